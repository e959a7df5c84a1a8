"""Is what a program computed right? One way for the command line and for Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attncli.attention.check.candidate import Candidate, Target, read_candidate
from attncli.attention.check.compare import Comparison, Pair, compare_pair
from attncli.attention.check.hypotheses import Check, Hypothesis, check
from attncli.attention.options import AttentionOptions, Layout
from attncli.attention.problem import Problem
from attncli.columns import record_of
from attncli.errors import UsageError


def require_candidates(
    given: Iterable[str], rtol: float | None, atol: float | None, *, pair: bool = False
) -> None:
    """Refuse what makes no check, before anything is loaded.

    Args:
        given: the targets of the candidates.
        rtol, atol: tolerances of the caller; None for those of the dtype.
        pair: whether a second candidate is to be compared with the one given.

    Raises:
        UsageError: no candidate, several of them for a pair, or a tolerance that is none.
    """
    count = len(list(given))
    if not count:
        names = ", ".join(f"«actual_{target}»" for target in Target)
        raise UsageError("check", f"expected one of {names}, got none")
    if pair and count > 1:
        raise UsageError("«pair»", f"expected one candidate beside it, got {count}")
    for name, value in (("«rtol»", rtol), ("«atol»", atol)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise UsageError(name, f"expected a finite number of at least 0, got {value}")


def check_tensors(
    problem: Problem,
    options: AttentionOptions,
    actual: Mapping[Target, torch.Tensor],
    layout: Layout,
    *,
    rtol: float | None,
    atol: float | None,
    tell: Callable[[int], None] | None = None,
) -> Check:
    """Compare tensors with the reference, and name the mistake where they differ.

    Args:
        problem: what they were computed from.
        options: what the problem was made with.
        actual: what each claims to be → the tensor, in a shape that `read_candidate` takes.
        layout: order of the axes of an output.
        rtol, atol: tolerances of the caller; None for those of the dtype.
        tell: hears of every query of every head that is compared, how many more.

    Raises:
        DataError: a shape that is neither the expected one nor that of a layout mistake.
    """
    candidates = [_candidate(target, values, problem, layout) for target, values in actual.items()]
    return check(problem, options, candidates, rtol=rtol, atol=atol, tell=tell)


def check_pair(
    problem: Problem,
    options: AttentionOptions,
    target: Target,
    both: tuple[torch.Tensor, torch.Tensor],
    layout: Layout,
    *,
    rtol: float | None,
    atol: float | None,
) -> Pair:
    """Compare two tensors for the same target with the reference and with each other.

    Arguments and errors as for `check_tensors`.
    """
    first, second = (_candidate(target, values, problem, layout) for values in both)
    return compare_pair(problem, options, first, second, rtol=rtol, atol=atol)


def _candidate(target: Target, values: torch.Tensor, problem: Problem, layout: Layout) -> Candidate:
    return read_candidate(target, values.cpu(), problem, layout)


def listed(result: Any) -> dict[str, Any]:
    """The record of a result, in which indices are lists."""
    record = record_of(result)
    return {key: list(v) if isinstance(v, tuple) else v for key, v in record.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a check found.

    Attributes:
        comparisons: one per candidate: errors, tolerance, the worst cell, where mismatches sit.
        hypotheses: every classic mistake that was tried; none where all candidates passed.
        problem: the checked input: sizes, scale, mask, dtype and device of the arithmetic.
    """

    comparisons: tuple[Comparison, ...]
    hypotheses: tuple[Hypothesis, ...]
    problem: Problem

    @property
    def passed(self) -> bool:
        """Whether every candidate is right."""
        return all(comparison.passed for comparison in self.comparisons)

    @property
    def mistakes(self) -> tuple[Hypothesis, ...]:
        """The mistakes that explain every cell of every candidate."""
        return tuple(one for one in self.hypotheses if one.matches)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was assumed, and what looks like a mistake."""
        return self.problem.warnings
