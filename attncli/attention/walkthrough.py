"""What each stage did to the numbers of one problem: the facts behind `compute --explain`."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

from attncli.attention.options import Stage
from attncli.attention.problem import Problem, cost_of
from attncli.attention.stages import Block, Selection, select, stage_blocks, stages_of
from attncli.attention.statistics import RunningStatistics, SoftmaxStats, softmax_stats
from attncli.attention.steps import logits

# Far enough below a row's maximum that exp gives 0, and finite, so that 0 · it is 0.
_NOTHING = -1e6
# Rows whose entropies are told one by one.
FIRST_ROWS = 16
# Queries and keys up to which a mask is told cell by cell.
SMALL = 8


@dataclass(frozen=True, slots=True)
class OnlineStep:
    """The running softmax of one row after a block of keys."""

    stop: int  # one past the last key taken in
    maximum: float  # largest logit so far, −inf before the first visible key
    total: float  # Σ exp(logit − maximum) so far


class Walkthrough:
    """Facts about every stage, over the visible cells of the selected rows.

    Attributes:
        problem: what is explained.
        cost: its operations and bytes.
        q_variance, k_variance: population variance of the entries of Q and K.
        statistics: stage → extremes and moments.
        masked_cells: cells that the mask hides.
        cells: all cells of real queries.
        keys: visible keys of the rows that are not empty.
        empty_rows: queries that see no key.
        naive_overflows: rows whose softmax without subtracting the maximum overflows in float32.
        naive_underflows: rows whose naive softmax is 0/0 in float32.
        rows: real queries, batch by batch and head by head.
        row_entropies_bits: of the first rows, in bits; None for empty ones.
        small_mask: which keys each query of the first head sees, where both are few; else empty.
        online: the running softmax of the row that sees most keys, block by block.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.cost = cost_of(problem)
        self.q_variance, self.k_variance = input_variance(problem.q), input_variance(problem.k)
        self.statistics = {stage: RunningStatistics() for stage in stages_of(problem)}
        self.keys = RunningStatistics()
        self.cells = self.masked_cells = self.empty_rows = self.rows = 0
        self.naive_overflows = self.naive_underflows = 0
        self.row_entropies_bits: tuple[float | None, ...] = ()
        self.small_mask: tuple[tuple[bool, ...], ...] = ()
        self.online: tuple[OnlineStep, ...] = ()
        names = [entry.name for entry in fields(SoftmaxStats)]
        self._unscaled = {name: RunningStatistics() for name in names}
        self._scaled = {name: RunningStatistics() for name in names}
        self._heads: dict[tuple[int, int], RunningStatistics] = {}

    @property
    def unscaled(self) -> SoftmaxStats[float | None]:
        """Means of the same softmax under a scale of 1; None where there are no rows."""
        return SoftmaxStats(**{name: found.mean for name, found in self._unscaled.items()})

    @property
    def scaled(self) -> SoftmaxStats[float | None]:
        """Likewise of what softmax is really given, a sink's weight included."""
        return SoftmaxStats(**{name: found.mean for name, found in self._scaled.items()})

    @property
    def head_entropies_bits(self) -> tuple[float, ...]:
        """Mean entropy of each head, in bits."""
        return tuple(head.mean or 0.0 for head in self._heads.values())

    def add(self, blocks: dict[Stage, Block]) -> None:
        """Take in every stage of some rows."""
        logits = blocks[Stage.MASKED]
        real = logits.real.numpy()
        visible = logits.counted.numpy()[real]  # (rows, S_k)
        for stage, block in blocks.items():
            values = block.values.numpy()[real]
            self.statistics[stage].add(values[visible] if stage.over_keys else values)
        if not self.small_mask and max(visible.shape) <= SMALL:
            self.small_mask = tuple(map(tuple, visible.tolist()))
        seen = visible.any(1)
        self.rows += len(visible)
        self.cells += visible.size
        self.masked_cells += int((~visible).sum())
        self.empty_rows += int((~seen).sum())
        self.keys.add(visible.sum(1)[seen])
        masked = logits.values.numpy()[real]
        self._sharpness(blocks, masked[seen], visible[seen], seen)
        self._naive(masked[seen], visible[seen])
        if not self.online and seen.any():
            row = int(visible.sum(1).argmax())
            self.online = _online(masked[row], visible[row])

    def _sharpness(
        self,
        blocks: dict[Stage, Block],
        masked: NDArray[np.floating],
        visible: NDArray[np.bool_],
        seen: NDArray[np.bool_],
    ) -> None:
        scores = blocks[Stage.SCORES]
        if not visible.size:
            self._keep_entropies([None] * len(seen))
            return
        raw = self._without_scale(blocks)[scores.real.numpy()][seen]
        sinks = self.problem.sinks
        sink = None if sinks is None else float(sinks[scores.head])
        before, after = (softmax_stats(_outcomes(part, visible, sink)) for part in (raw, masked))
        for name in self._scaled:
            self._unscaled[name].add(getattr(before, name))
            self._scaled[name].add(getattr(after, name))
        head = self._heads.setdefault((scores.batch, scores.head), RunningStatistics())
        head.add(after.entropy_bits)
        found = iter(after.entropy_bits.tolist())
        self._keep_entropies([next(found) if row else None for row in seen])

    def _keep_entropies(self, bits: list[float | None]) -> None:
        self.row_entropies_bits = (*self.row_entropies_bits, *bits)[:FIRST_ROWS]

    def _without_scale(self, blocks: dict[Stage, Block]) -> NDArray[np.floating]:
        """What softmax would be given under a scale of 1, (rows, S_k).

        Temperature, soft cap and biases stay, so that the scale alone makes the difference.
        """
        problem, masked = self.problem, blocks[Stage.MASKED]
        before = blocks.get(Stage.CAPPED, blocks[Stage.SCALED])
        found = logits(
            blocks[Stage.SCORES].values,
            scale=1.0,
            temperature=problem.temperature,
            softcap=problem.softcap,
            visible=masked.counted,
            bias=masked.values - before.values if problem.mask.has_bias else None,
        )
        return found.masked.numpy()

    def _naive(self, masked: NDArray[np.floating], visible: NDArray[np.bool_]) -> None:
        """What exp(x) / Σ exp(x), the maximum not subtracted, would do in float32."""
        with np.errstate(over="ignore"):
            exps = np.where(visible, np.exp(masked.astype(np.float32)), np.float32(0))
            totals = exps.sum(1, dtype=np.float32)
        self.naive_overflows += int(np.isinf(totals).sum())
        self.naive_underflows += int((totals == 0).sum())


