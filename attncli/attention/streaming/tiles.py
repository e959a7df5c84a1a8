"""One pass over the tiles of some rows: what each tile adds to their statistics, and the output.

A tile is scored, masked and exponentiated in two buffers that stay in the second-level cache; of
each of its rows a few sums are kept, to be merged once the rows have seen all their tiles. With
s the logits of a row in one tile, t their maximum and r the reference that was subtracted:

    sum_exp = Σ e^(s−r),  sum_exp_shifted = Σ e^(s−r)·(s−r),  distance_sum = Σ e^(s−r)·|p−j|

With `base2_logits`, s and r are in units of ln 2 and powers are of 2, until tiles are merged.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from attncli.attention.streaming.head_group import SLANT_ROWS, HeadGroup, RowBlock, Slant, Tile

# The logit of a visible key whose weight is 0: e^−10,000 is 0 in every dtype, and it is no ∞.
NO_WEIGHT = -1e4
LOG2_E = 1.4426950408889634

# Half of these keys would stay in a second-level cache of 2 MiB, a tenth faster in one thread. In
# two threads this is a fifth faster, since Python's lock changes hands after every operation.
TILE_ROWS = 512
TILE_KEYS = 1024
TILE_CELLS = TILE_ROWS * TILE_KEYS
RUN = 32  # keys next to each other of which a largest is looked for together


@dataclass(slots=True)
class TileSums:
    """Sums of G × R rows over T tiles.

    Attributes:
        figures: (2 to 4, T, G, R): the largest logit, −inf where a row sees nothing of the tile;
            sum_exp, without the largest weight with `separate_max`; where entropy is wanted
            sum_exp_shifted; and distance_sum where distances are.
        reference: (T, G, R), what was subtracted before the exponential, which is the running
            maximum where an output is summed along; else None: the largest logit, made finite.
        top_key: (T, G, R), index of the largest logit on the key axis; None if not asked for.
        seen: int64 (G | 1, R), visible keys so far.
        nonfinite: bool (G, R), whether a visible logit was NaN or infinite.
        lost: bool (G, R), whether one was NaN or +inf, so that no weight of the row is a number.
        output: (G, R, d_v), relative to the last reference; None where there are no values.
        tiles: how many of the T tiles hold something.
    """

    figures: torch.Tensor
    reference: torch.Tensor | None
    top_key: torch.Tensor | None
    seen: torch.Tensor
    nonfinite: torch.Tensor
    lost: torch.Tensor
    output: torch.Tensor | None
    tiles: int = 0

    @classmethod
    def none_yet(cls, group: HeadGroup, block: RowBlock) -> TileSums:
        """Room for the tiles of a block, and for one where there are none."""
        heads, rows = len(group.heads), block.stop - block.start
        shape, device = (max(1, len(block.tiles)), heads, rows), group.device
        reference = output = None
        if group.values is not None:
            output = group.keys.new_zeros(heads, rows, group.values.shape[2])
            reference = group.keys.new_empty(shape)
        nothing = torch.zeros(heads, rows, dtype=torch.bool, device=device)
        return cls(
            group.keys.new_empty(2 + group.entropy + group.distances, *shape),
            reference,
            top_key=torch.empty(shape, dtype=torch.int64, device=device) if group.top_key else None,
            seen=torch.zeros(1, rows, dtype=torch.int64, device=device),
            nonfinite=nothing,
            lost=nothing,
            output=output,
        )

    def add_empty_tile(self) -> None:
        """One tile of which no row sees anything."""
        self.figures[:, 0] = 0
        self.figures[0, 0] = -torch.inf
        if self.reference is not None:
            self.reference[0] = torch.finfo(self.reference.dtype).min
        if self.top_key is not None:
            self.top_key[0] = 0
        self.tiles = 1


@dataclass(slots=True)
class Workspace:
    """Buffers that one tile after another is computed in."""

    logits: torch.Tensor  # like the weights flat, at least G × rows × keys of any tile
    weights: torch.Tensor
    upwards: torch.Tensor  # 0 … S_k − 1; downwards, the same back
    downwards: torch.Tensor
    _distances: torch.Tensor | None = field(default=None, repr=False)
    _views: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict, repr=False
    )
    _edges: dict[
        tuple[int, bool, bool, float], tuple[NDArray[np.int32], tuple[slice, torch.Tensor]]
    ] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, group: HeadGroup) -> Workspace:
        """Buffers for the tiles of a group."""
        rows, keys = min(len(group.queries), TILE_ROWS), min(group.keys.shape[2], TILE_KEYS)
        cells = len(group.heads) * rows * keys
        empty = torch.empty(2, cells, dtype=group.dtype, device=group.device)
        steps = torch.arange(group.keys.shape[2], device=group.device).to(group.dtype)
        return cls(logits=empty[0], weights=empty[1], upwards=steps, downwards=steps.flip(0))

    def tile(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the buffers for logits and weights, (G or runs, rows, keys)."""
        if shape not in self._views:
            cells = math.prod(shape)
            self._views[shape] = self.logits[:cells].view(shape), self.weights[:cells].view(shape)
        return self._views[shape]

    def edges(
        self, bounds: NDArray[np.int32], tile: Tile, outside: float = -torch.inf
    ) -> tuple[slice, torch.Tensor]:
        """0 inside each row's interval and −inf outside, to be added to logits, (rows, some keys).

        Of the keys those are left out which come before, or else after, all that are hidden. Tiles
        along a diagonal all have the same, so the last ones of each kind are kept.

        Args:
            bounds: int32 (2, rows), where in the tile each row's keys start and stop.
            tile: the keys.
            outside: what is added in the place of −inf.
        """
        kind = (tile.stop - tile.start, tile.starts_inside, tile.stops_inside, outside)
        if kind in self._edges and np.array_equal(self._edges[kind][0], bounds):
            return self._edges[kind][1]
        some = slice(0, kind[0])
        if not tile.starts_inside:
            some = slice(int(bounds[1].min()), kind[0])
        elif not tile.stops_inside:
            some = slice(0, int(bounds[0].max()))
        first, stop = torch.as_tensor(bounds, device=self.logits.device)[..., None]
        keys = torch.arange(some.start, some.stop, dtype=first.dtype, device=first.device)
        hidden = (keys < first) | (keys >= stop)
        added = self.logits.new_zeros(hidden.shape).masked_fill_(hidden, outside)
        self._edges[kind] = bounds, (some, added)
        return some, added

    def distances(self, group: HeadGroup, block: RowBlock, tile: Tile) -> torch.Tensor:
        """|p − j|, (rows, keys), overwritten by the next call."""
        rows, keys = block.stop - block.start, tile.stop - tile.start
        if self._distances is None or self._distances.numel() < rows * keys:
            self._distances = self.logits.new_empty(rows * keys)
        relative = group.relative_positions(block, tile.start)
        found = self._distances[: rows * keys].view(rows, keys)
        return torch.sub(relative[:, None], self.upwards[:keys], out=found).abs_()


