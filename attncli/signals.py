"""Signals that end the program: it leaves nothing behind and exits with 128 + the signal's number.

Python's own way, an exception wherever the program happens to be, can be swallowed by a library
that is being loaded, or print a traceback. Here the handler itself takes back what must not stay,
and exits. The command line alone installs it; elsewhere signals do what they always do.

This module is loaded first of all, and loads next to nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

# What each one is called on standard error. Windows has no SIGHUP.
ENDING = {"SIGINT": "interrupted", "SIGTERM": "terminated", "SIGHUP": "hung up"}

# What a signal does before the program ends, the latest first.
_undo: list[Callable[[], object]] = []
# Signals that have come while they are held back, for each `held_back` that is entered.
_waiting: list[list[int]] = []


def end_cleanly() -> None:
    """Install the handler, but for signals that whoever started the program has it ignore.

    So do `nohup` for SIGHUP, and shells for the SIGINT of what they run in the background.
    """
    for name in ENDING:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def undo_from_now(undo: Callable[[], object]) -> None:
    """Have a signal that comes from now on do this before it ends the program."""
    _undo.append(undo)


@contextmanager
def undoing(undo: Callable[[], object]) -> Iterator[None]:
    """Have a signal that comes within do this before it ends the program."""
    undo_from_now(undo)
    try:
        yield
    finally:
        _undo.remove(undo)


@contextmanager
def held_back() -> Iterator[None]:
    """Do something quick as a whole: a signal that comes within waits until it is done."""
    waiting: list[int] = []
    _waiting.append(waiting)
    try:
        yield
    finally:
        _waiting.pop()
        for number in waiting[:1]:
            _end(number)


def _end(number: int, _: object = None) -> None:
    if _waiting:
        _waiting[-1].append(number)
        return
    for undo in reversed(_undo):
        with suppress(Exception):
            undo()
    # Nobody may read what is said: the next signal is not to wait for it.
    signal.signal(number, signal.SIG_DFL)
    with suppress(OSError):
        os.write(2, f"attncli: {ENDING[signal.Signals(number).name]}\n".encode())
    os._exit(128 + number)
