"""The .safetensors format: the format's own library reads the header, the data are mapped."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from attncli.errors import DataError
from attncli.files.mapped import map_file
from attncli.files.tensor import (
    BY_CODE,
    BY_NAME,
    TensorFile,
    TensorHeader,
    array_at,
    byte_size,
)
from attncli.files.text import place, shown

OPTIONS_KEY = "attncli"

_CUT = "It is cut short, most likely: copy or download it again."
_NEWER = "A newer version of safetensors may know it."
# What the library says → expected what, got what, advice.
_FAULTS = {
    "invalid header length": ("a complete safetensors header, got a file cut short", _CUT),
    "header too large": ("a safetensors header below 100 MB, got a larger one", ""),
    "not fully covered": ("tensors that fill the file, got too few bytes or too many", _CUT),
    "invalid offset": ("tensors side by side, got overlapping data or a gap", ""),
    "invalid shape": ("as many bytes as shape and element type need, got more or fewer", ""),
    "unknown variant": ("element types that safetensors has, got another", _NEWER),
}
_DAMAGED = ("a safetensors header, got damaged data in its place", "")


def open_safetensors(local: Path, source: str) -> TensorFile:
    """Open a safetensors file and map its data.

    Raises:
        DataError: the header is damaged, or its tensors do not fill the file.
    """
    where = place(source)
    try:
        # "numpy" is what the library would convert to: it is never asked to.
        with safe_open(local, "numpy") as file:
            slices = [(name, file.get_slice(name)) for name in file.offset_keys()]
            found = [(name, tuple(s.get_shape()), s.get_dtype()) for name, s in slices]
            metadata = _options(file.metadata() or {}, where)
    except SafetensorError as error:
        raise _in_words(str(error), where) from error
    data = map_file(local)
    headers, starts = [], {}
    # The library has made sure that the tensors lie side by side behind the header.
    end = 8 + int.from_bytes(data[:8].tobytes(), "little")
    for name, shape, code in found:
        starts[name] = end
        digits = re.search(r"\d+", code)  # the bits of one element: F32, BF16, F8_E4M3, F4
        bits = int(digits[0]) if digits else 8
        end += byte_size(f"{where}::{shown(name, 80)}", shape, bits) // 8
        headers.append(TensorHeader(name, shape, _dtype(code)))

    def load(header: TensorHeader, _: str) -> NDArray[Any]:
        physical = BY_NAME[header.dtype].physical
        return array_at(data, starts[str(header.name)], header.shape, physical)

    return TensorFile(source, "safetensors", tuple(headers), load, metadata)


def _dtype(code: str) -> str:
    if code in BY_CODE:
        return BY_CODE[code].name
    return "complex64" if code == "C64" else shown(code, 20)


def _in_words(text: str, where: str) -> DataError:
    """What the library says, in one line of our own."""
    problem, advice = next((_FAULTS[key] for key in _FAULTS if key in text), _DAMAGED)
    name = re.search(r"tensor `(.*)`", text, re.DOTALL)
    at = f" at {shown(name[1], 80)}" if name else ""
    return DataError(where, f"expected {problem}{at}", advice)


def _options(metadata: dict[str, str], where: str) -> dict[str, Any]:
    """What the metadata say of attention: group → options; empty where they say nothing."""
    problem = f"expected metadata '{OPTIONS_KEY}' as JSON (group → options), got something else"
    try:
        options = json.loads(metadata.get(OPTIONS_KEY, "{}"), parse_constant=_not_json)
    except (ValueError, RecursionError) as error:
        raise DataError(where, problem) from error
    if not isinstance(options, dict) or not all(isinstance(o, dict) for o in options.values()):
        raise DataError(where, problem)
    return options


def _not_json(constant: str) -> None:
    raise ValueError(constant)
