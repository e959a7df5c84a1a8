"""What the masks of a model are: options where they are a known pattern, else the masks themselves.

Left to themselves the numbers of a mask mislead: what frameworks add to hide a key is finite, and a
mask that is causal by its hidden cells may add a bias to the others.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import torch

from attncli.attention.masks.audit import recognise_mask
from attncli.attention.masks.build import build_mask
from attncli.attention.options import AttentionOptions
from attncli.attention.sizes import Sizes

# Values looked at together.
_PART = 1 << 22
# Whatever is added to this leaves no weight.
_HIDING = -1e8


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
    parts = [split(part[..., :k_len]) for part in (mask, bias) if part is not None]
    shown = [visible for visible, _ in parts if visible is not None]
    biases = [added for _, added in parts if added is not None]
    visible = reduce(operator.and_, shown) if shown else None
    found = {} if visible is None else _recognised(visible, q_len, k_len)
    if not biases:
        return {"attn_mask": _of_rank_4(visible)} if found is None else found
    values = reduce(operator.add, biases).float()
    if found is None:
        assert visible is not None
        return {"attn_mask": _of_rank_4(torch.where(visible, values, -math.inf))}
    return found | {"attn_mask": _of_rank_4(values)}


def split(mask: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What a mask hides and what it adds, each None where it does not.

    Returns:
        Bool, True = visible; and the values, 0 where they hide.
    """
    if mask.dtype == torch.bool:
        return mask, None
    # Sums of two lowest values lie beyond it, too, and −10⁹ with a score added.
    visible = mask > max(torch.finfo(mask.dtype).min / 2, _HIDING)
    flat, seen = mask.reshape(-1), visible.reshape(-1)
    adds = any(
        bool(((flat[start : start + _PART] != 0) & seen[start : start + _PART]).any())
        for start in range(0, len(flat), _PART)
    )
    if bool(visible.all()):
        return None, mask if adds else None
    return visible, mask.masked_fill(~visible, 0.0) if adds else None


def _recognised(visible: torch.Tensor, q_len: int, k_len: int) -> dict[str, Any] | None:
    """The options that build a mask; None where none do."""
    cells = _of_rank_4(visible)
    sizes = Sizes(cells.shape[0], cells.shape[1], q_len, k_len)
    return recognise_mask(build_mask(AttentionOptions(attn_mask=cells), sizes)).options


def _of_rank_4(values: torch.Tensor | None) -> np.ndarray[Any, Any]:
    assert values is not None
    array: np.ndarray[Any, Any] = values.detach().cpu().numpy()
    return array.reshape((1,) * (4 - array.ndim) + array.shape)
