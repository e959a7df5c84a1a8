"""The cheapest pattern that gives exactly the cells of a mask, from its rows' and columns' sums.

A candidate leaves each query an interval [l, u] of the keys of its document. If every row's first
and last visible key lie within it, and every key that is used at all is used by as many queries as
the candidate lets at it, then the cells are the candidate's without the unused keys: exact, without
another look at the cells.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from attncli.attention.patterns import Pattern
from attncli.attention.structure import Ordered, Profile, Structure, coverage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from attncli.attention.mask_view import View

# Up to this many cells every query offset is tried for documents, beyond it the likely ones.
_ALL_OFFSETS_CELLS = 4096
_MOST_PREFIX_OFFSETS = 6
_FULL_ROWS = 256
_MOST_DOCUMENT_OFFSETS = 12


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """The cheapest patterns, by `Pattern.cost`, whose cells are exactly those of a view.

    Attributes:
        pattern: the cheapest of all; None where no pattern fits.
        buildable: the cheapest that options build, that is, without queries hidden altogether.
    """

    pattern: Pattern | None
    buildable: Pattern | None


def fit(view: View) -> Fit:
    """Find the cheapest patterns whose cells are those of the view."""
    profile = view.profile
    plain = Pattern(q_len=view.mask.sizes.q_len, k_len=view.k_len)
    if profile.kept == view.cells:
        return Fit(plain, plain)
    if profile.kept == 0:
        nothing = replace(plain, length=0)
        return Fit(nothing, nothing)
    buildable = _cheapest(plain, view, Best(profile))
    seeing = int((profile.counts > 0).sum())
    if seeing == view.rows or seeing == 1:  # one row alone fits too many patterns
        return Fit(buildable, buildable)
    hiding = _cheapest(plain, view, Best(profile, buildable, rows_may_hide=True))
    return Fit(hiding, buildable)


def _cheapest(plain: Pattern, view: View, best: Best) -> Pattern | None:
    if view.profile.is_structured:
        best.take(_without_documents(plain, view.profile))
    best.take(_with_documents(plain, view, _hull_labels(view.profile)))
    if best.pattern is None:
        labels = _connected_labels(view)
        if labels is not None:
            best.take(_with_documents(plain, view, labels))
    return best.pattern


class Best:
    """The cheapest of the candidates that fit so far."""

    def __init__(
        self, profile: Profile, pattern: Pattern | None = None, *, rows_may_hide: bool = False
    ) -> None:
        self.pattern = pattern
        self._profile = profile
        self._rows_may_hide = rows_may_hide

    def take(self, candidates: Iterable[Pattern]) -> None:
        """Try candidates, of which one as cheap as an earlier one loses."""
        for candidate in candidates:
            if self.pattern is not None and candidate.cost >= self.pattern.cost:
                continue  # padding and hidden queries only add to it
            found = complete(candidate, self._profile, self._rows_may_hide)
            if found is not None and (self.pattern is None or found.cost < self.pattern.cost):
                self.pattern = found


def complete(pattern: Pattern, profile: Profile, rows_may_hide: bool = False) -> Pattern | None:
    """The pattern with the padding that makes its cells those of the profile; None if none does.

    The documents of the pattern, if it has any, must have been read from the same cells: that a
    query sees keys of its own document alone is taken for granted.
    """
    structure = pattern.structure(len(profile.counts))
    some = profile.counts > 0
    if rows_may_hide:
        structure = replace(structure, stop=np.where(some, structure.stop, structure.first))
    outside = (profile.first < structure.first) | (profile.last >= structure.stop)
    if (some & outside).any():
        return None
    reach = Ordered(structure).profile().used
    seen = profile.used > 0
    if (seen & (profile.used != reach)).any():
        return None
    found = _with_padding(pattern, seen, ~seen & (reach > 0))
    if not rows_may_hide:
        return found
    shown = Ordered(found.structure(len(profile.counts)))
    hidden = np.flatnonzero(~some & (shown.high > shown.low))
    return replace(found, hidden_rows=hidden) if len(hidden) else found


def _with_padding(pattern: Pattern, seen: NDArray[np.bool_], hide: NDArray[np.bool_]) -> Pattern:
    """The pattern with these keys hidden; keys that nobody could see go where words are fewest."""
    if not hide.any():
        return pattern
    used, hidden = np.flatnonzero(seen), np.flatnonzero(hide)
    if not len(used) or hidden[0] > used[-1]:
        return replace(pattern, length=int(hidden[0]))
    if hidden[-1] < used[0]:
        return replace(pattern, keep=np.arange(len(hide)) > hidden[-1])
    return replace(pattern, keep=~hide)


@dataclass(frozen=True, slots=True)
class _Edges:
    """Diagonals on which the visible cells of the rows begin and end.

    Attributes:
        lowest: the smallest diagonal that holds a first key: a lower bound may be this or less …
        above: … and must be more than this; None where nothing forces a lower bound.
        highest: the largest diagonal that holds a last key: an upper bound may be this or more …
        below: … and must be less than this; None where nothing forces an upper bound.
    """

    lowest: int
    above: int | None
    highest: int
    below: int | None

    def lowest_candidates(self, marks: Iterable[int]) -> list[int | None]:
        least = [self.lowest, *(min(mark, self.lowest) for mark in marks)]
        fitting = [each for each in least if self.above is None or each > self.above]
        return [*([None] if self.above is None else []), *dict.fromkeys(fitting)]

    def highest_candidates(self, marks: Iterable[int]) -> list[int | None]:
        most = [*(mark for mark in marks if mark >= self.highest), self.highest]
        fitting = [each for each in most if self.below is None or each < self.below]
        return [*([None] if self.below is None else []), *dict.fromkeys(fitting)]


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The queries that see a key: their indices, first and last keys, each int64 (queries,)."""

    index: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]

    @classmethod
    def of(cls, profile: Profile) -> _Rows:
        index = np.flatnonzero(profile.counts)
        return cls(index, profile.first[index], profile.last[index])


