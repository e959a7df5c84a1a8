"""What keys get once the softmax of every row is known: chosen ones of each row, each of all rows.

The weight of a few given keys per query costs O(n·d); the mass of every key a second pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from attncli.attention.masks.interval_mask import coverage
from attncli.attention.streaming.head_group import HeadGroup, RowBlock, Tile
from attncli.attention.streaming.rows import RowStatistics
from attncli.attention.streaming.tiles import (
    LOG2_E,
    TILE_KEYS,
    Workspace,
    exponential,
    score_tile,
)
from attncli.attention.threads import parallel_map

# How many steps from its query a key counts as local.
LOCAL_WINDOW = 4
# Rows of a diagonal at once: with 64 dimensions a product of 8 MiB.
DIAGONAL_ROWS = 1 << 15
# A weight that no key has.
NOT_SEEN = -1.0
# Cells of a band that are computed and not used grow with its height.
BAND_ROWS = 256


@dataclass(frozen=True, slots=True)
class Share:
    """What some of the keys get of each row, (G, R) or (R,).

    Attributes:
        weight: float64, the sum of their weights; NaN in empty rows.
        seen: int64, how many of them the query sees.
    """

    weight: torch.Tensor
    seen: torch.Tensor

    def of_head(self, index: int) -> Share:
        """One head of the group."""
        return Share(self.weight[index], self.seen[index])


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the keys that give heads their names; None where positions are not defined.

    Attributes:
        first: of the first keys.
        own: of the key at the query's own position.
        previous: of the key one before it.
        local: of the keys at most a few steps from it.
    """

    first: Share
    own: Share | None
    previous: Share | None
    local: Share | None

    def of_head(self, index: int) -> Shares:
        """One head of the group."""
        own, previous, local = (
            None if share is None else share.of_head(index)
            for share in (self.own, self.previous, self.local)
        )
        return Shares(self.first.of_head(index), own, previous, local)


@dataclass(frozen=True, slots=True)
class KeyMass:
    """What each key receives from all queries, (G, S_k) or (S_k,).

    Attributes:
        queries: int64, how many queries see the key.
        mass: float64, Σ of the weights they give it.
    """

    queries: torch.Tensor
    mass: torch.Tensor

    def of_head(self, index: int) -> KeyMass:
        """One head of the group."""
        return KeyMass(self.queries[index], self.mass[index])


def find_shares(group: HeadGroup, rows: RowStatistics, sink_keys: int) -> Shares:
    """Shares of the first keys and of the keys near each query.

    Args:
        group: the heads.
        rows: their rows.
        sink_keys: how many keys count as the first ones.
    """
    first = _first_share(group, rows, sink_keys, Workspace.of(group))
    if group.positions is None:
        return Shares(first, None, None, None)

    straight = group.plain and group.in_a_row and not group.may_overflow
    near = _diagonals(group) if straight else _bands(group, rows)
    weights = _weights(near, rows, slice(None))  # (G, R, 2·LOCAL_WINDOW + 1)
    own, previous, everything = (
        slice(LOCAL_WINDOW, LOCAL_WINDOW + 1),
        slice(LOCAL_WINDOW - 1, LOCAL_WINDOW),
        slice(None),
    )
    return Shares(first, *(_share(weights, rows, keys) for keys in (own, previous, everything)))


def _diagonals(group: HeadGroup) -> torch.Tensor:
    """Logits of the keys around each position, −inf where one is not visible or not there.

    Each step from the positions of queries that follow each other is one product of these with
    the keys moved along, so that nothing is computed that is not wanted: up to a third of the
    time of short heads and narrow windows.
    """
    assert group.positions is not None
    length, k_len, width = len(group.queries), group.keys.shape[2], 2 * LOCAL_WINDOW + 1
    found = group.keys.new_full((len(group.heads), length, width), -torch.inf)
    factor = group.factor()
    factor = factor[..., 0] if isinstance(factor, torch.Tensor) else factor  # (G, 1)
    for start in range(0, length, DIAGONAL_ROWS):
        stop = min(start + DIAGONAL_ROWS, length)
        queries = group.shrunk_queries(start, stop).transpose(1, 2).contiguous()  # (G, d_k, rows)
        position = int(group.positions[start])
        for step in range(width):
            key = position + step - LOCAL_WINDOW  # of the first row
            low, high = max(0, -key), min(stop - start, k_len - key)
            if low < high:
                product = queries[:, :, low:high] * group.keys[:, :, key + low : key + high]
                found[:, start + low : start + high, step] = product.sum(1) * factor
    steps = torch.arange(-LOCAL_WINDOW, LOCAL_WINDOW + 1, device=group.device)
    keys = group.positions[:, None] + steps  # (R, 2·LOCAL_WINDOW + 1)
    first, stop_keys = group.bounds[..., None]
    return found.masked_fill_((keys < first) | (keys >= stop_keys), -torch.inf)


def _bands(group: HeadGroup, rows: RowStatistics) -> torch.Tensor:
    """The same for any queries and anything that is done to the logits, block by block."""

    def band_of(block: RowBlock, work: Workspace) -> torch.Tensor:
        return _band(group, block, rows, work)

    blocks, workspace = list(_narrow_blocks(group)), lambda: Workspace.of(group)
    nothing = group.keys.new_empty(len(group.heads), 0, 2 * LOCAL_WINDOW + 1)
    return torch.cat([nothing, *parallel_map(band_of, blocks, workspace, group.workers)], 1)


