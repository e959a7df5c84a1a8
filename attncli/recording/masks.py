"""What the masks of a model are: options where they are a known pattern, else the masks themselves.

Left to themselves the numbers of a mask mislead: what frameworks add to hide a key is finite, and a
mask that is causal by its hidden cells may add a bias to the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from attncli.attention.masks.build import build_mask
from attncli.attention.masks.recognise import recognise_mask
from attncli.attention.options import AttentionOptions
from attncli.attention.sizes import Sizes

# Values looked at together.
_PART = 1 << 22


@dataclass(slots=True)
class MaskReader:
    """Masks as keywords of `AttentionOptions`, each worked out once as long as it is remembered.

    Attributes:
        known: the tensors by their identity, which is theirs as long as they are kept, and the
            keywords.
    """

    known: dict[tuple[int, ...], tuple[Any, dict[str, Any]]] = field(default_factory=dict)

    def keywords(
        self, mask: torch.Tensor | None, bias: torch.Tensor | None, q_len: int, k_len: int
    ) -> dict[str, Any]:
        """Keywords that hide and add what a mask and a bias do.

        Args:
            mask: bool, True = may attend, or additive; up to (B, H, S_q, S_k); None for none.
            bias: additive, likewise.
            q_len: S_q.
            k_len: S_k.
        """
        key = id(mask), id(bias), q_len, k_len
        if key not in self.known:
            self.known[key] = (mask, bias), _keywords(mask, bias, q_len, k_len)
        return self.known[key][1]

    def forget(self) -> None:
        """Let go of all masks: those that come now are others."""
        self.known.clear()


def _keywords(
    mask: torch.Tensor | None, bias: torch.Tensor | None, q_len: int, k_len: int
) -> dict[str, Any]:
    visible, added = split(mask if mask is None else mask[..., :k_len])
    if bias is not None:
        added = bias[..., :k_len] if added is None else added + bias[..., :k_len]
    found = {} if visible is None else _recognised(visible, q_len, k_len)
    if added is None:
        return {"attn_mask": _of_rank_4(visible)} if found is None else found
    values = added.float()
    if visible is not None:  # where options hide, what is added is nothing
        values = values.masked_fill(~visible, -math.inf if found is None else 0.0)
    return (found or {}) | {"attn_mask": _of_rank_4(values)}


def split(mask: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What a mask hides and what it adds, each None where it does not.

    Returns:
        Bool, True = visible; and the values, which mean nothing where they hide.
    """
    if mask is None or mask.dtype == torch.bool:
        return mask, None
    limit = torch.finfo(mask.dtype).min / 2  # sums of two lowest values lie beyond, too
    visible = mask > limit
    flat, seen = mask.reshape(-1), visible.reshape(-1)
    adds = any(
        bool(((flat[start : start + _PART] != 0) & seen[start : start + _PART]).any())
        for start in range(0, len(flat), _PART)
    )
    return (None if bool(visible.all()) else visible), (mask if adds else None)


def _recognised(visible: torch.Tensor, q_len: int, k_len: int) -> dict[str, Any] | None:
    """The options that build a mask; None where none do."""
    cells = _of_rank_4(visible)
    sizes = Sizes(cells.shape[0], cells.shape[1], q_len, k_len)
    return recognise_mask(build_mask(AttentionOptions(attn_mask=cells), sizes)).options


def _of_rank_4(values: torch.Tensor | None) -> np.ndarray[Any, Any]:
    assert values is not None
    array: np.ndarray[Any, Any] = values.detach().cpu().numpy()
    return array.reshape((1,) * (4 - array.ndim) + array.shape)
