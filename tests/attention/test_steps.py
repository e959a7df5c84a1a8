"""The reference against worked values, and the softmax where it is hardest."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import attncli
from attncli.attention import steps
from attncli.attention.steps import entropy_of_weights

INF = math.inf


@dataclass(frozen=True)
class Worked:
    """A worked value: inputs, options, and one stage of the first batch and head."""

    name: str
    q: Any
    k: Any
    v: Any
    expected: Any
    options: dict[str, Any] = field(default_factory=dict)
    stage: str = "output"


def identity(size: int) -> list[list[float]]:
    return torch.eye(size).tolist()


def column(*values: float) -> list[list[float]]:
    return [[value] for value in values]


def logits(*values: float) -> dict[str, Any]:
    """Q and K whose scores, unscaled, are the values."""
    return {"q": [[1.0]], "k": column(*values), "v": None}


UNSCALED = {"scale": 1.0}
EXAMPLE_Q = [[0.11, 0.77, 0.08], [-0.55, -0.28, 0.24], [-0.79, 0.97, -0.74], [-0.72, 0.95, 0.36]]
EXAMPLE_K = [[-0.89, -0.34, -0.17], [-0.17, 0.81, -0.10], [0.86, -0.99, 0.30], [0.10, -0.91, 0.92]]
EXAMPLE_V = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]]
EXAMPLE = {"q": EXAMPLE_Q, "k": EXAMPLE_K, "v": EXAMPLE_V}
POINTS = {"q": [[2.0, 0, 0, 0]], "k": identity(4), "v": column(0, 1, 2, 3)}
CORNERS = {
    "q": identity(2),
    "k": [[1.0, 0], [0, 1], [1, 1], [2, 0]],
    "v": column(0, 1, 2, 3),
}
WIDE_V = [[1.0] * 16, [3.0] * 16]
WINDOW = {"q": [[0.0]] * 5, "k": [[0.0]] * 5, "v": None}
NEIGHBOURS = [
    [1, 0, 0, 0, 0],
    [0.5, 0.5, 0, 0, 0],
    [0, 0.5, 0.5, 0, 0],
    [0, 0, 0.5, 0.5, 0],
    [0, 0, 0, 0.5, 0.5],
]
THREE = [True, True, False]

WORKED = [
    Worked("scale of the head", [[1.0] * 4], [[1.0] * 4, [2.0] * 4], WIDE_V, [[2.761594] * 16]),
    Worked("scale .5", **POINTS, options={"scale": 0.5}, expected=[[1.049266]]),
    Worked("scale 1", **POINTS, options={"scale": 1}, expected=[[0.577531]]),
    Worked("scale 2", **POINTS, options={"scale": 2}, expected=[[0.104170]]),
    Worked("scale 0 is a value", **POINTS, options={"scale": 0}, expected=[[1.5]]),
    Worked(
        "soft cap",
        **logits(2.5, 0.5, 1),
        options=UNSCALED | {"softcap": 2.0},
        stage="weights",
        expected=[[0.567824, 0.169878, 0.262297]],
    ),
    Worked(
        "cap before mask",
        **logits(5, 1, 2),
        options=UNSCALED | {"softcap": 2.0, "attn_mask": THREE},
        stage="weights",
        expected=[[0.740582, 0.259418, 0]],
    ),
    Worked(
        "softmax of 10, 1, 1",
        **logits(10, 1, 1),
        options=UNSCALED,
        stage="weights",
        expected=[[0.999753, 0.000123, 0.000123]],
    ),
    Worked(
        "softmax of 1000, 1000",
        **logits(1000, 1000),
        options=UNSCALED,
        stage="weights",
        expected=[[0.5, 0.5]],
    ),
    Worked(
        "causal, top-left",
        **CORNERS,
        options={"causal": True, "query_offset": "top-left"},
        expected=[[0], [0.669762]],
    ),
    Worked(
        "causal, bottom-right",
        **CORNERS,
        options={"causal": True, "query_offset": "bottom-right"},
        expected=[[1], [1.5]],
    ),
    Worked(
        "left window",
        **WINDOW,
        options={"causal": True, "left_window": 1},
        stage="weights",
        expected=NEIGHBOURS,
    ),
    Worked(
        "right window",
        **WINDOW,
        options={"left_window": 0, "right_window": 1},
        stage="weights",
        expected=[row[::-1] for row in NEIGHBOURS[::-1]],
    ),
    Worked(
        "an empty row",
        identity(2),
        identity(2),
        [[1, 2], [3, 4]],
        [[1, 2], [0, 0]],
        options={"attn_mask": [[True, False], [False, False]]},
    ),
    Worked(
        "True keeps",
        **logits(1, 2, 3),
        options=UNSCALED | {"attn_mask": THREE},
        stage="weights",
        expected=[[0.268941, 0.731059, 0]],
    ),
    Worked(
        "True drops",
        **logits(1, 2, 3),
        options=UNSCALED | {"attn_mask": THREE, "mask_true": "drop"},
        stage="weights",
        expected=[[0, 0, 1]],
    ),
    Worked(
        "a sink",
        **logits(1, 2),
        options=UNSCALED | {"sinks": [0.5]},
        stage="weights",
        expected=[[0.231224, 0.628532]],
    ),
    Worked(
        "example, scores",
        **EXAMPLE,
        options={},
        stage="scores",
        expected=[[-0.3733, 0.5970, -0.6437, -0.6161]],
    ),
    Worked(
        "example, weights",
        **EXAMPLE,
        options={},
        stage="weights",
        expected=[[0.223429, 0.391231, 0.191135, 0.194205]],
    ),
    Worked("example, output", **EXAMPLE, expected=[[0.417634, 0.585436, 0.385340]]),
]


@pytest.mark.parametrize("case", WORKED, ids=lambda case: case.name)
def test_worked_value(case: Worked) -> None:
    expected = np.array(case.expected, dtype=float)
    v = [[0.0]] * len(case.k) if case.v is None else case.v
    result = attncli.compute(case.q, case.k, v, **case.options)
    found = result.stages[case.stage][0, 0, : len(expected)].numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=6e-7)
    assert found.shape == expected.shape


def test_grouped_heads_are_interleaved() -> None:
    v = torch.tensor([0.0, 1.0])[:, None, None]  # (H_kv, S_k, d_v)
    result = attncli.compute(torch.zeros(4, 1, 1), torch.zeros(2, 1, 1), v)
    assert result.stages["output"].flatten().tolist() == [0, 0, 1, 1]


def test_the_embedded_example_causally() -> None:
    weights = attncli.compute(EXAMPLE_Q, EXAMPLE_K, causal=True).stages["weights"][0, 0]
    expected = torch.tensor([0.386604, 0.514468, 0.098928, 0], dtype=torch.float64)
    torch.testing.assert_close(weights[2], expected, rtol=0, atol=6e-7)
    bits = entropy_of_weights(weights) / math.log(2)
    expected = torch.tensor([0, 0.971039, 1.353528, 1.840207], dtype=torch.float64)
    torch.testing.assert_close(bits, expected, rtol=0, atol=6e-7)


def test_the_embedded_example_in_moments() -> None:
    result = attncli.compute(EXAMPLE_Q, EXAMPLE_K)
    bits = entropy_of_weights(result.stages["weights"][0, 0]) / math.log(2)
    expected = torch.tensor([1.928241, 1.976416, 1.688874, 1.840207], dtype=torch.float64)
    torch.testing.assert_close(bits, expected, rtol=0, atol=6e-7)
    assert result.statistics["scores"].std is not None
    assert result.statistics["scores"].std ** 2 == pytest.approx(0.736971, abs=6e-7)
    assert result.statistics["scaled"].std is not None
    assert result.statistics["scaled"].std ** 2 == pytest.approx(0.245657, abs=6e-7)


# ── the softmax itself ───────────────────────────────────────────────────────────────────────


def softmax(
    values: list[float], visible: list[bool] | None = None, sink: float | None = None
) -> steps.Softmax:
    row = torch.tensor([values], dtype=torch.float64)
    seen = torch.ones_like(row, dtype=torch.bool) if visible is None else torch.tensor([visible])
    one_more = None if sink is None else torch.tensor(sink, dtype=torch.float64)
    return steps.softmax(torch.where(seen, row, -INF), seen, one_more)


def test_a_sink_takes_its_share_and_leaves_the_log_sum_exp_alone() -> None:
    found = softmax([1.0, 2.0], sink=0.5)
    assert found.sink.item() == pytest.approx(0.140244, abs=6e-7)
    assert found.logsumexp.item() == pytest.approx(math.log(math.e + math.e**2), abs=1e-12)
    entropy = entropy_of_weights(found.weights, with_sink=True)
    assert entropy.item() == pytest.approx(0.905959, abs=6e-7)


@pytest.mark.parametrize("sink", [0.5, -700.0, 700.0, 1e6, -1e6])
def test_the_log_sum_exp_survives_any_sink(sink: float) -> None:
    assert softmax([1.0, 2.0], sink=sink).logsumexp.item() == pytest.approx(2.313262, abs=6e-7)


@pytest.mark.parametrize("sink", [None, 3.0])
def test_an_empty_row_is_all_zeros_sink_or_not(sink: float | None) -> None:
    found = softmax([1.0, 2.0], [False, False], sink)
    assert found.weights.tolist() == [[0.0, 0.0]]
    assert found.sink.item() == 0.0
    assert found.logsumexp.item() == -INF
    assert found.empty.tolist() == [True]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_logit_gives_hidden_keys_no_weight(bad: float) -> None:
    found = softmax([bad, 1.0, 2.0], [True, True, False])
    assert math.isnan(found.weights[0, 0].item())
    assert found.weights[0, 2].item() == 0.0


def test_no_keys_at_all() -> None:
    found = steps.softmax(torch.empty(2, 0), torch.empty(2, 0, dtype=torch.bool))
    assert found.weights.shape == (2, 0)
    assert found.empty.tolist() == [True, True]
    assert found.logsumexp.tolist() == [-INF, -INF]


@pytest.mark.parametrize("shift", [1e3, -1e3, 1e6, -1e6])
def test_the_maximum_is_subtracted(shift: float) -> None:
    """float64 holds 1e6 + x to 1e-10; exp of it it does not hold at all."""
    found = softmax([shift + 1.0, shift + 2.0, shift])
    torch.testing.assert_close(found.weights, softmax([1.0, 2.0, 0.0]).weights, rtol=0, atol=1e-9)
    assert found.logsumexp.item() - shift == pytest.approx(2.407606, abs=1e-6)


ENTROPIES = [
    ([0.25, 0.0, 0.75], 0.562335),
    ([0.25] * 4, 1.386294),
    ([1.0, 0.0], 0.0),
    ([0.0, 0.0], 0.0),
    ([0.5, 0.5], 0.693147),
    ([1.0], 0.0),
    ([1.0 + 2**-52, 0.0], 0.0),
]


@pytest.mark.parametrize(("weights", "nats"), ENTROPIES)
def test_entropy(weights: list[float], nats: float) -> None:
    found = entropy_of_weights(torch.tensor([weights], dtype=torch.float64)).item()
    assert found == pytest.approx(nats, abs=6e-7)
    assert math.copysign(1, found) == 1


def test_entropy_of_uniform_causal_rows() -> None:
    zeros = torch.zeros(4, 2)
    weights = attncli.compute(zeros, zeros, causal=True).stages["weights"][0, 0]
    expected = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).log()
    torch.testing.assert_close(entropy_of_weights(weights), expected, rtol=0, atol=1e-15)


# ── a finite "minus a lot" is not a mask ─────────────────────────────────────────────────────


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_the_lowest_number_everywhere_is_a_uniform_row(precision: str) -> None:
    lowest = torch.finfo(getattr(torch, precision)).min
    q, k = torch.tensor([[1.0]]), torch.tensor(column(1, 2, 3))
    result = attncli.compute(q, k, attn_mask=[[lowest] * 3], precision=precision)
    assert result.stages["weights"].flatten().tolist() == pytest.approx([1 / 3] * 3, abs=1e-6)
    assert result.statistics["masked"].n_masked == 0
    assert result.warnings


def test_a_smaller_minus_a_lot_is_the_plain_softmax() -> None:
    q, k = [[1.0]], column(1, 2, 3)
    plain = attncli.compute(q, k).stages["weights"]
    moved = attncli.compute(q, k, attn_mask=[[-1e4] * 3]).stages["weights"]
    torch.testing.assert_close(moved, plain, rtol=0, atol=1e-9)


def test_float64s_lowest_number_hides_no_key_in_float32() -> None:
    lowest = torch.finfo(torch.float64).min
    result = attncli.compute([[1.0]], column(1, 2), attn_mask=[lowest, lowest], precision="float32")
    assert result.statistics["masked"].n_masked == 0
    assert torch.isfinite(result.stages["masked"]).all()
