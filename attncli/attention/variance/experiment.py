"""Why √d_k: the variance of q·k and what it does to softmax, measured on random draws."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from enum import StrEnum
from threading import Event

import numpy as np
from numpy.typing import NDArray

from attncli.attention.options import DistributionName
from attncli.attention.statistics import softmax_stats, student_quantile
from attncli.attention.variance.distributions import Distribution
from attncli.columns import column
from attncli.errors import UsageError
from attncli.limits import processors

# Numbers drawn from one seed before the next takes over. Part of what a seed means: another value
# gives other draws. 2 MiB of float64 stay in the second-level cache between drawing and use.
CHUNK_NUMBERS = 1 << 18

# What scores are multiplied by at most, so that their squares stay numbers.
LARGEST_FACTOR = 1e30


class ScaleRule(StrEnum):
    """How the scale follows from d_k and the number of keys n.

    sqrt: 1/√d_k, of Vaswani et al. (2017). linear: 1/d_k, of μP (Yang et al., 2022), made for
    q and k that training has correlated. none: 1. log-n: ln(n)/√d_k, of Chiang and Cholak,
    "Overcoming a Theoretical Limitation of Self-Attention" (2022), which keeps attention from
    flattening as n grows; others divide it by the logarithm of the length trained on.
    """

    SQRT = "sqrt"
    LINEAR = "linear"
    NONE = "none"
    LOG_N = "log-n"


def parse_scale_rule(text: str) -> ScaleRule | float:
    """The rule of that name, or the scale that the text spells.

    Raises:
        UsageError: neither a name nor a finite number.
    """
    if text in tuple(ScaleRule):
        return ScaleRule(text)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        names = ", ".join(ScaleRule)
        raise UsageError("«scale_rule»", f"expected {names} or a finite number, got {text}")
    return value


def scale_of(rule: ScaleRule | float, dk: int, keys: int) -> float:
    """The number that the scores are multiplied by.

    Args:
        rule: a rule, or the number itself.
        dk: width of a query.
        keys: number of keys of each query, n of log-n.
    """
    match rule:
        case ScaleRule.SQRT:
            return 1 / math.sqrt(dk)
        case ScaleRule.LINEAR:
            return 1 / dk
        case ScaleRule.NONE:
            return 1.0
        case ScaleRule.LOG_N:
            return math.log(keys) / math.sqrt(dk)
        case value:
            return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentSpec:
    """What to draw, and which scales to look at."""

    dk: int  # width of queries and keys
    samples: int = 100_000  # number of dot products
    # Keys of each query; the last query's surplus keys feed the softmax columns alone.
    keys: int = 8
    distribution: Distribution = field(default_factory=Distribution)  # of the entries
    # Scale rules, or scales, side by side on the same draws.
    rules: tuple[ScaleRule | float, ...] = (ScaleRule.SQRT,)
    temperatures: tuple[float, ...] = (1.0,)  # divide the scaled scores; likewise, with every rule
    seed: int = 0  # of the draws. A d_k draws the same numbers alone and in a sweep.
    # How many draw at once; None for as many as there are processors, eight at most. The results do
    # not depend on it.
    threads: int | None = None

    def __post_init__(self) -> None:
        """Refuse sizes and temperatures that make no sense.

        Raises:
            UsageError: naming the option, what it takes and what it got.
        """
        least = {"«dk»": self.dk, "«samples»": self.samples, "«keys»": self.keys}
        for option, value in least.items():
            if value < 1:
                raise UsageError(option, f"expected at least 1, got {value}")
        if self.seed < 0:
            raise UsageError("«seed»", f"expected at least 0, got {self.seed}")
        for temperature in self.temperatures:
            if not (math.isfinite(temperature) and temperature > 0):
                raise UsageError(
                    "«temperatures»", f"expected finite numbers above 0, got {temperature}"
                )
        for rule, temperature in itertools.product(self.rules, self.temperatures):
            factor = scale_of(rule, self.dk, self.keys) / temperature
            if abs(factor) > LARGEST_FACTOR:
                problem = f"expected at most {LARGEST_FACTOR:g} by the temperature, got {factor:g}"
                raise UsageError("«scale»", problem)

    @property
    def queries(self) -> int:
        """How many queries are drawn."""
        return -(-self.samples // self.keys)

    @property
    def numbers(self) -> int:
        """How many numbers are drawn."""
        return self.queries * (self.keys + 1) * self.dk

    @property
    def bytes_needed(self) -> int:
        """An estimate of the memory held at once, in bytes, whatever the number of samples."""
        draws = 4 * max(CHUNK_NUMBERS, self.dk)  # q, k and what correlates or shifts them
        queries = max(1, CHUNK_NUMBERS // ((self.keys + 1) * self.dk))
        scores = 8 * queries * self.keys  # and their softmax, in the making
        return 8 * (self.threads or default_threads()) * (draws + scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentRecord:
    """One d_k under one scale and temperature; None for what a distribution does not have.

    Softmax is that over the keys of one query, without a scale and of scores · scale /
    temperature; its numbers are means over queries.
    """

    dk: int = column("d_k", is_key=True, description="width of queries and keys")
    samples: int = column("samples", description="dot products drawn")
    dist: str = column("dist", description="what entries were drawn from")
    keys: int = column("keys", description="of each query")
    scale: float = column("scale", description="multiplies the scores")
    mean: float = column("mean", description="measured mean of q·k")
    mean_theory: float | None = column(
        "mean theory", description="E(q·k); none where it does not exist"
    )
    var: float = column("var", description="measured population variance of q·k")
    var_theory: float | None = column(
        "var theory", description="Var(q·k); none where it does not exist"
    )
    var_ci95_low: float | None = column(
        "95 % from",
        description="lower end of a 95 % interval of the variance, allowing for keys that share a "
        "query; none where there is none, see interval_reason",
    )
    var_ci95_high: float | None = column("to", description="upper end of that interval")
    ratio: float | None = column("ratio", description="var / var_theory")
    scaled_var: float = column("scaled var", description="var · (scale / temperature)²")
    entropy_bits_unscaled: float = column(
        "entropy unscaled", unit="bits", description="mean entropy of softmax(q·k)"
    )
    entropy_bits_scaled: float = column(
        "entropy scaled", unit="bits", description="of softmax(q·k · scale / temperature)"
    )
    entropy_bits_max: float = column("log2(keys)", unit="bits", description="the most there can be")
    max_weight_unscaled: float = column(
        "largest weight unscaled", description="mean largest weight of softmax(q·k), 0 to 1"
    )
    max_weight_scaled: float = column(
        "largest weight scaled", description="of softmax(q·k · scale / temperature)"
    )
    softmax_grad_unscaled: float = column(
        "gradient unscaled",
        description="mean Frobenius norm of the Jacobian of softmax(q·k), 0 to ½ √2",
    )
    softmax_grad_scaled: float = column(
        "gradient scaled", description="of the Jacobian of softmax(q·k · scale / temperature)"
    )
    rule: str = column("scale rule", description="its name, or the number given in its place")
    temperature: float = column("temperature", description="divides the scaled scores")
    entry_mean: float | None = column("entry mean", description="of an entry of Q and K, by theory")
    entry_std: float | None = column("entry std", description="of an entry of Q and K, by theory")
    correlation: float = column(
        "correlation", description="between the entries of q and k, −1 to 1"
    )
    df: float | None = column("df", description="degrees of freedom of student-t")
    seed: int = column("seed", description="of the draws")
    interval_reason: str | None = column(
        "no interval because", description="why there is no interval; none where there is one"
    )
    assumption: str = column("assumption", description="of var_theory, with its growth by d_k")


def experiment(
    spec: ExperimentSpec, tell: Callable[[int], None] | None = None
) -> tuple[ExperimentRecord, ...]:
    """Draw once, and look at the draws under every rule and temperature, in that order.

    Work is cut into chunks of fixed size with a seed each and summed in their order, so that
    neither the number of threads nor anything else about the machine's speed changes a bit of the
    result, and memory does not grow with the samples.

    Args:
        spec: what to draw.
        tell: is told of every part how many of the `numbers` it has drawn.
    """
    pairs = list(itertools.product(spec.rules, spec.temperatures))
    scales = [scale_of(rule, spec.dk, spec.keys) for rule, _ in pairs]
    factors = [scale / t for scale, (_, t) in zip(scales, pairs, strict=True)]
    sums, means = _measure(spec, [1.0, *factors], tell)
    entries, dk, unscaled = spec.distribution, spec.dk, means[0]
    reason, var_theory = _why_no_interval(spec), entries.dot_variance(dk)
    low, high = (None if reason else sums.interval()) or (None, None)
    return tuple(
        ExperimentRecord(
            dk=dk,
            samples=spec.samples,
            dist=entries.name.value,
            keys=spec.keys,
            scale=scale,
            # d_k·μ² is part of every score, and would round away what varies.
            mean=dk * entries.centre**2 + _reference(spec) + sums.shift,
            mean_theory=entries.dot_mean(dk),
            var=sums.variance,
            var_theory=var_theory,
            var_ci95_low=low,
            var_ci95_high=high,
            ratio=sums.variance / var_theory if var_theory else None,
            scaled_var=sums.variance * factor * factor,
            entropy_bits_unscaled=float(unscaled[0]),
            entropy_bits_scaled=float(stats[0]),
            entropy_bits_max=math.log2(spec.keys),
            max_weight_unscaled=float(unscaled[1]),
            max_weight_scaled=float(stats[1]),
            softmax_grad_unscaled=float(unscaled[2]),
            softmax_grad_scaled=float(stats[2]),
            rule=rule.value if isinstance(rule, ScaleRule) else repr(rule),
            temperature=temperature,
            entry_mean=entries.entry_mean,
            entry_std=entries.entry_std,
            correlation=entries.correlation,
            df=entries.df if entries.name is DistributionName.STUDENT_T else None,
            seed=spec.seed,
            interval_reason=reason,
            assumption=entries.assumption(dk),
        )
        for (rule, temperature), scale, factor, stats in zip(
            pairs, scales, factors, means[1:], strict=True
        )
    )


# Pairs of the four sums of a group, each once.
_PAIRS = np.triu_indices(4)
_TWICE = np.where(_PAIRS[0] == _PAIRS[1], 1.0, 2.0)


@dataclass(frozen=True, slots=True)
class ClusterSums:
    """Sums over groups of samples, each group independent of the others.

    A group with n samples x, taken from a fixed reference, enters as u = (w, (Σx)²/n, Σx, n), where
    w is the sum of squares about the group's own mean, Σx² − (Σx)²/n.
    """

    groups: int  # how many there are
    first: NDArray[np.float64]  # float64 (4,), Σ u over groups
    second: NDArray[np.float64]  # float64 (4, 4), Σ u uᵀ over groups
    # Float64 (10, 10), Σ p pᵀ over groups, p the products of any two of u.
    fourth: NDArray[np.float64]

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
        sums = x.sum(1)
        of_means = sums * sums / np.maximum(sizes, 1.0)
        within = np.maximum(0.0, np.einsum("gw,gw->g", x, x) - of_means)
        u = np.stack([within, of_means, sums, sizes])  # (4, groups)
        pairs = u[_PAIRS[0]] * u[_PAIRS[1]]  # (10, groups)
        with np.errstate(over="ignore"):
            fourth = np.einsum("ag,bg->ab", pairs, pairs)
        return cls(int((sizes > 0).sum()), u.sum(1), np.einsum("ag,bg->ab", u, u), fourth)

    def __add__(self, other: ClusterSums) -> ClusterSums:
        """Sums over the groups of both."""
        names = [entry.name for entry in fields(self)]
        return ClusterSums(*(getattr(self, name) + getattr(other, name) for name in names))

    @property
    def count(self) -> float:
        """How many samples there are."""
        return float(self.first[3])

    @property
    def shift(self) -> float:
        """Mean of the samples, from the reference."""
        return float(self.first[2] / self.first[3])

    @property
    def variance(self) -> float:
        """Population variance of the samples."""
        return max(0.0, float((self.first[0] + self.first[1]) / self.first[3]) - self.shift**2)

    def interval(self, confidence: float = 0.95) -> tuple[float, float] | None:
        """Interval for the variance of the population; None for fewer than two groups.

        The variance is that of the groups' means and that about them. Each part is a mean over
        groups, positive and skewed, and gets an interval on its logarithm, about a centre that
        allows for the lean, with the quantile of student-t; its degrees of freedom are those that
        an error estimated from groups of this kurtosis has, of which a sample of few groups shows
        too little. The two intervals are joined from their ends, with the correlation of the parts:
        where the one part is steady and the other is not, no logarithm of the sum is near normal.

        Source: Liang and Zeger, "Longitudinal Data Analysis Using Generalized Linear Models"
        (1986), for errors of whole groups; Satterthwaite (1946) for the degrees of freedom,
        Var(s²) ∝ (κ − 1)/groups; Zou and Donner, "Construction of confidence limits about effect
        measures" (2008), for joining intervals, as Graybill and Wang (1980) do for components of
        variance.
        """
        if self.groups < 2:
            return None
        if self.variance == 0.0:
            return 0.0, 0.0
        shift = self.shift
        # The means lie about the mean of all samples, which the groups share out between them.
        unbiased = self.groups / (self.groups - 1)
        about, own = np.array([0.0, 1.0, -2 * shift, shift**2]), np.array([1.0, 0.0, 0.0, 0.0])
        between, within = self._part(about, unbiased), self._part(own, 1.0)
        total = between.value + within.value
        covariance = float(between.influence @ self.second @ within.influence)
        spread = math.sqrt(between.squares * within.squares)
        correlation = covariance / spread if spread > 0 else 0.0
        (low_a, high_a), (low_b, high_b) = between.reach(confidence), within.reach(confidence)
        below = low_a**2 + low_b**2 + 2 * correlation * low_a * low_b
        above = high_a**2 + high_b**2 + 2 * correlation * high_a * high_b
        side = max(0.0, below), max(0.0, above)
        return max(0.0, total - math.sqrt(side[0])), total + math.sqrt(side[1])

    def _part(self, of_group: NDArray[np.float64], factor: float) -> _Part:
        """A part of the variance that is the mean of one linear function of the groups' sums."""
        mean = max(0.0, float(of_group @ self.first)) / self.count
        influence = (of_group - np.array([0.0, 0.0, 0.0, mean])) * factor
        squares = max(0.0, float(influence @ self.second @ influence))
        pairs = influence[_PAIRS[0]] * influence[_PAIRS[1]] * _TWICE
        with np.errstate(over="ignore", invalid="ignore"):
            fourth = float(pairs @ self.fourth @ pairs)
        error = math.sqrt(squares * self.groups / (self.groups - 1)) / self.count
        return _Part(mean * factor, influence, squares, fourth, error, self.groups)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a variance, and how far it may be off."""

    value: float  # ≥ 0
    influence: NDArray[np.float64]  # float64 (4,), of a group: a linear function of its sums
    squares: float  # Σ influence² over groups
    fourth: float  # Σ influence⁴, or not a finite number where that overflows
    error: float  # standard error of the value
    groups: int  # ≥ 2

    def reach(self, confidence: float) -> tuple[float, float]:
        """How far the ends of its interval lie below and above the value."""
        if self.value == 0.0 or self.error == 0.0:
            return 0.0, 0.0
        error = self.error / self.value
        reach = student_quantile(0.5 + confidence / 2, self._degrees_of_freedom) * error
        low, high = error**2 - reach, error**2 + reach
        return -self.value * math.expm1(low), self.value * math.expm1(high)

    @property
    def _degrees_of_freedom(self) -> float:
        """Of the error: groups − 1 for normal influences, fewer for heavy tails."""
        most, square = self.groups - 1, self.squares * self.squares
        if not (square > 0 and math.isfinite(self.fourth)):
            return most
        kurtosis = self.groups * max(0.0, self.fourth) / square
        # Few groups show too little of a heavy tail, and the less the heavier it is. By trial.
        kurtosis *= 1 + kurtosis * (kurtosis + 4) / (2 * self.groups)
        return min(most, max(3.0, most / max(1.0, (kurtosis - 1) / 2)))


def _measure(
    spec: ExperimentSpec, factors: list[float], tell: Callable[[int], None] | None
) -> tuple[ClusterSums, NDArray[np.float64]]:
    """Sums of all dot products, and mean `SoftmaxStats` under every factor, float64 (factors, 3).

    The chunks are computed a few ahead, and added in their order. One that is interrupted leaves no
    chunk to be waited for.
    """
    per_chunk = max(1, CHUNK_NUMBERS // ((spec.keys + 1) * spec.dk))
    chunks = -(-spec.queries // per_chunk)
    threads, stopped = spec.threads or default_threads(), Event()
    pool = ThreadPoolExecutor(threads)
    try:
        waiting = deque(
            pool.submit(_chunk, spec, factors, per_chunk, chunk, stopped)
            for chunk in range(min(chunks, 2 * threads))
        )
        total: tuple[ClusterSums, NDArray[np.float64]] | None = None
        for chunk in range(chunks):
            ahead = chunk + len(waiting)
            dots, stats = waiting.popleft().result()
            if ahead < chunks:
                waiting.append(pool.submit(_chunk, spec, factors, per_chunk, ahead, stopped))
            total = (dots, stats) if total is None else (total[0] + dots, total[1] + stats)
            if tell is not None:
                queries = min(per_chunk, spec.queries - chunk * per_chunk)
                tell(queries * (spec.keys + 1) * spec.dk)
    finally:
        stopped.set()
        pool.shutdown(cancel_futures=True)
    assert total is not None  # there is at least one query
    return total[0], total[1] / spec.queries


def default_threads() -> int:
    """How many chunks are drawn at once where nobody says."""
    return min(8, processors())


def _chunk(
    spec: ExperimentSpec, factors: list[float], per_chunk: int, chunk: int, stopped: Event
) -> tuple[ClusterSums, NDArray[np.float64]]:
    """Draw one chunk and sum it up.

    Raises:
        CancelledError: nobody waits for it any more.
    """
    queries = min(per_chunk, spec.queries - chunk * per_chunk)
    seed = np.random.SeedSequence(spec.seed, spawn_key=(spec.dk, chunk))
    scores = _scores(spec, np.random.default_rng(seed), queries, stopped)
    counted = spec.samples - chunk * per_chunk * spec.keys
    stats = []
    for factor in factors:
        with np.errstate(under="ignore"):
            found = softmax_stats(scores * factor)
        stats.append([found.entropy_bits.sum(), found.max_weight.sum(), found.softmax_grad.sum()])
        if stopped.is_set():
            raise CancelledError
    return ClusterSums.of(scores, _reference(spec), counted), np.array(stats)


def _reference(spec: ExperimentSpec) -> float:
    """What scores without their constant lie about."""
    entries = spec.distribution
    shared = entries.correlation * (entries.entry_std or 0.0) ** 2
    return 0.0 if entries.entry_mean is None else spec.dk * shared


def _scores(
    spec: ExperimentSpec, rng: np.random.Generator, queries: int, stopped: Event
) -> NDArray[np.float64]:
    """Draw queries, then their keys, and return q·k less its constant, float64 (queries, keys).

    With q = μ + σz and k = μ + σw that is σ·w·q + σμ·Σz.

    einsum, not a matrix product: BLAS may split a sum by the number of threads.
    """
    entries = spec.distribution
    z = entries.standardised(rng, (queries, 1, spec.dk))
    step = max(1, CHUNK_NUMBERS // (queries * spec.dk))  # all keys, unless one query has too many
    parts = []
    q = entries.to_entries(z.copy())
    for at in range(0, spec.keys, step):
        if stopped.is_set():
            raise CancelledError
        e = entries.standardised(rng, (queries, min(step, spec.keys - at), spec.dk))
        k = entries.correlated(z, e)
        k = k if entries.centre else entries.to_entries(k)
        parts.append(np.einsum("qkd,qd->qk", k, q[:, 0]))
    if entries.centre:
        std = 1.0 if entries.entry_std is None else entries.entry_std
        parts = [std * part + std * entries.centre * z.sum(-1) for part in parts]
    return np.concatenate(parts, axis=1)


def _why_no_interval(spec: ExperimentSpec) -> str | None:
    entries = spec.distribution
    if not entries.has_interval:
        return (
            f"student-t with df {entries.df:g}: q·k has no fourth moment, so the error of its "
            f"variance cannot be estimated (df above {8 if entries.correlation else 4} has one)"
        )
    if spec.queries < 2:
        return "one query alone: its keys share it, so nothing tells how far they stray together"
    return None
