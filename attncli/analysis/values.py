"""Option values that hold several things: repeated, comma-separated, or in a file."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from typing import TypeVar

from attncli.errors import UsageError

Number = TypeVar("Number", int, float)
Choice = TypeVar("Choice", bound=StrEnum)


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


def int_ranges(option: str, given: list[str] | None) -> tuple[int, ...] | None:
    """Whole numbers, ranges A:B that double, A:B:xF that multiply, A:B:+D that add.

    Raises:
        UsageError: something else, or a range that does not climb.
    """
    if given is None:
        return None
    return tuple(number for part in _parts(option, given) for number in _int_range(option, part))


def _int_range(option: str, text: str) -> list[int]:
    pieces = text.split(":")
    expected = "whole numbers, A:B, A:B:xF or A:B:+D"
    if len(pieces) == 1:
        return [_number(option, text, int, expected)]
    step = pieces[2] if len(pieces) == 3 else "x2"
    if len(pieces) > 3 or step[:1] not in ("x", "+"):
        raise UsageError(option, f"expected {expected}, got {text!r}")
    low, high, by = (_number(option, p, int, expected) for p in (*pieces[:2], step[1:]))
    if low < 1 or high < low or by < (2 if step[0] == "x" else 1):
        raise UsageError(option, f"expected a range that climbs, got {text!r}")
    numbers = [low]
    while (following := numbers[-1] * by if step[0] == "x" else numbers[-1] + by) <= high:
        numbers.append(following)
    return numbers


def floats(option: str, given: list[str] | None) -> tuple[float, ...] | None:
    """Finite numbers of an option; None where it is not given.

    Raises:
        UsageError: something else than finite numbers.
    """
    if given is None:
        return None
    return tuple(_number(option, part, float, "finite numbers") for part in _parts(option, given))


def finite(option: str, value: float) -> float:
    """A number that is neither infinite nor NaN.

    Raises:
        UsageError: it is.
    """
    if not math.isfinite(value):
        raise UsageError(option, f"expected a finite number, got {value}")
    return value


def _parts(option: str, given: list[str]) -> list[str]:
    parts = several(given)
    if not parts:
        raise UsageError(option, "expected at least one value, got none")
    return parts


def _number(option: str, text: str, kind: Callable[[str], Number], expected: str) -> Number:
    try:
        value = kind(text if text.isascii() else "")
    except ValueError:
        raise UsageError(option, f"expected {expected}, got {text!r}") from None
    if isinstance(value, int):
        refuse_beyond_64_bits(option, value)
    elif not math.isfinite(value):
        raise UsageError(option, f"expected {expected}, got {text}")
    return value


def refuse_beyond_64_bits(option: str, value: int) -> None:
    """Sizes and ids are signed numbers of 64 bits everywhere.

    Raises:
        UsageError: a number that needs more.
    """
    if not -(2**63) <= value < 2**63:
        raise UsageError(option, f"expected a whole number of 64 bits, got {value}")


def choice_of(kind: type[Choice], value: str, where: str) -> Choice:
    """The member of an enumeration that a string names.

    Raises:
        UsageError: there is none; lists those there are.
    """
    try:
        return kind(value)
    except ValueError:
        raise UsageError(where, f"expected one of {', '.join(kind)}, got {value!r}") from None
