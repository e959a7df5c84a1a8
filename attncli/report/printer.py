"""The one place that prints: results to standard output or a file, the rest to standard error.

For eyes it draws with rich; for programs it writes the envelope of JSON, records in NDJSON and CSV,
and their numbers.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.text import Text

from attncli import __version__
from attncli.errors import on_command_line, printable
from attncli.files.target import once_there
from attncli.files.writer import write_text
from attncli.report import FALLBACKS, Color, Format

# Off a terminal nothing is cut: wider than any table, and higher, since rich wants both.
UNLIMITED = 1_000_000
PROSE_WIDTH = 88
INDENT = 3  # of prose
HANGING = 2  # columns of further lines of prose that is broken


class Preformatted(str):
    """Text that is laid out already, and is not to be broken into lines."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class Printer:
    """Where output goes and what it can show."""

    target: str = "-"  # file to write, or "-" for standard output
    color: Color = Color.AUTO  # when to colour
    quiet: bool = False  # whether warnings and progress are left out
    warned: list[str] = field(default_factory=list)  # the warnings given so far, each once

    @property
    def on_terminal(self) -> bool:
        """Whether people will read the results in a terminal as they come."""
        return self.target == "-" and sys.stdout.isatty()

    @property
    def width(self) -> int:
        """Columns that a table may take."""
        return shutil.get_terminal_size().columns if self.on_terminal else UNLIMITED

    @property
    def height(self) -> int:
        """Lines that a terminal shows at once."""
        return shutil.get_terminal_size().lines if self.on_terminal else UNLIMITED

    @property
    def colored(self) -> bool:
        """Whether results carry colour."""
        if self.color is not Color.AUTO:
            return self.color is Color.ALWAYS
        forbidden = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        return self.on_terminal and not forbidden

    @property
    def has_few_colors(self) -> bool:
        """Whether there are 256 colours to choose from, not all."""
        return self.colored and self.console().color_system == "256"

    def warn(self, messages: Iterable[str]) -> None:
        """Say each message once, on standard error."""
        for message in map(on_command_line, messages):
            if message not in self.warned:
                self.warned.append(message)
                if not self.quiet:
                    self._to_stderr(f"attncli: warning: {message}")

    def note(self, message: str) -> None:
        """Say something that is no result and no warning, on standard error."""
        if not self.quiet:
            self._to_stderr(f"attncli: {message}")

    def write(self, chunks: Iterable[str], form: Format = Format.TABLE) -> None:
        """Write text to the target: a file appears whole or not at all."""
        if self.target == "-":
            for chunk in chunks:
                sys.stdout.write(encodable(chunk, sys.stdout, form))
            return
        write_text(self.target, chunks)
        self.wrote(self.target)

    def wrote(self, target: str) -> None:
        """Say that a file is written, once it is there."""
        once_there(partial(self.note, f"wrote {target}"))

    def show(self, *parts: RenderableType) -> None:
        """Write tables and lines of text."""
        self.write(self.rendered(part) for part in parts)

    def rendered(self, part: RenderableType) -> str:
        """A table or line as text, with colour where the target shows it."""
        if isinstance(part, str):
            return (part if isinstance(part, Preformatted) else self._wrapped(part)) + "\n"
        if isinstance(part, Text) and not self.colored:
            return part.plain + "\n"
        console = self.console()
        with console.capture() as captured:
            console.print(part, soft_wrap=isinstance(part, Text))
        return "\n".join(line.rstrip() for line in captured.get().split("\n"))

    def sign(self, usual: str, plain: str) -> str:
        """A sign, or what takes as much room where standard output cannot encode it."""
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        if self.target != "-":
            return usual
        try:
            usual.encode(encoding)
        except UnicodeEncodeError:
            return plain
        return usual

    def _wrapped(self, line: str) -> str:
        """A line of prose, broken between words where a terminal is too narrow."""
        if cell_len(line) <= self.width:
            return line
        indent = line[: len(line) - len(line.lstrip())]
        room = max(1, self.width - len(indent) - HANGING)
        first, *rest = (
            part.plain.rstrip() for part in Text(line.strip()).wrap(self.console(), room)
        )
        return "\n".join([indent + first, *(f"{indent}{'':>{HANGING}}{part}" for part in rest)])

    def console(self) -> Console:
        """A rich console of the target's width and colour, which interprets no markup."""
        options: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
        rich_terminal = self.on_terminal and os.environ.get("TERM") not in ("dumb", "unknown")
        # Off a terminal rich would not ask what colours the one that shows it in the end has.
        deep = os.environ.get("COLORTERM") in ("truecolor", "24bit")
        system = "auto" if rich_terminal else "truecolor" if deep else "256"
        return Console(
            width=self.width,
            height=UNLIMITED,
            force_terminal=self.colored,
            color_system=system if self.colored else None,  # type: ignore[arg-type]
            no_color=not self.colored,
            legacy_windows=False,
            **options,
        )

    def _to_stderr(self, line: str) -> None:
        print(encodable(printable(line), sys.stderr), file=sys.stderr)


