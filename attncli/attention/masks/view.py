"""One batch and head of a mask, looked at without ever holding all its cells."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from attncli.attention.masks.mask_input import let_go
from attncli.attention.masks.structure import Ordered, Profile, Structure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from attncli.attention.masks.mask import Mask

BLOCK_CELLS = 1 << 22

# Rows whose sums by column still fit into one byte.
_BYTE_ROWS = 255


@dataclass(frozen=True)
class View:
    """The real queries of one batch and head of a mask.

    Attributes:
        mask: where the cells come from, on the host.
        batch, head: which of its batches and heads.
        inverted: whether to see what the mask hides in the place of what it shows.
        hide_at: additive values at or below this count as hidden; None for −inf alone.
    """

    mask: Mask
    batch: int = 0
    head: int = 0
    inverted: bool = False
    hide_at: float | None = None

    @property
    def rows(self) -> int:
        """Number of queries that are not padding."""
        return self.mask.real_queries(self.batch)

    @property
    def k_len(self) -> int:
        """S_k."""
        return self.mask.sizes.k_len

    @property
    def cells(self) -> int:
        """Number of cells of real queries."""
        return self.rows * self.k_len

    @cached_property
    def structure(self) -> Structure | None:
        """What the rows have in common; None where only the cells themselves say it.

        A mask that is alike for all queries, or for all keys, is no more than padding.
        """
        if self.inverted:
            return None
        mask, real = self.mask, slice(self.rows)
        first, stop = _row(mask.first, self.batch)[real], _row(mask.stop, self.batch)[real]
        keep = None if mask.key_keep is None else _row(mask.key_keep, self.batch)
        for given in (mask.allowed, mask.added):
            if given is None:
                continue
            if 1 not in given.shape[2:]:
                return None
            seen = self._seen(given, slice(None))
            if given.shape[2] == 1:
                keep = seen[0] if keep is None else keep & seen[0]
            else:
                stop = np.where(seen[real, 0], stop, first)
        if keep is not None:
            keep = np.broadcast_to(keep, (self.k_len,))
        keys, queries = self._documents()
        return Structure(self.k_len, first, stop, keep, keys, queries)

    @cached_property
    def profile(self) -> Profile:
        """Counts of rows and columns, from the structure or from one walk over the cells."""
        if self.structure is not None:
            return Ordered(self.structure).profile()
        return _walk(self)

    @cached_property
    def known(self) -> Structure | None:
        """The structure, also where the walk over the cells has found that there is one."""
        if self.structure is None and self.profile.is_structured:
            return self.profile.structure()
        return self.structure

    @property
    def inverse(self) -> View:
        """The same view of what is hidden."""
        return replace(self, inverted=not self.inverted)

    def visible(self, rows: slice) -> NDArray[np.bool_]:
        """Bool (rows, S_k): True where the query sees the key; not to be written to."""
        if self.structure is not None:
            return self.structure.cells(rows)
        seen = self._by_rule(rows)
        for given in (self.mask.allowed, self.mask.added):
            if given is not None:
                here = np.broadcast_to(
                    self._seen(given, rows), (rows.stop - rows.start, self.k_len)
                )
                seen = here if seen is None else seen & here
        if seen is None:
            seen = np.ones((rows.stop - rows.start, self.k_len), np.bool_)
        return ~seen if self.inverted else seen

    def blocks(self) -> Iterator[tuple[slice, NDArray[np.bool_]]]:
        """The cells in blocks of whole rows, with the rows of each; mapped files are let go."""
        step = max(1, BLOCK_CELLS // max(1, self.k_len))
        for start in range(0, self.rows, step):
            rows = slice(start, min(start + step, self.rows))
            yield rows, self.visible(rows)
            self.release(rows)

    def release(self, rows: slice) -> None:
        """Let go of the mapped parts of mask files that hold these rows."""
        for given in (self.mask.allowed, self.mask.added):
            if given is not None:
                let_go(_plane(given, self.batch, self.head)[_of_axis(given.shape[2], rows)])

    def added(self, rows: slice) -> NDArray[Any]:
        """Float (rows | 1, S_k | 1): what is added to the logits; 0 where there is nothing."""
        given = self.mask.added
        if given is None:
            return np.zeros((1, 1))
        return _plane(given, self.batch, self.head)[_of_axis(given.shape[2], rows)]

    def _by_rule(self, rows: slice) -> NDArray[np.bool_] | None:
        """What options beside a mask file leave visible; None where they hide nothing."""
        rule = self._rule
        whole = rule.keep is None and rule.key_ids is None
        if whole and not rule.first[rows].any() and (rule.stop[rows] == self.k_len).all():
            return None
        return rule.cells(rows)

    @cached_property
    def _rule(self) -> Structure:
        alone = replace(self.mask, allowed=None, added=None)
        found = View(alone, self.batch, self.head).structure
        assert found is not None  # no mask file is left
        return found

    def _seen(self, given: NDArray[Any], rows: slice) -> NDArray[np.bool_]:
        """Bool (rows | 1, S_k | 1): what one mask file shows."""
        plane = _plane(given, self.batch, self.head)[_of_axis(given.shape[2], rows)]
        if given is self.mask.added:
            limit = -np.inf if self.hide_at is None else self.hide_at
            shown: NDArray[np.bool_] = plane > limit
            return shown
        if plane.dtype == bool:
            return np.asarray(plane) if self.mask.allowed_value else ~plane
        equal: NDArray[np.bool_] = plane == self.mask.allowed_value
        return equal

    def _documents(self) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
        if self.mask.segments is None:
            return None, None
        offset = self.mask.offset
        assert offset is not None  # segments need positions, and the mask was built
        _, keys = np.unique(_row(self.mask.segments, self.batch), return_inverse=True)
        position = int(_row(offset, self.batch)) + np.arange(self.rows)
        return document_of(keys.astype(np.int64), position)


def document_of(
    key_ids: NDArray[np.int64], position: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The documents of the keys, and of queries at these positions: −1 off the axis."""
    on_axis = (position >= 0) & (position < len(key_ids))
    if not len(key_ids):
        return key_ids, np.full(len(position), -1, np.int64)
    return key_ids, np.where(on_axis, key_ids[np.where(on_axis, position, 0)], -1)


