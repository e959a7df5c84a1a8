"""How sharp a softmax is: entropy, largest weight, gradient. Without torch, for few keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class SoftmaxStats(Generic[Value]):
    """What tells a softmax that is too sharp or too flat: float64 (rows,), or a mean of each.

    Attributes:
        entropy_bits: in bits, 0 to log2(keys).
        max_weight: the largest weight of the row, 1/keys to 1.
        softmax_grad: Frobenius norm of the softmax Jacobian diag(w) − w wᵀ.
    """

    entropy_bits: Value
    max_weight: Value
    softmax_grad: Value


def softmax_stats(logits: NDArray[np.float64]) -> SoftmaxStats[NDArray[np.float64]]:
    """Softmax of each row of logits, float64 (rows, keys), keys ≥ 1, and how sharp it is.

    The largest weight is held apart from the rest, so that rows that are nearly one-hot keep
    their relative accuracy: 1 − max_weight is a sum of small numbers, not a difference.
    """
    top_key = logits.argmax(1)[:, None]
    shifted = logits - np.take_along_axis(logits, top_key, 1)  # ≤ 0
    rest = np.exp(shifted)
    np.put_along_axis(rest, top_key, 0.0, 1)
    sum_exp_minus_1 = rest.sum(1)
    sum_exp = 1 + sum_exp_minus_1
    sum_exp_shifted = np.einsum("rk,rk->r", rest, shifted)
    entropy = (np.log1p(sum_exp_minus_1) - sum_exp_shifted / sum_exp) / math.log(2)
    return SoftmaxStats(entropy, 1 / sum_exp, _gradient(rest / sum_exp[:, None], 1 / sum_exp))


def _gradient(rest: NDArray[np.float64], largest: NDArray[np.float64]) -> NDArray[np.float64]:
    """Frobenius norm of diag(w) − w wᵀ, from the weights without the largest, and the largest."""
    squares = rest * rest
    second = squares.sum(1)
    pairs = np.maximum(0.0, second * second - np.einsum("rk,rk->r", squares, squares))
    diagonal = (largest * rest.sum(1)) ** 2  # w(1 − w) of the largest, then of the others
    rest *= 1 - rest
    diagonal += np.einsum("rk,rk->r", rest, rest)
    norm: NDArray[np.float64] = np.sqrt(diagonal + 2 * largest * largest * second + pairs)
    return norm
