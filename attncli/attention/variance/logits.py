"""Softmax of a few given logits: with a scale, after it, at temperatures, and done naively."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attncli.attention.statistics import softmax_stats
from attncli.columns import column
from attncli.errors import UsageError

# The d_k of a scale that is not said otherwise.
DEFAULT_DK = 64
# exp(x) is infinite above the logarithm of the largest number.
EXP_LIMITS = {
    name: math.log(float(np.finfo(name).max)) for name in ("float16", "float32", "float64")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsRecord:
    """What one way to take the softmax makes of the logits x."""

    form: str = column("softmax", is_key=True, description="how it was taken")
    dtype: str = column("in", description="what was computed in: float16, float32, float64")
    weights: tuple[float, ...] = column(None, description="one a logit")
    sum: float = column("sum", description="of the weights")
    entropy_nats: float | None = column(
        "entropy", unit="nats", description="−Σ w ln w; none where the weights do not sum to 1"
    )
    entropy_bits: float | None = column("entropy", unit="bits", description="entropy_nats / ln 2")
    max_weight: float | None = column(
        "largest weight", description="0 to 1; none where the weights do not sum to 1"
    )
    softmax_grad: float | None = column(
        "gradient", description="Frobenius norm of the softmax Jacobian, 0 to ½ √2; likewise"
    )


def softmax_of_logits(
    logits: Sequence[float], widths: Sequence[int], temperatures: Sequence[float]
) -> Iterator[LogitsRecord]:
    """Softmax as it is, scaled before and after, at temperatures, and without the maximum.

    Args:
        logits: finite, one at least.
        widths: d_k of the scales 1/√d_k, ≥ 1.
        temperatures: > 0.

    Raises:
        UsageError: something else.
    """
    if not logits or not all(map(math.isfinite, logits)):
        raise UsageError("«logits»", f"expected finite numbers, got {list(logits)}")
    for name, values in (("«dk»", widths), ("«temperatures»", temperatures)):
        for value in values:
            if not 0 < value < math.inf:
                raise UsageError(name, f"expected finite numbers above 0, got {value:g}")
    x = np.array(logits, np.float64)
    yield _stable("softmax(x)", x)
    for dk in widths:
        yield _stable(f"softmax(x / √{dk})", x / math.sqrt(dk))
        yield _record(f"softmax(x) / √{dk}", "float64", _softmax(x) / math.sqrt(dk))
    for temperature in temperatures:
        with np.errstate(over="ignore"):  # the largest is 0, others may lie below all numbers
            below = (x - x.max()) / temperature
        yield _stable(f"softmax(x / {temperature:g})", below.clip(min=np.finfo(np.float64).min))
    for name in EXP_LIMITS:
        with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
            exps = np.exp(x.astype(name))
            yield _record("exp(x) / Σ exp(x)", name, exps / exps.sum(dtype=exps.dtype))


def _softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(over="ignore"):  # of logits further apart than float64 reaches
        exps = np.exp(x - x.max())
    weights: NDArray[np.float64] = exps / exps.sum()
    return weights


def _stable(form: str, x: NDArray[np.float64]) -> LogitsRecord:
    found = softmax_stats(x[None])
    bits = float(found.entropy_bits[0])
    return _record(
        form,
        "float64",
        _softmax(x),
        entropy_bits=bits,
        entropy_nats=bits * math.log(2),
        max_weight=float(found.max_weight[0]),
        softmax_grad=float(found.softmax_grad[0]),
    )


def _record(
    form: str, dtype: str, weights: NDArray[np.floating], **found: float | None
) -> LogitsRecord:
    unknown = dict.fromkeys(("entropy_bits", "entropy_nats", "max_weight", "softmax_grad"))
    return LogitsRecord(
        form=form,
        dtype=dtype,
        weights=tuple(weights.astype(np.float64).tolist()),
        sum=float(weights.sum(dtype=np.float64)),
        **unknown | found,
    )
