"""Lengths of the axes of one attention problem."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths of the axes of one attention problem: B, H, S_q, S_k."""

    batch: int
    heads: int
    q_len: int
    k_len: int
