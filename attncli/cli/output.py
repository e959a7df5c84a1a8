"""The way out of every command: where it prints, what it prints, and how far it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from attncli.cli.commands import OutputOptions
from attncli.columns import Column
from attncli.files.writer import require_folder
from attncli.report import Format
from attncli.report.printer import Printer, csv_lines, document, ndjson

Record = dict[str, Any]


def make_printer(output: OutputOptions) -> Printer:
    """The printer that the output options ask for.

    Raises:
        DataError: the folder to write to is not there; nothing has been saved by then.
    """
    if output.output != "-":
        require_folder(output.output)
    return Printer(target=output.output, color=output.color, quiet=output.quiet)


def write_result(
    form: Format,
    printer: Printer,
    *,
    command: str,
    columns: Sequence[Column],
    records: Iterable[Record],
    inputs: dict[str, Any],
    params: dict[str, Any],
    show: Callable[[list[Record]], Iterable[RenderableType]],
    wrap: Callable[[list[Record]], Any] = list,
) -> None:
    """Print records in the format asked for.

    Args:
        form: what to print.
        printer: where to.
        command: the subcommand, which names the schema.
        columns: the keys of every record, in order.
        records: NDJSON and CSV write them as they come; the others gather them first.
        inputs: what `inputs` of the JSON document says.
        params: what `params` says.
        show: draws the gathered records as tables.
        wrap: makes `data` of the JSON document of the gathered records.
    """
    if form is Format.NDJSON:
        printer.write(ndjson(records))
    elif form is Format.CSV:
        printer.write(csv_lines([column.key for column in columns], records))
    elif form is Format.JSON:
        data = wrap(list(records))
        printer.write(
            document(command, inputs=inputs, params=params, warnings=printer.warned, data=data)
        )
    else:
        printer.show(*show(list(records)))


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
