"""The run behind `attncli entropy`: problems in, heads measured, records out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import RenderableType

from attncli import ranks
from attncli.analysis import entropy as analysis
from attncli.analysis import head_columns
from attncli.analysis.entropy import ChosenHeads, Record
from attncli.analysis.head_columns import GroupPlace
from attncli.analysis.options import AttentionWords, InputOptions, floats, indices
from attncli.analysis.pictures import head_curves
from attncli.analysis.problems import (
    GroupProblem,
    inputs_record,
    labelled,
    load_problems,
    params_record,
)
from attncli.attention.stages import select
from attncli.attention.streaming.head_record import HeadStatistics, Thresholds
from attncli.attention.streaming.heads import FEWEST_SAMPLED, draw_rows
from attncli.attention.streaming.stream import HeadRows, Wanted, planned_cells
from attncli.cli import refusals
from attncli.cli.commands import EntropyOptions, PlotOptions, Shard
from attncli.cli.opening import openings
from attncli.cli.output import (
    end_with,
    fail_for,
    leave_out,
    make_printer,
    write_picture,
    write_result,
)
from attncli.cli.terminal import progress
from attncli.columns import Column
from attncli.errors import AttncliError, UsageError
from attncli.report import Format
from attncli.report import entropy as report
from attncli.report.printer import Printer

Draw = Callable[[list[Record]], Iterator[RenderableType]]
Measured = Iterator[tuple[ChosenHeads, HeadRows, HeadStatistics]]


def run(
    inputs: InputOptions, words: AttentionWords, options: EntropyOptions, output: PlotOptions
) -> None:
    """Print what is asked for, then fail where a head is as `--fail-on` says."""
    failures = refusals.failures_typed(options.fail_on)
    thresholds = head_columns.thresholds_typed(options.label_limit, "--label-limit")
    if "nan" in failures:
        inputs = replace(inputs, allow_nonfinite=True)
    printer = make_printer(output)
    computing = output.precision, output.device
    faults: list[AttncliError] = []
    made = load_problems(inputs, words, *computing, weights=options.weights, faults=faults)
    leave_out(printer, faults)
    if options.labels is not None:
        made = labelled(made, options.labels)
    _tell_sums(made, printer)
    for one in made:
        printer.warn(one.warnings)
    lengths = [one.problem.sizes.q_len for one in made]
    if options.sample_rows is not None and options.sample_rows < min(FEWEST_SAMPLED, *lengths):
        few = f"95 % intervals of fewer than {FEWEST_SAMPLED} rows may hold less often"
        printer.warn([f"--sample-rows {options.sample_rows}: {few}"])
    chosen = [heads for one in made for heads in _chosen(one, options)]
    if options.histogram:
        _require_one_head(chosen)
    known = any(some.tokens is not None for some in chosen)
    if known and options.shard is Shard.KEYS:
        problem = "expected keys without tokens, got tokens, which are looked for among all keys"
        raise UsageError("--shard keys", problem, "--shard rows knows what to do with them")
    if options.grid in {column.key for column in head_columns.OF_TOKENS} and not known:
        raise UsageError("--grid", f"expected tokens for {options.grid}, got none", "«labels»")
    # Where records run down the same terminal, a bar would be drawn across them.
    silent = output.format in (Format.CSV, Format.NDJSON) and printer.on_terminal
    keys_drawn = output.plot is not None and not (
        options.per_row or options.histogram or options.grid is not None
    )
    shown = replace(options, per_key=options.per_key or keys_drawn)
    distances = _shows_distances(options, output)
    measured = _measured(chosen, shown, thresholds, printer, silent=silent, distances=distances)
    drawn: list[Record] = []
    if output.plot is not None:
        measured = _drawn(measured, drawn, rows=options.histogram)
    limits = head_columns.limits_of(thresholds, tokens=known)
    style = report.Style(printer, output.digits, output.unit, limits, openings(made, output.unit))
    tokens = tokens_of(made)
    heads: list[Record] = []
    of_tokens = head_columns.OF_TOKENS if known else ()
    columns, records, draw = _view(options, measured, heads, style, tokens, of_tokens)
    write_result(
        output,
        printer,
        command="entropy",
        columns=columns,
        records=records,
        inputs=inputs_record(made),
        params=params_record(made) | _params(options, limits),
        show=draw,
        above=report.alone(style),
    )
    given = inputs, words, options, output
    write_picture(
        "entropy",
        given,
        printer,
        lambda plots, title: _draw(plots, title, drawn, options, style, tokens),
    )
    end_with(faults)
    _judge(heads, failures)


def _drawn(measured: Measured, drawn: list[Record], *, rows: bool) -> Measured:
    """The same, on whose way the records of heads are kept with what runs along the sequence."""
    for some, found, statistics in measured:
        record = analysis.head_record(some, found, statistics)
        record["curves"] = head_curves(found, some.problem.sizes.q_len)
        record["entropies"] = found.entropy_nats.cpu().numpy() if rows else None
        drawn.append(record)
        yield some, found, statistics


def _draw(
    plots: Any,
    title: str,
    drawn: list[Record],
    options: EntropyOptions,
    style: report.Style,
    tokens: report.Tokens,
) -> Any:
    """A picture of what is asked for."""
    labels = report.common_labels(drawn, tokens)
    if options.grid is not None:
        return plots.grid_picture(title, drawn, refusals.NUMBERS[options.grid], style.digits)
    if options.histogram:
        return plots.histogram_picture(title, drawn[0]["entropies"], style.unit)
    if options.per_row:
        return plots.rows_picture(title, drawn, style.unit)
    if options.per_key:
        return plots.keys_picture(title, drawn, labels)
    return plots.entropy_picture(title, drawn, style.unit, labels, options.sink_keys)


def _tell_sums(made: Sequence[GroupProblem], printer: Printer) -> None:
    """How far from 1 the rows of weights that were given sum to."""
    given = [one.problem.given for one in made if one.problem.given is not None]
    sums = [end for one in given for end in (one.lowest, one.highest) if end is not None]
    if sums:
        off = max(abs(end - 1) for end in sums)
        printer.note(f"rows of weights sum to 1 within {off:.2g}")


def _chosen(made: GroupProblem, options: EntropyOptions) -> Iterator[ChosenHeads]:
    """The chosen heads under every scale and temperature asked for, the problem's own first."""
    batches = indices("--batch-index", options.batch_index)
    heads = indices("--head-index", options.head_index)
    temperatures = floats("--temperatures", options.temperatures)
    place = GroupPlace(source=made.group.source_name, group=made.group.name)
    tokens = analysis.token_numbers(made.group.labels, made.problem)
    for variant in analysis.variants(made.problem, temperatures, options.compare_scale):
        yield ChosenHeads(place, variant, select(variant, batches, heads), tokens)


