"""`mask` for eyes: what a mask is, what it lets through, how it looks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attncli.attention.masks.audit import AddedValues, MaskAudit, MaskRecord, cell_counts, place
from attncli.attention.masks.mask import HeadMask
from attncli.columns import columns_of
from attncli.report.choices import Unit
from attncli.report.mask_picture import picture, picture_size
from attncli.report.prose import heading, paragraph
from attncli.report.records import MASK_CELLS, MASK_EFFECT
from attncli.report.table import record_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from attncli.attention.masks.compare import Comparison, Leak
    from attncli.attention.masks.mask import Mask
    from attncli.report.printer import Printer

Record = dict[str, Any]

# Pictures on a terminal before the rest is left to --format json or --batch.
MOST_PICTURES = 4
# Bias values shown of ALiBi or a float mask.
BIAS_ROWS = 8
# Lines of counts on a terminal.
MOST_RECORDS = 40


@dataclass(frozen=True, slots=True)
class Results:
    """What `mask` has found.

    Attributes:
        built: the mask.
        judged: counts and words.
        leaks: what it shows although a rule hides it; None where nobody asked.
    """

    built: Mask
    judged: MaskAudit
    leaks: Sequence[Leak] | None = None


def mask_tables(
    results: Results,
    records: Sequence[Record],
    labels: Sequence[str] | None,
    printer: Printer,
    digits: int,
) -> Iterator[RenderableType]:
    """Description, a picture of each different matrix, counts, and what is added."""
    recognition = results.judged.recognition
    yield _title(results.judged.description, printer)
    if results.judged.lenient is None and recognition.options and not recognition.probably_inverted:
        yield f"  options: {_options_text(recognition.options)}"
    if recognition.probably_inverted and hasattr(results.built.file, "shown"):
        yield f"  --mask-true {_other(results.built)} reads it the other way round"
    yield ""
    yield from _pictures(results, labels, printer)
    limit = MOST_RECORDS if printer.on_terminal else len(records)
    yield record_table(columns_of(MaskRecord), records[:limit], printer, digits=digits)
    if limit < len(records):
        yield f"… {len(records) - limit} more: --format csv has them all"
    yield from _named(records[:limit])
    yield from _leak_lines(results.leaks or ())
    yield from _bias_lines(results.built, digits)
    if results.judged.added is not None:
        yield from _added_lines(results.judged.added)


def _title(text: str, printer: Printer) -> RenderableType:
    """What the mask is; in red where that is probably a mistake."""
    if not text.startswith("probably inverted") and ": probably inverted" not in text:
        return heading(text, printer) if len(text) <= printer.width else text
    loud = text.replace("probably inverted", "PROBABLY INVERTED")
    return printer.styled((loud, "bold rgb(255,255,255) on rgb(176,32,32)"))


def _other(built: Mask) -> str:
    return "drop" if getattr(built.file, "shown", True) else "keep"


def _pictures(
    results: Results, labels: Sequence[str] | None, printer: Printer
) -> Iterator[RenderableType]:
    """Each different matrix."""
    built, parts = results.built, results.judged.recognition.parts
    shown = parts[:MOST_PICTURES] if printer.on_terminal else parts
    offset = 0 if built.offset is None else int(built.offset[0])
    for batch, head, part in shown:
        if len(parts) > 1:
            yield f"{place(batch, head).strip(' ()')}: {part.description}"
        counts = cell_counts(HeadMask(built, batch or 0, head or 0), *picture_size(printer))
        yield from picture(counts, labels, printer, offset=offset)
        yield ""
    if len(shown) < len(parts):
        yield f"… {len(parts) - len(shown)} more matrices: `| less` or --output shows them all"
        yield ""


def _leak_lines(leaks: Sequence[Leak]) -> Iterator[str]:
    """What the mask file shows although a rule hides it."""
    for leak in leaks:
        if not leak.cells:
            yield f'leaks through "{leak.rule}": none'
            continue
        cells = ", ".join(f"({cell.query}, {cell.key})" for cell in leak.first)
        more = ", …" if leak.cells > len(leak.first) else ""
        yield f'leaks through "{leak.rule}": {leak.cells}, (query, key) {cells}{more}'


def comparison_tables(
    found: Comparison,
    cells: Sequence[Record],
    against: str,
    printer: Printer,
) -> Iterator[RenderableType]:
    """How many cells differ, and the first of them."""
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
    yield ""
    yield record_table(MASK_CELLS, cells, printer, digits=6)
    if len(cells) < found.differing + found.bias_differing:
        yield f"… the first {len(cells)} are named"


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
        elif name == "key_padding":
            parts.append(f"{option} FILE")  # no list of numbers serves for this one
        elif hasattr(value, "tolist"):
            flat = value.ravel().tolist()
            text = ",".join(str(int(item)) for item in flat[:24]) + (",…" if len(flat) > 24 else "")
            parts.append(f"{option} {text}")
        elif isinstance(value, tuple):
            parts.append(f"{option} {','.join(map(str, value))}")
        elif value is not None and value is not False:
            parts.append(f"{option} {value}")
    return " ".join(parts) or "none needed"


def _named(records: Sequence[Record]) -> Iterator[str]:
    """The first empty rows and unused keys, by index."""
    for record in records:
        for what in ("empty_rows", "unused_keys"):
            first = record[f"first_{what}"]
            if first:
                more = ", …" if record[what] > len(first) else ""
                listed = ", ".join(map(str, first))
                where = place(record["batch"], record["head"])
                yield f"{what.replace('_', ' ')}{where}: {listed}{more}"


def _added_lines(added: AddedValues) -> Iterator[str]:
    """The values of an additive mask, or between what they lie."""
    yield ""
    if added.counts is not None:
        values = (f"{value + 0.0:g} ({cells} cells)" for value, cells in added.counts.items())
        yield f"adds {', '.join(values)}"
    else:
        hidden = f"; -inf, hidden, in {added.hidden} cells" if added.hidden else ""
        yield f"adds numbers from {added.minimum:g} to {added.maximum:g}{hidden}"


def _bias_lines(built: Mask, digits: int) -> Iterator[RenderableType]:
    """ALiBi: its slopes, and the first values of the bias of head 0."""
    if built.slopes is None:
        return
    slopes = ", ".join(f"{slope:.6g}" for slope in built.slopes.tolist())
    yield ""
    yield f"ALiBi: adds −slope·|p − j|; slope of each head: {slopes}"
    one, corner = slice(0, 1), slice(0, BIAS_ROWS)
    values = built.bias(one, one, slice(0, min(BIAS_ROWS, built.sizes.q_len)), corner)
    if values is not None:
        yield "bias of head 0, first queries and keys:"
        for row in values[0, 0].tolist():
            yield "  " + " ".join(f"{value + 0.0:>{digits + 4}.{digits}f}" for value in row)
