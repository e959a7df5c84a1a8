"""The streaming engine against the plain steps, on random problems over every option."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncli.attention import stages, steps
from attncli.attention.options import AttentionOptions, Corner, MaskTrue, Stage
from attncli.attention.problem import Precision, Problem, make_problem
from attncli.attention.stages import blocks_of, select
from attncli.attention.streaming import rows as row_statistics
from attncli.attention.streaming import slant, stream, tiles
from attncli.attention.streaming.stream import HeadRows, Wanted, planned_cells, stream_rows

EVERYTHING = Wanted(top_key=True, output=True, per_key=True, sink_keys=2)
LOCAL_WINDOW = 2


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(monkeypatch, 4, 3)


def use_tiles(monkeypatch: pytest.MonkeyPatch, rows: int, keys: int) -> None:
    """Make tiles small, so that a few queries and keys fill many of them."""
    for module in (slant, stream, tiles):
        monkeypatch.setattr(module, "TILE_ROWS", rows)
        monkeypatch.setattr(module, "TILE_KEYS", keys)
    for name in ("BAND_ROWS", "SHARE_ROWS", "TILE_ROWS"):
        monkeypatch.setattr(row_statistics, name, rows)
    monkeypatch.setattr(row_statistics, "LOCAL_WINDOW", LOCAL_WINDOW)
    for module in (slant, stream):
        monkeypatch.setattr(module, "TILE_CELLS", rows * keys)


@dataclass(frozen=True)
class Expected:
    """All of one head by the reference: the whole matrices."""

    masked: torch.Tensor
    visible: torch.Tensor
    weights: torch.Tensor
    sink: torch.Tensor
    logsumexp: torch.Tensor
    output: torch.Tensor | None


def reference(problem: Problem, batch: int, head: int) -> Expected:
    mask = problem.mask.moved(torch.as_tensor)
    one_batch, one_head, everything = slice(batch, batch + 1), slice(head, head + 1), slice(None)
    real = mask.real_queries(batch)
    visible = mask.visible(one_batch, one_head, everything, everything)[0, 0, :real]
    bias = mask.bias(one_batch, one_head, everything, everything)
    shared = problem.kv_head(head)
    found = steps.logits(
        problem.q[batch, head, :real].double() @ problem.k[batch, shared].double().T,
        scale=problem.scale,
        temperature=problem.temperature,
        softcap=problem.softcap,
        visible=visible,
        bias=None if bias is None else bias[0, 0, :real].double(),
    )
    sink = None if problem.sinks is None else problem.sinks[head]
    soft = steps.softmax(found.masked, found.visible, sink)
    output = None
    if problem.v is not None:
        output = steps.weighted_sum(soft.weights, problem.v[batch, shared].double(), found.visible)
    return Expected(found.masked, found.visible, soft.weights, soft.sink, soft.logsumexp, output)


def assert_agrees(problem: Problem, rows: HeadRows, wanted: Wanted, atol: float) -> None:
    """Every field of one head is what the whole matrices say."""
    expected = reference(problem, rows.batch, rows.head)
    keys = expected.visible.sum(-1)
    empty = keys == 0
    assert torch.equal(rows.keys, keys)
    assert torch.equal(rows.empty, empty)
    some = ~empty
    outcomes = torch.cat([expected.weights, expected.sink[:, None]], 1)
    entropy = -torch.special.xlogy(outcomes, outcomes).sum(-1)
    top, place = _largest(expected.masked)
    pairs = {
        "entropy_nats": entropy,
        "max_weight": _largest(expected.weights)[0],
        "max_logit": top,
        "logsumexp": expected.logsumexp,
        "sink_mass": expected.weights[:, : wanted.sink_keys].sum(-1),
    }
    if problem.mask.offset is not None:
        everything = slice(None)
        distance = problem.mask.distance(everything, everything, everything)
        distance = torch.as_tensor(distance[rows.batch if len(distance) > 1 else 0, 0])
        distance = distance[: len(keys)]
        pairs["distance"] = (expected.weights * distance).sum(-1)
        local = expected.weights * (distance <= LOCAL_WINDOW)
        assert rows.shares.local is not None
        close(rows.shares.local.weight[some], local.sum(-1)[some], atol)
        near = expected.visible & (distance <= LOCAL_WINDOW)
        assert torch.equal(rows.shares.local.seen, near.sum(-1))
        assert rows.shares.own is not None
        own = expected.weights * (distance == 0)
        close(rows.shares.own.weight[some], own.sum(-1)[some], atol)
    else:
        assert rows.distance is None
        assert rows.shares.own is None
    for name, values in pairs.items():
        found = getattr(rows, name)
        assert bool(torch.isnan(found[empty]).all()), name
        close(found[some], values[some], atol, name)
    limit = torch.log(rows.outcomes[some].double())
    assert bool((rows.entropy_nats[some] >= 0).all())
    assert not bool(torch.signbit(rows.entropy_nats[some]).any())
    assert bool((rows.entropy_nats[some] <= limit).all())
    if rows.sink_weight is not None:
        close(rows.sink_weight[some], expected.sink[some], atol)
    if rows.output is not None:
        assert expected.output is not None
        close(rows.output.double(), expected.output, atol)
    if rows.received is not None:
        close(rows.received.mass, expected.weights.sum(0), atol * 10)
        assert torch.equal(rows.received.queries, expected.visible.sum(0))
    if rows.top_key is not None and atol < 1e-9:
        assert torch.equal(rows.top_key[some], place[some])
        assert bool((rows.top_key[empty] == -1).all())
        if bool(some.any()):
            assert rows.max_logit_query == int(top.argmax())
            assert rows.max_logit_key == int(place[int(top.argmax())])


def _largest(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if values.shape[1] == 0:
        return values.new_full((len(values),), -torch.inf), torch.zeros(len(values))
    return values.max(1)


def close(found: torch.Tensor, expected: torch.Tensor, atol: float, what: str = "") -> None:
    torch.testing.assert_close(
        found,
        expected.to(found.dtype),
        rtol=atol,
        atol=atol,
        equal_nan=True,
        msg=lambda m: what + m,
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, AttentionOptions]:
    kv_heads, repeat = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    batch, heads = draw(st.integers(1, 2)), kv_heads * repeat
    q_len = draw(st.integers(0, 11))
    k_len = q_len if draw(st.booleans()) else draw(st.integers(0, 11))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    causal = draw(st.booleans())
    offsets = st.one_of(
        st.sampled_from(list(Corner)),
        st.integers(-4, 6),
        st.tuples(*[st.integers(-3, 5)] * batch),
    )

    def some(strategy: st.SearchStrategy) -> object:
        return draw(st.one_of(st.none(), st.none(), strategy))

    options = AttentionOptions(
        scale=some(st.sampled_from([0.0, -0.7, 1.5])),
        temperature=draw(st.sampled_from([1.0, 0.3])),
        softcap=some(st.just(1.3)),
        causal=causal,
        query_offset=draw(offsets) if q_len != k_len or draw(st.booleans()) else None,
        left_window=some(st.integers(0, 5)),
        right_window=some(st.integers(0, 5)),
        prefix=some(st.integers(0, 4)) if causal else None,
        key_lengths=some(st.tuples(*[st.integers(0, k_len)] * batch)),
        query_lengths=some(st.tuples(*[st.integers(0, q_len)] * batch)),
        key_padding=draw_padding(draw, rng, (batch, k_len)),
        attn_mask=draw_mask(draw, rng, (batch, heads, q_len, k_len)),
        mask_true=MaskTrue.KEEP,
        segments=draw_segments(draw, rng, (batch, k_len)),
        alibi=draw(st.booleans()),
        sinks=rng.standard_normal(heads) if draw(st.booleans()) else None,
    )
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    q, k, v = (
        torch.from_numpy(rng.standard_normal(shape) * 2).to(torch.float32)
        for shape in (
            (batch, heads, q_len, 4),
            (batch, kv_heads, k_len, 4),
            (batch, kv_heads, k_len, 3),
        )
    )
    precision = Precision.FLOAT64 if dtype == torch.float64 else Precision.FLOAT32
    return make_problem(q, k, v, options, precision=precision), options


def draw_segments(
    draw: st.DrawFn, rng: np.random.Generator, shape: tuple[int, int]
) -> np.ndarray | None:
    kind = draw(st.sampled_from(["none", "in one piece", "scattered"]))
    ids = rng.integers(0, 4, shape)
    return {"none": None, "in one piece": np.sort(ids, 1), "scattered": ids}[kind]


def draw_padding(
    draw: st.DrawFn, rng: np.random.Generator, shape: tuple[int, int]
) -> np.ndarray | None:
    kind = draw(st.sampled_from(["none", "left", "scattered"]))
    left = np.arange(shape[1]) >= rng.integers(0, shape[1] + 1, (shape[0], 1))
    return {"none": None, "left": left, "scattered": rng.random(shape) < 0.7}[kind]


def draw_mask(
    draw: st.DrawFn, rng: np.random.Generator, full: tuple[int, ...]
) -> np.ndarray | None:
    kind = draw(st.sampled_from(["none", "none", "bool", "added"]))
    if kind == "none":
        return None
    shape = tuple(size if draw(st.booleans()) else 1 for size in full)
    if kind == "bool":
        return rng.random(shape) < 0.6
    added = rng.standard_normal(shape)
    return np.where(rng.random(shape) < 0.3, -np.inf, added)


@pytest.mark.usefixtures("small_tiles")
class TestAgainstSteps:
    """With tiles of 4 × 3 cells."""

    @settings(max_examples=60, deadline=None)
    @given(problems())
    def test_every_option(self, drawn: tuple[Problem, AttentionOptions]) -> None:
        problem, _ = drawn
        atol = 1e-11 if problem.dtype == torch.float64 else 2e-5
        heads = list(stream_rows(problem, EVERYTHING))
        pairs = [(b, h) for b in range(problem.sizes.batch) for h in range(problem.sizes.heads)]
        assert [(rows.batch, rows.head) for rows in heads] == pairs
        for rows in heads:
            assert_agrees(problem, rows, EVERYTHING, atol)


def hard_problem(**options: object) -> Problem:
    rng = np.random.default_rng(6)
    q, k, v = (torch.from_numpy(rng.standard_normal((1, 2, 10, 4))) for _ in range(3))
    return make_problem(q, k, v, AttentionOptions(**options), allow_nonfinite=True)  # type: ignore[arg-type]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
class TestNonfinite:
    def test_hidden_keys_give_nothing(self, value: float) -> None:
        problem = hard_problem(key_lengths=(7,), causal=True)
        clean = list(stream_rows(problem, EVERYTHING))
        problem.k[..., 7:, :] = value
        for rows, same in zip(stream_rows(problem, EVERYTHING), clean, strict=True):
            assert not bool(rows.nonfinite.any())
            assert_agrees(problem, rows, EVERYTHING, 1e-11)
            assert rows.output is not None
            torch.testing.assert_close(rows.output, same.output)

    def test_hidden_values_give_nothing(
        self, value: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        problem = hard_problem(key_lengths=(7,), causal=True)
        clean = outputs_of(problem, monkeypatch)
        assert problem.v is not None
        problem.v[..., 7:, 1] = value
        for output, same in zip(outputs_of(problem, monkeypatch), clean, strict=True):
            torch.testing.assert_close(output, same)

    def test_visible_keys_reach_their_rows_alone(self, value: float) -> None:
        problem = hard_problem(causal=True)
        problem.k[0, 1, 6, 2] = value
        clean, touched = stream_rows(problem, EVERYTHING)
        assert not bool(clean.nonfinite.any())
        assert touched.nonfinite.tolist() == [False] * 6 + [True] * 4
        expected = reference(problem, 0, 1)
        outcomes = torch.special.xlogy(expected.weights, expected.weights)
        close(touched.entropy_nats, -outcomes.sum(-1), 1e-11)
        known = torch.where(torch.isnan(expected.masked), -torch.inf, expected.masked)
        torch.testing.assert_close(touched.max_logit, known.amax(-1))
        assert touched.received is not None
        close(touched.received.mass, expected.weights.sum(0), 1e-10)

    def test_values_reach_the_output_of_those_who_see_them(
        self, value: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        problem = hard_problem(causal=True)
        assert problem.v is not None
        problem.v[0, 0, 3, 1] = value
        problem.v[0, 0, 8, :2] = -value
        for head, output in enumerate(outputs_of(problem, monkeypatch)):
            expected = reference(problem, 0, head).output
            assert expected is not None
            close(output, expected, 1e-11)


def outputs_of(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The output of each head, asked for so that tiles compute it where they can."""
    monkeypatch.setattr(stages, "BLOCK_CELLS", 10)
    blocks = list(blocks_of(problem, [Stage.OUTPUT], select(problem)))
    heads = range(problem.sizes.heads)
    return [torch.cat([one.values for one in blocks if one.head == head]) for head in heads]