def _require_one_head(chosen: Sequence[ChosenHeads]) -> None:
    count = sum(len(some.selection.batches) * len(some.selection.heads) for some in chosen)
    if count != 1:
        raise UsageError(
            "--histogram",
            f"expected one head, got {count}",
            "choose with --group, --head-index and --batch-index",
        )


def _shows_distances(options: EntropyOptions, output: PlotOptions) -> bool:
    """Whether anything that is printed or drawn holds distances, a tenth of the work."""
    if options.per_row or options.histogram or options.grid is not None:
        return True
    as_named = output.format is not Format.TABLE or output.columns is not None
    return as_named and not (options.per_key or options.summary)


def _measured(
    chosen: Sequence[ChosenHeads],
    options: EntropyOptions,
    thresholds: Thresholds,
    printer: Printer,
    *,
    silent: bool,
    distances: bool,
) -> Measured:
    """Every chosen head, with progress in cells.

    Of a sample these are the share of the cells that its rows have on average.
    """
    wanted = Wanted(
        top_key=options.per_row,
        per_key=options.per_key,
        sink_keys=options.sink_keys,
        distances=distances,
    )
    count, total = options.sample_rows, 0.0
    for some in chosen:
        of = {"batches": some.selection.batches, "heads": some.selection.heads}
        queries = some.problem.sizes.q_len
        share = 1.0 if count is None else min(1.0, count / max(1, queries))
        total += planned_cells(some.problem, wanted, **of) * share
    seed = options.sample_seed
    drawn = [None if count is None else draw_rows(some.problem, count, seed) for some in chosen]
    shown = 0 if silent else int(total / ranks.count())
    with progress(printer, shown, "attention") as advance:
        yield from analysis.measure_all(
            chosen,
            wanted,
            thresholds,
            queries=drawn,
            by_keys=options.shard is Shard.KEYS,
            advance=advance,
        )


