"""`compare` for eyes: tables of heads, groups and keys, and pictures of all heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.console import RenderableType

from attncli.columns import Column
from attncli.errors import printable
from attncli.report.entropy import Style, alone, head_name, heads_picture
from attncli.report.printer import heading
from attncli.report.table import record_table

Record = dict[str, Any]

_LABEL = Column("label", "label")
_LARGEST = ("kl_nats_mean", "kl_bits_mean", "kl_nats_max", "kl_bits_max")
_ORDER = dict.fromkeys(_LARGEST, -1) | {"kl_max_query": 0}


def record_tables(
    records: Sequence[Record], columns: Sequence[Column], style: Style
) -> Iterator[RenderableType]:
    """One table, a line a head or a group, and what its columns mean."""
    if not records:
        yield "no heads"
        return
    yield from alone(style)
    yield from _one_change(records)
    said = [each for each in columns if style.shows(each, records) and _tells(each, records)]
    if "label_a" not in records[0]:
        yield record_table(said, records, style.printer, digits=style.digits)
        return
    keys = [column for column in said if column.is_key]
    if not any(column.key == "head" for column in keys):
        keys.append(Column("head", "head", is_key=True))
    others = [column for column in said if not column.is_key]
    # Behind the maximum that it belongs to, in whatever unit.
    others.sort(key=lambda column: _ORDER.get(column.key, 1))
    lines = [record | {"label": _label(record)} for record in records]
    yield record_table([*keys, _LABEL, *others], lines, style.printer, digits=style.digits)
    yield ""
    yield style.note(
        "A is the base, B the other side. KL(A‖B) over the rows where it is finite; mass lost is "
        "A's weight on keys that B hides; output error is ‖O_B − O_A‖ / ‖O_A‖."
    )


def heads_pictures(
    records: Sequence[Record], column: Column, style: Style
) -> Iterator[RenderableType]:
    """A picture of all heads for each what-if."""
    yield from alone(style)
    style = replace(style, openings={})
    for what_if in dict.fromkeys(record["what_if"] for record in records):
        of_change = [record for record in records if record["what_if"] == what_if]
        yield from _one_change(of_change)
        yield from heads_picture(of_change, column, style)


def worst_tables(records: Sequence[Record], style: Style) -> Iterator[RenderableType]:
    """The keys of the worst row of each what-if."""
    if not records:
        yield "no row to compare"
    shown = ("key", "token", "weight_a", "weight_b", "change")
    headings = {"weight_a": "before", "weight_b": "after"}
    columns = [Column(key, headings.get(key, key), is_key=key == "key") for key in shown]
    for what_if in dict.fromkeys(record["what_if"] for record in records):
        lines = [record for record in records if record["what_if"] == what_if]
        place = f"{printable(lines[0]['group'])} {head_name(lines[0])}".strip()
        told = [] if what_if is None else [what_if]
        yield heading(", ".join([*told, place, f"query {lines[0]['query']}"]))
        yield record_table(columns, lines, style.printer, digits=style.digits)


def _tells(column: Column, records: Sequence[Record]) -> bool:
    """Whether a column is worth a place: what nothing loses anywhere is not."""
    return column.key != "mass_lost_mean" or any(record[column.key] for record in records)


def _one_change(records: Sequence[Record]) -> Iterator[RenderableType]:
    """A line that names the what-if, where all records have one in common."""
    changes = {record["what_if"] for record in records}
    if len(changes) == 1 and None not in changes:
        yield heading(f"what if {changes.pop()}")


def _label(record: Record) -> str | None:
    labels = record["label_a"], record["label_b"]
    if labels[0] == labels[1]:
        return None if labels[0] is None else str(labels[0])
    return " → ".join("–" if label is None else str(label) for label in labels)
