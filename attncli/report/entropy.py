"""`entropy` for eyes: tables of heads, variants, samples, groups, rows and keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attncli.columns import Column
from attncli.report.choices import Unit
from attncli.report.grid import GridColumn
from attncli.report.grid import grid as laid_out
from attncli.report.numbers import decimals
from attncli.report.prose import heading, paragraph
from attncli.report.record_table import KEYS, record_table
from attncli.report.records import GROUP_ENTROPY, KEY_MASS, ROW_ENTROPY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.console import RenderableType

    from attncli.report.printer import Printer

Record = dict[str, Any]
Tokens = dict[tuple[str, str], tuple[int | None, tuple[str, ...]]]

TERMINAL_RECORDS = 40
TOKEN_WIDTH = 20


@dataclass(frozen=True, slots=True)
class Style:
    """How tables are drawn.

    Attributes:
        printer: where they go.
        digits: decimals.
        unit: of entropy.
        limits: the threshold of each label.
    """

    printer: Printer
    digits: int
    unit: Unit
    limits: Mapping[str, float]

    def number(self, value: float | None) -> str:
        """A number of a table."""
        return decimals(value, self.digits)

    def estimate(self, value: float | None, error: float | None) -> str:
        """A number with its standard error; "?" where a single row tells none."""
        if value is None:
            return self.number(value)
        return f"{self.number(value)} ±{'?' if error is None else self.number(error)}"

    def heading(self, text: str) -> RenderableType:
        """A line that stands out."""
        return heading(text, self.printer)

    def note(self, text: str) -> RenderableType:
        """Prose below a table."""
        return paragraph(text, self.printer)


def _of_groups(
    records: Sequence[Record],
    style: Style,
    table: Callable[[list[Record], Style], RenderableType],
) -> Iterator[RenderableType]:
    """A table for each group, under its name where it has one."""
    for named, of_group in by_group(records):
        if named:
            yield style.heading(named)
        yield table(of_group, style)
        yield ""


def head_tables(records: Sequence[Record], style: Style) -> Iterator[RenderableType]:
    """A table of heads for each group, a line a head."""
    yield from _of_groups(records, style, _head_table)
    yield from _sink_note(records, style)
    yield _label_note(style)


def sampled_tables(records: Sequence[Record], style: Style) -> Iterator[RenderableType]:
    """Estimates with their standard errors; what only all rows could tell is not there."""
    yield from _of_groups(records, style, _sampled_table)
    yield style.note(
        "estimated from the sampled rows: means ± their standard errors; labels are estimates "
        "too. Largest logits are those of the sample: the head's own may be larger."
    )
    yield from _sink_note(records, style)
    yield _label_note(style)


def variant_tables(records: Sequence[Record], style: Style) -> Iterator[RenderableType]:
    """Scales or temperatures side by side, a line a head."""
    yield from _of_groups(records, style, _variant_table)
    yield style.note(
        f"mean entropy in {style.unit} and mean largest weight over the rows of each head"
    )
    yield from _sink_note(records, style)
    yield _label_note(style)


def group_table(records: Sequence[Record], style: Style) -> Iterator[RenderableType]:
    """One line a group, means over its heads."""
    columns = [
        column for column in _in_unit(GROUP_ENTROPY, style.unit) if _says_something(column, records)
    ]
    yield record_table(columns, records, style.printer, digits=style.digits)


def row_table(
    records: Sequence[Record], style: Style, tokens: Tokens | None = None
) -> Iterator[RenderableType]:
    """One line a query row, with tokens where there are some."""

    def token(record: Record) -> str | None:
        offset, labels = (tokens or {}).get((record["source"], record["group"]), (None, ()))
        return None if offset is None else _label_at(labels, record["query"] + offset)

    def top_token(record: Record) -> str | None:
        return _label_at(_labels_of(record, tokens), record["top_key"])

    columns = _with_column(ROW_ENTROPY, "query", Column("token", "token"))
    columns = _with_column(columns, "top_key", Column("top_token", "its token"))
    yield from _long_table(columns, records, style, {"token": token, "top_token": top_token})


def key_table(
    records: Sequence[Record], style: Style, tokens: Tokens | None = None
) -> Iterator[RenderableType]:
    """One line a key, with the mass it receives."""

    def token(record: Record) -> str | None:
        return _label_at(_labels_of(record, tokens), record["key"])

    columns = _with_column(KEY_MASS, "key", Column("token", "token"))
    yield from _long_table(columns, records, style, {"token": token})


def by_group(records: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Records of each group, under a name that leaves out a source that all share."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["source"], record["group"]), []).append(record)
    sources = {source for source, _ in groups}
    for (source, group), found in groups.items():
        yield (group if len(sources) == 1 else f"{source} {group}".strip()), found


def head_name(record: Record) -> str:
    """The number of a head, with its batch before it where that is not the first."""
    return f"{record['batch']}.{record['head']}" if record["batch"] else str(record["head"])


def _head_table(records: Sequence[Record], style: Style) -> RenderableType:
    def numbers(name: str, key: str) -> GridColumn:
        return GridColumn(name, [style.number(record[key]) for record in records])

    entropy = f"entropy ({style.unit})"
    columns = [
        GridColumn("head", [head_name(record) for record in records], is_key=True),
        GridColumn("label", [_label(record) for record in records], is_text=True),
        GridColumn(entropy, [style.number(_entropy(record, style.unit)) for record in records]),
        numbers("effective keys", "effective_keys_mean"),
        numbers("largest weight", "max_weight_mean"),
        numbers("max logit", "max_logit"),
        GridColumn("at query, key", [_where(record) for record in records]),
        numbers("logsumexp", "logsumexp_mean"),
        numbers("sink mass", "sink_mass_mean"),
    ]
    if any(record["distance_mean"] is not None for record in records):
        columns.append(numbers("distance", "distance_mean"))
    columns.append(GridColumn("empty rows", [str(record["empty_rows"]) for record in records]))
    if any(record["nonfinite_rows"] for record in records):
        cells = [str(record["nonfinite_rows"]) for record in records]
        columns.append(GridColumn("non-finite rows", cells))
    return laid_out(columns, style.printer)


def _sampled_table(records: Sequence[Record], style: Style) -> RenderableType:
    def estimates(name: str, key: str) -> GridColumn:
        pairs = [(record[f"{key}_mean"], record[f"{key}_se"]) for record in records]
        return GridColumn(name, [style.estimate(*pair) for pair in pairs])

    unit = style.unit
    entropies = [style.estimate(_entropy(r, unit), r[f"entropy_{unit}_se"]) for r in records]
    sampled = [f"{record['sampled_queries']} of {record['queries']}" for record in records]
    columns = [
        GridColumn("head", [head_name(record) for record in records], is_key=True),
        GridColumn("label", [_label(record) for record in records], is_text=True),
        GridColumn("rows sampled", sampled),
        GridColumn(f"entropy ({unit})", entropies),
        estimates("effective keys", "effective_keys"),
        estimates("largest weight", "max_weight"),
        estimates("logsumexp", "logsumexp"),
        estimates("sink mass", "sink_mass"),
    ]
    if any(record["distance_mean"] is not None for record in records):
        columns.append(estimates("distance", "distance"))
    logits = [style.number(record["sampled_max_logit"]) for record in records]
    columns.append(GridColumn("max logit of the sample", logits))
    counts = [str(record["sampled_empty_rows"]) for record in records]
    columns.append(GridColumn("empty rows of the sample", counts))
    return laid_out(columns, style.printer)


def _variant_table(records: Sequence[Record], style: Style) -> RenderableType:
    by_head: dict[tuple[int, int], dict[tuple[float, float], Record]] = {}
    for record in records:
        found = by_head.setdefault((record["batch"], record["head"]), {})
        found[record["scale"], record["temperature"]] = record
    heads = list(by_head.values())
    variants = list(heads[0])
    columns = [GridColumn("head", [head_name(next(iter(h.values()))) for h in heads], is_key=True)]
    for variant in variants:
        cells = [style.number(_entropy(head[variant], style.unit)) for head in heads]
        columns.append(GridColumn(f"entropy, {_variant(variant, variants)}", cells))
    for variant in variants:
        cells = [style.number(head[variant]["max_weight_mean"]) for head in heads]
        columns.append(GridColumn(f"weight, {_variant(variant, variants)}", cells))
    labels = [" → ".join(_changes(head, variants)) for head in heads]
    columns.append(GridColumn("label", labels, is_text=True))
    return laid_out(columns, style.printer)


def _changes(head: Mapping[tuple[float, float], Record], variants: Sequence[Any]) -> list[str]:
    """Its labels one after another, one that stays the same once."""
    labels = [str(head[variant]["label"] or "–") for variant in variants]
    return [label for i, label in enumerate(labels) if i == 0 or label != labels[i - 1]]


def _variant(variant: tuple[float, float], among: Sequence[tuple[float, float]]) -> str:
    """A scale and a temperature, those of them that differ among the variants."""
    scales, heats = (len(set(values)) > 1 for values in zip(*among, strict=True))
    words = [f"scale {variant[0]:.6g}"] if scales or not heats else []
    return " ".join(words + ([f"temperature {variant[1]:.6g}"] if heats else []))


def _label(record: Record) -> str:
    if record["label"] is None:
        return "–"
    score = record["label_score"]
    return str(record["label"]) + ("" if score is None else f" {score:.2f}")


def _where(record: Record) -> str:
    query = record["max_logit_query"]
    return "–" if query is None else f"{query}, {record['max_logit_key']}"


def _entropy(record: Record, unit: Unit) -> float | None:
    nats: float | None = record["entropy_nats_mean"]
    return nats if nats is None or unit is Unit.NATS else nats / math.log(2)


def _label_note(style: Style) -> RenderableType:
    parts = [f"{name} ≥ {value:g}" for name, value in style.limits.items()]
    limits = ", ".join(parts)
    return style.note(f"labels: {limits}, otherwise mixed; --label-limit NAME=X adjusts them")


def _sink_note(records: Sequence[Record], style: Style) -> Iterator[RenderableType]:
    if any(record.get("sink_weight_mean") is not None for record in records):
        yield style.note("entropies count the sink logit as one more outcome")


def _long_table(
    columns: Sequence[Column],
    records: Sequence[Record],
    style: Style,
    tokens: Mapping[str, Callable[[Record], str | None]],
) -> Iterator[RenderableType]:
    limit = TERMINAL_RECORDS if style.printer.on_terminal else len(records)
    shown = [
        record | {name: token(record) for name, token in tokens.items()}
        for record in records[:limit]
    ]
    named = [column for column in _in_unit(columns, style.unit) if _varies(column, records)]
    if not records:
        yield "no records"
        return
    yield record_table(named, shown, style.printer, digits=style.digits)
    if limit < len(records):
        yield f"… {len(records) - limit} more: --format csv, or a pipe, has them all"
    yield from _sink_note([{"sink_weight_mean": r.get("sink_weight")} for r in shown], style)


def _varies(column: Column, records: Sequence[Record]) -> bool:
    """Whether a column says anything: a place that all share, or "no" everywhere, does not."""
    if column.key == "nonfinite":
        return any(record["nonfinite"] for record in records)
    if column.key not in KEYS or column.key in ("query", "key"):
        return True
    return len({record[column.key] for record in records}) > 1


def _says_something(column: Column, records: Sequence[Record]) -> bool:
    if column.key in ("empty_rows", "nonfinite_rows"):
        return any(record[column.key] for record in records)
    return _varies(column, records)


def _in_unit(columns: Sequence[Column], unit: Unit) -> list[Column]:
    """Columns without those in the other unit of entropy."""
    return [column for column in columns if column.unit in ("", str(unit))]


def _with_column(columns: Sequence[Column], after: str, new: Column) -> list[Column]:
    place = next(i for i, column in enumerate(columns) if column.key == after) + 1
    return [*columns[:place], new, *columns[place:]]


def _labels_of(record: Record, tokens: Tokens | None) -> tuple[str, ...]:
    return (tokens or {}).get((record["source"], record["group"]), (None, ()))[1]


def _label_at(labels: Sequence[str], index: int | None) -> str | None:
    if index is None or not 0 <= index < len(labels):
        return None
    from attncli.files.text import shown

    return shown(labels[index], TOKEN_WIDTH)
