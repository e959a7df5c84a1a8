"""What a mask is and what it lets through: in words, as counts per batch and head, on a grid.

It is said exactly, as the inverse of something, or nearest to something. Of the patterns that give
the same cells the one with the fewest numbers is named (`Pattern.cost`): "full" before padding,
padding by a length before causality with a window, those before packed documents, and padding key
by key last. Rules that do not show at the mask's size are not named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncli.attention.masks.build import blocks_of, build_mask
from attncli.attention.masks.compare import Leak, distinct_heads, leak
from attncli.attention.masks.fit import Nearest, complete, fit, nearest_of
from attncli.attention.masks.interval_mask import IntervalMask, SortedIntervals
from attncli.attention.masks.mask import HeadMask, Mask, count_columns
from attncli.attention.masks.patterns import Option, Pattern, describe, merge, options_of
from attncli.attention.masks.positions import read_documents
from attncli.attention.masks.spans import span_counts, spans_of
from attncli.attention.options import DOCUMENTS, AttentionOptions
from attncli.columns import column

_MOST_VALUES = 16
_LISTED = 4


@dataclass(frozen=True, slots=True, eq=False)
class Recognition:
    """What one batch and head of a mask is."""

    description: str  # in words
    view: HeadMask  # the batch and head
    # Gives exactly the cells, in the fewest numbers; None where no known pattern does.
    pattern: Pattern | None = None
    buildable: Pattern | None = None  # likewise, and options build it; None where no options do
    # Gives exactly the hidden cells, where that is the likelier intention or the only pattern there
    # is; None elsewhere.
    inverse: Pattern | None = None
    # The known pattern that differs in the fewest cells, where none is exact.
    nearest: Nearest | None = None

    @property
    def options(self) -> dict[str, Any] | None:
        """Options, by their names in AttentionOptions, that build the mask; None if none do."""
        return None if self.buildable is None else options_of([self.buildable])

    @property
    def probably_inverted(self) -> bool:
        """Whether true and false have probably been exchanged."""
        return self.inverse is not None


@dataclass(frozen=True, slots=True, eq=False)
class MaskRecognition:
    """What a mask is as a whole."""

    description: str  # in words, of all batches and heads together
    # Options, by their names in AttentionOptions, that build it for its number of batches; None if
    # none do, or if its heads differ.
    options: dict[str, Any] | None
    # Batch (None where all are alike), head (likewise), and what each of them is.
    parts: tuple[tuple[int | None, int | None, Recognition], ...]

    @property
    def probably_inverted(self) -> bool:
        """Whether true and false have probably been exchanged in some batch or head."""
        return any(part.probably_inverted for _, _, part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskRecord:
    """What one batch and head of a mask lets through; padded queries count nowhere."""

    batch: int | None = column("batch", description="none where all batches are equal", is_key=True)
    head: int | None = column("head", description="none where all heads are equal", is_key=True)
    q_len: int = column("S_q", description="number of queries, padding included")
    k_len: int = column("S_k", description="number of keys, padding included")
    cells: int = column("cells", description="cells of real queries: their number times S_k")
    kept: int = column("kept", description="cells that are visible")
    density: float | None = column(
        "density", description="kept / cells, 0 to 1; none without cells"
    )
    empty_rows: int = column("empty rows", description="real queries that see no key")
    first_empty_rows: tuple[int, ...] = column(None, description="indices of the first such rows")
    unused_keys: int = column("unused keys", description="keys that no real query sees")
    first_unused_keys: tuple[int, ...] = column(None, description="indices of the first such keys")
    keys_min: int | None = column(
        "keys min", description="fewest keys that a real query sees; none without queries"
    )
    keys_max: int | None = column(
        "keys max",
        description="most keys that a real query sees; none without queries",
        is_beside=True,
    )
    description: str = column(None, description="what the mask is, in words")


@dataclass(frozen=True, slots=True, eq=False)
class AddedValues:
    """The numbers of an additive mask."""

    # How often each stands in the mask as given, in ascending order; None where there are more than
    # 16.
    counts: dict[float, int] | None
    minimum: float | None  # of the finite ones; None where there are none
    maximum: float | None
    hidden: int  # number of cells that hold −inf


@dataclass(frozen=True, slots=True, eq=False)
class MaskAudit:
    """A whole mask."""

    # One per batch and head that are not equal to the others along their axis.
    records: tuple[MaskRecord, ...]
    # What the mask is as a whole, in words; where rows hold nothing but values that were probably
    # meant to hide, in both readings.
    description: str
    recognition: MaskRecognition  # what it is as it stands
    # What it is if the numbers that hide beside others hide also in rows of nothing else; None
    # where there are no such rows.
    lenient: MaskRecognition | None
    added: AddedValues | None  # the numbers that a mask file adds; None for none


def audit(mask: Mask, options: AttentionOptions | None = None, *, named: int = 10) -> MaskAudit:
    """Count and describe every batch and head of a mask.

    Args:
        mask: on the host; without a mask file its size costs nothing, since no cell is built.
        options: of the mask, to tell what they ask for where it does not show; None for its cells.
        named: how many empty rows and unused keys to name.
    """
    recognition, lenient = recognise_mask(mask), None
    also, own = "", {}
    if mask.spared is not None:
        # Rows of nothing but −10,000 or finfo.min: whoever writes that means to hide.
        lenient = recognise_mask(mask.hiding_below(mask.spared))
        also = f"; with values of {mask.spared:g} or less as hidden everywhere: "
        own = {(batch, head): part.description for batch, head, part in lenient.parts}

    def told(one: MaskRecognition | Recognition, meant: str) -> str:
        said = f"{one.description}{also}{meant}"
        return said if options is None else described(mask, options, said, one.options)

    whole = "" if lenient is None else lenient.description
    records = tuple(
        _record(batch, head, part, told(part, own.get((batch, head), whole)), named)
        for batch, head, part in recognition.parts
    )
    added = None if mask.added is None else _added_values(mask.added)
    return MaskAudit(records, told(recognition, whole), recognition, lenient, added)


def place(batch: int | None, head: int | None) -> str:
    """Which batch and head, in brackets; nothing where there is one matrix."""
    named = ", ".join(_named(batch, head))
    return f" ({named})" if named else ""


def _named(batch: int | None, head: int | None) -> list[str]:
    indices = {"batch": batch, "head": head}
    return [f"{name} {index}" for name, index in indices.items() if index is not None]


def _record(
    batch: int | None, head: int | None, part: Recognition, description: str, named: int
) -> MaskRecord:
    view, profile = part.view, part.view.marginals
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
        description=description,
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


def recognise(view: HeadMask) -> Recognition:
    """Say what one batch and head of a mask is."""
    pattern, buildable = fit(view)
    if pattern is not None:
        said, inverse = _with_suspicion([pattern]), _suspected(pattern)
        return Recognition(said, view, pattern=pattern, buildable=buildable, inverse=inverse)
    inverse, _ = fit(view.inverse)
    if inverse is not None and inverse.offset in (None, *inverse.corners):
        said = f"probably inverted: {describe([inverse])}"
        return Recognition(said, view, inverse=inverse)
    nearest = nearest_of(view)
    return Recognition(f"no known pattern; {nearest.words}", view, nearest=nearest)


def recognise_mask(mask: Mask) -> MaskRecognition:
    """Say what a mask on the host is, all batches and heads together."""
    parts = tuple((batch, head, recognise(view)) for batch, head, view in distinct_heads(mask))
    found = [part for _, _, part in parts]
    if not found:
        return MaskRecognition(description="no heads", options=None, parts=())
    built = [part.buildable for part in found]
    if len({head for _, head, _ in parts}) == 1:
        joint, told = _joint(found, built), _joint(found, [part.pattern for part in found])
        options = None if joint is None else options_of(joint)
        if told is not None:
            said = _with_suspicion(told)
            return MaskRecognition(description=said, options=options, parts=parts)
    words = {part.description for part in found}
    if len(words) == 1:
        alike = len({None if one is None else one.numbers for one in built}) == 1
        options = found[0].options if alike else None
        return MaskRecognition(description=words.pop(), options=options, parts=parts)
    listed = [
        f"{' '.join(_named(batch, head))}: {part.description}"
        for batch, head, part in parts[:_LISTED]
    ]
    more = [f"… {len(parts)} in all"] if len(parts) > _LISTED else []
    return MaskRecognition(description=" | ".join(listed + more), options=None, parts=parts)


def described(mask: Mask, options: AttentionOptions, said: str, found: Option) -> str:
    """What a mask of these options is, in words that leave out nothing that they ask for.

    By its cells alone something is said of it, and options are found that build these, if any do.
    """
    asked = _asked_words(mask, options)
    padding = {"key_lengths", "key_padding"} & (found or {}).keys()
    for name in ("causal", "left_window", "right_window", *_LOOSER, *_PADDING, *DOCUMENTS):
        value = getattr(options, name)
        nothing = value is None or value is False or (name in _LOOSER and value == _LOOSER[name])
        told = name in (found or {}) or (name in _PADDING and padding) or asked == said
        told = told or (name in DOCUMENTS and "segments" in (found or {}))
        if nothing or told:
            continue
        if options.attn_mask is not None:
            return f"{said}; asked for beside the file: {asked}"
        return asked if found is None else f"{asked}; here the same as: {said}"
    return said


# Options that change nothing at these values.
_LOOSER = {"sink_window": 0, "prefix": 0, "dilation": 1}
_PADDING = ("key_lengths", "key_padding")


def _asked_words(mask: Mask, options: AttentionOptions) -> str:
    """What the options ask for, whatever of it shows."""
    batches = mask.indices(0) if mask.differs(0) else [0]
    said = describe(merge([asked_pattern(options, mask, batch) for batch in batches]))
    if mask.shift is None or mask.offset is not None:
        return said
    offset = options.query_offset
    offsets = ",".join(map(str, offset)) if isinstance(offset, tuple) else offset
    at = f"at offset {offsets}" if isinstance(offset, int | tuple) else f"{offset}"
    return f"{said}; positions counted in each document, {at}"


def asked_pattern(options: AttentionOptions, mask: Mask, batch: int) -> Pattern:
    """The pattern that the options ask for in one batch, whatever of it shows."""
    sizes, own = mask.sizes, mask.shift is not None and mask.offset is None
    offset = 0 if own else None
    if mask.offset is not None and options.needs_positions:
        offset = int(mask.offset[batch if len(mask.offset) > 1 else 0])
    ends = [0] if options.causal else []
    ends += [] if options.right_window is None else [options.right_window]
    documents, _ = read_documents(options, sizes)
    keys = None if documents is None else documents.keys
    padded = None if options.key_padding is None else mask.real_keys(batch)
    lengths = options.key_lengths
    return Pattern(
        q_len=sizes.k_len if own else sizes.q_len,  # no corner is that of the whole
        k_len=sizes.k_len,
        lowest=None if options.left_window is None else (offset or 0) - options.left_window,
        kept=options.sink_window or None,
        highest=(offset or 0) + min(ends) if ends else None,
        prefix=options.prefix or None,
        position=offset,
        dilation=options.dilation if options.dilation != 1 else None,
        length=None if lengths is None or padded is not None else lengths[batch % len(lengths)],
        keep=padded,
        ids=None if keys is None else keys[batch % len(keys)],
    )


def undeclared_leaks(mask: Mask, recognition: MaskRecognition, named: int = 10) -> list[Leak]:
    """What a mask that is no known pattern shows beyond the pattern nearest to it.

    Where no rule is declared, this is the best guess at the rule that was meant. One leak for each
    batch and head that has such a pattern, even if it shows nothing beyond it; of each, so many
    cells are named.
    """
    found = []
    for batch, head, part in recognition.parts:
        if part.nearest is None or part.nearest.inverted:
            continue
        pattern, view = part.nearest.pattern, mask.head(batch or 0, head or 0)
        options = AttentionOptions(**(options_of([pattern]) or {}))
        rule = build_mask(options, replace(mask.sizes, batch=1, heads=1)).head(0, 0)
        found.append(leak(describe([pattern]), [(batch, head, view, rule, view.rows)], named))
    return found


def _with_suspicion(patterns: Sequence[Pattern]) -> str:
    """The words of the patterns, and of what they may be the inverse of by mistake."""
    said = describe(patterns)
    inverse = [_suspected(pattern) for pattern in patterns]
    suspected = [pattern for pattern in inverse if pattern is not None]
    if len(suspected) < len(patterns):
        return said
    inverted = f"probably inverted: {describe(suspected)}"
    lowest = patterns[0].lowest
    if lowest is not None and lowest > max(patterns[0].corners):
        return inverted  # only the future is visible: nobody declares that
    return f"{said}; or {inverted}"


def _suspected(pattern: Pattern) -> Pattern | None:
    """What a mistaken True or False would have made of another pattern to give this one.

    Only the future visible is causality the wrong way round. Only the last keys visible is padding
    on the left, or padding on the right the wrong way round.
    """
    p = pattern
    if p.hidden_rows is not None or p.highest is not None or p.kept is not None:
        return None
    if p.lowest is None:
        hides_first = p.ids is None and p.padded_left is not None
        return replace(p, keep=None, length=p.padded_left) if hides_first else None
    if p.ids is not None or not (p.lowest - 1 in p.corners or p.lowest >= max(p.corners)):
        return None
    inverse = replace(p, lowest=None, highest=p.lowest - 1)
    if p.padded_left is None:
        return inverse
    return replace(inverse, keep=None, prefix=p.padded_left)  # hidden before, so visible after


def _joint(
    parts: Sequence[Recognition], found: Sequence[Pattern | None]
) -> Sequence[Pattern] | None:
    """The patterns of all batches, told so that they differ in numbers only, where they can be."""
    own = [pattern for pattern in found if pattern is not None]
    if len(own) < len(found):
        return None
    if len({_shape(pattern) for pattern in own}) == 1:
        return merge(own)
    bare = [replace(pattern, length=None, keep=None) for pattern in own]
    for pattern in {pattern.numbers: pattern for pattern in bare}.values():
        if not pattern.shows_in_sums or pattern.hidden_rows is not None:
            continue  # read from the cells of one batch
        fitted = [complete(pattern, part.view.marginals) for part in parts]
        patterns = [pattern for pattern in fitted if pattern is not None]
        if len(patterns) == len(own):
            return merge(patterns)
    return None


def _shape(p: Pattern) -> tuple[Any, ...]:
    """What must be alike for two patterns to be told as one."""
    hidden = None if p.hidden_rows is None else p.hidden_rows.tobytes()
    shape = (p.causal, p.offset is None, p.left, p.right, p.kept, p.prefix, p.dilation)
    return *shape, p.ids is None, hidden


@dataclass(frozen=True, slots=True, eq=False)
class CellCounts:
    """Visible cells of a mask too large to show cell by cell, summed over rectangles."""

    # Int64 (rows + 1,); row r of the grid holds the queries from the r-th edge up to, without, the
    # next.
    query_edges: NDArray[np.int64]
    key_edges: NDArray[np.int64]  # int64 (columns + 1,), likewise for the keys
    counts: NDArray[np.int64]  # int64 (rows, columns), visible cells in each rectangle

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Int64 (rows, columns): all cells in each rectangle."""
        return np.outer(np.diff(self.query_edges), np.diff(self.key_edges))


def cell_counts(view: HeadMask, rows: int, columns: int) -> CellCounts:
    """Count the visible cells on a grid of at most `rows` × `columns` rectangles.

    There are at least one of each, and no more than queries that are not padding, and keys.
    """
    spans = spans_of(view.mask)
    if spans is not None:
        rows, columns = spans.grid(rows, columns)
    query_edges, key_edges = _edges(view.rows, rows), _edges(view.k_len, columns)
    if not view.size:
        counts = np.zeros((len(query_edges) - 1, len(key_edges) - 1), np.int64)
    elif spans is not None:
        counts = span_counts(spans.of(view.batch), query_edges, key_edges)
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
