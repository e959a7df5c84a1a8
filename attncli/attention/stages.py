"""The stages of attention for chosen rows, block by block, with their statistics.

No stage is ever held for all queries and keys: a block is some query rows of one head.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from attncli.attention import steps
from attncli.attention.masks.mask import Mask
from attncli.attention.nonfinite import all_finite
from attncli.attention.options import Stage, stages_there
from attncli.attention.pooling import Edges, Pool
from attncli.attention.problem import Problem
from attncli.attention.sizes import Rows, places
from attncli.attention.statistics import NumberStatistics, RunningStatistics
from attncli.attention.streaming.head_group import may_overflow
from attncli.attention.streaming.stream import stream_outputs
from attncli.attention.threads import product
from attncli.columns import column

# Cells of one block: 2²⁰ float32 are 4 MiB, of which a handful stay in the processor's cache.
BLOCK_CELLS = 1 << 20


_BEFORE_SOFTMAX = (Stage.SCORES, Stage.SCALED, Stage.CAPPED, Stage.MASKED)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which batches, heads and query rows to look at, in the order asked for."""

    batches: tuple[int, ...]
    heads: tuple[int, ...]
    rows: Rows


@dataclass(frozen=True, slots=True)
class Block:
    """Some query rows of one head at one stage."""

    stage: Stage
    batch: int  # indices into the tensors
    head: int
    at: int  # where the first of these rows stands among the selected rows
    rows: Rows  # indices of the queries
    values: torch.Tensor  # (rows, columns), in the dtype of the arithmetic, on the CPU
    visible: torch.Tensor | None  # bool (rows, columns); None where every cell counts
    # Bool (rows,), True for queries that are not padding; the others count for nothing.
    real: torch.Tensor

    @property
    def counted(self) -> torch.Tensor:
        """Bool (rows, columns): the cells that count."""
        real = self.real[:, None].expand(self.values.shape)
        return real if self.visible is None else real & self.visible


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStatistics(NumberStatistics):
    """What stands in the selected, visible cells of one stage; padded queries do not count.

    Attributes:
        n_masked: how many selected cells are invisible.
        n_nan, n_posinf, n_neginf: visible cells that hold NaN, +inf, −inf.
        n_finite: the other visible cells.
        min, max, mean, std: of the finite ones, std of the population; None where there are none.
    """

    n_masked: int = column("masked", description="selected cells that are hidden")