@pytest.mark.usefixtures("small_tiles")
def test_a_row_of_nan_has_no_largest_logit() -> None:
    problem = hard_problem()
    problem.q[0, 0, 2] = math.nan
    rows = next(stream_rows(problem, EVERYTHING))
    assert math.isnan(rows.max_logit[2])
    assert rows.top_key is not None
    assert int(rows.top_key[2]) == -1
    assert rows.max_logit_query is not None
    assert rows.max_logit_query != 2


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("per_key", [False, True])
@pytest.mark.parametrize("heads", [None, [1]])
def test_progress_adds_up(per_key: bool, heads: list[int] | None) -> None:
    problem, wanted = hard_problem(causal=True, left_window=3), Wanted(per_key=per_key)
    steps: list[int] = []
    list(stream_rows(problem, wanted, heads=heads, advance=steps.append))
    assert len(steps) > 2
    assert sum(steps) == planned_cells(problem, wanted, heads=heads)


def test_chosen_heads_come_in_the_order_asked_for_and_the_others_cost_nothing() -> None:
    rng = np.random.default_rng(9)
    q, k = (torch.from_numpy(rng.standard_normal((3, heads, 9, 4))) for heads in (6, 2))
    problem = make_problem(q, k, None, AttentionOptions(causal=True))
    every = {(rows.batch, rows.head): rows for rows in stream_rows(problem)}
    chosen = list(stream_rows(problem, batches=[2, 0], heads=[4, 1, 2, 3]))
    assert [rows.batch for rows in chosen] == [2] * 4 + [0] * 4
    assert [rows.head for rows in chosen] == [4, 1, 2, 3] * 2
    for rows in chosen:
        same = every[rows.batch, rows.head]
        torch.testing.assert_close(rows.entropy_nats, same.entropy_nats)
        torch.testing.assert_close(rows.shares.first.weight, same.shares.first.weight)
    planned = planned_cells(problem, batches=[2, 0], heads=[4, 1, 2, 3])
    assert planned * 18 == planned_cells(problem) * 8


