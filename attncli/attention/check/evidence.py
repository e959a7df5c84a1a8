"""A sample of rows on which mistakes show, and how well a variant explains a candidate there."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from attncli.attention.check.candidate import Candidate, Target, mend
from attncli.attention.check.difference import (
    errors_of,
    forgive_empty,
    of_target,
    when_empty_of,
)
from attncli.attention.check.tolerance import RowSizes, Tolerance, tolerance_of
from attncli.attention.check.variant import Expected, Part, Variant, evaluate, parts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncli.attention.problem import Problem

# Cells of the sample that every mistake is tried on, and of the one that most fail on already.
SAMPLE_CELLS = 1 << 20
GLANCE_CELLS = 1 << 16
_SEED = 20_250_101


@dataclass(frozen=True, slots=True)
class RowSample:
    """Queries of neighbouring batches, of all heads.

    Attributes:
        batches: neighbours.
        rows: int64 (R,), ascending, none of them padding.
    """

    batches: range
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """How well a variant explains the candidates on some rows.

    Attributes:
        max_abs_error: largest finite error of any candidate; inf where a cell is NaN or inf and
            should not be.
        mismatches: cells beyond the tolerance.
        rms: for each candidate, √ of the mean squared error, in units of what its tolerance
            allows a cell of typical size.
        errors: for each candidate, √ of the mean squared error.
        differs: whether the variant differs from what is right by more than the tolerance.
        cells: cells compared.
    """

    max_abs_error: float
    mismatches: int
    rms: tuple[float, ...]
    errors: tuple[float, ...]
    differs: bool
    cells: int

    def share_explained(self, before: Verdict) -> float | None:
        """How much of the squared error on the same rows is gone, at most 1, below 0 for more.

        The mean over the candidates; None where one of them had no error.
        """
        pairs = list(zip(self.errors, before.errors, strict=True))
        if not all(old > 0 and math.isfinite(new) for new, old in pairs):
            return None
        return math.fsum(1 - (new / old) ** 2 for new, old in pairs) / max(1, len(pairs))

    @property
    def explains(self) -> bool:
        """Whether every cell is within the tolerance."""
        return self.mismatches == 0 and self.cells > 0


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that mistakes are judged by.

    Attributes:
        base: what is right.
        candidates: what is to be explained.
        sample: the rows that mistakes are tried on.
        glance: a few of them, on which most mistakes fail.
        complete: whether the sample holds every row, so that nothing is left to confirm.
        rtol, atol: tolerances of the caller; None for those of the dtype.
        off: int64 (B, H, S_q), mismatches of each row, summed over the candidates.
        sizes: of the rows of Q, K and V.
    """

    base: Variant
    candidates: tuple[Candidate, ...]
    sample: tuple[RowSample, ...]
    glance: tuple[RowSample, ...]
    complete: bool
    rtol: float | None
    atol: float | None
    off: torch.Tensor
    sizes: RowSizes
    # What is right for the parts of the sample: every mistake is held against it.
    _right: dict[tuple[int, ...], Expected] = field(init=False, default_factory=dict, repr=False)
    _before: dict[int, Verdict] = field(init=False, default_factory=dict, repr=False)

    def before(self, rows: tuple[RowSample, ...]) -> Verdict:
        """How far the candidates are off on one of the samples without any mistake, found once."""
        if id(rows) not in self._before:
            self._before[id(rows)] = judge(self.base, self, rows)
        return self._before[id(rows)]

    def right(self, part: Part) -> Expected:
        """What is right for a part of the sample, computed once."""
        ends = (part.batch.start, part.batch.stop, part.head.start, part.head.stop)
        key = (part.rows.data_ptr(), len(part.rows), *ends)
        if key not in self._right:
            self._right[key] = evaluate(self.base, part, with_output=self.with_output)
        return self._right[key]

    @property
    def with_output(self) -> bool:
        """Whether any candidate is an output."""
        return any(candidate.target is Target.OUTPUT for candidate in self.candidates)


