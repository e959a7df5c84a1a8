"""From options to a mask: what comes from outside is checked, and becomes the rules that it means.

Every positional rule (causal, windows, prefix) leaves each query one interval of keys, so together
they are two integers per query. Padding files, segments and mask files stay what they are, but that
it is decided here, for every command, which keys a float mask hides without saying −∞: who writes
−10,000 or finfo.min into a mask means to hide, and the softmax gives such a key a weight of exactly
0 wherever its row has another. It counts as hidden there. A row of nothing but such keys stays as
the softmax has it: to move all logits of a row by one number changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncli.attention.masks.interval_mask import Marginals
from attncli.attention.masks.mask import BLOCK_CELLS, Mask, drop_page_cache, head_masks
from attncli.attention.masks.positions import (
    Placement,
    RealCells,
    place,
    read_documents,
    segment_doubts,
)
from attncli.attention.masks.rules import (
    AdditiveMask,
    BooleanMask,
    Dilation,
    KeyInterval,
    KeyPadding,
    Rule,
    Segments,
)
from attncli.attention.options import AttentionOptions, MaskTrue
from attncli.attention.sizes import FLOAT64_CELLS, Sizes
from attncli.errors import DataError, UsageError

# A window this wide is no window, and its distance to any position fits 64 bits.
_WIDEST = 2**62

_WHERE = "«attn_mask»"
# ln of half the smallest number above 0, by bytes of the arithmetic: e^x of less is exactly 0.
UNDERFLOW = {4: -103.972, 8: -745.133}
# Additive values at or below this are meant as "minus infinity": −10,000 is the smallest such
# habit in use, and no honest bias comes near it.
MINUS_A_LOT = -1e4

# Values further apart are not of one kind: e^−30 of a weight is lost in any sum of them.
_GAP = 30.0
_MOST_RANGES = 16

Reach = Callable[[float], float]


def build_mask(
    options: AttentionOptions,
    sizes: Sizes,
    placement: Placement | None = None,
    *,
    itemsize: int | None = None,
    reach: Reach = lambda needed: 0.0,
) -> Mask:
    """Combine every visibility rule of the options for tensors of the given sizes.

    Args:
        options: what shapes the mask, and more.
        sizes: of the tensors.
        placement: where the queries stand; None for where the options say.
        itemsize: bytes of a number of the arithmetic, which decides which numbers of a float mask
            leave a key no weight at all; None for the arithmetic that these sizes usually have.
        reach: by how much the logits of a row may differ before a float mask is added, at most;
            asked with what would not matter.

    Raises:
        UsageError: an option does not fit the sizes, or needs a query offset that is not given.
        DataError: a mask or padding array has the wrong shape or values.
    """
    real, warnings = _real_cells(options, sizes)
    documents, said = read_documents(options, sizes)
    warnings += said
    if placement is None:
        placement, said = place(options, sizes, real, documents)
        warnings += said
    if options.prefix and options.left_window is not None and options.sink_window is None:
        warnings.append(
            "«prefix»: the window hides keys of the prefix too; «sink_window="
            f"{options.prefix}» in its place keeps the first keys in view (StreamingLLM)"
        )
    positions = None if placement is None else placement.positions(sizes.q_len)
    rules = [*_positional(options, sizes, placement)]
    if options.dilation is not None:
        assert positions is not None  # `place` has refused the other case
        rules.append(Dilation(positions, options.dilation))
    if options.key_lengths is not None or options.key_padding is not None:
        rules.append(KeyPadding(real.keys))
    if documents is not None:
        rules.append(Segments(documents.keys, documents.of_queries(positions)))
        warnings += segment_doubts(options.segments)
    if options.attn_mask is not None:
        file, said = _read_mask(options, sizes)
        rules.append(file)
        warnings = [*said, *warnings]
    mask = Mask(
        sizes=sizes,
        rules=tuple(rules),
        shift=None if placement is None else placement.shift,
        query_lengths=real.query_lengths,
        slopes=_slopes(options, sizes),
    )
    shape = None if options.attn_mask is None else options.attn_mask.shape
    if sizes.q_len == sizes.batch > 1 and shape == (sizes.batch, sizes.k_len):  # B or S_q?
        files = tuple(rule for rule in rules if rule is mask.file)
        warnings += padding_doubts(replace(mask, rules=files).head(0, 0).marginals, options)
    if mask.added is not None and options.hide_below is None:
        size = itemsize or (8 if sizes.cells <= FLOAT64_CELLS else 4)
        mask, said = _hide_weightless(mask, UNDERFLOW[size], reach)
        warnings += said
    return replace(mask, warnings=tuple(warnings))


def placement_of(options: AttentionOptions, sizes: Sizes) -> Placement | None:
    """Where the queries stand; None where positions are not defined."""
    real, _ = _real_cells(options, sizes)
    return place(options, sizes, real, read_documents(options, sizes)[0])[0]


def _real_cells(options: AttentionOptions, sizes: Sizes) -> tuple[RealCells, list[str]]:
    """What is padding by lengths and by the padding file, and what was assumed."""
    lengths = _per_batch(options.key_lengths, "key_lengths", sizes.batch, sizes.k_len)
    queries = _per_batch(options.query_lengths, "query_lengths", sizes.batch, sizes.q_len)
    keys = np.arange(sizes.k_len) < lengths[:, None]  # (B | 1, S_k)
    if options.key_padding is None:
        return RealCells(keys, queries), []
    keep, said = _key_padding(options.key_padding, sizes)
    return RealCells(keys & keep, queries), said


def _per_batch(
    lengths: tuple[int, ...] | None, name: str, batch: int, limit: int
) -> NDArray[np.int64]:
    """Lengths as int64 (B | 1,); the whole axis where none are given."""
    if lengths is None:
        return np.array([limit], np.int64)
    if len(lengths) not in (1, batch):
        raise UsageError(
            f"«{name}»", f"expected one length or one per batch (B={batch}), got {len(lengths)}"
        )
    if max(lengths, default=0) > limit:
        got = max(lengths)
        raise UsageError(f"«{name}»", f"expected at most {limit}, the axis' length, got {got}")
    return np.array(lengths, np.int64)


def _slopes(options: AttentionOptions, sizes: Sizes) -> NDArray[np.float64] | None:
    """Slopes of ALiBi, float64 (H,): those given, or those of its paper; None without it."""
    if options.alibi_slopes is None:
        return alibi_slopes(sizes.heads) if options.alibi else None
    given, heads = options.alibi_slopes, sizes.heads
    if given.shape not in ((heads,), (1, heads)):
        raise UsageError(
            "«alibi_slopes»",
            f"expected one slope per head (H={heads}), got {given.shape}",
            "slopes per batch: add −slope·|p − j| as a float «attn_mask»" if given.ndim > 1 else "",
        )
    if not np.isfinite(given).all():
        raise UsageError("«alibi_slopes»", "expected finite slopes, got NaN or inf")
    return given.reshape(heads)


def alibi_slopes(heads: int) -> NDArray[np.float64]:
    """Slopes mₕ of ALiBi, float64 (H,).

    For a power of two n they are 2^(−8h/n), h = 1…n. Otherwise the slopes of the power of two
    below come first, then every other slope of the power of two above.

    Source: Press, Smith and Lewis, "Train Short, Test Long" (2022), reference implementation.
    """
    whole = 1 << (heads.bit_length() - 1) if heads else 0
    below, above = (np.exp2(-8.0 * np.arange(1, n + 1) / max(n, 1)) for n in (whole, 2 * whole))
    return np.concatenate([below, above[::2][: heads - whole]])


def _positional(
    options: AttentionOptions, sizes: Sizes, placement: Placement | None
) -> Iterator[Rule]:
    """The keys [first, stop) that causality, windows and prefix leave each query."""
    if not options.causal and options.left_window is None and options.right_window is None:
        return
    assert placement is not None  # `place` has refused the other case
    position = placement.positions(sizes.q_len)  # (B | 1, S_q)
    first, stop = np.zeros_like(position), np.full_like(position, sizes.k_len)
    if options.causal:
        stop = position + 1
        if options.prefix is not None:
            stop = np.maximum(stop, placement.start + min(options.prefix, sizes.k_len))
    if options.right_window is not None:
        stop = np.minimum(stop, position + min(options.right_window, _WIDEST) + 1)
    if options.left_window is not None:
        first = position - min(options.left_window, _WIDEST)
    first, kept = np.clip(first, 0, sizes.k_len), None
    if options.sink_window:
        kept = np.zeros_like(position) + placement.start + min(options.sink_window, sizes.k_len)
        first = np.where(first <= kept, 0, first)  # no key is left out between both
        kept = kept if first.any() else None
    yield KeyInterval(first, np.maximum(first, np.clip(stop, 0, sizes.k_len)), kept)


def _read_mask(
    options: AttentionOptions, sizes: Sizes
) -> tuple[BooleanMask | AdditiveMask, list[str]]:
    """The rule that the attention mask of the options is, and what was assumed or looks wrong."""
    assert options.attn_mask is not None  # whoever asks has one
    mask, shown = as_rank_4(options.attn_mask, sizes), options.mask_true is MaskTrue.KEEP
    if mask.dtype.kind in "biu":
        said: list[str] = []
        if options.hide_below is not None:
            said.append(f"«hide_below»: {_WHERE} is boolean, and has no numbers to be below it")
        if mask.dtype != bool:
            _refuse_other_integers(mask, _WHERE)
            said.append(f"{_WHERE}: integers 0 and 1 were taken as a boolean mask")
        return BooleanMask(mask, shown), said
    if mask.dtype.kind != "f":
        raise DataError(_WHERE, f"expected booleans, 0 and 1, or floats, got {mask.dtype}")
    if not shown:
        raise DataError(_WHERE, f"expected a boolean mask beside «mask_true», got {mask.dtype}")
    added, only_zero_one = _read_added(mask)
    if options.hide_below is not None:
        added = replace(added, hidden_below=float(_rounded_down(options.hide_below, mask.dtype)))
    doubt = (
        f"{_WHERE}: a float mask is added to the logits, and this one holds only 0 and 1; was a "
        "boolean mask meant?"
    )
    return added, [doubt] if only_zero_one else []


def as_rank_4(mask: NDArray[Any], sizes: Sizes) -> NDArray[Any]:
    """The mask with axes (B | 1, H | 1, S_q | 1, S_k | 1), as a view.

    Raises:
        DataError: a rank above 4 or 0, a length that fits neither the axis nor 1, or rank 3 where
            its first axis could be batches as well as heads.
    """
    full = (sizes.batch, sizes.heads, sizes.q_len, sizes.k_len)
    names = ("B", "H", "S_q", "S_k")
    if not 1 <= mask.ndim <= 4:
        raise DataError(_WHERE, f"expected rank 1 to 4, got shape {mask.shape}")
    if mask.ndim == 3 and mask.shape[0] == sizes.batch == sizes.heads > 1:
        raise DataError(
            _WHERE,
            f"expected rank 2 or 4, got {mask.shape}, whose first axis could be B or H, both "
            f"{sizes.heads}",
            f"reshape it to ({sizes.batch}, 1, S_q, S_k) or (1, {sizes.heads}, S_q, S_k)",
        )
    expected = full[4 - mask.ndim :]
    for length, size in zip(mask.shape, expected, strict=True):
        if length not in (size, 1):
            named = zip(names[4 - mask.ndim :], expected, strict=True)
            wanted = ", ".join(f"{name}={size}" for name, size in named)
            advice = ""
            if mask.ndim == 3 and mask.shape[0] == sizes.batch:
                advice = f"for one mask per batch reshape it to ({sizes.batch}, 1, S_q, S_k)"
            elif mask.shape == (sizes.batch, sizes.k_len):
                shape = f"({sizes.batch}, 1, 1, {sizes.k_len})"
                advice = (
                    f"for a row per batch: «key_padding», True = real, or reshape it to {shape}"
                )
            raise DataError(_WHERE, f"expected ({wanted}) or 1s, got {mask.shape}", advice)
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def padding_doubts(rows: Marginals, options: AttentionOptions) -> Iterator[str]:
    """Whether a boolean mask (S_q, S_k) looks like key padding, whose rows are batches.

    Every row shows the keys up to some, or from some on. Where causality alone could have made
    that, at a corner or of a square, nothing is said.

    Args:
        rows: of the mask alone.
        options: that have it.
    """
    assert options.attn_mask is not None  # whoever asks has one
    counts, k_len = rows.counts, len(rows.used)
    is_run = (rows.last - rows.first + 1 == counts) & (counts > 0)
    if options.attn_mask.dtype.kind not in "biu" or not is_run.all():
        return
    for side, edges, is_so in (
        ("from the left", rows.last + 1, rows.first == 0),
        ("up to the right end", rows.first, rows.last == k_len - 1),
    ):
        # As a corner has it, with a prefix or without.
        index, corners = np.arange(1, len(edges) + 1), (0, k_len - len(edges))
        usual = (np.clip(index + corner, edges.min(initial=k_len), k_len) for corner in corners)
        climbs = bool((np.diff(edges) >= 0).all())
        causal = climbs and (len(edges) == k_len or any((one == edges).all() for one in usual))
        if is_so.all() and not causal and (edges != edges[:1]).any():
            shown = "True" if options.mask_true is MaskTrue.KEEP else "False"
            yield f"{_WHERE}: {shown} runs {side} in every row; meant as «key_padding», (B, S_k)?"


def _key_padding(padding: NDArray[Any], sizes: Sizes) -> tuple[NDArray[np.bool_], list[str]]:
    """Key padding as bool (B | 1, S_k), True = real key, with what was assumed."""
    where, said = "«key_padding»", []
    keep = np.atleast_2d(padding)
    if keep.ndim != 2 or keep.shape[0] not in (1, sizes.batch) or keep.shape[1] != sizes.k_len:
        raise DataError(
            where, f"expected (B={sizes.batch}, S_k={sizes.k_len}), got {padding.shape}"
        )
    if padding.dtype.kind in "iu":
        _refuse_other_integers(keep[None, None], where)
        said = [f"{where}: integers 0 and 1 were taken as boolean, 1 = real key"]
    elif padding.dtype != bool:
        raise DataError(where, f"expected a boolean array, got {padding.dtype}")
    return keep != 0, said


def _refuse_other_integers(mask: NDArray[Any], where: str) -> None:
    for block in blocks_of(mask):
        wrong = block[(block != 0) & (block != 1)]
        if wrong.size:
            raise DataError(
                where, f"expected integers 0 and 1 or a boolean or float mask, got {wrong[0]}"
            )


def blocks_of(mask: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """The rank-4 mask in blocks of whole rows, (rows, S_k), few enough to hold at once."""
    for batch in mask:
        for head in batch:
            step = max(1, BLOCK_CELLS // max(1, head.shape[-1]))
            for start in range(0, len(head), step):
                block = head[start : start + step]
                yield block
                drop_page_cache(block)


def _read_added(mask: NDArray[Any]) -> tuple[AdditiveMask, bool]:
    """Look at every number of a float mask once; whether there are 0 and 1 alone.

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
    return AdditiveMask(mask, lowest, ranges=tuple(ranges)), zero_or_one and any_one


