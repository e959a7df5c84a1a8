"""The axes of tensors: their lengths, and the orders they lie in memory in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from attncli.attention.options import Layout
from attncli.errors import DataError, UsageError

Tensor = TypeVar("Tensor", bound=Any)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths of the axes of one attention problem: B, H, S_q, S_k."""

    batch: int
    heads: int
    q_len: int
    k_len: int


def to_bhsd(tensor: Tensor, role: str, layout: Layout, heads: int | None) -> Tensor:
    """View a tensor, of torch or NumPy, as (B, H, S, d).

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
    found: Tensor = _unpack(tensor, role, heads) if layout is Layout.BSH else tensor
    if found.ndim not in (2, 3, 4):
        expected = "(S, d), (H, S, d) or (B, H, S, d)"
        if layout is Layout.BSHD:
            expected = "(S, d), (S, H, d) or (B, S, H, d)"
        raise DataError(role, f"expected {expected}, got {tuple(tensor.shape)}")
    found = found[(None,) * (4 - found.ndim)]
    if layout is Layout.BSH or (layout is Layout.BSHD and tensor.ndim > 2):
        found = found.swapaxes(1, 2)
    return found


def _unpack(tensor: Tensor, role: str, heads: int | None) -> Tensor:
    """(B, S, H, d) of (B, S, H·d), as a view."""
    shape = tuple(tensor.shape)
    if tensor.ndim not in (2, 3):
        raise DataError(role, f"expected (B, S, H·d) for «layout=bsh», got {shape}")
    if heads is None:
        raise UsageError("«layout=bsh»", "expected «heads» beside it, got none")
    if heads < 1 or shape[-1] % heads:
        option = "«heads»" if role == "q" else "«kv_heads» or «heads»"
        raise UsageError(option, f"expected a divisor of {role}'s width {shape[-1]}, got {heads}")
    whole = tensor[(None,) * (3 - tensor.ndim)]
    split: Tensor = whole.reshape(*whole.shape[:-1], heads, shape[-1] // heads)
    return split
