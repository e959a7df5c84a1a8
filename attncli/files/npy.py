"""NumPy's formats: .npy, a header that promises an array, then its bytes; .npz, an archive of them.

Members of an archive are read when they are asked for; a .pt file is one too, and told apart here.
"""

from __future__ import annotations

import io
import lzma
import struct
import warnings
import zipfile
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from attncli.errors import AttncliError, DataError, ResourceError
from attncli.files.mapped import MappedReader, map_file
from attncli.files.tensor import (
    UNDECLARED,
    TensorFile,
    TensorHeader,
    array_at,
    byte_size,
    name_of,
    shape_text,
)
from attncli.files.text import ACCEPTED, listed, place, shown, size_text
from attncli.limits import require_memory

MAX_HEADER = 12 + 10_000

_CUT = "expected a complete .npy header, got a file cut short"
_LONG = "expected a .npy header below 10 kB, got a longer one"
_BAD = "expected a .npy header, got damaged data in its place"
_VERSIONS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    # Differs in the encoding of the names of fields, and arrays with fields are refused anyway.
    (3, 0): np.lib.format.read_array_header_2_0,
}


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """What a .npy file promises."""

    shape: tuple[int, ...]  # lengths of the axes
    dtype: np.dtype[Any]  # element type, in the byte order of the file
    order: Literal["C", "F"]  # "C" or "F" (Fortran)
    start: int  # byte at which the data begin
    nbytes: int | None  # bytes of data; None for pickled objects, which have no fixed size

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
    try:
        with warnings.catch_warnings():
            # Of the parser and of NumPy, about text that is not ours.
            warnings.simplefilter("ignore")
            shape, fortran, dtype = _VERSIONS[version](stream)
    # The parser of Python and what NumPy does with its result raise nearly anything.
    except Exception as error:
        problem = _CUT if len(head) < MAX_HEADER else _LONG
        ended = str(error).startswith("EOF: reading")
        raise DataError(where, problem if ended else _BAD) from error
    if any(length < 0 for length in shape):
        raise DataError(where, _BAD)
    shape = tuple(map(int, shape))  # NumPy takes True for a length
    nbytes = None if dtype.hasobject else byte_size(where, shape, dtype.itemsize)
    return NpyHeader(shape, dtype, "F" if fortran else "C", stream.tell(), nbytes)


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


# Ways of compressing, and how many bytes one byte may stand for at most; None for no limit.
_METHODS = {
    zipfile.ZIP_STORED: 1,
    zipfile.ZIP_DEFLATED: 1032,
    zipfile.ZIP_BZIP2: None,
    zipfile.ZIP_LZMA: None,
}
_ENCRYPTED = 0x1
_CHUNK = 1 << 22

# What the standard library raises for a damaged archive: more than its manual says.
DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    OSError,
    ValueError,
    OverflowError,
    RuntimeError,  # includes NotImplementedError: an unknown way of compressing
    MemoryError,
    IndexError,
)


def archive_format(local: Path, where: str) -> str:
    """Return "npz" or "pt": which of the two formats that live in zip archives this is.

    Raises:
        DataError: the archive is damaged, encrypted, ambiguous or holds something else.
    """
    with _directory(local, where) as archive:
        names = [member.filename for member in archive.infolist()]
        is_torch = any(name == "data.pkl" or name.endswith("/data.pkl") for name in names)
        _check_members(archive, where, local.stat().st_size, is_torch)
    if is_torch:
        if any(name.endswith("/constants.pkl") for name in names):
            problem = "expected a torch file of tensors, got TorchScript code"
            advice = "Save its tensors with torch.save(model.state_dict(), …)."
            raise DataError(where, problem, advice)
        return "pt"
    if any(name.endswith(".npy") for name in names):
        return "npz"
    what = f"a zip archive of {listed(names, 3)}" if names else "an empty zip archive"
    raise DataError(where, f"expected {ACCEPTED}, got {what}")


