"""Q, K and V that no file holds: the embedded example, random ones, and projections of X."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from attncli.errors import DataError, UsageError

# The 4×3 example that the theory works through by hand; V is ours.
EXAMPLE_Q = [[0.11, 0.77, 0.08], [-0.55, -0.28, 0.24], [-0.79, 0.97, -0.74], [-0.72, 0.95, 0.36]]
EXAMPLE_K = [[-0.89, -0.34, -0.17], [-0.17, 0.81, -0.10], [0.86, -0.99, 0.30], [0.10, -0.91, 0.92]]
EXAMPLE_V = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomShape:
    """Sizes of random Q, K and V; None follows another size as its comment says."""

    batch: int = 1
    heads: int = 1
    kv_heads: int | None = None  # heads
    q_len: int = 8
    k_len: int | None = None  # q_len
    dk: int = 64
    dv: int | None = None  # dk


def example() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K and V of the embedded example, each float64 (4, 3)."""
    matrices = (EXAMPLE_Q, EXAMPLE_K, EXAMPLE_V)
    q, k, v = (torch.tensor(rows, dtype=torch.float64) for rows in matrices)
    return q, k, v


def draw(
    shape: RandomShape, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q (B, H, S_q, d_k), K (B, H_kv, S_k, d_k) and V (B, H_kv, S_k, d_v), standard normal.

    Drawn in that order from `numpy.random.default_rng(seed)` in float64 and then cast to `dtype`,
    so that a seed means the same numbers on every device and version.

    Raises:
        UsageError: a negative seed or length, or fewer than one batch, head or d_k.
    """
    kv_heads = shape.heads if shape.kv_heads is None else shape.kv_heads
    k_len = shape.q_len if shape.k_len is None else shape.k_len
    dv = shape.dk if shape.dv is None else shape.dv
    at_least_one = {"«batch»": shape.batch, "«heads»": shape.heads, "«kv_heads»": kv_heads}
    for option, value in (at_least_one | {"«dk»": shape.dk}).items():
        if value < 1:
            raise UsageError(option, f"expected at least 1, got {value}")
    for option, value in {"«q_len»": shape.q_len, "«k_len»": k_len, "«dv»": dv}.items():
        if value < 0:
            raise UsageError(option, f"expected at least 0, got {value}")
    if seed < 0:
        raise UsageError("«seed»", f"expected at least 0, got {seed}")
    rng = np.random.default_rng(seed)
    q = _normal(rng, (shape.batch, shape.heads, shape.q_len, shape.dk), dtype)
    k = _normal(rng, (shape.batch, kv_heads, k_len, shape.dk), dtype)
    v = _normal(rng, (shape.batch, kv_heads, k_len, dv), dtype)
    return q, k, v


def project(
    x: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    heads: int,
    kv_heads: int,
    biases: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> dict[str, torch.Tensor]:
    """Project X and split the result into heads.

    Args:
        x: (S, d) or (B, S, d).
        weights: "wq" (d, H·d_k), "wk" (d, H_kv·d_k) and, where there are values, "wv"
            (d, H_kv·d_v).
        heads: H.
        kv_heads: H_kv.
        biases: for some of these weights, under the weight's name, what is added then: one number
            for each of its columns.

    Returns:
        "q", "k" and "v", float64 (B, H | H_kv, S, d_k | d_v).

    Raises:
        DataError: a rank or width that does not fit.
        UsageError: a number of heads that does not divide the width.
    """
    if x.ndim not in (2, 3):
        raise DataError("«x»", f"expected (S, d) or (B, S, d), got {tuple(x.shape)}")
    whole = x[(None,) * (3 - x.ndim)].to(torch.float64)  # (B, S, d)
    counts = {"wq": heads, "wk": kv_heads, "wv": kv_heads}
    projected = {}
    for name, weight in weights.items():
        _check_weight(f"«{name}»", weight, whole.shape[-1], counts[name])
        packed = whole @ weight.to(torch.float64)  # (B, S, H·d)
        if name in biases:
            packed += biases[name].to(torch.float64)
        split = packed.reshape(*packed.shape[:2], counts[name], -1)
        projected[name.removeprefix("w")] = split.transpose(1, 2)  # (B, H, S, d)
    return projected


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)


def _check_weight(option: str, weight: torch.Tensor, width: int, heads: int) -> None:
    if weight.ndim != 2 or weight.shape[0] != width:
        raise DataError(
            option,
            f"expected (d, H·width) with d={width} like «x», got {tuple(weight.shape)}",
            "«weights_layout=out-in» takes the weight of an nn.Linear",
        )
    if heads < 1 or weight.shape[1] % heads:
        raise UsageError(
            "«heads»", f"expected a divisor of {option}'s width {weight.shape[1]}, got {heads}"
        )