@dataclass(slots=True)
class StageResult:
    """One stage for a selection, measured as its blocks come, or later if its values are kept."""

    stage: Stage
    shape: tuple[int, int, int, int]  # (batches, heads, rows, columns) of the selection
    numbers: RunningStatistics = field(default_factory=RunningStatistics)  # of its visible cells
    n_masked: int = 0  # how many of its cells are invisible
    # (batches, heads, rows, columns), in the dtype of the arithmetic; None where they are too many
    # to keep.
    values: torch.Tensor | None = None
    # Bool, same shape; None where there are no values or every cell counts.
    visible: torch.Tensor | None = None
    real: torch.Tensor | None = None  # bool (batches, rows), True for queries that are not padding
    _is_measured: bool = field(default=False, repr=False)
    _seen: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict, repr=False)

    @property
    def statistics(self) -> StageStatistics:
        """What stands in its visible cells; of kept values, as they are when first asked."""
        if not self._is_measured and self.values is not None and self.real is not None:
            for batch, head in itertools.product(*map(range, self.shape[:2])):
                visible = None if self.visible is None else self.visible[batch, head]
                self._measure(self.values[batch, head], visible, self.real[batch])
        return StageStatistics(**asdict(self.numbers.result), n_masked=self.n_masked)

    def add(self, block: Block, *, keep: bool, measure: bool = True) -> None:
        """Take in a block, whose blocks come batch by batch and head by head."""
        if measure:
            self._measure(block.values, block.visible, block.real)
        if not keep:
            return
        if self.values is None:
            self.values = block.values.new_empty(self.shape)
            self.real = torch.ones(self.shape[0], self.shape[2], dtype=torch.bool)
        batch, head = self.place(block)
        rows = slice(block.at, block.at + len(block.rows))
        self.values[batch, head, rows] = block.values
        if self.real is not None:
            self.real[batch, rows] = block.real

    def _measure(
        self, values: torch.Tensor, visible: torch.Tensor | None, real: torch.Tensor
    ) -> None:
        """Count in rows of one head; arguments as in `Block`."""
        self._is_measured = True
        if visible is None:
            self.numbers.add((values if bool(real.all()) else values[real]).numpy())
            return
        self.n_masked += int(real.sum()) * values.shape[1]
        step = max(1, BLOCK_CELLS // max(1, values.shape[1]))
        for part, seen, there in zip(
            *(torch.split(whole, step) for whole in (values, visible, real)), strict=True
        ):
            numbers = part.numpy()[(seen & there[:, None]).numpy()]
            self.n_masked -= numbers.size
            self.numbers.add(numbers)

    def place(self, block: Block) -> tuple[int, int]:
        """Where the block's batch and head stand among the selected ones."""
        place = len(self._seen)
        fresh = (place // max(1, self.shape[1]), place % max(1, self.shape[1]))
        return self._seen.setdefault((block.batch, block.head), fresh)


def visibility(problem: Problem, selection: Selection) -> torch.Tensor | None:
    """Bool (batches, heads, rows, S_k): what each query sees, which is nothing for padding.

    Batches and heads that are alike share their memory. None where no rule hides any cell.
    """
    mask, rows, k_len = problem.mask_on_device(), selection.rows, problem.sizes.k_len
    if (
        k_len
        and not mask.hides
        and all(bool(_real(mask, b, rows).all()) for b in selection.batches)
    ):
        return None
    batches = selection.batches if mask.differs(0) else selection.batches[:1]
    heads = selection.heads if mask.differs(1) else selection.heads[:1]
    found = torch.ones(len(batches), len(heads), len(rows), k_len, dtype=torch.bool)
    step = max(1, BLOCK_CELLS // max(1, k_len))
    parts = itertools.product(enumerate(batches), enumerate(heads), range(0, len(rows), step))
    for (i, batch), (j, head), at in parts:
        visible = _visible(problem, mask, batch, head, rows[at : at + step])
        if visible is not None:
            found[i, j, at : at + step] = visible
    return found.expand(len(selection.batches), len(selection.heads), -1, -1)


def stages_of(problem: Problem) -> list[Stage]:
    """The stages that this problem has."""
    return stages_there(capped=problem.softcap is not None, with_values=problem.v is not None)


def shape_of(
    problem: Problem,
    stage: Stage,
    selection: Selection,
    output_projection: steps.OutputProjection | None = None,
) -> tuple[int, int, int, int]:
    """(batches, heads, rows, columns) of a stage for a selection."""
    heads, rows = len(selection.heads), len(selection.rows)
    if stage in (Stage.K, Stage.V):
        heads = len({problem.kv_head(head) for head in selection.heads})
        rows = problem.sizes.k_len
    columns = problem.sizes.k_len if stage.over_keys else problem.dv or 0
    if stage in (Stage.Q, Stage.K):
        columns = problem.dk
    if stage is Stage.PROJECTED:
        assert output_projection is not None
        heads, columns = 1, output_projection.weight.shape[1]
    return len(selection.batches), heads, rows, columns


def select(
    problem: Problem,
    batches: Sequence[int | slice] | None = None,
    heads: Sequence[int | slice] | None = None,
    rows: Sequence[int | slice] | None = None,
) -> Selection:
    """Turn indices and ranges as a user gives them into a selection.

    Negative ones count from the end; one that is named twice is taken once.

    Raises:
        UsageError: an index beyond its axis.
    """
    sizes = problem.sizes
    return Selection(
        tuple(places("«batch_index»", batches, sizes.batch)),
        tuple(places("«head_index»", heads, sizes.heads)),
        places("«rows»", rows, sizes.q_len),
    )


def blocks_of(
    problem: Problem,
    stages: Sequence[Stage],
    selection: Selection,
    output_projection: steps.OutputProjection | None = None,
) -> Iterator[Block]:
    """`stage_blocks`, or the same in tiles where those suit."""
    if suits_tiles(problem, stages, selection):
        return output_blocks(problem, selection)
    return stage_blocks(problem, stages, selection, output_projection)


def suits_tiles(problem: Problem, stages: Sequence[Stage], selection: Selection) -> bool:
    """Whether nothing but the output of all queries is wanted, and there are many of them.

    A few rows are computed alone, and whoever wants weights as well has whole rows at hand. Values
    that are not finite are left to whole rows, where they reach only those who see them.
    """
    cells = len(selection.rows) * problem.sizes.k_len
    everything = isinstance(selection.rows, range)
    if tuple(stages) != (Stage.OUTPUT,) or not everything or cells <= BLOCK_CELLS:
        return False
    return problem.v is not None and all_finite(problem.v)


def output_blocks(problem: Problem, selection: Selection) -> Iterator[Block]:
    """The output of the chosen heads in tiles, a block a head; 0 for padded queries.

    Args:
        problem: what to compute; it has values, all finite.
        selection: which batches and heads, with all rows.
    """
    rows = range(problem.sizes.q_len)
    found = stream_outputs(problem, batches=selection.batches, heads=selection.heads)
    for batch, head, output in found:
        count = len(output)
        values = output.new_zeros(len(rows), output.shape[1])
        values[:count] = output  # real queries come first
        real = torch.arange(len(rows)) < count
        yield Block(Stage.OUTPUT, batch, head, 0, rows, values.cpu(), None, real)


def stage_blocks(
    problem: Problem,
    stages: Sequence[Stage],
    selection: Selection,
    output_projection: steps.OutputProjection | None = None,
) -> Iterator[Block]:
    """Compute stages for the selection, one head and some query rows at a time.

    Args:
        problem: what to compute.
        stages: some that `stages_of` the problem lists.
        selection: which batches, heads and rows.
        output_projection: needed for the stage `projected` alone.

    Yields:
        For each batch, head and run of rows a block per stage, in the order of `stages`; those
        that are not over queries and keys (q, k, v, projected) come after the others.
    """
    mask, step = problem.mask_on_device(), rows_of_block(problem)
    by_rows = [stage for stage in stages if stage.over_keys or stage is Stage.OUTPUT]
    for batch, head in itertools.product(selection.batches, selection.heads) if by_rows else ():
        inputs = _HeadInputs.of(problem, batch, head)
        for at in range(0, len(selection.rows), step):
            rows = selection.rows[at : at + step]
            values, visible = _compute(problem, inputs, by_rows, rows, mask)
            real = _real(mask, batch, rows)
            for stage in by_rows:
                seen = visible if stage.over_keys else None
                yield Block(stage, batch, head, at, rows, values[stage], seen, real)
    for stage in stages:
        if stage in (Stage.Q, Stage.K, Stage.V):
            yield from _input_blocks(problem, stage, selection, mask)
        elif stage is Stage.PROJECTED:
            assert output_projection is not None  # the stage is offered only where it is given
            yield from _projected_blocks(problem, selection, mask, output_projection, step)


def rows_of_block(problem: Problem) -> int:
    """How many query rows of a head `stage_blocks` computes at once."""
    return max(1, BLOCK_CELLS // max(1, problem.sizes.k_len))


@dataclass(frozen=True, slots=True)
class _HeadInputs:
    """One head of Q, K and V, in the dtype and on the device of the arithmetic."""

    batch: int
    head: int
    q: torch.Tensor  # (S_q, d_k), still as it came: only the rows in hand are cast
    k: torch.Tensor  # (S_k, d_k)
    v: torch.Tensor | None  # (S_k, d_v)
    shrink: float  # what queries are multiplied by where products overflow; 1 elsewhere

    @classmethod
    def of(cls, problem: Problem, batch: int, head: int) -> _HeadInputs:
        shared, q = problem.kv_head(head), problem.q[batch, head]
        v = None if problem.v is None else problem.cast(problem.v[batch, shared])
        k = problem.cast(problem.k[batch, shared])
        factor = problem.scale_of(head) / problem.temperature
        shrink = steps.shrink_for(factor, k.dtype) if may_overflow(q, k, 1.0) else 1.0
        return cls(batch, head, q, k, v, shrink)


def _compute(
    problem: Problem, inputs: _HeadInputs, stages: Sequence[Stage], rows: Rows, mask: Mask
) -> tuple[dict[Stage, torch.Tensor], torch.Tensor | None]:
    """Values (rows, columns) of each stage, and visibility as in `Block`, all on the CPU."""
    index = _index(rows, problem.device)
    batch, head = slice(inputs.batch, inputs.batch + 1), slice(inputs.head, inputs.head + 1)
    visible = _visible(problem, mask, inputs.batch, inputs.head, rows)
    bias = mask.bias(batch, head, index, slice(None))
    q, scale = problem.cast(inputs.q[_index(rows, inputs.q.device)]), problem.scale_of(inputs.head)
    scaled = None
    if inputs.shrink != 1.0:
        shrunk = product(q * inputs.shrink, inputs.k.T)
        scaled = shrunk * (scale / inputs.shrink) / problem.temperature
    found = steps.logits(
        product(q, inputs.k.T),  # (rows, S_k)
        scale=scale,
        temperature=problem.temperature,
        softcap=problem.softcap,
        visible=torch.ones((1, 1), dtype=torch.bool) if visible is None else visible,
        bias=None if bias is None else bias[0, 0],
        scaled=scaled,
    )
    values = {stage: getattr(found, stage) for stage in stages if stage in _BEFORE_SOFTMAX}
    if len(values) < len(stages):
        sink = None if problem.sinks is None else problem.cast(problem.sinks[inputs.head])
        weights = steps.softmax(found.masked, found.visible, sink).weights
        values[Stage.WEIGHTS] = weights
        if inputs.v is not None and Stage.OUTPUT in stages:
            values[Stage.OUTPUT] = steps.weighted_sum(weights, inputs.v, found.visible)
    on_host = {stage: value.cpu() for stage, value in values.items()}
    return on_host, None if visible is None else found.visible.cpu()


def _visible(
    problem: Problem, mask: Mask, batch: int, head: int, rows: Rows
) -> torch.Tensor | None:
    """Bool (rows, S_k | 1) on the device: padding sees nothing; None where nothing is hidden."""
    real = _real(mask, batch, rows)
    if not mask.hides and bool(real.all()):
        return None
    place = slice(batch, batch + 1), slice(head, head + 1), _index(rows, problem.device)
    visible: torch.Tensor = mask.visible(*place, slice(None))[0, 0]
    return visible & real[:, None].to(visible.device)


def _input_blocks(
    problem: Problem, stage: Stage, selection: Selection, mask: Mask
) -> Iterator[Block]:
    """Q for the selected rows, or all keys or values of the heads that the selection uses."""
    tensor = getattr(problem, stage)
    shared = dict.fromkeys(problem.kv_head(head) for head in selection.heads)
    rows = selection.rows if stage is Stage.Q else range(problem.sizes.k_len)
    for batch in selection.batches:
        everything = torch.ones(len(rows), dtype=torch.bool)
        real = _real(mask, batch, rows) if stage is Stage.Q else everything
        for head in selection.heads if stage is Stage.Q else shared:
            values = problem.cast(tensor[batch, head][_index(rows, tensor.device)]).cpu()
            yield Block(stage, batch, head, 0, rows, values, None, real)


def _projected_blocks(
    problem: Problem,
    selection: Selection,
    mask: Mask,
    projection: steps.OutputProjection,
    step: int,
) -> Iterator[Block]:
    """The output of all heads together, projected; its one head is called 0."""
    for batch in selection.batches:
        inputs = [_HeadInputs.of(problem, batch, head) for head in range(problem.sizes.heads)]
        for at in range(0, len(selection.rows), step):
            rows = selection.rows[at : at + step]
            parts = [_compute(problem, one, [Stage.OUTPUT], rows, mask)[0] for one in inputs]
            output = torch.stack([part[Stage.OUTPUT] for part in parts])[None]  # (1, H, rows, d_v)
            values = steps.project_output(output, projection)[0, 0]  # (rows, d)
            yield Block(Stage.PROJECTED, batch, 0, at, rows, values, None, _real(mask, batch, rows))


def _real(mask: Mask, batch: int, rows: Rows) -> torch.Tensor:
    """Bool (rows,): which of the queries are not padding."""
    real = mask.real_queries(batch)
    return torch.tensor([row < real for row in rows], dtype=torch.bool)


def _index(rows: Rows, device: torch.device) -> slice | torch.Tensor:
    if isinstance(rows, range):
        return slice(rows.start, rows.stop)
    return torch.tensor(rows, dtype=torch.int64, device=device)


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
