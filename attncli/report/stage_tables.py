"""Stages as tables for eyes: weights shaded, masked cells as dots, long matrices cut short."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attncli.report.numbers import decimals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from rich.console import RenderableType
    from rich.table import Table

    from attncli.attention.stage_statistics import StageResult
    from attncli.report.printer import Printer

PROSE_WIDTH = 88
MASKED = "·"
GAP = "…"

# On a terminal: rows of one matrix, and matrices of one stage, before the middle is left out.
TERMINAL_ROWS = 16
TERMINAL_MATRICES = 4

# Shading of weights from 0 to 1, dark to bright; the text on it stays legible on both ends.
_DARK, _BRIGHT = (18, 22, 40), (46, 134, 222)


@dataclass(frozen=True, slots=True)
class Axes:
    """Names of rows and columns.

    Attributes:
        rows: a name for each selected query.
        keys: a name for each key.
        batches, heads: the selected indices.
    """

    rows: Sequence[str]
    keys: Sequence[str]
    batches: Sequence[int]
    heads: Sequence[int]


@dataclass(frozen=True, slots=True)
class View:
    """How to draw matrices.

    Attributes:
        printer: whose width, colour and terminal decide what is cut.
        digits: decimals.
        entropies: for the weights a further column: heading, and a value per
            (batch, head, row), None for empty rows; None for no such column.
    """

    printer: Printer
    digits: int
    entropies: tuple[str, NDArray[np.object_]] | None = None


def stage_tables(
    result: StageResult, title: str, axes: Axes, view: View
) -> Iterator[RenderableType]:
    """The matrices of one stage under its title, or a line that says where its values are."""
    yield heading(f"{title}   {result.shape}", view.printer)
    if result.values is None:
        yield "  not shown" if 0 not in result.shape else "  no cells"
        yield ""
        return
    batches, heads = result.shape[:2]
    matrices = [(batch, head) for batch in range(batches) for head in range(heads)]
    limit = TERMINAL_MATRICES if view.printer.on_terminal else len(matrices)
    for batch, head in matrices[:limit]:
        if len(matrices) > 1:
            named = axes.heads if len(axes.heads) == heads else range(heads)
            yield f"  batch {axes.batches[batch]}, head {named[head]}"
        yield from _matrix(result, batch, head, axes, view)
    if limit < len(matrices):
        yield f"  {GAP} {len(matrices) - limit} more heads: --head-index, --batch-index"
    yield ""


def heading(text: str, printer: Printer) -> RenderableType:
    """A line that stands out where there is colour."""
    from rich.text import Text

    return Text(text, style="bold" if printer.colored else "")


def paragraph(text: str, printer: Printer, *, style: str = "", lead: str = "") -> RenderableType:
    """Prose, indented, in lines that the eye can follow however wide the output is."""
    from rich.text import Text

    indent = "   "
    wrapped = textwrap.fill(
        text,
        min(printer.width, PROSE_WIDTH),
        initial_indent=indent + lead,
        subsequent_indent=indent + " " * len(lead),
        break_long_words=False,
    )
    return Text(wrapped, style=style if printer.colored else "")


def summary_table(results: Sequence[StageResult], view: View) -> Table:
    """One line a stage: shape, extremes, mean and deviation, what is masked or not finite."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("stage", "shape", "min", "max", "mean", "std", "masked", "nan", "inf", "-inf"):
        table.add_column(name, justify="left" if name in ("stage", "shape") else "right")
    for result in results:
        found = result.statistics
        ends = (found.minimum, found.maximum) if found.count else (None, None)
        numbers = [decimals(number, view.digits) for number in (*ends, found.mean, found.std)]
        counts = (result.n_masked, found.n_nan, found.n_posinf, found.n_neginf)
        table.add_row(str(result.stage), str(result.shape), *numbers, *map(str, counts))
    return table


