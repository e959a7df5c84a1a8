"""What a problem costs: floating-point operations, and bytes with and without an n×n matrix."""

from __future__ import annotations

from dataclasses import dataclass

from attncli.attention.masks.mask import Mask, head_masks
from attncli.attention.problem import Problem


@dataclass(frozen=True, slots=True)
class Cost:
    """Operations (one multiply-add is two) and bytes of the whole problem, whatever is selected.

    Attributes:
        pairs: B·H·S_q·S_k.
        visible_pairs: those of them that real queries see.
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
    visible = _visible_pairs(problem.mask)
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


def _visible_pairs(mask: Mask) -> int:
    """From the intervals of each batch and head, or counted where a mask file is more than that."""
    found = head_masks(mask)
    alike = mask.sizes.batch * mask.sizes.heads // max(1, len(found))
    return alike * sum(view.marginals.kept for _, _, view in found)
