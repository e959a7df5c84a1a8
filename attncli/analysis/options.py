"""What a user says: where Q, K and V come from, and values that hold several things.

Loads nothing, so that help is fast. None means "not given".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

from attncli.attention.options import OPTION_NAMES, Layout, Stage, WeightsLayout, option
from attncli.errors import UsageError, nearest, option_name
from attncli.files.floats import FloatType

Number = TypeVar("Number", int, float)


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
    dtype: FloatType | None = option(
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


# The roles of attention, and what Q, K and V are projected with.
ROLES = ("q", "k", "v")
BIASES = {"bq": "wq", "bk": "wk", "bv": "wv", "bo": "wo"}
PROJECTION_OPTIONS = ("x", "wq", "wk", "wv", "wo", *BIASES)
# Options that shape random tensors, and those that shape packed heads of files as well.
RANDOM_OPTIONS = ("batch", "q_len", "k_len", "dk", "dv", "seed")
RANDOM_OR_PACKED = ("heads", "kv_heads")


def given_of(options: FileOptions, names: Iterable[str]) -> dict[str, Any]:
    """Those of the options that are given."""
    values = {name: getattr(options, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def refuse_inputs(options: FileOptions) -> None:
    """Refuse options of inputs that exclude each other, lack a partner or would do nothing.

    Raises:
        UsageError: naming one of them.
    """
    named, projecting = given_of(options, ROLES), given_of(options, PROJECTION_OPTIONS)
    has_files = bool(options.files or named)
    if options.weights_layout is not WeightsLayout.IN_OUT and not projecting:
        raise UsageError("«weights_layout»", "expected «x» and weights beside it, got none")
    for name in ("layout", "k_layout"):
        if getattr(options, name) in (None, Layout.BHSD):
            continue
        if projecting:
            problem = "expected nothing beside «x», got it; Q, K and V are split by «heads»"
            raise UsageError(f"«{name}»", problem)
        if not has_files and options.qkv is None:
            raise UsageError(f"«{name}»", "expected files beside it, got none")
    fused = options.qkv is not None
    whole = "«x»" if projecting else "«qkv»" if fused else "the files"
    if projecting or fused or has_files:
        refuse_beside(options, RANDOM_OPTIONS, "shapes random tensors", whole)
    if projecting or fused:
        _refuse_others(options, {"qkv": options.qkv} if projecting and fused else named, whole)
    if projecting:
        _refuse_alone(projecting)
    elif fused and options.k_layout is not None:
        raise UsageError("«k_layout»", "expected nothing beside «qkv», got it")
    elif not has_files and not fused and not isinstance(options, InputOptions):
        raise UsageError("FILE", "expected files of Q and K, got none")
    elif not has_files and not fused and options.group:
        raise UsageError("«group»", "expected a bundle beside it, got no file")
    seed = getattr(options, "seed", None)
    if seed is not None and seed < 0:
        raise UsageError("«seed»", f"expected at least 0, got {seed}")


def refuse_beside(options: FileOptions, names: Iterable[str], what: str, beside: str) -> None:
    """Refuse options that have no meaning beside something.

    Raises:
        UsageError: one of them is given.
    """
    for name in given_of(options, names):
        raise UsageError(f"«{name}»", f"expected nothing beside {beside}, got it; it {what}")


def refuse_beside_weights(options: FileOptions) -> None:
    """Refuse options of Q, K and V where weights stand in their place.

    Raises:
        UsageError: one of them is given.
    """
    others = (*ROLES, "qkv", *PROJECTION_OPTIONS, *RANDOM_OPTIONS, *RANDOM_OR_PACKED, "k_layout")
    refuse_beside(options, others, "is about Q, K and V", "«weights»")
    if options.layout is not Layout.BHSD:
        raise UsageError("«layout»", "expected nothing beside «weights», got it")


def _refuse_others(options: FileOptions, named: Mapping[str, Any], beside: str) -> None:
    """Refuse Q, K and V of files beside what they are all made from."""
    if options.files or named:
        other = options.files[0] if options.files else f"«{next(iter(named))}»"
        raise UsageError(other, f"expected no other Q, K or V beside {beside}, got one")


def _refuse_alone(projecting: Mapping[str, Any]) -> None:
    """Refuse projections that lack X, a weight or the weight of their bias."""
    for name in ("x", "wq", "wk"):
        if name not in projecting:
            there = ", ".join(f"«{n}»" for n in projecting)
            problem = f"expected «x», «wq» and «wk» together, got only {there}"
            raise UsageError(f"«{name}»", problem)
    for name, partner in ({"wo": "wv"} | BIASES).items():
        if name in projecting and partner not in projecting:
            raise UsageError(f"«{name}»", f"expected «{partner}» beside it, got none")


class AttentionWords(SimpleNamespace):
    """What is said of each field of `AttentionOptions`, as typed; None where nothing is."""

    panel: ClassVar[str] = "What shapes attention"


def defaults_of(options: Any) -> dict[str, Any]:
    """The default of every option of a group."""
    if isinstance(options, AttentionWords):
        return dict.fromkeys(OPTION_NAMES)
    return {entry.name: entry.default for entry in fields(options)}


def refuse_given(options: Any, why: str, besides: tuple[str, ...] = ()) -> None:
    """Refuse options of a group that would do nothing.

    Args:
        options: the group.
        why: what is expected in their place.
        besides: names of those that may be given.

    Raises:
        UsageError: naming the first that is given.
    """
    for name, default in defaults_of(options).items():
        value = getattr(options, name)
        if value != default and value is not None and name not in besides:
            option = option_name(f"no_{name}" if value is False else name)
            raise UsageError(option, f"{why}, got {option} alone")


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


def stages_named(option: str, names: Sequence[str], offered: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages of these names, in capitals or not.

    Raises:
        UsageError: one that is not offered, or none at all.
    """
    if not names:
        raise UsageError(option, "expected at least one name, got none")
    for name in map(str.casefold, names):
        if name not in offered:
            problem = f"expected one of {', '.join(offered)} for these inputs, got {name!r}"
            advice = nearest(name, offered)
            if name == Stage.OUTPUT:
                advice = "the output needs V, and none was given"
            raise UsageError(option, problem, advice)
    return tuple(Stage(name.casefold()) for name in names)


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
