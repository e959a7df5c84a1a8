"""Where queries stand on the key axis, and which documents they and the keys belong to.

Positions count along the key axis. Where queries have documents of their own, each query stands as
far behind the first key of its document as it is behind the first query of it, plus an offset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncli.attention.options import AttentionOptions, Corner
from attncli.attention.sizes import Sizes
from attncli.errors import DataError, UsageError

# Offsets stay within it: their sums fit 64 bits.
FARTHEST = 2**53


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """Packed documents, numbered from 0.

    Attributes:
        keys: int64 (B | 1, S_k), document of each key.
        queries: int64 (B | 1, S_q), of each query; None where that of the key at its position is.
    """

    keys: NDArray[np.int64]
    queries: NDArray[np.int64] | None

    def of_queries(self, positions: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """Int64 (B | 1, S_q): document of each query, −1 where it stands off the key axis."""
        if self.queries is not None:
            return self.queries
        assert positions is not None  # `place` has refused the other case
        k_len = self.keys.shape[1]
        on_axis = (positions >= 0) & (positions < k_len)
        if not k_len:
            return np.full_like(positions, -1)
        keys = np.broadcast_to(self.keys, (max(len(self.keys), len(positions)), k_len))
        own = np.take_along_axis(keys, np.where(on_axis, positions, 0), axis=1)
        return np.where(on_axis, own, -1)


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where the queries stand.

    Attributes:
        shift: int64 (B | 1, 1 | S_q), position of query i less i.
        start: int64 (B | 1, 1 | S_q), the first key of the axis, or of the query's document.
    """

    shift: NDArray[np.int64]
    start: NDArray[np.int64]

    def positions(self, q_len: int) -> NDArray[np.int64]:
        """Int64 (B | 1, S_q)."""
        return self.shift + np.arange(q_len)


@dataclass(frozen=True, slots=True, eq=False)
class RealCells:
    """Which keys and queries are no padding.

    Attributes:
        key_lengths: int64 (B | 1,), keys from here on are padding.
        key_padding: bool (B | 1, S_k), True = real key; None for no such file.
        query_lengths: int64 (B | 1,), queries from here on are padding.
    """

    key_lengths: NDArray[np.int64]
    key_padding: NDArray[np.bool_] | None
    query_lengths: NDArray[np.int64]

    def keys(self, batch: int, k_len: int) -> NDArray[np.bool_]:
        """Bool (S_k,), True = real key."""
        real: NDArray[np.bool_] = np.arange(k_len) < _of(self.key_lengths, batch)
        return real if self.key_padding is None else real & _of(self.key_padding, batch)


def read_documents(options: AttentionOptions, sizes: Sizes) -> Documents | None:
    """The documents that the options declare; None for none.

    Raises:
        UsageError: ids or offsets that do not fit the sizes.
        DataError: ids that are not integers.
    """
    if options.segments is None:
        return None
    keys = _read_ids(options.segments, "segments", "key", sizes.batch, sizes.k_len)
    known = np.unique(keys)
    return Documents(np.searchsorted(known, keys), None)


def place(
    options: AttentionOptions, sizes: Sizes, real: RealCells, documents: Documents | None
) -> tuple[Placement | None, list[str]]:
    """Where the queries stand, None where that is undefined, and what was assumed.

    Raises:
        UsageError: positions are needed and nothing says where queries stand; or there are
            neither one offset nor one per batch.
    """
    declared = options.query_offset
    zeros = np.zeros((1, 1), np.int64)
    if declared is None:
        if sizes.q_len == sizes.k_len:
            return Placement(zeros, zeros), []
        if options.needs_positions:
            corner, _ = _corners(sizes, real)
            raise UsageError(
                "«query_offset»",
                f"expected a value, since «{options.needs_positions[0]}» needs positions and "
                f"S_q={sizes.q_len} differs from S_k={sizes.k_len}, got none",
                "top-left: query 0 stands at key 0 (PyTorch is_causal); bottom-right: the last "
                f"query stands at the last key, an offset of {_listed(corner)} "
                "(KV cache, FlashAttention)",
            )
        return None, []
    if declared is Corner.BOTTOM_RIGHT:
        corner, said = _corners(sizes, real)
        return Placement(corner[:, None], zeros), said
    offsets = 0 if declared is Corner.TOP_LEFT else declared
    return Placement(_per_batch(offsets, sizes.batch)[:, None], zeros), []


def _corners(sizes: Sizes, real: RealCells) -> tuple[NDArray[np.int64], list[str]]:
    """Offsets at which the last real query stands at the last real key, int64 (B | 1,)."""
    if real.key_padding is None:
        return real.key_lengths - real.query_lengths, []
    batches = range(max(len(real.key_lengths), len(real.key_padding)))
    kept = [np.flatnonzero(real.keys(batch, sizes.k_len)) for batch in batches]
    stop = np.array([keys[-1] + 1 if len(keys) else 0 for keys in kept], np.int64)
    corner = stop - real.query_lengths
    if all(len(keys) == end for keys, end in zip(kept, stop, strict=True)):
        return corner, []
    said = (
        "«query_offset»: bottom-right counts up to the last real key, also those before it that "
        f"are padding by «key_padding»: an offset of {_listed(corner)}"
    )
    return corner, [said]


def _per_batch(declared: int | tuple[int, ...], batch: int) -> NDArray[np.int64]:
    offsets = (declared,) if isinstance(declared, int) else declared
    if len(offsets) not in (1, batch):
        raise UsageError(
            "«query_offset»",
            f"expected one value or one per batch (B={batch}), got {len(offsets)}",
        )
    if max(map(abs, offsets), default=0) > FARTHEST:
        raise UsageError("«query_offset»", "expected at most 2^53 in size, got more")
    return np.array(offsets, np.int64)


def _read_ids(
    given: NDArray[Any], name: str, what: str, batch: int, length: int
) -> NDArray[np.int64]:
    """Document ids of keys or queries as int64 (B | 1, S)."""
    ids = np.atleast_2d(given)
    if ids.dtype.kind not in "iub":
        raise DataError(f"«{name}»", f"expected integers, got {ids.dtype}")
    if ids.ndim != 2 or ids.shape[0] not in (1, batch) or ids.shape[1] != length:
        axis = f"S_{what[0]}={length}"
        raise UsageError(
            f"«{name}»",
            f"expected one id per {what}, ({axis}) or (B={batch}, {axis}), got {given.shape}",
        )
    return ids.astype(np.int64)


def _of(array: NDArray[Any], batch: int) -> Any:
    return array[batch if len(array) > 1 else 0]


def _listed(offsets: NDArray[np.int64]) -> str:
    return ",".join(map(str, offsets.tolist()))
