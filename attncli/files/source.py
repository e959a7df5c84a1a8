"""From the name that a user gave to a file on disk that can be mapped into memory."""

from __future__ import annotations

import atexit
import contextlib
import difflib
import errno
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from attncli.errors import DataError, ResourceError
from attncli.files.text import ACCEPTED, place, shown

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def local_file(name: str) -> Iterator[Path]:
    """Give a regular file that can be read and holds the bytes that `name` stands for.

    Standard input ("-") and pipes are copied to a temporary file first, which is unlinked on
    leaving: open or map it before.

    Raises:
        DataError: there is no such file, or it cannot be read.
        ResourceError: the disk has no room for the copy.
    """
    where = place(name)
    if name == "-":
        with _spooled(where, _standard_input(where)) as copy:
            yield copy
        return
    path = Path(name)
    if stat.S_ISFIFO(_mode(where, path)):
        with _opened(where, path) as stream, _spooled(where, stream) as copy:
            yield copy
        return
    _opened(where, path).close()
    yield path


def _mode(where: str, path: Path) -> int:
    """The kind of a file that can hold tensors."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise _unreadable(where, path, error) from error
    if stat.S_ISDIR(mode):
        raise DataError(where, f"expected {ACCEPTED}, got a directory")
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        raise DataError(where, f"expected {ACCEPTED}, got a device or a socket")
    return mode


def _opened(where: str, path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise _unreadable(where, path, error) from error


def _unreadable(where: str, path: Path, error: Exception) -> DataError:
    if isinstance(error, FileNotFoundError):
        return DataError(where, "expected a file, got no file of this name", _suggestion(path))
    if isinstance(error, PermissionError):
        return DataError(where, "expected a file that can be read, got permission denied")
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "bad name"
    return DataError(where, f"expected a file that can be read, got: {reason}")


def _suggestion(path: Path) -> str:
    """The neighbour that was probably meant."""
    with contextlib.suppress(OSError):
        if not path.parent.is_dir():
            return f"There is no folder {shown(str(path.parent))} either."
        neighbours = [entry.name for entry in path.parent.iterdir()]
        for close in difflib.get_close_matches(path.name, neighbours, n=1, cutoff=0.75):
            return f"Did you mean {shown(str(path.parent / close))}?"
    return ""


def _standard_input(where: str) -> BinaryIO:
    stream = getattr(sys.stdin, "buffer", None)
    if stream is None:
        raise DataError(where, f"expected {ACCEPTED}, got no standard input")
    if stream.isatty():
        raise DataError(where, f"expected {ACCEPTED}, got a terminal")
    binary: BinaryIO = stream
    return binary


@contextlib.contextmanager
def _spooled(where: str, stream: BinaryIO) -> Iterator[Path]:
    copy = _temporary(where)
    try:
        try:
            with copy.open("wb") as file:
                shutil.copyfileobj(stream, file, 1 << 20)
        except OSError as error:
            raise _not_copied(where, copy, error) from error
        yield copy
    finally:
        _discard(copy)


def _temporary(where: str) -> Path:
    try:
        descriptor, name = tempfile.mkstemp(prefix="attncli-")
    except OSError as error:
        raise ResourceError(where, "needs a folder for temporary files, got none") from error
    os.close(descriptor)
    return Path(name)


def _not_copied(where: str, copy: Path, error: OSError) -> DataError | ResourceError:
    if error.errno in _FULL:
        return ResourceError(where, f"needs more room than {copy.parent} has for a copy")
    reason = os.strerror(error.errno) if error.errno else "an error"
    return DataError(where, f"expected {ACCEPTED}, got: {reason}")


def _discard(copy: Path) -> None:
    try:
        copy.unlink()
    except OSError:
        # Some systems keep a file that is mapped: by the end of the run it no longer is.
        atexit.register(copy.unlink, missing_ok=True)
