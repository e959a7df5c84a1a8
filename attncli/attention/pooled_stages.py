"""Stages of any size as matrices that a terminal has room for, pooled as they are computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from attncli.attention.pooling import Edges, Pool
from attncli.attention.stages import Block, Stage


@dataclass(frozen=True, slots=True)
class PooledMatrix:
    """One matrix of one head, of which each point stands for a rectangle of cells.

    Attributes:
        stage: which stage.
        batch, head: indices into the tensors.
        values: float64 (R, C), the mean or the largest of the finite cells. A weight that the mask
            hides is one of 0; of masked scores hidden ones are left out. NaN where nothing is left.
        hidden: bool (R, C), True where every cell is hidden by the mask or of padding; before the
            mask none is hidden.
        keys_seen: float64 (R,), how many cells of a row are not hidden, on average.
        nonfinite: cells that were left out since they are NaN or infinite.
        row_edges: int64 (R + 1,), where runs begin and end among the selected rows.
        column_edges: int64 (C + 1,), likewise among the columns.
    """

    stage: Stage
    batch: int
    head: int
    values: NDArray[np.float64]
    hidden: NDArray[np.bool_]
    keys_seen: NDArray[np.float64]
    nonfinite: int
    row_edges: Edges
    column_edges: Edges

    @property
    def cells_a_point(self) -> tuple[int, int]:
        """Rows and columns of the largest rectangle."""
        rows, columns = (np.diff(edges) for edges in (self.row_edges, self.column_edges))
        return int(rows.max(initial=0)), int(columns.max(initial=0))


def pool_blocks(
    blocks: Iterable[Block], row_edges: Edges, column_edges: Edges, *, largest: bool = False
) -> Iterator[PooledMatrix]:
    """Pool the blocks of one stage as they come; no more than a block is held of a matrix.

    Args:
        blocks: of one stage, head after head.
        row_edges, column_edges: as `edges_of` gives them.
        largest: whether a point is the largest of its cells, not their mean.
    """
    for (batch, head), of_head in groupby(blocks, lambda block: (block.batch, block.head)):
        cells = Pool.over(row_edges, column_edges)
        seen_cells = Pool.over(row_edges, column_edges)
        nonfinite = 0
        for block in of_head:
            stage, values = block.stage, block.values.numpy()
            real = np.broadcast_to(block.real.numpy()[:, None], values.shape)
            hides = block.visible is not None and stage in (Stage.MASKED, Stage.WEIGHTS)
            seen = real & block.visible.numpy() if hides and block.visible is not None else real
            counted = real if stage is Stage.WEIGHTS else seen
            rows = np.arange(block.at, block.at + len(values))
            cells.add(rows, values, counted)
            seen_cells.add(rows, seen)
            nonfinite += int((counted & ~np.isfinite(values)).sum())
        yield PooledMatrix(
            stage,
            batch,
            head,
            np.where(cells.counts > 0, cells.peaks if largest else cells.means, np.nan),
            seen_cells.sums == 0,
            seen_cells.sums.sum(1) / np.diff(row_edges),
            nonfinite,
            row_edges,
            column_edges,
        )
