"""Options as one would type them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attncli.errors import on_command_line


def option_words(name: str, value: Any) -> list[str]:
    """One option as words of a command line; none for None.

    Args:
        name: of its field: "left_window".
        value: a list stands for an option that is repeated, a tuple for numbers in one word.
    """
    if value is None:
        return []
    if isinstance(value, bool):
        return [on_command_line(f"«{name}»" if value else f"«no_{name}»")]
    option = on_command_line(f"«{name}»")
    if isinstance(value, list):
        return [word for one in value for word in (option, str(one))]
    if isinstance(value, tuple):
        return [option, ",".join(map(str, value))]
    # A float must read back as itself.
    return [option, repr(value) if isinstance(value, float) else str(value)]


def options_text(options: Mapping[str, Any]) -> str:
    """Options in one line."""
    return " ".join(word for item in options.items() for word in option_words(*item))
