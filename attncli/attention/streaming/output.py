"""The output of every query, in tiles: what `compute` takes where it is all that is asked for."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from attncli.attention.stages import BLOCK_CELLS, Block, Stage, stage_blocks
from attncli.attention.streaming.chosen_heads import chosen_parts, stream_parts
from attncli.attention.streaming.stream import Wanted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attncli.attention.problem import Problem
    from attncli.attention.stages import Selection


def suits_tiles(problem: Problem, stages: Sequence[Stage], selection: Selection) -> bool:
    """Whether nothing but the output of all queries is wanted, and there are many of them.

    A few rows are computed alone, and whoever wants weights as well has whole rows at hand.
    """
    cells = len(selection.rows) * problem.sizes.k_len
    everything = isinstance(selection.rows, range)
    return tuple(stages) == (Stage.OUTPUT,) and everything and cells > BLOCK_CELLS


def output_blocks(problem: Problem, selection: Selection) -> Iterator[Block]:
    """The output of the chosen heads, a block a head; 0 for padded queries.

    Args:
        problem: what to compute; it has values.
        selection: which batches and heads, with all rows.
    """
    pairs = itertools.product(selection.batches, selection.heads)  # in the order asked for
    parts = [part for batch, head in pairs for part in chosen_parts(problem, [batch], [head])]
    rows = range(problem.sizes.q_len)
    for found in stream_parts(parts, Wanted(output=True)):
        assert found.output is not None
        count = len(found.queries)
        values = found.output.new_zeros(len(rows), found.output.shape[1])
        values[:count] = found.output  # real queries come first
        real = torch.arange(len(rows)) < count
        yield Block(Stage.OUTPUT, found.batch, found.head, 0, rows, values.cpu(), None, real)


def blocks_of(
    problem: Problem,
    stages: Sequence[Stage],
    selection: Selection,
    output_projection: torch.Tensor | None = None,
) -> Iterator[Block]:
    """`stage_blocks`, or the same in tiles where those suit."""
    if suits_tiles(problem, stages, selection):
        return output_blocks(problem, selection)
    return stage_blocks(problem, stages, selection, output_projection)
