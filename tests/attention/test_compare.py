"""Comparisons with the reference: right candidates pass, wrong cells are found and placed."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from attncli.attention.check.candidate import read_candidate, values_dtype
from attncli.attention.check.compare import Comparison, Pair, compare, compare_pair
from attncli.attention.check.hypotheses import check
from attncli.attention.check.variant import Part, evaluate, right_variant
from attncli.attention.options import AttentionOptions, Layout, Target
from attncli.attention.problem import Problem, make_problem
from attncli.errors import DataError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    drawn = np.random.default_rng(seed).standard_normal(shape)
    return torch.from_numpy(drawn).to(dtype)


def kernel_draw(seed: int, dtype: torch.dtype) -> tuple[Problem, AttentionOptions, torch.Tensor]:
    """A random problem in a dtype and what torch's kernel of that dtype makes of it."""
    random = np.random.default_rng(seed)
    batch, shared, group = (int(random.integers(1, 4)) for _ in range(3))
    length, width = int(random.integers(1, 80)), int(random.choice([8, 32, 64]))
    size = float(random.choice([0.5, 1, 3]))
    q = size * torch.from_numpy(random.standard_normal((batch, shared * group, length, width)))
    k, v = (
        torch.from_numpy(random.standard_normal((batch, shared, length, width))) for _ in range(2)
    )
    q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
    causal = bool(random.random() < 0.5)
    output = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    options = AttentionOptions(causal=causal)
    return make_problem(q, k, v, options), options, output


def compared(problem: Problem, options: AttentionOptions, output: torch.Tensor) -> Comparison:
    return compare(problem, options, [read_candidate(Target.OUTPUT, output, problem)])[0]


def right_output(problem: Problem, options: AttentionOptions) -> torch.Tensor:
    """The reference's own output as float32, (B, H, S_q, d_v)."""
    variant = right_variant(problem, options)
    rows = torch.arange(problem.sizes.q_len)
    found = evaluate(variant, Part(slice(None), slice(None), rows)).output
    assert found is not None
    return found.float()


@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_of_honest_kernels_pass(dtype: torch.dtype) -> None:
    failed = [seed for seed in range(34) if not compared(*kernel_draw(seed, dtype)).passed]
    assert failed == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_half_precision_output_saved_as_float32_keeps_its_tolerance(dtype: torch.dtype) -> None:
    problem, options, output = kernel_draw(3, dtype)
    assert values_dtype(output.float()) == dtype
    assert compared(problem, options, output.float()).passed


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_wrong_cell_of_a_million_fails_and_is_named(dtype: torch.dtype) -> None:
    q, k, v = (normal(seed, 1, 4, 256, 16, dtype=dtype) for seed in range(3))
    v = torch.cat([v] * 61, -1)  # (1, 4, 256, 976): 999,424 cells
    options = AttentionOptions(causal=True)
    problem = make_problem(q, k, v, options)
    output = scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    output = output.to(dtype)
    assert compared(problem, options, output).passed
    right = float(output[0, 2, 100, 500])
    output[0, 2, 100, 500] += 0.1
    found = compared(problem, options, output)
    assert not found.passed
    assert (found.mismatches, found.worst_index) == (1, (0, 2, 100, 500))
    assert found.expected == pytest.approx(right, abs=0.01)
    assert found.locations.findings == (
        "only head 2 of 4",
        "only row 100 of 256",
        "only column 500 of 976",
    )


def test_errors_are_those_of_the_definition() -> None:
    q, k, v = (normal(seed, 1, 2, 5, 4, dtype=torch.float64) for seed in range(3))
    right = scaled_dot_product_attention(q, k, v)
    wrong = right + 0.1 * normal(9, *right.shape, dtype=torch.float64)
    options = AttentionOptions()
    found = compared(make_problem(q, k, v, options), options, wrong)
    error = (wrong - right).abs()
    assert found.max_abs_error == pytest.approx(float(error.max()), rel=1e-9)
    assert found.max_rel_error == pytest.approx(float((error / right.abs()).max()), rel=1e-9)
    assert found.rms_error == pytest.approx(float(error.square().mean().sqrt()), rel=1e-9)
    cosine = torch.cosine_similarity(wrong.flatten(), right.flatten(), dim=0)
    assert found.cosine == pytest.approx(float(cosine), rel=1e-9)
    assert found.mismatches == found.cells == 40


