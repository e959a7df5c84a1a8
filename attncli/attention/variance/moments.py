"""Exact mean and variance of all visible scores of a head, in linear time where masks allow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncli.attention.variance.cell_sums import CellSums, LongVectors, interval_sums, streamed_sums
from attncli.attention.variance.sides import Side, SideMoments, side_moments
from attncli.attention.variance.visible_intervals import real_keys, visible_intervals

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncli.attention.problem import Problem

# Between these squares of entries, sums of squares of scores are ordinary float32 numbers.
_SMALL, _LARGE = 1e-12, 1e10


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreMoments:
    """Moments of the scores Q Kᵀ of one head; soft cap and biases do not enter.

    "Visible" cells are those the mask lets through, of real queries. "Real pairs" are all real
    queries times all real keys, whatever the mask: only padding takes queries and keys out. Q̄ and
    K̄ are the mean vectors over real queries and keys, Σ_q and Σ_k the population covariances.
    Every number is None where there are no such cells or pairs, or where it is not finite.

    Attributes:
        batch, head: indices of the query head.
        dk: width of a query.
        cells: number of visible cells.
        mean, var, std: of the visible scores, population values.
        var_within_rows: tr(Σ_q Σ_k) + q̄ᵀΣ_k q̄ over real pairs: the mean variance along a row,
            all that softmax sees.
        var_all_pairs: variance over real pairs = var_within_rows + var_from_key_mean.
        scale: multiplies the scores.
        scaled_mean, scaled_var, scaled_std: of scores · scale / temperature over visible cells.
        q_mean_norm, k_mean_norm: ‖q̄‖ and ‖k̄‖.
        q_var, k_var: tr(Σ)/d_k, the variance of an entry about its column's mean, averaged over
            columns.
        var_unit_theory: d_k, what independent entries of mean 0 and variance 1 would give, and
            what 1/√d_k is made for.
        var_from_interaction: tr(Σ_q Σ_k).
        var_from_query_mean: q̄ᵀΣ_k q̄, a bias towards the same keys that all queries share.
        var_from_key_mean: k̄ᵀΣ_q k̄, constant along each row, so softmax never sees it.
        scale_for_unit_variance: temperature / std, the scale that makes scaled_var 1; None where
            std is 0.
    """

    batch: int
    head: int
    dk: int
    cells: int
    mean: float | None
    var: float | None
    std: float | None
    var_within_rows: float | None
    var_all_pairs: float | None
    scale: float
    scaled_mean: float | None
    scaled_var: float | None
    scaled_std: float | None
    q_mean_norm: float | None
    k_mean_norm: float | None
    q_var: float | None
    k_var: float | None
    var_unit_theory: float
    var_from_interaction: float | None
    var_from_query_mean: float | None
    var_from_key_mean: float | None
    scale_for_unit_variance: float | None


@dataclass(frozen=True, slots=True)
class _Head:
    """One head, its real rows, and the dtype that arithmetic is done in."""

    problem: Problem
    batch: int
    head: int
    keys_kept: torch.Tensor | None  # int64, the real keys; None for all
    dtype: torch.dtype

    def queries(self, order: torch.Tensor | None = None) -> Side:
        real = self.problem.mask.real_queries(self.batch)
        rows = self.problem.q[self.batch, self.head, :real]
        return Side(rows, order, self.dtype, self.problem.device)

    def keys(self, order: torch.Tensor | None) -> Side:
        shared = self.problem.k[self.batch, self.problem.kv_head(self.head)]
        return Side(shared, order, self.dtype, self.problem.device)


def key_moments(
    problem: Problem, batch: int, kv_head: int, key_lengths: tuple[int, ...] | None = None
) -> SideMoments | None:
    """Moments of the real keys of a key head, for all query heads that share it.

    Args:
        problem: what is measured.
        batch: index of the batch.
        kv_head: index of the key head.
        key_lengths: as in `score_moments`.
    """
    kept = real_keys(problem.mask, batch, key_lengths)
    first_user = kv_head * (problem.sizes.heads // problem.kv_heads)
    head = _Head(problem, batch, first_user, kept, problem.dtype)
    return _checked_moments(head.keys(kept))


def score_moments(
    problem: Problem,
    batch: int,
    head: int,
    *,
    key_lengths: tuple[int, ...] | None = None,
    keys: SideMoments | None = None,
) -> ScoreMoments:
    """Mean and variance of the scores of one head, and where the variance comes from.

    Exact up to rounding. Linear in S_q and S_k for every mask but a file that depends on both
    query and key, whose cells are gone through in tiles; memory is bounded in every case.

    Args:
        problem: what is measured, in its dtype of arithmetic, sums of blocks in float64.
        batch: index of the batch.
        head: index of the query head.
        key_lengths: number of real keys, one or one per batch, as in `AttentionOptions`: a mask
            alone does not tell padding from causality. None for no padding but `key_padding`.
        keys: `key_moments` of the key head that this head uses, if at hand.

    Source: variance of a product of independent vectors, with uniform draws of a query and a key.
    """
    kept = real_keys(problem.mask, batch, key_lengths)
    found = _Head(problem, batch, head, kept, problem.dtype)
    of_q = _checked_moments(found.queries())
    of_k = keys or _checked_moments(found.keys(kept))
    if of_q is None or of_k is None:
        return _record(found, CellSums(0, 0.0, 0.0, 0.0), of_q, of_k)
    if not (_ordinary(of_q) and _ordinary(of_k)):
        found = _Head(problem, batch, head, kept, torch.float64)
    return _record(found, _visible_sums(found, of_q, of_k), of_q, of_k)


def _checked_moments(side: Side) -> SideMoments | None:
    """Moments of a side, in float64 where squares would leave float32's range."""
    found = side_moments(side)
    if found is None or _ordinary(found):
        return found
    return side_moments(Side(side.tensor, side.order, torch.float64, side.device))


