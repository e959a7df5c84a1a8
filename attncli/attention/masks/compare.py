"""Two masks cell by cell: where they differ, and where one lets through what the other forbids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncli.attention.masks.build import build_mask, placement_of
from attncli.attention.masks.interval_mask import row_differences
from attncli.attention.masks.mask import HeadMask, Mask, head_masks
from attncli.attention.options import DOCUMENTS, AttentionOptions
from attncli.attention.pooling import Pool
from attncli.columns import column
from attncli.errors import DataError

Cells = NDArray[np.bool_]
Found = tuple[int | None, int | None, HeadMask]
Pair = tuple[int | None, int | None, HeadMask, HeadMask, int]

# Cells of a pair that a map is made of: seconds.
MOST_MAPPED = 1 << 28

# Rules that a mask may break: the options that declare one, and those that say more of it.
RULES = {
    "causal": (("causal",), ("prefix",)),
    "left window": (("left_window",), ("sink_window",)),
    "right window": (("right_window",), ()),
    "dilation": (("dilation",), ("left_window", "right_window")),
    "segments": (DOCUMENTS, ("query_segments",)),
    "key padding": (("key_lengths", "key_padding"), ()),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell in which two masks differ: in whether it is visible, or in what is added to it."""

    batch: int | None = column("batch", description="none where all are alike", is_key=True)
    head: int | None = column("head", description="none where all are alike", is_key=True)
    query: int = column("query", description="index of its row", is_key=True)
    key: int = column("key", description="index of its column", is_key=True)
    a: bool | float = column(
        "this", description="whether it is visible, or, where both show it, what is added to it"
    )
    b: bool | float = column("other", description="the same of the other mask")


@dataclass(frozen=True, slots=True, eq=False)
class MaskComparison:
    """Where two masks differ; cells along axes on which both are alike count once."""

    cells: int  # number of cells compared
    only_a: int  # cells visible in one mask alone
    only_b: int
    bias_differing: int  # number of cells visible in both to which different numbers are added
    first: tuple[Cell, ...]  # the first cells that differ, in order of batch, head, query and key

    @property
    def differing(self) -> int:
        """Number of cells visible in one mask alone."""
        return self.only_a + self.only_b


@dataclass(frozen=True, slots=True)
class Leak:
    """Cells that a mask shows although a declared rule hides them."""

    rule: str = column(None, description="the rule, or the description of a whole pattern")
    cells: int = column(None, description="number of such cells")
    first: tuple[Cell, ...] = column(
        None, description="the first of them; a is the mask's visibility, b the rule's"
    )


@dataclass(frozen=True, slots=True, eq=False)
class DifferenceMaps:
    """Where two masks show a key, pooled, for a batch and head; None where all are alike."""

    batch: int | None  # of both masks
    head: int | None
    both: Pool  # cells visible in both masks
    only_a: Pool  # in one alone
    only_b: Pool


def difference_maps(a: Mask, b: Mask, most: int) -> Iterator[DifferenceMaps]:
    """Maps of at most so many places each way, of two masks of the same sizes.

    Of very many cells a row of each place is looked at.
    """
    for batch, head, one, other, rows in _pairs(a, b):
        maps = (Pool.of(rows, one.k_len, most) for _ in range(3))
        found = DifferenceMaps(batch, head, *maps)
        if rows * one.k_len <= MOST_MAPPED:
            blocks = _blocks(one, other, rows, everything=True)
        else:
            chosen = (slice(row, row + 1) for row in found.both.row_edges[:-1].tolist())
            blocks = ((row, one.cells(row), other.cells(row)) for row in chosen)
        for block, seen, shown in blocks:
            at = np.arange(block.start, block.stop)
            found.both.add(at, seen & shown)
            found.only_a.add(at, seen & ~shown)
            found.only_b.add(at, shown & ~seen)
        yield found


def compare(a: Mask, b: Mask, limit: int = 10) -> MaskComparison:
    """Compare two masks for the same S_q and S_k, over the queries that are real in both.

    Args:
        a: a mask on the host.
        b: another.
        limit: how many differing cells to name.

    Raises:
        DataError: other lengths, or numbers of batches or heads that differ.
    """
    lengths, counts = (
        [(getattr(sizes, one), getattr(sizes, other)) for sizes in (a.sizes, b.sizes)]
        for one, other in (("q_len", "k_len"), ("batch", "heads"))
    )
    if lengths[0] != lengths[1]:
        raise DataError("«against»", f"expected (S_q, S_k) = {lengths[0]}, got {lengths[1]}")
    if any(1 not in pair and len(set(pair)) > 1 for pair in zip(*counts, strict=True)):
        raise DataError("«against»", f"expected (B, H) = {counts[0]}, got {counts[1]}")
    cells = only_a = only_b = biased = 0
    for _, _, one, other, rows in _pairs(a, b):
        cells += rows * one.k_len
        here, there = _exclusive(one, other, rows)
        only_a, only_b = only_a + here, only_b + there
        if _adds(one, other):
            blocks = _blocks(one, other, rows, everything=True)
            biased += sum(int(_other_bias(one, other, *block).sum()) for block in blocks)
    # No more than there are: the walk ends with the last of them.
    named = islice(differing_cells(a, b), min(limit, only_a + only_b + biased))
    return MaskComparison(cells, only_a, only_b, biased, tuple(named))