def test_tolerances_of_the_caller_are_taken() -> None:
    problem, options, output = kernel_draw(0, torch.float32)
    candidate = read_candidate(Target.OUTPUT, output + 0.01, problem)
    assert compare(problem, options, [candidate], atol=0.02)[0].passed
    strict = compare(problem, options, [candidate], rtol=0.0, atol=0.005)[0]
    assert (strict.passed, strict.rtol, strict.atol) == (False, 0.0, 0.005)


def test_padded_queries_are_left_out() -> None:
    q, k, v = (normal(seed, 2, 1, 6, 4) for seed in range(3))
    options = AttentionOptions(query_lengths=(6, 3))
    output = scaled_dot_product_attention(q, k, v)
    output[1, :, 3:] = 99.0
    found = compared(make_problem(q, k, v, options), options, output)
    assert found.passed
    assert found.cells == 9 * 4


@pytest.mark.parametrize("hidden", ["query_lengths", "key_lengths", "bool", "additive", "square"])
def test_what_stands_in_padding_forgives_no_error(hidden: str) -> None:
    q, k, v = (normal(seed, 1, 2, 12, 8) for seed in (50, 51, 52))
    real = np.arange(12) < 9
    options = {
        "query_lengths": AttentionOptions(query_lengths=(9,)),
        "key_lengths": AttentionOptions(key_lengths=(9,)),
        "bool": AttentionOptions(attn_mask=real),
        "additive": AttentionOptions(attn_mask=np.where(real, 0.0, -np.inf)),
        "square": AttentionOptions(attn_mask=np.tri(12, dtype=bool) & real),
    }[hidden]
    (q if hidden == "query_lengths" else k)[..., 9:, :] = 1e8
    output = right_output(make_problem(q, k, v, options), options)
    assert compared(make_problem(q, k, v, options), options, output).passed
    output[0, 1, 3, 2] += 0.05
    assert compared(make_problem(q, k, v, options), options, output).mismatches == 1


def test_weights_and_logsumexp_are_compared_without_values() -> None:
    q, k = normal(0, 2, 3, 6, 8), normal(1, 2, 3, 6, 8)
    options = AttentionOptions(causal=True)
    problem = make_problem(q, k, None, options)
    hidden = (q @ k.mT / math.sqrt(8)).masked_fill(~torch.ones(6, 6).tril().bool(), -math.inf)
    candidates = [
        read_candidate(Target.WEIGHTS, hidden.softmax(-1), problem),
        read_candidate(Target.LOGSUMEXP, hidden.logsumexp(-1), problem),
    ]
    assert [one.passed for one in compare(problem, options, candidates)] == [True, True]
    moved = read_candidate(Target.LOGSUMEXP, hidden.logsumexp(-1) + 0.01, problem)
    found = compare(problem, options, [moved])[0]
    assert not found.passed
    assert found.worst_index is not None
    assert len(found.worst_index) == 3
    with pytest.raises(DataError, match="expected v"):
        read_candidate(Target.OUTPUT, q, problem)


def test_nan_of_empty_rows_is_located_and_explained() -> None:
    q, k, v = (normal(seed, 1, 1, 4, 4) for seed in range(3))
    mask = np.ones((4, 4), bool)
    mask[2] = False
    options = AttentionOptions(attn_mask=mask)
    output = scaled_dot_product_attention(q, k, v, attn_mask=torch.from_numpy(mask))
    assert compared(make_problem(q, k, v, options), options, output).passed
    output[:, :, 2] = math.nan
    found = compared(make_problem(q, k, v, options), options, output)
    assert (found.n_nan, found.worst_index) == (4, (0, 0, 2, 0))
    assert found.explanation is not None
    assert "all of them see no key" in found.explanation
    assert "only rows that see no key" in found.locations.findings


