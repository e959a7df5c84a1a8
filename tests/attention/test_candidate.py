"""The shapes that a candidate may come in, and what each is read as."""

from __future__ import annotations

import pytest
import torch

from attncli.attention.check.candidate import (
    LayoutError,
    Target,
    apply_layout_error,
    read_candidate,
    shapes_of,
    undo_layout,
    values_dtype,
)
from attncli.attention.options import AttentionOptions, Layout, require_candidates
from attncli.attention.problem import Problem, make_problem
from attncli.errors import AttncliError, DataError, UsageError

B, H, S, K, D = 2, 4, 5, 7, 3


def problem_of(batch: int = B, heads: int = H, dv: int | None = D) -> Problem:
    q, k = torch.zeros(batch, heads, S, 2), torch.zeros(batch, heads, K, 2)
    return make_problem(
        q, k, None if dv is None else torch.zeros(batch, heads, K, dv), AttentionOptions()
    )


# (B, H, S_q, d_v), every number another one.
OUTPUT = torch.arange(B * H * S * D, dtype=torch.float32).reshape(B, H, S, D)

SHAPES: list[tuple[Layout, torch.Tensor, str | None]] = [
    (Layout.BHSD, OUTPUT, None),
    (Layout.BHSD, OUTPUT.transpose(1, 2), "layout:output"),
    (Layout.BHSD, OUTPUT.transpose(1, 2).flatten(2), "layout:packed"),
    (Layout.BSHD, OUTPUT.transpose(1, 2), None),
    (Layout.BSHD, OUTPUT, "layout:output"),
    (Layout.BSHD, OUTPUT.transpose(1, 2).flatten(2), "layout:packed"),
    (Layout.SBHD, OUTPUT.permute(2, 0, 1, 3), None),
    (Layout.SBHD, OUTPUT.transpose(1, 2), "layout:output"),
    (Layout.SBHD, OUTPUT, "layout:output"),
    (Layout.BHDS, OUTPUT.mT, None),
    (Layout.BHDS, OUTPUT, "layout:output"),
    (Layout.BHDS, OUTPUT.transpose(1, 2), "layout:output"),
    (Layout.BSH, OUTPUT.transpose(1, 2).flatten(2), None),
    (Layout.BSH, OUTPUT.transpose(1, 2), None),
    (Layout.BSH, OUTPUT, "layout:output"),
    (Layout.SBH, OUTPUT.permute(2, 0, 1, 3).flatten(2), None),
    (Layout.SBH, OUTPUT.permute(2, 0, 1, 3), None),
    (Layout.SBH, OUTPUT.transpose(1, 2).flatten(2), "layout:output"),
]


@pytest.mark.parametrize(("layout", "given", "reading"), SHAPES)
def test_outputs_of_every_layout(layout: Layout, given: torch.Tensor, reading: str | None) -> None:
    found = read_candidate(Target.OUTPUT, given, problem_of(), layout)
    assert torch.equal(found.values, OUTPUT)
    assert found.reading == reading


def test_axes_of_length_one_may_be_left_out() -> None:
    for shape in ((1, H, S, D), (H, S, D)):
        found = read_candidate(Target.OUTPUT, OUTPUT[0].reshape(shape), problem_of(1))
        assert torch.equal(found.values, OUTPUT[:1])
    for shape in ((1, 1, S, D), (1, S, D), (S, D)):
        found = read_candidate(Target.OUTPUT, OUTPUT[0, 0].reshape(shape), problem_of(1, 1))
        assert torch.equal(found.values, OUTPUT[:1, :1])
        assert found.reading is None
    for batch, heads, shape in ((1, 2, (S, D)), (2, 2, (2, S, D))):
        with pytest.raises(DataError, match=r"expected \(B, H, S_q, d_v\)"):
            read_candidate(Target.OUTPUT, torch.zeros(shape), problem_of(batch, heads))


def test_weights_and_their_mean_over_heads() -> None:
    weights = torch.arange(B * H * S * K, dtype=torch.float32).reshape(B, H, S, K)
    for given, reading in ((weights, None), (weights.transpose(1, 2), "layout:output")):
        found = read_candidate(Target.WEIGHTS, given, problem_of())
        assert torch.equal(found.values, weights)
        assert found.reading == reading
    mean = read_candidate(Target.WEIGHTS, weights.mean(1), problem_of())
    assert mean.reading == "heads:averaged"
    assert torch.equal(mean.values, weights.mean(1, keepdim=True).expand(B, H, S, K))
    alone = read_candidate(Target.WEIGHTS, weights[0].mean(0), problem_of(1))
    assert alone.reading == "heads:averaged"
    assert torch.equal(alone.values, mean.values[:1])
    # Of one head nothing is averaged, and of two batches one mean is not enough.
    assert read_candidate(Target.WEIGHTS, weights[0, :1], problem_of(1, 1)).reading is None
    for given, batch, heads in ((weights[0, 0], 2, 4), (weights[0, :3], 3, 1)):
        with pytest.raises(DataError, match=r"expected \(B, H, S_q, S_k\)"):
            read_candidate(Target.WEIGHTS, given, problem_of(batch, heads))


def test_a_logsumexp_with_and_without_a_last_axis() -> None:
    values = torch.arange(B * H * S, dtype=torch.float32).reshape(B, H, S, 1)
    for given, reading in (
        (values, None),
        (values[..., 0], None),
        (values.transpose(1, 2), "layout:output"),
        (values.transpose(1, 2)[..., 0], "layout:output"),
    ):
        found = read_candidate(Target.LOGSUMEXP, given, problem_of())
        assert torch.equal(found.values, values)
        assert found.reading == reading
    alone = read_candidate(Target.LOGSUMEXP, values[0, 0, :, 0], problem_of(1, 1))
    assert torch.equal(alone.values, values[:1, :1])


