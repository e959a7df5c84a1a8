"""From the rows of a head to one record and a label, or to estimates where they are a sample."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from attncli.attention.problem import Problem
from attncli.attention.statistics import student_quantile
from attncli.attention.streaming.head_record import (
    AVERAGED,
    HeadStatistics,
    Label,
    LabelScores,
    Thresholds,
    choose_label,
    nearest_label,
)
from attncli.attention.streaming.rows import Share
from attncli.attention.streaming.stream import HeadRows
from attncli.attention.threads import single_threaded_torch


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over all rows of a head, estimated from some of them."""

    mean: float  # unbiased
    # Of the mean, 0 where all rows were looked at; None from a single row.
    standard_error: float | None
    reach: float | None  # half the width of the mean's 95 % interval; likewise


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
    lowest, highest, std = _spread(_only(rows.entropy_nats, ~rows.empty))
    return HeadStatistics(
        **{f"{name}_mean": _mean(values) for name, values in row_values(rows).items()},
        batch=rows.batch,
        head=rows.head,
        queries=len(rows.queries),
        empty_rows=int(rows.empty.sum()),
        entropy_nats_min=lowest,
        entropy_nats_max=highest,
        entropy_nats_std=std,
        max_weight_max=_spread(_only(rows.max_weight, ~rows.empty))[1],
        max_logit=_largest_logit(rows),
        max_logit_query=rows.max_logit_query,
        max_logit_key=rows.max_logit_key,
        nonfinite_rows=int(rows.nonfinite.sum()),
        label=label,
        label_score=label_score,
        nearest_label=nearest_label(scores, thresholds)[0] if label is Label.MIXED else None,
        scores=scores,
    )


def row_values(rows: HeadRows) -> dict[str, torch.Tensor]:
    """The columns of which heads have means, float64 (rows that have a value,)."""
    columns = {name: getattr(rows, name) for name in AVERAGED}
    return {
        name: rows.keys.new_empty(0, dtype=torch.float64)
        if values is None
        else _only(values, rows.having(name)).to(torch.float64)
        for name, values in columns.items()
    }


def _only(values: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Some rows, without a copy where they are all: that takes as long as all means of them."""
    return values if bool(chosen.all()) else values[chosen]


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
    with single_threaded_torch(rows.keys.device):
        return {
            name: estimate(values, len(rows.queries), queries)
            for name, values in row_values(rows).items()
            if len(values)
        }


def estimate(values: torch.Tensor, sampled: int, queries: int) -> Estimate:
    """Mean, standard error and interval from the rows of a sample that have a value.

    Args:
        values: float64 (n,), n ≥ 1.
        sampled: rows drawn, with or without a value.
        queries: rows there are.

    Source: Cochran, "Sampling Techniques" (1977), 2.6 and 2.12: s/√n · √(1 − sampled/queries),
    s² with the divisor n − 1, also for the mean of a domain, such as the rows that are not empty;
    2.8 for the quantile of Student's t with n − 1 degrees of freedom. By 2.15 that takes 25 times
    the square of the skewness of rows, which a sample shows too little of.
    """
    mean, rows = float(values.mean()), len(values)
    unseen = 1 - sampled / queries
    if unseen == 0:
        return Estimate(mean, 0.0, 0.0)
    if rows == 1:
        return Estimate(mean, None, None)
    error = math.sqrt(float(values.var()) / rows * unseen)
    return Estimate(mean, error, student_quantile(0.975, rows - 1) * error)


# Rows from which on an interval of a sample holds, where their values are not skewed.
FEWEST_SAMPLED = 20


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
    known = _only(rows.max_logit, ~torch.isnan(rows.max_logit))
    return float(known.max()) if len(known) else None


# Fewer queries whose token came before tell nothing of a head.
_FEWEST_REPEATS = 8


def score_labels(rows: HeadRows) -> LabelScores:
    """Score every label for one head, 0 to 1.

    Scores of places, which is all but uniform and collapsed, are the mean weight on the keys in
    question, corrected for what even attention would put there:

        score = (mean weight − mean even share) / (1 − mean even share), at least 0

    so that an even head scores 0 however few keys there are, and one that looks nowhere else 1.
    Rows in which the keys in question are all keys or none do not count, and of the last two at
    least eight have to.
    """
    shares = rows.shares
    normalized = _mean(_only(rows.entropy_normalized, rows.having("entropy_normalized")))
    if normalized is not None and math.isnan(normalized):
        normalized = None
    return LabelScores(
        previous_token=_place_score(rows, shares.previous),
        self=_place_score(rows, shares.own),
        sink=_place_score(rows, shares.first, rows.sink_weight),
        local=_place_score(rows, shares.local),
        uniform=normalized,
        collapsed=None if normalized is None else 1 - normalized,
        induction=_place_score(rows, shares.behind_repeated, fewest=_FEWEST_REPEATS),
        duplicate_token=_place_score(rows, shares.repeated, fewest=_FEWEST_REPEATS),
    )


def _place_score(
    rows: HeadRows, share: Share | None, also: torch.Tensor | None = None, fewest: int = 1
) -> float | None:
    """Mean weight on some keys, corrected for chance.

    Args:
        rows: of a head.
        share: of the keys; None for none.
        also: the weight of one more outcome that counts as such a key.
        fewest: rows that have to count.
    """
    if share is None:
        return None
    weight, seen = share.weight, share.seen
    if also is not None:
        weight, seen = (weight + also).clamp(max=1.0), seen + 1
    even = seen.to(torch.float64) / rows.outcomes.clamp(min=1)  # (R,)
    counts = (even > 0) & (even < 1)
    if int(counts.sum()) < fewest:
        return None
    found, chance = map(float, torch.stack([weight, even])[:, counts].mean(-1))
    if math.isnan(found):
        return None
    return max(0.0, (found - chance) / (1 - chance))
