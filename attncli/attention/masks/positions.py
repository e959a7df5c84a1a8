"""Where queries stand on the key axis, and which documents they and the keys belong to.

Positions count along the key axis. Where queries have documents of their own, each query stands as
far behind the first key of its document as it is behind the first query of it, plus an offset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncli.attention.options import AttentionOptions, Corner
from attncli.attention.sizes import Sizes
from attncli.errors import DataError, UsageError

# Offsets stay within it: their sums fit 64 bits.
FARTHEST = 2**53


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """Packed documents, numbered from 0."""

    keys: NDArray[np.int64]  # int64 (B | 1, S_k), document of each key
    # Int64 (B | 1, S_q), of each query; None where that of the key at its position is.
    queries: NDArray[np.int64] | None

    def of_queries(self, positions: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """Int64 (B | 1, S_q): document of each query, −1 where it stands off the key axis."""
        if self.queries is not None:
            return self.queries
        assert positions is not None  # `place` has refused the other case
        k_len = self.keys.shape[1]
        on_axis = (positions >= 0) & (positions < k_len)
        if not k_len:
            return np.full_like(positions, -1)
        keys = np.broadcast_to(self.keys, (max(len(self.keys), len(positions)), k_len))
        own = np.take_along_axis(keys, np.where(on_axis, positions, 0), axis=1)
        return np.where(on_axis, own, -1)


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where the queries stand."""

    shift: NDArray[np.int64]  # int64 (B | 1, 1 | S_q), position of query i less i
    # Int64 (B | 1, 1 | S_q), the first key of the axis, or of the query's document.
    start: NDArray[np.int64]

    def positions(self, q_len: int) -> NDArray[np.int64]:
        """Int64 (B | 1, S_q)."""
        return self.shift + np.arange(q_len)


@dataclass(frozen=True, slots=True, eq=False)
class RealCells:
    """Which keys and queries are no padding."""

    keys: NDArray[np.bool_]  # bool (B | 1, S_k), True = real key
    query_lengths: NDArray[np.int64]  # int64 (B | 1,), queries from here on are padding


def read_documents(options: AttentionOptions, sizes: Sizes) -> tuple[Documents | None, list[str]]:
    """The documents that the options declare, None for none, and what the reader should know.

    Raises:
        UsageError: ids or offsets that do not fit the sizes.
        DataError: ids that are not integers.
    """
    if options.cu_seqlens_q is not None or options.cu_seqlens_k is not None:
        of_axes = packed_lengths(options, sizes)
        queries, keys = (np.repeat(np.arange(len(counts)), counts)[None] for counts in of_axes)
        return Documents(keys, queries), []
    if options.position_ids is not None:
        return _restarted(options.position_ids, sizes)
    if options.segments is None:
        return None, []
    keys = _read_ids(options.segments, "segments", "key", sizes.batch, sizes.k_len)
    if options.query_segments is None:
        known = np.unique(keys)
        return Documents(np.searchsorted(known, keys), None), _doubt_of_positions(keys, sizes)
    given = options.query_segments
    queries = _read_ids(given, "query_segments", "query", sizes.batch, sizes.q_len)
    known = np.unique(np.concatenate([keys.ravel(), queries.ravel()]))
    return Documents(*(np.searchsorted(known, ids) for ids in (keys, queries))), []


def _doubt_of_positions(keys: NDArray[np.int64], sizes: Sizes) -> list[str]:
    """As many documents as queries may mean that each has one, wherever positions put them."""
    if sizes.q_len == sizes.k_len or sizes.q_len < 2:
        return []
    own = [np.unique(row, return_index=True) for row in keys]
    if any(len(ids) != sizes.q_len for ids, _ in own):
        return []
    ids, first = own[0]
    example = ",".join(map(str, ids[np.argsort(first)][:20])) + ",…" * (len(ids) > 20)
    return [
        f"«segments»: each query sees the document at its position; with {len(ids)} documents and "
        f"as many queries, was one query of each meant? «query_segments={example}»"
    ]


