"""The distributions that experiments draw entries of Q and K from, and what theory says of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attncli.attention.options import DistributionName
from attncli.errors import UsageError

_UNIFORM_MEAN = 0.5
_UNIFORM_STD = math.sqrt(1 / 12)
# Kurtosis E z⁴ of the standardised entry; student-t's depends on its degrees of freedom.
_KURTOSIS = {"normal": 3.0, "uniform": 1.8, "rademacher": 1.0, "laplace": 6.0}

# Sizes of a mean or deviation whose eighth power, times any d_k, is an ordinary number.
_SMALLEST, _LARGEST = 1e-30, 1e30
# Beyond so many deviations from 0, rounding of q·k comes near to what it varies by.
_FARTHEST = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """How the entries of one query and its keys are drawn.

    With z and e standardised and independent, an entry of a query is mean + std·z, and the entry
    of a key in the same dimension is mean + std·(ρ·z + √(1−ρ²)·e). Without correlation both follow
    the named distribution; with it keys are a mixture, which is normal only for normal entries.

    Attributes:
        name: the family.
        mean: of every entry; None for the family's own: 1/2 for uniform on [0, 1), otherwise 0.
        std: of every entry, ≥ 0; None for the family's own: 1/√12 for uniform on [0, 1),
            otherwise 1.
        correlation: ρ between a query and each of its keys in the same dimension, −1 to 1.
        df: degrees of freedom of student-t, > 0. Up to 2 it has no variance: entries are then
            mean + t, not standardised.
    """

    name: DistributionName = DistributionName.NORMAL
    mean: float | None = None
    std: float | None = None
    correlation: float = 0.0
    df: float = 10.0

    def __post_init__(self) -> None:
        """Refuse parameters that describe no distribution.

        Raises:
            UsageError: naming the option, what it takes and what it got.
        """
        if self.mean is not None and not math.isfinite(self.mean):
            raise UsageError("«mean»", f"expected a finite number, got {self.mean}")
        if self.std is not None and not (math.isfinite(self.std) and self.std >= 0):
            raise UsageError("«std»", f"expected a finite number of at least 0, got {self.std}")
        for option, value in (("«mean»", self.mean), ("«std»", self.std)):
            if value and not _SMALLEST <= abs(value) <= _LARGEST:
                sizes = f"0, or from {_SMALLEST:g} to {_LARGEST:g} in size"
                raise UsageError(option, f"expected {sizes}, got {value:g}")
        if not -1 <= self.correlation <= 1:
            raise UsageError("«correlation»", f"expected from -1 to 1, got {self.correlation}")
        if not (math.isfinite(self.df) and self.df > 0):
            raise UsageError("«df»", f"expected a finite number above 0, got {self.df}")
        if self.entry_std and abs(self.centre) > _FARTHEST * self.entry_std:
            problem = f"expected at most {_FARTHEST:g} deviations of an entry, got {self.centre:g}"
            raise UsageError("«mean»", problem)
        if not self.has_variance and (self.std is not None or self.correlation):
            option = "«correlation»" if self.std is None else "«std»"
            raise UsageError(
                option, f"expected «df» above 2, where student-t has a variance, got {self.df:g}"
            )

    @property
    def entry_mean(self) -> float | None:
        """Mean of an entry; None where it does not exist (student-t, df ≤ 1)."""
        if self.name is DistributionName.STUDENT_T and self.df <= 1:
            return None
        return self.centre

    @property
    def centre(self) -> float:
        """What an entry is symmetric about."""
        if self.mean is not None:
            return self.mean
        return _UNIFORM_MEAN if self.name is DistributionName.UNIFORM else 0.0

    @property
    def entry_std(self) -> float | None:
        """Standard deviation of an entry; None where it does not exist (student-t, df ≤ 2)."""
        if not self.has_variance:
            return None
        if self.std is not None:
            return self.std
        return _UNIFORM_STD if self.name is DistributionName.UNIFORM else 1.0

    @property
    def has_variance(self) -> bool:
        """Whether an entry has a variance."""
        return self.name is not DistributionName.STUDENT_T or self.df > 2

    @property
    def has_interval(self) -> bool:
        """Whether q·k has the fourth moment that an error of its variance is estimated from.

        For student-t that takes df > 4, and df > 8 beside a correlation, where q·k holds ρ·|q|².
        """
        bound = 8 if self.correlation else 4
        return self.name is not DistributionName.STUDENT_T or self.df > bound

    @property
    def kurtosis(self) -> float | None:
        """E z⁴ of a standardised entry, 3 for normal; None where infinite (student-t, df ≤ 4)."""
        if self.name is not DistributionName.STUDENT_T:
            return _KURTOSIS[self.name]
        return 3 + 6 / (self.df - 4) if self.df > 4 else None

    def dot_mean(self, dk: int) -> float | None:
        """E(q·k) = d_k·(μ² + ρσ²); None where it does not exist."""
        if self.entry_mean is None:
            return None
        shared = self.correlation * (self.entry_std or 0.0) ** 2
        return dk * (self.entry_mean**2 + shared)

    def dot_variance(self, dk: int) -> float | None:
        """Var(q·k) = d_k·(σ⁴·(1 + ρ²(κ−2)) + 2μ²σ²(1+ρ)); None where it does not exist.

        κ = E z⁴ matters only beside a correlation. Derived for entries symmetric about their mean,
        which all of these are: for q = μ + σz and k = μ + σw, w = ρz + √(1−ρ²)e, the variance of
        zw is E z²w² − ρ² = 1 + ρ²(κ−2), that of z + w is 2 + 2ρ, and their covariance is 0.
        """
        mean, std, rho = self.entry_mean, self.entry_std, self.correlation
        if mean is None or std is None:
            return None
        excess = 0.0
        if rho:
            if self.kurtosis is None:
                return None
            excess = rho * rho * (self.kurtosis - 2)
        return dk * (std**4 * (1 + excess) + 2 * mean**2 * std**2 * (1 + rho))

    def assumption(self, dk: int) -> str:
        """What the theoretical variance assumes, with its growth by d_k, as one line."""
        variance = self.dot_variance(dk)
        factor = "" if variance is None else f"{variance / dk:.6g}·".removeprefix("1·")
        value = "does not exist" if variance is None else f"= {factor}d_k"
        rho = self.correlation
        bond = f"correlation {rho:g} between q and k" if rho else "q and k independent"
        formula = "d_k·(σ⁴ + 2μ²σ²)"
        if rho:
            formula = "d_k·(σ⁴(1 + ρ²(κ−2)) + 2μ²σ²(1+ρ))"
        return f"{self._entries()}, {bond}: Var(q·k) = {formula} {value}"

    def standardised(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
        """Draw z, float64 of that shape: mean 0 and, where there is a variance, variance 1."""
        match self.name:
            case DistributionName.NORMAL:
                return rng.standard_normal(shape)
            case DistributionName.UNIFORM:
                return (rng.random(shape) - _UNIFORM_MEAN) / _UNIFORM_STD
            case DistributionName.RADEMACHER:
                return 2.0 * rng.integers(0, 2, shape, dtype=np.int8).astype(np.float64) - 1.0
            case DistributionName.LAPLACE:
                return rng.laplace(0.0, math.sqrt(0.5), shape)
            case DistributionName.STUDENT_T:
                width = math.sqrt(1 - 2 / self.df) if self.has_variance else 1.0
                return rng.standard_t(self.df, shape) * width

    def to_entries(self, z: NDArray[np.float64]) -> NDArray[np.float64]:
        """mean + std·z, in the place of z."""
        std = 1.0 if self.entry_std is None else self.entry_std
        if std != 1.0:
            z *= std
        if self.centre != 0.0:
            z += self.centre
        return z

    def correlated(self, z: NDArray[np.float64], e: NDArray[np.float64]) -> NDArray[np.float64]:
        """ρ·z + √(1−ρ²)·e, in the place of e (queries, keys, d_k); z is (queries, 1, d_k)."""
        rho = self.correlation
        if rho:
            e *= math.sqrt((1 - rho) * (1 + rho))
            e += rho * z
        return e

    def _entries(self) -> str:
        if self.name is DistributionName.UNIFORM and self.mean is None and self.std is None:
            return "entries uniform on [0, 1): mean 0.5, variance 1/12"
        family = self.name.value
        if self.name is DistributionName.STUDENT_T:
            family += f" (df {self.df:g})"
        mean = "none" if self.entry_mean is None else f"{self.entry_mean:g}"
        std = "none" if self.entry_std is None else f"{self.entry_std:g}"
        return f"{family} entries: mean {mean}, std {std}"
