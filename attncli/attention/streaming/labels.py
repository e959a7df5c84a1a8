"""What a head is: one word, and how much it is that.

Scores are between 0 and 1. Those of places (previous token, self, sink, local) are the mean weight
on the keys in question, corrected for what even attention would put there:

    score = (mean weight − mean even share) / (1 − mean even share), at least 0

so that an even head scores 0 however few keys there are, and one that looks nowhere else 1. Rows
in which the keys in question are all keys or none do not count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum

import torch

from attncli.attention.streaming.shares import Share
from attncli.attention.streaming.stream import HeadRows


class Label(StrEnum):
    """What a head does, in the order in which the words are considered."""

    PREVIOUS_TOKEN = "previous-token"
    SELF = "self"
    SINK = "sink"
    LOCAL = "local"
    UNIFORM = "uniform"
    COLLAPSED = "collapsed"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Scores from which on a head may get a label; `choose_label` says which of several it gets.

    Attributes:
        previous_token: on the key before the query's own position.
        self: on the key at the query's own position.
        sink: on the first keys, and the sink logit where there is one.
        local: on the keys a few steps from the query, these two included.
        uniform: mean entropy as a share of the largest possible.
        collapsed: 1 − that share: nearly all weight on one key, and not on any of the above.
    """

    previous_token: float = 0.5
    self: float = 0.5
    sink: float = 0.5
    local: float = 0.6
    uniform: float = 0.95
    collapsed: float = 0.95


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


def score_labels(rows: HeadRows) -> LabelScores:
    """Score every label for one head."""
    shares = rows.shares
    sink_weight = rows.sink_weight
    normalized = _mean(rows.entropy_normalized[rows.having("entropy_normalized")])
    return LabelScores(
        previous_token=_place_score(rows, shares.previous),
        self=_place_score(rows, shares.own),
        sink=_place_score(rows, shares.first, sink_weight),
        local=_place_score(rows, shares.local),
        uniform=normalized,
        collapsed=None if normalized is None else 1 - normalized,
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
    places = [name for name in fitting if name in ("previous_token", "self", "sink")]
    best = max(places, key=known.__getitem__) if places else next(iter(fitting), None)
    if best is None:
        nearest = max(score / getattr(thresholds, name) for name, score in known.items())
        return Label.MIXED, 1 - nearest
    return Label(best.replace("_", "-")), known[best]


def _place_score(
    rows: HeadRows, share: Share | None, also: torch.Tensor | None = None
) -> float | None:
    """Mean weight on some keys, corrected for chance; `also` is the weight of one more outcome."""
    if share is None:
        return None
    weight, seen = share.weight, share.seen
    if also is not None:
        weight, seen = (weight + also).clamp(max=1.0), seen + 1
    even = seen.to(torch.float64) / rows.outcomes.clamp(min=1)  # (R,)
    counts = (even > 0) & (even < 1)
    if not bool(counts.any()):
        return None
    means = torch.stack([weight[counts].mean(), even[counts].mean()])
    found, chance = float(means[0]), float(means[1])
    if math.isnan(found):
        return None
    return max(0.0, (found - chance) / (1 - chance))


def _mean(values: torch.Tensor) -> float | None:
    mean = float(values.mean()) if len(values) else math.nan
    return None if math.isnan(mean) else mean
