"""Tables as a notebook shows them: those of the command line, as HTML that suits light and dark."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.text import Text

from attncli.report.printer import UNLIMITED, Printer

WIDTH = 160
HEIGHT = 44
# Text has the notebook's own colours; what is shaded brings both of its own.
FRAME = (
    '<pre style="overflow-x:auto;white-space:pre;line-height:1.25;background:none;color:inherit">'
    "{code}</pre>"
)


class NotebookPrinter(Printer):
    """A terminal of fixed size with every colour: long tables are cut, and say so."""

    @property
    def on_terminal(self) -> bool:
        """So much as a page of a notebook is read at once."""
        return True

    @property
    def width(self) -> int:
        """Columns that a table may take."""
        return WIDTH

    @property
    def height(self) -> int:
        """Lines that are seen at once."""
        return HEIGHT

    @property
    def colored(self) -> bool:
        """HTML has colour."""
        return True

    def console(self) -> Console:
        """A rich console that knows nothing of the notebook that it runs in."""
        return _console(io.StringIO(), record=False)

    def sign(self, usual: str, plain: str) -> str:
        """HTML has every sign."""
        return usual


def html(parts: Iterable[RenderableType], printer: NotebookPrinter) -> str:
    """Tables and lines one below another, as HTML that runs nothing and loads nothing."""
    text = "".join(printer.rendered(part) for part in parts)
    console = _console(io.StringIO(), record=True)
    console.print(Text.from_ansi(text), soft_wrap=True)
    return console.export_html(code_format=FRAME, inline_styles=True)


def _console(file: io.StringIO, *, record: bool) -> Console:
    return Console(
        file=file,
        record=record,
        width=WIDTH,
        height=UNLIMITED,
        force_terminal=True,
        force_jupyter=False,
        color_system="truecolor",
        legacy_windows=False,
        markup=False,
        emoji=False,
        highlight=False,
    )