def _ordinary(side: SideMoments) -> bool:
    largest = max(float(side.covariance.diagonal().max()), side.mean_norm**2)
    return _SMALL < largest < _LARGE


def _visible_sums(head: _Head, of_q: SideMoments, of_k: SideMoments) -> CellSums:
    """Sums over the visible cells, by the cheapest way that the mask allows."""
    mask = head.problem.mask
    intervals = visible_intervals(mask, head.batch, head.head, head.keys_kept)
    if intervals is None:
        queries = LongVectors(head.queries(), of_q.centre, of_k.centre, one_first=True)
        keys = LongVectors(head.keys(None), of_k.centre, of_q.centre, one_first=False)
        return streamed_sums(queries, keys, _visible_of(head))
    if intervals.complete:
        return _all_pairs(of_q, of_k)
    queries = LongVectors(head.queries(intervals.rows), of_q.centre, of_k.centre, one_first=True)
    keys = LongVectors(head.keys(intervals.keys), of_k.centre, of_q.centre, one_first=False)
    return interval_sums(queries, keys, intervals.first, intervals.stop)


def _visible_of(head: _Head) -> Callable[[slice, slice], torch.Tensor]:
    """Visibility of a block of the head, bool (rows, columns)."""
    batch, one = slice(head.batch, head.batch + 1), slice(head.head, head.head + 1)

    def visible(rows: slice, cols: slice) -> torch.Tensor:
        block = head.problem.mask.visible(batch, one, rows, cols)[0, 0]
        return torch.as_tensor(block, device=head.problem.device)

    return visible


@dataclass(frozen=True, slots=True)
class _Parts:
    """The variance over all real pairs in three parts, Python floats."""

    interaction: float
    query_mean: float
    key_mean: float

    @classmethod
    def of(cls, of_q: SideMoments, of_k: SideMoments) -> _Parts:
        return cls(
            interaction=float((of_q.covariance * of_k.covariance).sum()),
            query_mean=float(of_q.mean @ of_k.covariance @ of_q.mean),
            key_mean=float(of_k.mean @ of_q.covariance @ of_k.mean),
        )

    @property
    def within_rows(self) -> float:
        return self.interaction + self.query_mean

    @property
    def total(self) -> float:
        return self.within_rows + self.key_mean


def _all_pairs(of_q: SideMoments, of_k: SideMoments) -> CellSums:
    cells = of_q.count * of_k.count
    variance = _Parts.of(of_q, of_k).total
    return CellSums(cells, 0.0, variance * cells, float(of_q.mean @ of_k.mean))


def _record(
    head: _Head, sums: CellSums, of_q: SideMoments | None, of_k: SideMoments | None
) -> ScoreMoments:
    problem = head.problem
    factor = problem.scale / problem.temperature
    parts = _Parts.of(of_q, of_k) if of_q and of_k else None
    mean, var = _finite(sums.mean), _finite(sums.variance)
    std = None if var is None else math.sqrt(var)
    return ScoreMoments(
        batch=head.batch,
        head=head.head,
        dk=problem.dk,
        cells=sums.cells,
        mean=mean,
        var=var,
        std=std,
        var_within_rows=_finite(parts.within_rows if parts else None),
        var_all_pairs=_finite(parts.total if parts else None),
        scale=problem.scale,
        scaled_mean=None if mean is None else _finite(mean * factor),
        scaled_var=None if var is None else _finite(var * factor * factor),
        scaled_std=None if std is None else _finite(std * abs(factor)),
        q_mean_norm=_finite(of_q.mean_norm if of_q else None),
        k_mean_norm=_finite(of_k.mean_norm if of_k else None),
        q_var=_finite(of_q.entry_variance if of_q else None),
        k_var=_finite(of_k.entry_variance if of_k else None),
        var_unit_theory=float(problem.dk),
        var_from_interaction=_finite(parts.interaction if parts else None),
        var_from_query_mean=_finite(parts.query_mean if parts else None),
        var_from_key_mean=_finite(parts.key_mean if parts else None),
        scale_for_unit_variance=_finite(problem.temperature / std) if std else None,
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
