"""Sums of scores and of their squares over the visible cells, without the matrix of scores.

With q = c_q + a and k = c_k + b, a score less the constant c_q·c_k + m is a·b + c_q·b + a·c_k − m:
the product of [a, 1, a·c_k − m] and [b, c_q·b, 1]. So the sums over an interval of keys are the
last column and the quadratic form of the Gram matrix Σ b̃ b̃ᵀ of these augmented vectors, which is
kept up to date as the interval moves. Cells near an interval's ends are computed one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from attncli.attention.threads import map_ranges, single_threaded_torch

# Rows read, cast and centred at a time: 8192 × 128 float32 are 4 MiB.
TILE_ROWS = 8192
_SAMPLE_ROWS = 4096
ROW_BLOCK = 256
# Cells per row of a block that are computed one by one, at most, before the block is halved, or
# instead of a Gram matrix.
_DIRECT_KEYS = 4 * ROW_BLOCK
# Long inputs are cut into so many chunks of rows, which repeat the sum up to their first interval.
_CHUNKS = 2
_CHUNK_ROWS = 2048
_STREAM_ROWS = 1024
# The relative error of a variance that is let pass, and roundings in a score.
VARIANCE_ERROR = 4e-7
_SCORE_ROUNDINGS = 2


@dataclass(frozen=True, slots=True)
class CentredRows:
    """Some rows of Q or K, read in blocks, in the order wanted."""

    tensor: torch.Tensor  # (S, d), in the dtype it came in
    # Int64 (n,), which rows and in which order; None for all as they lie.
    order: torch.Tensor | None
    dtype: torch.dtype  # of the arithmetic, float32 or float64
    device: torch.device  # where it is done

    def __len__(self) -> int:
        """How many rows."""
        return self.tensor.shape[0] if self.order is None else len(self.order)

    @property
    def width(self) -> int:
        """Length of one vector."""
        return self.tensor.shape[1]

    def block(self, at: int, stop: int) -> torch.Tensor:
        """Rows [at, stop) in the dtype of the arithmetic, (stop − at, d)."""
        rows = self.tensor[at:stop] if self.order is None else self._picked(self.order[at:stop])
        return rows.to(device=self.device, dtype=self.dtype)

    def _picked(self, places: torch.Tensor) -> torch.Tensor:
        # On CPUs ten times as fast as indexing by a tensor.
        return self.tensor.index_select(0, places.to(self.tensor.device))

    def centre(self, weights: NDArray[np.int64] | None = None) -> torch.Tensor:
        """A vector near the mean, float64 (d,), that the arithmetic's dtype holds exactly.

        The mean of some thousand rows spread evenly; 0 where that is not finite. Subtracting it
        from float32 rows far from 0 loses nothing, and what is left of the mean is small. Rows
        that are all alike give themselves.

        Args:
            weights: of each row, ≥ 0 and not all 0; None for rows that count alike.
        """
        counted = np.arange(len(self)) if weights is None else np.flatnonzero(weights)
        some = counted[:: -(-len(counted) // _SAMPLE_ROWS)]
        places = torch.from_numpy(some)
        share = np.ones(len(some)) if weights is None else weights[some].astype(np.float64)
        shares = torch.as_tensor(share / share.sum(), device=self.device)[:, None]
        with single_threaded_torch(self.device):
            rows = self._picked(places if self.order is None else self.order[places])
            rows = rows.to(device=self.device, dtype=torch.float64)
            mean = rows[0] + (rows - rows[0]).mul_(shares).sum(0)
        held = mean.to(self.dtype).to(torch.float64)
        return torch.where(torch.isfinite(held), held, 0.0)


@dataclass(frozen=True, slots=True)
class CellSums:
    """What the visible cells add up to."""

    cells: int  # how many there are
    shift: float  # Σ (score − origin)
    squares: float  # Σ (score − origin)²
    origin: float = 0.0  # what is subtracted from each score
    # Score that lies at 0 where the squares were rounded: the origin for cells taken one by one,
    # c_q·c_k for a Gram matrix, which subtracts m from sums of squares.
    rounded_about: float = 0.0
    dtype: torch.dtype = torch.float64  # of the arithmetic

    @property
    def mean(self) -> float:
        """Mean of the scores, of which there have to be some."""
        return self.origin + self.shift / self.cells

    @property
    def variance(self) -> float:
        """Population variance of the scores; 0 where they differ by their own rounding alone."""
        variance = self.squares / self.cells - (self.shift / self.cells) ** 2
        rounding = _SCORE_ROUNDINGS * torch.finfo(torch.float64).eps * abs(self.mean)
        return 0.0 if variance <= rounding**2 else variance

    @property
    def is_cancelled(self) -> bool:
        """Whether rounding of the squares may show in the variance."""
        if not self.cells:
            return False
        eps = torch.finfo(self.dtype).eps
        return eps * (self.mean - self.rounded_about) ** 2 > VARIANCE_ERROR * self.variance


@dataclass(slots=True)
class AugmentedRows:
    """The augmented vectors of queries or of keys, the last tiles of them kept."""

    rows: CentredRows  # queries or keys
    centre: torch.Tensor  # float64 (d,), c of these
    other_centre: torch.Tensor  # float64 (d,), c of the others
    minus: float  # what is subtracted from the product with the other's centre
    one_first: bool  # whether the 1 comes before that product (queries)
    _tiles: dict[int, torch.Tensor] = field(default_factory=dict, init=False)

    def pieces(self, at: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The vectors [at, stop) as (index of the first, (rows, d + 2)), tile by tile."""
        while at < stop:
            tile = at // TILE_ROWS
            end = min(stop, (tile + 1) * TILE_ROWS)
            yield at, self._tile(tile)[at - tile * TILE_ROWS : end - tile * TILE_ROWS]
            at = end

    def _tile(self, tile: int) -> torch.Tensor:
        if tile not in self._tiles:
            if len(self._tiles) > 1:  # an interval's two ends
                del self._tiles[next(iter(self._tiles))]
            self._tiles[tile] = self._prepare(tile * TILE_ROWS)
        return self._tiles[tile]

    def _prepare(self, at: int) -> torch.Tensor:
        block = self.rows.block(at, min(at + TILE_ROWS, len(self.rows)))
        width = block.shape[1]
        longer = block.new_empty(len(block), width + 2)
        moved = torch.sub(block, self.centre.to(block.dtype), out=longer[:, :width])
        one, product = (width, width + 1) if self.one_first else (width + 1, width)
        longer[:, one] = 1.0
        longer[:, product] = moved @ self.other_centre.to(block.dtype) - self.minus
        return longer


