"""What a problem costs: floating-point operations, and bytes with and without an n×n matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attncli.attention.streaming.intervals import as_intervals

if TYPE_CHECKING:
    from attncli.attention.problem import Problem


@dataclass(frozen=True, slots=True)
class Cost:
    """Operations (one multiply-add is two) and bytes of the whole problem, whatever is selected.

    Attributes:
        pairs: B·H·S_q·S_k.
        visible_pairs: those of real queries that the mask's intervals leave; a mask file, and
            padding or documents that are no intervals, may hide more.
        scores_operations: 2·pairs·d_k.
        output_operations: 2·pairs·d_v; 0 without values.
        visible_operations: both, for the visible pairs alone: what a kernel that skips needs.
        softmax_exponentials: one per pair.
        input_bytes: Q, K and V in the dtype of the arithmetic.
        matrix_bytes: one (B, H, S_q, S_k) matrix in that dtype.
        streamed_bytes: what is kept beside the inputs when it is never built: the output and a
            maximum and a sum per row.
    """

    pairs: int
    visible_pairs: int
    scores_operations: int
    output_operations: int
    visible_operations: int
    softmax_exponentials: int
    input_bytes: int
    matrix_bytes: int
    streamed_bytes: int


def cost_of(problem: Problem) -> Cost:
    """Count what the problem costs, by 2·S_q·S_k·d_k for the scores and 2·S_q·S_k·d_v after."""
    sizes, width = problem.sizes, problem.dtype.itemsize
    dv = problem.dv or 0
    pairs = sizes.batch * sizes.heads * sizes.q_len * sizes.k_len
    visible = _visible_pairs(problem)
    tensors = [problem.q, problem.k] + ([] if problem.v is None else [problem.v])
    rows = sizes.batch * sizes.heads * sizes.q_len
    return Cost(
        pairs=pairs,
        visible_pairs=visible,
        scores_operations=2 * pairs * problem.dk,
        output_operations=2 * pairs * dv,
        visible_operations=2 * visible * (problem.dk + dv),
        softmax_exponentials=pairs,
        input_bytes=width * sum(tensor.numel() for tensor in tensors),
        matrix_bytes=width * pairs,
        streamed_bytes=width * rows * (dv + 2),
    )


def _visible_pairs(problem: Problem) -> int:
    sizes, mask = problem.sizes, as_intervals(problem.mask)
    real = np.arange(sizes.q_len) < mask.query_lengths[:, None]  # (B | 1, S_q)
    kept = np.where(real, mask.stop - mask.first, 0)
    return int(kept.sum()) * sizes.heads * sizes.batch // len(kept)
