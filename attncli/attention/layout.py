"""The ways tensors lie in memory, brought to (B, H, S, d)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncli.attention.options import Layout
from attncli.errors import DataError, UsageError

if TYPE_CHECKING:
    import torch


def to_bhsd(tensor: torch.Tensor, role: str, layout: Layout, heads: int | None) -> torch.Tensor:
    """View a tensor as (B, H, S, d).

    Args:
        tensor: rank 2 (S, d), 3 (H, S, d) or 4 (B, H, S, d) for `bhsd`; rank 4 (B, S, H, d) or
            3 (S, H, d) for `bshd`; rank 3 (B, S, H·d) or 2 (S, H·d) for `bsh`.
        role: name for messages: "q", "k", "v".
        layout: order of the axes.
        heads: number of heads that `bsh` packs into its last axis.

    Raises:
        DataError: a rank that the layout does not have.
        UsageError: `bsh` without a number of heads, or one that does not divide the width.
    """
    shape = tuple(tensor.shape)
    if layout is Layout.BSH:
        return _unpack(tensor, role, heads)
    ranks = (3, 4) if layout is Layout.BSHD else (2, 3, 4)
    if tensor.ndim == 2 and layout is Layout.BSHD:
        return tensor[None, None]
    if tensor.ndim not in ranks:
        expected = "(S, d), (H, S, d) or (B, H, S, d)"
        if layout is Layout.BSHD:
            expected = "(S, d), (S, H, d) or (B, S, H, d)"
        raise DataError(role, f"expected {expected}, got {shape}")
    whole = tensor[(None,) * (4 - tensor.ndim)]
    return whole.transpose(1, 2) if layout is Layout.BSHD else whole


def _unpack(tensor: torch.Tensor, role: str, heads: int | None) -> torch.Tensor:
    """Split (B, S, H·d) into (B, H, S, d), as a view."""
    shape = tuple(tensor.shape)
    if tensor.ndim not in (2, 3):
        raise DataError(role, f"expected (B, S, H·d) for «layout=bsh», got {shape}")
    if heads is None:
        raise UsageError("«layout=bsh»", "expected «heads» beside it, got none")
    if heads < 1 or shape[-1] % heads:
        option = "«heads»" if role == "q" else "«kv_heads» or «heads»"
        raise UsageError(option, f"expected a divisor of {role}'s width {shape[-1]}, got {heads}")
    whole = tensor[(None,) * (3 - tensor.ndim)]
    width = shape[-1] // heads
    return whole.reshape(*whole.shape[:-1], heads, width).transpose(1, 2)  # (B, H, S, d)
