"""Mean and variance of samples that come in independent groups, with an honest interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ClusterSums:
    """Sums over groups of samples, each group independent of the others.

    A group with n samples x, taken from a fixed reference, enters as u = (Σx², Σx, n).

    Attributes:
        groups: how many there are.
        first: float64 (3,), Σ u over groups.
        second: float64 (3, 3), Σ u uᵀ over groups.
    """

    groups: int
    first: NDArray[np.float64]
    second: NDArray[np.float64]

    @classmethod
    def of(cls, samples: NDArray[np.float64], reference: float, counted: int) -> ClusterSums:
        """Sums of a block of groups.

        Args:
            samples: float64 (groups, samples of each).
            reference: near the mean, so that nothing cancels; the same for every block.
            counted: how many of the samples count, from the first in reading order.
        """
        groups, width = samples.shape
        x = samples - reference
        sizes = np.full(groups, width, np.float64)
        if counted < x.size:
            x.reshape(-1)[counted:] = 0.0
            sizes = np.clip(counted - width * np.arange(groups), 0, width).astype(np.float64)
        u = np.stack([np.einsum("gw,gw->g", x, x), x.sum(1), sizes])  # (3, groups)
        return cls(int((sizes > 0).sum()), u.sum(1), np.einsum("ag,bg->ab", u, u))

    def __add__(self, other: ClusterSums) -> ClusterSums:
        """Sums over the groups of both."""
        return ClusterSums(
            self.groups + other.groups, self.first + other.first, self.second + other.second
        )

    @property
    def shift(self) -> float:
        """Mean of the samples, from the reference."""
        return float(self.first[1] / self.first[2])

    @property
    def variance(self) -> float:
        """Population variance of the samples."""
        return max(0.0, float(self.first[0] / self.first[2]) - self.shift**2)

    def interval(self, confidence: float = 0.95) -> tuple[float, float] | None:
        """Interval for the variance of the population; None for fewer than two groups.

        The error is the cluster-robust one: samples of one group may depend on each other in any
        way. It is taken on the logarithm, since the variance's own sampling distribution leans to
        the right, with the quantile of student-t with groups − 1 degrees of freedom.

        Source: Liang and Zeger, "Longitudinal Data Analysis Using Generalized Linear Models"
        (1986), for the influence of a whole group; the delta method for the logarithm.
        """
        if self.groups < 2:
            return None
        variance = self.variance
        if variance == 0.0:
            return 0.0, 0.0
        influence = np.array([1.0, -2 * self.shift, self.shift**2 - variance])
        squares = max(0.0, float(influence @ self.second @ influence))
        squares *= self.groups / (self.groups - 1)
        error = math.sqrt(squares) / float(self.first[2]) / variance
        reach = math.exp(student_quantile(0.5 + confidence / 2, self.groups - 1) * error)
        return variance / reach, variance * reach


def student_quantile(probability: float, df: int) -> float:
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
