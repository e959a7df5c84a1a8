"""Zip archives: which of the two formats that live in them, and whether they can be trusted."""

from __future__ import annotations

import zipfile
from collections import Counter
from pathlib import Path

from attncli.errors import DataError
from attncli.files.container import TensorFile
from attncli.files.damage import ARCHIVE_ERRORS
from attncli.files.npz import open_npz
from attncli.files.text import ACCEPTED, listed, place, shown
from attncli.files.torchfile import open_torch

_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
_ENCRYPTED = 0x1


def open_archive(local: Path, source: str) -> TensorFile:
    """Open a zip archive as .npz or .pt, whichever its members tell.

    Raises:
        DataError: the archive is damaged, encrypted, ambiguous or holds something else.
    """
    where = place(source)
    archive = _directory(local, where)
    names = [member.filename for member in archive.infolist()]
    if any(name.endswith(".npy") for name in names) and not _is_torch(names):
        _check_members(archive, where)
        return open_npz(archive, source)
    with archive:
        _check_members(archive, where)
        _require_torch(names, where)
        stored = all(member.compress_type == 0 for member in archive.infolist())
        size = sum(member.file_size for member in archive.infolist())
    return open_torch(local, source, mapped=stored, expanded=0 if stored else size)


def _directory(local: Path, where: str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(local)
    except ARCHIVE_ERRORS as error:
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


def _is_torch(names: list[str]) -> bool:
    return any(name == "data.pkl" or name.endswith("/data.pkl") for name in names)


def _require_torch(names: list[str], where: str) -> None:
    if not names:
        raise DataError(where, f"expected {ACCEPTED}, got an empty zip archive")
    if not _is_torch(names):
        raise DataError(where, f"expected {ACCEPTED}, got a zip archive of {listed(names, 3)}")
    if any(name.endswith("/constants.pkl") for name in names):
        advice = "Save its tensors with torch.save(model.state_dict(), …)."
        raise DataError(where, "expected a torch file of tensors, got TorchScript code", advice)
