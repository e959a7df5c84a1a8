"""Statistics of every query row, and the output, in memory that grows with n alone.

The score matrix is visited in tiles and never held; heads come one after another, several at a
time where they are small. The mass that every key receives takes a second pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from attncli.attention.masks.interval_mask import coverage
from attncli.attention.problem import Problem
from attncli.attention.streaming.head_group import (
    HeadGroup,
    RowBlock,
    largest_logit_of,
    make_group,
    row_blocks,
)
from attncli.attention.streaming.mass import BlockMass, KeyMass
from attncli.attention.streaming.pooling import (
    Bins,
    PooledWeights,
    nothing_pooled,
    pool_tile,
)
from attncli.attention.streaming.repeats import find_repeats
from attncli.attention.streaming.rows import (
    MergedTiles,
    RowStatistics,
    Shares,
    find_shares,
    finish_rows,
    mark_seen,
    merge_tiles,
)
from attncli.attention.streaming.slant import joined_blocks
from attncli.attention.streaming.tiles import (
    LOG2_E,
    TILE_CELLS,
    TILE_KEYS,
    TILE_ROWS,
    Workspace,
    exponential,
    score_tile,
    sum_tiles,
)
from attncli.attention.threads import parallel_map, single_threaded_torch
from attncli.errors import UsageError

Result = TypeVar("Result")

# Heads whose keys, values and rows take no more than this are shared out together.
_BYTES_AT_ONCE = 96 << 20
_CELLS_OF_A_DEVICE = 1 << 25  # 128 MiB of float32: starting many small products takes longer
_BYTES_A_ROW = 300  # some thirty figures of 8 bytes, and what they are made of


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to compute beside the columns that every row has."""

    top_key: bool = False  # the key of the largest logit of every row
    output: bool = False  # the output, where the problem has values, all of them finite
    distances: bool = True  # and what heads are labelled by: the shares of keys near the query
    per_key: bool = False  # the mass that each key receives; costs a second pass
    sink_keys: int = 1  # how many of the first keys `sink_mass` is the weight of
    # For which to pool the weights, in the pass of `per_key`; of queries that follow each other,
    # counted from the first.
    bins: Bins | None = None
    # Int64 (B | 1, S_k), at least 0: numbers of the keys' tokens, to look for earlier ones.
    tokens: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        """Refuse a count that makes no sense.

        Raises:
            UsageError: naming the option.
        """
        if self.sink_keys < 1:
            raise UsageError("«sink_keys»", f"expected at least 1, got {self.sink_keys}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRows(RowStatistics):
    """The real queries of one head, (R,), and what is known beside their rows."""

    batch: int  # indices into the tensors
    head: int
    queries: torch.Tensor  # int64 (R,), indices of the queries, ascending; padded ones are left out
    shares: Shares  # what the keys get that heads are labelled by
    # The first query that reaches the head's largest logit; None for none.
    max_logit_query: int | None
    max_logit_key: int | None  # the first key of that query that does
    received: KeyMass | None  # mass of each key; None if not asked for
    pooled: PooledWeights | None  # weights of the bins; None if not asked for


def stream_rows(
    problem: Problem,
    wanted: Wanted | None = None,
    *,
    batches: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    queries: Sequence[NDArray[np.int64]] | None = None,
    part: slice = slice(None),
    advance: Callable[[int], None] | None = None,
) -> Iterator[HeadRows]:
    """Compute the statistics of every row, one batch and head after another.

    Args:
        problem: what to compute.
        wanted: what to compute beside the columns that every row has.
        batches: indices of the batches to look at, in the order to yield them; None for all.
        heads: query heads, likewise.
        queries: int64 arrays, one for each batch of the problem: ascending indices of the
            queries to look at; None for all real ones.
        part: which of these alone, from a multiple of TILE_ROWS on; what is found of a row is what
            is found beside all the others, bit for bit.
        advance: told after each block of rows how many of the `planned_cells` it covered.
    """
    wanted = wanted or Wanted()
    make = partial(
        make_group,
        problem,
        problem.mask_on_device(),
        part=part,
        with_values=wanted.output,
        with_top_key=wanted.top_key,
        with_distances=wanted.distances,
    )
    for run in runs_of(problem, batches, heads, queries, with_values=wanted.output):
        with single_threaded_torch(problem.device) as workers:
            found = rows_of_groups(made_groups(make, run, workers), wanted, advance, workers)
        for _, rows in found:
            yield from rows


def stream_outputs(
    problem: Problem, *, batches: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Batch, head, and the output of its real queries (R, d_v), without statistics.

    Args:
        problem: what to compute; it has values, all of them finite.
        batches, heads: as for `stream_rows`.
    """
    make = partial(
        make_group, problem, problem.mask_on_device(), with_values=True, with_statistics=False
    )
    for run in runs_of(problem, batches, heads):
        with single_threaded_torch(problem.device) as workers:
            groups = made_groups(make, run, workers)
            found = _all_rows(groups, None, workers)
        for group, rows in zip(groups, found, strict=True):
            assert rows.output is not None
            yield from zip([group.batch] * len(rows.output), group.heads, rows.output, strict=True)


Heads = tuple[int, range, NDArray[np.int64]]  # a batch, some neighbouring heads, and their queries


def runs_of(
    problem: Problem,
    batches: Sequence[int] | None,
    heads: Sequence[int] | None,
    queries: Sequence[NDArray[np.int64]] | None = None,
    *,
    with_values: bool = True,
) -> Iterator[list[Heads]]:
    """All that is asked for, in order, as much at a time as threads share out together."""
    sizes, held = problem.sizes, 0
    run: list[Heads] = []
    width = problem.dk + (problem.dv or 0 if with_values else 0)
    for batch in range(sizes.batch) if batches is None else batches:
        chosen = np.arange(problem.mask.real_queries(batch)) if queries is None else queries[batch]
        a_head = sizes.k_len * width * problem.dtype.itemsize + len(chosen) * _BYTES_A_ROW
        all_heads = range(sizes.heads) if heads is None else heads
        for several in neighbours(all_heads, heads_at_once(problem, len(chosen))):
            if run and held + len(several) * a_head > _BYTES_AT_ONCE:
                yield run
                run, held = [], 0
            run.append((batch, several, chosen))
            held += len(several) * a_head
    if run:
        yield run


def made_groups(
    make: Callable[[int, range, NDArray[np.int64]], HeadGroup], run: Sequence[Heads], workers: int
) -> list[HeadGroup]:
    """Groups of heads; where there is one alone, it has all threads to itself."""
    if len(run) > 1 or workers == 1:
        return list(parallel_map(lambda heads, _: make(*heads), run, lambda: None, workers))
    torch.set_num_threads(workers)  # for its large tensors
    try:
        return [replace(make(*run[0]), workers=workers)]
    finally:
        torch.set_num_threads(1)


def planned_cells(
    problem: Problem,
    wanted: Wanted | None = None,
    *,
    batches: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> int:
    """Cells that `stream_rows` will visit with the same arguments; for progress."""
    heads = range(problem.sizes.heads) if heads is None else heads
    passes = 1 + (wanted is not None and wanted.per_key)
    cells = 0
    for batch in range(problem.sizes.batch) if batches is None else batches:
        at_once = heads_at_once(problem, problem.mask.real_queries(batch))
        for several in neighbours(heads, at_once):
            hull = problem.mask.hull(batch, several)
            blocks = row_blocks(hull, TILE_ROWS, TILE_KEYS)
            cells += sum(map(_cells, blocks)) * len(several)
    return cells * passes


def _cells(block: RowBlock) -> int:
    return (block.stop - block.start) * sum(tile.stop - tile.start for tile in block.tiles)


def heads_at_once(problem: Problem, rows: int) -> int:
    """How many heads there may be for one tile of each to fit the buffers."""
    cells = min(rows, TILE_ROWS) * min(problem.sizes.k_len, TILE_KEYS)
    room = TILE_CELLS if problem.device.type == "cpu" else _CELLS_OF_A_DEVICE
    return max(1, room // max(1, cells))


def neighbours(heads: Sequence[int], at_most: int) -> Iterator[range]:
    """The heads in their order, as runs that ascend by one."""
    start = 0
    for at in range(1, len(heads) + 1):
        if at < len(heads) and heads[at] == heads[at - 1] + 1 and at - start < at_most:
            continue
        yield range(heads[start], heads[at - 1] + 1)
        start = at


def rows_of_groups(
    groups: Sequence[HeadGroup],
    wanted: Wanted,
    advance: Callable[[int], None] | None,
    workers: int,
) -> list[tuple[RowStatistics, list[HeadRows]]]:
    """All that is wanted of each group: the rows of its heads together, (G, R), and each head's.

    Args:
        groups: the heads.
        wanted: what to compute beside the columns that every row has.
        advance: as for `stream_rows`.
        workers: how many threads share out the blocks of all groups.
    """
    rows = _all_rows(groups, advance, workers)
    masses: Sequence[_Masses | None] = [None] * len(groups)
    if wanted.per_key:
        masses = masses_of(groups, rows, wanted.bins, advance, workers)

    def ends_of(index: int, _: None) -> tuple[RowStatistics, list[HeadRows]]:
        return rows[index], _heads_of(groups[index], wanted, rows[index], masses[index])

    return list(parallel_map(ends_of, range(len(groups)), lambda: None, workers))


def _heads_of(
    group: HeadGroup, wanted: Wanted, rows: RowStatistics, mass: _Masses | None
) -> list[HeadRows]:
    shares = find_shares(group, rows, wanted.sink_keys)
    if wanted.tokens is not None and group.places is not None:
        tokens = wanted.tokens[group.batch if len(wanted.tokens) > 1 else 0]
        repeated, behind = find_repeats(group, rows, tokens)
        shares = replace(shares, repeated=repeated, behind_repeated=behind)
    received, pooled = mass or (None, None)
    largest = [_largest_logit(group, index, rows) for index in range(len(group.heads))]
    return heads_of_group(group, rows, shares, largest, received, pooled)


def heads_of_group(
    group: HeadGroup,
    rows: RowStatistics,
    shares: Shares,
    largest: Sequence[tuple[int | None, int | None]],
    received: KeyMass | None,
    pooled: PooledWeights | None,
) -> list[HeadRows]:
    """Each head of a group with all that is known of it; `largest` is the place of its logit."""
    found = []
    for index, (head, (query, key)) in enumerate(zip(group.heads, largest, strict=True)):
        own = shares.of_head(index)
        found.append(
            HeadRows(
                **rows.of_head(index) | {"sink_mass": own.first.weight},
                batch=group.batch,
                head=head,
                queries=group.rows,
                shares=own,
                max_logit_query=query,
                max_logit_key=key,
                received=None if received is None else received.of_head(index),
                pooled=None if pooled is None else pooled.of_head(index),
            )
        )
    return found


Piece = tuple[int, RowBlock]  # the number of a group, and some of its rows


def _heaviest_first(
    groups: Sequence[HeadGroup], cut: Callable[[HeadGroup], Iterable[RowBlock]]
) -> list[Piece]:
    """The blocks of all groups in such an order that no thread is left alone at the end."""
    pieces = [(number, block) for number, group in enumerate(groups) for block in cut(group)]
    return sorted(pieces, key=lambda piece: -_cells(piece[1]) * len(groups[piece[0]].heads))


def _all_rows(
    groups: Sequence[HeadGroup],
    advance: Callable[[int], None] | None,
    workers: int,
) -> list[RowStatistics]:
    found = merged_blocks(groups, advance, workers)

    def finish(index: int, _: None) -> RowStatistics:
        return finish_rows(groups[index], found[index])

    return list(parallel_map(finish, range(len(groups)), lambda: None, workers))


def merged_blocks(
    groups: Sequence[HeadGroup],
    advance: Callable[[int], None] | None,
    workers: int,
) -> list[list[MergedTiles]]:
    """Of each group what the tiles of its blocks say of their rows, in the order of the rows."""

    def merge(piece: Piece, work: Workspace) -> MergedTiles:
        number, block = piece
        return merge_tiles(groups[number], sum_tiles(groups[number], block, work))

    none = RowBlock(0, 0, ())
    found = [
        {0: merge((number, none), Workspace.of(groups[number]))} for number in range(len(groups))
    ]
    pieces = _heaviest_first(groups, joined_blocks)
    for (number, block), merged in _each(groups, merge, pieces, advance, workers):
        found[number][block.start] = merged
    return [[merged for _, merged in sorted(of_group.items())] for of_group in found]


_Masses = tuple[KeyMass, PooledWeights | None]


def masses_of(
    groups: Sequence[HeadGroup],
    rows: Sequence[RowStatistics],
    bins: Bins | None,
    advance: Callable[[int], None] | None,
    workers: int,
) -> list[_Masses]:
    def give(piece: Piece, work: Workspace) -> tuple[BlockMass, PooledWeights | None]:
        number, block = piece
        return mass_of_block(groups[number], block, rows[number], work, bins)

    found = [
        (no_mass(group), None if bins is None else nothing_pooled(group, bins)) for group in groups
    ]
    pieces = _heaviest_first(groups, lambda group: row_blocks(group.hull, TILE_ROWS, TILE_KEYS))
    for (number, _), (mass, of_block) in _each(groups, give, pieces, advance, workers):
        received, pooled = found[number]
        received.add(mass)
        if pooled is not None and of_block is not None:
            pooled.add(of_block)
    return found


def _each(
    groups: Sequence[HeadGroup],
    function: Callable[[Piece, Workspace], Result],
    pieces: Sequence[Piece],
    advance: Callable[[int], None] | None,
    workers: int,
) -> Iterator[tuple[Piece, Result]]:
    """Each piece with its result, in order; `advance` hears of its cells once it is dealt with."""
    largest = max(groups, key=lambda group: len(group.heads) * len(group.queries))
    found = parallel_map(function, pieces, lambda: Workspace.of(largest), workers)
    for piece, result in zip(pieces, found, strict=True):
        yield piece, result
        if advance is not None:
            advance(len(groups[piece[0]].heads) * _cells(piece[1]))


def _largest_logit(
    group: HeadGroup, index: int, rows: RowStatistics
) -> tuple[int | None, int | None]:
    """Query and key of the largest logit of a head, the first where several are equal."""
    row = largest_row(rows, index)
    if row is None:
        return None, None
    query = int(group.queries[row])
    if rows.top_key is not None:
        return query, int(rows.top_key[index, row])
    return query, largest_logit_of(group, index, row)[1]


def largest_row(rows: RowStatistics, index: int) -> int | None:
    """The first row that reaches the largest logit of a head; None for none."""
    if rows.max_logit is None:
        return None
    logits = rows.max_logit[index]
    logits = torch.where(torch.isnan(logits), -torch.inf, logits)
    if not len(logits):
        return None
    row = int(logits.argmax())
    return None if bool(torch.isneginf(logits[row])) else row


def no_mass(group: HeadGroup) -> KeyMass:
    """Nothing yet; the queries are known already where intervals alone decide."""
    shape = (len(group.heads), group.keys.shape[2])
    queries = torch.zeros(shape, dtype=torch.int64, device=group.device)
    if group.by_interval:
        seen = coverage(group.hull.first, group.hull.stop, shape[1])
        queries += torch.as_tensor(seen).to(queries)
    return KeyMass(queries)


def mass_of_block(
    group: HeadGroup,
    block: RowBlock,
    rows: RowStatistics,
    work: Workspace,
    bins: Bins | None = None,
) -> tuple[BlockMass, PooledWeights | None]:
    """What the queries of one block give to each key from its first tile's to its last's.

    Args:
        group: the heads.
        block: the rows, and their tiles.
        rows: of all blocks.
        work: buffers.
        bins: for which to pool the weights as well.

    Returns:
        The mass, and the queries that see the key; these are 0 where intervals alone decide,
        since `no_mass` has counted them. With bins the pooled weights of those of the block.
    """
    first = block.tiles[0].start if block.tiles else 0
    width = block.tiles[-1].stop - first if block.tiles else 0
    mass = torch.zeros(len(group.heads), width, dtype=torch.float64, device=group.device)
    seen_by = torch.zeros_like(mass, dtype=torch.int64)
    pooled = None if bins is None else nothing_pooled(group, bins, slice(block.start, block.stop))
    some = slice(block.start, block.stop)
    share = (1 / (1 + rows.sum_exp_minus_1[:, some])).masked_fill(rows.empty[:, some], 0.0)
    share = share.masked_fill(torch.isnan(share), 1.0)  # where weights themselves are NaN
    share = share[:, None].to(group.dtype)  # (G, 1, rows)
    unit = LOG2_E if group.base2_logits else 1.0
    power = torch.exp2 if group.base2_logits else exponential
    queries, factor = group.shrunk_queries(block.start, block.stop), group.factor(unit)
    row_max = (rows.row_max[:, some] * unit).masked_fill(rows.empty[:, some], 0.0)
    row_max = row_max[..., None].to(group.dtype)
    for tile in block.tiles:
        logits, weights = work.tile(
            len(group.heads), block.stop - block.start, tile.stop - tile.start
        )
        score_tile(group, block, tile, queries, factor, logits, work)
        mark_seen(group, block, tile, rows, logits)
        inside = slice(tile.start - first, tile.stop - first)
        hidden = None
        if group.may_overflow:
            hidden = ~group.visible(block, tile)
        elif not group.by_interval:
            hidden = torch.isneginf(logits)
        power(logits.sub_(row_max), out=weights)
        if hidden is not None and group.may_overflow:  # it gives nothing, NaN itself or not
            weights.masked_fill_(hidden, 0.0)
        mass[:, inside] = torch.bmm(share.expand(len(weights), -1, -1), weights)[:, 0]
        if hidden is not None and not group.by_interval:
            seen_by[:, inside] = (~hidden).sum(1)
        if bins is not None and pooled is not None:
            pool_tile(pooled, bins, block, tile, weights.mul_(share.mT))
    number = (group.rows_before + block.start) // TILE_ROWS
    return BlockMass(number, first, mass, seen_by), pooled
