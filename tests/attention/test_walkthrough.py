"""The facts behind `--explain`, against the plain stages."""

from __future__ import annotations

import math
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import masks, tensors

import attncli
from attncli.attention import stages as stages_module
from attncli.attention.options import AttentionOptions, Stage
from attncli.attention.problem import Problem, make_problem
from attncli.attention.qkv import example
from attncli.attention.stages import select
from attncli.attention.statistics import SoftmaxStats
from attncli.attention.steps import entropy_of_weights
from attncli.attention.walkthrough import Walkthrough, input_variance, walk_through


def scores_of(*rows: list[float], **options: Any) -> Problem:
    """A problem whose scores, unscaled, are the rows."""
    matrix = torch.tensor(rows, dtype=torch.float64)  # (S_q, S_k)
    options = {"scale": 1.0, "query_offset": 0} | options
    keys = torch.eye(matrix.shape[1], dtype=torch.float64)
    return make_problem(matrix, keys, keys, AttentionOptions(**options), allow_nonfinite=True)


def max_logit(walk: Walkthrough) -> float | None:
    """The largest logit that softmax is given; None where there is none."""
    return walk.statistics[Stage.MASKED].result.max


def jacobian_norm(weights: torch.Tensor) -> float:
    """Frobenius norm of diag(w) − w wᵀ, written out."""
    return float((torch.diag(weights) - torch.outer(weights, weights)).norm())


def assert_sharpness(found: SoftmaxStats[float | None], weights: torch.Tensor) -> None:
    """Means over rows of outcomes, (rows, outcomes), that all see something."""
    assert found.entropy_bits == pytest.approx(
        float(entropy_of_weights(weights).mean()) / math.log(2), abs=1e-9
    )
    assert found.max_weight == pytest.approx(float(weights.amax(-1).mean()), abs=1e-9)
    mean_norm = sum(map(jacobian_norm, weights)) / len(weights)
    assert found.softmax_grad == pytest.approx(mean_norm, abs=1e-9)


@given(data=st.data(), cells=st.sampled_from([1, 6, 1 << 22]))
@settings(max_examples=40, deadline=None)
def test_facts_against_the_whole(data: st.DataObject, cells: int) -> None:
    t = data.draw(tensors())
    mask = data.draw(masks(t.cells))
    result = attncli.compute(t.q, t.k, t.v, attn_mask=mask)
    assert result.visible is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages_module, "BLOCK_CELLS", cells)
        found = walk_through(result.problem)
    keys = result.visible.sum(-1).flatten()
    some = keys > 0
    assert (found.cells, found.rows) == (math.prod(t.cells), len(keys))
    assert found.masked_cells == int((~result.visible).sum())
    assert found.empty_rows == int((~some).sum())
    for stage, numbers in found.statistics.items():
        expected = result.statistics[str(stage)]
        assert numbers.mean == (None if expected.mean is None else pytest.approx(expected.mean))
    bits = entropy_of_weights(result.stages["weights"]).flatten() / math.log(2)
    for entropy, exact, seen in zip(found.row_entropies_bits, bits, some, strict=False):
        assert entropy == (pytest.approx(float(exact), abs=1e-9) if seen else None)
    if not some.any():
        assert (found.keys.count, max_logit(found), found.online) == (0, None, ())
        assert astuple(found.scaled) == (None, None, None)
        return
    assert (found.keys.minimum, found.keys.maximum) == (int(keys[some].min()), int(keys.max()))
    weights = result.stages["weights"].flatten(0, 2)[some]
    assert_sharpness(found.scaled, weights)
    unscaled = attncli.compute(t.q, t.k, attn_mask=mask, scale=1.0, stages="weights")
    assert_sharpness(found.unscaled, unscaled.stages["weights"].flatten(0, 2)[some])


def test_the_embedded_example() -> None:
    found = walk_through(make_problem(*example(), AttentionOptions()))
    expected = (1.928241, 1.976416, 1.688874, 1.840207)
    assert found.row_entropies_bits == pytest.approx(expected, abs=6e-7)
    assert found.head_entropies_bits == pytest.approx((sum(expected) / 4,), abs=6e-7)
    std = found.statistics[Stage.SCORES].std
    assert std is not None
    assert std**2 == pytest.approx(0.736971, abs=6e-7)
    assert (found.naive_overflows, found.naive_underflows, found.masked_cells) == (0, 0, 0)


@pytest.mark.parametrize(("row", "gradient"), [([0.0] * 8, 0.330719), ([10.0, 1.0, 1.0], 0.000390)])
def test_softmax_gradient(row: list[float], gradient: float) -> None:
    assert walk_through(scores_of(row)).scaled.softmax_grad == pytest.approx(gradient, abs=6e-7)


@pytest.mark.parametrize(
    ("row", "overflows", "underflows"),
    [
        ([1000.0, 1000.0], 1, 0),
        ([88.0, 0.0], 0, 0),
        ([88.5, 88.5], 1, 0),
        ([-1000.0, -999.0], 0, 1),
        ([-1000.0, 0.0], 0, 0),
    ],
)
def test_where_the_naive_softmax_fails(row: list[float], overflows: int, underflows: int) -> None:
    found = walk_through(scores_of(row))
    assert (found.naive_overflows, found.naive_underflows) == (overflows, underflows)