def _edges(rows: _Rows, used: NDArray[np.int64], ids: NDArray[np.int64] | None) -> _Edges:
    keys = np.flatnonzero(used)
    if ids is not None:
        keys = keys[np.argsort(ids[keys], kind="stable")]
    place = np.zeros(len(used), np.int64)
    place[keys] = np.arange(len(keys))
    before, after = place[rows.first] - 1, place[rows.last] + 1
    has_before, has_after = before >= 0, after < len(keys)
    if ids is not None:  # a neighbour in another document forces nothing
        has_before[has_before] = (ids[keys[before]] == ids[rows.first])[has_before]
        clipped = np.minimum(after, len(keys) - 1)
        has_after &= ids[keys[clipped]] == ids[rows.last]
    above = keys[before[has_before]] - rows.index[has_before]
    below = keys[after[has_after]] - rows.index[has_after]
    return _Edges(
        int((rows.first - rows.index).min()),
        int(above.max()) if len(above) else None,
        int((rows.last - rows.index).max()),
        int(below.min()) if len(below) else None,
    )


def _without_documents(plain: Pattern, profile: Profile) -> list[Pattern]:
    """Bands, prefixes and plain padding, the cheapest first."""
    rows = _Rows.of(profile)
    edges = _edges(rows, profile.used, None)
    lows = edges.lowest_candidates(plain.corners)
    uppers = [replace(plain, highest=high) for high in edges.highest_candidates(plain.corners)]
    for high in _prefix_offsets(plain, rows):
        uppers += _prefixes(replace(plain, highest=high), rows, edges)
    found = [replace(upper, lowest=low) for upper, low in product(uppers, lows)]
    return sorted(found, key=lambda pattern: pattern.cost)


def _prefix_offsets(plain: Pattern, rows: _Rows) -> list[int]:
    """Upper bounds that the rows reaching beyond some key have, the most frequent ones."""
    order = np.argsort(rows.last, kind="stable")
    diagonals = (rows.last - rows.index)[order]
    most = np.maximum.accumulate(diagonals[::-1])[::-1]
    starts = np.flatnonzero(np.diff(rows.last[order], prepend=-1))
    frequent = Counter(most[starts].tolist()).most_common(_MOST_PREFIX_OFFSETS)
    return list(dict.fromkeys([*plain.corners, *(each for each, _ in frequent)]))


def _prefixes(causal: Pattern, rows: _Rows, edges: _Edges) -> Iterator[Pattern]:
    """Prefixes beside an upper bound, with and without a limit on how far ahead they reach."""
    assert causal.highest is not None
    beyond = rows.last[rows.last > rows.index + causal.highest]
    if len(beyond):
        wide = replace(causal, prefix=int(beyond.max()) + 1)
        yield wide
        yield replace(wide, ahead=edges.highest)


def _with_documents(plain: Pattern, view: View, labels: _Labels) -> Iterator[Pattern]:
    """Packed documents with and without bands and prefixes inside them."""
    rows = _Rows.of(view.profile)
    for offset in _document_offsets(plain, view, rows):
        ids = labels(rows, offset)
        if ids is None or ((ids == ids[0]).all() and len(rows.index) == view.rows):
            continue
        edges = _edges(rows, view.profile.used, ids)
        base = replace(plain, position=offset)
        found = list(_bands_in_documents(base, rows, edges))
        for variant in _named(ids, view.profile, rows, offset):
            yield from (replace(pattern, ids=variant) for pattern in found)


def _bands_in_documents(base: Pattern, rows: _Rows, edges: _Edges) -> Iterator[Pattern]:
    offset = base.position
    assert offset is not None
    lows = [low for low in edges.lowest_candidates([offset]) if low is None or low <= offset]
    causal = replace(base, highest=offset)
    uppers = [
        replace(base, highest=high)
        for high in edges.highest_candidates([offset])
        if high is None or high >= offset
    ]
    for upper in (*uppers, *_prefixes(causal, rows, edges)):
        yield from (replace(upper, lowest=low) for low in lows)