def test_distances_that_nobody_wants_change_nothing_else() -> None:
    rng = np.random.default_rng(9)
    q = torch.from_numpy(rng.standard_normal((1, 2, 1100, 8)).astype(np.float32))
    problem = make_problem(q, q, None, AttentionOptions(causal=True), precision=Precision.FLOAT32)
    for rows, bare in zip(
        stream_rows(problem), stream_rows(problem, Wanted(distances=False)), strict=True
    ):
        assert rows.distance is not None
        assert bare.distance is None
        assert torch.equal(rows.entropy_nats, bare.entropy_nats)
        assert rows.shares.local is not None
        assert bare.shares.local is not None
        assert torch.equal(rows.shares.local.weight, bare.shares.local.weight)


def test_heads_taken_together_are_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(10)
    q = torch.from_numpy(rng.standard_normal((2, 3, 1100, 8)).astype(np.float32))
    problem = make_problem(q, q, q, AttentionOptions(causal=True), precision=Precision.FLOAT32)
    together = list(stream_rows(problem, EVERYTHING))
    monkeypatch.setattr(stream, "_BYTES_AT_ONCE", 1)
    for rows, alone in zip(together, stream_rows(problem, EVERYTHING), strict=True):
        assert (rows.batch, rows.head) == (alone.batch, alone.head)
        assert torch.equal(rows.entropy_nats, alone.entropy_nats)
        assert rows.received is not None
        assert alone.received is not None
        assert torch.equal(rows.received.mass, alone.received.mass)


