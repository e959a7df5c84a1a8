"""Which mistake is it? Every classic one is tried on a candidate that differs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from attncli.attention.check.candidate import Candidate, Target
from attncli.attention.check.compare import Comparison, compare_with
from attncli.attention.check.dropout import find_dropout
from attncli.attention.check.evidence import Evidence, Verdict, gather, judge
from attncli.attention.check.fitted import fitted_scale, other_value_heads
from attncli.attention.check.half import judge_half
from attncli.attention.check.mistakes import (
    MISTAKES,
    TOGETHER,
    Alternative,
    Mistake,
    options_text,
)
from attncli.attention.check.variant import Variant, right_variant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from attncli.attention.options import AttentionOptions
    from attncli.attention.problem import Problem

# Of several that explain a candidate only those count whose errors are about as small as the
# best one's: in half precision much lies within the tolerance.
_AS_GOOD = 2.0
_EQUALLY_SMALL = 0.02
# A mistake has to bring the errors down, not merely below a threshold that they just exceeded.
_BETTER = 0.5
# A softmax over queries needs every row, even for a sample: above this it is tried last.
_CHEAP_CELLS = 1 << 22
_OVER_QUERIES = tuple(one for one in MISTAKES if one.name == "softmax:axis")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A mistake, or several joined by "+", tried on the candidates.

    Attributes:
        name: "family:kind", as in the documented table.
        changes: the fields of `AttentionOptions` that reproduce it, None for one to be left out;
            empty where no option does.
        max_abs_error: largest error of the candidates against it, over the rows it was tried on:
            all of them where it matches. inf where a cell is NaN or inf and should not be.
        matches: whether it explains every cell of every candidate.
        explained: share of the squared error that it takes away, over the rows it was tried on:
            1 for all of it, below 0 where it makes things worse; None where that says nothing.
    """

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    max_abs_error: float
    matches: bool
    explained: float | None = None

    @property
    def options(self) -> str:
        """Command-line options that reproduce it, spelt out; empty where there are none."""
        return options_text(self.changes)


@dataclass(frozen=True, slots=True)
class Check:
    """A candidate's comparison, and what explains it where it failed."""

    comparisons: tuple[Comparison, ...]
    hypotheses: tuple[Hypothesis, ...]

    @property
    def passed(self) -> bool:
        """Whether every candidate is right."""
        return all(comparison.passed for comparison in self.comparisons)


def check(
    problem: Problem,
    options: AttentionOptions,
    candidates: Sequence[Candidate],
    *,
    rtol: float | None = None,
    atol: float | None = None,
    tell: Callable[[int], None] | None = None,
) -> Check:
    """Compare candidates with the reference and, where they fail, look for the mistake.

    Args:
        problem: what they were computed from.
        options: what the problem was made with.
        candidates: from `read_candidate`.
        rtol: relative tolerance; None for that of the candidate's dtype.
        atol: absolute tolerance, likewise.
        tell: hears of every query of every head that is compared, how many more.
    """
    base = right_variant(problem, options)
    if any(one.reading == "heads:averaged" for one in candidates):
        base = replace(base, heads_averaged=True)
    compared = compare_with(base, candidates, rtol=rtol, atol=atol, tell=tell)
    if all(comparison.passed for comparison in compared):
        return Check(tuple(compared), ())
    found = _find(base, tuple(candidates), compared, rtol, atol)
    named = [one for one in found if one.matches]
    explained = tuple(_with_names(comparison, named) for comparison in compared)
    return Check(explained, tuple(found))


@dataclass(frozen=True, slots=True)
class _Tried:
    """A mistake with its best alternative, and how much of the error that takes away."""

    name: str
    alternative: Alternative
    verdict: Verdict
    explained: float | None


def _find(
    base: Variant,
    candidates: tuple[Candidate, ...],
    compared: Sequence[Comparison],
    rtol: float | None,
    atol: float | None,
) -> list[Hypothesis]:
    off = sum(comparison.off for comparison in compared[1:]) + compared[0].off
    evidence = gather(base, candidates, off, rtol, atol)
    readings = list(dict.fromkeys(one.reading for one in candidates if one.reading))
    prefix = "+".join(readings)
    if readings and all(comparison.mismatches == 0 for comparison in compared):
        largest = max(comparison.max_abs_error for comparison in compared)
        return [Hypothesis(name=prefix, max_abs_error=largest, matches=True)]
    before = evidence.before(evidence.sample)
    tried = [t for m in _single(evidence) if (t := _try(m, base, evidence)) is not None]
    explaining = _explaining(tried, evidence, before)
    if not explaining and _is_costly(base):
        tried += [t for m in _OVER_QUERIES if (t := _try(m, base, evidence)) is not None]
        explaining = _explaining(tried, evidence, before)
    found = _as_hypotheses(tried, explaining, prefix)
    found += _special(base, evidence, prefix, explained=bool(explaining))
    if not any(one.matches for one in found):
        found += _precision(base, evidence, prefix)
    if not any(one.matches for one in found):
        found += _pairs(base, evidence, before, prefix)
    return found


def _single(evidence: Evidence) -> list[Mistake]:
    """The table, and the mistakes that are read off the candidate."""
    only_logsumexp = all(one.target is Target.LOGSUMEXP for one in evidence.candidates)
    late = _OVER_QUERIES if _is_costly(evidence.base) else ()
    return [
        *(
            one
            for one in MISTAKES
            if one not in late and (one.family != "softmax" or not only_logsumexp)
        ),
        Mistake("scale:fitted", lambda variant: fitted_scale(variant, evidence)),
        Mistake("heads:value-head", lambda variant: other_value_heads(variant, evidence)),
    ]


