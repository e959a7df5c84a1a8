"""Masks in terms of intervals: what needs no cell-by-cell work, and which tiles to visit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from attncli.attention.masks.mask import Mask


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


def as_intervals(mask: Mask) -> Mask:
    """The same mask, in which padding and segments that leave intervals have become intervals.

    Args:
        mask: as built, with NumPy arrays.
    """
    if mask.key_keep is not None:
        runs = [_run_of_true(keep) for keep in mask.key_keep]
        if all(run is not None for run in runs):
            low, high = np.array(runs, np.int64).T[:, :, None]  # each (B | 1, 1)
            mask = replace(_narrowed(mask, low, high), key_keep=None)
    if mask.segments is not None and mask.sizes.k_len:
        bounds = [_run_bounds(ids) for ids in mask.segments]
        if all(bound is not None for bound in bounds):
            mask = replace(_narrowed(mask, *_own_runs(mask, bounds)), segments=None)
    return mask


def queries_per_key(
    first: NDArray[np.int64], stop: NDArray[np.int64], k_len: int
) -> NDArray[np.int64]:
    """How many of the rows' intervals hold each key, int64 (S_k,)."""
    opened = np.bincount(first, minlength=k_len + 1) - np.bincount(stop, minlength=k_len + 1)
    return np.cumsum(opened)[:k_len]


def _narrowed(mask: Mask, low: NDArray[np.int64], high: NDArray[np.int64]) -> Mask:
    """The mask with every interval cut to [low, high)."""
    first = np.maximum(mask.first, low)
    stop = np.maximum(first, np.minimum(mask.stop, high))
    first, stop = np.broadcast_arrays(np.minimum(first, mask.sizes.k_len), stop)
    return replace(mask, first=first, stop=np.minimum(stop, mask.sizes.k_len))


def _run_of_true(keep: NDArray[np.bool_]) -> tuple[int, int] | None:
    """Start and end of the only run of True; None where there are several."""
    places = np.flatnonzero(keep)
    if not len(places):
        return 0, 0
    low, high = int(places[0]), int(places[-1]) + 1
    return (low, high) if high - low == len(places) else None


def _run_bounds(ids: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Start and end of each key's segment; None where a segment lies in several pieces."""
    starts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
    if len(np.unique(ids[starts])) < len(starts):
        return None
    lengths = np.diff(np.append(starts, len(ids)))
    return np.repeat(starts, lengths), np.repeat(starts + lengths, lengths)


def _own_runs(mask: Mask, bounds: list[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The segment [low, high) each query stands in, (B | 1, S_q); none for one off the axis."""
    position = mask.positions(slice(None), slice(None))  # (B | 1, S_q)
    on_axis = (position >= 0) & (position < mask.sizes.k_len)
    place = np.where(on_axis, position, 0)
    low, high = (np.stack(side) for side in zip(*bounds, strict=True))  # (B | 1, S_k)
    batches = max(len(low), len(place))
    rows = np.broadcast_to(place, (batches, place.shape[1]))
    widened = (np.broadcast_to(side, (batches, side.shape[1])) for side in (low, high))
    start, end = (np.take_along_axis(side, rows, 1) for side in widened)
    return np.where(on_axis, start, 0), np.where(on_axis, end, 0)
