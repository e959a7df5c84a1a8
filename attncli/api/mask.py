"""`attncli.mask`: build a mask, count what it lets through, say what it is. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from attncli.analysis.mask import SOFTMAX, sizes_of, suspicions
from attncli.api.keywords import OptionKeywords, as_options
from attncli.attention.masks.audit import MaskRecord
from attncli.attention.masks.audit import audit as audit_mask
from attncli.attention.masks.build import build_mask
from attncli.attention.masks.mask import Mask
from attncli.errors import UsageError, in_python


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedMask:
    """A mask, and what it lets through.

    Attributes:
        description: what the mask is, in words.
        options: options that build it, by their names in `AttentionOptions`; None if none do.
        probably_inverted: whether True and False have probably been exchanged.
        records: counts, one record per batch and head; one for all where they are equal.
        mask: the mask itself, computed block by block.
        warnings: what was assumed, and what looks like a mistake.
    """

    description: str
    options: dict[str, Any] | None
    probably_inverted: bool
    records: tuple[MaskRecord, ...]
    mask: Mask
    warnings: tuple[str, ...]

    def visible(self, batch: int = 0, head: int = 0) -> NDArray[np.bool_]:
        """Bool (S_q, S_k): True where the query may see the key.

        Raises:
            UsageError: there is no such batch or head.
        """
        sizes = self.mask.sizes
        for name, index, size in (("batch", batch, sizes.batch), ("head", head, sizes.heads)):
            if not 0 <= index < size:
                raise UsageError(name, f"expected 0 to {size - 1}, got {index}")
        seen: NDArray[np.bool_] = self.mask.head(batch, head).cells(slice(None))
        return seen


def mask(
    q_len: int | None = None,
    k_len: int | None = None,
    *,
    batch: int | None = None,
    heads: int | None = None,
    **options: Unpack[OptionKeywords],
) -> AuditedMask:
    """Build a mask from options, count what it lets through, and say what it is.

    >>> attncli.mask(4, causal=True, left_window=1).records[0].kept
    7
    >>> attncli.mask(attn_mask=numpy.tri(4, dtype=bool)).options
    {'causal': True}

    Args:
        q_len: S_q; None for what the masks say, or S_k.
        k_len: S_k; None for what the masks say, or S_q, or 8.
        batch: B; None for what masks and lengths per batch say, or 1.
        heads: H; None for what `attn_mask` says, or 1.
        options: the fields of `AttentionOptions` that shape a mask; numbers may stand for tuples
            of one, and lists, NumPy arrays or torch tensors for arrays.

    Raises:
        TypeError: a keyword that is no option of a mask.
        UsageError: options that make no sense, or do not fit the sizes.
        DataError: a mask of the wrong shape or values.
    """
    known = as_options(options, without=SOFTMAX)
    said = {"batch": batch, "heads": heads, "q_len": q_len, "k_len": k_len}
    built = build_mask(known, sizes_of(known, said))
    judged = audit_mask(built)
    return AuditedMask(
        description=judged.description,
        options=judged.recognition.options,
        probably_inverted=judged.recognition.probably_inverted,
        records=judged.records,
        mask=built,
        warnings=tuple(map(in_python, (*built.warnings, *suspicions(judged)))),
    )
