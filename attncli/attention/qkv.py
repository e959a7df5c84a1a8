"""Q, K and V that no file holds, and weights in the place of Q and K.

The embedded example, random ones, projections of X, and what holds all three. Of weights that
someone else has computed the logarithms are logits that the same softmax leads to, so everything
that is known of rows by their logits is known of them too, but for what a constant along the row
would change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from attncli.attention.masks.build import build_mask
from attncli.attention.masks.mask import Mask
from attncli.attention.nonfinite import origin_of_weights, refuse_nonfinite
from attncli.attention.options import BEFORE_WEIGHTS, AttentionOptions, Layout, Precision
from attncli.attention.problem import GivenWeights, Problem, choose_device, compute_dtype
from attncli.attention.sizes import PACKED, RandomShape, Sizes, to_bhsd
from attncli.attention.threads import product, sum_along
from attncli.errors import DataError, UsageError

# The 4×3 example that the theory works through by hand; V is ours.
EXAMPLE_Q = [[0.11, 0.77, 0.08], [-0.55, -0.28, 0.24], [-0.79, 0.97, -0.74], [-0.72, 0.95, 0.36]]
EXAMPLE_K = [[-0.89, -0.34, -0.17], [-0.17, 0.81, -0.10], [0.86, -0.99, 0.30], [0.10, -0.91, 0.92]]
EXAMPLE_V = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]]

# Numbers that are drawn before Ctrl-C is heard again.
DRAWN_AT_ONCE = 1 << 22


def example() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K and V of the embedded example, each float64 (4, 3)."""
    q, k, v = (torch.tensor(m, dtype=torch.float64) for m in (EXAMPLE_Q, EXAMPLE_K, EXAMPLE_V))
    return q, k, v


