"""The columns of records of heads, keys and groups, and the limits of labels: without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

from attncli.analysis.options import floats, several
from attncli.attention.streaming.head_record import (
    AVERAGED,
    TOKEN_LABELS,
    HeadStatistics,
    Thresholds,
    TokenScores,
)
from attncli.columns import Column, column, columns_of
from attncli.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """Where heads came from."""

    source: str = column("file", is_key=True, description="where Q came from, or random, example")
    group: str = column("group", is_key=True, description="its name in the bundle, else empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyStatistics(GroupPlace):
    """What one key receives from the queries of a head."""

    batch: int = column("batch", is_key=True, description="its index")
    head: int = column("head", is_key=True, description="index of the query head")
    key: int = column("key", is_key=True, description="index of the key")
    queries: int = column("queries", description="real queries that see it")
    mass: float = column("mass", description="Σ of the weights they give it, 0 to queries")
    mass_mean: float | None = column(
        "mean weight", description="mass / queries, 0 to 1; none where no query sees it"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics(GroupPlace):
    """The heads of a group: means over them, extremes, and how many have which label."""

    heads: int = column("heads", description="records of heads: batches × heads")
    entropy_nats_mean: float | None = column(
        "entropy", unit="nats", description="mean over the heads of their mean entropies"
    )
    entropy_bits_mean: float | None = column("entropy", unit="bits", description="the same in bits")
    entropy_nats_min: float | None = column(
        "lowest head", unit="nats", description="mean entropy of the head that has the lowest"
    )
    entropy_nats_max: float | None = column(
        "highest head", unit="nats", description="mean entropy of the head that has the highest"
    )
    entropy_bits_min: float | None = column(
        "lowest head", unit="bits", description="entropy_nats_min in bits"
    )
    entropy_bits_max: float | None = column(
        "highest head", unit="bits", description="entropy_nats_max in bits"
    )
    effective_keys_mean: float | None = column(
        "effective keys", description="mean over the heads of their mean effective keys"
    )
    max_weight_mean: float | None = column(
        "largest weight", description="mean over the heads of their mean largest weights"
    )
    max_logit: float | None = column("max logit", description="largest visible logit of all heads")
    sink_mass_mean: float | None = column(
        "sink mass", description="mean over the heads of their mean weight on the first keys"
    )
    empty_rows: int = column("empty rows", description="rows of all heads that see no key")
    nonfinite_rows: int = column(
        "non-finite rows",
        description="rows of all heads of which a visible logit is NaN or infinite",
    )
    labels: str = column("labels", description="how many heads have which label, most first")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the numbers of a head hold for, and what the sink logit takes on average."""

    scale: float | None = column(
        None, description="what multiplies the scores; none of weights that were given"
    )
    temperature: float | None = column(
        None, description="what divides the scaled scores; none of weights that were given"
    )
    sink_weight_mean: float | None = column(
        "sink logit's weight", description="mean weight that the sink logit takes; none without one"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What is known of the rows in a sample alone."""

    sampled_queries: int = column("rows sampled", description="rows that were looked at")
    sampled_empty_rows: int = column(
        "empty rows of the sample", description="rows of the sample that see no key"
    )
    sampled_nonfinite_rows: int = column(
        "non-finite rows of the sample",
        description="rows of the sample of which a visible logit is NaN or infinite",
    )
    sampled_max_logit: float | None = column(
        "max logit of the sample", description="largest visible logit of the sample"
    )


HEAD = columns_of(GroupPlace, HeadStatistics, Setting)
# Of a sample what all rows alone could tell is none.
_OF_SAMPLE = tuple(each if each.of_sample else replace(each, holds=float | None) for each in HEAD)
WORDS_OF_HEADS = ("label", "nearest_label")
# Beside them where tokens are known.
OF_TOKENS = columns_of(TokenScores)
NUMBERS_OF_HEADS = (
    *(each for each in HEAD if not (each.is_key or each.key in WORDS_OF_HEADS)),
    *OF_TOKENS,
)
CERTAINTY = {
    "se": "standard error of {}; 0 where all rows were looked at",
    "ci95_low": "from where the 95 % interval of {} by Student's t reaches",
    "ci95_high": "to where the 95 % interval of {} reaches",
}
ERRORS = tuple(
    Column(f"{name}_{part}", None, description=says.format(f"{name}_mean"), holds=float | None)
    for name in AVERAGED
    for part, says in CERTAINTY.items()
)
SAMPLED = (*_OF_SAMPLE, *columns_of(Sample), *ERRORS)
KEY = columns_of(KeyStatistics)
GROUP = columns_of(GroupStatistics)


def thresholds_of(limits: Mapping[str, float], where: str) -> Thresholds:
    """Thresholds of the labels, adjusted by the names that labels have.

    Raises:
        UsageError: at `where`: a name that is no label, or a value that is no score above 0.
    """
    names = [field.name for field in fields(Thresholds)]
    adjusted = {name.replace("-", "_"): float(value) for name, value in limits.items()}
    for name, value in adjusted.items():
        if name not in names:
            there = ", ".join(name.replace("_", "-") for name in names)
            raise UsageError(where, f"expected some of {there}, got {name!r}")
        if not 0 < value <= 1:
            raise UsageError(where, f"expected a score above 0, up to 1, got {value:g}")
    return Thresholds(**adjusted)


def thresholds_typed(given: list[str] | None, where: str) -> Thresholds:
    """The same from words NAME=X.

    Raises:
        UsageError: at `where`: as above, or words of another form.
    """
    limits: dict[str, float] = {}
    for text in several(given):
        name, _, number = text.partition("=")
        if not number:
            raise UsageError(where, f"expected NAME=X, got {text!r}")
        limits[name.strip()] = (floats(where, [number]) or (0.0,))[0]
    return thresholds_of(limits, where)


def limits_of(thresholds: Thresholds, *, tokens: bool = False) -> dict[str, float]:
    """The thresholds by the names that labels have, those of tokens only if these are known."""
    return {
        name.replace("_", "-"): value
        for name, value in asdict(thresholds).items()
        if tokens or name not in TOKEN_LABELS
    }
