"""The run behind `attncli entropy`: problems in, heads streamed, records out."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from attncli.cli.emit import described, emit, merged
from attncli.cli.values import floats, integers
from attncli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import RenderableType

    from attncli.attention.head_statistics import HeadStatistics
    from attncli.attention.labels import Thresholds
    from attncli.attention.problem import Problem
    from attncli.attention.stream import HeadRows, Wanted
    from attncli.cli.emit import Record
    from attncli.cli.entropy import EntropyOptions
    from attncli.cli.inputs import Group
    from attncli.cli.options import InputOptions, ShapeOptions, WorkOptions
    from attncli.report.printer import Printer
    from attncli.report.records import Column


@dataclass(frozen=True, slots=True)
class _Work:
    """One group under one scale and temperature."""

    group: Group
    problem: Problem


@dataclass(slots=True)
class _Run:
    """What is wanted of all groups, and the record of every head as it is finished."""

    chosen: EntropyOptions
    works: list[_Work]
    wanted: Wanted
    thresholds: Thresholds
    heads: list[Record] = field(default_factory=list)


def run_entropy(
    inputs: InputOptions,
    given: ShapeOptions,
    chosen: EntropyOptions,
    work: WorkOptions,
    printer: Printer,
) -> list[Record]:
    """Print what is asked for; return the record of every head."""
    from attncli.cli.inputs import load_groups
    from attncli.cli.problems import params_record, problem_of, warnings_of

    groups = load_groups(inputs)
    prepared = [(group, *problem_of(group, inputs, given, work)) for group in groups]
    for group, shape, problem in prepared:
        printer.warn(warnings_of(group, shape, problem))
    params = merged(groups, [params_record(*one) for one in prepared])
    run = _plan(chosen, [_Work(group, problem) for group, _, problem in prepared])
    params |= {"sink_keys": chosen.sink_keys, "labels": asdict(run.thresholds)}
    columns, records, draw = _view(run, printer, work)
    emit(
        work.format,
        printer,
        command="entropy",
        columns=columns,
        records=records,
        inputs=described(groups),
        params=params,
        show=lambda found: draw(found),
    )
    return run.heads


def _plan(chosen: EntropyOptions, works: list[_Work]) -> _Run:
    """Every group under every scale and temperature asked for."""
    from attncli.attention.stream import Wanted

    works = [
        _Work(work.group, replace(work.problem, scale=scale, temperature=temperature))
        for work in works
        for scale, temperature in _variants(chosen, work.problem)
    ]
    wanted = Wanted(top_key=chosen.per_row, per_key=chosen.per_key, sink_keys=chosen.sink_keys)
    if chosen.histogram:
        _require_one_head(works, chosen)
    return _Run(chosen, works, wanted, read_thresholds(chosen.label_limit))


def _variants(chosen: EntropyOptions, problem: Problem) -> list[tuple[float, float]]:
    """Scale and temperature pairs, the problem's own first."""
    temperatures = floats("--temperatures", chosen.temperatures) or (problem.temperature,)
    scales = [problem.scale] + ([1.0] if chosen.compare_scale else [])
    return [(scale, temperature) for temperature in temperatures for scale in scales]


def read_thresholds(given: list[str] | None) -> Thresholds:
    """Thresholds of the labels, with those that `--label-limit` adjusts.

    Raises:
        UsageError: a name that is no label, or a value outside 0 to 1.
    """
    from attncli.attention.labels import Thresholds
    from attncli.cli.values import several

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


def _require_one_head(works: list[_Work], chosen: EntropyOptions) -> None:
    heads = integers("--head-index", chosen.head_index)
    batches = integers("--batch-index", chosen.batch_index)
    sizes = works[0].problem.sizes
    count = len(works)
    count *= sizes.heads if heads is None else len(heads)
    count *= sizes.batch if batches is None else len(batches)
    if count != 1:
        raise UsageError(
            "--histogram",
            f"expected one head, got {count}",
            "choose with --group, --head-index and --batch-index",
        )


