"""Stages as `compute` shows them: what stands above them in every form, and pictures of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rich.console import RenderableType

from attncli.analysis.attention_arguments import arguments_record
from attncli.analysis.compute import StagesAsked
from attncli.analysis.problems import GroupProblem
from attncli.cli.commands import ComputeOptions, OutputOptions
from attncli.files.text import shown
from attncli.report import Pooling
from attncli.report.heatmap import (
    FEWEST_LINES,
    FRAME_LINES,
    MOST_LINES,
    canvas_for,
    heat_map,
    names_of_rows,
)
from attncli.report.printer import Printer, heading
from attncli.report.stages import StageView, problem_line


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
        one.made.group.labels,
        printer,
        output.digits,
        output.unit,
        scale=options.scale_colour,
        skip_first=options.skip_first,
    )


def opening(one: GroupStages, printer: Printer) -> Iterator[RenderableType]:
    """What stands above the stages: the group, the sizes, and the options in use."""
    if one.made.group.name:
        yield heading(f"group {shown(one.made.group.name)}")
    yield problem_line(one.made.problem, one.made.group.source)
    used = _options_in_use(one)
    if used:
        yield f"options: {used}"


def _options_in_use(one: GroupStages) -> str:
    """Options that differ from their defaults, and where query 0 stands if that matters."""
    options = one.made.arguments.options
    record = arguments_record(one.made.arguments, one.made.problem.mask.offset)
    parts = []
    for name, value in record.items():
        is_default = value in (None, False) or (name == "temperature" and value == 1)
        if is_default or name in ("scale", "query_offset", "mask_true"):
            continue
        told = "" if value is True else f" {_told(value)}"
        parts.append(name.replace("_", " ") + told)
    if options.attn_mask is not None and options.attn_mask.dtype == bool:
        parts.append(f"True = {options.mask_true}")
    if options.needs_positions or options.query_offset is not None:
        offset = record["query_offset"]
        where = "query 0 at position" if isinstance(offset, int | list) else "in each document"
        parts.append(f"{where} {_told(offset)}")
    return " · ".join(parts)


def _told(value: Any) -> str:
    """An option's value; a long list cut short."""
    if not isinstance(value, list):
        return f"{value:g}" if isinstance(value, float) else str(value)
    more = f",… ({len(value)})" if len(value) > 8 else ""
    return ",".join(f"{part:g}" for part in value[:8]) + more


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
            yield from opening(one, printer)
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