def _rounded_down(value: Any, dtype: Any) -> Any:
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
        near = values >= _rounded_down(high - _GAP, values.dtype)
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


def _hide_weightless(mask: Mask, underflow: float, reach: Reach) -> tuple[Mask, list[str]]:
    """Count as hidden what a mask file's numbers make weightless beside a row's other keys.

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
    decided = mask, 0, -np.inf
    if lowest - highest < limit:
        level = _level(ranges, limit)
        decided = _by_row(mask, highest, limit) if level is None else _by_level(mask, level)
    found, rows, top = decided
    if highest <= MINUS_A_LOT:
        rows = sum(int((view.marginals.counts > 0).sum()) for _, _, view in head_masks(mask))
        top = highest
    said = [*_of_opinion(ranges, limit)]
    if not rows:
        return found, said
    line = _line(top)
    said.append(
        f"{_WHERE}: {'1 row holds' if rows == 1 else f'{rows} rows hold'} nothing but values of "
        f"{line} or less; they are added as they stand, which makes a row uniform or a plain "
        f"softmax, never empty; «hide_below={line}» makes it empty"
    )
    assert isinstance(found.file, AdditiveMask)  # as before
    return found.with_file(replace(found.file, spared=top)), said


def _level(ranges: Sequence[tuple[float, float]], limit: float) -> float | None:
    """The highest number that hides beside any of those above it; None where rows differ in that.

    None of those above it hides another, and none below.
    """
    for above, below in pairwise(ranges):
        alike = above[1] - ranges[0][0] >= limit and ranges[-1][1] - below[0] >= limit
        if alike and below[0] - above[1] < limit:
            return below[0]
    return None


# The mask with most rows decided; how many see nothing but what is meant to hide and stay as they
# stand, heads that are alike counted once; and the highest number in these.
_Decided = tuple[Mask, int, float]


def _by_level(mask: Mask, level: float) -> _Decided:
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
    return hiding if limits is None else mask.hiding_below(limits), hopeless, level


def _by_row(mask: Mask, highest: float, limit: float) -> _Decided:
    """Every row hides what is further below the highest number that it sees."""
    limits, hopeless, highest_of_these = _limits(mask, -np.inf), 0, -np.inf
    for batch, head, view in head_masks(mask):
        for rows, seen in view.blocks():
            added = np.where(seen, view.additive(rows), -np.inf).astype(np.float64)
            top = added.max(-1, initial=-np.inf)  # (rows,)
            # What is as low as finfo.min does not change by so little, but is not below itself.
            with np.errstate(over="ignore"):
                under = np.minimum(top + limit, np.nextafter(top, -np.inf))
            limits[batch or 0, head or 0, rows, 0] = _rounded_down(under, limits.dtype)
            low = (top < highest + limit) & (top > -np.inf)
            hopeless += int(low.sum())
            highest_of_these = max(highest_of_these, float(top[low].max(initial=-np.inf)))
    return mask.hiding_below(limits), hopeless, highest_of_these


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
