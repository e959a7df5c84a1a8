"""From the sums of tiles to the statistics of whole rows, and the weight of chosen keys of each.

The weight of a few given keys per query costs O(n·d) once the softmax of every row is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from attncli.attention.streaming.head_group import HeadGroup, RowBlock, Tile
from attncli.attention.streaming.tiles import (
    NO_WEIGHT,
    TILE_ROWS,
    TileSums,
    Workspace,
    exponential,
    score_tile,
)
from attncli.attention.threads import parallel_map
from attncli.columns import column


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStatistics:
    """What is known of rows, (G, R) for the heads of a group or (R,) for one of them.

    Floats are float64, and NaN where a row has no such value: an empty row has none; whole numbers
    are int64, and −1 for no top key. Fields that are columns say themselves what they are, and are
    None if not asked for.

    Attributes:
        row_max: the larger of the largest logit and the sink.
        sum_exp_minus_1: Σ e^(s − row_max) − 1 over all outcomes, so that a weight is
            e^(s − row_max) / (1 + sum_exp_minus_1).
        empty: bool, whether the query sees no key.
        output: (G, R, d_v), in the dtype of arithmetic, 0 in empty rows; None if not asked for.
    """

    keys: torch.Tensor = column("keys", description="number of visible keys", holds=int)
    entropy_nats: torch.Tensor = column(
        "entropy",
        unit="nats",
        description="−Σ w ln w over all outcomes: the visible keys, and the sink logit if there is "
        "one; 0 to ln(outcomes)",
        holds=float | None,
    )
    entropy_bits: torch.Tensor = column(
        "entropy", unit="bits", description="entropy_nats / ln 2", holds=float | None
    )
    entropy_normalized: torch.Tensor = column(
        "normalised",
        description="entropy / ln(outcomes), 0 to 1; none where there is one outcome alone",
        holds=float | None,
    )
    effective_keys: torch.Tensor = column(
        "effective keys", description="e^entropy, 1 to outcomes", holds=float | None
    )
    max_weight: torch.Tensor = column(
        "largest weight",
        description="the largest weight of a visible key, 0 to 1",
        holds=float | None,
    )
    top_key: torch.Tensor | None = column(
        "top key", description="key of the largest logit; none in an empty row", holds=int | None
    )
    max_logit: torch.Tensor | None = column(
        "max logit",
        description="the largest visible logit that is not NaN; none of weights that were given",
        holds=float | None,
    )
    logsumexp: torch.Tensor | None = column(
        "logsumexp",
        description="ln Σ e^logit over the visible keys alone; none of weights that were given",
        holds=float | None,
    )
    sink_mass: torch.Tensor | None = column(
        "sink mass",
        description="weight on the first keys («sink_keys»), 0 to 1",
        holds=float | None,
        default=None,
    )
    distance: torch.Tensor | None = column(
        "distance",
        description="Σ w·|p − j|, in keys, p the query's position and j the key's; none where "
        "positions are not defined",
        holds=float | None,
    )
    sink_weight: torch.Tensor | None = column(
        "sink logit's weight",
        description="what the sink logit takes, 0 to 1; none without one",
        holds=float | None,
    )
    nonfinite: torch.Tensor = column(
        "non-finite", description="whether a visible logit is NaN or infinite", holds=bool
    )
    row_max: torch.Tensor
    sum_exp_minus_1: torch.Tensor
    empty: torch.Tensor
    output: torch.Tensor | None

    @property
    def outcomes(self) -> torch.Tensor:
        """Int64: visible keys, and the sink where there is one; 0 in empty rows."""
        with_sink = 0 if self.sink_weight is None else 1
        return (self.keys + with_sink).masked_fill(self.empty, 0)

    def having(self, name: str) -> torch.Tensor:
        """Bool, which rows have a value in a column: without a choice nothing is normalised."""
        return self.outcomes > 1 if name == "entropy_normalized" else ~self.empty

    def of_head(self, index: int) -> dict[str, Any]:
        """The fields of one head of the group."""
        whole = {part.name: getattr(self, part.name) for part in fields(RowStatistics)}
        return {name: None if value is None else value[index] for name, value in whole.items()}


@dataclass(frozen=True, slots=True)
class MergedTiles:
    """What tiles say of rows, (G, R): sums over the outcomes relative to a row's largest logit."""

    row_max: torch.Tensor  # float64, as all that is not said of; the largest logit
    # Σ e^(s − row_max) − 1. Of a nearly one-hot row this is all that counts, and beside the 1 it
    # would lose its digits.
    sum_exp_minus_1: torch.Tensor
    sum_exp_shifted: torch.Tensor  # Σ e^(s − row_max)·(s − row_max); NaN if not asked for
    distance: torch.Tensor | None  # Σ e^(s − row_max)·|p − j|; None if not asked for
    top_key: torch.Tensor | None  # int64, the first of the largest logit; None if not asked for
    vanished: torch.Tensor  # bool, whether no visible logit is above −inf
    keys: torch.Tensor  # int64, visible keys
    nonfinite: torch.Tensor  # bool, as in `TileSums`
    lost: torch.Tensor  # bool, likewise
    output: torch.Tensor | None  # (G, R, d_v), Σ e^(s − row_max)·v in the dtype of arithmetic