def _directory(local: Path, where: str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(cast("IO[bytes]", MappedReader(local)))
    except DAMAGE as error:
        problem = "expected a complete .npz or .pt archive, got a damaged zip archive"
        advice = "Its directory, the last part, is missing or broken: copy or write it again."
        raise DataError(where, problem, advice) from error


def _check_members(archive: zipfile.ZipFile, where: str, file_size: int, is_torch: bool) -> None:
    """Refuse members that cannot be read, and sizes that cannot be theirs.

    Whoever reads a member takes memory for what the directory says, before a byte of it is there.
    """
    counts = Counter(member.filename for member in archive.infolist())
    for member in archive.infolist():
        name = shown(member.filename, 80)
        if counts[member.filename] > 1:
            raise DataError(where, f"expected each name once, got {name} more than once")
        if member.flag_bits & _ENCRYPTED:
            problem = f"expected a plain archive, got an encrypted member {name}"
            raise DataError(where, problem, "Unpack it with its password first.")
        most = _METHODS.get(member.compress_type)
        if most is None and (is_torch or member.compress_type not in _METHODS):
            problem = f"expected stored or deflated members, got {name} compressed otherwise"
            advice = "Write it again with " + ("torch.save." if is_torch else "numpy.savez.")
            raise DataError(where, problem, advice)
        if most is not None and member.file_size > most * member.compress_size:
            raise _damaged(f"{where}::{name}")
        file_size -= member.compress_size
        if file_size < 0:
            raise _damaged(f"{where}::{name}")


def open_npz(local: Path, source: str) -> TensorFile:
    """Open an archive of .npy members; only their headers are read.

    Raises:
        DataError: a member is damaged, or its header promises more bytes than it has.
    """
    where = place(source)
    archive = _directory(local, where)
    members = {
        info.filename.removesuffix(".npy"): info for info in archive.infolist() if _is_array(info)
    }
    parsed, notes = {}, []
    for name, info in members.items():
        member = f"{where}::{shown(name)}"
        parsed[name] = _header(archive, info, member)
        extra = check_size(parsed[name], info.file_size, member)
        if extra:
            notes.append(f"{member}: {size_text(extra)} after the array are ignored")
    names = [info.filename for info in archive.infolist() if not _is_array(info)]
    # Not is_dir(), which fails on a member without a name.
    others = [name or '""' for name in names if not name.endswith("/")]
    if others:
        notes.append(f"{where}: members that are no .npy arrays are ignored: {listed(others, 3)}")

    def load(header: TensorHeader, where: str) -> NDArray[Any]:
        name = str(header.name)
        return _data(archive, members[name], parsed[name], where)

    headers = tuple(header.named(name) for name, header in parsed.items())
    return TensorFile(source, "npz", headers, load, warnings=notes)


def _is_array(info: zipfile.ZipInfo) -> bool:
    # Archives packed anew on a Mac carry a shadow of each file under __MACOSX.
    return info.filename.endswith(".npy") and not info.filename.startswith("__MACOSX/")


def _header(archive: zipfile.ZipFile, info: zipfile.ZipInfo, where: str) -> NpyHeader:
    try:
        with archive.open(info) as member:
            head = member.read(MAX_HEADER)
    except DAMAGE as error:
        raise _damaged(where, error) from error
    if not head.startswith(b"\x93NUMPY"):
        raise DataError(where, "expected a .npy array, got something else under that name")
    return parse_header(head, where)


def _data(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, header: NpyHeader, where: str
) -> NDArray[Any]:
    size = header.nbytes or 0
    require_memory(where, size)
    data = bytearray()  # grows with what is there, whatever the headers promise
    try:
        with archive.open(info) as member:
            member.read(header.start)
            while len(data) < size and (part := member.read(min(_CHUNK, size - len(data)))):
                data += part
            # The checksum is compared at the end of the member, wherever the array ends.
            while member.read(_CHUNK):
                pass
    except DAMAGE as error:
        raise _damaged(where, error) from error
    if len(data) < size:
        raise _damaged(where)
    flat = np.frombuffer(data, np.uint8)
    return native(array_at(flat, 0, header.shape, header.dtype, header.order), where)


def _damaged(where: str, error: Exception | None = None) -> AttncliError:
    if isinstance(error, MemoryError):  # a few bytes may ask for a dictionary of gigabytes
        return ResourceError(where, "needs more memory to be decompressed than there is")
    advice = "Its checksum or its compressed data are wrong: copy or write it again."
    return DataError(where, "expected intact data, got a damaged archive member", advice)
