"""Count what a mask lets through, one record per batch and head, and on a grid to be drawn."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncli.attention.masks.compare import distinct_heads
from attncli.attention.masks.interval_mask import IntervalMask, SortedIntervals
from attncli.attention.masks.mask import HeadMask, Mask, count_columns
from attncli.attention.masks.recognise import (
    MaskRecognition,
    Recognition,
    combine,
    described,
    recognise,
    recognise_mask,
)
from attncli.attention.masks.weightless import blocks_of
from attncli.attention.options import AttentionOptions
from attncli.columns import column

_MOST_VALUES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskRecord:
    """What one batch and head of a mask lets through; padded queries count nowhere."""

    batch: int | None = column("batch", description="None where all batches are equal", is_key=True)
    head: int | None = column("head", description="None where all heads are equal", is_key=True)
    q_len: int = column("S_q", description="padding included")
    k_len: int = column("S_k", description="padding included")
    cells: int = column("cells", description="cells of real queries")
    kept: int = column("kept", description="how many of them are visible")
    density: float | None = column("density", description="kept / cells; None without cells")
    empty_rows: int = column("empty rows", description="real queries that see no key")
    first_empty_rows: tuple[int, ...] = column(None, description="indices of the first of them")
    unused_keys: int = column("unused keys", description="keys that no real query sees")
    first_unused_keys: tuple[int, ...] = column(None, description="indices of the first of them")
    keys_min: int | None = column("keys min", description="fewest keys that a real query sees")
    keys_max: int | None = column("max", description="most keys that a real query sees")
    description: str = column(None, description="what the mask is, in words")


@dataclass(frozen=True, slots=True)
class AddedValues:
    """The numbers of an additive mask.

    Attributes:
        counts: how often each stands in the mask as given, in ascending order; None where there
            are more than 16.
        minimum, maximum: of the finite ones; None where there are none.
        hidden: number of cells that hold −inf.
    """

    counts: dict[float, int] | None
    minimum: float | None
    maximum: float | None
    hidden: int


@dataclass(frozen=True, slots=True)
class MaskAudit:
    """A whole mask.

    Attributes:
        records: one per batch and head that are not equal to the others along their axis.
        description: what the mask is as a whole, in words; where rows hold nothing but values
            that were probably meant to hide, in both readings.
        recognition: what it is as it stands.
        lenient: what it is if the numbers that hide beside others hide also in rows of nothing
            else; None where there are no such rows.
        added: the numbers that a mask file adds; None for none.
    """

    records: tuple[MaskRecord, ...]
    description: str
    recognition: MaskRecognition
    lenient: MaskRecognition | None
    added: AddedValues | None


def audit(mask: Mask, options: AttentionOptions | None = None, *, named: int = 10) -> MaskAudit:
    """Count and describe every batch and head of a mask.

    Args:
        mask: on the host; without a mask file its size costs nothing, since no cell is built.
        options: that it was built of, to tell what they ask for also where it does not show;
            None to go by the cells alone.
        named: how many empty rows and unused keys to name.
    """
    judged = _of_cells(mask, named)
    if options is None:
        return judged
    options_of = {(batch, head): one.options for batch, head, one in judged.recognition.parts}
    records = tuple(
        replace(one, description=described(mask, options, one.description, of_part))
        for one in judged.records
        for of_part in [options_of[one.batch, one.head]]
    )
    said = described(mask, options, judged.description, judged.recognition.options)
    return replace(judged, records=records, description=said)


def _of_cells(mask: Mask, named: int) -> MaskAudit:
    """What is visible, whoever asked for it."""
    found = [(*each, recognise(each[2])) for each in distinct_heads(mask)]
    records = tuple(_record(*each, named) for each in found)
    recognition = combine(found)
    added = None if mask.added is None else _added_values(mask.added)
    line = mask.spared
    if line is None:
        return MaskAudit(records, recognition.description, recognition, None, added)
    # Rows of nothing but −10,000 or finfo.min: whoever writes that means to hide.
    lenient = recognise_mask(mask.hiding_below(line))
    own = {(batch, head): part.description for batch, head, part in lenient.parts}
    also = f"; with values of {line:g} or less as hidden everywhere: "
    records = tuple(
        replace(one, description=f"{one.description}{also}{meant}")
        for one in records
        for meant in [own.get((one.batch, one.head), lenient.description)]
    )
    said = f"{recognition.description}{also}{lenient.description}"
    return MaskAudit(records, said, recognition, lenient, added)


def place(batch: int | None, head: int | None) -> str:
    """Which batch and head, in brackets; nothing where there is one matrix."""
    named = {"batch": batch, "head": head}
    parts = [f"{name} {index}" for name, index in named.items() if index is not None]
    return f" ({', '.join(parts)})" if parts else ""


def _record(
    batch: int | None, head: int | None, view: HeadMask, recognition: Recognition, named: int
) -> MaskRecord:
    profile = view.marginals
    empty, unused = (np.flatnonzero(each == 0) for each in (profile.counts, profile.used))
    return MaskRecord(
        batch=batch,
        head=head,
        q_len=view.mask.sizes.q_len,
        k_len=view.k_len,
        cells=view.size,
        kept=profile.kept,
        density=profile.kept / view.size if view.size else None,
        empty_rows=len(empty),
        first_empty_rows=tuple(empty[:named].tolist()),
        unused_keys=len(unused),
        first_unused_keys=tuple(unused[:named].tolist()),
        keys_min=int(profile.counts.min()) if view.rows else None,
        keys_max=int(profile.counts.max()) if view.rows else None,
        description=recognition.description,
    )


def _added_values(added: NDArray[Any]) -> AddedValues:
    counts: Counter[float] = Counter()
    lowest, highest, hidden = np.inf, -np.inf, 0
    for block in blocks_of(added):
        finite = block[block > -np.inf]
        hidden += block.size - finite.size
        lowest = min(lowest, float(finite.min(initial=np.inf)))
        highest = max(highest, float(finite.max(initial=-np.inf)))
        if len(counts) <= _MOST_VALUES:
            values, cells = np.unique(block, return_counts=True)
            counts.update(dict(zip(values.tolist(), cells.tolist(), strict=True)))
    return AddedValues(
        counts=dict(sorted(counts.items())) if len(counts) <= _MOST_VALUES else None,
        minimum=lowest if lowest < np.inf else None,
        maximum=highest if highest > -np.inf else None,
        hidden=hidden,
    )


@dataclass(frozen=True, slots=True, eq=False)
class CellCounts:
    """Visible cells of a mask too large to show cell by cell, summed over rectangles.

    Attributes:
        query_edges: int64 (rows + 1,); row r of the grid holds the queries from the r-th edge up
            to, without, the next.
        key_edges: int64 (columns + 1,), likewise for the keys.
        counts: int64 (rows, columns), visible cells in each rectangle.
    """

    query_edges: NDArray[np.int64]
    key_edges: NDArray[np.int64]
    counts: NDArray[np.int64]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Int64 (rows, columns): all cells in each rectangle."""
        return np.outer(np.diff(self.query_edges), np.diff(self.key_edges))


