"""Pictures of `entropy` in the terminal: a grid of all heads, a histogram of one."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from attncli.errors import UsageError
from attncli.report.entropy import by_group, head_name
from attncli.report.grid import aligned, text_width
from attncli.report.numbers import decimals
from attncli.report.records import HEAD_ENTROPY
from attncli.report.stage_tables import shade

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType
    from rich.text import Text

    from attncli.columns import Column
    from attncli.report.entropy import Style

Record = dict[str, Any]

BINS = 20
BAR_WIDTH = 40
MARKS = "·░▒▓█"
PLAIN_MARKS = ".:+*#"  # where the encoding lacks the others
MISSING = "–"
# Off a terminal lines may be as long as they like, but nobody reads a picture wider than this.
PICTURE_WIDTH = 160


def grid_column(name: str) -> Column:
    """The column of head records of that name, if it holds numbers.

    Raises:
        UsageError: it does not; lists those that do.
    """
    words = ("source", "group", "batch", "head", "label")
    columns = {column.key: column for column in HEAD_ENTROPY if column.key not in words}
    if name not in columns:
        raise UsageError("--grid", f"expected one of {', '.join(columns)}, got {name!r}")
    return columns[name]


def grid(records: Sequence[Record], column: Column, style: Style) -> Iterator[RenderableType]:
    """Groups down, heads across, shaded from the smallest value to the largest.

    Values stand in the grid where they fit the width, otherwise one mark each.
    """
    unit = f" ({column.unit})" if column.unit else ""
    yield style.heading(f"{column.heading or column.key}{unit}: heads across")
    lines = _lines(records)
    if not lines:
        yield "no heads"
        return
    values = [r[column.key] for r in records if _is_finite(r[column.key])]
    low, high = (min(values), max(values)) if values else (0.0, 0.0)
    picture = _Picture(column.key, low, high, style, _lead(lines, style))
    yield from picture.drawn(lines)
    yield _scale_line(low, high, style, picture.in_marks(lines))


def histogram(records: Sequence[Record], style: Style) -> Iterator[RenderableType]:
    """How the entropies of one head's rows are distributed."""
    if not records:
        yield "no rows"
        return
    first, unit = records[0], str(style.unit)
    place = f"{first['group']} head {head_name(first)}".strip()
    yield style.heading(f"row entropies of {place} ({unit})")
    found = [record[f"entropy_{unit}"] for record in records]
    entropies = [value for value in found if _is_finite(value)]
    if not entropies:
        yield "no row has an entropy"
        return
    yield from _bars(entropies, style)
    mean = math.fsum(entropies) / len(entropies)
    empty = sum(value is None for value in found)
    broken = len(found) - len(entropies) - empty
    said = f"{len(entropies)} rows, mean {style.number(mean)} {unit}"
    said += f"; {empty} empty rows left out" if empty else ""
    yield said + (f"; {broken} rows that are not finite left out" if broken else "")


def _bars(entropies: Sequence[float], style: Style) -> Iterator[RenderableType]:
    low, high = min(entropies), max(entropies)
    # Rows that differ by rounding alone are one bar, not twenty.
    bins = BINS if high - low > 1e-9 * max(1.0, high) else 1
    counts = [0] * bins
    width = (high - low) / bins
    for value in entropies:
        counts[min(int((value - low) / width), bins - 1) if width and bins > 1 else 0] += 1
    edges = [low + width * index for index in range(bins)] + [high]
    pairs = list(itertools.pairwise(edges))
    spans = [f"{style.number(left)} to {style.number(right)}" for left, right in pairs]
    widest, digits = max(map(text_width, spans)), len(str(max(counts)))
    room = min(BAR_WIDTH, max(4, style.printer.width - widest - digits - 4))
    for count, span in zip(counts, spans, strict=True):
        bar = style.printer.sign("█", "#") * max(int(count > 0), round(room * count / max(counts)))
        yield f"{aligned(span, widest)}  {count:>{digits}}  {bar}".rstrip()


