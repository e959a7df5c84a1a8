"""The run behind `attncli compare`: two sides in, what becomes of every head out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

from attncli import ranks
from attncli.analysis import compare as analysis
from attncli.analysis.changes import Change, read_changes
from attncli.analysis.compare import ComparedHead, Pair, WorstRow
from attncli.analysis.entropy import Record, token_numbers
from attncli.analysis.head_columns import GroupPlace
from attncli.analysis.options import AttentionWords, InputOptions, indices
from attncli.analysis.problems import GroupProblem, inputs_record, load_problems, params_record
from attncli.attention.streaming.stream import planned_cells
from attncli.cli import refusals
from attncli.cli.commands import CompareOptions, PlotOptions
from attncli.cli.entropy_run import tokens_of
from attncli.cli.opening import openings
from attncli.cli.output import fail_for, make_printer, write_picture, write_result
from attncli.cli.terminal import progress
from attncli.errors import UsageError
from attncli.report import Format
from attncli.report import compare as report
from attncli.report.entropy import Style, alone, long_table
from attncli.report.printer import Printer
from attncli.report.table import labels_of_batch

WORST_KEYS = 10


@dataclass(frozen=True, slots=True)
class Sides:
    """Both sides as they were loaded.

    Attributes:
        base: the groups of A.
        other: those of B; empty where a change makes it.
        pairs: what to compare, each with what A is made of.
        changes: the what-ifs; empty between two inputs.
    """

    base: list[GroupProblem]
    other: list[GroupProblem]
    pairs: list[tuple[Pair, GroupProblem]]
    changes: list[Change] = field(default_factory=list)

    def record(self, of_side: Any) -> dict[str, Any]:
        """What `inputs_record` or `params_record` says of A, or of A and B."""
        if not self.other:
            return dict(of_side(self.base))
        return {"a": of_side(self.base), "b": of_side(self.other)}


def run(
    inputs: InputOptions, words: AttentionWords, options: CompareOptions, output: PlotOptions
) -> None:
    """Print what is asked for, then fail where a head exceeds a limit of `--fail-on`."""
    columns = refusals.compared_columns(options)
    limits = refusals.limits_typed(options.fail_on)
    printer = make_printer(output)
    sides = _load(inputs, words, options, output, printer)
    silent = output.format in (Format.CSV, Format.NDJSON) and printer.on_terminal
    heads: list[Record] = []
    worst: dict[str | None, WorstRow] = {}
    compared = _followed(_compared(sides, printer, silent=silent), heads, worst)
    tokens = tokens_of(sides.base)
    records: Iterable[Record] = _records(options, compared, worst, tokens)
    if options.sort is not None:
        records = analysis.most_changed_first(records, options.sort)
    if options.top is not None and not options.worst:
        records = islice(records, options.top)
    style = Style(printer, output.digits, output.unit, {}, openings(sides.base))
    if options.worst:
        draw: Any = partial(report.worst_tables, style=style)
    elif options.per_row:
        draw = partial(long_table, columns=columns, style=style, tokens=tokens)
    elif options.grid is not None:
        draw = partial(
            report.heads_pictures, column=refusals.COMPARED_NUMBERS[options.grid], style=style
        )
    else:
        draw = partial(report.record_tables, columns=columns, style=style)
    made_of = {"what_if": options.what_if} if options.what_if else {}
    write_result(
        output,
        printer,
        command="compare",
        columns=columns,
        records=records,
        inputs=sides.record(inputs_record),
        params=sides.record(params_record) | made_of,
        show=draw,
        above=alone(style),
    )
    for _ in compared:  # those that --top has left out count, too
        pass
    grid = None if options.grid is None else refusals.COMPARED_NUMBERS[options.grid]
    write_picture(
        "compare",
        (inputs, words, options, output),
        printer,
        lambda plots, title: plots.compare_picture(title, heads, output.unit, grid, output.digits),
    )
    _judge(heads, limits)


def _load(
    inputs: InputOptions,
    words: AttentionWords,
    options: CompareOptions,
    output: PlotOptions,
    printer: Printer,
) -> Sides:
    """Read both sides, or one and the what-ifs, and pair their groups."""
    computing = words, output.precision, output.device
    chosen = (
        indices("--batch-index", options.batch_index),
        indices("--head-index", options.head_index),
    )
    changes = read_changes(options.what_if or [])
    named = {role: getattr(options, f"other_{role}") for role in "qkv"}
    apart = not changes and not any(named.values())
    files = inputs.files or []
    base = load_problems(replace(inputs, files=files[:1]) if apart else inputs, *computing)
    other: list[GroupProblem] = []
    if not changes:
        given = {role: name for role, name in named.items() if name is not None}
        theirs = replace(inputs, files=files[1:]) if apart else inputs
        other = load_problems(replace(theirs, **given), *computing)
    for one in (*base, *other):
        printer.warn(one.warnings)
    matched = [(one, one) for one in base]
    if not changes:
        matched, said = analysis.matched(base, other)
        printer.warn(said)
    pairs = []
    for one, partner in matched:
        place = GroupPlace(source=one.group.source_name, group=one.group.name)
        sides = one.problem, partner.problem
        pair = analysis.pair_of(place, *sides, *chosen, partner.group.place)
        tokens = token_numbers(one.group.labels, one.problem)
        pairs.append((replace(pair, tokens=tokens), one))
    return Sides(base, other, pairs, changes)


def _compared(sides: Sides, printer: Printer, *, silent: bool) -> Iterator[ComparedHead]:
    """Every head of every pair, with progress in cells: about two passes over each side."""
    total = sum(
        4 * planned_cells(pair.a, batches=pair.selection.batches, heads=pair.selection.heads)
        for pair, _ in sides.pairs
    ) * max(1, len(sides.changes))
    with progress(printer, 0 if silent else total // ranks.count(), "attention") as advance:
        for pair, one in sides.pairs:
            made: Iterable[Pair] = [pair]
            if sides.changes:
                options = one.arguments.options
                made = analysis.alternatives(pair, options, sides.changes, printer.warn)
            for each in made:
                yield from analysis.compare_heads(each, advance)


def _followed(
    compared: Iterable[ComparedHead], heads: list[Record], worst: dict[str | None, WorstRow]
) -> Iterator[ComparedHead]:
    """The same, whose records and worst rows are remembered as they come by."""
    for one in compared:
        heads.append(one.record)
        row, what_if = analysis.worst_row(one), one.pair.what_if
        if row is not None and (what_if not in worst or row.rank > worst[what_if].rank):
            worst[what_if] = row
        yield one


def _records(
    options: CompareOptions,
    compared: Iterable[ComparedHead],
    worst: dict[str | None, WorstRow],
    tokens: Any,
) -> Iterator[Record]:
    """What is asked for, as it becomes known."""
    if options.per_row:
        return (row for one in compared for row in analysis.row_records(one))
    heads = (one.record for one in compared)
    if options.summary:
        return analysis.group_records(heads)
    return _keys(heads, worst, options.top or WORST_KEYS, tokens) if options.worst else heads


def _keys(
    heads: Iterable[Record], worst: dict[str | None, WorstRow], top: int, tokens: Any
) -> Iterator[Record]:
    for _ in heads:  # only the last tells which row is the worst
        pass
    for row in worst.values():
        place = row.pair.place
        _, of_batches = tokens.get((place.source, place.group), (None, None))
        yield from analysis.key_records(row, top, labels_of_batch(of_batches, row.batch) or ())


def _judge(heads: Sequence[Record], limits: dict[str, float]) -> None:
    """Fail where a head exceeds a limit; one of which B hides keys exceeds every KL."""
    for name, limit in limits.items():
        key = refusals.LIMITED.get(name, name)
        if heads and all(record[key] is None for record in heads) and name == "output":
            raise UsageError("--fail-on output", "expected V on both sides, got none")
        over = [
            record
            for record in heads
            if (record[key] is not None and not record[key] <= limit)
            or (key.startswith("kl_") and record["infinite_kl_rows"] > 0)
        ]
        fail_for(f"{name.replace('_', '-')}={limit:g}", over, heads)
