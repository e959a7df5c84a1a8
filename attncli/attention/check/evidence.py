"""A sample of rows on which mistakes show, and how well a variant explains a candidate there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from attncli.attention.check.candidate import Candidate, Target
from attncli.attention.check.tolerance import Tolerance
from attncli.attention.check.variant import (
    Expected,
    Part,
    Storage,
    Variant,
    evaluate,
    parts_of,
    real_rows,
)
from attncli.attention.check.walk import (
    ErrorSums,
    all_parts,
    cells_of,
    difference,
    errors_of,
    stored,
)
from attncli.attention.problem import Problem

# Cells of the sample that every mistake is tried on, and of the one that most fail on already.
SAMPLE_CELLS = 1 << 20
QUICK_CELLS = 1 << 16
_SEED = 20_250_101

Rows = tuple[torch.Tensor, range]  # int64 (R,), ascending and no padding; neighbouring batches


@dataclass(frozen=True, slots=True)
class RowSample:
    """Queries of some batches, of all heads, cut into parts once: results are kept by part.

    Attributes:
        parts: with neighbouring heads that can be computed alone.
        parts_of_all_heads: with all heads, for variants in which they depend on each other.
    """

    parts: tuple[Part, ...]
    parts_of_all_heads: tuple[Part, ...]

    @classmethod
    def of(cls, problem: Problem, rows: Iterable[Rows]) -> RowSample:
        """Those rows of a problem."""
        rows = list(rows)
        alone, together = (
            tuple(p for some in rows for p in parts_of(problem, *some, all_heads=all_heads))
            for all_heads in (False, True)
        )
        return cls(alone, together)


@dataclass(frozen=True, slots=True)
class FitResult:
    """How well a variant explains the candidates on some rows.

    Attributes:
        sums: the errors of each candidate.
        differs: whether the variant differs from what is right by more than the tolerance.
        plausible: whether nothing beside the errors speaks against it.
    """

    sums: tuple[ErrorSums, ...]
    differs: bool
    plausible: bool = True

    @property
    def max_abs_error(self) -> float:
        """Largest finite error; inf where a cell is NaN or inf and should not be."""
        return max(math.inf if one.broken else one.max_abs for one in self.sums)

    @property
    def rms(self) -> float:
        """√ of the mean square of error / tolerance, summed over the candidates."""
        return math.fsum(one.rms_allowed for one in self.sums)

    @property
    def explains(self) -> bool:
        """Whether every cell is within the tolerance, and every head as rounding explains."""
        right = not any(one.mismatches or bool(one.heads_off.any()) for one in self.sums)
        return right and self.plausible and any(one.cells for one in self.sums)

    def of_heads(self, heads: torch.Tensor) -> FitResult:
        """The same for some heads alone, bool (H,)."""
        return replace(self, sums=tuple(one.of_heads(heads) for one in self.sums))

    def shares_explained(self, before: FitResult) -> list[float]:
        """How much of each candidate's squared error on the same rows is gone.

        At most 1, below 0 for more; empty where one of them had no error.
        """
        pairs = [(new.rms, old.rms) for new, old in zip(self.sums, before.sums, strict=True)]
        if not all(old > 0 and math.isfinite(new) for new, old in pairs):
            return []
        return [1 - (new / old) ** 2 for new, old in pairs]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that mistakes are judged by.

    Attributes:
        base: what is right.
        candidates: what is to be explained.
        sample: the rows that mistakes are tried on.
        quick_rows: a few of them, on which most mistakes fail.
        complete: whether the sample holds every row, so that nothing is left to confirm.
        tolerance: how far off is still right.
        off: int64 (B, H, S_q), mismatches of each row; 1 where nothing is known of them.
        heads: bool (H,), the heads that are to be explained, others being right; None for all.
    """

    base: Variant
    candidates: tuple[Candidate, ...]
    sample: RowSample
    quick_rows: RowSample
    complete: bool
    tolerance: Tolerance
    off: torch.Tensor
    heads: torch.Tensor | None = None
    # What is right for the parts of the sample: every mistake is held against it.
    _right: dict[Part, Expected] = field(init=False, default_factory=dict, repr=False)
    _before: dict[RowSample, FitResult] = field(init=False, default_factory=dict, repr=False)

    def parts(self, variant: Variant, sample: RowSample | None) -> Iterable[Part]:
        """The parts of a sample that a variant and the base can be evaluated on; None for all."""
        if sample is None:
            return all_parts(variant if variant.needs_all_heads else self.base)
        together = variant.needs_all_heads or self.base.needs_all_heads
        return sample.parts_of_all_heads if together else sample.parts

    def right(self, part: Part) -> Expected:
        """What is right for a part of the sample, computed once."""
        if part not in self._right:
            with_output = any(one.target is Target.OUTPUT for one in self.candidates)
            self._right[part] = evaluate(self.base, part, with_output=with_output)
        return self._right[part]

    def before(self, sample: RowSample) -> FitResult:
        """How far the candidates are off without any mistake, found once."""
        if sample not in self._before:
            self._before[sample] = judge(self.base, self, sample)
        return self._before[sample]


