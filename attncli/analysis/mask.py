"""Masks from options: how long they are, what leaks through them, what looks wrong, and to files.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncli.attention.masks.audit import MaskAudit, place
from attncli.attention.masks.build import build_mask
from attncli.attention.masks.compare import Leak, leaks
from attncli.attention.masks.mask import HeadMask, Mask
from attncli.attention.masks.recognise import undeclared_leaks
from attncli.attention.options import AttentionOptions
from attncli.attention.sizes import Sizes
from attncli.files.tensor import bfloat16_bits
from attncli.files.writer import TensorSaver

DEFAULT_LENGTH = 8
BLOCK_CELLS = 1 << 24

_AXES = ("batch", "heads", "q_len", "k_len")
_OF_KEYS = ("batch", "k_len")


def sizes_of(
    options: AttentionOptions,
    said: Mapping[str, int | None],
    scores: NDArray[Any] | None = None,
) -> Sizes:
    """B, H, S_q and S_k: as said, or as the arrays and lengths need them, or 1, 1, 8 and 8.

    Args:
        options: what shapes the mask.
        said: some of "batch", "heads", "q_len" and "k_len"; None for what is not said.
        scores: what the mask is for, rank 2 (S_q, S_k) to 4; None for nothing in particular.
    """
    found: dict[str, int] = {}
    offset = options.query_offset
    per_batch = offset if isinstance(offset, tuple) else None
    for values in (options.key_lengths, options.query_lengths, per_batch):
        if values is not None and len(values) > 1:
            found["batch"] = len(values)
    for array, axes in (
        (scores, _AXES),
        (options.segments, _OF_KEYS),
        (options.key_padding, _OF_KEYS),
        (options.attn_mask, _AXES),
    ):
        shape = () if array is None else array.shape[-len(axes) :]
        for axis, length in zip(axes[len(axes) - len(shape) :], shape, strict=True):
            if length != 1 or axis not in found:
                found[axis] = length
    if found.get("q_len") == 1 and offset is None and options.needs_positions:
        del found["q_len"]  # one row for all queries; how many there are, the keys say
    found |= {name: length for name, length in said.items() if length is not None}
    default = found.get("q_len", found.get("k_len", DEFAULT_LENGTH))
    return Sizes(
        found.get("batch", 1),
        found.get("heads", 1),
        found.get("q_len", default),
        found.get("k_len", default),
    )


def file_alone(options: AttentionOptions, mask: NDArray[Any] | None) -> AttentionOptions:
    """Options of a mask file without the rules beside it."""
    return AttentionOptions(
        attn_mask=mask, mask_true=options.mask_true, query_lengths=options.query_lengths
    )


def find_leaks(options: AttentionOptions, mask: Mask, judged: MaskAudit) -> list[Leak]:
    """What a mask file shows although a rule hides it.

    The rules are those that the options declare. Where they declare none, the pattern nearest to
    the mask is taken for the rule; a mask that is a known pattern then leaks nothing.

    Args:
        options: a mask file, and the rules beside it.
        mask: built of these options.
        judged: the audit of it.
    """
    alone = build_mask(file_alone(options, options.attn_mask), mask.sizes)
    found = leaks(alone, replace(options, attn_mask=None))
    return found or undeclared_leaks(mask, judged.recognition)


def suspicions(judged: MaskAudit) -> Iterator[str]:
    """What looks like a mistake of whoever made the mask."""
    for recognition in (judged.recognition, judged.lenient):
        for batch, head, part in () if recognition is None else recognition.parts:
            where = place(batch, head)
            if part.probably_inverted and part.description.startswith("probably inverted"):
                yield f"the mask{where} is {part.description}; were True and False exchanged?"
            hidden = part.pattern is not None and part.pattern.hidden_rows is not None
            if hidden and part.description.startswith("queries"):
                yield (
                    f"the mask{where} hides whole rows, {part.description}; padding hides keys, "
                    "which are columns: is it transposed?"
                )


def save_mask(mask: Mask, target: str, dtype: str) -> list[str]:
    """Write a mask block by block, (B, H, S_q, S_k); axes along which it is alike are 1 long.

    Args:
        mask: on the host.
        target: the file.
        dtype: "bool", True = may attend; or "float16", "bfloat16", "float32" or "float64", what
            is added to a logit, −inf = hidden.

    Returns:
        What of the mask is not in the file.

    Raises:
        DataError, ResourceError: the place cannot be written.
    """
    sizes, additive = mask.sizes, dtype != "bool"
    batches = sizes.batch if mask.differs(0) else 1
    biased = additive and mask.slopes is not None  # ALiBi has a slope for each head
    heads = sizes.heads if biased or mask.differs(1) else 1
    kind: Any = dtype if dtype == "bfloat16" else np.dtype(dtype)
    step = max(1, BLOCK_CELLS // max(1, sizes.k_len))
    hidden = bfloat16_bits(np.array(-np.inf)) if dtype == "bfloat16" else -np.inf
    lost = 0
    shape = (batches, heads, sizes.q_len, sizes.k_len)
    with TensorSaver(target, {"attn_mask": (shape, kind)}) as saver:
        for batch, head in np.ndindex(batches, heads):
            one = mask.head(batch, head)
            for start in range(0, sizes.q_len, step):
                rows = slice(start, min(start + step, sizes.q_len))
                seen = block = one.cells(rows)
                if additive:
                    block = _values(one, rows, seen, dtype)
                    lost += int(np.count_nonzero(seen & (block == hidden)))
                saver.write("attn_mask", (batch, head, rows), block)
    warnings = []
    if lost:
        warnings.append(
            f"«dtype»: {lost} visible cells are -inf in {dtype}, so they are hidden there"
        )
    if not additive and (mask.slopes is not None or mask.added is not None):
        warnings.append("a boolean mask leaves out what is added; «as=additive» keeps it")
    return warnings


def _values(mask: HeadMask, rows: slice, seen: NDArray[np.bool_], dtype: str) -> NDArray[Any]:
    """(rows, S_k) of what is added, in the dtype to be written; bfloat16 as bits."""
    bias = mask.bias(rows)
    values = np.where(seen, 0.0 if bias is None else bias, -np.inf)
    if dtype == "bfloat16":
        return bfloat16_bits(values)
    with np.errstate(over="ignore"):
        cast: NDArray[Any] = values.astype(dtype)
    return cast
