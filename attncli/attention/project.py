"""Projections: X times W_Q, W_K and W_V gives Q, K and V; the output times W_O leaves the layer."""

from __future__ import annotations

import torch

from attncli.errors import DataError, UsageError


def project(
    x: torch.Tensor, weights: dict[str, torch.Tensor], heads: int, kv_heads: int
) -> dict[str, torch.Tensor]:
    """Project X and split the result into heads.

    Args:
        x: (S, d) or (B, S, d).
        weights: "wq" (d, H·d_k), "wk" (d, H_kv·d_k) and, where there are values, "wv"
            (d, H_kv·d_v).
        heads: H.
        kv_heads: H_kv.

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
        split = packed.reshape(*packed.shape[:2], counts[name], -1)
        projected[name.removeprefix("w")] = split.transpose(1, 2)  # (B, H, S, d)
    return projected


def project_output(output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Concatenate the heads of the output and project them.

    Args:
        output: (B, H, S, d_v).
        weight: W_O, (H·d_v, d).

    Returns:
        (B, 1, S, d), in the dtype of the output.
    """
    packed = output.transpose(1, 2).flatten(2)  # (B, S, H·d_v)
    return (packed @ weight.to(packed))[:, None]


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
