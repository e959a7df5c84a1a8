"""Files that appear whole or not at all: written beside their target, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from attncli.errors import AttncliError, DataError, ResourceError
from attncli.files.text import shown

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Give an empty file to write that takes the place of `target` on leaving without error.

    On any exception, interrupts included, it is removed and `target` is as it was. A link is
    followed; an old file's permissions are kept, a new file gets the ordinary ones. A device
    or pipe cannot be replaced and is given as it is.

    Raises:
        DataError: there is no such folder, it cannot be written, or `target` is a folder.
        ResourceError: the disk is full.
    """
    with _told(target):
        mode = _old_mode(target)
        real = target.resolve()
        if mode is not None and not stat.S_ISREG(mode):
            yield real
            return
        temporary = _beside(real)
        try:  # from before there is a file: an interrupt may come at any moment
            # Not tempfile, whose files nobody else may read.
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            if mode is not None:
                temporary.chmod(stat.S_IMODE(mode))
            yield temporary
            temporary.replace(real)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def require_folder(target: str) -> None:
    """Refuse a file to write whose folder is not there, before anything is computed.

    Raises:
        DataError: there is no such folder.
    """
    if not Path(target).parent.is_dir():
        raise _in_words(Path(target), FileNotFoundError())


def _old_mode(target: Path) -> int | None:
    """The kind and permissions of what is there already; None where nothing is."""
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(mode):
        raise DataError(shown(str(target)), "expected a file to write, got a directory")
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return mode


def _beside(target: Path) -> Path:
    """A name beside the target that nobody else uses."""
    # Cut, since the longest name allowed leaves no room for more.
    return target.with_name(f".{target.name[:50]}.{secrets.token_hex(6)}.tmp")


@contextlib.contextmanager
def _told(target: Path) -> Iterator[None]:
    """Turn what the system says into the project's errors."""
    try:
        yield
    except BrokenPipeError:
        # Nobody reads any more: not a fault, and settled where standard output is.
        raise
    except OSError as error:
        raise _in_words(target, error) from error


def _in_words(target: Path, error: OSError) -> AttncliError:
    where = shown(str(target))
    if error.errno in _FULL:
        return ResourceError(where, "needs more room than the disk has left")
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        parent = shown(str(target.parent))
        return DataError(where, f"expected a folder {parent} to write to, got none of this name")
    if isinstance(error, PermissionError):
        return DataError(where, "expected a place that can be written, got permission denied")
    reason = os.strerror(error.errno) if error.errno else "an error"
    return DataError(where, f"expected a place that can be written, got: {reason}")


@contextlib.contextmanager
def folder(target: Path) -> Iterator[Path]:
    """Give a folder, made if need be, and unmade on any exception if it was.

    Raises:
        DataError: the folder cannot be made, or `target` is something else.
    """
    with _told(target):
        made = not target.exists()
        if made:
            target.mkdir()
        elif not target.is_dir():
            raise DataError(shown(str(target)), "expected a folder to write to, got a file")
    try:
        yield target
    except BaseException:
        if made:
            with contextlib.suppress(OSError):
                target.rmdir()
        raise