def gather(
    base: Variant,
    candidates: Sequence[Candidate],
    off: torch.Tensor,
    rtol: float | None,
    atol: float | None,
) -> Evidence:
    """Choose the rows that mistakes are tried on.

    Args:
        base: what is right.
        candidates: what is to be explained.
        off: int64 (B, H, S_q), mismatches of each row.
        rtol, atol: tolerances of the caller; None for those of the dtype.
    """
    problem = base.problem
    sizes = problem.sizes
    everything = tuple(all_row_samples(problem))
    complete = sizes.batch * sizes.heads * sizes.q_len * sizes.k_len <= SAMPLE_CELLS
    sample = everything if complete else tuple(_chosen(problem, off, SAMPLE_CELLS))
    few = sizes.batch * sizes.heads * sizes.q_len * sizes.k_len <= GLANCE_CELLS
    glance = everything if few else tuple(_chosen(problem, off, GLANCE_CELLS))
    return Evidence(
        base=base,
        candidates=tuple(candidates),
        sample=sample,
        glance=glance,
        complete=complete,
        rtol=rtol,
        atol=atol,
        off=off,
        sizes=RowSizes.of(problem),
    )


def judge(variant: Variant, evidence: Evidence, rows: Iterable[RowSample] | None = None) -> Verdict:
    """Compare the candidates with a variant, and the variant with what is right.

    Args:
        variant: how the candidates may have been computed.
        evidence: the candidates.
        rows: samples of the evidence; None for every row, and then `differs` is not found out.
    """
    tolerances = tolerances_of(variant, evidence)
    values = [_as_read(candidate, variant) for candidate in evidence.candidates]
    tallies = [_Tally() for _ in values]
    needs_all = variant.needs_all_heads or evidence.base.needs_all_heads
    cut = variant if variant.needs_all_heads == needs_all else evidence.base
    for one in all_row_samples(variant.problem) if rows is None else rows:
        for part in parts_of(cut, one.rows, one.batches):
            right = None if rows is None else evidence.right(part)
            found = evaluate(variant, part, with_output=evidence.with_output)
            for index, candidate in enumerate(evidence.candidates):
                actual = values[index][part.batch, part.head][:, :, part.rows.to("cpu")]
                tallies[index].add(candidate.target, actual, found, right, tolerances[index])
    return Verdict(
        max_abs_error=max((tally.max_abs for tally in tallies), default=0.0),
        mismatches=sum(tally.mismatches for tally in tallies),
        rms=tuple(
            tally.rms / allowed
            if (allowed := tolerance.atol + tolerance.rtol * tally.typical)
            else tally.rms
            for tally, tolerance in zip(tallies, tolerances, strict=True)
        ),
        errors=tuple(tally.rms for tally in tallies),
        differs=any(tally.differs for tally in tallies) or variant.misread is not None,
        cells=sum(tally.cells for tally in tallies),
    )


def tolerances_of(variant: Variant, evidence: Evidence) -> list[Tolerance]:
    """The tolerance of each candidate for a variant."""
    return [
        tolerance_of(
            one.target,
            one.dtype,
            variant.problem,
            evidence.rtol,
            evidence.atol,
            sizes=evidence.sizes,
        )
        for one in evidence.candidates
    ]


