"""Stages as records and as tables for eyes.

JSON holds them with their statistics, CSV and NDJSON cell by cell; tables shade weights, show
masked cells as dots, and cut long matrices short.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

from attncli.attention.options import Stage
from attncli.attention.problem import Cost, Problem
from attncli.attention.stages import Block, Selection, StageResult, StageStatistics
from attncli.columns import Column, columns_of
from attncli.files.text import count_text, shown, size_text
from attncli.report import ColourScale, Unit
from attncli.report.explanation import formula
from attncli.report.palette import Colours
from attncli.report.printer import Printer, csv_field, heading, shortest
from attncli.report.shading import Shading, style_on
from attncli.report.table import (
    TableColumn,
    decimals,
    labels_of_batch,
    scale_text,
    shortened,
    table,
    text_width,
)
from attncli.report.words import ENGLISH, Words

CELLS = (
    Column("group", None, description="of several groups, its name", holds=str, always=False),
    Column("stage", None, description="scores, scaled, …, weights, output", holds=str),
    Column("batch", None, description="its index", holds=int),
    Column("head", None, description="its index", holds=int),
    Column(
        "row", None, description="index of the query, or of the key in stages k and v", holds=int
    ),
    Column("column", None, description="index of the key, or of the feature", holds=int),
    Column("value", None, description="in the dtype of the arithmetic", holds=float),
)
STAGE = (
    Column(
        "shape",
        None,
        description="(batches, heads, rows, columns) of the selection",
        holds=tuple[int, int, int, int],
    ),
    *columns_of(StageStatistics),
    Column(
        "values",
        None,
        description="by batch, head, row and column; null where they are too many, of padded "
        "queries and where not finite",
        holds=list[list[list[list[float]]]] | None,
    ),
    Column(
        "values_omitted",
        None,
        description="true where all are left out since they are too many",
        holds=bool,
        always=False,
    ),
)


def stage_record(result: StageResult) -> dict[str, Any]:
    """The JSON record of one stage; `values` is null and `values_omitted` true above the limit."""
    found = result.statistics
    record: dict[str, Any] = {"shape": list(result.shape), "n_masked": found.n_masked}
    record |= asdict(found) | {"values": _nested(result)}
    if record["values"] is None:
        record["values_omitted"] = True
    return record


def csv_cells(blocks: Iterable[Block], group: str | None) -> Iterator[str]:
    """Lines of `stage,batch,head,row,column,value`, after `group` where one is given."""
    lead = "" if group is None else f"{_quoted(group)},"
    for block in blocks:
        for at, row in _real_rows(block):
            texts = map(csv_field, shortest(at).tolist())
            start = f"{lead}{block.stage},{block.batch},{block.head},{row},"
            yield "".join(f"{start}{column},{text}\n" for column, text in enumerate(texts))


def ndjson_cells(blocks: Iterable[Block], group: str | None) -> Iterator[str]:
    """The same as records, one a line."""
    lead = {} if group is None else {"group": group}
    for block in blocks:
        for at, row in _real_rows(block):
            place = lead | {"stage": block.stage, "batch": block.batch, "head": block.head}
            start = json.dumps(place | {"row": row}, ensure_ascii=False)[:-1]
            finite = np.isfinite(at).tolist()
            for column, value in enumerate(shortest(at).tolist()):
                text = repr(value) if finite[column] else "null"
                yield f'{start}, "column": {column}, "value": {text}}}\n'


def _real_rows(block: Block) -> Iterator[tuple[np.ndarray[Any, Any], int]]:
    values = block.values.numpy()
    for place, (row, real) in enumerate(zip(block.rows, block.real.tolist(), strict=True)):
        if real:
            yield values[place], row


def _quoted(text: str) -> str:
    if any(character in text for character in ',"\r\n'):
        return '"' + text.replace('"', '""') + '"'
    return text


def _nested(result: StageResult) -> Any:
    """Values as nested lists (batches, heads, rows, columns); null where not finite or padded."""
    if result.values is None:
        return np.empty(result.shape).tolist() if 0 in result.shape else None
    array = result.values.numpy()
    kept = np.isfinite(array)
    if result.real is not None:
        kept &= result.real.numpy()[:, None, :, None]
    values = shortest(array).astype(object)
    values[~kept] = None
    return values.tolist()


MASKED = "·"
GAP = "…"
DIM = Style(dim=True)

# On a terminal: rows of one matrix, and matrices of one stage, before the middle is left out.
TERMINAL_ROWS = 16
TERMINAL_MATRICES = 4

# Of a matrix too large to show: rows from both ends, and how wide they are anywhere.
CORNER_ROWS = 12
CORNER_WIDTH = 100

COLUMNS_ADVICE = "--columns, --format csv, or a wider terminal"

# What a terminal shows of a token above its column; wider cells leave room for more.
LABEL_WIDTH = 6
# Rich holds half a kilobyte a cell until it has drawn a table: long ones are drawn in stretches.
CELLS_AT_ONCE = 16_384


@dataclass(frozen=True, slots=True)
class StageView:
    """How the stages of one problem are drawn."""

    problem: Problem  # what was computed
    selection: Selection  # for which batches, heads and rows
    keys: Sequence[int]  # which of them to show
    # A token per position, one row of them for all batches or one per batch; None for none.
    labels: Sequence[Sequence[str]] | None
    printer: Printer  # whose width, colour and terminal decide what is cut
    digits: int  # decimals
    unit: Unit = Unit.BITS  # of the entropy beside the weights
    # In nats, (batches, heads, rows), None for rows that see no key; None where the weights are not
    # shown.
    entropies: NDArray[np.object_] | None = None
    scale: ColourScale = ColourScale.LOG  # of the colours of weights
    skip_first: int = 0  # columns at the beginning that are left out of the colours

    def shading(self, stage: Stage, values: NDArray[np.float64]) -> Shading:
        """How the numbers of a stage, (…, columns), become colours."""
        is_weights = stage is Stage.WEIGHTS
        skipped = self.skip_first if stage.over_keys else 0
        scale = self.scale if is_weights else None
        few = self.printer.has_few_colors
        return Shading.of(values, scale, self.problem.sizes.k_len, skipped, few=few)

    def tokens(self, batch: int, length: int) -> list[str] | None:
        """Labels that can be printed, where there is one per position."""
        labels = labels_of_batch(self.labels, self.selection.batches[batch])
        if labels is None or len(labels) != length:
            return None
        return [shown(label, 40) for label in labels]

    def names(self, batch: int, indices: Sequence[int], length: int) -> list[str]:
        """Positions along an axis, after their labels where there is one for each."""
        tokens = self.tokens(batch, length)
        return [f"{tokens[index]} {index}" if tokens else str(index) for index in indices]


def problem_line(problem: Problem, source: str | None, words: Words = ENGLISH) -> str:
    """One line that says what is computed: sizes, scale, what is hidden, arithmetic."""
    sizes, t = problem.sizes, words.text
    parts = [] if source is None else [source]
    parts.append(f"B={sizes.batch} H={sizes.heads} S_q={sizes.q_len} S_k={sizes.k_len}")
    if problem.kv_heads != sizes.heads:
        parts[-1] += f" H_kv={problem.kv_heads}"
    if problem.given is None:
        parts[-1] += f" d_k={problem.dk}" + ("" if problem.dv is None else f" d_v={problem.dv}")
        parts.append(t("opening.scale", scale=scale_text(problem.scale)))
    if not (problem.mask.hides or problem.mask.has_bias):
        parts.append(t("opening.nomask"))
    dtype = str(problem.dtype).removeprefix("torch.")
    parts.append(t("opening.computed", dtype=dtype, device=problem.device))
    return " · ".join(parts)


def cost_line(cost: Cost) -> str:
    """What this costs, and what n×n would."""
    operations = cost.scores_operations + cost.output_operations
    visible = cost.visible_operations
    seen = "" if visible == operations else f", {count_text(visible)} of them for visible pairs"
    return (
        f"cost: {count_text(operations)} operations (scores 2·S_q·S_k·d_k, output "
        f"2·S_q·S_k·d_v){seen}; S_q×S_k matrices of all heads: {size_text(cost.matrix_bytes)}, "
        f"streamed: {size_text(cost.streamed_bytes)}"
    )


def stage_tables(
    result: StageResult, view: StageView, *, repeats: bool = False
) -> Iterator[RenderableType]:
    """The matrices of one stage under its formula.

    Args:
        result: the stage, with its values where it has cells.
        view: how to draw it.
        repeats: whether its numbers are those of the stage before, and need not come again.
    """
    yield _title(result, view)
    if 0 in result.shape:
        yield "  no cells"
    batches, heads = result.shape[:2]
    matrices = [(batch, head) for batch in range(batches) for head in range(heads)]
    matrices = [] if repeats or 0 in result.shape else matrices
    limit = TERMINAL_MATRICES if view.printer.on_terminal else len(matrices)
    for batch, head in matrices[:limit]:
        yield from _place_line(result, batch, head, view)
        yield from _matrix(result, batch, head, view)
    if limit < len(matrices):
        gap = view.printer.sign(GAP, "...")
        left = len(matrices) - limit
        yield f"  {gap} {left} of {len(matrices)} heads not shown: --head-index, --batch-index"
    yield ""


def corner_tables(
    whole: StageResult, corner: StageResult, view: StageView
) -> Iterator[RenderableType]:
    """The first and last rows and columns of the first matrix of a stage too large to show.

    Args:
        whole: the stage.
        corner: the same of the rows at both ends, which `view` has for its selection.
        view: how to draw it.
    """
    yield _title(whole, view)
    yield from _place_line(corner, 0, 0, view)
    rows = corner.shape[2]
    shown: list[int | None] = _ends(rows, CORNER_ROWS + 1)
    if rows < whole.shape[2]:
        shown.insert(rows - CORNER_ROWS // 3, None)
    matrix = _Matrix.of(corner, 0, 0, view)
    room = min(view.printer.width, CORNER_WIDTH)
    widths = matrix.fitting([row for row in shown if row is not None], room)
    yield matrix.drawn(shown, widths, with_names=True)
    yield ""


def _title(result: StageResult, view: StageView) -> RenderableType:
    title = formula(view.problem, result.stage)
    if result.stage is Stage.MASKED:
        hides = f"−∞ ({MASKED}) where the query may not see the key"
        title += f", {hides}" if result.statistics.n_masked else ", nothing hidden"
    return heading(f"{title}   {result.shape}")


def _place_line(
    result: StageResult, batch: int, head: int, view: StageView
) -> Iterator[RenderableType]:
    """Which matrix it is, where the problem has several."""
    if view.problem.sizes.batch * view.problem.sizes.heads > 1:
        yield f"  {_place(result, batch, head, view)}"


def summary_table(results: Sequence[StageResult], printer: Printer, digits: int) -> RenderableType:
    """One line a stage: its visible and finite cells, their extremes and moments, and the rest."""
    found = [result.statistics for result in results]
    columns = [
        TableColumn("stage", [str(result.stage) for result in results], True, True),
        TableColumn("shape", [str(result.shape) for result in results], True),
    ]
    columns.append(TableColumn("cells", [str(one.n_finite) for one in found]))
    for name in ("min", "max", "mean", "std"):
        values = [decimals(getattr(one, name), digits) for one in found]
        columns.append(TableColumn(name, values))
    counts = {"masked": "n_masked", "nan": "n_nan", "inf": "n_posinf", "-inf": "n_neginf"}
    for title, name in counts.items():
        numbers = [getattr(one, name) for one in found]
        if title == "masked" or any(numbers):
            columns.append(TableColumn(title, list(map(str, numbers))))
    return table(columns, printer)


def _place(result: StageResult, batch: int, head: int, view: StageView) -> str:
    """Which batch and head a matrix is of."""
    where = f"batch {view.selection.batches[batch]}"
    if result.stage is Stage.PROJECTED:
        return f"{where}, all heads"
    if result.stage in (Stage.K, Stage.V):
        shared = list(dict.fromkeys(map(view.problem.kv_head, view.selection.heads)))
        return f"{where}, key head {shared[head]}"
    return f"{where}, head {view.selection.heads[head]}"


def _matrix(
    result: StageResult, batch: int, head: int, view: StageView
) -> Iterator[RenderableType]:
    """One head's matrix, of which a terminal shows the rows and columns at the ends."""
    matrix = _Matrix.of(result, batch, head, view)
    rows = result.shape[2]
    shown_rows = _ends(rows, TERMINAL_ROWS if view.printer.on_terminal else rows)
    widths = matrix.fitting([row for row in shown_rows if row is not None], view.printer.width)
    step = max(1, CELLS_AT_ONCE // max(1, len(widths)))
    for start in range(0, max(1, len(shown_rows)), step):
        yield matrix.drawn(shown_rows[start : start + step], widths, with_names=start == 0)
    yield from _cut_note(rows, shown_rows, "rows", "--rows, or --format csv", view)
    yield from _cut_note(len(matrix.positions), list(widths), "columns", COLUMNS_ADVICE, view)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One matrix, and its names."""

    row_names: Sequence[str]  # a name a row; padded queries say that they are
    positions: Sequence[str]  # a name a column
    tokens: Sequence[str] | None  # a token a column; None for none
    values: list[list[float]]  # (rows, columns)
    visible: list[list[bool]] | None  # bool (rows, columns); None where every cell counts
    real: list[bool]  # bool (rows,), False for padding, which has no values
    beside: Sequence[tuple[str, Sequence[str]]]  # a heading and a text a row for last columns
    stage: Stage
    view: StageView
    masked_sign: str  # what stands for a masked cell
    colours: Colours | None  # sRGB (rows, columns, 3) of the cells; None for none

    @classmethod
    def of(cls, result: StageResult, batch: int, head: int, view: StageView) -> _Matrix:
        """The matrix of the batch and head that stand here among the selected ones."""
        assert result.values is not None
        sizes, (rows, columns) = view.problem.sizes, result.shape[2:]
        real = [True] * rows if result.real is None else result.real[batch].tolist()
        if result.stage in (Stage.K, Stage.V):
            names = view.names(batch, range(sizes.k_len), sizes.k_len)
        else:
            names = view.names(batch, view.selection.rows, sizes.q_len)
        chosen, tokens = list(range(columns)), None
        if result.stage.over_keys:
            chosen, tokens = list(view.keys), view.tokens(batch, sizes.k_len)
        values, colours = result.values[batch, head], _colours(result, batch, head, view)
        visible = None if result.visible is None else result.visible[batch, head]
        return cls(
            [
                name if there else f"{name} (padding)"
                for name, there in zip(names, real, strict=True)
            ],
            list(map(str, chosen)),
            None if tokens is None else [tokens[key] for key in chosen],
            values[:, chosen].tolist(),
            None if visible is None else visible[:, chosen].tolist(),
            real,
            list(_beside(result, batch, head, view)),
            result.stage,
            view,
            view.printer.sign(MASKED, "."),
            None if colours is None else colours[:, chosen],
        )

    def text(self, row: int, column: int) -> str:
        """The text of a cell."""
        if not self.real[row]:
            return ""
        if self.stage in (Stage.MASKED, Stage.WEIGHTS) and not self._seen(row, column):
            return self.masked_sign
        return decimals(self.values[row][column], self.view.digits)

    def style(self, row: int, column: int) -> Style | None:
        """The style of a cell where there is colour."""
        if not self.real[row]:
            return None
        if not self._seen(row, column):
            return DIM
        return None if self.colours is None else style_on(self.colours[row, column])

    def _seen(self, row: int, column: int) -> bool:
        return self.visible is None or self.visible[row][column]

    def fitting(self, rows: Sequence[int], room: int) -> dict[int | None, int]:
        """The columns that the room has place for, in order, and the width of each.

        None is the gap where the middle is left out.
        """
        count = len(self.positions)
        room -= 3 + max((text_width(self.row_names[row]) for row in rows), default=1)
        room -= sum(_wide(*each) + 2 for each in self.beside)
        if room >= 1 + count * 2:  # else not even single digits fit
            widths: dict[int | None, int] = {c: self._width(rows, c) for c in range(count)}
            if sum(widths.values()) + count <= room + 1:
                return widths
        first: dict[int | None, int] = {}
        last: dict[int | None, int] = {}
        left = room - 1
        for turn in range(count):
            side = last if turn % 3 == 1 else first
            column = count - 1 - len(last) if side is last else len(first)
            width = self._width(rows, column)
            if left < width + 1 and turn >= 2:
                break
            left -= width + 1
            side[column] = width
        return first | {None: 1} | dict(reversed(last.items()))

    def _width(self, rows: Sequence[int], column: int) -> int:
        label = len(self.positions[column])
        if self.tokens is not None:
            label = max(label, text_width(self.tokens[column]))
        if self.view.printer.on_terminal:
            label = min(label, max(LABEL_WIDTH, len(self.positions[column])))
        return max([label, *(len(self.text(row, column)) for row in rows)])

    def drawn(
        self, rows: Sequence[int | None], widths: dict[int | None, int], *, with_names: bool
    ) -> RenderableType:
        """Some rows, under the names of the columns for the first of them.

        A column's cells stand as lines in one cell of rich, which lays out each cell anew: that
        takes a fifth of the time.
        """
        gap, colored = self.view.printer.sign(GAP, ":"), self.view.printer.colored
        dim = "dim" if colored else ""
        lead = max(map(text_width, self.row_names), default=1) + 2
        drawing = Table(box=None, show_header=with_names, padding=0, header_style="")
        drawing.add_column("", justify="right", width=lead, style=dim)
        stacked: list[RenderableType] = [
            Text("\n".join(gap if row is None else self.row_names[row] for row in rows))
        ]
        for column, width in widths.items():
            name = gap if column is None else self.positions[column]
            if self.tokens is not None:
                token = gap if column is None else shortened(self.tokens[column], width)
                name = f"{name}\n{token}"
            drawing.add_column(Text(name, dim), justify="right", width=width + 1, no_wrap=True)
            segments = []
            for row in rows:
                text, style = gap, None
                if row is not None and column is not None:
                    text = self.text(row, column)
                    style = self.style(row, column) if colored else None
                segments.append(Segment(f"{text:>{width + 1}}\n", style))
            stacked.append(Segments(segments))
        for title, values in self.beside:
            drawing.add_column(Text(title, dim), justify="right", width=_wide(title, values) + 2)
            stacked.append(Text("\n".join(gap if row is None else values[row] for row in rows)))
        if rows:
            drawing.add_row(*stacked)
        return drawing


def _colours(result: StageResult, batch: int, head: int, view: StageView) -> Colours | None:
    """The colours of scores or weights, told apart within the matrix; None where there are none."""
    if not view.printer.colored or not result.stage.over_keys or result.values is None:
        return None
    values = result.values[batch, head].numpy().astype(np.float64)
    visible = np.ones(values.shape, bool)
    if result.visible is not None:
        visible = result.visible[batch, head].numpy()
    shading = view.shading(result.stage, np.where(visible, values, np.nan))
    return shading.colours(values, ~visible, visible.sum(1))


def _beside(
    result: StageResult, batch: int, head: int, view: StageView
) -> Iterator[tuple[str, list[str]]]:
    """What stands beside the rows of weights: the sink logit's share, and their entropy."""
    if result.stage is not Stage.WEIGHTS or result.values is None:
        return
    if view.problem.sinks is not None:
        rest = 1 - result.values[batch, head].double().sum(-1).numpy()
        empty = (
            np.zeros(len(rest), bool)
            if result.visible is None
            else ~result.visible[batch, head].any(-1).numpy()
        )
        shares = zip(rest.tolist(), empty.tolist(), strict=True)
        yield "sink", [decimals(None if gone else one, view.digits) for one, gone in shares]
    if view.entropies is not None:
        factor = 1 / math.log(2) if view.unit is Unit.BITS else 1.0
        values = view.entropies[batch, head]
        nats = [decimals(None if one is None else one * factor, view.digits) for one in values]
        yield f"entropy ({view.unit})", nats


def _wide(title: str, texts: Sequence[str]) -> int:
    return max(map(len, (title, *texts)))


def _ends(length: int, limit: int) -> list[int | None]:
    """Indices from both ends, None for the gap between, at most `limit` in all."""
    if length <= limit:
        return list(range(length))
    tail = (limit - 1) // 3
    head = limit - 1 - tail
    return [*range(head), None, *range(length - tail, length)]


def _cut_note(
    length: int, shown: Sequence[int | None], what: str, advice: str, view: StageView
) -> Iterator[RenderableType]:
    hidden = length - sum(index is not None for index in shown)
    if hidden:
        gap = view.printer.sign(GAP, "...")
        yield f"  {gap} {hidden} of {length} {what} not shown: {advice}"
