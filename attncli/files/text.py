"""Words for messages: names made safe to print, lists cut short, sizes for people."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from rich.filesize import decimal

from attncli.errors import printable

ACCEPTED = "a .npy, .npz, .safetensors or .pt file"


def shown(text: str, limit: int = 200) -> str:
    """Return `text` with everything unprintable escaped and cut to `limit` characters.

    File names and the names inside a file may hold terminal codes, line ends or undecodable
    bytes: none of them may reach a terminal as they are.
    """
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return printable(cut)


def place(source: str) -> str:
    """Return what messages call the file that the user named `source`."""
    return "standard input" if source == "-" else shown(source)


def natural_order(name: str) -> list[tuple[int, str]]:
    """A sort key that puts layers.2 before layers.10."""
    parts = re.split(r"(\d+)", name)
    numbers = [digits.lstrip("0") for digits in parts[1::2]]
    # Numbers by length, then digits: they may be too long to convert.
    parts[1::2] = numbers
    return [(len(part) if at % 2 else 0, part) for at, part in enumerate(parts)]


def listed(names: Iterable[str | None], limit: int = 8) -> str:
    """Return the names joined by commas, those past `limit` only counted."""
    known = [shown(name, 80) if name is not None else "(no name)" for name in names]
    rest = len(known) - limit
    return ", ".join(known[:limit]) + (f" and {rest:,} more" if rest > 0 else "")


def count_text(count: float) -> str:
    """Return a number of things for people, in a decimal unit where it is large."""
    units = ("", " k", " M", " G", " T", " P", " E")
    at = 0
    while count >= 999.5 and at + 1 < len(units):
        count, at = count / 1000, at + 1
    return f"{count:.3g}{units[at]}"


def size_text(size: int) -> str:
    """Return a number of bytes for people, in a decimal unit."""
    return decimal(size)


# Unlike those of Path, these have an answer for names that are too long for any file.


def is_file(path: str | Path) -> bool:
    """Whether there is a file of this name."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: str | Path) -> bool:
    """Whether there is a folder of this name."""
    return os.path.isdir(path)  # noqa: PTH112
