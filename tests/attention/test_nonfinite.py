"""Where NaN and infinities enter, whom they reach, and that they reach nobody else."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import masks, positional_options, tensors

from attncli.attention import nonfinite
from attncli.attention.nonfinite import find_broken, rows_that_see
from attncli.attention.options import AttentionOptions, Precision, Stage
from attncli.attention.problem import Problem, make_problem, score_warnings
from attncli.attention.qkv import problem_of_weights
from attncli.attention.stages import select, stage_blocks, stages_of
from attncli.attention.streaming.stream import HeadRows, Wanted, stream_rows
from attncli.attention.variance.moments import score_moments

INF, NAN = math.inf, math.nan


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def let_through(q: Any, k: Any, v: Any = None, precision: str = "auto", **options: Any) -> Problem:
    chosen = AttentionOptions(**options)
    return make_problem(q, k, v, chosen, precision=Precision(precision), allow_nonfinite=True)


@pytest.mark.parametrize("rows", [7, 1 << 21])
def test_what_is_broken_is_counted_and_named_in_order(rows: int) -> None:
    """Also where it takes several looks."""
    tensor = torch.zeros(1, 2, rows, 2)
    for index, value in {(0, 0, rows - 1, 1): NAN, (0, 1, 0, 0): INF, (0, 1, 2, 1): -INF}.items():
        tensor[index] = value
    found = find_broken(tensor, "k")
    assert found is not None
    assert (found.nan, found.posinf, found.neginf) == (1, 1, 1)
    assert found.first == ((0, 0, rows - 1, 1), (0, 1, 0, 0), (0, 1, 2, 1))
    assert np.argwhere(found.rows).tolist() == [[0, 0, rows - 1], [0, 1, 0], [0, 1, 2]]
    assert find_broken(torch.zeros(2, 2), "q") is None
    assert find_broken(torch.ones(2, 2, dtype=torch.int64), "q") is None


@pytest.mark.parametrize(
    ("place", "options", "says"),
    [
        (("q", (0, 1, 2, 0)), {}, "NaN enters at q[0, 1, 2, 0] (1 NaN); 1 of 24 rows of scores"),
        (("k", (0, 1, 4, 3)), {"causal": True}, "at k[0, 1, 4, 3] (1 NaN); 4 of 24 rows of scores"),
        (
            ("v", (0, 0, 0, 0)),
            {"causal": True},
            "at v[0, 0, 0, 0] (1 NaN); 12 of 24 rows of output",
        ),
        (("k", (0, 0, 5, 0)), {"key_lengths": [5]}, "0 of 24 rows of scores affected"),
        (("q", (0, 0, 5, 0)), {"query_lengths": [5], "query_offset": 0}, "0 of 20 rows of scores"),
        (
            ("k", (0, 0, 1, 0)),
            {"causal": True, "left_window": 1, "sink_window": 2},
            "(1 NaN); 10 of 24 rows of scores",
        ),
        (("k", (0, 0, 1, 0)), {"attn_mask": np.eye(6, dtype=bool)}, "2 of 24 rows of scores"),
        (("k", (0, 0, 1, 0)), {"attn_mask": np.arange(4)[:, None, None] > 0}, "6 of 24 rows of"),
        (("q", (0, 0, 1, 0)), {"attn_mask": np.arange(6)[:, None] > 1}, "0 of 24 rows of scores"),
    ],
)
def test_the_origin_is_traced(
    place: tuple[str, tuple[int, ...]], options: dict[str, Any], says: str
) -> None:
    """4 heads, 2 key heads, 6 queries and keys."""
    given_tensors = {"q": normal(1, 4, 6, 4), "k": normal(1, 2, 6, 4), "v": normal(1, 2, 6, 4)}
    role, index = place
    given_tensors[role][index] = NAN
    (said,) = let_through(**given_tensors, **options).warnings
    assert says in said


def test_only_the_first_cells_are_named() -> None:
    q = normal(1, 1, 4, 2)
    q[..., 1:, :] = NAN
    q[..., 3, 1] = INF
    (said,) = let_through(q, normal(1, 1, 4, 2)).warnings
    first = "NaN and inf enter at q[0, 0, 1, 0], q[0, 0, 1, 1], q[0, 0, 2, 0] and 3 more"
    assert said.startswith(f"{first} (5 NaN and 1 inf); 3 of 4 rows")


@pytest.mark.parametrize(
    ("q", "k", "options", "stage"),
    [
        ([[INF, 0.0]], [[1.0, 0.0]], {}, "weights, from ∞ − ∞"),
        ([[INF, 0.0]], [[0.0, 1.0]], {}, "scores, from ∞ − ∞ or 0 · ∞"),
        ([[INF, 1.0]], [[1.0, -INF]], {}, "scores"),
        ([[INF, 0.0]], [[1.0, 0.0]], {"scale": 0.0}, "scaled, from 0 · ∞"),
    ],
)
def test_the_stage_at_which_infinities_make_a_nan_is_named(
    q: Any, k: Any, options: dict[str, Any], stage: str
) -> None:
    problem = let_through(torch.tensor(q), torch.tensor(k), **options)
    assert f"NaN first arises in {stage}" in problem.warnings[0]
    found = {b.stage: b.values for b in stage_blocks(problem, stages_of(problem), select(problem))}
    name = stage.split(",")[0]
    before = [each for each in found if each in list(Stage)[: list(Stage).index(Stage(name))]]
    assert bool(torch.isnan(found[Stage(name)]).any())
    assert not any(bool(torch.isnan(found[each]).any()) for each in before)


@pytest.mark.parametrize("value", [-INF, INF])
def test_infinities_that_make_no_nan_are_told_without_one(value: float) -> None:
    q, k = torch.tensor([[1.0]]), torch.tensor([[-1.0], [value]])
    said = let_through(q, k, softcap=5.0).warnings
    assert "NaN first" not in said[0]
    assert ("NaN first" in let_through(q, k).warnings[0]) == (value > 0)


def test_weights_are_traced_row_by_row() -> None:
    weights = torch.full((1, 2, 3, 3), 1 / 3)
    weights[0, 1, 0, 2] = NAN
    weights[0, 1, 2, 2] = NAN
    for causal, count in ((False, 2), (True, 1)):
        options = AttentionOptions(causal=causal)
        said = problem_of_weights(weights, options, allow_nonfinite=True).warnings
        first = "NaN enters at weights[0, 1, 0, 2], weights[0, 1, 2, 2] (2 NaN)"
        assert f"{first}; {count} of 6 rows affected" in said


@pytest.mark.parametrize(
    ("scale", "precision", "scaled", "scores"),
    [
        (1.0, "float32", True, True),
        (1e-39, "float32", False, True),
        (1.0, "float64", False, False),
        (1e300, "float64", True, False),
        (-1e300, "float64", True, False),
    ],
)
def test_overflow_in_the_precision_asked_for_is_said(
    scale: float, precision: str, scaled: bool, scores: bool
) -> None:
    q, k = torch.tensor([[1.0, 0], [1e20, 0]]), torch.tensor([[1e19, 0], [3e19, 0]])
    problem = make_problem(
        q, k, None, AttentionOptions(scale=scale), precision=Precision(precision)
    )
    first = f"scaled scores overflow {precision}, first at query 1 of batch 0, head 0"
    first = first.replace("query 1", "query 0") if abs(scale) > 1 else first
    assert any(text.startswith(first) for text in problem.warnings) == scaled
    assert bool(score_warnings(problem)) == scores
    found = {b.stage: b.values for b in stage_blocks(problem, stages_of(problem), select(problem))}
    assert bool(torch.isinf(found[Stage.SCORES]).any()) == scores
    assert bool(torch.isinf(found[Stage.SCALED]).any()) == scaled
    if not scaled:
        exact = (q.double() @ k.double().T * scale).softmax(-1)
        torch.testing.assert_close(found[Stage.WEIGHTS].double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("place", [(0, 0, 2), (1, 3, 0), (1, 1, 4)])
def test_the_first_logit_that_overflows_is_named(place: tuple[int, int, int]) -> None:
    """In any batch, head and row, between rows that come near to it and do not."""
    batch, head, row = place
    q, k = torch.full((2, 4, 5, 2), 1e18), torch.full((2, 2, 3, 2), 1e18)
    q[..., 1], k[..., 1] = 0.0, 0.0
    q[batch, head, row, 0] = -1e21  # times 1e18 is beyond float32's 3.4e38
    options = AttentionOptions(scale=1.0)
    problem = make_problem(q, k, None, options, precision=Precision.FLOAT32)
    where = f"first at query {row} of batch {batch}, head {head}; precision=float64 holds more"
    assert problem.warnings == (f"scaled scores overflow float32, {where}",)
    for scale in (0.3, 0.35):
        scaled = AttentionOptions(scale=scale)
        found = make_problem(q, k, None, scaled, precision=Precision.FLOAT32).warnings
        assert bool(found) == (scale > 0.3402823)
    each = tuple(1.0 if one == head else 0.1 for one in range(4))
    apart = AttentionOptions(scale=each)
    assert make_problem(q, k, None, apart, precision=Precision.FLOAT32).warnings
    others = AttentionOptions(scale=tuple(1.1 - one for one in each))
    assert not make_problem(q, k, None, others, precision=Precision.FLOAT32).warnings


def test_sums_of_products_overflow_too() -> None:
    """Of 4 products of 1e38, none of which overflows by itself."""
    q, k = torch.full((2, 4), 1e19), torch.full((3, 4), 1e19)
    k[:2, 1:] = 0.0
    options = AttentionOptions(scale=1.0)
    problem = make_problem(q, k, None, options, precision=Precision.FLOAT32)
    assert "first at query 0 of batch 0, head 0" in problem.warnings[0]
    fine = make_problem(q, k[:2], None, options, precision=Precision.FLOAT32)
    assert fine.warnings == ()
    # Beside a number that is none the others count.
    q[1, 0] = NAN
    beside = let_through(q, k, precision="float32", scale=1.0)
    assert any("scaled scores overflow float32" in said for said in beside.warnings)


def test_a_search_for_overflow_that_gives_up_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each query might overflow by its size alone, and none does."""
    q, k = torch.tensor([[1e20, 0.0]] * 3), torch.tensor([[0.0, 1e20]] * 3)
    assert let_through(q, k, precision="float32").warnings == ()
    monkeypatch.setattr(nonfinite, "MOST_CELLS", 1)
    (said,) = let_through(q, k, precision="float32").warnings
    assert said.startswith("scaled scores may overflow float32: ")


