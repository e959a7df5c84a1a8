"""The records of `attncli entropy`: from the rows of heads to what programs read."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncli.analysis.inputs import Group
    from attncli.attention.problem import Problem
    from attncli.attention.stages import Selection
    from attncli.attention.streaming.heads import HeadStatistics
    from attncli.attention.streaming.labels import Thresholds
    from attncli.attention.streaming.stream import HeadRows, Wanted
    from attncli.cli.emit import Record
    from attncli.cli.entropy import EntropyOptions
    from attncli.report.printer import Printer

# Python's numbers take a multiple of the tensors' room: only so many rows are unpacked at once.
ROWS_AT_ONCE = 4096

# What a sample of rows cannot say of all rows: extremes, spread and counts.
OF_ALL_ROWS = (
    "empty_rows",
    "entropy_nats_min",
    "entropy_nats_max",
    "entropy_nats_std",
    "max_weight_max",
    "max_logit",
    "max_logit_query",
    "max_logit_key",
    "nonfinite_rows",
)
ESTIMATED = (
    "keys",
    "entropy_nats",
    "entropy_bits",
    "entropy_normalized",
    "effective_keys",
    "max_weight",
    "logsumexp",
    "sink_mass",
    "distance",
)


@dataclass(frozen=True, slots=True)
class HeadsOfGroup:
    """The chosen heads of one group under one scale and temperature.

    Attributes:
        group: where they came from.
        problem: all its heads.
        selection: the chosen ones.
    """

    group: Group
    problem: Problem
    selection: Selection


@dataclass(slots=True)
class EntropyRun:
    """What is wanted of all groups, and the record of every head as it is finished."""

    chosen: EntropyOptions
    works: list[HeadsOfGroup]
    wanted: Wanted
    thresholds: Thresholds
    printer: Printer
    shows_progress: bool
    heads: list[Record] = field(default_factory=list)


def head_records(run: EntropyRun) -> Iterator[Record]:
    """One record per batch and head."""
    for _ in _stream(run):
        yield run.heads[-1]


def row_records(run: EntropyRun) -> Iterator[Record]:
    """One record per real query; what a row does not have is None."""
    for work, rows in _stream(run):
        place = _place(work, rows)
        for start in range(0, len(rows.queries), ROWS_AT_ONCE):
            columns = _row_columns(rows, slice(start, start + ROWS_AT_ONCE))
            for values in zip(*columns.values(), strict=True):
                yield place | dict(zip(columns, values, strict=True))


def _row_columns(rows: HeadRows, inside: slice) -> dict[str, list[Any]]:
    empty = rows.empty[inside].tolist()

    def listed(values: Any) -> list[Any]:
        """What each row that is not empty has."""
        if values is None:
            return [None] * len(empty)
        pairs = zip(values[inside].tolist(), empty, strict=True)
        return [None if is_empty else value for value, is_empty in pairs]

    entropy, outcomes = listed(rows.entropy_nats), rows.outcomes[inside].tolist()
    pairs = list(zip(entropy, outcomes, strict=True))
    return {
        "query": rows.queries[inside].tolist(),
        "keys": rows.keys[inside].tolist(),
        "entropy_nats": entropy,
        "entropy_bits": [None if nats is None else nats / math.log(2) for nats in entropy],
        "entropy_normalized": [
            None if nats is None or count < 2 else nats / math.log(count) for nats, count in pairs
        ],
        "effective_keys": [None if nats is None else math.exp(nats) for nats in entropy],
        "max_weight": listed(rows.max_weight),
        "top_key": [None if key is None or key < 0 else key for key in listed(rows.top_key)],
        "max_logit": listed(rows.max_logit),
        "logsumexp": listed(rows.logsumexp),
        "sink_mass": listed(rows.sink_mass),
        "distance": listed(rows.distance),
        "sink_weight": listed(rows.sink_weight),
        "nonfinite": rows.nonfinite[inside].tolist(),
    }


def key_records(run: EntropyRun) -> Iterator[Record]:
    """One record per key, or the heaviest of each head."""
    import torch

    for work, rows in _stream(run):
        assert rows.received is not None
        mass, queries = rows.received.mass.cpu(), rows.received.queries.cpu()
        keys = torch.arange(len(mass))
        if run.chosen.top is not None:
            known = mass.nan_to_num(-1.0, posinf=-1.0)  # NaN is never the heaviest
            keys = torch.argsort(known, descending=True, stable=True)[: run.chosen.top]
        place = _place(work, rows)
        chosen = (keys, queries[keys], mass[keys])
        for key, count, weight in zip(*(part.tolist() for part in chosen), strict=True):
            mean = weight / count if count else None
            yield place | {"key": key, "queries": count, "mass": weight, "mass_mean": mean}


def group_records(run: EntropyRun) -> Iterator[Record]:
    """One record per group: means over its heads, extremes, and how many have which label."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in head_records(run):
        groups.setdefault((record["source"], record["group"]), []).append(record)
    for (source, group), heads in groups.items():
        nats, bits = (_finite(heads, f"entropy_{unit}_mean") for unit in ("nats", "bits"))
        labels = Counter(str(head["label"]) for head in heads if head["label"] is not None)
        yield {
            "source": source,
            "group": group,
            "heads": len(heads),
            "entropy_nats_mean": _mean(heads, "entropy_nats_mean"),
            "entropy_bits_mean": _mean(heads, "entropy_bits_mean"),
            "entropy_nats_min": min(nats, default=None),
            "entropy_nats_max": max(nats, default=None),
            "entropy_bits_min": min(bits, default=None),
            "entropy_bits_max": max(bits, default=None),
            "effective_keys_mean": _mean(heads, "effective_keys_mean"),
            "max_weight_mean": _mean(heads, "max_weight_mean"),
            "max_logit": max(_present(heads, "max_logit"), default=None),
            "sink_mass_mean": _mean(heads, "sink_mass_mean"),
            "empty_rows": sum(head["empty_rows"] for head in heads),
            "nonfinite_rows": sum(head["nonfinite_rows"] for head in heads),
            "labels": ", ".join(f"{count} {label}" for label, count in labels.most_common()),
        }


