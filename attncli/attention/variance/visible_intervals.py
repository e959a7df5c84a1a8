"""Visible cells as one interval of keys for each query, after putting keys and queries in order.

Windows, causality and prefixes are intervals as they stand. Padding leaves intervals of what
remains. Keys sorted by document turn "the same document, and within the window" into an interval
as well. Only a mask file that depends on both query and key is more than that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attncli.attention.masks.mask import per_batch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from attncli.attention.masks.mask import Mask

_SCAN_CELLS = 1 << 22


@dataclass(frozen=True, slots=True)
class Intervals:
    """Which cells of one head are visible.

    Attributes:
        rows: int64, the real queries that see a key, in the order of `first`; None for all.
        keys: int64, the keys that the intervals run over, in order; None for all.
        first, stop: int64 (rows,), the interval of each query, places in `keys`; stop > first.
        complete: whether every real query sees every real key.
    """

    rows: torch.Tensor | None
    keys: torch.Tensor | None
    first: NDArray[np.int64]
    stop: NDArray[np.int64]
    complete: bool


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a mask file lets through, where it looks at queries and keys apart; None for all."""

    rows: NDArray[np.bool_] | None = None
    keys: NDArray[np.bool_] | None = None


def real_keys(
    mask: Mask, batch: int, key_lengths: tuple[int, ...] | None = None
) -> torch.Tensor | None:
    """Indices of the keys of a batch that are not padding, int64; None for all of them.

    Args:
        mask: holds the key padding.
        batch: index of the batch.
        key_lengths: number of real keys, one or one per batch; None for all.
    """
    k_len = mask.sizes.k_len
    lengths = per_batch(key_lengths, "--key-lengths", mask.sizes.batch, k_len)
    length = int(_of(lengths, batch))
    if mask.key_keep is None:
        return None if length == k_len else torch.arange(length)
    return torch.from_numpy(np.flatnonzero(_of(mask.key_keep, batch)[:length]))


def visible_intervals(
    mask: Mask, batch: int, head: int, real: torch.Tensor | None
) -> Intervals | None:
    """The visible cells of one head as intervals; None where they are none.

    Args:
        mask: all visibility rules.
        batch, head: indices.
        real: what `real_keys` says.
    """
    kept = _kept_by_file(mask, batch, head)
    if kept is None:
        return None
    queries = mask.real_queries(batch)
    keys = np.arange(mask.sizes.k_len) if real is None else real.numpy()
    count = len(keys)
    if kept.keys is not None:
        keys = keys[np.broadcast_to(kept.keys, mask.sizes.k_len)[keys]]
    rows = np.arange(queries)
    if kept.rows is not None:
        rows = rows[kept.rows[:queries]]
    rows, keys, first, stop = _in_order(mask, batch, rows, keys)
    some = stop > first
    rows, first, stop = rows[some], first[some], stop[some]
    complete = len(rows) == queries and len(keys) == count and bool((stop - first == count).all())
    return Intervals(
        rows=_order(rows, queries),
        keys=_order(keys, mask.sizes.k_len),
        first=first,
        stop=stop,
        complete=complete,
    )


def _in_order(
    mask: Mask, batch: int, rows: NDArray[np.int64], keys: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Queries and keys in an order in which each query's keys are one interval, and that."""
    first, stop = _of(mask.first, batch)[rows], _of(mask.stop, batch)[rows]
    if mask.segments is None:
        return rows, keys, np.searchsorted(keys, first), np.searchsorted(keys, stop)
    k_len = mask.sizes.k_len
    _, document = np.unique(_of(mask.segments, batch), return_inverse=True)
    place = int(_of(mask.offset, batch)) + rows
    on_axis = (place >= 0) & (place < k_len)
    rows, first, stop, place = rows[on_axis], first[on_axis], stop[on_axis], place[on_axis]
    by_document = np.argsort(document[place], kind="stable")
    rows, first, stop, place = (array[by_document] for array in (rows, first, stop, place))
    start = document[place] * k_len
    keys = keys[np.argsort(document[keys], kind="stable")]
    where = document[keys] * k_len + keys
    return rows, keys, np.searchsorted(where, start + first), np.searchsorted(where, start + stop)


def _kept_by_file(mask: Mask, batch: int, head: int) -> _Kept | None:
    """What the mask file lets through; None where that depends on query and key together."""
    if mask.allowed is not None:
        allowed = _of(_of(mask.allowed, batch), head)
        return _apart(allowed == mask.allowed_value) if 1 in allowed.shape else None
    if mask.added is None:
        return _Kept()
    added = _of(_of(mask.added, batch), head)
    if not _any_hidden(added):
        return _Kept()
    return _apart(added != -np.inf) if 1 in added.shape else None


def _apart(seen: NDArray[np.bool_]) -> _Kept:
    """A mask (1, S_k | 1) or (S_q, 1) as rows or keys kept."""
    return _Kept(keys=seen[0]) if seen.shape[0] == 1 else _Kept(rows=seen[:, 0])


def _any_hidden(added: NDArray[Any]) -> bool:
    step = max(1, _SCAN_CELLS // max(1, added.shape[1]))
    return any(bool((added[at : at + step] == -np.inf).any()) for at in range(0, len(added), step))


def _order(index: NDArray[np.int64], length: int) -> torch.Tensor | None:
    """The index, or None where it is all of an axis as it lies."""
    if len(index) == length and bool((index == np.arange(length)).all()):
        return None
    return torch.from_numpy(np.ascontiguousarray(index))


def _of(array: Any, index: int) -> Any:
    """One entry of an axis that is 1 long where all are alike."""
    return array[index if len(array) > 1 else 0]
