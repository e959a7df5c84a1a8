"""The known pattern that a mask comes closest to, for masks that are none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from attncli.attention.masks.interval_mask import SortedIntervals, row_differences
from attncli.attention.masks.patterns import Pattern, describe

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from attncli.attention.masks.interval_mask import Marginals
    from attncli.attention.masks.mask import HeadMask


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


def nearest_of(view: HeadMask) -> Nearest:
    """The nearest of the patterns that most rows and columns of the view agree with."""
    best: Nearest | None = None
    for low, pattern in sorted(_bounded(view), key=lambda pair: pair[0]):
        if best is not None and low >= best.cells:
            break
        differing = differing_cells(view, pattern)
        outcomes = [(differing, False)]
        if pattern.frame.causal or pattern.ids is not None:  # that of padding is padding again
            outcomes.append((view.size - differing, True))
        for cells, inverted in outcomes:
            if best is None or cells < best.cells:
                best = Nearest(pattern, cells, inverted)
    assert best is not None  # there is always the full mask
    return best


def differing_cells(view: HeadMask, pattern: Pattern) -> int:
    """In how many cells of real queries a view and a pattern differ."""
    expected = pattern.interval_mask(view.rows)
    if view.intervals is not None:
        return int(row_differences(view.intervals, expected).sum())
    return sum(
        int(np.count_nonzero(block != expected.cells(rows))) for rows, block in view.blocks()
    )


def _bounded(view: HeadMask) -> list[tuple[int, Pattern]]:
    """Candidates, each with a number of cells that it differs in at least, or its inverse does."""
    found: dict[str, tuple[int, Pattern]] = {}
    for pattern in _candidates(view):
        ordered = SortedIntervals(pattern.interval_mask(view.rows))
        counts, used = ordered.high - ordered.low, ordered.marginals().used
        bounds = []
        for rows, columns in (
            (view.marginals.counts, view.marginals.used),
            (view.k_len - view.marginals.counts, view.rows - view.marginals.used),
        ):
            bounds += [max(int(abs(rows - counts).sum()), int(abs(columns - used).sum()))]
        found.setdefault(describe([pattern]), (min(bounds), pattern))
    return list(found.values())


def _candidates(view: HeadMask) -> list[Pattern]:
    profile = view.marginals
    plain = Pattern(q_len=view.mask.sizes.q_len, k_len=view.k_len)
    some = np.flatnonzero(profile.counts)
    found = [plain, replace(plain, length=0)]
    found += [replace(plain, highest=corner) for corner in plain.corners]
    if len(some):
        low, high = profile.first[some] - some, profile.last[some] - some
        found.append(replace(plain, highest=_mode(high)))
        found += [
            replace(plain, lowest=lower, highest=upper)
            for upper in (_mode(high), *plain.corners)
            for lower in (_mode(low), upper - _mode(profile.counts[some]) + 1)
            if upper >= lower
        ]
        found.append(replace(plain, length=_mode(profile.last[some]) + 1))
        found += _documents(plain, profile, some)
    return [*found, *(_padded(pattern, view) for pattern in found)]


def _padded(pattern: Pattern, view: HeadMask) -> Pattern:
    """The pattern without the keys that nearly no query sees who should."""
    reach = SortedIntervals(pattern.interval_mask(view.rows)).marginals().used
    keep = 10 * view.marginals.used >= reach
    if keep.all():
        return pattern
    hidden = np.flatnonzero(~keep)
    if len(hidden) == view.k_len - hidden[0]:
        return replace(pattern, length=int(hidden[0]))
    return replace(pattern, keep=keep)


def _documents(plain: Pattern, profile: Marginals, some: NDArray[np.int64]) -> list[Pattern]:
    """Documents that begin where several rows, or the row that stands there, begin to see."""
    found = []
    for corner in plain.corners:
        begun = np.bincount(profile.first[some], minlength=plain.k_len)
        starts = begun >= 2
        own = some[profile.first[some] == some + corner]
        starts[profile.first[own]] = True
        ids = np.cumsum(starts)
        if len(np.unique(ids)) > 1:
            documents = replace(plain, position=corner, ids=ids - ids[0])
            found += [documents, replace(documents, highest=corner)]
    return found


def _mode(values: NDArray[np.int64]) -> int:
    unique, counts = np.unique(values, return_counts=True)
    return int(unique[counts.argmax()])
