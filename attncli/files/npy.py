"""The .npy format: a header that promises an array, then its bytes."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from attncli.errors import DataError
from attncli.files.container import TensorFile, array_at, byte_size, map_file, shape_text
from attncli.files.limits import require_memory
from attncli.files.tensor import UNDECLARED, TensorHeader, name_of
from attncli.files.text import place, size_text

MAX_HEADER = 12 + 10_000

_CUT = "expected a complete .npy header, got a file cut short"
_BAD = "expected a .npy header, got damaged data in its place"
_VERSIONS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    # Differs in the encoding of the names of fields, and arrays with fields are refused anyway.
    (3, 0): np.lib.format.read_array_header_2_0,
}


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
    """Parse the header that `head`, the first `MAX_HEADER` bytes of a .npy file, begins with.

    Raises:
        DataError: the header is cut short or damaged.
    """
    stream = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(stream)
    except ValueError as error:
        raise DataError(where, _CUT) from error
    if version not in _VERSIONS:
        problem = f"expected .npy version 1, 2 or 3, got {version[0]}.{version[1]}"
        raise DataError(where, problem)
    shape, fortran, dtype = _fields(stream, version, where)
    nbytes = None if dtype.hasobject else byte_size(where, shape, dtype.itemsize)
    return NpyHeader(shape, dtype, "F" if fortran else "C", stream.tell(), nbytes)


def _fields(
    stream: io.BytesIO, version: tuple[int, int], where: str
) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, Fortran order and element type."""
    try:
        with warnings.catch_warnings():
            # Of the parser and of NumPy, about text that is not ours.
            warnings.simplefilter("ignore")
            shape, fortran, dtype = _VERSIONS[version](stream)
    # The parser of Python and what NumPy does with its result raise nearly anything.
    except Exception as error:
        raise DataError(where, _fault(error, len(stream.getvalue()))) from error
    if any(length < 0 for length in shape):
        raise DataError(where, _BAD)
    # NumPy takes True for a length.
    return tuple(map(int, shape)), fortran, dtype


def _fault(error: Exception, length: int) -> str:
    if not str(error).startswith("EOF: reading"):
        return _BAD
    return _CUT if length < MAX_HEADER else "expected a .npy header below 10 kB, got a longer one"


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
