"""Is this output right? Candidates against the float64 reference, and against each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from attncli.attention.check.candidate import Candidate
from attncli.attention.check.variant import Expected, Part, Variant, right_variant
from attncli.attention.check.walk import (
    DetailedSums,
    Errors,
    Tolerance,
    all_parts,
    cells_of,
    difference,
    errors_of,
    unit_roundoff,
)
from attncli.attention.options import AttentionOptions, Target
from attncli.attention.pooling import Pool
from attncli.attention.problem import Problem
from attncli.attention.sizes import Chosen
from attncli.columns import column
from attncli.ranks import in_order

_FINITE_RIGHT = "every finite cell is right"
# Rows and columns of a map of errors, and the largest number on it.
MOST_PLACES = 128
LARGEST_RATIO = 1e18


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One candidate against what is right: the record, described below, and what it is made of.

    Attributes:
        findings: the explanation beside the number of cells: what the shape, NaN and heads say, and
            where the mismatches sit.
        reading: the mistake that its shape shows already; None for the expected shape.
        locations: where the mismatches sit.
        off: int64 (B, H, S_q), mismatches of each row.
        ratios: rows × columns of all batches and heads, pooled: |error| / what is allowed, 1e18
            for what is not finite and should be.
    """

    target: Target = column("target", description="what was compared")
    passed: bool = column("passed", description="nothing below is off, and the axes are right")
    max_abs_error: float = column(
        "max abs error", description="largest |actual − expected|, of cells finite in both"
    )
    max_rel_error: float = column(
        "max rel error", description="largest |error| / |expected|, where not 0"
    )
    rms_error: float = column("rms error", description="√ of the mean squared error")
    cosine: float | None = column(
        "cosine", description="of both as vectors, −1 to 1; none where one is all 0"
    )
    mismatches: int = column("mismatches", description="cells beyond the tolerance")
    worst_index: tuple[int, ...] | None = column(
        "worst at", description="index of the cell furthest off; none where all is right"
    )
    actual: float | None = column("actual", description="the candidate there")
    expected: float | None = column("expected", description="the reference there")
    rtol: float = column(
        "rtol", description="|actual − expected| ≤ atol + rtol·|expected| passes, cell by cell"
    )
    atol: float = column("atol", description="at the worst cell; each cell has its own")
    explanation: str | None = column(None, description="what was found out about a failure")
    cells: int = column("cells", description="cells compared")
    dtype: str = column("dtype", description="narrowest that holds the values; sets the tolerance")
    n_nan: int = column("nan", description="NaN in the candidate")
    n_posinf: int = column("inf", description="+∞ in the candidate")
    n_neginf: int = column("-inf", description="−∞ in the candidate")
    worst_head: tuple[int, int] | None = column(
        "worst head", description="(batch, head) of the largest error / explained error"
    )
    relative_error: float | None = column(
        "relative error", description="of the worst head: rms error / rms of what is expected"
    )
    explained_error: float | None = column(
        "explained error", description="what rounding explains of the relative error"
    )
    heads_off: int = column("heads off", description="heads beyond 8 times what is explained")
    notes: tuple[str, ...] = column(None, description="what other programs do and is forgiven")
    error: float | None = column("error there", description="|actual − expected| of the worst cell")
    allowed: float | None = column("allowed there", description="the largest error that passes it")
    findings: tuple[str, ...]
    reading: str | None
    locations: ErrorLocations
    off: torch.Tensor = field(repr=False, compare=False)
    ratios: Pool = field(repr=False, compare=False)

    @property
    def finite_is_right(self) -> bool:
        """Whether nothing is wrong but NaN and inf in the candidate, or nothing at all."""
        return _FINITE_RIGHT in self.findings or not (self.mismatches or self.heads_off)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two candidates for one tensor, each against what is right, then against each other."""

    first: Comparison
    second: Comparison
    closer: int | None = column(None, description="1 or 2, by NaN and inf, then by rms error")
    max_abs_error: float = column(
        None, description="largest |first − second| of cells finite in both"
    )
    rms_error: float = column(None, description="√ of the mean squared difference")
    cosine: float | None = column(
        None, description="of both as vectors, −1 to 1; none where one is all 0"
    )
    mismatches: int = column(None, description="cells apart by more than both tolerances")
    worst_index: tuple[int, ...] | None = column(None, description="the cell furthest apart")
    values: tuple[float, float] | None = column(
        None, description="of the first and the second there"
    )
    first_part: tuple[int, ...] | None = column(
        None, description="(batch, head, row) of the first row apart"
    )
    error: float | None = column(None, description="|first − second| of the cell furthest apart")
    allowed: float | None = column(None, description="what both tolerances allow there together")
    locations: ErrorLocations


@dataclass(frozen=True, slots=True)
class _Gathered:
    """A candidate, or the difference of two, on its way through the parts."""

    candidate: Candidate
    sums: DetailedSums
    rows: RowErrors

    @classmethod
    def of(cls, candidate: Candidate, variant: Variant) -> _Gathered:
        return cls(candidate, DetailedSums.of(candidate), RowErrors.of(candidate, variant))

    def add(self, errors: Errors, expected: Expected, part: Part) -> None:
        self.sums.add(errors, part)
        self.rows.add(errors, expected, part)


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
        problem: what they were computed from; padded queries are left out.
        options: what the problem was made with.
        candidates: from `read_candidate`.
        rtol, atol: tolerances; None for those of the candidate's dtype.
    """
    tolerance = Tolerance(problem.dtype, rtol, atol)
    return compare_with(right_variant(problem, options), candidates, tolerance)


