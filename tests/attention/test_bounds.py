"""How far off a candidate may be: the documented formulas, worked out again in NumPy."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from attncli.attention.check.candidate import Candidate, Target
from attncli.attention.check.variant import (
    Expected,
    Part,
    Storage,
    Variant,
    evaluate,
    right_variant,
)
from attncli.attention.check.walk import (
    DetailedSums,
    Errors,
    ErrorSums,
    Tolerance,
    cells_of,
    difference,
    errors_of,
    stored,
)
from attncli.attention.options import AttentionOptions
from attncli.attention.problem import make_problem

UNITS = {torch.float64: 2.0**-53, torch.float32: 2.0**-24}
UNITS |= {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float8_e4m3fn: 2.0**-4}
# What rounding to 0 may lose: half a subnormal step, or all below the normal numbers.
SMALLEST = {torch.float64: 2.0**-1022, torch.float32: 2.0**-126, torch.float16: 2.0**-25}
SMALLEST |= {torch.bfloat16: 2.0**-126, torch.float8_e4m3fn: 2.0**-10}
EVERY = slice(None)


def right(dtype: torch.dtype, **options: object) -> tuple[Variant, Part, Expected]:
    """A problem of two batches and heads in the arithmetic of `dtype`, and what is right for it."""
    random = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 2, n, 4, generator=random) * 2 for n in (3, 5, 5))
    mask = np.ones((3, 5), bool)
    mask[0, 3:] = False
    declared = AttentionOptions(attn_mask=mask, **options)  # type: ignore[arg-type]
    problem = make_problem(q.to(dtype), k.to(dtype), v.to(dtype), declared)
    variant = right_variant(problem, declared)
    part = Part(EVERY, EVERY, torch.arange(3))
    return variant, part, evaluate(variant, part)


def candidate(target: Target, dtype: torch.dtype, expected: Expected) -> Candidate:
    return Candidate(target, expected.of(target), dtype)


def logit_sizes(variant: Variant, expected: Expected) -> np.ndarray:
    """L_i = ‖q_i‖·max‖k_j‖·|scale| over the visible keys, (B, H, S_q, 1)."""
    q, k = (one.double().numpy() for one in (variant.problem.q, variant.problem.k))
    lengths = np.linalg.norm(k, axis=-1)[:, :, None]
    # Keys that some of the rows see count for all of them.
    seen = expected.visible.numpy().any(2, keepdims=True)
    longest = np.where(seen, lengths, 0).max(-1, keepdims=True)
    return np.linalg.norm(q, axis=-1, keepdims=True) * longest * variant.problem.scale


@pytest.mark.parametrize("arithmetic", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", UNITS)
def test_the_bounds_of_an_output(dtype: torch.dtype, arithmetic: torch.dtype) -> None:
    variant, _, expected = right(arithmetic)
    found, explained = Tolerance(arithmetic).bounds(
        candidate(Target.OUTPUT, dtype, expected), expected
    )
    u, smallest = UNITS[dtype], SMALLEST[dtype]
    inner = 4 * max(
        UNITS[torch.float64 if dtype == torch.float64 else torch.float32], u_of(arithmetic)
    )
    rounding = u + inner * (1 + logit_sizes(variant, expected))
    weights = expected.weights.double().numpy()
    assert variant.problem.v is not None
    v = variant.problem.v.double().numpy()
    output = np.abs(weights @ v)
    off = weights * rounding
    if dtype == torch.float16:
        off = off + 2.0**-25 * expected.visible.numpy()
    allowed = 2 * u * output + off @ np.abs(v) + smallest
    np.testing.assert_allclose(found.numpy(), allowed, rtol=1e-5)
    squares = (rounding * output) ** 2 + smallest**2 + off**2 @ v**2
    assert explained is not None
    np.testing.assert_allclose(explained.numpy(), squares.sum((2, 3)), rtol=1e-5)


def u_of(dtype: torch.dtype) -> float:
    return UNITS[dtype]


@pytest.mark.parametrize("dtype", UNITS)
def test_the_bounds_of_weights(dtype: torch.dtype) -> None:
    variant, _, expected = right(torch.float64)
    found, explained = Tolerance(torch.float64).bounds(
        candidate(Target.WEIGHTS, dtype, expected), expected
    )
    u, weights = UNITS[dtype], expected.weights.numpy()
    inner = 4 * UNITS[torch.float64 if dtype == torch.float64 else torch.float32]
    relative = 2 * u + 2 * inner * (1 + logit_sizes(variant, expected))
    allowed = relative * weights + u**2 * weights.max(-1, keepdims=True) + 2 * SMALLEST[dtype]
    np.testing.assert_allclose(found.numpy(), allowed, rtol=1e-9)
    assert explained is None


def test_the_bounds_of_weights_grow_with_what_is_added_to_their_logits() -> None:
    """A key that lies far below the others by its bias is rounded far from 0 nevertheless."""
    bias = np.zeros((3, 5))
    bias[:, 1] = -60.0
    q, k = torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 5, 4)
    declared = AttentionOptions(attn_mask=bias)
    variant = right_variant(make_problem(q, k, None, declared), declared)
    expected = evaluate(variant, Part(EVERY, EVERY, torch.arange(3)))
    expected = replace(expected, weights=torch.full_like(expected.weights, 0.25))
    found, _ = Tolerance(torch.float32).bounds(
        candidate(Target.WEIGHTS, torch.float32, expected), expected
    )
    u = 2.0**-24
    rest = 2 * u * 0.25 + u**2 * 0.25
    np.testing.assert_allclose(found[0, 0, :, 1].numpy(), rest + 8 * u * 61 * 0.25, rtol=1e-6)
    np.testing.assert_allclose(found[0, 0, :, 0].numpy(), rest + 8 * u * 0.25, rtol=1e-6)


@pytest.mark.parametrize("dtype", UNITS)
def test_the_bounds_of_a_logsumexp(dtype: torch.dtype) -> None:
    variant, _, expected = right(torch.float64)
    found, explained = Tolerance(torch.float64).bounds(
        candidate(Target.LOGSUMEXP, dtype, expected), expected
    )
    inner = 4 * UNITS[torch.float64 if dtype == torch.float64 else torch.float32]
    logit = 1 + logit_sizes(variant, expected)
    allowed = 2 * UNITS[dtype] * expected.logsumexp.abs().numpy() + inner * (logit + math.log(5))
    np.testing.assert_allclose(found.numpy(), allowed, rtol=1e-9)
    assert explained is None


@pytest.mark.parametrize("target", Target)
def test_tolerances_of_the_caller(target: Target) -> None:
    _, _, expected = right(torch.float64)
    one, size = candidate(target, torch.float16, expected), expected.of(target).abs()
    found, explained = Tolerance(torch.float64, rtol=0.5, atol=0.25).bounds(one, expected)
    torch.testing.assert_close(found, 0.5 * size + 0.25)
    assert explained is None
    absolute, _ = Tolerance(torch.float64, atol=0.25).bounds(one, expected)
    assert bool((absolute >= 2 * 2.0**-11 * size + 0.25).all())
    assert bool((absolute < 0.01 * size + 0.26).all())
    # A relative one beside what the dtype loses of small numbers.
    relative, explained = Tolerance(torch.float64, rtol=0.5).bounds(one, expected)
    assert bool((relative > 0.5 * size).all())
    assert bool((relative < 0.5 * size + 0.02).all())
    assert explained is None


def test_cells_that_are_no_numbers_allow_nothing_by_their_size() -> None:
    _, _, expected = right(torch.float64)
    broken = expected.logsumexp.clone()
    broken[0, 0, :, 0] = torch.tensor([math.nan, math.inf, -math.inf])
    expected = replace(expected, logsumexp=broken)
    found, _ = Tolerance(torch.float64, rtol=1.0, atol=0.5).bounds(
        candidate(Target.LOGSUMEXP, torch.float32, expected), expected
    )
    assert found[0, 0, :, 0].tolist() == [0.5, 0.5, 0.5]


def test_differences_of_what_is_not_finite() -> None:
    inf, nan = math.inf, math.nan
    actual = torch.tensor([1.0, nan, inf, inf, 1.0, nan, 2.0, 1.5], dtype=torch.float64)
    expected = torch.tensor([1.0, nan, inf, -inf, inf, 0.0, 1.0, 1.0], dtype=torch.float64)
    allowed = torch.full((8,), 0.5, dtype=torch.float64)
    found = difference(actual, expected, allowed)
    assert found.error.tolist() == [0, 0, 0, inf, inf, inf, 1, 0.5]
    assert found.wrong.tolist() == [False, False, False, True, True, True, True, False]
    assert difference(actual, expected, allowed[:1]).allowed.shape == (8,)
    # Two numbers that are the same are right even where nothing is allowed.
    same = torch.zeros(1, dtype=torch.float64)
    assert not difference(same, same, same - 1).wrong.any()


SHARED = [(0, 1, 2, 3), (2, 3), (3,), (2,)]


@pytest.mark.parametrize("shared", SHARED)
def test_a_part_of_a_result_has_the_scale_of_all_that_shares_it(shared: tuple[int, ...]) -> None:
    """Rounded by a scale that a value of another batch, head or row decides."""
    variant, _, whole = right(torch.float64)
    assert whole.output is not None
    output = whole.output.clone()
    output[1, 1, 2] *= 50  # the largest are not in the part
    storage = Storage(torch.int8, shared)
    values = storage.rounded(output)
    part = Part(slice(0, 1), slice(0, 1), torch.tensor([0, 1]))
    here = (part.batch, part.head, slice(0, 2))
    expected = evaluate(variant, part)
    assert expected.output is not None
    torch.testing.assert_close(expected.output, output[here])
    one = Candidate(Target.OUTPUT, values, torch.float64)
    tolerance = Tolerance(torch.float64)
    errors = errors_of(one, values[here], expected, tolerance)
    assert int(errors.wrong.sum()) > 0
    found = stored(errors, storage, one, part)
    assert int(found.wrong.sum()) == 0
    assert found.explained is errors.explained
    other = stored(errors, Storage(torch.int8, (1,) if shared != (1,) else (0,)), one, part)
    assert int(other.wrong.sum()) > 0
    # One step too far is seen.
    step = output.abs().amax(shared, keepdim=True) / 127
    off = replace(errors, actual=errors.actual + step.expand(output.shape)[here])
    assert int(stored(off, storage, one, part).wrong.sum()) == off.wrong.numel()


def test_a_logsumexp_to_base_2_is_read_in_nats() -> None:
    variant, part, expected = right(torch.float64)
    values = expected.logsumexp / math.log(2)
    candidates = [
        Candidate(Target.LOGSUMEXP, values, torch.float64),
        Candidate(Target.OUTPUT, expected.of(Target.OUTPUT), torch.float64),
    ]
    for base_2, factor in ((True, math.log(2)), (False, 1.0)):
        ((_, found, cells),) = cells_of(replace(variant, base_2=base_2), candidates, [part])
        torch.testing.assert_close(cells[0], values * factor)
        assert torch.equal(cells[1], candidates[1].values)
        assert found.output is not None
    ((_, without, _),) = cells_of(variant, candidates[:1], [part])
    assert without.output is None


def errors(error: torch.Tensor, explained: torch.Tensor | None = None) -> Errors:
    """Of what should be 2, where 0.5 is allowed."""
    expected = torch.full_like(error, 2.0)
    allowed = torch.full_like(error, 0.5)
    return replace(difference(expected + error, expected, allowed), explained=explained)


def test_sums_of_errors_over_parts() -> None:
    one = Candidate(Target.OUTPUT, torch.zeros(2, 2, 3, 2), torch.float32)
    sums = DetailedSums.of(one)
    random = torch.Generator().manual_seed(3)
    error = torch.rand(2, 2, 3, 2, generator=random, dtype=torch.float64)
    error[1, 0, 2, 1] = math.nan
    parts = [
        Part(slice(b, b + 1), slice(h, h + 1), torch.tensor(rows))
        for b in range(2)
        for h in range(2)
        for rows in ([0], [1, 2])
    ]
    for part in parts:
        block = error[part.batch, part.head][:, :, part.rows]
        explained = torch.full((1, 1), 0.01 * len(part.rows), dtype=torch.float64)
        sums.add(errors(block, explained), part)
    finite = error.nan_to_num(0.0)
    squares = finite.square().sum((2, 3))
    torch.testing.assert_close(sums.squares, squares)
    torch.testing.assert_close(sums.explained, torch.full((2, 2), 0.03).double())
    assert sums.sizes.tolist() == [[24, 24], [20, 24]]
    assert sums.wrong.tolist() == ((error > 0.5) | error.isnan()).sum((2, 3)).tolist()
    torch.testing.assert_close(sums.largest, finite.amax((2, 3)))
    torch.testing.assert_close(sums.ratios, 4 * squares)
    assert (sums.cells, sums.finite, sums.n_nan, sums.broken) == (24, 23, 1, True)
    assert sums.rms == pytest.approx(math.sqrt(float(squares.sum()) / 23))
    assert sums.rms_allowed == pytest.approx(2 * math.sqrt(float(squares.sum()) / 24))
    assert sums.max_abs == pytest.approx(float(finite.max()))
    assert sums.max_rel == pytest.approx(float(finite.max()) / 2)
    assert sums.worst is not None
    assert sums.worst[0] == (1, 0, 2, 1)
    actual = torch.where(error.isnan(), 0.0, 2 + finite)
    cosine = float(actual.sum()) * 2 / math.sqrt(float(actual.square().sum()) * 4 * 23)
    assert sums.cosine == pytest.approx(cosine)
    head, relative, explained_error = sums.worst_head or ((0, 0), 0.0, 0.0)
    assert head == tuple(divmod(int(squares.argmax()), 2))
    size = float(sums.sizes[head])
    assert relative == pytest.approx(math.sqrt(float(squares.max()) / size))
    assert explained_error == pytest.approx(math.sqrt(0.03 / size))
    some = sums.of_heads(torch.tensor([False, True]))
    assert some.cells == 12
    torch.testing.assert_close(some.squares, squares[:, 1:])


def test_a_head_is_off_beyond_eight_times_what_is_explained() -> None:
    one = Candidate(Target.OUTPUT, torch.zeros(1, 3, 1, 1), torch.float32)
    sums = ErrorSums.of(one)
    error = torch.tensor([7.9, 8.1, 0.0], dtype=torch.float64).reshape(1, 3, 1, 1) / 100
    explained = torch.full((1, 3), 1e-4, dtype=torch.float64)
    part = Part(slice(0, 1), slice(0, 3), torch.tensor([0]))
    sums.add(errors(error, explained), part)
    assert sums.heads_off.tolist() == [[False, True, False]]
    assert sums.mismatches == 0
    unknown = ErrorSums.of(one)
    unknown.add(errors(error), part)
    assert unknown.heads_off.tolist() == [[False] * 3]
    assert unknown.worst_head is None
    # Where nothing is explained any error is too much.
    nothing = ErrorSums.of(one)
    nothing.add(errors(error, torch.zeros_like(explained)), part)
    assert nothing.heads_off.tolist() == [[True, True, False]]


def test_no_cells_have_no_error() -> None:
    sums = DetailedSums.of(Candidate(Target.OUTPUT, torch.zeros(1, 1, 0, 2), torch.float32))
    assert (sums.rms, sums.rms_allowed, sums.max_abs, sums.cosine) == (0, 0, 0, None)
    assert sums.worst is None
