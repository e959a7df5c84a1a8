"""Statistics of a stage, gathered block by block, and its values where they are few."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from attncli.attention.running import RunningStatistics
from attncli.attention.stages import Block, Stage


@dataclass(slots=True)
class StageResult:
    """One stage for a selection.

    Attributes:
        stage: which stage.
        shape: (batches, heads, rows, columns) of the selection.
        statistics: of its visible cells.
        n_masked: how many of its cells are invisible.
        values: (batches, heads, rows, columns), in the dtype of the arithmetic; None where they
            are too many to keep.
        visible: bool, same shape; None where there are no values or every cell counts.
        real: bool (batches, rows), True for queries that are not padding.
    """

    stage: Stage
    shape: tuple[int, int, int, int]
    statistics: RunningStatistics = field(default_factory=RunningStatistics)
    n_masked: int = 0
    values: torch.Tensor | None = None
    visible: torch.Tensor | None = None
    real: torch.Tensor | None = None
    _seen: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict, repr=False)

    def add(self, block: Block, *, keep: bool) -> None:
        """Take in a block, whose blocks come batch by batch and head by head."""
        real = block.real[:, None].expand(block.values.shape)
        counted = real if block.visible is None else real & block.visible
        self.n_masked += int(real.sum()) - int(counted.sum())
        self.statistics.add(block.values[counted].numpy())
        if not keep:
            return
        if self.values is None:
            self.values = block.values.new_empty(self.shape)
            self.real = torch.ones(self.shape[0], self.shape[2], dtype=torch.bool)
            if block.visible is not None:
                self.visible = torch.ones(self.shape, dtype=torch.bool)
        batch, head = self.place(block)
        rows = slice(block.at, block.at + len(block.rows))
        self.values[batch, head, rows] = block.values
        if self.visible is not None and block.visible is not None:
            self.visible[batch, head, rows] = block.visible
        if self.real is not None:
            self.real[batch, rows] = block.real

    def place(self, block: Block) -> tuple[int, int]:
        """Where the block's batch and head stand among the selected ones."""
        place = len(self._seen)
        fresh = (place // max(1, self.shape[1]), place % max(1, self.shape[1]))
        return self._seen.setdefault((block.batch, block.head), fresh)
