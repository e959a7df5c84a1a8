"""From the rows of a head to one record, or to estimates where they are a sample."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from attncli.attention.problem import Problem
from attncli.attention.streaming.labels import LabelScores, Thresholds, choose_label, score_labels
from attncli.attention.streaming.stream import HeadRows
from attncli.attention.threads import single_threaded_torch
from attncli.columns import column, columns_of


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadStatistics:
    """One head in numbers; means are over its rows that are not empty, std is the population's.

    None stands for what there is not, NaN for what NaN and infinities in the input made of it.
    A field that ends in `_mean` is the mean of the column of rows of that name.
    """

    batch: int = column("batch", is_key=True)
    head: int = column("head", is_key=True)
    queries: int = column(None, description="real queries")
    empty_rows: int = column(
        "empty rows", description="those of them that see no key", of_sample=False
    )
    keys_mean: float | None = column(None, description="visible keys")
    entropy_nats_mean: float | None = column("entropy", unit="nats")
    entropy_nats_min: float | None = column(None, unit="nats", of_sample=False)
    entropy_nats_max: float | None = column(None, unit="nats", of_sample=False)
    entropy_nats_std: float | None = column(
        None, unit="nats", description="the population's", of_sample=False
    )
    entropy_bits_mean: float | None = column("entropy", unit="bits")
    entropy_normalized_mean: float | None = column(
        None, description="entropy / ln(outcomes), over the rows with more than one outcome"
    )
    effective_keys_mean: float | None = column("effective keys", description="e^entropy")
    max_weight_mean: float | None = column(
        "largest weight", description="the largest weight of each row"
    )
    max_weight_max: float | None = column(None, of_sample=False)
    max_logit: float | None = column(
        "max logit", description="the largest visible logit", of_sample=False
    )
    max_logit_query: int | None = column(
        "at query", description="where it stands first", of_sample=False
    )
    max_logit_key: int | None = column("at key", of_sample=False)
    logsumexp_mean: float | None = column("logsumexp", description="of the visible keys")
    sink_mass_mean: float | None = column("sink mass", description="weight on the first keys")
    distance_mean: float | None = column(
        "distance", description="Σ w·|p − j|, in keys; None where positions are not defined"
    )
    nonfinite_rows: int = column(
        "non-finite rows",
        description="rows of which a visible logit is NaN or infinite",
        of_sample=False,
    )
    label: str | None = column(
        "label", description="what the head does; None where no query has a choice"
    )
    label_score: float | None = column(None, description="how much it is that, 0 to 1")
    scores: LabelScores  # of all labels


# The columns of rows of which heads have means.
AVERAGED = tuple(
    each.key.removesuffix("_mean")
    for each in columns_of(HeadStatistics)
    if each.key.endswith("_mean")
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over all rows of a head, estimated from some of them.

    Attributes:
        mean: unbiased.
        standard_error: of the mean, 0 where all rows were looked at; None from a single row.
    """

    mean: float
    standard_error: float | None


def head_statistics(rows: HeadRows, thresholds: Thresholds | None = None) -> HeadStatistics:
    """Sum up the rows of one head.

    Args:
        rows: as `stream_rows` yields them.
        thresholds: of the labels.
    """
    with single_threaded_torch(rows.keys.device):
        return _head_statistics(rows, thresholds)


def _head_statistics(rows: HeadRows, thresholds: Thresholds | None) -> HeadStatistics:
    scores = score_labels(rows)
    label, label_score = choose_label(scores, thresholds)
    lowest, highest, std = _spread(rows.entropy_nats[~rows.empty])
    return HeadStatistics(
        **{f"{name}_mean": _mean(values) for name, values in row_values(rows).items()},
        batch=rows.batch,
        head=rows.head,
        queries=len(rows.queries),
        empty_rows=int(rows.empty.sum()),
        entropy_nats_min=lowest,
        entropy_nats_max=highest,
        entropy_nats_std=std,
        max_weight_max=_spread(rows.max_weight[~rows.empty])[1],
        max_logit=_largest_logit(rows),
        max_logit_query=rows.max_logit_query,
        max_logit_key=rows.max_logit_key,
        nonfinite_rows=int(rows.nonfinite.sum()),
        label=label,
        label_score=label_score,
        scores=scores,
    )


def row_values(rows: HeadRows) -> dict[str, torch.Tensor]:
    """The columns of which heads have means, float64 (rows that have a value,)."""
    columns = {name: getattr(rows, name) for name in AVERAGED}
    return {
        name: rows.keys.new_empty(0, dtype=torch.float64)
        if values is None
        else values[rows.having(name)].to(torch.float64)
        for name, values in columns.items()
    }


def draw_rows(problem: Problem, count: int, seed: int) -> list[NDArray[np.int64]]:
    """The rows of a sample, ascending int64, one array per batch."""
    rng = np.random.default_rng(seed)
    chosen = []
    for batch in range(problem.sizes.batch):
        real = problem.mask.real_queries(batch)
        drawn = rng.choice(real, min(count, real), replace=False)
        chosen.append(np.sort(drawn).astype(np.int64))
    return chosen


def estimates_of(rows: HeadRows, queries: int) -> dict[str, Estimate]:
    """Estimates of the means of one head; columns without a row in the sample are left out.

    Args:
        rows: the sample.
        queries: how many real queries the head has.
    """
    return {
        name: estimate(values, len(rows.queries), queries)
        for name, values in row_values(rows).items()
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


def _mean(values: torch.Tensor) -> float | None:
    return float(values.mean()) if len(values) else None


def _spread(values: torch.Tensor) -> tuple[float | None, float | None, float | None]:
    """Smallest, largest and population standard deviation."""
    if not len(values):
        return None, None, None
    std = values.std(correction=0)
    lowest, highest, deviation = torch.stack([values.min(), values.max(), std]).tolist()
    return lowest, highest, deviation


def _largest_logit(rows: HeadRows) -> float | None:
    if rows.max_logit is None:
        return None
    known = rows.max_logit[~torch.isnan(rows.max_logit)]
    return float(known.max()) if len(known) else None
