"""One batch and head of a mask as an interval of keys per query, never as a matrix.

With padding files and packed documents a query still sees an interval: of the real keys of its own
document, in the order of the axis. So the keys are sorted by document, and two binary searches per
query answer what would otherwise take a row of cells.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class IntervalMask:
    """Rows of cells given by what they have in common.

    Query i sees key j iff first_i ≤ j or j < kept_i, and j < stop_i, the key is real, and both
    have the same document.

    Attributes:
        k_len: S_k.
        first: int64 (S_q,), 0 to S_k.
        stop: int64 (S_q,), 0 to S_k.
        keep: bool (S_k,), True = real key; None for all real.
        key_ids: int64 (S_k,), document of each key, at least 0; None for one document.
        query_ids: int64 (S_q,), document of each query, −1 for none; None beside `key_ids` None.
        kept: int64 (S_q,), number of first keys that `first` does not hide; None for 0.
    """

    k_len: int
    first: NDArray[np.int64]
    stop: NDArray[np.int64]
    keep: NDArray[np.bool_] | None = None
    key_ids: NDArray[np.int64] | None = None
    query_ids: NDArray[np.int64] | None = None
    kept: NDArray[np.int64] | None = None

    @classmethod
    def full(cls, rows: int, k_len: int) -> IntervalMask:
        """Every query sees every key."""
        return cls(k_len, np.zeros(rows, np.int64), np.full(rows, k_len))

    @classmethod
    def of_keys(cls, rows: int, keep: NDArray[np.bool_]) -> IntervalMask:
        """Every query sees the keys that are True, bool (S_k,)."""
        return replace(cls.full(rows, len(keep)), keep=keep)

    @classmethod
    def of_documents(cls, keys: NDArray[np.int64], queries: NDArray[np.int64]) -> IntervalMask:
        """A query sees the keys of its document: int64 (S_k,) from 0, int64 (S_q,), −1 for none."""
        return replace(cls.full(len(queries), len(keys)), key_ids=keys, query_ids=queries)

    @property
    def rows(self) -> int:
        """Number of queries."""
        return len(self.first)

    def queries(self, rows: int) -> IntervalMask:
        """The same for the first queries alone."""
        queries = None if self.query_ids is None else self.query_ids[:rows]
        return replace(self, first=self.first[:rows], stop=self.stop[:rows], query_ids=queries)

    @property
    def parts(self) -> tuple[IntervalMask, ...]:
        """The same cells as structures of which none keeps any keys; no cell is in two."""
        if self.kept is None:
            return (self,)
        before = np.minimum(self.kept, np.minimum(self.first, self.stop))
        kept = replace(self, first=np.zeros_like(before), stop=before, kept=None)
        return kept, replace(self, kept=None)

    def marginals(self) -> Marginals:
        """Counts, first and last key of each row, and queries of each key."""
        found = [SortedIntervals(part).marginals() for part in self.parts]
        if len(found) == 1:
            return found[0]
        a, b = found
        return Marginals(
            counts=a.counts + b.counts,
            first=np.minimum(a.first, b.first),
            last=np.maximum(a.last, b.last),
            used=a.used + b.used,
        )

    def hull(self) -> Hull:
        """The keys from each query's first to its last, in the order of the axis."""
        found = self.marginals()
        first, stop = np.minimum(found.first, found.last + 1), found.last + 1
        if self.kept is not None:
            return Hull(first, stop, False, self.kept, self.first)
        return Hull(first, stop, bool((stop - first == found.counts).all()))

    def cells(self, rows: slice) -> NDArray[np.bool_]:
        """Bool (rows, S_k): True where the query sees the key."""
        # Half the width is compared twice as fast.
        width: type[np.int32 | np.int64] = np.int32 if self.k_len < 2**31 else np.int64
        keys: NDArray[Any] = np.arange(self.k_len, dtype=width)
        first: NDArray[Any] = self.first[rows, None].astype(width)  # (rows, 1)
        stop: NDArray[Any] = self.stop[rows, None].astype(width)
        seen: NDArray[np.bool_] = keys >= first  # (rows, S_k)
        if self.kept is not None:
            seen |= keys < self.kept[rows, None].astype(width)
        seen &= keys < stop
        if self.keep is not None:
            seen &= self.keep
        if self.key_ids is not None and self.query_ids is not None:
            seen &= self.query_ids[rows, None] == self.key_ids
        return seen


