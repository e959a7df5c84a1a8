"""Pictures of results: what is drawn of each command, from numbers that are computed elsewhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from attncli.attention.pooling import Pool, StageMaps
from attncli.columns import Column
from attncli.report import Unit
from attncli.report.canvas import (
    DIGIT,
    MUTED,
    PLAIN,
    POINTS,
    WARM,
    WEIGHT,
    Labels,
    Picture,
    Values,
    draw_map,
    draw_scale,
    from_right,
    name_axis,
    name_curves,
    picture,
    pool_names,
    pooled_words,
    print_values,
    room_for,
    shade_of,
    signed_scale,
    styled,
    weight_scale,
)
from attncli.report.entropy import head_lines

Record = dict[str, Any]

# What a map shows, and in what unit.
STAGES = {
    "scores": ("scores = Q Kᵀ", "q · k (no unit)"),
    "scaled": ("scaled = scores · scale", "logit (no unit)"),
    "capped": ("capped = c · tanh(scaled / c)", "logit (no unit)"),
    "masked": ("masked: grey is hidden", "logit (no unit)"),
    "weights": ("weights = softmax(masked)", WEIGHT),
    "output": ("output = weights · V", "in units of V"),
}
NAMED_CURVES = 16
BINS = 20


# ── stages ───────────────────────────────────────────────────────────────────────────────────


def stage_picture(
    title: str, named: Sequence[tuple[str, Labels, StageMaps]], digits: int
) -> Picture:
    """The stages of heads side by side, a row a head; queries down, keys across.

    Args:
        title: what made them.
        named: the group of each head, tokens on its key axis, None for none, and its stages, which
            all of them have.
        digits: decimals at most of numbers in cells.
    """
    groups, labels, heads = zip(*named, strict=True)
    stages, (down, across) = list(heads[0].maps), next(iter(heads[0].maps.values())).sums.shape
    side = 3.0 if len(heads) == 1 else 2.3
    high = side * min(2.0, max(0.3, down / max(1, across)))
    title += pooled_words(pool for head in heads for pool in head.maps.values())
    words = room_for(labels[0])
    with styled():
        size = 1.2 + (side + 0.3) * len(stages), 1.7 + (high + 0.15) * len(heads) + words
        figure = picture(title, *size, compress=True)
        grid: NDArray[Any] = figure.subplots(len(heads), len(stages), squeeze=False)
        for stage, column in zip(stages, grid.T, strict=True):
            pools = [head.maps[stage] for head in heads]
            means = [pool.means for pool in pools]
            signed, over_keys = stage != "weights", stage != "output"
            norm = signed_scale(*means) if signed else weight_scale(pools[0].shape[1])
            for axes, pool, values, tokens in zip(column, pools, means, labels, strict=True):
                image = draw_map(axes, values, norm)
                axes.set_box_aspect(high / side)
                print_values(axes, image, values, (side, high), digits)
                axes.xaxis.tick_top()
                tokens = tokens if over_keys else None
                names = pool_names(pool.column_edges, tokens) if axes is column[0] else []
                name_axis(axes, "x", names, side, tokens=tokens is not None)
                axes.set_yticks([])
            column[0].set_title(STAGES[stage][0])
            column[0].set_xlabel("key" if over_keys else "value dimension", color=MUTED)
            column[0].xaxis.set_label_position("top")
            reach = float(norm.vmax or 1.0)
            beyond = any(np.nanmax(np.abs(values), initial=0.0) > reach for values in means)
            told = STAGES[stage][1]
            draw_scale(image, list(column), told, side * 0.9, below=True, extend=beyond and signed)
        figure.align_titles()
        for axes, group, head, tokens in zip(grid[:, 0], groups, heads, labels, strict=True):
            queries = _query_names(head, tokens)
            name_axis(axes, "y", queries, high, tokens=tokens is not None)
            place = [*from_right([group]), f"batch {head.batch}," if head.batch else ""]
            name = " ".join(["query of", *filter(None, place), f"head {head.head}"])
            fits = len(name) * 9 * DIGIT < high * POINTS
            lying = {} if fits else {"rotation": 0, "ha": "right", "va": "center"}
            axes.set_ylabel(name if fits else name.removeprefix("query of "), **lying)
        return figure


def _query_names(head: StageMaps, labels: Labels) -> list[str]:
    """The chosen queries, by their tokens where those and the position of each are known."""
    known = None if head.offset is None else labels
    edges = next(iter(head.maps.values())).row_edges.tolist()
    first = (np.array([head.rows[a], head.rows[a] + b - a]) for a, b in itertools.pairwise(edges))
    return [pool_names(pair, known, head.offset or 0)[0] for pair in first]


# ── heads ────────────────────────────────────────────────────────────────────────────────────


def entropy_picture(
    title: str, records: Sequence[Record], unit: Unit, labels: Labels, sink_keys: int
) -> Picture:
    """All heads: mean entropy and sink mass, entropy along the sequence, the mass of each key.

    Args:
        title: what made them.
        records: those of heads, with their `curves` beside them.
        unit: of entropy.
        labels: tokens on the key axis, where all groups have the same; None for none.
        sink_keys: how many keys count as sinks.
    """
    entropies = Column(f"entropy_{unit}_mean", f"mean entropy ({unit})")
    first = "the first key" if sink_keys == 1 else f"the first {sink_keys} keys"
    masses = Column("sink_mass_mean", f"mean weight on {first} (0 to 1)")
    lines = len(head_lines(records, entropies))
    high = min(8.0, max(2.0, 0.34 * lines))
    with styled():
        size = 13.4, high + 4.4 + room_for(labels)
        figure = picture(title, *size)
        panels = figure.subplot_mosaic(
            [["entropy", "sink"], ["curves", "keys"]], height_ratios=[high, 3.0]
        )
        most = _most_entropy(records, unit)
        _draw_heads(panels["entropy"], records, entropies, (5.3, high), Normalize(0, most))
        _draw_heads(panels["sink"], records, masses, (5.3, high), Normalize(0, 1))
        _draw_curves(panels["curves"], records, unit, 3.0)
        _draw_keys(panels["keys"], records, labels, (5.3, 3.0))
        return figure


def grid_picture(title: str, records: Sequence[Record], column: Column, digits: int) -> Picture:
    """One number of all heads: groups down, heads across."""
    lines = head_lines(records, column)
    wide = min(16.0, max(5.0, 0.5 * max((len(heads) for _, heads in lines), default=1)))
    high = min(10.0, max(2.0, 0.34 * len(lines)))
    with styled():
        figure = picture(title, wide + 2.4, high + 1.5)
        _draw_heads(figure.subplots(), records, column, (wide, high), None, digits)
        return figure


def compare_picture(
    title: str, records: Sequence[Record], unit: Unit, column: Column | None, digits: int
) -> Picture:
    """How far the heads of two sides are apart: in weights, and in output or else by KL.

    Args:
        title: what made them.
        records: of heads; those of several changes are drawn below each other.
        unit: of KL.
        column: one number in the place of both; None for both.
        digits: decimals at most.
    """
    if len({record["what_if"] for record in records}) > 1:
        records = [one | {"group": f"{one['group']} {one['what_if']}".strip()} for one in records]
    if column is not None:
        return grid_picture(title, records, column, digits)
    moved = Column("tv_mean", "weight that moved, mean over rows (0 to 1)")
    right = Column(f"kl_{unit}_mean", f"KL of B from A, mean over rows ({unit})")
    if any(record["output_rel_error"] is not None for record in records):
        right = Column("output_rel_error", "change of the output (÷ its size)")
    high = min(10.0, max(2.0, 0.34 * len(head_lines(records, moved))))
    with styled():
        figure = picture(title, 13.4, high + 1.2)
        panels = figure.subplots(1, 2)
        _draw_heads(panels[0], records, moved, (5.3, high), Normalize(0, 1))
        _draw_heads(panels[1], records, right, (5.3, high), None)
        return figure


def rows_picture(title: str, records: Sequence[Record], unit: Unit) -> Picture:
    """Entropy along the sequence, a curve for each head where they are few, or for each group."""
    with styled():
        figure = picture(title, 12.0, 5.2)
        _draw_curves(figure.subplots(), records, unit, 4.0)
        return figure


def keys_picture(title: str, records: Sequence[Record], labels: Labels) -> Picture:
    """The mean weight of each key, a line for each head where they are few, or for each group."""
    lines = len(_curves_of(records, "mass"))
    high = min(10.0, max(2.0, 0.3 * lines))
    with styled():
        named = room_for(labels)
        figure = picture(title, 13.0, high + 1.5 + named)
        _draw_keys(figure.subplots(), records, labels, (10.5, high))
        return figure


def histogram_picture(title: str, nats: Values, unit: Unit) -> Picture:
    """How the entropies of one head's rows are distributed; what is not finite is left out."""
    known = nats[np.isfinite(nats)] / _nats_per(unit)
    with styled():
        figure = picture(title, 8.0, 4.4)
        axes: Axes = figure.subplots()
        if known.size:
            even = float(np.ptp(known)) <= 1e-9 * max(1.0, float(known.max()))
            axes.hist(known, 1 if even else BINS, color=PLAIN, rwidth=0.94)
            mean = float(known.mean())
            axes.axvline(mean, color=WARM, lw=1.2)
            axes.annotate(
                f" mean {mean:.3g}",
                (mean, 1.0),
                xycoords=("data", "axes fraction"),
                va="top",
                color=WARM,
            )
        axes.set_title(f"Entropy of {len(known):,} rows")
        axes.set_xlabel(f"entropy ({unit})")
        axes.set_ylabel("rows")
        axes.grid(axis="y")
        return figure


