"""`attncli.check`: is this output right, and if not, which mistake is it?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from attncli.analysis.check import check_tensors, require_candidates
from attncli.api.arguments import as_problem, as_tensor
from attncli.api.keywords import OptionKeywords, TensorLike, as_choice, as_options
from attncli.attention.check.candidate import Target
from attncli.attention.check.compare import Comparison
from attncli.attention.check.hypotheses import Hypothesis
from attncli.attention.options import Layout, Precision
from attncli.attention.problem import Problem


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


def check(
    q: TensorLike,
    k: TensorLike,
    v: TensorLike = None,
    *,
    actual_output: TensorLike = None,
    actual_weights: TensorLike = None,
    actual_logsumexp: TensorLike = None,
    rtol: float | None = None,
    atol: float | None = None,
    layout: Layout | str = Layout.BHSD,
    heads: int | None = None,
    kv_heads: int | None = None,
    precision: Precision | str = Precision.FLOAT64,
    device: str = "auto",
    allow_nonfinite: bool = False,
    **options: Unpack[OptionKeywords],
) -> Checked:
    """Compare what a program computed with the reference, and name the mistake if it differs.

    >>> q = k = v = [[2.0, 0.0], [0.0, 1.0], [1.0, 1.0]]
    >>> uncaused = attncli.compute(q, k, v).stages["output"]
    >>> result = attncli.check(q, k, v, actual_output=uncaused, causal=True)
    >>> result.passed
    False
    >>> [(mistake.name, mistake.options) for mistake in result.mistakes]
    [('causal:missing', '--no-causal')]

    Args:
        q: (S_q, d_k), (H, S_q, d_k) or (B, H, S_q, d_k), or as `layout` says: a torch tensor, a
            NumPy array or nested lists, of any real dtype.
        k: like q, with S_k in the place of S_q and H_kv in the place of H.
        v: like k, with d_v in the place of d_k; needed to check an output.
        actual_output: (B, H, S_q, d_v), or as `layout` says; leading axes of length 1 may be
            left out, here and below.
        actual_weights: (B, H, S_q, S_k).
        actual_logsumexp: (B, H, S_q), of the visible keys, in nats.
        rtol: relative tolerance; None for that of each candidate's dtype.
        atol: absolute tolerance, likewise.
        layout: "bhsd", "bshd" for (B, S, H, d), or "bsh" for packed (B, S, H·d).
        heads: H, needed where the layout packs heads, checked elsewhere.
        kv_heads: H_kv, likewise; None means `heads`.
        precision: dtype of the reference: "float64", "float32", or "auto" for what `compute` uses.
        device: "auto", "cpu", "cuda" or "cuda:N".
        allow_nonfinite: whether NaN and inf in Q, K and V are let through, as IEEE says.
        options: any field of `AttentionOptions`: causal=True, attn_mask=mask, key_lengths=[5, 3], …

    Raises:
        DataError: shapes that do not fit each other, or NaN and inf that are not allowed.
        UsageError: no candidate, or options that make no sense or do not fit the shapes.
        ResourceError: a device that is not there.
    """
    given = {
        Target.OUTPUT: actual_output,
        Target.WEIGHTS: actual_weights,
        Target.LOGSUMEXP: actual_logsumexp,
    }
    actual = {
        target: as_tensor(values, f"actual_{target}")
        for target, values in given.items()
        if values is not None
    }
    require_candidates(actual, rtol, atol)
    declared, order = as_options(options), as_choice(Layout, layout, "layout")
    problem = as_problem(
        q,
        k,
        v,
        declared,
        layout=order,
        heads=heads,
        kv_heads=kv_heads,
        precision=precision,
        device=device,
        allow_nonfinite=allow_nonfinite,
    )
    found = check_tensors(problem, declared, actual, order, rtol=rtol, atol=atol)
    return Checked(comparisons=found.comparisons, hypotheses=found.hypotheses, problem=problem)