def _is_costly(variant: Variant) -> bool:
    """Whether a pass over all queries and keys is worth putting off."""
    sizes = variant.problem.sizes
    return sizes.batch * sizes.heads * sizes.q_len * sizes.k_len > _CHEAP_CELLS


def _try(mistake: Mistake, variant: Variant, evidence: Evidence) -> _Tried | None:
    """The alternative of a mistake that explains most; None where it would change nothing."""
    best: _Tried | None = None
    for alternative in mistake.alternatives(variant):
        rows = evidence.glance
        verdict = judge(alternative.variant, evidence, rows)
        if verdict.explains and rows is not evidence.sample:
            rows = evidence.sample
            verdict = judge(alternative.variant, evidence, rows)
        if not verdict.differs:
            continue
        if best is None or _order(verdict) < _order(best.verdict):
            share = verdict.share_explained(evidence.before(rows))
            best = _Tried(mistake.name, alternative, verdict, share)
    return best


def _order(verdict: Verdict) -> tuple[bool, float, float]:
    return not verdict.explains, sum(verdict.rms), verdict.max_abs_error


def _explaining(tried: Sequence[_Tried], evidence: Evidence, before: Verdict) -> list[_Tried]:
    """Those that explain every cell, confirmed on all rows, and are as good as the best."""
    found = [one for one in tried if one.verdict.explains and _brings_down(one, before)]
    if not evidence.complete:
        confirmed = [
            replace(one, verdict=judge(one.alternative.variant, evidence)) for one in found
        ]
        found = [one for one in confirmed if one.verdict.explains]
    if not found:
        return []
    least = min(sum(one.verdict.rms) for one in found)
    limit = max(_AS_GOOD * least, least + _EQUALLY_SMALL)
    found = [one for one in found if sum(one.verdict.rms) <= limit]
    named = [one for one in found if one.name.startswith("scale:") and one.name != "scale:fitted"]
    return [one for one in found if one.name != "scale:fitted" or not named]


def _brings_down(one: _Tried, before: Verdict) -> bool:
    """Whether the errors are clearly smaller than without the mistake."""
    broken = before.max_abs_error == float("inf")
    return broken or sum(one.verdict.rms) <= _BETTER * sum(before.rms)


def _as_hypotheses(
    tried: Iterable[_Tried], explaining: Sequence[_Tried], prefix: str
) -> list[Hypothesis]:
    confirmed = {one.name: one for one in explaining}
    return [
        Hypothesis(
            name=f"{prefix}+{one.name}" if prefix else one.name,
            # No option mends the order of the candidate's axes.
            changes={} if prefix else one.alternative.changes,
            max_abs_error=confirmed.get(one.name, one).verdict.max_abs_error,
            matches=one.name in confirmed,
            explained=one.explained,
        )
        for one in tried
    ]


def _special(
    base: Variant, evidence: Evidence, prefix: str, *, explained: bool
) -> list[Hypothesis]:
    """Dropout, which is no variant of the problem."""
    dropout = find_dropout(base, evidence)
    if dropout is None:
        return []
    return [
        Hypothesis(
            name=f"{prefix}+dropout" if prefix else "dropout",
            max_abs_error=dropout.verdict.max_abs_error,
            matches=dropout.verdict.explains and not explained,
        )
    ]


def _precision(base: Variant, evidence: Evidence, prefix: str) -> list[Hypothesis]:
    """Scores in half precision, asked last: its errors are small and follow no formula."""
    found: list[Hypothesis] = []
    for dtype in (torch.bfloat16, torch.float16):
        verdict = judge_half(base, evidence, dtype)
        if verdict is None:
            continue
        name = f"precision:{str(dtype).removeprefix('torch.')}"
        # What is the rounding of bfloat16 may have the size of float16's sums as well.
        matches = verdict.explains and not any(one.matches for one in found)
        found.append(
            Hypothesis(
                name=f"{prefix}+{name}" if prefix else name,
                max_abs_error=verdict.max_abs_error,
                matches=matches,
            )
        )
    return found


def _pairs(base: Variant, evidence: Evidence, before: Verdict, prefix: str) -> list[Hypothesis]:
    """Two mistakes of different families, and tensors misread together; only those that match."""
    tried = [t for m in TOGETHER if (t := _try(m, base, evidence)) is not None]
    for index, first in enumerate(MISTAKES):
        for second in MISTAKES[index + 1 :]:
            if first.family != second.family and _plausible(first, second):
                found = _try(_both(first, second), base, evidence)
                tried += [] if found is None else [found]
    explaining = _explaining(tried, evidence, before)
    return _as_hypotheses(explaining, explaining, prefix)


def _both(first: Mistake, second: Mistake) -> Mistake:
    def alternatives(variant: Variant) -> Iterable[Alternative]:
        for one in first.alternatives(variant):
            for two in second.alternatives(one.variant):
                # Half of the way is no way: both have options, or there are none.
                both = one.changes | two.changes if one.changes and two.changes else {}
                yield Alternative(two.variant, both)

    return Mistake(f"{first.name}+{second.name}", alternatives)


def _plausible(first: Mistake, second: Mistake) -> bool:
    """A softmax over another axis is no one's second mistake, and costs a pass of its own."""
    return "softmax:axis" not in (first.name, second.name)


def _with_names(comparison: Comparison, named: Sequence[Hypothesis]) -> Comparison:
    """The comparison with the mistakes that explain it in its explanation."""
    if comparison.passed or not named:
        return comparison
    told = [f"matches {one.name}" + (f" ({one.options})" if one.options else "") for one in named]
    said = [" or ".join(told), comparison.explanation]
    return replace(comparison, explanation="; ".join(text for text in said if text))


__all__ = ["Check", "Hypothesis", "Target", "check"]
