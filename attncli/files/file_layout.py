"""Where everything stands in a file of tensors, known before any of the data are.

Each layout is the bytes before the data and the place of each tensor behind them, so that
tensors can be written in any order, block by block.
"""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from attncli.files.tensor import BY_NAME, name_of

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor to be written: its shape and torch's name of its element type."""

    shape: Shape
    dtype: str

    @classmethod
    def of(cls, shape: Shape, dtype: np.dtype[Any] | str) -> Spec:
        """Return the spec for a NumPy dtype or for torch's name of one.

        Raises:
            TypeError: torch has no such element type.
        """
        name = dtype if isinstance(dtype, str) else name_of(np.dtype(dtype))
        if name not in BY_NAME:
            raise TypeError(f"no such element type: {name}")
        return cls(tuple(int(length) for length in shape), name)

    @property
    def physical(self) -> np.dtype[Any]:
        """The NumPy dtype of the blocks: unsigned integers for bfloat16 and float8."""
        return BY_NAME[self.dtype].physical

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.physical.itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One file.

    Attributes:
        head: the bytes before the data.
        size: bytes of the whole file.
        offsets: tensor → first byte of its data.
    """

    head: bytes
    size: int
    offsets: dict[str, int]


def npy_layout(name: str, spec: Spec) -> FileLayout:
    """Lay out a .npy file of one tensor."""
    header = _npy_header(spec)
    return FileLayout(header, len(header) + spec.nbytes, {name: len(header)})


def safetensors_layout(specs: Mapping[str, Spec]) -> FileLayout:
    """Lay out a safetensors file: the widest elements first, so that all data are aligned."""
    header: dict[str, Any] = {}
    places, end = {}, 0
    for name, spec in sorted(specs.items(), key=lambda item: -item[1].physical.itemsize):
        places[name] = end
        end += spec.nbytes
        code = BY_NAME[spec.dtype].code
        offsets = [places[name], end]
        header[name] = {"dtype": code, "shape": spec.shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    offsets_of = {name: len(head) + place for name, place in places.items()}
    return FileLayout(head, len(head) + end, offsets_of)


def _npy_header(spec: Spec) -> bytes:
    """The bytes that stand before a tensor's data in a .npy file."""
    # What NumPy has no name for is stored as it would store it: raw bytes.
    element = BY_NAME[spec.dtype]
    raw = f"|V{element.physical.itemsize}"
    descr = raw if element.is_raw else np.lib.format.dtype_to_descr(element.physical)
    stream = io.BytesIO()
    fields = {"descr": descr, "fortran_order": False, "shape": spec.shape}
    np.lib.format.write_array_header_1_0(stream, fields)
    return stream.getvalue()
