"""`mask` for eyes: what a mask is, what it lets through, how it looks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from attncli.report.choices import Unit
from attncli.report.mask_picture import picture, picture_size
from attncli.report.record_table import record_table
from attncli.report.records import MASK, MASK_CELLS, MASK_EFFECT
from attncli.report.stage_tables import heading, paragraph

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from attncli.attention.mask import Mask
    from attncli.attention.mask_audit import MaskAudit
    from attncli.attention.mask_compare import Comparison
    from attncli.report.printer import Printer

Record = dict[str, Any]

# Pictures on a terminal before the rest is left to --format json or --batch.
MOST_PICTURES = 4
# Bias values shown of ALiBi or a float mask.
BIAS_ROWS = 8


def mask_tables(
    built: Mask,
    judged: MaskAudit,
    records: Sequence[Record],
    labels: Sequence[str] | None,
    printer: Printer,
    digits: int,
) -> Iterator[RenderableType]:
    """Description, a picture of each different matrix, counts, and what is added."""
    from attncli.attention.mask_picture import cell_counts
    from attncli.attention.mask_view import View

    yield heading(judged.recognition.description, printer)
    if judged.recognition.options:
        yield f"  options: {_options_text(judged.recognition.options)}"
    yield ""
    shown = records[:MOST_PICTURES]
    for record in shown:
        view = View(built, record["batch"] or 0, record["head"] or 0)
        if len(records) > 1:
            yield f"{_place(record)}: {record['description']}"
        yield from picture(cell_counts(view, *picture_size(printer)), labels, printer)
        yield ""
    if len(shown) < len(records):
        yield f"… {len(records) - len(shown)} more matrices: --format json has them all"
        yield ""
    yield record_table(MASK, records, printer, digits=digits)
    yield from _named(records)
    yield from _bias_lines(built, printer, digits)


def comparison_tables(
    found: Comparison, cells: Sequence[Record], against: str
) -> Iterator[RenderableType]:
    """How many cells differ, and the first of them."""
    from attncli.report.printer import Printer

    if not found.differing and not found.bias_differing:
        yield f"equal to {against}: {found.cells} cells compared"
        return
    yield (
        f"{found.differing} of {found.cells} cells differ from {against}: {found.only_a} visible "
        f"in this mask alone, {found.only_b} in the other alone"
    )
    if found.differing == found.cells:
        yield "every cell differs: each mask is the inverse of the other"
    if found.bias_differing:
        yield f"{found.bias_differing} cells visible in both have other additive values"
    yield record_table(MASK_CELLS, cells, Printer(), digits=6)


def effect_tables(
    records: Sequence[Record], printer: Printer, digits: int, unit: Unit
) -> Iterator[RenderableType]:
    """Softmax before and after the mask, a line a query."""
    columns = [column for column in MASK_EFFECT if column.unit in ("", str(unit))]
    limit = 40 if printer.on_terminal else len(records)
    yield record_table(columns, records[:limit], printer, digits=digits)
    if limit < len(records):
        yield f"… {len(records) - limit} more queries: --format csv has them all"
    yield ""
    removed = [record["mass_removed"] for record in records]
    empty = sum(record["sum_after"] == 0 for record in records)
    if removed:
        mean = sum(removed) / len(removed)
        yield paragraph(
            "mass removed: weight that hidden keys had before the mask, on average "
            f"{mean:.{digits}f}; it moved to the visible keys. {empty} rows are empty.",
            printer,
        )


def _options_text(options: dict[str, Any]) -> str:
    """Recognised options as one would type them."""
    parts = []
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            parts.append(option)
        elif hasattr(value, "tolist"):
            flat = value.ravel().tolist()
            text = ",".join(str(int(item)) for item in flat[:24]) + (",…" if len(flat) > 24 else "")
            parts.append(f"{option} {text}")
        elif isinstance(value, tuple):
            parts.append(f"{option} {','.join(map(str, value))}")
        elif value is not None and value is not False:
            parts.append(f"{option} {value}")
    return " ".join(parts) or "none needed"


def _place(record: Record) -> str:
    named = {"batch": record["batch"], "head": record["head"]}
    parts = [f"{name} {index}" for name, index in named.items() if index is not None]
    return ", ".join(parts) or "all"


def _named(records: Sequence[Record]) -> Iterator[str]:
    """The first empty rows and unused keys, by index."""
    for record in records:
        for what in ("empty_rows", "unused_keys"):
            first = record[f"first_{what}"]
            if first:
                more = ", …" if record[what] > len(first) else ""
                listed = ", ".join(map(str, first))
                yield f"{what.replace('_', ' ')} of {_place(record)}: {listed}{more}"


def _read_as_hidden(built: Mask) -> Iterator[str]:
    """What a float mask would be if its "minus a lot" meant hidden."""
    from attncli.attention.mask_input import MINUS_A_LOT
    from attncli.attention.recognise import recognise_mask

    said = recognise_mask(built, hide_at=MINUS_A_LOT).description
    yield f"  with values of {MINUS_A_LOT:g} or less read as hidden: {said}"


def _bias_lines(built: Mask, printer: Printer, digits: int) -> Iterator[RenderableType]:
    """What is added to the logits: slopes of ALiBi, and the values of a float mask."""
    if built.slopes is not None:
        slopes = ", ".join(f"{slope:.6g}" for slope in built.slopes.tolist())
        yield ""
        yield f"ALiBi: adds −slope·|p − j|; slope of each head: {slopes}"
        yield from _bias_corner(built, digits)
    from attncli.attention.mask_additive import audit_additive
    from attncli.attention.mask_input import MINUS_A_LOT

    found = audit_additive(built)
    if found is None:
        return
    yield ""
    yield heading("additive values", printer)
    if found.zeros_and_ones:
        yield "  only 0 and 1: most likely meant as boolean"
    for value in found.values or ():
        if value.value == -math.inf:
            continue
        effects = {str(effect): [] for effect in value.effects.values()}  # type: ignore[var-annotated]
        for form, effect in value.effects.items():
            effects[str(effect)].append(str(form))
        told = "; ".join(f"{' and '.join(forms)}: {effect}" for effect, forms in effects.items())
        yield f"  {value.value:g} in {value.cells} cells: {told}"
    if found.values is None:
        yield f"  more than can be listed, from {found.minimum:g} to {found.maximum:g}"
    if found.minus_infinity:
        yield f"  -inf in {found.minus_infinity} cells: hidden"
    if found.minimum is not None and found.minimum <= MINUS_A_LOT:
        yield from _read_as_hidden(built)
    for form, rows in found.rows.items():
        if rows.empty or rows.uniform or rows.unlikely:
            yield (
                f"  rows in {form}: {rows.empty} empty, {rows.uniform} uniform over hidden keys, "
                f"{rows.unlikely} a softmax over keys meant to be hidden"
            )


def _bias_corner(built: Mask, digits: int) -> Iterator[str]:
    """The first values of the bias of head 0."""
    corner = slice(0, BIAS_ROWS)
    one = slice(0, 1)
    values = built.bias(one, one, slice(0, min(BIAS_ROWS, built.sizes.q_len)), corner)
    if values is None:
        return
    yield "bias of head 0, first queries and keys:"
    for row in values[0, 0].tolist():
        yield "  " + " ".join(f"{value + 0.0:>{digits + 4}.{digits}f}" for value in row)