def differing_cells(a: Mask, b: Mask) -> Iterator[Cell]:
    """Every cell in which two masks differ, in order of batch, head, query and key."""
    for batch, head, one, other, rows in _pairs(a, b):
        biased = _adds(one, other)
        for block, seen, shown in _blocks(one, other, rows, everything=biased):
            wrong = seen != shown
            if biased:
                wrong |= _other_bias(one, other, block, seen, shown)
            for query, key in _places(wrong):
                pair: Sequence[Any] = bool(seen[query, key]), bool(shown[query, key])
                if pair[0] == pair[1]:
                    added = (_added(view, block) for view in (one, other))
                    pair = [float(np.broadcast_to(x, seen.shape)[query, key]) for x in added]
                yield Cell(batch, head, block.start + query, key, *pair)


def same_cells(one: HeadMask, other: HeadMask) -> bool:
    """Whether two views have the same real queries and show them the same keys."""
    if one.rows != other.rows or one.k_len != other.k_len:
        return False
    sums = ((view.marginals.counts, view.marginals.used) for view in (one, other))
    if not all(np.array_equal(*pair) for pair in zip(*sums, strict=True)):
        return False
    return all((seen == shown).all() for _, seen, shown in _blocks(one, other, one.rows))


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
    placement = placement_of(options, given.sizes)
    return [
        leak(name, list(_pairs(given, build_mask(rule, given.sizes, placement))), limit)
        for name, rule in _rules(options).items()
    ]


def leak(rule: str, pairs: Sequence[Pair], limit: int) -> Leak:
    """What the first of each pair shows although the second hides it."""
    cells = sum(_exclusive(one, other, rows)[0] for _, _, one, other, rows in pairs)
    first = (
        Cell(batch, head, block.start + query, key, True, False)
        for batch, head, one, other, rows in pairs
        for block, seen, shown in _blocks(one, other, rows)
        for query, key in _places(seen & ~shown)
    )
    return Leak(rule, cells, tuple(islice(first, limit)))


def _rules(options: AttentionOptions) -> dict[str, AttentionOptions]:
    """Options that declare one rule each."""
    bare = AttentionOptions(query_lengths=options.query_lengths)
    found = {}
    for name, (declaring, beside) in RULES.items():
        values = {field: getattr(options, field) for field in (*declaring, *beside)}
        if any(values[field] is not None and values[field] is not False for field in declaring):
            found[name] = replace(bare, **values)
    return found


def _pairs(a: Mask, b: Mask) -> Iterator[Pair]:
    """HeadMasks of both masks for each batch and head in which either may differ.

    And how many queries are real in both.
    """
    by_batch, by_head = (a.differs(axis) or b.differs(axis) for axis in (0, 1))
    batches, heads = (
        a.indices(axis) if a.chosen[axis] is not None else range(max(of_both))
        for axis, of_both in enumerate(
            ((a.sizes.batch, b.sizes.batch), (a.sizes.heads, b.sizes.heads))
        )
    )
    for batch in batches if by_batch else batches[:1]:
        for head in heads if by_head else heads[:1]:
            one, other = (
                HeadMask(mask, min(batch, mask.sizes.batch - 1), min(head, mask.sizes.heads - 1))
                for mask in (a, b)
            )
            where = batch if by_batch else None, head if by_head else None
            yield *where, one, other, min(one.rows, other.rows)


def _exclusive(one: HeadMask, other: HeadMask, rows: int) -> tuple[int, int]:
    """How many cells of the first `rows` queries are visible in `one` alone and `other` alone."""
    known = one.interval_mask, other.interval_mask
    if known[0] is not None and known[1] is not None:
        here, there = (view.marginals.counts[:rows] for view in (one, other))
        excess = int(here.sum() - there.sum())
        differing = int(row_differences(known[0].queries(rows), known[1].queries(rows)).sum())
        return (differing + excess) // 2, (differing - excess) // 2
    counts = np.zeros(3, np.int64)  # seen in the one, in the other, in both
    for _, seen, shown in _blocks(one, other, rows):
        counts += [np.count_nonzero(cells) for cells in (seen, shown, seen & shown)]
    seen_by_one, seen_by_other, by_both = counts.tolist()
    return seen_by_one - by_both, seen_by_other - by_both


def _blocks(
    one: HeadMask, other: HeadMask, rows: int, *, everything: bool = False
) -> Iterator[tuple[slice, Cells, Cells]]:
    """Blocks of rows, and what each view shows: (rows, S_k) each.

    Of two structures only rows that differ, unless everything is asked for.
    """
    known = one.interval_mask, other.interval_mask
    if known[0] is not None and known[1] is not None and not everything:
        wrong = row_differences(known[0].queries(rows), known[1].queries(rows))
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


def _places(wrong: Cells) -> Iterator[tuple[int, int]]:
    """Row and column of every True, one row of them at a time."""
    for query in np.flatnonzero(wrong.any(-1)).tolist():
        for key in np.flatnonzero(wrong[query]).tolist():
            yield query, key


def _adds(one: HeadMask, other: HeadMask) -> bool:
    return one.mask.added is not None or other.mask.added is not None


def _other_bias(one: HeadMask, other: HeadMask, block: slice, seen: Cells, shown: Cells) -> Cells:
    """Bool (rows, S_k): True where both views show a cell and add different numbers to it."""
    different: Cells = seen & shown & (_added(one, block) != _added(other, block))
    return different


def _added(view: HeadMask, rows: slice) -> NDArray[Any]:
    """Float (rows | 1, S_k | 1): what a mask file adds; 0 without one."""
    added = view.additive(rows)
    return np.zeros((1, 1)) if added is None else added