def merge_tiles(group: HeadGroup, sums: TileSums) -> MergedTiles:
    """Merge the tiles of a block of rows."""
    tiles, least = slice(sums.tiles), torch.finfo(sums.figures.dtype).min
    unit, power = (math.log(2), torch.exp2) if group.base2_logits else (1.0, exponential)
    figures = sums.figures[:, tiles].to(torch.float64)  # (…, T, G, R)
    tile_max, sum_exp = figures[:2]
    reference = tile_max.clamp(min=least) if sums.reference is None else sums.reference[tiles]
    row_max, best = tile_max.max(0)
    # e^−1e5 is 0, and 0 · ∞ would be NaN.
    shift = (reference - row_max.clamp(min=least)).clamp_(min=-1e5)
    shrink, minus_1 = power(shift), None
    if group.separate_max:
        # What each tile's largest logit weighs, where its sum leaves it out. That of the best tile
        # is the 1 which sum_exp_minus_1 does not count.
        apart = power(tile_max - reference)
        minus_1 = (shrink * sum_exp).sum(0)
        minus_1 += (shrink * apart).scatter_(0, best[None], 0.0).sum(0)
        sum_exp += apart
    if group.entropy:
        figures[2].addcmul_(shift, sum_exp)
    total, *others = figures[1:].mul_(shrink).sum(1)
    if minus_1 is None:
        minus_1 = total - 1.0
    row_max = row_max * unit
    vanished = torch.isneginf(row_max)
    lost = sums.lost | vanished
    return MergedTiles(
        row_max=row_max,
        sum_exp_minus_1=minus_1.masked_fill_(lost, torch.nan),
        sum_exp_shifted=others[0] * unit if group.entropy else torch.full_like(row_max, torch.nan),
        distance=others[1] if group.distances else None,
        top_key=None if sums.top_key is None else sums.top_key[tiles].gather(0, best[None])[0],
        vanished=vanished,
        keys=sums.seen.expand(row_max.shape),
        nonfinite=sums.nonfinite,
        lost=sums.lost,
        output=sums.output,
    )


def finish_rows(group: HeadGroup, blocks: Sequence[MergedTiles]) -> RowStatistics:
    """The statistics of the rows of all blocks, one after another.

    Source: entropy H = ln Σe^(s−m) − Σe^(s−m)(s−m) / Σe^(s−m), from H = −Σ w ln w.
    """
    sinks, merged = group.sinks, concatenate(blocks)
    keys, lost = merged.keys, merged.lost
    if group.given is not None:  # a row that gives nothing is an empty one, whatever it may see
        keys = keys.masked_fill(merged.row_max == NO_WEIGHT, 0)
    empty = keys == 0
    joined = merged if sinks is None else _join_sink(merged, sinks)
    shrink = exponential(merged.row_max - joined.row_max)  # 1 without a sink
    largest = shrink / (1 + joined.sum_exp_minus_1)
    spread = joined.sum_exp_shifted / (1 + joined.sum_exp_minus_1)
    entropy = torch.log1p(joined.sum_exp_minus_1) - spread
    sink_weight = None
    if sinks is not None:
        sink_weight = exponential(sinks - joined.row_max) / (1 + joined.sum_exp_minus_1)
    outcomes = (keys + (sinks is not None)).to(torch.float64)
    limit = torch.log(outcomes)

    def of_rows(values: torch.Tensor) -> torch.Tensor:
        return values.masked_fill(empty, torch.nan)

    entropy = of_rows(torch.minimum(entropy.clamp(min=0.0), limit) + 0.0)  # never −0.0
    logits_known, top_key = group.given is None, merged.top_key
    return RowStatistics(
        keys=keys,
        entropy_nats=entropy,
        entropy_bits=entropy / math.log(2),
        entropy_normalized=(entropy / limit).masked_fill(outcomes < 2, torch.nan),
        effective_keys=torch.exp(entropy),
        max_weight=of_rows(largest),
        top_key=None if top_key is None else top_key.masked_fill(empty | merged.vanished, -1),
        max_logit=of_rows(merged.row_max.masked_fill(lost & merged.vanished, torch.nan))
        if logits_known
        else None,
        logsumexp=of_rows(_logsumexp(merged)) if logits_known else None,
        distance=None if merged.distance is None else of_rows(merged.distance * largest),
        sink_weight=None if sink_weight is None else of_rows(sink_weight),
        nonfinite=merged.nonfinite | (merged.vanished & ~empty),
        row_max=joined.row_max,
        sum_exp_minus_1=joined.sum_exp_minus_1,
        empty=empty,
        output=_output(merged, largest * group.value_unit, empty),
    )


