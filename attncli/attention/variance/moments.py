"""Exact mean and variance of all visible scores of a head, in linear time where masks allow.

Do these tensors meet the assumption behind 1/√d_k, and if not, what breaks it?
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from attncli.attention.masks.mask import HeadMask
from attncli.attention.problem import Problem
from attncli.attention.sizes import Chosen
from attncli.attention.threads import map_ranges
from attncli.attention.variance.cell_sums import (
    TILE_ROWS,
    VARIANCE_ERROR,
    AugmentedRows,
    CellSums,
    CentredRows,
    interval_sums,
    streamed_sums,
)
from attncli.columns import column

# Tiles that one thread goes through.
_CHUNK_TILES = 8
# Between these squares of entries, sums of squares of scores are ordinary float32 numbers.
_SMALL, _LARGE = 1e-12, 1e10


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreMoments:
    """Moments of the scores Q Kᵀ of one head; soft cap and biases do not enter.

    "Visible" cells are those the mask lets through, of real queries. "Real pairs" are all real
    queries times all real keys, whatever the mask: only padding takes queries and keys out. q̄ and
    k̄ are the mean vectors over real queries and keys, Σ_q and Σ_k the population covariances.
    Every number is None where there are no such cells or pairs, or where it is not finite.
    """

    batch: int = column("batch", is_key=True, description="its index")
    head: int = column("head", is_key=True, description="index of the query head")
    dk: int = column("d_k", is_key=True, description="width of queries and keys")
    cells: int = column("cells", description="visible pairs of a query and a key")
    mean: float | None = column("mean", description="mean of the visible scores q·k")
    var: float | None = column("var", description="population variance of the visible scores")
    std: float | None = column("std", description="√var")
    var_within_rows: float | None = column(
        "within rows",
        description="mean variance along a row over real pairs, all that softmax sees: "
        "tr(Σ_q Σ_k) + q̄ᵀΣ_k q̄",
    )
    var_all_pairs: float | None = column(
        "all pairs", description="variance over real pairs: var_within_rows + var_from_key_mean"
    )
    scale: float = column("scale", description="multiplies the scores")
    scaled_mean: float | None = column("scaled mean", description="mean · scale / temperature")
    scaled_var: float | None = column("scaled var", description="var · (scale / temperature)²")
    scaled_std: float | None = column("scaled std", description="√scaled_var")
    q_mean_norm: float | None = column("|q mean|", description="‖q̄‖, length of the mean query")
    k_mean_norm: float | None = column("|k mean|", description="‖k̄‖, length of the mean key")
    q_var: float | None = column(
        "q var", description="tr(Σ_q)/d_k: of an entry about its column's mean, averaged"
    )
    k_var: float | None = column("k var", description="tr(Σ_k)/d_k, likewise")
    var_unit_theory: float = column(
        "unit theory",
        description="d_k: what independent entries of mean 0 and variance 1 would give, and what "
        "1/√d_k is made for",
    )
    var_from_interaction: float | None = column(
        "interaction", description="tr(Σ_q Σ_k), from what varies in both"
    )
    var_from_query_mean: float | None = column(
        "query mean", description="q̄ᵀΣ_k q̄, a bias towards the same keys that all queries share"
    )
    var_from_key_mean: float | None = column(
        "key mean", description="k̄ᵀΣ_q k̄, constant along each row, so softmax never sees it"
    )
    scale_for_unit_variance: float | None = column(
        "unit scale", description="temperature / std, which would make scaled_var 1"
    )


@dataclass(frozen=True, slots=True)
class RowMoments:
    """Mean and population covariance of some rows."""

    count: int  # number of rows, ≥ 1
    mean: torch.Tensor  # float64 (d,)
    covariance: torch.Tensor  # float64 (d, d)
    dtype: torch.dtype  # of the arithmetic: float32 only where squares stay in its range

    @property
    def mean_norm(self) -> float:
        """Euclidean length of the mean vector."""
        return float(self.mean.norm())

    @property
    def entry_variance(self) -> float:
        """Variance of an entry about its column's mean, averaged over columns: tr(Σ)/d."""
        return float(self.covariance.diagonal().mean())


