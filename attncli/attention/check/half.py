"""Scores kept in half precision or summed in it: errors that look like it.

The order of the sum is not known, so no emulation can give the very errors of a candidate. Two
things can be asked of them: whether they *are* those of an emulation (scores rounded to float16
when they are stored come out the same wherever they are computed), and, for a sum in float16,
whether they have the size that rounding at every step predicts, row by row, and no bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from attncli.attention.check.candidate import Target, mend
from attncli.attention.check.difference import of_target
from attncli.attention.check.evidence import Verdict
from attncli.attention.check.variant import Part, SoftmaxOver, Variant, evaluate, parts_of
from attncli.attention.steps import softmax, weighted_sum

if TYPE_CHECKING:
    from attncli.attention.check.evidence import Evidence


class Keeping(StrEnum):
    """What is held in half precision."""

    INPUTS = "queries and keys"
    SCORES = "scores, rounded when stored"
    SCALED = "queries scaled first, scores rounded when stored"
    SUMS = "every partial sum of a score"


_KEPT = {
    torch.float16: (Keeping.SCORES, Keeping.SCALED, Keeping.SUMS),
    torch.bfloat16: (Keeping.INPUTS, Keeping.SCORES, Keeping.SCALED),
}
# An emulation that gives the candidate's very errors explains most of their square.
_SAME = 0.5
# Errors of the predicted size: within this factor, over all rows.
_SIZE = 2.0
# And no error beyond so many predicted standard deviations of its row.
_SIGMAS = 12.0
# Mean error of all cells in units of its size, times the root of the rows.
_BIAS = 4.0
_ENOUGH_ROWS = 12
_ENOUGH_CELLS = 64
# Sums in so many orders, to know the size of their errors row by row.
_ORDERS = 4
_SEED = 20_250_102


@dataclass(frozen=True, slots=True)
class _Rows:
    """Errors of one candidate, float64 (rows, w), and those of emulations, each the same."""

    actual: torch.Tensor
    emulated: tuple[torch.Tensor, ...]


def judge_half(variant: Variant, evidence: Evidence, dtype: torch.dtype) -> Verdict | None:
    """Whether the candidates' errors are those of scores in a half dtype.

    Args:
        variant: what is right.
        evidence: the candidates, all of whose errors have to look like it.
        dtype: float16, or bfloat16, whose sums nobody keeps and whose inputs are rounded often.

    Returns:
        None where the question makes no sense.
    """
    sizes = variant.problem.sizes
    if variant.softmax is not SoftmaxOver.KEYS or not sizes.k_len or not evidence.candidates:
        return None
    half = dtype == torch.float16
    by_size = half and all(_holds_half(t) for t in (variant.problem.q, variant.problem.k))
    largest, cells, matches = 0.0, 0, False
    for keeping in _KEPT[dtype]:
        found = _errors(variant, evidence, keeping, dtype)
        cells = sum(rows.actual.numel() for rows in found)
        largest = max(
            (float(r.actual.abs().amax()) for r in found if r.actual.numel()), default=0.0
        )
        sums = by_size and keeping is Keeping.SUMS
        matches = matches or all(_is_one_of(r) or (sums and _of_that_size(r)) for r in found)
    return Verdict(largest, 0 if matches else cells, (0.0,), (), differs=True, cells=cells)


def _holds_half(tensor: torch.Tensor) -> bool:
    """Whether float16 holds every value: other inputs were rounded first, and that shows more."""
    for batch in tensor:
        rounded = _rounded(batch, torch.float16)
        if not torch.equal(batch.nan_to_num(), rounded.nan_to_num()):
            return False
    return True


def _is_one_of(rows: _Rows) -> bool:
    """Whether the candidate's errors are those of an emulation, NaN and inf at the same cells."""
    for emulated in rows.emulated:
        both = torch.isfinite(rows.actual) & torch.isfinite(emulated)
        if int(both.sum()) < _ENOUGH_CELLS or not _broken_alike(rows.actual, emulated):
            continue
        actual, ours = torch.where(both, rows.actual, 0.0), torch.where(both, emulated, 0.0)
        left, total = float((actual - ours).square().sum()), float(actual.square().sum())
        if left <= (1 - _SAME) * total:
            return True
    return False


def _broken_alike(actual: torch.Tensor, emulated: torch.Tensor) -> bool:
    return torch.equal(torch.isfinite(actual), torch.isfinite(emulated))


def _of_that_size(rows: _Rows) -> bool:
    """Whether errors are as large as predicted in total, nowhere much larger, and without bias."""
    actual = rows.actual
    if not all(bool(torch.isfinite(tensor).all()) for tensor in (actual, *rows.emulated)):
        return False
    predicted = torch.stack([e.square().mean(1) for e in rows.emulated]).mean(0).sqrt()  # (rows,)
    live = predicted > 0
    if int(live.sum()) < _ENOUGH_ROWS or float(actual[~live].abs().sum()) > 0:
        return False
    size = math.sqrt(float(actual.square().mean()) / float(predicted.square().mean()))
    spread = (predicted.square() + predicted.square().mean()).sqrt()
    beyond = float((actual.abs().amax(1) / spread).max())
    mean = float(actual.mean()) / float(actual.square().mean().sqrt().clamp_min(1e-300))
    unbiased = abs(mean) * math.sqrt(len(actual)) <= _BIAS
    return 1 / _SIZE <= size <= _SIZE and beyond <= _SIGMAS and unbiased


