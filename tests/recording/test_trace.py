"""Softmax that is written out in other words; eager code by rows; calls that do not fit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from small_models import build, inputs
from torch import nn

import attncli
from attncli.recording import hooks
from attncli.recording.capture import Capture

HEADS, WIDTH = 4, 8


class WrittenOut(nn.Module):
    """Causal attention with a bias, (B, S, 32), by products of one kind or another."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.num_heads = HEADS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, H, S, 8)."""
        heads = x.unflatten(-1, (HEADS, WIDTH))  # (B, S, H, d)
        q, k, v = (heads.roll(n, -1).transpose(1, 2) for n in range(3))  # (B, H, S, d)
        batch, _, length, _ = q.shape
        position = torch.arange(length)
        bias = (position - position[:, None]) / 5.0
        hidden = position > position[:, None]
        if self.kind == "einsum":
            scores = torch.einsum("bqhd,bkhd->bhqk", q.transpose(1, 2), k.transpose(1, 2))
            weights = torch.softmax(
                (scores / math.sqrt(WIDTH) + bias).masked_fill(hidden, -1e9), -1
            )
            mixed = torch.einsum("bhqk,bkhd->bqhd", weights, v.transpose(1, 2))
            return mixed.transpose(1, 2)
        if self.kind == "baddbmm":
            flat = [tensor.flatten(0, 1) for tensor in (q, k, v)]
            wide = bias.expand(batch * HEADS, length, length)
            scores = torch.baddbmm(wide, flat[0], flat[1].mT, beta=1.0, alpha=WIDTH**-0.5)
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
            return torch.bmm(weights, flat[2]).unflatten(0, (batch, HEADS))
        scores = (q * WIDTH**-0.25) @ (k * WIDTH**-0.25).mT
        weights = nn.functional.softmax(scores + bias + torch.where(hidden, -math.inf, 0.0), -1)
        return nn.functional.dropout(weights, 0.1, self.training) @ v


@pytest.mark.parametrize("kind", ["einsum", "baddbmm", "matmul"])
def test_softmax_is_followed_whatever_makes_its_products(kind: str) -> None:
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(WrittenOut(kind)).eval()
    with torch.no_grad(), attncli.capture(model, trace=True) as seen:
        out = model(x)
    (name,) = seen.groups
    group, found = seen.groups[name], seen[name]
    assert (group.batch, group.heads, group.q_len, group.dk) == (2, HEADS, 5, WIDTH)
    assert group.options["causal"] is True
    assert group.self_check is not None
    assert group.self_check < 1e-6
    derived = attncli.compute(found.q, found.k, found.v, **found.options).stages["output"]
    torch.testing.assert_close(derived.float(), out, rtol=0, atol=1e-6)


def test_products_that_are_no_attention_are_let_be() -> None:
    class Other(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Products around a softmax of other shapes and meanings."""
            torch.einsum("...qd,...kd->...qk", x, x).softmax(-1)
            torch.einsum("bsd,bsd->bs", x, x).softmax(-1)
            gate = (x @ x.mT).softmax(1)[:, :2]
            return torch.bmm(gate, x) + (x @ x.mT).sum() * torch.softmax(x, -1)[:, :2]

    with (
        pytest.raises(attncli.DataError, match="none from Other"),
        attncli.capture(Other(), trace=True) as seen,
    ):
        seen.model(torch.ones(2, 4, 8))


@pytest.mark.parametrize("name", ["gemma2", "t5", "bert"])
def test_eager_code_gives_the_same_by_blocks_of_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(name, "eager")
    with torch.no_grad():
        plain = model(**inputs(name))[0]
        monkeypatch.setattr(hooks, "_EAGER_CELLS", 40)  # three rows of twelve keys
        with attncli.capture(model) as seen:
            blocked = model(**inputs(name))[0]
    torch.testing.assert_close(blocked, plain, rtol=0, atol=1e-5)
    assert seen.warnings == []


def test_weights_that_are_wanted_are_computed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_EAGER_CELLS", 40)
    model = build("bert", "eager")
    with torch.no_grad(), attncli.capture(model):
        found = model(**inputs("bert"), output_attentions=True).attentions
    assert [tuple(one.shape) for one in found] == [(1, 4, 12, 12)] * 2


def test_what_does_not_fit_is_recorded_without_it_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    complete = Capture._keywords

    def broken(self: Any, call: Any) -> dict[str, Any]:
        return complete(self, call) | {"sinks": [1.0, 2.0, 3.0]}

    monkeypatch.setattr(Capture, "_keywords", broken)
    model = build("bert")
    with torch.no_grad(), attncli.capture(model, layers=0) as seen:
        model(**inputs("bert"))
    said = "encoder.layer.0.attention.self: recorded without its options: sinks: expected one logit"
    assert seen.warnings[0].startswith(said)
    assert seen.groups["layers.0"].failed
