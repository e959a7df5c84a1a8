"""Every temporary file: taken back whatever ends the program but a kill, and then by the next one.

Beside its temporary files in a folder a program has an empty one that it holds a lock on (flock).
The system takes the lock back when the program ends, however it ends: where the lock can be had,
nobody writes those files any more, and the next program that writes to the folder removes them.
"""

from __future__ import annotations

import atexit
import os
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path

from attncli.signals import held_back, undoing

if sys.platform != "win32":
    import fcntl

# The empty file; the others have a number besides.
_LOCK = re.compile(r"\.attncli-[0-9a-f]{12}")


@contextmanager
def temporaries(folder: Path) -> Iterator[Callable[[int], Path]]:
    """Give what makes empty files in a folder; those that were not renamed are removed on leaving.

    It takes their permissions, of which the user's mask takes some away.

    Raises:
        OSError: they cannot be made.
    """
    _sweep(folder)
    made: list[Path] = []

    def make(mode: int) -> Path:
        path = lock.with_name(f"{lock.name}.{len(made)}")
        # Before there is a file: a signal may come at any moment.
        made.append(path)
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
        return path

    remove = partial(_remove, made)
    if sys.platform == "win32":  # keeps files that are mapped; by then they no longer are
        atexit.register(remove)
    with ExitStack() as stack:
        stack.enter_context(undoing(remove))
        stack.callback(remove)
        is_ours = False
        while not is_ours:
            lock = folder / f".attncli-{os.urandom(6).hex()}"
            made.append(lock)
            descriptor = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            stack.callback(os.close, descriptor)
            # Between the two somebody may have found a lock that nobody holds.
            is_ours = _locked(descriptor) is not False and lock.exists()
        yield make


@contextmanager
def spool() -> Iterator[Path]:
    """Give an empty file in the system's folder for them, which this user alone can read.

    Raises:
        OSError: there is no such folder.
    """
    with held_back():  # tries where a file can be made
        folder = Path(tempfile.gettempdir())
    with temporaries(folder) as make:
        yield make(0o600)


def _locked(descriptor: int) -> bool | None:
    """Lock a file; False if somebody else has, None where the file system has no locks."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _remove(paths: list[Path]) -> None:
    """Remove files, the lock last: without it nobody would know that the others are stale."""
    for path in reversed(paths):
        with suppress(OSError):
            path.unlink()


@cache
def _sweep(folder: Path) -> None:
    """Remove what killed programs have left in a folder; once, since it may be a large one."""
    with suppress(OSError):
        names = os.listdir(folder)  # noqa: PTH208 - many names need no paths
        for lock in filter(_LOCK.fullmatch, names):
            others = sorted(folder / name for name in names if name.startswith(f"{lock}."))
            _remove_stale(folder / lock, others)


def _remove_stale(lock: Path, others: list[Path]) -> None:
    # Folders for temporary files are everybody's: whatever has such a name is not to be followed.
    careful = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with suppress(OSError), ExitStack() as stack:
        descriptor = os.open(lock, os.O_RDWR | careful)
        stack.callback(os.close, descriptor)
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and _locked(descriptor):
            _remove([lock, *others])
