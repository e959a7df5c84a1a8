"""Visible cells as one interval of keys for each query, after putting keys and queries in order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from attncli.attention.masks.mask import Mask


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


def real_keys(mask: Mask, batch: int) -> torch.Tensor | None:
    """Indices of the keys of a batch that are not padding, int64; None for all of them."""
    real = mask.real_keys(batch)
    return None if real.all() else torch.from_numpy(np.flatnonzero(real))


def visible_intervals(mask: Mask, batch: int, head: int) -> Intervals | None:
    """The visible cells of one head as intervals; None where they are none."""
    found = mask.head(batch, head).sorted_intervals()
    if found is None:
        return None
    rows = np.flatnonzero(found.high > found.low)
    rows = rows[np.argsort(found.low[rows], kind="stable")]  # documents one after another
    first, stop = found.low[rows], found.high[rows]
    complete = len(rows) == len(found.low)
    complete = complete and bool((stop - first == mask.real_keys(batch).sum()).all())
    queries, keys = _order(rows, len(found.low)), _order(found.keys, mask.sizes.k_len)
    return Intervals(queries, keys, first, stop, complete)


def _order(index: NDArray[np.int64], length: int) -> torch.Tensor | None:
    """The index, or None where it is all of an axis as it lies."""
    if np.array_equal(index, np.arange(length)):
        return None
    return torch.from_numpy(np.ascontiguousarray(index))