def test_hidden_cells_overflow_for_nobody() -> None:
    q, k = torch.tensor([[1.0], [1e20]]), torch.tensor([[1.0], [1e20]])
    options = {"precision": "float32", "attn_mask": np.array([[True, True], [True, False]])}
    assert not let_through(q, k, **options).warnings
    assert let_through(q, k, precision="float32").warnings


def test_outputs_of_huge_values_do_not_overflow_in_tiles() -> None:
    """A mean of numbers is no larger than they are, though their sum is."""
    q, k = torch.zeros(3, 2), torch.zeros(1000, 2)
    v = torch.full((1000, 1), 3e38)
    v[0] = -1e38
    problem = let_through(q, k, v, precision="float32")
    (rows,) = stream_rows(problem, Wanted(output=True))
    assert rows.output is not None
    exact = (999 * 3e38 - 1e38) / 1000
    assert rows.output.flatten().tolist() == pytest.approx([exact] * 3, rel=1e-5)


@st.composite
def planted(draw: st.DrawFn) -> tuple[Any, dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors, the same with NaN and infinities in some rows, and options."""
    clean = draw(tensors())
    options = draw(positional_options(clean.cells))
    if (mask := draw(masks(clean.cells))) is not None:
        options["attn_mask"] = mask
    if draw(st.booleans()):
        options["sinks"] = np.zeros(clean.cells[1])
    if draw(st.booleans()):
        options["softcap"] = 5.0
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    broken = {role: getattr(clean, role).clone() for role in "qkv"}
    for role in draw(st.lists(st.sampled_from("qkv"), min_size=1, max_size=3, unique=True)):
        for _ in range(draw(st.integers(1, 3))):
            index = tuple(int(rng.integers(size)) for size in broken[role].shape)
            broken[role][index] = draw(st.sampled_from([NAN, INF, -INF]))
    return clean, broken, options


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, equal_nan=True)


@settings(max_examples=60)
@given(planted())
def test_rows_that_see_nothing_broken_are_those_of_a_clean_run(
    drawn: tuple[Any, dict[str, torch.Tensor], dict[str, Any]],
) -> None:
    """In the reference, in tiles, and, of keys that no broken row sees, in their mass."""
    clean, broken, options = drawn
    chosen = AttentionOptions(**options)
    before = make_problem(clean.q, clean.k, clean.v, chosen)
    after = make_problem(broken["q"], broken["k"], broken["v"], chosen, allow_nonfinite=True)
    bad = {role: ~torch.isfinite(broken[role]).all(-1) for role in "qkv"}  # (B, H, S)
    plain = [_reference(problem) for problem in (before, after)]
    tiles = [list(stream_rows(one, Wanted(per_key=True, top_key=True))) for one in (before, after)]
    for one, other in zip(*tiles, strict=True):
        shared, place = after.kv_head(one.head), (one.batch, one.head)
        seen = torch.as_tensor(np.array(after.mask.head(*place).cells(slice(None))))[
            : len(one.queries)
        ]
        own = bad["q"][place][: len(seen)] & seen.any(-1)
        logits_broken = own | (seen & bad["k"][one.batch, shared]).any(-1)
        output_broken = logits_broken | (seen & bad["v"][one.batch, shared]).any(-1)
        for stage in (Stage.WEIGHTS, Stage.MASKED, Stage.OUTPUT):
            sound = ~(output_broken if stage is Stage.OUTPUT else logits_broken)
            first, second = (found[(*place, stage)][: len(seen)][sound] for found in plain)
            close(second, first)
        _same_rows(one, other, ~logits_broken)
        whole = ~(seen & logits_broken[:, None]).any(0)  # of which no broken row sees the key
        assert one.received is not None
        assert other.received is not None
        close(other.received.mass[whole], one.received.mass[whole])
        assert other.received.queries.tolist() == one.received.queries.tolist()
        if not bool(logits_broken.any()):
            _same_moments(before, after, place)


def _reference(problem: Problem) -> dict[Any, torch.Tensor]:
    stages = [Stage.MASKED, Stage.WEIGHTS, Stage.OUTPUT]
    blocks = stage_blocks(problem, stages, select(problem))
    return {(block.batch, block.head, block.stage): block.values for block in blocks}


def _same_rows(one: HeadRows, other: HeadRows, sound: torch.Tensor) -> None:
    for name in ("entropy_nats", "max_weight", "max_logit", "logsumexp", "sink_mass", "distance"):
        first, second = getattr(one, name), getattr(other, name)
        if first is not None:
            close(second[sound], first[sound])
    assert one.top_key is not None
    assert other.top_key is not None
    assert other.top_key[sound].tolist() == one.top_key[sound].tolist()
    assert not bool((other.nonfinite & sound).any() & ~one.nonfinite.any())


def _same_moments(before: Problem, after: Problem, place: tuple[int, int]) -> None:
    """Of the visible cells, among which nothing is broken."""
    one, other = score_moments(before, *place), score_moments(after, *place)
    assert other.cells == one.cells
    for name in ("mean", "var"):
        expected = getattr(one, name)
        found = getattr(other, name)
        assert found == (None if expected is None else pytest.approx(expected, 1e-6, abs=1e-9))


@given(st.data())
def test_who_sees_some_keys_is_what_the_cells_say(data: st.DataObject) -> None:
    clean = data.draw(tensors())
    options = data.draw(positional_options(clean.cells))
    problem = make_problem(clean.q, clean.k, None, AttentionOptions(**options))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    keys = rng.random(clean.cells[3]) < 0.4
    keys[0] = True
    for batch, head in np.ndindex(*clean.cells[:2]):
        view = problem.mask.head(batch, head)
        expected = (view.cells(slice(0, view.rows)) & keys).any(-1)
        assert rows_that_see(view, keys).tolist() == expected.tolist()


def test_columns_of_a_mask_file_are_counted_over_all_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks of two rows: what one of them counts is no less than what the next one adds."""
    monkeypatch.setattr("attncli.attention.masks.mask.BLOCK_CELLS", 10)
    keep = np.random.default_rng(0).random((7, 5)) < 0.5
    problem = let_through(torch.zeros(7, 2), torch.zeros(5, 2), attn_mask=keep, query_offset=0)
    found = problem.mask.head(0, 0).marginals
    assert found.used.tolist() == keep.sum(0).tolist()
    assert found.counts.tolist() == keep.sum(1).tolist()