def _view(
    options: EntropyOptions,
    measured: Measured,
    heads: list[Record],
    style: report.Style,
    tokens: report.Tokens,
    of_tokens: Sequence[Column],
) -> tuple[Sequence[Column], Iterable[Record], Draw]:
    """Columns, records and drawing of what is asked for; each head's own record goes to `heads`."""

    def whole(record: Record) -> Record:
        """With what tokens tell, also where those of other groups alone are known."""
        return record | {column.key: record.get(column.key) for column in of_tokens}

    def kept() -> Measured:
        for some, rows, statistics in measured:
            heads.append(whole(analysis.head_record(some, rows, statistics)))
            yield some, rows, statistics

    of_heads = (heads[-1] for _ in kept())
    if options.per_row or options.histogram:
        rows = (row for some, found, _ in kept() for row in analysis.row_records(some.place, found))
        if options.histogram:
            return analysis.ROW, rows, partial(report.histogram, style=style)
        draw: Draw = partial(report.long_table, columns=analysis.ROW, style=style, tokens=tokens)
        return analysis.ROW, rows, draw
    if options.per_key:
        keys = (
            key
            for some, rows, _ in kept()
            for key in analysis.key_records(some.place, rows, options.top)
        )
        draw = partial(report.long_table, columns=head_columns.KEY, style=style, tokens=tokens)
        return head_columns.KEY, keys, draw
    if options.summary:
        draw = partial(report.group_table, columns=head_columns.GROUP, style=style)
        return head_columns.GROUP, analysis.group_records(of_heads), draw
    if options.sample_rows is not None:
        sampled = (whole(analysis.sampled_record(*each)) for each in measured)
        columns = (*head_columns.SAMPLED, *of_tokens)
        return columns, sampled, partial(report.head_tables, columns=columns, style=style)
    columns = (*head_columns.HEAD, *of_tokens)
    if options.grid is not None:
        draw = partial(report.heads_picture, column=refusals.NUMBERS[options.grid], style=style)
    elif options.compare_scale or options.temperatures:
        draw = partial(report.variant_tables, style=style)
    else:
        draw = partial(report.head_tables, columns=columns, style=style)
    return columns, of_heads, draw


def tokens_of(made: Sequence[GroupProblem]) -> report.Tokens:
    """For each group that has a token for each key: the position of query 0, and the tokens.

    Where batches have positions of their own, queries are left without tokens.
    """
    found = {}
    for one in made:
        labels, mask = one.group.labels, one.problem.mask
        if labels is not None and {len(row) for row in labels} == {mask.sizes.k_len}:
            shared = mask.offset is not None and len(mask.offset) == 1
            offset = int(mask.offset[0]) if shared else None  # type: ignore[index]
            found[one.group.source_name, one.group.name] = (offset, labels)
    return found


def _params(options: EntropyOptions, limits: dict[str, float]) -> dict[str, Any]:
    """What `params` says of the options that only this command has."""
    record: dict[str, Any] = {
        "path": "tiles",
        "sink_keys": options.sink_keys,
        "labels": limits,
    }
    if options.sample_rows is not None:
        record |= {"sample_rows": options.sample_rows, "sample_seed": options.sample_seed}
    temperatures = floats("--temperatures", options.temperatures)
    if temperatures is not None:
        record["temperatures"] = list(temperatures)
    if options.compare_scale:
        record["compare_scale"] = True
    if options.shard is Shard.KEYS:
        record["shard"] = options.shard
    return record


def _judge(heads: Sequence[Record], failures: dict[str, float]) -> None:
    """Fail where a head is as `--fail-on` says."""
    tests: dict[str, Callable[[Record, float], bool]] = {
        "collapsed": lambda record, _: record["label"] == "collapsed",
        "nan": lambda record, _: record["nonfinite_rows"] > 0,
        "max-logit": lambda record, limit: (
            record["max_logit"] is not None and record["max_logit"] > limit
        ),
        "entropy-bits": partial(_is_below, "entropy_bits_mean"),
        "effective-keys": partial(_is_below, "effective_keys_mean"),
    }
    for name, limit in failures.items():
        found = [record for record in heads if tests[name](record, limit)]
        fail_for(f"{name}={limit:g}" if f"{name}=X" in refusals.FAILURES else name, found, heads)


def _is_below(key: str, record: Record, limit: float) -> bool:
    """Whether a head has the number, and it is below a limit."""
    return record[key] is not None and record[key] < limit
