"""Pictures of `check`: where a candidate is off, and by how much."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from attncli.attention.check.compare import Comparison
from attncli.attention.pooling import Pool
from attncli.report.canvas import (
    PLAIN,
    WARM,
    Picture,
    Values,
    draw_map,
    draw_scale,
    log_axis,
    name_axis,
    picture,
    pool_names,
    styled,
)

SMALLEST_RATIO = 1e-3  # of an error to what is allowed, on a logarithmic axis


def check_picture(title: str, comparisons: Sequence[Comparison], explained: str) -> Picture:
    """Where each candidate is off: |error| / what is allowed as a map, and against the position.

    Args:
        title: what made them.
        comparisons: one or more.
        explained: the mistake that explains them; empty for none.
    """
    if explained:
        title += f" · explained by {explained}"
    with styled():
        figure = picture(title, 11.0, 3.9 * len(comparisons))
        for row, one in enumerate(comparisons):
            left = figure.add_subplot(len(comparisons), 2, 2 * row + 1)
            right = figure.add_subplot(len(comparisons), 2, 2 * row + 2)
            peaks = np.where(np.isfinite(one.ratios.peaks), one.ratios.peaks, np.nan)
            _draw_errors(left, one, peaks)
            _draw_errors_along(right, one.ratios, np.nanmax(peaks, axis=1, initial=0.0))
        return figure


def _draw_errors(axes: Axes, one: Comparison, peaks: Values) -> None:
    """The errors of a candidate as a map, with the worst cell outlined."""
    edges = one.ratios.row_edges, one.ratios.column_edges
    reach = math.ceil(math.log10(max(SMALLEST_RATIO, np.nanmax(peaks, initial=0.0))))
    powers = [-3, -2, -1, 0] if one.passed else list(range(max(0, reach - 4), max(2, reach) + 1))
    norm = LogNorm(10.0 ** powers[0], 10.0 ** powers[-1], clip=True)
    image = draw_map(axes, peaks if one.passed else np.where(peaks > 1, peaks, np.nan), norm)
    told = "up to 1 passes" if one.passed else "grey passes"
    bar = draw_scale(image, axes, f"|error| / allowed, log; {told}", 3.0)
    bar.set_ticks([10.0**p for p in powers], labels=[f"{10.0**p:g}" for p in powers])
    name_axis(axes, "y", pool_names(edges[0], None), 3.0)
    name_axis(axes, "x", pool_names(edges[1], None), 3.4)
    axes.set_title(f"{one.target}: {'passed' if one.passed else 'OFF'}")
    axes.set_ylabel("query; largest of all heads")
    axes.set_xlabel("key" if one.target == "weights" else "value dimension")
    if one.worst_index is not None and not one.passed:
        row, column = (*one.worst_index, 0)[2:4]
        x, y = (
            float(np.searchsorted(along, index, "right")) - 1.5
            for along, index in ((edges[1], column), (edges[0], row))
        )
        axes.add_patch(Rectangle((x, y), 1, 1, fill=False, ec=WARM, lw=2))


def _draw_errors_along(axes: Axes, pool: Pool, largest: Values) -> None:
    """The largest error of each query against its position, and what is allowed."""
    middle = (pool.row_edges[:-1] + pool.row_edges[1:] - 1) / 2
    axes.plot(middle, np.maximum(largest, SMALLEST_RATIO), ".-", color=PLAIN, ms=4)
    axes.axhline(1, color=WARM, lw=1.1)
    place: dict[str, Any] = {
        "xycoords": ("axes fraction", "data"),
        "textcoords": "offset points",
        "ha": "right",
    }
    axes.annotate("allowed", (1, 1), (-2, 3), color=WARM, **place)
    log_axis(axes)
    axes.set(title="Largest of each query", xlabel="query position")
    axes.set_ylabel("|error| / allowed (no unit)")
    axes.xaxis.set_major_locator(MaxNLocator(9, steps=[1, 2, 5, 10], integer=True))
    axes.grid(axis="y")
