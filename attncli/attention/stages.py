"""The stages of attention for chosen rows, block by block, with their statistics.

No stage is ever held for all queries and keys: a block is some query rows of one head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from attncli.attention import steps
from attncli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attncli.attention.mask import Mask
    from attncli.attention.problem import Problem

# Cells of one block: 2²² float64 are 32 MiB, and a handful of such arrays live at once.
BLOCK_CELLS = 1 << 22


class Stage(StrEnum):
    """The stages, in the order in which they are computed."""

    Q = "q"
    K = "k"
    V = "v"
    SCORES = "scores"
    SCALED = "scaled"
    CAPPED = "capped"
    MASKED = "masked"
    WEIGHTS = "weights"
    OUTPUT = "output"
    PROJECTED = "projected"

    @property
    def over_keys(self) -> bool:
        """Whether its columns are keys, so that cells may be invisible."""
        return self in (Stage.SCORES, Stage.SCALED, Stage.CAPPED, Stage.MASKED, Stage.WEIGHTS)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which batches, heads and query rows to look at, in the order asked for."""

    batches: tuple[int, ...]
    heads: tuple[int, ...]
    rows: tuple[int, ...] | range


@dataclass(frozen=True, slots=True)
class Block:
    """Some query rows of one head at one stage.

    Attributes:
        batch, head: indices into the tensors.
        at: where the first of these rows stands among the selected rows.
        rows: indices of the queries.
        values: (rows, columns), in the dtype of the arithmetic, on the CPU.
        visible: bool (rows, columns); None where every cell counts.
        real: how many of the rows, from the first, are not padding; the rest count for nothing.
    """

    batch: int
    head: int
    at: int
    rows: tuple[int, ...] | range
    values: torch.Tensor
    visible: torch.Tensor | None
    real: torch.Tensor


@dataclass(slots=True)
class StageStatistics:
    """Running statistics of the cells of a stage.

    min, max, mean and std (population) are of the finite visible cells, and None where there are
    none; the counts say what the others were. Blocks are combined by their centred sums, so that
    large means do not cancel.

    Source: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm" (1979).
    """

    n_masked: int = 0
    n_nan: int = 0
    n_posinf: int = 0
    n_neginf: int = 0
    count: int = 0
    minimum: float = math.inf
    maximum: float = -math.inf
    _mean: float = field(default=0.0, repr=False)
    _squares: float = field(default=0.0, repr=False)

    def add(self, block: Block) -> None:
        """Take in the cells of one block."""
        real = block.real[:, None].expand(block.values.shape)
        counted = real if block.visible is None else real & block.visible
        self.n_masked += int(real.sum()) - int(counted.sum())
        self.add_values(block.values[counted])

    def add_values(self, cells: torch.Tensor) -> None:
        """Take in a flat tensor of visible cells."""
        self.n_nan += int(torch.isnan(cells).sum())
        self.n_posinf += int(torch.isposinf(cells).sum())
        self.n_neginf += int(torch.isneginf(cells).sum())
        finite = cells[torch.isfinite(cells)].to(torch.float64)
        if finite.numel() == 0:
            return
        mean = float(finite.mean())
        squares = float((finite - mean).square().sum())
        total = self.count + finite.numel()
        shift = mean - self._mean
        self._squares += squares + shift * shift * self.count * finite.numel() / total
        self._mean += shift * finite.numel() / total
        self.count = total
        self.minimum = min(self.minimum, float(finite.min()))
        self.maximum = max(self.maximum, float(finite.max()))

    @property
    def mean(self) -> float | None:
        """Mean of the finite visible cells."""
        return self._mean if self.count else None

    @property
    def std(self) -> float | None:
        """Population standard deviation of the finite visible cells."""
        return math.sqrt(self._squares / self.count) if self.count else None


def stages_of(problem: Problem) -> list[Stage]:
    """The stages that this problem has."""
    found = [Stage.SCORES, Stage.SCALED]
    if problem.softcap is not None:
        found.append(Stage.CAPPED)
    found += [Stage.MASKED, Stage.WEIGHTS]
    return found if problem.v is None else [*found, Stage.OUTPUT]