def test_overflow_before_the_scale_is_explained() -> None:
    q, k, v = (normal(seed, 1, 1, 4, 16, dtype=torch.float16) for seed in range(3))
    q, k = q * 300, k * 300
    options = AttentionOptions()
    scores = (q.float() @ k.float().mT).half().float()
    output = ((scores / 4).softmax(-1) @ v.float()).half()
    assert bool(torch.isnan(output).any())
    found = compared(make_problem(q, k, v, options), options, output)
    assert found.explanation is not None
    assert "beyond float16's 65504" in found.explanation


def test_locations_name_the_batches_with_padding() -> None:
    q, k, v = (normal(seed, 3, 2, 8, 4) for seed in range(3))
    options = AttentionOptions(key_lengths=(8, 5, 8))
    problem = make_problem(q, k, v, options)
    ignored = scaled_dot_product_attention(q, k, v)
    found = compared(problem, options, ignored)
    assert found.locations.batches == (1,)
    assert "only the batches with padded keys" in found.locations.findings


def test_locations_name_the_first_rows() -> None:
    q, k, v = (normal(seed, 1, 1, 32, 4, dtype=torch.float64) for seed in range(3))
    options = AttentionOptions()
    problem = make_problem(q, k, v, options)
    right = scaled_dot_product_attention(q, k, v)
    first = right.clone()
    first[:, :, :3] += 1
    assert (
        "only the first rows (rows 0 to 2 of 32)"
        in compared(problem, options, first).locations.findings
    )


@pytest.mark.parametrize(
    ("target", "shape", "layout", "reading"),
    [
        (Target.OUTPUT, (2, 3, 5, 7), Layout.BHSD, None),
        (Target.OUTPUT, (2, 5, 3, 7), Layout.BHSD, "layout:output"),
        (Target.OUTPUT, (2, 5, 21), Layout.BHSD, "layout:packed"),
        (Target.OUTPUT, (2, 5, 3, 7), Layout.BSHD, None),
        (Target.OUTPUT, (2, 5, 21), Layout.BSH, None),
        (Target.OUTPUT, (2, 3, 5, 7), Layout.BSH, "layout:output"),
        (Target.WEIGHTS, (2, 3, 5, 6), Layout.BHSD, None),
        (Target.WEIGHTS, (2, 5, 6), Layout.BHSD, "heads:averaged"),
        (Target.LOGSUMEXP, (2, 3, 5), Layout.BHSD, None),
        (Target.LOGSUMEXP, (2, 3, 5, 1), Layout.BHSD, None),
        (Target.LOGSUMEXP, (2, 5, 3), Layout.BHSD, "layout:output"),
    ],
)
def test_shapes_are_told_apart(
    target: Target, shape: tuple[int, ...], layout: Layout, reading: str | None
) -> None:
    problem = make_problem(
        normal(0, 2, 3, 5, 4), normal(1, 2, 3, 6, 4), normal(2, 2, 3, 6, 7), AttentionOptions()
    )
    found = read_candidate(target, normal(3, *shape), problem, layout)
    width = {Target.OUTPUT: 7, Target.WEIGHTS: 6, Target.LOGSUMEXP: 1}[target]
    assert (found.reading, found.values.shape) == (reading, (2, 3, 5, width))


@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 3, 5, 8), (2, 7, 3, 5), (210,)])
def test_other_shapes_are_data_errors(shape: tuple[int, ...]) -> None:
    problem = make_problem(
        normal(0, 2, 3, 5, 4), normal(1, 2, 3, 6, 4), normal(2, 2, 3, 6, 7), AttentionOptions()
    )
    with pytest.raises(DataError, match=r"expected \(B, H, S_q, d_v\) \(2, 3, 5, 7\)"):
        read_candidate(Target.OUTPUT, normal(3, *shape), problem)


def test_short_shapes_stand_for_axes_of_one() -> None:
    problem = make_problem(normal(0, 5, 4), normal(1, 6, 4), normal(2, 6, 7), AttentionOptions())
    assert read_candidate(Target.OUTPUT, normal(3, 5, 7), problem).values.shape == (1, 1, 5, 7)
    assert read_candidate(Target.LOGSUMEXP, normal(3, 5), problem).values.shape == (1, 1, 5, 1)


