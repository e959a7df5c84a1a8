"""Count what a mask lets through, one record per batch and head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attncli.attention.masks.recognise import MaskRecognition, combine, recognise
from attncli.attention.masks.view import distinct_views

if TYPE_CHECKING:
    from attncli.attention.masks.mask import Mask
    from attncli.attention.masks.recognise import Recognition
    from attncli.attention.masks.view import View


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskRecord:
    """What one batch and head of a mask lets through; padded queries count nowhere.

    Attributes:
        batch, head: which; None where all along that axis are equal.
        q_len, k_len: S_q and S_k, padding included.
        cells: number of cells of real queries.
        kept: number of them that are visible.
        density: kept / cells; None without cells.
        empty_rows: number of real queries that see no key.
        first_empty_rows: indices of the first of them.
        unused_keys: number of keys that no real query sees.
        first_unused_keys: indices of the first of them.
        keys_min, keys_max: fewest and most keys that a real query sees, 0 for an empty row;
            None without real queries.
        description: what the mask is, in words.
    """

    batch: int | None
    head: int | None
    q_len: int
    k_len: int
    cells: int
    kept: int
    density: float | None
    empty_rows: int
    first_empty_rows: tuple[int, ...]
    unused_keys: int
    first_unused_keys: tuple[int, ...]
    keys_min: int | None
    keys_max: int | None
    description: str


@dataclass(frozen=True, slots=True)
class MaskAudit:
    """A whole mask.

    Attributes:
        records: one per batch and head that are not equal to the others along their axis.
        recognition: what the mask is as a whole.
    """

    records: tuple[MaskRecord, ...]
    recognition: MaskRecognition


def audit(mask: Mask, *, named: int = 10, hide_at: float | None = None) -> MaskAudit:
    """Count and describe every batch and head of a mask.

    Args:
        mask: on the host; without a mask file its size costs nothing, since no cell is built.
        named: how many empty rows and unused keys to name.
        hide_at: additive values at or below this count as hidden; None for −inf alone.
    """
    found = [(*each, recognise(each[2])) for each in distinct_views(mask, hide_at)]
    records = tuple(_record(*each, named) for each in found)
    return MaskAudit(records, combine(found))


def _record(
    batch: int | None, head: int | None, view: View, recognition: Recognition, named: int
) -> MaskRecord:
    profile = view.profile
    empty, unused = (np.flatnonzero(each == 0) for each in (profile.counts, profile.used))
    return MaskRecord(
        batch=batch,
        head=head,
        q_len=view.mask.sizes.q_len,
        k_len=view.k_len,
        cells=view.cells,
        kept=profile.kept,
        density=profile.kept / view.cells if view.cells else None,
        empty_rows=len(empty),
        first_empty_rows=tuple(empty[:named].tolist()),
        unused_keys=len(unused),
        first_unused_keys=tuple(unused[:named].tolist()),
        keys_min=int(profile.counts.min()) if view.rows else None,
        keys_max=int(profile.counts.max()) if view.rows else None,
        description=recognition.description,
    )
