"""Scaled dot-product attention step by step, plainly: in float64 this file defines what is right.

    scores = Q Kᵀ
    scaled = scores · scale / temperature
    capped = c · tanh(scaled / c)
    masked = capped + biases, invisible cells −∞
    weights = softmax(masked), a sink joining the denominator
    output = weights · V
    entropy = −Σ weights · ln weights

Source: Vaswani et al., "Attention Is All You Need" (2017), section 3.2; the soft cap of Gemma 2
(2024), the sink logits of gpt-oss (2025).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from attncli.attention.threads import product, sum_along


@dataclass(frozen=True, slots=True)
class Logits:
    """What the softmax is given."""

    scores: torch.Tensor  # Q Kᵀ, (..., S_q, S_k)
    scaled: torch.Tensor  # scores · scale / temperature, same shape
    capped: torch.Tensor | None  # after the soft cap, same shape; None without one
    masked: torch.Tensor  # capped (or scaled) plus biases, −inf at invisible cells, same shape
    visible: torch.Tensor  # bool, same shape; True where the query sees the key


@dataclass(frozen=True, slots=True)
class Softmax:
    """Weights, and what is known beside them."""

    # (..., S_q, S_k); rows sum to 1, to less beside a sink, and to 0 in empty rows.
    weights: torch.Tensor
    logsumexp: torch.Tensor  # (..., S_q), of the visible keys alone; −inf in empty rows
    sink: torch.Tensor  # (..., S_q), the sink's own weight; 0 without one
    empty: torch.Tensor  # bool (..., S_q), True for a query that sees no key


def logits(
    scores: torch.Tensor,
    *,
    scale: float | torch.Tensor,
    temperature: float,
    softcap: float | None,
    visible: torch.Tensor,
    bias: torch.Tensor | None,
    scaled: torch.Tensor | None = None,
) -> Logits:
    """Every stage before the softmax, in the dtype of the scores.

    Args:
        scores: Q Kᵀ, (..., S_q, S_k), by whatever way they were made.
        scale: multiplies them; broadcastable to them.
        temperature: divides them.
        softcap: c of c·tanh(x/c); None for none.
        visible: bool, broadcastable to (..., S_q, S_k); True where the query sees the key.
        bias: broadcastable likewise; added to visible logits; None for none.
        scaled: scores · scale / temperature where these overflow before they are scaled; None
            where they do not.
    """
    if scaled is None:
        scaled = scores * scale if temperature == 1 else scores * scale / temperature
    capped = None if softcap is None else softcap * torch.tanh(scaled / softcap)
    masked = scaled if capped is None else capped
    if bias is not None:
        masked = masked + finite_in(bias, masked.dtype)
    shown = visible.expand(masked.shape)
    if visible.numel() != 1 or not bool(visible):  # one True hides nothing
        masked = torch.where(shown, masked, -torch.inf)
    return Logits(scores, scaled, capped, masked, shown)


def shrink_for(factor: float, dtype: torch.dtype) -> float:
    """A power of two that queries are multiplied by where their products might overflow.

    It rounds nothing, so that products that are equal stay equal.

    Args:
        factor: what products are multiplied by afterwards, which says how large they may be.
        dtype: of the arithmetic.
    """
    if not 0 < abs(factor) < 1:
        return 1.0
    return max(2.0 ** math.floor(math.log2(abs(factor))), torch.finfo(dtype).tiny)


def softmax(
    masked: torch.Tensor, visible: torch.Tensor, sink: torch.Tensor | None = None
) -> Softmax:
    """Softmax over the visible keys of each row, the row maximum subtracted first.

    Args:
        masked: (..., S_q, S_k), −inf at invisible cells.
        visible: bool, same shape.
        sink: broadcastable to (..., S_q), one more logit that joins maximum and denominator and
            whose weight is then dropped; None for none.
    """
    of_all = _row_maximum(masked)  # (..., S_q)
    empty = torch.isneginf(of_all)
    if bool(empty.any()):  # else every row has a key that it sees
        empty = empty & ~visible.any(-1)
    row_max = of_all if sink is None else torch.maximum(of_all, sink)
    row_max = torch.where(empty, 0.0, row_max)
    exps = (masked - row_max[..., None]).exp_()
    of_keys = sum_along(exps, torch.float64)
    of_sink = torch.zeros_like(of_keys)
    if sink is not None:
        of_sink = torch.where(empty, 0.0, torch.exp((sink - row_max).to(torch.float64)))
    sum_exp = torch.where(empty, 1.0, of_keys + of_sink)
    logsumexp = torch.log(of_keys) + row_max
    if sink is not None:  # the keys may all lie far below the sink: their own maximum then serves
        key_max = torch.where(empty, 0.0, of_all)
        of_own = sum_along(torch.exp(masked - key_max[..., None]), torch.float64)
        logsumexp = torch.log(of_own) + key_max
    weights = exps.div_(sum_exp[..., None].to(exps.dtype))
    if bool(torch.isnan(sum_exp).any()):  # where a row is NaN, hidden keys are not
        weights = torch.where(visible, weights, 0.0)
    return Softmax(
        weights=weights,
        logsumexp=torch.where(empty, -torch.inf, logsumexp).to(masked.dtype),
        sink=(of_sink / sum_exp).to(masked.dtype),
        empty=empty,
    )


def weighted_sum(weights: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Output = weights · V, (..., S_q, d_v), to which invisible keys give nothing at all.

    Args:
        weights: (..., S_q, S_k).
        v: (..., S_k, d_v); NaN and inf count only for the queries that see their key.
        visible: bool (..., S_q, S_k).
    """
    finite = torch.isfinite(v)
    output = product(weights, torch.where(finite, v, 0.0))  # (..., S_q, d_v)
    return output if bool(finite.all()) else output + _of_broken(weights, v, visible)


