"""What shapes attention, as its user declares it, before any tensor is seen."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from attncli.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class MaskTrue(StrEnum):
    """What True means in a boolean attention mask."""

    KEEP = "keep"
    DROP = "drop"


class Corner(StrEnum):
    """Where a causal triangle sits when queries and keys differ in number."""

    TOP_LEFT = "top-left"
    BOTTOM_RIGHT = "bottom-right"


class Layout(StrEnum):
    """Order of the axes of a tensor of rank 4, or of a packed one of rank 2 or 3."""

    BHSD = "bhsd"
    BSHD = "bshd"
    BSH = "bsh"


class WeightsLayout(StrEnum):
    """Order of the axes of a projection: x @ w, or the weight of a linear layer."""

    IN_OUT = "in-out"
    OUT_IN = "out-in"


class Precision(StrEnum):
    """The dtype that arithmetic is done in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT64 = "float64"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """Everything beside Q, K and V that decides what attention computes.

    Attributes:
        scale: multiplies the scores; None means 1/√d_k. 0 and negative values are values.
        temperature: divides the scaled scores; finite, > 0.
        softcap: c of c·tanh(scaled/c), before the mask; finite, > 0; None for none.
        causal: key j is visible to a query at position p iff j ≤ p.
        query_offset: position of query 0 on the key axis: a corner, one integer, or one integer
            per batch. None means 0 where S_q = S_k and "not declared" elsewhere.
        left_window: keys before p − left_window are invisible; None for unbounded.
        right_window: keys after p + right_window are invisible; None for unbounded.
        prefix: with `causal`, the first `prefix` keys are visible to every query.
        key_lengths: number of real keys, one for all batches or one per batch.
        query_lengths: number of real queries, one for all batches or one per batch.
        key_padding: bool (B, S_k) or (S_k,), True = real key.
        attn_mask: bool (True as `mask_true` says), 0/1 integer, or additive float; rank 1 (S_k),
            2 (S_q, S_k), 3 (H, S_q, S_k) or 4 (B, H, S_q, S_k), broadcast from the right.
        mask_true: what True means in a boolean `attn_mask`.
        segments: integer document ids of the keys, (S_k,) or (B, S_k).
        alibi: add the bias −mₕ·|p − j|.
        sinks: one logit per query head, (H,), that joins the softmax denominator.
    """

    scale: float | None = None
    temperature: float = 1.0
    softcap: float | None = None
    causal: bool = False
    query_offset: Corner | int | tuple[int, ...] | None = None
    left_window: int | None = None
    right_window: int | None = None
    prefix: int | None = None
    key_lengths: tuple[int, ...] | None = None
    query_lengths: tuple[int, ...] | None = None
    key_padding: NDArray[Any] | None = None
    attn_mask: NDArray[Any] | None = None
    mask_true: MaskTrue = MaskTrue.KEEP
    segments: NDArray[Any] | None = None
    alibi: bool = False
    sinks: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        """Refuse values that make no sense for any tensors.

        Raises:
            UsageError: naming the option, what it takes and what it got.
        """
        if self.scale is not None and not math.isfinite(self.scale):
            raise UsageError("--scale", f"expected a finite number, got {self.scale}")
        for name in ("temperature", "softcap"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UsageError(f"--{name}", f"expected a finite number above 0, got {value}")
        for name in ("left_window", "right_window", "prefix"):
            _refuse_negative(name, getattr(self, name))
        for name in ("key_lengths", "query_lengths"):
            for length in getattr(self, name) or ():
                _refuse_negative(name, length)
        if self.prefix is not None and not self.causal:
            raise UsageError("--prefix", "expected --causal beside it, got --prefix alone")

    @property
    def needs_positions(self) -> list[str]:
        """The options in use that cannot be read without knowing where query 0 stands."""
        used = {
            "--causal": self.causal,
            "--left-window": self.left_window is not None,
            "--right-window": self.right_window is not None,
            "--segments": self.segments is not None,
            "--alibi": self.alibi,
        }
        return [option for option, given in used.items() if given]


OPTION_NAMES = tuple(field.name for field in fields(AttentionOptions))


def _refuse_negative(name: str, value: int | None) -> None:
    if value is not None and value < 0:
        option = "--" + name.replace("_", "-")
        raise UsageError(option, f"expected a whole number of at least 0, got {value}")
