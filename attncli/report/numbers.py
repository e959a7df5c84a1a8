"""Numbers as programs and people read them: shortest round-trip, or a fixed number of decimals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

# With fewer decimals than these their user wants few characters, not small numbers.
SCIENTIFIC_FROM = 3


def strict(value: Any) -> Any:
    """A value as strict JSON can hold it: a number that is not finite becomes None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: strict(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [strict(part) for part in value]
    return value


def shortest(array: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """float64 values that print as the shortest decimal that gives back the array's own value.

    float32 0.1 is 0.10000000149011612 in float64; a reader wants to see 0.1.
    """
    short = array if array.dtype == np.float64 else array.astype(np.str_)
    return short.astype(np.float64, copy=False)


def field(value: Any) -> str:
    """A CSV field: empty for None, nan, inf and -inf spelt out, true and false as in JSON."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return repr(value) if isinstance(value, float) else str(value)


def decimals(value: float | None, digits: int) -> str:
    """A number for a table: fixed decimals, scientific where those would hide it."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    size = abs(value)
    hidden = digits >= SCIENTIFIC_FROM and size < 0.5 * 10.0**-digits
    if size and (size >= 1e7 or hidden):
        return f"{value:.{max(digits - 2, 1)}e}"
    return f"{round(value, digits) + 0.0:.{digits}f}"  # + 0.0 turns −0 into 0
