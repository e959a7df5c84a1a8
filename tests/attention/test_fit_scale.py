"""Scales recovered from weights and outputs that torch or the reference steps computed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from attncli.attention import steps
from attncli.attention.check import evidence
from attncli.attention.options import AttentionOptions, Target
from attncli.attention.problem import Problem, make_problem
from attncli.attention.variance.fit_scale import ScaleFit, fit_scale
from attncli.errors import DataError

DK, DV, HEADS = 16, 9, 4
SCALES = {
    "1": 1.0,
    "1/√d_k": DK**-0.5,
    "1/√d_v": DV**-0.5,
    "1/√d_model": (HEADS * DK) ** -0.5,
    "1/d_k": 1 / DK,
    "fitted": 0.137,
}


def problem_with(length: int = 24, **options: Any) -> Problem:
    """Q (2, 4, length, 16), K and V with two heads, float64."""
    rng = np.random.default_rng(8)
    q = torch.from_numpy(rng.standard_normal((2, HEADS, length, DK)))
    k = torch.from_numpy(rng.standard_normal((2, 2, length, DK)))
    v = torch.from_numpy(rng.standard_normal((2, 2, length, DV)))
    return make_problem(q, k, v, AttentionOptions(**options))


def computed(problem: Problem, source: Target, scale: float) -> torch.Tensor:
    """Weights or output under another scale, by the reference steps, float64."""
    repeats = problem.sizes.heads // problem.kv_heads
    k, v = (side.repeat_interleave(repeats, 1) for side in (problem.k, problem.v))
    every = slice(None)
    mask = problem.mask.moved(torch.as_tensor)
    found = steps.logits(
        problem.q @ k.mT,
        scale=scale,
        temperature=problem.temperature,
        softcap=problem.softcap,
        visible=mask.visible(every, every, every, every),
        bias=mask.bias(every, every, every, every),
    )
    sink = None if problem.sinks is None else problem.sinks[:, None]
    weights = steps.softmax(found.masked, found.visible, sink).weights
    return weights if source is Target.WEIGHTS else weights @ v


def fit(problem: Problem, source: Target, target: torch.Tensor) -> ScaleFit:
    return fit_scale(problem, source, target)


def fitted_scale(found: ScaleFit) -> float:
    (scale,) = (one.scale for one in found.candidates if one.name == "fitted")
    return scale


@pytest.mark.parametrize("source", [Target.WEIGHTS, Target.OUTPUT])
@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"temperature": 1.7, "alibi": True},
        {"softcap": 3.0},
        {"sinks": np.array([0.5, 1.0, -1.0, 2.0]), "causal": True, "left_window": 5},
        {"query_lengths": (3, 20), "key_lengths": (24, 0)},
    ],
    ids=["plain", "causal", "temperature", "softcap", "sinks", "padded"],
)
def test_the_scale_that_was_used_comes_first(
    source: Target, name: str, options: dict[str, Any]
) -> None:
    problem = problem_with(**options)
    found = fit(problem, source, computed(problem, source, SCALES[name]))
    best = found.candidates[0]
    assert best.name == name
    assert best.scale == pytest.approx(SCALES[name], rel=1e-9)
    assert best.max < 1e-9
    assert fitted_scale(found) == pytest.approx(SCALES[name], rel=1e-7)
    assert found.reason is None
    others = [one for one in found.candidates if one.name not in (name, "fitted")]
    assert all(one.rms > 1e-4 for one in others)


@pytest.mark.parametrize("source", [Target.WEIGHTS, Target.OUTPUT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounded_tensors_still_name_the_scale(source: Target, dtype: torch.dtype) -> None:
    problem = problem_with(causal=True)
    found = fit(problem, source, computed(problem, source, 1.0).to(dtype))
    assert found.candidates[0].name == "1"
    assert fitted_scale(found) == pytest.approx(1, rel=torch.finfo(dtype).eps)
    assert found.candidates[0].rms <= found.target_rms * torch.finfo(dtype).eps


def test_the_output_of_torch_itself() -> None:
    problem = problem_with(causal=True)
    output = scaled_dot_product_attention(
        problem.q, problem.k, problem.v, is_causal=True, enable_gqa=True, scale=1 / DK
    )
    found = fit_scale(problem, Target.OUTPUT, output)
    assert found.candidates[0].name == "1/d_k"
    assert (found.rows, found.rows_total) == (2 * 4 * 24, 2 * 4 * 24)


@pytest.mark.parametrize("source", [Target.WEIGHTS, Target.OUTPUT])
@pytest.mark.parametrize("scale", [-0.4, 0.0, 30.0])
def test_unusual_scales(source: Target, scale: float) -> None:
    problem = problem_with()
    found = fit(problem, source, computed(problem, source, scale))
    assert fitted_scale(found) == pytest.approx(scale, rel=1e-6, abs=1e-12)


def test_underflow_does_not_bend_the_fit() -> None:
    problem = problem_with()
    weights = computed(problem, Target.WEIGHTS, 3.0).to(torch.float16)
    assert int((weights == 0).sum()) > weights.numel() // 3
    assert fitted_scale(fit_scale(problem, Target.WEIGHTS, weights)) == pytest.approx(3, rel=1e-3)


def test_equal_scales_share_a_line() -> None:
    q = torch.eye(4)[None, None]
    found = fit_scale(make_problem(q, q, q, AttentionOptions(scale=0.3)), Target.OUTPUT, q)
    names = {one.name: one.scale for one in found.candidates}
    assert names["1/√d_k = 1/√d_v = 1/√d_model"] == 0.5
    assert names["as given"] == 0.3


def test_without_values_there_is_no_scale_of_their_width() -> None:
    q, k = torch.eye(4)[None, None].expand(1, 2, 4, 4), torch.ones(1, 2, 5, 4)
    problem = make_problem(q, k, None, AttentionOptions())
    weights = torch.full((1, 2, 4, 5), 0.2)
    names = {one.name: one.scale for one in fit_scale(problem, Target.WEIGHTS, weights).candidates}
    model = 1 / math.sqrt(8)
    assert names == {"1/√d_k": 0.5, "1/√d_model": model, "1/d_k": 0.25, "1": 1.0}


@pytest.mark.parametrize("source", [Target.WEIGHTS, Target.OUTPUT])
def test_what_depends_on_no_scale_has_no_fitted_one(source: Target) -> None:
    ones = torch.ones(5, 4, dtype=torch.float64)
    problem = make_problem(ones, ones, ones, AttentionOptions())
    width = 5 if source is Target.WEIGHTS else 4
    value = 0.2 if source is Target.WEIGHTS else 1.0
    found = fit(problem, source, torch.full((5, width), value, dtype=torch.float64))
    assert found.reason is not None
    assert "fitted" not in [one.name for one in found.candidates]
    assert found.candidates[0].max < 1e-15


def test_rows_that_see_no_key_may_hold_anything() -> None:
    problem = problem_with(causal=True, query_offset=-3)
    weights = computed(problem, Target.WEIGHTS, 1.0)
    weights[:, :, :3] = torch.nan
    found = fit_scale(problem, Target.WEIGHTS, weights)
    assert found.candidates[0].name == "1"
    assert found.rows == 2 * 4 * 21


def test_nothing_to_see() -> None:
    problem = problem_with(key_lengths=(0,))
    found = fit_scale(problem, Target.WEIGHTS, torch.zeros(2, HEADS, 24, 24))
    assert (found.rows, found.target_rms) == (0, 0)
    assert found.reason == "no query sees a key"


@pytest.mark.parametrize("source", [Target.WEIGHTS, Target.OUTPUT])
def test_a_sample_of_rows_finds_the_same(source: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "SAMPLE_CELLS", 24 * 20)
    problem = problem_with(causal=True)
    found = fit(problem, source, computed(problem, source, SCALES["1/√d_v"]))
    assert found.candidates[0].name == "1/√d_v"
    assert 8 <= found.rows <= 20 < found.rows_total == 2 * 4 * 24


def test_rows_of_padded_queries_are_neither_looked_at_nor_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = problem_with(query_lengths=(24, 10))
    weights = computed(problem, Target.WEIGHTS, 1.0)
    weights[1, :, 10:] = 7.0
    found = fit_scale(problem, Target.WEIGHTS, weights)
    assert (found.candidates[0].name, found.rows, found.rows_total) == ("1", 136, 136)
    monkeypatch.setattr(evidence, "SAMPLE_CELLS", 24 * 20)
    assert fit_scale(problem, Target.WEIGHTS, weights).rows_total == 136


def test_wrong_input_is_refused() -> None:
    problem = problem_with()
    weights = computed(problem, Target.WEIGHTS, 1.0)
    with pytest.raises(DataError, match=r"\(2, 4, 24, 24\), got \(2, 4, 24, 9\)"):
        fit_scale(problem, Target.WEIGHTS, weights[..., :DV])
    weights[1, 2, 3, 4] = math.inf
    with pytest.raises(DataError, match="batch 1, head 2"):
        fit_scale(problem, Target.WEIGHTS, weights)
    bare = make_problem(problem.q, problem.k, None, AttentionOptions())
    with pytest.raises(DataError, match="expected v beside it"):
        fit_scale(bare, Target.OUTPUT, weights[..., :DV])


def test_a_scale_that_went_through_float32_is_the_classic_one() -> None:
    given = problem_with(scale=float(np.float32(1 / 3)))  # 1/√d_v
    fit = fit_scale(given, Target.WEIGHTS, computed(given, Target.WEIGHTS, 1 / 3))
    assert [candidate.name for candidate in fit.candidates if "given" in candidate.name] == []
    assert fit.candidates[0].name == "1/√d_v"


def test_a_named_scale_that_leaves_rounding_alone_comes_first() -> None:
    rng = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 3, 16, 32, generator=rng, dtype=torch.float64) for _ in range(2))
    problem = make_problem(q, k, None, AttentionOptions())
    weights = torch.softmax(q @ k.mT / 32**0.5, -1)
    assert fit_scale(problem, Target.WEIGHTS, weights).candidates[0].name.startswith("1/√d_k")
