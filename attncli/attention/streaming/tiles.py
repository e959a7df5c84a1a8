"""One pass over the tiles of some rows: what each tile adds to their statistics, and the output.

A tile is scored, masked and exponentiated in two buffers that stay in the second-level cache; of
each of its rows a few sums are kept, to be merged once the rows have seen all their tiles. With
s the logits of a row in one tile, t their maximum and r the reference that was subtracted:

    total = Σ e^(s−r),  moment = Σ e^(s−r)·(s−r),  reach = Σ e^(s−r)·|p−j|

Where a group is `binary`, s and r are in units of ln 2 and powers are of 2, until tiles are merged.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from attncli.attention.streaming.exponential import LOG2_E, exponential

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncli.attention.streaming.head_group import HeadGroup
    from attncli.attention.streaming.intervals import RowBlock, Tile

# Half of these keys would stay in a second-level cache of 2 MiB, a tenth faster in one thread. In
# two threads this is a fifth faster, since Python's lock changes hands after every operation.
TILE_ROWS = 512
TILE_KEYS = 1024
TILE_CELLS = TILE_ROWS * TILE_KEYS


@dataclass(frozen=True, slots=True)
class Gather:
    """Which sums the tiles of a run have to keep.

    Attributes:
        crown: hold the largest weight of each tile apart from the others. Nearly one-hot rows
            then keep their entropy's leading digits, of which float64 has enough to be worth it.
        place: note where the largest logit stands.
        reach: sum the distances; needs positions.
        output: sum the values.
    """

    crown: bool
    place: bool
    reach: bool
    output: bool


@dataclass(slots=True)
class TileSums:
    """Sums of G × R rows over T tiles, each (T, G, R).

    Attributes:
        top: largest logit, −inf where a row sees nothing of the tile.
        reference: what was subtracted before the exponential; `top` itself, or the running
            maximum where an output is summed along.
        total, moment, reach: as above; `total` without the largest weight under `Gather.crown`.
        place: index of the largest logit on the key axis; None if not gathered.
        seen: int64 (G | 1, R), visible keys so far.
        nonfinite: bool (G, R), whether a visible logit was NaN or infinite.
        output: (G, R, d_v), relative to the last reference; None if not gathered.
        tiles: how many of the T tiles hold something.
    """

    top: torch.Tensor
    reference: torch.Tensor
    total: torch.Tensor
    moment: torch.Tensor
    reach: torch.Tensor | None
    place: torch.Tensor | None
    seen: torch.Tensor
    nonfinite: torch.Tensor
    output: torch.Tensor | None
    tiles: int = 0

    @classmethod
    def none_yet(cls, group: HeadGroup, block: RowBlock, gather: Gather) -> TileSums:
        """Room for the tiles of a block."""
        heads, rows = len(group.heads), block.stop - block.start
        shape = (5, len(block.tiles), heads, rows)
        top, reference, total, moment, reach = group.keys.new_empty(shape)
        device = group.device
        return cls(
            top,
            reference,
            total,
            moment,
            reach if gather.reach else None,
            torch.empty(shape[1:], dtype=torch.int64, device=device) if gather.place else None,
            seen=torch.zeros(1, rows, dtype=torch.int64, device=device),
            nonfinite=torch.zeros(heads, rows, dtype=torch.bool, device=device),
            output=_no_output(group, heads, rows) if gather.output else None,
        )


@dataclass(slots=True)
class Workspace:
    """Buffers that one tile after another is computed in.

    Attributes:
        logits, weights: flat, at least G × rows × keys of any tile.
        upwards, downwards: 0 … S_k − 1 and back.
    """

    logits: torch.Tensor
    weights: torch.Tensor
    upwards: torch.Tensor
    downwards: torch.Tensor
    _distances: torch.Tensor | None = field(default=None, repr=False)
    _edges: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, group: HeadGroup) -> Workspace:
        """Buffers for the tiles of a group."""
        rows, keys = min(len(group.queries), TILE_ROWS), min(group.keys.shape[2], TILE_KEYS)
        cells = len(group.heads) * rows * keys
        empty = torch.empty(2, cells, dtype=group.dtype, device=group.device)
        steps = torch.arange(group.keys.shape[2], device=group.device).to(group.dtype)
        return cls(
            logits=empty[0],
            weights=empty[1],
            upwards=steps,
            downwards=steps.flip(0),
        )

    def tile(self, group: HeadGroup, rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views (G, rows, keys) of the buffers for logits and weights."""
        shape = (len(group.heads), rows, keys)
        cells = shape[0] * rows * keys
        return self.logits[:cells].view(shape), self.weights[:cells].view(shape)

    def edges(self, first: torch.Tensor, stop: torch.Tensor, width: int) -> torch.Tensor:
        """0 inside each row's interval and −inf outside, (rows, width), to be added to logits.

        Tiles along a diagonal all have the same, so the last one is kept.
        """
        bounds = torch.stack([first, stop])
        if self._edges is not None:
            known, found = self._edges
            if found.shape[1] == width and torch.equal(known, bounds):
                return found
        keys = torch.arange(width, dtype=first.dtype, device=first.device)
        hidden = (keys < first[:, None]) | (keys >= stop[:, None])
        added = self.logits.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        self._edges = bounds, added
        return added

    def distances(self, group: HeadGroup, block: RowBlock, tile: Tile) -> torch.Tensor:
        """|p − j|, (rows, keys), overwritten by the next call."""
        rows, keys = block.stop - block.start, tile.stop - tile.start
        if self._distances is None or self._distances.numel() < rows * keys:
            self._distances = self.logits.new_empty(rows * keys)
        relative = group.relative_positions(block, tile.start)
        found = self._distances[: rows * keys].view(rows, keys)
        return torch.sub(relative[:, None], self.upwards[:keys], out=found).abs_()


