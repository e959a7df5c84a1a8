"""The rows that mistakes are tried on: real ones, some that are off, the same every time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attncli.attention.check import evidence as evidence_module
from attncli.attention.check.candidate import Candidate, Target
from attncli.attention.check.evidence import Evidence, sample_rows
from attncli.attention.check.variant import right_variant
from attncli.attention.options import AttentionOptions
from attncli.attention.problem import make_problem

B, H, S = 5, 2, 40


def sampled(off: torch.Tensor | None, **options: Any) -> Evidence:
    declared = AttentionOptions(**options)
    q = torch.zeros(B, H, S, 2)
    variant = right_variant(make_problem(q, q, q, declared), declared)
    return sample_rows(variant, [Candidate(Target.OUTPUT, q, torch.float32)], off)


def rows_of(evidence: Evidence, *, together: bool, quick: bool = False) -> dict[int, list[int]]:
    """The rows of each batch, each of which has to be there once for every head."""
    sample = evidence.quick_rows if quick else evidence.sample
    count = torch.zeros(B, H, S, dtype=torch.int64)
    for part in sample.parts[int(together)]:
        assert not together or range(*part.head.indices(H)) == range(H)
        for batch in range(*part.batch.indices(B)):
            count[batch, part.head][:, part.rows] += 1
    assert int(count.max()) <= 1
    assert bool((count == count[:, :1]).all())
    return {b: rows for b in range(B) if (rows := count[b, 0].nonzero()[:, 0].tolist())}


def test_few_cells_are_all_of_the_sample() -> None:
    found = sampled(None, query_lengths=(40, 3, 0, 40, 7))
    assert found.complete
    assert found.sample is found.quick_rows
    assert bool((found.off == 1).all())
    for together in (False, True):
        rows = rows_of(found, together=together)
        assert {b: len(some) for b, some in rows.items()} == {0: 40, 1: 3, 3: 40, 4: 7}


@pytest.mark.parametrize("together", [False, True])
def test_of_many_cells_some_rows_are_chosen(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst rows, first and last ones, and those where what is visible begins to change."""
    monkeypatch.setattr(evidence_module, "SAMPLE_CELLS", 5 * 24 * H * S)
    monkeypatch.setattr(evidence_module, "QUICK_CELLS", 5 * 4 * H * S)
    off = torch.zeros(B, H, S, dtype=torch.int64)
    off[3, 1, 21:23] = 4
    off[1, 0, 30] = 1
    found = sampled(off, causal=True, left_window=9, query_lengths=(40, 40, 12, 40, 39))
    assert not found.complete
    rows = rows_of(found, together=together)
    assert 3 in rows  # the batch with most that is off
    assert {0, 4} <= rows.keys()  # the first and the last one
    assert {21, 22, 0, 39} <= set(rows[3])
    # A window of 9 begins to hide keys from query 10 on.
    assert {9, 10, 11} & set(rows[3])
    for batch, some in rows.items():
        assert max(some) < (40, 40, 12, 40, 39)[batch]
        assert 4 <= len(some) <= 24
    again = rows_of(
        sampled(off, causal=True, left_window=9, query_lengths=(40, 40, 12, 40, 39)),
        together=together,
    )
    assert again == rows
    quick = rows_of(found, together=together, quick=True)
    assert sum(map(len, quick.values())) < sum(map(len, rows.values()))
    assert 21 in quick[3] or 22 in quick[3]
