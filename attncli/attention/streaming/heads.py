"""From the rows of a head to one record and a label, or to estimates where they are a sample."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum

import numpy as np
import torch
from numpy.typing import NDArray

from attncli.attention.problem import Problem
from attncli.attention.statistics import student_quantile
from attncli.attention.streaming.rows import Share
from attncli.attention.streaming.stream import HeadRows
from attncli.attention.threads import single_threaded_torch
from attncli.columns import column, columns_of


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadStatistics:
    """One head in numbers; means are over its rows that are not empty, std is the population's.

    None stands for what there is not, NaN for what NaN and infinities in the input made of it.
    A field that ends in `_mean` is the mean of the column of rows of that name.
    """

    batch: int = column("batch", is_key=True, description="its index")
    head: int = column("head", is_key=True, description="index of the query head")
    queries: int = column(None, description="real queries, padding left out")
    empty_rows: int = column(
        "empty rows", description="real queries that see no key", of_sample=False
    )
    keys_mean: float | None = column(None, description="mean number of visible keys of a row")
    entropy_nats_mean: float | None = column(
        "entropy",
        unit="nats",
        description="mean of −Σ w ln w, 0 to ln(visible keys); the sink logit counts as a key",
    )
    entropy_nats_min: float | None = column(
        None, unit="nats", description="lowest entropy of a row", of_sample=False
    )
    entropy_nats_max: float | None = column(
        None, unit="nats", description="highest entropy of a row", of_sample=False
    )
    entropy_nats_std: float | None = column(
        None,
        unit="nats",
        description="population standard deviation of the rows' entropies",
        of_sample=False,
    )
    entropy_bits_mean: float | None = column(
        "entropy", unit="bits", description="entropy_nats_mean / ln 2"
    )
    entropy_normalized_mean: float | None = column(
        "normalised",
        description="mean of entropy / ln(visible keys, and the sink logit), 0 to 1, over the rows "
        "with more than one",
    )
    effective_keys_mean: float | None = column(
        "effective keys", description="mean of e^entropy, 1 to the number of visible keys"
    )
    max_weight_mean: float | None = column(
        "largest weight", description="mean of the largest weight of each row, 0 to 1"
    )
    max_weight_max: float | None = column(
        None, description="largest weight of all", of_sample=False
    )
    max_logit: float | None = column(
        "max logit",
        description="largest visible logit: score after scale, temperature, soft cap and bias; "
        "none of weights that were given",
        of_sample=False,
    )
    max_logit_query: int | None = column(
        "at query",
        description="query where max_logit stands first",
        of_sample=False,
        is_extra=True,
    )
    max_logit_key: int | None = column(
        "at key",
        description="key where max_logit stands first",
        of_sample=False,
        is_extra=True,
    )
    logsumexp_mean: float | None = column(
        "logsumexp",
        description="mean of ln Σ e^logit over the visible keys, without the sink logit",
        is_extra=True,
    )
    sink_mass_mean: float | None = column(
        "sink mass", description="mean weight on the first keys («sink_keys»), 0 to 1"
    )
    distance_mean: float | None = column(
        "distance",
        description="mean of Σ w·|p − j|, in keys, p the query's position and j the key's; none "
        "where positions are not defined",
        is_extra=True,
    )
    nonfinite_rows: int = column(
        "non-finite rows",
        description="rows of which a visible logit is NaN or infinite",
        of_sample=False,
    )
    label: str | None = column(
        "label",
        description="what the head does: previous-token, self, sink, induction, duplicate-token, "
        "local, uniform, collapsed or mixed; none where no query has a choice",
    )
    label_score: float | None = column(None, description="how much it is that, 0 to 1")
    nearest_label: str | None = column(
        None, description="the label that a mixed head is nearest to; none of others"
    )
    scores: LabelScores  # of all labels


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """What a head looks for by tokens, where these are known: scores of labels, 0 to 1."""

    induction_score: float | None = column(
        "induction",
        description="mean weight on the keys right behind earlier occurrences of the query's "
        "token, 0 to 1; none where too few tokens come again, or tokens are not known",
        always=False,
    )
    duplicate_token_score: float | None = column(
        "duplicate token",
        description="mean weight on earlier occurrences of the query's token, likewise",
        always=False,
    )


# The columns of rows of which heads have means.
AVERAGED = tuple(
    each.key.removesuffix("_mean")
    for each in columns_of(HeadStatistics)
    if each.key.endswith("_mean")
)


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
        nearest_label=nearest_label(scores, thresholds)[0] if label is Label.MIXED else None,
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
    known = rows.max_logit[~torch.isnan(rows.max_logit)]
    return float(known.max()) if len(known) else None


class Label(StrEnum):
    """What a head does, in the order in which the words are considered."""

    PREVIOUS_TOKEN = "previous-token"
    SELF = "self"
    SINK = "sink"
    LOCAL = "local"
    UNIFORM = "uniform"
    COLLAPSED = "collapsed"
    MIXED = "mixed"
    # These are considered where tokens are known, beside the first three.
    INDUCTION = "induction"
    DUPLICATE_TOKEN = "duplicate-token"


# Labels of which tokens decide, as scores and thresholds name them.
TOKEN_LABELS = ("induction", "duplicate_token")
_PLACES = ("previous_token", "self", "sink", *TOKEN_LABELS)
# Fewer queries whose token came before tell nothing of a head.
_FEWEST_REPEATS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Scores from which on a head may get a label; `choose_label` says which of several it gets."""

    previous_token: float = 0.5  # on the key before the query's own position
    self: float = 0.5  # on the key at the query's own position
    sink: float = 0.5  # on the first keys, and the sink logit where there is one
    local: float = 0.6  # on the keys a few steps from the query, these two included
    uniform: float = 0.95  # mean entropy as a share of the largest possible
    # 1 − that share: nearly all weight on one key, and not on any of the above.
    collapsed: float = 0.95
    induction: float = 0.5  # on the keys right behind earlier occurrences of the query's token
    duplicate_token: float = 0.5  # on these occurrences themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelScores:
    """How well each label fits, 0 to 1; None where it cannot be considered.

    Attributes are those of `Thresholds`.
    """

    previous_token: float | None
    self: float | None
    sink: float | None
    local: float | None
    uniform: float | None
    collapsed: float | None
    induction: float | None = None
    duplicate_token: float | None = None


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
    normalized = _mean(rows.entropy_normalized[rows.having("entropy_normalized")])
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