def views(mask: Mask, hide_at: float | None = None) -> list[tuple[int | None, int | None, View]]:
    """A view of each batch and head; None in the place of an index where all are plainly alike."""
    batches = range(mask.sizes.batch) if differs(mask, 0) else [None]
    heads = range(mask.sizes.heads) if differs(mask, 1) else [None]
    if not mask.sizes.batch or not mask.sizes.heads:
        return []
    return [
        (batch, head, View(mask, batch or 0, head or 0, hide_at=hide_at))
        for batch in batches
        for head in heads
    ]


def distinct_views(
    mask: Mask, hide_at: float | None = None
) -> list[tuple[int | None, int | None, View]]:
    """The views of a mask, without those that are equal to the first along an axis."""
    found = views(mask, hide_at)
    if len(found) < 2:
        return found
    from attncli.attention.masks.compare import collapse

    return collapse(found)


def _walk(view: View) -> Profile:
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
    return Profile(counts, first, last, used)


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


def _plane(given: NDArray[Any], batch: int, head: int) -> NDArray[Any]:
    heads = given[batch if len(given) > 1 else 0]
    plane: NDArray[Any] = heads[head if len(heads) > 1 else 0]  # (S_q | 1, S_k | 1)
    return plane


def _of_axis(length: int, rows: slice) -> slice:
    return rows if length > 1 else slice(None)


def _row(array: NDArray[Any], batch: int) -> Any:
    return array[batch if len(array) > 1 else 0]


def differs(mask: Mask, axis: int) -> bool:
    """Whether anything in the mask is given apart for each batch (0) or head (1)."""
    given = [mask.allowed, mask.added]
    if axis == 0:
        given += [mask.offset, mask.first, mask.key_keep, mask.segments, mask.query_lengths]
    return any(array is not None and array.shape[axis] > 1 for array in given)
