"""Dropout left on: every weight is 0 or w/(1 − p), with one p for all.

From weights that is plain to see. From an output alone it is only where the values are so many
and so different (S_k ≤ d_v, full rank) that the weights can be solved for; elsewhere nothing is
said, since some pattern of dropped weights explains almost any output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncli.attention.check.candidate import Candidate, Target, mend
from attncli.attention.check.difference import errors_of, of_target
from attncli.attention.check.evidence import Verdict, all_row_samples, narrowed
from attncli.attention.check.tolerance import Tolerance, tolerance_of
from attncli.attention.check.variant import Part, Variant, evaluate, parts_of
from attncli.attention.steps import weighted_sum

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attncli.attention.check.evidence import Evidence, RowSample

# So many weights have to be kept, and so many dropped, before a pattern is called one.
_ENOUGH_KEPT = 8
_ENOUGH_DROPPED = 3
# Share of dropped weights against the p that the kept ones show, in standard errors.
_SIGMAS = 5.0
# Errors of solved weights must be this small beside a typical weight.
_SOLVABLE = 0.02


@dataclass(frozen=True, slots=True)
class Dropout:
    """What was found out.

    Attributes:
        probability: p, from the kept weights.
        verdict: how well it explains the candidates.
    """

    probability: float
    verdict: Verdict


@dataclass(slots=True)
class _Counts:
    """What is counted over visible weights that are large enough to tell 0 from kept."""

    kept: int = 0
    dropped: int = 0
    mismatches: int = 0
    cells: int = 0
    max_abs: float = 0.0


def find_dropout(variant: Variant, evidence: Evidence) -> Dropout | None:
    """Look for dropout in the candidates; None where it cannot be told or is not there.

    Args:
        variant: how attention was computed before the dropout.
        evidence: the candidates.
    """
    source = _source(variant, evidence)
    if source is None:
        return None
    factor = _factor(variant, source, evidence.glance)
    if factor is None or factor <= 1:
        return None
    counts = _Counts()
    for part, expected, actual, tolerance in _weights(variant, source, None):
        _count(counts, expected, actual, tolerance, factor)
        _check_others(counts, variant, evidence, source, part, actual)
    probability = 1 - 1 / factor
    if not _plausible(counts, probability):
        counts.mismatches = max(1, counts.mismatches)
    return Dropout(
        probability,
        Verdict(counts.max_abs, counts.mismatches, (0.0,), (), differs=True, cells=counts.cells),
    )


def _source(variant: Variant, evidence: Evidence) -> Candidate | None:
    """The candidate that shows weights: itself, or an output that can be solved for them."""
    by_target = {candidate.target: candidate for candidate in evidence.candidates}
    if Target.WEIGHTS in by_target:
        return by_target[Target.WEIGHTS]
    v, sizes = variant.problem.v, variant.problem.sizes
    solvable = v is not None and 0 < sizes.k_len <= v.shape[-1]
    return by_target.get(Target.OUTPUT) if solvable else None


def _weights(
    variant: Variant, source: Candidate, samples: Sequence[RowSample] | None
) -> Iterator[tuple[Part, torch.Tensor, torch.Tensor, Tolerance]]:
    """Expected and actual weights (b, h, R, S_k), float64, and how far the latter may be off."""
    problem = variant.problem
    tolerance = tolerance_of(source.target, source.dtype, problem)
    for one in all_row_samples(problem) if samples is None else samples:
        for part in parts_of(variant, one.rows, one.batches):
            expected = evaluate(variant, part, with_output=False).weights.to(torch.float64)
            values = source.values
            if source.target is Target.OUTPUT:
                values = mend(values, variant.misread)
            cells = values[part.batch, part.head][:, :, part.rows.cpu()].to(expected)
            if source.target is Target.WEIGHTS:
                yield part, expected, cells, tolerance
                continue
            solved = _solve(variant, part, cells, tolerance)
            if solved is not None:
                yield part, expected, *solved


def _solve(
    variant: Variant, part: Part, output: torch.Tensor, tolerance: Tolerance
) -> tuple[torch.Tensor, Tolerance] | None:
    """Weights from an output, W = O·V⁺, and their tolerance; None where V does not allow it."""
    problem = variant.problem
    assert problem.v is not None
    heads = range(*part.head.indices(problem.sizes.heads))
    chosen = variant.value_heads or [problem.kv_head(h) for h in range(problem.sizes.heads)]
    v = problem.v[part.batch][:, [chosen[h] for h in heads]].to(output)  # (b, h, S_k, d_v)
    if not bool(torch.isfinite(v).all() & torch.isfinite(output).all()):
        return None
    smallest = float(torch.linalg.svdvals(v).amin())
    off = float(tolerance.allowed(output).max()) * math.sqrt(v.shape[-1])
    if smallest <= 0 or off / smallest > _SOLVABLE / problem.sizes.k_len:
        return None
    return output @ torch.linalg.pinv(v), Tolerance(1e-12, off / smallest)


def _factor(variant: Variant, source: Candidate, samples: Sequence[RowSample]) -> float | None:
    """1/(1 − p), the median ratio of kept weights; None where too few are kept."""
    ratios = []
    for _, expected, actual, tolerance in _weights(variant, source, samples):
        clear = expected > 16 * tolerance.allowed(expected)
        kept = clear & (actual > expected / 2)
        # Large weights are known best, relatively.
        best = kept & (expected >= expected[kept].median()) if bool(kept.any()) else kept
        ratios.append((actual[best] / expected[best]).flatten())
    found = torch.cat(ratios) if ratios else torch.zeros(0)
    return float(found.median()) if len(found) >= _ENOUGH_KEPT // 2 else None


def _count(
    counts: _Counts,
    expected: torch.Tensor,
    actual: torch.Tensor,
    tolerance: Tolerance,
    factor: float,
) -> None:
    """Take in a block: each weight has to be 0 or expected · factor."""
    scaled = expected * factor
    allowed = 2 * tolerance.allowed(scaled)
    is_zero, is_kept = actual.abs() <= tolerance.atol, (actual - scaled).abs() <= allowed
    clear = expected > 16 * tolerance.allowed(expected)
    counts.kept += int((clear & is_kept).sum())
    counts.dropped += int((clear & is_zero).sum())
    counts.mismatches += int((~(is_zero | is_kept)).sum())
    counts.cells += actual.numel()
    error = torch.minimum(actual.abs(), (actual - scaled).abs()).nan_to_num(torch.inf)
    counts.max_abs = max(counts.max_abs, float(error.max()) if error.numel() else 0.0)


def _check_others(
    counts: _Counts,
    variant: Variant,
    evidence: Evidence,
    source: Candidate,
    part: Part,
    weights: torch.Tensor,
) -> None:
    """The other candidates: an output has to follow from the weights, a log-sum-exp is as ever."""
    for other in narrowed(evidence, (c for c in evidence.candidates if c is not source)).candidates:
        expected = evaluate(variant, part, with_output=False)
        cells = of_target(expected, other.target) if other.target is not Target.OUTPUT else None
        if cells is None:
            problem = variant.problem
            assert problem.v is not None
            heads = range(*part.head.indices(problem.sizes.heads))
            v = problem.v[part.batch][:, [problem.kv_head(h) for h in heads]].to(weights)
            cells = weighted_sum(weights, v, weights != 0)
        actual = other.values[part.batch, part.head][:, :, part.rows.cpu()]
        tolerance = tolerance_of(other.target, other.dtype, variant.problem)
        wide = Tolerance(2 * tolerance.rtol, 4 * tolerance.atol)
        errors = errors_of(other.target, actual, cells, wide, expected.empty)
        counts.mismatches += int(errors.wrong.sum())
        counts.cells += errors.error.numel()
        counts.max_abs = max(counts.max_abs, float(errors.error.max()))


def _plausible(counts: _Counts, probability: float) -> bool:
    """Whether as many are dropped as the size of the kept ones says."""
    total = counts.kept + counts.dropped
    if counts.kept < _ENOUGH_KEPT or counts.dropped < _ENOUGH_DROPPED:
        return False
    error = math.sqrt(probability * (1 - probability) / total)
    return abs(counts.dropped / total - probability) <= _SIGMAS * error