def row_moments(rows: CentredRows) -> RowMoments | None:
    """Their moments, in one pass; None of no rows."""
    if len(rows) == 0:
        return None
    centre = rows.centre()
    near = centre.to(rows.dtype)
    whole = len(rows) if rows.device.type != "cpu" else _CHUNK_TILES * TILE_ROWS
    bounds = [(at, min(at + whole, len(rows))) for at in range(0, len(rows), whole)]
    sums = torch.stack(map_ranges(lambda at, end: _row_sums(rows, near, at, end), bounds)).sum(0)
    first, second = sums[0], sums[1:]
    rest = first / len(rows)
    covariance = second / len(rows) - torch.outer(rest, rest)
    found = RowMoments(len(rows), centre + rest, covariance, rows.dtype)
    largest = max(float(covariance.diagonal().max()), found.mean_norm**2)
    if rows.dtype is torch.float64 or _SMALL < largest < _LARGE:
        return found
    return row_moments(replace(rows, dtype=torch.float64))


def _row_sums(rows: CentredRows, near: torch.Tensor, begin: int, finish: int) -> torch.Tensor:
    """Σ x and, below it, Σ x xᵀ over rows x [begin, finish) less `near`, float64 (1 + d, d)."""
    sums = torch.zeros(rows.width + 1, rows.width, dtype=torch.float64, device=rows.device)
    for at in range(begin, finish, TILE_ROWS):
        moved = rows.block(at, min(at + TILE_ROWS, finish)) - near  # (rows, d)
        sums[0] += moved.sum(0)
        sums[1:] += moved.T @ moved
    return sums


@dataclass(frozen=True, slots=True)
class _AllPairs:
    """The variance over all real pairs in three parts."""

    interaction: float  # tr(Σ_q Σ_k)
    query_mean: float  # q̄ᵀΣ_k q̄
    key_mean: float  # k̄ᵀΣ_q k̄
    # What they would add up to if rows varied as much in every direction: what rounding is relative
    # to.
    isotropic: float

    @classmethod
    def of(cls, of_q: RowMoments, of_k: RowMoments) -> _AllPairs:
        var_q, var_k = of_q.entry_variance, of_k.entry_variance
        return cls(
            interaction=float((of_q.covariance * of_k.covariance).sum(0).sum()),
            query_mean=float(of_q.mean @ of_k.covariance @ of_q.mean),
            key_mean=float(of_k.mean @ of_q.covariance @ of_k.mean),
            isotropic=len(of_q.mean) * var_q * var_k
            + of_q.mean_norm**2 * var_k
            + of_k.mean_norm**2 * var_q,
        )

    @property
    def within_rows(self) -> float:
        return self.interaction + self.query_mean

    @property
    def total(self) -> float:
        return self.within_rows + self.key_mean

    def rounds_away(self, variance: float) -> bool:
        """Whether rounding to float32 may show in a variance."""
        return torch.finfo(torch.float32).eps * self.isotropic > VARIANCE_ERROR * variance


def _queries(problem: Problem, batch: int, head: int) -> CentredRows:
    real = problem.q[batch, head, : problem.mask.real_queries(batch)]
    return CentredRows(real, None, problem.dtype, problem.device)


def _keys(problem: Problem, batch: int, kv_head: int) -> CentredRows:
    real = np.flatnonzero(problem.mask.real_keys(batch))
    keys = problem.k[batch, kv_head]
    return CentredRows(keys, _order(real, len(keys)), problem.dtype, problem.device)


def _order(index: NDArray[np.int64], length: int) -> torch.Tensor | None:
    """The index, or None where it is all of an axis as it lies."""
    as_it_lies = np.array_equal(index, np.arange(length))
    return None if as_it_lies else torch.from_numpy(np.ascontiguousarray(index))


def key_moments(problem: Problem, batch: int, kv_head: int) -> RowMoments | None:
    """Moments of the real keys of a key head, for all query heads that share it."""
    return row_moments(_keys(problem, batch, kv_head))


