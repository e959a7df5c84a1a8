"""Stages block by block: equal to the whole, for any selection, with honest statistics."""

from __future__ import annotations

import math
from dataclasses import asdict, astuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import masks, positional_options, tensors

from attncli.analysis.compute import ask_stages
from attncli.attention import stages as stages_module
from attncli.attention import steps
from attncli.attention.options import AttentionOptions, Precision, Stage
from attncli.attention.problem import Problem, make_problem
from attncli.attention.qkv import project
from attncli.attention.stages import (
    StageResult,
    pool_blocks,
    select,
    shape_of,
    stage_blocks,
    stages_of,
)
from attncli.attention.steps import OutputProjection, project_output
from attncli.errors import UsageError

EVERYTHING = slice(None)
NAN, INF = math.nan, math.inf


def whole(problem: Problem) -> dict[Stage, torch.Tensor]:
    """Every stage in one go, from the steps, K and V repeated per query head: (B, H, S_q, ·)."""
    mask = problem.mask.moved(torch.as_tensor)
    shape = (problem.sizes.batch, problem.sizes.heads, problem.sizes.q_len, problem.sizes.k_len)
    group = problem.sizes.heads // problem.kv_heads
    visible = mask.visible(EVERYTHING, EVERYTHING, EVERYTHING, EVERYTHING).expand(shape)
    logits = steps.logits(
        problem.cast(problem.q) @ problem.cast(problem.k).repeat_interleave(group, 1).mT,
        scale=problem.scale,
        temperature=problem.temperature,
        softcap=problem.softcap,
        visible=visible,
        bias=mask.bias(EVERYTHING, EVERYTHING, EVERYTHING, EVERYTHING),
    )
    sinks = None if problem.sinks is None else problem.cast(problem.sinks)[:, None]
    weights = steps.softmax(logits.masked, visible, sinks).weights
    found = {Stage.SCORES: logits.scores, Stage.SCALED: logits.scaled, Stage.MASKED: logits.masked}
    if logits.capped is not None:
        found[Stage.CAPPED] = logits.capped
    found[Stage.WEIGHTS] = weights
    if problem.v is not None:
        v = problem.cast(problem.v).repeat_interleave(group, 1)
        found[Stage.OUTPUT] = steps.weighted_sum(weights, v, visible)
    return found


def gathered(
    problem: Problem,
    stages: list[Stage] | None = None,
    output_projection: OutputProjection | None = None,
    **chosen: Any,
) -> dict[Stage, StageResult]:
    """Results of the stages for a selection, block by block."""
    selection = select(problem, **chosen)
    wanted = stages_of(problem) if stages is None else stages
    results = {
        stage: StageResult(stage, shape_of(problem, stage, selection, output_projection))
        for stage in wanted
    }
    for block in stage_blocks(problem, wanted, selection, output_projection):
        results[block.stage].add(block, keep=True)
    return results


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def problem_of(*sizes: int, seed: int = 0, **options: Any) -> Problem:
    """B, H, H_kv, S_q, S_k, d_k, d_v, standard normal, float64."""
    batch, heads, kv_heads, q_len, k_len, dk, dv = sizes
    return make_problem(
        normal(batch, heads, q_len, dk, seed=seed),
        normal(batch, kv_heads, k_len, dk, seed=seed + 1),
        normal(batch, kv_heads, k_len, dv, seed=seed + 2),
        AttentionOptions(**options),
    )


def assert_values(result: StageResult, expected: torch.Tensor) -> None:
    assert result.values is not None
    assert result.shape == tuple(expected.shape)
    torch.testing.assert_close(result.values, expected, rtol=1e-12, atol=1e-12)


# ── blocks and selections ────────────────────────────────────────────────────────────────────


@given(data=st.data(), cells=st.sampled_from([1, 5, 12, 1 << 22]))
@settings(max_examples=60, deadline=None)
def test_blocks_of_any_size_make_the_whole(data: st.DataObject, cells: int) -> None:
    t = data.draw(tensors())
    options = data.draw(positional_options(t.cells))
    options["query_offset"] = tuple(options["query_offset"])
    if options["key_lengths"] is not None:
        options["key_lengths"] = tuple(options["key_lengths"])
    options["softcap"] = data.draw(st.none() | st.just(2.0))
    options["sinks"] = data.draw(st.none() | st.just(np.linspace(-1, 1, t.cells[1])))
    options["attn_mask"] = data.draw(masks(t.cells))
    problem = make_problem(t.q, t.k, t.v, AttentionOptions(**options))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages_module, "BLOCK_CELLS", cells)
        results = gathered(problem)
    expected = whole(problem)
    assert set(results) == set(expected)
    for stage, result in results.items():
        assert_values(result, expected[stage])


