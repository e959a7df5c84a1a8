"""What a mask does to given scores: softmax before and after it, row by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from attncli.attention.masks.mask import HeadMask

_BLOCK_CELLS = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class MaskEffect:
    """Softmax of the real queries before and after a mask; each array float64 (S_q,).

    Attributes:
        sum_before, sum_after: sum of the weights of each row: 1, or 0 for an empty row.
        entropy_before, entropy_after: in nats; NaN for an empty row.
        mass_removed: weight that the keys now invisible had before.
        mass_moved: half the sum of the absolute changes of the weights; 1 at most.
        top_before, top_after: int64 (S_q,), key of the largest weight; −1 for an empty row.
    """

    sum_before: NDArray[np.float64]
    sum_after: NDArray[np.float64]
    entropy_before: NDArray[np.float64]
    entropy_after: NDArray[np.float64]
    mass_removed: NDArray[np.float64]
    mass_moved: NDArray[np.float64]
    top_before: NDArray[np.int64]
    top_after: NDArray[np.int64]


def mask_effect(scores: NDArray[Any], view: HeadMask) -> MaskEffect:
    """Compare the softmax of the scores with that of the scores under the mask.

    Args:
        scores: (S_q, S_k), any real dtype; what softmax would be given without the mask.
        view: the mask's batch and head that belongs to them; its additive values and ALiBi count.
    """
    step = max(1, _BLOCK_CELLS // max(1, view.k_len))
    parts = []
    for start in range(0, view.rows, step):
        rows = slice(start, min(start + step, view.rows))
        parts.append(_of_rows(*weights_before_and_after(scores, view, rows), view.cells(rows)))
    if not parts:
        none: NDArray[Any] = np.zeros(0)
        parts = [(*[none] * 6, *[none.astype(np.int64)] * 2)]
    columns: list[Any] = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return MaskEffect(*columns)


def weights_before_and_after(
    scores: NDArray[Any], view: HeadMask, rows: slice
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Softmax weights of some rows without and with the mask, each float64 (rows, S_k).

    Args:
        scores: (S_q, S_k), any real dtype.
        view: the mask's batch and head that belongs to them.
        rows: which rows, with a start and a stop.
    """
    logits = scores[rows].astype(np.float64)  # (rows, S_k)
    bias = view.bias(rows)
    everything = np.ones(logits.shape, np.bool_)
    with np.errstate(invalid="ignore"):  # scores that are not finite follow IEEE
        masked = logits if bias is None else logits + bias
        return _softmax(logits, everything), _softmax(masked, view.cells(rows))


def _softmax(logits: NDArray[np.float64], seen: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Weights over the visible keys, 0 elsewhere and in empty rows."""
    shown = np.where(seen, logits, -np.inf)
    top = shown.max(-1, keepdims=True, initial=-np.inf)
    shifted = np.where(seen, logits, 0.0) - np.where(np.isneginf(top), 0.0, top)
    exps = np.where(seen, np.exp(np.where(seen, shifted, 0.0)), 0.0)
    total = exps.sum(-1, keepdims=True)
    weights: NDArray[np.float64] = exps / np.where(total > 0, total, 1.0)
    return weights


def _of_rows(
    before: NDArray[np.float64], after: NDArray[np.float64], seen: NDArray[np.bool_]
) -> tuple[NDArray[Any], ...]:
    """The attributes of `MaskEffect` for some rows, in order."""
    return (
        before.sum(-1),
        after.sum(-1),
        _entropy(before, np.full(len(seen), seen.shape[-1])),
        _entropy(after, seen.sum(-1)),
        np.where(seen, 0.0, before).sum(-1),
        abs(after - before).sum(-1) / 2,
        _top(before),
        _top(after),
    )


def _entropy(weights: NDArray[np.float64], keys: NDArray[np.int64]) -> NDArray[np.float64]:
    """Σ −w ln w in nats, with 0 · ln 0 = 0; NaN where there are no weights."""
    terms = -weights * np.log(np.where(weights > 0, weights, 1.0))
    total = np.clip(terms.sum(-1), 0.0, np.log(np.maximum(keys, 1))) + 0.0  # never −0.0
    entropy: NDArray[np.float64] = np.where(weights.any(-1), total, np.nan)
    return entropy


def _top(weights: NDArray[np.float64]) -> NDArray[np.int64]:
    if not weights.shape[-1]:
        return np.full(len(weights), -1, np.int64)
    top: NDArray[np.int64] = np.where(weights.any(-1), weights.argmax(-1), -1)
    return top
