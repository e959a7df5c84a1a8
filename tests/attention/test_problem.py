"""What a problem refuses, what it assumes, and what it costs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import attncli
from attncli.attention import problem as problem_module
from attncli.attention.options import AttentionOptions, Layout, Precision
from attncli.attention.problem import (
    Problem,
    choose_device,
    compute_dtype,
    cost_of,
    make_problem,
    refuse_nonfinite,
)
from attncli.attention.sizes import Sizes
from attncli.errors import AttncliError, DataError, ResourceError, UsageError


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def made(*shapes: tuple[int, ...], **options: Any) -> Problem:
    """A problem of zeros of the given shapes of q, k and v."""
    q, k, v = (*map(torch.zeros, shapes), None)[:3]
    return make_problem(q, k, v, AttentionOptions(**options))


Q, K, V = (2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 3)


def test_sizes_and_defaults() -> None:
    found = made(Q, K, V)
    assert found.sizes == Sizes(2, 4, 5, 6)
    assert (found.kv_heads, found.dk, found.dv) == (2, 8, 3)
    assert found.scale == 1 / math.sqrt(8)
    assert (found.temperature, found.softcap, found.sinks) == (1.0, None, None)
    assert found.warnings == ()
    assert [found.kv_head(head) for head in range(4)] == [0, 0, 1, 1]


def test_values_are_optional() -> None:
    found = make_problem(zeros(*Q), zeros(*K), None, AttentionOptions())
    assert (found.v, found.dv) == (None, None)


@pytest.mark.parametrize(
    ("k", "v", "said"),
    [
        ((1, 2, 6, 8), (1, 2, 6, 3), "k and v hold 1 batch, shared by all 2 of q"),
        ((2, 6, 8), V, "k holds 1 batch, shared by all 2 of q"),
        (K, (1, 2, 6, 3), "v holds 1 batch, shared by all 2 of q"),
    ],
)
def test_keys_and_values_of_one_batch_serve_all(
    k: tuple[int, ...], v: tuple[int, ...], said: str
) -> None:
    tensors = [torch.from_numpy(np.random.default_rng(0).normal(size=s)) for s in (Q, k, v)]
    whole = [tensors[0], *(t.expand(2, -1, -1, -1) for t in tensors[1:])]
    found, expected = (attncli.compute(*three) for three in (tensors, whole))
    for stage, values in expected.stages.items():
        assert torch.equal(found.stages[stage], values)
    assert found.warnings == (said,)
    heads = attncli.entropy(*tensors, per_key=True)
    assert heads.heads == attncli.entropy(*whole).heads


SHAPES: list[tuple[tuple[Any, ...], type[AttncliError], str]] = [
    ((Q, (2, 2, 6, 7), V), DataError, "k: expected d_k=8 like q (2, 4, 5, 8), got (2, 2, 6, 7)"),
    (((1, 4, 5, 8), K, V), DataError, "k: expected B=1 like q, got (2, 2, 6, 8)"),
    ((Q, K, (3, 2, 6, 3)), DataError, "v: expected B=2 like q, got (3, 2, 6, 3)"),
    (
        (Q, K, (2, 2, 7, 3)),
        DataError,
        "v: expected H_kv=2 and S_k=6 like k (2, 2, 6, 8), got (2, 2, 7, 3)",
    ),
    (
        (Q, K, (2, 4, 6, 3)),
        DataError,
        "v: expected H_kv=2 and S_k=6 like k (2, 2, 6, 8), got (2, 4, 6, 3)",
    ),
    (
        (Q, (2, 3, 6, 8), (2, 3, 6, 3)),
        DataError,
        "k: expected a number of heads that divides q's 4, got 3",
    ),
    (
        ((2, 2, 5, 8), (2, 4, 6, 8), (2, 4, 6, 3)),
        DataError,
        "k: expected a number of heads that divides q's 2, got 4",
    ),
    (
        ((5, 0), (6, 0), (6, 3)),
        DataError,
        "q: expected d_k of at least 1, got shape (1, 1, 5, 0)",
    ),
    (((8,), (6, 8), (6, 3)), DataError, "q: expected (S, d), (H, S, d) or (B, H, S, d), got (8,)"),
]


@pytest.mark.parametrize(("shapes", "kind", "message"), SHAPES)
def test_shapes_that_do_not_fit(
    shapes: tuple[Any, ...], kind: type[AttncliError], message: str
) -> None:
    with pytest.raises(kind) as raised:
        made(*shapes)
    assert str(raised.value) == message


def test_complex_numbers_are_refused() -> None:
    q = torch.zeros(2, 2, dtype=torch.complex64)
    with pytest.raises(DataError, match=r"q: expected real numbers, got torch\.complex64"):
        make_problem(q, q, None, AttentionOptions())


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"heads": 3}, "heads: expected 4 for tensors of (2, 4, 5, 8), got 3"),
        ({"kv_heads": 4}, "kv_heads: expected 2 for tensors of (2, 2, 6, 8), got 4"),
    ],
)
def test_declared_heads_are_checked(declared: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        make_problem(zeros(*Q), zeros(*K), zeros(*V), AttentionOptions(), **declared)
    assert str(raised.value) == message


def test_packed_keys_have_as_many_heads_as_queries_unless_told() -> None:
    q, packed = zeros(2, 5, 32), zeros(2, 6, 16)
    alike = make_problem(q, q, None, AttentionOptions(), layout=Layout.BSH, heads=4)
    assert alike.kv_heads == 4
    grouped = make_problem(
        q, packed, None, AttentionOptions(), layout=Layout.BSH, heads=4, kv_heads=2
    )
    assert (grouped.kv_heads, grouped.dk) == (2, 8)


def test_more_heads_than_queries_earn_a_warning_that_names_the_layout() -> None:
    (warning,) = made((1, 5, 4, 8), (1, 5, 4, 8)).warnings
    assert warning == (
        "q (1, 5, 4, 8) has more heads than queries; if it is (B, S, H, d), say layout=bshd"
    )
    swapped = make_problem(
        zeros(1, 4, 5, 8), zeros(1, 4, 5, 8), None, AttentionOptions(), layout=Layout.BSHD
    )
    assert swapped.warnings == ()
    assert made((1, 4, 4, 8), (1, 4, 4, 8)).warnings == ()


# ── sinks ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        ([0.0], "sinks: expected one logit per query head (H=4), got (1,)"),
        ([[0.0] * 4], "sinks: expected one logit per query head (H=4), got (1, 4)"),
        ([0.0, 1.0, math.nan, 0.0], "sinks: expected finite logits, got NaN or inf"),
        ([0.0, 1.0, -math.inf, 0.0], "sinks: expected finite logits, got NaN or inf"),
    ],
)
def test_sinks_that_do_not_fit(sinks: list[Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        made(Q, K, sinks=np.array(sinks))
    assert str(raised.value) == message


# ── numbers that are none ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("role", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_input_is_refused_with_count_and_place(role: str, bad: float) -> None:
    tensors = {"q": zeros(*Q), "k": zeros(*K), "v": zeros(*V)}
    tensors[role][1, 1, 2, 0] = bad
    tensors[role][1, 1, 3, 2] = bad
    with pytest.raises(DataError) as raised:
        make_problem(**tensors, options=AttentionOptions())
    expected = "expected finite values, got 2 NaN or inf, the first at (1, 1, 2, 0)"
    assert str(raised.value) == f"{role}: {expected}"
    assert "«allow_nonfinite»" in raised.value.advice
    make_problem(**tensors, options=AttentionOptions(), allow_nonfinite=True)


@pytest.mark.parametrize("elements", [1, 7, 1 << 22])
def test_the_place_is_right_across_parts(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem_module, "_SCAN_ELEMENTS", elements)
    tensor = zeros(2, 3, 50, 4)
    tensor[1, 0, 37, 2] = math.nan
    tensor[0, 2, 41, 0] = math.inf
    with pytest.raises(DataError, match=r"got 2 NaN or inf, the first at \((1, 0, 37, 2|0, 2, 41)"):
        refuse_nonfinite(tensor, "q")


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16"])
def test_narrow_floats_are_scanned(name: str) -> None:
    tensor = torch.tensor([[1.0, math.nan]]).to(getattr(torch, name))
    with pytest.raises(DataError, match=r"got 1 NaN or inf, the first at \(0, 1\)"):
        refuse_nonfinite(tensor, "k")


def test_integers_need_no_scan() -> None:
    refuse_nonfinite(torch.zeros(2, 2, dtype=torch.int64), "q")


# ── dtype and device of the arithmetic ───────────────────────────────────────────────────────

SMALL, LARGE = Sizes(1, 1, 1 << 13, 1 << 13), Sizes(1, 1, 1 << 13, (1 << 13) + 1)
F16, F32, F64 = torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("precision", "came_as", "sizes", "expected"),
    [
        (Precision.AUTO, [F32, F32], SMALL, F64),
        (Precision.AUTO, [F32, F16], LARGE, F32),
        (Precision.AUTO, [F32, F64], LARGE, F64),
        (Precision.FLOAT32, [F64], SMALL, F32),
        (Precision.FLOAT64, [F16], LARGE, F64),
    ],
)
def test_precision(
    precision: Precision, came_as: list[torch.dtype], sizes: Sizes, expected: torch.dtype
) -> None:
    assert compute_dtype(precision, came_as, sizes) == expected


def test_what_the_input_came_as_decides_not_what_it_was_projected_to() -> None:
    q = torch.zeros(1, 1, 9000, 1, dtype=F64)
    found = make_problem(q, q, None, AttentionOptions(), came_as=[F32])
    assert (found.dtype, found.numpy_dtype) == (F32, np.float32)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cpu0", "", "mps"])
def test_a_device_name_that_is_none(name: str) -> None:
    with pytest.raises(UsageError, match="device: expected auto, cpu, cuda or cuda:N, got"):
        choose_device(name)


def test_a_device_that_is_not_there() -> None:
    absent = torch.cuda.device_count()
    with pytest.raises(
        ResourceError, match="this torch sees no CUDA" if not absent else f"one of {absent}"
    ):
        choose_device(f"cuda:{absent}")


def test_the_cpu_is_always_there() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


# ── options that no tensors could make right ─────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": math.nan}, "scale: expected a finite number, got nan"),
        ({"scale": -math.inf}, "scale: expected a finite number, got -inf"),
        ({"temperature": 0.0}, "temperature: expected a finite number above 0, got 0.0"),
        ({"temperature": math.inf}, "temperature: expected a finite number above 0, got inf"),
        ({"softcap": 0.0}, "softcap: expected a finite number above 0, got 0.0"),
        ({"softcap": -1.0}, "softcap: expected a finite number above 0, got -1.0"),
        ({"left_window": -1}, "left_window: expected a whole number of at least 0, got -1"),
        ({"key_lengths": (3, -1)}, "key_lengths: expected a whole number of at least 0, got -1"),
        ({"prefix": 2}, "prefix: expected causal beside it, got prefix alone"),
        (
            {"causal": True, "dilation": 2},
            "dilation: expected left_window or right_window beside it, got dilation alone",
        ),
        (
            {"left_window": 4, "dilation": 0},
            "dilation: expected a whole number of at least 1, got 0",
        ),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        AttentionOptions(**options)
    assert str(raised.value) == message


POSITIONAL = [
    {"causal": True},
    {"left_window": 1},
    {"right_window": 1},
    {"causal": True, "prefix": 1},
    {"segments": np.zeros(6, np.int64)},
    {"alibi": True},
]


@pytest.mark.parametrize("options", POSITIONAL)
def test_positions_must_be_declared_where_lengths_differ(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="query_offset: expected a value") as raised:
        made(Q, K, **options)
    assert "top-left" in raised.value.advice
    assert "bottom-right" in raised.value.advice
    assert made(Q, K, **options, query_offset=0).mask.offset is not None


def test_positions_are_undefined_where_nothing_needs_them() -> None:
    assert made(Q, K).mask.offset is None
    offset = made(Q, (2, 2, 5, 8)).mask.offset
    assert offset is not None
    assert offset.tolist() == [0]


# ── cost ─────────────────────────────────────────────────────────────────────────────────────


def test_cost_of_everything() -> None:
    found = cost_of(made(Q, K, V))
    pairs = 2 * 4 * 5 * 6
    assert (found.pairs, found.visible_pairs, found.softmax_exponentials) == (pairs,) * 3
    assert (found.scores_operations, found.output_operations) == (2 * pairs * 8, 2 * pairs * 3)
    assert found.visible_operations == found.scores_operations + found.output_operations
    assert found.input_bytes == 8 * (2 * 4 * 5 * 8 + 2 * 2 * 6 * (8 + 3))
    assert found.matrix_bytes == 8 * pairs
    assert found.streamed_bytes == 8 * 2 * 4 * 5 * (3 + 2)


@pytest.mark.parametrize(
    ("options", "visible"),
    [
        ({"causal": True}, 2 * 4 * 15),
        ({"causal": True, "left_window": 1}, 2 * 4 * 9),
        ({"key_lengths": (5, 2)}, 4 * (25 + 10)),
        ({"causal": True, "key_lengths": (5, 2)}, 4 * (15 + 9)),
        ({"causal": True, "query_lengths": (5, 2)}, 4 * (15 + 3)),
        ({"key_padding": np.arange(5)[None] < 3}, 2 * 4 * 15),
        ({"segments": np.array([0, 0, 1, 1, 1])}, 2 * 4 * (4 + 9)),
        ({"segments": np.array([0, 1, 0, 1, 0])}, 2 * 4 * (9 + 4)),
        ({"causal": True, "left_window": 4, "dilation": 2}, 2 * 4 * 9),
        ({"attn_mask": np.tri(5, dtype=bool)}, 2 * 4 * 15),
        ({"attn_mask": np.where(np.tri(5), 0.5, -np.inf), "causal": True}, 2 * 4 * 15),
        ({"attn_mask": np.tri(5, dtype=bool), "query_lengths": (5, 2)}, 4 * (15 + 3)),
        ({"attn_mask": np.arange(4)[:, None, None] * np.ones((5, 5)) > 1}, 2 * 2 * 25),
    ],
)
def test_cost_of_what_is_visible(options: dict[str, Any], visible: int) -> None:
    found = cost_of(made(Q, (2, 2, 5, 8), (2, 2, 5, 3), **options))
    assert found.visible_pairs == visible
    assert found.visible_operations == 2 * visible * (8 + 3)


def test_cost_without_values() -> None:
    found = cost_of(made(Q, K))
    assert found.output_operations == 0
    assert found.streamed_bytes == 8 * 2 * 4 * 5 * 2


def test_declared_heads_are_no_guess_at_the_layout() -> None:
    q = torch.zeros(1, 8, 4, 2)
    assert "layout=bshd" in make_problem(q, q, q, AttentionOptions()).warnings[0]
    assert make_problem(q, q, q, AttentionOptions(), heads=8).warnings == ()
