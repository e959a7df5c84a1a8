"""`entropy` for eyes: heads, groups, rows, keys; a grid of all heads; a histogram of one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from attncli.errors import UsageError
from attncli.report.choices import Unit
from attncli.report.numbers import decimals
from attncli.report.record_table import record_table
from attncli.report.records import GROUP_ENTROPY, HEAD_ENTROPY, KEY_MASS, ROW_ENTROPY
from attncli.report.stage_tables import heading, paragraph, shade

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from attncli.report.printer import Printer
    from attncli.report.records import Column

Record = dict[str, Any]

HISTOGRAM_BINS = 20
HISTOGRAM_WIDTH = 48
TERMINAL_RECORDS = 40
GRID_MARKS = " ·░▒▓█"


def head_tables(
    records: Sequence[Record], printer: Printer, digits: int, unit: Unit
) -> Iterator[RenderableType]:
    """A table of heads for each group, a line a head."""
    for named, of_group in _by_group(records):
        if named:
            yield heading(named, printer)
        yield _head_table(of_group, digits, unit)
        yield ""


def variant_tables(
    records: Sequence[Record], printer: Printer, digits: int, unit: Unit
) -> Iterator[RenderableType]:
    """Scales or temperatures side by side, a line a head."""
    names = list(dict.fromkeys(_variant(record) for record in records))
    for named, of_group in _by_group(records):
        if named:
            yield heading(named, printer)
        table = _table("head", *(f"entropy, {name}" for name in names))
        for name in names:
            table.add_column(f"largest weight, {name}", justify="right")
        table.add_column("label", justify="left")
        for key in dict.fromkeys((r["batch"], r["head"]) for r in of_group):
            found = {_variant(r): r for r in of_group if (r["batch"], r["head"]) == key}
            entropies = [decimals(_entropy(found[name], unit), digits) for name in names]
            largest = [decimals(found[name]["max_weight_mean"], digits) for name in names]
            labels = " → ".join(dict.fromkeys(str(found[name]["label"]) for name in names))
            table.add_row(_head_name(found[names[0]]), *entropies, *largest, labels)
        yield table
        yield ""
    yield f"entropy in {unit}, mean over the rows of each head"


def group_table(
    records: Sequence[Record], printer: Printer, digits: int, unit: Unit
) -> Iterator[RenderableType]:
    """One line a group, means over its heads."""
    yield record_table(_in_unit(GROUP_ENTROPY, unit), records, printer, digits=digits)


def row_table(
    records: Sequence[Record], printer: Printer, digits: int, unit: Unit
) -> Iterator[RenderableType]:
    """One line a query row."""
    yield from _long_table(ROW_ENTROPY, records, printer, digits, unit)


def key_table(
    records: Sequence[Record], printer: Printer, digits: int, unit: Unit
) -> Iterator[RenderableType]:
    """One line a key, with the mass it receives."""
    yield from _long_table(KEY_MASS, records, printer, digits, unit)


def grid(
    records: Sequence[Record], column: Column, printer: Printer, digits: int
) -> Iterator[RenderableType]:
    """Groups down, heads across, one value each, shaded from the smallest to the largest."""
    from rich.text import Text

    values = [record[column.key] for record in records if record[column.key] is not None]
    low, high = (min(values), max(values)) if values else (0.0, 0.0)
    unit = f" ({column.unit})" if column.unit else ""
    yield heading(f"{column.heading or column.key}{unit}", printer)
    rows = list(_by_group(records))
    lead = max((len(named) for named, _ in rows), default=0)
    widest = max((len(decimals(value, min(digits, 2))) for value in values), default=1)
    most = max((len(of_group) for _, of_group in rows), default=0)
    fits = lead + 1 + most * (widest + 1) <= printer.width
    for named, of_group in [("", rows[0][1])] if rows and fits else []:
        numbers = "".join(f"{record['head']:>{widest + 1}}" for record in of_group)
        yield Text(f"{named:>{lead}}{numbers}", style="dim" if printer.colored else "")
    for named, of_group in rows:
        line = Text(f"{named:>{lead}} ")
        for record in of_group:
            value = record[column.key]
            share = 0.0 if value is None or high == low else (value - low) / (high - low)
            mark = decimals(value, min(digits, 2)) if fits else _mark(share)
            line.append(f"{mark:>{widest}}" if fits else mark, style=_style(share, printer))
            line.append(" " if fits else "")
        yield line
    yield f"from {decimals(low, digits)} to {decimals(high, digits)}"


def histogram(
    records: Sequence[Record], printer: Printer, digits: int, unit: Unit
) -> Iterator[RenderableType]:
    """How the entropies of one head's rows are distributed."""
    import numpy as np

    found = [_of_row(record, unit) for record in records]
    entropies = np.array([value for value in found if value is not None])
    yield heading(f"row entropies of {_head_name(records[0]) if records else 'no rows'}", printer)
    if not entropies.size:
        yield "no row sees a key"
        return
    counts, edges = np.histogram(entropies, HISTOGRAM_BINS)
    for count, left, right in zip(counts.tolist(), edges, edges[1:], strict=False):
        bar = "█" * max(int(count > 0), round(HISTOGRAM_WIDTH * count / counts.max()))
        span = f"{decimals(left, digits)} to {decimals(right, digits)}"
        yield f"{span:>{2 * digits + 12}} {count:>7} {bar}"
    empty = len(found) - entropies.size
    yield (
        f"{entropies.size} rows, mean {decimals(float(entropies.mean()), digits)} {unit}"
        + (f"; {empty} empty rows left out" if empty else "")
    )