def test_ties_go_to_the_lowest_index() -> None:
    """Equal keys and queries: whichever code path finds the key, it finds the first."""
    rng = np.random.default_rng(7)
    q = torch.from_numpy(np.tile(rng.standard_normal((1, 64)), (40, 1)).astype(np.float32))
    k = torch.from_numpy(np.tile(rng.standard_normal((3, 64)), (400, 1)).astype(np.float32))
    problem = make_problem(q, k, None, AttentionOptions(), precision=Precision.FLOAT32)
    best = int((q[0].double() @ k[:3].double().T).argmax())
    for wanted in (Wanted(), EVERYTHING):
        (rows,) = stream_rows(problem, wanted)
        assert (rows.max_logit_query, rows.max_logit_key) == (0, best)


def test_torch_gets_its_threads_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        rng = np.random.default_rng(8)
        q = torch.from_numpy(rng.standard_normal((1, 2, 1100, 4)))
        problem = make_problem(q, q, q, AttentionOptions(causal=True))
        first = [rows.entropy_nats for rows in stream_rows(problem, EVERYTHING)]
        assert torch.get_num_threads() == 3
        heads = stream_rows(problem, EVERYTHING)
        next(heads)
        assert torch.get_num_threads() == 3
        heads.close()
        torch.set_num_threads(1)
        alone = [rows.entropy_nats for rows in stream_rows(problem, EVERYTHING)]
        assert all(torch.equal(a, b) for a, b in zip(first, alone, strict=True))
    finally:
        torch.set_num_threads(before)


