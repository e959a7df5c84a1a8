"""A variant beside the candidates: how far off each is, and how far an honest kernel may be.

With u the unit roundoff of the candidate's dtype, u₃₂ that of the arithmetic of its logits
(2⁻²⁴, also beside float16 and bfloat16; 2⁻⁵³ beside float64), L_i = ‖q_i‖·max‖k_j‖·|scale| over
the visible keys, which no |score| exceeds, nor the terms of one that cancel and are rounded too,
or the largest |logit| where a bias or a sink makes that more, and a_ic = Σ_j w_ij·|v_jc| of the
very cell, |actual − expected| may be

    target      of |expected|                  beside it
    output      2u                             a_ic·(u + 4·u₃₂·(1 + L_i)), for float16 plus
                                               2⁻²⁵·(1 + Σ_j |v_jc|) of the visible keys
    weights     2u + 8·u₃₂·(1 + L_i)           u² of the row's largest
    logsumexp   2u                             4·u₃₂·(1 + L_i + ln S_k)

    dtype       u
    float64     2⁻⁵³
    float32     2⁻²⁴
    float16     2⁻¹¹
    bfloat16    2⁻⁸
    float8      2⁻⁴ (e4m3), 2⁻³ (e5m2)

and beside all of them what is lost of numbers too small for the dtype.

An output errs by Σ δ_j·w_j·v_j with |δ_j| ≤ u for the rounding of weights before they meet V, by
the rounding of the logits, and by its own last rounding; weights that are subnormal in float16
err by up to 2⁻²⁵ each.

Such errors are independent of each other. With c_i = u + 4·u₃₂·(1 + L_i), rounding explains an
error of √(c_i²·(e_ic² + Σ_j w_ij²·v_jc²)) in a cell, and of the root mean square of that in a
head: cells of a head that all err to their limit, or that all are 0 where the values average out,
are seen there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch

from attncli.attention.check.candidate import Candidate
from attncli.attention.check.variant import (
    Expected,
    Part,
    Storage,
    Variant,
    evaluate,
    parts_of,
    real_rows,
)
from attncli.attention.options import Target
from attncli.attention.threads import product, sum_along, sum_of

_LOGIT_ROUNDINGS = 4.0
# Half the distance of float16's subnormal numbers.
_SUBNORMAL_ERROR = 2.0**-25
# Below it subnormal numbers are often flushed to 0, and no one misses them.
_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far off is still right.

    Attributes:
        dtype: of the reference's arithmetic, whose rounding counts too.
        rtol: relative tolerance of the caller; None for that of the dtype.
        atol: absolute tolerance of the caller, in the unit of the target; None likewise.
    """

    dtype: torch.dtype
    rtol: float | None = None
    atol: float | None = None

    def allowed(self, candidate: Candidate, expected: Expected) -> torch.Tensor:
        """The largest error that passes, float64, broadcastable to (b, h, R, w)."""
        return self.bounds(candidate, expected)[0]

    def bounds(
        self, candidate: Candidate, expected: Expected
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The largest error that passes in a cell, and what rounding explains in a head.

        Returns:
            Float64, broadcastable to (b, h, R, w); and Σ over the cells of the squared error that
            rounding explains, float64 (b, h), None but for outputs without a tolerance of the
            caller.
        """
        unit = unit_roundoff(candidate.dtype)
        theirs = torch.float64 if candidate.dtype == torch.float64 else torch.float32
        inner = _LOGIT_ROUNDINGS * max(unit_roundoff(theirs), unit_roundoff(self.dtype))  # 4·u₃₂
        size = expected.of(candidate.target).to(torch.float64).abs().nan_to_num(0.0, 0.0, 0.0)
        own = (2 * unit if self.rtol is None else self.rtol) * size
        logit = 1 + expected.logit_size.to(torch.float64).nan_to_num(0.0, 0.0)  # (b, h, R, 1)
        if self.rtol is None and candidate.target is Target.WEIGHTS:
            far = expected.logits.abs().nan_to_num(0.0, 0.0)
            own = own + 2 * inner * torch.maximum(logit, 1 + far) * size
        if self.atol is not None:
            return own + self.atol, None
        if candidate.target is Target.WEIGHTS:
            largest = size.amax(-1, keepdim=True) if size.shape[-1] else 0.0
            return own + unit * unit * largest + 2 * smallest_number(candidate.dtype), None
        if candidate.target is Target.LOGSUMEXP:
            keys = math.log(max(1, expected.weights.shape[-1]))
            return own + inner * (logit + keys), None
        return self._of_output(candidate, expected, own, unit + inner * logit)

    def _of_output(
        self, candidate: Candidate, expected: Expected, own: torch.Tensor, rounding: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`bounds` of an output, of c_i (b, h, R, 1)."""
        assert expected.output is not None
        assert expected.v is not None
        smallest = smallest_number(candidate.dtype)
        output, v = (_finite(one.to(torch.float64)) for one in (expected.output, expected.v))
        weights = expected.weights.to(torch.float64)
        if not bool((torch.isfinite(expected.logsumexp) | expected.empty).all()):
            weights = _finite(weights)
        if candidate.dtype == torch.float16:
            off = weights * rounding + _SUBNORMAL_ERROR * expected.visible  # (b, h, R, S_k)
            spread, of_keys = product(off, v.abs()), off.square().sum(2)  # (b, h, S_k)
        else:
            spread = rounding * product(weights, v.abs())
            of_keys = product(rounding.square().mT, weights.square())[:, :, 0]
        allowed = own + spread + smallest
        if self.rtol is not None:
            return allowed, None
        own_rounding = sum_along(((rounding * output).square() + smallest**2).flatten(2))
        return allowed, own_rounding + sum_along(of_keys * v.square().sum(-1))


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def smallest_number(dtype: torch.dtype) -> float:
    """What rounding to 0 may lose: half a subnormal step, or all of them where few matter."""
    normal = float(torch.finfo(dtype).smallest_normal)
    return normal if normal < _TINY else normal * unit_roundoff(dtype)


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    """The same without NaN and inf."""
    return tensor if math.isfinite(float(tensor.sum())) else tensor.nan_to_num(0.0, 0.0, 0.0)


# A head is off whose root mean square error is beyond so many times what rounding explains.
ROUNDING_MARGIN = 8.0
# An error where none is allowed, in units of what is: squares of it still fit a float64.
_HUGE = 1e100


def cells_of(
    variant: Variant, candidates: Sequence[Candidate], parts: Iterable[Part] | None = None
) -> Iterator[tuple[Part, Expected, list[torch.Tensor]]]:
    """What a variant gives and what candidates hold that were laid out as by it, part by part.

    Yields:
        The part, of those given or of all queries that are not padding, what the variant gives for
        it, and of each candidate the cells (b, h, R, w), float64, on the device of the arithmetic
        and in the unit of the reference.
    """
    targets = [candidate.target for candidate in candidates]
    values = [candidate.read_as(variant.layout_error) for candidate in candidates]
    of_logsumexp = math.log(2) if variant.base_2 else 1.0
    units = [of_logsumexp if target is Target.LOGSUMEXP else 1.0 for target in targets]
    for part in all_parts(variant) if parts is None else parts:
        expected = evaluate(variant, part, with_output=Target.OUTPUT in targets)
        rows = part.rows.cpu()
        cells = [
            one[part.batch, part.head][:, :, rows].to(expected.weights.device, torch.float64) * unit
            for one, unit in zip(values, units, strict=True)
        ]
        yield part, expected, cells


def all_parts(variant: Variant) -> Iterator[Part]:
    """Every query that is not padding, in parts."""
    for rows, batches in real_rows(variant):
        yield from parts_of(variant, rows, batches, all_heads=variant.needs_all_heads)


@dataclass(frozen=True, slots=True)
class Errors:
    """What a block of cells shows: all float64 (b, h, R, w) or bool.

    Attributes:
        actual, expected: the two values.
        error: |actual − expected|; inf where exactly one of them is not finite, or where both
            are and differ.
        allowed, wrong: the largest error that passes, and where the error is larger.
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

    def of_heads(self, heads: torch.Tensor) -> Errors:
        """Those of some heads alone, bool (h,)."""
        return replace(
            self,
            actual=self.actual[:, heads],
            expected=self.expected[:, heads],
            error=self.error[:, heads],
            allowed=self.allowed[:, heads],
            wrong=self.wrong[:, heads],
            explained=None if self.explained is None else self.explained[:, heads],
        )


def errors_of(
    candidate: Candidate,
    actual: torch.Tensor,
    expected: Expected,
    tolerance: Tolerance,
    *,
    lenient: bool = False,
) -> Errors:
    """Compare a block of a candidate, float64 (b, h, R, w), with what is right or a mistake's.

    The lenient let rows without a key be NaN or the plain mean of the values, as programs leave
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


def stored(errors: Errors, storage: Storage, candidate: Candidate, part: Part) -> Errors:
    """The errors of a part where rounding a result lets a right value lie between two rounded ones.

    What shares a scale with its values has a say in it.
    """
    shared, every = storage.shared or (), slice(None)
    batch, head = every if 0 in shared else part.batch, every if 1 in shared else part.head
    like = candidate.values[batch, head].to(errors.actual.device)
    like = like if 2 in shared else like[:, :, part.rows]
    low, high = (storage.rounded(errors.expected + sign * errors.allowed, like) for sign in (-1, 1))
    nearest = torch.minimum(torch.maximum(errors.actual, low), high)
    found = difference(errors.actual, nearest, errors.allowed)
    return replace(found, explained=errors.explained, forgiven=errors.forgiven)


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


_BY_HEAD = ("squares", "explained", "sizes", "wrong", "ratios", "largest")


@dataclass(slots=True)
class ErrorSums:
    """Errors of one candidate, gathered part by part.

    Attributes:
        squares, explained, sizes: float64 (B, H), Σ error², Σ of what rounding explains of it,
            and Σ expected², over the finite cells of each head.
        wrong, ratios, largest: float64 (B, H), cells beyond the tolerance, Σ (error / allowed)²
            over cells, and the largest error of finite ones.
        cells, finite: cells looked at, finite in both.
        broken: whether NaN or inf is out of place.
        judged: whether what rounding explains is known.
        heads: bool (H,), those that count; None for all.
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
    heads: torch.Tensor | None = None

    @classmethod
    def of(cls, candidate: Candidate, heads: torch.Tensor | None = None) -> Self:
        """Empty ones for a candidate, of some heads alone, bool (H,), or of all."""
        shape = candidate.values.shape[:2]
        zeros: dict[str, Any] = {name: torch.zeros(shape, dtype=torch.float64) for name in _BY_HEAD}
        return cls(**zeros, heads=heads)

    def of_heads(self, heads: torch.Tensor) -> ErrorSums:
        """Those of some heads that count alone, bool (H,); all have equally many cells."""
        among = len(heads) if self.heads is None else int(self.heads.sum())
        share = int(heads.sum()) / max(1, among)
        kept: dict[str, Any] = {name: getattr(self, name)[:, heads] for name in _BY_HEAD}
        cells, finite = round(self.cells * share), round(self.finite * share)
        return replace(self, cells=cells, finite=finite, heads=None, **kept)

    def add(self, errors: Errors, part: Part) -> Errors:
        """Take in a block whose rows and heads are those of the part.

        Returns:
            The same, with 0 in the place of both values where one of them is not finite.
        """
        place: tuple[slice, Any] = (part.batch, part.head)
        if self.heads is not None and not bool(self.heads[part.head].all()):
            counted = self.heads[part.head]
            errors = errors.of_heads(counted.to(errors.error.device))
            place = (part.batch, counted.nonzero()[:, 0] + (part.head.start or 0))
        self.cells += errors.error.numel()
        self.wrong[place] += errors.wrong.sum((2, 3)).cpu()
        if not math.isfinite(float(errors.actual.sum()) + float(errors.expected.sum())):
            finite = torch.isfinite(errors.actual) & torch.isfinite(errors.expected)
            self.broken |= bool(torch.isinf(errors.error).any())
            self.finite -= int((~finite).sum())
            three = errors.actual, errors.expected, errors.error
            a, e, error = (torch.where(finite, one, 0.0) for one in three)
            errors = replace(errors, actual=a, expected=e, error=error)
        self.finite += errors.error.numel()
        if errors.explained is not None:
            self.judged = True
            self.explained[place] += errors.explained.cpu()
        if errors.error.numel():
            self.squares[place] += sum_along(errors.error.square().flatten(2)).cpu()
            self.sizes[place] += sum_along(errors.expected.square().flatten(2)).cpu()
            largest = errors.error.amax((2, 3)).cpu()
            self.largest[place] = torch.maximum(self.largest[place], largest)
            ratio = (errors.error / errors.allowed).nan_to_num(0.0).clamp(max=_HUGE)
            self.ratios[place] += sum_along(ratio.square().flatten(2)).cpu()
        return errors

    @property
    def mismatches(self) -> int:
        """Cells beyond the tolerance."""
        return int(self.wrong.sum())

    @property
    def max_abs(self) -> float:
        """Largest error of finite cells."""
        return float(self.largest.max()) if self.largest.numel() else 0.0

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
        at = int(errors.error.argmax())
        worst = float(errors.error.flatten()[at])
        if worst > self.worst_error:
            self.worst_error = worst
            place = [int(index) for index in np.unravel_index(at, errors.error.shape)]
            starts = part.batch.start, part.head.start
            index = starts[0] + place[0], starts[1] + place[1], int(part.rows[place[2]]), place[3]
            values = errors.actual, errors.expected, errors.allowed
            a, e, allowed = (float(one[tuple(place)]) for one in values)
            self.worst = index, a, e, allowed
        if finite is not errors:
            self.n_nan += int(torch.isnan(errors.actual).sum())
            self.n_posinf += int(torch.isposinf(errors.actual).sum())
            self.n_neginf += int(torch.isneginf(errors.actual).sum())
        relative = (finite.error / finite.expected.abs()).nan_to_num(0.0, 0.0)
        self.max_rel = max(self.max_rel, float(relative.max()))
        self.products += sum_of(finite.actual * finite.expected)
        self.actual_squares += sum_of(finite.actual.square())
        return finite

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between the two; None where one of them is 0."""
        norm = math.sqrt(self.actual_squares) * math.sqrt(float(self.sizes.sum()))
        return max(-1.0, min(1.0, self.products / norm)) if norm > 0 else None
