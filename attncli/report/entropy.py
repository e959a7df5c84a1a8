"""`entropy` for eyes: tables of heads, variants, groups, rows and keys; pictures of all heads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from rich.console import RenderableType
from rich.style import Style as Shade
from rich.text import Text

from attncli.attention.streaming.head_record import TOKEN_LABELS
from attncli.attention.streaming.heads import FEWEST_SAMPLED
from attncli.columns import Column
from attncli.files.text import shown
from attncli.report import Unit
from attncli.report.printer import Printer, heading, paragraph
from attncli.report.shading import shade
from attncli.report.table import (
    GAP,
    PLAIN_SHADES,
    SHADES,
    TableColumn,
    cell,
    decimals,
    from_left,
    labels_of_batch,
    record_table,
    table,
    text_width,
)

Record = dict[str, Any]
Variant = tuple[str, float]  # a scale and a temperature
# For each source and group the position of query 0, where all batches share it, and the tokens.
Tokens = Mapping[tuple[str, str], tuple[int | None, Sequence[Sequence[str]]]]
# A name, and beside it the value of each head.
Lines = list[tuple[str, dict[int, float | None]]]

TERMINAL_RECORDS = 40
TOKEN_WIDTH = 20
BINS = 20
BAR_WIDTH = 40
MISSING = "–"
# Off a terminal lines may be as long as they like, but nobody reads a picture wider than this.
PICTURE_WIDTH = 160


@dataclass(frozen=True, slots=True)
class Style:
    """How tables are drawn."""

    printer: Printer  # where they go
    digits: int  # decimals
    unit: Unit  # of entropy
    limits: Mapping[str, float]  # the threshold of each label
    # For each source and group what its numbers are of, in lines above its table.
    openings: Mapping[tuple[str, str], Sequence[RenderableType]] = field(default_factory=dict)

    def number(self, value: float | None) -> str:
        """A number of a table."""
        return decimals(value, self.digits)

    def note(self, text: str) -> RenderableType:
        """Prose below a table."""
        return paragraph(text, self.printer)

    def shows(self, column: Column, records: Sequence[Record]) -> bool:
        """Whether a column says anything: not in the other unit, and not 0 or "no" everywhere."""
        if column.heading is None or column.is_extra:
            return False
        if column.unit not in ("", str(self.unit)):
            return False
        values = [record[column.key] for record in records]
        if column.is_key and column.key not in ("query", "key"):
            return len(set(values)) > 1
        return any(values) if column.key.endswith(("_rows", "nonfinite")) else True


def head_tables(
    records: Sequence[Record], columns: Sequence[Column], style: Style
) -> Iterator[RenderableType]:
    """A table for each group, a line a head; estimates stand beside how far they may be off."""
    sampled = any(column.key == "sampled_queries" for column in columns)
    labels = [_label(record, style) for record in records]
    for opened, of_group in _openings(records, style):
        yield from opened
        yield table(_head_columns(of_group, columns, style, sampled, labels), style.printer)
        yield ""
    if sampled:
        yield style.note(
            "estimated from the sampled rows: means ± half the width of their 95 % intervals by "
            f"Student's t, which hold from {FEWEST_SAMPLED} rows on, and for less in columns that "
            "are skewed, as sink mass and largest weight often are. Labels are estimates too; "
            "largest logits are those of the sample: the head's own may be larger."
        )
    yield from _head_notes(records, style)


def variant_tables(records: Sequence[Record], style: Style) -> Iterator[RenderableType]:
    """Scales or temperatures side by side, a line a head."""
    for opened, of_group in _openings(records, style):
        yield from opened
        yield table(_variant_columns(of_group, style), style.printer)
        yield ""
    yield style.note(
        f"mean entropy in {style.unit} and mean largest weight over the rows of each head"
    )
    yield from _head_notes(records, style)


def group_table(
    records: Sequence[Record], columns: Sequence[Column], style: Style
) -> Iterator[RenderableType]:
    """One line a group, means over its heads."""
    said = [column for column in columns if style.shows(column, records)]
    yield from alone(style)
    yield record_table(said, records, style.printer, digits=style.digits)


def long_table(
    records: Sequence[Record], columns: Sequence[Column], style: Style, tokens: Tokens
) -> Iterator[RenderableType]:
    """One line a query row or a key, with tokens where there are some."""
    if not records:
        yield "no records"
        return
    yield from alone(style)
    limit = TERMINAL_RECORDS if style.printer.on_terminal else len(records)
    lines = [record | _tokens_of(record, tokens) for record in records[:limit]]
    said: list[Column] = []
    for column in columns:
        if style.shows(column, records):
            said.append(column)
        if column.key in ("query", "key"):
            said.append(Column("token", "token"))
        if column.key == "top_key":
            said.append(Column("top_token", "its token"))
    yield record_table(said, lines, style.printer, digits=style.digits)
    if limit < len(records):
        yield f"… {len(records) - limit} more: --format csv, or a pipe, has them all"
    if any(record.get("sink_weight") is not None for record in lines):
        yield style.note("entropies count the sink logit as one more outcome")


def heads_picture(
    records: Sequence[Record], column: Column, style: Style
) -> Iterator[RenderableType]:
    """Groups down, heads across, shaded from the smallest value to the largest.

    Values stand in the picture where they fit the width, otherwise one mark each.
    """
    unit = f" ({column.unit})" if column.unit else ""
    yield from alone(style)
    yield heading(f"{column.heading or column.key}{unit}: heads across")
    lines = head_lines(records, column)
    if not lines:
        yield "no heads"
        return
    known = [value for _, values in lines for value in values.values() if _is_finite(value)]
    # From 0, where no number is below it: small differences of large numbers look small.
    among = ValueRange(min([*known, 0.0]), max([*known, 0.0]), style.printer)
    ends = [style.number(end) for end in (min(known, default=0.0), max(known, default=0.0))]
    span = f"from {ends[0]} to {ends[1]}" if ends[0] != ends[1] else f"{ends[0]} everywhere"
    width = min(style.printer.width, PICTURE_WIDTH)
    whole = _values(lines, among, style)
    if sum(column.width + GAP for column in whole) - GAP <= width:
        yield table(whole, style.printer)
        yield span
        return
    yield from _marks(lines, among, width)
    marks = f"{among.mark(among.low)} at {among.low:.4g} to {among.mark(among.high)}"
    yield f"{span}; {marks} at {among.high:.4g}; {MISSING} for none"


def histogram(records: Sequence[Record], style: Style) -> Iterator[RenderableType]:
    """How the entropies of one head's rows are distributed."""
    if not records:
        yield "no rows"
        return
    yield from alone(style)
    first, unit = records[0], str(style.unit)
    place = f"{shown(first['group'])} {head_name(first)}".strip()
    yield heading(f"row entropies of {place} ({unit})")
    found = [record[f"entropy_{unit}"] for record in records]
    entropies = [value for value in found if _is_finite(value)]
    if not entropies:
        yield "no row has an entropy"
        return
    yield _bars(entropies, style)
    mean = math.fsum(entropies) / len(entropies)
    empty = sum(value is None for value in found)
    broken = len(found) - len(entropies) - empty
    said = f"{len(entropies)} rows, mean {style.number(mean)} {unit}"
    said += f"; {empty} empty rows left out" if empty else ""
    yield said + (f"; {broken} rows that are not finite left out" if broken else "")


