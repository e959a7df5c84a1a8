"""Sums of scores and of their squares over the visible cells, without the matrix of scores.

With q = c_q + a and k = c_k + b, a score less the constant c_q·c_k is a·b + c_q·b + a·c_k: the
product of [a, 1, a·c_k] and [b, c_q·b, 1]. So the sums over an interval of keys are the last
column and the quadratic form of the Gram matrix Σ b̃ b̃ᵀ of these longer vectors, which is kept
up to date as the interval moves. Cells near an interval's ends are computed one by one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from attncli.attention.threads import map_ranges
from attncli.attention.variance.sides import TILE_ROWS, Side

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

ROW_BLOCK = 256
# Cells per row of a block that are computed one by one, at most, before the block is halved, or
# instead of a Gram matrix.
_DIRECT_KEYS = 4 * ROW_BLOCK
_STREAM_ROWS = 1024
# Long inputs are cut into so many chunks of rows, which repeat the sum up to their first interval.
_CHUNKS = 2
_CHUNK_ROWS = 2048


@dataclass(frozen=True, slots=True)
class CellSums:
    """What the visible cells add up to.

    Attributes:
        cells: how many there are.
        shift: Σ (score − origin).
        squares: Σ (score − origin)².
        origin: what is subtracted from each score, near their mean.
    """

    cells: int
    shift: float
    squares: float
    origin: float

    @property
    def mean(self) -> float | None:
        """Mean of the scores; None without cells."""
        return self.origin + self.shift / self.cells if self.cells else None

    @property
    def variance(self) -> float | None:
        """Population variance of the scores; None without cells."""
        if not self.cells:
            return None
        variance = self.squares / self.cells - (self.shift / self.cells) ** 2
        return variance if variance != variance else max(0.0, variance)


@dataclass(slots=True)
class LongVectors:
    """The longer vectors of one side, the last tiles of them kept.

    Attributes:
        side: queries or keys.
        own: float64 (d,), the side's centre.
        other: float64 (d,), the other side's.
        one_first: whether the 1 comes before the product with the other's centre (queries).
    """

    side: Side
    own: torch.Tensor
    other: torch.Tensor
    one_first: bool
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
        block = self.side.block(at, min(at + TILE_ROWS, len(self.side)))
        width = block.shape[1]
        longer = block.new_empty(len(block), width + 2)
        moved = torch.sub(block, self.own.to(block.dtype), out=longer[:, :width])
        one, product = (width, width + 1) if self.one_first else (width + 1, width)
        longer[:, one] = 1.0
        longer[:, product] = moved @ self.other.to(block.dtype)
        return longer


@dataclass(slots=True)
class RunningGram:
    """Σ b̃ b̃ᵀ over an interval [first, stop) of keys that moves.

    Attributes:
        keys: the longer vectors of the keys.
        total: float64 (d + 2, d + 2).
        first, stop: the interval.
    """

    keys: LongVectors
    total: torch.Tensor
    first: int = 0
    stop: int = 0

    @classmethod
    def empty(cls, keys: LongVectors) -> RunningGram:
        """The Gram matrix of no keys."""
        width = keys.side.width + 2
        zeros = torch.zeros(width, width, dtype=torch.float64, device=keys.side.device)
        return cls(keys, zeros)

    def move(self, first: int, stop: int) -> torch.Tensor:
        """The matrix of keys [first, stop), in the dtype of the arithmetic."""
        leaving = max(0, first - self.first) + max(0, self.stop - stop)
        if leaving >= stop - first:  # starting afresh costs less and cancels nothing
            self._restart(first, stop)
        else:
            self._add(first, self.first, 1)
            self._add(self.first, first, -1)
            self._add(self.stop, stop, 1)
            self._add(stop, self.stop, -1)
            if leaving and not bool(torch.isfinite(self.total).all()):
                self._restart(first, stop)  # what left was not finite, and ∞ − ∞ remains
        self.first, self.stop = first, stop
        return self.total.to(self.keys.side.dtype)

    def _restart(self, first: int, stop: int) -> None:
        self.total.zero_()
        self._add(first, stop, 1)

    def _add(self, first: int, stop: int, sign: int) -> None:
        for _, piece in self.keys.pieces(first, stop):
            self.total.add_(piece.T @ piece, alpha=sign)


def interval_sums(
    queries: LongVectors,
    keys: LongVectors,
    first: NDArray[np.int64],
    stop: NDArray[np.int64],
) -> CellSums:
    """Sums over cells that are one interval of keys for each query.

    Linear in both lengths where intervals move slowly from row to row, whatever their width.

    Args:
        queries, keys: the longer vectors.
        first, stop: int64 (queries,), with stop > first.
    """
    bounds = _chunk_bounds(len(first), keys.side.device)

    def sums_of(at: int, end: int) -> torch.Tensor:
        # Tiles are kept by each chunk for itself.
        return _chunk_sums(replace(queries), replace(keys), first, stop, at, end)

    totals = torch.stack(map_ranges(sums_of, bounds)).sum(0) if bounds else torch.zeros(2)
    shift, squares = totals.tolist()
    return CellSums(int((stop - first).sum()), shift, squares, _origin(queries))


def _chunk_bounds(length: int, device: torch.device) -> list[tuple[int, int]]:
    """Rows [at, end) to be summed apart: by the length alone, so that sums never change."""
    many = _CHUNKS if device.type == "cpu" and length >= _CHUNKS * _CHUNK_ROWS else 1
    blocks = -(-length // ROW_BLOCK)
    edges = [blocks * place // many * ROW_BLOCK for place in range(many)] + [length]
    return [(at, end) for at, end in itertools.pairwise(edges) if at < end]


def _chunk_sums(
    queries: LongVectors,
    keys: LongVectors,
    first: NDArray[np.int64],
    stop: NDArray[np.int64],
    begin: int,
    finish: int,
) -> torch.Tensor:
    """Σ (score − origin) and Σ (score − origin)² over rows [begin, finish), float64 (2,)."""
    gram = RunningGram.empty(keys)
    totals = torch.zeros(2, dtype=torch.float64, device=keys.side.device)
    for at, end in _row_blocks(first, stop, begin, finish):
        low, high = int(first[at:end].min()), int(stop[at:end].max())
        left, right = int(first[at:end].max()), int(stop[at:end].min())
        if high - low <= _DIRECT_KEYS or left >= right:
            left = right = high
        for row, rows in queries.pieces(at, end):
            if left < right:
                _add_quadratic(totals, rows, gram.move(left, right))
            span = slice(row, row + len(rows))
            for key, some in itertools.chain(keys.pieces(low, left), keys.pieces(right, high)):
                hidden = _outside(first[span], stop[span], key, key + len(some), keys.side.device)
                _add_direct(totals, rows, some, hidden)
    return totals


def streamed_sums(
    queries: LongVectors,
    keys: LongVectors,
    visible: Callable[[slice, slice], torch.Tensor],
) -> CellSums:
    """Sums over any set of cells, tile by tile: quadratic in time, bounded in memory.

    Args:
        queries, keys: the longer vectors.
        visible: bool (rows, columns) of a block, True where the query sees the key.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=keys.side.device)
    cells = 0
    for at in range(0, len(queries.side), _STREAM_ROWS):
        for row, rows in queries.pieces(at, min(at + _STREAM_ROWS, len(queries.side))):
            for key, some in keys.pieces(0, len(keys.side)):
                seen = visible(slice(row, row + len(rows)), slice(key, key + len(some)))
                count = int(seen.sum())
                if count:
                    _add_direct(totals, rows, some, ~seen)
                    cells += count
    shift, squares = totals.tolist()
    return CellSums(cells, shift, squares, _origin(queries))


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


def _add_quadratic(totals: torch.Tensor, rows: torch.Tensor, gram: torch.Tensor) -> None:
    product = rows @ gram  # (rows, d + 2)
    totals[0] += product[:, -1].sum()
    totals[1] += product.mul_(rows).sum()


def _add_direct(
    totals: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor | None
) -> None:
    scores = rows @ keys.T  # (rows, keys)
    if hidden is not None:
        scores.masked_fill_(hidden, 0.0)
    totals[0] += scores.sum()
    totals[1] += scores.square_().sum()


def _origin(queries: LongVectors) -> float:
    return float(queries.own @ queries.other)
