"""Scores kept or summed in float16: errors that look like it, and scores beyond 65,504.

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
    from collections.abc import Callable

    from attncli.attention.check.evidence import Evidence

HALF = torch.float16


class Keeping(StrEnum):
    """What is held in float16."""

    SCORES = "scores, rounded when stored"
    SCALED = "queries scaled first, scores rounded when stored"
    SUMS = "every partial sum of a score"


# An emulation that gives the candidate's very errors explains most of their square.
_SAME = 0.5
# Errors of the predicted size: within this factor, over all rows.
_SIZE = 3.0
# And no error beyond so many predicted standard deviations of its row.
_SIGMAS = 12.0
_ENOUGH_ROWS = 8
_ENOUGH_CELLS = 64


@dataclass(frozen=True, slots=True)
class _Rows:
    """Errors of one block, float64: of the candidate and of an emulation, (rows, w)."""

    actual: torch.Tensor
    emulated: torch.Tensor


def judge_half(variant: Variant, evidence: Evidence) -> Verdict | None:
    """Whether the candidates' errors are those of float16 scores; None where it makes no sense.

    Args:
        variant: what is right.
        evidence: the candidates, all of whose errors have to look like it.
    """
    sizes = variant.problem.sizes
    if variant.softmax is not SoftmaxOver.KEYS or not sizes.k_len or not evidence.candidates:
        return None
    largest, matches = 0.0, False
    for keeping in Keeping:
        blocks = _blocks(variant, evidence, keeping)
        largest = max(largest, *(float(b.actual.abs().amax()) for b in blocks if b.actual.numel()), 0.0)
        matches = matches or all(_alike(block, keeping) for block in blocks) and bool(blocks)
        if matches:
            break
    cells = sum(block.actual.numel() for block in blocks)
    return Verdict(largest, 0 if matches else cells, (0.0,), differs=True, cells=cells)


def _alike(rows: _Rows, keeping: Keeping) -> bool:
    """Whether the candidate's errors are an emulation's, or have their size in every row."""
    both = torch.isfinite(rows.actual) & torch.isfinite(rows.emulated)
    one = torch.isfinite(rows.actual) != torch.isfinite(rows.emulated)
    if bool(one.any()) or int(both.sum()) < _ENOUGH_CELLS:
        return False
    a, e = torch.where(both, rows.actual, 0.0), torch.where(both, rows.emulated, 0.0)
    left = float(((a - e) ** 2).sum())
    total = float((a**2).sum())
    if total > 0 and left <= (1 - _SAME) * total and float((a * e).sum()) > 0:
        return True
    return keeping is Keeping.SUMS and _of_that_size(a, e)


def _of_that_size(actual: torch.Tensor, emulated: torch.Tensor) -> bool:
    """Whether errors are as large as predicted in total and in each row, and go with the rows."""
    ours = emulated.square().mean(1).sqrt()  # (rows,)
    theirs = actual.square().mean(1).sqrt()
    live = ours > 0
    if int(live.sum()) < _ENOUGH_ROWS or float(theirs[~live].sum()) > 0:
        return False
    ratio = math.sqrt(float(theirs.square().sum()) / float(ours.square().sum()))
    if not 1 / _SIZE <= ratio <= _SIZE:
        return False
    smooth = (ours.square() + ours.square().mean()).sqrt()
    beyond = float((actual.abs().amax(1) / smooth).max())
    mean = float(actual.mean()) / max(1e-300, float(actual.square().mean().sqrt()))
    unbiased = abs(mean) <= 6 / math.sqrt(len(ours))
    return beyond <= _SIGMAS and unbiased and _correlation(ours[live], theirs[live]) > 0.3


def _correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Correlation of the logarithms."""
    x, y = (t.clamp_min(1e-300).log() for t in (a, b))
    x, y = x - x.mean(), y - y.mean()
    norm = math.sqrt(float((x * x).sum()) * float((y * y).sum()))
    return float((x * y).sum()) / norm if norm > 0 else 0.0


def _blocks(variant: Variant, evidence: Evidence, keeping: Keeping) -> list[_Rows]:
    """Errors of every candidate on the glance, and those of an emulation."""
    per_candidate: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in evidence.candidates]
    for one in evidence.glance:
        for part in parts_of(variant, one.rows, one.batches):
            right = evaluate(variant, part, with_output=evidence.with_output)
            emulated = _emulate(variant, part, keeping)
            for found, candidate in zip(per_candidate, evidence.candidates, strict=True):
                values = candidate.values
                if candidate.target is Target.OUTPUT:
                    values = mend(values, variant.misread)
                cells = of_target(right, candidate.target).to(torch.float64)
                actual = values[part.batch, part.head][:, :, part.rows.cpu()].to(cells)
                keep = ~right.empty[..., 0]
                found.append(
                    ((actual - cells)[keep], (emulated[candidate.target] - cells)[keep])
                )
    joined = [[torch.cat(side) for side in zip(*found, strict=True)] for found in per_candidate]
    return [_Rows(actual, emulated) for actual, emulated in joined]


def _emulate(variant: Variant, part: Part, keeping: Keeping) -> dict[Target, torch.Tensor]:
    """What a program that keeps scores in float16 gives for a part, in float64."""
    problem = variant.problem
    heads = range(*part.head.indices(problem.sizes.heads))
    shared = [problem.kv_head(head) for head in heads]
    q = problem.q[part.batch, part.head][:, :, part.rows].to(HALF).to(torch.float32)
    k = problem.k[part.batch][:, shared].to(HALF).to(torch.float32)
    factor = problem.scale / problem.temperature
    if keeping is Keeping.SCALED:
        scaled = _rounded(_rounded(q * factor) @ k.transpose(-1, -2))
    elif keeping is Keeping.SCORES:
        scaled = _rounded(_rounded(q @ k.transpose(-1, -2)) * factor)
    else:
        scaled = _rounded(_half_sums(q, k) * factor)
    masked = _masked(variant, part, scaled.to(torch.float64), _rounded)
    visible = problem.mask.visible(part.batch, part.head, part.rows, slice(None))
    sink = None if problem.sinks is None else problem.sinks[part.head][None, :, None]
    soft = softmax(masked, visible.expand(masked.shape), sink)
    found = {Target.WEIGHTS: soft.weights, Target.LOGSUMEXP: soft.logsumexp[..., None]}
    if problem.v is not None:
        v = problem.v[part.batch][:, shared].to(torch.float64)
        found[Target.OUTPUT] = weighted_sum(soft.weights, v, visible.expand(masked.shape))
    return found


def _half_sums(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Q Kᵀ with every product added in float16, (b, h, R, S_k) float32."""
    total = q.new_zeros(*q.shape[:-1], k.shape[-2])
    for column in range(q.shape[-1]):
        product = q[..., :, None, column] * k[..., None, :, column]
        total = _rounded(total + product)
    return total


def _masked(
    variant: Variant,
    part: Part,
    scaled: torch.Tensor,
    rounded: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Soft cap, bias and mask on scaled scores."""
    problem = variant.problem
    cap = problem.softcap
    capped = scaled if cap is None else rounded(cap * torch.tanh(scaled / cap))
    bias = problem.mask.bias(part.batch, part.head, part.rows, slice(None))
    if bias is not None:
        capped = capped + bias
    visible = problem.mask.visible(part.batch, part.head, part.rows, slice(None))
    return torch.where(visible, capped, -torch.inf)


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    """Rounded to float16, held in its own dtype; beyond 65,504 it is infinite."""
    return tensor.to(HALF).to(tensor.dtype)
