"""The scale that explains some tensors best: a least-squares fit of one number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from attncli.attention.check.candidate import Target, mend
from attncli.attention.check.difference import of_target
from attncli.attention.check.evidence import Evidence, RowSample
from attncli.attention.check.variant import Variant, evaluate, parts_of

Errors = Callable[[float], torch.Tensor]

# Scales are looked for up to so many factors of two from 1/√d_k, to either side and sign.
_POWERS = range(-10, 11)
_GOLDEN = (5**0.5 - 1) / 2
_NARROWINGS = 12
_POLISHES = 12


def best_scale(
    variant: Variant,
    evidence: Evidence,
    rows: Sequence[RowSample],
    *,
    starts: Sequence[float] = (),
    noise: float = 0.0,
) -> float | None:
    """The scale that leaves the least squared error; None where the candidates tell none.

    The best of a grid is narrowed down by golden sections between its neighbours, on the few rows
    of the evidence's glance, and polished by Gauss–Newton steps, which find a zero residual to the
    last digits where sections stop at the square root of the precision.

    Args:
        variant: how the candidates were computed, but for the scale.
        evidence: the candidates.
        rows: what the last digits are read from.
        starts: scales to try besides the grid.
        noise: root mean square of errors up to which two scales explain the same.
    """
    unit = 1 / math.sqrt(variant.problem.dk)
    errors = scale_errors(variant, evidence, evidence.glance)
    grid = sorted({0.0, *starts, *(sign * unit * 2.0**p for p in _POWERS for sign in (1, -1))})
    costs = [_cost(errors, scale) for scale in grid]
    least = min(costs)
    if not min(costs[0], costs[-1]) > least + noise**2:  # all fit alike, or any large one does
        return None
    best = costs.index(least)
    narrow = _narrowed(errors, grid[best - 1], grid[best], grid[best + 1])
    return _polished(scale_errors(variant, evidence, rows), narrow, unit)


def scale_errors(variant: Variant, evidence: Evidence, rows: Sequence[RowSample]) -> Errors:
    """Recomputed − given of all cells of the rows, float64 (n,), as a function of the scale.

    What is not finite, and rows that see no key, count 0.
    """

    def errors(scale: float) -> torch.Tensor:
        tried = variant.with_problem(scale=scale)
        found = [torch.zeros(1, dtype=torch.float64)]
        for sample in rows:
            for part in parts_of(tried, sample.rows, sample.batches):
                expected = evaluate(tried, part, with_output=evidence.with_output)
                for candidate in evidence.candidates:
                    values = candidate.values
                    if candidate.target is Target.OUTPUT:
                        values = mend(values, variant.misread)
                    actual = values[part.batch, part.head][:, :, part.rows.cpu()].double()
                    error = of_target(expected, candidate.target).cpu().double() - actual
                    error = torch.where(expected.empty.cpu(), 0.0, error)
                    found.append(error.nan_to_num(0.0, 0.0, 0.0).flatten())
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