def concatenate(blocks: Sequence[MergedTiles]) -> MergedTiles:
    """What is known of several blocks of rows, one after another."""
    whole: dict[str, Any] = {}
    for field in fields(MergedTiles):
        values = [getattr(block, field.name) for block in blocks]
        whole[field.name] = None if values[0] is None else torch.cat(values, 1)
    return MergedTiles(**whole)


def _join_sink(keys: MergedTiles, sinks: torch.Tensor) -> MergedTiles:
    """Let one more outcome into the sums; where all keys are at −inf, it takes everything."""
    row_max = torch.maximum(keys.row_max, sinks)
    of_keys, of_sink = exponential(keys.row_max - row_max), exponential(sinks - row_max)
    above = keys.row_max - row_max
    behind = keys.sum_exp_minus_1 + of_sink
    in_front = of_keys * (1 + keys.sum_exp_minus_1)
    minus_1 = torch.where(keys.row_max >= sinks, behind, in_front)
    alone = keys.vanished & ~keys.lost
    minus_1 = minus_1.masked_fill(alone, 0.0)
    shifted = of_keys * (keys.sum_exp_shifted + above.clamp(min=-1e5) * (1 + keys.sum_exp_minus_1))
    shifted = shifted + of_sink * (sinks - row_max).clamp(min=-1e5)
    shifted = shifted.masked_fill(alone, 0.0)
    return replace(keys, row_max=row_max, sum_exp_minus_1=minus_1, sum_exp_shifted=shifted)


def _logsumexp(keys: MergedTiles) -> torch.Tensor:
    found = keys.row_max + torch.log1p(keys.sum_exp_minus_1)
    return found.masked_fill(keys.vanished & ~keys.lost, -torch.inf)


def _output(merged: MergedTiles, largest: torch.Tensor, empty: torch.Tensor) -> torch.Tensor | None:
    if merged.output is None:
        return None
    # Weights first, of values in their unit: what comes of it is no larger than they are.
    output = merged.output * largest[..., None].to(merged.output.dtype)
    return output.masked_fill_(empty[..., None], 0.0)


# How many steps from its query a key counts as local.
LOCAL_WINDOW = 4
# Queries whose products with all the keys around any of them are computed together.
DIAGONAL_ROWS = 16
# Rows of heads whose shares are found together: of 512 it is calls that cost, of all it is memory.
SHARE_ROWS = 4096
# Of the first keys as many at once as a few bytes a row hold the weights of.
FIRST_KEYS = 16
# Cells of a band that are computed and not used grow with its height, a part of that of blocks.
BAND_ROWS = 256


