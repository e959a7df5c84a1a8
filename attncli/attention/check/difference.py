"""Errors of a candidate, gathered block by block in float64; no array of all cells is built."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncli.attention.check.candidate import Target

if TYPE_CHECKING:
    from attncli.attention.check.tolerance import Tolerance
    from attncli.attention.check.variant import Expected, Part

WorstIndex = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Errors:
    """What a block of cells shows: all float64 (b, h, R, w) or bool.

    Attributes:
        actual, expected: the two values.
        error: |actual − expected|; inf where exactly one of them is not finite, or where both
            are and differ.
        wrong: bool, True where the error is above the tolerance.
    """

    actual: torch.Tensor
    expected: torch.Tensor
    error: torch.Tensor
    wrong: torch.Tensor


def errors_of(
    target: Target,
    actual: torch.Tensor,
    expected: torch.Tensor,
    tolerance: Tolerance,
    empty: torch.Tensor,
) -> Errors:
    """Compare a block.

    Args:
        target: what is compared.
        actual: (b, h, R, w), the candidate's cells, in any dtype and on any device.
        expected: (b, h, R, w).
        tolerance: how far off is still right.
        empty: bool (b, h, R, 1), True for a query that sees no key. Its log-sum-exp is −inf here,
            +inf or 0 elsewhere: all three are right.
    """
    e = expected.to(torch.float64)
    a = actual.to(device=e.device, dtype=torch.float64)
    if target is Target.LOGSUMEXP:
        a = torch.where(empty & (torch.isinf(a) | (a == 0)), e, a)
    same = (a == e) | (torch.isnan(a) & torch.isnan(e))
    error = torch.where(same, 0.0, (a - e).abs())
    error = torch.where(torch.isnan(error), torch.inf, error)
    wrong = (error > tolerance.allowed(e)) | torch.isinf(error)
    return Errors(a, e, error, wrong & ~same)


def forgive_empty(
    errors: Errors, empty: torch.Tensor, when_empty: torch.Tensor | None, tolerance: Tolerance
) -> Errors:
    """Let empty rows be NaN or the plain mean of the values, as other programs leave them.

    Args:
        errors: of a block, against zeros in empty rows.
        empty: bool (b, h, R, 1).
        when_empty: what such a row holds where hidden logits are finite and alike,
            broadcastable to the block; None where there is no such value.
        tolerance: how far off is still right.
    """
    if not bool(empty.any()):
        return errors
    fine = torch.isnan(errors.actual)
    if when_empty is not None:
        near = (errors.actual - when_empty).abs() <= 2 * tolerance.allowed(when_empty)
        fine = fine | near
    fine = fine & empty
    return Errors(
        errors.actual,
        errors.expected,
        torch.where(fine, 0.0, errors.error),
        errors.wrong & ~fine,
    )


def of_target(expected: Expected, target: Target) -> torch.Tensor:
    """The array of a target."""
    if target is Target.OUTPUT:
        assert expected.output is not None
        return expected.output
    return expected.weights if target is Target.WEIGHTS else expected.logsumexp


def when_empty_of(expected: Expected, target: Target) -> torch.Tensor | None:
    """What an empty row of a target holds where hidden logits are finite and alike."""
    if target is Target.OUTPUT:
        return expected.when_empty
    if target is Target.WEIGHTS:
        return expected.weights.new_full((1, 1, 1, 1), 1 / max(1, expected.weights.shape[-1]))
    return None


@dataclass(slots=True)
class Sums:
    """Running sums over cells.

    Attributes:
        cells: cells looked at.
        finite: of them, those where both values are finite.
        mismatches: of them, those beyond the tolerance.
        max_abs, max_rel: over finite cells.
        squares: Σ (a − e)², products: Σ a·e, actual_squares: Σ a², expected_squares: Σ e².
        worst_error: |a − e| of the cell furthest off, inf where one of both is not finite and
            should be; −1 before the first cell.
        worst: (batch, head, row, column), actual and expected of that cell.
    """

    cells: int = 0
    finite: int = 0
    mismatches: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    actual_squares: float = 0.0
    expected_squares: float = 0.0
    worst_error: float = -1.0
    worst: tuple[WorstIndex, float, float] | None = None

    def add(self, errors: Errors, part: Part) -> None:
        """Take in a block whose rows and heads are those of the part."""
        if not errors.error.numel():
            return
        a, e, error = errors.actual, errors.expected, errors.error
        self.cells += error.numel()
        self.mismatches += int(errors.wrong.sum())
        broken = ~(torch.isfinite(a) & torch.isfinite(e))
        some_broken = bool(broken.any())
        self.finite += error.numel() - (int(broken.sum()) if some_broken else 0)
        if some_broken:
            a, e = torch.where(broken, 0.0, a), torch.where(broken, 0.0, e)
            error = torch.where(broken, 0.0, error)
        self.squares += float((error * error).sum())
        self.products += float((a * e).sum())
        self.actual_squares += float((a * a).sum())
        self.expected_squares += float((e * e).sum())
        self.max_abs = max(self.max_abs, float(error.max()))
        relative = torch.where(e == 0, 0.0, error / e.abs())
        self.max_rel = max(self.max_rel, float(relative.max()))
        self._keep_worst(errors, part)

    @property
    def rms(self) -> float:
        """√ of the mean squared error over finite cells."""
        return math.sqrt(self.squares / self.finite) if self.finite else 0.0

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between the two; None where one of them is 0."""
        norm = math.sqrt(self.actual_squares) * math.sqrt(self.expected_squares)
        return max(-1.0, min(1.0, self.products / norm)) if norm > 0 else None

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
        index = (
            (part.batch.start or 0) + batch,
            (part.head.start or 0) + head,
            int(part.rows[row]),
            column,
        )
        pair = (float(errors.actual.flatten()[place]), float(errors.expected.flatten()[place]))
        self.worst = (index, *pair)
