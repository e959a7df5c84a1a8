"""Records as one table for eyes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncli.report.numbers import decimals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from attncli.report.printer import Printer
    from attncli.report.records import Column


def record_table(
    columns: Sequence[Column],
    records: Sequence[dict[str, Any]],
    printer: Printer,
    *,
    digits: int,
) -> Table:
    """A table with a line a record, numbers to the right.

    Columns that tables leave out, and those that hold nothing in any record, are not shown.
    """
    from rich.table import Table

    shown = [
        column
        for column in columns
        if column.heading is not None and any(record[column.key] is not None for record in records)
    ]
    table = Table(box=None, pad_edge=False, header_style="bold" if printer.colored else "")
    for column in shown:
        values = [record[column.key] for record in records]
        is_text = any(isinstance(value, str | list) for value in values)
        unit = f" ({column.unit})" if column.unit else ""
        justify = "left" if is_text else "right"
        table.add_column(f"{column.heading}{unit}", justify=justify, overflow="fold")  # type: ignore[arg-type]
    for record in records:
        table.add_row(*(cell(record[column.key], digits) for column in shown))
    return table


def cell(value: Any, digits: int) -> str:
    """One value as a table shows it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return decimals(value, digits)
    if isinstance(value, list):
        return "(" + ", ".join(map(str, value)) + ")"
    return str(value)
