"""A mask too large to show cell by cell, as exact counts on a small grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attncli.attention.masks.structure import Ordered, Structure
from attncli.attention.masks.view import count_columns

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from attncli.attention.masks.view import View


@dataclass(frozen=True, slots=True, eq=False)
class CellCounts:
    """Visible cells of a mask, summed over rectangles.

    Attributes:
        query_edges: int64 (rows + 1,); row r of the grid holds the queries from the r-th edge up
            to, without, the next.
        key_edges: int64 (columns + 1,), likewise for the keys.
        counts: int64 (rows, columns), visible cells in each rectangle.
        sizes: int64 (rows, columns), all cells in each rectangle.
    """

    query_edges: NDArray[np.int64]
    key_edges: NDArray[np.int64]
    counts: NDArray[np.int64]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """All cells in each rectangle."""
        return np.outer(np.diff(self.query_edges), np.diff(self.key_edges))


def cell_counts(view: View, rows: int, columns: int) -> CellCounts:
    """Count the visible cells on a grid of at most `rows` × `columns` rectangles.

    Args:
        view: one batch and head; its padded queries are left out.
        rows: at least 1; fewer where there are fewer queries.
        columns: at least 1; fewer where there are fewer keys.
    """
    query_edges, key_edges = _edges(view.rows, rows), _edges(view.k_len, columns)
    if not view.cells:
        counts = np.zeros((len(query_edges) - 1, len(key_edges) - 1), np.int64)
    elif view.known is not None:
        counts = _from_structure(view.known, query_edges, key_edges)
    else:
        counts = _from_cells(view, query_edges, key_edges)
    return CellCounts(query_edges, key_edges, counts)


def _edges(length: int, parts: int) -> NDArray[np.int64]:
    """Where an axis is cut into at most so many parts, as even as whole numbers allow."""
    parts = max(1, min(length, parts)) if length else 0
    return np.arange(parts + 1) * length // max(1, parts)


def _from_structure(
    structure: Structure, query_edges: NDArray[np.int64], key_edges: NDArray[np.int64]
) -> NDArray[np.int64]:
    ordered = Ordered(structure)
    counts = np.empty((len(query_edges) - 1, len(key_edges) - 1), np.int64)
    before = ordered.low
    for column, edge in enumerate(key_edges[1:].tolist()):
        limit = np.clip(edge, structure.first, structure.stop)
        upto = np.clip(ordered.below(limit), ordered.low, ordered.high)
        counts[:, column] = np.add.reduceat(upto - before, query_edges[:-1])
        before = upto
    return counts


def _from_cells(
    view: View, query_edges: NDArray[np.int64], key_edges: NDArray[np.int64]
) -> NDArray[np.int64]:
    counts = np.zeros((len(query_edges) - 1, len(key_edges) - 1), np.int64)
    for rows, block in view.blocks():
        first, last = np.searchsorted(query_edges, [rows.start, rows.stop - 1], "right") - 1
        for part in range(first, last + 1):
            start = max(int(query_edges[part]), rows.start) - rows.start
            stop = min(int(query_edges[part + 1]), rows.stop) - rows.start
            by_key = count_columns(block[start:stop])
            counts[part] += np.add.reduceat(by_key, key_edges[:-1])
    return counts
