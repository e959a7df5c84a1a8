"""Lines that stand out, and prose in lines that the eye can follow."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
