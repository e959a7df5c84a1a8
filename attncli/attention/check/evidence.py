"""A sample of rows on which mistakes show, how well a variant explains a candidate there, and what
of a variant can be read off the candidates: a scale, a soft cap, sinks, value heads, dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from attncli.attention.check.candidate import Candidate
from attncli.attention.check.mistakes import Alternative
from attncli.attention.check.variant import (
    Expected,
    Part,
    Variant,
    evaluate,
    parts_of,
    real_rows,
)
from attncli.attention.check.walk import (
    ErrorSums,
    Tolerance,
    all_parts,
    cells_of,
    difference,
    errors_of,
    stored,
)
from attncli.attention.options import Target
from attncli.attention.problem import Problem
from attncli.attention.steps import weighted_sum
from attncli.attention.threads import sum_along, sum_of

# Cells of the sample that every mistake is tried on, and of the one that most fail on already.
SAMPLE_CELLS = 1 << 20
QUICK_CELLS = 1 << 16
_SEED = 20_250_101

Rows = tuple[torch.Tensor, range]  # int64 (R,), ascending and no padding; neighbouring batches


@dataclass(frozen=True, slots=True, eq=False)
class RowSample:
    """Queries of some batches, of all heads, cut into parts once: results are kept by part.

    First the parts of some neighbouring heads, then those of all, for variants in which heads
    depend on each other.
    """

    parts: tuple[list[Part], list[Part]]


@dataclass(frozen=True, slots=True)
class FitResult:
    """How well a variant explains the candidates on some rows."""

    sums: Sequence[ErrorSums]  # the errors of each candidate
    differs: bool  # whether the variant differs from what is right by more than the tolerance
    plausible: bool = True  # whether nothing beside the errors speaks against it

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
    """Everything that mistakes are judged by."""

    base: Variant  # what is right
    candidates: Sequence[Candidate]  # what is to be explained
    sample: RowSample  # the rows that mistakes are tried on, and a few on which most fail
    quick_rows: RowSample
    complete: bool  # whether the sample holds every row, so that nothing is left to confirm
    tolerance: Tolerance  # how far off is still right
    off: torch.Tensor  # int64 (B, H, S_q), mismatches of each row; 1 where nothing is known of them
    # Bool (H,), the heads that are to be explained, others being right; None for all.
    heads: torch.Tensor | None = None
    # What is right for the parts of the sample: every mistake is held against it.
    _right: dict[Part, Expected] = field(init=False, default_factory=dict, repr=False)
    _before: dict[RowSample, FitResult] = field(init=False, default_factory=dict, repr=False)

    @property
    def chosen(self) -> torch.Tensor | None:
        """Bool (H,), the heads that are looked at; None for all."""
        heads = self.base.chosen[1]
        if heads is None:
            return None
        found = torch.zeros(self.base.problem.sizes.heads, dtype=torch.bool)
        found[list(heads)] = True
        return found

    def parts(self, variant: Variant, sample: RowSample | None) -> Iterable[Part]:
        """The parts of a sample that a variant and the base can be evaluated on; None for all."""
        if sample is None:
            return all_parts(variant if variant.needs_all_heads else self.base)
        return sample.parts[int(variant.needs_all_heads or self.base.needs_all_heads)]

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
    """Choose the rows that mistakes are tried on, for `Evidence` of these.

    Without `off` nothing is known of the rows, without a tolerance that of the dtypes holds.
    """
    problem, sizes = base.problem, base.problem.sizes
    if off is None or not bool(off.any()):
        off = torch.ones(candidates[0].values.shape[:3], dtype=torch.int64)
    cells = sizes.batch * sizes.heads * sizes.q_len * sizes.k_len

    def sample(most: int) -> RowSample:
        rows = list(real_rows(base) if cells <= most else _chosen(base, off, most))
        alone, together = (
            [part for of_batch in rows for part in parts_of(base, *of_batch, all_heads=kind)]
            for kind in (False, True)
        )
        return RowSample((alone, together))

    whole = sample(SAMPLE_CELLS)
    return Evidence(
        base=base,
        candidates=candidates,
        sample=whole,
        quick_rows=whole if cells <= QUICK_CELLS else sample(QUICK_CELLS),
        complete=cells <= SAMPLE_CELLS,
        tolerance=tolerance or Tolerance(problem.dtype),
        off=off,
    )


def judge(variant: Variant, evidence: Evidence, sample: RowSample | None = None) -> FitResult:
    """Compare the candidates with a variant, and the variant with what is right.

    Without a sample every row counts, and `differs` is not found out.
    """
    sums = [ErrorSums.of(candidate, evidence.chosen) for candidate in evidence.candidates]
    differs = variant.layout_error is not None or variant.base_2
    parts = evidence.parts(variant, sample)
    for part, expected, cells in cells_of(variant, evidence.candidates, parts):
        for one, candidate, actual in zip(sums, evidence.candidates, cells, strict=True):
            errors = errors_of(candidate, actual, expected, evidence.tolerance, lenient=True)
            if variant.result is not None and candidate.target is not Target.LOGSUMEXP:
                errors = stored(errors, variant.result, candidate, part)
            one.add(errors, part)
            if sample is not None and not differs:
                right = evidence.right(part).of(candidate.target).to(torch.float64)
                differs = bool(difference(errors.expected, right, errors.allowed).wrong.any())
    if evidence.heads is not None:
        sums = [one.of_heads(evidence.heads) for one in sums]
    return FitResult(sums, differs)


def _chosen(base: Variant, off: torch.Tensor, cells: int) -> Iterator[Rows]:
    """Rows where mistakes show, of the batches with most and fewest, of the first and the last."""
    problem = base.problem
    there = range(problem.sizes.batch) if base.chosen[0] is None else sorted(base.chosen[0])
    per_row = max(1, problem.sizes.heads * problem.sizes.k_len)
    order = [one for one in off.sum((1, 2)).argsort(descending=True).tolist() if one in there]
    wanted = dict.fromkeys([*order[:1], *order[-1:], there[0], there[-1], *order])
    batches = sorted(list(wanted)[: max(1, cells // (8 * per_row))])
    count = max(4, min(64, cells // (per_row * len(batches))))
    for batch in batches:
        real = problem.mask.real_queries(batch)
        rows = _chosen_rows(problem, off[batch].sum(0)[:real], batch, count)
        if len(rows):
            yield rows.to(problem.device), range(batch, batch + 1)


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


Errors = Callable[[float], torch.Tensor]

# Scales are looked for up to so many factors of two from 1/√d_k, to either side and sign.
_POWERS = range(-10, 11)
_GOLDEN = (5**0.5 - 1) / 2
_NARROWINGS = 12
_POLISHES = 12
_CAPS = (*(2.0**power for power in range(-4, 13)), 15.0, 20.0, 30.0, 50.0)
# A sink that takes less of a row tells nothing of itself, and one this low takes nothing.
_LEAST_SINK = 1e-6
_NO_SINK = -1e4
# As few digits as explain the candidates, of a scale in all, of others after the point.
_DIGITS = (4, 6, 9, 12, 17)
_PLACES = (1, 2, *_DIGITS)
# So many weights have to be kept, and so many dropped, before a pattern is called one.
_ENOUGH_KEPT = 8
_ENOUGH_DROPPED = 3
# Share of dropped weights against the p that the kept ones show, in standard errors.
_SIGMAS = 5.0
# A weight so many times what is allowed is large enough to tell dropped from small.
_CLEAR = 16.0


def best_scale(
    variant: Variant,
    evidence: Evidence,
    sample: RowSample,
    *,
    starts: Sequence[float] = (),
    noise: float = 0.0,
) -> float | None:
    """The scale that leaves the least squared error; None where the candidates tell none.

    The last digits are read from the sample, `starts` are tried besides the usual scales, and
    `noise` is the root mean square of errors up to which two scales explain the same.
    """
    unit = 1 / math.sqrt(variant.problem.dk)
    errors = scale_errors(variant, evidence, evidence.quick_rows)
    grid = sorted({0.0, *starts, *(s * unit * 2.0**p for p in _POWERS for s in (1, -1))})
    costs = [_cost(errors, scale) for scale in grid]
    if not min(costs[0], costs[-1]) > min(costs) + noise**2:  # all fit alike, or any large one
        return None
    narrow = _narrowed(errors, grid, costs)
    return _polished(scale_errors(variant, evidence, sample), narrow, unit)


def scale_errors(variant: Variant, evidence: Evidence, sample: RowSample) -> Errors:
    """`_errors_of` as a function of the scale."""
    return _errors_of(lambda scale: variant.with_problem(scale=scale), evidence, sample)


def _errors_of(
    variant_of: Callable[[float], Variant], evidence: Evidence, sample: RowSample
) -> Errors:
    """Recomputed − given of all cells of a sample, float64 (n,), by what a variant depends on.

    What is not finite, and rows that see no key, count 0.
    """

    def errors(number: float) -> torch.Tensor:
        tried = variant_of(number)
        found = [torch.zeros(1, dtype=torch.float64)]
        parts = evidence.parts(tried, sample)
        for part, expected, cells in cells_of(tried, evidence.candidates, parts):
            for candidate, actual in zip(evidence.candidates, cells, strict=True):
                error = torch.where(expected.empty, 0.0, expected.of(candidate.target) - actual)
                heads = evidence.chosen if evidence.heads is None else evidence.heads
                if heads is not None:
                    error = error[:, heads[part.head].to(error.device)]
                found.append(error.nan_to_num(0.0, 0.0, 0.0).flatten().cpu())
        return torch.cat(found)

    return errors


def _cost(errors: Errors, scale: float) -> float:
    found = errors(scale).square()
    return sum_of(found) / max(1, len(found))


def _narrowed(errors: Errors, grid: Sequence[float], costs: Sequence[float]) -> float:
    """The best of some golden sections between the neighbours of the best of a grid, or that."""
    best = costs.index(min(costs))
    low, high = grid[best - 1], grid[best + 1]
    tried = {grid[best]: costs[best]}
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    for _ in range(_NARROWINGS):
        for scale in (left, right):
            if scale not in tried:
                tried[scale] = _cost(errors, scale)
        if tried[left] <= tried[right]:
            high, right = right, left
            left = high - _GOLDEN * (high - low)
        else:
            low, left = left, right
            right = low + _GOLDEN * (high - low)
    return min(tried, key=tried.__getitem__)


def _polished(errors: Errors, scale: float, unit: float) -> float:
    """Gauss–Newton steps while they help, the slope taken by differences.

    They find a zero residual to the last digits, where sections stop at √ of the precision.
    """
    cost = _cost(errors, scale)
    for _ in range(_POLISHES):
        step = 1e-5 * max(abs(scale), 1e-3 * unit)
        slope = (errors(scale + step) - errors(scale - step)) / (2 * step)
        norm = sum_of(slope * slope)
        if norm == 0:
            break
        moved = scale - sum_of(slope * errors(scale)) / norm
        found = _cost(errors, moved)
        if not found < cost:
            break
        scale, cost = moved, found
    return scale


def fitted_scale(variant: Variant, evidence: Evidence) -> Iterator[Alternative]:
    """The scale that fits the candidates best, with as few digits as explain them."""
    scale = variant.problem.scale
    starts = scale if isinstance(scale, tuple) else (scale,)
    found = best_scale(variant, evidence, evidence.quick_rows, starts=starts)
    if found is None:
        return
    values = dict.fromkeys(float(f"{found:.{digits}g}") for digits in _DIGITS)
    yield _first_explaining("scale", values, variant, evidence)


def fitted_softcap(variant: Variant, evidence: Evidence) -> Iterator[Alternative]:
    """The soft cap c that fits best, looked for as 1/c², by which logits change evenly."""
    if variant.problem.softcap is not None:
        return

    def capped(rate: float) -> Variant:
        return variant.with_problem(softcap=rate**-0.5 if rate > 0 else None)

    errors = _errors_of(capped, evidence, evidence.quick_rows)
    grid = [0.0, *sorted(c**-2.0 for c in _CAPS)]
    costs = [_cost(errors, rate) for rate in grid]
    least = min(costs)
    if least in (costs[0], costs[-1]) or least > costs[0] / 2:
        return
    rate = _polished(errors, _narrowed(errors, grid, costs), grid[1])
    if rate > 0:
        values = dict.fromkeys(round(rate**-0.5, digits) for digits in _PLACES)
        yield _first_explaining("softcap", values, variant, evidence)


def fitted_sinks(variant: Variant, evidence: Evidence) -> Iterator[Alternative]:
    """The sink of each head that takes as much of the weights as the candidates lack."""
    sources = [one for one in evidence.candidates if one.target is not Target.LOGSUMEXP]
    problem = variant.problem
    if problem.sinks is not None or not sources or variant.needs_all_heads:
        return
    none = torch.zeros(0, dtype=torch.float64)  # of heads that are not looked at
    found = [[none] for _ in range(problem.sizes.heads)]
    parts = evidence.parts(variant, evidence.quick_rows)
    for part, expected, (actual,) in cells_of(variant, sources[:1], parts):
        full = expected.of(sources[0].target).to(torch.float64)
        left = sum_along(full * actual) / sum_along(full.square())  # (b, h, R), 1 without a sink
        sinks = expected.logsumexp[..., 0] + (1 / left - 1).log()
        known = torch.isfinite(sinks) & ((1 - left) > _LEAST_SINK)
        for index, head in enumerate(range(*part.head.indices(problem.sizes.heads))):
            found[head].append(sinks[:, index][known[:, index]].double().cpu())
    sums = [torch.cat(one) for one in found]
    if not any(len(one) for one in sums):
        return
    fitted = [float(one.median()) if len(one) else _NO_SINK for one in sums]
    values = dict.fromkeys(tuple(round(x, digits) for x in fitted) for digits in _PLACES)
    yield _first_explaining("sinks", values, variant, evidence)


def _first_explaining(
    name: str, values: Iterable[Any], variant: Variant, evidence: Evidence
) -> Alternative:
    """The variant with the first value of a field that explains the candidates, or the last one."""
    tried = []
    for value in values:
        of_problem = value
        if isinstance(value, tuple):
            of_problem = torch.tensor(value, dtype=torch.float64, device=variant.problem.device)
        tried.append(Alternative(variant.with_problem(**{name: of_problem}), {name: value}))
        if judge(tried[-1].variant, evidence, evidence.quick_rows).explains:
            break
    return tried[-1]


def other_value_heads(variant: Variant, evidence: Evidence) -> Iterator[Alternative]:
    """For each query head the value head that fits it best, where that is not its own."""
    problem = variant.problem
    outputs = [one for one in evidence.candidates if one.target is Target.OUTPUT]
    if problem.v is None or problem.kv_heads < 2 or not outputs or variant.needs_all_heads:
        return
    own = [problem.kv_head(head) for head in range(problem.sizes.heads)]
    misfit = torch.zeros(problem.sizes.heads, problem.kv_heads, dtype=torch.float64)
    parts = evidence.parts(variant, evidence.quick_rows)
    for part, expected, (actual, *_) in cells_of(variant, outputs, parts):
        for shared in range(problem.kv_heads):
            v = problem.cast(problem.v[part.batch, shared : shared + 1])
            error = weighted_sum(expected.weights, v, expected.weights > 0) - actual
            cleared = error.nan_to_num(0.0, 0.0, 0.0).square()
            squares = sum_along(cleared.transpose(0, 1).flatten(1))
            misfit[part.head, shared] += squares.cpu()
    ties = misfit.gather(1, torch.tensor(own)[:, None])[:, 0] <= misfit.amin(1)
    best = zip(own, misfit.argmin(1).tolist(), ties.tolist(), strict=True)
    chosen = tuple(o if tie else b for o, b, tie in best)
    if list(chosen) != own:
        yield Alternative(replace(variant, value_heads=chosen))


def find_dropout(variant: Variant, evidence: Evidence) -> FitResult | None:
    """Dropout left on, which weights show: each is 0 or w/(1 − p), with one p for all.

    An output has to follow from the weights, a log-sum-exp is as ever. None where no weights are
    given, or where they show none.
    """
    sources = [one for one in evidence.candidates if one.target is Target.WEIGHTS]
    factor = _dropout_factor(variant, evidence, sources[0]) if sources else None
    if factor is None or factor <= 1:
        return None
    candidates = (sources[0], *(one for one in evidence.candidates if one is not sources[0]))
    sums = [ErrorSums.of(candidate) for candidate in candidates]
    kept = dropped = 0
    for part, expected, cells in cells_of(variant, candidates, evidence.parts(variant, None)):
        clear = expected.weights > _CLEAR * evidence.tolerance.allowed(sources[0], expected)
        kept += int((clear & (cells[0] != 0)).sum())
        dropped += int((clear & (cells[0] == 0)).sum())
        left = expected.with_weights(torch.where(cells[0] != 0, expected.weights * factor, 0.0))
        for one, candidate, actual in zip(sums, candidates, cells, strict=True):
            one.add(errors_of(candidate, actual, left, evidence.tolerance), part)
    probability = 1 - 1 / factor
    error = math.sqrt(probability * (1 - probability) / max(1, kept + dropped))
    as_many = abs(dropped / max(1, kept + dropped) - probability) <= _SIGMAS * error
    plausible = kept >= _ENOUGH_KEPT and dropped >= _ENOUGH_DROPPED and as_many
    return FitResult(sums, differs=True, plausible=plausible)


def _dropout_factor(variant: Variant, evidence: Evidence, source: Candidate) -> float | None:
    """1/(1 − p), the median ratio of kept weights; None where too few are kept."""
    ratios = [torch.zeros(0, dtype=torch.float64)]
    parts = evidence.parts(variant, evidence.quick_rows)
    for _, expected, (actual,) in cells_of(variant, [source], parts):
        weights = expected.weights.to(torch.float64)
        clear = weights > _CLEAR * evidence.tolerance.allowed(source, expected)
        kept = clear & (actual > weights / 2)
        # Large weights are known best, relatively.
        best = kept & (weights >= weights[kept].median()) if bool(kept.any()) else kept
        ratios.append((actual[best] / weights[best]).cpu())
    found = torch.cat(ratios)
    return float(found.median()) if len(found) >= _ENOUGH_KEPT // 2 else None
