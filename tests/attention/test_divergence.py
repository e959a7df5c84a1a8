"""How far two heads' rows are apart, against the definitions over whole rows of weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from attncli.attention.options import AttentionOptions
from attncli.attention.problem import Problem, make_problem
from attncli.attention.streaming import divergence
from attncli.attention.streaming.divergence import refuse_other_shapes, stream_divergences
from attncli.errors import DataError

B, H, S, K, D = 2, 3, 9, 11, 4


def problem_of(seed: int, dtype: torch.dtype = torch.float64, **options: Any) -> Problem:
    random = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(B, H, n, D, generator=random, dtype=torch.float64) for n in (S, K))
    return make_problem(q.to(dtype), k.to(dtype), None, AttentionOptions(**options))


def outcomes_of(problem: Problem, batch: int, head: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights of all outcomes, (S, K + 1), the sink last, and which keys are seen, bool (S, K)."""
    seen = problem.mask.head(batch, head).cells(slice(0, S))
    q, k = (one[batch, head].double().numpy() for one in (problem.q, problem.k))
    sink = -np.inf if problem.sinks is None else float(problem.sinks[head])
    with np.errstate(invalid="ignore"):
        logits = np.where(seen, q @ k.T * problem.scale, -np.inf)
        joined = np.concatenate([logits, np.full((S, 1), sink)], 1)
        exps = np.exp(joined - joined.max(1, keepdims=True))
        weights = exps / exps.sum(1, keepdims=True)
    empty = ~seen.any(1)
    weights[empty] = 0.0
    return weights, seen


def plain(a: Problem, b: Problem, batch: int, head: int) -> dict[str, np.ndarray]:
    (p, seen_a), (q, seen_b) = outcomes_of(a, batch, head), outcomes_of(b, batch, head)
    mean, empty = (p + q) / 2, (~seen_a.any(1), ~seen_b.any(1))
    with np.errstate(divide="ignore", invalid="ignore"):
        kl = np.where(p > 0, p * np.log(p / q), 0.0).sum(1)
        js = sum(np.where(w > 0, w * np.log(w / mean), 0.0).sum(1) for w in (p, q)) / 2
    tv = np.abs(p - q).sum(1) / 2
    hides = (seen_a & ~seen_b).any(1)
    found = {
        "kl_nats": np.where(hides, np.inf, kl),
        "js_nats": js,
        "tv": tv,
    }
    found = {name: np.where(empty[0] | empty[1], np.nan, part) for name, part in found.items()}
    lost = (p[:, :-1] * (seen_a & ~seen_b)).sum(1)
    return {**found, "mass_lost": np.where(empty[0], 0.0, lost), "hides": hides}


RANDOM = np.random.default_rng(8)
# Of both batches and all heads, some rows of which see nothing.
SPARSE = RANDOM.random((B, H, S, K)) < 0.6
SPARSE[0, 1, 3] = SPARSE[1, :, 5] = False
OTHER = RANDOM.random((B, H, S, K)) < 0.7
OTHER[0, 1, 3] = OTHER[0, 2, 4] = False
SINKS = np.array([0.3, -1.0, 2.0])

SIDES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"causal": True, "query_offset": 2}, {"causal": True, "query_offset": 2, "left_window": 3}),
    ({"causal": True, "query_offset": 2, "left_window": 3}, {"causal": True, "query_offset": 0}),
    ({"attn_mask": SPARSE}, {"attn_mask": OTHER}),
    ({"attn_mask": SPARSE}, {}),
    ({}, {"attn_mask": OTHER}),
    ({"sinks": SINKS}, {"sinks": SINKS - 1}),
    ({"attn_mask": OTHER}, {"sinks": SINKS, "attn_mask": SPARSE}),
    ({"query_offset": 0, "left_window": 2}, {"query_offset": 0, "left_window": 2, "scale": 0.1}),
]


@pytest.mark.parametrize("cells", [40, 1 << 20])
@pytest.mark.parametrize(("of_a", "of_b"), SIDES)
def test_rows_are_apart_as_their_weights_are(
    of_a: dict[str, Any], of_b: dict[str, Any], cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divergence, "CELLS_AT_ONCE", cells)
    a, b = problem_of(1, **of_a), problem_of(2, **of_b)
    told: list[int] = []
    pairs = list(stream_divergences(a, b, advance=told.append))
    assert [(pair.a.batch, pair.a.head) for pair in pairs] == list(np.ndindex(B, H))
    for pair in pairs:
        for name, expected in plain(a, b, pair.a.batch, pair.a.head).items():
            found = getattr(pair.rows, name).numpy()
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12, err_msg=name)
    assert sum(told) > 0