def test_the_naive_softmax_of_hidden_keys_does_not_count() -> None:
    found = walk_through(scores_of([1.0, 1000.0], attn_mask=np.array([True, False])))
    assert (found.naive_overflows, max_logit(found)) == (0, 1.0)
    low = walk_through(scores_of([-1000.0, 0.0], attn_mask=np.array([True, False])))
    assert (low.naive_overflows, low.naive_underflows) == (0, 1)


def test_the_online_softmax_ends_at_the_stable_one() -> None:
    row = np.random.default_rng(0).standard_normal(11) * 30
    found = walk_through(scores_of(row.tolist()))
    stops = [step.stop for step in found.online]
    assert stops == sorted(stops)
    assert stops[-1] == 11
    assert 2 <= len(stops) <= 4
    for step in found.online:
        seen = row[: step.stop]
        assert step.maximum == seen.max()
        assert step.total == pytest.approx(np.exp(seen - seen.max()).sum(), rel=1e-12)


def test_the_online_softmax_skips_hidden_keys() -> None:
    mask = np.array([False, False, False, True, True, False])
    found = walk_through(scores_of([9.0, 9, 9, 1, 2, 9], attn_mask=mask))
    assert (found.online[0].maximum, found.online[0].total) == (-math.inf, 0.0)
    assert found.online[-1].maximum == 2.0
    assert found.online[-1].total == pytest.approx(1 + math.exp(-1))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.5},
        {"softcap": 1.5},
        {"alibi": True, "causal": True},
        {"attn_mask": np.array([[0.0, -1.0, 2.0, -np.inf]] * 4), "softcap": 2.0},
        {"alibi": True, "temperature": 2.0, "sinks": np.array([0.5])},
    ],
)
def test_without_the_scale_all_else_stays(options: dict[str, Any]) -> None:
    q, k, _ = example()
    found = walk_through(make_problem(q, k, None, AttentionOptions(**options))).unscaled
    other = walk_through(make_problem(q, k, None, AttentionOptions(scale=1.0, **options))).scaled
    assert astuple(found) == pytest.approx(astuple(other), abs=1e-12)


def test_a_sink_is_one_more_outcome() -> None:
    found = walk_through(scores_of([1.0, 2.0], sinks=np.array([0.5])))
    outcomes = torch.tensor([[0.231224, 0.628532, 0.140244]], dtype=torch.float64)
    assert found.scaled.entropy_bits == pytest.approx(0.905959 / math.log(2), abs=2e-6)
    assert found.scaled.max_weight == pytest.approx(0.628532, abs=6e-7)
    assert found.scaled.softmax_grad == pytest.approx(jacobian_norm(outcomes[0]), abs=2e-6)


@pytest.mark.parametrize("level", [-1e38, -3.4e38, 1e30, 0.0])
def test_hidden_keys_weigh_nothing_beside_enormous_logits(level: float) -> None:
    """At 1e30 the next number is 1e14 away: no fixed step leads below it."""
    mask = np.array([level, level, -np.inf])
    found = walk_through(scores_of([0.0, 0.0, 0.0], attn_mask=mask))
    assert found.scaled.entropy_bits == pytest.approx(1.0)
    assert found.scaled.max_weight == pytest.approx(0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("whole_row", [False, True])
def test_nonfinite_logits_warn_of_nothing_and_spoil_their_row_alone(
    bad: float, whole_row: bool
) -> None:
    row = [bad] * 3 if whole_row else [bad, 1.0, 1.0]
    q = torch.tensor([row, [0.0, 0.0, 0.0]], dtype=torch.float64)
    visible = np.array([[True, True, True], [True, True, False]])
    problem = make_problem(
        q,
        torch.ones(3, 3, dtype=torch.float64),
        None,
        AttentionOptions(attn_mask=visible),
        allow_nonfinite=True,
    )
    found = walk_through(problem)
    assert found.rows == 2
    assert found.row_entropies_bits[1] == pytest.approx(1.0)
    assert found.scaled.entropy_bits == pytest.approx(1.0)
    assert math.isnan(found.row_entropies_bits[0] or 0.0)


def test_padded_queries_and_other_rows_stay_out() -> None:
    rows = [[0.0, 0.0], [5.0, 0.0], [9.0, 0.0]]
    padded = walk_through(scores_of(*rows, query_lengths=(2,)))
    assert (padded.rows, padded.cells, max_logit(padded)) == (2, 4, 5.0)
    problem = scores_of(*rows)
    chosen = walk_through(problem, select(problem, rows=[-1]))
    assert (chosen.rows, chosen.statistics[Stage.SCORES].maximum) == (1, 9.0)


@pytest.mark.parametrize(("q_len", "k_len"), [(0, 3), (3, 0)])
def test_empty_axes(q_len: int, k_len: int) -> None:
    q, k = torch.zeros(q_len, 2), torch.zeros(k_len, 2)
    found = walk_through(make_problem(q, k, k, AttentionOptions()))
    assert (found.rows, found.empty_rows, found.cells) == (q_len, q_len if not k_len else 0, 0)
    assert astuple(found.scaled) == (None, None, None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.float8_e5m2])
def test_variance_of_the_entries(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[[3, 0], [1, 2]]]).to(dtype)
    assert input_variance(tensor) == pytest.approx(1.25)
