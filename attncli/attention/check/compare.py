"""Is this output right? Candidates against the float64 reference, and against each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from attncli.attention.check.candidate import Candidate, Target
from attncli.attention.check.locations import ErrorLocations, RowErrors, why_broken
from attncli.attention.check.tolerance import Tolerance, unit_roundoff
from attncli.attention.check.variant import Variant, right_variant
from attncli.attention.check.walk import DetailedSums, Errors, cells_of, difference, errors_of
from attncli.attention.options import AttentionOptions
from attncli.attention.problem import Problem
from attncli.columns import column

_FINITE_RIGHT = "every finite cell is right"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One candidate against what is right.

    Attributes:
        target to notes: the record, described below.
        findings: what the explanation is made of beside the number of cells: what the shape, NaN
            and heads say, and where the mismatches sit.
        reading: the mistake that its shape shows already; None for the expected shape.
        locations: where the mismatches sit.
        off: int64 (B, H, S_q), mismatches of each row.
    """

    target: Target = column("target", description="what was compared")
    passed: bool = column("passed", description="nothing below is off, and the axes are right")
    max_abs_error: float = column("max abs error", description="of cells finite in both")
    max_rel_error: float = column("max rel error", description="/ |expected|, where not 0")
    rms_error: float = column("rms error", description="√ of the mean squared error")
    cosine: float | None = column("cosine", description="none where one of both is all 0")
    mismatches: int = column("mismatches", description="cells beyond the tolerance")
    worst_index: tuple[int, ...] | None = column("worst at", description="the cell furthest off")
    actual: float | None = column("actual", description="the candidate there")
    expected: float | None = column("expected", description="the reference there")
    rtol: float = column("rtol", description="|actual − expected| ≤ atol + rtol·|expected| passes")
    atol: float = column("atol", description="at the worst cell; each cell has its own")
    explanation: str | None = column(None, description="what was found out about a failure")
    cells: int = column("cells", description="cells compared")
    dtype: str = column("dtype", description="narrowest that holds the values; sets the tolerance")
    n_nan: int = column("nan", description="NaN in the candidate")
    n_posinf: int = column("inf", description="+∞ in the candidate")
    n_neginf: int = column("-inf", description="−∞ in the candidate")
    worst_head: tuple[int, int] | None = column("worst head", description="by error / explained")
    relative_error: float | None = column("relative error", description="there, rms / expected rms")
    explained_error: float | None = column("explained error", description="of it, by rounding")
    heads_off: int = column("heads off", description="heads beyond 8 times what is explained")
    notes: tuple[str, ...] = column(None, description="what other programs do and is forgiven")
    findings: tuple[str, ...]
    reading: str | None
    locations: ErrorLocations
    off: torch.Tensor = field(repr=False, compare=False)

    @property
    def finite_is_right(self) -> bool:
        """Whether nothing is wrong but NaN and inf in the candidate, or nothing at all."""
        return _FINITE_RIGHT in self.findings or not (self.mismatches or self.heads_off)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two candidates for the same tensor.

    Attributes:
        first, second: each against what is right.
        closer to first_part: the record, described below.
        locations: where they part.
    """

    first: Comparison
    second: Comparison
    closer: int | None = column(None, description="1 or 2, by NaN and inf, then by rms error")
    max_abs_error: float = column(None, description="|first − second| of cells finite in both")
    rms_error: float = column(None, description="√ of the mean squared difference")
    cosine: float | None = column(None, description="of the angle between both")
    mismatches: int = column(None, description="cells apart by more than both tolerances")
    worst_index: tuple[int, ...] | None = column(None, description="the cell furthest apart")
    values: tuple[float, float] | None = column(None, description="first and second there")
    first_part: tuple[int, ...] | None = column(None, description="the first row apart")
    locations: ErrorLocations


@dataclass(frozen=True, slots=True)
class _Gathered:
    """A candidate, or the difference of two, on its way through the parts."""

    candidate: Candidate
    sums: DetailedSums
    rows: RowErrors

    @classmethod
    def of(cls, candidate: Candidate, problem: Problem) -> _Gathered:
        return cls(candidate, DetailedSums.of(candidate), RowErrors.of(candidate, problem))


def compare(
    problem: Problem,
    options: AttentionOptions,
    candidates: Sequence[Candidate],
    *,
    rtol: float | None = None,
    atol: float | None = None,
) -> list[Comparison]:
    """Compare candidates with the reference; no array over all queries and keys is built.

    Args:
        problem: what they were computed from.
        options: what the problem was made with.
        candidates: from `read_candidate`; padded queries are left out.
        rtol: relative tolerance; None for that of the candidate's dtype.
        atol: absolute tolerance, likewise.
    """
    tolerance = Tolerance.of(problem, rtol, atol)
    return compare_with(right_variant(problem, options), candidates, tolerance)


def compare_with(
    variant: Variant,
    candidates: Sequence[Candidate],
    tolerance: Tolerance,
    tell: Callable[[int], None] | None = None,
) -> list[Comparison]:
    """The same against any variant of the problem.

    `tell` hears of every query and head that is done, how many more.
    """
    return [_finish(one, variant, tolerance) for one in _walk(variant, candidates, tolerance, tell)]


def compare_pair(
    problem: Problem,
    options: AttentionOptions,
    first: Candidate,
    second: Candidate,
    *,
    rtol: float | None = None,
    atol: float | None = None,
) -> Pair:
    """Compare two candidates for one target with each other and with the reference.

    Args:
        problem: what they were computed from.
        options: what the problem was made with.
        first, second: from `read_candidate`, of the same target.
        rtol, atol: tolerances of each against the reference; None for those of its dtype.
    """
    variant, tolerance = right_variant(problem, options), Tolerance.of(problem, rtol, atol)
    between = _Gathered.of(first, problem)
    gathered = _walk(variant, [first, second], tolerance, between=between)
    one, two = (_finish(each, variant, tolerance) for each in gathered)
    sums, parted = between.sums, between.rows.wrong.nonzero()
    order = parted[parted[:, 2].argsort(stable=True)] if len(parted) else parted
    worst = sums.worst
    return Pair(
        first=one,
        second=two,
        closer=_closer(one, two),
        max_abs_error=sums.max_abs,
        rms_error=sums.rms,
        cosine=sums.cosine,
        mismatches=sums.mismatches,
        worst_index=None if worst is None else worst[0],
        values=None if worst is None else (worst[1], worst[2]),
        first_part=tuple(order[0].tolist()) if len(order) else None,
        locations=between.rows.locations,
    )


def _walk(
    variant: Variant,
    candidates: Sequence[Candidate],
    tolerance: Tolerance,
    tell: Callable[[int], None] | None = None,
    between: _Gathered | None = None,
) -> list[_Gathered]:
    """The errors of each candidate and, in `between`, those of the first against the second."""
    gathered = [_Gathered.of(candidate, variant.problem) for candidate in candidates]
    for part, expected, cells in cells_of(variant, candidates) if candidates else ():
        found: list[Errors] = []
        for one, actual in zip(gathered, cells, strict=True):
            found.append(errors_of(one.candidate, actual, expected, tolerance))
            one.sums.add(found[-1], part)
            one.rows.add(found[-1], expected, part)
        if between is not None:
            # Each may be off by its own tolerance, to opposite sides.
            allowed = found[0].allowed + found[1].allowed
            parted = difference(found[0].actual, found[1].actual, allowed)
            between.sums.add(parted, part)
            between.rows.add(parted, expected, part)
        if tell is not None:
            tell(expected.empty.numel())
    return gathered


def _closer(first: Comparison, second: Comparison) -> int | None:
    keys = [(one.n_nan + one.n_posinf + one.n_neginf, one.rms_error) for one in (first, second)]
    if keys[0] == keys[1]:
        return None
    return 1 if keys[0] < keys[1] else 2


def _finish(gathered: _Gathered, variant: Variant, tolerance: Tolerance) -> Comparison:
    candidate, sums = gathered.candidate, gathered.sums
    heads_off = int(sums.heads_off.sum())
    passed = sums.mismatches == 0 and heads_off == 0 and candidate.reading is None
    index, actual, expected, allowed = sums.worst or (None, None, None, 0.0)
    if index is not None and candidate.target is Target.LOGSUMEXP:
        index = index[:-1]
    rtol = 2 * unit_roundoff(candidate.dtype) if tolerance.rtol is None else tolerance.rtol
    atol = max(0.0, allowed - rtol * abs(expected or 0.0))
    head, relative, explained = sums.worst_head or (None, None, None)
    locations = gathered.rows.locations
    findings = () if passed else _findings(gathered, variant, heads_off, locations)
    return Comparison(
        target=candidate.target,
        passed=passed,
        max_abs_error=sums.max_abs,
        max_rel_error=sums.max_rel,
        rms_error=sums.rms,
        cosine=sums.cosine,
        mismatches=sums.mismatches,
        worst_index=index,
        actual=actual,
        expected=expected,
        rtol=rtol,
        atol=atol if tolerance.atol is None else tolerance.atol,
        explanation=None if passed else "; ".join([_share(sums), *findings]),
        findings=findings,
        notes=_notes(sums),
        cells=sums.cells,
        n_nan=sums.n_nan,
        n_posinf=sums.n_posinf,
        n_neginf=sums.n_neginf,
        dtype=str(candidate.dtype).removeprefix("torch."),
        reading=candidate.reading,
        worst_head=head,
        relative_error=relative,
        explained_error=explained,
        heads_off=heads_off,
        locations=locations,
        off=gathered.rows.wrong,
    )


def _share(sums: DetailedSums) -> str:
    wrong, cells = sums.mismatches, sums.cells
    share = f"{wrong / cells:.2%}" if cells and wrong / cells >= 1e-4 else "less than 0.01%"
    return f"{wrong} of {cells} cells are off" + (f" ({share})" if wrong else "")


def _notes(sums: DetailedSums) -> tuple[str, ...]:
    if not sums.forgiven:
        return ()
    rows = f"{sums.forgiven} row{'s' * (sums.forgiven > 1)}"
    return (f"+∞ in {rows} without a key is forgiven, as FlashAttention 2 has it; expected −∞",)


def _findings(
    gathered: _Gathered, variant: Variant, heads_off: int, locations: ErrorLocations
) -> tuple[str, ...]:
    """What shape, broken rows, heads and the places of the errors say, a clause each."""
    candidate, sums = gathered.candidate, gathered.sums
    said = []
    if candidate.reading is not None:
        right = ", and so read it is right" if sums.mismatches + heads_off == 0 else ""
        said.append(f"its shape is that of {candidate.reading}{right}")
    said += why_broken(candidate, gathered.rows, variant)
    if said and sums.mismatches == sums.n_nan + sums.n_posinf + sums.n_neginf > 0:
        said.append(_FINITE_RIGHT)
    if heads_off and not sums.mismatches and sums.worst_head is not None:
        (batch, head), error, explained = sums.worst_head
        said.append(
            f"batch {batch}, head {head} errs by {error:.2g} of its size, {error / explained:.2g} "
            f"times what rounding explains"
        )
    return (*said, *locations.findings)