@pytest.mark.parametrize(
    ("off", "said"),
    [
        (range(4, 16), "rows 4 to 15 of 16"),
        (range(8, 16), "only the last rows (rows 8 to 15 of 16)"),
        (range(9), "rows 0 to 8 of 16"),
        (range(0, 16, 2), "only 8 of 16 rows, between 0 and 14"),
        ([0, *range(6, 16)], "11 of 16 rows, between 0 and 15"),
        (range(3, 16), None),
    ],
)
def test_most_of_the_rows_are_not_called_only(off: Iterable[int], said: str | None) -> None:
    q, k, v = (normal(seed, 1, 1, 16, 8) for seed in range(3))
    problem = make_problem(q, k, v, AttentionOptions())
    bad = scaled_dot_product_attention(q, k, v)
    bad[0, 0, list(off)] += 0.1
    candidate = read_candidate(Target.OUTPUT, bad, problem)
    (found,) = compare(problem, AttentionOptions(), [candidate])
    assert found.locations.findings == (() if said is None else (said,))


@pytest.mark.parametrize("heads", [(1,), (0, 3), (3, 1, 2)])
def test_chosen_heads_are_compared_as_if_alone(heads: tuple[int, ...]) -> None:
    """And what explains them is looked for in them alone; what others do plays no part."""
    q, k, v = (normal(seed, 3, 4, 7, 8) for seed in range(3))
    options = AttentionOptions(key_lengths=(7, 5, 4))
    mask = (torch.arange(7) < torch.tensor([[7], [5], [4]]))[:, None, None]
    causal = mask & torch.ones(7, 7, dtype=torch.bool).tril()
    candidate = scaled_dot_product_attention(q, k, v, attn_mask=causal)
    candidate[:, [head for head in range(4) if head not in heads]] += 3
    candidate[0] = torch.nan
    problem = make_problem(q, k, v, options)
    whole = read_candidate(Target.OUTPUT, candidate, problem)
    found = check(problem, options, [whole], chosen=((2, 1), heads))
    batches, listed = [1, 2], sorted(heads)
    own = [one[batches][:, listed].contiguous() for one in (q, k, v, candidate)]
    few = AttentionOptions(key_lengths=(5, 4))
    alone = make_problem(*own[:3], few)
    expected = check(alone, few, [read_candidate(Target.OUTPUT, own[3], alone)])
    (one,), (other,) = found.comparisons, expected.comparisons
    for name in ("cells", "mismatches", "heads_off", "n_nan", "dtype", "passed"):
        assert getattr(one, name) == getattr(other, name), name
    for name in ("max_abs_error", "max_rel_error", "rms_error", "cosine", "error", "allowed"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-9), name
    assert other.worst_index is not None
    batch, head, *rest = other.worst_index
    assert one.worst_index == (batches[batch], listed[head], *rest)
    assert [one.name for one in found.hypotheses if one.matches] == ["causal:added"]
    assert "batch" not in str(one.explanation)
    assert "head" not in str(one.explanation)


def test_among_chosen_heads_the_wrong_one_is_named() -> None:
    q, k, v = (normal(seed, 1, 4, 7, 8) for seed in range(3))
    candidate = scaled_dot_product_attention(q, k, v)
    candidate[:, 2:] = scaled_dot_product_attention(q, k, v, is_causal=True)[:, 2:]
    problem = make_problem(q, k, v, AttentionOptions())
    whole = read_candidate(Target.OUTPUT, candidate, problem)
    found = check(problem, AttentionOptions(), [whole], chosen=(None, (1, 2)))
    assert [one.told for one in found.hypotheses if one.matches] == ["causal:added (head 2)"]
    assert found.comparisons[0].locations.findings[0] == "only head 2 of the 2 chosen"
    weights = torch.softmax(q @ k.mT / math.sqrt(8), -1).mean(1)
    averaged = read_candidate(Target.WEIGHTS, weights, problem)
    with pytest.raises(DataError, match="expected each head's for head_index"):
        check(problem, AttentionOptions(), [averaged], chosen=(None, (1,)))


