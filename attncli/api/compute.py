"""`attncli.compute`: every stage of attention as tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Unpack

import torch

from attncli.api.arguments import as_problem
from attncli.api.keywords import OptionKeywords, TensorLike, as_indices, as_options
from attncli.attention import stages as attention_stages
from attncli.attention.cost import Cost, cost_of
from attncli.attention.options import Layout, Precision
from attncli.attention.problem import Problem
from attncli.attention.stage_statistics import StageResult
from attncli.attention.stages import (
    Selection,
    Stage,
    blocks_of,
    select,
    shape_of,
    stages_of,
)
from attncli.errors import ResourceError, UsageError
from attncli.files.limits import available_memory
from attncli.files.text import size_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Arrays of a block that live at once while its stages are computed, measured and copied.
_WORKING_ARRAYS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStatistics:
    """What stands in the selected, visible cells of one stage; padded queries do not count.

    Attributes:
        n_masked: how many selected cells are invisible.
        n_nan, n_posinf, n_neginf: visible cells that hold NaN, +inf, −inf.
        min, max, mean, std: of the finite ones, std of the population; None where there are none.
    """

    n_masked: int
    n_nan: int
    n_posinf: int
    n_neginf: int
    min: float | None
    max: float | None
    mean: float | None
    std: float | None


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


def compute(
    q: TensorLike,
    k: TensorLike,
    v: TensorLike = None,
    *,
    stages: str | Sequence[str] | None = None,
    rows: int | Sequence[int] | None = None,
    head_index: int | Sequence[int] | None = None,
    batch_index: int | Sequence[int] | None = None,
    layout: Layout | str = Layout.BHSD,
    heads: int | None = None,
    kv_heads: int | None = None,
    precision: Precision | str = Precision.AUTO,
    device: str = "auto",
    allow_nonfinite: bool = False,
    **options: Unpack[OptionKeywords],
) -> Computed:
    """Compute attention stage by stage, for everything or for chosen batches, heads and queries.

    >>> result = attncli.compute([[2.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]], [[0.0], [1.0]], scale=1)
    >>> result.stages["weights"]
    tensor([[[[0.8808, 0.1192]]]], dtype=torch.float64)
    >>> result.stages["output"].item()
    0.11920292202211755
    >>> result.statistics["scaled"].max
    2.0

    Args:
        q: (S_q, d_k), (H, S_q, d_k) or (B, H, S_q, d_k), or as `layout` says: a torch tensor, a
            NumPy array or nested lists, of any real dtype.
        k: like q, with S_k in the place of S_q and H_kv in the place of H.
        v: like k, with d_v in the place of d_k; None leaves out the stage `output`.
        stages: some of `scores`, `scaled`, `capped`, `masked`, `weights`, `output`; None for all
            that there are. A stage over keys takes batches × heads × rows × S_k numbers.
        rows: queries to compute, negative ones counted from the end; None for all.
        head_index: query heads, likewise.
        batch_index: batches, likewise.
        layout: "bhsd", "bshd" for (B, S, H, d), or "bsh" for packed (B, S, H·d).
        heads: H, needed where the layout packs heads, checked elsewhere.
        kv_heads: H_kv, likewise; None means `heads`.
        precision: dtype of the arithmetic: "float32", "float64", or "auto", which is float64
            for float64 input or up to 2²⁶ scores.
        device: "auto", "cpu", "cuda" or "cuda:N".
        allow_nonfinite: whether NaN and inf in Q, K and V are let through, as IEEE says.
        options: any field of `AttentionOptions`: causal=True, attn_mask=mask, key_lengths=[5, 3], …

    Raises:
        DataError: shapes that do not fit each other, or NaN and inf that are not allowed.
        UsageError: options that make no sense, or do not fit the shapes.
        ResourceError: a device that is not there, or more memory than there is.
    """
    problem = as_problem(
        q,
        k,
        v,
        as_options(options),
        layout=layout,
        heads=heads,
        kv_heads=kv_heads,
        precision=precision,
        device=device,
        allow_nonfinite=allow_nonfinite,
    )
    chosen = select(problem, as_indices(batch_index), as_indices(head_index), as_indices(rows))
    wanted = _wanted(problem, stages)
    _refuse_too_large(problem, chosen, wanted)
    return _gather(problem, chosen, wanted)


def needed_bytes(problem: Problem, selection: Selection, stages: Sequence[Stage]) -> int:
    """Bytes that computing and keeping stages of a selection takes, beside the inputs."""
    width, k_len = problem.dtype.itemsize, problem.sizes.k_len
    kept = 0
    for stage in stages:
        cells = math.prod(shape_of(problem, stage, selection))
        kept += cells * (width + 1 if stage.over_keys else width)  # a byte for its visibility
    rows = min(len(selection.rows), max(1, attention_stages.BLOCK_CELLS // max(1, k_len)))
    working = _WORKING_ARRAYS * rows * k_len * width
    one_head = k_len * (problem.dk + (problem.dv or 0)) * width
    return kept + working + one_head


def _wanted(problem: Problem, stages: str | Sequence[str] | None) -> list[Stage]:
    offered = stages_of(problem)
    names = [stages] if isinstance(stages, str) else stages
    for name in names or ():
        if name not in offered:
            there = ", ".join(offered)
            raise UsageError("stages", f"expected some of {there} for these inputs, got {name!r}")
    return [stage for stage in offered if names is None or stage in names]


def _refuse_too_large(problem: Problem, selection: Selection, stages: Sequence[Stage]) -> None:
    need, free = needed_bytes(problem, selection, stages), available_memory()
    if free is not None and need > free:
        raise ResourceError(
            "stages",
            f"expected at most {size_text(free)}, which is available, got {size_text(need)}",
            "fewer rows, head_index, batch_index or stages need less",
        )


def _gather(problem: Problem, selection: Selection, stages: Sequence[Stage]) -> Computed:
    results = {stage: StageResult(stage, shape_of(problem, stage, selection)) for stage in stages}
    for block in blocks_of(problem, stages, selection):
        results[block.stage].add(block, keep=True)
    visible = [found for stage, found in results.items() if stage.over_keys]
    return Computed(
        stages=MappingProxyType({str(s): _values(problem, r) for s, r in results.items()}),
        statistics=MappingProxyType({str(s): _statistics(r) for s, r in results.items()}),
        visible=_visible(visible[0]) if visible else None,
        real=_real(problem, selection),
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


def _statistics(result: StageResult) -> StageStatistics:
    found = result.statistics
    return StageStatistics(
        n_masked=result.n_masked,
        n_nan=found.n_nan,
        n_posinf=found.n_posinf,
        n_neginf=found.n_neginf,
        min=found.minimum if found.count else None,
        max=found.maximum if found.count else None,
        mean=found.mean,
        std=found.std,
    )


def _real(problem: Problem, selection: Selection) -> torch.Tensor:
    """Bool (batches, rows): which of the selected queries are not padding."""
    rows = torch.tensor(selection.rows, dtype=torch.int64)
    lengths = [problem.mask.real_queries(batch) for batch in selection.batches]
    return rows < torch.tensor(lengths, dtype=torch.int64)[:, None]
