"""Stages of attention for what a caller selects: gathered once, for files and for Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import itemgetter

from attncli import ranks
from attncli.analysis.options import stages_named
from attncli.attention import stages as attention_stages
from attncli.attention.options import Stage
from attncli.attention.pooling import FIRST_ALONE, edges_of
from attncli.attention.problem import Problem, score_warnings
from attncli.attention.stages import (
    Block,
    PooledMatrix,
    Selection,
    StageResult,
    blocks_of,
    output_blocks,
    pool_blocks,
    rows_of_block,
    select,
    shape_of,
    stage_blocks,
    stages_of,
    suits_tiles,
    visibility,
)
from attncli.attention.steps import OutputProjection

# Arrays of a block that live at once while its stages are computed, measured and copied.
_WORKING_ARRAYS = 8


@dataclass(frozen=True, slots=True)
class StagesAsked:
    """Stages of a problem, and for which of its batches, heads and queries."""

    problem: Problem  # what to compute
    selection: Selection  # for which batches, heads and rows
    stages: tuple[Stage, ...]  # in the order of computation
    output_projection: OutputProjection | None = None  # needed for the stage `projected` alone

    def blocks(self, *stages: Stage) -> Iterator[Block]:
        """The stages, or some of them, block by block."""
        asked = stages or self.stages
        return blocks_of(self.problem, asked, self.selection, self.output_projection)

    def shared_blocks(self) -> Iterator[Block]:
        """The blocks of all stages, those of rows shared out over the ranks; none but at rank 0."""
        rows, problem = self.selection.rows, self.problem
        tiles = suits_tiles(problem, self.stages, self.selection)
        step = len(rows) if tiles else rows_of_block(problem)
        stages = [one for one in self.stages if one.over_keys or one is Stage.OUTPUT]
        places = list(
            product(self.selection.batches, self.selection.heads, range(0, len(rows), step or 1))
        )

        def work(place: tuple[int, int, int], _: slice) -> list[Block]:
            batch, head, at = place
            some = Selection((batch,), (head,), rows[at : at + step])
            blocks = output_blocks(problem, some) if tiles else stage_blocks(problem, stages, some)
            return [replace(block, at=at) for block in blocks]

        for blocks in ranks.in_order(
            places if stages else [], lambda _: [1.0], work, itemgetter(0)
        ):
            yield from blocks
        others = [one for one in self.stages if one not in stages]
        if others and ranks.is_first():
            yield from stage_blocks(problem, others, self.selection, self.output_projection)

    def pooled(
        self, stage: Stage, rows: int, columns: int, *, largest: bool = False, alone: int = 0
    ) -> Iterator[PooledMatrix]:
        """A stage as matrices of at most so many rows and columns, head after head.

        Args:
            stage: one of those asked for.
            rows, columns: of points.
            largest: whether a point is the largest of its cells, not their mean.
            alone: how many of the first columns are points of their own, the first few always.
        """
        *_, height, width = self.results()[stage].shape
        edges = edges_of(height, rows), edges_of(width, columns, max(FIRST_ALONE, alone))
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
        *,
        measure: bool = True,
    ) -> None:
        """Compute every stage once and fill the results.

        Args:
            results: as `results` makes them.
            max_values: the values of larger stages are left out.
            write: is given every block.
            measure: whether statistics are wanted, too; those of kept values can be had later.
        """
        kept = {stage for stage, one in results.items() if math.prod(one.shape) <= max_values}
        over_keys = [
            result for stage, result in results.items() if stage in kept and stage.over_keys
        ]
        visible = visibility(self.problem, self.selection) if over_keys else None
        for result in over_keys:
            result.visible = visible
        for block in self.blocks() if ranks.count() == 1 else self.shared_blocks():
            result = results[block.stage]
            result.add(block, keep=block.stage in kept, measure=measure)
            if write is not None:
                write(result, block)

    @property
    def needed_bytes(self) -> int:
        """Bytes that computing and keeping all values takes, beside the inputs."""
        problem = self.problem
        width, k_len = problem.dtype.itemsize, problem.sizes.k_len
        cells = {stage: math.prod(result.shape) for stage, result in self.results().items()}
        kept = width * sum(cells.values())
        # A byte for each cell's visibility, which stages share.
        kept += max((count for stage, count in cells.items() if stage.over_keys), default=0)
        block_rows = max(1, attention_stages.BLOCK_CELLS // max(1, k_len))
        working = _WORKING_ARRAYS * min(len(self.selection.rows), block_rows) * k_len * width
        return kept + working + k_len * (problem.dk + (problem.dv or 0)) * width


def ask_stages(
    problem: Problem,
    names: Sequence[str] | None,
    *,
    option: str,
    batches: Sequence[int | slice] | None,
    heads: Sequence[int | slice] | None,
    rows: Sequence[int | slice] | None,
    is_projected: bool = False,
    output_projection: OutputProjection | None = None,
) -> StagesAsked:
    """The stages named, for what is selected; None stands for all.

    Args:
        problem: what to compute.
        names: of stages.
        option: where they were named, for messages.
        batches, heads, rows: indices and ranges, negative ones from the end.
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
    named = None if names is None else stages_named(option, names, offered)
    wanted = tuple(stage for stage in offered if named is None or stage in named)
    if Stage.SCORES in wanted and (said := score_warnings(problem)):
        problem = replace(problem, marked_warnings=(*problem.marked_warnings, *said))
    return StagesAsked(problem, selection, wanted, output_projection)