def sum_tiles(group: HeadGroup, block: RowBlock, work: Workspace) -> TileSums:
    """Visit the tiles of one block of rows.

    Args:
        group: the heads.
        block: the rows, and their tiles.
        work: buffers of the group.
    """
    sums, slant, visited = TileSums.none_yet(group, block), block.slant, block
    lines = (len(group.heads), block.stop - block.start)
    queries = group.shrunk_queries(block.start, block.stop)
    if slant is not None:
        lines = (lines[1] // SLANT_ROWS, SLANT_ROWS)
        queries = queries.reshape(*lines, -1)
        # The first run, and its keys: distances within are those of every other.
        visited = RowBlock(block.start, block.start + SLANT_ROWS, (slant.tile,))
    factor = group.factor(LOG2_E if group.base2_logits else 1.0)
    power = torch.exp2 if group.base2_logits else exponential
    gaps = _gaps(group, visited) if group.distances and block.tiles else None
    # Views of what is written to, made once: one takes as long as an operation on a row or two.
    columns = sums.figures.view(*sums.figures.shape[:2], *lines, 1)
    of_tiles = list(zip(*(column.unbind() for column in columns), strict=True))
    always_seen = 0  # keys of tiles that hide none
    for index, tile in enumerate(visited.tiles):
        logits, weights = work.tile(*lines, tile.stop - tile.start)
        seen: torch.Tensor | int
        if slant is None:
            seen = score_tile(group, block, tile, queries, factor, logits, work)
        else:
            seen = _score_slant(group, block, slant, queries, factor, logits, work)
        if isinstance(seen, int):
            always_seen += seen
        elif group.by_interval or not group.on_host or bool(seen.any()):
            sums.seen = sums.seen + seen
        else:
            continue
        at = sums.tiles
        reference, sum_exp, *others = of_tiles[at]  # (G, rows, 1) each
        candidates = _candidates(group, sums, tile, logits, seen) if group.may_overflow else logits
        torch.amax(candidates, -1, keepdim=True, out=reference)
        if sums.top_key is not None:
            sums.top_key[at] = first_of_largest(candidates)
        all_seen = slant is not None or isinstance(seen, int)  # by every row something, at least
        if not all_seen or group.may_overflow:
            # A row that sees nothing of the tile has −inf here, and −inf − (−inf) is NaN.
            reference = reference.clamp(min=torch.finfo(reference.dtype).min)
        if sums.reference is not None:
            if at:
                reference = torch.maximum(reference, sums.reference[at - 1, ..., None])
            sums.reference[at] = reference[..., 0]
        logits -= reference
        power(logits, out=weights)
        if group.entropy:
            if group.may_overflow or not all_seen:  # 0 · ∞ is NaN
                logits.clamp_(min=torch.finfo(logits.dtype).min)
            torch.sum(logits.mul_(weights), -1, keepdim=True, out=others[0])
        if sums.output is not None:
            _add_values(group, sums, tile, weights, power)
        torch.sum(weights, -1, keepdim=True, out=sum_exp)
        if gaps is not None:
            _add_distances(
                group, visited, tile, work, gaps[index], weights, logits, sum_exp, others[1]
            )
        if sums.top_key is not None:
            top_key = sums.top_key[at]
            if group.separate_max:
                weights.scatter_(-1, top_key[..., None], 0.0)
                torch.sum(weights, -1, keepdim=True, out=sum_exp)
            top_key += tile.start
        sums.tiles += 1
    if always_seen:
        sums.seen = sums.seen + always_seen
    if not sums.tiles:
        sums.add_empty_tile()
    return sums


def score_tile(
    group: HeadGroup,
    block: RowBlock,
    tile: Tile,
    queries: torch.Tensor,
    factor: float | torch.Tensor,
    logits: torch.Tensor,
    work: Workspace,
) -> torch.Tensor | int:
    """Write the masked logits of one tile, −inf where a query does not see the key.

    Args:
        group: the heads.
        block: the rows.
        tile: the keys.
        queries: (G, rows, d_k).
        factor: what the products are multiplied by; not the queries, or equal products would
            become logits that differ by their rounding.
        logits: (G, rows, keys), to be overwritten.
        work: buffers.

    Returns:
        The visible keys of each row, int64 (G | 1, rows), or one int where nothing is hidden.
    """
    if group.given is not None:  # logits that lead to the weights given
        logits.copy_(group.given_weights(block, tile)).log_().clamp_(min=NO_WEIGHT)
        return _hide(group, block, tile, logits)
    keys = group.keys[:, :, tile.start : tile.stop]
    if group.dtype == torch.float32 and isinstance(factor, float):
        logits.baddbmm_(queries, keys, beta=0, alpha=factor)
    else:  # of float64, libraries would multiply the operands
        torch.bmm(queries, keys, out=logits).mul_(factor)
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
    return _hide(group, block, tile, logits)


def _score_slant(
    group: HeadGroup,
    block: RowBlock,
    slant: Slant,
    queries: torch.Tensor,
    factor: float | torch.Tensor,
    logits: torch.Tensor,
    work: Workspace,
) -> torch.Tensor:
    """Write the logits of a slant, (runs, rows, keys), finite ones that weigh 0 for hidden keys.

    Returns what `score_tile` does.
    """
    shape, strides = (*queries.shape[::2], logits.shape[2]), group.keys.stride()
    offset = group.keys.storage_offset() + slant.tile.start
    keys = group.keys.as_strided(shape, (SLANT_ROWS, *strides[1:]), offset)
    assert isinstance(factor, float)
    logits.baddbmm_(queries, keys, beta=0, alpha=factor)
    # Far below all that a product can be where none may overflow, and no ∞ when it is added to it.
    logits += work.edges(slant.bounds, slant.tile, torch.finfo(logits.dtype).min / 2)[1]
    first, stop = group.host_bounds[:, block.start : block.stop]
    return torch.as_tensor(stop - first, device=group.device)[None]


def _hide(group: HeadGroup, block: RowBlock, tile: Tile, logits: torch.Tensor) -> torch.Tensor:
    visible = group.visible(block, tile)
    logits.masked_fill_(~visible, -torch.inf)
    return visible.sum(-1)


def _hide_by_interval(
    group: HeadGroup, block: RowBlock, tile: Tile, logits: torch.Tensor, work: Workspace
) -> torch.Tensor | int:
    if not (tile.starts_inside or tile.stops_inside):
        return tile.stop - tile.start
    bounds = group.intervals(block, tile)
    some, edges = work.edges(bounds, tile)
    if group.may_overflow:  # NaN − ∞ is NaN
        logits[..., some].masked_fill_(torch.isneginf(edges), -torch.inf)
    else:
        logits[..., some].add_(edges)
    return torch.as_tensor(bounds[1] - bounds[0], device=group.device)[None]


def _candidates(
    group: HeadGroup, sums: TileSums, tile: Tile, logits: torch.Tensor, seen: torch.Tensor | int
) -> torch.Tensor:
    """The logits of which a largest is looked for; notes what is not finite."""
    hidden = tile.stop - tile.start - seen
    broken = torch.isnan(logits)
    sums.lost = sums.lost | (broken | torch.isposinf(logits)).any(-1)
    sums.nonfinite = sums.nonfinite | sums.lost | (torch.isneginf(logits).sum(-1) > hidden)
    return torch.where(broken, -torch.inf, logits)


def first_of_largest(values: torch.Tensor) -> torch.Tensor:
    """Index of the first largest value of each row, (G, rows, keys) → int64 (G, rows).

    The first run of keys that has it, then the first of these: a third of the cost of argmax.
    """
    heads, rows, keys = values.shape
    if keys % RUN or keys == RUN:
        return values.argmax(-1)
    runs = values.view(heads, rows, keys // RUN, RUN)
    first = runs.amax(-1).argmax(-1, keepdim=True)
    inside = runs.gather(2, first[..., None].expand(-1, -1, 1, RUN)).squeeze(2)
    found: torch.Tensor = first[..., 0] * RUN + inside.argmax(-1)
    return found


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
        assert sums.reference is not None
        shrink = sums.reference[sums.tiles - 1] - sums.reference[sums.tiles]
        sums.output *= power(shrink)[..., None]
    sums.output.baddbmm_(weights, group.values[:, tile.start : tile.stop])


def _gaps(group: HeadGroup, block: RowBlock) -> list[tuple[int | None, torch.Tensor]]:
    """Of each tile the key next to the positions of all rows, and how far these are from it.

    None for tiles that some of the positions lie in; their distances mean nothing.
    """
    assert group.positions_float is not None
    lowest, highest = group.position_range(block)
    nearest = [
        tile.stop - 1 if lowest >= tile.stop - 1 else tile.start if highest <= tile.start else None
        for tile in block.tiles
    ]
    keys = torch.tensor([key or 0 for key in nearest], dtype=group.dtype, device=group.device)
    gaps = (group.positions_float[block.start : block.stop] - keys[:, None]).abs_()  # (T, rows)
    return list(zip(nearest, gaps[..., None].unbind(), strict=True))


def _add_distances(
    group: HeadGroup,
    block: RowBlock,
    tile: Tile,
    work: Workspace,
    near: tuple[int | None, torch.Tensor],
    weights: torch.Tensor,
    scratch: torch.Tensor,
    sum_exp: torch.Tensor,
    distance: torch.Tensor,
) -> None:
    """Sum e^(s−r)·|p − j|; keys all on one side of the rows need no |p − j| of each cell."""
    key, gap = near
    if key is None:
        torch.mul(weights, work.distances(group, block, tile), out=scratch)
        torch.sum(scratch, -1, keepdim=True, out=distance)
        return
    width = tile.stop - tile.start
    steps = work.upwards[:width] if key == tile.start else work.downwards[-width:]
    column = steps[None, :, None].expand(len(weights), -1, -1)  # (G, keys, 1)
    torch.bmm(weights, column, out=distance)
    distance.addcmul_(gap, sum_exp)


def exponential(values: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """e^x of each value, float32 or float64, by way of exp2; in `out` where it is given.

    On CPUs torch hands `exp` to a library that takes three times as long, and seventy times as
    long where results are denormal, which weights far below a row's largest are all the time. The
    detour costs a relative error of |x| half ulps: nothing, where results get small as |x| gets
    large. It also spares us torch.set_flush_denormal, which is a setting of the whole process.
    """
    return torch.mul(values, LOG2_E, out=out).exp2_()