def sampled_records(run: EntropyRun) -> Iterator[Record]:
    """Estimates of every head's means from some rows, with their standard errors.

    What only all rows could tell (extremes, spread, counts) is None, unless the sample is all of
    them; what the sample itself holds of it has names that say so.
    """
    from attncli.attention.streaming.heads import draw_rows

    count = run.chosen.sample_rows
    assert count is not None
    with _progress(run, count) as advance:
        for work in run.works:
            drawn = draw_rows(work.problem, count, run.chosen.sample_seed)
            for rows in _rows_of(run, work, advance, drawn):
                yield _sampled(run, work, rows)


def _sampled(run: EntropyRun, work: HeadsOfGroup, rows: HeadRows) -> Record:
    from attncli.attention.streaming.heads import estimates_of, head_statistics

    real = work.problem.mask.real_queries(rows.batch)
    sampled = len(rows.queries)
    numbers = _numbers(head_statistics(rows, run.thresholds)) | {"queries": real}
    of_sample = {
        "sampled_empty_rows": numbers["empty_rows"],
        "sampled_nonfinite_rows": numbers["nonfinite_rows"],
        "sampled_max_logit": numbers["max_logit"],
    }
    if sampled < real:
        numbers |= dict.fromkeys(OF_ALL_ROWS)
    found = estimates_of(rows, real)
    errors = {
        f"{name}_se": found[name].standard_error if name in found else None for name in ESTIMATED
    }
    extra = {"sampled_queries": sampled} | of_sample | errors
    return _place(work, rows) | numbers | _heat(work, rows) | extra


def _stream(run: EntropyRun) -> Iterator[tuple[HeadsOfGroup, HeadRows]]:
    """Every head that is asked for, with progress; its record is kept for the verdict."""
    from attncli.attention.streaming.heads import head_statistics

    with _progress(run) as advance:
        for work in run.works:
            for rows in _rows_of(run, work, advance):
                found = head_statistics(rows, run.thresholds)
                run.heads.append(_place(work, rows) | _numbers(found) | _heat(work, rows))
                yield work, rows


def _rows_of(
    run: EntropyRun, work: HeadsOfGroup, advance: Any, queries: Any = None
) -> Iterator[HeadRows]:
    from attncli.attention.streaming.stream import stream_rows

    chosen = {"batches": work.selection.batches, "heads": work.selection.heads}
    return stream_rows(work.problem, run.wanted, **chosen, queries=queries, advance=advance)


def _progress(run: EntropyRun, sampled: int | None = None) -> Any:
    """Progress in cells; of a sample, the share of the cells that its rows have on average."""
    from attncli.attention.streaming.stream import planned_cells
    from attncli.cli.progress import progress

    total = 0.0
    for work in run.works:
        chosen = {"batches": work.selection.batches, "heads": work.selection.heads}
        queries = max(1, work.problem.sizes.q_len)
        share = 1.0 if sampled is None else min(1.0, sampled / queries)
        total += planned_cells(work.problem, run.wanted, **chosen) * share
    return progress(run.printer, int(total) if run.shows_progress else 0, "attention")


def _place(work: HeadsOfGroup, rows: HeadRows) -> Record:
    return {
        "source": work.group.source_name,
        "group": work.group.name,
        "batch": rows.batch,
        "head": rows.head,
    }


def _heat(work: HeadsOfGroup, rows: HeadRows) -> Record:
    """The scale and temperature of the numbers, and what the sink logit takes on average."""
    sink = None
    if rows.sink_weight is not None and not bool(rows.empty.all()):
        sink = float(rows.sink_weight[~rows.empty].mean())
    heat = {"scale": work.problem.scale, "temperature": work.problem.temperature}
    return heat | {"sink_weight_mean": sink}


def _numbers(found: HeadStatistics) -> Record:
    left_out = ("scores", "batch", "head")
    record = {f.name: getattr(found, f.name) for f in fields(found) if f.name not in left_out}
    if record["label"] is not None:
        record["label"] = str(record["label"])
    return record


def _present(records: list[Record], key: str) -> list[float]:
    """The values there are; NaN is none."""
    return [r[key] for r in records if r[key] is not None and not math.isnan(r[key])]


def _finite(records: list[Record], key: str) -> list[float]:
    return [value for value in _present(records, key) if math.isfinite(value)]


def _mean(records: list[Record], key: str) -> float | None:
    """The mean over the heads that have the value; NaN where one of them is."""
    values = [record[key] for record in records if record[key] is not None]
    return math.fsum(values) / len(values) if values else None


def read_limits(thresholds: Thresholds) -> dict[str, float]:
    """The thresholds by the names that labels have."""
    limits: dict[str, float] = asdict(thresholds)
    return {name.replace("_", "-"): value for name, value in limits.items()}
