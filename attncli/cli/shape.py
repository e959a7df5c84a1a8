"""From the options that shape attention to `AttentionOptions`: files read, bundles heard."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attncli.attention.options import AttentionOptions, Corner
from attncli.cli.values import floats, integers, several
from attncli.errors import DataError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from attncli.cli.options import ShapeOptions
    from attncli.files.tensor import StoredTensor

# What a bundle may declare for a group, and the kind of value that it must be.
DECLARABLE = {
    "scale": "number",
    "temperature": "number",
    "softcap": "number",
    "causal": "true or false",
    "query_offset": "corner, whole number or list of them",
    "left_window": "whole number",
    "right_window": "whole number",
    "prefix": "whole number",
    "key_lengths": "list of whole numbers",
    "query_lengths": "list of whole numbers",
    "segments": "list of whole numbers",
    "alibi": "true or false",
    "sinks": "list of numbers",
}
# How NumPy's formats store bfloat16, which they have no name for.
BFLOAT16_IN_NPY = "|V2"
FROM_FILES = ("key_padding", "attn_mask", "segments", "sinks")


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What shapes attention for one group.

    Attributes:
        options: ready for the mathematics.
        files: option → the file that it was read from, for the record.
        warnings: what the reader of the results should know.
    """

    options: AttentionOptions
    files: dict[str, str]
    warnings: tuple[str, ...] = ()


def read_shape(given: ShapeOptions, declared: Mapping[str, Any] | None = None) -> Shape:
    """Combine the command line with what a bundle declares: the command line wins.

    Raises:
        UsageError: a value on the command line that the option does not take.
        DataError: a file that cannot be read, or a declared value of the wrong kind.
    """
    values: dict[str, Any] = {}
    warnings = []
    for name, value in (declared or {}).items():
        if name not in DECLARABLE:
            warnings.append(f"the bundle declares {name!r}, which attncli does not know")
        elif value is not None:
            values[name] = _declared(name, value)
    _check_declared(values)
    files: dict[str, str] = {}
    for name, value in _given(given, files, warnings).items():
        if value is not None:
            values[name] = value
    return Shape(AttentionOptions(**values), files, tuple(warnings))


def shape_record(shape: Shape, mask_offset: NDArray[np.int64] | None) -> dict[str, Any]:
    """What `params` says of the shape: every option, as it was used."""
    options = shape.options
    record: dict[str, Any] = {
        name: getattr(options, name) for name in DECLARABLE if name not in ("segments", "sinks")
    }
    for name in ("key_lengths", "query_lengths"):
        record[name] = None if record[name] is None else list(record[name])
    record["query_offset"] = _scalar_or_list(mask_offset)
    for name in FROM_FILES:
        value = getattr(options, name)
        # A file's own name stands for its values, of which there may be billions.
        listed = name not in shape.files and value is not None
        record[name] = value.tolist() if listed else shape.files.get(name)
    record["mask_true"] = str(options.mask_true) if options.attn_mask is not None else None
    return record


def read_offset(given: list[str] | None) -> Corner | int | tuple[int, ...] | None:
    """A query offset as the command line spells it.

    Raises:
        UsageError: neither a corner nor whole numbers.
    """
    if given is None:
        return None
    parts = several(given)
    if len(parts) == 1 and parts[0] in tuple(Corner):
        return Corner(parts[0])
    try:
        offsets = tuple(int(part) for part in parts)
    except ValueError:
        offsets = ()
    if not offsets:
        expected = "top-left, bottom-right or whole numbers"
        raise UsageError("--query-offset", f"expected {expected}, got {','.join(parts)!r}")
    return offsets[0] if len(offsets) == 1 else offsets


