"""Columns of text side by side, split where they do not fit: the one layout of every table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

    from attncli.report.printer import Printer

GAP = "  "


@dataclass(frozen=True, slots=True)
class GridColumn:
    """One column.

    Attributes:
        heading: its name.
        cells: a text a line.
        is_text: whether it stands to the left; numbers stand to the right.
        is_key: whether it names the line, and comes again in each part of a split table.
    """

    heading: str
    cells: Sequence[str]
    is_text: bool = False
    is_key: bool = False

    @property
    def width(self) -> int:
        """Columns of the terminal that it takes."""
        return max(map(text_width, (self.heading, *self.cells)))


def grid(columns: Sequence[GridColumn], printer: Printer) -> RenderableType:
    """The columns as one text; on a terminal in as many parts as its width asks for."""
    keys = [column for column in columns if column.is_key]
    limit = printer.width // max(1, len(keys))
    keys = [_shortened(key, max(12, limit - len(GAP) - 12), printer) for key in keys]
    others = [column for column in columns if not column.is_key]
    texts: list[tuple[str, str]] = []
    for part in _parts(keys, others, printer.width):
        if texts:
            texts.append(("\n\n", ""))
        texts += _lines([*keys, *part])
    return printer.styled(*texts)


def text_width(text: str) -> int:
    """Columns of the terminal that a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def aligned(text: str, width: int, *, left: bool = False) -> str:
    """The text filled up with spaces to a width on the terminal."""
    space = " " * (width - text_width(text))
    return text + space if left else space + text


def shortened(text: str, width: int) -> str:
    """The text cut to a width on the terminal, with an ellipsis."""
    if text_width(text) <= width:
        return text
    from rich.cells import set_cell_size

    return set_cell_size(text, max(0, width - 1)).rstrip() + "…"


def _shortened(column: GridColumn, width: int, printer: Printer) -> GridColumn:
    if not printer.on_terminal or column.width <= width:
        return column
    cells = ["…" + text[1 - width :] if len(text) > width else text for text in column.cells]
    return GridColumn(column.heading, cells, column.is_text, column.is_key)


def _parts(
    keys: Sequence[GridColumn], others: Sequence[GridColumn], width: int
) -> list[list[GridColumn]]:
    """The columns in runs that fit beside the keys, one a run at least."""
    lead = sum(key.width + len(GAP) for key in keys)
    parts: list[list[GridColumn]] = [[]]
    used = lead
    for column in others:
        if parts[-1] and used + column.width > width:
            parts.append([])
            used = lead
        parts[-1].append(column)
        used += column.width + len(GAP)
    return parts


def _lines(columns: Sequence[GridColumn]) -> Iterator[tuple[str, str]]:
    """The headings, and a line for each row of cells, with their styles."""
    widths = [column.width for column in columns]
    lines = zip(*(column.cells for column in columns), strict=True)
    headings = [column.heading for column in columns]
    for number, cells in enumerate([headings, *lines]):
        placed = zip(cells, widths, columns, strict=True)
        line = GAP.join(aligned(cell, width, left=c.is_text) for cell, width, c in placed)
        yield ("\n" if number else "") + line.rstrip(), "bold" if number == 0 else ""
