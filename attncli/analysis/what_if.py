"""What if: changes of attention as they are typed, and the problems that they make of a problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from attncli.analysis.attention_arguments import NONE, typed
from attncli.analysis.options import floats, integers
from attncli.attention.masks.rules import KeptKeys
from attncli.attention.nonfinite import all_finite
from attncli.attention.options import OPTIONS, AttentionOptions, Kind, Precision
from attncli.attention.problem import Problem, make_problem
from attncli.attention.stages import Selection
from attncli.attention.streaming.stream import Wanted, stream_rows
from attncli.errors import DataError, UsageError
from attncli.files.tensor import FLOATS

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

Tensors = dict[str, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Change:
    """What is different in one what-if.

    Attributes:
        text: as typed, words side by side.
        options: field of `AttentionOptions` → value.
        rounded: "q", "k" or "v" → what rounds it, of a tensor (B, H, S, d).
        kept: how many keys a cache keeps: "first", "last", "heavy"; empty for all.
        warnings: what reading files gave rise to.
    """

    text: str
    options: Mapping[str, Any] = field(default_factory=dict)
    rounded: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
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
            meant = [near.replace("_", "-") for near in get_close_matches(name, known, 1)]
            expected = "expected OPTION=VALUE with an option that shapes attention, q-dtype, "
            advice = f"was {meant[0]} meant?" if meant and name not in known else ""
            raise UsageError(
                WHERE, f"{expected}k-dtype, v-dtype or keep-keys, got {text!r}", advice
            )
        alternatives.setdefault(name, []).append(_read(text, name, value.strip()))
    return [_together(parts) for parts in product(*alternatives.values())] if given else []


def _together(parts: Sequence[Change]) -> Change:
    return Change(
        " ".join(part.text for part in parts),
        {name: value for part in parts for name, value in part.options.items()},
        {role: function for part in parts for role, function in part.rounded.items()},
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


def _rounding(text: str, value: str) -> Callable[[torch.Tensor], torch.Tensor]:
    name, _, shared = value.partition(":")
    scaled = name in INTEGERS or name.startswith("float8")
    if name not in (*FLOATS, *INTEGERS):
        raise UsageError(WHERE, f"expected one of {', '.join([*FLOATS, *INTEGERS])}, got {text!r}")
    if shared and not scaled:
        raise UsageError(WHERE, f"expected a scale with int8, int4 or float8 alone, got {text!r}")
    if shared and shared not in SHARED:
        raise UsageError(WHERE, f"expected one of {', '.join(SHARED)} after ':', got {text!r}")
    dtype = None if name in INTEGERS else getattr(torch, name)
    if dtype is not None and not shared:
        return partial(_cast, dtype=dtype)
    top = INTEGERS[name] if dtype is None else torch.finfo(dtype).max
    return partial(_quantised, dtype=dtype, top=top, axes=SHARED[shared or "tensor"])


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Floats of at least 32 bits that hold the same numbers."""
    exact = tensor.dtype == torch.float64 or not tensor.is_floating_point()
    return tensor.to(torch.float64 if exact else torch.float32)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    wide = _wide(tensor)
    return wide.to(dtype).to(wide.dtype)


def _quantised(
    tensor: torch.Tensor, dtype: torch.dtype | None, top: float, axes: tuple[int, ...]
) -> torch.Tensor:
    """Numbers as multiples of a scale that takes the largest to `top`, rounded, and back.

    Args:
        tensor: (B, H, S, d).
        dtype: what the multiples are rounded to; None for integers.
        top: the largest of them.
        axes: over which the largest number is looked for.
    """
    wide = _wide(tensor)
    if not wide.numel():
        return wide
    scale = wide.abs().amax(axes, keepdim=True) / top
    units = wide / scale.masked_fill(scale == 0, 1.0)
    return (units.round() if dtype is None else units.to(dtype).to(wide.dtype)) * scale


def _kept(text: str, value: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in value.split(","):
        name, _, count = part.partition(":")
        if name not in KEPT or name in found or not (count.isascii() and count.isdecimal()):
            raise UsageError(WHERE, f"expected first:N, last:N or heavy:N once each, got {text!r}")
        found[name] = int(count)
    return found


def changed(
    problem: Problem, options: AttentionOptions, change: Change, selection: Selection
) -> tuple[Problem, list[str]]:
    """The problem under a change, with what is new to say of it.

    Args:
        problem: as it is.
        options: what it was made of.
        change: what is different.
        selection: batches and heads that will be looked at.

    Raises:
        UsageError: the change does not fit the problem.
        DataError: likewise, of arrays.
    """
    values, kept, said = dict(change.options), dict(change.kept), list(change.warnings)
    window = values.get("left_window", options.left_window)
    if kept.get("last") and "heavy" not in kept and window is None:
        # With first keys a window with sinks, of which streaming knows where it shows nothing.
        values |= {"left_window": kept.pop("last") - 1, "sink_window": kept.pop("first", 0)}
    tensors: Tensors = {role: getattr(problem, role) for role in "qkv"}
    for role, function in change.rounded.items():
        tensor = tensors[role]
        if tensor is None:
            raise DataError(role, f"expected values for {change.text}, got none")
        tensors[role] = new = function(tensor)
        if all_finite(tensor) and not all_finite(new):
            said.append(f"{change.text}: numbers of {role} beyond its range became NaN or infinite")
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    assert q is not None
    assert k is not None
    made = make_problem(
        q,
        k,
        v,
        replace(options, **values),
        heads=problem.sizes.heads,  # which axes are which is settled
        kv_heads=problem.kv_heads,
        precision=Precision(str(problem.dtype).removeprefix("torch.")),
        device=str(problem.device),
        allow_nonfinite=True,
    )
    fresh = [text for text in made.marked_warnings if text not in problem.marked_warnings]
    said += [f"{change.text}: {text}" for text in fresh]
    if kept:
        made = replace(made, mask=made.mask.also(_cache(problem, made, kept, selection)))
    return made, said


def _cache(problem: Problem, made: Problem, kept: Mapping[str, int], chosen: Selection) -> KeptKeys:
    """The rule of a cache: the first keys, the heaviest of each head, the latest of each query."""
    sizes = problem.sizes
    shape = (sizes.batch, sizes.heads) if "heavy" in kept else (1, 1)
    stay = np.zeros((*shape, 1, sizes.k_len), np.bool_)
    stay[..., : kept.get("first", 0)] = True
    if "heavy" in kept:
        wanted = Wanted(per_key=True)
        for rows in stream_rows(problem, wanted, batches=chosen.batches, heads=chosen.heads):
            assert rows.received is not None
            mass = rows.received.mass.nan_to_num(-1.0)
            heavy = mass.argsort(descending=True, stable=True)[: kept["heavy"]]
            stay[rows.batch, rows.head, 0, heavy.cpu().numpy()] = True
    latest = np.full((1, sizes.q_len), sizes.k_len, np.int64)
    if kept.get("last"):
        latest = made.mask.positions(slice(None), slice(None)) + 1 - kept["last"]
    return KeptKeys(stay, latest)