def test_a_block_is_as_large_as_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages_module, "BLOCK_CELLS", 12)
    problem = problem_of(1, 1, 1, 7, 5, 2, 2)
    blocks = list(stage_blocks(problem, [Stage.WEIGHTS], select(problem)))
    assert [(block.at, tuple(block.rows)) for block in blocks] == [
        (0, (0, 1)),
        (2, (2, 3)),
        (4, (4, 5)),
        (6, (6,)),
    ]


SELECTIONS: list[tuple[dict[str, Any], tuple[list[int], list[int], list[int]]]] = [
    ({}, ([0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4])),
    ({"rows": [-1, 0]}, ([0, 1], [0, 1, 2, 3], [4, 0])),
    ({"rows": [2, -3, 2, 1]}, ([0, 1], [0, 1, 2, 3], [2, 1])),
    ({"heads": [3, -4, 3]}, ([0, 1], [3, 0], [0, 1, 2, 3, 4])),
    ({"batches": [-1], "heads": [2], "rows": [4, 3]}, ([1], [2], [4, 3])),
    ({"rows": []}, ([0, 1], [0, 1, 2, 3], [])),
]


@pytest.mark.parametrize(("chosen", "indices"), SELECTIONS)
@pytest.mark.parametrize("cells", [6, 1 << 22])
def test_a_selection_is_a_part_of_the_whole(
    chosen: dict[str, Any],
    indices: tuple[list[int], list[int], list[int]],
    cells: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stages_module, "BLOCK_CELLS", cells)
    mask = np.random.default_rng(5).standard_normal((2, 4, 5, 6))
    options = {"causal": True, "query_offset": (1, 3), "alibi": True, "attn_mask": mask}
    problem = problem_of(2, 4, 2, 5, 6, 3, 2, **options)
    selection = select(problem, **chosen)
    batches, heads, rows = indices
    assert (list(selection.batches), list(selection.heads), list(selection.rows)) == indices
    expected = whole(problem)
    for stage, result in gathered(problem, **chosen).items():
        if rows:
            assert_values(result, expected[stage][batches][:, heads][:, :, rows])
        else:
            assert result.shape[2] == 0
            assert result.values is None


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"rows": [5]}, "rows: expected an index from -5 to 4, got 5"),
        ({"rows": [0, -6]}, "rows: expected an index from -5 to 4, got -6"),
        ({"heads": [4]}, "head_index: expected an index from -4 to 3, got 4"),
        ({"batches": [2]}, "batch_index: expected an index from -2 to 1, got 2"),
    ],
)
def test_an_index_beyond_its_axis_is_refused(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        select(problem_of(2, 4, 2, 5, 6, 3, 2), **chosen)
    assert str(raised.value) == message


def test_any_row_of_an_empty_axis_is_refused() -> None:
    with pytest.raises(UsageError, match="expected an index none, the axis is empty, got 0"):
        select(problem_of(1, 1, 1, 0, 3, 2, 2), rows=[0])


def test_inputs_as_stages() -> None:
    """q for the chosen rows; k and v once per head that the selection uses, all keys."""
    problem = problem_of(2, 4, 2, 5, 6, 3, 2)
    found = gathered(problem, [Stage.Q, Stage.K, Stage.V], heads=[3, 2, 0], rows=[4, 1])
    assert problem.v is not None
    assert_values(found[Stage.Q], problem.q[:, [3, 2, 0]][:, :, [4, 1]])
    assert_values(found[Stage.K], problem.k[:, [1, 0]])
    assert_values(found[Stage.V], problem.v[:, [1, 0]])


def test_the_order_of_stages() -> None:
    problem = problem_of(1, 1, 1, 2, 2, 2, 2, softcap=1.0)
    names = ["scores", "scaled", "capped", "masked", "weights", "output"]
    assert [str(stage) for stage in stages_of(problem)] == names
    blocks = stage_blocks(problem, stages_of(problem), select(problem))
    assert [str(block.stage) for block in blocks] == names
    without_values = make_problem(problem.q, problem.k, None, AttentionOptions())
    assert [str(s) for s in stages_of(without_values)] == ["scores", "scaled", "masked", "weights"]


def test_the_whole_matrix_is_never_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a million queries and keys a few rows are a few rows of work."""
    seen: list[int] = []
    plain = steps.logits

    def measured(scores: torch.Tensor, **shape: Any) -> steps.Logits:
        seen.append(scores.numel())
        return plain(scores, **shape)

    monkeypatch.setattr(stages_module.steps, "logits", measured)
    long = torch.ones(1_000_000, 1)
    problem = make_problem(long, long, None, AttentionOptions(causal=True))
    result = gathered(problem, [Stage.WEIGHTS], rows=[0, -1])[Stage.WEIGHTS]
    assert sum(seen) == 2_000_000
    assert result.n_masked == 999_999


# ── statistics ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("cells", [1, 7, 1 << 22])
def test_statistics_are_of_visible_cells_of_real_queries(
    cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages_module, "BLOCK_CELLS", cells)
    problem = problem_of(2, 2, 1, 5, 5, 3, 2, causal=True, query_lengths=(5, 2))
    visible = np.broadcast_to(np.tril(np.ones((5, 5), bool)), (2, 2, 5, 5)).copy()
    visible[1, :, 2:] = False
    for stage, expected in whole(problem).items():
        result = gathered(problem, [stage])[stage]
        counted = visible if stage.over_keys else np.broadcast_to(visible[..., :1], expected.shape)
        numbers = expected.numpy()[counted]
        record = asdict(result.numbers.result)
        assert record["min"] == pytest.approx(numbers.min(), abs=1e-12)
        assert record["max"] == pytest.approx(numbers.max(), abs=1e-12)
        assert record["mean"] == pytest.approx(numbers.mean(), abs=1e-12)
        assert record["std"] == pytest.approx(numbers.std(), abs=1e-12)
        assert result.n_masked == (2 * (10 + 4 + 3) if stage.over_keys else 0)


@pytest.mark.parametrize("cells", [7, 1 << 20])
def test_values_that_are_kept_can_be_measured_later(
    cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages_module, "BLOCK_CELLS", cells)
    problem = problem_of(2, 2, 1, 5, 5, 3, 2, causal=True, query_lengths=(5, 2))
    asked = ask_stages(problem, None, option="", batches=None, heads=[1, 0], rows=[4, 0, 2])
    at_once, later = asked.results(), asked.results()
    asked.gather(at_once)
    asked.gather(later, measure=False)
    for stage, result in at_once.items():
        assert later[stage].numbers.count == 0 < result.numbers.count
        expected = pytest.approx(asdict(result.statistics), abs=1e-12)
        assert asdict(later[stage].statistics) == expected
        assert asdict(later[stage].statistics) == expected  # measured once


def test_padded_queries_are_marked_in_their_batch() -> None:
    problem = problem_of(2, 2, 1, 4, 3, 3, 2, query_lengths=(4, 1))
    result = gathered(problem, [Stage.OUTPUT], rows=[3, 0])[Stage.OUTPUT]
    assert result.real is not None
    assert result.real.tolist() == [[True, True], [False, True]]


def test_all_queries_padded_leaves_no_statistics() -> None:
    problem = problem_of(1, 1, 1, 3, 3, 2, 2, query_lengths=(0,))
    result = gathered(problem, [Stage.WEIGHTS])[Stage.WEIGHTS]
    assert result.n_masked == 0
    assert set(astuple(result.numbers.result)) == {0, None}


def test_nonfinite_cells_are_counted_and_left_out_of_moments() -> None:
    q = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    k = torch.tensor([[NAN, 0], [INF, 0], [-INF, 0], [4, 0], [2, 0], [NAN, 0], [8, 0]])
    options = AttentionOptions(scale=1.0, attn_mask=np.array([1, 1, 1, 1, 1, 0, 0]))
    problem = make_problem(q, k.double(), None, options, allow_nonfinite=True)
    result = gathered(problem, [Stage.MASKED])[Stage.MASKED]
    counts = {"n_nan": 1, "n_posinf": 1, "n_neginf": 1, "n_finite": 2}
    moments = {"min": 2.0, "max": 4.0, "mean": 3.0, "std": 1.0}
    assert asdict(result.numbers.result) == counts | moments
    assert result.n_masked == 2


@pytest.mark.parametrize(("q_len", "k_len"), [(0, 4), (4, 0), (0, 0)])
def test_empty_axes(q_len: int, k_len: int) -> None:
    problem = problem_of(2, 2, 1, q_len, k_len, 3, 2)
    results = gathered(problem)
    for stage, result in results.items():
        columns = k_len if stage.over_keys else 2
        assert result.shape == (2, 2, q_len, columns)
        assert result.n_masked == 0
    output = results[Stage.OUTPUT]
    if q_len:
        assert output.values is not None
        assert (output.values == 0).all()
        assert output.numbers.result.max == 0.0
    else:
        assert output.numbers.count == 0


# ── dtypes ───────────────────────────────────────────────────────────────────────────────────

FLOAT8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
INTEGERS = ["uint8", "int8", "int16", "int32", "int64", "uint16", "uint32"]


@pytest.mark.parametrize("name", [*FLOAT8, "float16", "bfloat16", *INTEGERS])
@pytest.mark.parametrize("rows", [None, [-1, 0]])
def test_every_dtype_is_converted_exactly(name: str, rows: list[int] | None) -> None:
    numbers = torch.randint(0, 100, (3, 5, 4), generator=torch.Generator().manual_seed(0))
    stored = numbers.to(getattr(torch, name))
    exact = stored.to(torch.float64)
    options = AttentionOptions()
    found = gathered(make_problem(stored, stored, stored, options), rows=rows)
    expected = gathered(make_problem(exact, exact, exact, options), rows=rows)
    for stage, result in expected.items():
        assert result.values is not None
        assert result.values.dtype == torch.float64
        assert_values(found[stage], result.values)


def test_integers_never_wrap() -> None:
    """100 · 100 · 4 is far beyond int8, and beyond what float16 holds exactly."""
    for dtype in (torch.int8, torch.float16):
        hundreds = torch.full((2, 4), 100, dtype=dtype)
        result = gathered(make_problem(hundreds, hundreds, None, AttentionOptions()))
        assert result[Stage.SCORES].numbers.result.min == 40_000


def test_float32_scores_with_a_large_mean_keep_their_variance() -> None:
    q, k = torch.tensor([[1.0]]), torch.tensor([[10_000.0], [10_001.0], [10_002.0]])
    problem = make_problem(q, k, None, AttentionOptions(), precision=Precision.FLOAT32)
    result = gathered(problem, [Stage.SCORES])[Stage.SCORES]
    assert result.values is not None
    assert result.values.dtype == torch.float32
    assert result.statistics.std is not None
    assert result.statistics.std**2 == pytest.approx(0.666667, abs=6e-7)


# ── projections ──────────────────────────────────────────────────────────────────────────────


def test_the_projected_stage_is_a_plain_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages_module, "BLOCK_CELLS", 12)
    problem = problem_of(2, 4, 2, 5, 6, 3, 2, causal=True, query_offset=(1,))
    weight = normal(4 * 2, 7, seed=9)
    wanted = [Stage.OUTPUT, Stage.PROJECTED]
    found = gathered(problem, wanted, OutputProjection(weight), rows=[3, 0], heads=[1])
    output = whole(problem)[Stage.OUTPUT]  # (B, H, S_q, d_v)
    packed = torch.cat([output[:, head] for head in range(4)], dim=-1)  # (B, S_q, H·d_v)
    assert_values(found[Stage.PROJECTED], (packed @ weight)[:, None, [3, 0]])
    assert_values(found[Stage.OUTPUT], output[:, [1]][:, :, [3, 0]])


def test_projection_of_the_output_alone() -> None:
    output, weight = normal(2, 3, 5, 4), normal(12, 6, seed=1)
    found = project_output(output, OutputProjection(weight))
    assert found.shape == (2, 1, 5, 6)
    for batch, row in np.ndindex(2, 5):
        expected = torch.cat([output[batch, head, row] for head in range(3)]) @ weight
        torch.testing.assert_close(found[batch, 0, row], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rank", [2, 3])
def test_projection_of_the_input(rank: int) -> None:
    x = normal(2, 5, 6)[: 1 if rank == 2 else 2]
    weights = {"wq": normal(6, 12, seed=1), "wk": normal(6, 6, seed=2), "wv": normal(6, 8, seed=3)}
    found = project(x[0] if rank == 2 else x, weights, heads=4, kv_heads=2)
    for role, heads, width in (("q", 4, 3), ("k", 2, 3), ("v", 2, 4)):
        assert found[role].shape == (len(x), heads, 5, width)
        for head in range(heads):
            columns = weights[f"w{role}"][:, head * width : (head + 1) * width]
            torch.testing.assert_close(found[role][:, head], x @ columns, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("cells", [1, 22, 1 << 22])
def test_pooled_matrices_are_means_over_rectangles(
    cells: int, largest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every stage, hidden cells left out of masked scores, and padded queries of all."""
    monkeypatch.setattr(stages_module, "BLOCK_CELLS", cells)
    options = {"causal": True, "query_offset": 3, "query_lengths": (7, 5)}
    problem = problem_of(2, 2, 1, 7, 11, 3, 4, **options)
    problem.k[1, 0, 2] = INF
    rows, columns = np.array([0, 1, 4, 6, 7]), np.array([0, 2, 7, 11])
    everything = whole(problem)
    seen = np.tri(7, 11, 3, dtype=bool)
    for stage in (Stage.SCORES, Stage.MASKED, Stage.WEIGHTS):
        blocks = stage_blocks(problem, [stage], select(problem))
        found = list(pool_blocks(blocks, rows, columns, largest=largest))
        assert [(one.batch, one.head, one.stage) for one in found] == [
            (batch, head, stage) for batch in range(2) for head in range(2)
        ]
        for one in found:
            values = everything[stage][one.batch, one.head].numpy()
            real = np.arange(7)[:, None] < (7, 5)[one.batch]
            shown = real & (seen if stage is not Stage.SCORES else True) & np.ones((7, 11), bool)
            counted = shown if stage is Stage.MASKED else real & np.ones((7, 11), bool)
            assert one.nonfinite == (counted & ~np.isfinite(values)).sum()
            for (r, c), value in np.ndenumerate(one.values):
                box = slice(rows[r], rows[r + 1]), slice(columns[c], columns[c + 1])
                some = values[box][(counted & np.isfinite(values))[box]]
                expected = NAN if not some.size else some.max() if largest else some.mean()
                assert value == pytest.approx(expected, nan_ok=True)
                assert one.hidden[r, c] == (not shown[box].any())
            for r, count in enumerate(one.keys_seen):
                assert count == pytest.approx(shown[rows[r] : rows[r + 1]].sum(1).mean())


def test_inputs_count_as_real_where_their_batch_has_queries() -> None:
    problem = problem_of(2, 2, 1, 5, 6, 3, 4, query_lengths=(5, 2))
    chosen = select(problem, rows=range(1, 4))
    real = {0: [True] * 3, 1: [True, False, False]}
    for block in stage_blocks(problem, [Stage.Q, Stage.K, Stage.V], chosen):
        expected = real[block.batch] if block.stage is Stage.Q else [True] * 6
        assert block.real.tolist() == expected
        tensor = getattr(problem, block.stage.value)
        rows = slice(1, 4) if block.stage is Stage.Q else slice(None)
        assert torch.equal(block.values, tensor[block.batch, block.head, rows].to(block.values))


@pytest.mark.parametrize("cells", [1, 11, 1 << 22])
def test_projected_outputs_of_any_rows_and_blocks(
    cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages_module, "BLOCK_CELLS", cells)
    problem = problem_of(2, 2, 1, 6, 5, 3, 4)
    projection = OutputProjection(normal(8, 7, seed=9), normal(7, seed=10))
    packed = whole(problem)[Stage.OUTPUT].transpose(1, 2).flatten(2)
    expected = (packed @ projection.weight + projection.bias)[:, None]
    found = gathered(problem, [Stage.PROJECTED], projection)
    assert_values(found[Stage.PROJECTED], expected)
    some = gathered(problem, [Stage.PROJECTED], projection, rows=range(1, 5))
    assert_values(some[Stage.PROJECTED], expected[:, :, 1:5])
