"""The .safetensors format: a JSON header, then every tensor's bytes side by side."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from attncli.errors import DataError
from attncli.files.container import TensorFile, byte_size, map_file, shape_text, view
from attncli.files.elements import BY_CODE, BY_NAME
from attncli.files.tensor import TensorHeader
from attncli.files.text import place, shown, size_text

METADATA = "__metadata__"
OPTIONS_KEY = "attncli"

_LONGEST_HEADER = 100_000_000  # the limit of the format's own library
_BAD = "expected a safetensors header, got damaged data in its place"


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor and the bytes that hold it, counted from the end of the header."""

    header: TensorHeader
    begin: int
    end: int


def open_safetensors(local: Path, source: str) -> TensorFile:
    """Open a safetensors file and map its data.

    Raises:
        DataError: the header is damaged, or its tensors do not fit the file.
    """
    where = place(source)
    data = map_file(local)
    start, fields = _header(data, where)
    metadata = _options(fields.pop(METADATA, None), where)
    entries = {name: _entry(name, field, where) for name, field in fields.items()}
    extra = _check_places(list(entries.values()), data.size - start, where)
    warned = [f"{where}: {size_text(extra)} after the tensors are ignored"] if extra else []

    def load(header: TensorHeader, _: str) -> NDArray[Any]:
        offset = start + entries[str(header.name)].begin
        return view(data, offset, header.shape, BY_NAME[header.dtype].physical)

    headers = tuple(entry.header for entry in entries.values())
    return TensorFile(source, "safetensors", headers, load, metadata, warned)


def _header(data: NDArray[np.uint8], where: str) -> tuple[int, dict[str, Any]]:
    """The byte at which the data begin, and the parsed header."""
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > _LONGEST_HEADER:
        limit = size_text(_LONGEST_HEADER)
        raise DataError(where, f"expected a header below {limit}, got {size_text(length)}")
    if 8 + length > data.size:
        problem = f"expected a header of {length:,} bytes, got {data.size - 8:,}"
        raise DataError(where, problem, "The file is cut short: copy or download it again.")
    return 8 + length, _parsed(data[8 : 8 + length].tobytes(), where)


def _parsed(text: bytes, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(text, object_pairs_hook=functools.partial(_unique, where))
    except (ValueError, RecursionError) as error:
        raise DataError(where, _BAD) from error
    if not isinstance(fields, dict):
        raise DataError(where, _BAD)
    return fields


def _unique(where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(where, f"expected each name once, got {shown(twice, 80)} more than once")
    return fields


def _options(metadata: object, where: str) -> dict[str, Any]:
    """What the metadata say of attention: group → options; empty where they say nothing."""
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise DataError(where, _BAD)
    text = metadata.get(OPTIONS_KEY, "{}")
    problem = f"expected metadata '{OPTIONS_KEY}' as JSON (group → options), got something else"
    try:
        options = json.loads(text, parse_constant=_not_json)
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(where, problem) from error
    if not isinstance(options, dict) or not all(isinstance(o, dict) for o in options.values()):
        raise DataError(where, problem)
    return options


def _not_json(constant: str) -> None:
    raise ValueError(constant)


def _entry(name: str, field: object, where: str) -> _Entry:
    where = f"{where}::{shown(name, 80)}"
    shape, begin, end, code = _field(field, where)
    element = BY_CODE.get(code)
    if element is not None:
        need = byte_size(where, shape, element.physical.itemsize)
        if need != end - begin:
            promised = f"{need:,} bytes for shape {shape_text(shape)} of {element.name}"
            raise DataError(where, f"expected {promised}, got {end - begin:,}")
    dtype = element.name if element else {"C64": "complex64"}.get(code, shown(code, 20))
    return _Entry(TensorHeader(name, shape, dtype), begin, end)


def _field(field: object, where: str) -> tuple[tuple[int, ...], int, int, str]:
    """Shape, first byte, byte after the last, and element code of one header entry."""
    if not isinstance(field, dict):
        raise DataError(where, _BAD)
    code, shape, places = field.get("dtype"), field.get("shape"), field.get("data_offsets")
    if not isinstance(code, str) or not _are_sizes(shape) or not _are_sizes(places):
        raise DataError(where, _BAD)
    if len(places) != 2 or places[0] > places[1]:
        raise DataError(where, _BAD)
    return tuple(shape), places[0], places[1], code


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _check_places(entries: list[_Entry], size: int, where: str) -> int:
    """Return how many of the `size` bytes after the header follow the last tensor.

    Raises:
        DataError: tensors overlap, leave a gap, or reach beyond the file.
    """
    last = max((entry.end for entry in entries), default=0)
    if last > size:
        problem = f"expected {last:,} bytes of data, got {size:,}"
        raise DataError(where, problem, "The file is cut short: copy or download it again.")
    end = 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != end:
            fault = "overlapping data" if entry.begin < end else "a gap before the data"
            name = shown(str(entry.header.name), 80)
            raise DataError(where, f"expected tensors side by side, got {fault} of {name}")
        end = entry.end
    return size - last
