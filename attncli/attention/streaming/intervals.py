"""Which tiles of the score matrix to visit, by an interval of keys for each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Tile:
    """Some neighbouring keys that a block of rows visits.

    Attributes:
        start, stop: the keys.
        starts_inside, stops_inside: whether the interval of some row starts after the first of
            these keys, or stops before the last.
    """

    start: int
    stop: int
    starts_inside: bool
    stops_inside: bool


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Some rows in a row, and the keys that at least one of them may see.

    Attributes:
        start, stop: the rows, counted along the chosen queries.
        tiles: from the first key to the last; none where no row sees a key.
    """

    start: int
    stop: int
    tiles: tuple[Tile, ...]


def row_blocks(
    first: NDArray[np.int64], stop: NDArray[np.int64], height: int, width: int
) -> Iterator[RowBlock]:
    """Cut the visible part of the score matrix into tiles.

    Args:
        first: int64 (rows,), first key of each row's interval.
        stop: int64 (rows,), one past its last key.
        height: rows of a block at most.
        width: keys of a tile at most.
    """
    for start in range(0, len(first), height):
        firsts, stops = first[start : start + height], stop[start : start + height]
        some = stops > firsts
        end = start + len(firsts)
        if not some.any():
            yield RowBlock(start, end, ())
            continue
        low, high = int(firsts[some].min()), int(stops[some].max())
        latest, earliest = int(firsts.max()), int(stops.min())
        edges = [(left, min(left + width, high)) for left in range(low, high, width)]
        tiles = (Tile(left, right, latest > left, earliest < right) for left, right in edges)
        yield RowBlock(start, end, tuple(tiles))


def queries_per_key(
    first: NDArray[np.int64], stop: NDArray[np.int64], k_len: int
) -> NDArray[np.int64]:
    """How many of the rows' intervals hold each key, int64 (S_k,)."""
    opened = np.bincount(first, minlength=k_len + 1) - np.bincount(stop, minlength=k_len + 1)
    return np.cumsum(opened)[:k_len]
