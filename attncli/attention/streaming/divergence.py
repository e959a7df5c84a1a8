"""How far two attentions over the same queries and keys are apart, in memory that grows with n.

Both sides are measured row by row as `stream` does; one more pass visits the tiles that either of
them sees. With a and b the weights of one cell on the two sides and δ = ln b − ln a:

    KL(A‖B) = Σ a·ln(a/b) = Σ a·(e^δ − 1 − δ)       since Σ a = Σ b = 1
    JS = ½ KL(A‖M) + ½ KL(B‖M) = −½ Σ w·((2 + u)·ln(1 + u/2) + (1 + u)·|δ|)
    TV = ½ Σ |a − b|           = −½ Σ w·u

where M is the mean of both, w the larger of a and b, and u = e^−|δ| − 1. Every term is at least 0
and small where δ is, so that what two nearly equal attentions differ by is no rounding error of
large terms; and none needs a choice of each cell, which costs more than all the rest. A sink logit
is one more outcome.

Sources: Kullback and Leibler, "On information and sufficiency" (1951); Lin, "Divergence measures
based on the Shannon entropy" (1991).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from attncli.attention.problem import Problem
from attncli.attention.streaming.head_group import HeadGroup, RowBlock, common_blocks, make_group
from attncli.attention.streaming.rows import RowStatistics, mark_seen
from attncli.attention.streaming.stream import (
    HeadRows,
    Wanted,
    heads_at_once,
    neighbours,
    rows_of_groups,
)
from attncli.attention.streaming.tiles import (
    TILE_KEYS,
    TILE_ROWS,
    Workspace,
    exponential,
    score_tile,
)
from attncli.attention.threads import parallel_map, single_threaded_torch
from attncli.errors import DataError

# Its negative stands for the logits of hidden keys, of which differences are numbers then.
_FAR = 1e30
# A δ from which on b is all that counts of e^δ − 1 − δ, by dtype.
_ALL = {torch.float32: 20.0, torch.float64: 45.0}
# Of six buffers: fewer would stay in the second-level cache, and cost more calls than that spares.
CELLS_AT_ONCE = 1 << 17


@dataclass(frozen=True, slots=True)
class RowDivergences:
    """What the rows of one head differ by, float64 (R,); NaN where a row is empty on one side.

    Attributes:
        kl_nats: KL(A‖B); ∞ where B hides a key that A sees.
        js_nats: Jensen–Shannon divergence, at most ln 2.
        tv: total variation, at most 1.
        mass_lost: what A gives to keys that B hides; 1 where B sees no key, 0 where A sees none.
        hides: bool, whether B hides a key that A sees.
    """

    kl_nats: torch.Tensor
    js_nats: torch.Tensor
    tv: torch.Tensor
    mass_lost: torch.Tensor
    hides: torch.Tensor


@dataclass(frozen=True, slots=True)
class HeadPair:
    """One head on both sides, and what its rows differ by."""

    a: HeadRows
    b: HeadRows
    rows: RowDivergences


def stream_divergences(
    a: Problem,
    b: Problem,
    wanted: Wanted | None = None,
    *,
    batches: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    part: slice = slice(None),
    advance: Callable[[int], None] | None = None,
) -> Iterator[HeadPair]:
    """Compare every row, one batch and head after another, over the queries real on both sides.

    Args:
        a, b: two problems of equal batches, heads, queries and keys, on one device.
        wanted: what to compute of both sides beside the columns that every row has.
        batches, heads: indices, in the order to yield them; None for all.
        part: which of the queries, as for `stream_rows`.
        advance: told after each block of rows how many cells it covered.

    Raises:
        DataError: the problems do not have the same shape.
    """
    refuse_other_shapes(a, b)
    wanted = wanted or Wanted()
    heads = range(a.sizes.heads) if heads is None else heads
    masks = [side.mask_on_device() for side in (a, b)]
    for batch in range(a.sizes.batch) if batches is None else batches:
        chosen = real_on_both(a, b, batch)
        for several in neighbours(heads, heads_at_once(a, len(chosen))):
            with single_threaded_torch(a.device) as workers:
                groups = [
                    make_group(
                        side,
                        mask,
                        batch,
                        several,
                        chosen,
                        part=part,
                        with_values=wanted.output,
                        with_top_key=True,
                    )
                    for side, mask in zip((a, b), masks, strict=True)
                ]
                sides = rows_of_groups(groups, wanted, advance, workers)
                found = _of_groups(groups, [rows for rows, _ in sides], advance, workers)
            for of_a, of_b, rows in zip(sides[0][1], sides[1][1], found, strict=True):
                yield HeadPair(of_a, of_b, rows)


def real_on_both(a: Problem, b: Problem, batch: int) -> NDArray[np.int64]:
    """Int64 (R,): the queries that are padding on neither side."""
    return np.arange(min(a.mask.real_queries(batch), b.mask.real_queries(batch)))


def refuse_other_shapes(a: Problem, b: Problem) -> None:
    """Refuse two sides whose rows cannot be compared.

    Raises:
        DataError: they differ in batches, heads, queries or keys; names the role of B.
    """
    for name, symbol in (("batch", "B"), ("heads", "H"), ("q_len", "S_q"), ("k_len", "S_k")):
        one, other = getattr(a.sizes, name), getattr(b.sizes, name)
        if one != other:
            problem = f"expected the same {symbol} as on the other side, {one}, got {other}"
            raise DataError("q" if name != "k_len" else "k", problem)


def _of_groups(
    groups: Sequence[HeadGroup],
    rows: Sequence[RowStatistics],
    advance: Callable[[int], None] | None,
    workers: int,
) -> list[RowDivergences]:
    """The rows of some heads, block by block."""
    hulls = [group.hull for group in groups]
    blocks = list(common_blocks(hulls, TILE_ROWS, TILE_KEYS))

    def compare(block: tuple[RowBlock, ...], work: _Scratch) -> torch.Tensor:
        return _sums_of_block(groups, rows, block, work)

    def scratch() -> _Scratch:
        room = groups[0].keys.new_empty(4 * CELLS_AT_ONCE)
        return _Scratch([Workspace.of(group) for group in groups], room)

    found = []
    results = parallel_map(compare, blocks, scratch, workers)
    for block, sums in zip(blocks, results, strict=True):
        found.append(sums)
        if advance is not None:
            keys = sum(tile.stop - tile.start for tile in block[0].tiles)
            advance(2 * len(groups[0].heads) * (block[0].stop - block[0].start) * keys)
    none = torch.zeros(5, len(groups[0].heads), 0, dtype=torch.float64, device=groups[0].device)
    kl, js, tv, lost, hidden = torch.cat([none, *found], 2)  # (G, R) each
    one, other = rows
    hides = (hidden > 0) & ~one.empty
    if one.sink_weight is not None and other.sink_weight is None:
        kl = torch.full_like(kl, torch.inf)
    kl, js, tv = (
        part.masked_fill(one.empty | other.empty, torch.nan)
        for part in (kl.masked_fill(hides, torch.inf), js.clamp(max=math.log(2)), tv.clamp(max=1.0))
    )
    lost = lost.clamp(max=1.0).masked_fill(one.empty, 0.0)
    return [RowDivergences(*head) for head in zip(kl, js, tv, lost, hides, strict=True)]


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Buffers of one thread: those of each side's tiles, and flat ones for what they differ by."""

    sides: Sequence[Workspace]
    room: torch.Tensor


