"""The linear-time moments against all scores, one by one, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncli.attention.options import AttentionOptions, Corner, MaskTrue
from attncli.attention.problem import Precision, Problem, make_problem
from attncli.attention.variance import cell_sums, moments
from attncli.attention.variance.cell_sums import CentredRows
from attncli.attention.variance.moments import ScoreMoments, audit, row_moments, score_moments

S = 37
RNG = np.random.default_rng(5)
KEEP_2D = RNG.random((S, S)) > 0.4
ADDED = np.where(RNG.random((2, 4, S, S)) > 0.3, RNG.standard_normal((2, 4, S, S)), -np.inf)
SCATTERED = RNG.integers(0, 4, (2, S))
PADDING = RNG.random((2, S)) > 0.3

MASKS = {
    "full": {},
    "causal": {"causal": True},
    "offset 5": {"causal": True, "query_offset": 5},
    "offset −9": {"causal": True, "query_offset": -9},
    "offset far left": {"causal": True, "query_offset": -S},
    "offset far right": {"causal": True, "query_offset": 10 * S},
    "offset per batch": {"causal": True, "query_offset": (3, -4)},
    "causal window": {"causal": True, "left_window": 4},
    "itself alone": {"causal": True, "left_window": 0},
    "two-sided window": {"left_window": 3, "right_window": 6},
    "wide window": {"causal": True, "left_window": 25},
    "right window": {"right_window": 2},
    "prefix": {"causal": True, "prefix": 11},
    "prefix and window": {"causal": True, "prefix": 11, "left_window": 8},
    "key lengths": {"key_lengths": (30, 8)},
    "causal key lengths": {"causal": True, "key_lengths": (30, 8)},
    "no real key in one batch": {"key_lengths": (30, 0)},
    "query lengths": {"query_lengths": (12, 36), "causal": True},
    "key padding": {"key_padding": PADDING},
    "causal key padding": {"key_padding": PADDING, "causal": True, "key_lengths": (33,)},
    "documents": {"segments": np.repeat([7, 1, 9], [10, 20, 7]), "causal": True},
    "scattered documents": {"segments": SCATTERED},
    "scattered, windowed, padded": {
        "segments": SCATTERED,
        "left_window": 9,
        "right_window": 4,
        "key_padding": PADDING,
    },
    "documents with an offset": {"segments": SCATTERED, "query_offset": 6, "causal": True},
    "file": {"attn_mask": KEEP_2D},
    "file, True drops": {"attn_mask": KEEP_2D, "mask_true": MaskTrue.DROP, "causal": True},
    "file per key": {"attn_mask": KEEP_2D[0], "causal": True},
    "file per query": {"attn_mask": KEEP_2D[:, :1]},
    "file that hides all": {"attn_mask": np.zeros((1, 1), bool)},
    "additive file": {"attn_mask": ADDED, "key_padding": PADDING},
    "additive file per key": {"attn_mask": ADDED[:, :, :1], "causal": True},
    "additive file per query": {"attn_mask": ADDED[0, 0, :, :1]},
    "additive file that hides nothing": {"attn_mask": np.ones((S, S)) / 3, "causal": True},
    "alibi and a soft cap": {"alibi": True, "softcap": 2.0, "causal": True},
}


@pytest.fixture(params=["as built", "small blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the same cases with blocks so small that every boundary is crossed."""
    if request.param == "small blocks":
        monkeypatch.setattr(moments, "TILE_ROWS", 8)
        monkeypatch.setattr(cell_sums, "TILE_ROWS", 8)
        monkeypatch.setattr(cell_sums, "ROW_BLOCK", 4)
        monkeypatch.setattr(cell_sums, "_DIRECT_KEYS", 6)
        monkeypatch.setattr(cell_sums, "_CHUNK_ROWS", 8)
        monkeypatch.setattr(cell_sums, "_STREAM_ROWS", 5)