@dataclass(frozen=True, slots=True)
class Share:
    """What some of the keys get of each row, (G, R) or (R,)."""

    weight: torch.Tensor  # float64, the sum of their weights; NaN in empty rows
    seen: torch.Tensor  # int64, how many of them the query sees

    def of_head(self, index: int) -> Share:
        """One head of the group."""
        return Share(self.weight[index], self.seen[index])

    @classmethod
    def joined(cls, parts: Sequence[Share]) -> Share:
        """Those of rows that follow each other, (G, R)."""
        weights, seen = ([getattr(part, name) for part in parts] for name in ("weight", "seen"))
        return cls(torch.cat(weights, 1), torch.cat(seen, 1))


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the keys that give heads their names; None where positions are not defined."""

    first: Share  # of the first keys
    own: Share | None  # of the key at the query's own position
    previous: Share | None  # of the key one before it
    local: Share | None  # of the keys at most a few steps from it
    # Where tokens are known, of earlier keys with the query's token, and of the keys behind these.
    repeated: Share | None = None
    behind_repeated: Share | None = None

    def of_head(self, index: int) -> Shares:
        """One head of the group."""
        near = (self.own, self.previous, self.local, self.repeated, self.behind_repeated)
        of_head = (None if share is None else share.of_head(index) for share in near)
        return Shares(self.first.of_head(index), *of_head)


def find_shares(group: HeadGroup, rows: RowStatistics, sink_keys: int) -> Shares:
    """Shares of the first keys and of the keys near each query.

    Args:
        group: the heads.
        rows: their rows.
        sink_keys: how many keys count as the first ones.
    """
    straight = group.plain and group.in_a_row and not group.may_overflow
    near = None if straight or group.positions is None else _bands(group, rows)

    def of_rows(inside: slice, work: Workspace) -> list[Share]:
        found = [_first_share(group, rows, inside, sink_keys, work)]
        if group.positions is not None:
            logits = _diagonals(group, inside) if near is None else near[:, inside]
            weights, seen = weights_of(logits, rows, inside)  # (G, rows, 2·LOCAL_WINDOW + 1)
            for at in (LOCAL_WINDOW, LOCAL_WINDOW - 1):
                found.append(_share(weights[..., at], seen[..., at], rows, inside))
            found.append(_share(weights.sum(-1), seen.sum(-1), rows, inside))
        return found

    at_once = max(TILE_ROWS, SHARE_ROWS // len(group.heads) // TILE_ROWS * TILE_ROWS)
    starts = range(0, max(1, len(group.queries)), at_once)
    pieces = [slice(start, min(start + at_once, len(group.queries))) for start in starts]
    parts = parallel_map(of_rows, pieces, lambda: Workspace.of(group), group.workers)
    first, *others = (Share.joined(of_share) for of_share in zip(*parts, strict=True))
    return Shares(first, *(others or (None, None, None)))


def _diagonals(group: HeadGroup, inside: slice) -> torch.Tensor:
    """Logits of the keys around positions in a row, −inf where one is not visible or not there.

    The keys around a few queries in a row are a few in a row as well. Of the products of both,
    which take less time than a sum for each pair that is wanted, a diagonal band is kept.
    """
    assert group.positions is not None
    assert group.places is not None
    width = 2 * LOCAL_WINDOW + 1
    heads, dk, k_len = group.keys.shape
    factor = group.factor()
    if isinstance(factor, torch.Tensor):
        factor = factor[..., None]  # (G, 1, 1, 1)
    length = inside.stop - inside.start
    rows = -(-length // DIAGONAL_ROWS) * DIAGONAL_ROWS
    first = int(group.places[inside.start]) - LOCAL_WINDOW if length else 0
    count = rows + width - 1
    low, high = (min(max(0, key), k_len) for key in (first, first + count))
    before = min(max(0, low - first), count)
    keys = _padded(group.keys[:, :, low:high], -1, before, count - before - (high - low))
    queries = _padded(group.shrunk_queries(inside.start, inside.stop), -2, 0, rows - length)
    around = keys.unfold(2, DIAGONAL_ROWS + width - 1, DIAGONAL_ROWS).transpose(1, 2)
    products = queries.reshape(heads, -1, DIAGONAL_ROWS, dk) @ around  # (G, runs, rows, keys)
    band = products.mul_(factor).unfold(3, width, 1).diagonal(dim1=2, dim2=3)
    found = band.transpose(2, 3).flatten(1, 2)[:, :length]
    steps = torch.arange(-LOCAL_WINDOW, LOCAL_WINDOW + 1, device=group.device)
    bounds = group.bounds[:, inside] - group.positions[inside]  # from each position
    first_key, stop_key = bounds[..., None]  # (rows, 1)
    return found.masked_fill_((steps < first_key) | (steps >= stop_key), -torch.inf)


def _padded(values: torch.Tensor, axis: int, before: int, after: int) -> torch.Tensor:
    """With so many zeros before and after along an axis, the last or the one before it."""
    if not (before or after):
        return values
    return torch.nn.functional.pad(values, [0, 0] * (-1 - axis) + [before, after])


def _bands(group: HeadGroup, rows: RowStatistics) -> torch.Tensor:
    """The same for any queries and anything that is done to the logits, block by block."""

    def band_of(block: RowBlock, work: Workspace) -> torch.Tensor:
        return _band(group, block, rows, work)

    blocks, workspace = list(_narrow_blocks(group)), lambda: Workspace.of(group)
    nothing = group.keys.new_empty(len(group.heads), 0, 2 * LOCAL_WINDOW + 1)
    return torch.cat([nothing, *parallel_map(band_of, blocks, workspace, group.workers)], 1)


def _first_share(
    group: HeadGroup, rows: RowStatistics, inside: slice, sink_keys: int, work: Workspace
) -> Share:
    count = min(sink_keys, group.keys.shape[2])
    weight = torch.zeros_like(rows.row_max[:, inside])
    seen = torch.zeros_like(rows.keys[:, inside])
    if inside.stop == inside.start or (
        group.by_interval and int(group.hull.first[inside].min()) >= count
    ):
        count = 0  # none sees any
    for left in range(0, count, FIRST_KEYS):
        tile = Tile(left, min(left + FIRST_KEYS, count), True, True)
        found = group.keys.new_empty(*weight.shape, tile.stop - tile.start)
        # Products of a part of the rows are rounded as those of all only where blocks are the same.
        for start in range(inside.start, inside.stop, TILE_ROWS):
            block = RowBlock(start, min(start + TILE_ROWS, inside.stop), ())
            queries = group.shrunk_queries(block.start, block.stop)
            logits = found[:, block.start - inside.start : block.stop - inside.start]
            score_tile(group, block, tile, queries, group.factor(), logits, work)
            mark_seen(group, block, tile, rows, logits)
        weights, some = weights_of(found, rows, inside)
        weight += weights.sum(-1)
        seen += some.sum(-1)
    return _share(weight, seen, rows, inside)


def mark_seen(
    group: HeadGroup, block: RowBlock, tile: Tile, rows: RowStatistics, logits: torch.Tensor
) -> None:
    """Leave −inf to hidden keys: a visible one becomes the least number, which weighs as little.

    In rows whose weights are no numbers every visible logit becomes NaN.
    """
    if not group.may_overflow:
        return
    seen = group.visible(block, tile)
    logits.masked_fill_(seen & torch.isneginf(logits), torch.finfo(logits.dtype).min)
    lost = torch.isnan(rows.sum_exp_minus_1[:, block.start : block.stop])
    logits.masked_fill_(lost[..., None] & seen, torch.nan)


def _band(group: HeadGroup, block: RowBlock, rows: RowStatistics, work: Workspace) -> torch.Tensor:
    assert group.positions is not None
    window = LOCAL_WINDOW
    steps = torch.arange(-window, window + 1, device=group.device)
    keys = group.positions[block.start : block.stop, None] + steps  # (rows, 2·window + 1)
    lowest, highest = group.position_range(block)
    left, right = max(0, lowest - window), min(group.keys.shape[2], highest + window + 1)
    shape = (len(group.heads), *keys.shape)
    if left >= right:
        return group.keys.new_full(shape, -torch.inf)
    queries = group.shrunk_queries(block.start, block.stop)
    logits = group.keys.new_empty(shape[0], shape[1], right - left)
    index = (keys - left).clamp(0, right - left - 1).expand(shape)
    tile = Tile(left, right, True, True)
    score_tile(group, block, tile, queries, group.factor(), logits, work)
    mark_seen(group, block, tile, rows, logits)
    return logits.gather(2, index).masked_fill_((keys < left) | (keys >= right), -torch.inf)


def _narrow_blocks(group: HeadGroup) -> Iterator[RowBlock]:
    """Blocks of rows that stand near each other, so that their bands overlap.

    None goes beyond a multiple of their height, from which a part of the rows may begin.
    """
    assert group.places is not None
    places, start = group.places, 0
    while start < len(places):
        near = places[start : (start // BAND_ROWS + 1) * BAND_ROWS]
        ahead = np.flatnonzero((near < near[0]) | (near >= near[0] + BAND_ROWS))
        stop = start + (int(ahead[0]) if len(ahead) else len(near))
        yield RowBlock(start, stop, ())
        start = stop


def weights_of(
    logits: torch.Tensor, rows: RowStatistics, inside: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 weights of the keys of these logits, and which are seen, (G, rows, keys) both."""
    row_max, sum_exp = rows.row_max[:, inside], 1 + rows.sum_exp_minus_1[:, inside]
    weights = exponential(logits.to(torch.float64) - row_max[..., None]).div_(sum_exp[..., None])
    hidden = torch.isneginf(logits)
    return weights.masked_fill_(hidden, 0.0), ~hidden


def _share(weight: torch.Tensor, seen: torch.Tensor, rows: RowStatistics, inside: slice) -> Share:
    empty = rows.empty[:, inside]
    return Share(weight.clamp(max=1.0).masked_fill_(empty, torch.nan), seen.to(torch.int64))
