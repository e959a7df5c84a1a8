"""Which key each query may see, and what is added to its logit.

A mask is a tuple of rules (`attncli.attention.masks.rules`), which nobody but the mask reads.
`Mask` answers for blocks of any batches and heads, `HeadMask` for one of each, cell by cell or, as
long as every rule allows it, by an interval of keys per query.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncli.attention.masks.interval_mask import (
    Hull,
    IntervalMask,
    Marginals,
    SortedIntervals,
    intersection,
)
from attncli.attention.masks.rules import (
    AdditiveMask,
    Array,
    BooleanMask,
    CellBlock,
    Index,
    KeyPadding,
    Rule,
)
from attncli.attention.sizes import Chosen, Sizes
from attncli.errors import UsageError

BLOCK_CELLS = 1 << 22

# Rows whose sums by column still fit into one byte.
_BYTE_ROWS = 255

_ALL = slice(None)


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """Visibility and additive bias of every cell, computed block by block.

    Arrays have a leading batch axis of length B, or 1 where all batches are alike. They are NumPy
    arrays as built and may be moved to torch tensors; the methods work on both.

    Attributes:
        sizes: B, H, S_q, S_k.
        rules: a query may see a key if all of them say so; nobody but the mask reads them.
        shift: int64 (B | 1, 1 | S_q), position of query i on the key axis, less i; None where
            positions are not defined.
        query_lengths: int64 (B | 1,), number of real queries.
        slopes: float64 (H,), mₕ of ALiBi; None for none.
        warnings: what the reader of the results should know.
        chosen: the batches and the heads to look at, by their indices; None for all of them.
        convert: makes an array of the mask's library, on its device, of a NumPy one.
    """

    sizes: Sizes
    rules: tuple[Rule, ...]
    shift: Array | None
    query_lengths: Array
    slopes: Array | None = None
    warnings: tuple[str, ...] = ()
    chosen: Chosen = (None, None)
    convert: Callable[[Any], Array] = np.asarray
    # Where the keys of `sizes` start, and how many there are in all, where they are some of them;
    # keys and positions are counted from there.
    first_key: int = 0
    all_keys: int | None = None
    _hulls: dict[tuple[int, ...], Hull] = field(default_factory=dict, init=False, repr=False)

    def visible(self, batch: slice, head: slice, rows: Index, cols: slice) -> Array:
        """Bool (b | 1, h | 1, rows, cols): True where the query may see the key."""
        block = self.block(batch, head, rows, cols)
        shape = (1, 1, len(block.queries), len(block.keys))
        if not self.rules:
            return self.convert(np.ones(shape, np.bool_))
        found = [rule.cells(block) for rule in self.rules]
        seen = reduce(lambda one, other: one & other, found)
        shape = (*seen.shape[:2], *shape[2:])
        if seen.shape == shape:
            return seen
        on_host = isinstance(seen, np.ndarray)
        return np.broadcast_to(seen, shape).copy() if on_host else seen.expand(shape)

    def bias(self, batch: slice, head: slice, rows: Index, cols: slice) -> Array | None:
        """Float (b | 1, h | 1, rows, cols) to add to visible logits; None where there is none."""
        bias = self.additive(batch, head, rows, cols)
        if self.slopes is None:
            return bias
        alibi = -self.slopes[None, head, None, None] * self.distance(batch, rows, cols)
        return alibi if bias is None else alibi + bias

    def additive(self, batch: slice, head: slice, rows: Index, cols: slice) -> Array | None:
        """Float (b | 1, h | 1, rows | 1, cols | 1) of an additive mask; None where there is none.

        Unlike `bias` it leaves ALiBi out, for those who have a cheaper way to it.
        """
        added = self.added
        return None if added is None else self.block(batch, head, rows, cols).of_file(added)

    def distance(self, batch: slice, rows: Index, cols: slice) -> Array:
        """Int64 (b | 1, 1, rows, cols): |p − j|."""
        keys = self.block(batch, _ALL, rows, cols).keys - self.first_key
        return abs(self.positions(batch, rows)[:, None, :, None] - keys)

    def positions(self, batch: slice, rows: Index) -> Array:
        """Int64 (b | 1, rows): p, where each query stands on the key axis."""
        if self.shift is None:
            raise UsageError("«query_offset»", "expected a value, got none")
        block = self.block(batch, _ALL, rows, _ALL)
        shift = block.of_batch(self.shift)
        shift = shift if shift.shape[1] == 1 else shift[:, rows]
        return block.queries + (shift - self.first_key if self.first_key else shift)

    @property
    def offset(self) -> Array | None:
        """Int64 (B | 1,), position of query 0; None where no number says where the others are."""
        alike = self.shift is not None and self.shift.shape[1] == 1
        return self.shift[:, 0] if alike and self.shift is not None else None

    def real_queries(self, batch: int) -> int:
        """Number of queries of this batch that are not padding."""
        lengths = self.query_lengths
        return int(lengths[batch if len(lengths) > 1 else 0])

    def real_keys(self, batch: int) -> NDArray[np.bool_]:
        """Bool (S_k,), False for the keys of this batch that are padding."""
        rules = [rule for rule in self.on_host().rules if isinstance(rule, KeyPadding)]
        real = np.ones(self.sizes.k_len, np.bool_)
        return reduce(np.logical_and, [rule.keep[batch % len(rule.keep)] for rule in rules], real)

    def head(self, batch: int, head: int) -> HeadMask:
        """One batch and head of it."""
        return HeadMask(self, batch, head)

    def hull(self, batch: int, heads: range | None = None) -> Hull:
        """Intervals that hold all keys that each real query of a batch sees in any of the heads.

        These are neighbours, None for all; what is alike for batches or heads is worked out once.
        """
        heads = range(self.sizes.heads) if heads is None else heads
        of_heads = (heads.start, heads.stop) if self.differs(1) else ()
        key = (batch if self.differs(0) else 0, *of_heads)
        if key not in self._hulls and self.all_keys is not None:
            whole = replace(self.sizes, k_len=self.all_keys)
            hull = replace(self, sizes=whole, first_key=0, all_keys=None).hull(batch, heads)
            self._hulls[key] = hull.of_keys(self.first_key, self.first_key + self.sizes.k_len)
        elif key not in self._hulls:
            apart, mask = len(heads) > 1 and self.differs(1), self.on_host()
            rules = tuple(rule for rule in mask.rules if not (apart and rule.differs(1)))
            found, complete = replace(mask, rules=rules).head(batch, heads.start).by_rules
            hull = found.hull()
            self._hulls[key] = replace(hull, exact=hull.exact and complete and not apart)
        return self._hulls[key]

    @property
    def added(self) -> Array | None:
        """What a mask file adds, float (B | 1, H | 1, S_q | 1, S_k | 1); None for no such file."""
        return self.file.values if isinstance(self.file, AdditiveMask) else None

    @property
    def file(self) -> BooleanMask | AdditiveMask | None:
        """The rule of the mask file; None where there is none."""
        files = [rule for rule in self.rules if isinstance(rule, BooleanMask | AdditiveMask)]
        return files[0] if files else None

    def with_file(self, file: BooleanMask | AdditiveMask | None) -> Mask:
        """The same with another mask file, or without one."""
        kept = [rule for rule in self.rules if not isinstance(rule, BooleanMask | AdditiveMask)]
        return replace(self, rules=(*kept, file) if file is not None else tuple(kept))

    def hiding_below(self, limit: float | Array) -> Mask:
        """The same, in which added values at or below a limit, of all or each row, are hidden."""
        if not isinstance(self.file, AdditiveMask):
            return self
        return self.with_file(replace(self.file, hidden_below=limit))

    @property
    def spared(self) -> float | None:
        """Added values up to it hide keys from some rows, and are all that others see."""
        return self.file.spared if isinstance(self.file, AdditiveMask) else None

    def of_keys(self, start: int, stop: int) -> Mask:
        """The same of the keys [start, stop) alone, with positions counted from there."""
        sizes = replace(self.sizes, k_len=stop - start)
        return replace(self, sizes=sizes, first_key=start, all_keys=self.sizes.k_len)

    def also(self, rule: Rule) -> Mask:
        """The same with one rule more."""
        return replace(self, rules=(*self.rules, rule))

    @property
    def has_bias(self) -> bool:
        """Whether anything is added to the logits."""
        return self.slopes is not None or self.added is not None

    @property
    def hides(self) -> bool:
        """Whether there is any rule of what is visible; padded queries are none."""
        return bool(self.rules)

    def differs(self, axis: int) -> bool:
        """Whether any rule is given apart for each batch (0) or head (1)."""
        of_batch = [self.query_lengths] if self.shift is None else [self.shift, self.query_lengths]
        apart = axis == 0 and any(len(array) > 1 for array in of_batch)
        return apart or any(rule.differs(axis) for rule in self.rules)

    def indices(self, axis: int) -> Sequence[int]:
        """The batches (0) or heads (1) to look at."""
        length = self.sizes.heads if axis else self.sizes.batch
        chosen = self.chosen[axis]
        return range(length) if chosen is None else chosen

    @property
    def first(self) -> tuple[int, int]:
        """The first batch and head to look at, be there any or not."""
        batches, heads = self.indices(0), self.indices(1)
        return (batches[0] if batches else 0), (heads[0] if heads else 0)

    def moved(self, convert: Callable[[Any], Array]) -> Mask:
        """The same with its arrays somewhere else."""
        return replace(
            self,
            rules=tuple(rule.moved(convert) for rule in self.rules),
            shift=None if self.shift is None else convert(self.shift),
            query_lengths=convert(self.query_lengths),
            slopes=None if self.slopes is None else convert(self.slopes),
            convert=convert,
        )

    def on_host(self) -> Mask:
        """The same with NumPy arrays."""
        if isinstance(self.query_lengths, np.ndarray):
            return self
        return replace(self.moved(lambda tensor: tensor.cpu().numpy()), convert=np.asarray)

    def block(self, batch: slice, head: slice, rows: Index, cols: slice) -> CellBlock:
        """The cells as its rules are asked for them."""
        # Half the width is compared twice as fast.
        first, length = self.first_key, self.sizes.k_len
        narrow: Any = np.int32 if first + length < 2**31 else np.int64
        if self.all_keys is not None:
            low, high, _ = cols.indices(length)
            cols, length = slice(low + first, high + first), self.all_keys
        return CellBlock(
            batch=batch,
            head=head,
            rows=rows,
            cols=cols,
            queries=self._indices(rows, self.sizes.q_len) if isinstance(rows, slice) else rows,
            keys=self._indices(cols, length, narrow),
        )

    def _indices(self, index: slice, length: int, dtype: Any = np.int64) -> Array:
        start, stop, _ = index.indices(length)
        return self.convert(np.arange(start, stop, dtype=dtype))


@dataclass(frozen=True, eq=False)
class HeadMask:
    """The real queries of one batch and head of a mask.

    Attributes:
        mask: where the cells come from.
        batch, head: which of its batches and heads.
        inverted: whether to see what the mask hides in the place of what it shows.
    """

    mask: Mask
    batch: int = 0
    head: int = 0
    inverted: bool = False

    @property
    def rows(self) -> int:
        """Number of queries that are not padding."""
        return self.mask.real_queries(self.batch)

    @property
    def k_len(self) -> int:
        """S_k."""
        return self.mask.sizes.k_len

    @property
    def size(self) -> int:
        """Number of cells of real queries."""
        return self.rows * self.k_len

    def cells(self, rows: Index, cols: slice = _ALL) -> Any:
        """Bool (rows, cols): True where the query sees the key; not to be written to."""
        seen = self.mask.visible(*self._place, rows, cols)[0, 0]
        return ~seen if self.inverted else seen

    def bias(self, rows: Index, cols: slice = _ALL) -> Any:
        """Float (rows, cols) to add to visible logits; None where there is none."""
        bias = self.mask.bias(*self._place, rows, cols)
        return None if bias is None else bias[0, 0]

    def additive(self, rows: Index, cols: slice = _ALL) -> Any:
        """Float (rows | 1, cols | 1) of an additive mask alone; None where there is none."""
        added = self.mask.additive(*self._place, rows, cols)
        return None if added is None else added[0, 0]

    @cached_property
    def by_rules(self) -> tuple[IntervalMask, bool]:
        """The cells that the rules with intervals leave, and whether there are no others."""
        mask = self.mask.on_host()
        where = self.batch, self.head, self.rows, self.k_len
        found = [rule.intervals(*where) for rule in mask.rules]
        known = [each for each in found if each is not None]
        whole = IntervalMask.full(self.rows, self.k_len)
        # Full, or the first of them, is what the others narrow.
        return reduce(intersection, known) if known else whole, len(known) == len(found)

    @cached_property
    def interval_mask(self) -> IntervalMask | None:
        """What the rows have in common by the rules; None where only the cells say it."""
        found, complete = self.by_rules
        return found if complete and not self.inverted else None

    def sorted_intervals(self) -> SortedIntervals | None:
        """Keys in an order in which each query sees an interval; None where cells are needed."""
        found = self.interval_mask
        return None if found is None or found.kept is not None else SortedIntervals(found)

    @cached_property
    def marginals(self) -> Marginals:
        """Counts of rows and columns, from the intervals or from one walk over the cells."""
        return _walk(self) if self.interval_mask is None else self.interval_mask.marginals()

    @cached_property
    def intervals(self) -> IntervalMask | None:
        """The interval mask, also where the walk over the cells has found that there is one."""
        if self.interval_mask is None and self.marginals.is_interval_mask:
            return self.marginals.interval_mask()
        return self.interval_mask

    @property
    def inverse(self) -> HeadMask:
        """The same view of what is hidden."""
        return replace(self, inverted=not self.inverted)

    def blocks(self) -> Iterator[tuple[slice, NDArray[np.bool_]]]:
        """The cells in blocks of whole rows, with the rows of each."""
        step = max(1, BLOCK_CELLS // max(1, self.k_len))
        for start in range(0, self.rows, step):
            rows = slice(start, min(start + step, self.rows))
            yield rows, self.cells(rows)
            self.drop_page_cache(rows)

    def drop_page_cache(self, rows: slice) -> None:
        """Let the system take back the memory of the mapped part of a mask file with these rows."""
        if self.mask.file is not None:
            block = self.mask.block(*self._place, rows, _ALL)
            drop_page_cache(block.of_file(self.mask.file.values))

    @property
    def _place(self) -> tuple[slice, slice]:
        return slice(self.batch, self.batch + 1), slice(self.head, self.head + 1)


def head_masks(mask: Mask) -> list[tuple[int | None, int | None, HeadMask]]:
    """Each batch and head of a mask; None in the place of an index where all are plainly alike."""
    if not mask.sizes.batch or not mask.sizes.heads:
        return []
    batches = mask.indices(0) if mask.differs(0) else [None]
    heads = mask.indices(1) if mask.differs(1) else [None]
    return [(b, h, mask.head(b or 0, h or 0)) for b in batches for h in heads]


def _walk(view: HeadMask) -> Marginals:
    """Counts, first and last keys of the rows and counts of the columns, in one walk."""
    counts = np.zeros(view.rows, np.int64)
    first = np.full(view.rows, view.k_len, np.int64)
    last = np.full(view.rows, -1, np.int64)
    used = np.zeros(view.k_len, np.int64)
    for rows, block in view.blocks():
        if not view.k_len:
            break
        counts[rows] = _count_rows(block)
        some = counts[rows] > 0
        first[rows] = np.where(some, block.argmax(-1), view.k_len)
        last[rows] = np.where(some, view.k_len - 1 - block[:, ::-1].argmax(-1), -1)
        used += count_columns(block)
    return Marginals(counts, first, last, used)


def count_columns(block: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Int64 (S_k,): in how many rows of a block (rows, S_k) each key is visible."""
    counts = np.zeros(block.shape[-1], np.int64)
    for at in range(0, len(block), _BYTE_ROWS):
        part = block[at : at + _BYTE_ROWS].view(np.uint8)
        counts += np.add.reduce(part, axis=0, dtype=np.uint8)
    return counts


def _count_rows(block: NDArray[np.bool_]) -> NDArray[np.int64]:
    if block.shape[-1] < 4096:
        counts: NDArray[np.int64] = block.sum(-1, dtype=np.int64)
        return counts
    # One long row at a time is counted seven times faster than along an axis.
    return np.array([np.count_nonzero(row) for row in block], np.int64)


def drop_page_cache(array: NDArray[Any]) -> None:
    """Let the system take back the memory that holds a part of a mapped file just read."""
    base: Any = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    if not isinstance(base, mmap.mmap) or not array.flags.c_contiguous or not array.nbytes:
        return
    offset = array.ctypes.data - np.frombuffer(base, np.uint8, 1).ctypes.data
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    base.madvise(mmap.MADV_DONTNEED, start, offset + array.nbytes - start)
