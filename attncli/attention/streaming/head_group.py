"""Some heads of one batch, made ready for tiles, and which tiles of their scores to visit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from attncli.attention.masks.interval_mask import Hull
from attncli.attention.masks.mask import Mask
from attncli.attention.problem import Problem
from attncli.attention.steps import finite_in, logits, shrink_for

_KEYS_AT_ONCE = 1 << 12
ALIGNED_KEYS = 16  # a cache line of float32
SLANT_ROWS = 64
# Dtypes whose values torch compares.
_COMPARABLE = {torch.float64, torch.float32, torch.bfloat16, torch.float16}


@dataclass(frozen=True, slots=True)
class Tile:
    """Some neighbouring keys that a block of rows visits."""

    start: int  # the keys [start, stop)
    stop: int
    # Whether the interval of some row starts after the first of these keys, or stops before the
    # last.
    starts_inside: bool
    stops_inside: bool


@dataclass(frozen=True, slots=True)
class Slant:
    """Tiles along a window cut into runs of rows, each with keys of its own.

    Each run begins as many keys after the one before as it has rows. Of 512 rows and the 767 keys
    that a window of 256 covers half are left, and fewer calls than tiles take.
    """

    tile: Tile  # the keys of the first run
    bounds: NDArray[np.int32]  # (2, SLANT_ROWS), where among these each row's keys start and stop


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Some rows in a row, and the keys that at least one of them may see."""

    start: int  # the rows [start, stop), counted along the chosen queries
    stop: int
    # From the first key to the last; none where no row sees a key. Of a slant that of as many rows
    # as a block has.
    tiles: tuple[Tile, ...]
    slant: Slant | None = None  # what is summed in the place of the tiles


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """G heads of one batch, and R of its queries, in the dtype and on the device of arithmetic."""

    batch: int  # index of the batch
    heads: range  # the heads, neighbours
    queries: NDArray[np.int64]  # int64 (R,) on the host, indices of the queries, ascending
    rows: torch.Tensor  # the same on the device
    q: torch.Tensor  # (G, R, d_k), as it came: only the rows in hand are cast
    # (G, d_k, S_k), each row contiguous, so that a tile of keys is a matrix ready to multiply with.
    keys: torch.Tensor
    values: torch.Tensor | None  # (G, S_k, d_v); None where no output is asked for
    value_unit: float  # what values are counted in: a power of two, 1 but for huge ones
    # Multiplies the scores: the problem's scale / temperature, (G, 1, 1) where each head has its
    # own.
    scale: float | torch.Tensor
    softcap: float | None  # c of c·tanh(x/c); None for none
    slopes: torch.Tensor | None  # (G,), of ALiBi; None for none
    sinks: torch.Tensor | None  # float64 (G, 1); None for none
    mask: Mask  # on the device
    hull: Hull  # on the host, intervals that hold the queries' visible keys
    host_bounds: NDArray[np.int32]  # (2, R), where they start and stop
    bounds: torch.Tensor  # the same on the device
    # Int64 (R,) on the host, where each query stands on the key axis; None where positions are not
    # defined.
    places: NDArray[np.int64] | None
    positions: torch.Tensor | None  # the same on the device
    # The same in the dtype of arithmetic, exact wherever there are keys nearby.
    positions_float: torch.Tensor | None
    # Whether the bounds alone say which cells are visible, and nothing is added to these.
    by_interval: bool
    # Whether logits may be NaN or infinite, so that each tile has to be looked at.
    may_overflow: bool
    top_key: bool  # whether to note where the largest logit of each row stands
    entropy: bool  # whether it is wanted
    distances: bool  # whether they are, and positions are defined
    # (G, S_q, S_k), weights in the place of q and keys, where they came; None for none.
    given: torch.Tensor | None = None
    zeros_hidden: bool = False  # whether those of 0 are hidden
    workers: int = 1  # how many threads share the rows
    rows_before: int = 0  # rows of the same heads that stand before these, and belong to others

    @property
    def dtype(self) -> torch.dtype:
        """What arithmetic is done in."""
        return self.keys.dtype

    @property
    def device(self) -> torch.device:
        """Where it is done."""
        return self.keys.device

    @property
    def on_host(self) -> bool:
        """Whether to look at a value costs nothing; elsewhere it waits for all that is queued."""
        return self.device.type == "cpu"

    @property
    def plain(self) -> bool:
        """Whether the logits are scaled products alone, and intervals say which are visible."""
        return self.softcap is None and self.slopes is None and self.by_interval

    @property
    def in_a_row(self) -> bool:
        """Whether the queries, and their positions, follow each other without a gap."""
        lines = [self.queries] + ([] if self.places is None else [self.places])
        return len(self.queries) > 0 and all(bool((np.diff(line) == 1).all()) for line in lines)

    @property
    def base2_logits(self) -> bool:
        """Whether logits may be computed in units of ln 2, which spares a pass over each tile.

        Not in float64, whose every digit counts.
        """
        return self.plain and self.dtype == torch.float32

    @property
    def separate_max(self) -> bool:
        """Whether to hold the largest weight of each tile apart from the others.

        Nearly one-hot rows then keep their entropy's leading digits, of which float64 has enough
        to be worth noting the top key.
        """
        return self.dtype == torch.float64 and self.top_key

    @property
    def shrink(self) -> float:
        """A power of two that queries are multiplied by where products might overflow."""
        if not self.may_overflow:
            return 1.0
        largest = float(torch.as_tensor(self.scale).abs().amax())
        return shrink_for(largest / (self.softcap or 1.0), self.dtype)

    def shrunk_queries(self, start: int, stop: int) -> torch.Tensor:
        """(G, stop − start, d_k), in the dtype of arithmetic."""
        queries = self.q[:, start:stop].to(self.device, self.dtype)
        return queries if self.shrink == 1.0 else queries * self.shrink

    def factor(self, unit: float = 1.0) -> float | torch.Tensor:
        """What products of these queries and keys are multiplied by before the tanh.

        A number, or (G, 1, 1) where each head has its own.
        """
        largest = torch.finfo(self.dtype).max
        factor = self.scale / (self.softcap or 1.0) * (unit / self.shrink)
        if isinstance(factor, torch.Tensor):
            return factor.clamp(-largest, largest)
        return min(max(factor, -largest), largest)

    def relative_positions(self, block: RowBlock, key: int) -> torch.Tensor:
        """(rows,): how far each row stands to the right of a key, p − key."""
        assert self.positions_float is not None
        return self.positions_float[block.start : block.stop] - key

    def position_range(self, block: RowBlock) -> tuple[int, int]:
        """The lowest and the highest position of a block's rows."""
        assert self.places is not None
        places = self.places[block.start : block.stop]
        return int(places.min()), int(places.max())

    def intervals(self, block: RowBlock, tile: Tile) -> NDArray[np.int32]:
        """Int32 (2, rows), on the host: where in a tile each row's keys start and stop."""
        found: NDArray[np.int32] = self.host_bounds[:, block.start : block.stop] - tile.start
        np.maximum(found, 0, out=found)
        np.minimum(found, tile.stop - tile.start, out=found)
        return found

    def visible(self, block: RowBlock, tile: Tile) -> torch.Tensor:
        """Bool (G | 1, rows, keys): True where the query may see the key."""
        found: torch.Tensor = self.mask.visible(*self._cells(block, tile))[0]
        if self.zeros_hidden:
            found = found & (self.given_weights(block, tile) != 0)
        return found

    def given_weights(self, block: RowBlock, tile: Tile) -> torch.Tensor:
        """(G, rows, keys), those of a tile in the dtype and on the device of arithmetic."""
        assert self.given is not None
        _, _, rows, cols = self._cells(block, tile)
        if isinstance(rows, torch.Tensor):
            rows = rows.to(self.given.device)
        return self.given[:, rows, cols].to(self.device, self.dtype)

    def added(self, block: RowBlock, tile: Tile) -> torch.Tensor | None:
        """(G | 1, rows, keys), what an additive mask adds; None where there is none."""
        found = self.mask.additive(*self._cells(block, tile))
        return None if found is None else finite_in(found[0], self.dtype)

    def bias(self, index: int, block: RowBlock, tile: Tile) -> torch.Tensor | None:
        """(keys,), all that is added to the logits of one head and one row; None for nothing."""
        (batch, _, rows, cols), head = self._cells(block, tile), self.heads[index]
        found = self.mask.bias(batch, slice(head, head + 1), rows, cols)
        return None if found is None else found[0, 0, 0]

    def _cells(
        self, block: RowBlock, tile: Tile
    ) -> tuple[slice, slice, slice | torch.Tensor, slice]:
        """Batch, heads, queries and keys as a mask is asked for them."""
        batch, heads = slice(self.batch, self.batch + 1), slice(self.heads.start, self.heads.stop)
        rows: slice | torch.Tensor = self.rows[block.start : block.stop]
        first, last = int(self.queries[block.start]), int(self.queries[block.stop - 1])
        if last - first == block.stop - block.start - 1:  # neighbours
            rows = slice(first, last + 1)
        return batch, heads, rows, slice(tile.start, tile.stop)


