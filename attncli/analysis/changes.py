"""What if: changes of attention as they are typed. Needs no torch: `what_if` makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

from attncli.analysis.attention_arguments import NONE, typed
from attncli.analysis.options import floats, integers
from attncli.attention.options import OPTIONS, AttentionOptions, Kind, require_values
from attncli.errors import UsageError, nearest
from attncli.files.floats import SHORT_FLOATS, FloatType

WHERE = "«what_if»"
KEEP_KEYS = "keep_keys"
ROUNDED = {"q_dtype": "q", "k_dtype": "k", "v_dtype": "v"}
# The largest integer of each type, symmetric about 0.
INTEGERS = {"int8": 127, "int4": 7}
# What shares a scale, as the axes of (B, H, S, d) that its maximum is taken over.
SHARED = {"tensor": (0, 1, 2, 3), "head": (2, 3), "token": (3,), "channel": (2,)}
KEPT = ("first", "last", "heavy")
_DEFAULTS = {entry.name: entry.default for entry in fields(AttentionOptions)}
_SWITCHES = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True, slots=True)
class Rounding:
    """What numbers of a tensor are rounded to.

    Attributes:
        name: a floating-point type, or one of `INTEGERS`.
        shared: of `SHARED`, what has a scale of its own; "" for no scale.
    """

    name: str
    shared: str


@dataclass(frozen=True, slots=True)
class Change:
    """What is different in one what-if.

    Attributes:
        text: as typed, words side by side.
        options: field of `AttentionOptions` → value.
        rounded: "q", "k" or "v" → what it is rounded to.
        kept: how many keys a cache keeps: "first", "last", "heavy"; empty for all.
        warnings: what reading files gave rise to.
    """

    text: str
    options: Mapping[str, Any] = field(default_factory=dict)
    rounded: Mapping[str, Rounding] = field(default_factory=dict)
    kept: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def read_changes(given: Sequence[str]) -> list[Change]:
    """What-ifs from OPTION=VALUE: those of one option are alternatives, different ones combine.

    Raises:
        UsageError: a word that is no option, or a value that it does not take.
        DataError: a file that cannot be read.
    """
    alternatives: dict[str, list[Change]] = {}
    for text in dict.fromkeys(given):
        word, _, value = text.partition("=")
        name = word.strip().replace("-", "_")
        known = (*OPTIONS, *ROUNDED, KEEP_KEYS)
        if name not in known or not value:
            options = "an option that shapes attention, q-dtype, k-dtype, v-dtype or keep-keys"
            names = [one.replace("_", "-") for one in known]
            advice = "" if name in known else nearest(word.strip(), names)
            raise UsageError(WHERE, f"expected OPTION=VALUE with {options}, got {text!r}", advice)
        change = _read(text, name, value.strip())
        require_values(change.options)
        alternatives.setdefault(name, []).append(change)
    return [_together(parts) for parts in product(*alternatives.values())] if given else []


def _together(parts: Sequence[Change]) -> Change:
    return Change(
        " ".join(part.text for part in parts),
        {name: value for part in parts for name, value in part.options.items()},
        {role: to for part in parts for role, to in part.rounded.items()},
        {name: count for part in parts for name, count in part.kept.items()},
        tuple(said for part in parts for said in part.warnings),
    )


def _read(text: str, name: str, value: str) -> Change:
    if name in ROUNDED:
        return Change(text, rounded={ROUNDED[name]: _rounding(text, value)})
    if name == KEEP_KEYS:
        return Change(text, kept=_kept(text, value))
    if value == NONE:
        return Change(text, {name: _DEFAULTS[name]})
    kind, where = OPTIONS[name].kind, f"«{name}»"
    words: Any = [value]
    if kind is Kind.FLAG:
        if value not in _SWITCHES:
            raise UsageError(where, f"expected true or false, got {value!r}")
        return Change(text, {name: _SWITCHES[value]})
    if kind in (Kind.NUMBER, Kind.WHOLE):
        numbers = floats(where, words) if kind is Kind.NUMBER else integers(where, words)
        if numbers is None or len(numbers) != 1:
            raise UsageError(where, f"expected one number, got {value!r}")
        words = numbers[0]
    elif kind in (Kind.ARRAY, Kind.CHOICE):
        words = value
    warnings: list[str] = []
    return Change(text, {name: typed(name, words, {}, warnings)}, warnings=tuple(warnings))


def _rounding(text: str, value: str) -> Rounding:
    name, _, shared = value.partition(":")
    name = SHORT_FLOATS.get(name, name)
    offered = (*FloatType, *INTEGERS)
    if name not in offered:
        problem = f"expected one of {', '.join(offered)}, got {text!r}"
        raise UsageError(WHERE, problem, nearest(name, offered))
    if shared and not (name in INTEGERS or name.startswith("float8")):
        raise UsageError(WHERE, f"expected a scale with int8, int4 or float8 alone, got {text!r}")
    if shared and shared not in SHARED:
        raise UsageError(WHERE, f"expected one of {', '.join(SHARED)} after ':', got {text!r}")
    return Rounding(name, shared)


def _kept(text: str, value: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in value.split(","):
        name, _, count = part.partition(":")
        if name not in KEPT or name in found or not (count.isascii() and count.isdecimal()):
            raise UsageError(WHERE, f"expected first:N, last:N or heavy:N once each, got {text!r}")
        found[name] = int(count)
    return found