class _Picture:
    """One picture: what it shows, from what to what, and how wide its names are."""

    def __init__(self, key: str, low: float, high: float, style: Style, lead: int) -> None:
        self.key, self.low, self.high = key, low, high
        self.style, self.lead = style, lead
        self.width = min(style.printer.width, PICTURE_WIDTH)

    def cells(self, records: Sequence[Record]) -> list[str]:
        """The values as they stand in the grid: two decimals at most."""
        values = [record[self.key] for record in records]
        whole = all(value is None or isinstance(value, int) for value in values)
        digits = 0 if whole else min(self.style.digits, 2)
        return [decimals(value, digits) for value in values]

    def in_marks(self, lines: Sequence[tuple[str, list[Record]]]) -> bool:
        """Whether the values do not fit."""
        most = max(len(records) for _, records in lines)
        return self.lead + 1 + most * (self._widest(lines) + 1) > self.width

    def drawn(self, lines: Sequence[tuple[str, list[Record]]]) -> Iterator[Text]:
        """The lines of the grid, in parts where even marks do not fit."""
        in_marks = self.in_marks(lines)
        size = 1 if in_marks else self._widest(lines) + 1
        most = max(len(records) for _, records in lines)
        at_once = max(1, (self.width - self.lead - 1) // size)
        for start in range(0, most, at_once):
            yield self._head_line(lines[0][1][start : start + at_once], size)
            for named, records in lines:
                part = records[start : start + at_once]
                if part:
                    yield self._line(named, part, size, in_marks)

    def _widest(self, lines: Sequence[tuple[str, list[Record]]]) -> int:
        numbers = max(len(cell) for _, records in lines for cell in self.cells(records))
        return max(numbers, *(len(str(r["head"])) for _, records in lines for r in records))

    def _head_line(self, records: Sequence[Record], size: int) -> Text:
        from rich.text import Text

        if size > 1:
            numbers = "".join(f"{record['head']:>{size}}" for record in records)
        else:
            numbers = " " + _ruler([record["head"] for record in records])
        style = "dim" if self.style.printer.colored else ""
        return Text(" " * self.lead + numbers, style=style)

    def _line(self, named: str, records: Sequence[Record], size: int, in_marks: bool) -> Text:
        from rich.text import Text

        text = Text(aligned(_from_left(named, self.lead), self.lead, left=True))
        text.append(" " if in_marks else "")
        for record, cell in zip(records, self.cells(records), strict=True):
            share = self._share(record[self.key])
            colour = shade(share) if share is not None and self.style.printer.colored else ""
            if not in_marks:
                text.append(" ")
                text.append(aligned(cell, size - 1), style=colour)
            else:
                text.append(MISSING if share is None else _mark(share, self.style), style=colour)
        return text

    def _share(self, value: float | None) -> float | None:
        """Where a value stands between the smallest and the largest; None for no number."""
        if value is None or math.isnan(value):
            return None
        if math.isinf(value):
            return 1.0 if value > 0 else 0.0
        return 0.0 if self.high == self.low else (value - self.low) / (self.high - self.low)


def _lines(records: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    """The heads of each batch of each group, under a name."""
    lines = []
    for named, of_group in by_group(records):
        batches: dict[int, list[Record]] = {}
        for record in of_group:
            batches.setdefault(record["batch"], []).append(record)
        for batch, found in batches.items():
            name = f"{named} batch {batch}".strip() if len(batches) > 1 else named
            lines.append((name, found))
    return lines


def _lead(lines: Sequence[tuple[str, list[Record]]], style: Style) -> int:
    widest = max(text_width(named) for named, _ in lines)
    return min(widest, style.printer.width // 3)


def _from_left(text: str, width: int) -> str:
    """The end of a name that is too long: names of layers differ there."""
    return text if text_width(text) <= width else "…" + text[len(text) - width + 1 :]


def _ruler(heads: Sequence[int]) -> str:
    """Each tenth head by its number, in a line with one character a head."""
    line = [" "] * len(heads)
    for place, head in enumerate(heads):
        number = str(head)
        if head % 10 == 0 and place + len(number) <= len(heads):
            line[place : place + len(number)] = number
    return "".join(line).rstrip()


def _scale_line(low: float, high: float, style: Style, in_marks: bool) -> str:
    span = f"from {style.number(low)} to {style.number(high)}"
    if not in_marks:
        return span
    return f"{span}, {_mark(0.0, style)} to {_mark(1.0, style)}; {MISSING} for none"


def _mark(share: float, style: Style) -> str:
    marks = style.printer.sign(MARKS, PLAIN_MARKS)
    return marks[min(int(share * len(marks)), len(marks) - 1)]


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