def score_moments(
    problem: Problem, batch: int, head: int, *, keys: RowMoments | None = None
) -> ScoreMoments:
    """Mean and variance of the scores of one head, and where the variance comes from.

    Exact up to rounding. Linear in S_q and S_k for every mask but a file that depends on both
    query and key, whose cells are gone through in tiles; memory is bounded in every case.

    Args:
        problem: what is measured, in its dtype of arithmetic, sums of blocks in float64. What
            float32 would round away is done again in float64.
        batch, head: indices of the query head.
        keys: `key_moments` of the key head that this head uses, if at hand.

    Source: variance of a product of independent vectors, with uniform draws of a query and a key.
    """
    rows_q, rows_k = _queries(problem, batch, head), _keys(problem, batch, problem.kv_head(head))
    of_q, of_k = row_moments(rows_q), keys or row_moments(rows_k)
    if of_q is None or of_k is None:
        return _record(problem, batch, head, CellSums(0, 0.0, 0.0), of_q, of_k, None)
    parts = _AllPairs.of(of_q, of_k)
    if torch.float32 in (of_q.dtype, of_k.dtype) and parts.rounds_away(parts.total):
        of_q = row_moments(replace(rows_q, dtype=torch.float64)) or of_q
        of_k = row_moments(replace(rows_k, dtype=torch.float64)) or of_k
        parts = _AllPairs.of(of_q, of_k)
    visible = _VisibleCells.of(problem.mask.head(batch, head), rows_q, rows_k)
    if visible.cells == of_q.count * of_k.count:
        mean = float(of_q.mean @ of_k.mean)
        total = parts.total * visible.cells
        sums = CellSums(visible.cells, 0.0, total, origin=mean, rounded_about=mean)
    else:
        sums = visible.sums(torch.promote_types(of_q.dtype, of_k.dtype))
        single = sums.cells > 0 and sums.dtype is torch.float32
        if sums.is_cancelled or (single and parts.rounds_away(sums.variance)):
            sums = visible.sums(torch.float64, near=sums.mean)
        if sums.is_cancelled:
            sums = visible.sums(torch.float64, near=sums.mean, one_by_one=True)
    return _record(problem, batch, head, sums, of_q, of_k, parts)


@dataclass(frozen=True, slots=True)
class _VisibleCells:
    """The cells of one head that the mask lets through.

    Attributes:
        mask: of the head.
        queries, keys: the real ones, and where the cells are intervals those that see and may be
            seen, in the order of the intervals.
        first, stop: int64, the interval of each query, places in `keys`, stop > first; None where
            the cells are no intervals.
    """

    mask: HeadMask
    queries: CentredRows
    keys: CentredRows
    first: NDArray[np.int64] | None = None
    stop: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, mask: HeadMask, queries: CentredRows, keys: CentredRows) -> _VisibleCells:
        """Those of the real queries and keys."""
        found = mask.sorted_intervals()
        if found is None:
            return cls(mask, queries, keys)
        rows = np.flatnonzero(found.high > found.low)
        rows = rows[np.argsort(found.low[rows], kind="stable")]  # documents one after another
        return cls(
            mask,
            replace(queries, order=_order(rows, len(found.low))),
            replace(keys, order=_order(found.keys, len(keys.tensor))),
            found.low[rows],
            found.high[rows],
        )

    @property
    def cells(self) -> int | None:
        """How many there are; None where that takes to go through them."""
        if self.first is None or self.stop is None:
            return None
        return int((self.stop - self.first).sum())

    def sums(
        self, dtype: torch.dtype, near: float | None = None, *, one_by_one: bool = False
    ) -> CellSums:
        """What they add up to, by the cheapest way that the mask allows.

        Args:
            dtype: of the arithmetic.
            near: what is subtracted from each score; None for what the centres make of it.
            one_by_one: whether to compute every cell, whatever that takes.
        """
        queries, keys = replace(self.queries, dtype=dtype), replace(self.keys, dtype=dtype)
        first, stop = self.first, self.stop
        if first is None or stop is None:
            centres = queries.centre(), keys.centre()
            keys = replace(keys, order=None)  # hidden ones too: the mask counts them

            def visible(rows: slice, cols: slice) -> torch.Tensor:
                return torch.as_tensor(self.mask.cells(rows, cols), device=keys.device)

            return streamed_sums(*_augmented(queries, keys, *centres, near), visible)
        if not len(first):
            return CellSums(0, 0.0, 0.0)
        changes = np.bincount(first, minlength=len(keys) + 1)
        changes = changes - np.bincount(stop, minlength=len(keys) + 1)
        centres = queries.centre(stop - first), keys.centre(np.cumsum(changes)[:-1])
        augmented = _augmented(queries, keys, *centres, near)
        return interval_sums(*augmented, first, stop, one_by_one=one_by_one)


def _augmented(
    queries: CentredRows,
    keys: CentredRows,
    centre_q: torch.Tensor,
    centre_k: torch.Tensor,
    near: float | None,
) -> tuple[AugmentedRows, AugmentedRows]:
    """Both sides of scores less `near`."""
    minus = 0.0 if near is None else near - float(centre_q @ centre_k)
    return (
        AugmentedRows(queries, centre_q, centre_k, minus, one_first=True),
        AugmentedRows(keys, centre_k, centre_q, 0.0, one_first=False),
    )