def _draw_heads(
    axes: Axes,
    records: Sequence[Record],
    column: Column,
    inches: tuple[float, float],
    norm: Normalize | None,
    digits: int = 2,
) -> None:
    """One number of all heads, printed where it fits; grey where a head has none."""
    lines = head_lines(records, column)
    heads = sorted({head for _, values in lines for head in values})
    found = [[values.get(head) for head in heads] for _, values in lines]
    values: Values = np.array(
        [[math.nan if value is None else value for value in line] for line in found], np.float64
    )
    values[~np.isfinite(values)] = math.nan
    image = draw_map(axes, values, norm or _span(values))
    whole = all(value is None or isinstance(value, int) for line in found for value in line)
    print_values(axes, image, values, inches, 0 if whole else digits)
    name_axis(axes, "x", list(map(str, heads)), inches[0])
    name_axis(axes, "y", from_right([name for name, _ in lines]), inches[1], tokens=True)
    axes.set_xlabel("head")
    heading = f"{column.heading or column.key}{f' ({column.unit})' if column.unit else ''}"
    axes.set_title(heading[:1].upper() + heading[1:])
    draw_scale(image, axes, "", inches[1])


def _span(values: Values) -> Normalize:
    """From the smallest to the largest; symmetric where there are both signs."""
    if not np.isfinite(values).any():
        return Normalize(0, 1)
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    if low < 0 < high:
        return signed_scale(values)
    return Normalize(low, high if high > low else low + 1)


