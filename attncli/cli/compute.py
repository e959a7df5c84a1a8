"""`attncli compute`: every stage of attention, on files, random tensors or the example."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from attncli.analysis.options import AttentionWords, InputOptions
from attncli.analysis.values import integers, several
from attncli.cli.command import command
from attncli.cli.options import Many, WorkOptions, make_printer
from attncli.errors import ResourceError, UsageError
from attncli.report.choices import Format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attncli.analysis.attention_arguments import AttentionArguments
    from attncli.analysis.inputs import Group
    from attncli.attention.problem import Problem
    from attncli.attention.stage_statistics import StageResult
    from attncli.attention.stages import Block, Selection, Stage
    from attncli.report.printer import Printer


# What a value that is kept takes on its way to a table or to JSON: tensors, objects and text.
BYTES_A_VALUE = 120


@dataclass(frozen=True, slots=True)
class ComputeOptions:
    """What of the stages to look at."""

    stage: Annotated[
        Many,
        Option("--stage", metavar="NAME", help="Only these stages: scores, scaled, weights, …"),
    ] = None
    rows: Annotated[
        Many, Option("--rows", metavar="I[,I…]", help="Only these queries; -1 is the last.")
    ] = None
    head_index: Annotated[
        Many, Option("--head-index", metavar="I[,I…]", help="Only these heads.")
    ] = None
    batch_index: Annotated[
        Many, Option("--batch-index", metavar="I[,I…]", help="Only these batches.")
    ] = None
    max_values: Annotated[
        int,
        Option(
            "--max-values",
            metavar="N",
            min=0,
            help="Tables and JSON: leave out the values of larger stages.",
        ),
    ] = 65_536
    save: Annotated[
        str | None,
        Option("--save", metavar="FILE.npz|.safetensors|DIR", help="Write stages as tensors."),
    ] = None
    explain: Annotated[
        bool, Option("--explain", help="Walk through the stages: formula, purpose, numbers.")
    ] = False
    step: Annotated[
        bool, Option("--step", help="With --explain on a terminal: wait between stages.")
    ] = False


def register(app: typer.Typer) -> None:
    """Add `compute` to the program."""

    @command(app, "compute")
    def compute(
        inputs: InputOptions, shape: AttentionWords, chosen: ComputeOptions, work: WorkOptions
    ) -> None:
        """Compute attention stage by stage: scores, scaled, masked, weights, output.

        With no input it shows the embedded 4×3 example. Q, K and V come as three files, as a
        bundle (.npz, .safetensors, .pt) with tensors named q, k, v, or are projected from --x.
        """
        if chosen.step and not chosen.explain:
            raise UsageError("--step", "expected --explain beside it, got --step alone")
        from attncli.analysis.inputs import load_groups

        groups = load_groups(inputs, example=True)
        if len({group.source for group in groups}) > 1 or len({g.name for g in groups}) < len(
            groups
        ):
            raise UsageError("FILE", "expected one bundle, got several", "run once for each")
        _run([_prepare(group, inputs, shape, chosen, work) for group in groups], chosen, work)


@dataclass(frozen=True, slots=True)
class Prepared:
    """One group, ready to be computed."""

    group: Group
    problem: Problem
    shape: AttentionArguments
    selection: Selection
    stages: tuple[Stage, ...]
    chosen: ComputeOptions

    @property
    def warnings(self) -> list[str]:
        """What the reader of the results should know."""
        from attncli.analysis.problems import warnings_of

        return warnings_of(self.group, self.shape, self.problem)

    def results(self) -> dict[Stage, StageResult]:
        """An empty result per stage, to be filled block by block."""
        from attncli.attention.stage_statistics import StageResult
        from attncli.attention.stages import shape_of

        weight = self.group.output_projection
        shapes = {s: shape_of(self.problem, s, self.selection, weight) for s in self.stages}
        return {stage: StageResult(stage, shape) for stage, shape in shapes.items()}

    def blocks(self, stages: tuple[Stage, ...]) -> Iterator[Block]:
        from attncli.attention.stages import blocks_of

        return blocks_of(self.problem, stages, self.selection, self.group.output_projection)


def _prepare(
    group: Group,
    inputs: InputOptions,
    given: AttentionWords,
    chosen: ComputeOptions,
    work: WorkOptions,
) -> Prepared:
    from attncli.analysis.problems import problem_of
    from attncli.attention.stages import select

    shape, problem = problem_of(group, inputs, given, work.precision, work.device)
    selection = select(
        problem,
        integers("--batch-index", chosen.batch_index),
        integers("--head-index", chosen.head_index),
        integers("--rows", chosen.rows),
    )
    return Prepared(group, problem, shape, selection, _stages(group, problem, chosen), chosen)


def _stages(group: Group, problem: Problem, chosen: ComputeOptions) -> tuple[Stage, ...]:
    """The stages asked for, or all there are, in the order of computation."""
    from attncli.attention.stages import Stage, stages_of

    there = set(stages_of(problem))
    if group.is_projected:
        there |= {Stage.Q, Stage.K} | (set() if problem.v is None else {Stage.V})
    if group.output_projection is not None:
        there.add(Stage.PROJECTED)
    offered = [stage for stage in Stage if stage in there]
    wanted = several(chosen.stage)
    if chosen.stage is not None and not wanted:
        raise UsageError("--stage", "expected at least one name, got none")
    for name in wanted:
        if name not in offered:
            names = ", ".join(offered)
            raise UsageError("--stage", f"expected one of {names} for these inputs, got {name!r}")
    return tuple(stage for stage in offered if not wanted or stage in wanted)


def _run(prepared: list[Prepared], chosen: ComputeOptions, work: WorkOptions) -> None:
    printer = make_printer(work)
    if chosen.explain:
        from attncli.cli.explain import explain, refuse_where_useless

        refuse_where_useless(chosen.step, printer, work)
    for one in prepared:
        printer.warn(one.warnings)
    if chosen.explain and work.format is not Format.JSON:
        _gather_saved(prepared, printer)
        explain(prepared, printer, work)
        return
    streamed = work.format in (Format.CSV, Format.NDJSON)
    if streamed:
        _gather_saved(prepared, printer)
        printer.write(_cells(prepared, work.format))
        return
    gathered = _gather(prepared, printer, keep=True)
    if work.format is Format.JSON:
        printer.write(_document(prepared, gathered, printer, work))
        return
    from attncli.cli.compute_table import show

    show(prepared, gathered, printer, work)


def _gather_saved(prepared: list[Prepared], printer: Printer) -> None:
    """Write what `--save` asks for, where nothing else needs the stages."""
    if prepared[0].chosen.save is not None:
        _gather(prepared, printer, keep=False)


def _gather(prepared: list[Prepared], printer: Printer, *, keep: bool) -> list[list[StageResult]]:
    """Compute every stage once: statistics, values where they are few, and what is saved."""
    results = [one.results() for one in prepared]
    save = prepared[0].chosen.save
    if keep:
        _require_memory(prepared, results)
    with _saver(save, prepared, results) as write:
        for one, found in zip(prepared, results, strict=True):
            for block in one.blocks(one.stages):
                result = found[block.stage]
                few = math.prod(result.shape) <= one.chosen.max_values
                result.add(block, keep=keep and few)
                write(one, result, block)
    if save is not None:
        printer.note(f"wrote {save}")
    return [list(found.values()) for found in results]


def _require_memory(prepared: list[Prepared], results: list[dict[Stage, StageResult]]) -> None:
    """Refuse to keep more values than fit: in the end each is a number and its text."""
    from attncli.files.limits import require_memory

    limit = prepared[0].chosen.max_values
    cells = [math.prod(result.shape) for found in results for result in found.values()]
    need = BYTES_A_VALUE * sum(count for count in cells if count <= limit)
    try:
        require_memory("--max-values", need)
    except ResourceError as error:
        advice = "--format csv, --save, --rows and --stage need less"
        raise ResourceError(error.where, error.problem, advice) from None


@contextmanager
def _saver(
    save: str | None, prepared: list[Prepared], results: list[dict[Stage, StageResult]]
) -> Iterator[Callable[[Prepared, StageResult, Block], None]]:
    """A function that writes blocks to the tensors of `--save`, or one that does nothing."""
    if save is None:
        yield lambda one, result, block: None
        return
    from attncli.files.writer import TensorSaver

    def name_of(one: Prepared, stage: Stage) -> str:
        return f"{one.group.name}.{stage}" if one.group.name else str(stage)

    shapes = {
        name_of(one, stage): (result.shape, one.problem.numpy_dtype)
        for one, found in zip(prepared, results, strict=True)
        for stage, result in found.items()
    }
    with TensorSaver(save, shapes) as saver:

        def write(one: Prepared, result: StageResult, block: Block) -> None:
            batch, head = result.place(block)
            rows = slice(block.at, block.at + len(block.rows))
            saver.write(name_of(one, block.stage), (batch, head, rows), block.values.numpy())

        yield write


def _cells(prepared: list[Prepared], form: Format) -> Iterator[str]:
    """Every selected cell, stage by stage."""
    from attncli.report import stages as report

    grouped = len(prepared) > 1
    write = report.csv_cells if form is Format.CSV else report.ndjson_cells
    if form is Format.CSV:
        columns = report.GROUPED_CELL_COLUMNS if grouped else report.CELL_COLUMNS
        yield ",".join(columns) + "\n"
    for one in prepared:
        for stage in one.stages:
            yield from write(one.blocks((stage,)), one.group.name if grouped else None)


def _document(
    prepared: list[Prepared],
    gathered: list[list[StageResult]],
    printer: Printer,
    work: WorkOptions,
) -> Iterator[str]:
    """The JSON document: one group as it stands, several by name."""
    from attncli.report.document import document

    data = {
        one.group.name: _data(one, found, work)
        for one, found in zip(prepared, gathered, strict=True)
    }
    described = {one.group.name: one.group.described for one in prepared}
    params = {one.group.name: _params(one) for one in prepared}
    alone = len(prepared) == 1
    name = prepared[0].group.name
    return document(
        "compute",
        inputs=described[name] if alone else described,
        params=params[name] if alone else params,
        warnings=printer.warned,
        data=data[name] if alone else {"groups": data},
    )


def _data(one: Prepared, found: list[StageResult], work: WorkOptions) -> dict[str, Any]:
    from attncli.attention.cost import cost_of
    from attncli.report.stages import stage_record

    explained: dict[str, Any] = {}
    if one.chosen.explain:
        from attncli.cli.explain import explanation_record

        explained["explanation"] = explanation_record(one, work)
    return explained | {
        "stages": {str(result.stage): stage_record(result) for result in found},
        "cost": asdict(cost_of(one.problem)),
        "batches": list(one.selection.batches),
        "heads": list(one.selection.heads),
        "rows": None if one.chosen.rows is None else list(one.selection.rows),
    }


def _params(one: Prepared) -> dict[str, Any]:
    from attncli.analysis.problems import params_record

    return params_record(one.group, one.shape, one.problem) | {
        "stage": [str(stage) for stage in one.stages],
        "max_values": one.chosen.max_values,
    }
