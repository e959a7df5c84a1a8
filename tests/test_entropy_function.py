"""`attncli.entropy` on tensors: the command's numbers, in a training loop, for chosen heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import attncli


def tensors(requires_grad: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(2)
    q, k = (torch.from_numpy(rng.standard_normal(shape)) for shape in ((2, 6, 7, 8), (2, 3, 7, 8)))
    return q.requires_grad_(requires_grad), k.requires_grad_(requires_grad)


def test_it_agrees_with_compute() -> None:
    q, k = tensors()
    found = attncli.entropy(q, k, causal=True, per_row=True, per_key=True)
    weights = attncli.compute(q, k, causal=True, stages="weights").stages["weights"]
    entropies = torch.special.entr(weights).sum(-1)
    torch.testing.assert_close(found.column("entropy_nats_mean"), entropies.mean(-1))
    torch.testing.assert_close(found.column("max_weight_mean"), weights.amax(-1).mean(-1))
    assert found.rows is not None
    assert [(rows.batch, rows.head) for rows in found.rows] == [
        (batch, head) for batch in range(2) for head in range(6)
    ]
    for rows in found.rows:
        of_head = weights[rows.batch, rows.head]
        torch.testing.assert_close(rows.entropy_nats, entropies[rows.batch, rows.head])
        assert rows.received is not None
        torch.testing.assert_close(rows.received.mass, of_head.sum(0))


def test_it_leaves_gradients_and_inputs_alone() -> None:
    q, k = tensors(requires_grad=True)
    before = q.detach().clone()
    found = attncli.entropy(q, k, q.detach()[:, :3], per_row=True)
    assert found.rows is not None
    assert not found.rows[0].entropy_nats.requires_grad
    (q.sum() + k.sum()).backward()  # type: ignore[no-untyped-call]
    assert torch.equal(q.detach(), before)


def test_values_have_no_influence() -> None:
    q, k = tensors()
    plain = attncli.entropy(q, k).heads
    assert attncli.entropy(q, k, torch.randn(2, 3, 7, 5)).heads == plain


PER_HEAD: list[dict[str, Any]] = [
    {"causal": True, "left_window": 2},
    {"alibi": True},
    {"sinks": [0.0, 1.0, -1.0, 2.0, 5.0, -9.0]},
    {"attn_mask": np.random.default_rng(1).random((2, 6, 7, 7)) < 0.6},
    {"attn_mask": np.random.default_rng(1).standard_normal((2, 1, 7, 7))},
    {"attn_mask": np.random.default_rng(1).standard_normal((6, 1, 7))},
    {"key_lengths": [3, 6], "query_lengths": [7, 2]},
    {"key_padding": np.random.default_rng(1).random((2, 7)) < 0.6},
    {"query_offset": [1, 4], "causal": True},
    {"segments": np.array([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 2, 2, 2]])},
]


@pytest.mark.parametrize("options", PER_HEAD)
def test_chosen_heads_have_the_numbers_they_have_among_all(options: dict[str, Any]) -> None:
    q, k = tensors()
    every = attncli.entropy(q, k, **options).heads
    some = attncli.entropy(q, k, head_index=[-1, 2, 2], batch_index=1, **options)
    assert some.batches == (1,)
    assert some.head_indices == (5, 2)
    for one, head in zip(some.heads, (5, 2), strict=True):
        same = every[6 + head]
        assert (one.batch, one.head, one.label) == (1, head, same.label)
        for name in ("entropy_nats_mean", "logsumexp_mean", "max_logit", "distance_mean"):
            assert getattr(one, name) == pytest.approx(getattr(same, name), rel=1e-12), name


@pytest.mark.parametrize(
    "keywords",
    [
        {"head_index": 6},
        {"label_limits": {"nothing": 0.5}},
        {"label_limits": {"sink": 2.0}},
        {"sink_keys": 0},
        {"temperature": 0.0},
        {"device": "nowhere"},
    ],
)
def test_what_makes_no_sense_is_refused(keywords: dict[str, Any]) -> None:
    with pytest.raises(attncli.UsageError, match="expected"):
        attncli.entropy(*tensors(), **keywords)


def test_only_columns_of_numbers_are_columns() -> None:
    found = attncli.entropy(*tensors())
    with pytest.raises(attncli.UsageError, match="entropy_bits_mean"):
        found.column("label")
    assert found.column("queries").tolist() == [[7.0] * 6] * 2


def test_labels_follow_their_limits() -> None:
    q, k = tensors()
    moved = attncli.entropy(0 * q, k, label_limits={"uniform": 1.0})
    assert {head.label for head in moved.heads} == {"uniform"}
    moved = attncli.entropy(q, k, label_limits={"collapsed": 0.001, "uniform": 1.0})
    assert "collapsed" in {head.label for head in moved.heads}
