"""Which key each query may see, and what is added to its logit.

Every positional rule (causal, windows, prefix, key lengths) leaves each query one interval of
keys, so a structured mask of any size is two integers per query. Padding files, segments and mask
files stay what they are and are combined cell by cell, only for the block that is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from attncli.attention.masks.mask_input import MaskInput, read_key_padding, read_mask, read_segments
from attncli.attention.options import AttentionOptions, Corner, MaskTrue
from attncli.errors import UsageError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

# Offsets stay within it, and a window this wide is no window: their sums fit 64 bits.
FARTHEST = 2**53

Index = Any  # a slice or an integer array, of NumPy or torch like the mask itself
Array = Any  # NumPy on the host, torch after `Mask.to_torch`


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths of the axes of one attention problem: B, H, S_q, S_k."""

    batch: int
    heads: int
    q_len: int
    k_len: int


@dataclass(frozen=True, slots=True)
class Mask:
    """Visibility and additive bias of every cell, computed block by block.

    Arrays have a leading batch axis of length B, or 1 where all batches are alike. They are NumPy
    arrays as built and torch tensors after `to_torch`; the methods work on both.

    Attributes:
        sizes: B, H, S_q, S_k.
        offset: int64 (B | 1,), position of query 0; None where positions are not defined.
        first: int64 (B | 1, S_q), first key of each query's interval.
        stop: int64 (B | 1, S_q), one past the last key of the interval; stop ≥ first.
        key_keep: bool (B | 1, S_k), True = real key; None for all real.
        segments: int64 (B | 1, S_k), document ids; None for one document.
        allowed: bool or 0/1 integer (B | 1, H | 1, S_q | 1, S_k | 1); None for no such mask.
        allowed_value: what a cell of `allowed` holds where the query may attend: True or False.
        added: float (B | 1, H | 1, S_q | 1, S_k | 1), summed to the logits, −inf = invisible;
            None for no such mask.
        slopes: float64 (H,), mₕ of ALiBi; None for none.
        query_lengths: int64 (B | 1,), number of real queries.
        warnings: what the reader of the results should know.
    """

    sizes: Sizes
    offset: Array | None
    first: Array
    stop: Array
    key_keep: Array | None
    segments: Array | None
    allowed: Array | None
    allowed_value: bool
    added: Array | None
    slopes: Array | None
    query_lengths: Array
    warnings: tuple[str, ...] = ()

    def visible(self, batch: slice, head: slice, rows: Index, cols: slice) -> Array:
        """Bool (b | 1, h | 1, rows, cols): True where the query may see the key."""
        keys = self._keys(cols)
        first = _of_batch(self.first, batch)[:, None, rows, None]  # (b, 1, rows, 1)
        stop = _of_batch(self.stop, batch)[:, None, rows, None]
        seen = (keys >= first) & (keys < stop)  # (b, 1, rows, cols)
        if self.key_keep is not None:
            seen = seen & _of_batch(self.key_keep, batch)[:, None, None, cols]
        if self.segments is not None:
            seen = seen & self._same_segment(batch, rows, cols)
        if self.allowed is not None:
            seen = seen & (_block(self.allowed, batch, head, rows, cols) == self.allowed_value)
        if self.added is not None:
            seen = seen & (_block(self.added, batch, head, rows, cols) != -np.inf)
        return seen

    def bias(self, batch: slice, head: slice, rows: Index, cols: slice) -> Array | None:
        """Float (b | 1, h | 1, rows, cols) to add to visible logits; None where there is none."""
        bias = self.additive(batch, head, rows, cols)
        if self.slopes is None:
            return bias
        alibi = -self.slopes[None, head, None, None] * self.distance(batch, rows, cols)
        return alibi if bias is None else alibi + bias

    def additive(self, batch: slice, head: slice, rows: Index, cols: slice) -> Array | None:
        """Float (b | 1, h | 1, rows | 1, cols | 1) of an additive mask; None where there is none.

        Unlike `bias` it leaves ALiBi out, for those who have a cheaper way to it.
        """
        return None if self.added is None else _block(self.added, batch, head, rows, cols)

    def distance(self, batch: slice, rows: Index, cols: slice) -> Array:
        """Int64 (b | 1, 1, rows, cols): |p − j|."""
        return abs(self.positions(batch, rows)[:, None, :, None] - self._keys(cols))

    def positions(self, batch: slice, rows: Index) -> Array:
        """Int64 (b | 1, rows): p, where each query stands on the key axis."""
        if self.offset is None:
            raise UsageError("--query-offset", "expected a value, got none")
        index = rows
        if isinstance(rows, slice):
            index = self._arange(*rows.indices(self.sizes.q_len)[:2])
        return _of_batch(self.offset, batch)[:, None] + index

    def span(self, batch: slice, rows: Index) -> tuple[int, int]:
        """First key, and one past the last, that any of the rows may see by its interval."""
        first = _of_batch(self.first, batch)[:, rows]
        stop = _of_batch(self.stop, batch)[:, rows]
        some = stop > first
        if not bool(some.any()):
            return 0, 0
        return int(first[some].min()), int(stop[some].max())

    def real_queries(self, batch: int) -> int:
        """Number of queries of this batch that are not padding."""
        lengths = self.query_lengths
        return int(lengths[batch if len(lengths) > 1 else 0])

    def to_torch(self, device: torch.device | str) -> Mask:
        """The same mask with torch tensors on a device."""
        import torch

        def move(array: Array | None) -> Array | None:
            return None if array is None else torch.as_tensor(array, device=device)

        return replace(
            self,
            offset=move(self.offset),
            first=move(self.first),
            stop=move(self.stop),
            key_keep=move(self.key_keep),
            segments=move(self.segments),
            allowed=move(self.allowed),
            added=move(self.added),
            slopes=move(self.slopes),
        )

    @property
    def by_interval(self) -> bool:
        """Whether the intervals alone say which cells are visible."""
        others = (self.key_keep, self.segments, self.allowed, self.added)
        return all(rule is None for rule in others)

    def _same_segment(self, batch: slice, rows: Index, cols: slice) -> Array:
        ids = _of_batch(self.segments, batch)
        positions = self.positions(batch, rows)
        on_axis = (positions >= 0) & (positions < self.sizes.k_len)
        if not self.sizes.k_len:
            return on_axis[:, None, :, None]
        place = positions * on_axis  # off the axis: any valid index, its result is discarded
        own = ids[self._arange(0, len(ids))[:, None], place]
        return (own[:, None, :, None] == ids[:, None, None, cols]) & on_axis[:, None, :, None]

    def _keys(self, cols: slice) -> Array:
        return self._arange(*cols.indices(self.sizes.k_len)[:2])

    def _arange(self, start: int, stop: int) -> Array:
        if isinstance(self.first, np.ndarray):
            return np.arange(start, stop)
        import torch

        return torch.arange(start, stop, device=self.first.device)


