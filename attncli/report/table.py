"""Cells, and columns of them as rich tables, in as many parts as a terminal's width asks for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from rich.box import Box
from rich.cells import cell_len, set_cell_size
from rich.table import Table
from rich.text import Text

from attncli.columns import Column
from attncli.files.text import shown
from attncli.report.printer import Preformatted, Printer

GAP = 2
# With fewer decimals than these their user wants few characters, not small numbers.
SCIENTIFIC_FROM = 3
# From none to all, and where the encoding lacks these.
SHADES, PLAIN_SHADES = "·░▒▓█", ".:+*#"
# A light rule under the headings, on terminals alone: what is piped has a line a record.
RULE = Box("    \n    \n ── \n    \n    \n    \n    \n    \n", ascii=True)
# Rich holds some kilobytes a cell until a table is drawn: long ones are drawn in stretches.
LINES_AT_ONCE = 1000


@dataclass(frozen=True, slots=True, eq=False)
class TableColumn:
    """One column."""

    heading: str
    cells: Sequence[str | Text]  # a text a line, with styles of its own where it is a `Text`
    is_text: bool = False  # whether it stands to the left; numbers stand to the right
    is_key: bool = False  # whether it names the line, and comes again in each part of a split table
    is_beside: bool = False  # whether a split table keeps it beside the column before

    @property
    def width(self) -> int:
        """Columns of the terminal that it takes."""
        return max(text_width(str(text)) for text in (self.heading, *self.cells))


def table(columns: Iterable[TableColumn], printer: Printer) -> Preformatted:
    """The columns side by side; on a terminal in as many parts as its width asks for.

    Each part begins with the key columns. Nothing is cut, apart from the beginnings of keys that
    would leave no room on a terminal.
    """
    columns = list(columns)
    if not columns:  # of no records, as of a mask for no heads
        return Preformatted("")
    keys = [column for column in columns if column.is_key]
    room = max(12, printer.width // max(1, len(keys)) - GAP - 12)
    keys = [
        replace(key, cells=[from_left(str(text), room) for text in key.cells])
        if key.width > room
        else key
        for key in keys
    ]
    others = [column for column in columns if not column.is_key]
    parts = (
        "".join(_drawn([*keys, *part], printer)) for part in _parts(keys, others, printer.width)
    )
    return Preformatted("\n".join(parts).removesuffix("\n"))


def labels_of_batch(labels: Sequence[Sequence[str]] | None, batch: int) -> Sequence[str] | None:
    """The tokens of a batch, of rows of them for all batches or for each; None for none."""
    if labels is None or (len(labels) > 1 and batch >= len(labels)):
        return None
    return labels[batch if len(labels) > 1 else 0]


def record_table(
    columns: Sequence[Column], records: Sequence[dict[str, Any]], printer: Printer, *, digits: int
) -> Preformatted:
    """A table with a line a record, numbers to the right.

    Columns that tables leave out, and those that hold nothing in any record, are not shown.
    """
    built: list[TableColumn] = []
    for column in columns:
        values = [record[column.key] for record in records]
        if column.heading is None or all(value is None for value in values):
            continue
        unit = f" ({column.unit})" if column.unit else ""
        built.append(
            TableColumn(
                f"{column.heading}{unit}",
                [cell(value, digits) for value in values],
                is_text=any(isinstance(value, str | list) for value in values),
                is_key=column.is_key and all(before.is_key for before in built),
                is_beside=column.is_beside,
            )
        )
    return table(built, printer)


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
    return shown(str(value))


def scale_text(scale: float | tuple[float, ...]) -> str:
    """The scale of a problem: one number, or one per head, cut short where they are many."""
    if not isinstance(scale, tuple):
        return f"{scale:.6g}"
    return ", ".join(f"{one:.6g}" for one in scale[:8]) + (", …" if len(scale) > 8 else "")


def decimals(value: float | None, digits: int) -> str:
    """A number for a table: fixed decimals, scientific where those would hide it."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    size = abs(value)
    hidden = digits >= SCIENTIFIC_FROM and size < 0.5 * 10.0**-digits
    if size and (size >= 1e7 or hidden):
        return f"{value:.{max(digits - 2, 1)}e}"
    return f"{round(value, digits) + 0.0:.{digits}f}"  # + 0.0 turns −0 into 0


