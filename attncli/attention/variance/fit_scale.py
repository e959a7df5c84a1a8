"""Which scale made these weights, or this output, of these Q, K and V?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from attncli.attention.variance.fit_sample import Sample, draw_sample
from attncli.attention.variance.minimise import least_squares
from attncli.errors import UsageError

if TYPE_CHECKING:
    from attncli.attention.problem import Problem

# The fitted value only comes before a named one that leaves this many times its residual.
_CLEARLY_BETTER = 1.5
# Scales that differ by less, relatively, are one: a float32 may have stood between them.
_SAME = 1e-6


class FitSource(StrEnum):
    """What a scale is read from."""

    WEIGHTS = "weights"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class ScaleCandidate:
    """One scale, and how far from the given tensor it leads.

    Attributes:
        name: "1", "1/√d_k", "1/√d_v", "1/√d_model" (d_model = H·d_k), "1/d_k", "as given" for
            the problem's own where that is another, or "fitted"; "a = b" where two are one.
        scale: multiplies the scores, before the problem's temperature divides them.
        rms: root mean square of recomputed − given.
        max: largest |recomputed − given|.
    """

    name: str
    scale: float
    rms: float
    max: float


@dataclass(frozen=True, slots=True)
class ScaleFit:
    """Candidates, best first.

    Attributes:
        source: what was fitted.
        candidates: by residual, except that a named scale comes before the fitted value when that
            leaves hardly less.
        rows: query rows looked at, over all batches and heads.
        rows_total: how many there are that see a key.
        target_rms: root mean square of the given tensor on those rows, to judge residuals by.
        reason: why there is no fitted value; None where there is one.
    """

    source: FitSource
    candidates: tuple[ScaleCandidate, ...]
    rows: int
    rows_total: int
    target_rms: float
    reason: str | None


def fit_scale(
    problem: Problem,
    *,
    weights: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
) -> ScaleFit:
    """Compare a tensor from elsewhere with what each classic scale would have given, and fit one.

    Temperature, soft cap, biases, mask and sinks are the problem's own. Large inputs are judged by
    query rows spread evenly, in float64.

    Args:
        problem: Q, K and, for an output, V.
        weights: (B, H, S_q, S_k), or without leading axes of length 1.
        output: (B, H, S_q, d_v), likewise.

    Raises:
        UsageError: neither or both of weights and output, or an output without V.
        DataError: a shape that does not fit, or NaN and inf in rows that see a key.
    """
    if (weights is None) == (output is None):
        raise UsageError("--fit-scale", "expected either weights or an output")
    if output is not None and problem.v is None:
        raise UsageError("--fit-scale", "expected V beside an output, got none")
    source = FitSource.WEIGHTS if output is None else FitSource.OUTPUT
    target = weights if output is None else output
    assert target is not None  # one of the two is given
    sample = draw_sample(problem, target, source.value)
    fitted = _fit(sample, source, [scale for _, scale in _named(problem)])
    reason = None if fitted is not None else _why_not(sample, source)
    return ScaleFit(
        source=source,
        candidates=_ranked(sample, _named(problem), fitted),
        rows=sample.rows,
        rows_total=sample.rows_total,
        target_rms=sample.target_rms,
        reason=reason,
    )


def _named(problem: Problem) -> list[tuple[str, float]]:
    """The classic scales, equal ones under one name."""
    classic = [
        ("1/√d_k", 1 / math.sqrt(problem.dk)),
        ("1/√d_v", 1 / math.sqrt(problem.dv) if problem.dv else None),
        ("1/√d_model", 1 / math.sqrt(problem.sizes.heads * problem.dk)),
        ("1/d_k", 1 / problem.dk),
        ("1", 1.0),
        ("as given", problem.scale),
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
    sample: Sample, named: list[tuple[str, float]], fitted: float | None
) -> tuple[ScaleCandidate, ...]:
    """All candidates with their residuals, best first."""
    found = [ScaleCandidate(name, scale, *sample.residual(scale)) for name, scale in named]
    found.sort(key=lambda candidate: candidate.rms)
    if fitted is not None:
        own = ScaleCandidate("fitted", fitted, *sample.residual(fitted))
        limit = max(own.rms * _CLEARLY_BETTER, sample.noise)
        place = sum(candidate.rms <= limit for candidate in found)
        found.insert(place, own)
    return tuple(found)


def _fit(sample: Sample, source: FitSource, starts: list[float]) -> float | None:
    """The scale that fits best; None where the tensor does not depend on it."""
    if sample.rows == 0:
        return None
    if source is FitSource.WEIGHTS and sample.softcap is None:
        return _regression(sample)
    spread = sample.spread
    if spread == 0:
        return None
    grid = [sign * 10 ** (power / 4) / spread for power in range(-12, 13) for sign in (-1, 1)]
    return least_squares(sample.errors, sorted({0.0, *grid, *starts}), sample.noise)


def _regression(sample: Sample) -> float | None:
    """Slope of the logarithm of the weights on the scores, each row about its own mean.

    A row's log-sum-exp, and a sink's share, are its intercept. Cells count by their weight, so
    that what has lost digits near the smallest number of its dtype counts for nothing, and zeros
    are left out.
    """
    products, squares = 0.0, 0.0
    for part in sample.parts:
        w = torch.where(part.visible & (part.target >= sample.smallest), part.target, 0.0)
        mass = w / w.sum(-1, keepdim=True).clamp_min(sample.smallest)  # (rows, S_k)
        y = torch.where(w > 0, torch.log(w.clamp_min(sample.smallest)) - part.bias, 0.0)
        s = torch.where(w > 0, part.scores, 0.0)
        s = s - (mass * s).sum(-1, keepdim=True)
        y = y - (mass * y).sum(-1, keepdim=True)
        products += float((mass * s * y).sum())
        squares += float((mass * s * s).sum())
    # Below this the scores of a row differ by rounding alone.
    if squares <= (1e-12 * sample.spread) ** 2 or not math.isfinite(products):
        return None
    return products / squares * sample.temperature


def _why_not(sample: Sample, source: FitSource) -> str:
    if sample.rows == 0:
        return "no query sees a key"
    if source is FitSource.WEIGHTS:
        return "no row has two weights above 0 at different scores: any large scale fits"
    return "the output does not depend on the scale: scores or values are all alike"
