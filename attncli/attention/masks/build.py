"""From options to a mask: what comes from outside is checked, and becomes the rules that it means.

Every positional rule (causal, windows, prefix) leaves each query one interval of keys, so together
they are two integers per query. Padding files, segments and mask files stay what they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncli.attention.masks.mask import Mask
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
    KeyLengths,
    KeyPadding,
    Rule,
    Segments,
)
from attncli.attention.masks.weightless import (
    UNDERFLOW,
    Reach,
    blocks_of,
    hide_weightless,
    read_values,
    rounded_down,
)
from attncli.attention.options import AttentionOptions, MaskTrue
from attncli.attention.sizes import FLOAT64_CELLS, Sizes
from attncli.errors import DataError, UsageError

# A window this wide is no window, and its distance to any position fits 64 bits.
_WIDEST = 2**62

_WHERE = "«attn_mask»"


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
        reach: see `hide_weightless`.

    Raises:
        UsageError: an option does not fit the sizes, or needs a query offset that is not given.
        DataError: a mask or padding array has the wrong shape or values.
    """
    real, warnings = read_real_cells(options, sizes)
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
    if options.key_lengths is not None:
        rules.append(KeyLengths(real.key_lengths))
    if real.key_padding is not None:
        rules.append(KeyPadding(real.key_padding))
    if documents is not None:
        rules.append(Segments(documents.keys, documents.of_queries(positions)))
        warnings += segment_doubts(options.segments)
    if options.attn_mask is not None:
        file, said = read_mask(options, sizes)
        rules.append(file)
        warnings = [*said, *warnings]
    mask = Mask(
        sizes=sizes,
        rules=tuple(rules),
        shift=None if placement is None else placement.shift,
        query_lengths=real.query_lengths,
        slopes=_slopes(options, sizes),
    )
    if mask.added is not None and options.hide_below is None:
        size = itemsize or (8 if sizes.cells <= FLOAT64_CELLS else 4)
        mask, said = hide_weightless(mask, UNDERFLOW[size], reach)
        warnings += said
    return replace(mask, warnings=tuple(warnings))


def placement_of(options: AttentionOptions, sizes: Sizes) -> Placement | None:
    """Where the queries stand; None where positions are not defined."""
    real, _ = read_real_cells(options, sizes)
    return place(options, sizes, real, read_documents(options, sizes)[0])[0]


def read_real_cells(options: AttentionOptions, sizes: Sizes) -> tuple[RealCells, list[str]]:
    """What is padding by lengths and by the padding file, and what was assumed.

    Raises:
        UsageError: lengths that do not fit the sizes.
        DataError: a padding array has the wrong shape or values.
    """
    keys = per_batch(options.key_lengths, "key_lengths", sizes.batch, sizes.k_len)
    queries = per_batch(options.query_lengths, "query_lengths", sizes.batch, sizes.q_len)
    if options.key_padding is None:
        return RealCells(keys, None, queries), []
    keep, said = read_key_padding(options.key_padding, sizes)
    return RealCells(keys, keep, queries), said


def per_batch(
    lengths: tuple[int, ...] | None, name: str, batch: int, limit: int
) -> NDArray[np.int64]:
    """Lengths as int64 (B | 1,); the whole axis where none are given.

    Raises:
        UsageError: neither one length nor one per batch, or a length beyond the axis.
    """
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
    """Slopes of ALiBi, float64 (H,): those given, or those of its paper; None without it.

    Raises:
        UsageError: not one finite slope per head.
    """
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
    slopes = _geometric_slopes(whole)
    if whole < heads:
        slopes = np.concatenate([slopes, _geometric_slopes(2 * whole)[::2][: heads - whole]])
    return slopes


def _geometric_slopes(heads: int) -> NDArray[np.float64]:
    return np.exp2(-8.0 * np.arange(1, heads + 1) / max(heads, 1))


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


def read_mask(
    options: AttentionOptions, sizes: Sizes
) -> tuple[BooleanMask | AdditiveMask, list[str]]:
    """The rule that the attention mask of the options is, and what was assumed or looks wrong.

    Raises:
        DataError: a shape that does not fit or is ambiguous, integers beyond 0 and 1, NaN or
            +inf, or `mask_true` "drop" beside a mask that is added.
    """
    assert options.attn_mask is not None  # whoever asks has one
    mask, shown = as_rank_4(options.attn_mask, sizes), options.mask_true is MaskTrue.KEEP
    if mask.dtype.kind in "biu":
        said = []
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
    values = read_values(mask)
    said = []
    if values.only_zero_one:
        said.append(
            f"{_WHERE}: a float mask is added to the logits, and this one holds only 0 and 1; "
            "was a boolean mask meant?"
        )
    limit = -np.inf if options.hide_below is None else options.hide_below
    hidden_below = float(rounded_down(limit, mask.dtype))
    return AdditiveMask(mask, values.lowest, hidden_below, values.ranges), said


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
            raise DataError(_WHERE, f"expected ({wanted}) or 1s, got {mask.shape}", advice)
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def read_key_padding(padding: NDArray[Any], sizes: Sizes) -> tuple[NDArray[np.bool_], list[str]]:
    """Key padding as bool (B | 1, S_k), True = real key, with what was assumed.

    Raises:
        DataError: another shape, or values that are not boolean.
    """
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
