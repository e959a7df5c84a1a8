"""Is what a program computed right? One way for the command line and for Python."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from attncli.attention.check.candidate import Target
from attncli.columns import record_of
from attncli.errors import UsageError


def require_candidates(
    given: Iterable[str], rtol: float | None, atol: float | None, *, pair: bool = False
) -> None:
    """Refuse what makes no check, before anything is loaded.

    Args:
        given: the targets of the candidates.
        rtol, atol: tolerances of the caller; None for those of the dtype.
        pair: whether a second candidate is to be compared with the one given.

    Raises:
        UsageError: no candidate, several of them for a pair, or a tolerance that is none.
    """
    count = len(list(given))
    if not count:
        names = ", ".join(f"«actual_{target}»" for target in Target)
        raise UsageError("check", f"expected one of {names}, got none")
    if pair and count > 1:
        raise UsageError("«pair»", f"expected one candidate beside it, got {count}")
    for name, value in (("«rtol»", rtol), ("«atol»", atol)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise UsageError(name, f"expected a finite number of at least 0, got {value}")


def listed(result: Any) -> dict[str, Any]:
    """The record of a result, in which indices are lists."""
    record = record_of(result)
    return {key: list(v) if isinstance(v, tuple) else v for key, v in record.items()}
