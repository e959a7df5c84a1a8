"""Means of a head from a sample of its rows, with their standard errors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attncli.attention.streaming.head_statistics import row_columns
from attncli.attention.streaming.stream import HeadRows, Wanted, stream_rows
from attncli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from numpy.typing import NDArray

    from attncli.attention.problem import Problem


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over all rows of a head, estimated from some of them.

    Attributes:
        mean: unbiased.
        standard_error: of the mean, 0 where all rows were looked at; None from a single row.
    """

    mean: float
    standard_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledHead:
    """What a sample of rows says about a head.

    Attributes:
        rows: the statistics of the rows in the sample.
        sampled: how many rows are in it.
        queries: how many real queries the head has.
        estimates: of the mean of each column of `row_columns`, by its name; columns without a
            row in the sample are left out.
    """

    rows: HeadRows
    sampled: int
    queries: int
    estimates: dict[str, Estimate]


def sample_rows(
    problem: Problem,
    count: int,
    seed: int,
    wanted: Wanted | None = None,
    *,
    advance: Callable[[int], None] | None = None,
) -> Iterator[SampledHead]:
    """Estimate the means of every head from rows drawn evenly without replacement.

    The heads of one batch share their rows. Draws come from `numpy.random.default_rng(seed)`,
    one batch after another.

    Args:
        problem: what to compute.
        count: rows to draw per batch; all real ones where there are no more.
        seed: of the draw.
        wanted: as for `stream_rows`; `per_key` needs all rows and is refused.
        advance: as for `stream_rows`.

    Raises:
        UsageError: fewer than one row, a negative seed, or `per_key`.
    """
    if count < 1:
        raise UsageError("--sample-rows", f"expected at least 1, got {count}")
    if seed < 0:
        raise UsageError("--seed", f"expected at least 0, got {seed}")
    if wanted is not None and wanted.per_key:
        raise UsageError("--per-key", "expected all rows, got --sample-rows beside it")
    chosen = draw_rows(problem, count, seed)
    return _estimates(problem, stream_rows(problem, wanted, queries=chosen, advance=advance))


def draw_rows(problem: Problem, count: int, seed: int) -> list[NDArray[np.int64]]:
    """The rows of a sample, ascending int64, one array per batch."""
    rng = np.random.default_rng(seed)
    chosen = []
    for batch in range(problem.sizes.batch):
        real = problem.mask.real_queries(batch)
        drawn = rng.choice(real, min(count, real), replace=False)
        chosen.append(np.sort(drawn).astype(np.int64))
    return chosen


def _estimates(problem: Problem, heads: Iterator[HeadRows]) -> Iterator[SampledHead]:
    for rows in heads:
        real = problem.mask.real_queries(rows.batch)
        estimates = estimates_of(rows, real)
        yield SampledHead(rows=rows, sampled=len(rows.queries), queries=real, estimates=estimates)


def estimates_of(rows: HeadRows, queries: int) -> dict[str, Estimate]:
    """Estimates of the means of one head; columns without a row in the sample are left out.

    Args:
        rows: the sample.
        queries: how many real queries the head has.
    """
    return {
        name: estimate(values, len(rows.queries), queries)
        for name, values in row_columns(rows).items()
        if len(values)
    }


def estimate(values: torch.Tensor, sampled: int, queries: int) -> Estimate:
    """Mean and standard error from the rows of a sample that have a value.

    Args:
        values: float64 (n,), n ≥ 1.
        sampled: rows drawn, with or without a value.
        queries: rows there are.

    Source: Cochran, "Sampling Techniques" (1977), 2.6 and 2.12: s/√n · √(1 − sampled/queries),
    s² with the divisor n − 1, also for the mean of a domain, such as the rows that are not empty.
    """
    mean = float(values.mean())
    unseen = 1 - sampled / queries
    if unseen == 0:
        return Estimate(mean, 0.0)
    if len(values) == 1:
        return Estimate(mean, None)
    return Estimate(mean, math.sqrt(float(values.var()) / len(values) * unseen))
