"""Pictures of results: what is drawn of each command, from numbers that are computed elsewhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from attncli.attention.check.compare import Comparison
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
    drawable,
    log_axis,
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
SMALLEST_RATIO = 1e-3  # of an error to what is allowed, on a logarithmic axis
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
            place = [*_from_right([group]), f"batch {head.batch}," if head.batch else ""]
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
    name_axis(axes, "y", _from_right([name for name, _ in lines]), inches[1], tokens=True)
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


def _from_right(names: Sequence[str], limit: int = 18) -> list[str]:
    """Names cut at their beginning: those of layers differ at the end."""
    return [drawable(n if len(n) <= limit else "…" + n[1 - limit :], limit) for n in names]


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
            ends.append((float(x[known[-1]]), float(y[known[-1]]), _from_right([name])[0], colour))
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
    name_axis(axes, "y", _from_right([name for name, _ in lines]), inches[1], tokens=True)
    axes.set_xlabel("key")
    axes.set_title(f"Mean weight of each key{pooled_words(pool for _, pool in lines)}")
    draw_scale(image, axes, WEIGHT, inches[1])


# ── variance ─────────────────────────────────────────────────────────────────────────────────


def experiment_picture(title: str, records: Sequence[Record], unit: Unit) -> Picture:
    """Variance, entropy and gradient against d_k, without a scale and with each that was tried.

    Args:
        title: what made them.
        records: of an experiment.
        unit: of entropy.
    """
    rules: dict[str, list[Record]] = {}
    temperatures = {record["temperature"] for record in records}
    for record in records:
        told = "÷ √dₖ" if record["rule"] == "sqrt" else f"scale {record['rule']}"
        told += f", τ = {record['temperature']:g}" if len(temperatures) > 1 else ""
        rules.setdefault(told, []).append(record)
    plain = next(iter(rules.values()))
    per_bit = 1.0 if unit is Unit.BITS else math.log(2)
    with styled():
        figure = picture(title, 13.4, 4.6)
        panels = figure.subplots(1, 3)
        _draw_sweep(panels[0], plain, "var", "scaled_var", rules)
        _draw_sweep(
            panels[1], plain, "entropy_bits_unscaled", "entropy_bits_scaled", rules, per_bit
        )
        _draw_sweep(panels[2], plain, "softmax_grad_unscaled", "softmax_grad_scaled", rules)
        first, most = plain[0], plain[0]["entropy_bits_max"] * per_bit
        panels[0].set(title="Variance of q · k", ylabel="variance (no unit)")
        _draw_theory(panels[0], plain)
        if any(record["var"] > 0 for record in plain):
            log_axis(panels[0])
        panels[1].set(
            title=f"Entropy of softmax over {first['keys']} keys",
            ylabel=f"entropy ({unit}); dotted: even attention",
            ylim=(0, 1.06 * most or 1),
        )
        panels[1].axhline(most, color=MUTED, ls=":", lw=1.1)
        panels[2].set(title="Gradient of softmax", ylabel="norm of the Jacobian (no unit)")
        panels[2].set_ylim(0)
        for axes in panels:
            _name_sweep(axes)
        return figure


def _draw_sweep(
    axes: Axes,
    plain: Sequence[Record],
    unscaled: str,
    scaled: str,
    rules: Mapping[str, Sequence[Record]],
    per: float = 1.0,
) -> None:
    """One number against d_k: without a scale, and under each rule and temperature."""
    curves: list[tuple[str, Any, Sequence[Record], str]] = [("not scaled", WARM, plain, unscaled)]
    curves += [
        (name, PLAIN if len(rules) == 1 else shade_of(place, len(rules)), found, scaled)
        for place, (name, found) in enumerate(rules.items())
    ]
    for name, colour, found, key in curves:
        points = [(record["dk"], record[key] * per) for record in found]
        axes.plot(*zip(*points, strict=True), "o-", color=colour, ms=3.5, lw=1.4, label=name)


def _draw_theory(axes: Axes, plain: Sequence[Record]) -> None:
    """The variance in theory, and the intervals of what was measured, where there are any."""
    known = [record for record in plain if record["var_theory"] is not None]
    if known:
        points = [(record["dk"], record["var_theory"]) for record in known]
        axes.plot(*zip(*points, strict=True), ":", color=MUTED, lw=1.1, zorder=1)
        axes.set_title("Variance of q · k; dotted: theory")
    sure = [record for record in plain if record["var_ci95_low"] is not None]
    if sure:
        ends = [
            (r["dk"], r["var"] - r["var_ci95_low"], r["var_ci95_high"] - r["var"]) for r in sure
        ]
        widths, below, above = zip(*ends, strict=True)
        middle = [record["var"] for record in sure]
        axes.errorbar(
            widths, middle, (below, above), fmt="none", ecolor=WARM, elinewidth=1.0, capsize=3
        )
        axes.set_ylabel("variance (no unit); bars: 95 % interval")


def _name_sweep(axes: Axes) -> None:
    """d_k along the edge, and each curve by its name at its end."""
    curves = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    widths = sorted({float(x) for line in curves for x in np.asarray(line.get_xdata())})
    axes.set_xscale("log", base=2)
    axes.set_xlim(widths[0] / 1.3, widths[-1] * 1.3)
    step = math.ceil(len(widths) / 11)
    axes.set_xticks(widths[::step], [f"{width:g}" for width in widths[::step]])
    axes.minorticks_off()
    axes.set_xlabel("dₖ (entries of a query)")
    axes.grid(axis="y")
    ends = []
    for line in curves:
        x, y = (np.asarray(data, np.float64)[-1] for data in line.get_data())
        if math.isfinite(y):
            ends.append((float(x), float(y), str(line.get_label()), line.get_color()))
    name_curves(axes, ends, 3.3)


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


PARTS = {
    "var_from_interaction": ("interaction of query and key", PLAIN),
    "var_from_query_mean": ("query mean: one bias for all", "#e0955a"),
    "var_from_key_mean": ("key mean: softmax never sees it", "#c9c5ba"),
}


def audit_picture(title: str, records: Sequence[Record]) -> Picture:
    """The variance of the scores of every head, beside the assumption, and what it is made of."""
    place = np.arange(len(records))
    several = len({(record["source"], record["group"], record["batch"]) for record in records}) > 1
    names = [str(record["head"]) for record in records]
    wide = min(13.5, max(6.1, 0.17 * len(records)))
    with styled():
        figure = picture(title, wide + 2.5, 5.6)
        above, below = figure.subplots(2, 1, sharex=True)
        values = [math.nan if record["var"] is None else record["var"] for record in records]
        above.plot(place, values, "o", color=PLAIN, ms=4)
        above.step(
            place, [r["var_unit_theory"] for r in records], ":", where="mid", color=MUTED, lw=1.1
        )
        above.set(
            title="Variance of the visible scores; dotted: dₖ, for which 1/√dₖ is made",
            ylabel="variance (no unit)",
        )
        if any(value > 0 for value in values):
            log_axis(above)
        floor = np.zeros(len(records))
        total = np.array([r["var_all_pairs"] or math.nan for r in records], np.float64)
        for key, (name, colour) in PARTS.items():
            parts = np.array([r[key] or 0.0 for r in records], np.float64) / total
            below.bar(
                place, parts, 0.86 if len(records) < 150 else 1.0, floor, color=colour, label=name
            )
            floor = floor + np.nan_to_num(parts)
        below.set(
            title="What it is made of, over all real pairs", ylabel="share (0 to 1)", ylim=(0, 1)
        )
        below.legend(
            loc="upper left", bbox_to_anchor=(0, -0.28), ncols=3, frameon=False, fontsize=8.5
        )
        name_axis(below, "x", names, wide)
        below.set_xlabel("head" + (", groups one after another" if several else ""))
        above.grid(axis="y")
        above.set_xlim(-0.7, len(records) - 0.3)
        if several:
            _mark_groups(above, below, records)
        return figure


def _mark_groups(above: Axes, below: Axes, records: Sequence[Record]) -> None:
    """A line between groups, and the name of each where there is room."""
    starts = [
        place
        for place, record in enumerate(records)
        if place == 0
        or any(record[key] != records[place - 1][key] for key in ("source", "group", "batch"))
    ]
    for start in starts:
        above.axvline(start - 0.5, color="#b5b1a6", lw=0.7)
        below.axvline(start - 0.5, color="#b5b1a6", lw=0.7)
    for start in starts[:: max(1, math.ceil(len(starts) / 12))]:
        name = _from_right([str(records[start]["group"])], 12)[0]
        above.annotate(name, (start, 0.02), xycoords=("data", "axes fraction"), size=8, color=MUTED)
