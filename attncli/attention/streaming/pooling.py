"""Weights of neighbouring queries and keys taken together: maps of any length in B×B numbers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from attncli.attention.pooling import Edges
from attncli.attention.streaming.head_group import HeadGroup, RowBlock, Tile


@dataclass(frozen=True, slots=True, eq=False)
class Bins:
    """Which queries and which keys are taken together, (bins + 1,) each.

    Bin b holds what stands from edge b to before edge b + 1; edges ascend from 0 to the length.
    """

    queries: Edges
    keys: Edges


@dataclass(frozen=True, slots=True)
class PooledWeights:
    """Weights of blocks of cells, (G, bins of queries, bins of keys) or without the G.

    Attributes:
        sums: of all cells of the block, in the dtype of the arithmetic; hidden ones count 0.
        largest: of them; `sums` itself where every block is one cell.
        first: the bin of queries that row 0 of both is about.
    """

    sums: torch.Tensor
    largest: torch.Tensor
    first: int = 0

    def of_head(self, index: int) -> PooledWeights:
        """One head of the group."""
        return PooledWeights(self.sums[index], self.largest[index], self.first)

    def add(self, part: PooledWeights) -> None:
        """Join what a block of rows adds; one bin may lie in several of them."""
        rows = slice(part.first - self.first, part.first - self.first + part.sums.shape[1])
        self.sums[:, rows] += part.sums
        largest = self.largest[:, rows]
        torch.maximum(largest, part.largest, out=largest)


def nothing_pooled(group: HeadGroup, bins: Bins, rows: slice = slice(None)) -> PooledWeights:
    """Zeros to add to, of the bins that some rows of the group lie in."""
    edges = bins.queries
    start, stop, _ = rows.indices(int(edges[-1]))
    first, last = np.searchsorted(edges, [start, max(start, stop - 1)], side="right") - 1
    shape = (len(group.heads), max(0, int(last - first) + 1), len(bins.keys) - 1)
    sums = group.keys.new_zeros(shape)
    return PooledWeights(sums, torch.zeros_like(sums), int(first))


def pool_tile(
    pooled: PooledWeights, bins: Bins, block: RowBlock, tile: Tile, weights: torch.Tensor
) -> None:
    """Add the weights of one tile.

    Args:
        pooled: of the bins that the block lies in.
        bins: the edges.
        block, tile: the rows and keys, counted as the edges are.
        weights: (G, rows, keys).
    """
    rows = _inside(bins.queries, block.start, block.stop)
    first, keys = _bins_inside(bins.keys, tile.start, tile.stop)
    columns = slice(first, first + len(keys) - 1)
    if len(rows) - 1 == weights.shape[1]:
        sums = largest = weights
    else:
        parts = [weights[:, a:b] for a, b in pairwise(rows)]
        sums = torch.stack([part.sum(1) for part in parts], 1)
        largest = torch.stack([part.amax(1) for part in parts], 1)
    if len(keys) - 1 < weights.shape[2]:
        starts = np.asarray(keys[:-1])
        sums = torch.as_tensor(np.add.reduceat(sums.cpu().numpy(), starts, -1))
        largest = torch.as_tensor(np.maximum.reduceat(largest.cpu().numpy(), starts, -1))
    pooled.sums[..., columns] += sums.to(pooled.sums)
    seen = pooled.largest[..., columns]
    torch.maximum(seen, largest.to(pooled.sums), out=seen)


def _inside(edges: Edges, start: int, stop: int) -> list[int]:
    """The edges from one position to another, both of them included, counted from the first."""
    return _bins_inside(edges, start, stop)[1]


def _bins_inside(edges: Edges, start: int, stop: int) -> tuple[int, list[int]]:
    """The bin that a position lies in, and the edges from there to another, counted from it."""
    low, high = np.searchsorted(edges, start, side="right"), np.searchsorted(edges, stop)
    return int(low) - 1, [0, *(edges[low:high] - start).tolist(), stop - start]
