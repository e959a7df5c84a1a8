"""Files to write: each appears whole or not at all, and those of one command together."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from attncli.errors import (
    AttncliError,
    CheckFailedError,
    DataError,
    LeftOutError,
    ResourceError,
)
from attncli.files.temporary import spool, temporaries
from attncli.files.text import shown
from attncli.limits import DISK_FULL, full_disk
from attncli.signals import held_back, undoing

_CHUNK = 1 << 22


@dataclass(slots=True, eq=False)
class Batch:
    """Files that are written and have yet to appear, all at once.

    Attributes:
        moves: of each the place as the user named it, the temporary file, and the place itself.
        notes: what is to be said then.
        makers: what makes temporary files, by folder.
        undo: takes back whatever has not appeared.
    """

    moves: list[tuple[Path, Path, Path]] = field(default_factory=list)
    notes: list[Callable[[], object]] = field(default_factory=list)
    makers: dict[Path, Callable[[int], Path]] = field(default_factory=dict)
    undo: ExitStack = field(default_factory=ExitStack)

    def temporary(self, folder: Path, mode: int = 0o666) -> Path:
        """Make an empty file that goes with the batch."""
        if folder not in self.makers:
            self.makers[folder] = self.undo.enter_context(temporaries(folder))
        return self.makers[folder](mode)

    def appear(self) -> None:
        """Rename the files, one right after the other; where one cannot be, none stays renamed."""
        with held_back(), ExitStack() as back:
            for target, path, real in self.moves:
                with told(target):
                    kept = self._kept(real) if len(self.moves) > 1 else None
                    path.replace(real)
                back.callback(_put_back, real, kept)
            back.pop_all()
        for note in self.notes:
            note()

    def _kept(self, real: Path) -> Path | None:
        """Another name of the file that is there, itself where there is none; None without a name.

        Without hard links, or room for one, the old file cannot be put back.
        """
        if not real.exists():
            return real
        with suppress(OSError):
            other = self.temporary(real.parent)
            other.unlink()
            other.hardlink_to(real)
            return other
        return None


def _put_back(real: Path, kept: Path | None) -> None:
    """Give a place the file that it had, or none."""
    with suppress(OSError):
        if kept == real:
            real.unlink()
        elif kept is not None:
            kept.replace(real)


_BATCH: ContextVar[Batch | None] = ContextVar("_BATCH", default=None)


@contextmanager
def together() -> Iterator[None]:
    """Let all files that are written within appear at once on leaving, after an error none.

    A check that fails is no error of what was computed, nor is another file that was left out, nor
    a reader that has seen enough of standard output: then they do appear.

    Raises:
        DataError: a place cannot be written after all.
    """
    batch = Batch()
    before = _BATCH.set(batch)
    with batch.undo:
        try:
            yield
        except (BrokenPipeError, CheckFailedError, LeftOutError):
            batch.appear()
            raise
        finally:
            _BATCH.reset(before)
        batch.appear()


@contextmanager
def joined(batch: Batch | None = None) -> Iterator[Batch]:
    """Give a batch: this one, or that of `together`, or one of its own that appears on leaving."""
    known = batch or _BATCH.get()
    if known is not None:
        yield known
        return
    own = Batch()
    with own.undo:
        yield own
        own.appear()


def once_there(note: Callable[[], object]) -> None:
    """Say something as soon as the files that are written by now have appeared."""
    batch = _BATCH.get()
    if batch is None:
        note()
    else:
        batch.notes.append(note)


@contextmanager
def atomic_path(target: Path, batch: Batch | None = None) -> Iterator[Path]:
    """Give an empty file to write that takes the place of `target` on leaving without error.

    On any exception it is removed and `target` is as it was; so it is when a signal ends the
    program. A link is followed; an old file's permissions are kept, a new file gets the ordinary
    ones. What cannot be replaced, a device, pipe or stream, is given as it is: append to it.

    Args:
        target: the place as the user named it.
        batch: what it appears together with, when that does.

    Raises:
        DataError: there is no such folder, it cannot be written, or `target` is a folder.
        ResourceError: the disk is full.
    """
    with told(target), joined(batch) as files:
        mode = _old_mode(target)
        if not stat.S_ISREG(mode or stat.S_IFREG):
            yield target
            return
        stream = _stream(target)
        if stream is not None:
            yield target
            # Whoever has opened it goes on behind what was appended.
            os.lseek(stream, 0, os.SEEK_END)
            return
        real = target.resolve()
        # Nobody else is to read what becomes private, not even before it is.
        path = files.temporary(real.parent, 0o666 if mode is None else 0o600)
        if mode is not None:
            path.chmod(stat.S_IMODE(mode))
        yield path
        files.moves.append((target, path, real))


@contextmanager
def seekable_path(target: Path, batch: Batch | None = None) -> Iterator[Path]:
    """`atomic_path`, or for a device, pipe or stream a file that is copied there on leaving."""
    with atomic_path(target, batch) as path:
        if path != target:
            yield path
            return
        with spool() as part:
            yield part
            with part.open("rb") as source, path.open("ab") as sink:
                shutil.copyfileobj(source, sink, _CHUNK)


def make_folder(target: Path, batch: Batch) -> None:
    """Make a folder if need be, which is unmade if nothing of the batch appears in it.

    Raises:
        DataError: the folder cannot be made, or `target` is something else.
    """
    with told(target), held_back():
        try:
            target.mkdir()
        except FileExistsError:
            if not target.is_dir():
                problem = "expected a folder to write to, got a file"
                raise DataError(shown(str(target)), problem) from None
        else:
            batch.undo.enter_context(undoing(target.rmdir))
            batch.undo.callback(_remove_if_empty, target)


def require_target(target: str) -> None:
    """Refuse a file that cannot be written, before anything is computed.

    Raises:
        DataError: there is no such folder, it cannot be written, or `target` is a folder.
        ResourceError: the disk is full.
    """
    path = Path(target)
    with told(path):
        if stat.S_ISREG(_old_mode(path) or stat.S_IFREG) and _stream(path) is None:
            with temporaries(path.resolve().parent):
                pass


@contextmanager
def told(target: Path) -> Iterator[None]:
    """Turn what the system says of a place to write into the project's errors."""
    try:
        yield
    except BrokenPipeError:
        # Nobody reads any more: not a fault, and settled where standard output is.
        raise
    except OSError as error:
        raise _in_words(target, error) from error


