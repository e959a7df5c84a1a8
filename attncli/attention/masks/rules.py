"""The rules that a mask is made of: each says which keys a query may see, all together by AND.

A rule says it cell by cell, for NumPy and torch alike. One that leaves each query an interval of
keys, of some keys or of the keys of its own document, may say that as well (`intervals`), and costs
no cells then. One that does not is slow, never wrong.

Every array of a rule has a leading batch axis of length B, or 1 where all batches are alike; one
of rank 4 has a head axis after it, of length H or 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np

from attncli.attention.masks.interval_mask import IntervalMask

Index = Any  # a slice or an integer array, of NumPy or torch like the mask itself
Array = Any  # NumPy on the host, torch on a device


@dataclass(frozen=True, slots=True, eq=False)
class CellBlock:
    """Which cells a rule is asked for.

    Attributes:
        batch, head: slices of their axes.
        rows, cols: indices of the queries and keys.
        queries, keys: rows and cols as integer arrays, (rows,) and (cols,).
    """

    batch: slice
    head: slice
    rows: Index
    cols: slice
    queries: Array
    keys: Array

    def of_batch(self, array: Array) -> Array:
        """The chosen batches of an array (B | 1, …)."""
        return array if len(array) == 1 else array[self.batch]

    def of_file(self, array: Array) -> Array:
        """The block of an array of rank 4 in which any axis may be 1 long."""
        wanted = (self.batch, self.head, self.rows, self.cols)
        for axis, (index, length) in enumerate(zip(wanted, array.shape, strict=True)):
            if length > 1 and not (isinstance(index, slice) and index == slice(None)):
                array = array[(slice(None),) * axis + (index,)]
        return array

    def of_queries(self, array: Array) -> Array:
        """The chosen batches and queries of an array (B | 1, S_q), as (b | 1, 1, rows, 1)."""
        return self.of_batch(array)[:, None, self.rows, None]


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """One rule of visibility; a new kind needs `cells` alone."""

    def cells(self, block: CellBlock) -> Array:
        """Bool, broadcastable to (b, h, rows, cols): True where the query may see the key."""
        raise NotImplementedError

    def intervals(self, batch: int, head: int, rows: int, k_len: int) -> IntervalMask | None:
        """The cells of the first `rows` queries as intervals; None where they are more than that.

        Asked on the host alone.
        """
        del batch, head, rows, k_len
        return None

    def moved(self, convert: Callable[[Array], Array]) -> Self:
        """The same with its arrays somewhere else."""
        return replace(self, **{name: convert(array) for name, array in self._arrays()})

    def differs(self, axis: int) -> bool:
        """Whether it is given apart for each batch (0) or head (1)."""
        given = [array for _, array in self._arrays() if axis == 0 or len(array.shape) == 4]
        return any(array.shape[axis] > 1 for array in given)

    def _arrays(self) -> Iterator[tuple[str, Array]]:
        for field in fields(self):
            value = getattr(self, field.name)
            if hasattr(value, "shape"):
                yield field.name, value


@dataclass(frozen=True, slots=True, eq=False)
class KeyInterval(Rule):
    """Causality, windows and prefix: each query sees one interval of keys, or the first ones too.

    Attributes:
        first: int64 (B | 1, S_q), first key of each query's interval, 0 to S_k.
        stop: int64 (B | 1, S_q), one past its last key; first ≤ stop ≤ S_k.
        kept: int64 (B | 1, S_q), number of first keys that are seen although they come before
            `first`; None for none.
    """

    first: Array
    stop: Array
    kept: Array | None = None

    def cells(self, block: CellBlock) -> Array:
        """Compare keys with both ends."""
        ends = (block.of_queries(each) for each in (self.first, self.stop))
        first, stop = (_like(each, block.keys) for each in ends)  # (b | 1, 1, rows, 1)
        seen = block.keys >= first
        if self.kept is not None:
            seen |= block.keys < _like(block.of_queries(self.kept), block.keys)
        seen &= block.keys < stop
        return seen

    def intervals(self, batch: int, head: int, rows: int, k_len: int) -> IntervalMask:
        """The intervals themselves."""
        first, stop = (_of(each, batch)[:rows] for each in (self.first, self.stop))
        kept = None if self.kept is None else _of(self.kept, batch)[:rows]
        return IntervalMask(k_len, first, stop, kept=kept)


@dataclass(frozen=True, slots=True, eq=False)
class Dilation(Rule):
    """Only every so many-th key, counted from the query.

    Attributes:
        positions: int64 (B | 1, S_q), where each query stands on the key axis.
        step: from one visible key to the next, ≥ 1.
    """

    positions: Array
    step: int

    def cells(self, block: CellBlock) -> Array:
        """Where a key is a multiple of the step away."""
        return (block.of_queries(self.positions) - block.keys) % self.step == 0

    def intervals(self, batch: int, head: int, rows: int, k_len: int) -> IntervalMask:
        """As if the keys of one remainder were a document."""
        remainders = _of(self.positions, batch)[:rows] % self.step
        return IntervalMask.of_documents(np.arange(k_len) % self.step, remainders)


@dataclass(frozen=True, slots=True, eq=False)
class KeyPadding(Rule):
    """Padding among the keys, at their end or anywhere.

    Attributes:
        keep: bool (B | 1, S_k), True = real key.
    """

    keep: Array

    def cells(self, block: CellBlock) -> Array:
        """The real keys."""
        return block.of_batch(self.keep)[:, None, None, block.cols]

    def intervals(self, batch: int, head: int, rows: int, k_len: int) -> IntervalMask:
        """All real keys for every query."""
        return IntervalMask.of_keys(rows, _of(self.keep, batch))


@dataclass(frozen=True, slots=True, eq=False)
class Segments(Rule):
    """Packed documents: a query sees the keys of its own.

    Attributes:
        keys: int64 (B | 1, S_k), document of each key, from 0.
        queries: int64 (B | 1, S_q), document of each query, −1 for none.
    """

    keys: Array
    queries: Array

    def cells(self, block: CellBlock) -> Array:
        """Compare documents."""
        return (
            block.of_queries(self.queries) == block.of_batch(self.keys)[:, None, None, block.cols]
        )

    def intervals(self, batch: int, head: int, rows: int, k_len: int) -> IntervalMask:
        """Intervals of the keys sorted by document."""
        return IntervalMask.of_documents(_of(self.keys, batch), _of(self.queries, batch)[:rows])


@dataclass(frozen=True, slots=True, eq=False)
class KeptKeys(Rule):
    """What an eviction policy leaves in a cache: chosen keys of each head, and the latest ones.

    Attributes:
        chosen: bool (B | 1, H | 1, 1, S_k), the keys that stay for all queries.
        latest: int64 (B | 1, S_q), the first of the keys that each query still has; S_k for none.
    """

    chosen: Array
    latest: Array

    def cells(self, block: CellBlock) -> Array:
        """The chosen keys, and those that are late enough."""
        return block.of_file(self.chosen) | (block.keys >= block.of_queries(self.latest))


@dataclass(frozen=True, slots=True, eq=False)
class BooleanMask(Rule):
    """A mask file of truth values.

    Attributes:
        values: bool or 0/1 integer (B | 1, H | 1, S_q | 1, S_k | 1).
        shown: what a cell holds where the query may attend: True or False.
    """

    values: Array
    shown: bool

    def cells(self, block: CellBlock) -> Array:
        """Its values, or their opposite."""
        cells = block.of_file(self.values)
        if str(cells.dtype).endswith("bool"):
            return cells if self.shown else ~cells
        return cells == self.shown

    def intervals(self, batch: int, head: int, rows: int, k_len: int) -> IntervalMask | None:
        """Where it is alike for all queries or for all keys."""
        return _alike(self, batch, head, rows, k_len)


@dataclass(frozen=True, slots=True, eq=False)
class AdditiveMask(Rule):
    """A mask file of numbers to add to the logits.

    Attributes:
        values: float (B | 1, H | 1, S_q | 1, S_k | 1).
        lowest: the least of them; +inf of none.
        hidden_below: values at or below it hide the key; −inf as it stands. Where rows differ in
            it, (B | 1, H | 1, S_q, 1) in the dtype of the values.
        ranges: (highest, lowest) of the finite ones, in ranges with gaps between, from the top.
        spared: the highest number of rows that see none but such as hide elsewhere; None for no
            such rows.
    """

    values: Array
    lowest: float
    hidden_below: float | Array = -np.inf
    ranges: tuple[tuple[float, float], ...] = ()
    spared: float | None = None

    def cells(self, block: CellBlock) -> Array:
        """Where what is added is more than "hidden"."""
        limit = self.hidden_below
        return block.of_file(self.values) > (
            limit if isinstance(limit, float) else block.of_file(limit)
        )

    def intervals(self, batch: int, head: int, rows: int, k_len: int) -> IntervalMask | None:
        """Where it hides nothing, or is alike for all queries or for all keys."""
        if not isinstance(self.hidden_below, float):
            return self._two_kinds(batch, head, rows, k_len)
        if self.lowest > self.hidden_below:
            return IntervalMask.full(rows, k_len)
        return _alike(self, batch, head, rows, k_len)

    def _two_kinds(self, batch: int, head: int, rows: int, k_len: int) -> IntervalMask | None:
        """One row of numbers, which hides keys from the queries that see others.

        A query from which nothing is hidden sees by the other rules nothing but those keys: to it
        they are a document of their own.
        """
        limits = _of(_of(self.hidden_below, batch), head)[:rows, 0]
        limit = limits.max(initial=-np.inf)
        spared = np.isneginf(limits)
        if self.values.shape[2] > 1 or not (spared | (limits == limit)).all():
            return None
        values = np.broadcast_to(_of(_of(self.values, batch), head)[0], k_len)
        if spared.all():
            return IntervalMask.of_keys(rows, values > -np.inf)
        of_documents = IntervalMask.of_documents(
            (values <= limit).astype(np.int64), spared.astype(np.int64)
        )
        return replace(of_documents, keep=values > -np.inf)


def _alike(
    rule: BooleanMask | AdditiveMask, batch: int, head: int, rows: int, k_len: int
) -> IntervalMask | None:
    """A file without an axis for queries or for keys: it hides keys, or else queries."""
    if 1 not in rule.values.shape[2:]:
        return None
    one, every, unused = slice(batch, batch + 1), slice(None), np.empty(0)
    block = CellBlock(one, slice(head, head + 1), every, every, unused, unused)
    cells = rule.cells(block)[0, 0]
    if cells.shape[0] == 1:
        return IntervalMask.of_keys(rows, np.broadcast_to(cells[0], k_len))
    stop = np.where(cells[:rows, 0], k_len, 0)
    return IntervalMask(k_len, np.zeros(rows, np.int64), stop)


def _of(array: Array, index: int) -> Any:
    """One entry of an axis that is 1 long where all are alike."""
    return array[index if len(array) > 1 else 0]


def _like(array: Array, other: Array) -> Array:
    """The array in the dtype of the other, of the same library."""
    if isinstance(array, np.ndarray):
        return array.astype(other.dtype, copy=False)
    return array.to(other.dtype)
