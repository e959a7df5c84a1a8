"""What needs the finished softmax of every row: the mass of keys, and values that are broken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncli.attention.streaming.exponential import LOG2_E, exponential
from attncli.attention.streaming.intervals import queries_per_key
from attncli.attention.streaming.tiles import Workspace, score_tile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncli.attention.streaming.head_group import HeadGroup
    from attncli.attention.streaming.intervals import RowBlock, Tile
    from attncli.attention.streaming.row_statistics import RowStatistics


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


def no_mass(group: HeadGroup) -> KeyMass:
    """Zeros to add to; the queries are known already where intervals alone decide."""
    shape = (len(group.heads), group.keys.shape[2])
    mass = torch.zeros(shape, dtype=torch.float64, device=group.device)
    queries = torch.zeros(shape, dtype=torch.int64, device=group.device)
    if group.by_interval:
        queries += torch.as_tensor(queries_per_key(group.first, group.stop, shape[1])).to(queries)
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
    queries = torch.zeros_like(mass, dtype=torch.int64)
    some = slice(block.start, block.stop)
    share = (1 / (1 + rows.excess[:, some])).masked_fill(rows.empty[:, some], 0.0)
    share = share[:, None].to(group.dtype)  # (G, 1, rows)
    for tile, weights, seen in _tile_weights(group, block, block.tiles, rows, work):
        inside = slice(tile.start - first, tile.stop - first)
        mass[:, inside] = torch.bmm(share.expand(len(weights), -1, -1), weights)[:, 0]
        if not group.by_interval:
            queries[:, inside] = seen.sum(1)
    return KeyMass(queries, mass)


def add_broken_values(
    group: HeadGroup, blocks: list[RowBlock], rows: RowStatistics, values: torch.Tensor
) -> None:
    """Let NaN and infinite values reach the output of the queries that see them.

    The tiles had zeros in their place, since 0 · NaN would reach those that do not. Which
    outputs become what is a matter of 0s and 1s: NaN from a visible NaN, from an infinity of
    weight 0, and from infinities of both signs.

    Args:
        group: the heads.
        blocks: the rows, and their tiles.
        rows: of all blocks; their output is changed in place.
        values: (G, S_k, d_v), as they came.
    """
    work = Workspace.of(group)
    for block in blocks:
        _add_broken(group, block, rows, values, work)


def _add_broken(
    group: HeadGroup, block: RowBlock, rows: RowStatistics, values: torch.Tensor, work: Workspace
) -> None:
    assert rows.output is not None
    output = rows.output[:, block.start : block.stop]
    tiles = [
        tile
        for tile in block.tiles
        if not bool(torch.isfinite(values[:, tile.start : tile.stop]).all())
    ]
    for tile, weights, seen in _tile_weights(group, block, tuple(tiles), rows, work):
        of_tile = values[:, tile.start : tile.stop]
        some = (seen & (weights > 0)).to(weights.dtype)
        none = (seen & (weights == 0)).to(weights.dtype)
        rising, falling = (
            part.to(weights.dtype) for part in (of_tile == torch.inf, of_tile == -torch.inf)
        )
        undefined = torch.isnan(of_tile).to(weights.dtype)
        spoilt = seen.to(weights.dtype) @ undefined + none @ (rising + falling)  # (G, rows, d_v)
        output[spoilt > 0] = torch.nan
        output[(some @ rising) > 0] += torch.inf
        output[(some @ falling) > 0] -= torch.inf


def _tile_weights(
    group: HeadGroup,
    block: RowBlock,
    tiles: tuple[Tile, ...],
    rows: RowStatistics,
    work: Workspace,
) -> Iterator[tuple[Tile, torch.Tensor, torch.Tensor]]:
    """Tiles with e^(s − peak) (G, rows, keys) and, where it is not all True, visibility."""
    inside = slice(block.start, block.stop)
    unit = LOG2_E if group.binary else 1.0
    queries = group.scaled_queries(block.start, block.stop, unit)
    empty = rows.empty[:, inside]
    peak = (rows.peak[:, inside] * unit).masked_fill(empty, 0.0)[..., None].to(group.dtype)
    power = torch.exp2 if group.binary else exponential
    for tile in tiles:
        logits, weights = work.tile(group, block.stop - block.start, tile.stop - tile.start)
        score_tile(group, block, tile, queries, logits, work)
        seen = torch.ones((), dtype=torch.bool, device=group.device)
        if group.guarded or group.values is not None or not group.by_interval:
            seen = ~torch.isneginf(logits)
        power(logits.sub_(peak), out=weights)
        if group.guarded:  # what a query does not see it gives nothing, NaN itself or not
            weights.masked_fill_(~seen, 0.0)
        yield tile, weights, seen
