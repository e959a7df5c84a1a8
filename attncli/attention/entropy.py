"""Entropy of rows of weights."""

from __future__ import annotations

import torch


def entropy_of_weights(weights: torch.Tensor, *, with_sink: bool = False) -> torch.Tensor:
    """Shannon entropy of each row, in nats: Σ −w ln w with 0·ln 0 = 0.

    Args:
        weights: (..., S_q, S_k), rows that sum to 1, or to less beside a sink, or to 0.
        with_sink: whether what a row lacks to 1 is the weight of a sink, one more outcome.

    Returns:
        float64 (..., S_q); 0 in empty rows, never negative.

    Source: Shannon, "A Mathematical Theory of Communication" (1948).
    """
    exact = weights.to(torch.float64)
    entropy = torch.special.entr(exact).sum(-1)
    if with_sink:
        total = exact.sum(-1)
        rest = torch.where(total > 0, 1 - total, 0.0).clamp(min=0.0)
        entropy = entropy + torch.special.entr(rest)
    never_minus_zero: torch.Tensor = entropy.clamp(min=0.0) + 0.0
    return never_minus_zero
