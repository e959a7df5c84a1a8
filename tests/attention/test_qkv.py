"""Q, K and V that no file holds: projected, split from one tensor, and weights in their place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import attncli.attention.qkv as qkv_module
from attncli.attention.options import AttentionOptions, Layout
from attncli.attention.qkv import problem_of_weights, project, split_fused
from attncli.errors import AttncliError, DataError, UsageError

B, S, H, D = 2, 5, 4, 6
# Every number tells its place: [role, batch, head, position, entry].
WHOLE = torch.arange(3 * B * H * S * D, dtype=torch.float64).reshape(3, B, H, S, D)
EXPECTED = dict(zip("qkv", WHOLE, strict=True))


def assert_split(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == ["q", "k", "v"]
    for role, tensor in found.items():
        assert torch.equal(tensor, expected[role]), role


FUSED: list[tuple[str, Layout, torch.Tensor]] = [
    ("(B, S, 3, H, d)", Layout.BHSD, WHOLE.permute(1, 3, 0, 2, 4)),
    ("(B, S, H, 3, d)", Layout.BHSD, WHOLE.permute(1, 3, 2, 0, 4)),
    ("(3, B, H, S, d)", Layout.BHSD, WHOLE),
    ("(B, 3, H, S, d)", Layout.BHSD, WHOLE.permute(1, 0, 2, 3, 4)),
    ("(3, B, S, H, d)", Layout.BSHD, WHOLE.permute(0, 1, 3, 2, 4)),
    ("(B, 3, S, H, d)", Layout.BSHD, WHOLE.permute(1, 0, 3, 2, 4)),
    ("(3, B, S, H, d)", Layout.BSH, WHOLE.permute(0, 1, 3, 2, 4)),
    ("(S, B, 3, H, d)", Layout.SBHD, WHOLE.permute(3, 1, 0, 2, 4)),
    ("(S, B, H, 3, d)", Layout.SBH, WHOLE.permute(3, 1, 2, 0, 4)),
    ("(3, S, B, H, d)", Layout.SBHD, WHOLE.permute(0, 3, 1, 2, 4)),
]


@pytest.mark.parametrize(("order", "layout", "fused"), FUSED)
def test_an_axis_of_three_anywhere(order: str, layout: Layout, fused: torch.Tensor) -> None:
    found, said = split_fused(fused, layout, None, None)
    assert_split(found, EXPECTED)
    assert said == []


def test_an_axis_of_three_without_batches() -> None:
    one = {role: tensor[:1] for role, tensor in EXPECTED.items()}
    for fused in (
        WHOLE[:, 0].permute(2, 0, 1, 3),  # (S, 3, H, d)
        WHOLE[:, 0].permute(2, 1, 0, 3),  # (S, H, 3, d)
        WHOLE[:, 0],  # (3, H, S, d)
    ):
        assert_split(split_fused(fused, Layout.BHSD, None, None)[0], one)
    by_rows = WHOLE[:, 0].permute(0, 2, 1, 3)  # (3, S, H, d)
    assert_split(split_fused(by_rows, Layout.BSHD, None, None)[0], one)


def test_packed_heads_beside_an_axis_of_three() -> None:
    packed = WHOLE.permute(1, 3, 0, 2, 4).flatten(3)  # (B, S, 3, H·d)
    assert_split(split_fused(packed, Layout.BHSD, H, None)[0], EXPECTED)
    # As many heads as the second axis is long: (S, H, 3, d).
    found, _ = split_fused(packed, Layout.BHSD, S, None)
    assert tuple(found["q"].shape) == (1, S, B, H * D)
    assert torch.equal(found["q"][0, 1, 0], packed[0, 1, 0])


@pytest.mark.parametrize("kv_heads", [None, 4, 2])
def test_packed_heads_of_all_three_in_a_row(kv_heads: int | None) -> None:
    shared = kv_heads or H
    expected = {"q": WHOLE[0], "k": WHOLE[1, :, :shared], "v": WHOLE[2, :, :shared]}
    rows = [part.transpose(1, 2).flatten(2) for part in expected.values()]
    packed = torch.cat(rows, -1)  # (B, S, H·d + 2·H_kv·d)
    found, said = split_fused(packed, Layout.BSH, H, kv_heads)
    assert_split(found, expected)
    assert said == []
    turned, _ = split_fused(packed.transpose(0, 1), Layout.SBH, H, kv_heads)
    assert_split(turned, expected)
    single, _ = split_fused(packed, Layout.BSH, 1, 1)
    assert {tensor.shape for tensor in single.values()} == {(B, 1, S, packed.shape[-1] // 3)}
    alone, _ = split_fused(packed[0], Layout.BHSD, H, kv_heads)
    assert_split(alone, {role: part[:1] for role, part in expected.items()})


def test_two_axes_of_three_are_told() -> None:
    fused = torch.zeros(2, 3, 3, 4, 5)
    said = split_fused(fused, Layout.BHSD, None, None)[1]
    assert said == [
        "«qkv»: of (2, 3, 3, 4, 5), axis 2 is taken as that of Q, K and V, though axis 1 is of "
        "length 3 as well"
    ]


@pytest.mark.parametrize(
    ("shape", "heads", "kv_heads", "message"),
    [
        ((2, 5, 2, 4, 6), None, None, r"expected \(B, S, 3, H, d\), .*, got \(2, 5, 2, 4, 6\)"),
        ((3,), 2, None, r"got \(3,\)"),
        ((2, 5, 24), None, None, r"expected heads beside it for packed heads \(2, 5, 24\)"),
        ((2, 5, 24), 5, None, r"expected H \+ 2·H_kv to divide the width 24 of qkv, got 15"),
        ((2, 5, 24), 4, 3, r"divide the width 24 of qkv, got 10"),
        ((2, 5, 24), 0, 4, r"divide the width 24 of qkv, got 8"),
    ],
)
def test_fused_tensors_that_cannot_be_split(
    shape: tuple[int, ...], heads: int | None, kv_heads: int | None, message: str
) -> None:
    with pytest.raises(AttncliError, match=message):
        split_fused(torch.zeros(shape), Layout.BHSD, heads, kv_heads)


def test_projections_split_into_heads() -> None:
    random = np.random.default_rng(0)
    x, wq, wk, wv = (random.standard_normal(s) for s in ((2, 5, 7), (7, 12), (7, 6), (7, 4)))
    bias = random.standard_normal(6)
    weights = {"wq": wq, "wk": wk, "wv": wv}
    found = project(
        torch.from_numpy(x),
        {name: torch.from_numpy(one) for name, one in weights.items()},
        4,
        2,
        {"wk": torch.from_numpy(bias)},
    )
    for role, head, width in (("q", 3, 3), ("k", 1, 3), ("v", 1, 2)):
        columns = slice(head * width, (head + 1) * width)
        expected = x @ weights[f"w{role}"][:, columns] + (bias[columns] if role == "k" else 0)
        assert found[role].dtype == torch.float64
        np.testing.assert_allclose(found[role][:, head].numpy(), expected, rtol=1e-12)
    alone = project(torch.from_numpy(x[1]), {"wq": torch.from_numpy(wq)}, 4, 2)
    torch.testing.assert_close(alone["q"], found["q"][1:])


@pytest.mark.parametrize(
    ("x", "weight", "heads", "message"),
    [
        ((7,), (7, 12), 4, r"x: expected \(S, d\) or \(B, S, d\), got \(7,\)"),
        ((1, 2, 3, 7), (7, 12), 4, r"x: expected"),
        ((5, 7), (12, 7), 4, r"wq: expected \(d, H·width\) with d=7 like x, got \(12, 7\)"),
        ((5, 7), (7,), 4, r"wq: expected \(d, H·width\)"),
        ((5, 7), (7, 12), 5, "heads: expected a divisor of wq's width 12, got 5"),
        ((5, 7), (7, 12), 0, "heads: expected a divisor of wq's width 12, got 0"),
    ],
)
def test_projections_that_do_not_fit(
    x: tuple[int, ...], weight: tuple[int, ...], heads: int, message: str
) -> None:
    with pytest.raises(AttncliError, match=message):
        project(torch.zeros(x), {"wq": torch.zeros(weight)}, heads, 2)


# Weights in the place of Q and K


def rows_of_weights(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).dirichlet(np.ones(shape[-1]), shape[:-1]))


def warnings_of(weights: torch.Tensor, **options: Any) -> list[str]:
    return list(problem_of_weights(weights, AttentionOptions(**options)).warnings)


def test_weights_of_any_rank_and_what_is_known_of_them() -> None:
    weights = rows_of_weights(2, 3, 4, 5)
    problem = problem_of_weights(weights, AttentionOptions())
    assert (problem.q.shape, problem.k.shape) == ((2, 3, 4, 1), (2, 3, 5, 1))
    assert (problem.v, problem.scale, problem.dtype) == (None, 1.0, torch.float64)
    given = problem.given
    assert given is not None
    assert torch.equal(given.values, weights)
    assert given.zeros_hidden
    assert (given.lowest, given.highest) == (pytest.approx(1), pytest.approx(1))
    assert warnings_of(weights[0, 0]) == []
    alone = problem_of_weights(weights[0], AttentionOptions(causal=True, query_offset=0))
    assert alone.given is not None
    assert alone.given.values.shape == (1, 3, 4, 5)
    assert not alone.given.zeros_hidden


def test_sums_of_rows_are_told_from_the_least_to_the_largest() -> None:
    weights = rows_of_weights(2, 3, 4, 5)
    weights[1, 2, 3] *= 0.9
    weights[0, 0, 0] *= 1.2
    (said,) = warnings_of(weights)
    assert said.startswith("rows of weights sum from 0.9 to 1.2, not to 1, and are measured")
    weights[0, 1, 1] = 0  # which is no row of weights
    assert "from 0.9 to 1.2" in warnings_of(weights)[0]
    assert warnings_of(torch.zeros(2, 3)) == []
    assert warnings_of(rows_of_weights(4, 4) * (1 + 9e-5)) == []
    assert len(warnings_of(rows_of_weights(4, 4) * (1 + 1.1e-4))) == 1


@pytest.mark.parametrize(
    ("dtype", "fine"), [(torch.float32, 1e-5), (torch.bfloat16, 0.015), (torch.float16, 0.0019)]
)
def test_sums_that_their_dtype_rounds_are_fine(dtype: torch.dtype, fine: float) -> None:
    for sign in (-1, 1):
        one = torch.tensor([[1 + sign * fine, 0.0]]).to(dtype)
        assert warnings_of(one) == []
        off = torch.tensor([[1 + sign * max(3 * fine, 2e-4), 0.0]]).to(dtype)
        assert "not to 1" in warnings_of(off)[0]


def test_exchanged_axes_are_seen_by_the_sums_of_columns() -> None:
    weights = rows_of_weights(2, 3, 5, 5)
    with pytest.raises(DataError, match="expected rows that sum to 1, got columns that do"):
        warnings_of(weights.mT)
    # Of one head alone: its columns sum to 1, those of the others do not.
    mixed = weights.clone()
    mixed[1, 2] = weights[1, 2].mT
    assert "not to 1" in warnings_of(mixed)[0]
    assert warnings_of(torch.full((4, 4), 0.25)) == []


def test_scores_are_no_weights() -> None:
    weights = rows_of_weights(2, 3, 4, 5)
    weights[1, 2, 3, 4] = -0.5
    with pytest.raises(DataError, match=r"of at least 0, got -0.5 at \(1, 2, 3, 4\)"):
        warnings_of(weights)
    with pytest.raises(DataError, match=r"sum to 1, got sums from 1 to 3.01"):
        warnings_of(torch.tensor([[1.0, 0.0], [1.0, 2.01]]))
    assert "sum from 1 to 2.99" in warnings_of(torch.tensor([[1.0, 0.0], [1.0, 1.99]]))[0]


def test_every_block_of_rows_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qkv_module, "BLOCK_CELLS", 10)  # two rows of five
    for row in range(5):
        weights = rows_of_weights(1, 2, 5, 5)
        weights[0, 1, row] *= 0.5
        assert "sum from 0.5 to 1" in warnings_of(weights)[0]
        weights[0, 1, row, 2] = -1.0
        with pytest.raises(DataError, match=rf"got -1 at \(0, 1, {row}, 2\)"):
            warnings_of(weights)
    with pytest.raises(DataError, match="got columns that do"):
        warnings_of(rows_of_weights(1, 2, 5, 5).mT)


def test_weight_on_keys_that_the_options_hide_is_told() -> None:
    weights = torch.tensor([[0.75, 0.25, 0.0], [0.5, 0.5, 0.0], [0.25, 0.25, 0.5]])
    said = warnings_of(weights, causal=True)
    assert said == [
        "up to 0.25 of a row of weights is on keys that the options hide, and is left out"
    ]
    weights = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.5, 0.5]])
    said = warnings_of(weights, causal=True)
    assert len(said) == 1
    assert said[0].startswith("33% of the weights that the options show are 0")
    assert warnings_of(weights) == []
    shown = np.ones((4, 5), bool)
    shown[3, 0] = False
    for rows, said_of in ((1, None), (2, "11% of"), (3, "16% of")):  # of 19 visible cells
        few = torch.full((4, 5), 0.2)
        few[:rows] = few[3] = torch.tensor([0.0, 0.25, 0.25, 0.25, 0.25])
        said = warnings_of(few, attn_mask=shown)
        assert [one[:6] for one in said] == ([] if said_of is None else [said_of])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"scale": 0.5}, "scale"),
        ({"temperature": 2.0}, "temperature"),
        ({"softcap": 3.0}, "softcap"),
        ({"alibi": True}, "alibi"),
        ({"sinks": np.zeros(1)}, "sinks"),
    ],
)
def test_what_has_shaped_weights_is_not_asked_for_again(options: dict[str, Any], name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}: expected nothing beside weights, got it"):
        warnings_of(rows_of_weights(3, 3), **options)
    assert warnings_of(rows_of_weights(3, 3), temperature=1.0) == []


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(3), r"expected \(S_q, S_k\), .* got \(3,\)"),
        (torch.ones(1, 1, 1, 1, 1), r"got \(1, 1, 1, 1, 1\)"),
        (torch.ones(1, 1, dtype=torch.bool), "expected real numbers, got torch.bool"),
        (torch.ones(1, 1, dtype=torch.complex64), "expected real numbers, got torch.complex64"),
        (torch.tensor([[float("nan"), 1.0]]), "NaN"),
    ],
)
def test_what_cannot_be_weights(weights: torch.Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        warnings_of(weights)
