"""Stages as `compute` shows them: what stands above them in every form, and pictures of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from rich.console import RenderableType

from attncli.analysis.compute import StagesAsked
from attncli.analysis.options import indices
from attncli.analysis.problems import GroupProblem
from attncli.attention.options import Stage
from attncli.attention.sizes import places
from attncli.cli.commands import ComputeOptions, OutputOptions
from attncli.cli.opening import opening
from attncli.report import Pooling
from attncli.report.heatmap import (
    FEWEST_LINES,
    FRAME_LINES,
    MOST_LINES,
    canvas_for,
    heat_map,
    names_of_rows,
)
from attncli.report.printer import Printer
from attncli.report.stages import StageView


@dataclass(frozen=True, slots=True)
class GroupStages:
    """The stages of one group that are asked for."""

    made: GroupProblem
    asked: StagesAsked


def view_of(
    one: GroupStages, options: ComputeOptions, output: OutputOptions, printer: Printer
) -> StageView:
    """How the stages of a group are drawn."""
    return StageView(
        one.asked.problem,
        one.asked.selection,
        places("«columns»", indices("«columns»", output.columns), one.asked.problem.sizes.k_len),
        one.made.group.labels,
        printer,
        output.digits,
        output.unit,
        scale=options.scale_colour,
        skip_first=options.skip_first,
    )


def heat_maps(
    asked: list[GroupStages], options: ComputeOptions, output: OutputOptions, printer: Printer
) -> Iterator[RenderableType]:
    """Pictures of stages: a terminal has lines for some heads of each, elsewhere all are drawn."""
    pictures = [(one, stage) for one in asked for stage in one.asked.stages]
    share = max(FEWEST_LINES + FRAME_LINES, MOST_LINES // len(pictures))
    largest = options.pool is Pooling.MAX
    used = left = 0
    before: GroupStages | None = None
    for one, stage in pictures:
        view = view_of(one, options, output, printer)
        batches, heads, rows, columns = one.asked.results()[stage].shape
        names = names_of_rows(stage, 0, view)
        canvas = canvas_for(rows, columns, names, output.digits, printer, lines=share)
        fitting = batches * heads
        if printer.on_terminal:
            fits = not used or used + canvas.lines <= MOST_LINES
            fitting = min(fitting, max(1, share // canvas.lines)) if fits else 0
        if fitting and one is not before:
            yield from ([""] if before else [])
            yield from opening(one.made)
            before = one
        points = canvas.rows, canvas.columns
        pooled = one.asked.pooled(stage, *points, largest=largest, alone=options.skip_first)
        for matrix in islice(pooled, fitting):
            yield ""
            yield from heat_map(matrix, canvas, view, largest=largest)
        used += fitting * canvas.lines
        left += batches * heads - fitting
    if left:
        yield ""
        yield f"{left} more not drawn: --group, --head-index, --batch-index, --stage"


def map_of_first(
    one: GroupStages,
    stage: Stage,
    lines: int,
    options: ComputeOptions,
    output: OutputOptions,
    printer: Printer,
    *,
    title: str,
) -> Iterator[RenderableType]:
    """A picture of a stage of the first selected head, of at most so many lines.

    Args:
        one: the group.
        stage: which.
        lines: with what frames it.
        options, output, printer: how it is drawn, and where.
        title: above it, in the place of its formula; "" for that.
    """
    whole = one.asked.selection
    selection = replace(whole, batches=whole.batches[:1], heads=whole.heads[:1])
    few = replace(one, asked=replace(one.asked, stages=(stage,), selection=selection))
    view = view_of(few, options, output, printer)
    *_, rows, columns = few.asked.results()[stage].shape
    names = names_of_rows(stage, 0, view)
    canvas = canvas_for(rows, columns, names, output.digits, printer, lines=lines)
    for matrix in few.asked.pooled(stage, canvas.rows, canvas.columns, alone=options.skip_first):
        yield from heat_map(matrix, canvas, view, title=title)
        yield ""
