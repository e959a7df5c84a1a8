"""`compute --explain` and `--shapes`: what each stage is for, and what it did to these numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from rich.console import RenderableType

from attncli.attention.stages import Stage, stages_of
from attncli.attention.walkthrough import walk_through
from attncli.cli.commands import ComputeOptions, OutputOptions
from attncli.cli.stages import GroupStages, opening, view_of
from attncli.cli.terminal import turn_pages
from attncli.columns import Column, columns_of, record_of
from attncli.errors import UsageError
from attncli.report import Format
from attncli.report.explanation import Facts, Sizes, Step, StepShape, explain_steps, step_shapes
from attncli.report.heatmap import canvas_for, heat_map, names_of_rows
from attncli.report.printer import Printer, heading, paragraph
from attncli.report.table import record_table

SHAPES = (
    Column(
        "group", "group", is_key=True, description="its name; empty for the only one", holds=str
    ),
    *columns_of(StepShape),
)
LINES_OF_PROMPT = 2


def refuse_where_useless(step: bool, printer: Printer, output: OutputOptions) -> None:
    """Refuse formats that have no room for prose, and waiting where nobody can answer."""
    if output.format in (Format.CSV, Format.NDJSON):
        raise UsageError("--explain", f"expected --format table or json, got {output.format}")
    if step and output.format is not Format.TABLE:
        raise UsageError("--step", f"expected --format table beside it, got {output.format}")
    if step and not (printer.on_terminal and sys.stdin.isatty()):
        raise UsageError(
            "--step", "expected a terminal to wait at, got none", "--explain alone prints it all"
        )


def explain(
    asked: list[GroupStages],
    otherwise: list[GroupStages] | None,
    options: ComputeOptions,
    output: OutputOptions,
    printer: Printer,
) -> None:
    """Print what each stage is for and what it did to these numbers, or walk through it by keys.

    Args:
        asked: what to explain.
        otherwise: the same with another causal mask, where a reader can change to that.
        options, output: what is asked of it.
        printer: where it goes.
    """
    pages = list(_pages(asked, options, output, printer))
    if not options.step:
        printer.show(*(part for page in pages for part in page))
    elif otherwise is None:
        turn_pages(pages, printer)
    else:
        turn_pages(pages, printer, lambda: list(_pages(otherwise, options, output, printer)))


def _pages(
    asked: list[GroupStages], options: ComputeOptions, output: OutputOptions, printer: Printer
) -> Iterator[list[RenderableType]]:
    for one in asked:
        lead: list[RenderableType] = [*opening(one, printer), ""]
        for number, step in enumerate(steps_of(one, output), 1):
            page = [*lead, *_page(step, number, printer)]
            if options.step:
                room = printer.height - LINES_OF_PROMPT - _lines(page, printer)
                page += _matrices(step, one, room, options, output, printer)
            yield page
            lead = []
        yield [heading("in short"), *shapes_table([one], printer), ""]


def steps_of(one: GroupStages, output: OutputOptions) -> list[Step]:
    """Compute the facts and put them into words."""
    sizes = _sizes_of(one)
    return explain_steps(
        Facts(
            walk=walk_through(one.made.problem, one.asked.selection),
            model_width=sizes.model_width,
            projected_width=sizes.projected_width,
            unit=output.unit,
            digits=output.digits,
        )
    )


def shape_records(asked: list[GroupStages]) -> list[dict[str, Any]]:
    """One record a step of each group: its shape for one head, and for all of them."""
    return [
        {"group": one.made.group.name} | record_of(step)
        for one in asked
        for step in step_shapes(_sizes_of(one))
    ]


def shapes_table(asked: list[GroupStages], printer: Printer) -> Iterator[RenderableType]:
    """A table of steps for each group."""
    for one in asked:
        if len(asked) > 1:
            yield from opening(one, printer)
        yield record_table(columns_of(StepShape), shape_records([one]), printer, digits=0)


def _sizes_of(one: GroupStages) -> Sizes:
    x, projection = one.made.group.described.get("x"), one.asked.output_projection
    return Sizes(
        one.made.problem,
        model_width=None if x is None else x["shape"][-1],
        projected_width=None if projection is None else projection.weight.shape[1],
    )


def _page(step: Step, number: int, printer: Printer) -> Iterator[RenderableType]:
    yield heading(f"{number}. {step.name}")
    yield paragraph(step.formula, printer, style="cyan")
    yield paragraph(step.shape, printer)
    yield paragraph(step.purpose, printer, style="italic")
    for finding in step.findings:
        yield paragraph(finding, printer, lead="→ ")
    yield ""


def _matrices(
    step: Step,
    one: GroupStages,
    room: int,
    options: ComputeOptions,
    output: OutputOptions,
    printer: Printer,
) -> Iterator[RenderableType]:
    """What a step computes of the first head, as far as there are lines for it."""
    whole, is_first = one.asked.selection, step.name == "projection"
    there = [Stage.Q, Stage.K] if is_first else stages_of(one.made.problem)
    stages = tuple(stage for stage in there if is_first or stage == step.name)
    selection = replace(whole, batches=whole.batches[:1], heads=whole.heads[:1])
    few = replace(one, asked=replace(one.asked, stages=stages, selection=selection))
    view = view_of(few, options, output, printer)
    for stage in stages:
        *_, rows, columns = few.asked.results()[stage].shape
        names = names_of_rows(stage, 0, view)
        canvas = canvas_for(rows, columns, names, output.digits, printer, lines=room)
        pooled = few.asked.pooled(stage, canvas.rows, canvas.columns)
        title = str(stage).upper() if is_first else ""
        parts = [p for matrix in pooled for p in (*heat_map(matrix, canvas, view, title=title), "")]
        room -= _lines(parts, printer)
        if room < 0:
            return
        yield from parts


def _lines(parts: Iterable[RenderableType], printer: Printer) -> int:
    return sum(printer.rendered(part).count("\n") for part in parts)