def _restarted(given: NDArray[Any], sizes: Sizes) -> tuple[Documents, list[str]]:
    """A document begins wherever a position is no larger than the one before it."""
    ids = _read_ids(given, "position_ids", "key", sizes.batch, sizes.k_len)
    steps = np.diff(ids, axis=1, prepend=ids[:, :1] - 1)
    keys = np.cumsum(steps <= 0, axis=1, dtype=np.int64)
    said = []
    if (steps > 1).any():
        said = [
            "«position_ids»: some positions skip numbers within a document; distances and windows "
            "count keys all the same"
        ]
    if ((steps[:, 1:-2] == 0) & (steps[:, 2:-1] == 1) & (steps[:, 3:] == 0)).any():
        said.append(
            "«position_ids»: some repeat from key to key, as ids of documents do; «segments» takes "
            "those"
        )
    return Documents(keys, keys if sizes.q_len == sizes.k_len else None), said


def packed_lengths(
    options: AttentionOptions, sizes: Sizes
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many queries and keys the documents of `cu_seqlens_q` and `cu_seqlens_k` have.

    Raises:
        UsageError: numbers that do not fit the sizes.
        DataError: something else than whole numbers.
    """
    given = {"q": options.cu_seqlens_q, "k": options.cu_seqlens_k}
    lengths = {"q": sizes.q_len, "k": sizes.k_len}
    missing = next((axis for axis, edges in given.items() if edges is None), None)
    if missing is not None:
        there = given["k" if missing == "q" else "q"]
        assert there is not None  # whoever asks has one
        if sizes.q_len != sizes.k_len:
            one_each = ",".join(map(str, range(there.size)))
            fits = there.size - 1 == lengths[missing] and there.size < 20
            noun = "query" if missing == "q" else "key"
            raise UsageError(
                f"«cu_seqlens_{missing}»",
                f"expected a value, since S_q={sizes.q_len} differs from S_k={sizes.k_len}, "
                "got none",
                f"one {noun} of each document: «cu_seqlens_{missing}={one_each}»" if fits else "",
            )
    counts: dict[str, NDArray[np.int64]] = {}
    for axis, edges in given.items():
        if edges is None:
            continue
        where, cumulative = f"«cu_seqlens_{axis}»", np.atleast_1d(edges)
        if cumulative.dtype.kind not in "iu" or cumulative.ndim > 1:
            got = f"{cumulative.dtype} of shape {cumulative.shape}"
            raise DataError(where, f"expected a list of integers, got {got}")
        counts[axis] = cumulative[1:].astype(np.int64) - cumulative[:-1]
        ends = cumulative[:1].tolist() + cumulative[-1:].tolist()
        if ends != [0, lengths[axis]] or (counts[axis] < 0).any():
            expected = f"numbers that ascend from 0 to S_{axis}={lengths[axis]}"
            got = ",".join(map(str, cumulative[:8].tolist())) + ",…" * (len(cumulative) > 8)
            raise UsageError(where, f"expected {expected}, got {got}")
    if missing is not None:  # the documents of the other axis are its own
        (only,) = counts.values()
        return only, only
    if len(counts["q"]) != len(counts["k"]):
        raise UsageError(
            "«cu_seqlens_q»",
            f"expected {len(counts['k'])} documents as in «cu_seqlens_k», got {len(counts['q'])}",
        )
    return counts["q"], counts["k"]


def place(
    options: AttentionOptions, sizes: Sizes, real: RealCells, documents: Documents | None
) -> tuple[Placement | None, list[str]]:
    """Where the queries stand, None where that is undefined, and what was assumed.

    Raises:
        UsageError: positions are needed and nothing says where queries stand; or there are
            neither one offset nor one per batch.
    """
    if documents is not None and documents.queries is not None:
        return _place_in_documents(options, sizes, real, documents.keys, documents.queries)
    declared = options.query_offset
    zeros = np.zeros((1, 1), np.int64)
    if declared is None:
        if sizes.q_len == sizes.k_len:
            return Placement(zeros, zeros), []
        if options.needs_positions:
            corner, _ = _corners(sizes, real)
            raise undeclared(options, sizes, corner)
        return None, []
    if declared is Corner.BOTTOM_RIGHT:
        corner, said = _corners(sizes, real)
        return Placement(corner[:, None], zeros), said
    offsets = 0 if declared is Corner.TOP_LEFT else declared
    return Placement(offsets_of(offsets, sizes.batch)[:, None], zeros), []


def _place_in_documents(
    options: AttentionOptions,
    sizes: Sizes,
    real: RealCells,
    keys: NDArray[np.int64],
    queries: NDArray[np.int64],
) -> tuple[Placement | None, list[str]]:
    """Each query as far into the keys of its document as into the queries of it, and an offset."""
    declared = options.query_offset
    offsets = np.zeros(1, np.int64)
    if declared is not None and not isinstance(declared, Corner):
        offsets = offsets_of(declared, sizes.batch)
    batches = max(map(len, (keys, queries, real.keys, real.query_lengths, offsets)))
    shifts = np.zeros((batches, sizes.q_len), np.int64)
    starts, gaps = np.zeros_like(shifts), False
    for batch in range(batches):
        own = _of(queries, batch)
        count = 1 + max(int(each.max(initial=-1)) for each in (own, _of(keys, batch)))
        rows = _Extent.of(own, np.arange(sizes.q_len) < _of(real.query_lengths, batch), count)
        columns = _Extent.of(_of(keys, batch), _of(real.keys, batch), count)
        starts[batch] = columns.first[own]
        if declared is None:
            if np.array_equal(own, _of(keys, batch)):
                continue
            if not (rows.counts == columns.counts).all():
                if not options.needs_positions:
                    return None, []
                other = int((rows.counts != columns.counts).argmax())
                counts = rows.counts[other], columns.counts[other]
                raise undeclared_in_document(options, other, *counts)
        for name, extent in (("query_segments", rows), ("segments", columns)):
            if extent.is_split:
                raise UsageError(
                    f"«{name}»", "expected each document in one run where positions count in it"
                )
        offset = _of(offsets, batch)
        if declared is Corner.BOTTOM_RIGHT:
            offset = columns.real_lengths - rows.real_lengths
            gaps = gaps or columns.has_gaps
        shifts[batch] = (columns.first - rows.first + offset)[own]
    said = []
    if gaps:
        said.append(
            "«query_offset»: bottom-right counts up to the last real key of each document, also "
            "those before it that are padding"
        )
    alike = sizes.q_len == 0 or bool((shifts == shifts[:, :1]).all())
    return Placement(shifts[:, :1] if alike and sizes.q_len else shifts, starts), said


@dataclass(frozen=True, slots=True, eq=False)
class _Extent:
    """Where documents lie on one axis; int64 (documents,) each."""

    first: NDArray[np.int64]  # index of the first key or query; 0 where there are none
    counts: NDArray[np.int64]  # how many there are
    real_lengths: NDArray[np.int64]  # up to the last that is no padding
    real_counts: NDArray[np.int64]  # how many are no padding
    is_split: bool  # whether some document lies in several runs

    @classmethod
    def of(cls, ids: NDArray[np.int64], real: NDArray[np.bool_], count: int) -> _Extent:
        """By the document of each place of the axis, and whether it is no padding."""
        index = np.arange(len(ids))
        counts = np.bincount(ids, minlength=count)
        first = np.full(count, len(ids))
        np.minimum.at(first, ids, index)
        first = np.where(counts > 0, first, 0)
        stop, real_stop = first.copy(), first.copy()
        np.maximum.at(stop, ids, index + 1)
        np.maximum.at(real_stop, ids[real], index[real] + 1)
        real_counts = np.bincount(ids[real], minlength=count)
        is_split = bool((stop - first != counts).any())
        return cls(first, counts, real_stop - first, real_counts, is_split)

    @property
    def has_gaps(self) -> bool:
        """Whether padding lies before something that is none."""
        return bool((self.real_counts < self.real_lengths).any())


def undeclared(options: AttentionOptions, sizes: Sizes, corner: NDArray[np.int64]) -> UsageError:
    """For queries and keys of different number of which nothing says how they meet.

    Args:
        options: some of which need positions.
        sizes: of the tensors.
        corner: int64 (B | 1,), the offset that bottom-right would be.
    """
    return _undeclared(
        options,
        f"S_q={sizes.q_len} differs from S_k={sizes.k_len}",
        "top-left: query 0 stands at key 0 (PyTorch is_causal); bottom-right: the last "
        f"query stands at the last key, an offset of {_listed(corner)} "
        "(KV cache, FlashAttention)"
        + ("; «query_segments» says it for each" if options.segments is not None else ""),
    )


def undeclared_in_document(
    options: AttentionOptions, document: int, queries: int, keys: int
) -> UsageError:
    """The same for those of a document."""
    return _undeclared(
        options,
        f"document {document} has {queries} queries and {keys} keys",
        "in each document, top-left: its first query stands at its first key; "
        "bottom-right: its last at its last (FlashAttention)",
    )


def _undeclared(options: AttentionOptions, why: str, advice: str) -> UsageError:
    needing = options.needs_positions[0]
    problem = f"expected a value, since «{needing}» needs positions and {why}, got none"
    return UsageError("«query_offset»", problem, advice)


def _corners(sizes: Sizes, real: RealCells) -> tuple[NDArray[np.int64], list[str]]:
    """Offsets at which the last real query stands at the last real key, int64 (B | 1,)."""
    stop = (real.keys * np.arange(1, sizes.k_len + 1)).max(-1, initial=0)  # (B | 1,)
    corner = stop - real.query_lengths
    if (real.keys.sum(-1) == stop).all():
        return corner, []
    said = (
        "«query_offset»: bottom-right counts up to the last real key, also those before it that "
        f"are padding by «key_padding»: an offset of {_listed(corner)}"
    )
    return corner, [said]


def offsets_of(declared: int | tuple[int, ...], batch: int) -> NDArray[np.int64]:
    """Int64 (B | 1,): offsets that are numbers, of all batches or of each.

    Raises:
        UsageError: more or fewer, or one beyond 2⁵³.
    """
    offsets = (declared,) if isinstance(declared, int) else declared
    if len(offsets) not in (1, batch):
        raise UsageError(
            "«query_offset»",
            f"expected one value or one per batch (B={batch}), got {len(offsets)}",
        )
    if max(map(abs, offsets), default=0) > FARTHEST:
        raise UsageError("«query_offset»", "expected at most 2^53 in size, got more")
    return np.array(offsets, np.int64)


def _read_ids(
    given: NDArray[Any], name: str, what: str, batch: int, length: int
) -> NDArray[np.int64]:
    """Document ids of keys or queries as int64 (B | 1, S)."""
    ids = np.atleast_2d(given)
    if ids.dtype.kind not in "iub":
        raise DataError(f"«{name}»", f"expected integers, got {ids.dtype}")
    if ids.ndim != 2 or ids.shape[0] not in (1, batch) or ids.shape[1] != length:
        axis = f"S_{what[0]}={length}"
        raise UsageError(
            f"«{name}»",
            f"expected one id per {what}, ({axis}) or (B={batch}, {axis}), got {given.shape}",
        )
    return ids.astype(np.int64)


def _of(array: NDArray[Any], batch: int) -> Any:
    return array[batch if len(array) > 1 else 0]


def _listed(offsets: NDArray[np.int64]) -> str:
    return ",".join(map(str, offsets.tolist()))


def segment_doubts(segments: NDArray[Any] | None) -> list[str]:
    """What to say of ids of documents, (S_k,) or (B, S_k), that recur or count up, as positions do.

    Padding may repeat one number at either end.
    """
    for ids in () if segments is None else np.atleast_2d(segments).astype(np.int64):
        starts = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1))  # of the runs of one id
        runs = ids[starts]
        again = np.delete(starts, np.unique(runs, return_index=True)[1])
        steps, lengths = np.diff(runs), np.diff(starts, append=len(ids))
        up = ((steps[:-1] == 1) & (steps[1:] == 1)).any()
        counting = up and ((steps == 1) | (steps < 0)).all() and (lengths[1:-1] == 1).all()
        if counting and (len(again) or (len(runs) == len(ids) and ids[0] == 0)):
            said = "the ids count up from key to key, as positions do"
            return [f"«segments»: {said}; «position_ids» takes those"]
        if len(again):
            said = f"id {ids[again[0]]} comes again at key {again[0]}, after others"
            return [f"«segments»: {said}; both are one document («position_ids» takes positions)"]
    return []
