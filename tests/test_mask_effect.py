"""Softmax before and after masks, against numbers worked out by hand and by torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from attncli.analysis.mask_effect import RowEffect, effect_on_problem, effect_on_scores
from attncli.attention.masks.build import build_mask
from attncli.attention.masks.mask import Mask
from attncli.attention.options import AttentionOptions
from attncli.attention.problem import make_problem
from attncli.attention.sizes import Sizes


def build(q_len: int, k_len: int, **options: Any) -> Mask:
    return build_mask(AttentionOptions(**options), Sizes(1, 1, q_len, k_len))


def effects(scores: np.ndarray, mask: Mask) -> list[RowEffect]:
    return list(effect_on_scores(scores[None, None], mask))


def test_softmax_before_and_after_a_mask() -> None:
    """scores [1,2,3], mask TTF → [.268941,.731059,0]; the second row is empty."""
    given_mask = np.array([[True, True, False], [False, False, False]])
    scores = np.array([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    found = effects(scores, build(2, 3, attn_mask=given_mask))
    columns = {
        name: [getattr(row, name) for row in found]
        for name in ("sum_before", "sum_after", "mass_removed", "mass_moved")
    }
    np.testing.assert_allclose(columns["sum_before"], [1, 1])
    np.testing.assert_allclose(columns["sum_after"], [1, 0])
    np.testing.assert_allclose(columns["mass_removed"], [0.665241, 1], atol=1e-6)
    np.testing.assert_allclose(columns["mass_moved"], [0.665241, 0.5], atol=1e-6)
    before = [row.entropy_before_nats for row in found]
    np.testing.assert_allclose(before, [0.832396, np.log(3)], atol=1e-6)
    assert found[0].entropy_after_nats is not None
    assert abs(found[0].entropy_after_nats - 0.582203) < 1e-6
    assert (found[1].entropy_after_nats, found[1].entropy_after_bits) == (None, None)
    assert [row.top_before for row in found] == [2, 0]
    assert [row.top_after for row in found] == [1, None]


def test_softmax_agrees_with_torch_under_every_kind_of_bias() -> None:
    generator = np.random.default_rng(7)
    scores = generator.standard_normal((6, 5)) * 300
    added = np.where(generator.random((6, 5)) > 0.7, -np.inf, generator.standard_normal((6, 5)))
    added[:, 0] = 0
    mask = build(6, 5, attn_mask=added, causal=True, query_offset=0, alibi=True)
    everything = slice(None)
    hidden = ~mask.visible(everything, everything, everything, everything)[0, 0]
    bias = mask.bias(everything, everything, everything, everything)[0, 0]
    before = torch.softmax(torch.tensor(scores), -1)
    after = torch.softmax(torch.tensor(np.where(hidden, -np.inf, scores + bias)), -1)
    found = effects(scores, mask)
    moved = (after - before).abs().sum(-1) / 2
    np.testing.assert_allclose([row.mass_moved for row in found], moved, atol=1e-14)
    removed = np.where(hidden, before, 0).sum(-1)
    np.testing.assert_allclose([row.mass_removed for row in found], removed, atol=1e-14)


def test_entropy_is_never_below_0_nor_above_that_of_equal_weights() -> None:
    found = effects(np.zeros((50, 50)), build(50, 50, causal=True))
    entropies = np.array([row.entropy_after_nats for row in found])
    assert entropies[0] == 0
    assert not np.signbit(entropies[0])
    assert (entropies <= np.log(np.arange(1, 51))).all()


def test_scores_of_hidden_keys_do_not_matter_even_if_not_finite() -> None:
    scores = np.array([[1.0, np.inf], [np.nan, 2.0]])
    found = effects(scores, build(2, 2, attn_mask=np.eye(2) > 0))
    assert [(row.sum_after, row.top_after) for row in found] == [(1, 0), (1, 1)]


def test_no_queries_have_no_effect() -> None:
    assert effects(np.zeros((0, 3)), build(0, 3)) == []


def test_padded_queries_have_no_record_and_rows_are_named_by_their_index() -> None:
    q, k = torch.randn(2, 1, 1, 6, 4, dtype=torch.float64)
    problem = make_problem(q, k, None, AttentionOptions(causal=True, query_lengths=(4,)))
    found = list(effect_on_problem(problem))
    assert [row.query for row in found] == [0, 1, 2, 3]
    assert found[0].entropy_after_nats == 0