def _given(given: ShapeOptions, files: dict[str, str], warnings: list[str]) -> dict[str, Any]:
    """The values of the command line; None where an option is not given."""
    for option in ("temperature", "scale", "softcap"):
        value = getattr(given, option)
        if value is not None and not math.isfinite(value):
            raise UsageError(f"--{option}", f"expected a finite number, got {value}")
    values = {
        name: getattr(given, name)
        for name in ("scale", "temperature", "softcap", "causal", "left_window", "right_window")
    }
    values |= {"prefix": given.prefix, "alibi": given.alibi, "mask_true": given.mask_true}
    values["query_offset"] = read_offset(given.query_offset)
    values["key_lengths"] = integers("--key-lengths", given.key_lengths)
    values["query_lengths"] = integers("--query-lengths", given.query_lengths)
    for name in ("key_padding", "attn_mask"):
        spec = getattr(given, name)
        if spec is not None:
            values[name] = read_array(spec, "--" + name.replace("_", "-"), warnings)
            files[name] = spec
    values["segments"] = _list_or_file("segments", given.segments, files, warnings)
    values["sinks"] = _list_or_file("sinks", given.sinks, files, warnings)
    if given.mask_true is not None and given.attn_mask is None:
        raise UsageError("--mask-true", "expected --attn-mask beside it, got none")
    return values


def read_array(spec: str, option: str, warnings: list[str]) -> NDArray[Any]:
    """An array from FILE or FILE::NAME; bfloat16 and float8 as floats that hold their values."""
    from attncli.files.roles import read_one

    stored, said = read_one(spec, option)
    warnings += said
    if stored.dtype == BFLOAT16_IN_NPY:
        warnings.append(f"{option}: raw values of 2 bytes in {spec} were taken as bfloat16")
    return as_array(stored)


def as_array(stored: StoredTensor) -> NDArray[Any]:
    """The values of a stored tensor, as they are where NumPy has their dtype."""
    from attncli.files.tensor import as_float

    if stored.dtype == stored.array.dtype.name:
        return stored.array
    return as_float(stored, "bfloat16" if stored.dtype == BFLOAT16_IN_NPY else None)


def _list_or_file(
    name: str, given: list[str] | None, files: dict[str, str], warnings: list[str]
) -> NDArray[Any] | None:
    """Numbers of an option that may also be a file of them."""
    if given is None:
        return None
    import numpy as np

    option = f"--{name}"
    whole = name == "segments"
    if len(given) == 1 and _is_file(given[0]):
        files[name] = given[0]
        array = read_array(given[0], option, warnings)
        return array if whole else array.astype(np.float64)
    if whole:
        return np.array(integers(option, given), np.int64)
    return np.array(floats(option, given), np.float64)


def _is_file(text: str) -> bool:
    """Whether a value names a file: anything that is no list of numbers does."""
    try:
        [float(part) for part in several([text])]
    except ValueError:
        return True
    return Path(text).is_file()


def _declared(name: str, value: Any) -> Any:
    """A declared value, as `AttentionOptions` wants it."""
    import numpy as np

    checks: dict[str, Callable[[], Any]] = {
        "number": lambda: float(_as_kind(value, int | float)),
        "whole number": lambda: int(_as_kind(value, int)),
        "true or false": lambda: _as_kind(value, bool, allow_bool=True),
        "list of whole numbers": lambda: tuple(int(_as_kind(n, int)) for n in _listed(value)),
        "list of numbers": lambda: np.array([float(_as_kind(n, int | float)) for n in value]),
        "corner, whole number or list of them": lambda: read_offset(
            [str(part) for part in _listed(value)]
        ),
    }
    kind = DECLARABLE[name]
    try:
        read = checks[kind]()
    except (TypeError, ValueError, OverflowError, UsageError):
        text = " ".join(repr(value).split())[:80]
        raise DataError("bundle", f"expected {name} to be a {kind}, got {text}") from None
    return np.array(read, np.int64) if name == "segments" else read


def _check_declared(values: dict[str, Any]) -> None:
    """Refuse what a bundle declares as data at fault, not as a fault of the command line."""
    try:
        AttentionOptions(**values)
    except UsageError as error:
        where = error.where.removeprefix("--").replace("-", "_")
        raise DataError("bundle", f"{where}: {error.problem}") from None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _as_kind(value: Any, kind: Any, *, allow_bool: bool = False) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and not allow_bool):
        raise TypeError
    return value


def _scalar_or_list(offset: NDArray[np.int64] | None) -> int | list[int] | None:
    if offset is None:
        return None
    values: list[int] = offset.tolist()
    return values[0] if len(values) == 1 else values