@dataclass(slots=True)
class RunningGram:
    """Σ b̃ b̃ᵀ over an interval [first, stop) of keys that moves."""

    keys: AugmentedRows  # the augmented vectors of the keys
    total: torch.Tensor = field(init=False)  # float64 (d + 2, d + 2)
    first: int = 0  # the interval [first, stop)
    stop: int = 0

    def __post_init__(self) -> None:
        """Begin with no keys."""
        width = self.keys.rows.width + 2
        device = self.keys.rows.device
        self.total = torch.zeros(width, width, dtype=torch.float64, device=device)

    def move(self, first: int, stop: int) -> torch.Tensor:
        """The matrix of keys [first, stop), in the dtype of the arithmetic."""
        leaving = max(0, first - self.first) + max(0, self.stop - stop)
        if leaving >= stop - first:  # starting afresh costs less and cancels nothing
            self.total.zero_()
            self._add(first, stop, 1)
        else:
            self._add(first, self.first, 1)
            self._add(self.first, first, -1)
            self._add(self.stop, stop, 1)
            self._add(stop, self.stop, -1)
            if leaving and not bool(torch.isfinite(self.total).all()):
                self.total.zero_()  # what left was not finite, and ∞ − ∞ remains
                self._add(first, stop, 1)
        self.first, self.stop = first, stop
        return self.total.to(self.keys.rows.dtype)

    def _add(self, first: int, stop: int, sign: int) -> None:
        for _, piece in self.keys.pieces(first, stop):
            self.total.add_(piece.T @ piece, alpha=sign)


def interval_sums(
    queries: AugmentedRows,
    keys: AugmentedRows,
    first: NDArray[np.int64],
    stop: NDArray[np.int64],
    *,
    one_by_one: bool = False,
) -> CellSums:
    """Sums over cells that are one interval of keys for each query.

    Linear in both lengths where intervals move slowly from row to row, whatever their width.

    Args:
        queries, keys: the augmented vectors.
        first, stop: int64 (queries,), with stop > first.
        one_by_one: whether every cell is computed, in time by their number: what is left of a
            mean that the centres do not hold cancels in a Gram matrix.
    """
    bounds = _chunk_bounds(len(first), keys.rows.device)

    def sums_of(at: int, end: int) -> torch.Tensor:
        # Tiles are kept by each chunk for itself.
        return _chunk_sums(replace(queries), replace(keys), first, stop, at, end, one_by_one)

    totals = torch.stack(map_ranges(sums_of, bounds)).sum(0) if bounds else torch.zeros(2)
    return _cell_sums(int((stop - first).sum()), totals, queries, one_by_one)


