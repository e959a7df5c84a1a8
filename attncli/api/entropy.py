"""`attncli.entropy`: what every head does, in memory that grows with the length alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Unpack

import torch

from attncli.analysis.entropy import measure, thresholds_of
from attncli.api.arguments import as_problem
from attncli.api.keywords import OptionKeywords, TensorLike, as_indices, as_options
from attncli.attention.options import Layout, Precision
from attncli.attention.problem import Problem
from attncli.attention.stages import select
from attncli.attention.streaming.heads import HeadStatistics
from attncli.attention.streaming.stream import HeadRows, Wanted
from attncli.columns import columns_of
from attncli.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Entropies:
    """What the chosen heads of one attention problem do.

    Attributes:
        heads: one record per batch and head, batches first, in the order asked for.
        rows: the rows of each of them as tensors on the device of the arithmetic, with `received`,
            the mass of each key, if that was asked for; None unless either was.
        batches, head_indices: what was selected, as indices into the tensors.
        problem: the checked input: sizes, scale, mask, dtype and device of the arithmetic.
    """

    heads: tuple[HeadStatistics, ...]
    rows: tuple[HeadRows, ...] | None
    batches: tuple[int, ...]
    head_indices: tuple[int, ...]
    problem: Problem

    def column(self, name: str) -> torch.Tensor:
        """One number of all heads, float64 (batches, heads) on the CPU; NaN for none.

        Args:
            name: a column of `HeadStatistics` that holds numbers, such as "entropy_bits_mean".

        Raises:
            UsageError: it does not.
        """
        offered = [each.key for each in columns_of(HeadStatistics) if each.key != "label"]
        if name not in offered:
            raise UsageError("name", f"expected one of {', '.join(offered)}, got {name!r}")
        values = [getattr(head, name) for head in self.heads]
        known = [float("nan") if value is None else float(value) for value in values]
        shape = (len(self.batches), len(self.head_indices))
        return torch.tensor(known, dtype=torch.float64).reshape(shape)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was assumed, and what looks like a mistake."""
        return self.problem.warnings


@torch.no_grad()
def entropy(
    q: TensorLike,
    k: TensorLike,
    v: TensorLike = None,
    *,
    per_row: bool = False,
    per_key: bool = False,
    sink_keys: int = 1,
    label_limits: Mapping[str, float] | None = None,
    head_index: int | Sequence[int] | None = None,
    batch_index: int | Sequence[int] | None = None,
    layout: Layout | str = Layout.BHSD,
    heads: int | None = None,
    kv_heads: int | None = None,
    precision: Precision | str = Precision.AUTO,
    device: str | None = None,
    allow_nonfinite: bool = False,
    **options: Unpack[OptionKeywords],
) -> Entropies:
    """Measure every head, or chosen ones, without ever holding S_q × S_k numbers.

    Nothing is recorded for gradients, so that it may be called inside a training loop.

    >>> found = attncli.entropy([[0.0], [0.0]], [[1.0], [2.0]], causal=True)
    >>> found.heads[0].entropy_bits_mean
    0.5
    >>> found.column("max_weight_mean")
    tensor([[0.7500]], dtype=torch.float64)

    Args:
        q, k, layout, heads, kv_heads, precision, allow_nonfinite: as for `attncli.compute`.
        v: likewise; checked, but it has no influence.
        per_row: whether to keep the statistics of every row.
        per_key: whether to compute the mass that every key receives; costs a second pass.
        sink_keys: how many of the first keys the sink mass is the weight of.
        label_limits: score from which on a head gets a label, by its name ("previous-token").
        head_index: query heads to compute, negative ones counted from the end; None for all.
        batch_index: batches, likewise.
        device: "auto", "cpu", "cuda" or "cuda:N"; None means where q is.
        options: any field of `AttentionOptions`: causal=True, attn_mask=mask, key_lengths=[5, 3], …

    Raises:
        DataError: shapes that do not fit each other, or NaN and inf that are not allowed.
        UsageError: options that make no sense, or do not fit the shapes.
        ResourceError: a device that is not there.
    """
    thresholds = thresholds_of(label_limits or {}, "label_limits")
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
    selection = select(problem, as_indices(batch_index), as_indices(head_index))
    wanted = Wanted(top_key=per_row, per_key=per_key, sink_keys=sink_keys)
    found, kept = [], []
    for rows, statistics in measure(problem, selection, wanted, thresholds):
        found.append(statistics)
        if per_row or per_key:
            kept.append(rows)
    return Entropies(
        heads=tuple(found),
        rows=tuple(kept) if per_row or per_key else None,
        batches=selection.batches,
        head_indices=selection.heads,
        problem=problem,
    )
