"""Records as one table for eyes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncli.report.numbers import decimals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from attncli.report.printer import Printer
    from attncli.report.records import Column

# Columns that name a record: where a table is split to fit, each part has them.
KEYS = frozenset({"source", "name", "group", "batch", "head", "query", "key", "stage", "dk"})


def record_table(
    columns: Sequence[Column],
    records: Sequence[dict[str, Any]],
    printer: Printer,
    *,
    digits: int,
) -> RenderableType:
    """A table with a line a record, numbers to the right, split where a terminal is too narrow.

    Columns that tables leave out, and those that hold nothing in any record, are not shown.
    """
    from attncli.report.grid import GridColumn, grid

    shown = [
        column
        for column in columns
        if column.heading is not None and any(record[column.key] is not None for record in records)
    ]
    built = []
    for place, column in enumerate(shown):
        values = [record[column.key] for record in records]
        is_text = any(isinstance(value, str | list) for value in values)
        unit = f" ({column.unit})" if column.unit else ""
        is_key = all(before.key in KEYS for before in shown[: place + 1])
        cells = [cell(value, digits) for value in values]
        built.append(GridColumn(f"{column.heading}{unit}", cells, is_text, is_key))
    return grid(built, printer)


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
    from attncli.files.text import shown

    return shown(str(value))
