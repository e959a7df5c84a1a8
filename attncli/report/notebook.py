"""Results as a notebook shows them: tables of their commands, in HTML for light and dark."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from attncli.report.drawing import pictures, require_picture
from attncli.report.printer import UNLIMITED, Printer

DIGITS = 4
WIDTH = 160
HEIGHT = 44
# Text has the notebook's own colours; what is shaded brings both of its own.
FRAME = (
    '<pre style="overflow-x:auto;white-space:pre;line-height:1.25;background:none;color:inherit">'
    "{code}</pre>"
)


class Shown:
    """A result that a notebook shows as the tables of its command, and that can be drawn."""

    __slots__ = ()
    drawn_by = "plots"  # the module that draws it

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._said()})"

    def _repr_html_(self) -> str:
        """The tables of the command, long ones cut."""
        printer = NotebookPrinter()
        return html(self._tables(printer), printer)

    def plot(self, path: str | None = None) -> Any:
        """A picture, as the command draws it: a `matplotlib.figure.Figure` that notebooks show.

        Args:
            path: where to write it, too: .png, .svg or .pdf.

        Raises:
            DataError: the place cannot be written.
            UsageError: there is no matplotlib, or a name that says no format.
        """
        if path is not None:
            require_picture(path)
        figure = self._picture(pictures(self.drawn_by))
        if path is not None:
            figure.write(path)
        return figure

    def _said(self) -> str:
        """What it is, in a few words."""
        raise NotImplementedError

    def _tables(self, printer: Printer) -> Iterator[RenderableType]:
        """What is shown of it, from top to bottom."""
        raise NotImplementedError

    def _picture(self, plots: Any) -> Any:
        """The picture, by the module that draws."""
        raise NotImplementedError


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
