"""How far an honest kernel may be off: |actual − expected| ≤ atol + rtol·|expected|.

With u the unit roundoff of the candidate's dtype, u₃₂ that of the arithmetic of its logits
(float32, also beside float16 and bfloat16; float64 for float64), v = max |V| and
L = max‖q‖·max‖k‖·|scale| + the largest bias, which bounds every logit and, with it, its rounding:

    target      rtol                  atol
    output      2u                    v·(u + 4·u₃₂·(1 + L))
    weights     2u + 8·u₃₂·(1 + L)    u², at least the dtype's smallest number
    logsumexp   2u                    4·u₃₂·(1 + L + ln S_k)

    dtype       u
    float64     2⁻⁵³
    float32     2⁻²⁴
    float16     2⁻¹¹
    bfloat16    2⁻⁸
    float8      2⁻⁴ (e4m3), 2⁻³ (e5m2)

An output errs by Σ δ_j·w_j·v_j with |δ_j| ≤ u for the rounding of weights before they meet V, by
the rounding of the logits times the spread of the values, and by its own last rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncli.attention.check.candidate import Target

if TYPE_CHECKING:
    from attncli.attention.problem import Problem

_LOGIT_ROUNDINGS = 4.0
# A bias below this is meant as "minus infinity" and decides nothing that rounds.
_MINUS_A_LOT = -1e4
# Beyond so many nats below a row's maximum a weight is too small for its rounding to be seen.
_FAR_BELOW = 50.0


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far off is still right: |actual − expected| ≤ atol + rtol·|expected|."""

    rtol: float
    atol: float

    def allowed(self, expected: torch.Tensor) -> torch.Tensor:
        """The largest error that passes, per cell."""
        return self.atol + self.rtol * expected.abs()


def tolerance_of(
    target: Target,
    dtype: torch.dtype,
    problem: Problem,
    rtol: float | None = None,
    atol: float | None = None,
) -> Tolerance:
    """The tolerance for a candidate, unless the caller has one of their own.

    Args:
        target: what is compared.
        dtype: that of the candidate's values.
        problem: what it was computed from.
        rtol: relative tolerance; None for the table's.
        atol: absolute tolerance, in the unit of the target; None for the table's.
    """
    unit = unit_roundoff(dtype)
    inner = _LOGIT_ROUNDINGS * unit_of_arithmetic(dtype, problem)
    logit = 1 + largest_logit(problem)
    if target is Target.OUTPUT:
        largest = 0.0 if problem.v is None else _largest(problem.v, _seen_keys(problem))
        found = Tolerance(2 * unit, largest * (unit + inner * logit))
    elif target is Target.WEIGHTS:
        smallest = torch.finfo(dtype).smallest_normal * 2 * unit  # half a subnormal step and more
        found = Tolerance(2 * unit + 2 * inner * logit, max(unit * unit, smallest))
    else:
        found = Tolerance(2 * unit, inner * (logit + math.log(max(1, problem.sizes.k_len))))
    return Tolerance(found.rtol if rtol is None else rtol, found.atol if atol is None else atol)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def unit_of_arithmetic(dtype: torch.dtype, problem: Problem) -> float:
    """The unit roundoff of the logits, of the candidate's or of ours, whichever is coarser."""
    theirs = torch.float64 if dtype == torch.float64 else torch.float32
    return max(unit_roundoff(theirs), unit_roundoff(problem.dtype))


def largest_logit(problem: Problem) -> float:
    """A bound of |logit|, by Cauchy and Schwarz: no score is computed."""
    width = _longest_row(problem.q) * _longest_row(problem.k, _seen_keys(problem))
    bound = width * abs(problem.scale) / problem.temperature
    bound = bound if math.isfinite(bound) else 0.0
    return bound + _largest_bias(problem)


def _largest_bias(problem: Problem) -> float:
    found = 0.0
    mask = problem.mask
    if mask.added is not None:
        added = torch.as_tensor(mask.added)
        for part in added.flatten(0, -2).split(max(1, (1 << 22) // max(1, added.shape[-1]))):
            sizes = part.to(torch.float64)
            kept = torch.where(sizes > _MINUS_A_LOT, sizes.abs(), 0.0)
            found = max(found, float(kept.max()) if kept.numel() else 0.0)
    if mask.slopes is not None and len(mask.slopes):
        found += min(_FAR_BELOW, float(mask.slopes.max()) * problem.sizes.k_len)
    if problem.sinks is not None:
        found += float(problem.sinks.abs().max())
    return found


def _longest_row(tensor: torch.Tensor, seen: list[torch.Tensor] | None = None) -> float:
    """The largest Euclidean norm of a row (B, H, S, d), NaN and inf left out."""
    longest = 0.0
    for batch, heads in enumerate(tensor):
        norms = torch.linalg.vector_norm(heads.to(torch.float64), dim=-1)  # (H, S)
        longest = max(longest, _largest_seen(norms, None if seen is None else seen[batch]))
    return longest


def _largest(tensor: torch.Tensor, seen: list[torch.Tensor]) -> float:
    """The largest |value| of rows that some query may see, NaN and inf left out."""
    largest = 0.0
    for batch, heads in enumerate(tensor):
        if heads.shape[-1]:
            sizes = heads.to(torch.float64).abs().amax(-1)  # (H, S)
            largest = max(largest, _largest_seen(sizes, seen[batch]))
    return largest


def _largest_seen(sizes: torch.Tensor, seen: torch.Tensor | None) -> float:
    kept = torch.where(torch.isfinite(sizes), sizes, 0.0)
    if seen is not None:
        kept = torch.where(seen.to(kept.device), kept, 0.0)
    return float(kept.max()) if kept.numel() else 0.0


def _seen_keys(problem: Problem) -> list[torch.Tensor]:
    """Bool (S_k,) per batch: what lies in padding is garbage of any size and must not count."""
    mask, keys = problem.mask, torch.arange(problem.sizes.k_len)
    found = []
    for batch in range(problem.sizes.batch):
        first = torch.as_tensor(mask.first[batch % len(mask.first)])
        stop = torch.as_tensor(mask.stop[batch % len(mask.stop)])
        low, high = (int(first.min()), int(stop.max())) if len(first) else (0, 0)
        seen = (keys >= low) & (keys < high)
        if mask.key_keep is not None:
            seen &= torch.as_tensor(mask.key_keep[batch % len(mask.key_keep)]).cpu()
        found.append(seen)
    return found
