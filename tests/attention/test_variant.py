"""Every way of computing attention otherwise, against plain torch over whole tensors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import attncli.attention.check.variant as variant_module
from attncli.attention.check.candidate import Target
from attncli.attention.check.variant import (
    Expected,
    HalfPrecision,
    Part,
    Rotation,
    RoundedAt,
    SoftmaxOver,
    Storage,
    Variant,
    evaluate,
    parts_of,
    real_rows,
    right_variant,
)
from attncli.attention.options import AttentionOptions
from attncli.attention.problem import Problem, make_problem

B, H, KV, S, K, D, W = 2, 4, 2, 5, 7, 6, 3
EVERY = slice(None)
NEVER = -math.inf


def problem_of(dtype: torch.dtype = torch.float64, **options: Any) -> Variant:
    random = torch.Generator().manual_seed(11)
    q, k, v = (
        torch.randn(B, heads, length, width, generator=random, dtype=torch.float64).to(dtype)
        for heads, length, width in ((H, S, D), (KV, K, D), (KV, K, W))
    )
    declared = AttentionOptions(**options)
    return right_variant(make_problem(q, k, v, declared), declared)


# Row 1 of all sees no key; head 1 and batch 1 have fewer than the others.
MASK = np.ones((B, H, S, K), bool)
MASK[:, :, 1] = MASK[1, :, :, 5:] = MASK[:, 1, 3, :4] = False
BIAS = np.where(MASK, np.random.default_rng(4).standard_normal((B, H, S, K)), -np.inf)


def whole(variant: Variant) -> Expected:
    """All of it in one part."""
    return evaluate(variant, Part(EVERY, EVERY, torch.arange(S)))


def repeated(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.repeat_interleave(H // KV, 1)


def plain_logits(problem: Problem, bias: bool = False) -> torch.Tensor:
    """(B, H, S, K) before the mask, the bias added with its −inf as 0."""
    scores = problem.q @ repeated(problem.k).mT * problem.scale / problem.temperature
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    return scores + torch.from_numpy(np.where(MASK, BIAS, 0.0)) if bias else scores


def hidden(logits: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(~torch.from_numpy(MASK), NEVER)


def shown(weights: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.from_numpy(MASK), weights.nan_to_num(0.0), 0.0)


def assert_found(found: Expected, weights: torch.Tensor, problem: Problem) -> None:
    torch.testing.assert_close(found.weights, weights, rtol=1e-12, atol=1e-15)
    assert problem.v is not None
    assert found.output is not None
    torch.testing.assert_close(found.output, weights @ repeated(problem.v), rtol=1e-10, atol=1e-13)


def test_the_right_one() -> None:
    variant = problem_of(attn_mask=MASK, scale=0.4, temperature=1.5)
    found, logits = whole(variant), plain_logits(variant.problem)
    assert_found(found, shown(hidden(logits).softmax(-1)), variant.problem)
    torch.testing.assert_close(found.logsumexp[..., 0], hidden(logits).logsumexp(-1))
    assert found.empty[..., 0].tolist() == (~MASK.any(-1)).tolist()
    torch.testing.assert_close(found.logits, hidden(logits))
    assert found.visible.tolist() == MASK.tolist()
    assert found.seen.tolist() == MASK.any(2).tolist()
    for target, name in ((Target.OUTPUT, "output"), (Target.WEIGHTS, "weights")):
        assert found.of(target) is getattr(found, name)
    assert found.of(Target.LOGSUMEXP) is found.logsumexp


@pytest.mark.parametrize("scale", [0.4, -0.4])
def test_no_logit_exceeds_its_size(scale: float) -> None:
    variant = problem_of(attn_mask=MASK, scale=scale)
    found, problem = whole(variant), variant.problem
    lengths = torch.where(torch.from_numpy(MASK.any(2)), repeated(problem.k).norm(dim=-1), 0.0)
    expected = problem.q.norm(dim=-1) * lengths.amax(-1)[..., None] * 0.4
    torch.testing.assert_close(found.logit_size[..., 0], expected)
    finite = torch.where(torch.isfinite(found.logits), found.logits.abs(), 0.0)
    assert bool((finite <= found.logit_size).all())


def test_biases_and_sinks_count_where_they_are_larger() -> None:
    bias = np.zeros((S, K))
    bias[2], bias[3, 4] = 30.0, -40.0
    bias[4, 1:] = -200.0
    sinks = np.array([0.5, 60.0, -3.0, 0.0])
    sizes = whole(problem_of(attn_mask=bias, scale=0.1, sinks=sinks)).logit_size[..., 0]
    logits = whole(problem_of(attn_mask=bias, scale=0.1)).logits
    assert bool((sizes[:, 1] == 60).all())
    for head in (0, 2, 3):
        torch.testing.assert_close(sizes[:, head, 2], logits[:, head, 2].abs().amax(-1))
        torch.testing.assert_close(sizes[:, head, 3], logits[:, head, 3].abs().amax(-1))
        # Keys 200 nats below the others have no weight, and their size matters to nobody.
        assert bool((sizes[:, head, 4] < 10).all())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("over", SoftmaxOver)
def test_what_the_softmax_sums_over(over: SoftmaxOver, bias: bool) -> None:
    right = problem_of(attn_mask=BIAS if bias else MASK, scale=0.4)
    variant = replace(right, softmax=over)
    logits = plain_logits(variant.problem, bias)
    masked = hidden(logits)
    weights = {
        SoftmaxOver.KEYS: shown(masked.softmax(-1)),
        SoftmaxOver.ALL_KEYS: shown(logits.softmax(-1)),
        SoftmaxOver.ADDED_KEYS: shown((masked if bias else logits).softmax(-1)),
        SoftmaxOver.QUERIES: shown(masked.softmax(2)),
        SoftmaxOver.HEADS: shown(masked.softmax(1)),
        SoftmaxOver.NOTHING: shown((masked - masked.amax(-1, keepdim=True)).exp()),
    }[over]
    assert_found(whole(variant), weights, variant.problem)
    assert variant.needs_all_heads == (over is SoftmaxOver.HEADS)


def test_a_softmax_over_queries_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sums need rows that are not in the part, however many are summed at once."""
    variant = replace(problem_of(attn_mask=MASK), softmax=SoftmaxOver.QUERIES)
    expected = shown(hidden(plain_logits(variant.problem)).softmax(2))
    for cells in (1, 2 * K, 1 << 22):
        monkeypatch.setattr(variant_module, "_MOST_CELLS", cells)
        for batch, head in np.ndindex(B, H):
            part = Part(slice(batch, batch + 1), slice(head, head + 1), torch.tensor([0, 3]))
            found = evaluate(replace(variant), part).weights
            torch.testing.assert_close(found, expected[part.batch, part.head][:, :, [0, 3]])


