"""Experiments of `variance` for eyes: draws beside their theory, and softmax of given logits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from attncli.attention.variance.experiment import ScaleRule
from attncli.attention.variance.logits import EXP_LIMITS
from attncli.report import Unit
from attncli.report.printer import Printer, paragraph
from attncli.report.table import TableColumn, decimals, table

Record = dict[str, Any]

# Weights of given logits that have a column.
MOST_WEIGHTS = 16
# What the rules multiply by.
RULES = {
    ScaleRule.SQRT: "1/√d_k",
    ScaleRule.LINEAR: "1/d_k",
    ScaleRule.NONE: "1",
    ScaleRule.LOG_N: "ln(keys)/√d_k",
}
# Points of the curves after the scale, one for each rule and temperature.
MARKERS = "+x*#%@&=^~"
# Size of a curve in characters: lines, columns at most and at least, and columns left of these.
HEIGHT = 9
WIDTH, LEAST_WIDTH = 52, 16
LEAD = 11


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a plot."""

    name: str  # what it shows
    marker: str  # the character of its points
    points: Sequence[tuple[float, float | None]]  # (x, y) pairs; a y that is None has no point


def experiment_tables(
    records: Sequence[Record], printer: Printer, digits: int, unit: Unit
) -> Iterator[RenderableType]:
    """Variance against theory, what softmax makes of it, and curves where d_k is swept."""
    first = records[0]
    df = "" if first["df"] is None else f", df {first['df']:g}"
    known = ((name, first[f"entry_{name}"]) for name in ("mean", "std"))
    moments = ", ".join(f"{name} {value:g}" for name, value in known if value is not None) + df
    entries = f"entries {first['dist']} ({moments})"
    yield f"q·k of {first['samples']:,} pairs, {entries}, seed {first['seed']}"
    yield _variance_table(records, printer, digits)
    yield from _notes(records, printer)
    yield ""
    most = decimals(_entropy(first["entropy_bits_max"], unit), digits)
    keys = "1 key" if first["keys"] == 1 else f"{first['keys']} keys"
    yield f"softmax over {keys}, whose entropy is at most {most} {unit}"
    yield _softmax_table(records, printer, digits, unit)
    yield from _curves(records, printer, unit)


def logits_tables(
    records: Sequence[Record], printer: Printer, digits: int, unit: Unit
) -> Iterator[RenderableType]:
    """Softmax of given logits, a line a way to take it."""
    columns = [
        TableColumn("", [record["form"] for record in records], True, True),
        TableColumn("in", [record["dtype"] for record in records], True),
    ]
    for key in range(min(len(records[0]["weights"]), MOST_WEIGHTS)):
        weights = [record["weights"][key] for record in records]
        columns.append(numbers(f"key {key}", weights, digits))
    told = (("sum", "sum"), (f"entropy ({unit})", f"entropy_{unit}"))
    for heading, name in (*told, ("largest weight", "max_weight"), ("gradient", "softmax_grad")):
        columns.append(numbers(heading, [record[name] for record in records], digits))
    yield table(columns, printer)
    yield paragraph(
        "Divided by √d_k before softmax the weights are flatter and their gradient larger; divided "
        "after it they are the same shares of a smaller sum.",
        printer,
    )
    limits = ", ".join(f"{limit:.2f} in {name}" for name, limit in EXP_LIMITS.items())
    yield paragraph(
        f"The naive form fails where exp overflows, above {limits}; with the largest logit "
        "subtracted from all, as in the first line, exp is at most 1.",
        printer,
    )


def plot(
    title: str,
    curves: Sequence[Curve],
    *,
    log_y: bool,
    top: float | None = None,
    room: int = WIDTH + LEAD,
) -> list[str]:
    """Lines of a plot with a logarithmic x axis; where curves meet, the earlier one's marker shows.

    Args:
        title: what the y axis shows.
        curves: with x above 0.
        log_y: whether the y axis is logarithmic too; points at or below 0 then have no place.
        top: where a linear y axis ends at least; None for the highest point.
        room: columns of the terminal, all of which are used up to `WIDTH` and what is left of it.
    """
    points = [
        (curve.marker, x, y)
        for curve in curves
        for x, y in curve.points
        if y is not None and math.isfinite(y) and (y > 0 or not log_y)
    ]
    if not points:
        return []
    lift = math.log10 if log_y else float
    heights = [lift(y) for _, _, y in points]
    low, high = (min(heights), max(heights)) if log_y else (0.0, max(*heights, top or 0.0))
    widths = [math.log10(x) for _, x, _ in points]
    wide = max(LEAST_WIDTH, min(WIDTH, room - LEAD))
    grid = [[" "] * wide for _ in range(HEIGHT)]
    placed = zip(points, heights, widths, strict=True)
    for (marker, _, _), height, width in reversed(list(placed)):
        row = HEIGHT - 1 - _place(height, low, high, HEIGHT)
        grid[row][_place(width, min(widths), max(widths), wide)] = marker
    ends = (10**high, 10**low) if log_y else (high, low)
    names = [f"{ends[0]:.4g}", *[""] * (HEIGHT - 2), f"{ends[1]:.4g}"]
    legend = "   ".join(f"{curve.marker} {curve.name}" for curve in curves)
    lines = [title, " " * (LEAD - 1) + legend]
    lines += [f"{name:>9} |{''.join(row).rstrip()}" for name, row in zip(names, grid, strict=True)]
    left, right = (f"{10**end:.4g}" for end in (min(widths), max(widths)))
    axis = " " * (LEAD - 1) + "+" + "-" * wide
    return [*lines, axis, f"{'':>{LEAD}}{left:<{wide - len(right)}}{right}"]


