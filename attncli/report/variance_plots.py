"""Pictures of `variance`: an experiment over d_k, and what the scores of real heads vary by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from attncli.report import Unit
from attncli.report.canvas import (
    MUTED,
    PLAIN,
    WARM,
    Picture,
    from_right,
    log_axis,
    name_axis,
    name_curves,
    picture,
    shade_of,
    styled,
)

Record = dict[str, Any]

PARTS = {
    "var_from_interaction": ("interaction of query and key", PLAIN),
    "var_from_query_mean": ("query mean: one bias for all", "#e0955a"),
    "var_from_key_mean": ("key mean: softmax never sees it", "#c9c5ba"),
}


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
        # About their own middle: of very few samples they need not hold what was measured.
        widths = [record["dk"] for record in sure]
        ends = np.array([(record["var_ci95_low"], record["var_ci95_high"]) for record in sure])
        half = (ends[:, 1] - ends[:, 0]) / 2
        middle = ends[:, 0] + half
        axes.errorbar(widths, middle, half, fmt="none", ecolor=WARM, elinewidth=1.0, capsize=3)
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
        name = from_right([str(records[start]["group"])], 12)[0]
        above.annotate(name, (start, 0.02), xycoords=("data", "axes fraction"), size=8, color=MUTED)