def label_note(limits: str, printer: Printer) -> RenderableType:
    """The thresholds that the labels follow."""
    return paragraph(f"labels: {limits}", printer)


def _head_table(records: Sequence[Record], digits: int, unit: Unit) -> Table:
    sampled = any(record.get("entropy_nats_se") is not None for record in records)
    has_empty = any(record["empty_rows"] or record["nonfinite_rows"] for record in records)
    names = ["head", f"entropy ({unit})", "effective keys", "largest weight", "max logit", "at q,k"]
    names += ["sink mass", "distance"] + (["empty", "nonfinite"] if has_empty else [])
    table = _table(*names)
    table.add_column("label", justify="left", no_wrap=True)
    for record in records:
        entropy = decimals(_entropy(record, unit), digits)
        if sampled:
            error = record[f"entropy_{unit}_se"]
            entropy += f" ±{decimals(error, digits)}"
        at = "–"
        if record["max_logit_query"] is not None:
            at = f"{record['max_logit_query']},{record['max_logit_key']}"
        keys = ("effective_keys_mean", "max_weight_mean", "max_logit")
        after = ("sink_mass_mean", "distance_mean")
        extra = [str(record["empty_rows"]), str(record["nonfinite_rows"])] if has_empty else []
        table.add_row(
            _head_name(record),
            entropy,
            *(decimals(record[key], min(digits, 3)) for key in keys),
            at,
            *(decimals(record[key], min(digits, 3)) for key in after),
            *extra,
            _label(record),
        )
    return table


def _label(record: Record) -> str:
    if record["label"] is None:
        return "–"
    score = record["label_score"]
    return str(record["label"]) + ("" if score is None else f" {score:.2f}")


def _long_table(
    columns: Sequence[Column], records: Sequence[Record], printer: Printer, digits: int, unit: Unit
) -> Iterator[RenderableType]:
    limit = TERMINAL_RECORDS if printer.on_terminal else len(records)
    shown = [column for column in _in_unit(columns, unit) if _varies(column, records)]
    yield record_table(shown, records[:limit], printer, digits=digits)
    if limit < len(records):
        yield f"… {len(records) - limit} more records: --format csv has them all"


def _varies(column: Column, records: Sequence[Record]) -> bool:
    """Whether a column says anything: a place that all records share does not."""
    if column.key not in ("source", "group", "batch", "head"):
        return True
    return len({record[column.key] for record in records}) > 1


def _in_unit(columns: Sequence[Column], unit: Unit) -> list[Column]:
    """Columns without those in the other unit of entropy."""
    return [column for column in columns if column.unit in ("", str(unit))]


def _by_group(records: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Records of each group, under a name that leaves out a source that all share."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["source"], record["group"]), []).append(record)
    sources = {source for source, _ in groups}
    for (source, group), found in groups.items():
        yield (group if len(sources) == 1 else f"{source} {group}".strip()), found


def _head_name(record: Record) -> str:
    return f"{record['batch']}.{record['head']}" if record["batch"] else str(record["head"])


def _variant(record: Record) -> str:
    heat = record["temperature"]
    scale = f"scale {record['scale']:.4g}"
    return scale if heat == 1 else f"{scale} / {heat:g}"


def _entropy(record: Record, unit: Unit) -> float | None:
    nats: float | None = record["entropy_nats_mean"]
    return nats if nats is None or unit is Unit.NATS else nats / math.log(2)


def _of_row(record: Record, unit: Unit) -> float | None:
    value: float | None = record[f"entropy_{unit}"]
    return value


def _mark(share: float) -> str:
    return GRID_MARKS[min(int(share * len(GRID_MARKS)), len(GRID_MARKS) - 1)]


def _style(share: float, printer: Printer) -> str:
    return shade(share) if printer.colored else ""


def _table(*names: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in names:
        table.add_column(name, justify="right")
    return table


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
