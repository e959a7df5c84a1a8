"""Weights of chosen keys once the softmax of a row is known: O(n·d), no second softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncli.attention.crew import share_out
from attncli.attention.streaming.exponential import exponential
from attncli.attention.streaming.intervals import RowBlock, Tile
from attncli.attention.streaming.tiles import TILE_KEYS, Workspace, score_tile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncli.attention.streaming.head_group import HeadGroup
    from attncli.attention.streaming.row_statistics import RowStatistics

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


def find_shares(group: HeadGroup, rows: RowStatistics, sink_keys: int, local_window: int) -> Shares:
    """Shares of the first keys and of the keys near each query.

    Args:
        group: the heads.
        rows: their rows.
        sink_keys: how many keys count as the first ones.
        local_window: how many steps from the query a key is still local, on both sides.
    """
    first = _first_share(group, rows, sink_keys, Workspace.of(group))
    if group.positions is None:
        return Shares(first, None, None, None)

    band = _diagonals(group, local_window) if group.plain and group.in_a_row else None
    if band is None:
        band = _all_bands(group, local_window)
    weights = _weights(band, rows, slice(None))  # (G, R, 2·window + 1)
    middle = local_window
    return Shares(
        first,
        _share(weights, rows, slice(middle, middle + 1)),
        _share(weights, rows, slice(middle - 1, middle)),
        _share(weights, rows, slice(None)),
    )


def _diagonals(group: HeadGroup, window: int) -> torch.Tensor:
    """Logits of the keys p − window … p + window of queries that follow each other.

    Each step from p is one product of the queries with the keys moved along, so that nothing is
    computed that is not wanted.
    """
    assert group.offset is not None
    length, k_len = len(group.queries), group.keys.shape[2]
    found = group.keys.new_full((len(group.heads), length, 2 * window + 1), -torch.inf)
    for start in range(0, length, DIAGONAL_ROWS):
        stop = min(start + DIAGONAL_ROWS, length)
        queries = group.scaled_queries(start, stop).transpose(1, 2).contiguous()  # (G, d_k, rows)
        position = group.offset + int(group.queries[start])
        for place in range(2 * window + 1):
            key = position + place - window  # of the first row
            low, high = max(0, -key), min(stop - start, k_len - key)
            if low < high:
                keys = group.keys[:, :, key + low : key + high]
                found[:, start + low : start + high, place] = (queries[:, :, low:high] * keys).sum(
                    1
                )
    steps = torch.arange(-window, window + 1, device=group.device)
    assert group.positions is not None
    keys = group.positions[:, None] + steps  # (R, 2·window + 1)
    first, stop_keys = group.bounds[..., None]
    return found.masked_fill_((keys < first) | (keys >= stop_keys), -torch.inf)


def _all_bands(group: HeadGroup, window: int) -> torch.Tensor:
    """The same for any queries and anything that is added to the logits, block by block."""

    def band_of(block: RowBlock, work: Workspace) -> torch.Tensor:
        return _band(group, block, window, work)

    bands = share_out(
        band_of, list(_narrow_blocks(group)), lambda: Workspace.of(group), group.workers
    )
    nothing = group.keys.new_empty(len(group.heads), 0, 2 * window + 1)
    return torch.cat([nothing, *bands], 1)


def _first_share(group: HeadGroup, rows: RowStatistics, sink_keys: int, work: Workspace) -> Share:
    count = min(sink_keys, group.keys.shape[2])
    total = Share(torch.zeros_like(rows.peak), torch.zeros_like(rows.keys))
    height = max(1, work.logits.numel() // max(1, min(count, TILE_KEYS) * len(group.heads)))
    for start in range(0, len(group.queries), height):
        block = RowBlock(start, min(start + height, len(group.queries)), ())
        queries = group.scaled_queries(block.start, block.stop)
        inside = slice(block.start, block.stop)
        for left in range(0, count, TILE_KEYS):
            tile = Tile(left, min(left + TILE_KEYS, count), True, True)
            logits, _ = work.tile(group, block.stop - block.start, tile.stop - tile.start)
            score_tile(group, block, tile, queries, logits, work)
            part = _share(_weights(logits, rows, inside), rows, slice(None), inside)
            total.weight[:, inside] += part.weight
            total.seen[:, inside] += part.seen
    empty = rows.empty.expand(total.weight.shape)
    return Share(total.weight.clamp(max=1.0).masked_fill(empty, torch.nan), total.seen)


def _band(group: HeadGroup, block: RowBlock, window: int, work: Workspace) -> torch.Tensor:
    """Logits of the keys p − window … p + window, −inf where one is not visible or not there."""
    assert group.positions is not None
    steps = torch.arange(-window, window + 1, device=group.device)
    keys = group.positions[block.start : block.stop, None] + steps  # (rows, 2·window + 1)
    lowest, highest = group.position_range(block)
    left, right = max(0, lowest - window), min(group.keys.shape[2], highest + window + 1)
    shape = (len(group.heads), *keys.shape)
    if left >= right:
        return group.keys.new_full(shape, -torch.inf)
    queries = group.scaled_queries(block.start, block.stop)
    logits = group.keys.new_empty(shape[0], shape[1], right - left)
    index = (keys - left).clamp(0, right - left - 1).expand(shape)
    score_tile(group, block, Tile(left, right, True, True), queries, logits, work)
    return logits.gather(2, index).masked_fill_((keys < left) | (keys >= right), -torch.inf)


def _narrow_blocks(group: HeadGroup) -> Iterator[RowBlock]:
    """Blocks of rows that stand near each other, so that their bands overlap."""
    queries = group.queries
    start = 0
    while start < len(queries):
        beyond = int(queries[start]) + BAND_ROWS
        stop = int(queries.searchsorted(beyond))
        yield RowBlock(start, stop, ())
        start = stop


def _weights(logits: torch.Tensor, rows: RowStatistics, inside: slice) -> torch.Tensor:
    """Float64 weights of the keys of these logits (G, rows, keys); −1 where one is not seen."""
    peak, whole = rows.peak[:, inside], 1 + rows.excess[:, inside]
    weights = exponential(logits.to(torch.float64) - peak[..., None]) / whole[..., None]
    return weights.masked_fill_(torch.isneginf(logits), NOT_SEEN)


def _share(
    weights: torch.Tensor, rows: RowStatistics, of_keys: slice, inside: slice = slice(None)
) -> Share:
    """What some of the keys of these weights get together."""
    chosen = weights[..., of_keys]
    seen = chosen != NOT_SEEN
    weight = torch.where(seen, chosen, 0.0).sum(-1).clamp(max=1.0)
    return Share(weight.masked_fill(rows.empty[:, inside], torch.nan), seen.sum(-1))
