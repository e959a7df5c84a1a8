"""What must hold for all attention, on random problems."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import masks, positional_options, tensors

import attncli
from attncli.attention.steps import entropy_of_weights

NAN, INF = math.nan, math.inf


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_rows_sum_to_one_or_to_zero(data: st.DataObject) -> None:
    t = data.draw(tensors())
    result = attncli.compute(t.q, t.k, attn_mask=data.draw(masks(t.cells)))
    assert result.visible is not None
    weights, some = result.stages["weights"], result.visible.any(-1)
    torch.testing.assert_close(weights.sum(-1), some.double(), rtol=0, atol=1e-12)
    assert (weights >= 0).all()
    assert (weights[~result.visible] == 0).all()


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_entropy_lies_between_zero_and_that_of_equal_weights(data: st.DataObject) -> None:
    t = data.draw(tensors())
    result = attncli.compute(t.q, t.k, attn_mask=data.draw(masks(t.cells)))
    assert result.visible is not None
    entropy = entropy_of_weights(result.stages["weights"])
    most = result.visible.sum(-1).clamp(min=1).double().log()
    assert (entropy >= 0).all()
    assert (entropy <= most + 1e-12).all()


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_shifting_a_row_changes_nothing(data: st.DataObject) -> None:
    t = data.draw(tensors())
    mask = np.random.default_rng(0).standard_normal(t.cells[2:])
    shift = data.draw(st.lists(st.floats(-50, 50), min_size=t.cells[2], max_size=t.cells[2]))
    plain = attncli.compute(t.q, t.k, t.v, attn_mask=mask)
    moved = attncli.compute(t.q, t.k, t.v, attn_mask=mask + np.array(shift)[:, None])
    for stage in ("weights", "output"):
        torch.testing.assert_close(moved.stages[stage], plain.stages[stage], rtol=0, atol=1e-11)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_permuting_keys_permutes_weights(data: st.DataObject) -> None:
    t = data.draw(tensors())
    order = data.draw(st.permutations(range(t.cells[3])))
    mask = np.random.default_rng(1).random(t.cells) < 0.7
    plain = attncli.compute(t.q, t.k, t.v, attn_mask=mask)
    moved = attncli.compute(
        t.q, t.k[:, :, order], t.v[:, :, order], attn_mask=mask[..., list(order)]
    )
    torch.testing.assert_close(
        moved.stages["weights"], plain.stages["weights"][..., order], rtol=0, atol=1e-13
    )
    torch.testing.assert_close(
        moved.stages["output"], plain.stages["output"], rtol=1e-12, atol=1e-12
    )


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_grouped_heads_equal_repeated_ones(data: st.DataObject) -> None:
    t = data.draw(tensors())
    group = t.q.shape[1] // t.k.shape[1]
    k, v = t.k.repeat_interleave(group, 1), t.v.repeat_interleave(group, 1)
    grouped, repeated = attncli.compute(t.q, t.k, t.v), attncli.compute(t.q, k, v)
    for stage, values in repeated.stages.items():
        torch.testing.assert_close(grouped.stages[stage], values, rtol=1e-12, atol=1e-12)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_window_as_wide_as_the_sequence_is_plain_causality(data: st.DataObject) -> None:
    t = data.draw(tensors(square=True))
    length = t.cells[2]
    plain = attncli.compute(t.q, t.k, t.v, causal=True)
    wide = attncli.compute(t.q, t.k, t.v, causal=True, left_window=length, right_window=0)
    torch.testing.assert_close(
        wide.stages["output"], plain.stages["output"], rtol=1e-12, atol=1e-12
    )
    both = attncli.compute(t.q, t.k, t.v, left_window=length, right_window=length)
    free = attncli.compute(t.q, t.k, t.v)
    torch.testing.assert_close(both.stages["output"], free.stages["output"], rtol=1e-12, atol=1e-12)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_decode_step_is_the_last_row_of_the_full_run(data: st.DataObject) -> None:
    t = data.draw(tensors(square=True))
    options: dict[str, Any] = {
        "causal": True,
        "left_window": data.draw(st.none() | st.integers(0, 4)),
    }
    options["alibi"] = data.draw(st.booleans())
    full = attncli.compute(t.q, t.k, t.v, **options)
    step = attncli.compute(t.q[:, :, -1:], t.k, t.v, query_offset="bottom-right", **options)
    for stage, values in step.stages.items():
        torch.testing.assert_close(values, full.stages[stage][:, :, -1:], rtol=1e-12, atol=1e-12)


@given(data=st.data(), poison=st.sampled_from([NAN, INF, -INF, 1e300]))
@settings(max_examples=60, deadline=None)
def test_masked_keys_contribute_nothing_at_all(data: st.DataObject, poison: float) -> None:
    t = data.draw(tensors())
    hidden = data.draw(st.integers(0, t.cells[3] - 1))
    mask = np.ones(t.cells[3], bool)
    mask[hidden] = False
    k, v = t.k.clone(), t.v.clone()
    k[:, :, hidden, 0] = poison
    v[:, :, hidden] = poison
    softcap = data.draw(st.sampled_from([None, 3.0]))
    clean = attncli.compute(t.q, t.k, t.v, attn_mask=mask, softcap=softcap)
    dirty = attncli.compute(t.q, k, v, attn_mask=mask, softcap=softcap, allow_nonfinite=True)
    for stage in ("masked", "weights", "output"):
        torch.testing.assert_close(dirty.stages[stage], clean.stages[stage], rtol=0, atol=1e-12)


def test_a_broken_value_reaches_only_those_who_see_it() -> None:
    zeros, v = torch.zeros(3, 2), torch.tensor([[1.0, 1.0], [NAN, 2.0], [3.0, INF]])
    result = attncli.compute(zeros, zeros, v, causal=True, allow_nonfinite=True)
    expected = [[1.0, 1.0], [NAN, 1.5], [NAN, INF]]
    np.testing.assert_array_equal(result.stages["output"][0, 0].numpy(), expected)


def test_infinite_values_are_summed_as_ieee_says() -> None:
    """∞ − ∞ is NaN, and so is a weight that has vanished times ∞."""
    v = torch.tensor([[INF, INF, 1.0, -INF], [INF, -INF, -INF, 1.0]])
    q, k = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [-1e4]])
    result = attncli.compute(q, k, v, allow_nonfinite=True)
    assert result.stages["weights"][0, 0].tolist() == [[0.5, 0.5], [1.0, 0.0]]
    expected = [[INF, NAN, -INF, -INF], [NAN, NAN, NAN, -INF]]
    np.testing.assert_array_equal(result.stages["output"][0, 0].numpy(), expected)


def test_many_broken_values_cost_no_more_than_one() -> None:
    """Sixty thousand of them in a loop took seconds."""
    keys = torch.zeros(60_000, 1)
    result = attncli.compute(keys[:2], keys, keys + NAN, allow_nonfinite=True)
    assert result.statistics["output"].n_nan == 2


def test_a_broken_value_of_one_head_stays_in_its_group() -> None:
    v = torch.zeros(1, 2, 3, 1)
    v[0, 1, 0, 0] = NAN
    result = attncli.compute(
        torch.zeros(1, 4, 2, 1), torch.zeros(1, 2, 3, 1), v, allow_nonfinite=True
    )
    broken = result.stages["output"].isnan().any(-1).any(-1)
    assert broken.tolist() == [[False, False, True, True]]


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_sink_is_one_more_key_without_value(data: st.DataObject) -> None:
    t = data.draw(tensors())
    heads = t.q.shape[1]
    sinks = np.array(data.draw(st.lists(st.floats(-20, 20), min_size=heads, max_size=heads)))
    with_sinks = attncli.compute(t.q, t.k, t.v, sinks=sinks)
    one_more = F.pad(t.k, (0, 0, 0, 1))  # a zero key scores 0, and the mask adds the sink's logit
    bias = np.zeros((1, heads, 1, t.cells[3] + 1))
    bias[0, :, 0, -1] = sinks
    zero_value = F.pad(t.v, (0, 0, 0, 1))
    expected = attncli.compute(t.q, one_more, zero_value, attn_mask=bias)
    torch.testing.assert_close(
        with_sinks.stages["weights"], expected.stages["weights"][..., :-1], rtol=1e-11, atol=1e-14
    )
    torch.testing.assert_close(
        with_sinks.stages["output"], expected.stages["output"], rtol=1e-11, atol=1e-12
    )


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_a_soft_cap_far_above_the_scores_does_nothing(data: st.DataObject) -> None:
    t = data.draw(tensors())
    plain = attncli.compute(t.q, t.k).stages["scaled"]
    capped = attncli.compute(t.q, t.k, softcap=1e9).stages["capped"]
    torch.testing.assert_close(capped, plain, rtol=1e-9, atol=1e-9)


@given(data=st.data(), cap=st.floats(0.1, 50))
@settings(max_examples=30, deadline=None)
def test_a_soft_cap_bounds_and_keeps_the_order(data: st.DataObject, cap: float) -> None:
    t = data.draw(tensors())
    result = attncli.compute(t.q, t.k, softcap=cap)
    scaled, capped = result.stages["scaled"], result.stages["capped"]
    assert (capped.abs() <= cap).all()
    assert (capped.abs() <= scaled.abs() * (1 + 1e-12)).all()
    order = scaled.argsort(-1)
    assert (capped.gather(-1, order).diff(dim=-1) >= 0).all()


@given(data=st.data(), temperature=st.floats(0.05, 20))
@settings(max_examples=30, deadline=None)
def test_a_temperature_is_a_divided_scale(data: st.DataObject, temperature: float) -> None:
    t = data.draw(tensors())
    scale = data.draw(st.sampled_from([0.5, 1.0, -2.0]))
    warm = attncli.compute(t.q, t.k, t.v, scale=scale, temperature=temperature)
    divided = attncli.compute(t.q, t.k, t.v, scale=scale / temperature)
    torch.testing.assert_close(
        warm.stages["output"], divided.stages["output"], rtol=1e-10, atol=1e-10
    )


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_float32_agrees_with_float64(data: st.DataObject) -> None:
    t = data.draw(tensors())
    options = data.draw(positional_options(t.cells))
    options |= {
        "attn_mask": data.draw(masks(t.cells)),
        "softcap": data.draw(st.none() | st.just(4.0)),
    }
    options["sinks"] = data.draw(st.none() | st.just(np.linspace(-1, 1, t.cells[1])))
    q, k, v = t.q.float(), t.k.float(), t.v.float()
    exact = attncli.compute(q, k, v, precision="float64", **options)
    rough = attncli.compute(q, k, v, precision="float32", **options)
    for stage, values in rough.stages.items():
        assert values.dtype == torch.float32
        expected = exact.stages[stage]
        assert expected.dtype == torch.float64
        limit = 1e-5 * max(1.0, float(exact.stages["scaled"].abs().max()))
        torch.testing.assert_close(values.double(), expected, rtol=1e-4, atol=limit)
