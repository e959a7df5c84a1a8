"""What a softmax over a few keys looks like: entropy, largest weight, gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Symptoms:
    """The three symptoms of a softmax that is too sharp or too flat, one value per row.

    Attributes:
        entropy_bits: in bits, 0 to log2(keys).
        max_weight: the largest weight of the row, 1/keys to 1.
        softmax_grad: Frobenius norm of the softmax Jacobian diag(w) − w wᵀ.
    """

    entropy_bits: NDArray[np.float64]
    max_weight: NDArray[np.float64]
    softmax_grad: NDArray[np.float64]

    @property
    def totals(self) -> NDArray[np.float64]:
        """Float64 (3,): each summed over the rows."""
        return np.array([self.entropy_bits.sum(), self.max_weight.sum(), self.softmax_grad.sum()])


def symptoms(logits: NDArray[np.float64]) -> Symptoms:
    """Softmax of each row of logits, float64 (rows, keys), keys ≥ 1, and how sharp it is.

    The largest weight is held apart from the rest, so that rows that are nearly one-hot keep
    their relative accuracy: 1 − max_weight is a sum of small numbers, not a difference.
    """
    peak = logits.argmax(1)[:, None]
    below = logits - np.take_along_axis(logits, peak, 1)  # ≤ 0
    rest = np.exp(below)
    np.put_along_axis(rest, peak, 0.0, 1)
    beside = rest.sum(1)
    total = 1 + beside
    spread = np.einsum("rk,rk->r", rest, below)
    entropy = (np.log1p(beside) - spread / total) / math.log(2)
    return Symptoms(entropy, 1 / total, _gradient(rest / total[:, None], 1 / total))


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
