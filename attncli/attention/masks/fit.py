"""The cheapest pattern whose cells are exactly those of a mask, or else the one nearest to it.

Candidates are put together from what most rows begin and end at. One that has every row's first and
last key inside its interval, and every used key used by as many rows as it lets at it, has the
mask's cells, once the unused keys are hidden: no other look at the cells is needed, but for
documents and dilation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncli.attention.masks.interval_mask import (
    Marginals,
    SortedIntervals,
    coverage,
    row_differences,
)
from attncli.attention.masks.mask import HeadMask
from attncli.attention.masks.patterns import Pattern, describe

# Rows of so many keys are counted one by one faster than cell by cell.
_LONG_ROW = 512

# The least cost of packed documents.
_DOCUMENTS = 4


@dataclass(frozen=True, slots=True, eq=False)
class Nearest:
    """A pattern that is not quite the mask's.

    Attributes:
        pattern: the pattern.
        cells: number of cells of real queries that differ from it, or from its inverse.
        inverted: whether it is the inverse that is so near.
    """

    pattern: Pattern
    cells: int
    inverted: bool

    @property
    def words(self) -> str:
        """As "nearest is … differing in k cells"."""
        inverse = "the inverse of " if self.inverted else ""
        cells = "1 cell" if self.cells == 1 else f"{self.cells} cells"
        return f"nearest is {inverse}{describe([self.pattern])}, differing in {cells}"


def fit(view: HeadMask) -> tuple[Pattern | None, Pattern | None]:
    """The cheapest pattern whose cells are those of the view, and the cheapest that options build.

    Options do not hide queries altogether. None where no pattern fits.
    """
    marginals, plain = view.marginals, _plain(view)
    if marginals.kept in (0, view.size):
        whole = plain if marginals.kept == view.size else replace(plain, length=0)
        return whole, whole
    buildable = _cheapest(view, None, hide=False)
    if int((marginals.counts > 0).sum()) in (view.rows, 1):  # one row fits too many patterns
        return buildable, buildable
    return _cheapest(view, buildable, hide=True), buildable


def nearest_of(view: HeadMask) -> Nearest:
    """The pattern, or the inverse of one, that differs from the view in the fewest cells."""
    plain, best = _plain(view), None
    bases = [plain, replace(plain, length=0)]
    if view.marginals.kept:
        usual = list(_usual(plain, view.marginals))
        bases += [*usual, *_with_first_keys(usual, view)]
    bases = [base for base in bases if base.left is None or base.left >= 0]  # as options have it
    both = dict.fromkeys(each for base in bases for each in (base, _padded(base, view)))
    for bound, pattern in sorted(
        ((_at_least(view, each), each) for each in both), key=lambda pair: pair[0]
    ):
        if best is not None and bound >= best.cells:
            break
        cells = differing_cells(view, pattern)
        found = [Nearest(pattern, cells, False)]
        if pattern.causal or pattern.ids is not None:  # that of padding is padding again
            found.append(Nearest(pattern, view.size - cells, True))
        best = min([*([best] if best else []), *found], key=lambda one: one.cells)
    assert best is not None  # there is always the full mask
    return best


def differing_cells(view: HeadMask, pattern: Pattern) -> int:
    """In how many cells of real queries a view and a pattern differ."""
    expected = pattern.interval_mask(view.rows)
    if view.intervals is not None:
        return int(row_differences(view.intervals, expected).sum())
    parts = [SortedIntervals(part) for part in expected.parts]
    if view.k_len >= _LONG_ROW and all(part.in_order for part in parts):
        common = sum(
            int(np.count_nonzero(row[low:high]))
            for rows, block in view.blocks()
            for part in parts
            for row, low, high in zip(
                block, part.low[rows].tolist(), part.high[rows].tolist(), strict=True
            )
        )
        return view.marginals.kept + expected.marginals().kept - 2 * common
    return sum(
        int(np.count_nonzero(block != expected.cells(rows))) for rows, block in view.blocks()
    )


def complete(pattern: Pattern, marginals: Marginals, hide: bool = False) -> Pattern | None:
    """The pattern with the padding that makes its cells those of the mask; None if none does.

    That a query sees keys of its own document alone, every so many-th, or the first ones beside
    its window, is taken for granted. Queries that see nothing may be hidden altogether, if asked.
    """
    found, some = pattern.interval_mask(len(marginals.counts)), marginals.counts > 0
    if hide:
        found = replace(found, stop=np.where(some, found.stop, 0))
    first = found.first if found.kept is None else 0
    if (some & ((marginals.first < first) | (marginals.last >= found.stop))).any():
        return None
    reach, seen = found.marginals().used, marginals.used > 0
    if (seen & (marginals.used != reach)).any():
        return None
    padded = _with_padding(pattern, seen, ~seen & (reach > 0))
    if not hide:
        return padded
    shown = padded.interval_mask(len(marginals.counts)).marginals()
    hidden = np.flatnonzero(~some & (shown.counts > 0))
    return replace(padded, hidden_rows=hidden) if len(hidden) else padded


def _plain(view: HeadMask) -> Pattern:
    return Pattern(q_len=view.mask.sizes.q_len, k_len=view.k_len)


def _cheapest(view: HeadMask, best: Pattern | None, *, hide: bool) -> Pattern | None:
    """The cheapest candidate that is the view, if cheaper than the best so far."""
    marginals, plain = view.marginals, _plain(view)
    bounds = list(_bounds(plain, marginals))
    best = _cheaper(bounds if marginals.is_interval_mask else (), view, best, hide)
    if best is None:
        guesses = (*_dilated(bounds, marginals), *_with_first_keys(bounds, view))
        best = _cheaper(guesses, view, best, hide)
    if best is not None and best.cost <= _DOCUMENTS:
        return best
    highest = (bound.highest for bound in bounds if bound.highest is not None)
    for position in dict.fromkeys([*plain.corners, *highest]):
        before = best
        for ids in _documents(marginals, position):
            documents = replace(plain, position=position, ids=ids)
            best = _cheaper(_within(documents, bounds, marginals), view, best, hide)
        if best is not before:
            break  # the likeliest positions come first
    return best


def _cheaper(
    candidates: Iterable[Pattern], view: HeadMask, best: Pattern | None, hide: bool
) -> Pattern | None:
    for candidate in sorted(candidates, key=lambda pattern: pattern.cost):
        if best is not None and candidate.cost >= best.cost:
            break  # padding and hidden queries only add to it
        found = complete(candidate, view.marginals, hide)
        if found is None or (best is not None and found.cost >= best.cost):
            continue
        if found.shows_in_sums or differing_cells(view, found) == 0:
            best = found
    return best


def _bounds(plain: Pattern, marginals: Marginals) -> Iterator[Pattern]:
    """Upper bounds × lower bounds × prefixes that many rows suggest."""
    rows = np.flatnonzero(marginals.counts)
    first, last = marginals.first[rows], marginals.last[rows]
    lows = [None, *_common(first - rows)]
    for high in dict.fromkeys([None, *plain.corners, *_common(last - rows)]):
        beyond = last[:0] if high is None else last[last > rows + high]
        prefixes = [int(beyond.max()) + 1] if len(beyond) else []
        for low, prefix in product(dict.fromkeys(lows), [None, *prefixes]):
            if low is None or high is None or low <= high:
                yield replace(plain, lowest=low, highest=high, prefix=prefix)


def _common(diagonals: NDArray[np.int64]) -> list[int]:
    """The most frequent diagonal and the outermost ones."""
    values, counts = np.unique(diagonals, return_counts=True)
    return [int(values[counts.argmax()]), int(values[0]), int(values[-1])]


def _dilated(bounds: list[Pattern], marginals: Marginals) -> Iterator[Pattern]:
    """Windows of which every so many-th key is seen, as far apart as most rows say."""
    rows = np.flatnonzero(marginals.counts > 1)
    if not len(rows):
        return
    spread = (marginals.last - marginals.first)[rows] / (marginals.counts[rows] - 1)
    step = _common(spread.astype(np.int64))[0]
    if step < 2:
        return
    apart = int(marginals.first[rows[0]] - rows[0])
    for bound in bounds:
        if bound.lowest is None or bound.highest is None or bound.prefix is not None:
            continue
        likely = [*bound.corners, bound.highest, *range(bound.lowest, bound.lowest + step)]
        inside = [each for each in likely if bound.lowest <= each <= bound.highest]
        for position in [each for each in inside if (each - apart) % step == 0][:1]:
            pattern = replace(bound, position=position, dilation=step)
            if _holds(pattern, marginals):
                yield pattern


def _with_first_keys(bounds: list[Pattern], view: HeadMask) -> Iterator[Pattern]:
    """Windows beside which the first keys are seen: their sizes, as the row of most gaps says."""
    marginals = view.marginals
    gaps = np.where(
        marginals.counts > 0, marginals.last + 1 - marginals.first - marginals.counts, 0
    )
    row = int(gaps.argmax())
    if np.count_nonzero(gaps) < 2:  # one row is no window
        return
    cells = view.cells(slice(row, row + 1))[0]
    inside = np.arange(marginals.first[row], marginals.last[row] + 1)
    hidden = inside[~cells[inside]]
    for gap in (hidden, hidden[marginals.used[hidden] > 0]):  # the others may be padding
        for bound in bounds if len(gap) else ():
            kept, lowest = int(gap[0]), int(gap[-1]) + 1 - row
            if bound.lowest is None and (bound.highest is None or bound.highest >= lowest):
                yield replace(bound, lowest=lowest, kept=kept)


def _within(documents: Pattern, bounds: list[Pattern], marginals: Marginals) -> Iterator[Pattern]:
    """Packed documents, with bounds inside them."""
    assert documents.position is not None
    if not _holds(documents, marginals):
        return
    for bound in bounds:
        if bound.lowest is not None and bound.lowest > documents.position:
            continue
        if bound.highest is None or bound.highest >= documents.position:
            yield replace(bound, position=documents.position, ids=documents.ids)


def _holds(pattern: Pattern, marginals: Marginals) -> bool:
    """Whether each row sees as many keys as its document has between its first and its last."""
    found = pattern.interval_mask(len(marginals.counts))
    stop = marginals.last + 1
    first = np.minimum(marginals.first, stop)
    inside = SortedIntervals(replace(found, first=first, stop=stop, keep=marginals.used > 0))
    return bool((inside.high - inside.low == marginals.counts).all())


def _documents(marginals: Marginals, offset: int) -> Iterator[NDArray[np.int64]]:
    """Documents as runs of keys, by what the query at each key sees first, and by their starts."""
    rows, k_len = np.flatnonzero(marginals.counts), len(marginals.used)
    first, position = marginals.first[rows], rows + offset
    if position[0] < 0 or position[-1] >= k_len:
        return
    own = np.full(k_len, -1)
    own[position] = first
    reached = np.minimum(first, position), np.maximum(marginals.last[rows], position)
    runs = np.concatenate([[0], np.cumsum(coverage(*reached, k_len)[:-1] == 0)])
    begun = np.cumsum(np.bincount(first, minlength=k_len) >= 2)
    # Keys that no query sees, and at which none that sees any stands, show no document.
    free = (marginals.used == 0) & (own < 0)
    before = np.maximum.accumulate(np.where(free, -1, np.arange(k_len)))
    before = np.where(before < 0, int(np.argmin(free)), before)
    found: list[NDArray[np.int64]] = []
    for ids in (runs, np.where(own < 0, runs + k_len, own), begun):
        for each in (ids[before], ids) if free.any() else (ids,):
            numbered = _numbered(each)
            known = any(np.array_equal(numbered, one) for one in found)
            if not known and (numbered.any() or len(rows) < len(marginals.counts)):
                found.append(numbered)
                yield numbered


def _numbered(ids: NDArray[Any]) -> NDArray[np.int64]:
    """Documents numbered from 0 in the order of their first keys."""
    steps = np.diff(ids, prepend=ids[:1])
    if (steps >= 0).all():
        return np.cumsum(steps > 0)
    _, start, inverse = np.unique(ids, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(start))[inverse].astype(np.int64)


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


def _usual(plain: Pattern, marginals: Marginals) -> Iterator[Pattern]:
    """Bands and documents at the bounds and starts that most rows agree on."""
    rows = np.flatnonzero(marginals.counts)
    low, high = (_common(ends[rows] - rows)[0] for ends in (marginals.first, marginals.last))
    width = _common(marginals.counts[rows])[0]
    for highest in dict.fromkeys([None, *plain.corners, high]):
        lows = (None,) if highest is None else (None, low, highest - width + 1)
        for lowest in dict.fromkeys(lows):
            if lowest is None or highest is None or lowest <= highest:
                yield replace(plain, lowest=lowest, highest=highest)
    for corner in plain.corners:
        for ids in _documents(marginals, corner):
            documents = replace(plain, position=corner, ids=ids)
            yield from (documents, replace(documents, highest=corner))


def _at_least(view: HeadMask, pattern: Pattern) -> int:
    """In how many cells the pattern, or its inverse, differs at least, by sums of rows and keys."""
    expected, marginals = pattern.interval_mask(view.rows).marginals(), view.marginals
    pairs = (
        (marginals.counts, expected.counts, view.k_len),
        (marginals.used, expected.used, view.rows),
    )
    plain, inverse = (
        max(int(abs((length - a if inverted else a) - b).sum()) for a, b, length in pairs)
        for inverted in (False, True)
    )
    return min(plain, inverse)


def _padded(pattern: Pattern, view: HeadMask) -> Pattern:
    """The pattern without the keys that nearly no query sees who should."""
    keep = 10 * view.marginals.used >= pattern.interval_mask(view.rows).marginals().used
    return _with_padding(pattern, keep, ~keep)
