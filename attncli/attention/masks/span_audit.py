"""What a mask of positional rules alone is and lets through, at any length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise

from attncli.attention.masks.audit import (
    MaskAudit,
    MaskRecognition,
    MaskRecord,
    Recognition,
    asked_pattern,
)
from attncli.attention.masks.mask import Mask
from attncli.attention.masks.patterns import Pattern, describe, options_of
from attncli.attention.masks.spans import Patch, Progression, spans_of
from attncli.attention.options import AttentionOptions


def audit_spans(mask: Mask, options: AttentionOptions, *, named: int = 10) -> MaskAudit:
    """Count and describe every batch of a mask of `mask_of_spans`: what its options ask for.

    Args:
        mask: whose rule is `Spans`.
        options: that it was built of.
        named: how many empty rows and unused keys to name.
    """
    spans = spans_of(mask)
    assert spans is not None  # whoever asks has one
    packed = options.cu_seqlens_q is not None or options.cu_seqlens_k is not None
    plain = replace(options, cu_seqlens_q=None, cu_seqlens_k=None)
    batches = mask.indices(0) if len(spans.batches) > 1 else [0]
    patterns = [asked_pattern(plain, mask, batch) for batch in batches]
    if packed:
        patterns = [replace(one, q_len=one.k_len) for one in patterns]

    def told(some: Sequence[Pattern]) -> str:
        said = describe(some)
        if not packed:
            return said
        count = f"{len(spans.batches[0]):,} packed documents"
        return count if said == "full" else f"{said}; {count}, positions counted in each"

    records, parts = [], []
    for number, pattern in zip(batches, patterns, strict=True):
        batch = number if len(spans.batches) > 1 else None
        said = told([pattern])
        records.append(_record(batch, mask, spans.batches[number], said, named))
        parts.append((batch, None, Recognition(said, mask.head(number, 0))))
    whole = told(patterns)
    built = None if packed else options_of(patterns)
    recognition = MaskRecognition(description=whole, options=built, parts=tuple(parts))
    return MaskAudit(tuple(records), whole, recognition, None, None)


def _record(
    batch: int | None, mask: Mask, patches: Sequence[Patch], description: str, named: int
) -> MaskRecord:
    k_len, rows = mask.sizes.k_len, sum(patch.rows for patch in patches)
    kept = sum(patch.total() for patch in patches)
    seen = [patch.count(t) for patch in patches for piece in patch.pieces() for t in piece]
    empty = [gap for patch in patches for gap in _empty(patch)]
    unused = [gap for patch in patches for gap in _unused(patch)]
    return MaskRecord(
        batch=batch,
        head=None,
        q_len=mask.sizes.q_len,
        k_len=k_len,
        cells=rows * k_len,
        kept=kept,
        density=kept / (rows * k_len) if rows * k_len else None,
        empty_rows=sum(count for _, _, count in empty),
        first_empty_rows=_first(empty, named),
        unused_keys=sum(count for _, _, count in unused),
        first_unused_keys=_first(unused, named),
        keys_min=min(seen, default=None),
        keys_max=max(seen, default=None),
        description=description,
    )


def _empty(patch: Patch) -> Iterator[Progression]:
    """The queries that see no key."""
    for a, b in patch.pieces():
        none = [t for t in (a, b) if not patch.count(t)]
        if none:  # both, and so all between, or one of them
            first, last = none[0], none[-1]
            yield patch.row + patch.step * first, patch.step, last - first + 1


def _unused(patch: Patch) -> Iterator[Progression]:
    """The keys that no query sees, padding among them."""
    edges = [0, *(edge for span in patch.used() for edge in span), patch.padded]
    for first, stop in list(pairwise(edges))[::2]:  # between the spans
        if stop > first:
            yield patch.key + patch.step * first, patch.step, stop - first


def _first(gaps: Iterable[Progression], named: int) -> tuple[int, ...]:
    """The first few numbers of all of them."""
    heads = (first + step * n for first, step, count in gaps for n in range(min(count, named)))
    return tuple(islice(sorted(heads), named))