def encodable(text: str, stream: TextIO, form: Format = Format.TABLE) -> str:
    """The text in characters that the stream can encode; for programs the others are escaped."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        if form in (Format.JSON, Format.NDJSON):
            return "".join(c if c.isascii() else json.dumps(c)[1:-1] for c in text)
        if form is Format.CSV:
            return text.encode(encoding, "backslashreplace").decode(encoding)
        plain = text.translate(FALLBACKS)
        return plain.encode(encoding, "replace").decode(encoding)
    return text


def heading(text: str) -> RenderableType:
    """A line that stands out where there is colour."""
    return Text(text, "bold")


def paragraph(text: str, printer: Printer, *, style: str = "", lead: str = "") -> RenderableType:
    """Prose, indented, in lines that the eye can follow however wide the output is."""
    first = " " * INDENT + lead
    room = min(printer.width, PROSE_WIDTH) - cell_len(first)
    lines = (line.plain.rstrip() for line in Text(text).wrap(printer.console(), max(1, room)))
    return Text(first + ("\n" + " " * cell_len(first)).join(lines), style)


SCHEMA = 1


def schema_name(document: str) -> str:
    """What `schema` of a document says: attncli.entropy/1."""
    return f"attncli.{document}/{SCHEMA}"


def document(
    command: str,
    *,
    inputs: dict[str, Any],
    params: dict[str, Any],
    warnings: Sequence[str],
    data: Any,
) -> Iterator[str]:
    """One JSON document, as text in pieces.

    Args:
        command: the subcommand, which names the schema.
        inputs: role → source, shape and dtype of each tensor.
        params: every option as it was used.
        warnings: what the reader of the numbers should know.
        data: the results; numbers that are not finite become null.
    """
    whole = {
        "schema": schema_name(command),
        "attncli": __version__,
        "inputs": inputs,
        "params": params,
        "warnings": list(warnings),
        "data": data,
    }
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
    yield from map(_for_terminals, encoder.iterencode(strict(whole)))
    yield "\n"


def ndjson(records: Iterable[dict[str, Any]]) -> Iterator[str]:
    """One strict JSON record a line."""
    for record in records:
        yield _for_terminals(json.dumps(strict(record), ensure_ascii=False, allow_nan=False)) + "\n"


def _for_terminals(text: str) -> str:
    """JSON with what a terminal would obey escaped: names may hold it, and JSON lets it pass."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def csv_lines(columns: Sequence[str], records: Iterable[dict[str, Any]]) -> Iterator[str]:
    """A header, always, and one line a record."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    rest = iter(records)
    first = list(islice(rest, 1))  # what fails before there is any prints no header either
    yield buffer.getvalue()
    for record in chain(first, rest):
        buffer.seek(0)
        buffer.truncate()
        writer.writerow([csv_field(record[column]) for column in columns])
        yield buffer.getvalue()


def strict(value: Any) -> Any:
    """A value as strict JSON can hold it: a number that is not finite becomes None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: strict(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [strict(part) for part in value]
    if isinstance(value, np.ndarray):
        if value.ndim > 1:  # row by row, so that a signal is heard in between
            return [strict(row) for row in value]
        return strict(value.tolist()) if value.dtype.kind == "f" else value.tolist()
    return value


def shortest(array: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """float64 values that print as the shortest decimal that gives back the array's own value.

    float32 0.1 is 0.10000000149011612 in float64; a reader wants to see 0.1.
    """
    short = array if array.dtype == np.float64 else array.astype(np.str_)
    return short.astype(np.float64, copy=False)


def csv_field(value: Any) -> str:
    """A CSV field: empty for None, nan, inf and -inf spelt out, true and false as in JSON.

    What a terminal would obey is escaped, line ends among it: every line is a record.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return printable(" ".join(map(str, value)))
    return repr(value) if isinstance(value, float) else printable(str(value))