def choose_label(
    scores: LabelScores, thresholds: Thresholds | None = None
) -> tuple[Label | None, float | None]:
    """The label of a head and its score.

    Of the labels of one place the one that fits best is taken, then the first of the others that
    reaches its threshold. A head that none fits is mixed, and its score is how far, as a share of
    the threshold, the nearest label is away. A head in which no query has a choice has no label.
    """
    thresholds = thresholds or Thresholds()
    all_scores: dict[str, float | None] = {
        field.name: getattr(scores, field.name) for field in fields(scores)
    }
    known = {name: score for name, score in all_scores.items() if score is not None}
    if not known:
        return None, None
    fitting = [name for name in known if known[name] >= getattr(thresholds, name)]
    places = [name for name in fitting if name in _PLACES]
    best = max(places, key=known.__getitem__) if places else next(iter(fitting), None)
    if best is None:
        return Label.MIXED, 1 - nearest_label(scores, thresholds)[1]
    return Label(best.replace("_", "-")), known[best]


def nearest_label(
    scores: LabelScores, thresholds: Thresholds | None = None
) -> tuple[Label | None, float]:
    """The label of which a head has the largest share of the threshold, and that share."""
    shares = {
        field.name: score / getattr(thresholds or Thresholds(), field.name)
        for field in fields(scores)
        if (score := getattr(scores, field.name)) is not None
    }
    if not shares:
        return None, 0.0
    nearest = max(shares, key=shares.__getitem__)
    return Label(nearest.replace("_", "-")), shares[nearest]


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
    means = torch.stack([weight[counts].mean(), even[counts].mean()])
    found, chance = float(means[0]), float(means[1])
    if math.isnan(found):
        return None
    return max(0.0, (found - chance) / (1 - chance))
