"""Pictures of masks: what is visible, where two masks differ, what one does to the softmax.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.image import AxesImage
from matplotlib.patches import Patch

from attncli.attention.masks.audit import MaskAudit, MaskRecord, cell_counts, place
from attncli.attention.masks.compare import DifferenceMaps
from attncli.attention.masks.mask import Mask
from attncli.attention.pooling import Edges, Pool
from attncli.report.canvas import (
    HIDDEN,
    MUTED,
    WEIGHT,
    Labels,
    Picture,
    Values,
    draw_map,
    draw_scale,
    drawable,
    name_axis,
    picture,
    pool_names,
    pooled_words,
    room_for,
    styled,
    weight_scale,
)
from attncli.report.table import labels_of_batch

NamedMask = tuple[str, Mask, MaskAudit, Sequence[Sequence[str]] | None]

MOST_PANELS = 4
MOST_CELLS = 96
# Cells so few are drawn apart.
GAPS_UP_TO = 40
# Of no cell, some, all: what is visible is never as dark as a large weight.
VISIBLE = Normalize(-0.25, 1.6)
# Light to dark, so that they hold in grey: seen in neither mask, in both, in one alone.
COMPARED = {
    "neither": HIDDEN,
    "both": "#8fb4d8",
    "this mask alone": "#b8521a",
    "the other alone": "#35155c",
}


class EffectMaps(Protocol):
    """Weights of the first batch and head without and with a mask, and what it shows."""

    before: Pool
    visible: Pool
    after: Pool


def mask_picture(title: str, masks: Sequence[NamedMask]) -> Picture:
    """Each different matrix: visible cells filled, hidden ones grey; counts beneath.

    Args:
        title: what made it.
        masks: the name of each mask, the mask, its audit, and tokens on the key axis, of all
            batches or of each, None for none.
    """
    every = [(*one, record) for one in masks for record in one[2].records]
    if len(every) > MOST_PANELS:
        title += f" · {MOST_PANELS} of {len(every)} matrices"
    shown = every[:MOST_PANELS]
    with styled():
        figure, panels = _panels(title, len(shown), labels_of_batch(shown[0][3], 0))
        for axes, (name, mask, _, labels, record) in zip(panels, shown, strict=True):
            batch, head = record.batch or 0, record.head or 0
            offset = None if mask.offset is None else int(mask.offset.flat[0])
            counts = cell_counts(mask.head(batch, head), MOST_CELLS, MOST_CELLS)
            shares: Values = counts.counts / np.maximum(1, counts.sizes)
            image = draw_map(axes, np.where(shares > 0, shares, np.nan), VISIBLE)
            edges = counts.query_edges, counts.key_edges
            _name_cells(axes, *edges, labels_of_batch(labels, batch), offset)
            where = place(record.batch, record.head).strip(" ()")
            axes.set_title(drawable(f"{name} {where}".strip() or "visible: filled", 36))
            axes.set_xlabel(_counted(record), color=MUTED)
            if counts.sizes.max(initial=1) > 1:
                _share_scale(image, axes)
        return figure


def comparison_picture(
    title: str, maps: Sequence[DifferenceMaps], labels: Labels, against: str
) -> Picture:
    """Two masks cell by cell: visible in both, in one alone, in neither.

    A place that stands for several cells shows a difference if any of them differs.
    """
    shown = maps[:MOST_PANELS]
    with styled():
        title += pooled_words(one.both for one in shown)
        figure, panels = _panels(title, len(shown), labels)
        ramp = ListedColormap(list(COMPARED.values()))
        for axes, one in zip(panels, shown, strict=True):
            a, b, both = (pool.sums for pool in (one.only_a, one.only_b, one.both))
            kind = np.select([(b > 0) & (b >= a), a > 0, both > 0], [3, 2, 1], 0)
            draw_map(axes, kind.astype(np.float64), Normalize(-0.5, 3.5)).set_cmap(ramp)
            _name_cells(axes, one.both.row_edges, one.both.column_edges, labels, None)
            axes.set_title(place(one.batch, one.head).strip(" ()") or f"against {against}")
            counts = [round(part.sum()) for part in (both, a, b)]
            said = "visible in both {:,} · this alone {:,} · other alone {:,}".format(*counts)
            axes.set_xlabel(said, color=MUTED)
        handles = [
            Patch(color=colour, label=f"visible in {name}") for name, colour in COMPARED.items()
        ]
        figure.legend(
            handles=handles,
            loc="outside lower left",
            ncols=4 if len(shown) > 1 else 2,
            frameon=False,
        )
        return figure


def effect_picture(title: str, maps: EffectMaps, labels: Labels, offset: int | None) -> Picture:
    """Weights before the mask, the mask, and weights after it."""
    with styled():
        title += " · batch 0, head 0" + pooled_words([maps.before])
        figure, panels = _panels(title, 3, labels)
        norm = weight_scale(maps.before.shape[1])
        shares = maps.visible.means
        hidden = np.isnan(maps.after.means) | (shares == 0)
        for axes, name, values, scale in (
            (panels[0], "weights without the mask", maps.before.means, norm),
            (panels[1], "the mask: visible is filled", shares, VISIBLE),
            (panels[2], "weights with it", maps.after.means, norm),
        ):
            seen = values if axes is panels[0] else np.where(hidden, np.nan, values)
            image = draw_map(axes, seen, scale)
            _name_cells(axes, maps.before.row_edges, maps.before.column_edges, labels, offset)
            axes.set_title(name)
            if scale is norm:
                draw_scale(image, axes, WEIGHT, 2.9, below=True)
            else:
                _share_scale(image, axes)
        return figure


def _panels(title: str, count: int, labels: Labels) -> tuple[Picture, list[Axes]]:
    """An empty picture of so many square panels."""
    named = room_for(labels)
    wide = max(5.4, 1.0 + 3.7 * count)
    figure = picture(title, wide, 4.6 + named, compress=True)
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _name_cells(
    axes: Axes, queries: Edges, keys: Edges, labels: Labels, offset: int | None
) -> None:
    """Names at both edges, and gaps between cells that are few."""
    down = len(queries) - 1, len(keys) - 1
    axes.set_box_aspect(min(2.0, max(0.3, down[0] / max(1, down[1]))))
    name_axis(axes, "x", pool_names(keys, labels), 3.1, tokens=labels is not None)
    rows = labels if offset is not None else None
    name_axis(axes, "y", pool_names(queries, rows, offset or 0), 3.1, tokens=rows is not None)
    axes.xaxis.tick_top()
    axes.set_ylabel("query ↓, key →", color=MUTED)
    if max(down) <= GAPS_UP_TO:
        axes.set_xticks(np.arange(-0.5, down[1]), minor=True)
        axes.set_yticks(np.arange(-0.5, down[0]), minor=True)
        axes.grid(which="minor", color="white", lw=max(0.4, 2.0 - max(down) / 24))
        axes.tick_params(which="minor", length=0)


def _share_scale(image: AxesImage, axes: Axes) -> None:
    bar = draw_scale(image, axes, "share of the cells that is visible", 2.9, below=True)
    bar.ax.set_xlim(0, 1)


def _counted(record: MaskRecord) -> str:
    fewest, most = record.keys_min, record.keys_max
    if fewest is None or most is None:
        return "no cells"
    span = f"{most:,}" if fewest == most else f"{fewest:,}–{most:,}"
    return f"{record.kept:,} of {record.cells:,} visible · keys a query {span}"