def _first_share(group: HeadGroup, rows: RowStatistics, sink_keys: int, work: Workspace) -> Share:
    count = min(sink_keys, group.keys.shape[2])
    total = Share(torch.zeros_like(rows.row_max), torch.zeros_like(rows.keys))
    height = max(1, work.logits.numel() // max(1, min(count, TILE_KEYS) * len(group.heads)))
    for start in range(0, len(group.queries), height):
        block = RowBlock(start, min(start + height, len(group.queries)), ())
        queries = group.shrunk_queries(block.start, block.stop)
        inside = slice(block.start, block.stop)
        for left in range(0, count, TILE_KEYS):
            tile = Tile(left, min(left + TILE_KEYS, count), True, True)
            logits, _ = work.tile(group, block.stop - block.start, tile.stop - tile.start)
            score_tile(group, block, tile, queries, group.factor(), logits, work)
            _mark_seen(group, block, tile, rows, logits)
            part = _share(_weights(logits, rows, inside), rows, slice(None), inside)
            total.weight[:, inside] += part.weight
            total.seen[:, inside] += part.seen
    empty = rows.empty.expand(total.weight.shape)
    return Share(total.weight.clamp(max=1.0).masked_fill(empty, torch.nan), total.seen)


def _mark_seen(
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
    _mark_seen(group, block, tile, rows, logits)
    return logits.gather(2, index).masked_fill_((keys < left) | (keys >= right), -torch.inf)


def _narrow_blocks(group: HeadGroup) -> Iterator[RowBlock]:
    """Blocks of rows that stand near each other, so that their bands overlap."""
    assert group.places is not None
    places, start = group.places, 0
    while start < len(places):
        near = places[start : start + BAND_ROWS]
        ahead = np.flatnonzero((near < near[0]) | (near >= near[0] + BAND_ROWS))
        stop = start + (int(ahead[0]) if len(ahead) else len(near))
        yield RowBlock(start, stop, ())
        start = stop


def _weights(logits: torch.Tensor, rows: RowStatistics, inside: slice) -> torch.Tensor:
    """Float64 weights of the keys of these logits (G, rows, keys); −1 where one is not seen."""
    row_max, sum_exp = rows.row_max[:, inside], 1 + rows.sum_exp_minus_1[:, inside]
    weights = exponential(logits.to(torch.float64) - row_max[..., None]) / sum_exp[..., None]
    return weights.masked_fill_(torch.isneginf(logits), NOT_SEEN)


def _share(
    weights: torch.Tensor, rows: RowStatistics, of_keys: slice, inside: slice = slice(None)
) -> Share:
    """What some of the keys of these weights get together."""
    chosen = weights[..., of_keys]
    seen = chosen != NOT_SEEN
    weight = torch.where(seen, chosen, 0.0).sum(-1).clamp(max=1.0)
    return Share(weight.masked_fill(rows.empty[:, inside], torch.nan), seen.sum(-1))


def no_mass(group: HeadGroup) -> KeyMass:
    """Zeros to add to; the queries are known already where intervals alone decide."""
    shape = (len(group.heads), group.keys.shape[2])
    mass = torch.zeros(shape, dtype=torch.float64, device=group.device)
    queries = torch.zeros(shape, dtype=torch.int64, device=group.device)
    if group.by_interval:
        seen = coverage(group.hull.first, group.hull.stop, shape[1])
        queries += torch.as_tensor(seen).to(queries)
    return KeyMass(queries, mass)


def mass_of_block(
    group: HeadGroup, block: RowBlock, rows: RowStatistics, work: Workspace
) -> KeyMass:
    """What the queries of one block give to each key from its first tile's to its last's.

    Args:
        group: the heads.
        block: the rows, and their tiles.
        rows: of all blocks.
        work: buffers.

    Returns:
        The mass, and the queries that see the key; these are 0 where intervals alone decide,
        since `no_mass` has counted them.
    """
    first = block.tiles[0].start if block.tiles else 0
    width = block.tiles[-1].stop - first if block.tiles else 0
    mass = torch.zeros(len(group.heads), width, dtype=torch.float64, device=group.device)
    seen_by = torch.zeros_like(mass, dtype=torch.int64)
    some = slice(block.start, block.stop)
    share = (1 / (1 + rows.sum_exp_minus_1[:, some])).masked_fill(rows.empty[:, some], 0.0)
    share = share.masked_fill(torch.isnan(share), 1.0)  # where weights themselves are NaN
    share = share[:, None].to(group.dtype)  # (G, 1, rows)
    unit = LOG2_E if group.base2_logits else 1.0
    power = torch.exp2 if group.base2_logits else exponential
    queries, factor = group.shrunk_queries(block.start, block.stop), group.factor(unit)
    row_max = (rows.row_max[:, some] * unit).masked_fill(rows.empty[:, some], 0.0)
    row_max = row_max[..., None].to(group.dtype)
    for tile in block.tiles:
        logits, weights = work.tile(group, block.stop - block.start, tile.stop - tile.start)
        score_tile(group, block, tile, queries, factor, logits, work)
        _mark_seen(group, block, tile, rows, logits)
        inside = slice(tile.start - first, tile.stop - first)
        hidden = None
        if group.may_overflow:
            hidden = ~group.visible(block, tile)
        elif not group.by_interval:
            hidden = torch.isneginf(logits)
        power(logits.sub_(row_max), out=weights)
        if hidden is not None and group.may_overflow:  # it gives nothing, NaN itself or not
            weights.masked_fill_(hidden, 0.0)
        mass[:, inside] = torch.bmm(share.expand(len(weights), -1, -1), weights)[:, 0]
        if hidden is not None and not group.by_interval:
            seen_by[:, inside] = (~hidden).sum(1)
    return KeyMass(seen_by, mass)