def _sums_of_block(
    groups: Sequence[HeadGroup],
    rows: Sequence[RowStatistics],
    blocks: Sequence[RowBlock],
    work: _Scratch,
) -> torch.Tensor:
    """KL, JS, TV, what is lost and how many keys hide it, float64 (5, G, rows)."""
    some = slice(blocks[0].start, blocks[0].stop)
    offsets = [
        (side.row_max + torch.log1p(side.sum_exp_minus_1))[:, some].masked_fill(
            side.empty[:, some], 0.0
        )[..., None]
        for side in rows
    ]  # (G, rows, 1): the logarithm of the sum over all outcomes
    sums = torch.zeros(5, *offsets[0].shape[:2], dtype=torch.float64, device=groups[0].device)
    queries = [group.shrunk_queries(some.start, some.stop) for group in groups]
    factors = [group.factor() for group in groups]
    alike = all(group.by_interval for group in groups) and torch.equal(
        *(group.bounds[:, some] for group in groups)
    )
    gone = None if alike else -math.inf
    if any(group.may_overflow for group in groups):
        gone = torch.finfo(groups[0].dtype).min  # as `mark_seen` writes −∞ that is no hidden key
    for tiles in zip(*(block.tiles for block in blocks), strict=True):
        logits = []
        for at, tile in enumerate(tiles):
            group, block, own = groups[at], blocks[at], work.sides[at]
            logit, _ = own.tile(len(group.heads), some.stop - some.start, tile.stop - tile.start)
            score_tile(group, block, tile, queries[at], factors[at], logit, own)
            mark_seen(group, block, tile, rows[at], logit)
            logits.append(logit)
        sums += _divergences(logits, offsets, work.room, gone)
    if any(group.sinks is not None for group in groups):
        outcome = [
            offset * 0 + (-torch.inf if group.sinks is None else group.sinks[..., None])
            for group, offset in zip(groups, offsets, strict=True)
        ]  # (G, rows, 1)
        room = outcome[0].new_empty(4 * outcome[0].numel())
        sums[:3] += _divergences(outcome, offsets, room, None)[:3]
    return sums


