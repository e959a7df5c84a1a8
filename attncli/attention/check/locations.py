"""Where the errors of a candidate sit, and why it holds NaN or inf where the reference does not."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attncli.attention.check.candidate import Candidate
from attncli.attention.check.variant import Expected, Part, Variant
from attncli.attention.check.walk import Errors
from attncli.attention.problem import Problem

_NAMED = 6
# A share of rows beyond which naming them says nothing: causal row 0 is right whatever happens.
_MOST = 0.75
# Broken rows looked into: what broke one, as a rule broke all.
_ROWS = 64
HALF_LIMIT = 65504.0


@dataclass(frozen=True, slots=True)
class ErrorLocations:
    """Where the mismatches sit; empty where there are none.

    Attributes:
        batches, heads, rows: the indices that have mismatches, ascending.
        columns: likewise of the last axis; empty for a log-sum-exp.
        findings: what is peculiar about them, each a clause such as "only head 3 of 8".
    """

    batches: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    findings: tuple[str, ...] = ()


@dataclass(slots=True)
class RowErrors:
    """Mismatches counted per row and per column, while parts go by.

    Attributes:
        wrong: int64 (B, H, S_q), mismatches of each row.
        columns: int64 (w,), mismatches of each column.
        broken: bool (B, H, S_q), rows whose candidate is NaN or inf where the reference is not.
        mended: bool (B, H, S_q), rows whose candidate is finite where the reference is not.
        real: bool (B, S_q), queries that are not padding.
        empty: bool (B, H, S_q), rows that see no key.
        cut: bool (B, H, S_q), rows that see some keys, but not the first.
        seen: bool (B, S_k), keys that some query sees.
    """

    wrong: torch.Tensor
    columns: torch.Tensor
    broken: torch.Tensor
    mended: torch.Tensor
    real: torch.Tensor
    empty: torch.Tensor
    cut: torch.Tensor
    seen: torch.Tensor

    @classmethod
    def of(cls, candidate: Candidate, problem: Problem) -> RowErrors:
        """None yet, of a candidate for a problem."""
        batch, heads, length, width = candidate.values.shape
        rows = torch.zeros(batch, heads, length, dtype=torch.bool)
        return cls(
            wrong=rows.to(torch.int64),
            columns=torch.zeros(width, dtype=torch.int64),
            broken=rows.clone(),
            mended=rows.clone(),
            real=torch.zeros(batch, length, dtype=torch.bool),
            empty=rows.clone(),
            cut=rows.clone(),
            seen=torch.zeros(batch, problem.sizes.k_len, dtype=torch.bool),
        )

    def add(self, errors: Errors, expected: Expected, part: Part) -> None:
        """Take in a block whose rows and heads are those of the part."""
        place = (part.batch, part.head, part.rows.cpu())
        self.real[part.batch, place[2]] = True
        self.empty[place] = expected.empty[..., 0].cpu()
        if expected.visible.shape[-1]:
            self.cut[place] = ~(expected.visible[..., :1] | expected.empty)[..., 0].cpu()
            self.seen[part.batch] |= expected.seen.any(1).cpu()
        if not bool(errors.wrong.any()):
            return
        self.wrong[place] = errors.wrong.sum(-1).cpu()
        self.columns += errors.wrong.sum((0, 1, 2)).cpu()
        finite_there, finite_here = torch.isfinite(errors.actual), torch.isfinite(errors.expected)
        self.broken[place] = (errors.wrong & ~finite_there & finite_here).any(-1).cpu()
        self.mended[place] = (errors.wrong & finite_there & ~finite_here).any(-1).cpu()

    @property
    def locations(self) -> ErrorLocations:
        """Where the mismatches sit."""
        off = self.wrong > 0  # (B, H, S_q)
        if not bool(off.any()):
            return ErrorLocations()
        columns = _where(self.columns > 0) if len(self.columns) > 1 else ()
        found = [
            _only("batch", "batches", off.any(2).any(1)),
            _only("head", "heads", off.any(2).any(0)),
            *self._of_rows(off),
            _only("column", "columns", self.columns > 0) if columns else "",
        ]
        return ErrorLocations(
            batches=_where(off.any(2).any(1)),
            heads=_where(off.any(2).any(0)),
            rows=_where(off.any(1).any(0)),
            columns=columns,
            findings=tuple(text for text in found if text),
        )

    def _of_rows(self, off: torch.Tensor) -> list[str]:
        """What the rows that are off have in common and the others have not."""
        found = []
        by_row = off.any(1)  # (B, S_q)
        if bool((off <= self.empty).all()):
            found.append("only rows that see no key")
        length = int(self.real.sum(1).max())
        where = _where(by_row.any(0))
        if len(where) < length:
            found.append(_run_of_rows(where, length))
        padded = ~self.seen.all(1)  # (B,)
        if bool(padded.any()) and not bool(padded.all()) and bool((by_row.any(1) == padded).all()):
            found.append("only the batches with padded keys")
        whole = self.real[:, None] & ~self.cut
        if bool(self.cut.any()) and bool(whole.any()) and bool((off <= self.cut).all()):
            found.append("only rows that do not see the first key")
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


def _only(one: str, many: str, off: torch.Tensor) -> str:
    """ "only head 3 of 8" and the like; empty where all are off."""
    where = _where(off)
    if len(where) == len(off):
        return ""
    named = ", ".join(map(str, where[:_NAMED])) + (", …" if len(where) > _NAMED else "")
    return f"only {one if len(where) == 1 else many} {named} of {len(off)}"


def _where(flags: torch.Tensor) -> tuple[int, ...]:
    return tuple(flags.nonzero().flatten().tolist())


def why_broken(candidate: Candidate, rows: RowErrors, variant: Variant) -> list[str]:
    """Clauses that locate the broken rows and say what broke them; empty where none is.

    Args:
        candidate: what was compared.
        rows: of every part.
        variant: what it was compared with.
    """
    said = []
    if bool(rows.mended.any()):
        mended = f"finite in {int(rows.mended.sum())} rows where NaN or inf of the inputs"
        said.append(f"{mended} makes the reference NaN or inf")
    broken = rows.broken
    count = int(broken.sum())
    if not count:
        return said
    first = tuple(broken.nonzero()[0].tolist())
    said.append(
        f"NaN or inf in {count} row{'s' * (count > 1)}, the first (batch, head, row) {first}"
    )
    in_empty = int((broken & rows.empty).sum())
    if in_empty:
        which = "all" if in_empty == count else f"{in_empty}"
        said.append(f"{which} of them see no key: a softmax over −inf alone is NaN, expected 0")
    rest = (broken & ~rows.empty).nonzero()[:_ROWS]
    return said if not len(rest) else [*said, *_what_broke(rest, candidate, variant)]


def _what_broke(rows: torch.Tensor, candidate: Candidate, variant: Variant) -> list[str]:
    """What inputs and scores of broken rows (n, 3) say."""
    problem = variant.problem
    largest, inputs_broken = 0.0, 0
    for batch, head, row in rows.tolist():
        shared = problem.kv_head(head)
        q, k = problem.q[batch, head, row].double(), problem.k[batch, shared].double()
        values = [] if problem.v is None else [problem.v[batch, shared].double()]
        inputs_broken += not all(bool(torch.isfinite(tensor).all()) for tensor in (q, k, *values))
        largest = max(largest, float((k @ q).nan_to_num(0.0, 0.0, 0.0).abs().max()))
    said = []
    if largest > HALF_LIMIT:
        half = torch.float16 in (candidate.dtype, problem.q.dtype)
        where = "" if half else ", if it was used"
        said.append(
            f"|q·k| reaches {largest:.4g} there before the scale, beyond float16's 65504{where}"
        )
    if inputs_broken:
        said.append("q, k or v hold NaN or inf for these rows, at keys that the mask may hide")
    return said
