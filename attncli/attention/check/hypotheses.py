"""Which mistake is it? Every classic one is tried on a candidate that differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from operator import itemgetter
from statistics import fmean
from typing import Any

import torch

from attncli.attention.check.added import added_rules
from attncli.attention.check.candidate import Candidate
from attncli.attention.check.compare import Comparison, compare_with
from attncli.attention.check.evidence import (
    Evidence,
    FitResult,
    find_dropout,
    fitted_scale,
    fitted_sinks,
    fitted_softcap,
    judge,
    other_value_heads,
    sample_rows,
)
from attncli.attention.check.mistakes import MISTAKES, TOGETHER, Alternative, Mistake
from attncli.attention.check.variant import (
    HalfPrecision,
    RoundedAt,
    SoftmaxOver,
    Storage,
    Variant,
    right_variant,
)
from attncli.attention.check.walk import Tolerance
from attncli.attention.options import AttentionOptions, Target
from attncli.attention.problem import Problem
from attncli.attention.sizes import Chosen
from attncli.attention.threads import single_threaded_torch
from attncli.errors import DataError, options_text

# Of several that explain a candidate only those count whose errors are about as small as the
# best one's: in half precision much lies within the tolerance.
_AS_GOOD = 2.0
_EQUALLY_SMALL = 0.02
# A mistake has to bring the errors down, not merely below a threshold that they just exceeded.
_BETTER = 0.5
# Cells up to which threads cost more than they save.
_SMALL = 1 << 18
# A softmax over queries needs every row, even for a sample: above this it is tried last.
_CHEAP_CELLS = 1 << 22
# Scores rounded in the same way differ by how they were summed: most of the error is alike.
_SAME_ROUNDING = 0.5
_ROUNDED = {
    torch.bfloat16: (RoundedAt.INPUTS, RoundedAt.SCORES, RoundedAt.SCALED),
    torch.float16: (RoundedAt.SCORES, RoundedAt.SCALED),
}
# Σ error² over Σ expected² above which no rounding that anyone stores with explains it.
_FEW_BITS = 0.1
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
        detail: what was done, where no option tells it in short; empty for nothing to be told.
        heads: the heads in which it was made, the others being right; None for all.
    """

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    max_abs_error: float
    matches: bool
    explained: float | None = None
    detail: str = ""
    heads: tuple[int, ...] | None = None

    @property
    def told(self) -> str:
        """Its name, with its heads where it was made in some alone."""
        if self.heads is None:
            return self.name
        word = "head" if len(self.heads) == 1 else "heads"
        return f"{self.name} ({word} {', '.join(map(str, self.heads))})"

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
    chosen: Chosen = (None, None),
    tell: Callable[[int], None] | None = None,
) -> Check:
    """Compare candidates with the reference as `compare` does, and look for what made them fail.

    Of the batches and heads that are chosen. `tell` hears of every query of every head that is
    compared, how many more.
    """
    base = right_variant(problem, options, chosen)
    if any(one.reading == "heads:averaged" for one in candidates):
        if chosen[1] is not None:
            got = "those averaged over the heads"
            raise DataError("«actual_weights»", f"expected each head's for «head_index», got {got}")
        base = replace(base, heads_averaged=True)
    tolerance = Tolerance(problem.dtype, rtol, atol)
    is_small = problem.sizes.cells <= _SMALL
    with single_threaded_torch(problem.device) if is_small else nullcontext():
        compared = compare_with(base, candidates, tolerance, tell)
        if all(comparison.passed for comparison in compared):
            return Check(tuple(compared), ())
        off = torch.stack([comparison.off for comparison in compared]).sum(0)
        found = _find(sample_rows(base, candidates, off, tolerance), compared)
    named = [
        f"matches {one.told}" + (f" ({more})" if (more := one.options or one.detail) else "")
        for one in found
        if one.matches
    ]
    explained = []
    for one in compared:
        said = "; ".join(text for text in (" or ".join(named), one.explanation) if text)
        explained.append(one if one.passed or not named else replace(one, explanation=said))
    return Check(tuple(explained), tuple(found))


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A mistake with its best alternative, and how much of the error that takes away."""

    name: str
    alternative: Alternative
    result: FitResult
    explained: float | None

    @property
    def order(self) -> tuple[bool, float, float]:
        """The least is the best."""
        return not self.result.explains, self.result.rms, self.result.max_abs_error

    def hypothesis(self, *, matches: bool) -> Hypothesis:
        return Hypothesis(
            name=self.name,
            changes=self.alternative.changes,
            max_abs_error=self.result.max_abs_error,
            matches=matches,
            explained=self.explained,
            detail=self.alternative.detail,
        )


def _find(evidence: Evidence, compared: Sequence[Comparison]) -> list[Hypothesis]:
    readings = [one.reading for one in evidence.candidates if one.reading]
    prefix = "+".join(dict.fromkeys(readings))
    if readings and not any(one.mismatches or one.heads_off for one in compared):
        largest = max(comparison.max_abs_error for comparison in compared)
        return [Hypothesis(name=prefix, max_abs_error=largest, matches=True)]
    tried = _attempts(_single(evidence), evidence)
    explaining = _explaining(tried, evidence)
    if not explaining and _is_costly(evidence.base):
        tried += _attempts(_OVER_QUERIES, evidence)
        explaining = _explaining(tried, evidence)
    confirmed = {one.name: one for one in explaining}
    found = [confirmed.get(t.name, t).hypothesis(matches=t.name in confirmed) for t in tried]
    if not explaining:
        found += _in_some_heads(evidence, compared)
    dropout = find_dropout(evidence.base, evidence)
    if dropout is not None:
        alone, error = dropout.explains and not explaining, dropout.max_abs_error
        found.append(Hypothesis(name="dropout", max_abs_error=error, matches=alone))
    if not any(one.matches for one in found) and _comes_near(evidence):
        found += _named(_STORED, evidence)
    if not any(one.matches for one in found):
        found += _precision(evidence)
    if not any(one.matches for one in found):
        found += _named(_pairs(evidence), evidence)
    if prefix:  # no option mends the order of the candidate's axes
        found = [replace(one, name=f"{prefix}+{one.name}", changes={}) for one in found]
    return found


def _single(evidence: Evidence) -> list[Mistake]:
    """The table, and the mistakes that are read off the candidate."""
    left_out = _OVER_QUERIES if _is_costly(evidence.base) else ()
    return [
        *(one for one in _seen_by(evidence) if one not in left_out),
        *added_rules(evidence),
        Mistake("scale:fitted", lambda variant: fitted_scale(variant, evidence)),
        Mistake("softcap:added", lambda variant: fitted_softcap(variant, evidence)),
        Mistake("sinks:added", lambda variant: fitted_sinks(variant, evidence)),
        Mistake("heads:value-head", lambda variant: other_value_heads(variant, evidence)),
    ]


def _seen_by(evidence: Evidence) -> list[Mistake]:
    """The mistakes of the table that the candidates could show."""
    targets = {one.target for one in evidence.candidates}
    if Target.LOGSUMEXP not in targets:
        return [one for one in MISTAKES if one.family != "logsumexp"]
    if targets != {Target.LOGSUMEXP}:
        return list(MISTAKES)
    return [one for one in MISTAKES if "softmax" not in one.name]


def _is_costly(variant: Variant) -> bool:
    """Whether a pass over all queries and keys is worth putting off."""
    sizes = variant.problem.sizes
    return sizes.batch * sizes.heads * sizes.q_len * sizes.k_len > _CHEAP_CELLS


def _attempts(mistakes: Iterable[Mistake], evidence: Evidence) -> list[_Attempt]:
    """Of each mistake the alternative that explains most; none where it would change nothing."""
    found = []
    for mistake in mistakes:
        tried = []
        for alternative in mistake.alternatives(evidence.base):
            sample = evidence.quick_rows
            result = judge(alternative.variant, evidence, sample)
            if result.explains and sample is not evidence.sample:
                sample = evidence.sample
                result = judge(alternative.variant, evidence, sample)
            if result.differs:
                shares = result.shares_explained(evidence.before(sample))
                share = fmean(shares) if shares else None
                tried.append(_Attempt(mistake.name, alternative, result, share))
        found += [min(tried, key=lambda one: one.order)] if tried else []
    return found


def _named(mistakes: Iterable[Mistake], evidence: Evidence) -> list[Hypothesis]:
    """Those of some mistakes that explain the candidates."""
    found = _explaining(_attempts(mistakes, evidence), evidence)
    return [one.hypothesis(matches=True) for one in found]


def _explaining(tried: Sequence[_Attempt], evidence: Evidence) -> list[_Attempt]:
    """Those that explain every cell, confirmed on all rows, and are as good as the best."""
    before = evidence.before(evidence.sample)
    infinite = before.max_abs_error == math.inf  # which any finite error is better than
    found = [one for one in tried if one.result.explains]
    found = [one for one in found if infinite or one.result.rms <= _BETTER * before.rms]
    if not evidence.complete:
        confirmed = [replace(one, result=judge(one.alternative.variant, evidence)) for one in found]
        found = [one for one in confirmed if one.result.explains]
    if not found:
        return []
    least = min(one.result.rms for one in found)
    limit = max(_AS_GOOD * least, least + _EQUALLY_SMALL)
    found = [one for one in found if one.result.rms <= limit]
    named = [one for one in found if one.name.startswith("scale:") and one.name != "scale:fitted"]
    if any(one.name == "chunk:added" for one in found):  # which is said in fewer words
        found = [one for one in found if one.name != "segments:added"]
    return [one for one in found if one.name != "scale:fitted" or not named]


def _in_some_heads(evidence: Evidence, compared: Sequence[Comparison]) -> list[Hypothesis]:
    """Mistakes that explain all heads that are off, where others are right."""
    off = evidence.off.sum(-1).bool().any(0)  # (H,)
    known = sum(one.heads_off for one in compared) <= int(evidence.off.sum(-1).bool().sum())
    others = ~off if evidence.chosen is None else ~off & evidence.chosen
    if not bool(others.any()) or not bool(off.any()) or not known:
        return []
    some = replace(evidence, heads=off)
    heads = tuple(off.nonzero()[:, 0].tolist())
    # No option is for some heads alone: what it would be is told.
    return [
        replace(one, heads=heads, changes={}, detail=one.detail or one.options)
        for one in _named(_single(some), some)
    ]


def _comes_near(evidence: Evidence) -> bool:
    """Whether the errors are as small beside the values as few bits leave them."""
    sums = evidence.before(evidence.quick_rows).sums
    return all(float(one.squares.sum()) <= _FEW_BITS * float(one.sizes.sum()) for one in sums)


def _precision(evidence: Evidence) -> list[Hypothesis]:
    """Scores in half precision, asked last: its errors are small and follow no formula.

    The order of a sum is not known, so that an emulation cannot give the very errors of a
    candidate; but scores that are rounded when they are stored come out the same wherever they
    are computed, so that an emulation takes away most of the squared error.
    """
    base, before = evidence.base, evidence.before(evidence.quick_rows)
    if base.softmax is not SoftmaxOver.KEYS or not base.problem.sizes.k_len:
        return []
    found: list[Hypothesis] = []
    for dtype, places in _ROUNDED.items():
        shares = []
        for at in places:
            variant = replace(base, half_precision=HalfPrecision(dtype, at))
            result = judge(variant, evidence, evidence.quick_rows)
            alike = result.max_abs_error < math.inf
            share = min(result.shares_explained(before), default=0.0) if alike else -1.0
            shares.append((share, result))
        share, best = max(shares, key=itemgetter(0))
        name = f"precision:{str(dtype).removeprefix('torch.')}"
        # What is the rounding of bfloat16 may have the size of float16's as well.
        matches = share >= _SAME_ROUNDING and not any(one.matches for one in found)
        found.append(Hypothesis(name=name, max_abs_error=best.max_abs_error, matches=matches))
    return found


def _pairs(evidence: Evidence) -> Iterator[Mistake]:
    """Two mistakes of different families, and tensors misread together."""
    yield from TOGETHER
    paired = [one for one in _seen_by(evidence) if one.paired]
    for index, first in enumerate(paired):
        for second in paired[index + 1 :]:
            # A softmax over another axis is no one's second mistake, and costs a pass of its own.
            if first.family != second.family and "softmax:axis" not in (first.name, second.name):
                yield _both(first, second)


def _both(first: Mistake, second: Mistake) -> Mistake:
    def alternatives(variant: Variant) -> Iterable[Alternative]:
        for one in first.alternatives(variant):
            for two in second.alternatives(one.variant):
                # Half of the way is no way: both have options, or there are none.
                both = one.changes | two.changes if one.changes and two.changes else {}
                yield Alternative(two.variant, both)

    return Mistake(f"{first.name}+{second.name}", alternatives)


# Axes of (B, H, S, d) that share a scale, if any do, and how it is told.
_SHARED: dict[tuple[int, ...] | None, str] = {
    None: "",
    (0, 1, 2, 3): ", scaled by tensor",
    (2, 3): ", scaled by head",
    (3,): ", scaled by row",
    (2,): ", scaled by channel",
}
_ROLES = (("k", "v"), ("q", "k", "v"), ("q", "k"), ("k",), ("v",), ("q",))


def _stored(dtype: torch.dtype, *shared: tuple[int, ...] | None) -> Mistake:
    """Numbers that lost digits when they were stored: Q, K, V or the result."""

    def alternatives(variant: Variant) -> Iterator[Alternative]:
        problem = variant.problem
        for storage in (Storage(dtype, axes) for axes in shared):
            how = _SHARED[storage.shared]
            kept = {
                role: storage.rounded(tensor)
                for role in ("q", "k", "v")
                if (tensor := getattr(problem, role)) is not None
            }
            changed = {r for r, t in kept.items() if not torch.equal(t, getattr(problem, r))}
            for roles in _ROLES:
                if changed.issuperset(roles):
                    rounded = variant.with_problem(**{role: kept[role] for role in roles})
                    yield Alternative(rounded, {}, f"{', '.join(roles)} stored{how}")
            yield Alternative(replace(variant, result=storage), {}, f"the result stored{how}")

    name = f"precision:{str(dtype).removeprefix('torch.')}"
    return Mistake(name, alternatives, paired=False)


_STORED = (
    _stored(torch.float16, None),
    _stored(torch.bfloat16, None),
    _stored(torch.float8_e4m3fn, *_SHARED),
    _stored(torch.float8_e5m2, *_SHARED),
    _stored(torch.int8, *list(_SHARED)[1:]),
)
