"""Option values that hold several things: repeated, comma-separated, or in a file."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from attncli.errors import UsageError

Number = TypeVar("Number", int, float)


def several(given: list[str] | None) -> list[str]:
    """The parts of an option that is repeated or comma-separated, in order."""
    return [part.strip() for text in given or () for part in text.split(",") if part.strip()]


def integers(option: str, given: list[str] | None) -> tuple[int, ...] | None:
    """Whole numbers of an option; None where it is not given.

    Raises:
        UsageError: something else than whole numbers.
    """
    if given is None:
        return None
    return tuple(_number(option, part, int, "whole numbers") for part in _parts(option, given))


def floats(option: str, given: list[str] | None) -> tuple[float, ...] | None:
    """Finite numbers of an option; None where it is not given.

    Raises:
        UsageError: something else than finite numbers.
    """
    if given is None:
        return None
    return tuple(_number(option, part, float, "finite numbers") for part in _parts(option, given))


def _parts(option: str, given: list[str]) -> list[str]:
    parts = several(given)
    if not parts:
        raise UsageError(option, "expected at least one value, got none")
    return parts


def _number(option: str, text: str, kind: Callable[[str], Number], expected: str) -> Number:
    try:
        value = kind(text)
    except ValueError:
        raise UsageError(option, f"expected {expected}, got {text!r}") from None
    if not math.isfinite(value):
        raise UsageError(option, f"expected {expected}, got {text}")
    return value
