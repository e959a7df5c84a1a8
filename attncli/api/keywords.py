"""Keywords of Python callers, brought to `AttentionOptions`. Needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Any, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray

from attncli.attention.options import OPTION_NAMES, AttentionOptions, Corner, MaskTrue
from attncli.errors import DataError, UsageError
from attncli.files.tensor import BY_NAME, StoredTensor, as_float, name_of, require_accepted

TensorLike = Any  # a torch tensor, a NumPy array, or nested lists of numbers
_ARRAYS = ("key_padding", "attn_mask", "segments", "sinks")
_Choice = TypeVar("_Choice", bound=StrEnum)


class OptionKeywords(TypedDict, total=False):
    """The fields of `AttentionOptions` as keywords, in whatever form they are at hand.

    Meanings are those of `AttentionOptions`; numbers may stand for tuples of one, strings for
    the choices, and torch tensors or lists for arrays.
    """

    scale: float | None
    temperature: float
    softcap: float | None
    causal: bool
    query_offset: Corner | str | int | Sequence[int] | None
    left_window: int | None
    right_window: int | None
    prefix: int | None
    dilation: int | None
    key_lengths: int | Sequence[int] | None
    query_lengths: int | Sequence[int] | None
    key_padding: TensorLike
    attn_mask: TensorLike
    mask_true: MaskTrue | str
    segments: TensorLike
    alibi: bool
    sinks: TensorLike


def as_array(values: TensorLike, role: str) -> NDArray[Any]:
    """A NumPy array of the same values; bfloat16 and float8, which NumPy lacks, as float32.

    Raises:
        DataError: complex numbers, objects, strings, or lists of uneven lengths.
    """
    torch = sys.modules.get("torch")  # whoever has a tensor has loaded it
    if torch is not None and isinstance(values, torch.Tensor):
        element = BY_NAME.get(str(values.dtype).removeprefix("torch."))
        tensor = values.detach().cpu()
        values = (tensor.float() if element is not None and element.is_raw else tensor).numpy()
    stored = as_stored(values, role)
    if stored.dtype != stored.array.dtype.name:
        return as_float(stored)
    array = stored.array
    backwards = any(stride < 0 for stride in array.strides)
    if backwards or not array.dtype.isnative:  # of which torch makes no tensor
        return array.astype(array.dtype.newbyteorder("="), order="C")
    return array


def as_stored(values: Any, role: str) -> StoredTensor:
    """An array or lists of numbers with the true type of their elements.

    Raises:
        DataError: complex numbers, objects, strings, or lists of uneven lengths.
    """
    try:
        array = np.asarray(values)
    except ValueError:
        raise DataError(role, "expected an array, got lists of uneven lengths") from None
    name = name_of(array.dtype)
    require_accepted(role, name)
    if name in BY_NAME and BY_NAME[name].is_raw:
        array = array.view(BY_NAME[name].physical)
    return StoredTensor(role, None, name, array)


def as_options(given: OptionKeywords, without: Collection[str] = ()) -> AttentionOptions:
    """Keywords as `AttentionOptions`; None stands for the default.

    Args:
        given: the keywords.
        without: fields that the caller has no use for.

    Raises:
        TypeError: a keyword that is no field of it.
        UsageError: a value that the option does not take.
    """
    allowed = [name for name in OPTION_NAMES if name not in without]
    for name in given:
        if name not in allowed:
            raise TypeError(f"expected one of {', '.join(allowed)}, got keyword {name!r}")
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    for name in _ARRAYS:
        if name in values:
            values[name] = as_array(values[name], name)
    if "sinks" in values:
        values["sinks"] = np.atleast_1d(values["sinks"]).astype(np.float64)
    for name in ("key_lengths", "query_lengths"):
        values[name] = _whole_numbers(values.get(name))
    values["query_offset"] = _offset(values.get("query_offset"))
    values["mask_true"] = as_choice(MaskTrue, values.get("mask_true", "keep"), "mask_true")
    return AttentionOptions(**values)


def as_choice(kind: type[_Choice], value: str, where: str) -> _Choice:
    """The member of an enumeration that a string names.

    Raises:
        UsageError: there is none; lists those there are.
    """
    try:
        return kind(value)
    except ValueError:
        raise UsageError(where, f"expected one of {', '.join(kind)}, got {value!r}") from None


def as_indices(values: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Indices along an axis, one or several; None for all."""
    return _whole_numbers(values)


def _offset(value: Any) -> Corner | int | tuple[int, ...] | None:
    if isinstance(value, str):
        return as_choice(Corner, value, "query_offset")
    numbers = _whole_numbers(value)
    return numbers[0] if numbers is not None and len(numbers) == 1 else numbers


def _whole_numbers(value: Any) -> tuple[int, ...] | None:
    """One or several whole numbers of any library as a tuple of int."""
    if value is None:
        return None
    array = np.atleast_1d(np.asarray(value))
    if array.size and (array.dtype.kind not in "iu" or array.ndim > 1):
        raise TypeError(f"expected whole numbers, got {value!r}")
    return tuple(array.tolist())
