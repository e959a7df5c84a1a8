"""What `attncli inspect` does: the tensors of each file, part by part."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from attncli.attention.statistics import NumberStatistics, RunningStatistics
from attncli.cli.commands import InspectOptions, OutputOptions
from attncli.cli.output import Record, end_with, leave_out, make_printer, write_result
from attncli.columns import column, columns_of, record_of
from attncli.errors import AttncliError, DataError, ResourceError
from attncli.files.folder import files_in
from attncli.files.reader import open_file
from attncli.files.roles import split_name
from attncli.files.tensor import (
    UNDECLARED,
    StoredTensor,
    TensorFile,
    TensorHeader,
    as_float,
    doubts,
    require_accepted,
)
from attncli.files.text import is_folder, place
from attncli.report.table import record_table

# Elements looked at together.
PART = 1 << 20


@dataclass(frozen=True, slots=True)
class InspectedTensor:
    """One tensor of a file, whose elements may be no numbers."""

    source: str = column("file", is_key=True, description="as given")
    name: str | None = column(
        "name", is_key=True, description="in its file; none where that holds one tensor without"
    )
    shape: list[int] = column("shape", description="sizes of the axes")
    dtype: str = column("dtype", description="as the file says")
    elements: int = column(None, description="their number")
    bytes: int | None = column(
        "bytes", description="of the elements; none where values are not looked at", default=None
    )


# Of elements that are no numbers nothing is known.
COLUMNS = (
    *columns_of(InspectedTensor),
    *(replace(one, holds=float | None) for one in columns_of(NumberStatistics)),
)


def run(options: InspectOptions, output: OutputOptions) -> None:
    """Look at every file, and print what is found."""
    printer = make_printer(output)
    warnings: list[str] = []
    records: list[Record] = []
    faults: list[AttncliError] = []
    wanted = [part for given in options.files for part in _files(given, faults)]
    for given in wanted:
        try:
            records += _records(given, options.dtype, warnings)
        except (DataError, ResourceError) as fault:
            if len(wanted) == 1:
                raise
            faults.append(fault)
    if not records:
        raise faults[0]
    printer.warn(warnings)
    leave_out(printer, faults)
    write_result(
        output,
        printer,
        command="inspect",
        columns=COLUMNS,
        records=records,
        inputs={},
        params={"dtype": options.dtype},
        show=lambda found: [record_table(COLUMNS, found, printer, digits=output.digits)],
    )
    end_with(faults)


def _files(given: str, faults: list[AttncliError]) -> list[str]:
    """What is given, or the files of a folder; none of one that is at fault."""
    if not is_folder(given):
        return [given]
    try:
        return files_in(given)
    except DataError as fault:
        faults.append(fault)
        return []


def _records(given: str, dtype: str | None, warnings: list[str]) -> Iterator[Record]:
    """Of FILE or FILE::NAME."""
    source, name = split_name(given)
    file = open_file(source)
    if name is not None:
        file.read(name)  # refuses a name that is not there
    for header in file.headers:
        if name in (None, header.name):
            yield _record(file, header, dtype, warnings)
    where = place(source)
    warnings += [text if text.startswith(where) else f"{where}: {text}" for text in file.warnings]


def _record(
    file: TensorFile, header: TensorHeader, dtype: str | None, warnings: list[str]
) -> Record:
    """What there is to say of one tensor; of elements that are no numbers only the header."""
    shape = header.shape
    found = InspectedTensor(file.source, header.name, list(shape), header.dtype, math.prod(shape))
    unread = _unread(file, header, dtype)
    if unread is not None:
        warnings.append(f"{unread}; its values are not looked at")
        return dict.fromkeys(column.key for column in COLUMNS) | record_of(found)
    stored = file.read(header.name)
    if dtype is not None:
        warnings += doubts(stored, dtype)
    return record_of(replace(found, bytes=int(stored.array.nbytes)), _statistics(stored, dtype))


def _unread(file: TensorFile, header: TensorHeader, dtype: str | None) -> DataError | None:
    """Why the values of a tensor cannot be looked at; None where they can."""
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


def _statistics(stored: StoredTensor, dtype: str | None) -> NumberStatistics:
    """Counts, extremes and moments, in parts that bound what is in memory."""
    statistics = RunningStatistics()
    # Expanded tensors of .pt files are larger than what is stored: only parts of them are copied.
    array = stored.array
    flat = array.ravel(order="K") if array.flags.forc else array.flat
    for start in range(0, array.size, PART):
        statistics.add(as_float(replace(stored, array=flat[start : start + PART]), dtype))
    return statistics.result