def _matrix(
    result: StageResult, batch: int, head: int, axes: Axes, view: View
) -> Iterator[RenderableType]:
    from rich.table import Table

    rows, columns = result.shape[2:]
    names = axes.keys if result.stage.over_keys else [str(column) for column in range(columns)]
    cell = _painter(result, batch, head, view)
    row_names = axes.rows if len(axes.rows) == rows else [str(row) for row in range(rows)]
    shown_rows = _ends(rows, TERMINAL_ROWS if view.printer.on_terminal else rows)
    extra = _extra_column(result, batch, head, view)
    shown = _ends(columns, _fitting(names, row_names, extra is not None, view))
    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 1), header_style="dim")
    table.add_column("", justify="right", style="dim", no_wrap=True)
    for column in shown:
        name = GAP if column is None else names[column]
        table.add_column(name, justify="right", no_wrap=True, min_width=view.digits + 3)
    if extra is not None:
        table.add_column(extra[0], justify="right", style="italic", no_wrap=True)
    for row in shown_rows:
        cells = [GAP if row is None or c is None else cell(row, c) for c in shown]
        last = [] if extra is None else [GAP if row is None else extra[1](row)]
        table.add_row(GAP if row is None else row_names[row], *cells, *last)
    yield table
    yield from _cut_note(rows, shown_rows, "rows", "--rows")
    yield from _cut_note(columns, shown, "columns", "--format csv, or a wider terminal")


def _painter(
    result: StageResult, batch: int, head: int, view: View
) -> Callable[[int, int], RenderableType]:
    """A function from (row, column) to the cell's text."""
    from rich.text import Text

    assert result.values is not None
    values = result.values[batch, head].tolist()
    visible = None if result.visible is None else result.visible[batch, head].tolist()
    real = None if result.real is None else result.real[batch].tolist()
    hides = result.stage in ("masked", "weights")
    shades = result.stage == "weights" and view.printer.colored

    def cell(row: int, column: int) -> RenderableType:
        if real is not None and not real[row]:
            return Text("pad", style="dim")
        seen = visible is None or visible[row][column]
        if not seen and hides:
            return Text(MASKED, style="dim")
        text = decimals(values[row][column], view.digits)
        if shades:
            return Text(text, style=_shade(values[row][column]))
        return Text(text, style="" if seen else "dim")

    return cell


def _shade(weight: float) -> str:
    share = min(max(weight, 0.0), 1.0) if weight == weight else 0.0
    mixed = [round(d + (b - d) * share**0.5) for d, b in zip(_DARK, _BRIGHT, strict=True)]
    return f"rgb(255,255,255) on rgb({mixed[0]},{mixed[1]},{mixed[2]})"


def _extra_column(
    result: StageResult, batch: int, head: int, view: View
) -> tuple[str, Callable[[int], str]] | None:
    if result.stage != "weights" or view.entropies is None:
        return None
    name, values = view.entropies
    column = values[batch, head]
    return name, lambda row: decimals(column[row], view.digits)


def _fitting(names: Sequence[str], row_names: Sequence[str], extra: bool, view: View) -> int:
    """How many columns the width has room for."""
    lead = max(map(len, row_names), default=1) + (view.digits + 14 if extra else 0)
    each = max(view.digits + 4, max(map(len, names), default=1) + 1)
    return max(2, (view.printer.width - lead - 2) // each)


def _ends(length: int, limit: int) -> list[int | None]:
    """Indices from both ends, None for the gap between, at most `limit` in all."""
    if length <= limit:
        return list(range(length))
    tail = (limit - 1) // 3
    head = limit - 1 - tail
    return [*range(head), None, *range(length - tail, length)]


def _cut_note(
    length: int, shown: Sequence[int | None], what: str, advice: str
) -> Iterator[RenderableType]:
    hidden = length - sum(index is not None for index in shown)
    if hidden:
        yield f"  {GAP} {hidden} of {length} {what} not shown: {advice}"
