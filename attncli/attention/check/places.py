"""Where the errors of a candidate sit: heads, batches, rows, columns, and along the sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from attncli.attention.masks.mask import Mask

if TYPE_CHECKING:
    from attncli.attention.check.difference import Errors
    from attncli.attention.check.variant import Part
    from attncli.attention.problem import Problem

# Rank correlation of error and position from which errors are said to grow or to shrink.
_TREND = 0.9
_ROWS_FOR_TREND = 8
# Errors that differ by less, relatively, differ by how they were rounded.
_ALIKE = 1e-9
_NAMED = 6
# A share of rows beyond which naming them says nothing: causal row 0 is right whatever happens.
_MOST = 0.75


@dataclass(frozen=True, slots=True)
class Places:
    """Where the mismatches sit; empty where there are none.

    Attributes:
        batches, heads, rows: the indices that have mismatches, ascending.
        columns: likewise of the last axis; empty for a log-sum-exp.
        trend: rank correlation, −1 to 1, of a row's largest error with its index, over the rows
            that are off; None where these are fewer than eight or than half of the rows, or where
            all their errors are the same.
        findings: what is peculiar about them, each a clause such as "only head 3 of 8".
    """

    batches: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    trend: float | None = None
    findings: tuple[str, ...] = ()


@dataclass(slots=True)
class Tally:
    """Mismatches counted per row and per column, while blocks go by.

    Attributes:
        wrong: int64 (B, H, S_q), mismatches of each row.
        largest: float64 (B, H, S_q), largest finite error of each row.
        broken: bool (B, H, S_q), rows whose candidate is NaN or inf where the reference is not.
        mended: bool (B, H, S_q), rows whose candidate is finite where the reference is not.
        empty: bool (B, H, S_q), rows that see no key.
        columns: int64 (w,), mismatches of each column.
        at_zero: mismatches where the reference is exactly 0.
    """

    wrong: torch.Tensor
    largest: torch.Tensor
    broken: torch.Tensor
    mended: torch.Tensor
    empty: torch.Tensor
    columns: torch.Tensor
    at_zero: int = field(default=0)

    @classmethod
    def of(cls, shape: tuple[int, int, int, int]) -> Tally:
        """An empty one for a tensor (B, H, S_q, w)."""
        rows = shape[:3]
        return cls(
            torch.zeros(rows, dtype=torch.int64),
            torch.zeros(rows, dtype=torch.float64),
            torch.zeros(rows, dtype=torch.bool),
            torch.zeros(rows, dtype=torch.bool),
            torch.zeros(rows, dtype=torch.bool),
            torch.zeros(shape[3], dtype=torch.int64),
        )

    def add(self, errors: Errors, empty: torch.Tensor, part: Part) -> None:
        """Take in a block whose rows and heads are those of the part."""
        rows = part.rows.cpu()
        finite = torch.where(torch.isinf(errors.error), 0.0, errors.error)
        self.empty[part.batch, part.head, rows] = empty[..., 0].cpu()
        if finite.shape[-1]:
            self.largest[part.batch, part.head, rows] = finite.amax(-1).cpu()
        if not bool(errors.wrong.any()):
            return
        self.wrong[part.batch, part.head, rows] = errors.wrong.sum(-1).cpu()
        finite_there, finite_here = torch.isfinite(errors.actual), torch.isfinite(errors.expected)
        broken, mended = ~finite_there & finite_here, finite_there & ~finite_here
        self.broken[part.batch, part.head, rows] = (errors.wrong & broken).any(-1).cpu()
        self.mended[part.batch, part.head, rows] = (errors.wrong & mended).any(-1).cpu()
        self.columns += errors.wrong.sum((0, 1, 2)).cpu()
        self.at_zero += int((errors.wrong & (errors.expected == 0)).sum())


def places_of(tally: Tally, problem: Problem, real: torch.Tensor) -> Places:
    """Say where the mismatches sit.

    Args:
        tally: of every block.
        problem: what was compared with, to know what is peculiar about a row.
        real: bool (B, S_q), True for queries that are not padding.
    """
    off = tally.wrong > 0  # (B, H, S_q)
    if not bool(off.any()):
        return Places()
    columns = _where(tally.columns > 0) if len(tally.columns) > 1 else ()
    trend = _trend(tally, real)
    return Places(
        batches=_where(off.any(2).any(1)),
        heads=_where(off.any(2).any(0)),
        rows=_where(off.any(1).any(0)),
        columns=columns,
        trend=trend,
        findings=tuple(_findings(tally, problem, real, columns, trend)),
    )


def _findings(
    tally: Tally,
    problem: Problem,
    real: torch.Tensor,
    columns: tuple[int, ...],
    trend: float | None,
) -> list[str]:
    off = tally.wrong > 0
    found = [
        _only("batch", "batches", off.any(2).any(1)),
        _only("head", "heads", off.any(2).any(0)),
        *_of_rows(off, tally, problem, real),
    ]
    total = int(tally.wrong.sum())
    if columns and len(columns) < len(tally.columns):
        found.append(_only("column", "columns", tally.columns > 0))
    if tally.at_zero == total:
        found.append("only where the reference is 0")
    if trend is not None and abs(trend) >= _TREND:
        found.append("growing with the position" if trend > 0 else "shrinking with the position")
    return [text for text in found if text]


def _of_rows(off: torch.Tensor, tally: Tally, problem: Problem, real: torch.Tensor) -> list[str]:
    """What the rows that are off have in common and the others have not."""
    found = []
    by_row = off.any(1)  # (B, S_q)
    rows = by_row.any(0)
    if bool((off <= tally.empty).all()):
        found.append("only rows that see no key")
    where = _where(rows)
    length = int(real.sum(1).max())
    if len(where) < length:
        found.append(_run_of_rows(where, length))
    padded = _padded_keys(problem.mask)
    if bool(padded.any()) and not bool(padded.all()) and bool((by_row.any(1) == padded).all()):
        found.append("only the batches with padded keys")
    cut = _cut(problem.mask)
    if bool(cut.any()) and not bool(cut.all()) and bool((by_row <= cut).all()):
        found.append("only rows whose first keys a window hides")
    return found


def _run_of_rows(where: tuple[int, ...], length: int) -> str:
    """Rows by their place: first, last, a run, or some."""
    first, last = where[0], where[-1]
    named = f"row {first}" if first == last else f"rows {first} to {last}"
    if len(where) > _MOST * length:
        return ""
    if last - first + 1 > len(where):
        return f"only {len(where)} of {length} rows, between {first} and {last}"
    if first == 0:
        return f"only the first rows ({named} of {length})"
    if last == length - 1:
        return f"only the last rows ({named} of {length})"
    return f"only {named} of {length}"


def _cut(mask: Mask) -> torch.Tensor:
    """Bool (B, S_q), True for rows whose first keys are hidden though others are not."""
    hulls = [mask.hull(batch) for batch in range(mask.sizes.batch)]
    cut = torch.zeros(mask.sizes.batch, mask.sizes.q_len, dtype=torch.bool)
    for batch, hull in enumerate(hulls):
        cut[batch, : len(hull.first)] = torch.from_numpy(hull.first > 0)
    return cut


def _padded_keys(mask: Mask) -> torch.Tensor:
    """Bool (B,), True where some keys are padding."""
    return torch.tensor([not mask.real_keys(b).all() for b in range(mask.sizes.batch)])


def _only(one: str, many: str, off: torch.Tensor) -> str:
    """ "only head 3 of 8" and the like; empty where all are off."""
    where = _where(off)
    if len(where) == len(off):
        return ""
    named = ", ".join(map(str, where[:_NAMED])) + (", …" if len(where) > _NAMED else "")
    return f"only {one if len(where) == 1 else many} {named} of {len(off)}"


def _trend(tally: Tally, real: torch.Tensor) -> float | None:
    """Rank correlation of the largest error of a row with its index, over rows that are off."""
    off = (tally.wrong > 0).any(1).any(0)  # (S_q,)
    if int(off.sum()) < max(_ROWS_FOR_TREND, int(real.any(0).sum()) // 2):
        return None
    rank = _ranks(tally.largest.amax((0, 1))[off])
    place = torch.arange(len(rank), dtype=torch.float64)
    rank, place = rank - rank.mean(), place - place.mean()
    spread = float(rank.norm() * place.norm())
    return float(rank @ place) / spread if spread else None


def _ranks(errors: torch.Tensor) -> torch.Tensor:
    """Float64 (n,): ranks from 0 on; those that are alike up to rounding share their mean rank.

    In the order in which a sort leaves them they would seem to grow or to shrink.
    """
    order = errors.argsort(stable=True)
    ascending = errors[order]
    steps = ascending.diff() > _ALIKE * ascending[1:]
    _, group, count = torch.unique_consecutive(
        torch.cat([steps.new_zeros(1), steps]).cumsum(0), return_inverse=True, return_counts=True
    )
    last = count.cumsum(0).to(torch.float64)
    mean = last - (count + 1) / 2
    return torch.empty_like(mean[group]).scatter_(0, order, mean[group])


def _where(flags: torch.Tensor) -> tuple[int, ...]:
    return tuple(flags.nonzero().flatten().tolist())
