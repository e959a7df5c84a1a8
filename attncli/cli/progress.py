"""Progress of long work, on standard error and only where that is a terminal."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)
