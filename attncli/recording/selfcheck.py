"""Whether what was recorded of an attention call gives the output that the model computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attncli.attention import steps
from attncli.attention.check.walk import unit_roundoff
from attncli.attention.problem import Problem

# Queries that are looked at, from the first to the last.
ROWS = 4
# Keys of some heads in float64, at once: 16 MiB.
_ELEMENTS = 1 << 21
_FLOOR = 1e-5


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """How far a model's own output is from attention as it was recorded.

    Attributes:
        error: the largest difference of a row, in units of the mean |V| by the row's weights, where
            it is largest beside what is allowed.
        allowed: what rounding explains there, in the same unit.
    """

    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether what was recorded is what the model did."""
        return self.error <= self.allowed


@torch.no_grad()
def self_check(problem: Problem, output: torch.Tensor) -> SelfCheck | None:
    """Compare some rows of an output with attention in float64; None where no row sees a key.

    Args:
        problem: what was recorded, with V, for float64.
        output: (B, H, S_q, d_v), the model's own.
    """
    last = problem.sizes.q_len - 1
    chosen = sorted({round(last * part / (ROWS - 1)) for part in range(ROWS)})
    rows = torch.tensor(chosen, device=problem.device)
    mask = problem.mask_on_device()
    lengths = torch.as_tensor(mask.query_lengths, device=problem.device)
    real = (rows < lengths[:, None])[:, None]  # (B | 1, 1, rows)
    group = problem.sizes.heads // problem.kv_heads
    per_head = problem.sizes.batch * problem.sizes.k_len * problem.dk * group
    step = max(1, _ELEMENTS // max(1, per_head))
    worst: SelfCheck | None = None
    for start in range(0, problem.kv_heads, step):
        shared = slice(start, min(start + step, problem.kv_heads))
        heads = range(shared.start * group, shared.stop * group)
        found = _of_heads(problem, output, rows, real, shared, heads)
        if found is not None and (worst is None or _ratio(found) > _ratio(worst)):
            worst = found
    return worst


def _ratio(found: SelfCheck) -> float:
    return found.error / found.allowed


def _of_heads(
    problem: Problem,
    output: torch.Tensor,
    rows: torch.Tensor,
    real: torch.Tensor,
    shared: slice,
    heads: range,
) -> SelfCheck | None:
    """The same for neighbouring heads and the keys that they share."""
    assert problem.v is not None
    mask, of_heads = problem.mask_on_device(), slice(heads.start, heads.stop)
    group = len(heads) // (shared.stop - shared.start)
    k, v = (problem.cast(t[:, shared]).repeat_interleave(group, 1) for t in (problem.k, problem.v))
    found = steps.logits(
        problem.cast(problem.q[:, of_heads][:, :, rows]) @ k.mT,  # (B, heads, rows, S_k)
        scale=problem.scales_of(heads),
        temperature=problem.temperature,
        softcap=problem.softcap,
        visible=mask.visible(slice(None), of_heads, rows, slice(None)),
        bias=mask.bias(slice(None), of_heads, rows, slice(None)),
    )
    sink = None if problem.sinks is None else problem.cast(problem.sinks[of_heads])[:, None]
    softmax = steps.softmax(found.masked, found.visible, sink)  # (B, heads, rows, S_k)
    expected = steps.weighted_sum(softmax.weights, v, found.visible)  # (B, heads, rows, d_v)
    size = (softmax.weights @ v.abs()).amax(-1)
    off = (problem.cast(output[:, of_heads][:, :, rows]) - expected).abs().amax(-1)
    error = torch.where(off == 0, 0.0, off / size).nan_to_num(torch.inf)
    largest = torch.where(found.visible, found.masked, 0.0).abs().amax(-1)
    allowed = _allowed(output.dtype, largest)
    counted = (real & ~softmax.empty).expand(error.shape)
    if not bool(counted.any()):
        return None
    at = torch.where(counted, error / allowed, -1.0).argmax()
    return SelfCheck(float(error.flatten()[at]), float(allowed.flatten()[at]))


def _allowed(dtype: torch.dtype, largest: torch.Tensor) -> torch.Tensor:
    """What rounding explains in a row of that largest |logit|, of weights and so of outputs.

    Logits of half precision are rounded once, those of float32 as often as their sums are added up;
    what small models show is a sixteenth of it at most.
    """
    units = 8 if dtype.itemsize >= 4 else 2
    return (units * unit_roundoff(dtype) * (1 + largest)).clamp(min=_FLOOR)
