"""Is this output right? A candidate against the float64 reference, block by block."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from attncli.attention.check.candidate import Candidate, Target, mend, read_candidate
from attncli.attention.check.difference import Sums, errors_of, of_target
from attncli.attention.check.nonfinite import why_broken
from attncli.attention.check.places import Places, Tally, places_of
from attncli.attention.check.tolerance import Tolerance, tolerance_of
from attncli.attention.check.variant import Variant, evaluate, parts_of, right_variant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from attncli.attention.options import AttentionOptions
    from attncli.attention.problem import Problem

__all__ = ["Candidate", "Comparison", "Target", "compare", "read_candidate"]


_FINITE_RIGHT = "every finite cell is right"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One candidate against what is right.

    Attributes:
        target: what was compared.
        passed: whether every cell is within the tolerance and the axes lie as expected.
        max_abs_error: largest |actual − expected| over the cells that are finite in both.
        max_rel_error: largest |actual − expected| / |expected|, over those that are not 0.
        rms_error: √ of the mean squared error over the same cells.
        cosine: of the angle between both, −1 to 1; None where one of them is all 0.
        mismatches: number of cells beyond the tolerance.
        worst_index: (batch, head, row, column), without column for a log-sum-exp, of the cell
            furthest off; None where there are no cells.
        actual, expected: the values there.
        rtol, atol: a cell passes where |actual − expected| ≤ atol + rtol·|expected|.
        explanation: what was found out about a failure, one sentence; None for a pass.
        findings: what it is made of, beside the number of cells: what the shape and NaN say, and
            where the mismatches sit.
        cells: number of cells compared.
        n_nan, n_posinf, n_neginf: what the candidate holds that is not finite.
        dtype: the narrowest dtype that holds the candidate's values; the tolerance is its.
        reading: the mistake that its shape shows already; None for the expected shape.
        places: where the mismatches sit.
        off: int64 (B, H, S_q), mismatches of each row.
    """

    target: Target
    passed: bool
    max_abs_error: float
    max_rel_error: float
    rms_error: float
    cosine: float | None
    mismatches: int
    worst_index: tuple[int, ...] | None
    actual: float | None
    expected: float | None
    rtol: float
    atol: float
    explanation: str | None
    findings: tuple[str, ...]
    cells: int
    n_nan: int
    n_posinf: int
    n_neginf: int
    dtype: torch.dtype
    reading: str | None
    places: Places
    off: torch.Tensor = field(repr=False, compare=False)

    @property
    def finite_is_right(self) -> bool:
        """Whether nothing is wrong but NaN and inf in the candidate, or nothing at all."""
        return self.mismatches == 0 or _FINITE_RIGHT in self.findings


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
    return compare_with(right_variant(problem, options), candidates, rtol=rtol, atol=atol)


def compare_with(
    variant: Variant,
    candidates: Sequence[Candidate],
    *,
    rtol: float | None = None,
    atol: float | None = None,
    tell: Callable[[int], None] | None = None,
) -> list[Comparison]:
    """The same against any variant of the problem.

    `tell` hears of every query and head that is done, how many more.
    """
    runs = [_Run.of(candidate, variant, rtol, atol) for candidate in candidates]
    with_output = any(run.candidate.target is Target.OUTPUT for run in runs)
    if runs:
        for rows, batches in real_rows(variant.problem):
            for part in parts_of(variant, rows, batches):
                expected = evaluate(variant, part, with_output=with_output)
                for run in runs:
                    cells = of_target(expected, run.candidate.target)
                    actual = run.values[part.batch, part.head][:, :, part.rows.to(run.device)]
                    errors = errors_of(
                        run.candidate.target, actual, cells, run.tolerance, expected.empty
                    )
                    run.count_nonfinite(errors.actual)
                    run.sums.add(errors, part)
                    run.tally.add(errors, expected.empty, part)
                if tell is not None:
                    tell(expected.empty.numel())
    return [_finish(run, variant) for run in runs]