def cell_counts(view: HeadMask, rows: int, columns: int) -> CellCounts:
    """Count the visible cells on a grid of at most `rows` × `columns` rectangles.

    Args:
        view: one batch and head; its padded queries are left out.
        rows: at least 1; fewer where there are fewer queries.
        columns: at least 1; fewer where there are fewer keys.
    """
    query_edges, key_edges = _edges(view.rows, rows), _edges(view.k_len, columns)
    if not view.size:
        counts = np.zeros((len(query_edges) - 1, len(key_edges) - 1), np.int64)
    elif view.intervals is not None:
        counts = _count_intervals(view.intervals, query_edges, key_edges)
    else:
        counts = _count_cells(view, query_edges, key_edges)
    return CellCounts(query_edges, key_edges, counts)


def _edges(length: int, parts: int) -> NDArray[np.int64]:
    """Where an axis is cut into at most so many parts, as even as whole numbers allow."""
    parts = max(1, min(length, parts)) if length else 0
    return np.arange(parts + 1) * length // max(1, parts)


def _count_intervals(
    mask: IntervalMask, query_edges: NDArray[np.int64], key_edges: NDArray[np.int64]
) -> NDArray[np.int64]:
    """From the interval of each query: what lies below one edge, without that below the last."""
    if mask.kept is not None:
        both = (_count_intervals(part, query_edges, key_edges) for part in mask.parts)
        return np.add(*both)
    ordered = SortedIntervals(mask)
    counts = []
    before = ordered.low
    for edge in key_edges[1:].tolist():
        limit = np.clip(edge, mask.first, mask.stop)
        upto = np.clip(ordered.below(limit), ordered.low, ordered.high)
        counts.append(np.add.reduceat(upto - before, query_edges[:-1]))
        before = upto
    return np.stack(counts, axis=1)


def _count_cells(
    view: HeadMask, query_edges: NDArray[np.int64], key_edges: NDArray[np.int64]
) -> NDArray[np.int64]:
    """From blocks of cells, each of which may end within a rectangle."""
    counts = np.zeros((len(query_edges) - 1, len(key_edges) - 1), np.int64)
    for rows, block in view.blocks():
        first, last = np.searchsorted(query_edges, [rows.start, rows.stop - 1], "right") - 1
        for part in range(first, last + 1):
            start = max(int(query_edges[part]), rows.start) - rows.start
            stop = min(int(query_edges[part + 1]), rows.stop) - rows.start
            by_key = count_columns(block[start:stop])
            counts[part] += np.add.reduceat(by_key, key_edges[:-1])
    return counts
