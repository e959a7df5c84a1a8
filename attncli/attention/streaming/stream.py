"""Statistics of every query row, and the output, in memory that grows with n alone.

The score matrix is visited in tiles and never held; heads come one after another, several at a
time where they are small.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from attncli.attention.crew import one_torch_thread, share_out
from attncli.attention.streaming.head_group import make_group, top_key_of
from attncli.attention.streaming.intervals import RowBlock, as_intervals, row_blocks
from attncli.attention.streaming.row_statistics import RowStatistics, concatenate, finish_rows
from attncli.attention.streaming.second_pass import (
    KeyMass,
    add_broken_values,
    mass_of_block,
    no_mass,
)
from attncli.attention.streaming.single_keys import Shares, find_shares
from attncli.attention.streaming.tiles import (
    TILE_CELLS,
    TILE_KEYS,
    TILE_ROWS,
    Gather,
    Workspace,
    sum_tiles,
)
from attncli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from attncli.attention.problem import Problem
    from attncli.attention.streaming.head_group import HeadGroup

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to compute beside the columns that every row has.

    Attributes:
        top_key: the key of the largest logit of every row.
        output: the output, where the problem has values.
        per_key: the mass that each key receives; costs a second pass.
        sink_keys: how many of the first keys `sink_mass` is the weight of.
        local_window: how many steps from its query a key counts as local, for labels.
    """

    top_key: bool = False
    output: bool = False
    per_key: bool = False
    sink_keys: int = 1
    local_window: int = 4

    def __post_init__(self) -> None:
        """Refuse counts that make no sense.

        Raises:
            UsageError: naming the option.
        """
        for option, count in {
            "--sink-keys": self.sink_keys,
            "--local-window": self.local_window,
        }.items():
            if count < 1:
                raise UsageError(option, f"expected at least 1, got {count}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRows:
    """Statistics of the real queries of one head, on the device of arithmetic.

    Floats of rows are float64, and NaN where a row has no such value: an empty row has none.

    Attributes:
        batch, head: indices into the tensors.
        queries: int64 (R,), indices of the queries, ascending; padded ones are left out.
        keys: int64 (R,), visible keys.
        outcomes: int64 (R,), visible keys, and the sink where there is one.
        entropy_nats: (R,), of all outcomes, in nats.
        max_weight: (R,), the largest weight of a key.
        top_key: int64 (R,), the key of the largest logit, −1 for none; None if not asked for.
        max_logit: (R,).
        logsumexp: (R,), of the visible keys alone.
        sink_weight: (R,), what the sink logit takes; None without one.
        sink_mass: (R,), weight on the first keys.
        distance: (R,), Σ w·|p − j|; None where positions are not defined.
        shares: what the keys get that heads are labelled by.
        empty: bool (R,), whether the query sees no key.
        nonfinite: bool (R,), whether a visible logit is NaN or infinite.
        max_logit_query: the first query that reaches the head's largest logit; None for none.
        max_logit_key: the first key of that query that does.
        output: (R, d_v), in the dtype of arithmetic; None if not asked for.
        received: mass of each key; None if not asked for.
    """

    batch: int
    head: int
    queries: torch.Tensor
    keys: torch.Tensor
    outcomes: torch.Tensor
    entropy_nats: torch.Tensor
    max_weight: torch.Tensor
    top_key: torch.Tensor | None
    max_logit: torch.Tensor
    logsumexp: torch.Tensor
    sink_weight: torch.Tensor | None
    sink_mass: torch.Tensor
    distance: torch.Tensor | None
    shares: Shares
    empty: torch.Tensor
    nonfinite: torch.Tensor
    max_logit_query: int | None
    max_logit_key: int | None
    output: torch.Tensor | None
    received: KeyMass | None


def stream_rows(
    problem: Problem,
    wanted: Wanted | None = None,
    *,
    queries: Sequence[NDArray[np.int64]] | None = None,
    advance: Callable[[int], None] | None = None,
) -> Iterator[HeadRows]:
    """Compute the statistics of every row, one batch and head after another.

    Args:
        problem: what to compute.
        wanted: what to compute beside the columns that every row has.
        queries: int64 arrays, one per batch: ascending indices of the queries to look at; None
            for all real ones.
        advance: told after each block of rows how many of the `planned_cells` it covered.
    """
    wanted = wanted or Wanted()
    mask = as_intervals(problem.mask)
    moved = mask.to_torch(problem.device)
    for batch in range(problem.sizes.batch):
        chosen = np.arange(mask.real_queries(batch)) if queries is None else queries[batch]
        for heads in _head_ranges(problem, len(chosen)):
            with one_torch_thread(problem.device) as workers:
                group = make_group(problem, mask, moved, batch, heads, chosen, wanted.output)
                found = _of_group(replace(group, workers=workers), wanted, advance)
            yield from found


def planned_cells(problem: Problem, wanted: Wanted | None = None) -> int:
    """Cells that `stream_rows` will visit, of all batches and heads; for progress."""
    mask = as_intervals(problem.mask)
    passes = 1 + (wanted is not None and wanted.per_key)
    cells = 0
    for batch in range(problem.sizes.batch):
        row = batch if len(mask.first) > 1 else 0
        real = mask.real_queries(batch)
        blocks = row_blocks(mask.first[row, :real], mask.stop[row, :real], TILE_ROWS, TILE_KEYS)
        cells += sum(map(_cells, blocks))
    return cells * problem.sizes.heads * passes


def _cells(block: RowBlock) -> int:
    return (block.stop - block.start) * sum(tile.stop - tile.start for tile in block.tiles)


def _head_ranges(problem: Problem, rows: int) -> Iterator[range]:
    """Ranges of heads of which one tile each fits the buffers."""
    cells = min(rows, TILE_ROWS) * min(problem.sizes.k_len, TILE_KEYS)
    step = max(1, TILE_CELLS // max(1, cells))
    for start in range(0, problem.sizes.heads, step):
        yield range(start, min(start + step, problem.sizes.heads))


def _of_group(
    group: HeadGroup, wanted: Wanted, advance: Callable[[int], None] | None
) -> list[HeadRows]:
    """All that is wanted of some heads."""
    broken = None
    if group.values is not None and not bool(torch.isfinite(group.values).all()):
        broken = group.values
        group = replace(group, values=torch.where(torch.isfinite(broken), broken, 0.0))
    blocks = list(row_blocks(group.first, group.stop, TILE_ROWS, TILE_KEYS))
    rows = _all_rows(group, blocks, wanted, advance)
    if broken is not None:
        add_broken_values(group, blocks, rows, broken)
    received = _all_mass(group, blocks, rows, advance) if wanted.per_key else None
    shares = find_shares(group, rows, wanted.sink_keys, wanted.local_window)
    return [_of_head(group, index, rows, shares, received) for index in range(len(group.heads))]


def _all_rows(
    group: HeadGroup,
    blocks: list[RowBlock],
    wanted: Wanted,
    advance: Callable[[int], None] | None,
) -> RowStatistics:
    # float64 has digits enough for the entropy of nearly one-hot rows to be worth the index.
    crown = group.dtype == torch.float64
    gather = Gather(
        crown=crown,
        place=crown or wanted.top_key,
        reach=group.positions is not None,
        output=group.values is not None,
    )

    def finish(block: RowBlock, work: Workspace) -> RowStatistics:
        return finish_rows(sum_tiles(group, block, gather, work), crown, group.sinks, group.binary)

    pieces = blocks or [RowBlock(0, 0, ())]
    found = []
    for block, rows in zip(pieces, _each(group, finish, pieces), strict=True):
        found.append(rows)
        if advance is not None:
            advance(len(group.heads) * _cells(block))
    return concatenate(found)


def _all_mass(
    group: HeadGroup,
    blocks: list[RowBlock],
    rows: RowStatistics,
    advance: Callable[[int], None] | None,
) -> KeyMass:
    def give(block: RowBlock, work: Workspace) -> KeyMass:
        return mass_of_block(group, block, rows, work)

    received = no_mass(group)
    for block, part in zip(blocks, _each(group, give, blocks), strict=True):
        if block.tiles:
            inside = slice(block.tiles[0].start, block.tiles[-1].stop)
            received.mass[:, inside] += part.mass
            received.queries[:, inside] += part.queries
        if advance is not None:
            advance(len(group.heads) * _cells(block))
    return received


def _each(
    group: HeadGroup, function: Callable[[RowBlock, Workspace], Result], blocks: list[RowBlock]
) -> Iterator[Result]:
    return share_out(function, blocks, lambda: Workspace.of(group), group.workers)


def _of_head(
    group: HeadGroup, index: int, rows: RowStatistics, shares: Shares, received: KeyMass | None
) -> HeadRows:
    def pick(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[index]

    own = shares.of_head(index)
    with_sink = 0 if rows.sink_weight is None else 1
    query, key = _largest_logit(group, index, rows)
    return HeadRows(
        batch=group.batch,
        head=group.heads[index],
        queries=group.rows,
        keys=rows.keys[index],
        outcomes=(rows.keys[index] + with_sink).masked_fill(rows.empty[index], 0),
        entropy_nats=rows.entropy_nats[index],
        max_weight=rows.max_weight[index],
        top_key=pick(rows.top_key),
        max_logit=rows.max_logit[index],
        logsumexp=rows.logsumexp[index],
        sink_weight=pick(rows.sink_weight),
        sink_mass=own.first.weight,
        distance=pick(rows.distance),
        shares=own,
        empty=rows.empty[index],
        nonfinite=rows.nonfinite[index],
        max_logit_query=query,
        max_logit_key=key,
        output=pick(rows.output),
        received=None if received is None else received.of_head(index),
    )


def _largest_logit(
    group: HeadGroup, index: int, rows: RowStatistics
) -> tuple[int | None, int | None]:
    """Query and key of the largest logit of a head, the first where several are equal."""
    logits = rows.max_logit[index]
    logits = torch.where(torch.isnan(logits), -torch.inf, logits)
    if not len(logits):
        return None, None
    row = int(logits.argmax())
    if bool(torch.isnan(rows.max_logit[index, row])):
        return None, None
    query = int(group.queries[row])
    if rows.top_key is not None:
        return query, int(rows.top_key[index, row])
    return query, top_key_of(group, index, row)