def real_rows(problem: Problem) -> Iterator[tuple[torch.Tensor, range]]:
    """The queries that are not padding, int64 (R,), with the batches that have just these."""
    sizes = problem.sizes
    lengths = [problem.mask.real_queries(batch) for batch in range(sizes.batch)]
    if len(set(lengths)) == 1:
        yield torch.arange(lengths[0], device=problem.device), range(sizes.batch)
        return
    for batch, length in enumerate(lengths):
        yield torch.arange(length, device=problem.device), range(batch, batch + 1)


def real_queries(problem: Problem) -> torch.Tensor:
    """Bool (B, S_q), True for queries that are not padding."""
    rows = torch.arange(problem.sizes.q_len)
    lengths = [problem.mask.real_queries(batch) for batch in range(problem.sizes.batch)]
    return rows < torch.tensor(lengths, dtype=torch.int64)[:, None]


@dataclass(slots=True)
class _Run:
    """A candidate on its way through the blocks."""

    candidate: Candidate
    values: torch.Tensor
    tolerance: Tolerance
    sums: Sums
    tally: Tally
    n_nan: int = 0
    n_posinf: int = 0
    n_neginf: int = 0

    @classmethod
    def of(
        cls, candidate: Candidate, variant: Variant, rtol: float | None, atol: float | None
    ) -> _Run:
        values = candidate.values
        if candidate.target is Target.OUTPUT:
            values = mend(values, variant.misread)
        tolerance = tolerance_of(candidate.target, candidate.dtype, variant.problem, rtol, atol)
        batch, heads, length, width = values.shape
        return cls(candidate, values, tolerance, Sums(), Tally.of((batch, heads, length, width)))

    @property
    def device(self) -> torch.device:
        return self.values.device

    def count_nonfinite(self, actual: torch.Tensor) -> None:
        if bool(torch.isfinite(actual).all()):
            return
        self.n_nan += int(torch.isnan(actual).sum())
        self.n_posinf += int(torch.isposinf(actual).sum())
        self.n_neginf += int(torch.isneginf(actual).sum())


def _finish(run: _Run, variant: Variant) -> Comparison:
    sums, candidate = run.sums, run.candidate
    passed = sums.mismatches == 0 and candidate.reading is None
    index, actual, expected = sums.worst or (None, None, None)
    if index is not None and candidate.target is Target.LOGSUMEXP:
        index = index[:-1]
    places = places_of(run.tally, variant.problem, real_queries(variant.problem))
    findings = () if passed else _findings(run, variant, places)
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
        rtol=run.tolerance.rtol,
        atol=run.tolerance.atol,
        explanation=None if passed else "; ".join([_share(run), *findings]),
        findings=findings,
        cells=sums.cells,
        n_nan=run.n_nan,
        n_posinf=run.n_posinf,
        n_neginf=run.n_neginf,
        dtype=candidate.dtype,
        reading=candidate.reading,
        places=places,
        off=run.tally.wrong,
    )


def _share(run: _Run) -> str:
    wrong, cells = run.sums.mismatches, run.sums.cells
    share = f"{wrong / cells:.2%}" if cells and wrong / cells >= 1e-4 else "less than 0.01%"
    return f"{wrong} of {cells} cells are off" + (f" ({share})" if wrong else "")


def _findings(run: _Run, variant: Variant, places: Places) -> tuple[str, ...]:
    """What the shape, the broken rows and the places of the errors say, a clause each."""
    said = []
    if run.candidate.reading is not None:
        right = ", and so read it is right" if run.sums.mismatches == 0 else ""
        said.append(f"its shape is that of {run.candidate.reading}{right}")
    said += why_broken(run.candidate, run.tally, variant)
    if said and run.sums.mismatches == run.n_nan + run.n_posinf + run.n_neginf > 0:
        said.append(_FINITE_RIGHT)
    return (*said, *places.findings)
