"""How far a command is. Apart from the rest, since rich's bars take a while to load."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from attncli.report.printer import Printer


@contextmanager
def progress(printer: Printer, total: int, what: str) -> Iterator[Callable[[int], None] | None]:
    """A function that is told how much more is done, or None where nobody would see it.

    Args:
        printer: whose quietness counts.
        total: how much there is to do.
        what: what is being done, for the line.
    """
    if printer.quiet or not sys.stderr.isatty() or total <= 0:
        yield None
        return
    columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)
