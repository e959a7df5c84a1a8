"""Tensors that come from nowhere: a seed means the same numbers everywhere, for ever."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from attncli.attention.qkv import RandomShape, draw, example
from attncli.errors import UsageError


def test_the_seed_decides_the_numbers() -> None:
    """In the order q, k, v, in float64, from one generator, cast at the end."""
    rng = np.random.default_rng(7)
    shapes = ((2, 4, 3, 5), (2, 2, 6, 5), (2, 2, 6, 1))
    expected = [torch.from_numpy(rng.standard_normal(shape)) for shape in shapes]
    shape = RandomShape(batch=2, heads=4, kv_heads=2, q_len=3, k_len=6, dk=5, dv=1)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for found, exact in zip(draw(shape, 7, dtype), expected, strict=True):
            assert found.dtype == dtype
            assert torch.equal(found, exact.to(dtype))


def test_the_numbers_of_seed_0_stay_what_they_are() -> None:
    q, _, _ = draw(RandomShape(), 0, torch.float64)
    expected = [0.12573022, -0.13210486, 0.64042265, 0.10490012]
    np.testing.assert_allclose(q.flatten()[:4].numpy(), expected, rtol=0, atol=5e-9)


def test_sizes_follow_each_other() -> None:
    shapes = [tuple(tensor.shape) for tensor in draw(RandomShape(), 0)]
    assert shapes == [(1, 1, 8, 64)] * 3
    shape = RandomShape(heads=3, q_len=5, dk=2)
    assert [tuple(tensor.shape) for tensor in draw(shape, 0)] == [(1, 3, 5, 2)] * 3


def test_lengths_may_be_zero() -> None:
    q, k, v = draw(RandomShape(q_len=0, k_len=0, dv=0), 0)
    assert (q.shape[2], k.shape[2], v.shape[3]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("sizes", "seed", "message"),
    [
        ({"batch": 0}, 0, "batch: expected at least 1, got 0"),
        ({"heads": 0}, 0, "heads: expected at least 1, got 0"),
        ({"kv_heads": 0}, 0, "kv_heads: expected at least 1, got 0"),
        ({"dk": 0}, 0, "dk: expected at least 1, got 0"),
        ({"dv": -1}, 0, "dv: expected at least 0, got -1"),
        ({"q_len": -1}, 0, "q_len: expected at least 0, got -1"),
        ({"k_len": -2}, 0, "k_len: expected at least 0, got -2"),
        ({}, -1, "seed: expected at least 0, got -1"),
    ],
)
def test_refused(sizes: dict[str, Any], seed: int, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        draw(RandomShape(**sizes), seed)
    assert str(raised.value) == message


def test_the_example_is_that_of_the_theory() -> None:
    q, k, v = example()
    assert [tuple(tensor.shape) for tensor in (q, k, v)] == [(4, 3)] * 3
    assert {tensor.dtype for tensor in (q, k, v)} == {torch.float64}
    first = torch.tensor([-0.3733, 0.5970, -0.6437, -0.6161], dtype=torch.float64)
    torch.testing.assert_close(q[0] @ k.T, first, rtol=0, atol=1e-12)
    assert v.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]]