def text_width(text: str) -> int:
    """Columns of the terminal that a text takes."""
    return len(text) if text.isascii() else cell_len(text)


def chosen_words(chosen: Sequence[Sequence[int] | None]) -> list[str]:
    """Which batches and heads are looked at alone, in words; none for all."""
    named = zip((("batch", "batches"), ("head", "heads")), chosen, strict=True)
    return [
        f"{forms[len(indices) > 1]} {', '.join(map(str, indices[:8]))}" + ", …" * (len(indices) > 8)
        for forms, indices in named
        if indices is not None
    ]


def positions_above(edges: Sequence[int], wide: int, every: int, room: int) -> str:
    """A line above a picture: where every so many-th of its columns begins, as there is room.

    Args:
        edges: the position that each column begins with.
        wide: characters of a column.
        every: columns from one name to the next.
        room: of the line; a name that it would cut reads as another number.
    """
    line = ""
    for column in range(0, len(edges), every):
        longer = line.ljust(wide * column) + str(edges[column])
        if wide * column >= len(line) + (1 if line else 0) and len(longer) <= room:
            line = longer
    return line


def shortened(text: str, width: int) -> str:
    """The text cut to a width on the terminal, with an ellipsis."""
    if text_width(text) <= width:
        return text
    return set_cell_size(text, max(0, width - 1)).rstrip() + "…"


def from_left(text: str, width: int) -> str:
    """The end of a name that is too long: names of layers differ there."""
    if text_width(text) <= width:
        return text
    start = next(at for at in range(1, len(text) + 1) if text_width(text[at:]) < width)
    return "…" + text[start:]


def _parts(
    keys: Sequence[TableColumn], others: Sequence[TableColumn], width: int
) -> list[list[TableColumn]]:
    """The columns in runs that fit beside the keys, a run holds one, with those beside it."""
    lead = sum(key.width + GAP for key in keys)
    parts: list[list[TableColumn]] = [[]]
    used = lead
    for column, *beside in _together(others):
        wide = sum(each.width + GAP for each in (column, *beside))
        if parts[-1] and used + wide - GAP > width:
            parts.append([])
            used = lead
        parts[-1] += [column, *beside]
        used += wide
    return parts


def _together(columns: Sequence[TableColumn]) -> Iterator[list[TableColumn]]:
    """Each column with those that are to stay beside it."""
    starts = [at for at, column in enumerate(columns) if not (at and column.is_beside)]
    for start, stop in pairwise([*starts, len(columns)]):
        yield list(columns[start:stop])


def _drawn(columns: Sequence[TableColumn], printer: Printer) -> Iterator[str]:
    """The text of one part; only a column that does not fit beside the keys alone is wrapped."""
    widths = [column.width for column in columns]
    widths[-1] = min(widths[-1], max(GAP, printer.width - sum(widths[:-1]) - GAP * len(widths[1:])))
    lines = list(zip(*(column.cells for column in columns), strict=True))
    for start in range(0, max(1, len(lines)), LINES_AT_ONCE):
        ruled = printer.on_terminal and start == 0
        drawing = Table(
            box=RULE if ruled else None,
            show_header=start == 0,
            show_edge=False,
            pad_edge=False,
            padding=(0, GAP - 1 if ruled else GAP, 0, 0),  # a box has a column of its own between
        )
        for column, width in zip(columns, widths, strict=True):
            drawing.add_column(
                Text(column.heading),
                justify="left" if column.is_text else "right",
                width=width,
                overflow="fold",
            )
        for line in lines[start : start + LINES_AT_ONCE]:
            drawing.add_row(*(Text(text) if isinstance(text, str) else text for text in line))
        yield printer.rendered(drawing)
