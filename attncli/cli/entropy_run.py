"""The run behind `attncli entropy`: problems in, heads streamed, records out."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from attncli.analysis.inputs import described
from attncli.analysis.problems import merged
from attncli.analysis.values import floats, integers, several
from attncli.cli.emit import emit
from attncli.cli.entropy_records import (
    EntropyRun,
    HeadsOfGroup,
    group_records,
    head_records,
    key_records,
    read_limits,
    row_records,
    sampled_records,
)
from attncli.errors import UsageError
from attncli.report.choices import Format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import RenderableType

    from attncli.analysis.inputs import Group
    from attncli.analysis.options import AttentionWords, InputOptions
    from attncli.attention.problem import Problem
    from attncli.attention.streaming.labels import Thresholds
    from attncli.cli.emit import Record
    from attncli.cli.entropy import EntropyOptions
    from attncli.cli.options import WorkOptions
    from attncli.columns import Column
    from attncli.report.printer import Printer

    Draw = Callable[[list[Record]], Iterator[RenderableType]]


def run_entropy(
    inputs: InputOptions,
    given: AttentionWords,
    chosen: EntropyOptions,
    work: WorkOptions,
    printer: Printer,
) -> list[Record]:
    """Print what is asked for; return the record of every head."""
    from attncli.analysis.inputs import load_groups
    from attncli.analysis.problems import params_record, problem_of, warnings_of

    thresholds = read_thresholds(chosen.label_limit)
    _check_grid(chosen)
    groups = load_groups(inputs)
    prepared = [
        (group, *problem_of(group, inputs, given, work.precision, work.device)) for group in groups
    ]
    for group, shape, problem in prepared:
        printer.warn(warnings_of(group, shape, problem))
    params = merged(groups, [params_record(*one) for one in prepared])
    works = [w for group, _, problem in prepared for w in _variants_of(group, problem, chosen)]
    run = _plan(chosen, works, thresholds, printer, work)
    columns, records, draw = _view(run, work)
    emit(
        work.format,
        printer,
        command="entropy",
        columns=columns,
        records=records,
        inputs=described(groups),
        params=params | _own_params(chosen, thresholds),
        show=draw,
    )
    return run.heads


def _plan(
    chosen: EntropyOptions,
    works: list[HeadsOfGroup],
    thresholds: Thresholds,
    printer: Printer,
    work: WorkOptions,
) -> EntropyRun:
    from attncli.attention.streaming.stream import Wanted

    wanted = Wanted(top_key=chosen.per_row, per_key=chosen.per_key, sink_keys=chosen.sink_keys)
    if chosen.histogram:
        _require_one_head(works)
    # Where records run down the same terminal, a bar would be drawn across them.
    streams = work.format in (Format.CSV, Format.NDJSON) and printer.on_terminal
    return EntropyRun(chosen, works, wanted, thresholds, printer, not streams)


def _own_params(chosen: EntropyOptions, thresholds: Thresholds) -> dict[str, Any]:
    """What `params` says of the options that only this command has."""
    record: dict[str, Any] = {
        "path": "tiles",
        "sink_keys": chosen.sink_keys,
        "labels": read_limits(thresholds),
    }
    if chosen.sample_rows is not None:
        record |= {"sample_rows": chosen.sample_rows, "sample_seed": chosen.sample_seed}
    temperatures = floats("--temperatures", chosen.temperatures)
    if temperatures is not None:
        record["temperatures"] = list(temperatures)
    if chosen.compare_scale:
        record["compare_scale"] = True
    return record


def _variants_of(group: Group, problem: Problem, chosen: EntropyOptions) -> list[HeadsOfGroup]:
    """The chosen heads under every scale and temperature asked for, the problem's own first."""
    from attncli.attention.stages import select

    batches = integers("--batch-index", chosen.batch_index)
    heads = integers("--head-index", chosen.head_index)
    temperatures = floats("--temperatures", chosen.temperatures) or (problem.temperature,)
    scales = [problem.scale] + ([1.0] if chosen.compare_scale else [])
    pairs = dict.fromkeys((scale, heat) for heat in temperatures for scale in scales)
    found = []
    for scale, heat in pairs:
        variant = replace(problem, scale=scale, temperature=heat)
        found.append(HeadsOfGroup(group, variant, select(variant, batches, heads)))
    return found