def test_a_sink_that_the_other_side_lacks_takes_weight_that_it_cannot_have() -> None:
    a, b = problem_of(1, sinks=SINKS), problem_of(2)
    for pair in stream_divergences(a, b):
        expected = plain(a, b, pair.a.batch, pair.a.head)
        assert bool(torch.isinf(pair.rows.kl_nats).all())
        assert not bool(pair.rows.hides.any())
        for name in ("js_nats", "tv", "mass_lost"):
            np.testing.assert_allclose(getattr(pair.rows, name).numpy(), expected[name], rtol=1e-9)


def test_a_side_without_keys_loses_all() -> None:
    a, b = problem_of(1), problem_of(2, attn_mask=np.arange(S)[:, None] > np.zeros(K))
    for pair in stream_divergences(a, b):
        assert float(pair.rows.mass_lost[0]) == pytest.approx(1)
        assert bool(pair.rows.hides[0])
        assert bool(torch.isnan(pair.rows.kl_nats[0]))
        assert pair.rows.mass_lost[1:].tolist() == [0.0] * (S - 1)
    for pair in stream_divergences(b, a):
        assert pair.rows.mass_lost.tolist() == [0.0] * S
        assert not bool(pair.rows.hides.any())


def test_nearly_equal_rows_keep_their_digits() -> None:
    """KL of logits that differ by ε is half the variance of their difference."""
    a = problem_of(1, torch.float32)
    q = a.q.double() * (1 + 1e-5)
    b = make_problem(q, a.k.double(), None, AttentionOptions())
    wide = make_problem(a.q.double(), a.k.double(), None, AttentionOptions())
    for pair in stream_divergences(wide, b):
        weights, _ = outcomes_of(wide, pair.a.batch, pair.a.head)
        q_one, k_one = (one[pair.a.batch, pair.a.head].double() for one in (wide.q, wide.k))
        moved = (q_one @ k_one.T * wide.scale * 1e-5).numpy()
        p = weights[:, :-1]
        mean = (p * moved).sum(1, keepdims=True)
        half = (p * (moved - mean) ** 2).sum(1) / 2
        np.testing.assert_allclose(pair.rows.kl_nats.numpy(), half, rtol=1e-3)
        np.testing.assert_allclose(pair.rows.js_nats.numpy(), half / 4, rtol=1e-3)


def test_chosen_heads_and_real_queries_alone() -> None:
    a = problem_of(1, query_lengths=(7, 9))
    b = problem_of(2, query_lengths=(8, 4))
    pairs = list(stream_divergences(a, b, batches=[1, 0], heads=[2, 0]))
    assert [(one.a.batch, one.a.head) for one in pairs] == [(1, 2), (1, 0), (0, 2), (0, 0)]
    assert [len(one.rows.tv) for one in pairs] == [4, 4, 7, 7]
    every = stream_divergences(problem_of(1), problem_of(2))
    whole = {(one.a.batch, one.a.head): one for one in every}
    for one in pairs:
        rows = whole[one.a.batch, one.a.head].rows.tv[: len(one.rows.tv)]
        torch.testing.assert_close(one.rows.tv, rows)


@pytest.mark.parametrize(
    ("q", "k", "message"),
    [
        ((1, H, S, D), (1, H, K, D), "q: expected the same B as on the other side, 2, got 1"),
        ((B, 1, S, D), (B, 1, K, D), "q: expected the same H as on the other side, 3, got 1"),
        ((B, H, 8, D), (B, H, K, D), "q: expected the same S_q as on the other side, 9, got 8"),
        ((B, H, S, D), (B, H, 8, D), "k: expected the same S_k as on the other side, 11, got 8"),
    ],
)
def test_sides_of_other_sizes(q: tuple[int, ...], k: tuple[int, ...], message: str) -> None:
    other = make_problem(torch.zeros(q), torch.zeros(k), None, AttentionOptions())
    with pytest.raises(DataError, match=message):
        refuse_other_shapes(problem_of(1), other)
    wider = make_problem(torch.zeros(B, H, S, 9), torch.zeros(B, H, K, 9), None, AttentionOptions())
    refuse_other_shapes(problem_of(1), wider)
