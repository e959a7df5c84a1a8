"""What the heads of attention do, measured and as records, for the command line and for Python."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attncli import ranks
from attncli.analysis.head_columns import (
    CERTAINTY,
    HEAD,
    GroupPlace,
    GroupStatistics,
    KeyStatistics,
    Sample,
    Setting,
)
from attncli.analysis.tensor_files import Labels
from attncli.attention.problem import Problem
from attncli.attention.stages import Selection
from attncli.attention.streaming.by_keys import rows_by_keys
from attncli.attention.streaming.head_record import (
    AVERAGED,
    TOKEN_LABELS,
    HeadStatistics,
    Thresholds,
    TokenScores,
)
from attncli.attention.streaming.heads import Estimate, estimates_of, head_statistics
from attncli.attention.streaming.parts import Run, rows_of_runs
from attncli.attention.streaming.rows import RowStatistics
from attncli.attention.streaming.stream import HeadRows, Wanted, stream_rows
from attncli.attention.threads import sum_of
from attncli.columns import column, columns_of, record_of

Record = dict[str, Any]

# Python's numbers take a multiple of the tensors' room: only so many rows are unpacked at once.
ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlace(GroupPlace):
    """Which row a record is of."""

    batch: int = column("batch", is_key=True, description="its index")
    head: int = column("head", is_key=True, description="index of the query head")
    query: int = column("query", is_key=True, description="index of the query")


ROW = columns_of(RowPlace, RowStatistics)


@dataclass(frozen=True, slots=True)
class ChosenHeads:
    """Some heads of a problem, and where they came from."""

    place: GroupPlace
    problem: Problem
    selection: Selection
    # Int64 (B | 1, S_k), the same number where tokens are the same; None where they are not known.
    tokens: NDArray[np.int64] | None = None


def token_numbers(labels: Labels | None, problem: Problem) -> NDArray[np.int64] | None:
    """Numbers of tokens, int64 (B | 1, S_k); None where there is not one for each key."""
    lengths = {len(row) for row in labels or ()}
    if not labels or lengths != {problem.sizes.k_len}:
        return None
    if len(labels) not in (1, problem.sizes.batch):
        return None
    known: dict[str, int] = {}
    return np.array([[known.setdefault(token, len(known)) for token in row] for row in labels])


def measure(
    chosen: ChosenHeads,
    wanted: Wanted,
    thresholds: Thresholds,
    *,
    queries: Sequence[NDArray[np.int64]] | None = None,
    by_keys: bool = False,
    advance: Callable[[int], None] | None = None,
) -> Iterator[tuple[HeadRows, HeadStatistics]]:
    """The rows of each chosen head, in the order chosen, and what they come to.

    Args:
        chosen: the heads; the whole problem alone decides the dtype of the arithmetic.
        wanted: what to compute beside the columns that every row has.
        thresholds: of the labels.
        by_keys: whether each rank has a part of the keys; tokens are not looked at then.
        queries, advance: as for `stream_rows`.
    """
    selection, wanted = chosen.selection, replace(wanted, tokens=chosen.tokens)
    stream = rows_by_keys if by_keys else stream_rows
    for rows in stream(
        chosen.problem,
        wanted,
        batches=selection.batches,
        heads=selection.heads,
        queries=queries,
        advance=advance,
    ):
        yield rows, head_statistics(rows, thresholds)


def measure_all(
    chosen: Sequence[ChosenHeads],
    wanted: Wanted,
    thresholds: Thresholds,
    *,
    queries: Sequence[Sequence[NDArray[np.int64]] | None],
    by_keys: bool = False,
    advance: Callable[[int], None] | None = None,
) -> Iterator[tuple[ChosenHeads, HeadRows, HeadStatistics]]:
    """The same of the heads of several problems, shared out over the ranks where there are any.

    Args:
        queries: as for `stream_rows`, of each problem.
        by_keys: whether each rank has a part of the keys, not of the heads and rows.
        chosen, wanted, thresholds, advance: as for `measure`.
    """
    if by_keys or ranks.count() == 1:
        for some, rows_chosen in zip(chosen, queries, strict=True):
            found = measure(
                some, wanted, thresholds, queries=rows_chosen, by_keys=by_keys, advance=advance
            )
            yield from ((some, *each) for each in found)
        return
    runs = [
        (some, run)
        for some, rows_chosen in zip(chosen, queries, strict=True)
        for run in Run.all_of(
            some.problem, some.selection.batches, some.selection.heads, rows_chosen
        )
    ]
    wanted_of = [replace(wanted, tokens=some.tokens) for some, _ in runs]
    of_runs = rows_of_runs([run for _, run in runs], wanted_of, advance)
    for (some, _), heads in zip(runs, of_runs, strict=False):  # none at other ranks
        yield from ((some, rows, head_statistics(rows, thresholds)) for rows in heads)


def variants(
    problem: Problem, temperatures: Sequence[float] | None, unscaled: bool
) -> list[Problem]:
    """The problem at each temperature, None for its own, and each without the scale if asked."""
    scales = [problem.scale, *([1.0] if unscaled else [])]
    pairs = ((scale, heat) for heat in temperatures or [problem.temperature] for scale in scales)
    return [replace(problem, scale=s, temperature=t) for s, t in dict.fromkeys(pairs)]


def head_record(chosen: ChosenHeads, rows: HeadRows, statistics: HeadStatistics) -> Record:
    """One record of a head, with the columns `HEAD`, and `OF_TOKENS` where tokens are known."""
    sink = None
    if rows.sink_weight is not None and not bool(rows.empty.all()):
        of_sink = rows.sink_weight[~rows.empty]
        sink = sum_of(of_sink) / len(of_sink)
    problem = chosen.problem
    setting = Setting(
        scale=problem.scale_of(rows.head) if problem.given is None else None,
        temperature=problem.temperature if problem.given is None else None,
        sink_weight_mean=sink,
    )
    scores = () if chosen.tokens is None else (token_scores(statistics),)
    return record_of(chosen.place, statistics, setting, *scores)


def token_scores(statistics: HeadStatistics) -> TokenScores:
    """What a head looks for by tokens."""
    scores = {f"{name}_score": getattr(statistics.scores, name) for name in TOKEN_LABELS}
    return TokenScores(**scores)


def sampled_record(chosen: ChosenHeads, rows: HeadRows, statistics: HeadStatistics) -> Record:
    """One record of a head of which some rows are known, with the columns `SAMPLED`.

    What only all rows could tell (extremes, spread, counts) is None, unless the sample is all of
    them; what the sample itself holds of it has names that say so.
    """
    real = chosen.problem.mask.real_queries(rows.batch)
    found = estimates_of(rows, real)
    sample = Sample(
        sampled_queries=len(rows.queries),
        sampled_empty_rows=statistics.empty_rows,
        sampled_nonfinite_rows=statistics.nonfinite_rows,
        sampled_max_logit=statistics.max_logit,
    )
    record = head_record(chosen, rows, statistics) | {"queries": real}
    if len(rows.queries) < real:
        record |= {each.key: None for each in HEAD if not each.of_sample}
    record |= record_of(sample)
    for name in AVERAGED:
        record |= _certainty(name, found.get(name))
    return record


def _certainty(name: str, found: Estimate | None) -> Record:
    """How sure the mean of a sample is; None where there is none, or a single row."""
    values: tuple[float | None, ...] = (None,) * len(CERTAINTY)
    if found is not None and found.reach is not None:
        ends = found.mean - found.reach, found.mean + found.reach
        values = found.standard_error, *ends
    return {f"{name}_{part}": value for part, value in zip(CERTAINTY, values, strict=True)}


def row_records(place: GroupPlace, rows: HeadRows) -> Iterator[Record]:
    """One record per real query, with the columns `ROW`; what a row does not have is None."""
    of_head = record_of(place) | {"batch": rows.batch, "head": rows.head}
    names = [each.key for each in columns_of(RowStatistics)]
    for start in range(0, len(rows.queries), ROWS_AT_ONCE):
        inside = slice(start, start + ROWS_AT_ONCE)
        columns = [rows.queries[inside].tolist(), *(_listed(rows, n, inside) for n in names)]
        for values in zip(*columns, strict=True):
            yield of_head | dict(zip(("query", *names), values, strict=True))


def _listed(rows: HeadRows, name: str, inside: slice) -> list[Any]:
    """One column of some rows; None for what a row does not have."""
    values: torch.Tensor | None = getattr(rows, name)
    if values is None:
        return [None] * len(rows.queries[inside])
    listed = values[inside].tolist()
    if values.is_floating_point():
        known = rows.having(name)[inside].tolist()
        return [value if known else None for value, known in zip(listed, known, strict=True)]
    return [None if value < 0 else value for value in listed] if name == "top_key" else listed


def key_records(place: GroupPlace, rows: HeadRows, top: int | None) -> Iterator[Record]:
    """One record per key, with the columns `KEY`, or of the heaviest alone.

    Args:
        place: where the head came from.
        rows: with the mass that was asked for.
        top: how many of the heaviest; None for all in their order.
    """
    assert rows.received is not None
    mass, queries = rows.received.mass.cpu(), rows.received.queries.cpu()
    keys = torch.arange(len(mass))
    if top is not None:
        known = mass.nan_to_num(-1.0, posinf=-1.0)  # NaN is never the heaviest
        keys = torch.argsort(known, descending=True, stable=True)[:top]
    chosen = (keys, queries[keys], mass[keys])
    for key, count, weight in zip(*(part.tolist() for part in chosen), strict=True):
        yield record_of(
            KeyStatistics(
                source=place.source,
                group=place.group,
                batch=rows.batch,
                head=rows.head,
                key=key,
                queries=count,
                mass=weight,
                mass_mean=weight / count if count else None,
            )
        )


def group_records(heads: Iterable[Record]) -> Iterator[Record]:
    """One record per group of the records of heads, with the columns `GROUP`."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in heads:
        groups.setdefault((record["source"], record["group"]), []).append(record)
    for (source, group), of_group in groups.items():
        means = ("effective_keys_mean", "max_weight_mean", "sink_mass_mean")
        values: Record = {key: _mean(of_group, key) for key in means}
        for unit in ("nats", "bits"):
            of_heads = list(filter(math.isfinite, _known(of_group, f"entropy_{unit}_mean")))
            values |= {
                f"entropy_{unit}_mean": _mean(of_group, f"entropy_{unit}_mean"),
                f"entropy_{unit}_min": min(of_heads, default=None),
                f"entropy_{unit}_max": max(of_heads, default=None),
            }
        labels = Counter(str(head["label"]) for head in of_group if head["label"] is not None)
        summary = GroupStatistics(
            **values,
            source=source,
            group=group,
            heads=len(of_group),
            max_logit=max(_known(of_group, "max_logit"), default=None),
            empty_rows=sum(head["empty_rows"] for head in of_group),
            nonfinite_rows=sum(head["nonfinite_rows"] for head in of_group),
            labels=", ".join(f"{count} {label}" for label, count in labels.most_common()),
        )
        yield record_of(summary)


def _known(records: list[Record], key: str) -> list[float]:
    """The values there are; NaN is none."""
    return [r[key] for r in records if r[key] is not None and not math.isnan(r[key])]


def _mean(records: list[Record], key: str) -> float | None:
    """The mean over the heads that have the value; NaN where one of them is."""
    values = [record[key] for record in records if record[key] is not None]
    return math.fsum(values) / len(values) if values else None
