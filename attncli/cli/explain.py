"""`compute --explain`: the walk through the stages, all at once or one key press at a time."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from attncli.cli.compute_table import opening
from attncli.errors import UsageError
from attncli.report.choices import Format

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from attncli.cli.compute import Prepared
    from attncli.cli.options import WorkOptions
    from attncli.report.explanation import Step
    from attncli.report.printer import Printer

PROMPT = "Enter: next · b: back · q: quit "


def explain(prepared: list[Prepared], printer: Printer, work: WorkOptions) -> None:
    """Print what each stage is for and what it did to these numbers.

    Raises:
        UsageError: a format that has no room for prose.
    """
    refuse_where_useless(prepared[0].chosen.step, printer, work)
    everything: list[list[RenderableType]] = []
    for one in prepared:
        lead: list[RenderableType] = [*opening(one, printer), ""]
        for number, step in enumerate(steps_of(one, work), 1):
            everything.append([*lead, *_page(step, number, printer)])
            lead = []
    if prepared[0].chosen.step:
        _turn_pages(everything, printer)
    else:
        printer.show(*(part for page in everything for part in page))


def refuse_where_useless(step: bool, printer: Printer, work: WorkOptions) -> None:
    """Refuse formats that have no room for prose, and waiting where nobody can answer.

    Raises:
        UsageError: naming the option that would do nothing.
    """
    if work.format in (Format.CSV, Format.NDJSON):
        raise UsageError("--explain", f"expected --format table or json, got {work.format}")
    if step and work.format is not Format.TABLE:
        raise UsageError("--step", f"expected --format table beside it, got {work.format}")
    if step and not (printer.on_terminal and sys.stdin.isatty()):
        raise UsageError(
            "--step", "expected a terminal to wait at, got none", "--explain alone prints it all"
        )


def explanation_record(one: Prepared, work: WorkOptions) -> list[dict[str, Any]]:
    """The same for JSON: a list of steps."""
    return [asdict(step) for step in steps_of(one, work)]


def steps_of(one: Prepared, work: WorkOptions) -> list[Step]:
    """Compute the facts and put them into words."""
    from attncli.attention.cost import cost_of
    from attncli.attention.walkthrough import input_variance, walk_through
    from attncli.report.explanation import Facts, explain_steps

    problem = one.problem
    x, weight = one.group.described.get("x"), one.group.output_projection
    return explain_steps(
        Facts(
            problem=problem,
            walk=walk_through(problem, one.selection),
            cost=cost_of(problem),
            q_var=input_variance(problem.q),
            k_var=input_variance(problem.k),
            model_width=None if x is None else x["shape"][-1],
            projected_width=None if weight is None else weight.shape[1],
            unit=str(work.unit),
            digits=work.digits,
        )
    )


def _page(step: Step, number: int, printer: Printer) -> Iterator[RenderableType]:
    from attncli.report.prose import heading, paragraph

    yield heading(f"{number}. {step.name}", printer)
    yield paragraph(step.formula, printer, style="cyan")
    yield paragraph(step.shape, printer)
    yield paragraph(step.purpose, printer, style="italic")
    for finding in step.findings:
        yield paragraph(finding, printer, lead="→ ")
    yield ""


def _turn_pages(pages: list[list[RenderableType]], printer: Printer) -> None:
    """One page at a time: Enter for the next, b for the one before, q or end of input to leave."""
    at = 0
    while at < len(pages):
        printer.show(*pages[at])
        sys.stdout.write(f"[{at + 1}/{len(pages)}] {PROMPT}")
        sys.stdout.flush()
        answer = sys.stdin.readline()
        if not answer or answer.strip().lower() == "q":
            return
        at = max(0, at - 1) if answer.strip().lower() == "b" else at + 1