@dataclass(slots=True)
class _Tally:
    """What is counted for one candidate."""

    cells: int = 0
    finite: int = 0
    mismatches: int = 0
    max_abs: float = 0.0
    squares: float = 0.0
    expected_squares: float = 0.0
    differs: bool = False

    def add(
        self,
        target: Target,
        actual: torch.Tensor,
        found: Expected,
        right: Expected | None,
        tolerance: Tolerance,
    ) -> None:
        expected = of_target(found, target)
        errors = errors_of(target, actual, expected, tolerance, found.empty)
        errors = forgive_empty(errors, found.empty, when_empty_of(found, target), tolerance)
        self.cells += errors.error.numel()
        self.mismatches += int(errors.wrong.sum())
        if errors.error.numel():
            self.max_abs = max(self.max_abs, float(errors.error.max()))
            kept = torch.where(torch.isinf(errors.error), 0.0, errors.error)
            self.squares += float((kept * kept).sum())
            size = expected.to(torch.float64).nan_to_num(0.0, 0.0, 0.0)
            self.expected_squares += float((size * size).sum())
        if not self.differs and right is not None:
            right_cells = of_target(right, target)
            other = errors_of(target, expected, right_cells, tolerance, right.empty)
            self.differs = bool(other.wrong.any())

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / self.cells) if self.cells else 0.0

    @property
    def typical(self) -> float:
        """√ of the mean square of what was expected."""
        return math.sqrt(self.expected_squares / self.cells) if self.cells else 0.0


def _as_read(candidate: Candidate, variant: Variant) -> torch.Tensor:
    if candidate.target is Target.OUTPUT:
        return mend(candidate.values, variant.misread)
    return candidate.values


def all_row_samples(problem: Problem) -> list[RowSample]:
    """Every query that is not padding."""
    from attncli.attention.check.compare import real_rows

    return [RowSample(batches, rows) for rows, batches in real_rows(problem)]


def _chosen(problem: Problem, off: torch.Tensor, cells: int) -> list[RowSample]:
    """Rows where mistakes show: worst ones, edges of every rule, and some by chance."""
    sizes = problem.sizes
    per_row = max(1, sizes.heads * sizes.k_len)
    batches = _chosen_batches(problem, off, max(1, cells // (8 * per_row)))
    count = max(4, min(64, cells // (per_row * max(1, len(batches)))))
    found = []
    for batch in batches:
        real = problem.mask.real_queries(batch)
        rows = _chosen_rows(problem, off[batch].sum(0)[:real], batch, count)
        if len(rows):
            found.append(RowSample(range(batch, batch + 1), rows.to(problem.device)))
    return found


def _chosen_batches(problem: Problem, off: torch.Tensor, count: int) -> list[int]:
    """The batches with most and with fewest mismatches, the first and the last."""
    by_batch = off.sum((1, 2))
    order = by_batch.argsort(descending=True).tolist()
    wanted = [order[0], order[-1], 0, problem.sizes.batch - 1, *order] if order else []
    return sorted(list(dict.fromkeys(wanted))[: max(1, count)])


def _chosen_rows(problem: Problem, off: torch.Tensor, batch: int, count: int) -> torch.Tensor:
    """Up to `count` rows of one batch: a third worst, a third edges, the rest by chance."""
    length = len(off)
    if length <= count:
        return torch.arange(length)
    third = max(1, count // 3)
    worst = off.topk(third).indices
    random = torch.randperm(length, generator=torch.Generator().manual_seed(_SEED))[:count]
    edges = torch.tensor(_edges(problem, batch, length)[:third], dtype=torch.int64)
    rows = torch.cat([worst, edges, random])
    kept = torch.tensor(list(dict.fromkeys(rows.tolist()))[:count])
    return kept.sort().values


def _edges(problem: Problem, batch: int, length: int) -> list[int]:
    """First and last rows, and those where the interval of visible keys starts to change."""
    mask = problem.mask
    hull = mask.hull(batch)
    wanted = [0, length - 1, 1, length - 2]
    for line in (hull.first, hull.stop):
        change = (torch.from_numpy(line).diff() != 0).to(torch.int8).diff().nonzero().flatten()
        wanted += [int(row) + step for row in change[:2].tolist() for step in (1, 2, 0)]
    wanted += np.flatnonzero(~mask.real_keys(batch))[:2].tolist()
    return [row for row in dict.fromkeys(wanted) if 0 <= row < length]


def narrowed(evidence: Evidence, candidates: Iterable[Candidate]) -> Evidence:
    """The same rows for some of the candidates."""
    return replace(evidence, candidates=tuple(candidates))