@dataclass(frozen=True, slots=True, eq=False)
class Marginals:
    """What the rows and columns of a mask show without a look at its cells.

    Attributes:
        counts: int64 (S_q,), keys that each query sees.
        first: int64 (S_q,), the first of them; S_k where there are none.
        last: int64 (S_q,), the last of them; −1 where there are none.
        used: int64 (S_k,), queries that see each key.
    """

    counts: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    used: NDArray[np.int64]

    @property
    def kept(self) -> int:
        """Number of visible cells."""
        return int(self.counts.sum())

    @property
    def is_interval_mask(self) -> bool:
        """Whether each row holds every used key between its first and last: it is known exactly."""
        before = np.concatenate([[0], np.cumsum(self.used > 0)])
        hull = before[self.last + 1] - before[np.minimum(self.first, self.last + 1)]
        return bool((hull == self.counts).all())

    def interval_mask(self) -> IntervalMask:
        """The rows as intervals of the used keys; exact where `is_interval_mask`."""
        first = np.minimum(self.first, self.last + 1)
        return IntervalMask(len(self.used), first, self.last + 1, self.used > 0)


@dataclass(frozen=True, slots=True, eq=False)
class Hull:
    """An interval of keys per query that holds all keys it sees.

    Attributes:
        first: int64 (S_q,), the first of them; `stop` where there are none.
        stop: int64 (S_q,), one past the last.
        exact: whether each query sees every key of its interval.
        kept: int64 (S_q,), where a gap begins in which the query sees no key; None for no gap.
        resumed: int64 (S_q,), where it ends; None likewise.
    """

    first: NDArray[np.int64]
    stop: NDArray[np.int64]
    exact: bool
    kept: NDArray[np.int64] | None = None
    resumed: NDArray[np.int64] | None = None

    def queries(self, chosen: NDArray[np.int64] | slice) -> Hull:
        """The same for some queries alone."""
        first, stop = self.first[chosen], self.stop[chosen]
        if self.kept is None or self.resumed is None:
            return replace(self, first=first, stop=stop)
        return Hull(first, stop, self.exact, self.kept[chosen], self.resumed[chosen])

    def of_keys(self, start: int, stop: int) -> Hull:
        """The same for the keys [start, stop) alone, counted from there."""
        ends = (self.first, self.stop, self.kept, self.resumed)
        first, last, kept, resumed = (
            None if end is None else end.clip(start, stop) - start for end in ends
        )
        assert first is not None
        assert last is not None
        return Hull(np.minimum(first, last), last, self.exact, kept, resumed)

    def spans(self) -> list[tuple[int, int]]:
        """Intervals of keys, in their order, outside of which none of the queries sees any."""
        some = self.stop > self.first
        if not some.any():
            return []
        low, high = int(self.first[some].min()), int(self.stop[some].max())
        if self.kept is None or self.resumed is None:
            return [(low, high)]
        kept, resumed = int(self.kept[some].max()), int(self.resumed[some].min())
        if resumed <= kept:
            return [(low, high)]
        return [(low, min(kept, high)), (max(low, resumed), high)]


