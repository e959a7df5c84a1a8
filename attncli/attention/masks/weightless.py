"""Which keys a float mask hides without saying −∞: decided here, for every command.

Who writes −10,000 or finfo.min into a mask means to hide, and the softmax gives such a key a weight
of exactly 0 wherever its row has another. It counts as hidden there. A row of nothing but such keys
stays as the softmax has it: to move all logits of a row by one number changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncli.attention.masks.mask import Mask, drop_page_cache, head_masks
from attncli.attention.masks.rules import AdditiveMask
from attncli.errors import DataError

# ln of half the smallest number above 0, by bytes of the arithmetic: e^x of less is exactly 0.
UNDERFLOW = {4: -103.972, 8: -745.133}
# Additive values at or below this are meant as "minus infinity": −10,000 is the smallest such
# habit in use, and no honest bias comes near it.
MINUS_A_LOT = -1e4

# Values further apart are not of one kind: e^−30 of a weight is lost in any sum of them.
_GAP = 30.0
_MOST_RANGES = 16
_BLOCK_CELLS = 1 << 22
_WHERE = "«attn_mask»"

Reach = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class MaskValues:
    """What the numbers of a float mask are.

    Attributes:
        ranges: (highest, lowest) of the finite ones, in ranges with gaps between, from the top.
        lowest: the least of all, −inf included; +inf of none.
        only_zero_one: whether there are 0 and 1 alone, at least one 1.
    """

    ranges: tuple[tuple[float, float], ...]
    lowest: float
    only_zero_one: bool


def blocks_of(mask: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """The rank-4 mask in blocks of whole rows, (rows, S_k), few enough to hold at once."""
    for batch in mask:
        for head in batch:
            step = max(1, _BLOCK_CELLS // max(1, head.shape[-1]))
            for start in range(0, len(head), step):
                block = head[start : start + step]
                yield block
                drop_page_cache(block)


def read_values(mask: NDArray[Any]) -> MaskValues:
    """Look at every number of a float mask once, float (B | 1, H | 1, S_q | 1, S_k | 1).

    Raises:
        DataError: NaN or +inf among them.
    """
    ranges: list[tuple[float, float]] = []
    lowest, zero_or_one, any_one = np.inf, True, False
    for block in blocks_of(mask):
        if not block.size:
            continue
        high, low = float(block.max()), float(block.min())
        if not high < np.inf:  # NaN outlives a maximum
            raise DataError(_WHERE, "expected finite values or -inf, got NaN or +inf")
        lowest = min(lowest, low)
        if zero_or_one:
            zero_or_one = low >= 0 and high <= 1 and bool(((block == 0) | (block == 1)).all())
            any_one = any_one or high == 1
        if low == -np.inf:
            low = float(np.where(block == -np.inf, block.dtype.type(high), block).min())
        if low >= high - _GAP:  # one range, or none of finite numbers; most masks are done here
            ranges = _merged([*ranges, (high, low)]) if high > -np.inf else ranges
        else:
            ranges = _merged([*ranges, *_ranges(block[block > -np.inf])])
    return MaskValues(tuple(ranges), lowest, zero_or_one and any_one)


def rounded_down(value: Any, dtype: Any) -> Any:
    """The largest number of a dtype, as such, that is no larger; of a number or of an array."""
    with np.errstate(over="ignore"):
        near = np.asarray(value, np.float64).astype(dtype)
        return np.where(near > value, np.nextafter(near, dtype.type(-np.inf)), near)[()]


def _ranges(values: NDArray[Any]) -> Iterator[tuple[float, float]]:
    """(highest, lowest) of finite values, cut from the top; what is left in the end is one."""
    for _ in range(_MOST_RANGES):
        if not values.size:
            return
        high = float(values.max())
        near = values >= rounded_down(high - _GAP, values.dtype)
        yield high, float(values[near].min())
        values = values[~near]
    if values.size:
        yield float(values.max()), float(values.min())


def _merged(ranges: list[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for high, low in sorted(ranges, reverse=True):
        if found and (high >= found[-1][1] - _GAP or len(found) == _MOST_RANGES):
            found[-1] = found[-1][0], min(low, found[-1][1])
        else:
            found.append((high, low))
    return found


def hide_weightless(mask: Mask, underflow: float, reach: Reach) -> tuple[Mask, list[str]]:
    """Count as hidden what a mask file's numbers make weightless beside a row's other keys.

    Args:
        mask: on the host.
        underflow: of `UNDERFLOW`, that of the arithmetic.
        reach: by how much the logits of a row may differ before the file's numbers are added, at
            most; asked with what would not matter.

    Returns:
        The mask, and what is a matter of opinion about it.
    """
    file, limit = mask.file, underflow
    if not isinstance(file, AdditiveMask) or not file.ranges:
        return mask, []
    ranges = file.ranges
    highest, lowest = ranges[0][0], ranges[-1][1]
    if lowest - highest < underflow:
        gaps = [below[0] - above[1] for above, below in pairwise(ranges)]
        clear = [gap for gap in gaps if gap < underflow]
        limit -= reach(underflow - max(clear, default=underflow))
    found = _AsTheyStand(mask)
    if lowest - highest < limit:
        level = _level(ranges, limit)
        found = _by_row(mask, highest, limit) if level is None else _by_level(mask, level)
    if highest <= MINUS_A_LOT:
        rows = sum(int((view.marginals.counts > 0).sum()) for _, _, view in head_masks(mask))
        found = replace(found, rows=rows, highest=highest)
    mask, said = found.mask, [*_of_opinion(ranges, limit), *found.warnings]
    if not found.rows:
        return mask, said
    assert isinstance(mask.file, AdditiveMask)  # as before
    return mask.with_file(replace(mask.file, spared=found.highest)), said


@dataclass(frozen=True, slots=True)
class _AsTheyStand:
    """Rows that see nothing but what is meant to hide.

    Attributes:
        mask: the mask, with the others decided.
        rows: number of such rows, heads that are alike counted once.
        highest: of the numbers in them.
    """

    mask: Mask
    rows: int = 0
    highest: float = -np.inf

    @property
    def warnings(self) -> Iterator[str]:
        if self.rows:
            rows = "1 row holds" if self.rows == 1 else f"{self.rows} rows hold"
            line = _line(self.highest)
            yield (
                f"{_WHERE}: {rows} nothing but values of {line} or less; they are added as they "
                "stand, which makes a row uniform or a plain softmax, never empty; "
                f"«hide_below={line}» makes it empty"
            )


def _level(ranges: Sequence[tuple[float, float]], limit: float) -> float | None:
    """The highest number that hides beside any of those above it; None where rows differ in that.

    None of those above it hides another, and none below.
    """
    for above, below in pairwise(ranges):
        alike = above[1] - ranges[0][0] >= limit and ranges[-1][1] - below[0] >= limit
        if alike and below[0] - above[1] < limit:
            return below[0]
    return None


def _by_level(mask: Mask, level: float) -> _AsTheyStand:
    """Every row but those that see nothing above the level hides what is not above it."""
    hiding, limits, hopeless = mask.hiding_below(level), None, 0
    for batch, head, view in head_masks(hiding):
        none_left = view.marginals.counts == 0
        if none_left.any():
            none_left &= mask.head(batch or 0, head or 0).marginals.counts > 0
            hopeless += int(none_left.sum())
        if none_left.any():
            limits = _limits(mask, level) if limits is None else limits
            limits[batch or 0, head or 0, : view.rows, 0][none_left] = -np.inf
    return _AsTheyStand(hiding if limits is None else mask.hiding_below(limits), hopeless, level)


def _by_row(mask: Mask, highest: float, limit: float) -> _AsTheyStand:
    """Every row hides what is further below the highest number that it sees."""
    limits, hopeless, highest_of_these = _limits(mask, -np.inf), 0, -np.inf
    for batch, head, view in head_masks(mask):
        for rows, seen in view.blocks():
            added = np.where(seen, view.additive(rows), -np.inf).astype(np.float64)
            top = added.max(-1, initial=-np.inf)  # (rows,)
            # What is as low as finfo.min does not change by so little, but is not below itself.
            with np.errstate(over="ignore"):
                under = np.minimum(top + limit, np.nextafter(top, -np.inf))
            limits[batch or 0, head or 0, rows, 0] = rounded_down(under, limits.dtype)
            low = (top < highest + limit) & (top > -np.inf)
            hopeless += int(low.sum())
            highest_of_these = max(highest_of_these, float(top[low].max(initial=-np.inf)))
    return _AsTheyStand(mask.hiding_below(limits), hopeless, highest_of_these)


def _limits(mask: Mask, value: float) -> NDArray[Any]:
    """(B | 1, H | 1, S_q, 1), in the dtype of the file."""
    batch, heads = (
        length if mask.differs(axis) else 1
        for axis, length in enumerate((mask.sizes.batch, mask.sizes.heads))
    )
    dtype: Any = None if mask.added is None else mask.added.dtype
    limits: NDArray[Any] = np.full((batch, heads, mask.sizes.q_len, 1), value, dtype)
    return limits


def _of_opinion(ranges: Sequence[tuple[float, float]], limit: float) -> Iterator[str]:
    """Numbers that may be meant to hide, but are not so low that they do."""
    for above, below in pairwise(ranges):
        if below[0] - above[1] >= limit:
            line = _line(below[0])
            yield (
                f"{_WHERE}: values of {line} or less are added as they stand, and their keys count "
                f"as visible; «hide_below={line}» counts them as hidden"
            )
            return


def _line(value: float) -> str:
    """A number in few digits, from which it does not stand out above."""
    short = f"{value:g}"
    return short if float(short) >= value else repr(value)