def compare_with(
    variant: Variant,
    candidates: Sequence[Candidate],
    tolerance: Tolerance,
    tell: Callable[[int], None] | None = None,
) -> list[Comparison]:
    """The same against any variant of the problem; `tell` hears how many queries more are done."""
    return [_finish(one, variant, tolerance) for one in _walk(variant, candidates, tolerance, tell)]


def compare_pair(
    problem: Problem,
    options: AttentionOptions,
    first: Candidate,
    second: Candidate,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    chosen: Chosen = (None, None),
) -> Pair:
    """Compare two candidates for one target with each other and, as `compare`, the reference.

    Args:
        problem, options, rtol, atol: as for `compare`.
        first, second: the candidates.
        chosen: the batches and heads to look at.
    """
    variant = right_variant(problem, options, chosen)
    tolerance = Tolerance(problem.dtype, rtol, atol)
    between = _Gathered.of(first, variant)
    gathered = _walk(variant, [first, second], tolerance, between=between)
    one, two = (_finish(each, variant, tolerance) for each in gathered)
    sums, parted = between.sums, between.rows.wrong.nonzero()
    order = parted[parted[:, 2].argsort(stable=True)]
    worst = sums.worst
    keys = [(each.n_nan + each.n_posinf + each.n_neginf, each.rms_error) for each in (one, two)]
    return Pair(
        first=one,
        second=two,
        closer=None if keys[0] == keys[1] else 1 if keys[0] < keys[1] else 2,
        max_abs_error=sums.max_abs,
        rms_error=sums.rms,
        cosine=sums.cosine,
        mismatches=sums.mismatches,
        worst_index=None if worst is None else worst[0],
        values=None if worst is None else (worst[1], worst[2]),
        first_part=tuple(order[0].tolist()) if len(order) else None,
        error=None if worst is None else sums.worst_error,
        allowed=None if worst is None else worst[3],
        locations=between.rows.locations,
    )


