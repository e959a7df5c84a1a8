"""The rows of heads in parts that several compute, and joined again as if one had.

A part begins at a multiple of TILE_ROWS, so that its blocks are blocks of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attncli.attention.problem import Problem
from attncli.attention.streaming.divergence import HeadPair, real_on_both, stream_divergences
from attncli.attention.streaming.mass import KeyMass
from attncli.attention.streaming.stream import (
    HeadRows,
    Wanted,
    heads_at_once,
    neighbours,
    stream_rows,
)
from attncli.attention.streaming.tiles import TILE_ROWS
from attncli.ranks import in_order


def join_rows(parts: Sequence[HeadRows]) -> HeadRows:
    """The rows of one head, of which each part has the next ones; bins are not joined."""
    assert parts[0].pooled is None
    best = max(parts, key=_largest_logit)  # the first of equal ones
    received = [part.received for part in parts if part.received is not None]
    joined: HeadRows = join_tensors([replace(part, received=None) for part in parts])
    return replace(
        joined,
        max_logit_query=best.max_logit_query,
        max_logit_key=best.max_logit_key,
        received=KeyMass.joined(received) if received else None,
    )


def _largest_logit(rows: HeadRows) -> float:
    if rows.max_logit is None or rows.max_logit_query is None:
        return -torch.inf
    return float(rows.max_logit.nan_to_num(-torch.inf, torch.inf, -torch.inf).max())


def join_tensors(parts: Sequence[Any]) -> Any:
    """Tensors of rows one after another, or results whose fields are such; else the first."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts))
    if not is_dataclass(first) or isinstance(first, type):
        return first
    names = [field.name for field in fields(first)]
    return replace(first, **{n: join_tensors([getattr(p, n) for p in parts]) for n in names})


@dataclass(frozen=True, slots=True)
class Run:
    """Some heads of one batch, neighbours that are computed together, and which queries of them."""

    problem: Problem
    batch: int
    heads: range
    queries: Sequence[NDArray[np.int64]] | None  # as for `stream_rows`

    @classmethod
    def all_of(
        cls,
        problem: Problem,
        batches: Sequence[int],
        heads: Sequence[int],
        queries: Sequence[NDArray[np.int64]] | None = None,
    ) -> list[Run]:
        """The runs of heads in which `stream_rows` computes the same."""
        found = []
        for batch in batches:
            real = problem.mask.real_queries(batch)
            at_once = heads_at_once(problem, real if queries is None else len(queries[batch]))
            found += [cls(problem, batch, h, queries) for h in neighbours(heads, at_once)]
        return found

    @property
    def costs(self) -> list[float]:
        """Of each block of rows the cells of its tiles, and one for its being there."""
        hull = self.problem.mask.hull(self.batch, self.heads)
        if self.queries is not None:
            hull = hull.queries(self.queries[self.batch])
        rows, found = len(hull.first), []
        for start in range(0, max(1, rows), TILE_ROWS):
            spans = hull.queries(slice(start, start + TILE_ROWS)).spans()
            height = min(TILE_ROWS, rows - start)
            found.append(1.0 + height * sum(high - low for low, high in spans))
        return found


def rows_of_runs(
    runs: Sequence[Run], wanted: Sequence[Wanted], advance: Callable[[int], None] | None = None
) -> Iterator[list[HeadRows]]:
    """What `stream_rows` finds of the heads of each run, shared out over the ranks.

    Args:
        runs: of any problems.
        wanted: of each run.
        advance: as for `stream_rows`, of what this rank does.
    """

    def work(at: int, part: slice) -> list[HeadRows]:
        run, rows = runs[at], rows_of(part)
        found = stream_rows(
            run.problem,
            wanted[at],
            batches=[run.batch],
            heads=run.heads,
            queries=run.queries,
            part=rows,
            advance=advance,
        )
        return list(found)

    def join(parts: Sequence[list[HeadRows]]) -> list[HeadRows]:
        return [join_rows(of_head) for of_head in zip(*parts, strict=True)]

    return in_order(range(len(runs)), lambda at: runs[at].costs, work, join)


def shared_divergences(
    a: Problem,
    b: Problem,
    wanted: Wanted,
    *,
    batches: Sequence[int],
    heads: Sequence[int],
    advance: Callable[[int], None] | None = None,
) -> Iterator[HeadPair]:
    """What `stream_divergences` finds, shared out over the ranks."""
    queries = [real_on_both(a, b, batch) for batch in range(a.sizes.batch)]
    sides = [Run.all_of(side, batches, heads, queries) for side in (a, b)]

    def costs(at: int) -> list[float]:
        return [sum(both) for both in zip(*(side[at].costs for side in sides), strict=True)]

    def work(at: int, part: slice) -> list[HeadPair]:
        run, rows = sides[0][at], rows_of(part)
        found = stream_divergences(
            a, b, wanted, batches=[run.batch], heads=run.heads, part=rows, advance=advance
        )
        return list(found)

    def join(parts: Sequence[list[HeadPair]]) -> list[HeadPair]:
        return [_join_pairs(of_head) for of_head in zip(*parts, strict=True)]

    for pairs in in_order(range(len(sides[0])), costs, work, join):
        yield from pairs


def _join_pairs(parts: Sequence[HeadPair]) -> HeadPair:
    a, b = (join_rows([getattr(part, side) for part in parts]) for side in "ab")
    return HeadPair(a, b, join_tensors([part.rows for part in parts]))


def rows_of(blocks: slice) -> slice:
    """The rows of some blocks in a row."""
    start, stop = blocks.start, blocks.stop
    return slice(start and start * TILE_ROWS, stop and stop * TILE_ROWS)
