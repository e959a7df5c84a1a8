"""Two masks cell by cell: where they differ, and where one lets through what the other forbids."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from attncli.attention.masks.build import build_mask
from attncli.attention.masks.interval_mask import row_differences
from attncli.attention.masks.mask import HeadMask, Mask, head_masks
from attncli.attention.options import AttentionOptions
from attncli.attention.sizes import Sizes
from attncli.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    Found = tuple[int | None, int | None, HeadMask]


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell in which two masks differ.

    Attributes:
        batch, head: its batch and head; None where both masks are alike along that axis.
        query, key: its row and column.
        a, b: whether it is visible in the one and in the other, or what is added to its logit.
    """

    batch: int | None
    head: int | None
    query: int
    key: int
    a: bool | float
    b: bool | float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Where two masks differ; cells along axes on which both are alike count once.

    Attributes:
        cells: number of cells compared.
        differing: number of cells visible in one mask alone.
        only_a, only_b: the same, by which mask shows them.
        first: the first of them in order of batch, head, query and key.
        bias_differing: number of cells visible in both to which different numbers are added.
        first_bias: the first of those.
    """

    cells: int
    differing: int
    only_a: int
    only_b: int
    first: tuple[Cell, ...]
    bias_differing: int
    first_bias: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Leak:
    """Cells that a mask shows although a declared rule hides them.

    Attributes:
        rule: the rule in words: "causal", "left window", "right window", "dilation",
            "segments" or "key padding", or the description of a whole pattern.
        cells: number of such cells.
        first: the first of them; `a` is the mask's visibility, `b` the rule's.
    """

    rule: str
    cells: int
    first: tuple[Cell, ...]


def compare(a: Mask, b: Mask, limit: int = 10) -> Comparison:
    """Compare two masks for the same S_q and S_k, over the queries that are real in both.

    Args:
        a: a mask on the host.
        b: another.
        limit: how many differing cells to name.

    Raises:
        DataError: other lengths, or numbers of batches or heads that differ.
    """
    _refuse_other_sizes(a.sizes, b.sizes)
    total = np.zeros(4, np.int64)  # cells, only in a, only in b, other bias
    first: list[Cell] = []
    first_bias: list[Cell] = []
    for batch, head, one, other in _pairs(a, b):
        rows = min(one.rows, other.rows)
        only_a, only_b = _exclusive(one, other, rows)
        total[:3] += (rows * one.k_len, only_a, only_b)
        if only_a + only_b and len(first) < limit:
            for query, key in _first_differing(one, other, rows, limit - len(first)):
                seen = bool(one.cells(slice(query, query + 1))[0, key])
                first.append(Cell(batch, head, query, key, seen, not seen))
        if a.added is not None or b.added is not None:
            total[3] += _compare_bias(one, other, rows, (batch, head), first_bias, limit)
    cells, only_a, only_b, biased = (int(each) for each in total)
    return Comparison(
        cells, only_a + only_b, only_a, only_b, tuple(first), biased, tuple(first_bias)
    )


def same_cells(one: HeadMask, other: HeadMask) -> bool:
    """Whether two views have the same real queries and show them the same keys."""
    if one.rows != other.rows or one.k_len != other.k_len:
        return False
    sums = ((view.marginals.counts, view.marginals.used) for view in (one, other))
    if not all(np.array_equal(*pair) for pair in zip(*sums, strict=True)):
        return False
    return next(_first_differing(one, other, one.rows, 1), None) is None


def distinct_heads(mask: Mask) -> list[Found]:
    """The batches and heads of a mask, without those that are equal to the first along an axis."""
    found = head_masks(mask)
    return found if len(found) < 2 else collapse(found)


def collapse(found: Sequence[Found]) -> list[Found]:
    """The views of a mask without those that are equal to the first along an axis."""
    by_place = {(batch, head): view for batch, head, view in found}
    batches = list(dict.fromkeys(batch for batch, _ in by_place))
    heads = list(dict.fromkeys(head for _, head in by_place))
    if len(batches) > 1 and all(
        same_cells(view, by_place[batches[0], head]) for (_, head), view in by_place.items()
    ):
        return collapse([(None, head, by_place[batches[0], head]) for head in heads])
    if len(heads) > 1 and all(
        same_cells(view, by_place[batch, heads[0]]) for (batch, _), view in by_place.items()
    ):
        return [(batch, None, by_place[batch, heads[0]]) for batch in batches]
    return list(found)


def leaks(given: Mask, options: AttentionOptions, limit: int = 10) -> list[Leak]:
    """What a mask shows although the options hide it, for each rule that they declare.

    Args:
        given: the mask to judge, built without these options.
        options: causality, windows, prefix, segments, key lengths and key padding that the mask
            should obey. `attn_mask` plays no part.
        limit: how many cells to name per rule.
    """
    return [
        _leak(name, given, build_mask(rule, given.sizes), limit)
        for name, rule in _rules(options).items()
    ]


def _rules(options: AttentionOptions) -> dict[str, AttentionOptions]:
    """Options that declare one rule each."""
    o = options
    bare = AttentionOptions(query_offset=o.query_offset, query_lengths=o.query_lengths)
    declared = {
        "causal": replace(bare, causal=o.causal, prefix=o.prefix),
        "left window": replace(bare, left_window=o.left_window),
        "right window": replace(bare, right_window=o.right_window),
        "dilation": replace(
            bare, left_window=o.left_window, right_window=o.right_window, dilation=o.dilation
        ),
        "segments": replace(bare, segments=o.segments),
        "key padding": replace(bare, key_lengths=o.key_lengths, key_padding=o.key_padding),
    }
    given = {
        "causal": o.causal,
        "left window": o.left_window is not None,
        "right window": o.right_window is not None,
        "dilation": o.dilation is not None,
        "segments": o.segments is not None,
        "key padding": o.key_lengths is not None or o.key_padding is not None,
    }
    return {name: rule for name, rule in declared.items() if given[name]}


def _leak(name: str, given: Mask, rule: Mask, limit: int) -> Leak:
    cells = 0
    first: list[Cell] = []
    for batch, head, one, other in _pairs(given, rule):
        rows = min(one.rows, other.rows)
        here, _ = _exclusive(one, other, rows)
        cells += here
        if here and len(first) < limit:
            found = _first_differing(one, other, rows, limit - len(first), only_a=True)
            first += [Cell(batch, head, query, key, True, False) for query, key in found]
    return Leak(name, cells, tuple(first))


def _refuse_other_sizes(a: Sizes, b: Sizes) -> None:
    lengths = (a.q_len, a.k_len), (b.q_len, b.k_len)
    counts = (a.batch, a.heads), (b.batch, b.heads)
    if lengths[0] != lengths[1]:
        raise DataError("--against", f"expected (S_q, S_k) = {lengths[0]}, got {lengths[1]}")
    if any(1 not in pair and len(set(pair)) > 1 for pair in zip(*counts, strict=True)):
        raise DataError("--against", f"expected (B, H) = {counts[0]}, got {counts[1]}")


def _pairs(a: Mask, b: Mask) -> Iterator[tuple[int | None, int | None, HeadMask, HeadMask]]:
    """Views of both masks, one pair for each batch and head in which either may differ."""
    by_batch, by_head = (a.differs(axis) or b.differs(axis) for axis in (0, 1))
    batches, heads = max(a.sizes.batch, b.sizes.batch), max(a.sizes.heads, b.sizes.heads)
    for batch in range(batches if by_batch else min(1, batches)):
        for head in range(heads if by_head else min(1, heads)):
            one, other = (
                HeadMask(mask, min(batch, mask.sizes.batch - 1), min(head, mask.sizes.heads - 1))
                for mask in (a, b)
            )
            yield batch if by_batch else None, head if by_head else None, one, other


def _exclusive(one: HeadMask, other: HeadMask, rows: int) -> tuple[int, int]:
    """How many cells of the first `rows` queries are visible in `one` alone and `other` alone."""
    if one.interval_mask is not None and other.interval_mask is not None:
        here, there = (view.marginals.counts[:rows] for view in (one, other))
        excess = int(here.sum() - there.sum())
        differing = int(
            row_differences(
                one.interval_mask.queries(rows), other.interval_mask.queries(rows)
            ).sum()
        )
        return (differing + excess) // 2, (differing - excess) // 2
    only_one = only_other = 0
    for block, seen, shown in _blocks(one, other, rows):
        del block
        only_one += int(np.count_nonzero(seen & ~shown))
        only_other += int(np.count_nonzero(shown & ~seen))
    return only_one, only_other


def _first_differing(
    one: HeadMask, other: HeadMask, rows: int, limit: int, only_a: bool = False
) -> Iterator[tuple[int, int]]:
    """Query and key of the first cells that differ, or that are visible in `one` alone."""
    for block, seen, shown in _blocks(one, other, rows):
        wrong = seen & ~shown if only_a else seen != shown
        for query in np.flatnonzero(wrong.any(-1)):
            for key in np.flatnonzero(wrong[query]):
                if limit == 0:
                    return
                limit -= 1
                yield block.start + int(query), int(key)


def _blocks(
    one: HeadMask, other: HeadMask, rows: int
) -> Iterator[tuple[slice, NDArray[np.bool_], NDArray[np.bool_]]]:
    """Blocks of rows that both views show; of two structures only those that differ."""
    if one.interval_mask is not None and other.interval_mask is not None:
        wrong = row_differences(one.interval_mask.queries(rows), other.interval_mask.queries(rows))
        for row in np.flatnonzero(wrong).tolist():
            block = slice(row, row + 1)
            yield block, one.cells(block), other.cells(block)
        return
    walked, along = (other, one) if one.interval_mask is not None else (one, other)
    for block, seen in walked.blocks():
        block = slice(block.start, min(block.stop, rows))
        if block.start >= rows:
            return
        seen = seen[: block.stop - block.start]
        shown = along.cells(block)
        yield (block, seen, shown) if walked is one else (block, shown, seen)
        along.drop_page_cache(block)


def _compare_bias(
    one: HeadMask,
    other: HeadMask,
    rows: int,
    at: tuple[int | None, int | None],
    first: list[Cell],
    limit: int,
) -> int:
    """How many cells visible in both views have different numbers added; names the first."""
    cells = 0
    for block, seen in one.blocks():
        block = slice(block.start, min(block.stop, rows))
        if block.start >= rows:
            break
        both = seen[: block.stop - block.start] & other.cells(block)
        a, b = (_added(view, block, both.shape) for view in (one, other))
        wrong = both & (a != b)
        cells += int(np.count_nonzero(wrong))
        for query, key in np.argwhere(wrong)[: limit - len(first)] if len(first) < limit else ():
            values = float(a[query, key]), float(b[query, key])
            first.append(Cell(*at, block.start + int(query), int(key), *values))
        other.drop_page_cache(block)
    return cells


def _added(view: HeadMask, rows: slice, shape: tuple[int, ...]) -> NDArray[Any]:
    """Float (rows, S_k): what a mask file adds; 0 without one."""
    added = view.additive(rows)
    return np.broadcast_to(0.0 if added is None else added, shape)
