"""Some heads of a problem, as problems of their own, so that the others cost nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from attncli.attention.masks.mask import Mask, Sizes
from attncli.attention.stages import select

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from attncli.attention.problem import Problem
    from attncli.attention.streaming.stream import HeadRows, Wanted


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring batches and heads of a problem, as one of its own.

    Attributes:
        problem: it; its tensors are views.
        batch: the batch that its first batch is in the whole.
        head: likewise its first head.
    """

    problem: Problem
    batch: int = 0
    head: int = 0


def chosen_parts(
    problem: Problem, batches: Sequence[int] | None, heads: Sequence[int] | None
) -> list[Part]:
    """The whole problem where nothing is chosen, otherwise a part for each chosen head.

    Args:
        problem: the whole, which alone decides the dtype of the arithmetic.
        batches: indices, negative ones counted from the end; None for all.
        heads: query heads, likewise.

    Raises:
        UsageError: an index beyond its axis.
    """
    chosen = select(problem, batches, heads)
    if batches is None and heads is None:
        return [Part(problem)]
    pairs = ((batch, head) for batch in sorted(chosen.batches) for head in sorted(chosen.heads))
    return [Part(_one_head(problem, batch, head), batch, head) for batch, head in pairs]


def stream_parts(
    parts: Sequence[Part],
    wanted: Wanted,
    *,
    queries: Sequence[NDArray[np.int64]] | None = None,
    advance: Callable[[int], None] | None = None,
) -> Iterator[HeadRows]:
    """The rows of every head, under its indices in the whole; arguments as for `stream_rows`.

    Args:
        parts: as `chosen_parts` gives them.
        wanted: what to compute.
        queries: the rows to look at, one array for each batch of the whole; None for all.
        advance: told of progress.
    """
    from attncli.attention.streaming.stream import stream_rows

    for part in parts:
        inside = slice(part.batch, part.batch + part.problem.sizes.batch)
        own = None if queries is None else queries[inside]
        for rows in stream_rows(part.problem, wanted, queries=own, advance=advance):
            yield replace(rows, batch=part.batch + rows.batch, head=part.head + rows.head)


def _one_head(problem: Problem, batch: int, head: int) -> Problem:
    shared = problem.kv_head(head)
    of_batch, of_head = slice(batch, batch + 1), slice(head, head + 1)
    of_keys = slice(shared, shared + 1)
    return replace(
        problem,
        q=problem.q[of_batch, of_head],
        k=problem.k[of_batch, of_keys],
        v=None if problem.v is None else problem.v[of_batch, of_keys],
        mask=_mask_of_head(problem.mask, of_batch, of_head),
        sinks=None if problem.sinks is None else problem.sinks[of_head],
    )


def _mask_of_head(mask: Mask, batch: slice, head: slice) -> Mask:
    def of_batch(array: Any) -> Any:
        return array if array is None or len(array) == 1 else array[batch]

    def of_head(array: Any) -> Any:
        array = of_batch(array)
        return array if array is None or array.shape[1] == 1 else array[:, head]

    return replace(
        mask,
        sizes=Sizes(1, 1, mask.sizes.q_len, mask.sizes.k_len),
        offset=of_batch(mask.offset),
        first=of_batch(mask.first),
        stop=of_batch(mask.stop),
        key_keep=of_batch(mask.key_keep),
        segments=of_batch(mask.segments),
        allowed=of_head(mask.allowed),
        added=of_head(mask.added),
        slopes=None if mask.slopes is None else mask.slopes[head],
        query_lengths=of_batch(mask.query_lengths),
    )