def _stream(run: _Run, printer: Printer) -> Iterator[tuple[_Work, HeadRows]]:
    """Every head that is asked for, with progress; its record is kept for the verdict."""
    from attncli.attention.head_statistics import head_statistics
    from attncli.attention.stream import planned_cells, stream_rows
    from attncli.cli.progress import progress

    total = sum(planned_cells(work.problem, run.wanted) for work in run.works)
    with progress(printer, total, "attention") as advance:
        for work in run.works:
            for rows in stream_rows(work.problem, run.wanted, advance=advance):
                if _is_chosen(rows, work.problem, run.chosen):
                    found = head_statistics(rows, run.thresholds)
                    run.heads.append(_place(work, rows) | _numbers(found) | _heat(work))
                    yield work, rows


def _is_chosen(rows: HeadRows, problem: Problem, chosen: EntropyOptions) -> bool:
    for option, given, index, length in (
        ("--head-index", chosen.head_index, rows.head, problem.sizes.heads),
        ("--batch-index", chosen.batch_index, rows.batch, problem.sizes.batch),
    ):
        wanted = integers(option, given)
        if wanted is None:
            continue
        for one in wanted:
            if not -length <= one < length:
                raise UsageError(
                    option, f"expected an index from {-length} to {length - 1}, got {one}"
                )
        if index not in {one % length for one in wanted}:
            return False
    return True


def _place(work: _Work, rows: HeadRows) -> Record:
    return {
        "source": work.group.source_name,
        "group": work.group.name,
        "batch": rows.batch,
        "head": rows.head,
    }


def _heat(work: _Work) -> Record:
    return {"scale": work.problem.scale, "temperature": work.problem.temperature}


def _numbers(found: HeadStatistics) -> Record:
    record = asdict(found)
    del record["scores"], record["batch"], record["head"]
    if record["label"] is not None:
        record["label"] = str(record["label"])
    return record


def _head_records(run: _Run, printer: Printer) -> Iterator[Record]:
    for _ in _stream(run, printer):
        yield run.heads[-1]


def _row_records(run: _Run, printer: Printer) -> Iterator[Record]:
    """One record per real query; what an empty row does not have is None."""
    for work, rows in _stream(run, printer):
        place = _place(work, rows)
        empty = rows.empty.tolist()
        columns = {
            "query": rows.queries.tolist(),
            "keys": rows.keys.tolist(),
            "entropy_nats": rows.entropy_nats.tolist(),
            "outcomes": rows.outcomes.tolist(),
            "max_weight": rows.max_weight.tolist(),
            "top_key": rows.top_key.tolist() if rows.top_key is not None else [],
            "max_logit": rows.max_logit.tolist(),
            "logsumexp": rows.logsumexp.tolist(),
            "sink_mass": rows.sink_mass.tolist(),
        }
        columns["distance"] = (
            [None] * len(empty) if rows.distance is None else rows.distance.tolist()
        )
        for index, values in enumerate(zip(*columns.values(), strict=True)):
            record = dict(zip(columns, values, strict=True))
            yield place | (_empty_row(record) if empty[index] else _full_row(record))


def _empty_row(record: Record) -> Record:
    keys = ("entropy_nats", "entropy_bits", "entropy_normalized", "effective_keys", "max_weight")
    keys += ("top_key", "max_logit", "logsumexp", "sink_mass", "distance")  # type: ignore[assignment]
    return {"query": record["query"], "keys": 0} | dict.fromkeys(keys)


def _full_row(record: Record) -> Record:
    nats, outcomes = record["entropy_nats"], record.pop("outcomes")
    top = record["top_key"]
    return record | {
        "entropy_bits": nats / math.log(2),
        "entropy_normalized": nats / math.log(outcomes) if outcomes > 1 else None,
        "effective_keys": math.exp(nats),
        "top_key": None if top < 0 else top,
    }


def _key_records(run: _Run, printer: Printer) -> Iterator[Record]:
    """One record per key, or the heaviest of each head."""
    import torch

    for work, rows in _stream(run, printer):
        assert rows.received is not None
        mass, queries = rows.received.mass, rows.received.queries
        keys = torch.arange(len(mass))
        if run.chosen.top is not None:
            order = torch.argsort(mass.nan_to_num(0.0), descending=True, stable=True)
            keys = order[: run.chosen.top].cpu()
        place = _place(work, rows)
        chosen = (keys, queries[keys], mass[keys])
        for key, count, weight in zip(*(part.tolist() for part in chosen), strict=True):
            mean = weight / count if count else None
            yield place | {"key": key, "queries": count, "mass": weight, "mass_mean": mean}