def _chunk_bounds(length: int, device: torch.device) -> list[tuple[int, int]]:
    """Rows [at, end) to be summed apart: by the length alone, so that sums never change."""
    many = _CHUNKS if device.type == "cpu" and length >= _CHUNKS * _CHUNK_ROWS else 1
    blocks = -(-length // ROW_BLOCK)
    edges = [blocks * place // many * ROW_BLOCK for place in range(many)] + [length]
    return [(at, end) for at, end in itertools.pairwise(edges) if at < end]


def _chunk_sums(
    queries: AugmentedRows,
    keys: AugmentedRows,
    first: NDArray[np.int64],
    stop: NDArray[np.int64],
    begin: int,
    finish: int,
    one_by_one: bool,
) -> torch.Tensor:
    """Σ (score − origin) and Σ (score − origin)² over rows [begin, finish), float64 (2,)."""
    gram = RunningGram(keys)
    totals = torch.zeros(2, dtype=torch.float64, device=keys.rows.device)
    for at, end in _row_blocks(first, stop, begin, finish):
        low, high = int(first[at:end].min()), int(stop[at:end].max())
        left, right = int(first[at:end].max()), int(stop[at:end].min())
        if one_by_one or high - low <= _DIRECT_KEYS or left >= right:
            left = right = high
        for row, rows in queries.pieces(at, end):
            if left < right:
                product = rows @ gram.move(left, right)  # (rows, d + 2)
                totals[0] += product[:, -1].sum()
                totals[1] += product.mul_(rows).sum()
            span = slice(row, row + len(rows))
            for key, some in itertools.chain(keys.pieces(low, left), keys.pieces(right, high)):
                hidden = _outside(first[span], stop[span], key, key + len(some), keys.rows.device)
                _add_direct(totals, rows, some, hidden)
    return totals


def streamed_sums(
    queries: AugmentedRows, keys: AugmentedRows, visible: Callable[[slice, slice], torch.Tensor]
) -> CellSums:
    """Sums over any set of cells, tile by tile: quadratic in time, bounded in memory.

    Args:
        queries, keys: the augmented vectors.
        visible: bool (rows, columns) of a block, True where the query sees the key.
    """

    def sums_of(begin: int, finish: int) -> torch.Tensor:
        own_queries, own_keys = replace(queries), replace(keys)
        totals = torch.zeros(3, dtype=torch.float64, device=keys.rows.device)
        for key, some in own_keys.pieces(0, len(keys.rows)):
            for at in range(begin, finish, ROW_BLOCK):
                for row, rows in own_queries.pieces(at, min(at + ROW_BLOCK, finish)):
                    seen = visible(slice(row, row + len(rows)), slice(key, key + len(some)))
                    totals[2] += seen.sum()
                    _add_direct(totals, rows, some, ~seen)
        return totals

    length = len(queries.rows)
    bounds = [(at, min(at + _STREAM_ROWS, length)) for at in range(0, length, _STREAM_ROWS)]
    totals = torch.stack(map_ranges(sums_of, bounds)).sum(0) if bounds else torch.zeros(3)
    return _cell_sums(int(totals[2]), totals, queries, one_by_one=True)


def _row_blocks(
    first: NDArray[np.int64], stop: NDArray[np.int64], begin: int, finish: int
) -> Iterator[tuple[int, int]]:
    """Blocks of rows, small enough where intervals jump that few cells are taken one by one."""
    for at in range(begin, finish, ROW_BLOCK):
        todo = [(at, min(at + ROW_BLOCK, finish))]
        while todo:
            start, end = todo.pop()
            if end - start > 1 and _direct_keys(first[start:end], stop[start:end]) > _DIRECT_KEYS:
                middle = (start + end) // 2
                todo += [(middle, end), (start, middle)]
            else:
                yield start, end


def _direct_keys(first: NDArray[np.int64], stop: NDArray[np.int64]) -> int:
    """How many keys some of the rows see and others do not."""
    shared = max(0, int(stop.min()) - int(first.max()))
    return int(stop.max()) - int(first.min()) - shared


def _outside(
    first: NDArray[np.int64], stop: NDArray[np.int64], at: int, end: int, device: torch.device
) -> torch.Tensor | None:
    """Bool (rows, end − at), True where the key is outside the row's interval; None for nowhere."""
    keys = torch.arange(end - at, dtype=torch.int32, device=device)
    hidden = None
    if int(stop.min()) < end:
        hidden = keys >= _bounds(stop, at, end, device)
    if int(first.max()) > at:
        early = keys < _bounds(first, at, end, device)
        hidden = early if hidden is None else hidden | early
    return hidden


def _bounds(bounds: NDArray[np.int64], at: int, end: int, device: torch.device) -> torch.Tensor:
    near = (bounds - at).clip(0, end - at)
    return torch.as_tensor(near, dtype=torch.int32, device=device)[:, None]  # (rows, 1)


def _add_direct(
    totals: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor | None
) -> None:
    scores = rows @ keys.T  # (rows, keys)
    if hidden is not None:
        scores.masked_fill_(hidden, 0.0)
    totals[0] += scores.sum()
    totals[1] += scores.square_().sum()


def _cell_sums(
    cells: int, totals: torch.Tensor, queries: AugmentedRows, one_by_one: bool
) -> CellSums:
    centre = float(queries.centre @ queries.other_centre)
    shift, squares = totals[:2].tolist()
    origin = centre + queries.minus
    about = origin if one_by_one else centre
    return CellSums(cells, shift, squares, origin, about, queries.rows.dtype)