def test_a_soft_cap_after_the_mask() -> None:
    variant = replace(problem_of(attn_mask=MASK, softcap=2.0), cap_after_mask=True)
    scores = variant.problem.q @ repeated(variant.problem.k).mT * variant.problem.scale
    capped = torch.where(torch.from_numpy(MASK), 2 * torch.tanh(scores / 2), -2.0)
    assert_found(whole(variant), capped.softmax(-1), variant.problem)
    without = replace(problem_of(attn_mask=MASK), cap_after_mask=True)
    expected = shown(hidden(plain_logits(without.problem)).softmax(-1))
    assert_found(whole(without), expected, without.problem)


@pytest.mark.parametrize("fill", [0.0, 1e-9, -5.0])
def test_another_number_in_the_place_of_hidden_logits(fill: float) -> None:
    variant = replace(problem_of(attn_mask=MASK), fill=fill)
    filled = plain_logits(variant.problem).masked_fill(~torch.from_numpy(MASK), fill)
    assert_found(whole(variant), filled.softmax(-1), variant.problem)


def test_averaged_heads_late_scales_and_other_value_heads() -> None:
    right = problem_of(attn_mask=MASK, scale=(0.1, 0.2, 0.3, 0.4))
    problem = right.problem
    scales = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)[:, None, None]
    scores = problem.q @ repeated(problem.k).mT
    weights = shown(hidden(scores * scales).softmax(-1))
    mean = weights.mean(1, keepdim=True).expand(B, H, S, K)
    averaged = replace(right, heads_averaged=True)
    assert averaged.needs_all_heads
    assert not right.needs_all_heads
    assert_found(whole(averaged), mean, problem)
    assert_found(
        whole(replace(right, late_scale=True)), shown(hidden(scores).softmax(-1)) * scales, problem
    )
    chosen = (1, 1, 0, 1)
    assert problem.v is not None
    found = whole(replace(right, value_heads=chosen)).output
    assert found is not None
    torch.testing.assert_close(found, weights @ problem.v[:, list(chosen)])
    part = Part(slice(1, 2), slice(2, 4), torch.tensor([4, 0]))
    some = evaluate(replace(right, value_heads=chosen), part)
    assert some.output is not None
    torch.testing.assert_close(some.output, found[1:2, 2:4][:, :, [4, 0]])
    torch.testing.assert_close(some.weights, weights[1:2, 2:4][:, :, [4, 0]])
    assert evaluate(right, part, with_output=False).output is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("at", RoundedAt)