def row_blocks(hull: Hull, height: int, width: int) -> Iterator[RowBlock]:
    """Cut the visible part of the score matrix into tiles.

    Args:
        hull: of the rows.
        height: rows of a block at most.
        width: keys of a tile at most.
    """
    yield from (block for (block,) in common_blocks([hull], height, width))


def common_blocks(hulls: Sequence[Hull], height: int, width: int) -> Iterator[tuple[RowBlock, ...]]:
    """Cut what is visible on any of several sides into tiles, the same for all of them.

    Args:
        hulls: of the same rows.
        height, width: as for `row_blocks`.

    Yields:
        A block for each side; their tiles have the same keys.
    """
    for start in range(0, len(hulls[0].first), height):
        sides = [hull.queries(slice(start, start + height)) for hull in hulls]
        edges = [
            (max(low, right - width), right)
            for low, high in _joined(sorted(span for rows in sides for span in rows.spans()))
            # From the end, so that tiles on a diagonal are cut by it alike.
            for right in reversed(range(high, low, -width))
        ]
        yield tuple(
            RowBlock(
                start,
                start + len(rows.first),
                tuple(
                    Tile(left, right, int(rows.first.max()) > left, int(rows.stop.min()) < right)
                    for left, right in edges
                ),
            )
            for rows in sides
        )


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending spans, begun where rows of a tile lie well in memory; those that touch made one."""
    found: list[tuple[int, int]] = []
    for first, high in spans:
        low = first - first % ALIGNED_KEYS
        if found and low <= found[-1][1]:
            low, high = found[-1][0], max(found.pop()[1], high)
        found.append((low, high))
    return found


def make_group(
    problem: Problem,
    mask: Mask,
    batch: int,
    heads: range,
    queries: NDArray[np.int64],
    *,
    part: slice = slice(None),
    with_values: bool,
    with_top_key: bool = False,
    with_distances: bool = True,
    with_statistics: bool = True,
) -> HeadGroup:
    """Bring some heads of one batch into the shape that tiles need.

    Args:
        problem: what to compute.
        mask: the problem's mask on the device of arithmetic.
        batch: index of the batch.
        heads: the heads, neighbours.
        queries: int64, ascending.
        part: which R of these are the group's; all of them decide how it is computed.
        with_values: whether the values will be needed; these have to be finite.
        with_top_key: whether to note where the largest logit of each row stands.
        with_distances: whether distances are wanted where positions are defined.
        with_statistics: whether entropy and distances are; False where the output is all.
    """
    shared = [problem.kv_head(head) for head in heads]
    picked = len(queries) > 0 and int(queries[-1]) != len(queries) - 1
    rows = torch.as_tensor(queries, device=problem.device)
    q = problem.q[batch, heads.start : heads.stop].detach()
    q = q[:, rows.to(q.device)] if picked else q[:, : len(queries)]
    k = problem.cast(_of_heads(problem.k[batch].detach(), shared))  # (G, S_k, d_k)
    # Rows a power of two apart would share a few lines of each cache.
    room = k.new_empty(len(k), k.shape[2], k.shape[1] + ALIGNED_KEYS)
    keys = room[..., : k.shape[1]].copy_(k.mT)  # (G, d_k, S_k)
    values, value_unit = None, 1.0
    if with_values and problem.v is not None:
        values = problem.cast(_of_heads(problem.v[batch].detach(), shared))
        value_unit = _unit_of(values)
        values = values if value_unit == 1.0 else values / value_unit
    scale, slopes = problem.scales_of(heads) / problem.temperature, mask.slopes
    given = problem.given
    overflow = given is not None or may_overflow(q, k, scale / (problem.softcap or 1.0))
    rows_before = part.indices(len(queries))[0]
    q, queries, rows = q[:, part], queries[part], rows[part]  # (G, R, d_k), (R,)
    hull = problem.mask.hull(batch, heads).queries(queries)
    bounds = np.stack([hull.first, hull.stop]).astype(np.int32)
    places, positions = None, None
    if problem.mask.shift is not None:
        places = problem.mask.positions(slice(batch, batch + 1), queries)[0]
        positions = torch.as_tensor(places, device=problem.device)
    return HeadGroup(
        batch=batch,
        heads=heads,
        queries=queries,
        rows=rows,
        q=q,
        keys=keys,
        values=values,
        value_unit=value_unit,
        scale=scale,
        softcap=problem.softcap,
        slopes=None if slopes is None else problem.cast(slopes[heads.start : heads.stop]),
        # Rounded like every other logit, so that equal ones stay equal.
        sinks=None
        if problem.sinks is None
        else problem.cast(problem.sinks[heads.start : heads.stop, None]).to(torch.float64),
        mask=mask,
        hull=hull,
        host_bounds=bounds,
        bounds=torch.as_tensor(bounds, device=problem.device),
        places=places,
        positions=positions,
        distances=with_distances and with_statistics and positions is not None,
        entropy=with_statistics,
        positions_float=None if positions is None else problem.cast(positions),
        by_interval=hull.exact and mask.added is None and given is None,
        may_overflow=overflow,
        top_key=with_top_key or (with_statistics and problem.dtype == torch.float64),
        given=None if given is None else given.values[batch, heads.start : heads.stop],
        zeros_hidden=given is not None and given.zeros_hidden,
        rows_before=rows_before,
    )


def _unit_of(values: torch.Tensor) -> float:
    """1, or a power of two without which sums of values (G, S_k, d_v) might overflow."""
    if values.numel() == 0:
        return 1.0
    most = torch.finfo(values.dtype).max / (2 * values.shape[1])
    fits = _largest(values) < most
    return 1.0 if fits else 2.0 ** (values.shape[1].bit_length() + 1)


def largest_logit_of(group: HeadGroup, index: int, row: int) -> tuple[float, int]:
    """The largest logit of one row of one head, in float64, and the first key that has it.

    Each logit is summed by itself, so that equal keys have equal logits wherever they stand.
    """
    query = group.q[index, row].to(group.device, torch.float64)
    best, best_key = -torch.inf, 0
    low, high = int(group.hull.first[row]), int(group.hull.stop[row])
    block = RowBlock(row, row + 1, ())
    for start in range(low, high, _KEYS_AT_ONCE):
        tile = Tile(start, min(start + _KEYS_AT_ONCE, high), True, True)
        keys = group.keys[index, :, tile.start : tile.stop].T.to(torch.float64)
        masked = logits(
            (keys * query).sum(-1),
            scale=group.scale[index, 0] if isinstance(group.scale, torch.Tensor) else group.scale,
            temperature=1.0,
            softcap=group.softcap,
            visible=group.visible(block, tile).expand(len(group.heads), -1, -1)[index, 0],
            bias=group.bias(index, block, tile),
        ).masked  # (keys,)
        largest, key = masked.nan_to_num(-torch.inf, torch.inf, -torch.inf).max(0)
        if float(largest) > best:
            best, best_key = float(largest), tile.start + int(key)
    return best, best_key


def _of_heads(tensor: torch.Tensor, shared: list[int]) -> torch.Tensor:
    """The heads of (H_kv, S, d) that the query heads use, (G, S, d); a view where it can be."""
    if shared == list(range(shared[0], shared[0] + len(shared))):
        return tensor[shared[0] : shared[-1] + 1]
    return tensor[torch.tensor(shared, device=tensor.device)]


def may_overflow(q: torch.Tensor, k: torch.Tensor, factor: float | torch.Tensor) -> bool:
    """Whether some logit could be NaN or infinite: |q·k| ≤ d_k·max|q|·max|k|.

    Args:
        q: (…, S_q, d_k).
        k: (…, S_k, d_k), in the dtype of arithmetic.
        factor: multiplies the products.
    """
    if q.numel() == 0 or k.numel() == 0:
        return False
    width, largest_q, largest_k = k.shape[-1], _largest(q), _largest(k)
    if isinstance(factor, torch.Tensor):
        factor = float(factor.abs().amax())
    largest = largest_q * largest_k * width * max(abs(factor), 1.0)
    return not (math.isfinite(largest) and largest < torch.finfo(k.dtype).max / 8)


def _largest(values: torch.Tensor) -> float:
    """The largest absolute value, without a tensor of them all; NaN where one is."""
    low, high = torch.aminmax(values if values.dtype in _COMPARABLE else values.double())
    return max(-float(low), float(high))
