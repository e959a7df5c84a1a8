"""What each stage did to the numbers of one problem: the facts behind `compute --explain`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from attncli.attention.problem import Problem
from attncli.attention.running import RunningStatistics
from attncli.attention.softmax_stats import SoftmaxStats, softmax_stats
from attncli.attention.stages import Block, Selection, Stage, select, stage_blocks, stages_of
from attncli.attention.steps import logits_of_scores

# Far enough below a row's maximum that exp gives 0, and finite, so that 0 · it is 0.
_NOTHING = -1e6


@dataclass(frozen=True, slots=True)
class OnlineStep:
    """The running softmax of one row after a block of keys.

    Attributes:
        stop: one past the last key taken in.
        maximum: largest logit so far, −inf before the first visible key.
        total: Σ exp(logit − maximum) so far.
    """

    stop: int
    maximum: float
    total: float


@dataclass(frozen=True, slots=True)
class Walkthrough:
    """Facts about every stage, over the visible cells of the selected rows.

    Attributes:
        statistics: stage → extremes and moments.
        unscaled: means of the same softmax under a scale of 1; None where there are no rows.
        scaled: likewise of what softmax is really given, a sink's weight included.
        masked_cells: cells that the mask hides.
        cells: all cells of real queries.
        keys_min, keys_max: visible keys of the rows that are not empty.
        empty_rows: queries that see no key.
        max_logit: the largest logit that softmax is given; None where there is none.
        naive_overflows: rows whose softmax without subtracting the maximum overflows in float32.
        naive_underflows: rows whose naive softmax is 0/0 in float32.
        rows: real queries, batch by batch and head by head.
        row_entropies_bits: of the first rows, in bits; None for empty ones.
        head_entropies_bits: mean entropy of each head, in bits.
        online: the running softmax of the row that sees most keys, block by block.
    """

    statistics: dict[Stage, RunningStatistics]
    unscaled: SoftmaxStats[float | None]
    scaled: SoftmaxStats[float | None]
    masked_cells: int
    cells: int
    keys_min: int | None
    keys_max: int | None
    empty_rows: int
    max_logit: float | None
    naive_overflows: int
    naive_underflows: int
    rows: int
    row_entropies_bits: tuple[float | None, ...]
    head_entropies_bits: tuple[float, ...]
    online: tuple[OnlineStep, ...]


def walk_through(problem: Problem, selection: Selection | None = None) -> Walkthrough:
    """Gather the facts in one pass over the selected rows, a block at a time.

    Args:
        problem: what to explain.
        selection: which batches, heads and rows; None for all.
    """
    gathered = _Gathered(problem)
    chosen = selection or select(problem)
    for blocks in _together(problem, chosen):
        gathered.add(blocks)
    return gathered.facts()


def _together(problem: Problem, selection: Selection) -> Iterator[dict[Stage, Block]]:
    """All stages of the same rows at once."""
    stages = stages_of(problem)
    found: dict[Stage, Block] = {}
    for block in stage_blocks(problem, stages, selection):
        found[block.stage] = block
        if len(found) == len(stages):
            yield found
            found = {}


class _Gathered:
    """Running sums behind a `Walkthrough`."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.statistics = {stage: RunningStatistics() for stage in stages_of(problem)}
        names = ("entropy_bits", "max_weight", "softmax_grad")
        self.unscaled = {name: RunningStatistics() for name in names}
        self.scaled = {name: RunningStatistics() for name in names}
        self.heads: dict[tuple[int, int], RunningStatistics] = {}
        self.entropies: list[float | None] = []
        self.keys = RunningStatistics()
        self.cells = self.masked = self.empty = self.overflows = self.underflows = self.rows = 0
        self.online: tuple[OnlineStep, ...] = ()

    def add(self, blocks: dict[Stage, Block]) -> None:
        """Take in every stage of some rows."""
        logits = blocks[Stage.MASKED]
        real = logits.real.numpy()
        assert logits.visible is not None
        visible = logits.visible.numpy()[real]  # (rows, S_k)
        for stage, block in blocks.items():
            values = block.values.numpy()[real]
            self.statistics[stage].add(values[visible] if stage.over_keys else values)
        seen = visible.any(1)
        self.rows += len(visible)
        self.cells += visible.size
        self.masked += int((~visible).sum())
        self.empty += int((~seen).sum())
        self.keys.add(visible.sum(1)[seen])
        masked = blocks[Stage.MASKED].values.numpy()[real]
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
            self.entropies += [None] * len(seen)
            return
        raw = self._without_scale(blocks)[scores.real.numpy()][seen]
        sinks = self.problem.sinks
        sink = None if sinks is None else float(sinks[scores.head])
        before, after = (softmax_stats(_outcomes(part, visible, sink)) for part in (raw, masked))
        for name in self.scaled:
            self.unscaled[name].add(getattr(before, name))
            self.scaled[name].add(getattr(after, name))
        head = self.heads.setdefault((scores.batch, scores.head), RunningStatistics())
        head.add(after.entropy_bits)
        found = iter(after.entropy_bits.tolist())
        self.entropies += [next(found) if row else None for row in seen]

    def _without_scale(self, blocks: dict[Stage, Block]) -> NDArray[np.floating]:
        """What softmax would be given under a scale of 1, (rows, S_k).

        Temperature, soft cap and biases stay, so that the scale alone makes the difference.
        """
        problem, masked = self.problem, blocks[Stage.MASKED]
        before = blocks.get(Stage.CAPPED, blocks[Stage.SCALED])
        assert masked.visible is not None
        found = logits_of_scores(
            blocks[Stage.SCORES].values,
            scale=1.0,
            temperature=problem.temperature,
            softcap=problem.softcap,
            visible=masked.visible,
            bias=masked.values - before.values if problem.mask.has_bias else None,
        )
        return found.masked.numpy()

    def _naive(self, masked: NDArray[np.floating], visible: NDArray[np.bool_]) -> None:
        """What exp(x) / Σ exp(x), the maximum not subtracted, would do in float32."""
        with np.errstate(over="ignore"):
            exps = np.where(visible, np.exp(masked.astype(np.float32)), np.float32(0))
            totals = exps.sum(1, dtype=np.float32)
        self.overflows += int(np.isinf(totals).sum())
        self.underflows += int((totals == 0).sum())

    def facts(self) -> Walkthrough:
        """What was gathered."""
        logits = self.statistics[Stage.MASKED]
        keys = self.keys
        return Walkthrough(
            statistics=self.statistics,
            unscaled=SoftmaxStats(**{name: found.mean for name, found in self.unscaled.items()}),
            scaled=SoftmaxStats(**{name: found.mean for name, found in self.scaled.items()}),
            masked_cells=self.masked,
            cells=self.cells,
            keys_min=int(keys.minimum) if keys.count else None,
            keys_max=int(keys.maximum) if keys.count else None,
            empty_rows=self.empty,
            max_logit=logits.maximum if logits.count else None,
            naive_overflows=self.overflows,
            naive_underflows=self.underflows,
            rows=self.rows,
            row_entropies_bits=tuple(self.entropies[:16]),
            head_entropies_bits=tuple(head.mean or 0.0 for head in self.heads.values()),
            online=self.online,
        )


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
