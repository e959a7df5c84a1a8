"""What is said of a head: its numbers, its label, and how a label is chosen. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

from attncli.columns import column, columns_of


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
