"""Which keys may be one packed document, from what the queries see together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attncli.attention.masks.interval_mask import IntervalMask, Marginals, SortedIntervals, coverage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from attncli.attention.masks.mask import HeadMask

_FULL_ROWS = 256


@dataclass(frozen=True, slots=True, eq=False)
class SeeingRows:
    """The queries that see a key: their indices, first and last keys, each int64 (queries,)."""

    index: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]

    @classmethod
    def of(cls, profile: Marginals) -> SeeingRows:
        index = np.flatnonzero(profile.counts)
        return cls(index, profile.first[index], profile.last[index])


# Documents of the keys, int64 (S_k,), for a query offset; None where none is possible.
Labels = Callable[["SeeingRows", int], "NDArray[np.int64] | None"]


def hull_labels(profile: Marginals) -> Labels:
    """Documents that are runs of keys: as short as the rows, with their own positions, allow."""
    k_len = len(profile.used)

    def labels(rows: SeeingRows, offset: int) -> NDArray[np.int64] | None:
        position = rows.index + offset
        if position[0] < 0 or position[-1] >= k_len:
            return None
        low, high = np.minimum(rows.first, position), np.maximum(rows.last, position)
        crossed = coverage(low, high, k_len)  # by how many rows, between each key and the next
        return np.concatenate([[0], np.cumsum(crossed[:-1] == 0)])

    return labels


def connected_labels(view: HeadMask) -> Labels | None:
    """Documents of any shape: keys that some query sees together; None where all are connected."""
    key_labels = (
        _connected_by_structure(view.intervals) if view.intervals else _connected_by_cells(view)
    )
    if key_labels is None:
        return None

    def labels(rows: SeeingRows, offset: int) -> NDArray[np.int64] | None:
        position = rows.index + offset
        if position[0] < 0 or position[-1] >= view.k_len:
            return None
        pairs = np.stack([key_labels[position], key_labels[rows.first]])
        pairs = np.unique(pairs[:, pairs[0] != pairs[1]], axis=1)
        root = np.arange(view.k_len)
        for one, other in pairs.T.tolist():
            _join(root, one, other)
        while (root != root[root]).any():
            root = root[root]
        found: NDArray[np.int64] = root[key_labels]
        return found

    return labels


def _connected_by_structure(structure: IntervalMask) -> NDArray[np.int64]:
    ordered = SortedIntervals(structure)
    some = ordered.high > ordered.low
    crossed = coverage(ordered.low[some], ordered.high[some] - 1, len(ordered.keys))
    labels = np.arange(structure.k_len)
    if len(ordered.keys):
        run = np.concatenate([[0], np.cumsum(crossed[:-1] == 0)])
        starts = np.flatnonzero(np.diff(run, prepend=-1))
        labels[ordered.keys] = ordered.keys[starts][run]
    return labels


def _connected_by_cells(view: HeadMask) -> NDArray[np.int64] | None:
    labels = np.arange(view.k_len)
    apart = int((view.marginals.used > 0).sum())
    for row in _rows_fullest_first(view):
        seen = labels[row]
        if len(seen) and (seen != seen[0]).any():
            joined = np.zeros(view.k_len, np.bool_)
            joined[seen] = True
            labels = np.where(joined[labels], joined.argmax(), labels)
            apart -= int(joined.sum()) - 1
            if apart == 1:
                return None
    return labels


def _rows_fullest_first(view: HeadMask) -> Iterator[NDArray[np.bool_]]:
    """Every row, bool (S_k,), after some that connect much at once: most masks end with those."""
    counts = view.marginals.counts
    peaks = np.flatnonzero(counts > np.append(counts[1:], 0))
    for row in peaks[np.argsort(-counts[peaks], kind="stable")][:_FULL_ROWS].tolist():
        yield view.cells(slice(row, row + 1))[0]
    for _, block in view.blocks():
        yield from block


def _root(root: NDArray[np.int64], each: int) -> int:
    while root[each] != each:
        root[each] = root[root[each]]
        each = int(root[each])
    return each


def _join(root: NDArray[np.int64], one: int, other: int) -> None:
    one, other = _root(root, one), _root(root, other)
    root[max(one, other)] = min(one, other)


def numbered_variants(
    ids: NDArray[np.int64], profile: Marginals, rows: SeeingRows, offset: int
) -> Iterator[NDArray[np.int64]]:
    """The documents numbered from 0, with the keys that show no document put into one in turn.

    Such keys, which no query sees and at which no seeing query stands, go with the key before
    them, or with each other, or stay alone: the words are fewest in this order.
    """
    free = profile.used == 0
    free[rows.index + offset] = False
    place = np.arange(len(ids))
    if free.any() and not free.all():
        shown = np.where(free, -1, place)
        before = np.maximum.accumulate(shown)
        yield _numbered(ids[np.where(before < 0, int(shown.argmax()), before)])
        starts = free & ~np.concatenate([[False], free[:-1]])
        run = np.maximum.accumulate(np.where(starts, place, -1))
        yield _numbered(np.where(free, len(ids) + run, ids))
    yield _numbered(ids)


def _numbered(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse].astype(np.int64)