def _document_offsets(plain: Pattern, view: View, rows: _Rows) -> list[int]:
    """Query offsets at which documents are looked for, the likely ones first."""
    highest = int((rows.last - rows.index).max())
    lowest = int((rows.first - rows.index).min())
    starts = np.flatnonzero(np.diff(rows.first, prepend=-1) > 0)
    begun = Counter((rows.first - rows.index)[starts].tolist())
    ends = np.flatnonzero(np.diff(rows.last, append=view.k_len) > 0)
    begun += Counter((rows.last - rows.index)[ends].tolist())
    likely = [each for each, _ in begun.most_common(_MOST_DOCUMENT_OFFSETS)]
    every = range(1 - view.rows, view.k_len) if view.cells <= _ALL_OFFSETS_CELLS else ()
    return list(dict.fromkeys([*plain.corners, highest, lowest, *likely, *every]))


if TYPE_CHECKING:
    # Documents of the keys, int64 (S_k,), for a query offset; None where none is possible.
    _Labels = Callable[[_Rows, int], NDArray[np.int64] | None]


def _hull_labels(profile: Profile) -> _Labels:
    """Documents that are runs of keys: as short as the rows, with their own positions, allow."""
    k_len = len(profile.used)

    def labels(rows: _Rows, offset: int) -> NDArray[np.int64] | None:
        position = rows.index + offset
        if position[0] < 0 or position[-1] >= k_len:
            return None
        low, high = np.minimum(rows.first, position), np.maximum(rows.last, position)
        crossed = coverage(low, high, k_len)  # by how many rows, between each key and the next
        return np.concatenate([[0], np.cumsum(crossed[:-1] == 0)])

    return labels


def _connected_labels(view: View) -> _Labels | None:
    """Documents of any shape: keys that some query sees together; None where all are connected."""
    key_labels = _connected_by_structure(view.known) if view.known else _connected_by_cells(view)
    if key_labels is None:
        return None

    def labels(rows: _Rows, offset: int) -> NDArray[np.int64] | None:
        position = rows.index + offset
        if position[0] < 0 or position[-1] >= view.k_len:
            return None
        pairs = np.stack([key_labels[position], key_labels[rows.first]])
        pairs = np.unique(pairs[:, pairs[0] != pairs[1]], axis=1)
        root = np.arange(view.k_len)
        for one, other in pairs.T.tolist():
            _join(root, one, other)
        while (root != root[root]).any():
            root = root[root]
        found: NDArray[np.int64] = root[key_labels]
        return found

    return labels


def _connected_by_structure(structure: Structure) -> NDArray[np.int64]:
    ordered = Ordered(structure)
    some = ordered.high > ordered.low
    crossed = coverage(ordered.low[some], ordered.high[some] - 1, len(ordered.keys))
    labels = np.arange(structure.k_len)
    if len(ordered.keys):
        run = np.concatenate([[0], np.cumsum(crossed[:-1] == 0)])
        starts = np.flatnonzero(np.diff(run, prepend=-1))
        labels[ordered.keys] = ordered.keys[starts][run]
    return labels


def _connected_by_cells(view: View) -> NDArray[np.int64] | None:
    labels = np.arange(view.k_len)
    apart = int((view.profile.used > 0).sum())
    for row in _rows_fullest_first(view):
        seen = labels[row]
        if len(seen) and (seen != seen[0]).any():
            joined = np.zeros(view.k_len, np.bool_)
            joined[seen] = True
            labels = np.where(joined[labels], joined.argmax(), labels)
            apart -= int(joined.sum()) - 1
            if apart == 1:
                return None
    return labels


def _rows_fullest_first(view: View) -> Iterator[NDArray[np.bool_]]:
    """Every row, bool (S_k,), after some that connect much at once: most masks end with those."""
    counts = view.profile.counts
    peaks = np.flatnonzero(counts > np.append(counts[1:], 0))
    for row in peaks[np.argsort(-counts[peaks], kind="stable")][:_FULL_ROWS].tolist():
        yield view.visible(slice(row, row + 1))[0]
    for _, block in view.blocks():
        yield from block


def _root(root: NDArray[np.int64], each: int) -> int:
    while root[each] != each:
        root[each] = root[root[each]]
        each = int(root[each])
    return each


def _join(root: NDArray[np.int64], one: int, other: int) -> None:
    one, other = _root(root, one), _root(root, other)
    root[max(one, other)] = min(one, other)


def _named(
    ids: NDArray[np.int64], profile: Profile, rows: _Rows, offset: int
) -> Iterator[NDArray[np.int64]]:
    """The documents numbered from 0, with the keys that show no document put into one in turn.

    Such keys, which no query sees and at which no seeing query stands, go with the key before
    them, or with each other, or stay alone: the words are fewest in this order.
    """
    free = profile.used == 0
    free[rows.index + offset] = False
    place = np.arange(len(ids))
    if free.any() and not free.all():
        shown = np.where(free, -1, place)
        before = np.maximum.accumulate(shown)
        yield _numbered(ids[np.where(before < 0, int(shown.argmax()), before)])
        starts = free & ~np.concatenate([[False], free[:-1]])
        run = np.maximum.accumulate(np.where(starts, place, -1))
        yield _numbered(np.where(free, len(ids) + run, ids))
    yield _numbered(ids)


def _numbered(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse].astype(np.int64)