def _record(
    problem: Problem,
    batch: int,
    head: int,
    sums: CellSums,
    of_q: RowMoments | None,
    of_k: RowMoments | None,
    parts: _AllPairs | None,
) -> ScoreMoments:
    factor = problem.scale_of(head) / problem.temperature
    mean = _finite(sums.mean) if sums.cells else None
    var = _finite(sums.variance) if sums.cells else None
    std = None if var is None else math.sqrt(var)
    return ScoreMoments(
        batch=batch,
        head=head,
        dk=problem.dk,
        cells=sums.cells,
        mean=mean,
        var=var,
        std=std,
        var_within_rows=_finite(parts.within_rows if parts else None),
        var_all_pairs=_finite(parts.total if parts else None),
        scale=problem.scale_of(head),
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


# Where a number becomes worth a sentence. Shares of 1: of the variance of all real pairs, what is
# constant along rows; of what softmax sees, what is one bias that all queries share.
INVISIBLE, SHARED = 0.5, 0.4
# Scaled variances of a softmax much flatter or sharper than the assumption's: standard deviations
# of 1/4 and 2 rather than 1.
FLAT, SHARP = 1 / 16, 4.0
# How many times a variance may exceed or fall short of another and be called close to it.
NEAR = 2.0


def audit(problem: Problem, chosen: Chosen = (None, None)) -> Iterator[ScoreMoments]:
    """The moments of every head of every batch, key heads that are shared measured once.

    Args:
        problem: whose heads.
        chosen: which of its batches and heads.
    """
    for batch, heads in sharing(problem, chosen):
        yield from audit_sharing(problem, batch, heads)


def sharing(problem: Problem, chosen: Chosen) -> Iterator[tuple[int, Sequence[int]]]:
    """Each batch with neighbours among the chosen query heads that share a key head."""
    batches, heads = chosen
    for batch in range(problem.sizes.batch) if batches is None else batches:
        wanted = range(problem.sizes.heads) if heads is None else heads
        for _, some in groupby(wanted, key=problem.kv_head):
            yield batch, tuple(some)


def audit_sharing(problem: Problem, batch: int, heads: Sequence[int]) -> list[ScoreMoments]:
    """The moments of query heads that share a key head."""
    keys = key_moments(problem, batch, problem.kv_head(heads[0]))
    return [score_moments(problem, batch, head, keys=keys) for head in heads]


def diagnosis(record: ScoreMoments) -> str:
    """One sentence on what a head's variance is made of, and whether its scale suits it.

    What breaks the assumption most is named first: a mean of the keys (variance that softmax never
    sees), a mean of the queries (one bias for all), then scaled scores that are too large or too
    small, then a mask that chooses unusual cells.
    """
    var, scaled, total = record.var, record.scaled_var, record.var_all_pairs
    within, by_keys = record.var_within_rows, record.var_from_key_mean
    by_queries = record.var_from_query_mean
    if (var is None or scaled is None or total is None) or (
        within is None or by_keys is None or by_queries is None
    ):
        return "nothing to measure: no visible cells, or scores that are not finite"
    if var == 0:
        return "every visible score is the same: softmax is uniform whatever the scale"
    invisible = by_keys / total if total else 0.0
    shared = by_queries / within if within else 0.0
    findings = []
    if invisible >= INVISIBLE:
        findings.append(
            f"keys share a mean: {invisible:.0%} of the variance is constant along rows and "
            "invisible to softmax"
        )
    if shared >= SHARED:
        findings.append(
            f"queries share a mean: {shared:.0%} of what softmax sees is one bias towards the same "
            "keys, typical of sinks"
        )
    if not FLAT < scaled < SHARP:
        kind = "sharper" if scaled >= SHARP else "flatter"
        scale = record.scale_for_unit_variance
        advice = "" if scale is None else f" (a scale of {scale:.3g} would give 1)"
        findings.append(
            f"scaled variance {scaled:.3g} makes softmax {kind} than the assumed 1{advice}"
        )
    if not findings and total and not 1 / NEAR < var / total < NEAR:
        findings.append(
            f"the mask chooses unusual cells: their variance is {var / total:.2g} times that of "
            "all real pairs"
        )
    if findings:
        return "; ".join(findings)
    kind = "close to the assumption" if 1 / NEAR <= scaled <= NEAR else "no single cause"
    return (
        f"{kind}: scaled variance {scaled:.2g} (assumed: 1), {1 - shared if within else 0.0:.0%} "
        "of what softmax sees is interaction of query and key"
    )
