"""The .npy format: a header that promises an array, then its bytes."""

from __future__ import annotations

import ast
import re
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from attncli.errors import DataError
from attncli.files.container import TensorFile, array_at, byte_size, map_file, shape_text
from attncli.files.elements import UNDECLARED, name_of
from attncli.files.limits import require_memory
from attncli.files.tensor import TensorHeader
from attncli.files.text import place, size_text

MAX_HEADER = 12 + 10_000

_CUT = "expected a complete .npy header, got a file cut short"
_BAD = "expected a .npy header, got damaged data in its place"


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """What a .npy file promises.

    Attributes:
        shape: lengths of the axes.
        dtype: element type, in the byte order of the file.
        order: "C" or "F" (Fortran).
        start: byte at which the data begin.
        nbytes: bytes of data; None for pickled objects, which have no fixed size.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: Literal["C", "F"]
    start: int
    nbytes: int | None

    def named(self, name: str | None) -> TensorHeader:
        """Return the header in the terms that all formats share."""
        return TensorHeader(name, self.shape, name_of(self.dtype))


def open_npy(local: Path, source: str) -> TensorFile:
    """Open a .npy file and map its data.

    Raises:
        DataError: the header is damaged or promises more bytes than there are.
    """
    where = place(source)
    data = map_file(local)
    header = parse_header(data[:MAX_HEADER].tobytes(), where)
    extra = check_size(header, data.size, where)
    warned = [f"{where}: {size_text(extra)} after the array are ignored"] if extra else []

    def load(_: TensorHeader, where: str) -> NDArray[Any]:
        return native(array_at(data, header.start, header.shape, header.dtype, header.order), where)

    return TensorFile(source, "npy", (header.named(None),), load, warnings=warned)


def parse_header(head: bytes, where: str) -> NpyHeader:
    """Parse the header that `head`, the first `MAX_HEADER` bytes of a file, begins with.

    Raises:
        DataError: the header is cut short or damaged.
    """
    start, text = _header_text(head, where)
    try:
        with warnings.catch_warnings():
            # Of the parser and of NumPy, about text that is not ours.
            warnings.simplefilter("ignore")
            shape, dtype, order = _fields(text)
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError) as error:
        raise DataError(where, _BAD) from error
    nbytes = byte_size(where, shape, dtype.itemsize)
    return NpyHeader(shape, dtype, order, start, None if dtype.hasobject else nbytes)


def _header_text(head: bytes, where: str) -> tuple[int, str]:
    """The byte after the header, and the header's dictionary as text."""
    if len(head) < 10:
        raise DataError(where, _CUT)
    version = head[6]
    if version not in (1, 2, 3) or head[7] != 0:
        raise DataError(where, f"expected .npy version 1, 2 or 3, got {version}.{head[7]}")
    begin = 10 if version == 1 else 12
    if len(head) < begin:
        raise DataError(where, _CUT)
    (length,) = struct.unpack("<H" if version == 1 else "<I", head[8:begin])
    if begin + length > MAX_HEADER:
        raise DataError(where, f"expected a .npy header below 10 kB, got {size_text(length)}")
    if len(head) < begin + length:
        raise DataError(where, _CUT)
    encoding = "utf-8" if version == 3 else "latin-1"
    return begin + length, head[begin : begin + length].decode(encoding, errors="replace")


def _fields(text: str) -> tuple[tuple[int, ...], np.dtype[Any], Literal["C", "F"]]:
    # Python 2 wrote its long integers as 3L.
    fields = ast.literal_eval(re.sub(r"\b([0-9]+)L\b", r"\1", text.strip()))
    if not isinstance(fields, dict) or set(fields) != {"descr", "fortran_order", "shape"}:
        raise ValueError("keys")
    shape = fields["shape"]
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("shape")
    if not isinstance(fields["fortran_order"], bool):
        raise ValueError("order")
    dtype = np.lib.format.descr_to_dtype(fields["descr"])
    return shape, dtype, "F" if fields["fortran_order"] else "C"


def check_size(header: NpyHeader, size: int, where: str) -> int:
    """Return how many of `size` bytes, header included, come after the array.

    Raises:
        DataError: there are fewer than the header promises.
    """
    if header.nbytes is None:
        return 0
    extra = size - header.start - header.nbytes
    if extra < 0:
        promised = f"{header.nbytes:,} bytes for shape {shape_text(header.shape)}"
        problem = f"expected {promised} of {name_of(header.dtype)}, got {size - header.start:,}"
        raise DataError(where, problem, "The file is cut short: copy or write it again.")
    return extra


def native(array: NDArray[Any], where: str) -> NDArray[Any]:
    """Return the array in native byte order; undeclared bytes as unsigned integers.

    Raises:
        ResourceError: the byte order must change and the copy does not fit in memory.
    """
    bits = UNDECLARED.get(str(array.dtype))
    if bits is not None:
        return array.view(bits)
    if array.dtype.isnative:
        return array
    require_memory(where, array.nbytes)
    return array.astype(array.dtype.newbyteorder("="))
