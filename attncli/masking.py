"""The function behind `attncli mask` for Python, and what it returns: it needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType

from attncli.analysis.attention_arguments import read_keywords, whole_numbers
from attncli.analysis.mask import SOFTMAX, sizes_of, suspicions
from attncli.attention.masks.audit import MaskAudit, MaskRecord, audit
from attncli.attention.masks.build import build_mask
from attncli.attention.masks.mask import Mask
from attncli.attention.sizes import places
from attncli.columns import record_of
from attncli.errors import UsageError, in_python
from attncli.report.mask import mask_tables
from attncli.report.notebook import DIGITS, Shown
from attncli.report.printer import Printer


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class AuditedMask(Shown):
    """A mask, and what it lets through.

    Attributes:
        description: what the mask is, in words.
        options: options that build it, by their names in `AttentionOptions`; None if none do.
        probably_inverted: whether True and False have probably been exchanged.
        records: counts, one record per batch and head; one for all where they are equal.
        mask: the mask itself, computed block by block.
        warnings: what was assumed, and what looks like a mistake.
        judged: all that was found out about it.
    """

    description: str
    options: dict[str, Any] | None
    probably_inverted: bool
    records: tuple[MaskRecord, ...]
    mask: Mask
    warnings: tuple[str, ...]
    judged: MaskAudit

    drawn_by = "mask_plots"

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

    def _said(self) -> str:
        sizes = self.mask.sizes
        kept = sum(record.kept for record in self.records)
        return f"{self.description}; {sizes.q_len} queries, {sizes.k_len} keys, {kept} visible"

    def _tables(self, printer: Printer) -> Iterator[RenderableType]:
        records = [record_of(record) for record in self.records]
        yield from mask_tables(self.mask, self.judged, None, records, None, printer, DIGITS)

    def _picture(self, plots: Any) -> Any:
        return plots.mask_picture("attncli.mask", [("", self.mask, self.judged, None)])


def mask(
    q_len: int | None = None,
    k_len: int | None = None,
    *,
    batch: int | None = None,
    heads: int | None = None,
    head_index: int | Sequence[int] | None = None,
    batch_index: int | Sequence[int] | None = None,
    **options: Any,
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
        head_index: heads to look at, negative ones counted from the end; None for all.
        batch_index: batches, likewise.
        options: the fields of `AttentionOptions` that shape a mask; numbers may stand for tuples
            of one, and lists, NumPy arrays or torch tensors for arrays.

    Raises:
        TypeError: a keyword that is no option of a mask.
        UsageError: options that make no sense, or do not fit the sizes.
        DataError: a mask of the wrong shape or values.
    """
    known = read_keywords(options, without=SOFTMAX)
    said = {"batch": batch, "heads": heads, "q_len": q_len, "k_len": k_len}
    built = build_mask(known, sizes_of(known, said))
    chosen = [
        None if wanted is None else places(name, whole_numbers(wanted), length)
        for name, wanted, length in (
            ("batch_index", batch_index, built.sizes.batch),
            ("head_index", head_index, built.sizes.heads),
        )
    ]
    built = replace(built, chosen=(chosen[0], chosen[1]))
    judged = audit(built, known)
    return AuditedMask(
        description=judged.description,
        options=judged.recognition.options,
        probably_inverted=judged.recognition.probably_inverted,
        records=judged.records,
        mask=built,
        warnings=tuple(map(in_python, (*built.warnings, *suspicions(judged, known, said)))),
        judged=judged,
    )