def _group_records(run: _Run, printer: Printer) -> Iterator[Record]:
    """One record per group: means over its heads, extremes, and how many have which label."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in _head_records(run, printer):
        groups.setdefault((record["source"], record["group"]), []).append(record)
    for (source, group), heads in groups.items():
        bits = _present(heads, "entropy_bits_mean")
        labels = Counter(str(head["label"]) for head in heads if head["label"] is not None)
        means = {
            key: _mean(_present(heads, key))
            for key in (
                "entropy_nats_mean",
                "entropy_bits_mean",
                "effective_keys_mean",
                "max_weight_mean",
                "sink_mass_mean",
            )
        }
        yield (
            {"source": source, "group": group, "heads": len(heads)}
            | means
            | {
                "entropy_bits_min": min(bits, default=None),
                "entropy_bits_max": max(bits, default=None),
                "max_logit": max(_present(heads, "max_logit"), default=None),
                "empty_rows": sum(head["empty_rows"] for head in heads),
                "nonfinite_rows": sum(head["nonfinite_rows"] for head in heads),
                "labels": ", ".join(f"{count} {label}" for label, count in labels.most_common()),
            }
        )


def _sampled_records(run: _Run, printer: Printer) -> Iterator[Record]:
    """Estimates of every head's means from some rows, with standard errors."""
    from attncli.attention.head_statistics import head_statistics
    from attncli.attention.sample_rows import sample_rows

    chosen = run.chosen
    assert chosen.sample_rows is not None
    for work in run.works:
        for found in sample_rows(work.problem, chosen.sample_rows, chosen.sample_seed, run.wanted):
            if not _is_chosen(found.rows, work.problem, chosen):
                continue
            numbers = _numbers(head_statistics(found.rows, run.thresholds))
            errors = {
                f"{name}_se": found.estimates[name].standard_error
                if name in found.estimates
                else None
                for name in ("entropy_nats", "entropy_bits", "max_weight", "sink_mass")
            }
            numbers |= {"queries": found.queries, "sampled_queries": found.sampled}
            yield _place(work, found.rows) | numbers | _heat(work) | errors


def _present(records: list[Record], key: str) -> list[float]:
    return [record[key] for record in records if record[key] is not None]


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _view(
    run: _Run, printer: Printer, work: WorkOptions
) -> tuple[Sequence[Column], Iterator[Record], Callable[[list[Record]], Iterator[RenderableType]]]:
    """Columns, records and drawing of what is asked for."""
    from attncli.report import entropy as report
    from attncli.report import records as columns

    chosen = run.chosen
    heads = _head_records(run, printer)
    choices: list[tuple[bool, Sequence[Column], Iterator[Record], Any]] = [
        (chosen.per_row, columns.ROW_ENTROPY, _row_records(run, printer), report.row_table),
        (chosen.per_key, columns.KEY_MASS, _key_records(run, printer), report.key_table),
        (chosen.summary, columns.GROUP_ENTROPY, _group_records(run, printer), report.group_table),
        (
            chosen.histogram,
            columns.ROW_ENTROPY,
            _row_records(run, printer),
            report.histogram,
        ),
        (
            chosen.sample_rows is not None,
            columns.SAMPLED_ENTROPY,
            _sampled_records(run, printer),
            report.head_tables,
        ),
        (
            chosen.compare_scale or bool(chosen.temperatures),
            columns.HEAD_ENTROPY,
            heads,
            report.variant_tables,
        ),
        (True, columns.HEAD_ENTROPY, heads, report.head_tables),
    ]
    _, names, records, draw = next(choice for choice in choices if choice[0])

    def drawn(found: list[Record]) -> Iterator[RenderableType]:
        if chosen.grid is not None:
            column = report.grid_column(chosen.grid)
            yield from report.grid(found, column, printer, work.digits)
            return
        yield from draw(found, printer, work.digits, work.unit)
        if "label" in {column.key for column in names}:
            yield report.label_note(_limits_text(run.thresholds), printer)

    if chosen.grid is not None:
        report.grid_column(chosen.grid)
    return names, records, drawn


def _limits_text(thresholds: Thresholds) -> str:
    parts = [f"{name.replace('_', '-')} ≥ {value:g}" for name, value in asdict(thresholds).items()]
    return ", ".join(parts) + ", otherwise mixed; --label-limit NAME=X adjusts them"
