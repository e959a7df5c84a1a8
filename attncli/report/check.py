"""`check` for eyes: the verdict, the command that verifies it, the errors and where they sit."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from attncli.attention.check.compare import Comparison, Pair
from attncli.attention.check.hypotheses import Check, Hypothesis
from attncli.report.printer import Printer, heading, paragraph
from attncli.report.table import TableColumn, table, text_width

# The words of the command that verifies a mistake; None where no option makes it.
Command = Callable[[Hypothesis], list[str] | None]

# Of the mistakes that do not explain a candidate, those that come nearest are listed.
MOST_OTHERS = 5
# One that takes away less of the squared error than this is no trace of anything.
LEAST_SHARE = 0.2
# A smaller part of the cells would be rounded to none of them.
LEAST_PERCENT = 1e-4
PLACES = ("batch", "head", "row", "column")
# Off a terminal a command is one line, to be cut out by other programs.
INDENT = "  "


def check_tables(
    found: Check, command: Command, printer: Printer, digits: int
) -> Iterator[RenderableType]:
    """The verdict on every candidate, the mistakes that explain it, then its errors.

    Args:
        found: the candidates and what was tried.
        command: what verifies a mistake.
        printer, digits: how to print.
    """
    matching = [one for one in found.hypotheses if one.matches]
    for comparison in found.comparisons:
        yield heading(f"{comparison.target}: {_verdict(comparison, matching)}")
    yield from _explanations(matching, command, printer)
    for comparison in found.comparisons:
        yield ""
        if len(found.comparisons) > 1:
            yield heading(str(comparison.target))
        yield from _errors(comparison, printer, digits)
    if not found.passed:
        yield from _others(found, bool(matching), printer)


def pair_tables(
    found: Pair,
    checks: Sequence[Check],
    names: Sequence[str],
    commands: Sequence[Command],
    printer: Printer,
    digits: int,
) -> Iterator[RenderableType]:
    """Which of two candidates is closer, each against the reference, and where they part.

    Args:
        found: both.
        checks: of each alone, with what explains it.
        names: their files.
        commands: for each, as for `check_tables`.
        printer, digits: how to print.
    """
    closer = "both are equally close" if found.closer is None else names[found.closer - 1]
    yield heading(f"closer to the reference: {closer}")
    for alone, name, command in zip(checks, names, commands, strict=True):
        yield ""
        (comparison,) = alone.comparisons
        matching = [mistake for mistake in alone.hypotheses if mistake.matches]
        yield heading(f"{name} ({comparison.target}): {_verdict(comparison, matching)}")
        yield from _explanations(matching, command, printer)
        yield from [""] if matching else []
        yield from _errors(comparison, printer, digits)
        if not alone.passed:
            yield from _others(alone, bool(matching), printer)
    yield ""
    yield heading("between them")
    cells = found.first.cells
    yield _line("part", f"{found.mismatches} of {cells} cells, by more than both tolerances")
    size = f"max abs {found.max_abs_error:.4g}, rms {found.rms_error:.4g}"
    yield _line("difference", f"{size}, cosine {_cosine(found)}")
    if found.worst_index is not None and found.values is not None and found.max_abs_error:
        one, two = (f"{value:.{digits + 2}g}" for value in found.values)
        yield _line("most at", f"{_at(found.worst_index)}: {one} and {two}")
        yield from _apart(found)
    if found.first_part is not None:
        yield _line("first at", _at(found.first_part))
    if found.locations.findings:
        yield _line("where", ", ".join(found.locations.findings))


def _verdict(found: Comparison, matching: Sequence[Hypothesis]) -> str:
    names = " or ".join(one.told for one in matching)
    off = f"OFF, explained by {names}" if names else "OFF"
    return "right" if found.passed else off


def _explanations(
    matching: Sequence[Hypothesis], command: Command, printer: Printer
) -> Iterator[RenderableType]:
    """Each mistake that explains a candidate; of those that one command verifies the first."""
    told: dict[str, list[str]] = {}
    for one in matching:
        words = command(one)
        same = told.setdefault(shlex.join(words or [one.name]), words or [])
        if same is words or not words:
            yield from _explanation(one, words, printer)


def _explanation(
    found: Hypothesis, words: list[str] | None, printer: Printer
) -> Iterator[RenderableType]:
    """How far off it still is with the mistake, and the command that shows it."""
    how = found.options or found.detail
    told = f" ({how})" if how else ""
    yield f"{INDENT}{found.told}{told}: largest error left {found.max_abs_error:.3g}"
    if words is not None:
        yield Text("\n".join(_command_lines(words, printer)))


def _command_lines(words: Sequence[str], printer: Printer) -> list[str]:
    """A command in lines that a shell reads as one, each within the terminal's width."""
    lines = [INDENT + "$"]
    for word in map(shlex.quote, words):
        if text_width(lines[-1]) + text_width(word) + 3 > printer.width:
            lines[-1] += " \\"
            lines.append(INDENT + " ")
        lines[-1] += " " + word
    return lines