def sample_rows(
    base: Variant,
    candidates: Sequence[Candidate],
    off: torch.Tensor | None = None,
    tolerance: Tolerance | None = None,
) -> Evidence:
    """Choose the rows that mistakes are tried on.

    Args:
        base: what is right.
        candidates: what is to be explained.
        off: int64 (B, H, S_q), mismatches of each row; None where that is not known.
        tolerance: how far off is still right; None for what the dtypes allow.
    """
    problem, sizes = base.problem, base.problem.sizes
    if off is None or not bool(off.any()):
        off = torch.ones(candidates[0].values.shape[:3], dtype=torch.int64)
    cells = sizes.batch * sizes.heads * sizes.q_len * sizes.k_len
    samples = [
        RowSample.of(problem, real_rows(problem) if cells <= most else _chosen(problem, off, most))
        for most in (SAMPLE_CELLS, QUICK_CELLS)
    ]
    few = cells <= QUICK_CELLS
    return Evidence(
        base=base,
        candidates=tuple(candidates),
        sample=samples[0],
        quick_rows=samples[0] if few else samples[1],
        complete=cells <= SAMPLE_CELLS,
        tolerance=Tolerance.of(problem) if tolerance is None else tolerance,
        off=off,
    )


def judge(variant: Variant, evidence: Evidence, sample: RowSample | None = None) -> FitResult:
    """Compare the candidates with a variant, and the variant with what is right.

    Args:
        variant: how the candidates may have been computed.
        evidence: the candidates.
        sample: rows of the evidence; None for every row, and then `differs` is not found out.
    """
    sums = [ErrorSums.of(candidate) for candidate in evidence.candidates]
    differs = variant.layout_error is not None or variant.base_2
    parts = evidence.parts(variant, sample)
    for part, expected, cells in cells_of(variant, evidence.candidates, parts):
        for one, candidate, actual in zip(sums, evidence.candidates, cells, strict=True):
            errors = errors_of(candidate, actual, expected, evidence.tolerance, lenient=True)
            if variant.result is not None and candidate.target is not Target.LOGSUMEXP:
                like = _like(candidate, part, variant.result)
                errors = stored(errors, variant.result, like)
            one.add(errors, part)
            if sample is not None and not differs:
                right = evidence.right(part).of(candidate.target).to(torch.float64)
                differs = bool(difference(errors.expected, right, errors.allowed).wrong.any())
    found = FitResult(tuple(sums), differs)
    return found if evidence.heads is None else found.of_heads(evidence.heads)


def _like(candidate: Candidate, part: Part, storage: Storage) -> torch.Tensor:
    """The values of a candidate that share their scales with those of a part."""
    shared = storage.shared or ()
    batch = slice(None) if 0 in shared else part.batch
    head = slice(None) if 1 in shared else part.head
    chosen = candidate.values[batch, head]
    return chosen if 2 in shared else chosen[:, :, part.rows.cpu()]


def _chosen(problem: Problem, off: torch.Tensor, cells: int) -> Iterator[Rows]:
    """Rows where mistakes show: worst ones, edges of every rule, and some by chance."""
    sizes = problem.sizes
    per_row = max(1, sizes.heads * sizes.k_len)
    batches = _chosen_batches(problem, off, max(1, cells // (8 * per_row)))
    count = max(4, min(64, cells // (per_row * max(1, len(batches)))))
    for batch in batches:
        real = problem.mask.real_queries(batch)
        rows = _chosen_rows(problem, off[batch].sum(0)[:real], batch, count)
        if len(rows):
            yield rows.to(problem.device), range(batch, batch + 1)


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