def test_shapes_in_the_order_in_which_they_are_tried() -> None:
    def named(target: Target, problem: Problem, layout: Layout = Layout.BHSD) -> list[str]:
        return [axes for _, axes, _ in shapes_of(target, problem, layout)]

    assert named(Target.OUTPUT, problem_of()) == ["bhsw", "bshw", "bsp"]
    one = ["bhsw", "hsw", "bshw", "shw", "bsp", "sp"]
    assert named(Target.OUTPUT, problem_of(1)) == one
    both = ["bhsw", "hsw", "sw", "bshw", "shw", "sw", "bsp", "sp"]
    assert named(Target.OUTPUT, problem_of(1, 1)) == both
    assert named(Target.WEIGHTS, problem_of()) == ["bhsw", "bshw", "bsw"]
    assert named(Target.WEIGHTS, problem_of(1))[-2:] == ["bsw", "sw"]


def test_what_is_no_candidate() -> None:
    with pytest.raises(DataError, match=r"expected real numbers, got torch\.complex64"):
        read_candidate(Target.OUTPUT, OUTPUT.to(torch.complex64), problem_of())
    with pytest.raises(DataError, match="expected v beside it, got q and k alone"):
        read_candidate(Target.OUTPUT, OUTPUT, problem_of(dv=None))
    expected = r"actual_output: expected \(B, S_q, H·d_v\) \(2, 5, 12\), got \(9,\)"
    with pytest.raises(DataError, match=expected):
        read_candidate(Target.OUTPUT, torch.zeros(9), problem_of(), Layout.BSH)
    expected = r"actual_logsumexp: expected \(B, H, S_q\) \(2, 4, 5\), got \(9,\)"
    with pytest.raises(DataError, match=expected):
        read_candidate(Target.LOGSUMEXP, torch.zeros(9), problem_of())


@pytest.mark.parametrize("error", LayoutError)
def test_a_layout_error_is_taken_back(error: LayoutError) -> None:
    wrong = apply_layout_error(OUTPUT, error)
    assert not torch.equal(wrong.reshape(-1), OUTPUT.reshape(-1))
    assert torch.equal(undo_layout(wrong, error), OUTPUT)
    assert torch.equal(undo_layout(OUTPUT, None), OUTPUT)


def test_layout_errors_as_their_words_have_them() -> None:
    flat = OUTPUT.reshape(-1)
    bshd = OUTPUT.transpose(1, 2).reshape(-1)  # as (B, S, H, d) lies in memory
    packed = OUTPUT.transpose(1, 2)  # (B, S, H, d)
    for error, expected in (
        (LayoutError.SWAPPED, OUTPUT.transpose(1, 2)),
        (LayoutError.BSHD_READ_AS_BHSD, bshd.reshape(B, H, S, D)),
        (LayoutError.BHSD_READ_AS_BSHD, flat.reshape(B, S, H, D).transpose(1, 2)),
        (LayoutError.DH_SPLIT_AS_HD, packed.mT.reshape(B, S, H, D).transpose(1, 2)),
        (LayoutError.HD_SPLIT_AS_DH, packed.reshape(B, S, D, H).mT.transpose(1, 2)),
    ):
        assert torch.equal(apply_layout_error(OUTPUT, error), expected), error


def test_the_narrowest_dtype_that_holds_the_values() -> None:
    random = torch.randn(64, generator=torch.Generator().manual_seed(0))
    assert values_dtype(random) == torch.float32
    assert values_dtype(random.double()) == torch.float32
    assert values_dtype(random.double() / 3) == torch.float64
    for dtype in (torch.bfloat16, torch.float16):
        for wide in (torch.float32, torch.float64):
            assert values_dtype(random.to(dtype).to(wide)) == dtype
        assert values_dtype(random.to(dtype)) == dtype
    assert values_dtype(torch.arange(64)) == torch.float64
    # Of few numbers that is an accident: 0 tells nothing, NaN and inf are in all of them.
    half = random.half().float()
    assert values_dtype(half[:31]) == torch.float32
    assert values_dtype(half[:32]) == torch.float16
    padded = torch.cat([half[:31], torch.zeros(99)])
    assert values_dtype(padded) == torch.float32
    broken = torch.cat([half, torch.tensor([torch.nan, torch.inf])])
    assert values_dtype(broken) == torch.float16


@pytest.mark.parametrize(
    ("given", "rtol", "atol", "pair", "message"),
    [
        ([], None, None, False, "check: expected one of actual_output, actual_weights, "),
        (["output", "weights"], None, None, True, "pair: expected one candidate .*, got 2"),
        (["output"], -1.0, None, False, "rtol: expected a finite number of at least 0, got -1"),
        (["output"], None, float("inf"), False, "atol: expected a finite number .*, got inf"),
        (["output"], float("nan"), None, False, "rtol: expected a finite number .*, got nan"),
    ],
)
def test_checks_that_make_no_sense(
    given: list[str], rtol: float | None, atol: float | None, pair: bool, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        require_candidates(given, rtol, atol, pair=pair)


def test_checks_that_make_sense() -> None:
    require_candidates(["output"], 0.0, 0.0, pair=True)
    require_candidates(["output", "weights", "logsumexp"], None, 1e-3)
    assert issubclass(UsageError, AttncliError)
