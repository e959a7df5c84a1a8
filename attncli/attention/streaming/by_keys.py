"""Rows whose keys lie with several ranks: each sums the tiles of its own, and all merge the sums.

For keys that no machine has room for. A rank has some neighbouring keys, and every query: of a row
it knows its own largest logit m_r, its sums relative to that, and what all ranks make of them:

    m = max m_r,  Σ e^(s−m) = Σ_r e^(m_r−m)·Σ e^(s−m_r),  and likewise of what is summed along

What needs the softmax of whole rows, which is the shares of chosen keys and the mass of each key,
is computed by whoever has the keys, and added up.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from attncli import ranks
from attncli.attention.problem import Problem
from attncli.attention.streaming.head_group import HeadGroup, largest_logit_of, make_group
from attncli.attention.streaming.mass import KeyMass
from attncli.attention.streaming.rows import (
    MergedTiles,
    RowStatistics,
    Share,
    Shares,
    concatenate,
    find_shares,
    finish_rows,
)
from attncli.attention.streaming.stream import (
    HeadRows,
    Wanted,
    heads_of_group,
    largest_row,
    made_groups,
    masses_of,
    merged_blocks,
    runs_of,
)
from attncli.attention.streaming.tiles import exponential
from attncli.attention.threads import single_threaded_torch


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys of this rank, [start, stop) on the key axis."""

    start: int
    stop: int

    @classmethod
    def of_rank(cls, length: int) -> _Keys:
        """About as many for each rank."""
        here = ranks.share_of(length)
        return cls(here.start, here.stop)

    def of(self, problem: Problem) -> Problem:
        """The problem of these keys alone."""
        k = problem.k[:, :, self.start : self.stop]
        return replace(problem, k=k, v=None, mask=problem.mask.of_keys(self.start, self.stop))


def rows_by_keys(
    problem: Problem,
    wanted: Wanted,
    *,
    batches: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    queries: Sequence[NDArray[np.int64]] | None = None,
    advance: Callable[[int], None] | None = None,
) -> Iterator[HeadRows]:
    """What `stream_rows` finds, with the keys shared out over the ranks; nothing but at rank 0.

    Args:
        problem: as for `stream_rows`, as are the others.
        wanted: neither an output, nor bins, nor tokens.
        batches, heads, queries, advance: likewise.
    """
    keys = _Keys.of_rank(problem.sizes.k_len)
    own = keys.of(problem)
    make = partial(
        make_group,
        own,
        own.mask_on_device(),
        with_values=False,
        with_top_key=wanted.top_key,
        with_distances=wanted.distances,
    )
    for run in runs_of(problem, batches, heads, queries):
        with single_threaded_torch(problem.device) as workers:
            groups = made_groups(make, run, workers)
            merged = merged_blocks(groups, advance, workers)
            rows = [
                finish_rows(group, [_merge(concatenate(blocks), keys)])
                for group, blocks in zip(groups, merged, strict=True)
            ]
            masses: list[KeyMass | None] = [None] * len(groups)
            if wanted.per_key:
                found = masses_of(groups, rows, None, advance, workers)
                masses = [_whole_mass(mass) for mass, _ in found]
            for group, of_group, mass in zip(groups, rows, masses, strict=True):
                first_keys = max(0, wanted.sink_keys - keys.start)
                shares = _add_shares(find_shares(group, of_group, first_keys))
                largest = _largest_logits(group, of_group, keys)
                if ranks.is_first():
                    yield from heads_of_group(group, of_group, shares, largest, mass, None)


def _merge(own: MergedTiles, keys: _Keys) -> MergedTiles:
    """What the tiles of all ranks say of rows."""
    flags = torch.stack([own.lost, own.nonfinite.expand(own.lost.shape)]).to(torch.float64)
    row_max, lost, nonfinite = ranks.reduce(torch.cat([own.row_max[None], flags]), "MAX")
    vanished, here = torch.isneginf(row_max), ranks.place().rank
    # The first rank that has the largest logit leaves out its 1, as tiles do.
    owner = torch.where(own.row_max == row_max, here, ranks.count())
    is_owner = ranks.reduce(owner, "MIN") == here
    shift = (own.row_max - row_max).nan_to_num(0.0, neginf=-1e5).clamp(min=-1e5)
    shrink, nothing = exponential(shift), own.vanished | own.lost
    minus_1 = own.sum_exp_minus_1.masked_fill(nothing, -1.0)
    parts = [
        torch.where(is_owner, minus_1, shrink * (1 + minus_1)),
        shrink * (own.sum_exp_shifted.masked_fill(nothing, 0.0) + shift * (1 + minus_1)),
        own.keys.to(torch.float64),
    ]
    for part in (own.distance, own.top_key):
        if part is not None:
            parts.append(part.to(torch.float64).masked_fill(nothing, 0.0) * shrink)
    if own.top_key is not None:
        parts[-1] = torch.where(is_owner, own.top_key + keys.start, 0).to(torch.float64)
    minus_1, shifted, seen, *others = ranks.reduce(torch.stack(parts), "SUM")
    broken = lost > 0
    return MergedTiles(
        row_max=row_max,
        sum_exp_minus_1=minus_1.masked_fill(broken | vanished, torch.nan),
        sum_exp_shifted=shifted,
        distance=None if own.distance is None else others[0],
        top_key=None if own.top_key is None else others[-1].to(torch.int64),
        vanished=vanished,
        keys=seen.to(torch.int64),
        nonfinite=nonfinite > 0,
        lost=broken,
        output=None,
    )


def _add_shares(own: Shares) -> Shares:
    found = {}
    for field in fields(Shares):
        share: Share | None = getattr(own, field.name)
        if share is not None:
            weight, seen = ranks.reduce(torch.stack([share.weight, share.seen.double()]), "SUM")
            share = Share(weight.clamp(max=1.0), seen.to(torch.int64))
        found[field.name] = share
    return Shares(**found)  # type: ignore[arg-type]


def _whole_mass(own: KeyMass) -> KeyMass:
    """The mass of the keys of all ranks, one after another."""
    parts = ranks.everywhere(own)
    return KeyMass.side_by_side(parts)


def _largest_logits(
    group: HeadGroup, rows: RowStatistics, keys: _Keys
) -> list[tuple[int | None, int | None]]:
    """Query and key of the largest logit of each head, the first where several are equal."""
    found: list[tuple[int | None, int | None]] = []
    for index in range(len(group.heads)):
        row, key = largest_row(rows, index), None
        if row is not None and rows.top_key is not None:
            key = int(rows.top_key[index, row])
        elif row is not None:
            logit, own = largest_logit_of(group, index, row)
            best = ranks.reduce(torch.tensor(logit, dtype=torch.float64), "MAX")
            is_here = float(best) == logit and not np.isneginf(logit)
            first = torch.tensor(own + keys.start if is_here else torch.iinfo(torch.int64).max)
            key = int(ranks.reduce(first, "MIN"))
        found.append((None if row is None else int(group.queries[row]), key))
    return found
