"""Two candidates against each other and against what is right: which is closer, where they part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncli.attention.check.candidate import Candidate
from attncli.attention.check.compare import Comparison, compare, real_queries, real_rows
from attncli.attention.check.difference import Sums, errors_of
from attncli.attention.check.places import Places, Tally, places_of
from attncli.attention.check.tolerance import Tolerance, tolerance_of
from attncli.attention.check.variant import Part

if TYPE_CHECKING:
    from attncli.attention.options import AttentionOptions
    from attncli.attention.problem import Problem

_BLOCK_CELLS = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two candidates for the same tensor.

    Attributes:
        first, second: each against what is right.
        closer: 1 or 2, the candidate with fewer NaN and inf out of place or, where these are as
            many, with the smaller rms error; None where the two are alike.
        max_abs_error: largest |first − second| over the cells that are finite in both.
        rms_error: √ of the mean squared difference over the same cells.
        cosine: of the angle between both, −1 to 1; None where one of them is all 0.
        mismatches: cells in which they differ by more than both their tolerances together.
        worst_index: (batch, head, row, column) of the cell in which they differ most; None where
            there are no cells.
        values: first and second there.
        first_part: (batch, head, row) of the first row in which they part; None where they agree.
        places: where they part.
    """

    first: Comparison
    second: Comparison
    closer: int | None
    max_abs_error: float
    rms_error: float
    cosine: float | None
    mismatches: int
    worst_index: tuple[int, ...] | None
    values: tuple[float, float] | None
    first_part: tuple[int, ...] | None
    places: Places


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
    one, two = compare(problem, options, [first, second], rtol=rtol, atol=atol)
    sums, tally = _between(problem, first, second, _together(problem, first, second, rtol, atol))
    parted = tally.wrong.nonzero()
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
        places=places_of(tally, problem, real_queries(problem)),
    )


def _together(
    problem: Problem, first: Candidate, second: Candidate, rtol: float | None, atol: float | None
) -> Tolerance:
    """Each may be off by its own tolerance, to opposite sides."""
    both = [tolerance_of(c.target, c.dtype, problem, rtol, atol) for c in (first, second)]
    return Tolerance(sum(one.rtol for one in both), sum(one.atol for one in both))


def _between(
    problem: Problem, first: Candidate, second: Candidate, tolerance: Tolerance
) -> tuple[Sums, Tally]:
    """Errors of the first candidate against the second, row block by row block."""
    batch, heads, length, width = first.values.shape
    sums, tally = Sums(), Tally.of((batch, heads, length, width))
    step = max(1, _BLOCK_CELLS // max(1, heads * width))
    for rows, batches in real_rows(problem):
        for index in batches:
            for some in torch.split(rows.cpu(), step):
                part = Part(slice(index, index + 1), slice(0, heads), some)
                ours, theirs = (c.values[part.batch][:, :, some].double() for c in (first, second))
                empty = torch.zeros_like(ours[..., :1], dtype=torch.bool)
                errors = errors_of(first.target, ours, theirs, tolerance, empty)
                sums.add(errors, part)
                tally.add(errors, empty, part)
    return sums, tally


def _closer(first: Comparison, second: Comparison) -> int | None:
    keys = [(one.n_nan + one.n_posinf + one.n_neginf, one.rms_error) for one in (first, second)]
    if keys[0] == keys[1]:
        return None
    return 1 if keys[0] < keys[1] else 2
