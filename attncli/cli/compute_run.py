"""What `attncli compute` does: stages computed, kept or saved, and told in every format."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType

from attncli.analysis.attention_arguments import arguments_record
from attncli.analysis.compute import StagesAsked, ask_stages
from attncli.analysis.inputs import Group, load_groups
from attncli.analysis.options import AttentionWords, InputOptions, integers, several
from attncli.analysis.pictures import DRAWN_STAGES, MOST_HEADS, StageMaps, stage_maps
from attncli.analysis.problems import GroupProblem, problem_of
from attncli.attention.options import Layout
from attncli.attention.problem import cost_of
from attncli.attention.stages import Block, Stage, StageResult
from attncli.attention.steps import entropy_of_weights
from attncli.attention.walkthrough import walk_through
from attncli.cli.commands import ComputeOptions, PlotOptions
from attncli.cli.output import make_printer, write_picture
from attncli.errors import UsageError
from attncli.files.limits import require_memory
from attncli.files.text import shown
from attncli.files.writer import TensorSaver
from attncli.report import Format, Pooling
from attncli.report import stages as report
from attncli.report.explanation import Facts, Step, explain_steps
from attncli.report.heatmap import (
    FEWEST_LINES,
    FRAME_LINES,
    MOST_LINES,
    canvas_for,
    heat_map,
    names_of_rows,
)
from attncli.report.printer import Printer, document, heading, paragraph
from attncli.report.table import labels_of_batch

# What a value that is kept takes on its way to a table or to JSON: tensors, objects and text.
BYTES_A_VALUE = 120
PROMPT = "Enter: next · b: back · q: quit "

Results = dict[Stage, StageResult]


@dataclass(frozen=True, slots=True)
class GroupStages:
    """The stages of one group that are asked for."""

    made: GroupProblem
    asked: StagesAsked


def run(
    inputs: InputOptions, words: AttentionWords, options: ComputeOptions, output: PlotOptions
) -> None:
    """Compute what is asked for of every group, and print it."""
    groups = load_groups(inputs, example=True)
    sources, names = {group.source for group in groups}, {group.name for group in groups}
    if len(sources) > 1 or len(names) < len(groups):
        raise UsageError("FILE", "expected one bundle, got several", "run once for each")
    asked = [_asked(group, inputs, words, options, output) for group in groups]
    printer = make_printer(output)
    if options.explain:
        _refuse_where_useless(options.step, printer, output)
    for one in asked:
        printer.warn(one.made.warnings)
    if options.save is not None and inputs.layout is not Layout.BHSD:
        printer.note(f"{options.save} is (B, H, S, d) whatever --layout says of the inputs")
    given = inputs, words, options, output
    write_picture(
        "compute", given, printer, lambda plots, title: _draw(plots, title, asked, output)
    )
    in_words = options.explain and output.format is Format.TABLE
    if in_words or options.heatmap or output.format in (Format.CSV, Format.NDJSON):
        if options.save is not None:
            _gather(asked, options, printer, max_values=-1)
        if in_words:
            _explain(asked, options, output, printer)
        elif options.heatmap:
            maps = _heat_maps(asked, options, output, printer)
            printer.write(printer.rendered(part) for part in maps)
        else:
            printer.write(_cells(asked, output.format))
        return
    results = _gather(asked, options, printer, options.max_values)
    if output.format is Format.JSON:
        printer.write(_document(asked, results, options, output, printer))
    else:
        together = zip(asked, results, strict=True)
        printer.show(*(p for pair in together for p in _tables(*pair, options, output, printer)))


def _asked(
    group: Group,
    inputs: InputOptions,
    words: AttentionWords,
    options: ComputeOptions,
    output: PlotOptions,
) -> GroupStages:
    made = problem_of(group, inputs, words, output.precision, output.device)
    names = [str(Stage.WEIGHTS)] if options.heatmap else None
    names = names if options.stage is None else several(options.stage)
    if names == []:
        raise UsageError("--stage", "expected at least one name, got none")
    asked = ask_stages(
        made.problem,
        names,
        option="--stage",
        batches=integers("--batch-index", options.batch_index),
        heads=integers("--head-index", options.head_index),
        rows=integers("--rows", options.rows),
        is_projected=group.is_projected,
        output_projection=group.output_projection,
    )
    return GroupStages(made, asked)


def _draw(plots: Any, title: str, asked: list[GroupStages], output: PlotOptions) -> Any:
    """A picture of the stages of the first heads, of all groups that have the same.

    Raises:
        UsageError: none of the stages is a map.
    """
    found: list[tuple[str, Sequence[str] | None, StageMaps]] = []
    for one in asked:
        for maps in stage_maps(one.asked) if len(found) < MOST_HEADS else ():
            labels = labels_of_batch(one.made.group.labels, maps.batch)
            if not found or found[0][2].maps.keys() == maps.maps.keys():
                found.append((one.made.group.name, labels, maps))
    if not found or not found[0][2].maps:
        raise UsageError("--plot", f"expected some of {', '.join(DRAWN_STAGES)}, got none of them")
    selections = [one.asked.selection for one in asked]
    heads = sum(len(some.batches) * len(some.heads) for some in selections)
    if heads > MOST_HEADS:
        title += f" · {MOST_HEADS} of {heads} heads"
    return plots.stage_picture(title, found[:MOST_HEADS], output.digits)


# ── computing and saving ─────────────────────────────────────────────────────────────────────


def _gather(
    asked: list[GroupStages], options: ComputeOptions, printer: Printer, max_values: int
) -> list[Results]:
    """Compute every stage once: statistics, values where they are few, and what is saved."""
    results = [one.asked.results() for one in asked]
    cells = [math.prod(result.shape) for found in results for result in found.values()]
    kept = sum(count for count in cells if count <= max_values)
    advice = "--format csv, --save, --rows and --stage need less"
    require_memory("--max-values", BYTES_A_VALUE * kept, advice)
    with ExitStack() as stack:
        saver = None
        if options.save is not None:
            saver = stack.enter_context(TensorSaver(options.save, _saved(asked, results)))
        for one, found in zip(asked, results, strict=True):
            write = None if saver is None else partial(_write, saver, one.made.group.name)
            one.asked.gather(found, max_values, write)
    if options.save is not None:
        printer.note(f"wrote {options.save}")
    return results


def _saved(
    asked: list[GroupStages], results: list[Results]
) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """The tensors of `--save`: name → shape and dtype."""
    return {
        _saved_name(one.made.group.name, stage): (result.shape, one.made.problem.numpy_dtype)
        for one, found in zip(asked, results, strict=True)
        for stage, result in found.items()
    }


def _saved_name(group: str, stage: Stage) -> str:
    return f"{group}.{stage}" if group else str(stage)


def _write(saver: TensorSaver, group: str, result: StageResult, block: Block) -> None:
    batch, head = result.place(block)
    rows = slice(block.at, block.at + len(block.rows))
    saver.write(_saved_name(group, block.stage), (batch, head, rows), block.values.numpy())


# ── for programs ─────────────────────────────────────────────────────────────────────────────


def _cells(asked: list[GroupStages], form: Format) -> Iterator[str]:
    """Every selected cell, stage by stage."""
    grouped = len(asked) > 1
    write = report.csv_cells if form is Format.CSV else report.ndjson_cells
    if form is Format.CSV:
        columns = report.GROUPED_CELL_COLUMNS if grouped else report.CELL_COLUMNS
        yield ",".join(columns) + "\n"
    for one in asked:
        for stage in one.asked.stages:
            yield from write(one.asked.blocks(stage), one.made.group.name if grouped else None)


def _document(
    asked: list[GroupStages],
    results: list[Results],
    options: ComputeOptions,
    output: PlotOptions,
    printer: Printer,
) -> Iterator[str]:
    """The JSON document: one group as it stands, several by name."""
    names = [one.made.group.name for one in asked]

    def by_name(told: Iterable[dict[str, Any]]) -> dict[str, Any]:
        return dict(zip(names, told, strict=True))

    together = zip(asked, results, strict=True)
    inputs = by_name(one.made.group.described for one in asked)
    params = by_name(_params(one, options) for one in asked)
    data = by_name(_data(one, found, options, output) for one, found in together)
    alone = len(names) == 1
    return document(
        "compute",
        inputs=inputs[names[0]] if alone else inputs,
        params=params[names[0]] if alone else params,
        warnings=printer.warned,
        data=data[names[0]] if alone else {"groups": data},
    )


def _data(
    one: GroupStages, found: Results, options: ComputeOptions, output: PlotOptions
) -> dict[str, Any]:
    explained: dict[str, Any] = {}
    if options.explain:
        explained["explanation"] = [asdict(step) for step in _steps(one, output)]
    selection = one.asked.selection
    return explained | {
        "stages": {str(stage): report.stage_record(result) for stage, result in found.items()},
        "cost": asdict(cost_of(one.made.problem)),
        "batches": list(selection.batches),
        "heads": list(selection.heads),
        "rows": None if options.rows is None else list(selection.rows),
    }


def _params(one: GroupStages, options: ComputeOptions) -> dict[str, Any]:
    return one.made.params | {
        "stage": [str(stage) for stage in one.asked.stages],
        "max_values": options.max_values,
    }


# ── for people ───────────────────────────────────────────────────────────────────────────────


def _tables(
    one: GroupStages,
    found: Results,
    options: ComputeOptions,
    output: PlotOptions,
    printer: Printer,
) -> Iterator[RenderableType]:
    problem = one.made.problem
    entropies = _entropies(found.get(Stage.WEIGHTS), with_sink=problem.sinks is not None)
    view = replace(_view(one, options, output, printer), entropies=entropies)
    yield from _opening(one, printer)
    yield ""
    for result in found.values():
        yield from report.stage_tables(result, view)
    yield report.summary_table(list(found.values()), printer, output.digits)
    yield ""
    yield report.cost_line(cost_of(problem))
    left_out = [result for result in found.values() if result.values is None]
    if any(0 not in result.shape for result in left_out):
        yield (
            f"values of {', '.join(result.stage for result in left_out)} not shown: above "
            f"--max-values {options.max_values}; choose --rows, or --format csv, or --save FILE"
        )
    yield ""


def _view(
    one: GroupStages, options: ComputeOptions, output: PlotOptions, printer: Printer
) -> report.StageView:
    return report.StageView(
        one.asked.problem,
        one.asked.selection,
        one.made.group.labels,
        printer,
        output.digits,
        output.unit,
        scale=options.scale_colour,
        skip_first=options.skip_first,
    )


def _entropies(weights: StageResult | None, *, with_sink: bool) -> NDArray[np.object_] | None:
    """Nats of each row of the weights, for a column beside them; None for rows without keys."""
    if weights is None or weights.values is None or weights.visible is None:
        return None
    nats = entropy_of_weights(weights.values, with_sink=with_sink).numpy().astype(object)
    nats[~weights.visible.any(-1).numpy()] = None
    return nats


def _opening(one: GroupStages, printer: Printer) -> Iterator[RenderableType]:
    """What stands above the stages: the group, the sizes, and the options in use."""
    if one.made.group.name:
        yield heading(f"group {shown(one.made.group.name)}")
    yield report.problem_line(one.made.problem, one.made.group.source)
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


def _heat_maps(
    asked: list[GroupStages], options: ComputeOptions, output: PlotOptions, printer: Printer
) -> Iterator[RenderableType]:
    """Pictures of stages: a terminal has lines for some heads of each, elsewhere all are drawn."""
    pictures = [(one, stage) for one in asked for stage in one.asked.stages]
    share = max(FEWEST_LINES + FRAME_LINES, MOST_LINES // len(pictures))
    largest = options.pool is Pooling.MAX
    used = left = 0
    before: GroupStages | None = None
    for one, stage in pictures:
        view = _view(one, options, output, printer)
        batches, heads, rows, columns = one.asked.results()[stage].shape
        names = names_of_rows(stage, 0, view)
        canvas = canvas_for(rows, columns, names, output.digits, printer, lines=share)
        fitting = batches * heads
        if printer.on_terminal:
            fits = not used or used + canvas.lines <= MOST_LINES
            fitting = min(fitting, max(1, share // canvas.lines)) if fits else 0
        if fitting and one is not before:
            yield from ([""] if before else [])
            yield from _opening(one, printer)
            before = one
        pooled = one.asked.pooled(stage, canvas.rows, canvas.columns, largest=largest)
        for matrix in islice(pooled, fitting):
            yield ""
            yield from heat_map(matrix, canvas, view, largest=largest)
        used += fitting * canvas.lines
        left += batches * heads - fitting
    if left:
        yield ""
        yield f"{left} more not drawn: --group, --head-index, --batch-index, --stage"


# ── the walk through the stages, all at once or one key press at a time ──────────────────────


def _refuse_where_useless(step: bool, printer: Printer, output: PlotOptions) -> None:
    """Refuse formats that have no room for prose, and waiting where nobody can answer."""
    if output.format in (Format.CSV, Format.NDJSON):
        raise UsageError("--explain", f"expected --format table or json, got {output.format}")
    if step and output.format is not Format.TABLE:
        raise UsageError("--step", f"expected --format table beside it, got {output.format}")
    if step and not (printer.on_terminal and sys.stdin.isatty()):
        raise UsageError(
            "--step", "expected a terminal to wait at, got none", "--explain alone prints it all"
        )


def _explain(
    asked: list[GroupStages], options: ComputeOptions, output: PlotOptions, printer: Printer
) -> None:
    """Print what each stage is for and what it did to these numbers."""
    pages: list[list[RenderableType]] = []
    for one in asked:
        lead: list[RenderableType] = [*_opening(one, printer), ""]
        for number, step in enumerate(_steps(one, output), 1):
            pages.append([*lead, *_page(step, number, printer)])
            lead = []
    if options.step:
        _turn_pages(pages, printer)
    else:
        printer.show(*(part for page in pages for part in page))


def _steps(one: GroupStages, output: PlotOptions) -> list[Step]:
    """Compute the facts and put them into words."""
    x, projection = one.made.group.described.get("x"), one.asked.output_projection
    return explain_steps(
        Facts(
            walk=walk_through(one.made.problem, one.asked.selection),
            model_width=None if x is None else x["shape"][-1],
            projected_width=None if projection is None else projection.weight.shape[1],
            unit=output.unit,
            digits=output.digits,
        )
    )


def _page(step: Step, number: int, printer: Printer) -> Iterator[RenderableType]:
    yield heading(f"{number}. {step.name}")
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