def _curves_of(records: Sequence[Record], which: str) -> list[tuple[str, Pool]]:
    """Curves with their names: of each head where they are few, otherwise joined by groups."""
    lines = head_lines(records, Column("curves", None))
    several = len(lines) > 1
    found: list[tuple[str, list[Pool]]] = []
    for name, heads in lines:
        pools = {head: getattr(curves, which) for head, curves in heads.items()}
        if len(records) > NAMED_CURVES or (several and len(records) > NAMED_CURVES // 2):
            found.append((name, list(pools.values())))
        else:
            found += [(f"{name} head {head}".strip(), [pool]) for head, pool in pools.items()]
    return [(name, Pool.joined(pools)) for name, pools in found]


def _nats_per(unit: Unit) -> float:
    return math.log(2) if unit is Unit.BITS else 1.0


def _most_entropy(records: Sequence[Record], unit: Unit) -> float:
    """The largest entropy that any row could have; 1 where there is none."""
    most = [np.nanmax(r["curves"].most_nats.means, initial=0.0) for r in records]
    return float(max(most, default=0.0)) / _nats_per(unit) or 1.0


def _draw_curves(axes: Axes, records: Sequence[Record], unit: Unit, high: float) -> None:
    """Entropy along the sequence; dotted, that of attention to every visible key alike."""
    per_unit = _nats_per(unit)
    curves, evens = _curves_of(records, "entropy_nats"), _curves_of(records, "most_nats")
    most, length = _most_entropy(records, unit), max(1, *(p.shape[1] for _, p in curves))
    axes.set(xlim=(-0.5, length - 0.5), ylim=(0, 1.05 * most))
    for values in {pool.means.tobytes(): pool for _, pool in evens}.values():
        axes.plot(*_line(values, per_unit), color=MUTED, ls=":", lw=1.1)
    ends = []
    for place, (name, pool) in enumerate(curves):
        colour = shade_of(place, len(curves))
        x, y = _line(pool, per_unit)
        axes.plot(x, y, color=colour, label=name, marker="." if len(x) < 3 else None)
        known = np.flatnonzero(np.isfinite(y))
        if known.size:
            ends.append((float(x[known[-1]]), float(y[known[-1]]), from_right([name])[0], colour))
    step = max(1, math.ceil(len(ends) / NAMED_CURVES))
    name_curves(axes, ends[::step], high)
    axes.set_title(f"Entropy along the sequence{pooled_words(pool for _, pool in curves)}")
    axes.xaxis.set_major_locator(MaxNLocator(9, steps=[1, 2, 5, 10], integer=True))
    axes.set_xlabel("query position")
    axes.set_ylabel(f"entropy ({unit}); dotted: even attention")
    axes.grid(axis="y")


def _line(pool: Pool, per_unit: float) -> tuple[Values, Values]:
    """Where the places of a curve stand, and what it is there."""
    edges = pool.column_edges
    return (edges[:-1] + edges[1:] - 1) / 2, pool.means[0] / per_unit


def _draw_keys(
    axes: Axes, records: Sequence[Record], labels: Labels, inches: tuple[float, float]
) -> None:
    """The mean weight of each key over the queries that see it."""
    lines = _curves_of(records, "mass")
    longest = max((pool for _, pool in lines), key=lambda pool: pool.shape[1])
    values = np.full((len(lines), longest.sums.shape[1]), np.nan)
    for line, (_, pool) in zip(values, lines, strict=True):
        line[: pool.sums.shape[1]] = pool.means[0]
    image = draw_map(axes, values, weight_scale(longest.shape[1]))
    across = pool_names(longest.column_edges, labels)
    name_axis(axes, "x", across, inches[0], tokens=labels is not None)
    for text in axes.get_xticklabels() if labels is not None else ():
        text.set(rotation=-55, va="top")
    name_axis(axes, "y", from_right([name for name, _ in lines]), inches[1], tokens=True)
    axes.set_xlabel("key")
    axes.set_title(f"Mean weight of each key{pooled_words(pool for _, pool in lines)}")
    draw_scale(image, axes, WEIGHT, inches[1])