def columns_of(problem: Problem, stage: Stage) -> int:
    """How many columns a stage of this problem has."""
    return problem.sizes.k_len if stage.over_keys else problem.dv or 0


def select(
    problem: Problem,
    batches: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
) -> Selection:
    """Turn indices as a user gives them, negative ones counting from the end, into a selection.

    Raises:
        UsageError: an index beyond its axis.
    """
    sizes = problem.sizes
    return Selection(
        tuple(_indices("--batch-index", batches, sizes.batch)),
        tuple(_indices("--head-index", heads, sizes.heads)),
        _indices("--rows", rows, sizes.q_len),
    )


def stage_blocks(problem: Problem, stage: Stage, selection: Selection) -> Iterator[Block]:
    """Compute one stage for the selection, one head and some rows at a time.

    Args:
        problem: what to compute.
        stage: one that `stages_of` the problem lists.
        selection: which batches, heads and rows.
    """
    mask = problem.mask.to_torch(problem.device)
    step = max(1, BLOCK_CELLS // max(1, problem.sizes.k_len))
    for batch in selection.batches:
        real = mask.real_queries(batch)
        for head in selection.heads:
            inputs = _HeadInputs.of(problem, batch, head)
            for at in range(0, len(selection.rows), step):
                rows = selection.rows[at : at + step]
                values, visible = _compute(problem, inputs, stage, rows, mask)
                yield Block(
                    batch,
                    head,
                    at,
                    rows,
                    values.cpu(),
                    visible.cpu() if stage.over_keys else None,
                    torch.tensor([row < real for row in rows], dtype=torch.bool),
                )


@dataclass(frozen=True, slots=True)
class _HeadInputs:
    """One head of Q, K and V, in the dtype and on the device of the arithmetic."""

    batch: int
    head: int
    q: torch.Tensor  # (S_q, d_k), still as it came: only the rows in hand are cast
    k: torch.Tensor  # (S_k, d_k)
    v: torch.Tensor | None  # (S_k, d_v)

    @classmethod
    def of(cls, problem: Problem, batch: int, head: int) -> _HeadInputs:
        shared = problem.kv_head(head)
        v = None if problem.v is None else problem.cast(problem.v[batch, shared])
        k = problem.cast(problem.k[batch, shared])
        return cls(batch, head, problem.q[batch, head], k, v)


def _compute(
    problem: Problem,
    inputs: _HeadInputs,
    stage: Stage,
    rows: tuple[int, ...] | range,
    mask: Mask,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values (rows, columns) of one stage, and visibility (rows, S_k)."""
    index = slice(rows.start, rows.stop) if isinstance(rows, range) else torch.tensor(rows)
    batch, head = slice(inputs.batch, inputs.batch + 1), slice(inputs.head, inputs.head + 1)
    visible = mask.visible(batch, head, index, slice(None))[0, 0]  # (rows, S_k)
    bias = mask.bias(batch, head, index, slice(None))
    found = steps.logits(
        problem.cast(inputs.q[index]),
        inputs.k,
        scale=problem.scale,
        temperature=problem.temperature,
        softcap=problem.softcap,
        visible=visible,
        bias=None if bias is None else bias[0, 0],
    )
    if stage not in (Stage.WEIGHTS, Stage.OUTPUT):
        return getattr(found, stage), found.visible
    sink = None if problem.sinks is None else problem.cast(problem.sinks[inputs.head])
    weights = steps.softmax(found.masked, found.visible, sink).weights
    if stage is Stage.WEIGHTS:
        return weights, found.visible
    assert inputs.v is not None  # `stages_of` lists the output only where there are values
    return steps.weighted_sum(weights, inputs.v, found.visible), found.visible


def _indices(option: str, wanted: Sequence[int] | None, length: int) -> tuple[int, ...] | range:
    if wanted is None:
        return range(length)
    for index in wanted:
        if not -length <= index < length:
            limits = f"from {-length} to {length - 1}" if length else "none, the axis is empty"
            raise UsageError(option, f"expected an index {limits}, got {index}")
    return tuple(index % length for index in wanted)
