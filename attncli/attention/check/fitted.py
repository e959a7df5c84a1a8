"""Mistakes read off the candidates: a scale nobody declared, values of other heads, dropout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from attncli.attention.check.candidate import Candidate, Target
from attncli.attention.check.evidence import Evidence, FitResult, RowSample, judge
from attncli.attention.check.mistakes import Alternative
from attncli.attention.check.variant import Part, Variant
from attncli.attention.check.walk import ErrorSums, cells_of, errors_of
from attncli.attention.steps import weighted_sum

Errors = Callable[[float], torch.Tensor]

# Scales are looked for up to so many factors of two from 1/√d_k, to either side and sign.
_POWERS = range(-10, 11)
_GOLDEN = (5**0.5 - 1) / 2
_NARROWINGS = 12
_POLISHES = 12
_CAPS = (*(2.0**power for power in range(-4, 13)), 15.0, 20.0, 30.0, 50.0)
# A sink that takes less of a row tells nothing of itself, and one this low takes nothing.
_LEAST_SINK = 1e-6
_NO_SINK = -1e4
_DIGITS = (4, 6, 9, 12, 17)
# So many weights have to be kept, and so many dropped, before a pattern is called one.
_ENOUGH_KEPT = 8
_ENOUGH_DROPPED = 3
# Share of dropped weights against the p that the kept ones show, in standard errors.
_SIGMAS = 5.0
# A weight so many times what is allowed is large enough to tell dropped from small.
_CLEAR = 16.0


def best_scale(
    variant: Variant,
    evidence: Evidence,
    sample: RowSample,
    *,
    starts: Sequence[float] = (),
    noise: float = 0.0,
) -> float | None:
    """The scale that leaves the least squared error; None where the candidates tell none.

    The best of a grid is narrowed down by golden sections between its neighbours, on the quick
    rows of the evidence, and polished by Gauss–Newton steps, which find a zero residual to the
    last digits where sections stop at the square root of the precision.

    Args:
        variant: how the candidates were computed, but for the scale.
        evidence: the candidates.
        sample: what the last digits are read from.
        starts: scales to try besides the grid.
        noise: root mean square of errors up to which two scales explain the same.
    """
    unit = 1 / math.sqrt(variant.problem.dk)
    errors = scale_errors(variant, evidence, evidence.quick_rows)
    grid = sorted({0.0, *starts, *(sign * unit * 2.0**p for p in _POWERS for sign in (1, -1))})
    costs = [_cost(errors, scale) for scale in grid]
    least = min(costs)
    if not min(costs[0], costs[-1]) > least + noise**2:  # all fit alike, or any large one does
        return None
    best = costs.index(least)
    narrow = _narrowed(errors, grid[best - 1], grid[best], grid[best + 1])
    return _polished(scale_errors(variant, evidence, sample), narrow, unit)


def scale_errors(variant: Variant, evidence: Evidence, sample: RowSample) -> Errors:
    """Recomputed − given of all cells of the sample, float64 (n,), as a function of the scale.

    What is not finite, and rows that see no key, count 0.
    """
    parts = list(evidence.parts(variant, sample))

    return _errors_of(lambda scale: variant.with_problem(scale=scale), evidence, parts)


def _errors_of(
    variant_of: Callable[[float], Variant], evidence: Evidence, parts: Sequence[Part]
) -> Errors:
    """Recomputed − given of the cells of some parts, as a function of what a variant depends on."""

    def errors(number: float) -> torch.Tensor:
        tried = variant_of(number)
        found = [torch.zeros(1, dtype=torch.float64)]
        for part, expected, cells in cells_of(tried, evidence.candidates, parts):
            for candidate, actual in zip(evidence.candidates, cells, strict=True):
                error = torch.where(expected.empty, 0.0, expected.of(candidate.target) - actual)
                if evidence.heads is not None:
                    error = error[:, evidence.heads[part.head].to(error.device)]
                found.append(error.nan_to_num(0.0, 0.0, 0.0).flatten().cpu())
        return torch.cat(found)

    return errors


def _cost(errors: Errors, scale: float) -> float:
    return float(errors(scale).square().mean())


def _narrowed(errors: Errors, low: float, best: float, high: float) -> float:
    """The best of some golden sections of [low, high], and of what was known before."""
    tried = {best: _cost(errors, best)}
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    for _ in range(_NARROWINGS):
        for scale in (left, right):
            if scale not in tried:
                tried[scale] = _cost(errors, scale)
        if tried[left] <= tried[right]:
            high, right = right, left
            left = high - _GOLDEN * (high - low)
        else:
            low, left = left, right
            right = low + _GOLDEN * (high - low)
    return min(tried, key=tried.__getitem__)


def _polished(errors: Errors, scale: float, unit: float) -> float:
    """Gauss–Newton steps while they help, the slope taken by differences."""
    cost = _cost(errors, scale)
    for _ in range(_POLISHES):
        step = 1e-5 * max(abs(scale), 1e-3 * unit)
        slope = (errors(scale + step) - errors(scale - step)) / (2 * step)
        norm = float(slope @ slope)
        if norm == 0:
            break
        moved = scale - float(slope @ errors(scale)) / norm
        found = _cost(errors, moved)
        if not found < cost:
            break
        scale, cost = moved, found
    return scale


def fitted_scale(variant: Variant, evidence: Evidence) -> Iterator[Alternative]:
    """The scale that fits the candidates best, with as few digits as explain them."""
    scale = variant.problem.scale
    starts = scale if isinstance(scale, tuple) else (scale,)
    found = best_scale(variant, evidence, evidence.quick_rows, starts=starts)
    if found is None:
        return
    values = list(dict.fromkeys(float(f"{found:.{digits}g}") for digits in _DIGITS))
    tried = [Alternative(variant.with_problem(scale=value), {"scale": value}) for value in values]
    explaining = (t for t in tried if judge(t.variant, evidence, evidence.quick_rows).explains)
    yield next(explaining, tried[-1])


def fitted_softcap(variant: Variant, evidence: Evidence) -> Iterator[Alternative]:
    """The soft cap c that fits best, looked for as 1/c², by which logits change evenly."""
    if variant.problem.softcap is not None:
        return
    parts = list(evidence.parts(variant, evidence.quick_rows))

    def capped(rate: float) -> Variant:
        return variant.with_problem(softcap=rate**-0.5 if rate > 0 else None)

    errors = _errors_of(capped, evidence, parts)
    grid = [0.0, *sorted(c**-2.0 for c in _CAPS)]
    costs = [_cost(errors, rate) for rate in grid]
    best = costs.index(min(costs))
    if not 0 < best < len(grid) - 1 or costs[best] > costs[0] / 2:
        return
    rate = _polished(errors, _narrowed(errors, *grid[best - 1 : best + 2]), grid[1])
    if rate > 0:
        yield from _in_few_digits(
            (rate**-0.5,),
            lambda cap: Alternative(variant.with_problem(softcap=cap[0]), {"softcap": cap[0]}),
            evidence,
        )


def fitted_sinks(variant: Variant, evidence: Evidence) -> Iterator[Alternative]:
    """The sink of each head that takes as much of the weights as the candidates lack."""
    sources = [one for one in evidence.candidates if one.target is not Target.LOGSUMEXP]
    problem = variant.problem
    if problem.sinks is not None or not sources or variant.needs_all_heads:
        return
    found: list[list[torch.Tensor]] = [[] for _ in range(problem.sizes.heads)]
    parts = evidence.parts(variant, evidence.quick_rows)
    for part, expected, (actual,) in cells_of(variant, sources[:1], parts):
        full = expected.of(sources[0].target).to(torch.float64)
        left = (full * actual).sum(-1) / full.square().sum(-1)  # (b, h, R), 1 without a sink
        sinks = expected.logsumexp[..., 0] + (1 / left - 1).log()
        known = torch.isfinite(sinks) & ((1 - left) > _LEAST_SINK)
        for index, head in enumerate(range(*part.head.indices(problem.sizes.heads))):
            found[head].append(sinks[:, index][known[:, index]].double().cpu())
    sums = [torch.cat(one) for one in found]
    if not any(len(one) for one in sums):
        return
    fitted = tuple(float(one.median()) if len(one) else _NO_SINK for one in sums)

    def with_sinks(values: tuple[float, ...]) -> Alternative:
        sinks = torch.tensor(values, dtype=torch.float64, device=problem.device)
        return Alternative(variant.with_problem(sinks=sinks), {"sinks": values})

    yield from _in_few_digits(fitted, with_sinks, evidence)


def _in_few_digits(
    fitted: tuple[float, ...],
    made: Callable[[tuple[float, ...]], Alternative],
    evidence: Evidence,
) -> Iterator[Alternative]:
    """What was fitted, with as few digits after the point as explain the candidates."""
    rounded = (tuple(round(x, digits) for x in fitted) for digits in (1, 2, *_DIGITS))
    tried = [made(values) for values in dict.fromkeys(rounded)]
    explaining = (t for t in tried if judge(t.variant, evidence, evidence.quick_rows).explains)
    yield next(explaining, tried[-1])


def other_value_heads(variant: Variant, evidence: Evidence) -> Iterator[Alternative]:
    """For each query head the value head that fits it best, where that is not its own."""
    problem = variant.problem
    outputs = [one for one in evidence.candidates if one.target is Target.OUTPUT]
    if problem.v is None or problem.kv_heads < 2 or not outputs or variant.needs_all_heads:
        return
    own = [problem.kv_head(head) for head in range(problem.sizes.heads)]
    misfit = torch.zeros(problem.sizes.heads, problem.kv_heads, dtype=torch.float64)
    parts = evidence.parts(variant, evidence.quick_rows)
    for part, expected, (actual, *_) in cells_of(variant, outputs, parts):
        for shared in range(problem.kv_heads):
            v = problem.cast(problem.v[part.batch, shared : shared + 1])
            error = weighted_sum(expected.weights, v, expected.weights > 0) - actual
            squares = error.nan_to_num(0.0, 0.0, 0.0).square().sum((0, 2, 3))
            misfit[part.head, shared] += squares.cpu()
    ties = misfit.gather(1, torch.tensor(own)[:, None])[:, 0] <= misfit.amin(1)
    best = zip(own, misfit.argmin(1).tolist(), ties.tolist(), strict=True)
    chosen = tuple(o if tie else b for o, b, tie in best)
    if list(chosen) != own:
        yield Alternative(replace(variant, value_heads=chosen))


def find_dropout(variant: Variant, evidence: Evidence) -> FitResult | None:
    """Dropout left on, which weights show: each is 0 or w/(1 − p), with one p for all.

    An output has to follow from the weights, a log-sum-exp is as ever. None where no weights are
    given, or where they show none.

    Args:
        variant: how attention was computed before the dropout.
        evidence: the candidates.
    """
    sources = [one for one in evidence.candidates if one.target is Target.WEIGHTS]
    factor = _dropout_factor(variant, evidence, sources[0]) if sources else None
    if factor is None or factor <= 1:
        return None
    candidates = (sources[0], *(one for one in evidence.candidates if one is not sources[0]))
    sums = [ErrorSums.of(candidate) for candidate in candidates]
    kept = dropped = 0
    for part, expected, cells in cells_of(variant, candidates, evidence.parts(variant, None)):
        clear = expected.weights > _CLEAR * evidence.tolerance.allowed(sources[0], expected)
        kept += int((clear & (cells[0] != 0)).sum())
        dropped += int((clear & (cells[0] == 0)).sum())
        left = expected.with_weights(torch.where(cells[0] != 0, expected.weights * factor, 0.0))
        for one, candidate, actual in zip(sums, candidates, cells, strict=True):
            one.add(errors_of(candidate, actual, left, evidence.tolerance), part)
    probability = 1 - 1 / factor
    error = math.sqrt(probability * (1 - probability) / max(1, kept + dropped))
    as_many = abs(dropped / max(1, kept + dropped) - probability) <= _SIGMAS * error
    plausible = kept >= _ENOUGH_KEPT and dropped >= _ENOUGH_DROPPED and as_many
    return FitResult(tuple(sums), differs=True, plausible=plausible)


def _dropout_factor(variant: Variant, evidence: Evidence, source: Candidate) -> float | None:
    """1/(1 − p), the median ratio of kept weights; None where too few are kept."""
    ratios = [torch.zeros(0, dtype=torch.float64)]
    parts = evidence.parts(variant, evidence.quick_rows)
    for _, expected, (actual,) in cells_of(variant, [source], parts):
        weights = expected.weights.to(torch.float64)
        clear = weights > _CLEAR * evidence.tolerance.allowed(source, expected)
        kept = clear & (actual > weights / 2)
        # Large weights are known best, relatively.
        best = kept & (weights >= weights[kept].median()) if bool(kept.any()) else kept
        ratios.append((actual[best] / weights[best]).cpu())
    found = torch.cat(ratios)
    return float(found.median()) if len(found) >= _ENOUGH_KEPT // 2 else None
