"""From the sums of tiles to the statistics of whole rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from attncli.attention.streaming.head_group import HeadGroup
from attncli.attention.streaming.tiles import NO_WEIGHT, TileSums, exponential
from attncli.columns import column


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStatistics:
    """What is known of rows, (G, R) for the heads of a group or (R,) for one of them.

    Floats are float64, and NaN where a row has no such value: an empty row has none. Fields that
    are columns say themselves what they are.

    Attributes:
        row_max: the larger of the largest logit and the sink.
        sum_exp_minus_1: Σ e^(s − row_max) − 1 over all outcomes, so that a weight is
            e^(s − row_max) / (1 + sum_exp_minus_1).
        empty: bool, whether the query sees no key.
        output: (G, R, d_v), in the dtype of arithmetic, 0 in empty rows; None if not asked for.
    """

    keys: torch.Tensor = column("keys", description="int64, number of visible keys")
    entropy_nats: torch.Tensor = column(
        "entropy", unit="nats", description="of all outcomes: the visible keys and the sink"
    )
    entropy_bits: torch.Tensor = column("entropy", unit="bits", description="the same in bits")
    entropy_normalized: torch.Tensor = column(
        "normalised", description="entropy / ln(outcomes), where there is more than one outcome"
    )
    effective_keys: torch.Tensor = column("effective keys", description="e^entropy")
    max_weight: torch.Tensor = column(
        "largest weight", description="the largest weight of a visible key"
    )
    top_key: torch.Tensor | None = column(
        "top key", description="int64, key of the largest logit, −1 for none; None if not asked for"
    )
    max_logit: torch.Tensor | None = column(
        "max logit",
        description="the largest that is not NaN; NaN where there is no other; None of weights",
    )
    logsumexp: torch.Tensor | None = column(
        "logsumexp", description="of the visible keys alone; None of weights"
    )
    sink_mass: torch.Tensor | None = column(
        "sink mass",
        description="weight on the first keys; None until it is looked for",
        default=None,
    )
    distance: torch.Tensor | None = column(
        "distance", description="Σ w·|p − j|, in keys; None where positions are not defined"
    )
    sink_weight: torch.Tensor | None = column(
        "sink logit's weight", description="what the sink logit takes; None without one"
    )
    nonfinite: torch.Tensor = column(
        "non-finite", description="bool, whether a visible logit is NaN or infinite"
    )
    row_max: torch.Tensor
    sum_exp_minus_1: torch.Tensor
    empty: torch.Tensor
    output: torch.Tensor | None

    @property
    def outcomes(self) -> torch.Tensor:
        """Int64: visible keys, and the sink where there is one; 0 in empty rows."""
        with_sink = 0 if self.sink_weight is None else 1
        return (self.keys + with_sink).masked_fill(self.empty, 0)

    def having(self, name: str) -> torch.Tensor:
        """Bool, which rows have a value in a column: without a choice nothing is normalised."""
        return self.outcomes > 1 if name == "entropy_normalized" else ~self.empty

    def of_head(self, index: int) -> dict[str, Any]:
        """The fields of one head of the group."""
        whole = {part.name: getattr(self, part.name) for part in fields(RowStatistics)}
        return {name: None if value is None else value[index] for name, value in whole.items()}


def finish_rows(group: HeadGroup, sums: TileSums) -> RowStatistics:
    """Merge the tiles of a block of rows.

    Source: entropy H = ln Σe^(s−m) − Σe^(s−m)(s−m) / Σe^(s−m), from H = −Σ w ln w.
    """
    sinks, keys = group.sinks, sums.seen.expand(sums.nonfinite.shape)
    merged = _merge_tiles(group, sums)
    if group.given is not None:  # a row that gives nothing is an empty one, whatever it may see
        keys = keys.masked_fill(merged.row_max == NO_WEIGHT, 0)
    empty = keys == 0
    joined = merged if sinks is None else _join_sink(merged, sinks, sums.lost)
    shrink = exponential(merged.row_max - joined.row_max)  # 1 without a sink
    largest = shrink / (1 + joined.sum_exp_minus_1)
    spread = joined.sum_exp_shifted / (1 + joined.sum_exp_minus_1)
    entropy = torch.log1p(joined.sum_exp_minus_1) - spread
    sink_weight = None
    if sinks is not None:
        sink_weight = exponential(sinks - joined.row_max) / (1 + joined.sum_exp_minus_1)
    outcomes = (keys + (sinks is not None)).to(torch.float64)
    limit = torch.log(outcomes)

    def of_rows(values: torch.Tensor) -> torch.Tensor:
        return values.masked_fill(empty, torch.nan)

    entropy = of_rows(torch.minimum(entropy.clamp(min=0.0), limit) + 0.0)  # never −0.0

    logits_known = group.given is None
    return RowStatistics(
        keys=keys,
        entropy_nats=entropy,
        entropy_bits=entropy / math.log(2),
        entropy_normalized=(entropy / limit).masked_fill(outcomes < 2, torch.nan),
        effective_keys=torch.exp(entropy),
        max_weight=of_rows(largest),
        top_key=_top_key(sums, merged, empty),
        max_logit=of_rows(merged.row_max.masked_fill(sums.lost & merged.vanished, torch.nan))
        if logits_known
        else None,
        logsumexp=of_rows(_logsumexp(sums, merged)) if logits_known else None,
        distance=None if merged.distance is None else of_rows(merged.distance * largest),
        sink_weight=None if sink_weight is None else of_rows(sink_weight),
        nonfinite=sums.nonfinite | (merged.vanished & ~empty),
        row_max=joined.row_max,
        sum_exp_minus_1=joined.sum_exp_minus_1,
        empty=empty,
        output=_output(sums, largest, empty),
    )


def concatenate(blocks: Sequence[RowStatistics]) -> RowStatistics:
    """The statistics of several blocks of rows, one after another."""
    whole: dict[str, Any] = {}
    for field in fields(RowStatistics):
        values = [getattr(block, field.name) for block in blocks]
        whole[field.name] = None if values[0] is None else torch.cat(values, 1)
    return RowStatistics(**whole)


@dataclass(frozen=True, slots=True)
class _Merged:
    """Sums over the outcomes of a row relative to its largest logit, float64 (G, R).

    Attributes:
        row_max: the largest logit.
        sum_exp_minus_1: Σ e^(s − row_max) − 1. Of a nearly one-hot row this is all that counts,
            and beside the 1 it would lose its digits.
        sum_exp_shifted: Σ e^(s − row_max)·(s − row_max).
        distance: Σ e^(s − row_max)·|p − j|; None where positions are not defined.
        best_tile: int64, index of the first tile that holds the largest logit.
        vanished: bool, whether no visible logit is above −inf.
    """

    row_max: torch.Tensor
    sum_exp_minus_1: torch.Tensor
    sum_exp_shifted: torch.Tensor
    distance: torch.Tensor | None
    best_tile: torch.Tensor
    vanished: torch.Tensor


def _merge_tiles(group: HeadGroup, sums: TileSums) -> _Merged:
    tiles, unit = slice(sums.tiles), math.log(2) if group.base2_logits else 1.0
    tile_max, reference, sum_exp, shifted = (
        part[tiles].to(torch.float64) * scale
        for part, scale in (
            (sums.tile_max, unit),
            (sums.reference, unit),
            (sums.sum_exp, 1.0),
            (sums.sum_exp_shifted, unit),
        )
    )  # (T, G, R)
    row_max, best = tile_max.max(0)
    finite_max = row_max.clamp(min=torch.finfo(sums.tile_max.dtype).min * unit)
    shift = (reference - finite_max).clamp(min=-1e5)  # e^−1e5 is 0, and 0 · ∞ would be NaN
    shrink = exponential(shift)
    # What each tile's largest logit weighs, where its sum leaves it out. That of the best tile is
    # the 1 which sum_exp_minus_1 does not count.
    apart = exponential(tile_max - reference) if group.separate_max else torch.zeros_like(sum_exp)
    shifted = (shrink * (shifted + shift * (sum_exp + apart))).sum(0)
    others = (shrink * apart).scatter(0, best[None], 0.0)
    minus_1 = (shrink * sum_exp + others).sum(0) - (0.0 if group.separate_max else 1.0)
    minus_1 = minus_1.masked_fill(sums.lost, torch.nan)
    vanished = torch.isneginf(row_max)
    distance = None if sums.distance_sum is None else (shrink * sums.distance_sum[tiles]).sum(0)
    return _Merged(
        row_max=row_max,
        sum_exp_minus_1=minus_1.masked_fill(vanished, torch.nan),
        sum_exp_shifted=shifted,
        distance=distance,
        best_tile=best,
        vanished=vanished,
    )


def _join_sink(keys: _Merged, sinks: torch.Tensor, lost: torch.Tensor) -> _Merged:
    """Let one more outcome into the sums; where all keys are at −inf, it takes everything."""
    row_max = torch.maximum(keys.row_max, sinks)
    of_keys, of_sink = exponential(keys.row_max - row_max), exponential(sinks - row_max)
    above = keys.row_max - row_max
    behind = keys.sum_exp_minus_1 + of_sink
    in_front = of_keys * (1 + keys.sum_exp_minus_1)
    minus_1 = torch.where(keys.row_max >= sinks, behind, in_front)
    alone = keys.vanished & ~lost
    minus_1 = minus_1.masked_fill(alone, 0.0)
    shifted = of_keys * (keys.sum_exp_shifted + above.clamp(min=-1e5) * (1 + keys.sum_exp_minus_1))
    shifted = shifted + of_sink * (sinks - row_max).clamp(min=-1e5)
    shifted = shifted.masked_fill(alone, 0.0)
    return replace(keys, row_max=row_max, sum_exp_minus_1=minus_1, sum_exp_shifted=shifted)


def _logsumexp(sums: TileSums, keys: _Merged) -> torch.Tensor:
    found = keys.row_max + torch.log1p(keys.sum_exp_minus_1)
    return found.masked_fill(keys.vanished & ~sums.lost, -torch.inf)


def _top_key(sums: TileSums, merged: _Merged, empty: torch.Tensor) -> torch.Tensor | None:
    if sums.top_key is None:
        return None
    keys = sums.top_key[: sums.tiles].gather(0, merged.best_tile[None])[0]  # (G, R)
    return keys.masked_fill(empty | merged.vanished, -1)


def _output(sums: TileSums, largest: torch.Tensor, empty: torch.Tensor) -> torch.Tensor | None:
    if sums.output is None:
        return None
    output = sums.output * largest[..., None].to(sums.output.dtype)
    return output.masked_fill(empty[..., None], 0.0)
