"""A least-squares fit of one number."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_GOLDEN = (5**0.5 - 1) / 2
_NARROWINGS = 12
_POLISHES = 8


def least_squares(
    errors: Callable[[float], torch.Tensor], grid: list[float], noise: float
) -> float | None:
    """The x at which Σ errors(x)² is least; None where it is the same all over the grid.

    The best point of the grid is narrowed down by golden sections between its neighbours and
    polished by Gauss–Newton steps, which find a zero residual to the last digits where sections
    stop at the square root of the precision.

    Args:
        errors: float64 (n,) at an x.
        grid: ascending, fine enough to hold the valley.
        noise: root mean square of errors up to which two points are the same.
    """
    costs = [_cost(errors, x) for x in grid]
    if max(costs) - min(costs) <= noise**2:
        return None
    best = costs.index(min(costs))
    low, high = grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]
    return _polish(errors, _narrow(errors, low, grid[best], high))


def _cost(errors: Callable[[float], torch.Tensor], x: float) -> float:
    return float(errors(x).square().mean())


def _narrow(errors: Callable[[float], torch.Tensor], low: float, best: float, high: float) -> float:
    """The best of some golden sections of [low, high], and of what was known before."""
    tried = {best: _cost(errors, best)}
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    for _ in range(_NARROWINGS):
        for x in (left, right):
            if x not in tried:
                tried[x] = _cost(errors, x)
        if tried[left] <= tried[right]:
            high, right = right, left
            left = high - _GOLDEN * (high - low)
        else:
            low, left = left, right
            right = low + _GOLDEN * (high - low)
    return min(tried, key=tried.__getitem__)


def _polish(errors: Callable[[float], torch.Tensor], x: float) -> float:
    """Gauss–Newton steps while they help."""
    cost = _cost(errors, x)
    for _ in range(_POLISHES):
        reach = 1e-5 * abs(x) or 1e-8
        slope = (errors(x + reach) - errors(x - reach)) / (2 * reach)
        steep = float(slope @ slope)
        if steep == 0:
            break
        moved = x - float(slope @ errors(x)) / steep
        found = _cost(errors, moved)
        if not found < cost:
            break
        x, cost = moved, found
    return x
