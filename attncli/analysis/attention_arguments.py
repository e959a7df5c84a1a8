"""From what is said of `AttentionOptions` to their values: words, bundles, keywords.

Needs no torch: masks are built from these too.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from attncli.analysis.options import AttentionWords, finite, floats, integers, several
from attncli.analysis.tensor_files import FROM_FILES, HeldTensor
from attncli.attention.masks.build import build_mask
from attncli.attention.options import (
    OPTIONS,
    AttentionOptions,
    Corner,
    Kind,
    MaskTrue,
    require_heads,
    require_values,
)
from attncli.attention.sizes import Sizes
from attncli.errors import ROWS, DataError, UsageError, choice_of, in_python, nearest
from attncli.files.roles import read_one
from attncli.files.tensor import BY_NAME, StoredTensor, as_float, name_of, require_accepted
from attncli.files.text import is_file

Values = TypeVar("Values", list[int], tuple[int, ...], tuple[float, ...])
TensorLike = Any  # a torch tensor, a NumPy array, or nested lists of numbers
# How NumPy's formats store bfloat16, which they have no name for.
BFLOAT16_IN_NPY = "|V2"
# In the place of a file: without what a bundle declares of it.
NONE = "none"


@dataclass(frozen=True, slots=True, eq=False)
class AttentionArguments:
    """What shapes attention for one group."""

    options: AttentionOptions  # ready for the mathematics
    files: dict[str, str]  # option → the file that it was read from, for the record
    warnings: tuple[str, ...] = ()  # what the reader of the results should know


def read_arguments(
    words: AttentionWords, declared: Mapping[str, Any], bundle: str
) -> AttentionArguments:
    """Combine what is typed with what a bundle declares: what is typed wins.

    Args:
        words: what is typed.
        declared: option → value, as a bundle declares them, some of them tensors.
        bundle: its name, for messages.

    Raises:
        UsageError: a word that the option does not take.
        DataError: a file that cannot be read, or a declared value of the wrong kind.
    """
    values: dict[str, Any] = {}
    held: dict[str, HeldTensor] = {}
    warnings: list[str] = []
    for name, value in declared.items():
        if name not in OPTIONS:
            meant = nearest(name, OPTIONS, in_part=False)
            if meant:  # others describe the group
                said = f"the bundle declares {name!r}, which attncli does not know"
                warnings.append(f"{said}; {meant}")
        elif isinstance(value, HeldTensor):
            held[name] = value
        elif value is not None:
            values[name] = _declared(name, value, bundle)
    try:
        AttentionOptions(**values)
    except UsageError as error:  # data are at fault, not the command line
        raise DataError(bundle, f"{in_python(error.where)}: {error.problem}") from None
    files: dict[str, str] = {}
    for name, tensor in held.items():
        if getattr(words, name) is None:
            files[name] = tensor.source
            values[name] = _of_kind(OPTIONS[name].kind, as_array(tensor.read()))
    for name, value in vars(words).items():
        if value is not None:
            values[name] = typed(name, value, files, warnings)
    if words.alibi is False and words.alibi_slopes is None:
        values.pop("alibi_slopes", None)  # what a bundle declares of it goes with it
    for name in ("mask_true", "hide_below"):
        if getattr(words, name) is not None and values.get("attn_mask") is None:
            raise UsageError(f"«{name}»", "expected «attn_mask» beside it, got none")
    return AttentionArguments(AttentionOptions(**values), files, tuple(warnings))


def refuse_words(words: AttentionWords, sizes: Sizes | None) -> None:
    """Refuse words that no tensors could go with, or none of these sizes; no file is read.

    Args:
        words: what is typed.
        sizes: of the tensors; None where these are in files.

    Raises:
        UsageError: a word that the option does not take.
        DataError: an array of another shape.
    """
    given = {name: value for name, value in vars(words).items() if value is not None}
    read = {n: typed(n, value, {}, []) for n, value in given.items() if not names_file(n, value)}
    require_values(read)
    if sizes is None or len(read) < len(given):
        return
    options = read_arguments(words, {}, "").options
    require_heads(options, sizes.heads)
    build_mask(options, sizes)


def arguments_record(
    arguments: AttentionArguments, mask_offset: NDArray[np.int64] | None
) -> dict[str, Any]:
    """What `params` says: every option, as it was used."""
    options, files = arguments.options, arguments.files
    record: dict[str, Any] = {}
    for name, told in OPTIONS.items():
        if name not in FROM_FILES and told.kind is not Kind.CHOICE:
            value = getattr(options, name)
            record[name] = list(value) if isinstance(value, tuple) else value
    if mask_offset is not None:  # else it holds for each document, or is not declared
        record["query_offset"] = alone(mask_offset.tolist())
    for name in OPTIONS:
        if name in FROM_FILES:
            value = getattr(options, name)
            # A file's own name stands for its values, of which there may be billions.
            listed = name not in files and value is not None
            record[name] = value.tolist() if listed else files.get(name)
    return record | {"mask_true": None if options.attn_mask is None else str(options.mask_true)}


def read_array(spec: str, option: str, warnings: list[str]) -> NDArray[Any]:
    """An array from FILE or FILE::NAME; bfloat16 and float8 as floats that hold their values."""
    stored, said = read_one(spec, option)
    warnings += said
    if stored.dtype == BFLOAT16_IN_NPY:
        warnings.append(f"{option}: raw values of 2 bytes in {spec} were taken as bfloat16")
    return as_array(stored)


def as_array(stored: StoredTensor) -> NDArray[Any]:
    """The values of a stored tensor, as they are where NumPy has their dtype."""
    if stored.dtype == stored.array.dtype.name:
        return stored.array
    return as_float(stored, "bfloat16" if stored.dtype == BFLOAT16_IN_NPY else None)


def alone(values: Values) -> Any | Values:
    """One number as itself, several as they are."""
    return values[0] if len(values) == 1 else values


def typed(name: str, value: Any, files: dict[str, str], warnings: list[str]) -> Any:
    """The value of an option from its words, as Typer has them; files are read, noted in `files`.

    Raises:
        UsageError: words that the option does not take.
        DataError: a file that cannot be read.
    """
    kind, option = OPTIONS[name].kind, f"«{name}»"
    if name in FROM_FILES and value in (NONE, [NONE]):
        return None
    if kind is Kind.NUMBER:
        return finite(option, value)
    if kind is Kind.NUMBERS:
        return alone(floats(option, value) or ())
    if kind is Kind.OFFSET:
        return _offset(option, value)
    if kind is Kind.LENGTHS:
        return integers(option, value)
    if names_file(name, value):
        files[name] = file = value if kind is Kind.ARRAY else value[0]
        return _of_kind(kind, read_array(file, option, warnings))
    if name not in FROM_FILES:
        return value
    if kind is Kind.LOGITS:
        return np.array(floats(option, value))
    rows = [integers(option, [row]) for row in ",".join(value).split(ROWS)]
    if len({len(row or ()) for row in rows}) > 1:
        raise UsageError(option, f"expected rows of one length between {ROWS!r}, got several")
    array = np.array(rows[0] if len(rows) == 1 else rows, np.int64)
    if kind is Kind.MARKS:
        wrong = array[~np.isin(array, (0, 1))]
        if wrong.size:
            raise UsageError(option, f"expected 0 and 1, got {wrong[0]}")
        return array == 1
    return array


def names_file(name: str, value: Any) -> bool:
    """Whether the words of an option name a file in the place of values."""
    if OPTIONS[name].kind is Kind.ARRAY:
        return bool(value != NONE)
    return name in FROM_FILES and len(value) == 1 and value != [NONE] and _is_file(value[0])


def _offset(option: str, words: list[str]) -> Corner | int | tuple[int, ...]:
    parts = several(words)
    if len(parts) == 1 and parts[0].casefold() in tuple(Corner):
        return Corner(parts[0].casefold())
    try:
        offsets = tuple(int(part if part.isascii() else "") for part in parts)
    except ValueError:
        offsets = ()
    if not offsets:
        expected = "top-left, bottom-right or whole numbers"
        raise UsageError(option, f"expected {expected}, got {','.join(parts)!r}")
    return offsets[0] if len(offsets) == 1 else offsets


def _is_file(text: str) -> bool:
    """Whether a value names a file: anything that is no list of numbers does."""
    try:
        [float(part) for part in several([text.replace(ROWS, ",")])]
    except ValueError:
        return True
    return is_file(text)  # a list may be longer than names of files


def _of_kind(kind: Kind | None, array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.float64) if kind is Kind.LOGITS else array


def _declared(name: str, value: Any, bundle: str) -> Any:
    """A declared value, as `AttentionOptions` wants it."""
    kind = OPTIONS[name].kind
    try:
        if kind is Kind.FLAG:
            return _of_type(value, bool)
        if kind is Kind.WHOLE:
            return _of_type(value, int)
        if kind is Kind.NUMBER:
            return float(_of_type(value, int | float))
        if kind is Kind.LOGITS:
            return np.array([float(_of_type(number, int | float)) for number in value])
        listed = value if isinstance(value, list) else [value]
        if kind is Kind.NUMBERS:
            return alone(tuple(float(_of_type(number, int | float)) for number in listed))
        if kind is Kind.CHOICE:
            return choice_of(MaskTrue, _of_type(value, str), name)
        if kind is Kind.OFFSET:
            return _offset(name, [str(part) for part in listed])
        if kind in (Kind.IDS, Kind.ARRAY, Kind.MARKS):
            return _array(value, kind)
        return tuple(_of_type(number, int) for number in listed)
    except (TypeError, ValueError, OverflowError, UsageError):
        text = " ".join(repr(value).split())[:80]
        raise DataError(bundle, f"expected {name} to be a {kind}, got {text}") from None


def _array(value: Any, kind: Kind) -> NDArray[Any]:
    """Lists of numbers, one for each batch or query where they are nested."""
    array = np.array(_of_type(value, list))
    if array.dtype.kind not in ("iu" if kind is Kind.IDS else "biuf"):
        raise TypeError
    return array


def _of_type(value: Any, kind: Any) -> Any:
    # True is an int to Python, and a mistake where a number is declared.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError
    return value


def array_of(values: TensorLike, role: str) -> NDArray[Any]:
    """A NumPy array of the same values; bfloat16 and float8, which NumPy lacks, as float32.

    Raises:
        DataError: complex numbers, objects, strings, or lists of uneven lengths.
    """
    torch = sys.modules.get("torch")  # whoever has a tensor has loaded it
    if torch is not None and isinstance(values, torch.Tensor):
        element = BY_NAME.get(str(values.dtype).removeprefix("torch."))
        tensor = values.detach().cpu()
        values = (tensor.float() if element is not None and element.is_raw else tensor).numpy()
    stored = stored_of(values, role)
    if stored.dtype != stored.array.dtype.name:
        return as_float(stored)
    array = stored.array
    backwards = any(stride < 0 for stride in array.strides)
    if backwards or not array.dtype.isnative:  # of which torch makes no tensor
        return array.astype(array.dtype.newbyteorder("="), order="C")
    return array


def stored_of(values: Any, role: str) -> StoredTensor:
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


def read_keywords(given: Mapping[str, Any], without: Collection[str] = ()) -> AttentionOptions:
    """Keywords of Python as `AttentionOptions`; None stands for the default.

    Numbers may stand for tuples of one, strings for choices, lists and tensors for arrays.

    Args:
        given: the keywords.
        without: fields that the caller has no use for.

    Raises:
        TypeError: a keyword that is no field of it.
        UsageError: a value that the option does not take.
    """
    allowed = [name for name in OPTIONS if name not in without]
    for name in given:
        if name not in allowed:
            raise TypeError(f"expected one of {', '.join(allowed)}, got keyword {name!r}")
    present = {name: value for name, value in given.items() if value is not None}
    known = {name: _of_keyword(name, value) for name, value in present.items()}
    if "hide_below" in known and "attn_mask" not in known:
        raise UsageError("«hide_below»", "expected «attn_mask» beside it, got none")
    return AttentionOptions(**known)


def _of_keyword(name: str, value: Any) -> Any:
    kind = OPTIONS[name].kind
    if name in FROM_FILES:
        array = array_of(value, name)
        return np.atleast_1d(array).astype(np.float64) if kind is Kind.LOGITS else array
    if kind is Kind.LENGTHS:
        return whole_numbers(value)
    if kind is Kind.CHOICE:
        return choice_of(MaskTrue, value, name)
    if kind is Kind.NUMBERS:
        numbers = np.asarray(array_of(value, name), np.float64)
        return alone(tuple(numbers.flatten().tolist()))
    if kind is not Kind.OFFSET:
        return value
    if isinstance(value, str):
        return choice_of(Corner, value, name)
    return alone(whole_numbers(value) or ())


def whole_numbers(value: Any) -> tuple[int, ...] | None:
    """One or several whole numbers of any library as a tuple of int."""
    if value is None:
        return None
    array = np.atleast_1d(np.asarray(value))
    if array.size and (array.dtype.kind not in "iu" or array.ndim > 1):
        raise TypeError(f"expected whole numbers, got {value!r}")
    return tuple(array.tolist())
