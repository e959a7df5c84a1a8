"""Without torch: extremes and moments of any many numbers, and how sharp a softmax is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from attncli.columns import column


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberStatistics:
    """Extremes and moments of the finite ones among some numbers, and what the others were."""

    n_nan: int = column("nan", description="how many are NaN")
    n_posinf: int = column("inf", description="how many are +∞")
    n_neginf: int = column("-inf", description="how many are −∞; of a stage, of its visible cells")
    n_finite: int = column(None, description="how many are finite, which the rest is about")
    min: float | None = column("min", description="smallest finite value; none without one")
    max: float | None = column("max", description="largest finite value; none without one")
    mean: float | None = column("mean", description="mean of the finite values; none without one")
    std: float | None = column(
        "std", description="population standard deviation of the finite values; none without one"
    )


# Numbers that stay in the processor's cache, as float64, from one pass over them to the next.
_AT_ONCE = 1 << 16


@dataclass(slots=True)
class RunningStatistics:
    """Statistics of the numbers taken in so far.

    minimum, maximum, mean and std (population) are of the finite ones; the counts say what the
    others were. Parts are combined by their centred sums, so that large means do not cancel.

    Source: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm" (1979).
    """

    n_nan: int = 0
    n_posinf: int = 0
    n_neginf: int = 0
    count: int = 0
    minimum: float = math.inf
    maximum: float = -math.inf
    _mean: float = field(default=0.0, repr=False)
    _squares: float = field(default=0.0, repr=False)

    def add(self, numbers: NDArray[Any]) -> None:
        """Take in a part, of any real dtype."""
        flat = numbers.ravel(order="K")
        # What is not finite is no error, nor is a mean or a variance beyond float64: it is inf, or
        # NaN, and is shown as that.
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, flat.size, _AT_ONCE):
                self._add(flat[start : start + _AT_ONCE].astype(np.float64))

    def _add(self, exact: NDArray[np.float64]) -> None:
        """Take in some numbers, which are overwritten."""
        total = float(exact.sum())
        if not math.isfinite(total):  # else all of them are
            finite = exact[np.isfinite(exact)]
            if finite.size < exact.size:
                self.n_nan += int(np.isnan(exact).sum())
                self.n_posinf += int(np.isposinf(exact).sum())
                self.n_neginf += int(np.isneginf(exact).sum())
            if finite.size == 0:
                return
            exact, total = finite, float(finite.sum())
        size, mean = exact.size, total / exact.size
        self.minimum = min(self.minimum, float(exact.min()))
        self.maximum = max(self.maximum, float(exact.max()))
        exact -= mean
        squares = float(np.square(exact, out=exact).sum())
        together = self.count + size
        shift = mean - self._mean
        self._squares += squares + shift * shift * (self.count * size / together)
        self._mean += shift * (size / together)
        self.count = together

    @property
    def mean(self) -> float | None:
        """Mean of the finite numbers; None where there are none."""
        return self._mean if self.count else None

    @property
    def std(self) -> float | None:
        """Population standard deviation of the finite numbers; None where there are none."""
        return math.sqrt(self._squares / self.count) if self.count else None

    @property
    def result(self) -> NumberStatistics:
        """What was found so far."""
        return NumberStatistics(
            n_nan=self.n_nan,
            n_posinf=self.n_posinf,
            n_neginf=self.n_neginf,
            n_finite=self.count,
            min=self.minimum if self.count else None,
            max=self.maximum if self.count else None,
            mean=self.mean,
            std=self.std,
        )


Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class SoftmaxStats(Generic[Value]):
    """What tells a softmax that is too sharp or too flat: float64 (rows,), or a mean of each."""

    entropy_bits: Value  # in bits, 0 to log2(keys)
    max_weight: Value  # the largest weight of the row, 1/keys to 1
    softmax_grad: Value  # Frobenius norm of the softmax Jacobian diag(w) − w wᵀ


def softmax_stats(logits: NDArray[np.float64]) -> SoftmaxStats[NDArray[np.float64]]:
    """Softmax of each row of logits, float64 (rows, keys), keys ≥ 1, and how sharp it is.

    The largest weight is held apart from the rest, so that rows that are nearly one-hot keep
    their relative accuracy: 1 − max_weight is a sum of small numbers, not a difference.
    """
    top_key = logits.argmax(1)[:, None]
    with np.errstate(over="ignore"):  # of logits further apart than float64 reaches
        shifted = logits - np.take_along_axis(logits, top_key, 1)  # ≤ 0
    shifted = np.maximum(shifted, -1e4)  # a weight of 0 all the same, where 0·−∞ is none
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


def student_quantile(probability: float, df: float) -> float:
    """Quantile of student-t, exact for df of 1 and 2, to 0.5 % at 3 and 10⁻⁵ from 10 on.

    Source: Abramowitz and Stegun, "Handbook of Mathematical Functions" (1964), 26.7.5.
    """
    if df == 1:
        return math.tan(math.pi * (probability - 0.5))
    if df == 2:
        return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    x: float = NormalDist().inv_cdf(probability)
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return x + math.fsum(term / float(df) ** power for power, term in enumerate(terms, start=1))