def build_mask(options: AttentionOptions, sizes: Sizes) -> Mask:
    """Combine every visibility rule of the options for tensors of the given sizes.

    Raises:
        UsageError: an option does not fit the sizes, or needs a query offset that is not given.
        DataError: a mask or padding array has the wrong shape or values.
    """
    offset = resolve_offset(options, sizes)
    first, stop = _intervals(options, sizes, offset)
    given = MaskInput() if options.attn_mask is None else read_mask(options, sizes)
    keep, said = read_key_padding(options, sizes)
    return Mask(
        sizes=sizes,
        offset=offset,
        first=first,
        stop=stop,
        key_keep=keep,
        segments=read_segments(options, sizes),
        allowed=given.allowed,
        allowed_value=options.mask_true is MaskTrue.KEEP,
        added=given.added,
        slopes=alibi_slopes(sizes.heads) if options.alibi else None,
        query_lengths=per_batch(options.query_lengths, "--query-lengths", sizes.batch, sizes.q_len),
        warnings=(*given.warnings, *said),
    )


def resolve_offset(options: AttentionOptions, sizes: Sizes) -> NDArray[np.int64] | None:
    """Position of query 0 on the key axis, int64 (B | 1,), or None where it is undefined.

    Raises:
        UsageError: positions are needed, S_q ≠ S_k and nothing says where query 0 stands; or
            there are neither one offset nor one per batch.
    """
    declared = options.query_offset
    if declared is None:
        if sizes.q_len == sizes.k_len:
            return np.zeros(1, np.int64)
        if options.needs_positions:
            raise UsageError(
                "--query-offset",
                f"expected a value, since «{options.needs_positions[0]}» needs positions and "
                f"S_q={sizes.q_len} differs from S_k={sizes.k_len}, got none",
                "top-left: query 0 stands at key 0 (PyTorch is_causal); bottom-right: the last "
                f"query stands at the last key, an offset of {sizes.k_len - sizes.q_len} "
                "(KV cache, FlashAttention)",
            )
        return None
    if isinstance(declared, Corner):
        corner = 0 if declared is Corner.TOP_LEFT else sizes.k_len - sizes.q_len
        return np.array([corner], np.int64)
    offsets = (declared,) if isinstance(declared, int) else declared
    if len(offsets) not in (1, sizes.batch):
        raise UsageError(
            "--query-offset",
            f"expected one value or one per batch (B={sizes.batch}), got {len(offsets)}",
        )
    if max(map(abs, offsets), default=0) > FARTHEST:
        raise UsageError("--query-offset", "expected at most 2^53 in size, got more")
    return np.array(offsets, np.int64)


