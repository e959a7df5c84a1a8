"""What Python callers pass, brought to what the mathematics takes."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import numpy as np
import torch

from attncli.attention.options import (
    OPTION_NAMES,
    AttentionOptions,
    Corner,
    Layout,
    MaskTrue,
    Precision,
)
from attncli.attention.problem import Problem, make_problem
from attncli.errors import DataError, UsageError
from attncli.files.tensor import BY_NAME, StoredTensor, name_of
from attncli.files.torch_tensors import as_torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

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


def as_tensor(values: TensorLike, role: str) -> torch.Tensor:
    """A torch tensor of the same values, dtype and device, sharing memory where that works.

    Args:
        values: a torch tensor, a NumPy array of any strides and byte order (bfloat16 and float8
            of `ml_dtypes` included), or nested lists of numbers.
        role: name for messages: "q", "k", "v".

    Raises:
        DataError: complex numbers, objects, strings, or lists of uneven lengths.
    """
    if isinstance(values, torch.Tensor):
        return values.detach()
    try:
        array = np.asarray(values)
    except ValueError:
        raise DataError(role, "expected an array, got lists of uneven lengths") from None
    name = name_of(array.dtype)
    if name in BY_NAME and BY_NAME[name].is_raw:
        array = array.view(BY_NAME[name].physical)
    return as_torch(StoredTensor(role, None, name, array))


def as_array(values: TensorLike, role: str) -> NDArray[Any]:
    """A NumPy array of the same values; bfloat16 and float8, which NumPy lacks, as float32."""
    tensor = as_tensor(values, role).cpu()
    narrow = str(tensor.dtype).removeprefix("torch.")
    if BY_NAME[narrow].is_raw:
        tensor = tensor.to(torch.float32)
    array: NDArray[Any] = tensor.numpy()
    return array


def as_options(given: OptionKeywords) -> AttentionOptions:
    """Keywords as `AttentionOptions`; None stands for the default.

    Raises:
        TypeError: a keyword that is no field of it.
        UsageError: a value that the option does not take.
    """
    for name in given:
        if name not in OPTION_NAMES:
            raise TypeError(f"expected one of {', '.join(OPTION_NAMES)}, got keyword {name!r}")
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


def as_problem(
    q: TensorLike,
    k: TensorLike,
    v: TensorLike,
    options: AttentionOptions,
    *,
    layout: Layout | str,
    precision: Precision | str,
    device: str | None,
    heads: int | None,
    kv_heads: int | None,
    allow_nonfinite: bool,
) -> Problem:
    """A checked problem from what a caller gave; arguments and errors as for `make_problem`.

    A `device` of None means where q is.
    """
    queries = as_tensor(q, "q")
    return make_problem(
        queries,
        as_tensor(k, "k"),
        None if v is None else as_tensor(v, "v"),
        options,
        layout=as_choice(Layout, layout, "layout"),
        heads=heads,
        kv_heads=kv_heads,
        precision=as_choice(Precision, precision, "precision"),
        device=str(queries.device) if device is None else device,
        allow_nonfinite=allow_nonfinite,
    )