def test_of_a_pair_the_closer_one_is_named() -> None:
    q, k, v = (normal(seed, 1, 2, 16, 8) for seed in range(3))
    options = AttentionOptions()
    problem = make_problem(q, k, v, options)
    good = scaled_dot_product_attention(q, k, v)
    bad = good.clone()
    bad[0, 1, 9:] += 0.1
    first, second = (read_candidate(Target.OUTPUT, t, problem) for t in (bad, good))
    found = compare_pair(problem, options, first, second)
    assert (found.closer, found.first.passed, found.second.passed) == (2, False, True)
    assert found.first_part == (0, 1, 9)
    assert found.max_abs_error == pytest.approx(0.1, rel=1e-4)
    assert found.mismatches == 7 * 8
    assert found.values is not None
    assert found.error == found.max_abs_error == abs(found.values[0] - found.values[1])
    assert found.allowed == pytest.approx(found.first.allowed + found.second.allowed, rel=0.5)


def one_cell_off(by: float, **tolerances: float) -> Comparison:
    """Of 2·5·4 cells one is off, in float64, where all are 1/3 and logits are 0."""
    q, k, v = (torch.zeros(1, 2, length, 4, dtype=torch.float64) for length in (5, 3, 3))
    v += 1 / 3
    output = torch.full((1, 2, 5, 4), 1 / 3, dtype=torch.float64)
    output[0, 1, 2, 3] += by
    options = AttentionOptions()
    problem = make_problem(q, k, v, options)
    candidate = read_candidate(Target.OUTPUT, output, problem)
    return compare(problem, options, [candidate], **tolerances)[0]


def test_what_is_told_of_a_single_cell() -> None:
    found = one_cell_off(0.5)
    assert found.explanation == (
        "1 of 40 cells are off (2.50%); only head 1 of 2; only row 2 of 5; only column 3 of 4"
    )
    places = found.locations
    assert (places.batches, places.heads, places.rows, places.columns) == ((0,), (1,), (2,), (3,))
    assert (found.actual, found.expected) == (pytest.approx(5 / 6), pytest.approx(1 / 3))
    assert found.error == found.max_abs_error == pytest.approx(0.5)
    assert found.max_rel_error == pytest.approx(1.5)
    assert found.rms_error == pytest.approx(0.5 / math.sqrt(40))
    assert (found.n_nan, found.n_posinf, found.n_neginf) == (0, 0, 0)
    assert found.rtol == 2 * 2.0**-53
    assert found.allowed == pytest.approx(found.atol + found.rtol / 3, rel=1e-9)
    # The output's own 2u, and of each weight its u and 4 roundings of a logit of size 0.
    assert found.allowed == pytest.approx(7 * 2.0**-53 / 3, rel=1e-9)
    assert found.off[0].tolist() == [[0] * 5, [0, 0, 1, 0, 0]]
    assert (found.worst_head, found.heads_off) == ((0, 1), 1)
    assert found.relative_error == pytest.approx(math.sqrt(0.25 / (20 / 9)))


@pytest.mark.parametrize(
    ("value", "counts"), [(math.nan, (1, 0, 0)), (math.inf, (0, 1, 0)), (-math.inf, (0, 0, 1))]
)
def test_what_is_told_of_a_cell_that_is_no_number(
    value: float, counts: tuple[int, int, int]
) -> None:
    found = one_cell_off(value)
    assert (found.n_nan, found.n_posinf, found.n_neginf) == counts
    assert found.findings[:2] == (
        "NaN or inf in 1 row, the first (batch, head, row) (0, 1, 2)",
        "every finite cell is right",
    )
    assert found.finite_is_right
    assert (found.max_abs_error, found.mismatches, found.error) == (0, 1, math.inf)
    assert found.cosine == pytest.approx(1)


def test_a_right_candidate_in_another_order_says_no_more_than_that() -> None:
    q, k, v = (normal(seed, 1, 2, 5, 4) for seed in range(3))
    options = AttentionOptions()
    output = scaled_dot_product_attention(q, k, v).transpose(1, 2)
    found = compared(make_problem(q, k, v, options), options, output)
    said = "its shape is that of layout:output, and so read it is right"
    assert found.findings == (said,)
    assert found.explanation == f"0 of 40 cells are off; {said}"
    output[0, 3, 1, 2] += 1
    found = compared(make_problem(q, k, v, options), options, output)
    assert found.findings[0] == "its shape is that of layout:output"


