"""Masks, padding and segments that come from outside: checked, and brought to one shape."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attncli.attention.options import AttentionOptions, MaskTrue
from attncli.errors import DataError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from attncli.attention.masks.mask import Sizes

# Additive values at or below this are meant as "minus infinity": −10,000 is the smallest such
# habit in use, and no honest bias comes near it.
MINUS_A_LOT = -1e4

_BLOCK_CELLS = 1 << 22


@dataclass(frozen=True, slots=True)
class MaskInput:
    """A mask from outside, rank 4 with axes of full length or 1.

    Attributes:
        allowed: bool or 0/1 integer, as given; None for an additive mask.
        added: float, to be summed to the logits; None for a boolean mask.
        warnings: what was assumed, and what looks like a mistake.
    """

    allowed: NDArray[Any] | None = None
    added: NDArray[Any] | None = None
    warnings: tuple[str, ...] = ()


def read_mask(options: AttentionOptions, sizes: Sizes) -> MaskInput:
    """Check the attention mask of the options and bring it to rank 4.

    Raises:
        DataError: a shape that does not fit or is ambiguous, integers beyond 0 and 1, NaN or
            +inf, or `mask_true` "drop" beside a mask that is added.
    """
    assert options.attn_mask is not None
    mask = as_rank_4(options.attn_mask, sizes)
    if mask.dtype == bool:
        return MaskInput(allowed=mask)
    if mask.dtype.kind in "iu":
        _refuse_other_integers(mask)
        said = "--attn-mask: integers 0 and 1 were taken as a boolean mask"
        return MaskInput(allowed=mask, warnings=(said,))
    if mask.dtype.kind != "f":
        raise DataError("--attn-mask", f"expected booleans, 0 and 1, or floats, got {mask.dtype}")
    if options.mask_true is MaskTrue.DROP:
        raise DataError(
            "--attn-mask", f"expected a boolean mask beside --mask-true, got {mask.dtype}"
        )
    return MaskInput(added=mask, warnings=tuple(_additive_warnings(mask)))


def as_rank_4(mask: NDArray[Any], sizes: Sizes) -> NDArray[Any]:
    """The mask with axes (B | 1, H | 1, S_q | 1, S_k | 1), as a view.

    Raises:
        DataError: a rank above 4 or 0, a length that fits neither the axis nor 1, or rank 3 where
            its first axis could be batches as well as heads.
    """
    full = (sizes.batch, sizes.heads, sizes.q_len, sizes.k_len)
    names = ("B", "H", "S_q", "S_k")
    if not 1 <= mask.ndim <= 4:
        raise DataError("--attn-mask", f"expected rank 1 to 4, got shape {mask.shape}")
    if mask.ndim == 3 and mask.shape[0] == sizes.batch == sizes.heads > 1:
        raise DataError(
            "--attn-mask",
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
            raise DataError("--attn-mask", f"expected ({wanted}) or 1s, got {mask.shape}", advice)
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def read_key_padding(
    options: AttentionOptions, sizes: Sizes
) -> tuple[NDArray[np.bool_] | None, tuple[str, ...]]:
    """Key padding as bool (B | 1, S_k), True = real key, with what was assumed.

    Raises:
        DataError: another shape, or values that are not boolean.
    """
    padding = options.key_padding
    if padding is None:
        return None, ()
    said: tuple[str, ...] = ()
    where = "--key-padding"
    keep = np.atleast_2d(padding)
    if keep.ndim != 2 or keep.shape[0] not in (1, sizes.batch) or keep.shape[1] != sizes.k_len:
        raise DataError(
            where, f"expected (B={sizes.batch}, S_k={sizes.k_len}), got {padding.shape}"
        )
    if padding.dtype.kind in "iu":
        _refuse_other_integers(keep, where)
        said = (f"{where}: integers 0 and 1 were taken as boolean, 1 = real key",)
    elif padding.dtype != bool:
        raise DataError(where, f"expected a boolean array, got {padding.dtype}")
    return keep != 0, said


def read_segments(options: AttentionOptions, sizes: Sizes) -> NDArray[np.int64] | None:
    """Document ids of the keys as int64 (B | 1, S_k).

    Raises:
        UsageError: not one id per key.
        DataError: ids that are not integers.
    """
    if options.segments is None:
        return None
    ids = np.atleast_2d(options.segments)
    if ids.dtype.kind not in "iub":
        raise DataError("--segments", f"expected integers, got {ids.dtype}")
    if ids.ndim != 2 or ids.shape[0] not in (1, sizes.batch) or ids.shape[1] != sizes.k_len:
        got = options.segments.shape
        raise UsageError(
            "--segments",
            f"expected one id per key, (S_k={sizes.k_len}) or (B={sizes.batch}, "
            f"S_k={sizes.k_len}), got {got}",
        )
    return ids.astype(np.int64)


def blocks_of(mask: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """The rank-4 mask in blocks of whole rows, (rows, S_k), few enough to hold at once."""
    for batch in mask:
        for head in batch:
            step = max(1, _BLOCK_CELLS // max(1, head.shape[-1]))
            for start in range(0, len(head), step):
                block = head[start : start + step]
                yield block
                let_go(block)


def let_go(array: NDArray[Any]) -> None:
    """Let the system take back the memory that holds a part of a mapped file just read."""
    base: Any = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    if not isinstance(base, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    if not array.flags.c_contiguous or not array.nbytes:
        return
    offset = array.ctypes.data - np.frombuffer(base, np.uint8, 1).ctypes.data
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    base.madvise(mmap.MADV_DONTNEED, start, offset + array.nbytes - start)


def _refuse_other_integers(mask: NDArray[Any], where: str = "--attn-mask") -> None:
    for block in blocks_of(mask.reshape((1,) * (4 - mask.ndim) + mask.shape)):
        wrong = block[(block != 0) & (block != 1)]
        if wrong.size:
            raise DataError(
                where, f"expected integers 0 and 1 or a boolean or float mask, got {wrong[0]}"
            )


def _additive_warnings(mask: NDArray[Any]) -> list[str]:
    """What a float mask looks like that its author may not have meant.

    Raises:
        DataError: NaN or +inf among the values.
    """
    only_zero_one, any_one, hopeless_rows = True, False, 0
    for block in blocks_of(mask):
        if np.isnan(block).any() or np.isposinf(block).any():
            raise DataError("--attn-mask", "expected finite values or -inf, got NaN or +inf")
        only_zero_one = only_zero_one and bool(((block == 0) | (block == 1)).all())
        any_one = any_one or bool((block == 1).any())
        seen = block > -np.inf
        hopeless_rows += int((seen.any(-1) & (~seen | (block <= MINUS_A_LOT)).all(-1)).sum())
    said = []
    if only_zero_one and any_one:
        said.append(
            "--attn-mask: a float mask is added to the logits, and this one holds only 0 and 1; "
            "was a boolean mask meant?"
        )
    if hopeless_rows:
        rows = "1 row holds" if hopeless_rows == 1 else f"{hopeless_rows} rows hold"
        said.append(
            f"--attn-mask: {rows} nothing but values of {MINUS_A_LOT:g} or less; they are added "
            "as they stand, which makes a row uniform or a plain softmax, never empty"
        )
    return said
