"""What a user says: where Q, K and V come from, and values that hold several things.

Loads nothing, so that help is fast. None means "not given".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

from attncli.attention.options import OPTION_NAMES, Layout, WeightsLayout, option
from attncli.errors import UsageError, nearest

Number = TypeVar("Number", int, float)
Choice = TypeVar("Choice", bound=StrEnum)


@dataclass(slots=True, eq=False, repr=False)
class FileOptions:
    """Which files Q, K and V come from, and how to read them."""

    panel: ClassVar[str] = "Inputs"

    files: list[str] | None = option(
        None,
        "Q, K and V files in this order, or a bundle with tensors named q, k, v; "
        "'-' is standard input.",
        "FILE",
        positional=True,
    )
    q: str | None = option(None, "The queries.", "FILE[::NAME]")
    k: str | None = option(None, "The keys.", "FILE[::NAME]")
    v: str | None = option(None, "The values.", "FILE[::NAME]")
    qkv: str | None = option(
        None,
        "Q, K and V fused in one tensor: it is split, with «heads» where packed.",
        "FILE[::NAME]",
    )
    group: list[str] | None = option(None, "Analyse only these groups of a bundle.", "NAME")
    x: str | None = option(None, "Project X (S, d) or (B, S, d) first.", "FILE")
    wq: str | None = option(None, "W_Q for «x».", "FILE")
    wk: str | None = option(None, "W_K for «x».", "FILE")
    wv: str | None = option(None, "W_V for «x».", "FILE")
    wo: str | None = option(None, "W_O, adds the stage 'projected'.", "FILE")
    bq: str | None = option(None, "Bias after «wq», (H·d_k).", "FILE")
    bk: str | None = option(None, "Bias after «wk».", "FILE")
    bv: str | None = option(None, "Bias after «wv».", "FILE")
    bo: str | None = option(None, "Bias after «wo».", "FILE")
    weights_layout: WeightsLayout = option(
        WeightsLayout.IN_OUT, "in-out: x @ w; out-in: the weight of an nn.Linear."
    )
    layout: Layout = option(
        Layout.BHSD,
        "Order of the axes: bhsd is (B, H, S, d); bsh and sbh pack heads, (B, S, H·d).",
    )
    k_layout: Layout | None = option(None, "That of K, if another: bhds is (B, H, d, S).")
    heads: int | None = option(None, "Query heads.", "H")
    kv_heads: int | None = option(None, "Key and value heads. [default: H]", "H")
    dtype: str | None = option(
        None, "Cast on loading; of 16-bit integers, a 16-bit float says what bits they are.", "NAME"
    )
    allow_nonfinite: bool = option(False, "Carry on with NaN and inf, as IEEE says.")


@dataclass(slots=True, eq=False, repr=False)
class InputOptions(FileOptions):
    """Where Q, K and V come from: files, or random draws of these sizes."""

    batch: int | None = option(None, "Random tensors: batches. [default: 1]", "B")
    q_len: int | None = option(None, "Random tensors: S_q. [default: 8]", "N")
    k_len: int | None = option(None, "Random tensors: S_k. [default: 8]", "N")
    dk: int | None = option(None, "Random tensors: d_k. [default: 64]", "N")
    dv: int | None = option(None, "Random tensors: d_v. [default: d_k]", "N")
    seed: int | None = option(None, "Random tensors: the seed. [default: 0]", "N")


class AttentionWords(SimpleNamespace):
    """What is said of each field of `AttentionOptions`, as typed; None where nothing is."""

    panel: ClassVar[str] = "What shapes attention"


def defaults_of(options: Any) -> dict[str, Any]:
    """The default of every option of a group."""
    if isinstance(options, AttentionWords):
        return dict.fromkeys(OPTION_NAMES)
    return {entry.name: entry.default for entry in fields(options)}


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


# More than a table or a chart can show, and than an afternoon can draw.
MOST_NUMBERS = 10_000


def indices(option: str, given: list[str] | None) -> tuple[int | slice, ...] | None:
    """Whole numbers and ranges A:B without their end, as Python has them; None for no option.

    Raises:
        UsageError: something else.
    """
    if given is None:
        return None
    expected = "whole numbers or A:B"
    found: list[int | slice] = []
    for part in _parts(option, given):
        ends = part.split(":")
        if len(ends) > 2:
            raise UsageError(option, f"expected {expected}, got {part!r}")
        numbers = [_number(option, end, int, expected) if end else None for end in ends]
        found.append(slice(*numbers) if len(ends) == 2 else _number(option, part, int, expected))
    return tuple(found)


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
    if step[0] == "+" and (high - low) // by >= MOST_NUMBERS:
        problem = f"expected at most {MOST_NUMBERS:,} numbers, got {(high - low) // by + 1:,}"
        raise UsageError(option, problem, "a larger step D, or A:B:xF, gives fewer")
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
        problem = f"expected one of {', '.join(kind)}, got {value!r}"
        raise UsageError(where, problem, nearest(str(value), kind)) from None
