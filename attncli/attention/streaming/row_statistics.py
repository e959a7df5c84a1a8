"""From the sums of tiles to the statistics of whole rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from attncli.attention.streaming.exponential import exponential

if TYPE_CHECKING:
    from attncli.attention.streaming.tiles import TileSums


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStatistics:
    """What is known of G × R rows; NaN stands for what an empty row does not have.

    Attributes:
        keys: int64, number of visible keys.
        entropy_nats: float64, of all outcomes: the visible keys and the sink, if there is one.
        max_weight: float64, the largest weight of a visible key.
        max_logit: float64, the largest that is not NaN; NaN where there is no other.
        top_key: int64, the key it belongs to, −1 in empty rows; None if not asked for.
        logsumexp: float64, of the visible keys alone.
        peak: float64, the larger of the largest logit and the sink.
        excess: float64, Σ e^(s − peak) − 1 over all outcomes, so that a weight is
            e^(s − peak) / (1 + excess).
        sink_weight: float64, what the sink takes; None without one.
        distance: float64, Σ w·|p − j|; None where positions are not defined.
        empty: bool, whether the query sees no key.
        nonfinite: bool, whether a visible logit is NaN or infinite.
        output: (G, R, d_v), in the dtype of arithmetic, 0 in empty rows; None if not asked for.
    """

    keys: torch.Tensor
    entropy_nats: torch.Tensor
    max_weight: torch.Tensor
    max_logit: torch.Tensor
    top_key: torch.Tensor | None
    logsumexp: torch.Tensor
    peak: torch.Tensor
    excess: torch.Tensor
    sink_weight: torch.Tensor | None
    distance: torch.Tensor | None
    empty: torch.Tensor
    nonfinite: torch.Tensor
    output: torch.Tensor | None


def finish_rows(
    sums: TileSums, crown: bool, sinks: torch.Tensor | None, binary: bool = False
) -> RowStatistics:
    """Merge the tiles of a block of rows.

    Args:
        sums: of the tiles.
        crown: whether `total` leaves out the largest weight of each tile.
        sinks: float64 (G, 1), logits that join the denominator; None for none.
        binary: whether logits are in units of ln 2.

    Source: entropy H = ln Σe^(s−m) − Σe^(s−m)(s−m) / Σe^(s−m), from H = −Σ w ln w.
    """
    heads, rows = sums.nonfinite.shape
    keys = sums.seen.expand(heads, rows)
    empty = keys == 0
    if not sums.tiles:
        return _nothing_seen(sums, keys, sinks is not None)
    merged = _merge_tiles(sums, crown, binary)
    joined = merged if sinks is None else _join_sink(merged, sinks)
    shrink = exponential(merged.peak - joined.peak)  # 1 without a sink
    largest = shrink / (1 + joined.excess)
    entropy = torch.log1p(joined.excess) - joined.moment / (1 + joined.excess)
    outcomes = (keys + (sinks is not None)).to(torch.float64)
    entropy = torch.minimum(entropy.clamp(min=0.0), torch.log(outcomes)) + 0.0  # never −0.0

    def of_rows(values: torch.Tensor) -> torch.Tensor:
        return values.masked_fill(empty, torch.nan)

    return RowStatistics(
        keys=keys,
        entropy_nats=of_rows(entropy),
        max_weight=of_rows(largest),
        max_logit=of_rows(merged.peak.masked_fill(merged.lost, torch.nan)),
        top_key=_top_key(sums, merged, empty),
        logsumexp=of_rows(merged.peak + torch.log1p(merged.excess)),
        peak=joined.peak,
        excess=joined.excess,
        sink_weight=None if sinks is None else of_rows(_weight_of(sinks, joined)),
        distance=None if merged.reach is None else of_rows(merged.reach * largest),
        empty=empty,
        nonfinite=sums.nonfinite | (torch.isneginf(merged.peak) & ~empty),
        output=_output(sums, largest, empty),
    )


def concatenate(blocks: list[RowStatistics]) -> RowStatistics:
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
        peak: the largest logit.
        excess: Σ e^(s − peak) − 1. Of a nearly one-hot row this is all that counts, and beside
            the 1 it would lose its digits.
        moment: Σ e^(s − peak)·(s − peak).
        reach: Σ e^(s − peak)·|p − j|; None where positions are not defined.
        best: int64, index of the first tile that holds the largest logit.
        lost: bool, whether every visible logit is NaN.
    """

    peak: torch.Tensor
    excess: torch.Tensor
    moment: torch.Tensor
    reach: torch.Tensor | None
    best: torch.Tensor
    lost: torch.Tensor


