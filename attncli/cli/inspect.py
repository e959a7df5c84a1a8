"""`attncli inspect`: what a file holds, before anything is computed from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from attncli.cli.command import command
from attncli.cli.options import WorkOptions, make_printer
from attncli.errors import DataError
from attncli.report.choices import Format

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncli.files.container import TensorFile
    from attncli.files.tensor import StoredTensor, TensorHeader

# Elements looked at together.
PART = 1 << 20
MOMENTS = ("n_nan", "n_posinf", "n_neginf", "min", "max", "mean", "std")


@dataclass(frozen=True, slots=True)
class InspectOptions:
    """What to look at."""

    files: Annotated[
        list[str], typer.Argument(metavar="FILE", help="Files of tensors; '-' is stdin.")
    ]
    dtype: Annotated[
        str | None,
        Option("--dtype", metavar="NAME", help="What the raw bytes of a '|V2' tensor are."),
    ] = None


def register(app: typer.Typer) -> None:
    """Add `inspect` to the program."""

    @command(app, "inspect")
    def inspect(chosen: InspectOptions, work: WorkOptions) -> None:
        """List the tensors of files: names, shapes, dtypes, non-finite counts, moments.

        Minimum, maximum, mean and standard deviation (population) are of the finite values.
        """
        from attncli.report import document as report
        from attncli.report.record_table import record_table
        from attncli.report.records import INSPECT

        printer = make_printer(work)
        warnings: list[str] = []
        records = list(_records(chosen, warnings))
        printer.warn(warnings)
        columns = [column.key for column in INSPECT]
        if work.format is Format.JSON:
            params = {"dtype": chosen.dtype}
            printer.write(
                report.document(
                    "inspect", inputs={}, params=params, warnings=printer.warned, data=records
                )
            )
        elif work.format is Format.NDJSON:
            printer.write(report.ndjson(records))
        elif work.format is Format.CSV:
            printer.write(report.csv_lines(columns, records))
        else:
            printer.show(record_table(INSPECT, records, printer, digits=work.digits))


def _records(chosen: InspectOptions, warnings: list[str]) -> Iterator[dict[str, Any]]:
    from attncli.files.reader import open_file
    from attncli.files.roles import split_name
    from attncli.files.text import place

    for given in chosen.files:
        source, name = split_name(given)
        file = open_file(source)
        if name is not None:
            file.read(name)  # refuses a name that is not there
        for header in file.headers:
            if name in (None, header.name):
                yield _record(file, header, chosen.dtype, warnings)
        where = place(source)
        warnings += [
            text if text.startswith(where) else f"{where}: {text}" for text in file.warnings
        ]


def _record(
    file: TensorFile, header: TensorHeader, dtype: str | None, warnings: list[str]
) -> dict[str, Any]:
    """What there is to say of one tensor; of elements that are no numbers only the header."""
    elements = math.prod(header.shape)
    record: dict[str, Any] = {
        "source": file.source,
        "name": header.name,
        "shape": list(header.shape),
        "dtype": header.dtype,
        "elements": elements,
        "bytes": None,
    }
    unread = _unread(file, header, dtype)
    if unread is not None:
        warnings.append(f"{unread}; its values are not looked at")
        return record | dict.fromkeys(MOMENTS)
    stored = file.read(header.name)
    return record | {"bytes": int(stored.array.nbytes)} | _moments(stored, dtype)


def _unread(file: TensorFile, header: TensorHeader, dtype: str | None) -> DataError | None:
    """Why the values of a tensor cannot be looked at; None where they can."""
    from attncli.files.tensor import UNDECLARED, require_accepted
    from attncli.files.text import place

    where = place(file.source)
    if len(file.headers) > 1:
        where += f"::{place(str(header.name))}"
    try:
        require_accepted(where, header.dtype)
    except DataError as error:
        return error
    if header.dtype in UNDECLARED and dtype is None:
        return DataError(where, f"expected --dtype to say what {header.dtype} is, got none")
    return None


def _moments(stored: StoredTensor, dtype: str | None) -> dict[str, Any]:
    """Counts, extremes and moments, in parts that bound what is in memory."""
    from attncli.attention.running import RunningStatistics
    from attncli.files.tensor import as_float

    statistics = RunningStatistics()
    flat = stored.array.ravel(order="K")  # no copy, since files hold whole arrays
    for start in range(0, flat.size, PART):
        statistics.add(as_float(replace(stored, array=flat[start : start + PART]), dtype))
    return statistics.record
