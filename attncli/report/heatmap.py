"""One matrix as a picture in the terminal, of whatever size it is.

Four ways to draw it: figures on colour where they fit, colour alone with two rows a line, five
shades where there is no colour, and characters of ASCII where the encoding lacks those.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache

import numpy as np
from rich.color import Color
from rich.console import RenderableType
from rich.segment import Segment, Segments
from rich.style import Style

from attncli.attention.options import Stage
from attncli.attention.stages import PooledMatrix
from attncli.report import ColourScale
from attncli.report.explanation import formula
from attncli.report.printer import Printer, heading
from attncli.report.shading import Shading, style_on
from attncli.report.stages import StageView
from attncli.report.table import (
    PLAIN_SHADES,
    SHADES,
    decimals,
    positions_above,
    shortened,
    text_width,
)

# Lines of all pictures together on a terminal, what frames each of them, and the fewest of one.
MOST_LINES = 100
FRAME_LINES = 6
FEWEST_LINES = 8
# Off a terminal lines may be as long as they like, but nobody reads a picture wider than this.
MOST_WIDE = 160
NAME_WIDTH = 12
RAMP_WIDTH = 24
# A figure has room for a sign, a digit, a point and a space beside its decimals.
BESIDE_DECIMALS = 4
FEW_DECIMALS = 2
HALF = "▀"
# Stages of which each row is a key.
OF_KEYS = (Stage.K, Stage.V)
TENTHS = ".123456789#"


class Way(Enum):
    """How a point is drawn."""

    FIGURES = "figures on colour"
    COLOUR = "colour alone"
    SHADES = "five shades"
    TENTHS = "tenths as characters"


@dataclass(frozen=True, slots=True)
class Canvas:
    """What a picture may take, and how it is drawn there.

    Attributes:
        way: how a point is drawn.
        rows, columns: points at most.
        wide: characters of a point.
        rows_a_line: 2 where the halves of a character have colours of their own.
        lead: columns of the names at the left.
        digits: decimals of figures.
    """

    way: Way
    rows: int
    columns: int
    wide: int
    rows_a_line: int
    lead: int
    digits: int = 0

    @property
    def lines(self) -> int:
        """Lines of the whole picture, its frame included."""
        return -(-self.rows // self.rows_a_line) + FRAME_LINES


def canvas_for(
    rows: int,
    columns: int,
    names: Sequence[str],
    digits: int,
    printer: Printer,
    *,
    lines: int = MOST_LINES,
) -> Canvas:
    """The canvas that shows most of a matrix in the width there is.

    Args:
        rows, columns: of the matrix.
        names: of its rows.
        digits: decimals that figures are wanted with; two may have to do.
        printer: whose width, colour and characters decide.
        lines: that the picture may take with its frame.
    """
    of_runs = len(f"{rows}–{rows}")
    lead = min(NAME_WIDTH, max(of_runs, *map(text_width, names)))
    room = max(4, min(printer.width, MOST_WIDE) - lead - 1)
    lines = max(FEWEST_LINES, lines - FRAME_LINES)
    if not printer.colored:
        return _without_colour(rows, columns, room, lines, lead, printer)
    for decimals_ in dict.fromkeys((digits, min(digits, FEW_DECIMALS))):
        wide = decimals_ + BESIDE_DECIMALS
        if columns * wide <= room and rows <= lines:
            return Canvas(Way.FIGURES, rows, columns, wide, 1, lead, decimals_)
    screen = max(FEWEST_LINES, printer.height - FRAME_LINES) if printer.on_terminal else lines
    if 2 * columns <= room and rows <= min(lines, screen):
        return Canvas(Way.COLOUR, rows, columns, 2, 1, lead)
    columns = min(columns, room)
    rows_a_line = 2 if printer.sign(HALF, "") else 1
    most = max(FEWEST_LINES, columns * rows_a_line // 2)
    return Canvas(Way.COLOUR, min(rows, lines * rows_a_line, most), columns, 1, rows_a_line, lead)


def _without_colour(
    rows: int, columns: int, room: int, lines: int, lead: int, printer: Printer
) -> Canvas:
    fits = columns <= room and rows <= lines
    way = Way.SHADES if printer.sign(SHADES, "") or not fits else Way.TENTHS
    if fits:
        return Canvas(way, rows, columns, 2 if 2 * columns <= room else 1, 1, lead)
    columns = min(columns, room)
    return Canvas(way, min(rows, lines, max(FEWEST_LINES, columns // 2)), columns, 1, 1, lead)


def names_of_rows(stage: Stage, batch: int, view: StageView) -> list[str]:
    """A name for each row of a stage; the batch is its place among those selected."""
    if stage in OF_KEYS:
        return view.names(batch, range(view.problem.sizes.k_len), view.problem.sizes.k_len)
    return view.names(batch, view.selection.rows, view.problem.sizes.q_len)


def heat_map(
    matrix: PooledMatrix,
    canvas: Canvas,
    view: StageView,
    *,
    largest: bool = False,
    title: str = "",
) -> Iterator[RenderableType]:
    """Draw one matrix.

    Args:
        matrix: what to draw.
        canvas: where, as `canvas_for` gave it for the matrix before it was pooled.
        view: of which selection it is, and how it is shown.
        largest: whether a point is the largest of its cells.
        title: above it, in the place of its formula.
    """
    batch = view.selection.batches.index(matrix.batch)
    sizes, stage = view.problem.sizes, matrix.stage
    rows, columns = int(matrix.row_edges[-1]), int(matrix.column_edges[-1])
    heads = {Stage.PROJECTED: "all heads"} | dict.fromkeys(OF_KEYS, f"key head {matrix.head}")
    where = [f"batch {matrix.batch}"] if sizes.batch > 1 else []
    where += [heads.get(stage, f"head {matrix.head}")] if sizes.heads > 1 else []
    place = f"   {', '.join(where)}" if where else ""
    tokens = view.tokens(batch, sizes.k_len) if stage.over_keys else None
    yield from HeatMap(
        matrix,
        canvas,
        f"{title or formula(view.problem, stage)}{place}   ({rows}, {columns})",
        _names_of_lines(matrix, canvas.rows_a_line, names_of_rows(stage, batch, view), view),
        tokens,
        view.shading(stage, matrix.values),
        largest,
        view.printer,
    ).drawn()


def _names_of_lines(
    matrix: PooledMatrix, rows_a_line: int, names: Sequence[str], view: StageView
) -> list[str]:
    """A name for each line: that of its first row, or from which to which where they are pooled."""
    rows = range(len(names)) if matrix.stage in OF_KEYS else view.selection.rows
    edges = matrix.row_edges.tolist()
    found = []
    for at in range(0, len(edges) - 1, rows_a_line):
        first, last = edges[at], edges[min(at + rows_a_line, len(edges) - 1)] - 1
        alone = last - first < rows_a_line
        found.append(names[first] if alone else f"{rows[first]}–{rows[last]}")
    return found


@dataclass(frozen=True, slots=True)
class HeatMap:
    """A matrix on its canvas.

    Attributes:
        matrix: what is drawn.
        canvas: where.
        title: above it.
        line_names: a name for each line of points.
        column_names: a name for each column of figures; None for its position.
        shading: which colour a number has.
        largest: whether a point is the largest of its cells.
        printer: whose characters there are.
    """

    matrix: PooledMatrix
    canvas: Canvas
    title: str
    line_names: Sequence[str]
    column_names: Sequence[str] | None
    shading: Shading
    largest: bool
    printer: Printer

    def drawn(self) -> Iterator[RenderableType]:
        """Title, names of the columns, the points, and what their colours mean."""
        yield heading(self.title) if text_width(self.title) <= self.printer.width else self.title
        if 0 in self.matrix.values.shape:
            yield "  no cells"
            return
        yield Segments([Segment(f"{'':>{self.canvas.lead}} {self._above()}\n", self._dim)])
        match self.canvas.way:
            case Way.FIGURES:
                yield Segments(self._figures())
            case Way.COLOUR:
                yield Segments(self._colours())
            case _:
                yield Segments(self._characters())
        yield from self._legend()

    @property
    def _dim(self) -> Style | None:
        return Style.parse("dim") if self.printer.colored else None

    def _above(self) -> str:
        """Names of the columns over figures; elsewhere positions, where they have room."""
        wide, edges = self.canvas.wide, self.matrix.column_edges[:-1].tolist()
        if self.canvas.way is Way.FIGURES:
            names = self.column_names or list(map(str, edges))
            return "".join(_right(shortened(name, wide - 1), wide - 1) + " " for name in names)
        room = self.printer.width - self.canvas.lead - 1
        return positions_above(edges, wide, 8 // wide, room)

    def _name(self, row: int) -> Segment:
        name = shortened(self.line_names[row // self.canvas.rows_a_line], self.canvas.lead)
        return Segment(_right(name, self.canvas.lead) + " ", self._dim)

    def _figures(self) -> list[Segment]:
        matrix, wide = self.matrix, self.canvas.wide
        colours = self.shading.colours(matrix.values, matrix.hidden, matrix.keys_seen)
        usual = "−∞" if matrix.stage is Stage.MASKED else "·"
        sign = self.printer.sign(usual, "." * len(usual))
        found = []
        for row, values in enumerate(matrix.values.tolist()):
            found.append(self._name(row))
            for column, value in enumerate(values):
                if matrix.hidden[row, column]:
                    found.append(Segment(f"{sign:>{wide - 1}} ", self._dim))
                    continue
                text = _figure(value, self.canvas.digits, wide)
                found.append(Segment(text, style_on(colours[row, column])))
            found.append(Segment("\n"))
        return found

    def _colours(self) -> list[Segment]:
        matrix, canvas = self.matrix, self.canvas
        colours = self.shading.colours(matrix.values, matrix.hidden, matrix.keys_seen)
        found = []
        for row in range(0, len(colours), canvas.rows_a_line):
            found.append(self._name(row))
            for column in range(colours.shape[1]):
                upper = tuple(colours[row, column].tolist())
                if canvas.rows_a_line == 1:
                    found.append(Segment(" " * canvas.wide, _style(None, upper)))
                elif row + 1 < len(colours):
                    lower = tuple(colours[row + 1, column].tolist())
                    found.append(Segment(HALF, _style(upper, lower)))
                else:
                    found.append(Segment(HALF, _style(upper, None)))
            found.append(Segment("\n"))
        return found

    def _characters(self) -> list[Segment]:
        matrix, wide = self.matrix, self.canvas.wide
        if self._in_tenths:
            marks = [mark.ljust(wide) for mark in TENTHS]
            places = np.rint(np.nan_to_num(matrix.values) * 10)
        else:
            marks = [mark * wide for mark in self._shades]
            found = self.shading.places(matrix.values, matrix.keys_seen)
            places = np.floor(np.nan_to_num(found) * len(marks))
        chosen = np.clip(places, 0, len(marks) - 1).astype(int)
        chosen[matrix.hidden | ~np.isfinite(matrix.values)] = len(marks)
        marks.append(" " * wide)
        lines = ("".join(marks[place] for place in row).rstrip() for row in chosen.tolist())
        return [
            part
            for row, line in enumerate(lines)
            for part in (self._name(row), Segment(line + "\n"))
        ]

    @property
    def _in_tenths(self) -> bool:
        return self.canvas.way is Way.TENTHS and self.matrix.stage is Stage.WEIGHTS

    @property
    def _shades(self) -> str:
        return self.printer.sign(SHADES, PLAIN_SHADES)

    # ── what the colours mean ────────────────────────────────────────────────────────────────

    def _legend(self) -> Iterator[RenderableType]:
        """The ramp, its ends, and what a point stands for: a line, or more where it is long."""
        lead = self.canvas.lead + 1
        said = "; ".join(self._said())
        width = min(self.printer.width, MOST_WIDE) - lead
        if self.canvas.way not in (Way.FIGURES, Way.COLOUR):
            lines = textwrap.wrap(said, width, break_on_hyphens=False)
            yield Segments([Segment(f"{'':>{lead}}{line}\n") for line in lines])
            return
        ramp = self.shading.ramp
        length = min(RAMP_WIDTH, width)
        places = np.linspace(0, len(ramp) - 1, length).round().astype(int)
        found = [Segment(" " * lead)]
        found += [Segment(" ", _style(None, tuple(ramp[place].tolist()))) for place in places]
        if length + 2 + text_width(said) <= width:
            yield Segments([*found, Segment(f"  {said}\n", self._dim)])
            return
        lines = textwrap.wrap(said, width, break_on_hyphens=False)
        said_below = [Segment(f"{'':>{lead}}{line}\n", self._dim) for line in lines]
        yield Segments([*found, Segment("\n"), *said_below])

    def _said(self) -> Iterator[str]:
        matrix, coloured = self.matrix, self.printer.colored
        yield self._scale_said() if coloured else self._shades_said()
        if matrix.hidden.any() and self.canvas.way is not Way.FIGURES:
            yield "grey: hidden" if coloured else "blank: hidden"
        if self.shading.skip_first:
            yield f"first keys left out of the scale: {self.shading.skip_first}"
        rows, columns = matrix.cells_a_point
        if (rows, columns) != (1, 1):
            kind = "largest" if self.largest else "mean"
            yield f"each point is the {kind} of up to {rows}×{columns} cells"
        if matrix.nonfinite:
            yield f"{matrix.nonfinite} cells that are not finite are left out"

    def _scale_said(self) -> str:
        shading = self.shading
        low, high = shading.value_at(0), shading.value_at(1)
        match shading.scale:
            case None:
                return f"{_short(low)} … {_short(high)}"
            case ColourScale.LOG:
                return f"≤ {_short(low)} … 1, log; even: {_short(shading.even)}"
            case ColourScale.EVEN:
                return f"1/{high:g} … {high:g} × even attention"
            case ColourScale.SQRT:
                return f"0 … {_short(high)}, square root; even: {_short(shading.even)}"
            case ColourScale.LINEAR:
                return f"0 … {_short(high)}; even: {_short(shading.even)}"

    def _shades_said(self) -> str:
        if self._in_tenths:
            return f"tenths: {TENTHS[0]} below 0.05, 1 to 9, {TENTHS[-1]} from 0.95"
        shading = self.shading
        ends = [_short(shading.value_at(place / 5)) for place in range(6)]
        start = f" from {ends[0]}" if shading.scale is None else ""
        parts = zip(self._shades, [start, *[""] * 4], ends[1:], strict=True)
        told = ", ".join(f"{mark}{begin} to {end}" for mark, begin, end in parts)
        kind = " × even attention" if shading.scale is ColourScale.EVEN else ""
        return told + kind


@cache
def _style(front: tuple[int, ...] | None, back: tuple[int, ...] | None) -> Style:
    """A style of two colours."""
    colour, ground = (None if rgb is None else Color.from_rgb(*rgb) for rgb in (front, back))
    return Style(color=colour, bgcolor=ground)


def _right(text: str, width: int) -> str:
    """A text at the right of so many columns."""
    return " " * (width - text_width(text)) + text


def _figure(value: float, digits: int, wide: int) -> str:
    """A number with as many decimals as have room."""
    for fewer in range(digits, -1, -1):
        text = decimals(value, fewer)
        if len(text) < wide:
            break
    else:
        text = f"{value:.0e}"
    return f"{text:>{wide - 1}} "


def _short(value: float) -> str:
    """A number in a legend."""
    return f"{value:.2g}" if abs(value) < 1000 else f"{value:.3g}"
