"""Curves of a few points in plain characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

HEIGHT = 9
WIDTH = 52


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a plot.

    Attributes:
        name: what it shows.
        marker: the character of its points.
        points: (x, y) pairs; a y that is None has no point.
    """

    name: str
    marker: str
    points: Sequence[tuple[float, float | None]]


def plot(
    title: str, curves: Sequence[Curve], *, log_y: bool, top: float | None = None
) -> list[str]:
    """Lines of a plot with a logarithmic x axis; where curves meet, the earlier one's marker shows.

    Args:
        title: what the y axis shows.
        curves: with x above 0.
        log_y: whether the y axis is logarithmic too; points at or below 0 then have no place.
        top: where a linear y axis ends at least; None for the highest point.
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
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    placed = zip(points, heights, widths, strict=True)
    for (marker, _, _), height, width in reversed(list(placed)):
        row = HEIGHT - 1 - _place(height, low, high, HEIGHT)
        grid[row][_place(width, min(widths), max(widths), WIDTH)] = marker
    ends = (10**high, 10**low) if log_y else (high, low)
    names = [f"{ends[0]:.4g}", *[""] * (HEIGHT - 2), f"{ends[1]:.4g}"]
    legend = "   ".join(f"{curve.marker} {curve.name}" for curve in curves)
    lines = [title, f"          {legend}"]
    lines += [f"{name:>9} |{''.join(row).rstrip()}" for name, row in zip(names, grid, strict=True)]
    left, right = (f"{10**end:.4g}" for end in (min(widths), max(widths)))
    return [*lines, " " * 10 + "+" + "-" * WIDTH, f"{'':>11}{left:<{WIDTH - len(right)}}{right}"]


def _place(value: float, low: float, high: float, length: int) -> int:
    share = (value - low) / (high - low) if high > low else 0.5
    return round(share * (length - 1))
