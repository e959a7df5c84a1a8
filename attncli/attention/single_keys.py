"""Weights of chosen keys once the softmax of a row is known: O(n·d), no second softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncli.attention.crew import share_out
from attncli.attention.exponential import exponential
from attncli.attention.intervals import RowBlock, Tile
from attncli.attention.tiles import TILE_KEYS, Workspace, score_tile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncli.attention.head_group import HeadGroup
    from attncli.attention.row_statistics import RowStatistics

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

    def band_of(block: RowBlock, work: Workspace) -> torch.Tensor:
        return _band(group, block, local_window, work)

    bands = share_out(
        band_of, list(_narrow_blocks(group)), lambda: Workspace.of(group), group.workers
    )
    nothing = group.keys.new_empty(len(group.heads), 0, 2 * local_window + 1)
    band = torch.cat([nothing, *bands], 1)  # (G, R, 2·window + 1)
    middle = local_window
    own, previous = band[..., middle : middle + 1], band[..., middle - 1 : middle]
    return Shares(
        first,
        _share(own, rows, slice(None)),
        _share(previous, rows, slice(None)),
        _share(band, rows, slice(None)),
    )


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
            part = _share(logits, rows, inside)
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
    if group.plain:  # nothing but intervals: looked up for the few cells that are wanted
        torch.bmm(queries, group.keys[:, :, left:right], out=logits)
        first, stop = group.bounds[:, block.start : block.stop, None]
        return logits.gather(2, index).masked_fill_((keys < first) | (keys >= stop), -torch.inf)
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


def _share(logits: torch.Tensor, rows: RowStatistics, inside: slice) -> Share:
    """What the keys of these logits (G, rows, keys) get together."""
    peak, whole = rows.peak[:, inside], 1 + rows.excess[:, inside]
    seen = ~torch.isneginf(logits)
    weights = exponential(logits.to(torch.float64) - peak[..., None]) / whole[..., None]
    weight = torch.where(seen, weights, 0.0).sum(-1).clamp(max=1.0)
    return Share(weight.masked_fill(rows.empty[:, inside], torch.nan), seen.sum(-1))
