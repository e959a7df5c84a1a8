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
from attncli.attention.masks.build import MINUS_A_LOT
from attncli.attention.masks.mask import Mask, head_masks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from attncli.attention.problem import Problem

_LOGIT_ROUNDINGS = 4.0
# Larger mask files are not looked through for keys that all queries miss: each variant would pay.
_FILE_CELLS = 1 << 22
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


@dataclass(frozen=True, slots=True)
class RowSizes:
    """How large the rows of Q, K and V are, found once: many variants share these tensors.

    Attributes:
        tensors: Q, K and, where there are values, V, each (B, H, S, d).
        longest: float64 (B, S) for each, the largest Euclidean norm of a row over the heads.
        largest: float64 (B, S) for each, the largest |entry|.
    """

    tensors: tuple[torch.Tensor, ...]
    longest: tuple[torch.Tensor, ...]
    largest: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, problem: Problem) -> RowSizes:
        """Those of a problem."""
        tensors = tuple(t for t in (problem.q, problem.k, problem.v) if t is not None)
        return cls(
            tensors,
            tuple(_norms(tensor) for tensor in tensors),
            tuple(_maxima(tensor) for tensor in tensors),
        )

    def longest_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Float64 (B, S); looked up where the tensor is one of these."""
        known = zip(self.tensors, self.longest, strict=True)
        return _first_of(known, tensor, _norms)

    def largest_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Float64 (B, S); looked up where the tensor is one of these."""
        known = zip(self.tensors, self.largest, strict=True)
        return _first_of(known, tensor, _maxima)


def tolerance_of(
    target: Target,
    dtype: torch.dtype,
    problem: Problem,
    rtol: float | None = None,
    atol: float | None = None,
    *,
    sizes: RowSizes | None = None,
) -> Tolerance:
    """The tolerance for a candidate, unless the caller has one of their own.

    Args:
        target: what is compared.
        dtype: that of the candidate's values.
        problem: what it was computed from.
        rtol: relative tolerance; None for the table's.
        atol: absolute tolerance, in the unit of the target; None for the table's.
        sizes: of a problem that shares tensors with this one; None to find them out.
    """
    sizes = RowSizes.of(problem) if sizes is None else sizes
    seen = _seen_keys(problem.mask)
    unit = unit_roundoff(dtype)
    inner = _LOGIT_ROUNDINGS * unit_of_arithmetic(dtype, problem)
    logit = 1 + _largest_logit(problem, sizes, seen)
    if target is Target.OUTPUT:
        largest = 0.0
        if problem.v is not None:
            largest = _largest(sizes.largest_of(problem.v), seen)
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


def _largest_logit(problem: Problem, sizes: RowSizes, seen: torch.Tensor) -> float:
    """A bound of |logit|, by Cauchy and Schwarz: no score is computed."""
    queries, keys = sizes.longest_of(problem.q), sizes.longest_of(problem.k)
    bound = _largest(queries, _real_queries(problem)) * _largest(keys, seen)
    bound = bound * abs(problem.scale) / problem.temperature
    return (bound if math.isfinite(bound) else 0.0) + _largest_bias(problem)


def _largest_bias(problem: Problem) -> float:
    found = 0.0
    mask = problem.mask
    if mask.added is not None:
        for batch in torch.as_tensor(mask.added):
            for head in batch:
                sizes = head.to(torch.float64)
                kept = torch.where(sizes > MINUS_A_LOT, sizes.abs(), 0.0)
                found = max(found, float(kept.max()) if kept.numel() else 0.0)
    if mask.slopes is not None and len(mask.slopes):
        found += min(_FAR_BELOW, float(mask.slopes.max()) * problem.sizes.k_len)
    if problem.sinks is not None:
        sinks = torch.where(problem.sinks > MINUS_A_LOT, problem.sinks.abs(), 0.0)
        found += float(sinks.max()) if len(sinks) else 0.0
    return found


def _norms(tensor: torch.Tensor) -> torch.Tensor:
    """Float64 (B, S): the largest Euclidean norm of a row over the heads."""
    norms = [torch.linalg.vector_norm(one.to(torch.float64), dim=-1).amax(0) for one in tensor]
    return torch.stack(norms) if norms else torch.zeros(0, 0, dtype=torch.float64)


def _maxima(tensor: torch.Tensor) -> torch.Tensor:
    """Float64 (B, S): the largest |entry| of a row over the heads."""
    if not tensor.shape[-1]:
        return torch.zeros(tensor.shape[0], tensor.shape[2], dtype=torch.float64)
    maxima = [one.to(torch.float64).abs().amax((0, 2)) for one in tensor]
    return torch.stack(maxima) if maxima else torch.zeros(0, 0, dtype=torch.float64)


def _first_of(
    known: Iterable[tuple[torch.Tensor, torch.Tensor]],
    tensor: torch.Tensor,
    find: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    for one, sizes in known:
        if one is tensor:
            return sizes
    return find(tensor)


def _largest(sizes: torch.Tensor, seen: torch.Tensor | None = None) -> float:
    """The largest of (B, S), NaN and inf left out, and rows that are not seen."""
    kept = torch.where(torch.isfinite(sizes), sizes, 0.0)
    if seen is not None:
        kept = torch.where(seen.to(kept.device), kept, 0.0)
    return float(kept.max()) if kept.numel() else 0.0


def _seen_keys(mask: Mask) -> torch.Tensor:
    """Bool (B | 1, S_k): what lies in padding is garbage of any size and must not count."""
    seen = torch.zeros(mask.sizes.batch if mask.differs(0) else 1, mask.sizes.k_len).bool()
    for batch, _, view in head_masks(mask.on_host()):
        seen[batch or 0] |= torch.from_numpy(view.marginals.used > 0)
    return seen


def _real_queries(problem: Problem) -> torch.Tensor:
    """Bool (B | 1, S_q): padded queries are compared with nothing, whatever they hold."""
    lengths = torch.as_tensor(problem.mask.query_lengths).cpu()
    return torch.arange(problem.sizes.q_len) < lengths[:, None]