def _errors(found: Comparison, printer: Printer, digits: int) -> Iterator[RenderableType]:
    part = found.mismatches / max(1, found.cells)
    share = f" ({part:.2%})" if part >= LEAST_PERCENT else ""
    read = "" if found.reading is None else f", read as {found.reading}"
    yield _line("cells off", f"{found.mismatches} of {found.cells}{share}{read}")
    yield _line(
        "allowed",
        f"{found.atol:.3g} + {found.rtol:.3g}·|expected| at the worst cell ({found.dtype})",
    )
    if found.worst_head is not None:
        batch, head = found.worst_head
        off = f"; beyond 8 × that in {found.heads_off}: OFF" if found.heads_off else ""
        yield _line(
            "heads",
            f"relative error {found.relative_error:.2g}, rounding explains "
            f"{found.explained_error:.2g} (batch {batch}, head {head}){off}",
        )
    yield _line(
        "errors",
        f"max abs {found.max_abs_error:.4g}, max rel {found.max_rel_error:.4g}, "
        f"rms {found.rms_error:.4g}, cosine {_cosine(found)}",
    )
    if found.worst_index is not None and (found.mismatches or found.heads_off):
        actual, expected = (f"{x:.{digits + 2}g}" for x in (found.actual, found.expected))
        yield _line("worst at", f"{_at(found.worst_index)}: {actual}, expected {expected}")
        yield from _apart(found)
    if found.locations.findings:
        yield _line("where", ", ".join(found.locations.findings))
    others = found.findings[: len(found.findings) - len(found.locations.findings)]
    for text in (*others, *found.notes):
        yield paragraph(text, printer, lead="→ ")


def _apart(found: Comparison | Pair) -> Iterator[str]:
    """How far the two numbers of the line above are apart, which may look equal."""
    if found.error is not None and math.isfinite(found.error):
        yield _line("", f"{found.error:.3g} apart, {found.allowed or 0.0:.3g} allowed")


def _cosine(found: Comparison | Pair) -> str:
    return "–" if found.cosine is None else f"{found.cosine:.9g}"


def _line(name: str, text: str) -> str:
    return f"{INDENT}{name:<11}{text}"


def _others(found: Check, explained: bool, printer: Printer) -> Iterator[RenderableType]:
    """What was tried in vain: how many mistakes, and those that leave a trace."""
    others = [one for one in found.hypotheses if not one.matches]
    if explained or not others or all(one.finite_is_right for one in found.comparisons):
        return
    yield ""
    near = sorted(
        (one for one in others if (one.explained or 0.0) >= LEAST_SHARE),
        key=lambda one: -(one.explained or 0.0),
    )
    said = f"none of the {len(others)} mistakes tried explains it, alone or in pairs"
    yield paragraph(said + ("; the nearest:" if near else ", nor comes near"), printer)
    if near:
        yield _near_table(near[:MOST_OTHERS], printer)


def _near_table(found: Sequence[Hypothesis], printer: Printer) -> RenderableType:
    return table(
        [
            TableColumn(INDENT + " mistake", [INDENT + " " + o.name for o in found], True, True),
            TableColumn("explains", [f"{one.explained or 0.0:.0%}" for one in found]),
            TableColumn("max abs error left", [f"{one.max_abs_error:.4g}" for one in found]),
            TableColumn("reproduce with", [one.options or "–" for one in found], True),
        ],
        printer,
    )


def _at(index: Sequence[int]) -> str:
    return ", ".join(f"{name} {place}" for name, place in zip(PLACES, index, strict=False))
