"""The way out of every command: where it prints, and what it prints."""

from __future__ import annotations

import fnmatch
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import RenderableType

from attncli import ranks
from attncli.analysis.options import defaults_of, several
from attncli.cli.commands import OutputOptions, PlotOptions, PrintOptions
from attncli.cli.failures import abandon_stdout, tell
from attncli.columns import Column
from attncli.errors import (
    AttncliError,
    CheckFailedError,
    LeftOutError,
    UsageError,
    nearest,
    on_command_line,
    option_words,
)
from attncli.files.target import require_target
from attncli.report import Format
from attncli.report.drawing import pictures, require_picture
from attncli.report.printer import Printer, csv_lines, document, ndjson
from attncli.report.table import record_table

Record = dict[str, Any]


# How results are printed decides nothing about them.
PRINTING = {"format", "columns", "output", "digits", "unit", "color", "quiet", "plot"}
_NOT_DRAWN = ("save", "save_as", "save_dtype", "fail_on")


def make_printer(output: OutputOptions) -> Printer:
    """The printer that the output options ask for; of ranks the first alone has one that prints.

    Raises:
        DataError: the folder to write to is not there; nothing has been saved by then.
        UsageError: a picture that cannot be drawn.
    """
    if not ranks.is_first():
        return Printer(quiet=True)
    if output.output != "-":
        require_target(output.output)
    if isinstance(output, PlotOptions) and output.plot is not None:
        require_picture(output.plot)
    return Printer(target=output.output, color=output.color, quiet=output.quiet)


def write_picture(
    command: str,
    given: Sequence[Any],
    printer: Printer,
    draw: Callable[[Any, str], Any],
    module: str = "plots",
) -> None:
    """Draw what was computed, where that is asked for.

    Args:
        command: the subcommand.
        given: the groups of its options, those of output last.
        printer: hears of it.
        draw: makes the picture, of the module and a title.
        module: that draws.
    """
    target = given[-1].plot
    if target is not None and ranks.is_first():
        title = shlex.join(command_words(command, given, dict.fromkeys(_NOT_DRAWN)))
        draw(pictures(module), title).write(target)
        printer.wrote(target)


def kept(records: Iterable[Record], into: list[Record]) -> Iterator[Record]:
    """The same records, each of them remembered as it comes by."""
    for record in records:
        into.append(record)
        yield record


def command_words(command: str, given: Sequence[Any], changes: Mapping[str, Any]) -> list[str]:
    """`attncli COMMAND …` that computes the same, or the same with other options.

    Args:
        command: the subcommand.
        given: the groups of options that the user gave.
        changes: field of the options → its new value, None for leaving it out.
    """
    words = ["attncli", command]
    for options in given:
        for name, default in defaults_of(options).items():
            value = changes.get(name, getattr(options, name))
            if value == default or (isinstance(options, OutputOptions) and name in PRINTING):
                continue
            words += value if name == "files" else option_words(name, value)
    return words


def write_result(
    output: PrintOptions,
    printer: Printer,
    *,
    command: str,
    columns: Sequence[Column],
    records: Iterable[Record],
    inputs: dict[str, Any],
    params: dict[str, Any],
    show: Callable[[list[Record]], Iterable[RenderableType]],
    wrap: Callable[[list[Record]], Any] = list,
    above: Iterable[RenderableType] = (),
) -> None:
    """Print records in the format asked for.

    Args:
        output: what to print of it.
        printer: where to.
        command: the subcommand, which names the schema.
        columns: the keys of every record, in order.
        records: NDJSON and CSV write them as they come; the others gather them first. Ranks other
            than the first have none, and do their share of the work as they ask for them.
        inputs: what `inputs` of the JSON document says.
        params: what `params` says.
        show: draws the gathered records as tables.
        wrap: makes `data` of the JSON document of the gathered records.
        above: what stands above a table of columns that were chosen.

    Where the reader of standard output goes, what a picture is drawn from is computed all the same.

    Raises:
        BrokenPipeError: the reader has gone, and nothing is to be drawn.
        UsageError: a column that records do not have.
    """
    form, chosen = output.format, _chosen(output.columns, columns)
    if not ranks.is_first():
        for _ in records:  # do this rank's share of what they are made of
            pass
        return
    keys = [column.key for column in chosen]
    try:
        if form is Format.NDJSON and output.columns is not None:
            printer.write(ndjson({key: record[key] for key in keys} for record in records), form)
        elif form is Format.NDJSON:
            printer.write(ndjson(records), form)
        elif form is Format.CSV:
            printer.write(csv_lines(keys, records), form)
        elif form is Format.JSON:
            data = wrap(list(records))
            printer.write(
                document(command, inputs=inputs, params=params, warnings=printer.warned, data=data),
                form,
            )
        elif output.columns is not None:
            named = [replace(one, heading=one.heading or one.key) for one in chosen]
            printer.show(*above, record_table(named, list(records), printer, digits=output.digits))
        else:
            printer.show(*show(list(records)))
    except BrokenPipeError:
        if not (isinstance(output, PlotOptions) and output.plot is not None):
            raise
        abandon_stdout()
        for _ in records:
            pass


def leave_out(printer: Printer, faults: Sequence[AttncliError]) -> None:
    """Name files that are left out, each in a line, and among the warnings of documents."""
    for fault in faults:
        tell(fault)
        printer.warned.append(on_command_line(f"left out: {fault.where}: {fault.problem}"))


def end_with(faults: Sequence[AttncliError]) -> None:
    """Fail where files were left out.

    Raises:
        LeftOutError: some were.
    """
    if faults:
        raise LeftOutError("FILE", f"expected all of them to be whole, got {len(faults)} left out")


def _chosen(wanted: list[str] | None, columns: Sequence[Column]) -> Sequence[Column]:
    """The columns that names and patterns choose, in their order; all where none is given."""
    if wanted is None:
        return columns
    keys = {column.key: column for column in columns}
    found: dict[str, Column] = {}
    for name in several(wanted):
        fitting = fnmatch.filter(keys, name)
        if not fitting:
            known = ", ".join(keys)
            raise UsageError(
                "--columns", f"expected some of {known}, got {name!r}", nearest(name, keys)
            )
        found |= {key: keys[key] for key in fitting}
    return list(found.values())


def fail_for(what: str, found: Sequence[Record], among: Sequence[Record]) -> None:
    """Fail if there are any such heads, naming them.

    Args:
        what: what `--fail-on` asks for.
        found: the records of the heads that are so.
        among: those of all heads.

    Raises:
        CheckFailedError: there are some.
    """
    if found:
        names = ", ".join(_named(record, among) for record in found[:8])
        more = f" and {len(found) - 8} more" if len(found) > 8 else ""
        problem = f"expected no such head, got {len(found)}: {names}{more}"
        raise CheckFailedError(f"--fail-on {what}", problem)


def _named(record: Record, records: Sequence[Record]) -> str:
    """A head in words that tell it from the others."""

    def differs(*keys: str) -> bool:
        return len({tuple(other.get(key) for key in keys) for other in records}) > 1

    words = []
    if differs("source") or not record["group"]:
        words.append(record["source"])
    words.append(record["group"])
    if differs("batch"):
        words.append(f"batch {record['batch']}")
    words.append(f"head {record['head']}")
    if any(differs(key) for key in ("scale", "temperature")):
        words.append(f"(scale {record['scale']:.6g}, temperature {record['temperature']:.6g})")
    if differs("what_if"):
        words.append(f"({record['what_if']})")
    return " ".join(word for word in words if word)
