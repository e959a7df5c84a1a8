"""Matrices of any size as matrices that a picture can show: means over rectangles of cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Edges = NDArray[np.int64]

# So many of the first positions have bins of their own: sinks stand there.
FIRST_ALONE = 4


@dataclass(slots=True, eq=False)
class Pool:
    """Means over the rectangles of a grid, gathered block by block.

    Attributes:
        row_edges, column_edges: int64, where each rectangle begins, and where the last ends.
        sums, counts, peaks: float64 (rectangles down, across), of the finite cells that count:
            their sum, how many they are, and the largest of them, −inf where there are none.
    """

    row_edges: Edges
    column_edges: Edges
    sums: NDArray[np.float64]
    counts: NDArray[np.float64]
    peaks: NDArray[np.float64]

    @classmethod
    def of(cls, rows: int, columns: int, most: int) -> Pool:
        """An empty one, of at most so many rectangles each way."""
        return cls.over(edges_of(rows, most), edges_of(columns, most))

    @classmethod
    def over(cls, row_edges: Edges, column_edges: Edges) -> Pool:
        """An empty one, of the rectangles between these edges."""
        shape = len(row_edges) - 1, len(column_edges) - 1
        nothing = np.full(shape, -np.inf)
        return cls(row_edges, column_edges, np.zeros(shape), np.zeros(shape), nothing)

    def add(self, rows: Any, values: Any, counted: Any = True) -> None:
        """Take in some rows.

        Args:
            rows: int (R,), which ones.
            values: (R, columns), numbers.
            counted: bool, likewise; False for cells that are left out, as those that are not
                finite are.
        """
        values = np.asarray(values, np.float64)
        if not values.size:
            return
        kept = np.isfinite(values) & np.asarray(counted)
        places = np.searchsorted(self.row_edges, rows, "right") - 1
        for total, ufunc, cells in (
            (self.sums, np.add, np.where(kept, values, 0.0)),
            (self.counts, np.add, kept.astype(np.float64)),
            (self.peaks, np.maximum, np.where(kept, values, -np.inf)),
        ):
            ufunc.at(total, places, ufunc.reduceat(cells, self.column_edges[:-1], axis=1))

    @classmethod
    def joined(cls, pools: Sequence[Pool]) -> Pool:
        """Those of several on the same grid as one."""
        return replace(
            pools[0],
            sums=np.sum([pool.sums for pool in pools], 0),
            counts=np.sum([pool.counts for pool in pools], 0),
            peaks=np.max([pool.peaks for pool in pools], 0),
        )

    @property
    def means(self) -> NDArray[np.float64]:
        """(rectangles down, across); NaN where no cell counts."""
        known = np.maximum(self.counts, 1)
        return np.where(self.counts > 0, self.sums / known, np.nan)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole."""
        return int(self.row_edges[-1]), int(self.column_edges[-1])

    @property
    def pooled(self) -> bool:
        """Whether any rectangle is more than a cell."""
        return self.shape != self.sums.shape


@dataclass(frozen=True, slots=True)
class StageMaps:
    """The stages of one head, each as a map that a picture has room for.

    Attributes:
        batch, head: whose they are.
        rows: which queries.
        offset: position of query 0 on the key axis; None where that is not one number.
        maps: stage → its cells; those that the mask hides are left out of what comes after it.
    """

    batch: int
    head: int
    rows: Sequence[int]
    offset: int | None
    maps: Mapping[str, Pool]


def edges_of(length: int, bins: int, alone: int = FIRST_ALONE) -> Edges:
    """Edges of so many bins: the first positions have one each, since they are the sinks.

    Args:
        length: how many positions there are.
        bins: at most, at least 1.
        alone: how many of the first positions are not taken together with others, where there are
            more bins than that.
    """
    if length <= bins:
        return np.arange(length + 1)
    alone = min(alone, bins - 1)
    rest = np.rint(np.linspace(alone, length, bins - alone + 1)).astype(np.int64)
    return np.concatenate([np.arange(alone), rest])
