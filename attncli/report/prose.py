"""Widths of text, lines that stand out, and prose in lines that the eye can follow."""

from __future__ import annotations

import textwrap

from rich.cells import cell_len, set_cell_size
from rich.console import RenderableType

from attncli.report.printer import Printer

PROSE_WIDTH = 88


def heading(text: str, printer: Printer) -> RenderableType:
    """A line that stands out where there is colour."""
    return printer.styled((text, "bold"))


def paragraph(text: str, printer: Printer, *, style: str = "", lead: str = "") -> RenderableType:
    """Prose, indented, in lines that the eye can follow however wide the output is."""
    indent = "   "
    wrapped = textwrap.fill(
        text,
        min(printer.width, PROSE_WIDTH),
        initial_indent=indent + lead,
        subsequent_indent=indent + " " * len(lead),
        break_long_words=False,
    )
    return printer.styled((wrapped, style))


def text_width(text: str) -> int:
    """Columns of the terminal that a text takes."""
    return len(text) if text.isascii() else cell_len(text)


def aligned(text: str, width: int, *, left: bool = False) -> str:
    """The text filled up with spaces to a width on the terminal."""
    space = " " * (width - text_width(text))
    return text + space if left else space + text


def shortened(text: str, width: int) -> str:
    """The text cut to a width on the terminal, with an ellipsis."""
    if text_width(text) <= width:
        return text
    return set_cell_size(text, max(0, width - 1)).rstrip() + "…"