def _outcomes(
    logits: NDArray[np.floating], visible: NDArray[np.bool_], sink: float | None
) -> NDArray[np.float64]:
    """Logits below their row's maximum, the sink at the end, hidden keys where nothing weighs.

    The maximum goes first: beside logits of 1e30 no finite number would be far below all others.
    """
    exact = np.where(visible, logits.astype(np.float64), -np.inf)
    if sink is not None:
        exact = np.concatenate([exact, np.full((len(exact), 1), sink)], axis=1)
    with np.errstate(invalid="ignore"):  # ∞ − ∞ where the input is not finite: NaN, as IEEE says
        below = exact - exact.max(1, keepdims=True)
    return np.where(below == -np.inf, _NOTHING, below)


def _online(logits: NDArray[np.floating], visible: NDArray[np.bool_]) -> tuple[OnlineStep, ...]:
    """The running maximum and sum over up to four blocks of keys.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et
    al., "FlashAttention" (2022).
    """
    steps: list[OnlineStep] = []
    maximum, total = -math.inf, 0.0
    width = max(1, -(-len(logits) // 4), min(len(logits), 2))
    for start in range(0, len(logits), width):
        seen = logits[start : start + width][visible[start : start + width]].astype(np.float64)
        if seen.size:
            higher = max(maximum, float(seen.max()))
            with np.errstate(invalid="ignore"):  # ∞ − ∞, where the input is not finite
                of_block = float(np.exp(seen - higher).sum())
            total = total * math.exp(maximum - higher) + of_block
            maximum = higher
        steps.append(OnlineStep(min(start + width, len(logits)), maximum, total))
    return tuple(steps)


def input_variance(tensor: torch.Tensor) -> float:
    """Population variance of the entries of Q or K, in float64."""
    statistics = RunningStatistics()
    for part in torch.split(tensor.flatten(0, -2), 1 << 16):
        statistics.add(part.to(torch.float64).numpy())
    return (statistics.std or 0.0) ** 2


def walk_through(problem: Problem, selection: Selection | None = None) -> Walkthrough:
    """Gather the facts in one pass over the selected rows, a block at a time.

    Args:
        problem: what to explain.
        selection: which batches, heads and rows; None for all.
    """
    found, stages = Walkthrough(problem), stages_of(problem)
    together: dict[Stage, Block] = {}  # all stages of the same rows
    for block in stage_blocks(problem, stages, selection or select(problem)):
        together[block.stage] = block
        if len(together) == len(stages):
            found.add(together)
            together = {}
    return found