def _merge_tiles(sums: TileSums, crown: bool, binary: bool) -> _Merged:
    tiles, unit = slice(sums.tiles), math.log(2) if binary else 1.0
    top, reference, total, moment = (
        part[tiles].to(torch.float64) * scale
        for part, scale in (
            (sums.top, unit),
            (sums.reference, unit),
            (sums.total, 1.0),
            (sums.moment, unit),
        )
    )  # (T, G, R)
    peak, best = top.max(0)
    finite_peak = peak.clamp(min=torch.finfo(sums.top.dtype).min)
    shift = (reference - finite_peak).clamp(min=-1e5)  # e^−1e5 is 0, and 0 · ∞ would be NaN
    shrink = exponential(shift)
    crowns = exponential(top - reference) if crown else torch.zeros_like(total)
    moment = (shrink * (moment + shift * (total + crowns))).sum(0)
    others = (shrink * crowns).scatter(0, best[None], 0.0)
    excess = (shrink * total + others).sum(0) - (0.0 if crown else 1.0)
    hopeless = torch.isneginf(peak)
    return _Merged(
        peak=peak,
        excess=excess.masked_fill(hopeless, torch.nan),
        moment=moment,
        reach=None if sums.reach is None else (shrink * sums.reach[tiles]).sum(0),
        best=best,
        lost=hopeless & torch.isnan(total).any(0),
    )


def _join_sink(keys: _Merged, sinks: torch.Tensor) -> _Merged:
    """Let one more outcome into the sums."""
    peak = torch.maximum(keys.peak, sinks)
    of_keys, of_sink = exponential(keys.peak - peak), exponential(sinks - peak)
    above = keys.peak - peak
    behind = keys.excess + of_sink
    excess = torch.where(keys.peak >= sinks, behind, of_keys * (1 + keys.excess))
    moment = of_keys * (keys.moment + above.clamp(min=-1e5) * (1 + keys.excess))
    moment = moment + of_sink * (sinks - peak).clamp(min=-1e5)
    return _Merged(peak, excess, moment, keys.reach, keys.best, keys.lost)


def _weight_of(logit: torch.Tensor, joined: _Merged) -> torch.Tensor:
    return exponential(logit - joined.peak) / (1 + joined.excess)


def _top_key(sums: TileSums, merged: _Merged, empty: torch.Tensor) -> torch.Tensor | None:
    if sums.place is None:
        return None
    places = sums.place[: sums.tiles].gather(0, merged.best[None])[0]  # (G, R)
    return places.masked_fill(empty | merged.lost, -1)


def _output(sums: TileSums, largest: torch.Tensor, empty: torch.Tensor) -> torch.Tensor | None:
    if sums.output is None:
        return None
    output = sums.output * largest[..., None].to(sums.output.dtype)
    return output.masked_fill(empty[..., None], 0.0)


def _nothing_seen(sums: TileSums, keys: torch.Tensor, with_sink: bool) -> RowStatistics:
    """Statistics of rows that are all empty."""
    nothing = torch.full(keys.shape, torch.nan, dtype=torch.float64, device=keys.device)
    return RowStatistics(
        keys=keys,
        entropy_nats=nothing,
        max_weight=nothing,
        max_logit=nothing,
        top_key=None if sums.place is None else torch.full_like(keys, -1),
        logsumexp=nothing,
        peak=nothing,
        excess=nothing,
        sink_weight=nothing if with_sink else None,
        distance=None if sums.reach is None else nothing,
        empty=torch.ones_like(sums.nonfinite),
        nonfinite=sums.nonfinite,
        output=sums.output,
    )