def draw(
    shape: RandomShape, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q (B, H, S_q, d_k), K (B, H_kv, S_k, d_k) and V (B, H_kv, S_k, d_v), standard normal.

    Drawn in that order from `numpy.random.default_rng(seed)` in float64 and then cast to `dtype`,
    so that a seed means the same numbers on every device and version.

    Raises:
        UsageError: a negative seed.
    """
    kv_heads, k_len, dv = shape.key_heads, shape.keys, shape.values
    if seed < 0:
        raise UsageError("«seed»", f"expected at least 0, got {seed}")
    rng = np.random.default_rng(seed)

    def normal(*axes: int) -> torch.Tensor:
        drawn = torch.empty((shape.batch, *axes), dtype=dtype)
        flat = drawn.view(-1)
        for at in range(0, len(flat), DRAWN_AT_ONCE):
            part = flat[at : at + DRAWN_AT_ONCE]
            part.copy_(torch.from_numpy(rng.standard_normal(len(part))))
        return drawn

    q = normal(shape.heads, shape.q_len, shape.dk)
    return q, normal(kv_heads, k_len, shape.dk), normal(kv_heads, k_len, dv)


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
        packed = product(whole, weight.to(torch.float64))  # (B, S, H·d)
        if name in biases:
            packed += biases[name].to(torch.float64)
        width = packed.shape[2] // counts[name]
        split = packed.reshape(*packed.shape[:2], counts[name], width)
        projected[name.removeprefix("w")] = split.transpose(1, 2)  # (B, H, S, d)
    return projected


def split_fused(
    fused: torch.Tensor, layout: Layout, heads: int | None, kv_heads: int | None
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Split one tensor that holds Q, K and V.

    Args:
        fused: (B, S, 3, H, d), as FlashAttention has it, or with the axis of 3 elsewhere:
            (B, S, H, 3, d), (3, B, H, S, d) or (B, 3, H, S, d); without B one rank less. Or packed,
            (B, S, H·d + 2·H_kv·d) or without B: first all of Q, then of K, then of V. Or
            (B, S, 3, H·d).
        layout: order of the other axes; B and S are exchanged for `sbhd` and `sbh`.
        heads: H, which packed ones need.
        kv_heads: H_kv; None means `heads`.

    Returns:
        "q", "k" and "v" as (B, H | H_kv, S, d), and what was taken for what, if that is doubtful.

    Raises:
        DataError: no axis of 3.
        UsageError: packed ones without a number of heads, or with one that does not fit.
    """
    shape = tuple(fused.shape)
    by_rows = layout in (Layout.SBHD, Layout.SBH)
    unpacked, packed = (
        (Layout.SBHD, Layout.SBH) if by_rows else (Layout.BSHD, Layout.BSH)
    )  # with S before H
    if fused.ndim in (2, 3):
        return _split_packed(fused, packed, heads, kv_heads), []
    likely = {4: (1, 0, 2), 5: (2, 3, 0, 1)}.get(fused.ndim, ())
    threes = [axis for axis in likely if shape[axis] == 3]
    if not threes:
        raise DataError(
            "«qkv»",
            f"expected (B, S, 3, H, d), (S, 3, H, d) or packed heads, got {shape}",
            "(B, S, 3·H·d) and (B, S, H·d + 2·H_kv·d) need «heads»",
        )
    axis, *others = threes
    said = [
        f"«qkv»: of {shape}, axis {axis} is taken as that of Q, K and V, though axis {other} is of "
        "length 3 as well"
        for other in others
    ]
    parts = dict(zip("qkv", fused.unbind(axis), strict=True))
    if fused.ndim == 4 and axis == 2 and heads not in (None, shape[1]):
        return {role: to_bhsd(part, role, packed, heads) for role, part in parts.items()}, said
    before = axis < 2 and (axis, fused.ndim) != (1, 4)  # before both S and H
    order = layout if before and layout not in PACKED else unpacked
    return {role: to_bhsd(part, role, order, None) for role, part in parts.items()}, said


def _split_packed(
    fused: torch.Tensor, layout: Layout, heads: int | None, kv_heads: int | None
) -> dict[str, torch.Tensor]:
    """Q, K and V as (B, H, S, d) of one tensor that holds all of Q, then all of K and of V."""
    shape = tuple(fused.shape)
    if heads is None:
        raise UsageError("«qkv»", f"expected «heads» beside it for packed heads {shape}, got none")
    counts = {"q": heads, "k": kv_heads or heads, "v": kv_heads or heads}
    total = sum(counts.values())
    if min(counts.values()) < 1 or shape[-1] % total:
        raise UsageError(
            "«heads»", f"expected H + 2·H_kv to divide the width {shape[-1]} of «qkv», got {total}"
        )
    width = shape[-1] // total
    parts = torch.split(fused, [count * width for count in counts.values()], dim=-1)
    named = zip(counts.items(), parts, strict=True)
    return {role: to_bhsd(part, role, layout, count) for (role, count), part in named}


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


# How far from 1 a row may be without a word, whatever the dtype: programs round on the way.
ROW_SUM_TOLERANCE = 1e-4
# Dropout doubles a row at times, and no habit makes it three times as large.
MOST_OF_A_ROW = 3.0
# The share of visible cells without weight from which on it is worth a sentence.
MANY_ZEROS = 0.1
BLOCK_CELLS = 1 << 22


def problem_of_weights(
    weights: torch.Tensor,
    options: AttentionOptions,
    *,
    precision: Precision = Precision.AUTO,
    device: str = "auto",
    allow_nonfinite: bool = False,
) -> Problem:
    """Check weights, row by row.

    Where no option hides keys, those of weight 0 count as hidden.

    Args:
        weights: (S_q, S_k), (H, S_q, S_k) or (B, H, S_q, S_k).
        options: what is known of the mask, and where queries stand.
        precision: dtype of the arithmetic.
        device: "auto", "cpu", "cuda" or "cuda:N".
        allow_nonfinite: whether NaN and inf are let through.

    Raises:
        DataError: no weights: another rank, negative values, sums far from 1, or NaN and inf that
            are not allowed.
        UsageError: options that do not fit the shapes, or that weights have behind them.
        ResourceError: a device that is not there.
    """
    for name in BEFORE_WEIGHTS:
        value = getattr(options, name)
        if value is not None and value is not False and not (name == "temperature" and value == 1):
            behind = "it has shaped them already"
            raise UsageError(f"«{name}»", f"expected nothing beside «weights», got it; {behind}")
    if not 2 <= weights.ndim <= 4:
        expected = "(S_q, S_k), (H, S_q, S_k) or (B, H, S_q, S_k)"
        raise DataError("weights", f"expected {expected}, got {tuple(weights.shape)}")
    if weights.dtype is torch.bool or weights.is_complex():
        raise DataError("weights", f"expected real numbers, got {weights.dtype}")
    whole = weights.detach()[(None,) * (4 - weights.ndim)]
    if not allow_nonfinite:
        refuse_nonfinite(whole, "weights")
    sizes = Sizes(*whole.shape)
    mask = build_mask(options, sizes)
    seen = _examined(whole, mask)
    origins = origin_of_weights(whole, mask) if allow_nonfinite else []
    nothing = whole.new_zeros(1, dtype=torch.float32)
    return Problem(
        q=nothing.expand(*whole.shape[:3], 1),
        k=nothing.expand(*whole.shape[:2], sizes.k_len, 1),
        v=None,
        mask=mask,
        scale=1.0,
        temperature=1.0,
        softcap=None,
        sinks=None,
        dtype=compute_dtype(precision, [whole.dtype], sizes),
        device=choose_device(device),
        marked_warnings=(*_judged(seen, whole, mask), *mask.warnings, *origins),
        given=GivenWeights(whole, seen.lowest, seen.highest, zeros_hidden=not mask.hides),
    )


@dataclass(frozen=True, slots=True)
class _Seen:
    """What stands in the rows of real queries that are not empty."""

    lowest: float | None  # of the sums of rows; None where there are none
    highest: float | None
    columns_off: float  # how far from 1 the sums of columns are at most
    on_hidden: float  # the most that a row gives to keys which the mask hides
    zeros: float  # visible cells of weight 0, as a share of all visible ones


def _examined(weights: torch.Tensor, mask: Mask) -> _Seen:
    """One walk over all rows, a block at a time.

    Raises:
        DataError: a negative weight.
    """
    sums, columns_off, on_hidden, zeros, visible = [], 0.0, 0.0, 0, 0
    step = max(1, BLOCK_CELLS // max(1, weights.shape[-1]))
    for batch in range(weights.shape[0]):
        for head in range(weights.shape[1]):
            view, columns = mask.head(batch, head), torch.zeros(weights.shape[-1])
            for start in range(0, view.rows, step):
                rows = slice(start, min(start + step, view.rows))
                block = weights[batch, head, rows].cpu().to(torch.float64)
                if bool((block < 0).any()):
                    row, key = (block < 0).nonzero()[0].tolist()
                    value, where = float(block[row, key]), (batch, head, start + row, key)
                    problem = f"expected weights, of at least 0, got {value:.4g} at {where}"
                    advice = "scores before the softmax are no weights yet"
                    raise DataError("weights", problem, advice)
                sums.append(sum_along(block))
                columns = columns + block.sum(0)
                if mask.hides:
                    seen = torch.tensor(view.cells(rows))
                    hidden = sum_along(torch.where(seen, 0.0, block))
                    on_hidden = max(on_hidden, float(hidden.max()) if len(hidden) else 0.0)
                    zeros += int((seen & (block == 0)).sum())
                    visible += int(seen.sum())
            columns_off = max(columns_off, float((columns - 1).abs().max()) if len(columns) else 0)
    found = torch.cat(sums) if sums else torch.zeros(0)
    found = found[torch.isfinite(found) & (found > 0)]
    lowest, highest = (float(found.min()), float(found.max())) if len(found) else (None, None)
    return _Seen(lowest, highest, columns_off, on_hidden, zeros / max(1, visible))


def _judged(seen: _Seen, weights: torch.Tensor, mask: Mask) -> list[str]:
    """What looks like a mistake, in sentences.

    Raises:
        DataError: what cannot be weights.
    """
    lowest, highest, tolerance = seen.lowest, seen.highest, ROW_SUM_TOLERANCE
    if weights.is_floating_point():  # how far from 1 rounding takes the sum of a row of this dtype
        kind = torch.finfo(weights.dtype)
        subnormal = kind.smallest_normal * kind.eps
        tolerance = max(tolerance, 2 * kind.eps + weights.shape[-1] * subnormal / 2)
    if lowest is None or highest is None:
        return []
    said = []
    off = max(1 - lowest, highest - 1) > tolerance
    if off and seen.columns_off <= tolerance:
        raise DataError(
            "weights",
            "expected rows that sum to 1, got columns that do",
            "the last two axes are queries and keys, in this order: exchange them",
        )
    if highest > MOST_OF_A_ROW:
        sums = f"sums from {lowest:.4g} to {highest:.4g}"
        raise DataError("weights", f"expected rows that sum to 1, got {sums}")
    if off:
        said.append(
            f"rows of weights sum from {lowest:.4g} to {highest:.4g}, not to 1, and are measured "
            "as shares of their sum; was dropout on, or the share of a sink logit left out?"
        )
    if seen.on_hidden > tolerance:
        said.append(
            f"up to {seen.on_hidden:.4g} of a row of weights is on keys that the options hide, and "
            "is left out"
        )
    if seen.zeros > MANY_ZEROS:
        said.append(
            f"{seen.zeros:.0%} of the weights that the options show are 0: rounded to it, or "
            "hidden by something else; they count as visible"
        )
    return said
