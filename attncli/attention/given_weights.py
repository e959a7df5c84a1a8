"""Attention weights that someone else has computed, without the Q and K that they are of.

Their logarithms are logits that the same softmax leads to, so everything that is known of rows by
their logits is known of them too, but for what a constant along the row would change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attncli.attention.masks.build import build_mask
from attncli.attention.masks.mask import Mask
from attncli.attention.options import BEFORE_WEIGHTS, AttentionOptions, Precision
from attncli.attention.problem import (
    GivenWeights,
    Problem,
    choose_device,
    compute_dtype,
    refuse_nonfinite,
)
from attncli.attention.sizes import Sizes
from attncli.errors import DataError, UsageError

# How far from 1 a row may be without a word, whatever the dtype: programs round on the way.
ROW_SUM_TOLERANCE = 1e-4
# Dropout doubles a row at times, and no habit makes it three times as large.
MOST_OF_A_ROW = 3.0
# The share of visible cells without weight from which on it is worth a sentence.
MANY_ZEROS = 0.1
BLOCK_CELLS = 1 << 22


def problem_of_weights(
    weights: torch.Tensor,
    options: AttentionOptions,
    *,
    precision: Precision = Precision.AUTO,
    device: str = "auto",
    allow_nonfinite: bool = False,
) -> Problem:
    """Check weights, row by row.

    Where no option hides keys, those of weight 0 count as hidden.

    Args:
        weights: (S_q, S_k), (H, S_q, S_k) or (B, H, S_q, S_k).
        options: what is known of the mask, and where queries stand.
        precision: dtype of the arithmetic.
        device: "auto", "cpu", "cuda" or "cuda:N".
        allow_nonfinite: whether NaN and inf are let through.

    Raises:
        DataError: no weights: another rank, negative values, sums far from 1, or NaN and inf that
            are not allowed.
        UsageError: options that do not fit the shapes, or that weights have behind them.
        ResourceError: a device that is not there.
    """
    for name in BEFORE_WEIGHTS:
        value = getattr(options, name)
        if value is not None and value is not False and not (name == "temperature" and value == 1):
            behind = "it has shaped them already"
            raise UsageError(f"«{name}»", f"expected nothing beside «weights», got it; {behind}")
    whole = _as_rank_4(weights)
    if not allow_nonfinite:
        refuse_nonfinite(whole, "weights")
    sizes = Sizes(*whole.shape)
    mask = build_mask(options, sizes)
    seen = _examined(whole, mask)
    nothing = whole.new_zeros(1, dtype=torch.float32)
    return Problem(
        q=nothing.expand(*whole.shape[:3], 1),
        k=nothing.expand(*whole.shape[:2], sizes.k_len, 1),
        v=None,
        mask=mask,
        scale=1.0,
        temperature=1.0,
        softcap=None,
        sinks=None,
        dtype=compute_dtype(precision, [whole.dtype], sizes),
        device=choose_device(device),
        marked_warnings=(*_judged(seen, whole, mask), *mask.warnings),
        given=GivenWeights(whole, seen.lowest, seen.highest, zeros_hidden=not mask.hides),
    )


@dataclass(frozen=True, slots=True)
class _Seen:
    """What stands in the rows of real queries that are not empty.

    Attributes:
        lowest, highest: of the sums of rows; None where there are none.
        columns_off: how far from 1 the sums of columns are at most.
        on_hidden: the most that a row gives to keys which the mask hides.
        zeros: visible cells of weight 0, as a share of all visible ones.
    """

    lowest: float | None
    highest: float | None
    columns_off: float
    on_hidden: float
    zeros: float


def _as_rank_4(weights: torch.Tensor) -> torch.Tensor:
    if not 2 <= weights.ndim <= 4:
        expected = "(S_q, S_k), (H, S_q, S_k) or (B, H, S_q, S_k)"
        raise DataError("weights", f"expected {expected}, got {tuple(weights.shape)}")
    if weights.dtype is torch.bool or weights.is_complex():
        raise DataError("weights", f"expected real numbers, got {weights.dtype}")
    return weights.detach()[(None,) * (4 - weights.ndim)]


def _examined(weights: torch.Tensor, mask: Mask) -> _Seen:
    """One walk over all rows, a block at a time.

    Raises:
        DataError: a negative weight.
    """
    sums, columns_off, on_hidden, zeros, visible = [], 0.0, 0.0, 0, 0
    step = max(1, BLOCK_CELLS // max(1, weights.shape[-1]))
    for batch in range(weights.shape[0]):
        for head in range(weights.shape[1]):
            view, columns = mask.head(batch, head), torch.zeros(weights.shape[-1])
            for start in range(0, view.rows, step):
                rows = slice(start, min(start + step, view.rows))
                block = weights[batch, head, rows].cpu().to(torch.float64)
                _refuse_negative(block, (batch, head, start))
                sums.append(block.sum(-1))
                columns = columns + block.sum(0)
                if mask.hides:
                    seen = torch.tensor(view.cells(rows))
                    hidden = torch.where(seen, 0.0, block).sum(-1)
                    on_hidden = max(on_hidden, float(hidden.max()) if len(hidden) else 0.0)
                    zeros += int((seen & (block == 0)).sum())
                    visible += int(seen.sum())
            columns_off = max(columns_off, float((columns - 1).abs().max()) if len(columns) else 0)
    found = torch.cat(sums) if sums else torch.zeros(0)
    found = found[torch.isfinite(found) & (found > 0)]
    lowest, highest = (float(found.min()), float(found.max())) if len(found) else (None, None)
    return _Seen(lowest, highest, columns_off, on_hidden, zeros / max(1, visible))


def _refuse_negative(block: torch.Tensor, first: tuple[int, int, int]) -> None:
    if not bool((block < 0).any()):
        return
    row, key = (block < 0).nonzero()[0].tolist()
    where = (*first[:2], first[2] + row, key)
    raise DataError(
        "weights",
        f"expected weights, of at least 0, got {float(block[row, key]):.4g} at {where}",
        "scores before the softmax are no weights yet",
    )


def _judged(seen: _Seen, weights: torch.Tensor, mask: Mask) -> list[str]:
    """What looks like a mistake, in sentences.

    Raises:
        DataError: what cannot be weights.
    """
    lowest, highest, tolerance = seen.lowest, seen.highest, _tolerance(weights)
    if lowest is None or highest is None:
        return []
    said = []
    off = max(1 - lowest, highest - 1) > tolerance
    if off and seen.columns_off <= tolerance:
        raise DataError(
            "weights",
            "expected rows that sum to 1, got columns that do",
            "the last two axes are queries and keys, in this order: exchange them",
        )
    if highest > MOST_OF_A_ROW:
        sums = f"sums from {lowest:.4g} to {highest:.4g}"
        raise DataError("weights", f"expected rows that sum to 1, got {sums}")
    if off:
        said.append(
            f"rows of weights sum from {lowest:.4g} to {highest:.4g}, not to 1, and are measured "
            "as shares of their sum; was dropout on, or the share of a sink logit left out?"
        )
    if seen.on_hidden > tolerance:
        said.append(
            f"up to {seen.on_hidden:.4g} of a row of weights is on keys that the options hide, and "
            "is left out"
        )
    if seen.zeros > MANY_ZEROS:
        said.append(
            f"{seen.zeros:.0%} of the weights that the options show are 0: rounded to it, or "
            "hidden by something else; they count as visible"
        )
    return said


def _tolerance(weights: torch.Tensor) -> float:
    """How far from 1 rounding takes the sum of a row of this dtype."""
    if not weights.is_floating_point():
        return ROW_SUM_TOLERANCE
    kind = torch.finfo(weights.dtype)
    subnormal = kind.smallest_normal * kind.eps
    return max(ROW_SUM_TOLERANCE, 2 * kind.eps + weights.shape[-1] * subnormal / 2)
