"""A mask as a picture of characters: full for visible, dot for hidden, shades between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType

from attncli.attention.masks.audit import CellCounts
from attncli.report.printer import Printer

# Share of visible cells in a rectangle: none, up to a third, two thirds, less than all, all.
SHADES = ("·", "░", "▒", "▓", "█")
MOST_ROWS = 32
MOST_COLUMNS = 64
LABEL_WIDTH = 15


def picture_size(printer: Printer) -> tuple[int, int]:
    """Rows and columns of characters that a picture may take."""
    columns = min(MOST_COLUMNS, printer.width - LABEL_WIDTH - 4)
    return min(MOST_ROWS, max(8, printer.height - 12)), max(8, columns)


def picture(
    counts: CellCounts,
    labels: Sequence[str] | None,
    printer: Printer,
    *,
    offset: int = 0,
) -> Iterator[RenderableType]:
    """One line of characters per row of rectangles, positions or labels at the edges.

    Args:
        counts: visible cells of each rectangle.
        labels: a token for each position on the key axis; None for none.
        printer: where it goes.
        offset: position of query 0.
    """
    if not counts.counts.size:
        yield "no cells"
        return
    names = [
        _row_name(counts, row, labels, offset)[:LABEL_WIDTH] for row in range(len(counts.counts))
    ]
    lead = max(map(len, names), default=0)
    # Characters are twice as high as wide: two for a cell make a square, where they fit.
    room = min(MOST_COLUMNS, printer.width - LABEL_WIDTH - 4)
    wide = 2 if counts.sizes.max() == 1 and 2 * counts.counts.shape[1] <= room else 1
    yield printer.styled((" " * (lead + 1) + _column_scale(counts, wide), "dim"))
    for row in range(len(counts.counts)):
        line = [(f"{names[row]:>{lead}} ", "dim")]
        for column in range(counts.counts.shape[1]):
            mark = _mark(int(counts.counts[row, column]), int(counts.sizes[row, column]))
            if mark == SHADES[0]:
                line.append((f"{mark:<{wide}}", "dim"))
            else:
                line.append((mark * wide, "rgb(46,134,222)"))
        yield printer.styled(*line[:-1], (line[-1][0].rstrip(), line[-1][1]))
    if counts.sizes.size and counts.sizes.max() > 1:
        yield (
            f"{'':>{lead}} each character stands for up to {counts.sizes.max()} cells: "
            f"{SHADES[0]} none visible, {SHADES[1]}{SHADES[2]}{SHADES[3]} some, {SHADES[4]} all"
        )


def _mark(count: int, size: int) -> str:
    if count in (0, size):
        return SHADES[4 if count and size else 0]
    return SHADES[1 + min(2, 3 * count // size)]


def _row_name(counts: CellCounts, row: int, labels: Sequence[str] | None, offset: int) -> str:
    first, stop = counts.query_edges[row], counts.query_edges[row + 1]
    if stop - first > 1:
        return f"{first}–{stop - 1}"
    position = int(first) + offset
    if labels is not None and 0 <= position < len(labels):
        return f"{first} {labels[position]}"
    return str(first)


def _column_scale(counts: CellCounts, wide: int) -> str:
    """Key positions above the picture, as many as have room."""
    edges: Any = counts.key_edges[:-1]
    scale = ""
    for column, edge in enumerate(edges.tolist()):
        text = str(edge)
        free = wide * column >= len(scale) + (1 if scale else 0)
        if free and column % 5 == 0:
            scale = scale.ljust(wide * column) + text
    return scale