def sum_tiles(group: HeadGroup, block: RowBlock, gather: Gather, work: Workspace) -> TileSums:
    """Visit the tiles of one block of rows.

    Args:
        group: the heads.
        block: the rows, and their tiles.
        gather: which sums to keep.
        work: buffers of at least G × rows × TILE_KEYS cells.
    """
    sums = TileSums.none_yet(group, block, gather)
    queries = group.scaled_queries(block.start, block.stop, LOG2_E if group.binary else 1.0)
    power = torch.exp2 if group.binary else exponential
    for tile in block.tiles:
        logits, weights = work.tile(group, block.stop - block.start, tile.stop - tile.start)
        seen = score_tile(group, block, tile, queries, logits, work)
        if isinstance(seen, torch.Tensor) and not bool(seen.any()):
            continue
        sums.seen = sums.seen + seen
        _subtract_maximum(group, sums, tile, logits, seen, gather)
        power(logits, out=weights)
        if group.guarded or not isinstance(seen, int):  # 0 · ∞ is NaN
            logits.clamp_(min=torch.finfo(logits.dtype).min)
        torch.sum(logits.mul_(weights), -1, out=sums.moment[sums.tiles])
        if sums.output is not None:
            _add_values(group, sums, tile, weights, power)
        torch.sum(weights, -1, out=sums.total[sums.tiles])
        if sums.reach is not None:
            _add_distances(group, sums, block, tile, work, weights, logits)
        if sums.place is not None:
            _note_place(sums, tile, weights, gather)
        sums.tiles += 1
    return sums


def score_tile(
    group: HeadGroup,
    block: RowBlock,
    tile: Tile,
    queries: torch.Tensor,
    logits: torch.Tensor,
    work: Workspace,
) -> torch.Tensor | int:
    """Write the masked logits of one tile, −inf where a query does not see the key.

    Args:
        group: the heads.
        block: the rows.
        tile: the keys.
        queries: (G, rows, d_k), scaled.
        logits: (G, rows, keys), to be overwritten.
        work: buffers.

    Returns:
        The visible keys of each row, int64 (G | 1, rows), or one int where nothing is hidden.
    """
    torch.bmm(queries, group.keys[:, :, tile.start : tile.stop], out=logits)
    if group.softcap is not None:
        logits.tanh_().mul_(group.softcap)
    if group.slopes is not None:
        distances = work.distances(group, block, tile)
        logits.addcmul_(distances, group.slopes[:, None, None], value=-1)
    if group.by_interval:
        return _hide_by_interval(group, block, tile, logits, work)
    added = group.added(block, tile)
    if added is not None:
        logits += added
    visible = group.visible(block, tile)
    logits.masked_fill_(~visible, -torch.inf)
    return visible.sum(-1)