def _of_broken(weights: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """What NaN and inf in V add to the output, (..., S_q, d_v): 0 for those who do not see them.

    Told by counting: in a product with V itself 0 · NaN would be NaN for every query.
    """

    def reached(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return keys.to(weights.dtype) @ values.to(weights.dtype) > 0  # (..., S_q, d_v)

    weighed, vanished = visible & (weights != 0), visible & (weights == 0)
    nan = reached(visible, torch.isnan(v)) | reached(vanished, torch.isinf(v))  # 0 · ∞ is NaN
    higher = torch.where(reached(weighed, v == torch.inf), torch.inf, 0.0)
    lower = torch.where(reached(weighed, v == -torch.inf), -torch.inf, 0.0)
    return torch.where(nan, torch.nan, higher + lower)


@dataclass(frozen=True, slots=True)
class OutputProjection:
    """What the joined heads are multiplied with, and what is added then."""

    weight: torch.Tensor  # W_O, (H·d_v, d)
    bias: torch.Tensor | None = None  # (d,); None for none


def project_output(output: torch.Tensor, projection: OutputProjection) -> torch.Tensor:
    """Concatenate the heads of the output and project them.

    Args:
        output: (B, H, S, d_v).
        projection: with a weight for as many columns.

    Returns:
        (B, 1, S, d), in the dtype of the output.
    """
    packed = output.transpose(1, 2).flatten(2)  # (B, S, H·d_v)
    projected = product(packed, projection.weight.to(packed))
    if projection.bias is not None:
        projected += projection.bias.to(packed)
    return projected[:, None]


def entropy_of_weights(weights: torch.Tensor, *, with_sink: bool = False) -> torch.Tensor:
    """Shannon entropy of each row, in nats: Σ −w ln w with 0·ln 0 = 0.

    Args:
        weights: (..., S_q, S_k), rows that sum to 1, or to less beside a sink, or to 0.
        with_sink: whether what a row lacks to 1 is the weight of a sink, one more outcome.

    Returns:
        float64 (..., S_q); 0 in empty rows, never negative, nor above that of equal weights.

    Source: Shannon, "A Mathematical Theory of Communication" (1948).
    """
    exact = weights.to(torch.float64)
    entropy = sum_along(torch.special.entr(exact))
    outcomes = (exact > 0).sum(-1)
    if with_sink:
        total = sum_along(exact)
        rest = torch.where(total > 0, 1 - total, 0.0).clamp(min=0.0)
        entropy = entropy + torch.special.entr(rest)
        outcomes = outcomes + (rest > 0)
    most = torch.log(outcomes.clamp(min=1).to(torch.float64))
    bounded: torch.Tensor = torch.minimum(entropy, most).clamp(min=0.0) + 0.0  # never −0.0
    return bounded


def finite_in(bias: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A bias in another dtype, in which finite values stay finite.

    float64's lowest value, say, would be −inf in float32 and hide a key that it only makes
    unlikely.
    """
    limit = torch.finfo(dtype)
    if bias.is_floating_point() and torch.finfo(bias.dtype).max <= limit.max:
        return bias.to(dtype)
    clamped = bias.to(torch.float64).clamp(limit.min, limit.max)
    return torch.where(torch.isinf(bias), bias.to(torch.float64), clamped).to(dtype)


def _row_maximum(masked: torch.Tensor) -> torch.Tensor:
    if masked.shape[-1] == 0:
        return masked.new_full(masked.shape[:-1], -torch.inf)
    return masked.amax(-1)
