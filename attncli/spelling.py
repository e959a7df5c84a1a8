"""How options are spelt on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

# Between the numbers of one batch and those of the next.
ROWS = "/"


def option_name(field: str) -> str:
    """The option of a field: key_lengths is --key-lengths."""
    return "--" + field.replace("_", "-")


def option_words(field: str, value: Any) -> list[str]:
    """One option as words of a command line that read back as its value; none for None.

    Args:
        field: its name in Python.
        value: a number, a text, True or False, several (a tuple or an array, joined by commas, rows
            of one by `ROWS`) or a list, for each of which the option is repeated.
    """
    if value is None:
        return []
    if isinstance(value, bool):
        return [option_name(field if value else f"no_{field}")]
    if isinstance(value, list):
        return [word for one in value for word in (option_name(field), _text(one))]
    return [option_name(field), _joined(value)]


def _joined(value: Any) -> str:
    if not isinstance(value, tuple) and not getattr(value, "shape", ()):
        return _text(value)
    return (ROWS if len(getattr(value, "shape", ())) > 1 else ",").join(map(_joined, value))


def options_text(changes: Mapping[str, Any]) -> str:
    """Options side by side, those to be left out, whose value is None, last."""
    words = [word for field, value in changes.items() for word in option_words(field, value)]
    left_out = [option_name(field) for field, value in changes.items() if value is None]
    return " ".join([*words, *(["without", *left_out] if left_out else [])])


def _text(value: Any) -> str:
    if isinstance(value, StrEnum) or not hasattr(value, "item"):
        return repr(value) if isinstance(value, float) else str(value)
    item = value.item()  # of an array, which lists True and False as 1 and 0
    return _text(int(item) if isinstance(item, bool) else item)