def test_numbers_where_inputs_make_none_are_found() -> None:
    q, k = normal(0, 1, 2, 5, 4), normal(1, 1, 2, 5, 4)
    q[0, 1, 3] = math.nan
    options = AttentionOptions()
    problem = make_problem(q, k, k, options, allow_nonfinite=True)
    output = right_output(problem, options)
    assert compared(problem, options, output).passed
    output[0, 1, 3] = 0.0
    found = compared(problem, options, output)
    assert found.mismatches == 4
    said = "finite in 1 rows where NaN or inf of the inputs makes the reference NaN or inf"
    assert said in found.findings
    assert not found.finite_is_right


def test_broken_rows_beside_empty_ones_are_looked_into() -> None:
    q, k, v = (normal(seed, 1, 1, 4, 4) for seed in range(3))
    mask = np.ones((4, 4), bool)
    mask[2] = False
    options = AttentionOptions(attn_mask=mask)
    problem = make_problem(q, k, v, options)
    output = right_output(problem, options)
    output[0, 0, 2:] = math.nan
    found = compared(problem, options, output)
    assert found.findings[0].startswith(
        "NaN or inf in 2 rows, the first (batch, head, row) (0, 0, 2"
    )
    assert found.findings[1].startswith("1 of them see no key")


def test_shares_of_cells_that_are_next_to_none() -> None:
    values = torch.zeros(1, 1, 100, 1001, dtype=torch.float64)
    q, k = torch.zeros(1, 1, 100, 1).double(), torch.zeros(1, 1, 1, 1).double()
    options = AttentionOptions()
    problem = make_problem(q, k, torch.zeros(1, 1, 1, 1001).double(), options)
    values[0, 0, 0, 0] = 1
    said = str(compared(problem, options, values).explanation)
    assert said.startswith("1 of 100100 cells are off (less than 0.01%); ")
    values[0, 0, 0, :11] = 1
    said = str(compared(problem, options, values).explanation)
    assert said.startswith("11 of 100100 cells are off (0.01%); ")


def pair_of(first: torch.Tensor, second: torch.Tensor, **tolerances: float) -> Pair:
    """Two outputs of a problem whose right output is all ones."""
    q, k, v = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), torch.ones(1, 2, 3, 4)
    options = AttentionOptions()
    problem = make_problem(q.double(), k.double(), v.double(), options)
    one, two = (read_candidate(Target.OUTPUT, each, problem) for each in (first, second))
    return compare_pair(problem, options, one, two, **tolerances)


def test_a_pair_is_apart_beyond_both_tolerances_together() -> None:
    right = torch.ones(1, 2, 3, 4, dtype=torch.float64)
    low, high = right.clone(), right.clone()
    low[0, 1, 2, 1], high[0, 1, 2, 1] = 1 - 0.01, 1 + 0.008
    found = pair_of(low, high, rtol=0.0, atol=0.01)
    assert (found.mismatches, found.first_part, found.allowed) == (0, None, 0.02)
    assert found.error == pytest.approx(0.018)
    assert found.worst_index == (0, 1, 2, 1)
    assert found.values == (low[0, 1, 2, 1], high[0, 1, 2, 1])
    assert found.closer == 2
    assert found.rms_error == pytest.approx(0.018 / math.sqrt(24))
    apart = pair_of(low, high, rtol=0.0, atol=0.008)
    assert (apart.mismatches, apart.first_part) == (1, (0, 1, 2))
    assert pair_of(high, low, rtol=0.0, atol=0.01).closer == 1
    assert pair_of(low, low.clone()).closer is None
    assert pair_of(low, low.clone()).error == 0


def test_of_a_pair_the_one_with_fewer_broken_cells_is_closer() -> None:
    right = torch.ones(1, 2, 3, 4, dtype=torch.float64)
    broken, far = right.clone(), right + 1
    broken[0, 1, 1, 0] = math.nan
    assert pair_of(broken, far).closer == 2
    far[0, 0, 0, 0], far[0, 0, 0, 1] = math.inf, -math.inf
    found = pair_of(broken, far)
    assert found.closer == 1
    assert found.max_abs_error == 1
    assert found.first_part == (0, 0, 0)
    assert found.cosine == pytest.approx(1)