def per_batch(
    lengths: tuple[int, ...] | None, option: str, batch: int, limit: int
) -> NDArray[np.int64]:
    """Lengths as int64 (B | 1,); the whole axis where none are given.

    Raises:
        UsageError: neither one length nor one per batch, or a length beyond the axis.
    """
    if lengths is None:
        return np.array([limit], np.int64)
    if len(lengths) not in (1, batch):
        raise UsageError(
            option, f"expected one length or one per batch (B={batch}), got {len(lengths)}"
        )
    if max(lengths, default=0) > limit:
        raise UsageError(option, f"expected at most {limit}, the axis' length, got {max(lengths)}")
    return np.array(lengths, np.int64)


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


def _intervals(
    options: AttentionOptions, sizes: Sizes, offset: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The keys [first, stop) that the positional rules and key lengths leave each query."""
    lengths = per_batch(options.key_lengths, "--key-lengths", sizes.batch, sizes.k_len)
    rows = np.arange(sizes.q_len)
    first = np.zeros((1, sizes.q_len), np.int64)
    stop = np.broadcast_to(lengths[:, None], (len(lengths), sizes.q_len))
    if options.causal or options.left_window is not None or options.right_window is not None:
        assert offset is not None  # resolve_offset has refused the other case
        position = offset[:, None] + rows  # (B | 1, S_q)
        if options.causal:
            stop = np.minimum(stop, np.maximum(position + 1, min(options.prefix or 0, sizes.k_len)))
        if options.right_window is not None:
            stop = np.minimum(stop, position + min(options.right_window, FARTHEST) + 1)
        if options.left_window is not None:
            first = np.maximum(first, position - min(options.left_window, FARTHEST))
    first = np.clip(first, 0, sizes.k_len)
    first, stop = np.broadcast_arrays(first, np.clip(stop, 0, sizes.k_len))
    return np.ascontiguousarray(first), np.maximum(first, stop)


def _of_batch(array: Array, batch: slice) -> Array:
    """The chosen batches of an array whose batch axis is B long, or 1 for all alike."""
    return array if len(array) == 1 else array[batch]


def _block(array: Array, batch: slice, head: slice, rows: Index, cols: slice) -> Array:
    """A block of a rank-4 array in which any axis may be 1 long."""
    wanted = (batch, head, rows, cols)
    for axis, (index, length) in enumerate(zip(wanted, array.shape, strict=True)):
        if length > 1 and not (isinstance(index, slice) and index == slice(None)):
            array = array[(slice(None),) * axis + (index,)]
    return array
