"""Pages on a terminal that are turned by keys, forward and back."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer
from rich.console import Console, RenderableType

from attncli.report.printer import Printer

PROMPT = "→ next · ← back · 1 to 9, Home, End: go to · q: quit "
PLAIN_PROMPT = "n: next, b: back, 1 to 9, Home, End: go to, q: quit "

# What terminals send for keys that have no letter, and what Windows does.
LEFT = {"\x1b[D", "\x1bOD", "\x1b[A", "\x1bOA", "\x1b[5~", "\xe0K", "\xe0H", "\xe0I"}
RIGHT = {"\x1b[C", "\x1bOC", "\x1b[B", "\x1bOB", "\x1b[6~", "\xe0M", "\xe0P", "\xe0Q"}
HOME = {"\x1b[H", "\x1bOH", "\x1b[1~", "\x1b[7~", "\xe0G"}
END = {"\x1b[F", "\x1bOF", "\x1b[4~", "\x1b[8~", "\xe0O"}
NEXT, BACK = RIGHT | set("nN +"), LEFT | set("pPbB-\x7f\x08")
FIRST, LAST, QUIT = HOME | {"g"}, END | {"G"}, set("qQ\x1b\x04")
ENTER = set("\r\n")


def turn_pages(pages: Sequence[Sequence[RenderableType]], printer: Printer) -> None:
    """Show one page at a time, until its reader leaves; Enter leaves behind the last."""
    at: int | None = 0
    while at is not None:
        Console(legacy_windows=False).clear()
        printer.show(*pages[at])
        prompt = printer.sign(PROMPT, PLAIN_PROMPT)
        sys.stdout.write(f"[{at + 1}/{len(pages)}] {prompt}")
        sys.stdout.flush()
        try:
            at = page_after(typer.getchar(), at, len(pages))
        except EOFError:  # ^D
            at = None
        finally:
            sys.stdout.write("\n")


def page_after(key: str, at: int, count: int) -> int | None:
    """Which page a key leads to from page `at` of so many, counted from 0; None for none."""
    if key in ENTER:
        return at + 1 if at + 1 < count else None
    if key in QUIT:
        return None
    if key in NEXT:
        return min(at + 1, count - 1)
    if key in BACK:
        return max(at - 1, 0)
    if key in FIRST:
        return 0
    if key in LAST:
        return count - 1
    if key.isascii() and key.isdigit():
        return min(int(key) - 1, count - 1) if key != "0" else min(9, count - 1)
    return at
