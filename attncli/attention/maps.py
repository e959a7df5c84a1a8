"""Maps of many heads within a number of bytes: what to keep, and the numbers of it.

A map holds a weight for every block of cells, so that its size does not grow with the length. Of
short problems a block is a cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attncli.attention.pooling import Edges, edges_of
from attncli.attention.problem import Problem
from attncli.attention.streaming.pooling import Bins
from attncli.attention.streaming.stream import HeadRows

Floats = NDArray[np.float32]

HIDDEN = -1.0  # in the place of a weight, where no query of the block sees a key of it

# Beyond it a map of one head no longer has a point of the screen for each cell.
MOST_EXACT = 512
# Bins of pooled maps: more than these show no more, fewer too little to read.
MOST_BINS, FEWEST_BINS = 128, 40
# Bins of maps that only tell heads apart, and of those of the few heads that have more beside them.
THUMBNAILS, BESIDE_THUMBNAILS = (24, 16, 8), 96
# Of the bytes left, how many thumbnails of all heads may take.
SHARE_OF_THUMBNAILS = 0.75
BASE64 = 4 / 3
# Queries and keys of which scores are kept.
CORNER = 8
# Cells whose visibility is looked at at once.
CELLS_AT_ONCE = 1 << 22


class Encoding(StrEnum):
    """How weights are kept: as float32, or as 16 bits of their square root."""

    F4 = "f4"
    U2SQRT = "u2sqrt"

    @property
    def width(self) -> int:
        """Bytes of a weight."""
        return 4 if self is Encoding.F4 else 2


@dataclass(frozen=True, slots=True)
class MapShape:
    """How many heads there are of one size."""

    heads: int
    q_len: int
    k_len: int

    def cells(self, bins: int) -> int:
        """Blocks of all heads, with at most so many bins a side."""
        return self.heads * min(self.q_len, bins) * min(self.k_len, bins)

    def bytes(self, bins: int, planes: int, encoding: Encoding) -> float:
        """Of so many planes, of what is kept of single queries and keys, and of the corner."""
        single = min(self.q_len, bins) + min(self.k_len, bins) + CORNER**2
        weights = self.cells(bins) * planes * encoding.width
        return (weights + 4 * self.heads * single) * BASE64


@dataclass(frozen=True, slots=True)
class Plan:
    """What to keep of every head."""

    bins: int  # of queries and of keys, at most
    encoding: Encoding  # of the weights
    with_largest: bool  # whether the largest weight of each block is kept beside the mean
    # Of coarse maps of all heads; None where all have the same maps.
    thumbnail_bins: int | None = None
    # How many heads have maps of `bins` beside their thumbnails; None for all.
    detailed: int | None = None

    def bins_of(self, q_len: int, k_len: int, sink_keys: int) -> Bins:
        """The edges of one size; the first keys, and so the first queries, stay alone."""
        alone = min(max(4, sink_keys), self.bins // 2)
        return Bins(edges_of(q_len, self.bins, alone), edges_of(k_len, self.bins, alone))


def plan_maps(shapes: Sequence[MapShape], budget: float) -> Plan | None:
    """The most telling maps within so many bytes of base64; None where not even thumbnails fit.

    Every weight as float32, else as 16 bits, else pooled with the largest of each block, else by
    the mean alone, else thumbnails of all heads and maps of a few.

    Args:
        shapes: of all problems.
        budget: bytes.
    """
    longest = max(max(shape.q_len, shape.k_len) for shape in shapes)
    if longest <= MOST_EXACT:
        for encoding in Encoding:
            if sum(shape.bytes(longest, 1, encoding) for shape in shapes) <= budget:
                return Plan(longest, encoding, False)
    packed = Encoding.U2SQRT
    for planes in (2, 1):
        for bins in range(MOST_BINS, FEWEST_BINS - 1, -1):
            if sum(shape.bytes(bins, planes, packed) for shape in shapes) <= budget:
                return Plan(bins, packed, planes == 2)
    for thumbnail in THUMBNAILS:
        taken = sum(shape.cells(thumbnail) for shape in shapes) * packed.width * BASE64
        if taken <= SHARE_OF_THUMBNAILS * budget:
            bins = min(BESIDE_THUMBNAILS, longest)
            planes = 1 if bins == longest else 2
            each = max(replace(shape, heads=1).bytes(bins, planes, packed) for shape in shapes)
            heads = sum(shape.heads for shape in shapes)
            detailed = min(heads, int((budget - taken) // each))
            return Plan(bins, packed, planes == 2, thumbnail, detailed)
    return None


@dataclass(frozen=True, slots=True, eq=False)
class HeadMaps:
    """Maps of some heads of one batch, float32 with a row for each head."""

    bins: Bins  # the edges of both axes
    # (H, B_q, B_k), over all cells of a block, where a hidden one counts 0, so that rows keep their
    # sum; `HIDDEN` where all of them are.
    mean: Floats
    # (H, B_q, B_k), likewise the largest; `mean` itself where every block is a cell.
    largest: Floats
    entropy: Floats  # (H, B_q) in bits, mean over the queries that see a key; NaN for none
    mass: Floats  # (H, B_k), mean weight of the keys over the queries that see them; NaN for none
    keys: Floats  # (H, B_q), mean number of visible keys
    # (H, c, c), scaled and capped scores of the first queries and keys, before the mask; None of
    # weights.
    corner: Floats | None

    @property
    def pooled(self) -> bool:
        """Whether any block is more than a cell."""
        return any(edges[-1] >= len(edges) for edges in (self.bins.queries, self.bins.keys))

    def coarse(self, count: int) -> tuple[Bins, Floats]:
        """Fewer bins of the same, and the mean weights of these, (H, B_q, B_k)."""
        places = [edges_of(len(edges) - 1, count) for edges in (self.bins.queries, self.bins.keys)]
        bins = Bins(self.bins.queries[places[0]], self.bins.keys[places[1]])
        sums = np.where(self.mean == HIDDEN, 0, self.mean) * _cells(self.bins)
        mean = _reduced(np.add, sums, places) / _cells(bins)
        hidden = _reduced(np.minimum, (self.mean == HIDDEN).view(np.uint8), places)
        return bins, np.where(hidden, HIDDEN, mean).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class HeadMap:
    """The map of one head, as `HeadMaps` has it, but with weights where nothing is visible."""

    mean: Floats
    largest: Floats
    entropy: Floats
    mass: Floats
    keys: Floats


def map_of(rows: HeadRows, bins: Bins) -> HeadMap:
    """The map of a head that was measured with these bins and the mass of its keys."""
    assert rows.pooled is not None
    assert rows.received is not None
    known = (~rows.empty).cpu().numpy()
    entropy, keys = rows.entropy_bits.cpu().numpy(), rows.keys.cpu().numpy()
    mass, queries = rows.received.mass.cpu().numpy(), rows.received.queries.cpu().numpy()
    return HeadMap(
        mean=(rows.pooled.sums.cpu().numpy() / _cells(bins)).astype(np.float32),
        largest=rows.pooled.largest.cpu().numpy().astype(np.float32),
        entropy=_mean(np.where(known, entropy, 0), known, bins.queries),
        mass=_mean(mass, queries, bins.keys),
        keys=_mean(keys, np.ones_like(keys), bins.queries),
    )


def together(
    problem: Problem, batch: int, heads: Sequence[int], bins: Bins, maps: Sequence[HeadMap]
) -> HeadMaps:
    """The maps of some heads of a batch, where hidden cells are told from weights of 0."""
    mean, largest, entropy, mass, keys = (
        np.stack([getattr(one, name) for one in maps])
        for name in ("mean", "largest", "entropy", "mass", "keys")
    )
    apart = heads if problem.mask.differs(1) else heads[:1]
    hidden = np.stack([_hidden(problem, batch, head, bins) for head in apart])
    if problem.given is not None and problem.given.zeros_hidden:
        hidden = largest == 0
    return HeadMaps(
        bins=bins,
        mean=np.where(hidden, np.float32(HIDDEN), mean),
        largest=np.where(hidden, np.float32(HIDDEN), largest),
        entropy=entropy,
        mass=mass,
        keys=keys,
        corner=None if problem.given is not None else _corner(problem, batch, heads, bins),
    )


def _corner(problem: Problem, batch: int, heads: Sequence[int], bins: Bins) -> Floats:
    """Scaled and capped scores of the first queries and keys, (H, c, c)."""
    count = min(CORNER, int(bins.queries[-1]), int(bins.keys[-1]))
    shared = [problem.kv_head(head) for head in heads]
    q = problem.cast(problem.q[batch, list(heads), :count].detach())
    k = problem.cast(problem.k[batch, shared, :count].detach())
    scale = torch.tensor([problem.scale_of(head) for head in heads], dtype=torch.float64)
    scores = (q @ k.mT).cpu().double() * (scale / problem.temperature)[:, None, None]
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    return scores.float().numpy()


def _mean(sums: NDArray[Any], counts: NDArray[Any], edges: Edges) -> Floats:
    """Σ sums / Σ counts of each bin; NaN where the counts are 0."""
    total = np.add.reduceat(counts.astype(np.float64), edges[:-1])
    found = np.add.reduceat(sums.astype(np.float64), edges[:-1])
    return np.where(total > 0, found / np.maximum(total, 1), np.nan).astype(np.float32)


def _cells(bins: Bins) -> NDArray[np.int64]:
    """How many cells the blocks have, (B_q, B_k)."""
    return np.outer(np.diff(bins.queries), np.diff(bins.keys))


def _reduced(how: np.ufunc, values: NDArray[Any], edges: Sequence[Edges]) -> NDArray[Any]:
    """Values (…, queries, keys) brought together within the edges of both axes."""
    of_rows = how.reduceat(values, edges[0][:-1], axis=-2)
    found: NDArray[Any] = how.reduceat(of_rows, edges[1][:-1], axis=-1)
    return found


def _hidden(problem: Problem, batch: int, head: int, bins: Bins) -> NDArray[np.bool_]:
    """Where no query of a block sees any key of it, (B_q, B_k)."""
    seen = np.zeros((len(bins.queries) - 1, len(bins.keys) - 1), np.bool_)
    if not problem.mask.hides:
        return seen
    queries, keys = int(bins.queries[-1]), int(bins.keys[-1])
    height = max(1, CELLS_AT_ONCE // keys)
    for low in range(0, queries, height):
        rows = slice(low, min(low + height, queries))
        of_batch, of_head = slice(batch, batch + 1), slice(head, head + 1)
        cells = np.asarray(problem.mask.visible(of_batch, of_head, rows, slice(0, keys)))[0, 0]
        of_keys = np.logical_or.reduceat(cells, bins.keys[:-1], axis=1)
        bin_of_row = np.searchsorted(bins.queries, np.arange(low, rows.stop), side="right") - 1
        np.logical_or.at(seen, bin_of_row, of_keys)
    return ~seen
