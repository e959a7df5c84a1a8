"""Which scale made these weights, or this output, of these Q, K and V?"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from attncli.attention.check.candidate import Candidate, read_candidate
from attncli.attention.check.evidence import Errors, Evidence, best_scale, sample_rows, scale_errors
from attncli.attention.check.variant import right_variant
from attncli.attention.check.walk import cells_of
from attncli.attention.options import AttentionOptions, Target
from attncli.attention.problem import Problem
from attncli.attention.threads import sum_of
from attncli.columns import column
from attncli.errors import DataError, UsageError

# The fitted value only comes before a named one that leaves this many times its residual.
_CLEARLY_BETTER = 1.5
# Scales that differ by less, relatively, are one: a float32 may have stood between them.
_SAME = 1e-6
# Roundings between the scores and a weight: product, shift, exponential, sum, quotient.
_ROUNDINGS = 8
# Why there is no fitted value.
_NO_ROWS = "no query sees a key"
_WHY_NOT = {
    Target.WEIGHTS: "no row has two weights above 0 at different scores: any large scale fits",
    Target.OUTPUT: "the output does not depend on the scale: scores or values are all alike",
}


@dataclass(frozen=True, slots=True)
class ScaleCandidate:
    """One scale, and how far from the given tensor it leads.

    It is named "1", "1/√d_k", "1/√d_v", "1/√d_model" (d_model = H·d_k), "1/d_k", "as given" for
    the problem's own where that is another, or "fitted"; "a = b" where two are one.
    """

    name: str = column("scale", is_key=True, description="its name or formula, or fitted")
    scale: float = column(
        "value", description="multiplies the scores, before the temperature divides them"
    )
    rms: float = column("rms residual", description="root mean square of recomputed − given")
    max: float = column("largest residual", description="largest |recomputed − given|")


@dataclass(frozen=True, slots=True)
class ScaleFit:
    """Candidates, best first."""

    source: Target  # what was fitted, weights or an output
    # By residual, except that a named scale comes before the fitted value when that leaves hardly
    # less.
    candidates: tuple[ScaleCandidate, ...]
    rows: int  # query rows looked at that see a key, over all batches and heads
    rows_total: int  # how many there are, an estimate where rows were sampled
    target_rms: float  # root mean square of the given tensor on those rows, to judge residuals by
    reason: str | None  # why there is no fitted value; None where there is one

    @property
    def unexplained(self) -> float:
        """The least residual, as a share of what was fitted."""
        least = min(candidate.rms for candidate in self.candidates)
        return least / self.target_rms if self.target_rms else least


def fit_scale(problem: Problem, source: Target, given: torch.Tensor) -> ScaleFit:
    """Compare a tensor from elsewhere with what each classic scale would have given, and fit one.

    Temperature, soft cap, biases, mask and sinks are the problem's own. Large inputs are judged by
    a sample of query rows, in float64.

    Args:
        problem: Q, K and, for an output, V.
        source: weights or output.
        given: (B, H, S_q, S_k) or (B, H, S_q, d_v), or without leading axes of length 1.

    Raises:
        DataError: a shape that does not fit, an output without V, or NaN and inf in rows that see
            a key.
        UsageError: a problem with a scale for each head.
    """
    if isinstance(problem.scale, tuple):
        raise UsageError("«scale»", "expected one number beside «fit_scale», got one per head")
    candidate = read_candidate(source, given, problem)
    if candidate.reading is not None:
        raise DataError(
            str(source), f"expected (B, H, S_q, …), got {tuple(given.shape)}: {candidate.reading}"
        )
    base = right_variant(replace(problem, dtype=torch.float64), AttentionOptions())
    evidence = sample_rows(base, [candidate])
    seen, looked_at = _seen_cells(evidence, candidate)
    target_rms = math.sqrt(sum_of(seen.square()) / max(1, seen.numel()))
    kind = given.dtype if given.is_floating_point() else torch.float64
    noise = target_rms * torch.finfo(kind).eps * _ROUNDINGS
    named = _named(problem)
    fitted = None
    if len(seen):
        starts = [scale for _, scale in named]
        fitted = best_scale(base, evidence, evidence.sample, starts=starts, noise=noise)
    errors = scale_errors(base, evidence, evidence.sample)
    real = sum(problem.mask.real_queries(batch) for batch in range(problem.sizes.batch))
    return ScaleFit(
        source=source,
        candidates=_ranked(errors, max(1, seen.numel()), named, fitted, noise),
        rows=len(seen),
        rows_total=round(len(seen) / max(1, looked_at) * real * problem.sizes.heads),
        target_rms=target_rms,
        reason=None if fitted is not None else _WHY_NOT[source] if len(seen) else _NO_ROWS,
    )


def _seen_cells(evidence: Evidence, candidate: Candidate) -> tuple[torch.Tensor, int]:
    """The candidate in rows of the sample that see a key, float64 (rows, w); rows looked at.

    Raises:
        DataError: NaN or inf among them.
    """
    found, looked_at = [torch.empty(0, candidate.values.shape[-1], dtype=torch.float64)], 0
    parts = evidence.parts(evidence.base, evidence.sample)
    for part, expected, (actual,) in cells_of(evidence.base, [candidate], parts):
        seeing = ~expected.empty[..., 0]
        broken = ~torch.isfinite(actual).all(-1) & seeing  # (b, h, R)
        if bool(broken.any()):
            batch, head, _ = broken.nonzero()[0].tolist()
            raise DataError(
                str(candidate.target),
                "expected finite values in rows that see a key, got NaN or inf in "
                f"batch {part.batch.start + batch}, head {part.head.start + head}",
            )
        found.append(actual[seeing].cpu())
        looked_at += seeing.numel()
    return torch.cat(found), looked_at


def _named(problem: Problem) -> list[tuple[str, float]]:
    """The classic scales, equal ones under one name."""
    classic = [
        ("1/√d_k", 1 / math.sqrt(problem.dk)),
        ("1/√d_v", 1 / math.sqrt(problem.dv) if problem.dv else None),
        ("1/√d_model", 1 / math.sqrt(problem.sizes.heads * problem.dk)),
        ("1/d_k", 1 / problem.dk),
        ("1", 1.0),
        ("as given", problem.scale_of(0)),
    ]
    names: dict[float, str] = {}
    for name, scale in classic:
        if scale is None:
            continue
        same = next((known for known in names if math.isclose(scale, known, rel_tol=_SAME)), None)
        if same is None:
            names[scale] = name
        elif name != "as given":
            names[same] += f" = {name}"
    return [(name, scale) for scale, name in names.items()]


def _ranked(
    errors: Errors, cells: int, named: list[tuple[str, float]], fitted: float | None, noise: float
) -> tuple[ScaleCandidate, ...]:
    """All candidates with their residuals over so many cells, best first."""

    def candidate_of(name: str, scale: float) -> ScaleCandidate:
        error = errors(scale)
        rms = math.sqrt(sum_of(error.square()) / cells)
        return ScaleCandidate(name, scale, rms, float(error.abs().max()))

    found = sorted((candidate_of(*pair) for pair in named), key=lambda one: one.rms)
    if fitted is not None:
        own = candidate_of("fitted", fitted)
        limit = max(own.rms * _CLEARLY_BETTER, noise)
        found.insert(sum(one.rms <= limit for one in found), own)
    return tuple(found)
