"""What `attncli compute` does: stages computed, kept or saved, and told in every format."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType

from attncli import ranks
from attncli.analysis.compute import ask_stages
from attncli.analysis.inputs import Group, load_groups
from attncli.analysis.needs import require_values
from attncli.analysis.options import AttentionWords, InputOptions, indices, several
from attncli.analysis.pictures import DRAWN_STAGES, MOST_HEADS, stage_maps
from attncli.analysis.problems import problem_of
from attncli.attention.options import Layout, Stage
from attncli.attention.pooling import StageMaps
from attncli.attention.problem import cost_of
from attncli.attention.stages import Block, Selection, StageResult
from attncli.attention.steps import entropy_of_weights
from attncli.cli.commands import ComputeOptions, PlotOptions
from attncli.cli.explain import (
    SHAPES,
    explain,
    shape_records,
    shapes_table,
    steps_of,
)
from attncli.cli.opening import opening
from attncli.cli.output import make_printer, write_picture, write_result
from attncli.cli.stages import GroupStages, heat_maps, map_of_first, view_of
from attncli.cli.terminal import progress
from attncli.errors import AttncliError, UsageError
from attncli.files.writer import TensorSaver
from attncli.report import Format
from attncli.report import stages as report
from attncli.report.printer import Printer, document
from attncli.report.table import labels_of_batch

# Cells of all stages, or pairs of a query and a key, from which on somebody may wonder how long it
# takes.
WORTH_WATCHING = 1 << 23

# Of the picture of weights below the corners of a matrix that is too large to show.
MAP_LINES = 22

Results = dict[Stage, StageResult]


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
    for one in asked:
        printer.warn(one.made.warnings)
    if options.shapes:
        _write_shapes(asked, options, output, printer)
        return
    if options.save is not None and inputs.layout is not Layout.BHSD:
        printer.note(f"{options.save} is (B, H, S, d) whatever --layout says of the inputs")
    given = inputs, words, options, output
    write_picture(
        "compute", given, printer, lambda plots, title: _draw(plots, title, asked, output)
    )
    in_words = options.explain and output.format is Format.TABLE
    if in_words or options.heatmap or output.format in (Format.CSV, Format.NDJSON):
        if options.save is not None:
            _gather(asked, options, printer, max_values=-1, measure=False)
        if not ranks.is_first():
            return
        if in_words:
            otherwise = _otherwise_causal(asked, inputs, words, options, output)
            explain(asked, otherwise, options, output, printer)
        elif options.heatmap:
            maps = heat_maps(asked, options, output, printer)
            printer.write(printer.rendered(part) for part in maps)
        else:
            printer.write(_cells(asked, output.format), output.format)
        return
    results = _gather(asked, options, printer, options.max_values)
    if not ranks.is_first():  # its part of the work is done
        return
    if output.format is Format.JSON:
        printer.write(_document(asked, results, options, output, printer), output.format)
    else:
        printer.show(*_all_tables(asked, results, options, output, printer))


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
    asked = ask_stages(
        made.problem,
        names,
        option="--stage",
        batches=indices("--batch-index", options.batch_index),
        heads=indices("--head-index", options.head_index),
        rows=indices("--rows", options.rows),
        is_projected=group.is_projected,
        output_projection=group.output_projection,
    )
    return GroupStages(replace(made, problem=asked.problem), asked)


def _otherwise_causal(
    asked: list[GroupStages],
    inputs: InputOptions,
    words: AttentionWords,
    options: ComputeOptions,
    output: PlotOptions,
) -> list[GroupStages] | None:
    """The same causal where it is not, and not where it is; None where that makes no sense."""
    if not options.step:
        return None
    causal = not asked[0].made.arguments.options.causal
    changed = AttentionWords(**vars(words) | {"causal": causal})
    try:
        return [_asked(one.made.group, inputs, changed, options, output) for one in asked]
    except AttncliError:
        return None


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


def _write_shapes(
    asked: list[GroupStages], options: ComputeOptions, output: PlotOptions, printer: Printer
) -> None:
    write_result(
        output,
        printer,
        command="compute",
        columns=SHAPES,
        records=shape_records(asked, options),
        inputs={one.made.group.name: one.made.group.described for one in asked},
        params={},
        show=lambda _: shapes_table(asked, options, printer),
    )


# ── computing and saving ─────────────────────────────────────────────────────────────────────


def _gather(
    asked: list[GroupStages],
    options: ComputeOptions,
    printer: Printer,
    max_values: int,
    *,
    measure: bool = True,
) -> list[Results]:
    """Compute every stage once: statistics, values where they are few, and what is saved."""
    results = [one.asked.results() for one in asked]
    cells = [math.prod(result.shape) for found in results for result in found.values()]
    require_values(sum(count for count in cells if count <= max_values))
    with ExitStack() as stack:
        pairs = (_pairs(one) for one, found in zip(asked, results, strict=True) if found)
        shown = sum(cells) if max(sum(cells), sum(pairs)) >= WORTH_WATCHING else 0
        tell = stack.enter_context(progress(printer, shown, "computing"))
        saver = None
        if options.save is not None and ranks.is_first():
            saver = stack.enter_context(TensorSaver(options.save, _saved(asked, results)))
        for one, found in zip(asked, results, strict=True):
            take = partial(_take, saver, tell, one.made.group.name)
            one.asked.gather(found, max_values, take, measure=measure)
    if options.save is not None:
        printer.wrote(options.save)
    return results


def _pairs(one: GroupStages) -> int:
    """How many queries and keys meet in what is selected."""
    chosen = one.asked.selection
    k_len = one.asked.problem.sizes.k_len
    return len(chosen.batches) * len(chosen.heads) * len(chosen.rows) * k_len


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


def _take(
    saver: TensorSaver | None,
    tell: Callable[[int], None] | None,
    group: str,
    result: StageResult,
    block: Block,
) -> None:
    """Write a block where that is asked for, and say that it is done."""
    if saver is not None:
        _write(saver, group, result, block)
    if tell is not None:
        tell(block.values.numel())


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
        yield ",".join(one.key for one in report.CELLS if grouped or one.always) + "\n"
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
        explained["explanation"] = [asdict(step) for step in steps_of(one, options, output)]
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


def _all_tables(
    asked: list[GroupStages],
    results: list[Results],
    options: ComputeOptions,
    output: PlotOptions,
    printer: Printer,
) -> Iterator[RenderableType]:
    """Every group; on a terminal the matrices of the first alone."""
    costs: list[str] = []
    for at, (one, found) in enumerate(zip(asked, results, strict=True)):
        yield from opening(one.made)
        yield ""
        if at == 0 or not printer.on_terminal:
            yield from _matrices(one, found, options, output, printer)
        yield report.summary_table(list(found.values()), printer, output.digits)
        yield ""
        cost = report.cost_line(cost_of(one.made.problem))
        if options.stage is None and options.rows is None and cost not in costs:
            costs.append(cost)
            yield cost + (" (without the projections)" if one.made.group.is_projected else "")
            yield ""
    if len(asked) > 1 and printer.on_terminal:
        yield "matrices of the first group alone: --group NAME shows those of another"


def _matrices(
    one: GroupStages,
    found: Results,
    options: ComputeOptions,
    output: PlotOptions,
    printer: Printer,
) -> Iterator[RenderableType]:
    """The matrices of each stage, corners of those that are too large."""
    problem, view = one.made.problem, view_of(one, options, output, printer)
    changes = problem.mask.has_bias or not {Stage.SCALED, Stage.CAPPED} & found.keys()
    for stage, result in found.items():
        cells, drawn = result, view
        if result.values is None and 0 not in result.shape:
            some = _corner(one, stage)
            drawn = view_of(some, options, output, printer)
            cells = some.asked.results()[stage]
            some.asked.gather({stage: cells})
        if stage is Stage.WEIGHTS:
            entropies = _entropies(cells, with_sink=problem.sinks is not None)
            drawn = replace(drawn, entropies=entropies)
        if cells is not result:
            yield from report.corner_tables(result, cells, drawn)
            if stage is Stage.WEIGHTS and printer.on_terminal:
                given = options, output, printer
                yield from map_of_first(one, stage, MAP_LINES, *given, title=str(stage))
            continue
        repeats = stage is Stage.MASKED and not (result.statistics.n_masked or changes)
        yield from report.stage_tables(result, drawn, repeats=repeats)
    large = [str(stage) for stage, r in found.items() if r.values is None and 0 not in r.shape]
    if large:
        yield (
            f"corners alone of {', '.join(large)}: above --max-values {options.max_values}; choose "
            "--rows and --head-index, or a larger --max-values, --format csv or --save FILE"
        )
        yield ""


def _corner(one: GroupStages, stage: Stage) -> GroupStages:
    """The same, of rows at both ends of the first head."""
    selection = one.asked.selection
    heads = selection.heads if stage is Stage.PROJECTED else selection.heads[:1]
    rows = tuple(selection.rows)
    if len(rows) > report.CORNER_ROWS:
        last = report.CORNER_ROWS // 3
        rows = (*rows[: report.CORNER_ROWS - last], *rows[-last:])
    few = Selection(selection.batches[:1], heads, rows)
    return GroupStages(one.made, replace(one.asked, selection=few, stages=(stage,)))


def _entropies(weights: StageResult, *, with_sink: bool) -> NDArray[np.object_] | None:
    """Nats of each row of the weights, for a column beside them; None for rows without keys."""
    if weights.values is None:
        return None
    nats = entropy_of_weights(weights.values, with_sink=with_sink).numpy().astype(object)
    if weights.visible is not None:
        nats[~weights.visible.any(-1).numpy()] = None
    return nats
