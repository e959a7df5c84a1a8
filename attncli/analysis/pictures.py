"""What pictures are drawn from: stages and rows of any size, pooled to what a picture can show."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import torch

from attncli.analysis.compute import StagesAsked
from attncli.attention.options import Stage
from attncli.attention.pooling import Pool, StageMaps
from attncli.attention.streaming.stream import HeadRows

# What a picture has room for: heads below each other, stages side by side, cells of a map.
MOST_HEADS = 4
MOST_CELLS = 128
# Places along a curve.
MOST_PLACES = 512

DRAWN_STAGES = (
    Stage.SCORES,
    Stage.SCALED,
    Stage.CAPPED,
    Stage.MASKED,
    Stage.WEIGHTS,
    Stage.OUTPUT,
)


def stage_maps(asked: StagesAsked) -> list[StageMaps]:
    """The stages of the first heads of a selection, computed anew block by block.

    Args:
        asked: what of them; stages that no map shows (Q, K, V, the projection) are left out.
    """
    stages = tuple(stage for stage in asked.stages if stage in DRAWN_STAGES)
    heads = asked.selection.heads[:MOST_HEADS]
    batches = asked.selection.batches[: MOST_HEADS // max(1, len(heads))]
    few = replace(
        asked, stages=stages, selection=replace(asked.selection, batches=batches, heads=heads)
    )
    shapes = {stage: result.shape for stage, result in few.results().items()}
    offset = asked.problem.mask.offset
    one = None if offset is None or len(offset) > 1 else int(offset[0])
    found = {}
    for place in itertools.product(batches, heads):
        maps = {str(stage): Pool.of(*shape[2:], MOST_CELLS) for stage, shape in shapes.items()}
        found[place] = StageMaps(*place, asked.selection.rows, one, maps)
    for block in few.blocks() if stages else ():
        counted = block.real[:, None].expand(block.values.shape)
        if block.visible is not None and block.stage in (Stage.MASKED, Stage.WEIGHTS):
            counted = counted & block.visible
        found[block.batch, block.head].maps[block.stage].add(
            block.at + np.arange(len(block.rows)), block.values, counted
        )
    return list(found.values())


@dataclass(frozen=True, slots=True)
class HeadCurves:
    """What one head does along the sequence.

    Attributes:
        entropy_nats: (1, queries), of each row that is not empty.
        most_nats: likewise, the entropy of even attention to what the row sees.
        mass: (1, keys), the mean weight of each key over the queries that see it; None where that
            was not asked for.
    """

    entropy_nats: Pool
    most_nats: Pool
    mass: Pool | None


def head_curves(rows: HeadRows, queries: int) -> HeadCurves:
    """The curves of a head.

    Args:
        rows: its rows, with what keys receive if that is to be drawn.
        queries: S_q, of which padding is left out.
    """
    outcomes = rows.outcomes.to(torch.float64)
    mass = None
    if rows.received is not None:
        seen = rows.received.queries
        mass = _curve(rows.received.mass / seen, torch.arange(len(seen)), len(seen))
    return HeadCurves(
        entropy_nats=_curve(rows.entropy_nats, rows.queries, queries),
        most_nats=_curve(outcomes.log(), rows.queries, queries),
        mass=mass,
    )


def _curve(values: torch.Tensor, places: torch.Tensor, length: int) -> Pool:
    """Values (n,) at their places on an axis; what is not finite is left out."""
    whole = torch.full((1, length), torch.nan, dtype=torch.float64)
    whole[0, places.cpu()] = values.cpu().to(torch.float64)
    curve = Pool.of(1, length, MOST_PLACES)
    curve.add([0], whole.numpy())
    return curve
