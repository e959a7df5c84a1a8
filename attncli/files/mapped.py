"""Files mapped into memory, safe from being cut short meanwhile.

A mapped file costs memory only while its pages are looked at. But where another program cuts it
short, the pages that are gone raise SIGBUS, which ends a process without a word. On Linux that
signal is caught where it is raised: zeros take the place of what is gone, so that the instruction
can end, and the main thread raises the error, before any result of these zeros is told.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import mmap
import os
import signal
import sys
import threading
import weakref
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from attncli.errors import DataError
from attncli.files.text import shown
from attncli.limits import descriptors, require_memory

_PAGE = mmap.PAGESIZE
_MAP_FIXED = 0x10
_SA_SIGINFO = 4
# A signal that nobody else sends.
_TOLD_BY = getattr(signal, "SIGRTMAX", 64)
# Where `siginfo_t` of 64-bit Linux holds the address that could not be read.
_ADDRESS_AT = 16
# Bytes that are read at a time of a file that is not mapped.
_PART = 1 << 24

# Address → bytes and file of everything mapped now.
_ranges: dict[int, tuple[int, str]] = {}
# The maps that hold a descriptor each.
_held: weakref.WeakSet[Any] = weakref.WeakSet()
_lost: list[str] = []
_handlers: list[Any] = []


class _SigAction(ctypes.Structure):
    """`struct sigaction` of Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def map_file(local: Path) -> NDArray[np.uint8]:
    """Map a whole file that is not empty: uint8, (bytes,), private to this process.

    Each map holds a descriptor. Where many are held, the file is read instead.

    Raises:
        ResourceError: it is read, and does not fit in memory.
    """
    # Copy-on-write first, since torch warns of arrays that cannot be written. Private pages count
    # as memory, so a file larger than the machine's must be read-only.
    modes: tuple[Literal["c", "r"], ...] = ("c", "r") if len(_held) < descriptors() // 2 else ()
    for mode in modes:
        with contextlib.suppress(OSError, ValueError):
            data = np.memmap(local, np.uint8, mode)
            _held.add(data.base)
            whole = np.asarray(data)
            guard(whole.ctypes.data, whole.nbytes, local, data.base)
            return whole
    return _read_whole(local)


def _read_whole(local: Path) -> NDArray[np.uint8]:
    size = local.stat().st_size
    require_memory(shown(str(local)), size)
    whole = np.empty(size, np.uint8)
    with local.open("rb", buffering=0) as file:
        at = 0
        while at < size and (count := file.readinto(whole[at : at + _PART].data)):
            at += count
    return whole[:at]


class MappedReader(io.RawIOBase):
    """A mapped file as one that is read: it holds no descriptor of its own."""

    def __init__(self, local: Path) -> None:
        super().__init__()
        self._data, self._at = map_file(local), 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte, from the start, from here or from the end."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """Where it is."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Copy what comes next, as much as fits."""
        part = self._data[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part.tobytes()
        self._at += len(part)
        return len(part)


def guard(start: int, size: int, local: Path, owner: object = None) -> None:
    """Answer for a mapped part of a file until its owner is gone.

    Args:
        start: its address.
        size: its bytes.
        local: the file.
        owner: what unmaps it when it is dropped; None where that is not known.
    """
    _ranges[start] = size, str(local)
    if owner is not None:
        weakref.finalize(owner, _ranges.pop, start, None)
    if not _handlers and sys.platform == "linux" and sys.maxsize > 2**32:
        with contextlib.suppress(ValueError):  # not the main thread, which alone may catch signals
            _install()


def _install() -> None:
    """Catch SIGBUS where it is raised, and another signal by which the main thread hears of it."""
    signal.signal(_TOLD_BY, _tell)
    catch = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(_catch)
    _handlers.append(catch)
    action = _SigAction(handler=ctypes.cast(catch, ctypes.c_void_p).value, flags=_SA_SIGINFO)
    # Until the handler is left all signals wait, so that Python raises nothing within it.
    ctypes.memset(action.mask, 0xFF, ctypes.sizeof(action.mask))
    ctypes.CDLL(None).sigaction(signal.SIGBUS, ctypes.byref(action), None)


def _catch(number: int, info: int, _: int) -> None:
    """Put zeros in the place of what a file has lost; called by the thread that looked there."""
    address = ctypes.c_void_p.from_address(info + _ADDRESS_AT).value or 0
    for start, (size, name) in list(_ranges.items()):
        if start <= address < start + size:
            page = address // _PAGE * _PAGE
            _put_zeros(page, start + size - page)
            _lost.append(name)
            signal.pthread_kill(threading.main_thread().ident or 0, _TOLD_BY)
            return
    ctypes.CDLL(None).signal(number, None)  # no file of ours: the default, which ends the process


def _put_zeros(page: int, size: int) -> None:
    library = ctypes.CDLL(None)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    library.mmap(page, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)


def _tell(number: int, frame: FrameType | None) -> None:
    """Raise what `_catch` has found, in the main thread.

    Raises:
        DataError: naming the file.
    """
    del number, frame
    where = shown(_lost[-1]) if _lost else "memory"
    problem = "expected the whole file as long as it is read, got it cut short meanwhile"
    raise DataError(where, problem, "Run it again once the file is whole.")