def _divergences(
    logits: Sequence[torch.Tensor],
    offsets: Sequence[torch.Tensor],
    room: torch.Tensor,
    gone: float | None,
) -> torch.Tensor:
    """What the cells of some rows add to KL, JS, TV, to what is lost and to the keys that lose it.

    Args:
        logits: (G, rows, keys) of both sides, −inf where a key is hidden; overwritten.
        offsets: float64 (G, rows, 1), their log-sum-exp over all outcomes.
        room: flat, scratch for four times the cells that are looked at together.
        gone: logits from here on down weigh nothing beside others; None where B has none that A
            has not.

    Returns:
        Float64 (5, G, rows).
    """
    heads, rows, keys = logits[0].shape
    found = offsets[0].new_zeros(5, heads * rows)
    flat = [part.flatten(0, 1) for part in (*logits, *offsets)]
    step = max(1, len(room) // (4 * max(1, keys)))
    for start in range(0, heads * rows, step):
        a, b, *sums = (part[start : start + step] for part in flat)
        spare = room[: 4 * a.numel()].view(4, *a.shape)
        _add_cells(found[:, start : start + step], (a, b), sums, spare, gone)
    return found.view(5, heads, rows)


def _add_cells(
    found: torch.Tensor,
    logits: Sequence[torch.Tensor],
    offsets: Sequence[torch.Tensor],
    spare: torch.Tensor,
    gone: float | None,
) -> None:
    """The same of a few rows, (rows, keys), which stay in the cache; all passes over them count."""
    (a, b), dtype = logits, logits[0].dtype
    delta, distance, product, odd = spare
    if gone is not None:
        lost = _weightless(b, offsets[1], gone) & ~_weightless(a, offsets[0], gone)
    # Of nearly equal logits the difference has digits that those of two logarithms have not.
    torch.sub(b.clamp_(min=-_FAR), a.clamp_(min=-_FAR), out=delta)
    delta.sub_((offsets[1] - offsets[0]).to(dtype))
    for logit, offset in zip(logits, offsets, strict=True):
        logit.sub_(offset.to(dtype))
    larger = exponential(torch.maximum(a, b, out=a), out=a)  # of the two weights
    delta.clamp_(max=_ALL[dtype])
    torch.abs(delta, out=distance)
    less = torch.neg(distance, out=b).expm1_()  # e^−|δ| − 1, the smaller is larger · (1 + less)
    torch.mul(less, distance, out=product)
    torch.add(distance, product, alpha=0.5, out=odd).add_(less)  # of e^δ − 1 − δ, about |δ|³/12
    kl = _dot(larger, torch.copysign(odd, delta, out=odd)).add_(_dot(larger, product), alpha=0.5)
    tv = _dot(larger, less)
    rest = product.add_(distance)  # e^−|δ|·|δ|
    halves = torch.mul(less, 0.5, out=odd).log1p_()  # ln of the mean / the larger
    js = _dot(larger, halves.mul_(less.add_(2)).add_(rest))
    found[0] -= kl
    found[1] -= js / 2
    found[2] -= tv / 2
    if gone is not None:
        found[3] += _dot(larger, lost.to(dtype))
        found[4] += lost.sum(-1)


def _weightless(logits: torch.Tensor, offsets: torch.Tensor, least: float) -> torch.Tensor:
    """Which keys a row hides, or gives −∞ beside others that it does not, bool (rows, keys)."""
    hidden = torch.isneginf(logits)
    return hidden if least == -math.inf else hidden | ((logits <= least) & (offsets > least / 2))


def _dot(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Products of two rows of cells, summed: (rows, keys) twice → (rows,)."""
    found: torch.Tensor = torch.linalg.vecdot(one, other)
    return found
