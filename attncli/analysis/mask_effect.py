"""What a mask does to the softmax: weights before and after it, row by row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attncli.attention import steps
from attncli.attention.masks.mask import Mask
from attncli.attention.options import Stage
from attncli.attention.pooling import Pool
from attncli.attention.problem import Problem
from attncli.attention.sizes import Chosen
from attncli.attention.stages import select, stage_blocks
from attncli.attention.threads import sum_along
from attncli.columns import column


@dataclass(frozen=True, slots=True, kw_only=True)
class RowEffect:
    """Softmax of one real query before and after a mask."""

    batch: int = column("batch", is_key=True, description="its index")
    head: int = column("head", is_key=True, description="index of the query head")
    query: int = column("query", is_key=True, description="index of a real query")
    sum_before: float = column(None, description="sum of the weights without the mask: 1")
    sum_after: float = column(
        "row sum", description="sum of the weights with the mask: 1, or 0 for an empty row"
    )
    entropy_before_nats: float | None = column(
        "entropy before", unit="nats", description="entropy of the weights without the mask"
    )
    entropy_before_bits: float | None = column(
        "entropy before", unit="bits", description="entropy_before_nats / ln 2"
    )
    entropy_after_nats: float | None = column(
        "after",
        unit="nats",
        description="entropy of the weights with the mask; none for an empty row",
        is_beside=True,
    )
    entropy_after_bits: float | None = column(
        "after", unit="bits", description="entropy_after_nats / ln 2", is_beside=True
    )
    mass_removed: float = column(
        "mass removed", description="weight that the keys now hidden had before, 0 to 1"
    )
    mass_moved: float = column("mass moved", description="½ Σ |change| of the weights, 0 to 1")
    top_before: int | None = column("top key before", description="key of the largest weight")
    top_after: int | None = column(
        "after",
        description="key of the largest weight with the mask; none for an empty row",
        is_beside=True,
    )


@dataclass(frozen=True, slots=True)
class EffectMaps:
    """Weights of one batch and head without and with a mask, and what it shows, pooled."""

    place: tuple[int, int]  # the batch and the head
    before: Pool
    visible: Pool
    after: Pool

    @classmethod
    def of(cls, mask: Mask, most: int) -> EffectMaps:
        """Empty ones of the first to look at, of at most so many places each way."""
        view = mask.head(*mask.first)
        place = view.batch, view.head
        return cls(place, *(Pool.of(view.rows, view.k_len, most) for _ in range(3)))


def effect_on_problem(
    problem: Problem, maps: EffectMaps | None = None, chosen: Chosen = (None, None)
) -> Iterator[RowEffect]:
    """Of the mask of a problem on its own logits; sinks are left out.

    Args:
        problem: the whole.
        maps: filled on the way, if there are any.
        chosen: which of its batches and heads to look at.
    """
    before = Stage.SCALED if problem.softcap is None else Stage.CAPPED
    blocks = stage_blocks(problem, [before, Stage.MASKED], select(problem, *chosen))
    for plain, masked in zip(blocks, blocks, strict=True):
        real = plain.real
        rows = [row for row, is_real in zip(plain.rows, real.tolist(), strict=True) if is_real]
        values = (tensor[real] for tensor in (plain.values, masked.values, masked.counted))
        yield from _effects((plain.batch, plain.head), rows, maps, *values)


def effect_on_scores(
    scores: NDArray[Any], mask: Mask, maps: EffectMaps | None = None
) -> Iterator[RowEffect]:
    """Of a mask on given logits.

    Args:
        scores: real (B, H, S_q, S_k), what softmax would be given without the mask.
        mask: on the host; its additive values and ALiBi count.
        maps: filled on the way, if there are any.
    """
    for batch, head in product(mask.indices(0), mask.indices(1)):
        one = mask.head(batch, head)
        for rows, visible in one.blocks():
            bias = one.bias(rows)
            found = steps.logits(
                torch.from_numpy(scores[batch, head, rows].astype(np.float64)),
                scale=1.0,
                temperature=1.0,
                softcap=None,
                visible=torch.tensor(visible),
                bias=None if bias is None else torch.tensor(bias),
            )
            queries = range(rows.start, rows.stop)
            parts = found.scaled, found.masked, found.visible
            yield from _effects((batch, head), queries, maps, *parts)


def _effects(
    place: tuple[int, int],
    queries: Sequence[int],
    maps: EffectMaps | None,
    plain: torch.Tensor,
    masked: torch.Tensor,
    visible: torch.Tensor,
) -> Iterator[RowEffect]:
    """One a query, of logits (rows, S_k) without and with the mask."""
    everything = torch.ones_like(visible)
    before, after = (steps.softmax(*x) for x in ((plain, everything), (masked, visible)))
    if maps is not None and place == maps.place:
        maps.before.add(queries, before.weights)
        maps.visible.add(queries, visible)
        maps.after.add(queries, after.weights, visible)
    removed = sum_along(torch.where(visible, 0.0, before.weights))
    moved = sum_along((after.weights - before.weights).abs()) / 2
    rows = zip(queries, removed.tolist(), moved.tolist(), _told(before), _told(after), strict=True)
    for query, mass_removed, mass_moved, first, second in rows:
        yield RowEffect(
            batch=place[0],
            head=place[1],
            query=query,
            sum_before=first[0],
            sum_after=second[0],
            entropy_before_nats=first[1],
            entropy_before_bits=first[2],
            entropy_after_nats=second[1],
            entropy_after_bits=second[2],
            mass_removed=mass_removed,
            mass_moved=mass_moved,
            top_before=first[3],
            top_after=second[3],
        )


def _told(found: steps.Softmax) -> Iterator[tuple[float, float | None, float | None, int | None]]:
    """Of each row the sum, the entropy in nats and in bits, and the key of the largest weight."""
    weights = found.weights
    sums, entropies = sum_along(weights).tolist(), steps.entropy_of_weights(weights).tolist()
    keys = weights.argmax(-1).tolist() if weights.shape[-1] else sums
    for total, nats, key, empty in zip(sums, entropies, keys, found.empty.tolist(), strict=True):
        yield (total, None, None, None) if empty else (total, nats, nats / math.log(2), key)
