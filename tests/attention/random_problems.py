"""Random problems for hypothesis: tensors, masks and everything that needs positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

Cells = tuple[int, int, int, int]  # B, H, S_q, S_k


@dataclass(frozen=True)
class Tensors:
    """Q, K and V of a random problem, float64."""

    q: torch.Tensor  # (B, H, S_q, d_k)
    k: torch.Tensor  # (B, H_kv, S_k, d_k)
    v: torch.Tensor  # (B, H_kv, S_k, d_v)

    @property
    def cells(self) -> Cells:
        return (*self.q.shape[:3], self.k.shape[2])


@st.composite
def tensors(draw: st.DrawFn, *, square: bool = False) -> Tensors:
    def size(most: int) -> int:
        return draw(st.integers(1, most))

    batch, kv_heads, group = size(3), size(3), size(3)
    q_len, k_len = size(7), size(7)
    dk, dv = size(9), size(5)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.1, 1.0, 5.0]))

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape) * spread)

    return Tensors(
        normal(batch, kv_heads * group, k_len if square else q_len, dk),
        normal(batch, kv_heads, k_len, dk),
        normal(batch, kv_heads, k_len, dv),
    )


@st.composite
def masks(draw: st.DrawFn, cells: Cells) -> np.ndarray[Any, Any] | None:
    """None, or a boolean or additive mask of any rank, axes of length 1 among them."""
    kind = draw(st.sampled_from(["none", "boolean", "additive"]))
    if kind == "none":
        return None
    ranks = [1, 2, 4] if cells[0] == cells[1] > 1 else [1, 2, 3, 4]
    full = cells[4 - draw(st.sampled_from(ranks)) :]
    shape = [length if draw(st.booleans()) else 1 for length in full]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    keep = rng.random(shape) < draw(st.sampled_from([0.3, 0.8, 1.0]))
    return keep if kind == "boolean" else np.where(keep, rng.standard_normal(shape), -math.inf)


@st.composite
def positional_options(draw: st.DrawFn, cells: Cells) -> dict[str, Any]:
    batch, _, q_len, k_len = cells
    offset = st.integers(-q_len - 1, k_len + 1)
    found: dict[str, Any] = {
        "query_offset": draw(st.lists(offset, min_size=batch, max_size=batch)),
        "causal": draw(st.booleans()),
        "alibi": draw(st.booleans()),
    }
    for name in ("left_window", "right_window"):
        found[name] = draw(st.none() | st.integers(0, k_len + 1))
    if found["left_window"] is not None or found["right_window"] is not None:
        found["dilation"] = draw(st.none() | st.integers(1, 3))
    if found["left_window"] is not None:
        found["sink_window"] = draw(st.none() | st.integers(0, k_len + 1))
    if found["causal"]:
        found["prefix"] = draw(st.none() | st.integers(0, k_len + 1))
    lengths = st.lists(st.integers(0, k_len), min_size=batch, max_size=batch)
    found["key_lengths"] = draw(st.none() | lengths)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        found["key_padding"] = rng.random((batch, k_len)) < 0.7
    if draw(st.booleans()):
        found["segments"] = np.sort(rng.integers(0, 3, (batch, k_len)))
    return found
