"""`compute --explain` and `--shapes`: what each stage is for, and what it did to these numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from rich.console import RenderableType

from attncli.attention.options import Stage
from attncli.attention.stages import stages_of
from attncli.attention.walkthrough import walk_through
from attncli.cli.commands import ComputeOptions, OutputOptions
from attncli.cli.opening import opening
from attncli.cli.stages import GroupStages, map_of_first
from attncli.cli.terminal import turn_pages
from attncli.columns import Column, columns_of, record_of
from attncli.report.explanation import (
    Facts,
    Sizes,
    Step,
    StepShape,
    explain_steps,
    step_shapes,
)
from attncli.report.printer import Printer, heading, paragraph
from attncli.report.table import record_table
from attncli.report.words import walk_words

SHAPES = (
    Column(
        "group", "group", is_key=True, description="its name; empty for the only one", holds=str
    ),
    *columns_of(StepShape),
)
LINES_OF_PROMPT = 2


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
    pages, words = list(_pages(asked, options, output, printer)), walk_words(options.lang)
    if not options.step:
        printer.show(*(part for page in pages for part in page))
    elif otherwise is None:
        turn_pages(pages, printer, words)
    else:
        turn_pages(pages, printer, words, lambda: list(_pages(otherwise, options, output, printer)))


def _pages(
    asked: list[GroupStages], options: ComputeOptions, output: OutputOptions, printer: Printer
) -> Iterator[list[RenderableType]]:
    words = walk_words(options.lang)
    for one in asked:
        lead: list[RenderableType] = [*opening(one.made, words=words), ""]
        for number, step in enumerate(steps_of(one, options, output), 1):
            title = words.text(f"name.{step.name}")
            page = [*lead, heading(f"{number}. {title}"), *_page(step, printer)]
            if options.step:
                room = printer.height - LINES_OF_PROMPT - _lines(page, printer)
                page += _matrices(step, one, room, options, output, printer)
            yield page
            lead = []
        short = heading(words.text("heading.short"))
        yield [short, *shapes_table([one], options, printer), ""]


def steps_of(one: GroupStages, options: ComputeOptions, output: OutputOptions) -> list[Step]:
    """Compute the facts and put them into words."""
    sizes = _sizes_of(one, options)
    return explain_steps(
        Facts(
            walk=walk_through(one.made.problem, one.asked.selection),
            model_width=sizes.model_width,
            projected_width=sizes.projected_width,
            unit=output.unit,
            digits=output.digits,
            words=sizes.words,
        )
    )


def shape_records(asked: list[GroupStages], options: ComputeOptions) -> list[dict[str, Any]]:
    """One record a step of each group: its shape for one head, and for all of them."""
    return [
        {"group": one.made.group.name} | record_of(step)
        for one in asked
        for step in step_shapes(_sizes_of(one, options))
    ]


def shapes_table(
    asked: list[GroupStages], options: ComputeOptions, printer: Printer
) -> Iterator[RenderableType]:
    """A table of steps for each group."""
    words = walk_words(options.lang)
    columns = [replace(each, heading=words.heading(each)) for each in columns_of(StepShape)]
    for one in asked:
        if len(asked) > 1:
            yield from opening(one.made, words=words)
        yield record_table(columns, shape_records([one], options), printer, digits=0)


def _sizes_of(one: GroupStages, options: ComputeOptions) -> Sizes:
    x, projection = one.made.group.described.get("x"), one.asked.output_projection
    return Sizes(
        one.made.problem,
        model_width=None if x is None else x["shape"][-1],
        projected_width=None if projection is None else projection.weight.shape[1],
        words=walk_words(options.lang),
    )


def _page(step: Step, printer: Printer) -> Iterator[RenderableType]:
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
    is_first = step.name == "projection"
    there = [Stage.Q, Stage.K] if is_first else stages_of(one.made.problem)
    for stage in there:
        if not (is_first or stage == step.name):
            continue
        title = str(stage).upper() if is_first else ""
        parts = list(map_of_first(one, stage, room, options, output, printer, title=title))
        room -= _lines(parts, printer)
        if room < 0:
            return
        yield from parts


def _lines(parts: Iterable[RenderableType], printer: Printer) -> int:
    return sum(printer.rendered(part).count("\n") for part in parts)
