"""A variant beside the candidates, part by part, and the errors that this shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from attncli.attention.check.candidate import Candidate, Target
from attncli.attention.check.tolerance import Tolerance
from attncli.attention.check.variant import Expected, Part, Variant, evaluate, parts_of, real_rows

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
    with_output = any(candidate.target is Target.OUTPUT for candidate in candidates)
    for part in all_parts(variant) if parts is None else parts:
        expected = evaluate(variant, part, with_output=with_output)
        device = expected.weights.device
        rows = part.rows.cpu()
        cells = [one[part.batch, part.head][:, :, rows].to(device, torch.float64) for one in values]
        yield part, expected, cells


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
        heads_squares, heads_explained, heads_expected: float64 (B, H), Σ error², Σ of what
            rounding explains of it, and Σ expected², over the finite cells of each head.
        cells, finite, mismatches: cells looked at, finite in both, beyond the tolerance.
        max_abs, max_rel: over finite cells; `broken` says whether others are out of place.
        products, actual_squares: Σ actual·expected and Σ actual², over finite cells.
        ratios: Σ (error / allowed)² over cells.
        n_nan, n_posinf, n_neginf: of the candidate.
        forgiven: rows without a key whose log-sum-exp is +∞.
        judged: whether what rounding explains is known.
        worst_error: of the cell furthest off, inf where one of both is not finite and should be;
            −1 before the first cell.
        worst: (batch, head, row, column), actual, expected and allowed there.
    """

    heads_squares: torch.Tensor
    heads_explained: torch.Tensor
    heads_expected: torch.Tensor
    cells: int = 0
    finite: int = 0
    mismatches: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    broken: bool = False
    products: float = 0.0
    actual_squares: float = 0.0
    ratios: float = 0.0
    n_nan: int = 0
    n_posinf: int = 0
    n_neginf: int = 0
    forgiven: int = 0
    judged: bool = False
    worst_error: float = -1.0
    worst: tuple[tuple[int, ...], float, float, float] | None = None

    @classmethod
    def of(cls, candidate: Candidate) -> ErrorSums:
        """Empty ones for a candidate."""
        zeros = torch.zeros(candidate.values.shape[:2], dtype=torch.float64)
        return cls(zeros, zeros.clone(), zeros.clone())

    def add(self, errors: Errors, part: Part) -> None:
        """Take in a block whose rows and heads are those of the part."""
        error, a, e = errors.error, errors.actual, errors.expected
        self.forgiven += errors.forgiven
        if not error.numel():
            return
        self.cells += error.numel()
        self.mismatches += int(errors.wrong.sum())
        self._keep_worst(errors, part)
        out_of_place = ~(torch.isfinite(a) & torch.isfinite(e))
        if bool(out_of_place.any()):
            self._count_nonfinite(a)
            self.broken |= bool(torch.isinf(error).any())
            self.finite -= int(out_of_place.sum())
            a, e, error = (torch.where(out_of_place, 0.0, one) for one in (a, e, error))
        self.finite += error.numel()
        place = (part.batch, part.head)
        self.heads_squares[place] += (error * error).sum((2, 3)).cpu()
        self.heads_expected[place] += (e * e).sum((2, 3)).cpu()
        if errors.explained is not None:
            self.judged = True
            self.heads_explained[place] += errors.explained.cpu()
        self.products += float((a * e).sum())
        self.actual_squares += float((a * a).sum())
        self.max_abs = max(self.max_abs, float(error.max()))
        self.max_rel = max(self.max_rel, float((error / e.abs()).nan_to_num(0, 0, 0).max()))
        ratio = (error / errors.allowed).nan_to_num(0.0).clamp(max=_HUGE)
        self.ratios += float((ratio * ratio).sum())

    @property
    def rms(self) -> float:
        """√ of the mean squared error over finite cells."""
        return math.sqrt(float(self.heads_squares.sum()) / self.finite) if self.finite else 0.0

    @property
    def rms_allowed(self) -> float:
        """√ of the mean square of error / allowed."""
        return math.sqrt(self.ratios / self.cells) if self.cells else 0.0

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between the two; None where one of them is 0."""
        norm = math.sqrt(self.actual_squares) * math.sqrt(float(self.heads_expected.sum()))
        return max(-1.0, min(1.0, self.products / norm)) if norm > 0 else None

    @property
    def heads_off(self) -> torch.Tensor:
        """Bool (B, H), True for a head whose errors are more than rounding explains."""
        return self.judged & (self.heads_squares > ROUNDING_MARGIN**2 * self.heads_explained)

    @property
    def worst_head(self) -> tuple[tuple[int, int], float, float] | None:
        """The head whose error is the most times what rounding explains of it.

        (batch, head), its root mean square error and what rounding explains of that, both in
        units of the root mean square of what is expected; None where that is 0 or not asked.
        """
        if not self.judged:
            return None
        times = (self.heads_squares / self.heads_explained).nan_to_num(-1.0, _HUGE, -1.0)
        index = divmod(int(times.argmax()), times.shape[1])
        size = float(self.heads_expected[index])
        if not size:
            return None
        error, explained = (float(one[index]) for one in (self.heads_squares, self.heads_explained))
        return index, math.sqrt(error / size), math.sqrt(explained / size)

    def _count_nonfinite(self, actual: torch.Tensor) -> None:
        self.n_nan += int(torch.isnan(actual).sum())
        self.n_posinf += int(torch.isposinf(actual).sum())
        self.n_neginf += int(torch.isneginf(actual).sum())

    def _keep_worst(self, errors: Errors, part: Part) -> None:
        place = int(errors.error.argmax())
        worst = float(errors.error.flatten()[place])
        if worst <= self.worst_error:
            return
        self.worst_error = worst
        _, heads, rows, width = errors.error.shape
        rest, column = divmod(place, width)
        rest, row = divmod(rest, rows)
        batch, head = divmod(rest, heads)
        index = (part.batch.start + batch, part.head.start + head, int(part.rows[row]), column)
        values = (errors.actual, errors.expected, errors.allowed)
        a, e, allowed = (float(one.flatten()[place]) for one in values)
        self.worst = (index, a, e, allowed)
