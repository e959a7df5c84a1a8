"""Mistakes that are read off the candidate: a scale nobody declared, values of other heads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attncli.attention.check.candidate import Target, mend
from attncli.attention.check.evidence import judge
from attncli.attention.check.mistakes import Alternative
from attncli.attention.check.scale_fit import best_scale
from attncli.attention.check.variant import Variant, evaluate, parts_of
from attncli.attention.steps import weighted_sum

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncli.attention.check.evidence import Evidence

_DIGITS = (4, 6, 9, 12, 17)


def fitted_scale(variant: Variant, evidence: Evidence) -> Iterator[Alternative]:
    """The scale that fits the candidates best, with as few digits as explain them."""
    starts = [variant.problem.scale]
    found = best_scale(variant, evidence, evidence.glance, starts=starts)
    if found is None:
        return
    values = dict.fromkeys(float(f"{found:.{digits}g}") for digits in _DIGITS)
    tried = [variant.with_problem(scale=value) for value in values]
    for candidate in tried:
        if judge(candidate, evidence, evidence.glance).explains:
            yield _as_option(candidate)
            return
    yield _as_option(tried[-1])


def other_value_heads(variant: Variant, evidence: Evidence) -> Iterator[Alternative]:
    """For each query head the value head that fits it best, where that is not its own."""
    problem = variant.problem
    outputs = [one for one in evidence.candidates if one.target is Target.OUTPUT]
    if problem.v is None or problem.kv_heads < 2 or not outputs or variant.needs_all_heads:
        return
    own = [problem.kv_head(head) for head in range(problem.sizes.heads)]
    misfit = _misfit_of_value_heads(variant, evidence, mend(outputs[0].values, variant.misread))
    best = misfit.argmin(1).tolist()
    ties = misfit.gather(1, torch.tensor(own)[:, None])[:, 0] <= misfit.amin(1)
    chosen = tuple(o if tie else b for o, b, tie in zip(own, best, ties.tolist(), strict=True))
    if list(chosen) != own:
        yield Alternative(replace(variant, value_heads=chosen))


def _misfit_of_value_heads(
    variant: Variant, evidence: Evidence, actual: torch.Tensor
) -> torch.Tensor:
    """Float64 (H, H_kv): squared error of each query head with each value head."""
    problem = variant.problem
    assert problem.v is not None
    total = torch.zeros(problem.sizes.heads, problem.kv_heads, dtype=torch.float64)
    for one in evidence.glance:
        for part in parts_of(variant, one.rows, one.batches):
            weights = evaluate(variant, part, with_output=False).weights  # (b, h, R, S_k)
            cells = actual[part.batch, part.head][:, :, part.rows.cpu()].to(torch.float64)
            for shared in range(problem.kv_heads):
                v = problem.cast(problem.v[part.batch, shared : shared + 1])
                output = weighted_sum(weights, v, weights > 0).cpu().to(torch.float64)
                error = (output - cells).nan_to_num(0.0, 0.0, 0.0)
                total[part.head, shared] += (error * error).sum((0, 2, 3))
    return total


def _as_option(variant: Variant) -> Alternative:
    return Alternative(variant, {"scale": variant.problem.scale})