def tensors(
    q_len: int = S, k_len: int = S, shift: float = 0.0, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Q (2, 4, q_len, 6) and K (2, 2, k_len, 6), float64."""
    rng = np.random.default_rng(seed)
    q = torch.from_numpy(rng.standard_normal((2, 4, q_len, 6)) + shift)
    k = torch.from_numpy(rng.standard_normal((2, 2, k_len, 6)) - shift)
    return q, k


def visible_cells(problem: Problem, batch: int, head: int) -> torch.Tensor:
    """All visible scores of a head, float64, flat."""
    seen = problem.mask.visible(
        slice(batch, batch + 1), slice(head, head + 1), slice(None), slice(None)
    )
    seen = torch.as_tensor(seen[0, 0]).clone()
    seen[problem.mask.real_queries(batch) :] = False
    q, k = problem.q[batch, head].double(), problem.k[batch, problem.kv_head(head)].double()
    return (q @ k.T)[seen]


def assert_like_brute_force(problem: Problem, found: ScoreMoments, relative: float = 1e-12) -> None:
    """Compare cells, mean and variance with those of the scores themselves."""
    cells = visible_cells(problem, found.batch, found.head)
    assert found.cells == cells.numel()
    if not found.cells:
        assert found.mean is found.var is found.std is found.scaled_var is None
        return
    spread = float(cells.abs().max())
    assert found.mean == pytest.approx(float(cells.mean()), abs=relative * spread)
    expected = float(cells.var(correction=0))
    # The second term is for single cells, whose variance is a rounding error.
    assert found.var == pytest.approx(expected, rel=relative, abs=1e-14 * spread**2)
    assert found.std == pytest.approx(math.sqrt(found.var))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", MASKS)
def test_every_mask_gives_the_moments_of_the_scores(name: str) -> None:
    options = AttentionOptions(**MASKS[name])
    problem = make_problem(*tensors(), None, options)
    found = list(audit(problem))
    assert [(one.batch, one.head) for one in found] == [(b, h) for b in range(2) for h in range(4)]
    for one in found:
        assert_like_brute_force(problem, one)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("corner", Corner)
@pytest.mark.parametrize(("q_len", "k_len"), [(5, 23), (23, 5), (1, 1), (0, 4), (4, 0), (0, 0)])
def test_any_lengths(corner: Corner, q_len: int, k_len: int) -> None:
    options = AttentionOptions(causal=True, query_offset=corner)
    problem = make_problem(*tensors(q_len, k_len), None, options)
    for one in audit(problem):
        assert_like_brute_force(problem, one)
        assert (one.var_all_pairs is None) == (q_len * k_len == 0)


@pytest.mark.parametrize("name", MASKS)
def test_the_parts_add_up_to_the_variance_of_all_real_pairs(name: str) -> None:
    options = AttentionOptions(**MASKS[name])
    problem = make_problem(*tensors(shift=0.7), None, options)
    for one in audit(problem):
        q = problem.q[one.batch, one.head, : problem.mask.real_queries(one.batch)]
        k = problem.k[one.batch, problem.kv_head(one.head)]
        lengths = options.key_lengths or (S,)
        real = torch.arange(S) < lengths[one.batch % len(lengths)]
        if options.key_padding is not None:
            real &= torch.from_numpy(options.key_padding[one.batch])
        pairs = q @ k[real].T
        if pairs.numel() == 0:
            assert one.var_all_pairs is None
            continue
        rows = pairs.var(1, correction=0).mean()
        assert one.var_all_pairs == pytest.approx(float(pairs.var(correction=0)), rel=1e-12)
        assert one.var_within_rows == pytest.approx(float(rows), rel=1e-12)
        assert one.var_from_key_mean == pytest.approx(
            float(pairs.mean(1).var(correction=0)), rel=1e-12
        )
        assert one.var_from_query_mean == pytest.approx(
            float(pairs.mean(0).var(correction=0)), rel=1e-12
        )
        assert one.q_mean_norm == pytest.approx(float(q.mean(0).norm()), rel=1e-12)
        assert one.k_var == pytest.approx(float(k[real].var(0, correction=0).mean()), rel=1e-12)


def test_the_embedded_example() -> None:
    """The score variance that the theory gives for its two example matrices."""
    from attncli.attention.qkv import example

    q, k, _ = example()
    found = score_moments(make_problem(q, k, None, AttentionOptions()), 0, 0)
    assert found.var == pytest.approx(0.736971, abs=5e-7)
    assert found.scaled_var == pytest.approx(0.245657, abs=5e-7)
    assert found.var_unit_theory == 3
    assert found.scale_for_unit_variance == pytest.approx(1 / math.sqrt(found.var))


@pytest.mark.parametrize("options", [{}, {"scale": -0.3}, {"scale": 0.2, "temperature": 4.0}])
def test_the_scale_for_unit_variance_gives_it(options: dict[str, float]) -> None:
    temperature = options.get("temperature", 1.0)
    first = score_moments(make_problem(*tensors(), None, AttentionOptions(**options)), 1, 2)
    again = AttentionOptions(scale=first.scale_for_unit_variance, temperature=temperature)
    second = score_moments(make_problem(*tensors(), None, again), 1, 2)
    assert second.scaled_var == pytest.approx(1, rel=1e-12)
    assert first.scaled_std == pytest.approx(first.std * abs(first.scale) / temperature)
    assert first.scaled_mean == pytest.approx(first.mean * first.scale / temperature)


@pytest.mark.parametrize("name", ["full", "causal", "wide window", "scattered documents", "file"])
def test_large_common_means_in_float32(name: str) -> None:
    q, k = (side.float() for side in tensors(shift=1000.0))
    options = AttentionOptions(**MASKS[name])
    problem = make_problem(q, k, None, options, precision=Precision.FLOAT32)
    for one in audit(problem):
        expected = visible_cells(problem, one.batch, one.head).var(correction=0)
        assert one.var == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("name", ["full", "causal", "key padding"])
def test_long_float32_input_with_large_means(name: str) -> None:
    rng = np.random.default_rng(2)
    q, k = (torch.from_numpy(1000 + rng.uniform(-1, 1, (2, 1, 3000, 16))).float() for _ in "qk")
    padding = np.arange(3000)[None] % np.array([[3], [7]]) > 0
    options = AttentionOptions(
        **(MASKS[name] | {"key_padding": padding} if name[0] == "k" else MASKS[name])
    )
    problem = make_problem(q, k, None, options, precision=Precision.FLOAT32)
    for one in audit(problem):
        expected = visible_cells(problem, one.batch, one.head).var(correction=0)
        assert one.var == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("precision", [Precision.FLOAT32, Precision.FLOAT64])
def test_narrow_dtypes_do_not_overflow(dtype: torch.dtype, precision: Precision) -> None:
    largest = 300.0 if dtype in (torch.float16, torch.bfloat16) else 120.0
    signs = torch.from_numpy(RNG.choice([-largest, largest], (64, 8))).to(dtype)
    options = AttentionOptions(causal=True)
    problem = make_problem(signs, signs.flip(0), None, options, precision=precision)
    found = score_moments(problem, 0, 0)
    expected = visible_cells(problem, 0, 0)
    assert found.var == pytest.approx(float(expected.var(correction=0)), rel=1e-6)
    assert found.mean == pytest.approx(float(expected.mean()), abs=1e-6 * largest**2)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e30])
def test_sizes_beyond_float32_squares(size: float) -> None:
    q, k = (side[0, :1].float() * size for side in tensors())
    options = AttentionOptions(causal=True)
    problem = make_problem(q, k[:1], None, options, precision=Precision.FLOAT32)
    found = score_moments(problem, 0, 0)
    expected = visible_cells(problem, 0, 0).var(correction=0)
    assert found.var == pytest.approx(float(expected), rel=1e-9)


def test_a_hidden_key_may_hold_anything() -> None:
    q, k = tensors()
    k[:, :, 5], k[:, :, 20] = torch.nan, torch.inf
    padding = np.ones(S, bool)
    padding[[5, 20]] = False
    for mask in ({"key_padding": padding}, {"attn_mask": np.tile(padding, (S, 1)), "causal": True}):
        options = AttentionOptions(**mask)
        problem = make_problem(q, k, None, options, allow_nonfinite=True)
        for one in audit(problem):
            assert_like_brute_force(problem, one)


def test_what_sees_no_number_is_none() -> None:
    q, k = tensors()
    k[:, :, 5] = torch.nan
    problem = make_problem(q, k, None, AttentionOptions(causal=True), allow_nonfinite=True)
    found = score_moments(problem, 0, 0)
    assert found.cells == S * (S + 1) // 2
    assert found.var is found.mean is found.var_all_pairs is found.k_var is None


def test_equal_vectors_have_no_variance_and_no_scale() -> None:
    ones = torch.ones(9, 4)
    found = score_moments(make_problem(ones, 3 * ones, None, AttentionOptions(causal=True)), 0, 0)
    assert (found.mean, found.var, found.scale_for_unit_variance) == (12, 0, None)


def test_a_boundary_between_long_documents_costs_no_long_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows whose intervals jump are taken apart, not computed against both documents."""
    seen = []
    direct = cell_sums._add_direct

    def counted(
        totals: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, hidden: object
    ) -> None:
        seen.append(len(rows) * len(keys))
        direct(totals, rows, keys, hidden)

    monkeypatch.setattr(cell_sums, "_add_direct", counted)
    lengths = [5000, 3333, 1, 7000]
    options = AttentionOptions(segments=np.repeat(np.arange(4), lengths), causal=True)
    length = sum(lengths)
    rng = np.random.default_rng(0)
    q, k = (torch.from_numpy(rng.standard_normal((length, 4))) for _ in "qk")
    found = score_moments(make_problem(q, k, None, options), 0, 0)
    assert found.cells == sum(n * (n + 1) // 2 for n in lengths)
    assert sum(seen) < 600 * length


@settings(max_examples=60, deadline=None)
@given(
    q_len=st.integers(1, 40),
    k_len=st.integers(1, 40),
    offset=st.integers(-45, 45),
    left=st.none() | st.integers(0, 45),
    right=st.none() | st.integers(0, 45),
    prefix=st.none() | st.integers(0, 45),
    documents=st.none() | st.integers(1, 6),
    seed=st.integers(0, 999),
)
def test_rules_in_any_combination(
    q_len: int,
    k_len: int,
    offset: int,
    left: int | None,
    right: int | None,
    prefix: int | None,
    documents: int | None,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    options = AttentionOptions(
        causal=prefix is not None,
        prefix=prefix,
        query_offset=offset,
        left_window=left,
        right_window=right,
        segments=None if documents is None else rng.integers(0, documents, k_len),
        key_padding=rng.random((2, k_len)) > 0.2,
    )
    problem = make_problem(*tensors(q_len, k_len, seed=seed), None, options)
    for one in audit(problem):
        assert_like_brute_force(problem, one)


def exact_variance(problem: Problem) -> float:
    """Population variance of the visible scores of the first head, about a score, two passes."""
    cells = visible_cells(problem, 0, 0)
    cells = cells - cells[0]
    return float((cells - cells.mean()).square().mean())


@pytest.mark.parametrize("way", ["key padding", "file per key", "file"])
@pytest.mark.parametrize("precision", [Precision.FLOAT32, Precision.FLOAT64])
@pytest.mark.parametrize("size", [10_000.0, 1e8])
def test_a_mean_of_hidden_cells_does_not_cancel(
    way: str, precision: Precision, size: float
) -> None:
    dtype = torch.float32 if size < 1e7 else torch.float64
    k = torch.tensor([[size], [size + 1], [size + 2], [0], [0], [0]], dtype=dtype)
    keep = np.array([True] * 3 + [False] * 3)
    mask = {
        "key padding": {"key_padding": keep[None]},
        "file per key": {"attn_mask": keep},
        "file": {"attn_mask": np.tile(keep, (6, 1))},
    }
    options = AttentionOptions(**mask[way])
    problem = make_problem(torch.ones(6, 1, dtype=dtype), k, None, options, precision=precision)
    found = score_moments(problem, 0, 0)
    assert found.var == pytest.approx(2 / 3, rel=1e-6)
    assert found.mean == pytest.approx(size + 1, rel=1e-12)


@pytest.mark.parametrize("spread", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("mask", ["itself alone", "documents", "file"])
def test_visible_scores_far_from_all_others(spread: float, mask: str) -> None:
    """Rows of nearly one length: a query's score with its own key varies little."""
    rng = np.random.default_rng(0)
    length = 9000 if mask != "file" else 900
    rows = rng.standard_normal((length, 16))
    norms = 100 * (1 + spread * rng.standard_normal((length, 1)))
    rows = torch.from_numpy(rows / np.linalg.norm(rows, axis=1, keepdims=True) * norms)
    if mask == "documents":  # of three like rows each
        rows = rows[:3000].repeat_interleave(3, 0)
    rows = rows.float()
    options = AttentionOptions(
        **{
            "itself alone": {"left_window": 0, "right_window": 0},
            "documents": {"segments": np.repeat(np.arange(3000), 3)},
            "file": {"attn_mask": np.eye(length, dtype=bool)},
        }[mask]
    )
    problem = make_problem(rows, rows, None, options, precision=Precision.FLOAT32)
    own = rows.double().square().sum(1)
    expected = float((own - own.mean()).square().mean())
    assert score_moments(problem, 0, 0).var == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("precision", [Precision.FLOAT32, Precision.FLOAT64])
def test_long_documents_that_lie_far_apart(precision: Precision) -> None:
    """What a Gram matrix cannot tell is computed cell by cell."""
    rng = np.random.default_rng(3)
    places = 1e4 * rng.standard_normal((4, 8))
    places *= (1e4 / np.linalg.norm(places, axis=1))[:, None]
    rows = np.repeat(places, 1500, 0)
    q, k = (torch.from_numpy(rows + 1e-3 * rng.standard_normal(rows.shape)) for _ in "qk")
    options = AttentionOptions(segments=np.repeat(np.arange(4), 1500))
    problem = make_problem(q, k, None, options, precision=precision)
    expected = exact_variance(problem)
    assert score_moments(problem, 0, 0).var == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["full", "causal", "file"])
def test_a_mean_in_a_direction_in_which_nothing_varies(name: str) -> None:
    rng = np.random.default_rng(4)
    turn, _ = np.linalg.qr(rng.standard_normal((16, 16)))
    q = np.zeros((S, 16))
    q[:, :5] = rng.standard_normal((S, 5))
    k = rng.standard_normal((S, 16))
    k[:, 9] += 3e4
    q, k = (torch.from_numpy(side @ turn).float() for side in (q, k))
    options = AttentionOptions(**MASKS[name])
    problem = make_problem(q, k, None, options, precision=Precision.FLOAT32)
    expected = exact_variance(problem)
    assert score_moments(problem, 0, 0).var == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("precision", [Precision.FLOAT32, Precision.FLOAT64])
@pytest.mark.parametrize("mask", ["window", "file", "file per key"])
def test_one_visible_cell_has_no_variance(precision: Precision, mask: str) -> None:
    q, k = tensors()
    only = np.zeros((S, S), bool)
    only[3, 8] = True
    options = AttentionOptions(
        **{
            "window": {"left_window": 0, "right_window": 0, "query_offset": S - 1},
            "file": {"attn_mask": only},
            "file per key": {"attn_mask": only[3], "query_lengths": (1, 1)},
        }[mask]
    )
    problem = make_problem(q, k, None, options, precision=precision)
    for found in audit(problem):
        assert (found.cells, found.var, found.scale_for_unit_variance) == (1, 0.0, None)


@pytest.mark.parametrize("name", ["full", "causal", "file", "scattered documents"])
def test_threads_change_no_bit(name: str) -> None:
    rng = np.random.default_rng(1)
    q, k = (torch.from_numpy(rng.standard_normal((2, 2, 2500, 16))).float() for _ in "qk")
    masks = {
        "file": {"attn_mask": rng.random((2500, 2500)) > 0.3},
        "scattered documents": {"segments": rng.integers(0, 3, 2500)},
    }
    options = AttentionOptions(**masks.get(name, MASKS[name]))
    problem = make_problem(q, k, None, options, precision=Precision.FLOAT32)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(list(audit(problem)))
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_drift_have_the_moments_of_all_of_them(dtype: torch.dtype) -> None:
    """Of more rows than a centre is found from, of which neighbours are alike."""
    length = 2 * 4096 + 5
    random = np.random.default_rng(6)
    drift = 3 * np.sin(np.arange(length) ** 2 / 1e5)[:, None] + [5.0, -700.0, 0.0]
    rows = torch.from_numpy(drift + random.standard_normal((length, 3))).to(dtype)
    exact = rows.double().numpy()
    for order in (None, torch.arange(length - 2, -1, -1)):
        some = exact if order is None else exact[order.numpy()]
        centred = CentredRows(rows, order, dtype, torch.device("cpu"))
        found = row_moments(centred)
        assert found is not None
        assert found.count == len(some)
        rtol = 1e-4 if dtype is torch.float32 else 1e-10
        mean = some.mean(0)
        np.testing.assert_allclose(found.mean.numpy(), mean, rtol=rtol / 1e3, atol=rtol / 1e3)
        covariance = np.cov(some.T, bias=True)
        np.testing.assert_allclose(found.covariance.numpy(), covariance, rtol=rtol, atol=rtol)
        centre = centred.centre()
        # What is subtracted has to be a number of the arithmetic, and lie near the mean.
        assert torch.equal(centre, centre.to(dtype).double())
        assert float((centre - found.mean).norm()) < 0.2
        weights = (np.arange(len(some)) % 7 == 3).astype(np.int64) * np.arange(1, len(some) + 1)
        weighted = centred.centre(weights)
        expected = np.average(some, axis=0, weights=weights)
        np.testing.assert_allclose(weighted.numpy(), expected, rtol=1e-6, atol=1e-4)


def test_rows_without_a_finite_mean_are_centred_at_0() -> None:
    def of(*rows: list[float]) -> CentredRows:
        tensor = torch.tensor(rows).reshape(-1, 2)
        return CentredRows(tensor, None, torch.float32, torch.device("cpu"))

    assert of([1.0, torch.inf], [3.0, 2.0]).centre().tolist() == [2, 0]
    assert of([3.0, 2.0]).centre().tolist() == [3, 2]
    assert row_moments(of()) is None