def read_thresholds(given: list[str] | None) -> Thresholds:
    """Thresholds of the labels, with those that `--label-limit` adjusts.

    Raises:
        UsageError: a name that is no label, or a value outside 0 to 1.
    """
    from attncli.attention.streaming.labels import Thresholds

    names = [entry.name for entry in fields(Thresholds)]
    adjusted = {}
    for text in several(given):
        name, _, number = text.partition("=")
        key = name.strip().replace("-", "_")
        if key not in names or not number:
            options = ", ".join(name.replace("_", "-") + "=X" for name in names)
            raise UsageError("--label-limit", f"expected {options}, got {text!r}")
        (value,) = floats("--label-limit", [number]) or (0.0,)
        if not 0 < value <= 1:
            raise UsageError("--label-limit", f"expected a score above 0, up to 1, got {number}")
        adjusted[key] = value
    return Thresholds(**adjusted)


def _require_one_head(works: list[HeadsOfGroup]) -> None:
    chosen = [work.selection for work in works]
    count = sum(len(one.batches) * len(one.heads) for one in chosen)
    if count != 1:
        raise UsageError(
            "--histogram",
            f"expected one head, got {count}",
            "choose with --group, --head-index and --batch-index",
        )


def _check_grid(chosen: EntropyOptions) -> None:
    from attncli.report.entropy_pictures import grid_column

    if chosen.grid is not None:
        grid_column(chosen.grid)


def _view(run: EntropyRun, work: WorkOptions) -> tuple[Sequence[Column], Iterator[Record], Draw]:
    """Columns, records and drawing of what is asked for."""
    from attncli.report import entropy as report
    from attncli.report import entropy_pictures as pictures
    from attncli.report import records as columns

    chosen = run.chosen
    style = report.Style(run.printer, work.digits, work.unit, read_limits(run.thresholds))
    if chosen.per_row:
        tokens = _tokens(run)
        draw = partial(report.row_table, style=style, tokens=tokens)
        return columns.ROW_ENTROPY, row_records(run), draw
    if chosen.per_key:
        draw = partial(report.key_table, style=style, tokens=_tokens(run))
        return columns.KEY_MASS, key_records(run), draw
    if chosen.summary:
        draw = partial(report.group_table, style=style)
        return columns.GROUP_ENTROPY, group_records(run), draw
    if chosen.histogram:
        draw = partial(pictures.histogram, style=style)
        return columns.ROW_ENTROPY, row_records(run), draw
    if chosen.sample_rows is not None:
        draw = partial(report.sampled_tables, style=style)
        return columns.SAMPLED_ENTROPY, sampled_records(run), draw
    if chosen.grid is not None:
        draw = partial(pictures.grid, column=pictures.grid_column(chosen.grid), style=style)
        return columns.HEAD_ENTROPY, head_records(run), draw
    side_by_side = chosen.compare_scale or bool(chosen.temperatures)
    draw = partial(report.variant_tables if side_by_side else report.head_tables, style=style)
    return columns.HEAD_ENTROPY, head_records(run), draw


def _tokens(run: EntropyRun) -> dict[tuple[str, str], tuple[int | None, tuple[str, ...]]]:
    """For each group that has a token for each key: the position of query 0, and the tokens.

    Where batches have positions of their own, queries are left without tokens.
    """
    found = {}
    for work in run.works:
        labels, mask = work.group.labels, work.problem.mask
        if labels is not None and len(labels) == mask.sizes.k_len:
            one = mask.offset is not None and len(mask.offset) == 1
            offset = int(mask.offset[0]) if one else None  # type: ignore[index]
            found[work.group.source_name, work.group.name] = (offset, labels)
    return found
