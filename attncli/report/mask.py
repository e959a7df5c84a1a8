"""`mask` for eyes: what a mask is, what it lets through, how it looks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from attncli.attention.masks.audit import (
    AddedValues,
    CellCounts,
    MaskAudit,
    MaskRecord,
    cell_counts,
    place,
)
from attncli.attention.masks.compare import Cell, Leak, MaskComparison
from attncli.attention.masks.mask import Mask
from attncli.attention.masks.rules import BooleanMask
from attncli.attention.sizes import Sizes
from attncli.columns import Column, columns_of
from attncli.errors import options_text
from attncli.files.text import shown
from attncli.report.printer import Printer, heading, paragraph
from attncli.report.table import (
    PLAIN_SHADES,
    SHADES,
    TableColumn,
    decimals,
    labels_of_batch,
    positions_above,
    record_table,
    shortened,
    table,
)

Record = dict[str, Any]

# Pictures on a terminal before the rest is left to --format json or --batch.
MOST_PICTURES = 4
# Bias values shown of ALiBi.
BIAS_ROWS = 8
# Lines of records on a terminal.
MOST_RECORDS = 40
# Document ids that are listed.
MOST_IDS = 24
# Share of visible cells in a rectangle: none, up to a third, two thirds, less than all, all.
MOST_ROWS = 32
MOST_COLUMNS = 64
LABEL_WIDTH = 15


def mask_tables(
    mask: Mask,
    judged: MaskAudit,
    leaks: Sequence[Leak] | None,
    records: Sequence[Record],
    labels: Sequence[Sequence[str]] | None,
    printer: Printer,
    digits: int,
) -> Iterator[RenderableType]:
    """Description, a picture of each different matrix, counts, leaks, and what is added."""
    recognition = judged.recognition
    yield _title(judged.description, printer)
    if judged.lenient is None and recognition.options and not recognition.probably_inverted:
        yield f"  options: {_options_text(recognition.options, printer)}"
    if recognition.probably_inverted and isinstance(mask.file, BooleanMask):
        other = "drop" if mask.file.shown else "keep"
        yield f"  --mask-true {other} reads it the other way round"
    yield ""
    yield from _pictures(mask, judged, labels, printer)
    shown, rest = _first(records, "", printer)
    yield record_table(columns_of(MaskRecord), shown, printer, digits=digits)
    yield from rest
    yield from _named(shown)
    for leak in leaks or ():
        cells = ", ".join(f"({cell.query}, {cell.key})" for cell in leak.first)
        more = ", …" if leak.cells > len(leak.first) else ""
        found = f"{leak.cells}, (query, key) {cells}{more}" if leak.cells else "none"
        yield f'leaks through "{leak.rule}": {found}'
    yield from _bias_lines(mask, printer, digits)
    if judged.added is not None:
        yield from _added_lines(judged.added)


def mask_opening(
    names: Sequence[str], parts: Sequence[str], sizes: Sizes, *more: str
) -> Iterator[RenderableType]:
    """What a mask is of, in the form of other tables; nothing of one matrix without files.

    Args:
        names: of its groups; some may be empty.
        parts: the files that it is made of, in words.
        sizes: B, H, S_q and S_k.
        more: what else there is to say.
    """
    named = [name for name in names if name]
    if named:
        yield heading(f"group{'s' * (len(named) > 1)} {_runs(named)}")
    if named or parts or more or sizes.batch * sizes.heads != 1:
        of = f"B={sizes.batch} H={sizes.heads} S_q={sizes.q_len} S_k={sizes.k_len}"
        yield " · ".join((*parts, of, *more))


def kinds_table(
    kinds: Sequence[tuple[Sequence[str], MaskAudit]], printer: Printer
) -> Iterator[RenderableType]:
    """Which groups have which mask, a line a kind."""
    columns = [
        TableColumn("groups", [_runs(names) for names, _ in kinds], is_text=True, is_key=True),
        TableColumn("mask", [judged.description for _, judged in kinds], is_text=True),
    ]
    for heading_, of_record in (("kept", "kept"), ("empty rows", "empty_rows")):
        sums = [sum(getattr(one, of_record) for one in judged.records) for _, judged in kinds]
        columns.append(TableColumn(heading_, list(map(str, sums))))
    yield table(columns, printer)
    yield "--group NAME shows one"


def _runs(names: Sequence[str]) -> str:
    """Names side by side, those that count up in the end as their first and last."""
    found: list[tuple[str, int | None, int | None]] = []
    for name in names:
        stem, number = re.fullmatch(r"(.*?)(\d*)", shown(name), re.DOTALL).groups()  # type: ignore[union-attr]
        index = int(number) if number else None
        before = found[-1] if found else None
        if before and index is not None and before[0] == stem and before[2] == index - 1:
            found[-1] = stem, before[1], index
        else:
            found.append((stem, index, index))
    return ", ".join(
        stem + ("" if first is None else str(first) if first == last else f"{first}–{last}")
        for stem, first, last in found
    )


def comparison_tables(
    found: MaskComparison, cells: Sequence[Record], against: str, printer: Printer
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
    yield record_table(columns_of(Cell), cells, printer, digits=6)
    if len(cells) < found.differing + found.bias_differing:
        yield f"… the first {len(cells)} are named; --format csv names all"


def effect_tables(
    columns: Sequence[Column], records: Sequence[Record], printer: Printer, digits: int
) -> Iterator[RenderableType]:
    """Softmax before and after the mask, a line a query."""
    shown, rest = _first(records, " queries", printer)
    moved = any(
        decimals(one["mass_moved"], digits) != decimals(one["mass_removed"], digits)
        for one in records
    )
    columns = [one for one in columns if moved or one.key != "mass_moved"]
    yield record_table(columns, shown, printer, digits=digits)
    yield from rest
    yield ""
    if records:
        mean = sum(record["mass_removed"] for record in records) / len(records)
        empty = sum(record["sum_after"] == 0 for record in records)
        went = "mass moved: half of all change" if moved else "as much moved to the visible keys"
        told = "1 row is empty" if empty == 1 else f"{empty} rows are empty"
        yield paragraph(
            "mass removed: weight that hidden keys had before the mask, on average "
            f"{mean:.{digits}f}; {went}. {told}.",
            printer,
        )


def _first(
    records: Sequence[Record], what: str, printer: Printer
) -> tuple[Sequence[Record], list[str]]:
    """The records that a terminal shows, and a line that says how many are left."""
    left = len(records) - MOST_RECORDS if printer.on_terminal else 0
    if left <= 0:
        return records, []
    return records[:MOST_RECORDS], [f"… {left} more{what}: --format csv has them all"]


def _title(text: str, printer: Printer) -> RenderableType:
    """What the mask is; in red where that is probably a mistake."""
    if not text.startswith("probably inverted") and ": probably inverted" not in text:
        return heading(text) if len(text) <= printer.width else text
    loud = text.replace("probably inverted", "PROBABLY INVERTED")
    return Text(loud, "bold rgb(255,255,255) on rgb(176,32,32)")


def _options_text(options: dict[str, Any], printer: Printer) -> str:
    """Recognised options as one would type them; a terminal shows long lists cut short."""
    typed = {name: value for name, value in options.items() if value is not False}
    for name, value in typed.items():
        if printer.on_terminal and getattr(value, "size", 0) > MOST_IDS:
            first = ",".join(str(int(number)) for number in value.flat[:MOST_IDS])
            typed[name] = f"{first},… (`| less` or --output shows them all)"
        elif getattr(value, "ndim", 0) > 1 and len(value) == 1:
            typed[name] = value[0]
    return options_text(typed) or "none needed"


def _pictures(
    mask: Mask, judged: MaskAudit, labels: Sequence[Sequence[str]] | None, printer: Printer
) -> Iterator[RenderableType]:
    """Each different matrix."""
    parts = judged.recognition.parts
    shown = parts[:MOST_PICTURES] if printer.on_terminal else parts
    offset = 0 if mask.offset is None else int(mask.offset[0])
    for batch, head, part in shown:
        if len(parts) > 1:
            yield f"{place(batch, head).strip(' ()')}: {part.description}"
        counts = cell_counts(mask.head(batch or 0, head or 0), *picture_size(printer))
        yield from picture(counts, labels_of_batch(labels, batch or 0), printer, offset=offset)
        yield ""
    if len(shown) < len(parts):
        yield f"… {len(parts) - len(shown)} more matrices: `| less` or --output shows them all"
        yield ""


def _named(records: Sequence[Record]) -> Iterator[str]:
    """The first empty rows and unused keys, by index."""
    for record in records:
        for what in ("empty_rows", "unused_keys"):
            first = record[f"first_{what}"]
            if first:
                more = ", …" if record[what] > len(first) else ""
                listed = ", ".join(map(str, first))
                where = place(record["batch"], record["head"])
                named = "queries that see no key" if what == "empty_rows" else "keys nobody sees"
                yield f"{named}{where}: {listed}{more}"


def _bias_lines(mask: Mask, printer: Printer, digits: int) -> Iterator[RenderableType]:
    """ALiBi: its slopes, and the first values of the bias of head 0."""
    if mask.slopes is None:
        return
    slopes = ", ".join(f"{mask.slopes[head]:.6g}" for head in mask.indices(1))
    yield ""
    yield f"ALiBi: adds −slope·|p − j|; slope of each head: {slopes}"
    batch, head = mask.first
    corner, one = slice(0, BIAS_ROWS), slice(head, head + 1)
    rows = slice(0, min(BIAS_ROWS, mask.sizes.q_len))
    values = mask.bias(slice(batch, batch + 1), one, rows, corner)
    if values is not None and values.size:
        yield f"bias of head {head}, first queries and keys:"
        columns = values[0, 0].T.tolist()
        queries = TableColumn("", [str(query) for query in range(len(columns[0]))], is_key=True)
        keys = (
            TableColumn(str(key), [decimals(value, digits) for value in column])
            for key, column in enumerate(columns)
        )
        yield table([queries, *keys], printer)


def _added_lines(added: AddedValues) -> Iterator[str]:
    """The values of an additive mask, or between what they lie."""
    yield ""
    if added.counts is not None:
        values = (f"{value + 0.0:g} ({cells} cells)" for value, cells in added.counts.items())
        yield f"adds {', '.join(values)}"
    else:
        hidden = f"; -inf, hidden, in {added.hidden} cells" if added.hidden else ""
        yield f"adds numbers from {added.minimum:g} to {added.maximum:g}{hidden}"


def picture_size(printer: Printer) -> tuple[int, int]:
    """Rows and columns of characters that a picture may take."""
    columns = min(MOST_COLUMNS, printer.width - LABEL_WIDTH - 4)
    return min(MOST_ROWS, max(8, printer.height - 12)), max(8, columns)


def picture(
    counts: CellCounts,
    labels: Sequence[str] | None,
    printer: Printer,
    *,
    offset: int = 0,
) -> Iterator[RenderableType]:
    """One line of characters per row of rectangles, with positions or labels, which are tokens for
    each position on the key axis, at the edges.
    """
    if not counts.counts.size:
        yield "no cells"
        return
    names = [
        shortened(_row_name(counts, row, labels, offset), LABEL_WIDTH)
        for row in range(len(counts.counts))
    ]
    lead = max(map(len, names), default=0)
    # Characters are twice as high as wide: two for a cell make a square, where they fit.
    room = min(MOST_COLUMNS, printer.width - LABEL_WIDTH - 4)
    sizes, signs = counts.sizes, printer.sign(SHADES, PLAIN_SHADES)
    wide = 2 if sizes.max() == 1 and 2 * counts.counts.shape[1] <= room else 1
    above = positions_above(counts.key_edges[:-1].tolist(), wide, 5, printer.width - lead - 1)
    yield Text(" " * (lead + 1) + above, "dim")
    filled = np.minimum(2, 3 * counts.counts // np.maximum(1, sizes)) + 1
    filled = np.where(counts.counts == sizes, 4, np.where(counts.counts > 0, filled, 0))
    for name, marks in zip(names, filled.tolist(), strict=True):
        line = [(f"{name:>{lead}} ", "dim")]
        for is_some, run in groupby(marks, key=bool):
            shades = (signs[mark] * wide if is_some else f"{signs[0]:<{wide}}" for mark in run)
            line.append(("".join(shades), "rgb(46,134,222)" if is_some else "dim"))
        yield Text.assemble(*line[:-1], (line[-1][0].rstrip(), line[-1][1]))
    if sizes.max() > 1:
        yield (
            f"{'':>{lead}} each character stands for up to {sizes.max()} cells: "
            f"{signs[0]} none visible, {signs[1:4]} some, {signs[4]} all"
        )


def _row_name(counts: CellCounts, row: int, labels: Sequence[str] | None, offset: int) -> str:
    first, stop = counts.query_edges[row], counts.query_edges[row + 1]
    if stop - first > 1:
        return f"{first}–{stop - 1}"
    position = int(first) + offset
    if labels is not None and 0 <= position < len(labels):
        return f"{first} {shown(labels[position])}"
    return str(first)