def test_scores_that_pass_through_half_precision(at: RoundedAt, dtype: torch.dtype) -> None:
    right = problem_of(attn_mask=MASK, scale=0.3, temperature=1.25)
    problem = right.problem
    variant = replace(right, half_precision=HalfPrecision(dtype, at))

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype).float()

    q, k = rounded(problem.q), rounded(repeated(problem.k)).mT
    logits = {
        RoundedAt.INPUTS: q @ k * 0.24,
        RoundedAt.SCORES: rounded(rounded(q @ k) * 0.24),
        RoundedAt.SCALED: rounded(rounded(q * 0.24) @ k),
    }[at]
    found = whole(variant)
    # A sum in another order may be rounded to the number beside it.
    step = torch.finfo(dtype).eps if at is not RoundedAt.INPUTS else 1e-6
    torch.testing.assert_close(found.logits, hidden(logits.double()), rtol=step, atol=1e-6)
    near = (found.logits - hidden(logits.double())).nan_to_num(0.0, 0.0, 0.0).abs() < 1e-6
    assert float(near.double().mean()) > 0.95
    expected = hidden(plain_logits(problem))
    assert not torch.allclose(found.logits, expected, rtol=1e-6)


def turned(x: torch.Tensor, positions: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Pairs of entries as complex numbers, each times e^(i·angle)."""
    width = int(x.shape[-1] * rotation.share) // 2 * 2
    angles = positions[..., None] * rotation.base ** -(torch.arange(0, width, 2).double() / width)
    angles = -angles if rotation.backwards else angles
    head = x[..., :width]
    if rotation.interleaved:
        numbers = torch.complex(head[..., ::2], head[..., 1::2])
    else:
        numbers = torch.complex(head[..., : width // 2], head[..., width // 2 :])
    numbers = numbers * torch.polar(torch.ones_like(angles), angles)
    parts = [numbers.real, numbers.imag]
    joined = torch.stack(parts, -1).flatten(-2) if rotation.interleaved else torch.cat(parts, -1)
    return torch.cat([joined, x[..., width:]], -1)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.67])
@pytest.mark.parametrize("offset", [(2,), (2, 5)])
def test_rotations(
    offset: tuple[int, ...], share: float, interleaved: bool, backwards: bool
) -> None:
    rotation = Rotation(1e4, interleaved, offset, share, backwards=backwards)
    right = problem_of(attn_mask=MASK)
    q, k = right.problem.q, repeated(right.problem.k)
    places = torch.tensor(offset)[:, None, None] + torch.arange(S)
    q, k = turned(q, places, rotation), turned(k, torch.arange(K)[None, None], rotation)
    for with_queries, with_keys in ((True, True), (False, True), (True, False)):
        variant = replace(right, rotation=replace(rotation, queries=with_queries, keys=with_keys))
        product = (q if with_queries else right.problem.q) @ (
            k if with_keys else repeated(right.problem.k)
        ).mT
        found = whole(variant)
        torch.testing.assert_close(found.logits, hidden(product * right.problem.scale))
        part = Part(slice(1, 2), slice(2, 4), torch.tensor([4, 1]))
        some = evaluate(variant, part)
        torch.testing.assert_close(some.logits, found.logits[1:2, 2:4][:, :, [4, 1]])


def test_rotations_in_the_dtype_of_the_tensors() -> None:
    right = problem_of(torch.float16)
    rotation = Rotation(1e4, False, (0,), in_own_dtype=True)
    problem = right.problem
    exact = whole(replace(right, rotation=replace(rotation, in_own_dtype=False))).logits
    found = whole(replace(right, rotation=rotation)).logits
    cos, sin = (
        of(
            torch.arange(7.0).double()[:, None] * 1e4 ** -(torch.arange(0, 6, 2).double() / 6)
        ).half()
        for of in (torch.cos, torch.sin)
    )

    def half(x: torch.Tensor) -> torch.Tensor:
        one, two = x.chunk(2, -1)
        c, s = cos[: x.shape[-2]], sin[: x.shape[-2]]
        return torch.cat([one * c - two * s, two * c + one * s], -1).double()

    expected = half(problem.q) @ half(repeated(problem.k)).mT * problem.scale
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert not torch.equal(found, exact)


def test_numbers_as_they_are_stored() -> None:
    x = torch.tensor([[1.0, -254.0, 0.4], [0.0, 0.5, 63.5], [0.0, 0.0, 0.0]], dtype=torch.float64)
    by_all = Storage(torch.int8, (0, 1)).rounded(x)  # steps of 2
    assert by_all.tolist() == [[0, -254, 0], [0, 0, 64], [0, 0, 0]]
    by_row = Storage(torch.int8, (1,)).rounded(x)  # of 2, of 0.5, of 1
    assert by_row.tolist() == [[0, -254, 0], [0, 0.5, 63.5], [0, 0, 0]]
    like = torch.full((1, 1), 12.7, dtype=torch.float64)
    clipped = Storage(torch.int8, (0, 1)).rounded(x, like)
    torch.testing.assert_close(clipped[0].tolist(), [1.0, -12.7, 0.4])
    assert Storage(torch.int8).rounded(x)[0].tolist() == [1, -127, 0]
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        some = torch.tensor([0.1, 1.7, -3.3, 1e-4], dtype=torch.float64)
        assert torch.equal(Storage(dtype).rounded(some), some.float().to(dtype).double())
        assert Storage(dtype).rounded(some.float()).dtype == torch.float32
        most = float(torch.finfo(dtype).max)
        beyond = torch.tensor([4 * most, -4 * most], dtype=torch.float64)
        assert Storage(dtype).rounded(beyond).tolist() == [most, -most]
        scaled = Storage(dtype, (0,)).rounded(some)
        expected = (some * (most / 3.3)).float().to(dtype).double() / (most / 3.3)
        torch.testing.assert_close(scaled, expected)


@pytest.mark.parametrize("all_heads", [False, True])
@pytest.mark.parametrize(
    ("block", "most"), [(1, 1), (3 * K, 4 * K), (100, 1 << 22), (1 << 18, 1 << 22)]
)
def test_parts_hold_every_cell_once(
    block: int, most: int, all_heads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variant_module, "BLOCK_CELLS", block)
    monkeypatch.setattr(variant_module, "_MOST_CELLS", most)
    variant = problem_of(query_lengths=(5, 3))
    count = torch.zeros(B, H, S, dtype=torch.int64)
    for rows, batches in real_rows(variant):
        for part in parts_of(variant, rows, batches, all_heads=all_heads):
            count[part.batch, part.head, part.rows] += 1
            cells = count[part.batch, part.head, part.rows].numel() * K
            heads = range(*part.head.indices(H))
            assert not all_heads or len(heads) == H
            assert all_heads or cells <= max(block, most, K)
    assert count.tolist() == [[[1] * 5] * H, [[1, 1, 1, 0, 0]] * H]
    (alike,) = real_rows(problem_of(query_lengths=(4, 4)))
    assert (alike[0].tolist(), alike[1]) == ([0, 1, 2, 3], range(B))


def test_options_that_change_keep_the_mask_file_or_drop_it() -> None:
    variant = problem_of(attn_mask=MASK)
    causal = variant.with_options(causal=True, query_offset=0)
    both = MASK & np.tri(S, K, dtype=bool)
    assert causal.options.causal
    assert whole(causal).visible.tolist() == both.tolist()
    bare = causal.with_options(attn_mask=None)
    assert whole(bare).visible[0, 0].tolist() == np.tri(S, K, dtype=bool).tolist()
    assert bare.options.attn_mask is None
    other = variant.with_options(attn_mask=~MASK)
    assert whole(other).visible.tolist() == (~MASK).tolist()