def _hide_by_interval(
    group: HeadGroup, block: RowBlock, tile: Tile, logits: torch.Tensor, work: Workspace
) -> torch.Tensor | int:
    width = tile.stop - tile.start
    if not (tile.starts_inside or tile.stops_inside):
        return width
    first, stop = group.intervals(block, tile)  # of each row, relative to the tile
    edges = work.edges(first, stop, width)
    if group.guarded:  # NaN − ∞ is NaN
        logits.masked_fill_(torch.isneginf(edges), -torch.inf)
    else:
        logits += edges
    return (stop - first)[None]


def _subtract_maximum(
    group: HeadGroup,
    sums: TileSums,
    tile: Tile,
    logits: torch.Tensor,
    seen: torch.Tensor | int,
    gather: Gather,
) -> None:
    """Note the largest logit of each row, and subtract the reference."""
    index, candidates = sums.tiles, logits
    if group.guarded:
        hidden = tile.stop - tile.start - seen
        broken = torch.isnan(logits)
        sums.nonfinite |= (broken | torch.isposinf(logits)).any(-1)
        sums.nonfinite |= torch.isneginf(logits).sum(-1) > hidden
        candidates = torch.where(broken, -torch.inf, logits)
    top, reference = sums.top[index], sums.reference[index]
    if sums.place is None:
        torch.amax(candidates, -1, out=top)
    else:
        torch.max(candidates, -1, out=(top, sums.place[index]))
    # A row that sees nothing of the tile has −inf here, and −inf − (−inf) is NaN.
    torch.clamp(top, min=torch.finfo(top.dtype).min, out=reference)
    if gather.output and index:
        torch.maximum(reference, sums.reference[index - 1], out=reference)
    logits -= reference[..., None]


def _add_values(
    group: HeadGroup,
    sums: TileSums,
    tile: Tile,
    weights: torch.Tensor,
    power: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    assert group.values is not None
    assert sums.output is not None
    if sums.tiles:
        shrink = sums.reference[sums.tiles - 1] - sums.reference[sums.tiles]
        sums.output *= power(shrink)[..., None]
    sums.output.baddbmm_(weights, group.values[:, tile.start : tile.stop])


def _add_distances(
    group: HeadGroup,
    sums: TileSums,
    block: RowBlock,
    tile: Tile,
    work: Workspace,
    weights: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """Sum e^(s−r)·|p − j|; keys all on one side of the rows need no |p − j| of each cell."""
    assert sums.reach is not None
    reach, width = sums.reach[sums.tiles], tile.stop - tile.start
    lowest, highest = group.position_range(block)
    if lowest < tile.stop - 1 and highest > tile.start:
        torch.mul(weights, work.distances(group, block, tile), out=scratch)
        torch.sum(scratch, -1, out=reach)
        return
    before = lowest >= tile.stop - 1
    steps = work.downwards[-width:] if before else work.upwards[:width]
    gap = group.relative_positions(block, tile.stop - 1 if before else tile.start).abs_()
    column = steps[None, :, None].expand(len(weights), -1, -1)  # (G, keys, 1)
    torch.bmm(weights, column, out=reach[..., None])
    reach.addcmul_(gap, sums.total[sums.tiles])


def _note_place(sums: TileSums, tile: Tile, weights: torch.Tensor, gather: Gather) -> None:
    """Turn the place in the tile into a key, and leave the largest weight out of the total."""
    assert sums.place is not None
    place = sums.place[sums.tiles]
    if gather.crown:
        weights.scatter_(-1, place[..., None], 0.0)
        torch.sum(weights, -1, out=sums.total[sums.tiles])
    place += tile.start


def _no_output(group: HeadGroup, heads: int, rows: int) -> torch.Tensor:
    assert group.values is not None
    return group.keys.new_zeros(heads, rows, group.values.shape[2])
