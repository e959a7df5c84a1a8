"""Masks of positional rules alone, at any length: exact counts without a number for each query.

Causality, windows, prefixes, lengths, dilation and packed documents leave patches: queries and keys
of one document, or of one remainder, that see nothing outside. Within one, what query t sees ends
at t plus a number, or at a number. Between the few places where two of these ends meet every count
is linear in t, so that its sum needs the first and the last query in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncli.attention.masks.mask import Mask
from attncli.attention.masks.positions import (
    offsets_of,
    packed_lengths,
    undeclared,
    undeclared_in_document,
)
from attncli.attention.masks.rules import Array, CellBlock, Rule
from attncli.attention.options import AttentionOptions, Corner
from attncli.attention.sizes import Sizes
from attncli.errors import UsageError

# Each remainder is a patch of its own.
_MOST_DILATED = 4096
# Rectangles of a picture that are counted patch by patch.
_MOST_RECTANGLES = 4096
# Counts of cells, and 64 times any index, fit 64 bits.
_MOST_CELLS, _LONGEST = 2**62, 2**56
# What needs a look at every key or query.
_BEYOND = (
    "attn_mask",
    "key_padding",
    "segments",
    "query_segments",
    "position_ids",
    "alibi_slopes",
)

Progression = tuple[int, int, int]  # first, step, count


@dataclass(frozen=True, slots=True)
class Patch:
    """Queries and keys that see nothing outside, each every so many-th of its axis.

    Query t, counted within, sees key u iff (t + lowest ≤ u or u < kept), u ≤ t + right, and
    u ≤ t + causal or u < prefix; None stands for no such rule.
    """

    row: int  # its first query, on the axis
    key: int  # its first key, likewise
    step: int  # from one of its queries, or keys, to the next
    rows: int  # how many queries it has
    keys: int  # how many keys that are no padding
    padded: int  # how many keys, padding included
    lowest: int | None = None
    causal: int | None = None
    right: int | None = None
    prefix: int = 0
    kept: int = 0

    def ends(self, t: int, below: int | None = None) -> tuple[int, int, int]:
        """(before, first, stop): query t sees the keys [0, before) and [first, stop).

        Args:
            t: a query.
            below: up to which key to look; None for all.
        """
        stop = self.keys
        if self.causal is not None:
            stop = min(stop, max(t + self.causal + 1, self.prefix))
        if self.right is not None:
            stop = min(stop, t + self.right + 1)
        stop = max(0, stop if below is None else min(stop, below))
        first = 0 if self.lowest is None else min(max(0, t + self.lowest), self.keys)
        return min(self.kept, first, stop), first, max(first, stop)

    def ends_of(self, t: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """The same of several queries, int64 each, for all keys."""
        stop = np.full_like(t, self.keys)
        if self.causal is not None:
            stop = np.minimum(stop, np.maximum(t + self.causal + 1, self.prefix))
        if self.right is not None:
            stop = np.minimum(stop, t + self.right + 1)
        stop = np.maximum(0, stop)
        first = np.zeros_like(t)
        if self.lowest is not None:
            first = np.clip(t + self.lowest, 0, self.keys)
        return np.minimum(self.kept, np.minimum(first, stop)), first, np.maximum(first, stop)

    def count(self, t: int, below: int | None = None) -> int:
        """How many keys query t sees."""
        before, first, stop = self.ends(t, below)
        return before + stop - first

    def pieces(
        self, start: int = 0, end: int | None = None, below: int | None = None
    ) -> Iterator[tuple[int, int]]:
        """The first and last query of each range in which every end is linear."""
        end = self.rows if end is None else end
        ends = (self.lowest, *(each + 1 for each in (self.causal, self.right) if each is not None))
        marks = {0, self.keys, self.prefix, self.kept} | (set() if below is None else {below})
        cuts = {start, end}
        for line in ends:
            if line is not None:
                cuts.update(mark - line + near for mark in marks for near in (-1, 0, 1))
        inner = sorted(cut for cut in cuts if start <= cut <= end)
        for first, stop in pairwise(inner):
            yield first, stop - 1

    def total(self, start: int = 0, end: int | None = None, below: int | None = None) -> int:
        """How many keys the queries from `start` up to, without, `end` see together."""
        return sum(
            (self.count(a, below) + self.count(b, below)) * (b - a + 1) // 2
            for a, b in self.pieces(start, end, below)
        )

    def used(self) -> list[tuple[int, int]]:
        """The keys that some query sees, as ranges [first, stop) that do not touch."""
        seen: list[tuple[int, int]] = []
        for a, b in self.pieces():
            seen += [(0, max(self.ends(t)[0] for t in (a, b)))]
            # Each query of a piece sees an interval that touches the next one's, or none.
            sides = [self.ends(t)[1:] for t in (a, b)]
            spans = [(first, stop) for first, stop in sides if stop > first]
            seen += [(spans[0][0], spans[-1][1])] if spans else []
        return _merged(seen)


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for first, stop in sorted(one for one in ranges if one[1] > one[0]):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((first, stop))
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Spans(Rule):
    """All rules of a mask together, as patches of each batch, or of all where they are alike."""

    batches: tuple[tuple[Patch, ...], ...]

    def differs(self, axis: int) -> bool:
        """Whether the batches have patches of their own."""
        return axis == 0 and len(self.batches) > 1

    def of(self, batch: int) -> tuple[Patch, ...]:
        """The patches of a batch."""
        return self.batches[batch if len(self.batches) > 1 else 0]

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """So many rows and columns of a picture, or fewer where every patch crosses all of them."""
        step = self.batches[0][0].step if self.batches[0] else 1
        most = max(1, int((_MOST_RECTANGLES / step) ** 0.5))
        return (min(rows, most), min(columns, most)) if step > 1 else (rows, columns)

    def cells(self, block: CellBlock) -> Array:
        """By the ends of each query of each patch."""
        batches = np.arange(len(self.batches))[block.batch] if self.differs(0) else [0]
        seen = np.zeros((len(batches), 1, len(block.queries), len(block.keys)), np.bool_)
        for place, batch in enumerate(batches):
            for patch in self.batches[batch]:
                rows, t = _within(block.queries, patch.row, patch.step, patch.rows)
                columns, u = _within(block.keys, patch.key, patch.step, patch.keys)
                if not len(t) or not len(u):
                    continue
                before, first, stop = (each[:, None] for each in patch.ends_of(t))
                seen[place, 0][np.ix_(rows, columns)] = ((u >= first) & (u < stop)) | (u < before)
        return seen


def _within(
    index: NDArray[Any], start: int, step: int, count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which of the indices are of a patch, and where they stand in it."""
    away = index.astype(np.int64) - start
    inside = np.flatnonzero((away >= 0) & (away % step == 0) & (away // step < count))
    return inside, away[inside] // step


def spans_of(mask: Mask) -> Spans | None:
    """The one rule of a mask that `mask_of_spans` has made; None for other masks."""
    return mask.rules[0] if mask.rules and isinstance(mask.rules[0], Spans) else None


def span_counts(
    patches: Sequence[Patch], query_edges: NDArray[np.int64], key_edges: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Int64 (rows, columns): the visible cells in each rectangle of a grid."""
    counts = np.zeros((len(query_edges) - 1, len(key_edges) - 1), np.int64)
    for patch in patches:
        edges = [_clipped(edge, patch.key, patch.step, patch.keys) for edge in key_edges.tolist()]
        rows = [_clipped(edge, patch.row, patch.step, patch.rows) for edge in query_edges.tolist()]
        for row, (start, end) in enumerate(pairwise(rows)):
            upto = {edge: patch.total(start, end, edge) for edge in set(edges) if end > start}
            if upto:
                counts[row] += np.diff([upto[edge] for edge in edges])
    return counts


def _clipped(edge: int, first: int, step: int, count: int) -> int:
    """How many of a patch's queries or keys lie before an edge of the axis."""
    return min(max(0, -(-(edge - first) // step)), count)


def mask_of_spans(options: AttentionOptions, sizes: Sizes) -> Mask | None:
    """The mask of the options, if positional rules alone make it.

    Args:
        options: what shapes it.
        sizes: any.

    Raises:
        UsageError: as `build_mask` does.
    """
    dilated = options.dilation or 1
    if sizes.q_len * sizes.k_len >= _MOST_CELLS or max(sizes.q_len, sizes.k_len) >= _LONGEST:
        return None
    packed = options.cu_seqlens_q is not None or options.cu_seqlens_k is not None
    padded = options.key_lengths is not None or options.query_lengths is not None
    if any(getattr(options, name) is not None for name in _BEYOND) or options.alibi:
        return None
    if dilated > _MOST_DILATED or (packed and (padded or dilated > 1)):
        return None
    if packed:
        return _packed_spans(options, sizes)
    keys = _lengths(options.key_lengths, "key_lengths", sizes.batch, sizes.k_len)
    queries = _lengths(options.query_lengths, "query_lengths", sizes.batch, sizes.q_len)
    offsets = _offsets(options, sizes, keys, queries)
    if offsets is None:
        shift, starts = None, [0]
    else:
        shift, starts = np.array(offsets, np.int64)[:, None], offsets
    batches = max(map(len, (keys, queries, starts)))
    patches = tuple(
        tuple(
            _patches(
                options,
                rows=queries[batch % len(queries)],
                keys=keys[batch % len(keys)],
                k_len=sizes.k_len,
                offset=starts[batch % len(starts)],
            )
        )
        for batch in range(batches)
    )
    return Mask(sizes, (Spans(patches),), shift, np.array(queries, np.int64))


def _lengths(given: tuple[int, ...] | None, name: str, batch: int, limit: int) -> list[int]:
    """Lengths of all batches or of each; the whole axis where none are given."""
    if given is None:
        return [limit]
    if len(given) not in (1, batch):
        problem = f"expected one length or one per batch (B={batch}), got {len(given)}"
        raise UsageError(f"«{name}»", problem)
    if max(given) > limit:
        got = max(given)
        raise UsageError(f"«{name}»", f"expected at most {limit}, the axis' length, got {got}")
    return list(given)


def _offsets(
    options: AttentionOptions, sizes: Sizes, keys: Sequence[int], queries: Sequence[int]
) -> list[int] | None:
    """Where query 0 stands, of all batches or of each; None where that is undefined."""
    batches = range(max(len(keys), len(queries)))
    corner = [keys[b % len(keys)] - queries[b % len(queries)] for b in batches]
    declared = options.query_offset
    if declared is Corner.BOTTOM_RIGHT:
        return corner
    if declared is not None:
        given = 0 if declared is Corner.TOP_LEFT else declared
        return [int(each) for each in offsets_of(given, sizes.batch)]
    if sizes.q_len == sizes.k_len:
        return [0]
    if options.needs_positions:
        raise undeclared(options, sizes, np.array(corner))
    return None


def _patches(
    options: AttentionOptions, *, rows: int, keys: int, k_len: int, offset: int
) -> Iterator[Patch]:
    """A patch of each remainder: key s + step·u of query r + step·t, with s = (r + offset) % step.

    The position of query t among the keys of its remainder is t + (r + offset − s) / step.
    """
    step = options.dilation or 1
    for remainder in range(step):
        start = (remainder + offset) % step
        at = (remainder + offset - start) // step
        left, right = options.left_window, options.right_window
        yield Patch(
            row=remainder,
            key=start,
            step=step,
            rows=_share(rows, remainder, step),
            keys=_share(keys, start, step),
            padded=_share(k_len, start, step),
            lowest=None if left is None else at - left // step,
            causal=at if options.causal else None,
            right=None if right is None else at + right // step,
            prefix=_share(options.prefix or 0, start, step),
            kept=_share(options.sink_window or 0, start, step),
        )


def _share(count: int, remainder: int, step: int) -> int:
    """How many of the numbers below `count` have this remainder."""
    return max(0, -(-(count - remainder) // step))


def _packed_spans(options: AttentionOptions, sizes: Sizes) -> Mask:
    """A patch of each document, in which positions count from its first key."""
    queries, keys = (lengths.tolist() for lengths in packed_lengths(options, sizes))
    declared = options.query_offset
    if declared is None and queries != keys and options.needs_positions:
        other = next(n for n, (q, k) in enumerate(zip(queries, keys, strict=True)) if q != k)
        raise undeclared_in_document(options, other, queries[other], keys[other])
    corner = declared is Corner.BOTTOM_RIGHT
    given = 0 if declared is None or isinstance(declared, Corner) else declared
    batches = []
    for offset in offsets_of(given, sizes.batch).tolist():
        row, key, patches = 0, 0, []
        for q_len, k_len in zip(queries, keys, strict=True):
            at = k_len - q_len if corner else offset
            (patch,) = _patches(options, rows=q_len, keys=k_len, k_len=k_len, offset=at)
            patches.append(replace(patch, row=row, key=key))
            row, key = row + q_len, key + k_len
        batches.append(tuple(patches))
    alike = queries == keys and given == 0
    shift = np.zeros((1, 1), np.int64) if alike else None
    return Mask(sizes, (Spans(tuple(batches)),), shift, np.array([sizes.q_len], np.int64))
