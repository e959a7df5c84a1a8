"""The streaming engine on hard rows, against 50 digits and against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from mpmath import mp, mpf

from attncli.attention.options import AttentionOptions
from attncli.attention.problem import Precision, Problem, make_problem
from attncli.attention.streaming.stream import HeadRows, Wanted, stream_rows

ULP32 = 2.0**-23


def of_logits(logits: np.ndarray, dtype: str = "float64", sink: float | None = None) -> Problem:
    """One query whose logits are exactly these: q = 1, k = the logit."""
    tensor = torch.from_numpy(np.asarray(logits, dtype))[:, None]
    options = AttentionOptions(scale=1.0, sinks=None if sink is None else np.array([sink]))
    one = torch.ones(1, 1, dtype=tensor.dtype)
    return make_problem(one, tensor, None, options, precision=Precision(dtype))


def only_head(problem: Problem, wanted: Wanted | None = None) -> HeadRows:
    (rows,) = stream_rows(problem, wanted)
    return rows


def exact(logits: np.ndarray, sink: float | None = None, digits: int = 50) -> tuple[float, float]:
    """Entropy in nats and largest key weight, to 50 digits after those that a 1 hides."""
    with mp.workdps(digits):
        values = [mpf(float(value)) for value in logits]
        outcomes = values if sink is None else [*values, mpf(sink)]
        peak = max(outcomes)
        exps = [mp.exp(value - peak) for value in outcomes]
        total = mp.fsum(exps)
        weights = [part / total for part in exps]
        entropy = mp.fsum(-weight * mp.log(weight) for weight in weights if weight)
        return float(entropy), float(mp.exp(max(values) - peak) / total)


RNG = np.random.default_rng(0)
NORMAL = RNG.standard_normal(700)
HARD_ROWS = {
    "nearly one-hot, 1 - 1e-12": np.array([0.0, math.log(1e-12), -800.0]),
    "nearly one-hot at the end": np.append(np.full(700, -40.0), 0.0),
    "nearly one-hot, entropy near 1e-9": np.array([0.0, -24.0]),
    "two at the top, in different tiles": np.concatenate([[0.0], np.full(600, -60.0), [0.0]]),
    "nearly uniform": NORMAL * 1e-9,
    "uniform": np.zeros(700),
    "plain": NORMAL * 3,
    "logits of 1e4": NORMAL * 1e4,
    "all at 1e4": 1e4 + NORMAL,
    "all at -1e4": -1e4 + NORMAL,
    "one visible key": np.array([-3.25]),
}
CASES = [(name, sink) for name in HARD_ROWS for sink in (None, 0.5, -30.0, 1e4)]


@pytest.mark.parametrize(("name", "sink"), CASES)
def test_float64_keeps_twelve_digits(name: str, sink: float | None) -> None:
    logits = HARD_ROWS[name]
    rows = only_head(of_logits(logits, sink=sink))
    entropy, weight = exact(logits, sink)
    found = float(rows.entropy_nats[0])
    if entropy > 1e-9:
        assert found == pytest.approx(entropy, rel=1e-12, abs=0)
    else:
        assert found == pytest.approx(entropy, rel=1e-9, abs=1e-300)
    assert 0 <= found <= math.log(int(rows.outcomes[0]))
    assert float(rows.max_weight[0]) == pytest.approx(weight, rel=1e-12, abs=0)


GAPS = [1e-9, 1.0, 10.0, 30.0, 100.0, 300.0, 700.0]
APART = [np.array([0.0, -gap]) for gap in GAPS] + [NORMAL[:n] * 1e3 for n in (2, 3, 50)]
CLOSE = [HARD_ROWS[name] for name in ("nearly uniform", "plain", "all at 1e4", "all at -1e4")]
ONE_AMONG_MANY = np.append(0.0, np.full(4095, -9.0))


@pytest.mark.parametrize("logits", [*APART, *CLOSE], ids=repr)
def test_float64_loses_digits_by_the_gap_at_the_top_alone(logits: np.ndarray) -> None:
    """As the README says: relative to within (2 + G) ulps."""
    second, most = np.sort(logits)[-2:]
    entropy, _ = exact(logits, digits=700)
    found = float(only_head(of_logits(logits)).entropy_nats[0])
    assert abs(found - entropy) <= (2 + most - second) * 2.0**-52 * entropy


def test_float32_errs_by_the_largest_magnitude_of_a_logit() -> None:
    """The largest logit is 0 here, and the error is not."""
    logits = ONE_AMONG_MANY.astype(np.float32)
    entropy, _ = exact(logits)
    found = float(only_head(of_logits(logits, "float32")).entropy_nats[0])
    assert abs(found - entropy) <= 4 * ULP32 * 9


@pytest.mark.parametrize("name", HARD_ROWS)
def test_float32_is_within_ulps_of_the_largest_logit(name: str) -> None:
    logits = HARD_ROWS[name].astype(np.float32)
    rows = only_head(of_logits(logits, "float32"))
    entropy, _ = exact(logits)
    limit = 4 * ULP32 * max(1.0, float(np.abs(logits).max()), math.log(len(logits)))
    assert abs(float(rows.entropy_nats[0]) - entropy) <= limit


@pytest.mark.parametrize("spread", [1.0, 7.0])
@pytest.mark.parametrize("causal", [True, False])
def test_float32_at_16384_keys(spread: float, causal: bool) -> None:
    """Logits within ±30, some rows of a long head, against float64 on the same tensors."""
    n, rows = 16_384, 24
    rng = np.random.default_rng(1)
    q = torch.from_numpy(rng.standard_normal((rows, 64)).astype(np.float32))
    k = torch.from_numpy(rng.standard_normal((n, 64)).astype(np.float32))
    options = AttentionOptions(
        scale=spread / 8, causal=causal, query_offset=n - rows if causal else 0
    )
    low = only_head(make_problem(q, k, None, options, precision=Precision.FLOAT32))
    high = only_head(make_problem(q, k, None, options, precision=Precision.FLOAT64))
    assert float(high.max_logit.max()) < 35
    assert float((low.entropy_nats - high.entropy_nats).abs().max()) < 1e-5
    torch.testing.assert_close(low.logsumexp, high.logsumexp, rtol=0, atol=1e-5)
    torch.testing.assert_close(low.sink_mass, high.sink_mass, rtol=1e-4, atol=1e-9)
    assert low.distance is not None
    assert high.distance is not None
    torch.testing.assert_close(low.distance, high.distance, rtol=1e-5, atol=1e-3)


def test_finite_minus_a_lot_is_not_hidden() -> None:
    """A row with nothing but float32's lowest value comes out uniform, not empty."""
    q = k = torch.zeros(1, 4)
    lowest = np.full((1, 1), np.finfo(np.float32).min, np.float32)
    options = AttentionOptions(attn_mask=lowest)
    rows = only_head(make_problem(q, k.expand(5, 4), None, options, precision=Precision.FLOAT32))
    assert int(rows.keys[0]) == 5
    assert float(rows.entropy_nats[0]) == pytest.approx(math.log(5))


def test_entropy_is_the_output_with_keys_as_values() -> None:
    """H = logsumexp − scale · q · (Σ w k): the fused kernel of torch as an outside judge."""
    rng = np.random.default_rng(2)
    q, k = (torch.from_numpy(rng.standard_normal((1, 2, 700, 8))) for _ in range(2))
    scale = 0.7
    attend = torch.nn.functional.scaled_dot_product_attention
    mean_key = attend(q, k, k, is_causal=True, scale=scale)
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(
        torch.ones(700, 700, dtype=torch.bool).triu(1), -torch.inf
    )
    expected = torch.logsumexp(scores, -1) - scale * (q * mean_key).sum(-1)
    v = torch.from_numpy(rng.standard_normal((1, 2, 700, 5)))
    problem = make_problem(q, k, v, AttentionOptions(causal=True, scale=scale))
    for rows in stream_rows(problem, Wanted(output=True)):
        torch.testing.assert_close(rows.entropy_nats, expected[0, rows.head], atol=1e-11, rtol=0)
        output = attend(q, k, v, is_causal=True, scale=scale)
        torch.testing.assert_close(rows.output, output[0, rows.head])
