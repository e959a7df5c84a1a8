"""What may never happen while a file is read or a command runs, watched by the interpreter."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Events of the interpreter that reading and computing have no use for.
_FORBIDDEN = (
    *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty"),
    *("os.startfile",),
    *("os.kill", "os.killpg", "os.chdir", "os.chown", "os.setxattr"),
    *("subprocess.Popen", "pty.spawn", "socket.connect", "socket.bind", "socket.getaddrinfo"),
    *("pickle.find_class", "webbrowser.open", "urllib.Request", "builtins.input"),
    *("builtins.breakpoint",),
    *("sys.setprofile", "sys.settrace"),
)
# Those that change a folder, each with its paths first.
_CHANGES = {
    "shutil.rmtree": 1,
    "shutil.move": 2,
    "os.mkdir": 1,
    "os.rename": 2,
    "os.remove": 1,
    "os.rmdir": 1,
    "os.link": 2,
    "os.symlink": 2,
    "os.truncate": 1,
    "os.chmod": 1,
    "os.utime": 1,
}
_DEVICES = (os.devnull, "/dev/full")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Violation(BaseException):
    """No `except Exception` may hide it."""


class Guard:
    """Watches what happens in this process within `watching`.

    Args:
        folders: where files may be written.
        may_load: whether whole libraries may be loaded, as a command's first run does.
    """

    _active: Guard | None = None
    _hooked = False

    def __init__(self, *folders: Path, may_load: bool = False) -> None:
        self.may_load = may_load
        self.folders = tuple(os.path.realpath(folder) for folder in folders)
        self.seen: list[str] = []
        self.is_on = False  # until everything is loaded that is loaded late
        if not Guard._hooked:  # a hook stays as long as the interpreter
            sys.addaudithook(_hook)
            Guard._hooked = True

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within, nothing is started, loaded from a file, or written but in the given folders.

        Raises:
            AssertionError: something was, whatever came of it.
        """
        self.seen.clear()
        Guard._active = self if self.is_on else None
        try:
            yield
        finally:
            Guard._active = None
        assert not self.seen, f"done while it was watched: {', '.join(self.seen[:3])}"

    def refuse(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "import":
            # Parts of libraries are loaded late, whole ones are not.
            bad = not self.may_load and str(args[0]).partition(".")[0] not in sys.modules
        elif event == "open":
            bad = self._writes(*args) and not self._is_within(args[0])
        elif event in _CHANGES:
            bad = not all(map(self._is_within, args[: _CHANGES[event]]))
        else:
            bad = event in _FORBIDDEN
        if bad:
            self.seen.append(f"{event}{args!r}"[:200])
            raise Violation(event)

    @staticmethod
    def _writes(_: Any, mode: Any, flags: Any) -> bool:
        if isinstance(mode, str):
            return any(letter in mode for letter in "wax+")
        return bool(flags & _WRITING)

    def _is_within(self, path: Any) -> bool:
        if isinstance(path, int):  # opened before
            return True
        path = os.path.realpath(os.fsdecode(path))
        return path in _DEVICES or any(path.startswith(folder + os.sep) for folder in self.folders)


def _hook(event: str, args: tuple[Any, ...]) -> None:
    guard = Guard._active
    if guard is not None:
        Guard._active = None  # what it does itself is not watched
        try:
            guard.refuse(event, args)
        finally:
            Guard._active = guard


class Spent:
    """The most that one input has taken so far: seconds of this process, and its memory."""

    def __init__(self, seconds: float, megabytes: int) -> None:
        self.allowed = seconds, megabytes
        self.slowest, self.grown = 0.0, 0.0
        self._peak = _peak()
        signal.signal(signal.SIGPROF, _too_long)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count what happens within.

        Raises:
            AssertionError: it took more than it may.
        """
        began, before = time.process_time(), self._peak
        signal.setitimer(signal.ITIMER_PROF, 5 * self.allowed[0])
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        took, self._peak = time.process_time() - began, _peak()
        grown = self._peak - before
        self.slowest, self.grown = max(self.slowest, took), max(self.grown, grown)
        assert took <= self.allowed[0], f"took {took:.1f} s"
        assert grown <= self.allowed[1], f"took {grown:.0f} MB of memory"


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _too_long(*_: object) -> None:
    raise Violation("it does not end")


def confine(megabytes: int) -> None:
    """Hold this process to its memory of now and so much more."""
    lines = Path("/proc/self/status").read_text().splitlines()
    now = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (now + (megabytes << 20),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder in memory where there is one, with a folder for temporary files beside it."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as root:
        spool = Path(root, "tmp")
        work = Path(root, "work")
        spool.mkdir()
        work.mkdir()
        old, tempfile.tempdir = tempfile.tempdir, str(spool)
        try:
            yield work
        finally:
            tempfile.tempdir = old


class StandardError:
    """A file in the place of standard error, for what libraries print past Python."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it stays as long as the process
        os.dup2(self._file.fileno(), 2)

    def assert_empty(self) -> None:
        """Nobody has printed anything since the last time.

        Raises:
            AssertionError: somebody has.
        """
        if os.fstat(2).st_size:
            self._file.seek(0)
            said = self._file.read()
            self._file.truncate(0)
            self._file.seek(0)
            raise AssertionError(f"a library has said {said!r}")


def names_in(folder: Path) -> list[str]:
    """What lies in a folder."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries)