class SortedIntervals:
    """The real keys of a structure sorted by document, each query an interval [low, high) of them.

    Attributes:
        of: what was sorted, with `kept` None.
        keys: int64 (real keys,), indices of the keys, sorted by document and then by position.
        low, high: int64 (S_q,), the interval of each query; equal where it sees no key.
    """

    def __init__(self, of: IntervalMask) -> None:
        self.of = of
        self.keys = np.arange(of.k_len) if of.keep is None else np.flatnonzero(of.keep)
        ids, queries = of.key_ids, of.query_ids
        self._codes: NDArray[np.int64] | None = None
        if ids is not None and (ids[1:] < ids[:-1]).any():
            codes = ids[self.keys] * (of.k_len + 1) + self.keys
            order = np.argsort(codes, kind="stable")
            self.keys, self._codes = self.keys[order], codes[order]
        elif ids is not None and queries is not None:  # in their order already: no need to search
            most = 1 + max(int(ids.max(initial=0)), int(queries.max(initial=0)))
            edges = np.cumsum(np.bincount(ids[self.keys] + 1, minlength=most + 1))
            self._document = edges[queries], edges[queries + 1]
        if of.keep is not None:
            self._before = np.concatenate([[0], np.cumsum(of.keep, dtype=np.int64)])
        self.low = self.below(of.first)
        self.high = np.maximum(self.low, self.below(of.stop))
        if of.query_ids is not None:  # a query without a document sees nothing
            self.high = np.where(of.query_ids < 0, self.low, self.high)

    @property
    def in_order(self) -> bool:
        """Whether place i is key i, for all keys."""
        return self._codes is None and self.of.keep is None

    def below(self, limit: NDArray[np.int64]) -> NDArray[np.int64]:
        """Int64 (S_q,): where in the order the keys from `limit` of each query's document start.

        Args:
            limit: int64 (S_q,), 0 to S_k, one for each query.
        """
        ids = self.of.query_ids
        if self._codes is not None and ids is not None:
            return np.searchsorted(self._codes, ids * (self.of.k_len + 1) + limit)
        found: NDArray[np.int64] = limit if self.of.keep is None else self._before[limit]
        return found if ids is None else np.clip(found, *self._document)

    def marginals(self) -> Marginals:
        """Counts, first and last key of each row, and queries of each key."""
        counts, k_len = self.high - self.low, self.of.k_len
        some, keys = counts > 0, np.append(self.keys, k_len)  # an empty row may start at the end
        first = np.where(some, keys[self.low], k_len)
        last = np.where(some, keys[self.high - 1], -1)
        used = np.zeros(k_len, np.int64)
        used[self.keys] = coverage(self.low, self.high, len(self.keys))
        return Marginals(counts, first, last, used)


def coverage(low: NDArray[np.int64], high: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Int64 (length,): how many of the intervals [low, high) each place lies in."""
    change = np.bincount(low, minlength=length + 1) - np.bincount(high, minlength=length + 1)
    total: NDArray[np.int64] = np.cumsum(change)[:length]
    return total


def intersection(a: IntervalMask, b: IntervalMask) -> IntervalMask:
    """The cells that two structures of the same sizes both have.

    If one keeps its first keys, the other has to begin with key 0 for every query.
    """
    first, stop = np.maximum(a.first, b.first), np.minimum(a.stop, b.stop)
    keep = a.keep if b.keep is None else b.keep if a.keep is None else a.keep & b.keep
    keys, queries = a.key_ids, a.query_ids
    if keys is None or queries is None:
        keys, queries = b.key_ids, b.query_ids
    elif b.key_ids is not None and b.query_ids is not None:  # both divisions count
        width = 1 + max(int(ids.max(initial=0)) for ids in (b.key_ids, b.query_ids))
        pairs, keys = np.unique(keys * width + b.key_ids, return_inverse=True)
        wanted = np.where((queries < 0) | (b.query_ids < 0), -1, queries * width + b.query_ids)
        place = np.minimum(np.searchsorted(pairs, wanted), max(0, len(pairs) - 1))
        queries = np.where(np.isin(wanted, pairs), place, -1)
    kept = a.kept if b.kept is None else b.kept
    return IntervalMask(a.k_len, first, stop, keep, keys, queries, kept)


def row_differences(a: IntervalMask, b: IntervalMask) -> NDArray[np.int64]:
    """Int64 (S_q,): in how many cells each row of two structures of the same sizes differs."""
    both = [intersection(one, other) for one in a.parts for other in b.parts]
    difference = np.zeros(a.rows, np.int64)
    for times, parts in ((1, a.parts), (1, b.parts), (-2, both)):
        for found in map(SortedIntervals, parts):
            difference += times * (found.high - found.low)
    return difference
