"""What a change does to every head: two attentions over the same queries and keys, side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attncli import ranks
from attncli.analysis.changes import Change
from attncli.analysis.compare_columns import (
    OF_A_HEAD,
    GroupComparison,
    HeadComparison,
    KeyComparison,
    RowComparison,
)
from attncli.analysis.entropy import ROWS_AT_ONCE, Record
from attncli.analysis.head_columns import GroupPlace
from attncli.analysis.problems import GroupProblem
from attncli.analysis.what_if import changed
from attncli.attention.nonfinite import all_finite
from attncli.attention.options import AttentionOptions, Stage
from attncli.attention.problem import Problem
from attncli.attention.stages import Selection, select, stage_blocks
from attncli.attention.streaming.divergence import (
    HeadPair,
    refuse_other_shapes,
    stream_divergences,
)
from attncli.attention.streaming.heads import head_statistics
from attncli.attention.streaming.parts import shared_divergences
from attncli.attention.streaming.stream import HeadRows, Wanted
from attncli.attention.threads import single_threaded_torch
from attncli.columns import columns_of, record_of
from attncli.errors import DataError

LN2 = math.log(2)


# Of these the smallest have changed most.
SMALLEST_FIRST = {"top_key_agreement", "output_cosine_min", "output_cosine"}


@dataclass(frozen=True, slots=True)
class Pair:
    """Two sides of a group.

    Attributes:
        place: where A came from.
        what_if: what B is of A; None where it came from elsewhere.
        a, b: both sides.
        selection: batches and heads to look at.
        tokens: as of `ChosenHeads`; None where they are not known.
    """

    place: GroupPlace
    what_if: str | None
    a: Problem
    b: Problem
    selection: Selection
    tokens: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class ComparedHead:
    """One head: what its rows become, and what they come to."""

    pair: Pair
    rows: RowComparison
    statistics: HeadComparison

    @property
    def record(self) -> Record:
        """With the columns `HEAD`."""
        return record_of(self.pair.place, self.statistics)


def matched(
    base: Sequence[GroupProblem], other: Sequence[GroupProblem]
) -> tuple[list[tuple[GroupProblem, GroupProblem]], list[str]]:
    """Groups of one name, or the only ones, and what is said of those without a partner.

    Raises:
        DataError: none have a partner.
    """
    if len(base) == len(other) == 1:
        return [(base[0], other[0])], []
    partners = {one.group.name: one for one in other}
    names = {one.group.name for one in base}
    pairs = [(one, partners[one.group.name]) for one in base if one.group.name in partners]
    if not pairs:
        mine, theirs = (", ".join(one.group.name for one in side[:4]) for side in (base, other))
        problem = f"expected a group that {base[0].group.source_name} has too ({mine})"
        raise DataError(other[0].group.source_name, f"{problem}, got {theirs}")
    alone = [
        one.group.place
        for side, known in ((base, partners), (other, names))
        for one in side
        if one.group.name not in known
    ]
    return pairs, [f"{place}: left out, the other side has no such group" for place in alone]


def pair_of(
    place: GroupPlace,
    a: Problem,
    b: Problem,
    batches: Sequence[int | slice] | None,
    heads: Sequence[int | slice] | None,
    where: str,
) -> Pair:
    """Two sides, in the wider arithmetic of both.

    Raises:
        DataError: their shapes differ; `where` is the name of B.
    """
    try:
        refuse_other_shapes(a, b)
    except DataError as error:
        raise DataError(where, f"{error.problem} ({error.where})") from None
    dtype = torch.promote_types(a.dtype, b.dtype)
    a, b = (replace(side, dtype=dtype, device=a.device) for side in (a, b))
    return Pair(place, None, a, b, select(a, batches, heads))


def alternatives(
    pair: Pair, options: AttentionOptions, changes: Sequence[Change], warn: Callable[..., None]
) -> Iterator[Pair]:
    """A pair of A with itself, once under each change; one is made as it is asked for."""
    for change in changes:
        problem, said = changed(pair.a, options, change, pair.selection)
        warn(said)
        yield replace(pair, what_if=change.text, b=problem)


def compare_heads(
    pair: Pair, advance: Callable[[int], None] | None = None
) -> Iterator[ComparedHead]:
    """What each chosen head becomes, in the order chosen; `advance` as of `stream_divergences`."""
    values = [side.v for side in (pair.a, pair.b)]
    output = all(v is not None and all_finite(v) for v in values) and pair.a.dv == pair.b.dv
    of = {"batches": pair.selection.batches, "heads": pair.selection.heads}
    wanted = Wanted(output=output, tokens=pair.tokens)
    stream = stream_divergences if ranks.count() == 1 else shared_divergences
    for found in stream(pair.a, pair.b, wanted, **of, advance=advance):
        with single_threaded_torch(pair.a.device):
            rows, changes = _rows(found)
            statistics = _statistics(found, rows, changes, pair.what_if)
        yield ComparedHead(pair, rows, statistics)


def _rows(found: HeadPair) -> tuple[RowComparison, _OutputRows | None]:
    a, b, between = found.a, found.b, found.rows
    infinite = (between.hides | torch.isposinf(between.kl_nats)) & ~a.empty
    kl = between.kl_nats.masked_fill(infinite, torch.inf)
    changes = _of_outputs(a, b)
    error = None
    if changes is not None:
        same = changes.off == 0
        error = (changes.off / changes.size).masked_fill(same & ~a.empty, 0.0)
    assert a.top_key is not None
    assert b.top_key is not None
    assert a.max_logit is not None
    assert b.max_logit is not None
    return RowComparison(
        query=a.queries,
        keys_a=a.keys,
        keys_b=b.keys,
        kl_nats=kl,
        kl_bits=kl / LN2,
        infinite_kl=infinite,
        js_nats=between.js_nats,
        tv=between.tv,
        mass_lost=between.mass_lost.masked_fill(a.empty, torch.nan),
        top_key_a=a.top_key,
        top_key_b=b.top_key,
        entropy_nats_a=a.entropy_nats,
        entropy_nats_b=b.entropy_nats,
        max_logit_a=a.max_logit,
        max_logit_b=b.max_logit,
        output_rel_error=error,
        output_cosine=None if changes is None else changes.cosine,
    ), changes


def _statistics(
    found: HeadPair, rows: RowComparison, changes: _OutputRows | None, what_if: str | None
) -> HeadComparison:
    a, b = (head_statistics(side) for side in (found.a, found.b))
    both = ~found.a.empty & ~found.b.empty
    finite = both & ~rows.infinite_kl
    kl = _of(rows.kl_nats, finite)
    largest = None
    if kl[1] is not None and not math.isnan(kl[1]):
        largest = int(rows.query[finite][rows.kl_nats[finite].argmax()])
    js, tv = _of(rows.js_nats, both), _of(rows.tv, both)
    same_top_key = (rows.top_key_a == rows.top_key_b).to(torch.float64)
    same_top_key = same_top_key.masked_fill(torch.isnan(rows.js_nats), torch.nan)
    change = None
    if a.entropy_nats_mean is not None and b.entropy_nats_mean is not None:
        change = b.entropy_nats_mean - a.entropy_nats_mean
    return HeadComparison(
        batch=a.batch,
        head=a.head,
        what_if=what_if,
        queries=a.queries,
        kl_nats_mean=kl[0],
        kl_nats_max=kl[1],
        kl_max_query=largest,
        kl_bits_mean=None if kl[0] is None else kl[0] / LN2,
        kl_bits_max=None if kl[1] is None else kl[1] / LN2,
        infinite_kl_rows=int(rows.infinite_kl.sum()),
        js_nats_mean=js[0],
        js_nats_max=js[1],
        tv_mean=tv[0],
        tv_max=tv[1],
        mass_lost_mean=_of(rows.mass_lost, ~found.a.empty)[0],
        top_key_agreement=_of(same_top_key, both)[0],
        entropy_nats_a=a.entropy_nats_mean,
        entropy_nats_b=b.entropy_nats_mean,
        entropy_nats_change=change,
        entropy_bits_change=None if change is None else change / LN2,
        max_logit_a=a.max_logit,
        max_logit_b=b.max_logit,
        label_a=a.label,
        label_b=b.label,
        output_rel_error=None if changes is None else changes.rel_error,
        output_cosine_min=None if changes is None else changes.lowest_cosine,
        empty_rows_a=a.empty_rows,
        empty_rows_b=b.empty_rows,
        nonfinite_rows=int((both & torch.isnan(rows.js_nats)).sum()),
    )


def _of(values: torch.Tensor, rows: torch.Tensor) -> tuple[float | None, float | None]:
    """Mean and maximum of some rows."""
    chosen = values[rows]
    return (float(chosen.mean()), float(chosen.max())) if len(chosen) else (None, None)


@dataclass(frozen=True, slots=True)
class _OutputRows:
    """What the output of each row becomes, float64 (R,).

    Attributes:
        off: ‖o_B − o_A‖.
        size: ‖o_A‖.
        cosine: between both; NaN where one is 0.
    """

    off: torch.Tensor
    size: torch.Tensor
    cosine: torch.Tensor

    @property
    def rel_error(self) -> float:
        """‖O_B − O_A‖ / ‖O_A‖ over the rows."""
        off, size = (float(torch.linalg.vector_norm(part)) for part in (self.off, self.size))
        return off / size if size else math.inf if off else 0.0

    @property
    def lowest_cosine(self) -> float | None:
        """The smallest there is."""
        known = self.cosine[~torch.isnan(self.cosine)]
        return float(known.min()) if len(known) else None


def _of_outputs(a: HeadRows, b: HeadRows) -> _OutputRows | None:
    """Some rows at a time, since their float64 is several times as large as the outputs."""
    if a.output is None or b.output is None:
        return None
    parts = []
    for pair in zip(
        *(torch.split(side, ROWS_AT_ONCE) for side in (a.output, b.output)), strict=True
    ):
        one, other = (rows.to(torch.float64) for rows in pair)  # (rows, d_v)
        sizes = [torch.linalg.vector_norm(rows, dim=-1) for rows in (one, other)]
        off = torch.linalg.vector_norm(other - one, dim=-1)
        # Of equal rows exactly 1, and exact nearby.
        apart = one / sizes[0][:, None] - other / sizes[1][:, None]
        parts.append(torch.stack([off, sizes[0], 1 - apart.square().sum(-1) / 2]))
    return _OutputRows(*torch.cat(parts, 1))


def row_records(compared: ComparedHead) -> Iterator[Record]:
    """One record per query, with the columns `ROW`; None for what a row does not have."""
    whole = compared.record
    of_head = {each.key: whole[each.key] for each in OF_A_HEAD}
    names = [each.key for each in columns_of(RowComparison)]
    for start in range(0, len(compared.rows.query), ROWS_AT_ONCE):
        columns = [
            _listed(compared.rows, name, slice(start, start + ROWS_AT_ONCE)) for name in names
        ]
        for values in zip(*columns, strict=True):
            yield of_head | dict(zip(names, values, strict=True))


def _listed(rows: RowComparison, name: str, inside: slice) -> list[Any]:
    values: torch.Tensor | None = getattr(rows, name)
    if values is None:
        return [None] * len(rows.query[inside])
    listed = values[inside].tolist()
    if name.startswith("top_key"):
        return [None if value < 0 else value for value in listed]
    if name in ("max_logit_a", "max_logit_b", "entropy_nats_a", "entropy_nats_b"):
        seen = rows.keys_a if name.endswith("_a") else rows.keys_b
    else:
        seen = torch.minimum(rows.keys_a, rows.keys_b)
        if name in ("kl_nats", "kl_bits", "mass_lost"):  # which need A's keys alone
            seen = rows.keys_a
    if values.is_floating_point():
        return [v if keys else None for v, keys in zip(listed, seen[inside].tolist(), strict=True)]
    return listed


def group_records(heads: Iterable[Record]) -> Iterator[Record]:
    """One record per group and what-if of the records of heads, with the columns `GROUP`."""
    groups: dict[tuple[str, str, str | None], list[Record]] = {}
    for record in heads:
        key = record["source"], record["group"], record["what_if"]
        groups.setdefault(key, []).append(record)
    averaged = ["kl_nats_mean", "kl_bits_mean", "js_nats_mean", "tv_mean", "mass_lost_mean"]
    averaged += ["top_key_agreement", "entropy_nats_change", "entropy_bits_change"]
    for (source, group, what_if), found in groups.items():
        known = [one for one in found if one["kl_nats_max"] is not None]
        largest = max(known, key=lambda one: one["kl_nats_max"], default=None)
        errors = _values(found, "output_rel_error")
        summary = GroupComparison(
            **{key: _mean(_values(found, key)) for key in averaged},
            what_if=what_if,
            heads=len(found),
            kl_nats_max=None if largest is None else largest["kl_nats_max"],
            kl_bits_max=None if largest is None else largest["kl_bits_max"],
            kl_max_head=None if largest is None else largest["head"],
            infinite_kl_rows=sum(one["infinite_kl_rows"] for one in found),
            tv_max=max(_values(found, "tv_max"), default=None),
            output_rel_error=_mean(errors),
            output_rel_error_max=max(errors, default=None),
            output_cosine_min=min(_values(found, "output_cosine_min"), default=None),
            labels_changed=sum(one["label_a"] != one["label_b"] for one in found),
            nonfinite_rows=sum(one["nonfinite_rows"] for one in found),
        )
        yield record_of(GroupPlace(source=source, group=group), summary)


def _values(records: Sequence[Record], key: str) -> list[float]:
    return [record[key] for record in records if record[key] is not None]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def most_changed_first(records: Iterable[Record], key: str) -> list[Record]:
    """Sorted by a column, the most changed first; NaN before all, and None last."""

    def rank(record: Record) -> tuple[bool, float]:
        value = record[key]
        if value is None:
            return True, 0.0
        if isinstance(value, float) and math.isnan(value):
            return False, -math.inf
        return False, float(value) if key in SMALLEST_FIRST else -float(value)

    return sorted(records, key=rank)


@dataclass(frozen=True, slots=True)
class WorstRow:
    """The row that a what-if changes most: infinite KL before finite, of those the most lost.

    Attributes:
        pair: both sides.
        batch, head, query: where.
        kl_nats, mass_lost: what makes it the worst.
    """

    pair: Pair
    batch: int
    head: int
    query: int
    kl_nats: float
    mass_lost: float

    @property
    def rank(self) -> tuple[float, float]:
        """By which the worst is the largest."""
        return self.kl_nats, self.mass_lost


def worst_row(compared: ComparedHead) -> WorstRow | None:
    """Of one head; None where no row can be compared."""
    rows, head = compared.rows, compared.statistics
    known = torch.where(~torch.isnan(rows.kl_nats))[0]
    if not len(known):
        return None
    kl, lost = rows.kl_nats[known], rows.mass_lost[known]
    most = lost.masked_fill(kl < kl.max(), -1.0)
    at = int(known[most.argmax()])
    numbers = float(rows.kl_nats[at]), float(rows.mass_lost[at])
    return WorstRow(compared.pair, head.batch, head.head, int(rows.query[at]), *numbers)


def key_records(worst: WorstRow, top: int, tokens: Sequence[str]) -> Iterator[Record]:
    """The keys whose weights in a row move most, with the columns `KEY`."""
    pair, place = worst.pair, (worst.batch, worst.head, worst.query)
    chosen = Selection(*((one,) for one in place))
    weights = [
        next(stage_blocks(side, [Stage.WEIGHTS], chosen)).values[0].to(torch.float64)
        for side in (pair.a, pair.b)
    ]
    change = weights[1] - weights[0]
    for key in change.abs().argsort(descending=True, stable=True)[:top].tolist():
        found = KeyComparison(
            batch=worst.batch,
            head=worst.head,
            what_if=pair.what_if,
            query=worst.query,
            key=key,
            token=tokens[key] if key < len(tokens) else None,
            weight_a=float(weights[0][key]),
            weight_b=float(weights[1][key]),
            change=float(change[key]),
        )
        yield record_of(pair.place, found)