def _old_mode(target: Path) -> int | None:
    """The kind and permissions of what is there already; None where nothing is."""
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(mode):
        raise DataError(shown(str(target)), "expected a file to write, got a directory")
    if stat.S_ISREG(mode):  # others may wait for a reader
        os.close(os.open(target, os.O_WRONLY))
    return mode


def _stream(target: Path) -> int | None:
    """The descriptor of what a place such as /dev/stdout leads to; None for other places.

    A file that a shell has opened for the program is not to be replaced: more may be written there.
    """
    path, listing = target, ("/dev/fd", f"/proc/{os.getpid()}/fd")
    while str(path.parent.resolve()) not in listing:
        if not path.is_symlink():
            return None
        path = path.parent / path.readlink()
    return int(path.name) if path.name.isdigit() else None


def _in_words(target: Path, error: OSError) -> AttncliError:
    where = shown(str(target))
    if error.errno in DISK_FULL:
        return ResourceError(where, f"expected free space, got {full_disk(error, target.parent)}")
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        parent = shown(str((target.resolve() if target.is_symlink() else target).parent))
        return DataError(where, f"expected a folder {parent} to write to, got none of this name")
    if isinstance(error, PermissionError):
        return DataError(where, "expected a place that can be written, got permission denied")
    reason = os.strerror(error.errno) if error.errno else "an error"
    return DataError(where, f"expected a place that can be written, got: {reason}")


def _remove_if_empty(target: Path) -> None:
    with suppress(OSError):
        target.rmdir()
