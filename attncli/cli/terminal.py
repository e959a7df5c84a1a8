"""What a terminal has beside results: how far a command is, and pages that keys turn."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from attncli.report.printer import Printer
from attncli.report.words import Words
from attncli.signals import undoing

if sys.platform != "win32":
    import termios

# What terminals send for keys that have no letter, and what Windows does.
LEFT = {"\x1b[D", "\x1bOD", "\x1b[A", "\x1bOA", "\x1b[5~", "\xe0K", "\xe0H", "\xe0I"}
RIGHT = {"\x1b[C", "\x1bOC", "\x1b[B", "\x1bOB", "\x1b[6~", "\xe0M", "\xe0P", "\xe0Q"}
HOME = {"\x1b[H", "\x1bOH", "\x1b[1~", "\x1b[7~", "\xe0G"}
END = {"\x1b[F", "\x1bOF", "\x1b[4~", "\x1b[8~", "\xe0O"}
NEXT, BACK = RIGHT | set("nN +"), LEFT | set("pPbB-\x7f\x08")
FIRST, LAST, QUIT = HOME | {"g"}, END | {"G"}, set("qQ\x1b\x04")
ENTER, CAUSAL = set("\r\n"), set("cC")

# At the start of an empty line: a bar is taken away, and what rich hides for it comes back.
SHOW_CURSOR = b"\r\x1b[2K\x1b[?25h"

Pages = Sequence[Sequence[RenderableType]]
Item = TypeVar("Item")


# Off a terminal it is said once how long a run will take: after so many seconds, if so many remain.
_FORETOLD_AFTER, _WORTH_A_LINE = 3.0, 30.0
_UNITS = (("years", 31_557_600.0), ("days", 86_400.0), ("h", 3_600.0), ("min", 60.0), ("s", 1.0))


@contextmanager
def progress(
    printer: Printer, total: int | None, what: str
) -> Iterator[Callable[[int], None] | None]:
    """A function that is told how much more is done, or None where nobody would see it.

    Terminals get a bar; elsewhere one line says how long it will take, where that is long.

    Args:
        printer: whose quietness counts.
        total: how much there is to do, 0 for nothing to show; None where that is not known.
        what: what is being done, for the line.
    """
    shown = sys.stderr.isatty()
    if printer.quiet or total == 0 or (total is None and not shown):
        yield None
        return
    if total is not None and not shown:
        yield _foretelling(printer, total, what)
        return
    columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    # Or rich would print results above the bar, in the place of where they go.
    seen = Console(stderr=True)
    drawn = Progress(*columns, console=seen, transient=True, redirect_stdout=False)
    with undoing(partial(os.write, 2, SHOW_CURSOR)), drawn as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


def watched(
    items: Iterable[Item], printer: Printer, total: int, what: str, at_once: int = 1
) -> Iterator[Item]:
    """The same items, with progress as they come by.

    Args:
        items: so many as `total` says.
        printer, total, what: as for `progress`.
        at_once: how many of them come by before it is told.
    """
    with progress(printer, total, what) as tell:
        for done, item in enumerate(items, 1):
            yield item
            if tell is not None and done % at_once == 0:
                tell(at_once)


def _foretelling(printer: Printer, total: int, what: str) -> Callable[[int], None]:
    """Says once, when enough is done to tell, how long the rest will take."""
    begun, done, told = time.monotonic(), 0, False

    def tell(more: int) -> None:
        nonlocal done, told
        done += more
        passed = time.monotonic() - begun
        if told or passed < _FORETOLD_AFTER or not done:
            return
        told, left = True, passed * (total - done) / done
        if left >= _WORTH_A_LINE:
            printer.note(f"{what}: about {duration(left)} left")

    return tell


def duration(seconds: float) -> str:
    """Seconds in the largest unit of which there are two: 90 min, 3 h, 11 days."""
    unit, size = next((one for one in _UNITS if seconds >= 2 * one[1]), _UNITS[-1])
    return f"{seconds / size:,.0f} {unit}"


def turn_pages(
    pages: Pages, printer: Printer, words: Words, otherwise: Callable[[], Pages] | None = None
) -> None:
    """Show one page at a time, until its reader leaves; Enter leaves behind the last.

    Args:
        pages: what to show.
        printer: where.
        words: the language of the line below them.
        otherwise: makes the same pages under the other causal mask, which c changes to and back.
    """
    hidden: Pages | None = None
    kind = "arrows" if printer.sign("→←·", "") else "letters"
    known = [f"prompt.{kind}.next", f"prompt.{kind}.back", "prompt.number"]
    known += ["prompt.quit"] if otherwise is None else ["prompt.causal", "prompt.quit"]
    keys = printer.sign(" · ", " | ").join(map(words.text, known))
    at: int | None = 0
    while at is not None:
        Console(legacy_windows=False).clear()
        printer.show(*pages[at])
        sys.stdout.write(f"[{at + 1}/{len(pages)}] {keys} ")
        sys.stdout.flush()
        try:
            with _as_it_was():
                key = typer.getchar()
            if key in CAUSAL and otherwise is not None:
                pages, hidden = hidden or otherwise(), pages
            else:
                at = page_after(key, at, len(pages))
        except EOFError:  # ^D
            at = None
        finally:
            sys.stdout.write("\n")


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Have a signal that ends the program leave the terminal as it is now."""
    if sys.platform == "win32" or not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    now = termios.tcgetattr(terminal)
    with undoing(partial(termios.tcsetattr, terminal, termios.TCSADRAIN, now)):
        yield


def page_after(key: str, at: int, count: int) -> int | None:
    """Which page a key leads to from page `at` of so many, counted from 0; None for none."""
    if key in ENTER:
        return at + 1 if at + 1 < count else None
    if key in QUIT:
        return None
    if key in NEXT:
        return min(at + 1, count - 1)
    if key in BACK:
        return max(at - 1, 0)
    if key in FIRST:
        return 0
    if key in LAST:
        return count - 1
    if key.isascii() and key.isdigit():
        return min(int(key) - 1, count - 1) if key != "0" else min(9, count - 1)
    return at