def common_labels(records: Sequence[Record], tokens: Tokens) -> Sequence[str] | None:
    """The tokens on the key axis that all heads have in common; None where they do not."""
    found = set()
    for record in records:
        _, of_batches = tokens.get((record["source"], record["group"]), (None, ((),)))
        found.add(tuple(labels_of_batch(of_batches, record["batch"]) or ()))
    return found.pop() or None if len(found) == 1 else None


def _by_place(records: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    """Records of each source and group."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["source"], record["group"]), []).append(record)
    return groups


def _openings(
    records: Sequence[Record], style: Style
) -> Iterator[tuple[Sequence[RenderableType], list[Record]]]:
    """Records of each group, and what stands above them."""
    for place, found in _by_place(records).items():
        name = " ".join(filter(None, place))
        yield style.openings.get(place, [heading(shown(name))] if name else []), found


def alone(style: Style) -> Iterator[RenderableType]:
    """What stands above the table of a single group."""
    if len(style.openings) == 1:
        yield from next(iter(style.openings.values()))


def by_group(records: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Records of each group, under a name that leaves out a source that all share."""
    groups = _by_place(records)
    sources = {source for source, _ in groups}
    for (source, group), found in groups.items():
        yield shown(group if len(sources) == 1 else f"{source} {group}".strip()), found


def head_name(record: Record) -> str:
    """Which head, with its batch before it where that is not the first."""
    batch = f"batch {record['batch']}, " if record["batch"] else ""
    return f"{batch}head {record['head']}"


def _place_columns(records: Sequence[Record]) -> Iterator[TableColumn]:
    """Batches, where there are several, and heads."""
    if any(record["batch"] for record in records):
        yield TableColumn("batch", [str(record["batch"]) for record in records], is_key=True)
    yield TableColumn("head", [str(record["head"]) for record in records], is_key=True)


def _head_columns(
    records: Sequence[Record],
    columns: Sequence[Column],
    style: Style,
    sampled: bool,
    labels: Sequence[Text],
) -> Iterator[TableColumn]:
    """Columns of a group; those of all groups are as wide, so that tables fold alike."""
    yield from _place_columns(records)
    own = [_label(record, style) for record in records]
    for text in own:
        text.pad_right(max(map(len, labels)) - len(text))
    yield TableColumn("label", own, is_text=True)
    for column in columns:
        told = any(record[column.key] is not None for record in records)
        if column.is_key or column.key == "label" or not told or not style.shows(column, records):
            continue
        if column.of_sample or not sampled:
            unit = f" ({column.unit})" if column.unit else ""
            cells = [_head_cell(record, column.key, style) for record in records]
            yield TableColumn(f"{column.heading}{unit}", cells)


def _head_cell(record: Record, key: str, style: Style) -> str:
    """A number, and of an estimate half the width of its interval: "?" where a row has none."""
    text = cell(record[key], style.digits)
    if key == "sampled_queries":
        return f"{text} of {record['queries']}"
    highest_key = key.removesuffix("_mean") + "_ci95_high"
    if record[key] is None or highest_key not in record:
        return text
    highest = record[highest_key]
    return f"{text} ±{'?' if highest is None else style.number(highest - record[key])}"


def _variant_columns(records: Sequence[Record], style: Style) -> Iterator[TableColumn]:
    by_head: dict[tuple[int, int], list[Record]] = {}
    for record in records:
        by_head.setdefault((record["batch"], record["head"]), []).append(record)
    heads = list(by_head.values())
    variants = [_variant_of(together) for together in zip(*heads, strict=True)]
    yield from _place_columns([head[0] for head in heads])
    for name, key in (("entropy", f"entropy_{style.unit}_mean"), ("weight", "max_weight_mean")):
        for place, variant in enumerate(variants):
            cells = [style.number(head[place][key]) for head in heads]
            yield TableColumn(f"{name}, {_variant(variant, variants)}", cells)
    labels = []
    for head in heads:
        words = [str(record["label"] or MISSING) for record in head]
        labels.append(" → ".join(word for word, _ in itertools.groupby(words)))
    yield TableColumn("label", labels, is_text=True)


def _variant_of(heads: Sequence[Record]) -> Variant:
    """What the same variant of several heads is called: its scale and its temperature."""
    scales = {record["scale"] for record in heads}
    scale = f"{heads[0]['scale']:.6g}" if len(scales) == 1 else "of the head"
    return scale, heads[0]["temperature"]


def _variant(variant: Variant, among: Sequence[Variant]) -> str:
    """A scale and a temperature, those of them that differ among the variants."""
    scales, temperatures = (len(set(values)) > 1 for values in zip(*among, strict=True))
    words = [f"scale {variant[0]}"] if scales or not temperatures else []
    return " ".join(words + ([f"temperature {variant[1]:.6g}"] if temperatures else []))


def _label(record: Record, style: Style) -> Text:
    """The label and its score; of a mixed head, faintly, the nearest label and its score."""
    label, score, nearest = (record[key] for key in ("label", "label_score", "nearest_label"))
    if label is None or score is None:
        return Text(str(label or MISSING))
    if nearest is None:
        bad = "red" if label == "collapsed" and style.printer.colored else ""
        return Text(f"{label} {score:.2f}", bad)
    own = (1 - score) * style.limits[nearest]  # a mixed head's score is how far away this is
    return Text(f"{label} ").append(f"({nearest} {own:.2f})", "dim")


def _head_notes(records: Sequence[Record], style: Style) -> Iterator[RenderableType]:
    if any(record["sink_weight_mean"] is not None for record in records):
        yield style.note("entropies count the sink logit as one more outcome")
    unused = {
        name
        for name in TOKEN_LABELS
        if all(record.get(f"{name}_score") is None for record in records)
    }
    limits = ", ".join(
        f"{name} ≥ {value:g}"
        for name, value in style.limits.items()
        if name.replace("-", "_") not in unused
    )
    yield style.note(
        f"labels: {limits}, otherwise mixed, with what is nearest; --label-limit NAME=X adjusts "
        "them, --columns shows other columns"
    )


def _tokens_of(record: Record, tokens: Tokens) -> Record:
    """The tokens of a record's query or key, and of its top key; None for none."""
    offset, of_batches = tokens.get((record["source"], record["group"]), (None, ((),)))
    labels = labels_of_batch(of_batches, record["batch"]) or ()

    def token(index: int | None) -> str | None:
        known = index is not None and 0 <= index < len(labels)
        return shown(labels[index], TOKEN_WIDTH) if index is not None and known else None

    if "key" in record:
        return {"token": token(record["key"])}
    own = None if offset is None else record["query"] + offset
    return {"token": token(own), "top_token": token(record.get("top_key"))}


def head_lines(records: Sequence[Record], column: Column) -> Lines:
    """The values of the heads of each batch of each group, under a name."""
    lines: Lines = []
    for named, of_group in by_group(records):
        batches: dict[int, dict[int, float | None]] = {}
        for record in of_group:
            batches.setdefault(record["batch"], {})[record["head"]] = record[column.key]
        for batch, values in batches.items():
            name = f"{named} batch {batch}".strip() if len(batches) > 1 else named
            lines.append((name, values))
    return lines


@dataclass(frozen=True, slots=True)
class ValueRange:
    """The smallest value of a picture and the largest, and how those between are shown."""

    low: float
    high: float
    printer: Printer

    def share(self, value: float | None) -> float | None:
        """Where a value stands between the smallest and the largest; None for no number."""
        if value is None or math.isnan(value):
            return None
        if math.isinf(value):
            return 1.0 if value > 0 else 0.0
        return 0.0 if self.high == self.low else (value - self.low) / (self.high - self.low)

    def shade(self, value: float | None) -> Shade | str:
        """The style of a value."""
        share = self.share(value)
        if share is None or not self.printer.colored:
            return ""
        return shade(share, few=self.printer.has_few_colors)

    def mark(self, value: float | None) -> str:
        """The character for a value."""
        share = self.share(value)
        marks = self.printer.sign(SHADES, PLAIN_SHADES)
        return MISSING if share is None else marks[min(int(share * len(marks)), len(marks) - 1)]


def _values(lines: Lines, among: ValueRange, style: Style) -> list[TableColumn]:
    """The names of the lines, and a column of values for each head: two decimals at most."""
    known = [value for _, values in lines for value in values.values()]
    whole = all(value is None or isinstance(value, int) for value in known)
    digits = 0 if whole else min(style.digits, 2)

    def cell_of(values: dict[int, float | None], head: int) -> Text:
        value = values.get(head)
        return Text(decimals(value, digits) if head in values else "", among.shade(value))

    heads = dict.fromkeys(head for _, values in lines for head in values)
    return [
        TableColumn("", [name for name, _ in lines], is_text=True, is_key=True),
        *(TableColumn(str(head), [cell_of(values, head) for _, values in lines]) for head in heads),
    ]


def _marks(lines: Lines, among: ValueRange, width: int) -> Iterator[RenderableType]:
    """A mark for each head, in parts where not even marks fit."""
    lead = min(max(text_width(name) for name, _ in lines), among.printer.width // 3)
    at_once = max(1, width - lead - GAP)
    for start in range(0, max(len(values) for _, values in lines), at_once):
        parts = [(name, list(values.items())[start : start + at_once]) for name, values in lines]
        parts = [(name, inside) for name, inside in parts if inside]
        names = [from_left(name, lead) for name, _ in parts]
        heads = max(([head for head, _ in inside] for _, inside in parts), key=len)
        marks = [
            Text.assemble(*((among.mark(value), among.shade(value)) for _, value in inside))
            for _, inside in parts
        ]
        columns = [
            TableColumn("", names, is_text=True, is_key=True),
            TableColumn(_ruler(heads), marks, is_text=True),
        ]
        yield table(columns, among.printer)


def _ruler(heads: Sequence[int]) -> str:
    """Each tenth head by its number, in a line with one character a head."""
    line = [" "] * len(heads)
    for place, head in enumerate(heads):
        number = str(head)
        if head % 10 == 0 and place + len(number) <= len(heads):
            line[place : place + len(number)] = number
    return "".join(line).rstrip()


def _bars(entropies: Sequence[float], style: Style) -> RenderableType:
    low, high = min(entropies), max(entropies)
    # Rows that differ by rounding alone are one bar, and few rows are few bars.
    bins = min(BINS, math.ceil(math.sqrt(len(entropies))))
    bins = bins if high - low > 1e-9 * max(1.0, high) else 1
    counts = [0] * bins
    width = (high - low) / bins
    for value in entropies:
        counts[min(int((value - low) / width), bins - 1) if width and bins > 1 else 0] += 1
    edges = [low + width * index for index in range(bins)] + [high]
    spans = [f"{style.number(a)} to {style.number(b)}" for a, b in itertools.pairwise(edges)]
    rows = TableColumn("rows", list(map(str, counts)))
    entropy = TableColumn(f"entropy ({style.unit})", spans)
    room = min(BAR_WIDTH, max(4, style.printer.width - entropy.width - rows.width - 2 * GAP))
    sign = style.printer.sign("█", "#")
    bars = [sign * max(int(count > 0), round(room * count / max(counts))) for count in counts]
    return table([entropy, rows, TableColumn("", bars, is_text=True)], style.printer)


def _is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)
