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

from attncli.attention.masks.documents import (
    SeeingRows,
    connected_labels,
    hull_labels,
    numbered_variants,
)
from attncli.attention.masks.interval_mask import Marginals, SortedIntervals
from attncli.attention.masks.patterns import Pattern

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from attncli.attention.masks.documents import Labels
    from attncli.attention.masks.mask import HeadMask

# Up to this many cells every query offset is tried for documents, beyond it the likely ones.
_ALL_OFFSETS_CELLS = 4096
_MOST_PREFIX_OFFSETS = 6
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


def fit(view: HeadMask) -> Fit:
    """Find the cheapest patterns whose cells are those of the view."""
    profile = view.marginals
    plain = Pattern(q_len=view.mask.sizes.q_len, k_len=view.k_len)
    if profile.kept == view.size:
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


def _cheapest(plain: Pattern, view: HeadMask, best: Best) -> Pattern | None:
    if view.marginals.is_interval_mask:
        best.take(_without_documents(plain, view.marginals))
    best.take(_with_documents(plain, view, hull_labels(view.marginals)))
    if best.pattern is None:
        labels = connected_labels(view)
        if labels is not None:
            best.take(_with_documents(plain, view, labels))
    return best.pattern


class Best:
    """The cheapest of the candidates that fit so far."""

    def __init__(
        self, profile: Marginals, pattern: Pattern | None = None, *, rows_may_hide: bool = False
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


def complete(pattern: Pattern, profile: Marginals, rows_may_hide: bool = False) -> Pattern | None:
    """The pattern with the padding that makes its cells those of the profile; None if none does.

    The documents of the pattern, if it has any, must have been read from the same cells: that a
    query sees keys of its own document alone is taken for granted.
    """
    structure = pattern.interval_mask(len(profile.counts))
    some = profile.counts > 0
    if rows_may_hide:
        structure = replace(structure, stop=np.where(some, structure.stop, structure.first))
    outside = (profile.first < structure.first) | (profile.last >= structure.stop)
    if (some & outside).any():
        return None
    reach = SortedIntervals(structure).marginals().used
    seen = profile.used > 0
    if (seen & (profile.used != reach)).any():
        return None
    found = _with_padding(pattern, seen, ~seen & (reach > 0))
    if not rows_may_hide:
        return found
    shown = SortedIntervals(found.interval_mask(len(profile.counts)))
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


def _edges(rows: SeeingRows, used: NDArray[np.int64], ids: NDArray[np.int64] | None) -> _Edges:
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


def _without_documents(plain: Pattern, profile: Marginals) -> list[Pattern]:
    """Bands, prefixes and plain padding, the cheapest first."""
    rows = SeeingRows.of(profile)
    edges = _edges(rows, profile.used, None)
    lows = edges.lowest_candidates(plain.corners)
    uppers = [replace(plain, highest=high) for high in edges.highest_candidates(plain.corners)]
    for high in _prefix_offsets(plain, rows):
        uppers += _prefixes(replace(plain, highest=high), rows, edges)
    found = [replace(upper, lowest=low) for upper, low in product(uppers, lows)]
    return sorted(found, key=lambda pattern: pattern.cost)


def _prefix_offsets(plain: Pattern, rows: SeeingRows) -> list[int]:
    """Upper bounds that the rows reaching beyond some key have, the most frequent ones."""
    order = np.argsort(rows.last, kind="stable")
    diagonals = (rows.last - rows.index)[order]
    most = np.maximum.accumulate(diagonals[::-1])[::-1]
    starts = np.flatnonzero(np.diff(rows.last[order], prepend=-1))
    frequent = Counter(most[starts].tolist()).most_common(_MOST_PREFIX_OFFSETS)
    return list(dict.fromkeys([*plain.corners, *(each for each, _ in frequent)]))


def _prefixes(causal: Pattern, rows: SeeingRows, edges: _Edges) -> Iterator[Pattern]:
    """Prefixes beside an upper bound, with and without a limit on how far ahead they reach."""
    assert causal.highest is not None
    beyond = rows.last[rows.last > rows.index + causal.highest]
    if len(beyond):
        wide = replace(causal, prefix=int(beyond.max()) + 1)
        yield wide
        yield replace(wide, ahead=edges.highest)


def _with_documents(plain: Pattern, view: HeadMask, labels: Labels) -> Iterator[Pattern]:
    """Packed documents with and without bands and prefixes inside them."""
    rows = SeeingRows.of(view.marginals)
    for offset in _document_offsets(plain, view, rows):
        ids = labels(rows, offset)
        if ids is None or ((ids == ids[0]).all() and len(rows.index) == view.rows):
            continue
        edges = _edges(rows, view.marginals.used, ids)
        base = replace(plain, position=offset)
        found = list(_bands_in_documents(base, rows, edges))
        for variant in numbered_variants(ids, view.marginals, rows, offset):
            yield from (replace(pattern, ids=variant) for pattern in found)


def _bands_in_documents(base: Pattern, rows: SeeingRows, edges: _Edges) -> Iterator[Pattern]:
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


def _document_offsets(plain: Pattern, view: HeadMask, rows: SeeingRows) -> list[int]:
    """Query offsets at which documents are looked for, the likely ones first."""
    highest = int((rows.last - rows.index).max())
    lowest = int((rows.first - rows.index).min())
    starts = np.flatnonzero(np.diff(rows.first, prepend=-1) > 0)
    begun = Counter((rows.first - rows.index)[starts].tolist())
    ends = np.flatnonzero(np.diff(rows.last, append=view.k_len) > 0)
    begun += Counter((rows.last - rows.index)[ends].tolist())
    likely = [each for each, _ in begun.most_common(_MOST_DOCUMENT_OFFSETS)]
    every = range(1 - view.rows, view.k_len) if view.size <= _ALL_OFFSETS_CELLS else ()
    return list(dict.fromkeys([*plain.corners, highest, lowest, *likely, *every]))
