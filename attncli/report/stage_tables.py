"""Stages as tables for eyes: weights shaded, masked cells as dots, long matrices cut short."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attncli.report.grid import aligned, shortened, text_width
from attncli.report.numbers import decimals
from attncli.report.prose import heading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from rich.console import RenderableType
    from rich.text import Text

    from attncli.attention.stage_statistics import StageResult
    from attncli.report.printer import Printer

MASKED = "·"
GAP = "…"

# On a terminal: rows of one matrix, and matrices of one stage, before the middle is left out.
TERMINAL_ROWS = 16
TERMINAL_MATRICES = 4

# What a terminal shows of a token above its column; wider cells leave room for more.
LABEL_WIDTH = 6

# Shading of weights from 0 to 1, dark to bright; the text on it stays legible on both ends.
_DARK, _BRIGHT = (18, 22, 40), (46, 134, 222)


@dataclass(frozen=True, slots=True)
class Axes:
    """Names of rows and columns.

    Attributes:
        rows: a name for each selected query.
        keys: a name for each key.
        labels: a token for each key; None for none.
        batches, heads: the selected indices.
        kv_heads: the key and value heads that the selected heads use.
    """

    rows: Sequence[str]
    keys: Sequence[str]
    labels: Sequence[str] | None
    batches: Sequence[int]
    heads: Sequence[int]
    kv_heads: Sequence[int]


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
            yield f"  {_place(result, batch, head, axes)}"
        yield from _matrix(result, batch, head, axes, view)
    if limit < len(matrices):
        gap = view.printer.sign(GAP, "...")
        left = len(matrices) - limit
        yield f"  {gap} {left} of {len(matrices)} heads not shown: --head-index, --batch-index"
    yield ""


def _place(result: StageResult, batch: int, head: int, axes: Axes) -> str:
    """Which batch and head a matrix is of."""
    where = f"batch {axes.batches[batch]}"
    if result.stage == "projected":
        return f"{where}, all heads"
    if result.stage in ("k", "v"):
        return f"{where}, key head {axes.kv_heads[head]}"
    return f"{where}, head {axes.heads[head]}"


def summary_table(results: Sequence[StageResult], view: View) -> RenderableType:
    """One line a stage: shape, extremes, mean and deviation, and what is masked or not finite."""
    from attncli.report.grid import GridColumn, grid

    found = [result.statistics for result in results]
    columns = [
        GridColumn("stage", [str(result.stage) for result in results], True, True),
        GridColumn("shape", [str(result.shape) for result in results], True),
    ]
    for heading_, values in (
        ("min", [one.minimum if one.count else None for one in found]),
        ("max", [one.maximum if one.count else None for one in found]),
        ("mean", [one.mean for one in found]),
        ("std", [one.std for one in found]),
    ):
        columns.append(GridColumn(heading_, [decimals(value, view.digits) for value in values]))
    for heading_, counts in (
        ("masked", [result.n_masked for result in results]),
        ("nan", [one.n_nan for one in found]),
        ("inf", [one.n_posinf for one in found]),
        ("-inf", [one.n_neginf for one in found]),
    ):
        if heading_ == "masked" or any(counts):
            columns.append(GridColumn(heading_, list(map(str, counts))))
    return grid(columns, view.printer)


def _matrix(
    result: StageResult, batch: int, head: int, axes: Axes, view: View
) -> Iterator[RenderableType]:
    """One head's matrix, of which a terminal shows the rows and columns at the ends."""
    drawn = _Matrix.of(result, batch, head, axes, view)
    rows, columns = result.shape[2:]
    shown_rows = _ends(rows, TERMINAL_ROWS if view.printer.on_terminal else rows)
    real_rows = [row for row in shown_rows if row is not None]
    lead = max((text_width(drawn.row_names[row]) for row in real_rows), default=1)
    shown, widths = drawn.fitting(real_rows, view.printer.width - lead - 2 - drawn.extra_width)
    yield drawn.text(shown_rows, shown, widths, lead)
    yield from _cut_note(rows, shown_rows, "rows", "--rows, or --format csv", view)
    yield from _cut_note(columns, shown, "columns", "--format csv, or a wider terminal", view)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One matrix, its names, and how its cells look.

    Attributes:
        row_names: a name a row.
        headings: one or two lines of names above the columns: positions, and tokens.
        cell: (row, column) → text and style.
        real: which rows are queries and not padding; None where all are.
        extra: a heading and row → text for a last column; None for none.
    """

    row_names: Sequence[str]
    headings: Sequence[Sequence[str]]
    cell: Callable[[int, int], tuple[str, str]]
    real: Sequence[bool] | None
    extra: tuple[str, Callable[[int], str]] | None
    printer: Printer

    @classmethod
    def of(cls, result: StageResult, batch: int, head: int, axes: Axes, view: View) -> _Matrix:
        rows, columns = result.shape[2:]
        positions = [str(column) for column in range(columns)]
        labelled = result.stage.over_keys and axes.labels is not None
        row_names = axes.rows
        if result.stage in ("k", "v"):
            row_names = axes.keys
        return cls(
            row_names if len(row_names) == rows else [str(row) for row in range(rows)],
            [positions, axes.labels] if labelled and axes.labels else [positions],
            _painter(result, batch, head, view),
            None if result.real is None else result.real[batch].tolist(),
            _extra_column(result, batch, head, view),
            view.printer,
        )

    @property
    def extra_width(self) -> int:
        return 0 if self.extra is None else len(self.extra[0]) + 2

    def fitting(self, rows: Sequence[int], room: int) -> tuple[list[int | None], list[int]]:
        """The columns that the room has place for, None for the gap, and the width of each."""
        count = len(self.headings[0])
        if room >= 1 + count * 2:  # else not even single digits fit
            widths = [self._width(rows, column) for column in range(count)]
            if sum(widths) + count <= room:
                return list(range(count)), widths
        ends = ([], [])  # type: tuple[list[int], list[int]]
        widths_of: dict[int, int] = {}
        left = room - 2
        for turn in range(count):
            last = turn % 3 == 1
            column = count - 1 - len(ends[1]) if last else len(ends[0])
            width = self._width(rows, column)
            if left < width + 1 and turn >= 2:
                break
            left -= width + 1
            widths_of[column] = width
            ends[last].append(column)
        shown = [*ends[0], None, *reversed(ends[1])]
        return shown, [1 if column is None else widths_of[column] for column in shown]

    def _width(self, rows: Sequence[int], column: int) -> int:
        label = max(text_width(names[column]) for names in self.headings)
        if self.printer.on_terminal:
            label = min(label, max(LABEL_WIDTH, len(self.headings[0][column])))
        cells = [len(self.cell(row, column)[0]) for row in rows if self._is_real(row)]
        return max([label, *cells])

    def _is_real(self, row: int) -> bool:
        return self.real is None or self.real[row]

    def text(
        self,
        rows: Sequence[int | None],
        columns: Sequence[int | None],
        widths: Sequence[int],
        lead: int,
    ) -> Text:
        """The whole matrix."""
        from rich.text import Text

        gap = self.printer.sign(GAP, ":")
        text = Text()
        for line, names in enumerate(self.headings):
            text.append(" " * (lead + 2), style="")
            for column, width in zip(columns, widths, strict=True):
                name = gap if column is None else shortened(names[column], width)
                text.append(" " + aligned(name, width), style=self._dim)
            if self.extra is not None and line == 0:
                text.append("  " + self.extra[0], style=self._dim)
            text.append("\n")
        for row in rows:
            self._append_row(text, row, columns, widths, lead, gap)
        text.rstrip()
        return text

    def _append_row(
        self,
        text: Text,
        row: int | None,
        columns: Sequence[int | None],
        widths: Sequence[int],
        lead: int,
        gap: str,
    ) -> None:
        name = gap if row is None else self.row_names[row]
        text.append("  " + aligned(name, lead), style=self._dim)
        if row is not None and not self._is_real(row):
            text.append("  (padding)\n", style=self._dim)
            return
        for column, width in zip(columns, widths, strict=True):
            cell, style = (gap, "") if row is None or column is None else self.cell(row, column)
            text.append(" " + aligned(cell, width), style=style if self.printer.colored else "")
        if self.extra is not None:
            last = gap if row is None else self.extra[1](row)
            text.append("  " + aligned(last, len(self.extra[0])))
        text.append("\n")

    @property
    def _dim(self) -> str:
        return "dim" if self.printer.colored else ""


def _painter(
    result: StageResult, batch: int, head: int, view: View
) -> Callable[[int, int], tuple[str, str]]:
    """A function from (row, column) to the cell's text and style."""
    assert result.values is not None
    values = result.values[batch, head].tolist()
    visible = None if result.visible is None else result.visible[batch, head].tolist()
    hides = result.stage in ("masked", "weights")
    shades = result.stage == "weights"
    masked = view.printer.sign(MASKED, ".")

    def cell(row: int, column: int) -> tuple[str, str]:
        seen = visible is None or visible[row][column]
        if not seen and hides:
            return masked, "dim"
        value = values[row][column]
        style = shade(value) if shades else "" if seen else "dim"
        return decimals(value, view.digits), style

    return cell


def shade(weight: float) -> str:
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


def _ends(length: int, limit: int) -> list[int | None]:
    """Indices from both ends, None for the gap between, at most `limit` in all."""
    if length <= limit:
        return list(range(length))
    tail = (limit - 1) // 3
    head = limit - 1 - tail
    return [*range(head), None, *range(length - tail, length)]


def _cut_note(
    length: int, shown: Sequence[int | None], what: str, advice: str, view: View
) -> Iterator[RenderableType]:
    hidden = length - sum(index is not None for index in shown)
    if hidden:
        gap = view.printer.sign(GAP, "...")
        yield f"  {gap} {hidden} of {length} {what} not shown: {advice}"
