"""Stages of attention for what a caller selects: gathered once, for files and for Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from attncli.attention import stages as attention_stages
from attncli.attention.pooled_stages import PooledMatrix, pool_blocks
from attncli.attention.pooling import edges_of
from attncli.attention.problem import Cost, Problem, cost_of
from attncli.attention.stages import (
    Block,
    Selection,
    Stage,
    StageResult,
    StageStatistics,
    blocks_of,
    select,
    shape_of,
    stages_of,
)
from attncli.attention.steps import OutputProjection
from attncli.errors import UsageError
from attncli.files.limits import require_memory

# Arrays of a block that live at once while its stages are computed, measured and copied.
_WORKING_ARRAYS = 8


@dataclass(frozen=True, slots=True)
class StagesAsked:
    """Stages of a problem, and for which of its batches, heads and queries.

    Attributes:
        problem: what to compute.
        selection: for which batches, heads and rows.
        stages: in the order of computation.
        output_projection: needed for the stage `projected` alone.
    """

    problem: Problem
    selection: Selection
    stages: tuple[Stage, ...]
    output_projection: OutputProjection | None = None

    def blocks(self, *stages: Stage) -> Iterator[Block]:
        """The stages, or some of them, block by block."""
        asked = stages or self.stages
        return blocks_of(self.problem, asked, self.selection, self.output_projection)

    def pooled(
        self, stage: Stage, rows: int, columns: int, *, largest: bool
    ) -> Iterator[PooledMatrix]:
        """A stage as matrices of at most so many rows and columns, head after head.

        Args:
            stage: one of those asked for.
            rows, columns: of points.
            largest: whether a point is the largest of its cells, not their mean.
        """
        *_, height, width = self.results()[stage].shape
        edges = edges_of(height, rows), edges_of(width, columns)
        return pool_blocks(self.blocks(stage), *edges, largest=largest)

    def results(self) -> dict[Stage, StageResult]:
        """An empty result per stage, to be filled block by block."""
        shapes = {
            stage: shape_of(self.problem, stage, self.selection, self.output_projection)
            for stage in self.stages
        }
        return {stage: StageResult(stage, shape) for stage, shape in shapes.items()}

    def gather(
        self,
        results: dict[Stage, StageResult],
        max_values: float = math.inf,
        write: Callable[[StageResult, Block], None] | None = None,
    ) -> None:
        """Compute every stage once and fill the results.

        Args:
            results: as `results` makes them.
            max_values: the values of larger stages are left out.
            write: is given every block.
        """
        for block in self.blocks():
            result = results[block.stage]
            result.add(block, keep=math.prod(result.shape) <= max_values)
            if write is not None:
                write(result, block)

    @property
    def needed_bytes(self) -> int:
        """Bytes that computing and keeping all values takes, beside the inputs."""
        problem = self.problem
        width, k_len = problem.dtype.itemsize, problem.sizes.k_len
        kept = 0
        for stage, result in self.results().items():
            # A byte for each cell's visibility.
            kept += math.prod(result.shape) * (width + 1 if stage.over_keys else width)
        block_rows = max(1, attention_stages.BLOCK_CELLS // max(1, k_len))
        working = _WORKING_ARRAYS * min(len(self.selection.rows), block_rows) * k_len * width
        return kept + working + k_len * (problem.dk + (problem.dv or 0)) * width


def ask_stages(
    problem: Problem,
    names: Sequence[str] | None,
    *,
    option: str,
    batches: Sequence[int] | None,
    heads: Sequence[int] | None,
    rows: Sequence[int] | None,
    is_projected: bool = False,
    output_projection: OutputProjection | None = None,
) -> StagesAsked:
    """The stages named, for what is selected; None stands for all.

    Args:
        problem: what to compute.
        names: of stages.
        option: where they were named, for messages.
        batches, heads, rows: indices, negative ones from the end.
        is_projected: whether Q, K and V are stages themselves.
        output_projection: None where there is no stage `projected`.

    Raises:
        UsageError: a stage that the problem does not have, or an index beyond its axis.
    """
    selection = select(problem, batches, heads, rows)
    there = set(stages_of(problem))
    if is_projected:
        there |= {Stage.Q, Stage.K} | (set() if problem.v is None else {Stage.V})
    if output_projection is not None:
        there.add(Stage.PROJECTED)
    offered = [stage for stage in Stage if stage in there]
    for name in names or ():
        if name not in offered:
            known = ", ".join(offered)
            raise UsageError(option, f"expected one of {known} for these inputs, got {name!r}")
    wanted = tuple(stage for stage in offered if names is None or stage in names)
    return StagesAsked(problem, selection, wanted, output_projection)


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """The stages of one attention problem, for the selected batches, heads and queries.

    Attributes:
        stages: name → (batches, heads, rows, columns), float32 or float64 on the CPU. Columns are
            keys, and the value width for `output`; invisible cells of `masked` hold −inf.
        statistics: name → statistics of its visible cells.
        visible: bool (batches, heads, rows, S_k), True where the query sees the key; None where
            no stage over keys was asked for.
        real: bool (batches, rows), True for queries that are not padding.
        batches, heads, rows: what was selected, as indices into the tensors.
        cost: operations and bytes of the whole problem.
        problem: the checked input: sizes, scale, mask, dtype and device of the arithmetic.
    """

    stages: Mapping[str, torch.Tensor]
    statistics: Mapping[str, StageStatistics]
    visible: torch.Tensor | None
    real: torch.Tensor
    batches: tuple[int, ...]
    heads: tuple[int, ...]
    rows: tuple[int, ...]
    cost: Cost
    problem: Problem

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was assumed, and what looks like a mistake."""
        return self.problem.warnings


def compute_stages(asked: StagesAsked) -> Computed:
    """All values of the stages asked for, where there is memory for them.

    Raises:
        ResourceError: there is not.
    """
    advice = "fewer «rows», «head_index», «batch_index» or «stages» need less"
    require_memory("«stages»", asked.needed_bytes, advice)
    problem, selection, results = asked.problem, asked.selection, asked.results()
    asked.gather(results)
    over_keys = [result for stage, result in results.items() if stage.over_keys]
    rows = torch.tensor(selection.rows, dtype=torch.int64)
    lengths = [problem.mask.real_queries(batch) for batch in selection.batches]
    return Computed(
        stages=MappingProxyType({str(s): _values(problem, r) for s, r in results.items()}),
        statistics=MappingProxyType({str(s): r.statistics for s, r in results.items()}),
        visible=_visible(over_keys[0]) if over_keys else None,
        real=rows < torch.tensor(lengths, dtype=torch.int64)[:, None],
        batches=selection.batches,
        heads=selection.heads,
        rows=tuple(selection.rows),
        cost=cost_of(problem),
        problem=problem,
    )


def _values(problem: Problem, result: StageResult) -> torch.Tensor:
    """Its values; where there is no query there was no block, and they are as empty."""
    if result.values is None:
        return torch.empty(result.shape, dtype=problem.dtype)
    return result.values


def _visible(result: StageResult) -> torch.Tensor:
    if result.visible is None:
        return torch.empty(result.shape, dtype=torch.bool)
    return result.visible