def _errors(
    variant: Variant, evidence: Evidence, keeping: Keeping, dtype: torch.dtype
) -> list[_Rows]:
    """Errors of every candidate on the glance, and those of emulations."""
    gathered: list[list[list[torch.Tensor]]] = [[] for _ in evidence.candidates]
    for one in evidence.glance:
        for part in parts_of(variant, one.rows, one.batches):
            right = evaluate(variant, part, with_output=evidence.with_output)
            emulations = _emulate(variant, part, keeping, dtype)
            for found, candidate in zip(gathered, evidence.candidates, strict=True):
                values = candidate.values
                if candidate.target is Target.OUTPUT:
                    values = mend(values, variant.misread)
                cells = of_target(right, candidate.target).to(torch.float64)
                actual = values[part.batch, part.head][:, :, part.rows.cpu()].to(cells)
                # Weights err in proportion to their size.
                unit = cells if candidate.target is Target.WEIGHTS else torch.ones_like(cells)
                unit = torch.where(unit == 0, 1.0, unit)
                keep = ~right.empty[..., 0]
                tensors = [actual, *(emulated[candidate.target] for emulated in emulations)]
                found.append([((tensor - cells) / unit)[keep] for tensor in tensors])
    joined = [[torch.cat(side) for side in zip(*found, strict=True)] for found in gathered]
    return [_Rows(errors[0], tuple(errors[1:])) for errors in joined]


def _emulate(
    variant: Variant, part: Part, keeping: Keeping, dtype: torch.dtype
) -> list[dict[Target, torch.Tensor]]:
    """What programs that keep something in half precision give for a part, in float64."""
    problem = variant.problem
    heads = range(*part.head.indices(problem.sizes.heads))
    shared = [problem.kv_head(head) for head in heads]
    q = _rounded(
        problem.q[part.batch, part.head][:, :, part.rows].to(problem.device, torch.float32), dtype
    )
    k = _rounded(problem.k[part.batch][:, shared].to(problem.device, torch.float32), dtype)
    factor = problem.scale / problem.temperature
    turned = k.transpose(-1, -2)  # (b, h, d_k, S_k)
    if keeping is Keeping.INPUTS:
        scaled = [q @ turned * factor]
    elif keeping is Keeping.SCALED:
        scaled = [_rounded(_rounded(q * factor, dtype) @ turned, dtype)]
    elif keeping is Keeping.SCORES:
        scaled = [_rounded(_rounded(q @ turned, dtype) * factor, dtype)]
    else:
        sums = [_half_sums(q, k, order, dtype) for order in _orders(q.shape[-1])]
        scaled = [_rounded(one * factor, dtype) for one in sums]
    return [_finish(variant, part, one.to(torch.float64), shared) for one in scaled]


def _orders(width: int) -> list[list[int]]:
    """Orders to sum in: from first to last, and by chance."""
    random = torch.Generator().manual_seed(_SEED)
    shuffled = [torch.randperm(width, generator=random).tolist() for _ in range(_ORDERS - 1)]
    return [list(range(width)), *shuffled]


def _half_sums(
    q: torch.Tensor, k: torch.Tensor, order: list[int], dtype: torch.dtype
) -> torch.Tensor:
    """Q Kᵀ with every product added in half precision, (b, h, R, S_k) float32."""
    total = q.new_zeros(*q.shape[:-1], k.shape[-2])
    for column in order:
        product = q[..., :, None, column] * k[..., None, :, column]
        total = _rounded(total + product, dtype)
    return total


def _finish(
    variant: Variant, part: Part, scaled: torch.Tensor, shared: list[int]
) -> dict[Target, torch.Tensor]:
    """Every target from scaled scores (b, h, R, S_k) float64."""
    problem = variant.problem
    masked = _masked(variant, part, scaled)
    visible = problem.mask.visible(part.batch, part.head, part.rows, slice(None))
    visible = visible.expand(masked.shape)
    sink = (
        None
        if problem.sinks is None
        else problem.sinks[part.head].to(problem.device)[None, :, None]
    )
    soft = softmax(masked, visible, sink)
    found = {Target.WEIGHTS: soft.weights, Target.LOGSUMEXP: soft.logsumexp[..., None]}
    if problem.v is not None:
        v = problem.v[part.batch][:, shared].to(problem.device, torch.float64)
        found[Target.OUTPUT] = weighted_sum(soft.weights, v, visible)
    return found


def _masked(variant: Variant, part: Part, scaled: torch.Tensor) -> torch.Tensor:
    """Soft cap, bias and mask on scaled scores."""
    problem = variant.problem
    cap = problem.softcap
    capped = scaled if cap is None else cap * torch.tanh(scaled / cap)
    bias = problem.mask.bias(part.batch, part.head, part.rows, slice(None))
    if bias is not None:
        capped = capped + bias
    visible = problem.mask.visible(part.batch, part.head, part.rows, slice(None))
    return torch.where(visible, capped, -torch.inf)


def _rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded to another dtype, held in its own; float16 is infinite beyond 65,504."""
    return tensor.to(dtype).to(tensor.dtype)
