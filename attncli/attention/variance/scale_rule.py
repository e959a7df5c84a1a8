"""Rules that give the scale of the scores from the sizes at hand."""

from __future__ import annotations

import math
from enum import StrEnum

from attncli.errors import UsageError


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
        raise UsageError("--scale-rule", f"expected {names} or a finite number, got {text}")
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