def _variance_table(records: Sequence[Record], printer: Printer, digits: int) -> RenderableType:
    lines = _once_per_dk(records)
    columns = [_dk_column(lines)]
    if any(record["mean_theory"] for record in lines):
        for heading, key in (("mean", "mean"), ("expected mean", "mean_theory")):
            columns.append(numbers(heading, [record[key] for record in lines], digits))
    for heading, key in (("Var(q·k)", "var"), ("expected", "var_theory")):
        columns.append(numbers(heading, [record[key] for record in lines], digits))
    columns.append(numbers("std", [math.sqrt(record["var"]) for record in lines], digits))
    intervals = [_interval(record, digits) for record in lines]
    columns.append(TableColumn("95 % interval of Var", intervals))
    columns.append(numbers("measured/expected", [record["ratio"] for record in lines], digits))
    return table(columns, printer)


def _interval(record: Record, digits: int) -> str:
    low, high = record["var_ci95_low"], record["var_ci95_high"]
    return "none" if low is None else f"{decimals(low, digits)} to {decimals(high, digits)}"


def _notes(records: Sequence[Record], printer: Printer) -> Iterator[RenderableType]:
    for reason in dict.fromkeys(record["interval_reason"] for record in records):
        if reason is not None:
            yield paragraph(f"no interval: {reason}", printer)
    for assumption in dict.fromkeys(record["assumption"] for record in records):
        yield paragraph(f"expected: {assumption}", printer)
    growth = records[0]["var_theory"]
    if growth is not None and not math.isclose(growth, records[0]["dk"]):
        share = growth / records[0]["dk"]
        yield paragraph(
            "1/√d_k is made for entries of mean 0 and variance 1, q and k independent, where "
            f"Var(q·k) = d_k: here it gives a scaled variance of {share:.6g}, not 1",
            printer,
        )


def _softmax_table(
    records: Sequence[Record], printer: Printer, digits: int, unit: Unit
) -> RenderableType:
    """The three symptoms of a missing scale; a line for no scale, and one per rule."""
    lines = []
    for dk in dict.fromkeys(record["dk"] for record in records):
        of_dk = [record for record in records if record["dk"] == dk]
        lines.append((of_dk[0], "unscaled", "unscaled", of_dk[0]["var"]))
        for record in of_dk:
            if record["scale"] != 1 or record["temperature"] != 1:
                lines.append((record, "scaled", _scale_name(record), record["scaled_var"]))
    columns = [
        _dk_column([record for record, *_ in lines]),
        TableColumn("scores are", [named for _, _, named, _ in lines], True, True),
        numbers("Var", [var for *_, var in lines], digits),
    ]
    entropies = [_entropy(record[f"entropy_bits_{which}"], unit) for record, which, *_ in lines]
    columns.append(numbers(f"entropy ({unit})", entropies, digits))
    for heading, key in (("largest weight", "max_weight"), ("gradient", "softmax_grad")):
        values = [record[f"{key}_{which}"] for record, which, *_ in lines]
        columns.append(numbers(heading, values, digits))
    return table(columns, printer)


def _scale_name(record: Record) -> str:
    named = f"× {record['scale']:.4g}"
    if record["rule"] in RULES:
        named = f"× {RULES[record['rule']]} = {record['scale']:.4g}"
    return named if record["temperature"] == 1 else f"{named} / T={record['temperature']:g}"


def _curves(records: Sequence[Record], printer: Printer, unit: Unit) -> Iterator[str]:
    """Variance and entropy against d_k, without a scale and under each that was asked for."""
    swept = _once_per_dk(records)
    if len(swept) < 2:
        return
    under = _by_scale(records)
    names = ["after the scale"] if len(under) == 1 else list(under)
    variances = [Curve("Var(q·k)", "o", [(r["dk"], r["var"]) for r in swept])]
    entropies = [Curve("unscaled", "o", _points(swept, "entropy_bits_unscaled", unit))]
    for name, marker, lines in zip(names, MARKERS, under.values(), strict=False):
        variances.append(Curve(name, marker, [(r["dk"], r["scaled_var"]) for r in lines]))
        entropies.append(Curve(name, marker, _points(lines, "entropy_bits_scaled", unit)))
    yield ""
    yield from plot("variance against d_k", variances, log_y=True, room=printer.width)
    yield ""
    most = _entropy(swept[0]["entropy_bits_max"], unit)
    title = f"entropy ({unit}) against d_k, up to that of uniform weights"
    yield from plot(title, entropies, log_y=False, top=most, room=printer.width)


def _by_scale(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records under each rule and temperature, by a name without the d_k's own scale."""
    found: dict[str, list[Record]] = {}
    for record in records:
        heat = "" if record["temperature"] == 1 else f" / {record['temperature']:g}"
        found.setdefault(record["rule"] + heat, []).append(record)
    return found


def _points(records: Sequence[Record], key: str, unit: Unit) -> list[tuple[float, float | None]]:
    return [(record["dk"], _entropy(record[key], unit)) for record in records]


def _dk_column(records: Sequence[Record]) -> TableColumn:
    return TableColumn("d_k", [str(record["dk"]) for record in records], is_key=True)


def numbers(heading: str, values: Sequence[float | None], digits: int) -> TableColumn:
    """A column of numbers, rounded."""
    return TableColumn(heading, [decimals(value, digits) for value in values])


def _once_per_dk(records: Sequence[Record]) -> list[Record]:
    return list({record["dk"]: record for record in reversed(records)}.values())[::-1]


def _entropy(bits: float, unit: Unit) -> float:
    return bits if unit is Unit.BITS else bits * math.log(2)


def _place(value: float, low: float, high: float, length: int) -> int:
    share = (value - low) / (high - low) if high > low else 0.5
    return round(share * (length - 1))
