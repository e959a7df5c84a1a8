"""The command that asks the same again with the options of a mistake: if it passes, that was it."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

from attncli.cli.options import WorkOptions, defaults_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from attncli.attention.problem import Problem

# How results are printed decides nothing about them, and whoever verifies looks at a table.
_PRINTING = {"format", "output", "digits", "unit", "color", "quiet"}
# Hides, caps and adds nothing that float64 would show.
_NO_SOFTCAP, _NO_SINK = 1e9, -1e4


def command_words(
    given: Sequence[Any], changes: Mapping[str, Any], declared: Iterable[str], problem: Problem
) -> list[str]:
    """`attncli check …` with some options changed, as words of a command line.

    Args:
        given: the dataclasses of options that the user gave.
        changes: field of the options → its new value, None for leaving it out.
        declared: options that come from the bundle, which leaving out does not undo.
        problem: to know what undoes them.
    """
    changes = dict(changes)
    for name in declared:
        if name in changes and changes[name] is None:
            changes[name] = _undone(name, problem)
    if changes.get("prefix") is not None:
        changes.pop("causal")
    if "attn_mask" in changes:
        changes["mask_true"] = None
    words = ["attncli", "check"]
    for options in given:
        printed = isinstance(options, WorkOptions)
        for name, default in defaults_of(options).items():
            value = changes.get(name, getattr(options, name))
            if value != default and not (printed and name in _PRINTING):
                words += _words(name, value)
    return words


def with_q_and_k_exchanged(files: Any) -> dict[str, Any]:
    """The fields of the file options with Q and K exchanged; empty where that takes new files."""
    if files.q is not None and files.k is not None:
        return {"q": files.k, "k": files.q}
    positional = files.files or []
    if len(positional) in (2, 3) and files.q is None and files.k is None:
        return {"files": [positional[1], positional[0], *positional[2:]]}
    return {}


def _undone(name: str, problem: Problem) -> Any:
    """A value of an option that comes to the same as not to have it."""
    sizes = problem.sizes
    offset = problem.mask.offset
    away = 0 if offset is None else max(abs(int(position)) for position in offset)
    return {
        "softcap": _NO_SOFTCAP,
        "sinks": (_NO_SINK,) * sizes.heads,
        "key_lengths": sizes.k_len,
        "prefix": sizes.k_len,
        "dilation": 1,
        "left_window": sizes.q_len + sizes.k_len + away,
        "right_window": sizes.q_len + sizes.k_len + away,
    }[name]


def _words(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if name == "files":
        return list(value)
    option = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [option if value else "--no-" + name.replace("_", "-")]
    if isinstance(value, list):
        return [word for one in value for word in (option, str(one))]
    if isinstance(value, tuple):
        return [option, ",".join(map(str, value))]
    return [option, str(value) if isinstance(value, StrEnum) else repr_of(value)]


def repr_of(value: Any) -> str:
    """A number that reads back as itself, a text as it is."""
    return repr(value) if isinstance(value, float) else str(value)
