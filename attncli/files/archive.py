"""Zip archives: .npz with its .npy members, each read when it is asked for, told from .pt."""

from __future__ import annotations

import lzma
import struct
import warnings
import zipfile
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncli.errors import DataError
from attncli.files.container import TensorFile
from attncli.files.limits import require_memory
from attncli.files.npy import MAX_HEADER, NpyHeader, check_size, native, parse_header
from attncli.files.tensor import TensorHeader
from attncli.files.text import ACCEPTED, listed, place, shown, size_text

_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
_ENCRYPTED = 0x1
_CHUNK = 1 << 22

# What the standard library raises for a damaged archive: more than its manual says.
_DAMAGE = (
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
        _check_members(archive, where)
    if any(name == "data.pkl" or name.endswith("/data.pkl") for name in names):
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
        return zipfile.ZipFile(local)
    except _DAMAGE as error:
        problem = "expected a complete .npz or .pt archive, got a damaged zip archive"
        advice = "Its directory, the last part, is missing or broken: copy or write it again."
        raise DataError(where, problem, advice) from error


def _check_members(archive: zipfile.ZipFile, where: str) -> None:
    counts = Counter(member.filename for member in archive.infolist())
    for member in archive.infolist():
        name = shown(member.filename, 80)
        if counts[member.filename] > 1:
            raise DataError(where, f"expected each name once, got {name} more than once")
        if member.flag_bits & _ENCRYPTED:
            problem = f"expected a plain archive, got an encrypted member {name}"
            raise DataError(where, problem, "Unpack it with its password first.")
        if member.compress_type not in _METHODS:
            problem = f"expected stored or deflated members, got {name} compressed otherwise"
            raise DataError(where, problem, "Write it again with numpy.savez.")


def open_npz(local: Path, source: str) -> TensorFile:
    """Open an archive of .npy members; only their headers are read.

    Raises:
        DataError: a member is damaged, or its header promises more bytes than it has.
    """
    where = place(source)
    archive = _directory(local, where)
    members = {_name(info): info for info in archive.infolist() if _is_array(info)}
    parsed = {name: _header(archive, info, where) for name, info in members.items()}
    headers = tuple(header.named(name) for name, header in parsed.items())
    notes = _notes(archive, members, parsed, where)

    def load(header: TensorHeader, where: str) -> NDArray[Any]:
        name = str(header.name)
        return _data(archive, members[name], parsed[name], where)

    return TensorFile(source, "npz", headers, load, warnings=notes)


def _is_array(info: zipfile.ZipInfo) -> bool:
    # Archives packed anew on a Mac carry a shadow of each file under __MACOSX.
    return info.filename.endswith(".npy") and not info.filename.startswith("__MACOSX/")


def _name(info: zipfile.ZipInfo) -> str:
    return info.filename.removesuffix(".npy")


def _header(archive: zipfile.ZipFile, info: zipfile.ZipInfo, where: str) -> NpyHeader:
    where = f"{where}::{shown(_name(info))}"
    try:
        with archive.open(info) as member:
            head = member.read(MAX_HEADER)
    except _DAMAGE as error:
        raise _damaged(where) from error
    if not head.startswith(b"\x93NUMPY"):
        raise DataError(where, "expected a .npy array, got something else under that name")
    return parse_header(head, where)


def _notes(
    archive: zipfile.ZipFile,
    members: dict[str, zipfile.ZipInfo],
    parsed: dict[str, NpyHeader],
    where: str,
) -> list[str]:
    """Check each member's size; return what is odd but harmless."""
    notes = []
    for name, info in members.items():
        member = f"{where}::{shown(name)}"
        extra = check_size(parsed[name], info.file_size, member)
        if extra:
            notes.append(f"{member}: {size_text(extra)} after the array are ignored")
    names = [info.filename for info in archive.infolist() if not _is_array(info)]
    # Not is_dir(), which fails on a member without a name.
    others = [name or '""' for name in names if not name.endswith("/")]
    if others:
        notes.append(f"{where}: members that are no .npy arrays are ignored: {listed(others, 3)}")
    return notes


def _data(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, header: NpyHeader, where: str
) -> NDArray[Any]:
    require_memory(where, header.nbytes or 0)
    try:
        with archive.open(info) as member, warnings.catch_warnings():
            # About headers that Python 2 wrote.
            warnings.simplefilter("ignore")
            array: NDArray[Any] = np.lib.format.read_array(member, allow_pickle=False)
            # The checksum is compared at the end of the member, wherever the array ends.
            while member.read(_CHUNK):
                pass
    except _DAMAGE as error:
        raise _damaged(where) from error
    return native(array, where)


def _damaged(where: str) -> DataError:
    advice = "Its checksum or its compressed data are wrong: copy or write it again."
    return DataError(where, "expected intact data, got a damaged archive member", advice)