def test_works_where_gradients_are_tracked() -> None:
    q = torch.randn(5, 4, requires_grad=True)
    (rows,) = stream_rows(make_problem(q, q, q, AttentionOptions()), EVERYTHING)
    assert not rows.entropy_nats.requires_grad


@pytest.mark.parametrize("causal", [False, True])
def test_biases_of_each_batch_and_head_are_their_own(causal: bool) -> None:
    random = np.random.default_rng(12)
    q, k = (torch.from_numpy(random.standard_normal((2, 3, 9, 4))) for _ in range(2))
    for shape in ((2, 3, 9, 9), (1, 3, 9, 9), (2, 1, 1, 9), (1, 3, 9, 1), (9, 9)):
        added = random.standard_normal(shape)
        added[..., 2 % shape[-1]] = -np.inf if shape[-1] > 1 else 0.5
        options = AttentionOptions(attn_mask=added, causal=causal)
        problem = make_problem(q, k, None, options)
        for rows in stream_rows(problem, Wanted(top_key=True)):
            logits = q[rows.batch, rows.head] @ k[rows.batch, rows.head].T / 2
            bias = torch.tensor(np.broadcast_to(added, (2, 3, 9, 9))[rows.batch, rows.head])
            plain = logits + bias
            if causal:
                plain = plain.masked_fill(torch.ones(9, 9).tril() == 0, -torch.inf)
            weights = plain.softmax(-1)
            entropy = torch.special.entr(weights).sum(-1)
            close(rows.entropy_nats, entropy, 1e-12)
            assert rows.logsumexp is not None
            close(rows.logsumexp, plain.logsumexp(-1), 1e-12)
            assert rows.sink_mass is not None
            close(rows.sink_mass, weights[:, 0], 1e-12)
            assert rows.keys.tolist() == torch.isfinite(plain).sum(-1).tolist()
            assert rows.top_key is not None
            assert rows.top_key.tolist() == plain.argmax(-1).tolist()


