"""One side of the scores, queries or keys of a head, read in blocks and centred."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attncli.attention.threads import map_ranges

# Rows read, cast and centred at a time: 8192 × 128 float32 are 4 MiB.
TILE_ROWS = 8192
_SAMPLE_ROWS = 4096
_CHUNK_TILES = 8


@dataclass(frozen=True, slots=True)
class Side:
    """Some rows of Q or K, as vectors to be multiplied, in the order wanted.

    Attributes:
        tensor: (S, d), in the dtype it came in.
        order: int64 (n,), which rows and in which order; None for all as they lie.
        dtype: of the arithmetic, float32 or float64.
        device: where it is done.
    """

    tensor: torch.Tensor
    order: torch.Tensor | None
    dtype: torch.dtype
    device: torch.device

    def __len__(self) -> int:
        """How many rows."""
        return self.tensor.shape[0] if self.order is None else len(self.order)

    @property
    def width(self) -> int:
        """Length of one vector."""
        return self.tensor.shape[1]

    def block(self, at: int, stop: int) -> torch.Tensor:
        """Rows [at, stop) in the dtype of the arithmetic, (stop − at, d)."""
        rows = self.tensor[at:stop] if self.order is None else self.tensor[self.order[at:stop]]
        return rows.to(device=self.device, dtype=self.dtype)

    def rough_centre(self) -> torch.Tensor:
        """A vector near the mean, float64 (d,), that the arithmetic's dtype holds exactly.

        The mean of some thousand rows spread evenly; 0 where that is not finite. Subtracting it
        from float32 rows far from 0 loses nothing, and what is left of the mean is small.
        """
        step = -(-len(self) // _SAMPLE_ROWS)
        rows = self.tensor[::step] if self.order is None else self.tensor[self.order[::step]]
        mean = rows.to(device=self.device, dtype=torch.float64).mean(0)  # (d,)
        held = mean.to(self.dtype).to(torch.float64)
        return torch.where(torch.isfinite(held), held, 0.0)


@dataclass(frozen=True, slots=True)
class SideMoments:
    """Mean and population covariance of the rows of one side.

    Attributes:
        count: number of rows, ≥ 1.
        centre: float64 (d,), near the mean and exact in the dtype of the arithmetic.
        mean: float64 (d,).
        covariance: float64 (d, d).
    """

    count: int
    centre: torch.Tensor
    mean: torch.Tensor
    covariance: torch.Tensor

    @property
    def mean_norm(self) -> float:
        """Euclidean length of the mean vector."""
        return float(self.mean.norm())

    @property
    def entry_variance(self) -> float:
        """Variance of an entry about its column's mean, averaged over columns: tr(Σ)/d."""
        return float(self.covariance.diagonal().mean())


def side_moments(side: Side) -> SideMoments | None:
    """Moments of a side in one pass over its rows; None where it has none."""
    if len(side) == 0:
        return None
    centre = side.rough_centre()
    near = centre.to(side.dtype)
    whole = len(side) if side.device.type != "cpu" else _CHUNK_TILES * TILE_ROWS
    bounds = [(at, min(at + whole, len(side))) for at in range(0, len(side), whole)]
    sums = torch.stack(map_ranges(lambda at, end: _sums(side, near, at, end), bounds)).sum(0)
    first, second = sums[0], sums[1:]
    rest = first / len(side)
    covariance = second / len(side) - torch.outer(rest, rest)
    return SideMoments(len(side), centre, centre + rest, covariance)


def _sums(side: Side, near: torch.Tensor, begin: int, finish: int) -> torch.Tensor:
    """Σ x and, below it, Σ x xᵀ over rows x [begin, finish) less `near`, float64 (1 + d, d)."""
    sums = torch.zeros(side.width + 1, side.width, dtype=torch.float64, device=side.device)
    for at in range(begin, finish, TILE_ROWS):
        moved = side.block(at, min(at + TILE_ROWS, finish)) - near  # (rows, d)
        sums[0] += moved.sum(0)
        sums[1:] += moved.T @ moved
    return sums
