"""The rows of heads in parts are, joined, what they are together: bit for bit."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from attncli.attention.masks.mask import Mask
from attncli.attention.options import AttentionOptions, Precision
from attncli.attention.problem import Problem, make_problem
from attncli.attention.qkv import draw
from attncli.attention.sizes import RandomShape
from attncli.attention.streaming.head_group import make_group
from attncli.attention.streaming.mass import BlockMass, KeyMass
from attncli.attention.streaming.parts import join_rows
from attncli.attention.streaming.rows import find_shares, finish_rows
from attncli.attention.streaming.stream import Wanted, merged_blocks, stream_rows

LENGTH = 1100
TOKENS = np.random.default_rng(0).integers(0, 300, (1, LENGTH))
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "left_window": 100},
    "softcap": {"causal": True, "softcap": 5.0},
    "alibi": {"causal": True, "alibi": True},
    "sinks": {"sinks": np.array([0.5, 1.0])},
    "offset": {"causal": True, "query_offset": 7},
    "padding": {"key_lengths": np.array([900]), "query_lengths": np.array([1050])},
    "positions": {"causal": True, "position_ids": np.r_[0:600, 0:500][None]},
    "overflow": {"scale": 1e38},
}


def assert_same(one: Any, other: Any, name: str = "") -> None:
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, name
        assert torch.equal(torch.isnan(one), torch.isnan(other)), name
        assert torch.equal(one[~torch.isnan(one)], other[~torch.isnan(other)]), name
    elif isinstance(one, KeyMass):
        assert_same(one.mass, other.mass, f"{name}.mass")
        assert_same(one.queries, other.queries, f"{name}.queries")
    elif is_dataclass(one):
        for field in fields(one):
            assert_same(
                getattr(one, field.name), getattr(other, field.name), f"{name}.{field.name}"
            )
    else:
        assert one == other, name


def problem_of(precision: Precision, **options: Any) -> Problem:
    tensors = draw(RandomShape(heads=2, q_len=LENGTH, k_len=LENGTH, dk=24), 0)
    return make_problem(*tensors, AttentionOptions(**options), precision=precision)


@pytest.mark.parametrize("precision", [Precision.FLOAT32, Precision.FLOAT64])
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_are_the_whole(shape: str, precision: Precision) -> None:
    problem = problem_of(precision, **SHAPES[shape])
    mask: Mask = problem.mask
    tokens = None if mask.shift is None else TOKENS
    wanted = Wanted(per_key=True, output=True, tokens=tokens)
    whole = list(stream_rows(problem, wanted))
    edges = (0, 512, LENGTH) if precision is Precision.FLOAT32 else (0, 1024, LENGTH)
    parts = [list(stream_rows(problem, wanted, part=slice(*ends))) for ends in pairwise(edges)]
    for of_head, expected in zip(zip(*parts, strict=True), whole, strict=True):
        assert_same(join_rows(of_head), expected)


@pytest.mark.parametrize(
    ("sizes", "options", "sink_keys"),
    [
        ((4106, 4106, 32), {"causal": True}, 17),
        ((4106, 300, 32), {"causal": True, "query_offset": 50}, 1),
        ((4099, 256, 64), {"query_offset": 50}, 1),
    ],
)
def test_a_part_of_many_rows(
    sizes: tuple[int, int, int], options: dict[str, Any], sink_keys: int
) -> None:
    q_len, k_len, dk = sizes
    tensors = draw(RandomShape(heads=1, q_len=q_len, k_len=k_len, dk=dk), 0)
    problem = make_problem(*tensors, AttentionOptions(**options), precision=Precision.FLOAT32)
    wanted = Wanted(sink_keys=sink_keys)
    (whole,) = stream_rows(problem, wanted)
    parts = [
        next(stream_rows(problem, wanted, part=part)) for part in (slice(3584), slice(3584, None))
    ]
    assert_same(join_rows(parts), whole)


def test_shares_of_keys_far_behind_the_first_rows() -> None:
    length, first = 8224, 4112
    tensors = draw(RandomShape(heads=1, q_len=length, k_len=length, dk=4), 0)
    options = AttentionOptions(causal=True)
    problem = make_problem(*tensors, options, precision=Precision.FLOAT32)
    own = replace(
        problem, k=problem.k[:, :, first:], v=None, mask=problem.mask.of_keys(first, length)
    )
    queries = np.arange(length)
    group = make_group(own, own.mask_on_device(), 0, range(1), queries, with_values=False)
    (blocks,) = merged_blocks([group], None, 1)
    shares = find_shares(group, finish_rows(group, blocks), 1)
    assert shares.local is not None
    assert np.array_equal(shares.local.seen[0], np.clip(queries - first + 1, 0, 5))
    assert np.array_equal(shares.first.seen[0], queries >= first)


@pytest.mark.parametrize("offset", [-1000, 5000])
def test_queries_far_from_all_keys(offset: int) -> None:
    tensors = draw(RandomShape(heads=1, q_len=600, k_len=600, dk=4), 0)
    options = AttentionOptions(query_offset=offset)
    problem = make_problem(*tensors, options, precision=Precision.FLOAT32)
    (rows,) = stream_rows(problem)
    assert rows.shares.local is not None
    assert bool((rows.shares.local.seen == 0).all())
    assert bool((rows.keys == 600).all())


def test_parts_of_a_sample() -> None:
    problem, count = problem_of(Precision.FLOAT32, causal=True), 800
    chosen = [np.sort(np.random.default_rng(1).choice(LENGTH, count, replace=False))]
    whole = list(stream_rows(problem, queries=chosen))
    parts = [
        list(stream_rows(problem, queries=chosen, part=slice(*ends)))
        for ends in ((0, 512), (512, count))
    ]
    for of_head, expected in zip(zip(*parts, strict=True), whole, strict=True):
        assert_same(join_rows(of_head), expected)


@pytest.mark.parametrize("blocks", [1, 2, 3, 6, 7, 13])
def test_sums_of_keys_do_not_depend_on_the_cut(blocks: int) -> None:
    """Of numbers whose sum depends on the order of addition."""
    rng = np.random.default_rng(blocks)
    leaves = [
        BlockMass(
            number,
            first := int(rng.integers(0, 4)),
            torch.as_tensor(rng.standard_normal((1, 5 - first)) * 10.0 ** rng.integers(-9, 9)),
            torch.ones(1, 5 - first, dtype=torch.int64),
        )
        for number in range(blocks)
    ]

    def sums(some: list[BlockMass]) -> KeyMass:
        found = KeyMass(torch.zeros(1, 5, dtype=torch.int64))
        for leaf in some:
            found.add(leaf)
        return found

    whole = sums(leaves)
    for cut in range(blocks + 1):
        assert_same(KeyMass.joined([sums(leaves[:cut]), sums(leaves[cut:])]), whole)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_mask_of_some_keys_is_that_part_of_it(shape: str) -> None:
    mask, start, stop = problem_of(Precision.FLOAT32, **SHAPES[shape]).mask, 300, 700
    some, everything = mask.of_keys(start, stop), slice(None)
    place = slice(0, 1), slice(0, 1), slice(100, 900)
    for name in ("visible", "bias"):
        of_some = getattr(some, name)(*place, everything)
        of_all = getattr(mask, name)(*place, everything)
        assert (of_some is None) == (of_all is None)
        if of_all is not None:
            assert (np.broadcast_to(of_some, of_some.shape) == of_all[..., start:stop]).all()
    hull = some.hull(0)
    rows = np.arange(len(hull.first))
    keys = np.arange(stop - start)
    seen = some.visible(slice(0, 1), slice(0, 1), slice(0, len(rows)), everything)[0, 0]
    inside = (keys >= hull.first[:, None]) & (keys < hull.stop[:, None])
    assert (seen <= inside).all()
    assert (seen == inside).all() or not hull.exact