@pytest.mark.parametrize("sink_keys", [1, 3])
def test_first_keys_that_a_window_hides_get_nothing(sink_keys: int) -> None:
    random = np.random.default_rng(13)
    q, k = (torch.from_numpy(random.standard_normal((1, 2, 12, 4))) for _ in range(2))
    problem = make_problem(q, k, None, AttentionOptions(causal=True, left_window=2))
    place = torch.arange(12)
    seen = (place <= place[:, None]) & (place >= place[:, None] - 2)
    for rows in stream_rows(problem, Wanted(sink_keys=sink_keys)):
        logits = q[0, rows.head] @ k[0, rows.head].T / 2
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        assert rows.sink_mass is not None
        close(rows.sink_mass, weights[:, :sink_keys].sum(-1), 1e-12)
        assert rows.shares.first.seen.tolist() == seen[:, :sink_keys].sum(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_columns_of_rows_have_the_types_that_are_documented(dtype: torch.dtype) -> None:
    random = np.random.default_rng(14)
    q, k, v = (torch.from_numpy(random.standard_normal((1, 2, 9, 4))).to(dtype) for _ in range(3))
    precision = Precision.FLOAT32 if dtype is torch.float32 else Precision.FLOAT64
    options = AttentionOptions(causal=True, sinks=np.zeros(2))
    problem = make_problem(q, k, v, options, precision=precision)
    for rows in stream_rows(problem, Wanted(top_key=True, output=True)):
        whole = {name: getattr(rows, name) for name in ("keys", "top_key", "outcomes")}
        assert {name: one.dtype for name, one in whole.items()} == dict.fromkeys(whole, torch.int64)
        flags = rows.empty, rows.nonfinite
        assert [one.dtype for one in flags] == [torch.bool] * 2
        floats = ("entropy_nats", "entropy_bits", "entropy_normalized", "effective_keys")
        floats += ("max_weight", "max_logit", "logsumexp", "sink_mass", "distance", "sink_weight")
        for name in floats:
            assert getattr(rows, name).dtype == torch.float64, name
        assert rows.output is not None
        assert rows.output.dtype == dtype


@pytest.mark.parametrize("by_interval", [False, True])
def test_each_key_is_told_what_it_gets_and_from_how_many(by_interval: bool) -> None:
    random = np.random.default_rng(15)
    q, k = (torch.from_numpy(random.standard_normal((2, 2, 9, 4))) for _ in range(2))
    mask = random.random((2, 2, 9, 9)) < 0.5
    if by_interval:
        mask = np.broadcast_to(np.tri(9, dtype=bool) & (np.arange(9) != 4), (2, 2, 9, 9))
    options = AttentionOptions(attn_mask=np.array(mask))
    if by_interval:
        options = AttentionOptions(causal=True, key_padding=np.arange(9) != 4)
    for rows in stream_rows(make_problem(q, k, None, options), Wanted(per_key=True)):
        seen = torch.tensor(mask[rows.batch, rows.head])
        logits = q[rows.batch, rows.head] @ k[rows.batch, rows.head].T / 2
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
        assert rows.received is not None
        close(rows.received.mass, weights.sum(0), 1e-12)
        assert rows.received.queries.tolist() == seen.sum(0).tolist()
