"""How far an honest kernel may be off, cell by cell.

With u the unit roundoff of the candidate's dtype, u₃₂ that of the arithmetic of its logits
(2⁻²⁴, also beside float16 and bfloat16; 2⁻⁵³ beside float64), L_i the largest |logit| of row i,
or ‖q_i‖·max‖k_j‖·|scale| where that is more, since the terms of a score that cancel are rounded
too, and a_ic = Σ_j w_ij·|v_jc| of the very cell, |actual − expected| may be

    target      of |expected|                  beside it
    output      2u                             a_ic·(u + 4·u₃₂·(1 + L_i)), for float16 plus
                                               2⁻²⁵·Σ_j |v_jc| of the visible keys
    weights     2u + 8·u₃₂·(1 + L_i)           u², at least the dtype's smallest number
    logsumexp   2u                             4·u₃₂·(1 + L_i + ln S_k)

    dtype       u
    float64     2⁻⁵³
    float32     2⁻²⁴
    float16     2⁻¹¹
    bfloat16    2⁻⁸
    float8      2⁻⁴ (e4m3), 2⁻³ (e5m2)

An output errs by Σ δ_j·w_j·v_j with |δ_j| ≤ u for the rounding of weights before they meet V, by
the rounding of the logits, and by its own last rounding; weights that are subnormal in float16
err by up to 2⁻²⁵ each.

Such errors are independent of each other. With c_i = u + 4·u₃₂·(1 + L_i), rounding explains an
error of √(c_i²·(e_ic² + Σ_j w_ij²·v_jc²)) in a cell, and of the root mean square of that in a
head: cells of a head that all err to their limit, or that all are 0 where the values average out,
are seen there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from attncli.attention.check.candidate import Candidate, Target
from attncli.attention.check.variant import Expected
from attncli.attention.problem import Problem

_LOGIT_ROUNDINGS = 4.0
# Half the distance of float16's subnormal numbers.
_SUBNORMAL_ERROR = 2.0**-25
# Beyond so many nats below a row's maximum a weight is too small for its rounding to be seen.
_FAR_BELOW = 50.0


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far off is still right.

    Attributes:
        rtol: relative tolerance of the caller; None for that of the dtype.
        atol: absolute tolerance of the caller, in the unit of the target; None likewise.
        dtype: of the reference's arithmetic, whose rounding counts too.
    """

    rtol: float | None
    atol: float | None
    dtype: torch.dtype

    @classmethod
    def of(
        cls, problem: Problem, rtol: float | None = None, atol: float | None = None
    ) -> Tolerance:
        """The tolerance beside a reference, unless the caller has one of their own."""
        return cls(rtol, atol, problem.dtype)

    def allowed(self, candidate: Candidate, expected: Expected) -> torch.Tensor:
        """The largest error that passes, float64, broadcastable to (b, h, R, w)."""
        return self.bounds(candidate, expected)[0]

    def bounds(
        self, candidate: Candidate, expected: Expected
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The largest error that passes in a cell, and what rounding explains in a head.

        Returns:
            Float64, broadcastable to (b, h, R, w); and Σ over the cells of the squared error that
            rounding explains, float64 (b, h), None but for outputs without a tolerance of the
            caller.
        """
        unit, inner = unit_roundoff(candidate.dtype), self._of_logits(candidate)
        size = expected.of(candidate.target).to(torch.float64).abs().nan_to_num(0.0, 0.0, 0.0)
        own = (2 * unit if self.rtol is None else self.rtol) * size
        if self.rtol is None and candidate.target is Target.WEIGHTS:
            logit = torch.maximum(largest_logit(expected), expected.logits.abs().nan_to_num(0, 0))
            own = own + 2 * inner * (1 + logit) * size
        if self.atol is not None:
            return own + self.atol, None
        if candidate.target is Target.WEIGHTS:
            smallest = torch.finfo(candidate.dtype).smallest_normal * 2 * unit
            return own + max(unit * unit, smallest), None
        logit = 1 + largest_logit(expected)  # (b, h, R, 1)
        if candidate.target is Target.LOGSUMEXP:
            keys = math.log(max(1, expected.weights.shape[-1]))
            return own + inner * (logit + keys), None
        return self._of_output(candidate, expected, own, unit + inner * logit)

    def _of_output(
        self, candidate: Candidate, expected: Expected, own: torch.Tensor, rounding: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`bounds` of an output, of c_i (b, h, R, 1)."""
        assert expected.output is not None
        assert expected.v is not None
        weights, v = _finite(expected.weights), _finite(expected.v)
        off = weights * rounding  # (b, h, R, S_k), how far each weight may be off
        if candidate.dtype == torch.float16:
            off = off + _SUBNORMAL_ERROR * expected.visible
        allowed = own + off @ v.abs()
        if self.rtol is not None:
            return allowed, None
        of_keys = (off.square().sum(2) * v.square().sum(-1)).sum(-1)  # (b, h)
        return allowed, of_keys + (rounding * _finite(expected.output)).square().sum((2, 3))

    def _of_logits(self, candidate: Candidate) -> float:
        """4·u₃₂, of the candidate's arithmetic or of ours, whichever is coarser."""
        theirs = torch.float64 if candidate.dtype == torch.float64 else torch.float32
        return _LOGIT_ROUNDINGS * max(unit_roundoff(theirs), unit_roundoff(self.dtype))


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def largest_logit(expected: Expected) -> torch.Tensor:
    """L_i, float64 (b, h, R, 1), of keys whose weight is not too small for rounding to be seen."""
    logits = expected.logits
    if not logits.shape[-1]:
        return logits.new_zeros(*logits.shape[:-1], 1, dtype=torch.float64)
    near = logits >= logits.amax(-1, keepdim=True) - _FAR_BELOW
    largest = torch.where(near, logits.abs(), 0.0).amax(-1, keepdim=True)
    size = torch.maximum(largest, expected.terms)
    return size.to(torch.float64).nan_to_num(0.0, 0.0, 0.0)


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    """Float64, without NaN and inf; the same tensor where it holds none."""
    exact = tensor.to(torch.float64)
    return exact if math.isfinite(float(exact.sum())) else exact.nan_to_num(0.0, 0.0, 0.0)
