"""Every classic mistake, made by hand on random problems, is called by its name."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from mistaken import (
    MADE,
    NOT_LOGSUMEXP,
    ONLY_LOGSUMEXP,
    ONLY_OUTPUT,
    Draw,
    attend,
    draw_problem,
    offset_fits,
    visible,
)

from attncli.attention.check.candidate import read_candidate
from attncli.attention.check.compare import compare
from attncli.attention.check.hypotheses import Check, check
from attncli.attention.check.mistakes import MISTAKES
from attncli.attention.options import Target
from attncli.attention.problem import make_problem

DRAWS = 2
# Some pattern of dropped weights explains almost any output.
FROM_OUTPUT = [name for name in MADE if name not in ("dropout", *ONLY_LOGSUMEXP)]
FROM_WEIGHTS = [name for name in MADE if name not in (*ONLY_OUTPUT, *ONLY_LOGSUMEXP)]
FROM_LOGSUMEXP = [name for name in MADE if name not in NOT_LOGSUMEXP]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def checked(draw: Draw, target: Target, values: torch.Tensor) -> Check:
    problem = draw.problem()
    return check(problem, draw.options(), [read_candidate(target, values, problem)])


def coincides(name: str, draw: Draw, target: Target, values: torch.Tensor) -> bool:
    """Whether this mistake, made by hand, gives the same on this very problem."""
    close = (torch.allclose(other[target], values, 1e-4, 1e-5) for other in MADE[name](draw))
    return any(close)


def assert_named(name: str, target: Target, draw: Draw) -> None:
    for made in MADE[name](draw):
        values = made[target]
        found = checked(draw, target, values)
        if found.passed:  # this mistake changes nothing on this problem: nothing to be named
            assert torch.allclose(values, attend(draw)[target], 1e-3, 1e-4)
            continue
        named = [one.name for one in found.hypotheses if one.matches]
        assert name in named, (name, named)
        strangers = [
            one.name
            for one in found.hypotheses
            if one.matches and one.name != name and not coincides(one.name, draw, target, values)
            # Documents that differ by batch are no option's value.
            if one.name != "segments:added" or one.changes
            if not (one.changes and made_by(one.changes, draw, target, values))
        ]
        assert strangers == []


def made_by(changes: dict[str, Any], draw: Draw, target: Target, values: torch.Tensor) -> bool:
    """Whether these options give the same on this very problem."""
    changes = {key: np.array(v) if key == "segments" else v for key, v in changes.items()}
    if isinstance(changes.get("key_lengths"), int):
        changes["key_lengths"] = (changes["key_lengths"],)
    options = replace(draw.options(), **changes)
    problem = make_problem(draw.q, draw.k, draw.v, options)
    return compare(problem, options, [read_candidate(target, values, problem)])[0].passed


@pytest.mark.parametrize("name", FROM_OUTPUT)
def test_a_mistake_is_named_by_its_output(name: str) -> None:
    for seed in range(DRAWS):
        assert_named(name, Target.OUTPUT, offset_fits(name, draw_problem(name, seed)))


@pytest.mark.parametrize("name", FROM_WEIGHTS)
def test_a_mistake_is_named_by_its_weights(name: str) -> None:
    assert_named(name, Target.WEIGHTS, offset_fits(name, draw_problem(name, 50)))


@pytest.mark.parametrize("name", FROM_LOGSUMEXP)
def test_a_mistake_is_named_by_its_logsumexp(name: str) -> None:
    assert_named(name, Target.LOGSUMEXP, offset_fits(name, draw_problem(name, 60)))


HALVES = (torch.float16, torch.bfloat16)
ROUNDED = [
    *("scale:after-softmax", "prefix:missing", "dilation:missing", "segments:missing"),
    *("alibi:missing", "alibi:added", "mask:fill-zero", "mask:after-softmax"),
    *("rope:missing", "rope:twice", "window:added", "sink-window:added", "chunk:added"),
    *("segments:added", "prefix:added", "dilation:added", "padding:added"),
    *("softcap:added", "sinks:added"),
]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ROUNDED)
def test_a_mistake_is_named_in_half_precision(name: str, dtype: torch.dtype) -> None:
    draw = draw_problem(name, 70)
    for made in MADE[name](draw):
        found = checked(draw, Target.OUTPUT, made["output"].to(dtype))
        named = [one.name for one in found.hypotheses if one.matches]
        assert found.passed or name in named


@pytest.mark.parametrize("name", ["causal:missing", "scale:fitted", "window:added"])
def test_a_mistake_in_some_heads_is_named_with_them(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 16, 8, generator=generator) for _ in range(3))
    draw = Draw(q=q, k=k, v=v, scale=8**-0.5, causal=True)
    values = attend(draw)["output"].clone()
    values[:, [0, 3]] = next(MADE[name](draw))["output"][:, [0, 3]]
    found = [one for one in checked(draw, Target.OUTPUT, values).hypotheses if one.matches]
    assert [one.told for one in found] == [f"{name} (heads 0, 3)"]
    assert (found[0].heads, found[0].options) == ((0, 3), "")
    values[0, 0, 5, 2] += 0.1
    found = [one for one in checked(draw, Target.OUTPUT, values).hypotheses if one.matches]
    assert found == []


def rounded(x: torch.Tensor, name: str) -> torch.Tensor:
    """Stored in a dtype and read back; int8 with a scale for each row."""
    if name != "int8":
        return x.to(getattr(torch, name)).float()
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


STORED = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"]


@pytest.mark.parametrize("roles", ["kv", "qkv", "v"])
@pytest.mark.parametrize("name", STORED)
def test_inputs_that_were_stored_in_few_bits_are_named(name: str, roles: str) -> None:
    draw = draw_problem("causal:missing", 2)
    few = {role: rounded(getattr(draw, role), name) for role in roles}
    values = attend(replace(draw, **few))["output"]
    found = [one for one in checked(draw, Target.OUTPUT, values).hypotheses if one.matches]
    assert [one.name for one in found] == [f"precision:{name}"]
    assert found[0].detail.startswith(", ".join(roles) + " stored")


@pytest.mark.parametrize("name", STORED[2:])
@pytest.mark.parametrize("target", [Target.OUTPUT, Target.WEIGHTS])
def test_a_result_that_was_stored_in_few_bits_is_named(name: str, target: Target) -> None:
    draw = draw_problem("causal:missing", 2)
    values = rounded(attend(draw)[target], name).nan_to_num(0.0)
    found = [one for one in checked(draw, target, values).hypotheses if one.matches]
    assert [one.name for one in found] == [f"precision:{name}"]


def test_every_mistake_of_the_table_is_made_by_hand() -> None:
    assert {one.name for one in MISTAKES} <= set(MADE)


def test_two_mistakes_at_once_are_named_together() -> None:
    draw = draw_problem("padding:ignored", 1)
    both = {"scale": 1.0, "key_lengths": None}

    values = attend(replace(draw, **both))["output"]
    named = [one.name for one in checked(draw, Target.OUTPUT, values).hypotheses if one.matches]
    assert named == ["scale:none+padding:ignored"]


def test_random_numbers_are_explained_by_nothing() -> None:
    for seed in range(4):
        draw = draw_problem("scale:none", seed)
        values = torch.randn(
            attend(draw)["output"].shape, generator=torch.Generator().manual_seed(seed)
        )
        found = checked(draw, Target.OUTPUT, values)
        assert not found.passed
        assert [one.name for one in found.hypotheses if one.matches] == []


def test_one_wrong_cell_is_explained_by_nothing() -> None:
    draw = draw_problem("causal:missing", 2)
    values = attend(draw)["output"].clone()
    values[0, 0, -1, 0] += 0.05
    found = checked(draw, Target.OUTPUT, values)
    assert not found.passed
    assert [one.name for one in found.hypotheses if one.matches] == []


def test_a_right_candidate_is_not_searched() -> None:
    draw = draw_problem("scale:none", 0)
    found = checked(draw, Target.OUTPUT, attend(draw)["output"])
    assert found.passed
    assert found.hypotheses == ()


def test_only_mistakes_that_can_be_made_are_tried() -> None:
    unit = torch.eye(4)[None, None]
    draw = Draw(q=unit, k=unit, v=unit, scale=0.5)
    tried = {one.name for one in checked(draw, Target.OUTPUT, torch.ones(1, 1, 4, 4)).hypotheses}
    impossible = {"causal:missing", "offset:-1", "window:-1", "mask:inverted", "heads:tiled"}
    assert tried & (impossible | {"padding:ignored", "sinks:missing", "softcap:missing"}) == set()
    assert "scale:none" in tried


def test_the_option_reproduces_the_candidate() -> None:
    draw = offset_fits("offset:top-left", draw_problem("offset:top-left", 5))
    values = next(MADE["offset:top-left"](draw))["output"]
    found = checked(draw, Target.OUTPUT, values)
    match = next(one for one in found.hypotheses if one.matches)
    assert match.options == "--query-offset 0"

    as_told = replace(draw, offset=0)
    problem = as_told.problem()
    again = compare(problem, as_told.options(), [read_candidate(Target.OUTPUT, values, problem)])[0]
    assert again.passed
    assert match.max_abs_error == pytest.approx(again.max_abs_error)


def test_an_output_with_exchanged_axes_is_named() -> None:
    draw = draw_problem("layout:output", 3)
    values = attend(draw)["output"].transpose(1, 2).contiguous()
    found = checked(draw, Target.OUTPUT, values)
    assert not found.passed
    named = [(one.name, one.matches) for one in found.hypotheses if one.matches]
    assert named == [("layout:output", True)]
    assert found.comparisons[0].explanation is not None
    assert found.comparisons[0].explanation.startswith("matches layout:output")


def test_averaged_weights_are_named() -> None:
    draw = draw_problem("heads:averaged", 4)
    values = attend(draw)["weights"].mean(1)
    found = checked(draw, Target.WEIGHTS, values)
    assert [one.name for one in found.hypotheses if one.matches] == ["heads:averaged"]


def test_rows_left_empty_by_a_mistake_may_hold_nan() -> None:
    draw = draw_problem("offset:-1", 7)
    values = next(MADE["offset:-1"](draw))

    empty = ~visible(replace(draw, offset=(draw.offset or 0) - 1)).any(-1)
    output = values["output"].masked_fill(empty[..., None], math.nan)
    named = [one.name for one in checked(draw, Target.OUTPUT, output).hypotheses if one.matches]
    assert named == ["offset:-1"]


def test_large_problems_are_sampled_and_confirmed_in_full() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 800, 8, generator=generator) for _ in range(3))
    draw = Draw(q=q, k=k, v=v, scale=8**-0.5, causal=True, left=100)
    values = next(MADE["window:+1"](draw))["output"]
    found = checked(draw, Target.OUTPUT, values)
    assert [one.name for one in found.hypotheses if one.matches] == ["window:+1"]
    values[0, 1, 377, 3] += 0.5  # a row that no sample has to hold
    found = checked(draw, Target.OUTPUT, values)
    assert [one.name for one in found.hypotheses if one.matches] == []
