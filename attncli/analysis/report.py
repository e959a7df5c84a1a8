"""What a page about heads shows: their records, and maps of them within a number of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from attncli.analysis.entropy import ChosenHeads, Record, head_record, measure
from attncli.attention.maps import HeadMap, HeadMaps, MapShape, Plan, map_of, plan_maps, together
from attncli.attention.streaming.head_record import Thresholds
from attncli.attention.streaming.stream import Wanted, planned_cells
from attncli.errors import DataError, UsageError

# Labels of which a picture says something: a head of these is shown first.
TELLING = ("previous-token", "self", "local", "induction", "duplicate-token")


@dataclass(frozen=True, slots=True)
class ReportedHeads:
    """Some heads of one batch.

    Attributes:
        chosen: where they came from; its selection has one batch.
        records: one a head, with the columns of `attncli.analysis.entropy.HEAD`.
        maps: of all of them.
        detailed: indices of those of which the plan keeps more than thumbnails; None for all.
    """

    chosen: ChosenHeads
    records: tuple[Record, ...]
    maps: HeadMaps
    detailed: tuple[int, ...] | None = None

    @property
    def batch(self) -> int:
        """Which batch they are of."""
        return self.chosen.selection.batches[0]


def by_batch(chosen: ChosenHeads) -> Iterator[ChosenHeads]:
    """The same, one batch at a time."""
    for batch in chosen.selection.batches:
        yield replace(chosen, selection=replace(chosen.selection, batches=(batch,)))


def plan_of(chosen: Sequence[ChosenHeads], budget: float) -> Plan:
    """What to keep of these heads within so many bytes.

    Raises:
        DataError: there are no queries or no keys.
        UsageError: too few bytes for anything.
    """
    shapes = [_shape(one) for one in chosen]
    for one, shape in zip(chosen, shapes, strict=True):
        if not (shape.q_len and shape.k_len):
            got = f"{shape.q_len} queries and {shape.k_len} keys"
            raise DataError(one.place.source, f"expected queries and keys to show, got {got}")
    plan = plan_maps(shapes, budget)
    if plan is None:
        heads = sum(shape.heads for shape in shapes)
        raise UsageError(
            "«max_size»",
            f"expected room for maps of {heads} heads, got too little",
            "fewer heads: «group», «head_index»",
        )
    return plan


def report_heads(
    chosen: Sequence[ChosenHeads],
    plan: Plan,
    thresholds: Thresholds,
    sink_keys: int = 1,
    advance: Callable[[int], None] | None = None,
) -> list[ReportedHeads]:
    """Measure heads, and keep what is planned.

    Args:
        chosen: each of one batch.
        plan: of `plan_of`.
        thresholds: of the labels.
        sink_keys: how many of the first keys `sink_mass` is the weight of.
        advance: as for `stream_rows`.
    """
    found = [_measured(one, plan, thresholds, sink_keys, advance) for one in chosen]
    if plan.detailed is None:
        return found
    first = _most_telling([one.records for one in found], plan.detailed)
    return [
        replace(one, detailed=tuple(sorted(head for at, head in first if at == group)))
        for group, one in enumerate(found)
    ]


def cells_of(chosen: Sequence[ChosenHeads]) -> int:
    """Cells that `report_heads` will visit; for progress."""
    wanted = Wanted(per_key=True)
    return sum(
        planned_cells(one.problem, wanted, batches=one.selection.batches, heads=one.selection.heads)
        for one in chosen
    )


def most_telling(found: Sequence[ReportedHeads]) -> int:
    """Which head to show first, counted through all of them."""
    ((group, head),) = _most_telling([one.records for one in found], 1)
    return sum(len(one.records) for one in found[:group]) + head


def _shape(chosen: ChosenHeads) -> MapShape:
    problem, selection = chosen.problem, chosen.selection
    queries = problem.mask.real_queries(selection.batches[0])
    return MapShape(len(selection.heads), queries, problem.sizes.k_len)


def _measured(
    chosen: ChosenHeads,
    plan: Plan,
    thresholds: Thresholds,
    sink_keys: int,
    advance: Callable[[int], None] | None,
) -> ReportedHeads:
    shape = _shape(chosen)
    bins = plan.bins_of(shape.q_len, shape.k_len, sink_keys)
    wanted = Wanted(per_key=True, sink_keys=sink_keys, bins=bins)
    records: list[Record] = []
    maps: list[HeadMap] = []
    problem, selection = chosen.problem, chosen.selection
    for rows, statistics in measure(chosen, wanted, thresholds, advance=advance):
        records.append(head_record(chosen, rows, statistics))
        maps.append(map_of(rows, bins))
    whole = together(problem, selection.batches[0], selection.heads, bins, maps)
    return ReportedHeads(chosen, tuple(records), whole)


def _most_telling(groups: Sequence[Sequence[Record]], count: int) -> list[tuple[int, int]]:
    """So many heads as (group, head), in turn the best of each group, then its second, …"""

    def worth(record: Record) -> tuple[bool, bool, float]:
        label, score = record["label"], record["label_score"] or 0.0
        if label in (None, "mixed"):  # its score is how far the nearest label is away
            return False, False, -score
        return label in TELLING, True, score

    ranked = []
    for group, records in enumerate(groups):
        order = sorted(range(len(records)), key=lambda at: worth(records[at]), reverse=True)
        ranked += [(place, worth(records[at]), group, at) for place, at in enumerate(order)]
    if count == 1:  # the best of all, whatever its group
        return [max(ranked, key=lambda each: (each[1], -each[2], -each[3]))[2:]]
    ranked.sort(key=lambda each: (each[0], each[2]))
    return [each[2:] for each in ranked[:count]]