def _walk(
    variant: Variant,
    candidates: Sequence[Candidate],
    tolerance: Tolerance,
    tell: Callable[[int], None] | None = None,
    between: _Gathered | None = None,
) -> list[_Gathered]:
    """The errors of each candidate and, in `between`, those of the first against the second.

    Parts are shared out over the ranks, and added up at rank 0: the others find none.
    """
    gathered = [_Gathered.of(candidate, variant) for candidate in candidates]

    def work(part: Part, _whole: slice) -> tuple[Expected, list[Errors]]:
        ((_, expected, cells),) = cells_of(variant, candidates, [part])
        found = [
            errors_of(candidate, actual, expected, tolerance)
            for candidate, actual in zip(candidates, cells, strict=True)
        ]
        return expected.of_rows, found

    parts = list(all_parts(variant)) if candidates else []
    found_of_parts = in_order(parts, lambda _: [1.0], work, lambda alone: alone[0])
    for part, (expected, found) in zip(parts, found_of_parts, strict=False):
        for one, errors in zip(gathered, found, strict=True):
            one.add(errors, expected, part)
        if between is not None:
            # Each may be off by its own tolerance, to opposite sides.
            allowed = found[0].allowed + found[1].allowed
            parted = difference(found[0].actual, found[1].actual, allowed)
            between.add(parted, expected, part)
        if tell is not None:
            tell(expected.empty.numel())
    return gathered


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
    wrong, part = sums.mismatches, sums.mismatches / max(1, sums.cells)
    share = f" ({part:.2%})" if part >= 1e-4 else " (less than 0.01%)" if wrong else ""
    said = f"{wrong} of {sums.cells} cells are off{share}"
    rows = f"{sums.forgiven} row{'s' * (sums.forgiven > 1)}"
    note = f"+∞ in {rows} without a key is forgiven, as FlashAttention 2 has it; expected −∞"
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
        explanation=None if passed else "; ".join([said, *findings]),
        findings=findings,
        notes=(note,) if sums.forgiven else (),
        cells=sums.cells,
        n_nan=sums.n_nan,
        n_posinf=sums.n_posinf,
        n_neginf=sums.n_neginf,
        dtype=str(candidate.dtype).removeprefix("torch."),
        reading=candidate.reading,
        error=None if index is None else sums.worst_error,
        allowed=None if index is None else allowed,
        worst_head=head,
        relative_error=relative,
        explained_error=explained,
        heads_off=heads_off,
        locations=locations,
        off=gathered.rows.wrong,
        ratios=gathered.rows.ratios,
    )


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
        broken, mended: bool (B, H, S_q), rows whose candidate is NaN or inf where the reference is
            not, or finite where the reference is not.
        real: bool (B, S_q), queries that are not padding.
        empty, cut: bool (B, H, S_q), rows that see no key, or some keys but not the first.
        seen: bool (B, S_k), keys that some query sees.
        ratios: (S_q, w), error / allowed of all batches and heads.
        batches, heads: bool (B,) and (H,), those that are looked at.
    """

    wrong: torch.Tensor
    columns: torch.Tensor
    broken: torch.Tensor
    mended: torch.Tensor
    real: torch.Tensor
    empty: torch.Tensor
    cut: torch.Tensor
    seen: torch.Tensor
    ratios: Pool
    batches: torch.Tensor
    heads: torch.Tensor

    @classmethod
    def of(cls, candidate: Candidate, variant: Variant) -> RowErrors:
        """None yet, of a candidate held against a variant."""
        batch, heads, length, width = candidate.values.shape
        broken, mended, empty, cut = torch.zeros(4, batch, heads, length, dtype=torch.bool)
        return cls(
            wrong=broken.to(torch.int64),
            columns=torch.zeros(width, dtype=torch.int64),
            broken=broken,
            mended=mended,
            real=torch.zeros(batch, length, dtype=torch.bool),
            empty=empty,
            cut=cut,
            seen=torch.zeros(batch, variant.problem.sizes.k_len, dtype=torch.bool),
            ratios=Pool.of(length, width, MOST_PLACES),
            batches=_flags(variant.chosen[0], batch),
            heads=_flags(variant.chosen[1], heads),
        )

    def add(self, errors: Errors, expected: Expected, part: Part) -> None:
        """Take in a block whose rows and heads are those of the part."""
        place = (part.batch, part.head, part.rows.cpu())
        self.real[part.batch, place[2]] = True
        self.empty[place] = expected.empty[..., 0].cpu()
        if expected.visible.shape[-1]:
            self.cut[place] = ~(expected.visible[..., :1] | expected.empty)[..., 0].cpu()
            self.seen[part.batch] |= expected.seen.any(1).cpu()
        if errors.error.numel():
            # What is not finite, or 0 where nothing is allowed, is neither infinite nor left out.
            ratio = (errors.error / errors.allowed).nan_to_num(0.0).clamp(max=LARGEST_RATIO)
            self.ratios.add(place[2].numpy(), ratio.amax((0, 1)).cpu().numpy())
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
        batches, heads, rows = off.any(2).any(1), off.any(2).any(0), off.any(1).any(0)
        columns = self.columns > 0 if len(self.columns) > 1 else self.columns[:0]
        found = (
            _only("batch", "batches", batches, self.batches),
            _only("head", "heads", heads, self.heads),
            *self._of_rows(off),
            _only("column", "columns", columns, torch.ones_like(columns)),
        )
        return ErrorLocations(
            batches=_where(batches),
            heads=_where(heads),
            rows=_where(rows),
            columns=_where(columns),
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
        padded = ~self.seen.all(1) & self.batches  # (B,)
        some = bool(padded.any()) and bool((padded != self.batches).any())
        if some and bool((by_row.any(1) == padded).all()):
            found.append("only the batches with padded keys")
        whole = self.real[:, None] & ~self.cut
        if bool(self.cut.any()) and bool(whole.any()) and bool((off <= self.cut).all()):
            found.append("only rows that do not see the first key")
        return found


def _run_of_rows(where: tuple[int, ...], length: int) -> str:
    """Rows by their place: first, last, a run, or some."""
    first, last = where[0], where[-1]
    named = f"row {first}" if first == last else f"rows {first} to {last}"
    only = "only " if 2 * len(where) <= length else ""
    if len(where) > _MOST * length:
        return ""
    if last - first + 1 > len(where):
        return f"{only}{len(where)} of {length} rows, between {first} and {last}"
    if not only:
        return f"{named} of {length}"
    if first == 0:
        return f"only the first rows ({named} of {length})"
    if last == length - 1:
        return f"only the last rows ({named} of {length})"
    return f"only {named} of {length}"


def _flags(chosen: Sequence[int] | None, length: int) -> torch.Tensor:
    """Bool (length,), True at the chosen indices, or everywhere."""
    flags = torch.full((length,), chosen is None)
    flags[list(chosen or ())] = True
    return flags


def _only(one: str, many: str, off: torch.Tensor, among: torch.Tensor) -> str:
    """ "only head 3 of 8" and the like; empty where all that are looked at are off."""
    where, count = _where(off), int(among.sum())
    if len(where) == count:
        return ""
    named = ", ".join(map(str, where[:_NAMED])) + (", …" if len(where) > _NAMED else "")
    total = str(count) if count == len(among) else f"the {count} chosen"
    return f"only {one if len(where) == 1 else many} {named} of {total}"


def _where(flags: torch.Tensor) -> tuple[int, ...]:
    return tuple(flags.nonzero().flatten().tolist())


def why_broken(candidate: Candidate, rows: RowErrors, variant: Variant) -> list[str]:
    """Clauses that locate the broken rows and say what broke them; empty where none is."""
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
