"""How far an honest kernel may be off, cell by cell.

With u the unit roundoff of the candidate's dtype, u₃₂ that of the arithmetic of its logits
(2⁻²⁴, also beside float16 and bfloat16; 2⁻⁵³ beside float64), L_i = ‖q_i‖·max‖k_j‖·|scale| over
the visible keys, which no |score| exceeds, nor the terms of one that cancel and are rounded too,
or the largest |logit| where a bias or a sink makes that more, and a_ic = Σ_j w_ij·|v_jc| of the
very cell, |actual − expected| may be

    target      of |expected|                  beside it
    output      2u                             a_ic·(u + 4·u₃₂·(1 + L_i)), for float16 plus
                                               2⁻²⁵·(1 + Σ_j |v_jc|) of the visible keys
    weights     2u + 8·u₃₂·(1 + L_i)           u² of the row's largest
    logsumexp   2u                             4·u₃₂·(1 + L_i + ln S_k)

    dtype       u
    float64     2⁻⁵³
    float32     2⁻²⁴
    float16     2⁻¹¹
    bfloat16    2⁻⁸
    float8      2⁻⁴ (e4m3), 2⁻³ (e5m2)

and beside all of them what is lost of numbers too small for the dtype.

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
# Below it subnormal numbers are often flushed to 0, and no one misses them.
_TINY = 1e-30


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
        logit = 1 + expected.logit_size.to(torch.float64).nan_to_num(0.0, 0.0)  # (b, h, R, 1)
        if self.rtol is None and candidate.target is Target.WEIGHTS:
            far = expected.logits.abs().nan_to_num(0.0, 0.0)
            own = own + 2 * inner * torch.maximum(logit, 1 + far) * size
        if self.atol is not None:
            return own + self.atol, None
        if candidate.target is Target.WEIGHTS:
            largest = size.amax(-1, keepdim=True) if size.shape[-1] else 0.0
            return own + unit * unit * largest + 2 * smallest_number(candidate.dtype), None
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
        smallest = smallest_number(candidate.dtype)
        output, v = (_finite(one.to(torch.float64)) for one in (expected.output, expected.v))
        weights = expected.weights.to(torch.float64)
        if not bool((torch.isfinite(expected.logsumexp) | expected.empty).all()):
            weights = _finite(weights)
        if candidate.dtype == torch.float16:
            off = weights * rounding + _SUBNORMAL_ERROR * expected.visible  # (b, h, R, S_k)
            spread, of_keys = off @ v.abs(), off.square().sum(2)  # (b, h, S_k)
        else:
            spread = rounding * (weights @ v.abs())
            of_keys = (rounding.square().mT @ weights.square())[:, :, 0]
        allowed = own + spread + smallest
        if self.rtol is not None:
            return allowed, None
        own_rounding = ((rounding * output).square() + smallest**2).sum((2, 3))
        return allowed, own_rounding + (of_keys * v.square().sum(-1)).sum(-1)

    def _of_logits(self, candidate: Candidate) -> float:
        """4·u₃₂, of the candidate's arithmetic or of ours, whichever is coarser."""
        theirs = torch.float64 if candidate.dtype == torch.float64 else torch.float32
        return _LOGIT_ROUNDINGS * max(unit_roundoff(theirs), unit_roundoff(self.dtype))


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def smallest_number(dtype: torch.dtype) -> float:
    """What rounding to 0 may lose: half a subnormal step, or all of them where few matter."""
    normal = float(torch.finfo(dtype).smallest_normal)
    return normal if normal < _TINY else normal * unit_roundoff(dtype)


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    """The same without NaN and inf."""
    return tensor if math.isfinite(float(tensor.sum())) else tensor.nan_to_num(0.0, 0.0, 0.0)
