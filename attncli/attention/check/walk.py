"""A variant beside the candidates, part by part, and the errors that this shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

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

# A head is off whose root mean square error is beyond so many times what rounding explains.
ROUNDING_MARGIN = 8.0
# An error where none is allowed, in units of what is: squares of it still fit a float64.
_HUGE = 1e100


def cells_of(
    variant: Variant, candidates: Sequence[Candidate], parts: Iterable[Part] | None = None
) -> Iterator[tuple[Part, Expected, list[torch.Tensor]]]:
    """What a variant gives and what each candidate holds, part by part.

    Args:
        variant: how the candidates may have been computed.
        candidates: what is looked at; as the variant would have laid them out.
        parts: which queries; None for all that are not padding.

    Yields:
        The part, what the variant gives for it, and of each candidate the cells (b, h, R, w),
        float64, on the device of the arithmetic.
    """
    values = [candidate.read_as(variant.layout_error) for candidate in candidates]
    units = [_unit_of(variant, candidate) for candidate in candidates]
    with_output = any(candidate.target is Target.OUTPUT for candidate in candidates)
    for part in all_parts(variant) if parts is None else parts:
        expected = evaluate(variant, part, with_output=with_output)
        device = expected.weights.device
        rows = part.rows.cpu()
        cells = [
            one[part.batch, part.head][:, :, rows].to(device, torch.float64) * unit
            for one, unit in zip(values, units, strict=True)
        ]
        yield part, expected, cells


def _unit_of(variant: Variant, candidate: Candidate) -> float:
    """What the unit of a candidate is in that of the reference."""
    return math.log(2) if variant.base_2 and candidate.target is Target.LOGSUMEXP else 1.0


def all_parts(variant: Variant) -> Iterator[Part]:
    """Every query that is not padding, in parts."""
    for rows, batches in real_rows(variant.problem):
        yield from parts_of(variant.problem, rows, batches, all_heads=variant.needs_all_heads)


@dataclass(frozen=True, slots=True)
class Errors:
    """What a block of cells shows: all float64 (b, h, R, w) or bool.

    Attributes:
        actual, expected: the two values.
        error: |actual − expected|; inf where exactly one of them is not finite, or where both
            are and differ.
        allowed: the largest error that passes.
        wrong: bool, True where the error is larger.
        explained: (b, h), Σ over the cells of the squared error that rounding explains; None
            where that is not asked.
        forgiven: rows that see no key and whose log-sum-exp is +∞ in the place of −∞.
    """

    actual: torch.Tensor
    expected: torch.Tensor
    error: torch.Tensor
    allowed: torch.Tensor
    wrong: torch.Tensor
    explained: torch.Tensor | None = None
    forgiven: int = 0


def errors_of(
    candidate: Candidate,
    actual: torch.Tensor,
    expected: Expected,
    tolerance: Tolerance,
    *,
    lenient: bool = False,
) -> Errors:
    """Compare a block of a candidate with what is right, or with what a mistake makes of it.

    Args:
        candidate: whose cells they are.
        actual: float64 (b, h, R, w), its cells.
        expected: what they should be.
        tolerance: how far off is still right.
        lenient: let rows without a key be NaN or the plain mean of the values, as programs leave
            them that make a mistake which empties rows.
    """
    cells = expected.of(candidate.target).to(torch.float64)
    forgiven = 0
    if candidate.target is Target.LOGSUMEXP:
        infinite = expected.empty & torch.isposinf(actual)
        forgiven = int(infinite.sum())
        actual = torch.where(infinite, cells, actual)
    allowed, explained = tolerance.bounds(candidate, expected)
    found = replace(difference(actual, cells, allowed), explained=explained, forgiven=forgiven)
    if lenient and bool(expected.empty.any()):
        return _let_empty_rows_be(candidate, expected, found, tolerance)
    return found


def difference(actual: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor) -> Errors:
    """The errors of float64 cells against others, where so much is allowed."""
    same = (actual == expected) | (torch.isnan(actual) & torch.isnan(expected))
    error = torch.where(same, 0.0, (actual - expected).abs()).nan_to_num(torch.inf, torch.inf)
    wrong = ((error > allowed) | torch.isinf(error)) & ~same
    return Errors(actual, expected, error, allowed.expand(error.shape), wrong)


def stored(errors: Errors, storage: Storage, like: torch.Tensor) -> Errors:
    """The errors where rounding is monotonous, so that a right value lies between two rounded ones.

    Args:
        errors: without the rounding.
        storage: how the candidate was stored.
        like: its values that share their scales with these.
    """
    like = like.to(errors.actual.device)
    low, high = (storage.rounded(errors.expected + sign * errors.allowed, like) for sign in (-1, 1))
    nearest = torch.minimum(torch.maximum(errors.actual, low), high)
    return replace(
        difference(errors.actual, nearest, errors.allowed),
        explained=errors.explained,
        forgiven=errors.forgiven,
    )


def _let_empty_rows_be(
    candidate: Candidate, expected: Expected, errors: Errors, tolerance: Tolerance
) -> Errors:
    """Hidden logits that are finite and alike give the mean of the values, infinite ones NaN."""
    fine = torch.isnan(errors.actual)
    if candidate.target is not Target.LOGSUMEXP:
        even = expected.with_weights(
            torch.full_like(expected.weights, 1 / max(1, expected.weights.shape[-1]))
        )
        distance = (errors.actual - even.of(candidate.target)).abs()
        fine = fine | (distance <= 2 * tolerance.allowed(candidate, even))
    fine = fine & expected.empty
    error = torch.where(fine, 0.0, errors.error)
    return replace(errors, error=error, wrong=errors.wrong & ~fine)


@dataclass(slots=True)
class ErrorSums:
    """Errors of one candidate, gathered part by part.

    Attributes:
        squares, explained, sizes: float64 (B, H), Σ error², Σ of what rounding explains of it,
            and Σ expected², over the finite cells of each head.
        wrong: float64 (B, H), cells beyond the tolerance.
        ratios: float64 (B, H), Σ (error / allowed)² over cells.
        largest: float64 (B, H), largest error of finite cells.
        cells, finite: cells looked at, finite in both.
        broken: whether NaN or inf is out of place.
        judged: whether what rounding explains is known.
    """

    squares: torch.Tensor
    explained: torch.Tensor
    sizes: torch.Tensor
    wrong: torch.Tensor
    ratios: torch.Tensor
    largest: torch.Tensor
    cells: int = 0
    finite: int = 0
    broken: bool = False
    judged: bool = False

    @classmethod
    def of(cls, candidate: Candidate) -> Self:
        """Empty ones for a candidate."""
        zeros = torch.zeros(candidate.values.shape[:2], dtype=torch.float64)
        a, b, c, d, e = (zeros.clone() for _ in range(5))
        return cls(zeros, a, b, c, d, e)

    def of_heads(self, heads: torch.Tensor) -> ErrorSums:
        """Those of some heads alone, bool (H,), of which all have equally many cells."""
        share = int(heads.sum()) / max(1, len(heads))
        return ErrorSums(
            squares=self.squares[:, heads],
            explained=self.explained[:, heads],
            sizes=self.sizes[:, heads],
            wrong=self.wrong[:, heads],
            ratios=self.ratios[:, heads],
            largest=self.largest[:, heads],
            cells=round(self.cells * share),
            finite=round(self.finite * share),
            broken=self.broken,
            judged=self.judged,
        )

    @property
    def mismatches(self) -> int:
        """Cells beyond the tolerance."""
        return int(self.wrong.sum())

    @property
    def max_abs(self) -> float:
        """Largest error of finite cells."""
        return float(self.largest.max()) if self.largest.numel() else 0.0

    def add(self, errors: Errors, part: Part) -> Errors:
        """Take in a block whose rows and heads are those of the part.

        Returns:
            The same, with 0 in the place of both values where one of them is not finite.
        """
        place = (part.batch, part.head)
        self.cells += errors.error.numel()
        self.wrong[place] += errors.wrong.sum((2, 3)).cpu()
        if not math.isfinite(float(errors.actual.sum()) + float(errors.expected.sum())):
            errors = self._finite(errors)
        self.finite += errors.error.numel()
        if errors.explained is not None:
            self.judged = True
            self.explained[place] += errors.explained.cpu()
        if errors.error.numel():
            self.squares[place] += errors.error.square().sum((2, 3)).cpu()
            self.sizes[place] += errors.expected.square().sum((2, 3)).cpu()
            largest = errors.error.amax((2, 3)).cpu()
            self.largest[place] = torch.maximum(self.largest[place], largest)
            ratio = (errors.error / errors.allowed).nan_to_num(0.0).clamp(max=_HUGE)
            self.ratios[place] += ratio.square().sum((2, 3)).cpu()
        return errors

    def _finite(self, errors: Errors) -> Errors:
        finite = torch.isfinite(errors.actual) & torch.isfinite(errors.expected)
        self.broken |= bool(torch.isinf(errors.error).any())
        self.finite -= int((~finite).sum())
        a, e, error = (
            torch.where(finite, one, 0.0) for one in (errors.actual, errors.expected, errors.error)
        )
        return replace(errors, actual=a, expected=e, error=error)

    @property
    def rms(self) -> float:
        """√ of the mean squared error over finite cells."""
        return math.sqrt(float(self.squares.sum()) / self.finite) if self.finite else 0.0

    @property
    def rms_allowed(self) -> float:
        """√ of the mean square of error / allowed."""
        return math.sqrt(float(self.ratios.sum()) / self.cells) if self.cells else 0.0

    @property
    def heads_off(self) -> torch.Tensor:
        """Bool (B, H), True for a head whose errors are more than rounding explains."""
        return self.judged & (self.squares > ROUNDING_MARGIN**2 * self.explained)

    @property
    def worst_head(self) -> tuple[tuple[int, int], float, float] | None:
        """The head whose error is the most times what rounding explains of it.

        (batch, head), its root mean square error and what rounding explains of that, both in
        units of the root mean square of what is expected; None where that is 0 or not asked.
        """
        if not self.judged or not self.squares.numel():
            return None
        times = (self.squares / self.explained).nan_to_num(-1.0, _HUGE, -1.0)
        index = divmod(int(times.argmax()), times.shape[1])
        size = float(self.sizes[index])
        if not size:
            return None
        error, explained = (float(one[index]) for one in (self.squares, self.explained))
        return index, math.sqrt(error / size), math.sqrt(explained / size)


@dataclass(slots=True)
class DetailedSums(ErrorSums):
    """What a comparison tells beside them.

    Attributes:
        max_rel: largest error / |expected| of finite cells.
        products, actual_squares: Σ actual·expected and Σ actual², over finite cells.
        n_nan, n_posinf, n_neginf: of the candidate.
        forgiven: rows without a key whose log-sum-exp is +∞.
        worst_error: of the cell furthest off, inf where one of both is not finite and should be;
            −1 before the first cell.
        worst: (batch, head, row, column), actual, expected and allowed there.
    """

    max_rel: float = 0.0
    products: float = 0.0
    actual_squares: float = 0.0
    n_nan: int = 0
    n_posinf: int = 0
    n_neginf: int = 0
    forgiven: int = 0
    worst_error: float = -1.0
    worst: tuple[tuple[int, ...], float, float, float] | None = None

    def add(self, errors: Errors, part: Part) -> Errors:
        """Take in a block whose rows and heads are those of the part."""
        finite = ErrorSums.add(self, errors, part)
        self.forgiven += errors.forgiven
        if not errors.error.numel():
            return finite
        self._keep_worst(errors, part)
        if finite is not errors:
            self.n_nan += int(torch.isnan(errors.actual).sum())
            self.n_posinf += int(torch.isposinf(errors.actual).sum())
            self.n_neginf += int(torch.isneginf(errors.actual).sum())
        relative = (finite.error / finite.expected.abs()).nan_to_num(0.0, 0.0)
        self.max_rel = max(self.max_rel, float(relative.max()))
        self.products += float((finite.actual * finite.expected).sum())
        self.actual_squares += float(finite.actual.square().sum())
        return finite

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between the two; None where one of them is 0."""
        norm = math.sqrt(self.actual_squares) * math.sqrt(float(self.sizes.sum()))
        return max(-1.0, min(1.0, self.products / norm)) if norm > 0 else None

    def _keep_worst(self, errors: Errors, part: Part) -> None:
        place = int(errors.error.argmax())
        worst = float(errors.error.flatten()[place])
        if worst <= self.worst_error:
            return
        self.worst_error = worst
        batch, head, row, column = (int(i) for i in np.unravel_index(place, errors.error.shape))
        index = (part.batch.start + batch, part.head.start + head, int(part.rows[row]), column)
        values = (errors.actual, errors.expected, errors.allowed)
        a, e, allowed = (float(one[batch, head, row, column]) for one in values)
        self.worst = (index, a, e, allowed)
