"""Visibility from options and from mask files: every rule, and every way to mistake one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_masks import plain_mask

from attncli.attention.masks.build import alibi_slopes, build_mask
from attncli.attention.masks.mask import Mask
from attncli.attention.options import AttentionOptions, Corner, MaskTrue
from attncli.attention.sizes import Sizes
from attncli.errors import DataError, UsageError

ALL = slice(None)


def build(q_len: int, k_len: int, *, batch: int = 1, heads: int = 1, **options: Any) -> Mask:
    return build_mask(AttentionOptions(**options), Sizes(batch, heads, q_len, k_len))


def cells(mask: Mask) -> np.ndarray:
    """Bool (B, H, S_q, S_k)."""
    s = mask.sizes
    return np.broadcast_to(mask.visible(ALL, ALL, ALL, ALL), (s.batch, s.heads, s.q_len, s.k_len))


def sets(mask: Mask, batch: int = 0, head: int = 0) -> list[set[int]]:
    """The keys that each query sees."""
    return [set(np.flatnonzero(row).tolist()) for row in cells(mask)[batch, head]]


# Positions, causality, windows

STREAMED = [{0}, {0, 1}, {0, 1, 2}, {0, 2, 3}, {0, 3, 4}, {0, 4, 5}]
DILATED = [{0}, {1}, {0, 2}, {1, 3}, {0, 2, 4}]


@pytest.mark.parametrize(
    ("q_len", "k_len", "options", "expected"),
    [
        (3, 3, {"causal": True}, [{0}, {0, 1}, {0, 1, 2}]),
        (2, 4, {"causal": True, "query_offset": Corner.TOP_LEFT}, [{0}, {0, 1}]),
        (2, 4, {"causal": True, "query_offset": Corner.BOTTOM_RIGHT}, [{0, 1, 2}, {0, 1, 2, 3}]),
        (2, 4, {"causal": True, "query_offset": 1}, [{0, 1}, {0, 1, 2}]),
        (4, 2, {"causal": True, "query_offset": Corner.BOTTOM_RIGHT}, [set(), set(), {0}, {0, 1}]),
        (4, 2, {"causal": True, "query_offset": Corner.TOP_LEFT}, [{0}, {0, 1}, {0, 1}, {0, 1}]),
        (3, 3, {"causal": True, "query_offset": -1}, [set(), {0}, {0, 1}]),
        (2, 3, {"causal": True, "query_offset": -5}, [set(), set()]),
        (2, 3, {"causal": True, "query_offset": 9}, [{0, 1, 2}, {0, 1, 2}]),
        (5, 5, {"causal": True, "left_window": 1}, [{0}, {0, 1}, {1, 2}, {2, 3}, {3, 4}]),
        (4, 4, {"causal": True, "left_window": 0}, [{0}, {1}, {2}, {3}]),
        (3, 3, {"right_window": 1}, [{0, 1}, {0, 1, 2}, {0, 1, 2}]),
        (3, 3, {"left_window": 0, "right_window": 1}, [{0, 1}, {1, 2}, {2}]),
        (3, 3, {"left_window": 9, "right_window": 9}, [{0, 1, 2}] * 3),
        (4, 4, {"causal": True, "prefix": 3}, [{0, 1, 2}, {0, 1, 2}, {0, 1, 2}, {0, 1, 2, 3}]),
        (3, 3, {"causal": True, "prefix": 0}, [{0}, {0, 1}, {0, 1, 2}]),
        (3, 4, {"causal": True, "prefix": 9, "query_offset": 0}, [{0, 1, 2, 3}] * 3),
        (4, 4, {"causal": True, "prefix": 3, "left_window": 1}, [{0, 1, 2}] * 2 + [{1, 2}, {2, 3}]),
        (3, 3, {"causal": True, "prefix": 3, "right_window": 1}, [{0, 1}, {0, 1, 2}, {0, 1, 2}]),
        (3, 3, {"causal": True, "prefix": 3, "key_lengths": (2,)}, [{0, 1}] * 3),
        (6, 6, {"causal": True, "left_window": 1, "sink_window": 1}, STREAMED),
        (
            2,
            6,
            {"causal": True, "left_window": 0, "sink_window": 2, "query_offset": 4},
            [{0, 1, 4}, {0, 1, 5}],
        ),
        (
            2,
            3,
            {"causal": True, "left_window": 0, "sink_window": 2, "query_offset": -1},
            [set(), {0}],
        ),
        (1, 3, {"causal": True, "left_window": 0, "sink_window": 2, "query_offset": 9}, [{0, 1}]),
        (
            3,
            5,
            {"left_window": 0, "right_window": 1, "sink_window": 1, "query_offset": 2},
            [{0, 2, 3}, {0, 3, 4}, {0, 4}],
        ),
        (3, 3, {"left_window": 0, "sink_window": 9}, [{0, 1, 2}] * 3),
        (
            6,
            6,
            {
                "causal": True,
                "left_window": 1,
                "sink_window": 2,
                "segments": np.array([0, 0, 0, 1, 1, 1]),
            },
            [{0}, {0, 1}, {0, 1, 2}, {3}, {3, 4}, {4, 5}],
        ),
        (5, 5, {"causal": True, "left_window": 4, "dilation": 2}, DILATED),
        (5, 5, {"left_window": 2, "right_window": 3, "dilation": 9}, [{i} for i in range(5)]),
        (2, 5, {"right_window": 4, "dilation": 3, "query_offset": -3}, [{0}, {1}]),
        (2, 3, {"key_lengths": (2,)}, [{0, 1}] * 2),
        (2, 3, {"key_lengths": (0,)}, [set()] * 2),
        (2, 3, {"key_padding": np.array([True, False, True])}, [{0, 2}] * 2),
        (4, 4, {"segments": np.array([7, 7, -2, -2])}, [{0, 1}, {0, 1}, {2, 3}, {2, 3}]),
        (3, 2, {"segments": np.array([0, 0]), "query_offset": -1}, [set(), {0, 1}, {0, 1}]),
        (3, 2, {"segments": np.array([0, 0]), "query_offset": 1}, [{0, 1}, set(), set()]),
        (2, 3, {"segments": np.array([0, 1, 1]), "query_offset": 1}, [{1, 2}, {1, 2}]),
        (3, 3, {"segments": np.array([0, 1, 0])}, [{0, 2}, {1}, {0, 2}]),
    ],
)
def test_keys_that_each_query_sees(
    q_len: int, k_len: int, options: dict[str, Any], expected: list[set[int]]
) -> None:
    assert sets(build(q_len, k_len, **options)) == expected


def test_offsets_and_lengths_of_each_batch() -> None:
    mask = build(2, 3, batch=2, causal=True, query_offset=(0, 1), key_lengths=(3, 2))
    assert sets(mask, 0) == [{0}, {0, 1}]
    assert sets(mask, 1) == [{0, 1}, {0, 1}]


def test_one_length_serves_all_batches() -> None:
    mask = build(1, 3, batch=2, key_lengths=(2,))
    assert sets(mask, 0) == sets(mask, 1) == [{0, 1}]


def test_padding_and_segments_of_each_batch() -> None:
    keep = np.array([[True, False, True], [False, True, True]])
    ids = np.array([[0, 0, 0], [0, 1, 1]])
    mask = build(3, 3, batch=2, key_padding=keep, segments=ids)
    assert sets(mask, 0) == [{0, 2}] * 3
    assert sets(mask, 1) == [set(), {1, 2}, {1, 2}]


@pytest.mark.parametrize(("q_len", "k_len"), [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("ids", [False, True])
def test_no_queries_or_no_keys(q_len: int, k_len: int, ids: bool) -> None:
    segments = np.zeros(k_len, int) if ids else None
    mask = build(q_len, k_len, causal=True, query_offset=0, left_window=1, segments=segments)
    assert cells(mask).shape == (1, 1, q_len, k_len)
    assert not cells(mask).any()
    assert not mask.hull(0).stop.any()
    divided = {"segments": segments, "left_window": 1, "dilation": 2, "query_offset": 0}
    found = build(q_len, k_len, **divided).head(0, 0).marginals
    assert (len(found.counts), len(found.used)) == (q_len, k_len)
    assert found.kept == 0


@pytest.mark.parametrize(
    "option",
    [{"causal": True}, {"left_window": 1}, {"right_window": 1}, {"alibi": True}],
)
def test_positions_have_to_be_declared_where_lengths_differ(option: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        build(2, 5, **option)
    assert "query_offset" in str(caught.value)
    assert "top-left" in caught.value.advice
    assert "offset of 3" in caught.value.advice


def test_segments_need_positions_too() -> None:
    with pytest.raises(UsageError, match="segments needs positions"):
        build(2, 3, segments=np.array([0, 0, 1]))


def test_positions_are_undefined_where_nothing_needs_them() -> None:
    mask = build(2, 5, key_lengths=(3,))
    assert mask.offset is None
    with pytest.raises(UsageError):
        mask.positions(ALL, ALL)


def test_positions_are_signed_and_not_clamped() -> None:
    mask = build(3, 2, causal=True, query_offset=-2)
    np.testing.assert_array_equal(mask.positions(ALL, ALL), [[-2, -1, 0]])
    np.testing.assert_array_equal(mask.positions(ALL, np.array([2, 0])), [[0, -2]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"query_offset": (0, 1, 2)}, "one per batch"),
        ({"query_offset": 2**60}, "2\\^53"),
        ({"key_lengths": (1, 2, 3)}, "one per batch"),
        ({"key_lengths": (5,)}, "at most 4"),
        ({"query_lengths": (4,)}, "at most 3"),
        ({"segments": np.zeros(3, int)}, "one id per key"),
    ],
)
def test_options_that_do_not_fit_the_sizes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(3, 4, batch=2, **{"query_offset": 0, **options})


@given(data=st.data())
def test_any_combination_equals_plain_loops(data: st.DataObject) -> None:
    q_len, k_len = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 6))
    offset = data.draw(st.integers(-7, 7))
    drawn: dict[str, Any] = {
        "causal": data.draw(st.booleans()),
        "left_window": data.draw(st.none() | st.integers(0, 8)),
        "right_window": data.draw(st.none() | st.integers(0, 8)),
        "key_length": data.draw(st.none() | st.integers(0, k_len)),
        "segments": data.draw(st.none() | st.lists(st.integers(0, 2), min_size=6, max_size=6)),
        "keep": data.draw(st.none() | st.lists(st.booleans(), min_size=6, max_size=6)),
    }
    if drawn["causal"]:
        drawn["prefix"] = data.draw(st.integers(0, 8))
    if drawn["left_window"] is not None:
        drawn["sink_window"] = data.draw(st.none() | st.integers(0, 7))
    if drawn["left_window"] is not None or drawn["right_window"] is not None:
        drawn["dilation"] = data.draw(st.none() | st.integers(1, 4))
    rules = {name: value for name, value in drawn.items() if value is not None}
    options: dict[str, Any] = {**rules, "query_offset": offset}
    if "key_length" in rules:
        options["key_lengths"] = (options.pop("key_length"),)
    if "keep" in rules:
        options["key_padding"] = np.array(options.pop("keep")[:k_len], bool)
    if "segments" in rules:
        options["segments"] = np.array(rules["segments"][:k_len], int)
    mask = build(q_len, k_len, **options)
    np.testing.assert_array_equal(cells(mask)[0, 0], plain_mask(q_len, k_len, offset, **rules))


@given(
    q_len=st.integers(1, 6),
    k_len=st.integers(1, 6),
    offset=st.integers(-7, 7),
    left=st.none() | st.integers(0, 5),
    causal=st.booleans(),
)
def test_hull_is_what_is_visible(
    q_len: int, k_len: int, offset: int, left: int | None, causal: bool
) -> None:
    mask = build(q_len, k_len, causal=causal, query_offset=offset, left_window=left)
    hull, keys = mask.hull(0), np.arange(k_len)
    assert hull.exact
    found = (keys >= hull.first[:, None]) & (keys < hull.stop[:, None])
    np.testing.assert_array_equal(found, cells(mask)[0, 0])


def test_blocks_are_parts_of_the_whole() -> None:
    generator = np.random.default_rng(0)
    given_mask = generator.random((2, 3, 5, 7)) > 0.5
    mask = build(5, 7, batch=2, heads=3, attn_mask=given_mask, causal=True, query_offset=2)
    whole = cells(mask)
    part = mask.visible(slice(1, 2), slice(1, 3), slice(2, 5), slice(3, 6))
    np.testing.assert_array_equal(part, whole[1:2, 1:3, 2:5, 3:6])
    rows = np.array([4, 0])
    part = mask.visible(slice(0, 1), slice(0, 1), rows, ALL)
    np.testing.assert_array_equal(part, whole[:1, :1, rows])


# Mask files: polarity, rank, integers, additive values


def test_true_means_may_attend_unless_told_otherwise() -> None:
    given_mask = np.array([[True, True, False]])
    assert sets(build(1, 3, attn_mask=given_mask)) == [{0, 1}]
    assert sets(build(1, 3, attn_mask=given_mask, mask_true=MaskTrue.DROP)) == [{2}]


@pytest.mark.parametrize(
    ("shape", "place"),
    [
        ((4,), np.s_[None, None, None, :]),
        ((1,), np.s_[None, None, None, :]),
        ((3, 4), np.s_[None, None, :, :]),
        ((1, 4), np.s_[None, None, :, :]),
        ((3, 1), np.s_[None, None, :, :]),
        ((5, 3, 4), np.s_[None, :, :, :]),
        ((5, 1, 4), np.s_[None, :, :, :]),
        ((2, 5, 3, 4), np.s_[:, :, :, :]),
        ((2, 1, 1, 4), np.s_[:, :, :, :]),
        ((1, 5, 3, 1), np.s_[:, :, :, :]),
    ],
)
def test_ranks_broadcast_from_the_right(shape: tuple[int, ...], place: Any) -> None:
    given_mask = np.random.default_rng(1).random(shape) > 0.5
    mask = build(3, 4, batch=2, heads=5, attn_mask=given_mask)
    expected = np.broadcast_to(given_mask[place], (2, 5, 3, 4))
    np.testing.assert_array_equal(cells(mask), expected)


def test_rank_3_is_refused_where_it_could_mean_batches_or_heads() -> None:
    with pytest.raises(DataError) as caught:
        build(3, 4, batch=2, heads=2, attn_mask=np.ones((2, 3, 4), bool))
    assert "(2, 1, S_q, S_k)" in caught.value.advice
    build(3, 4, batch=2, heads=2, attn_mask=np.ones((1, 3, 4), bool))


def test_rank_3_of_batches_is_refused_with_the_rank_4_form() -> None:
    with pytest.raises(DataError) as caught:
        build(3, 4, batch=2, heads=5, attn_mask=np.ones((2, 3, 4), bool))
    assert "(2, 1, S_q, S_k)" in caught.value.advice


@pytest.mark.parametrize("shape", [(), (3,), (4, 4), (3, 5), (1, 1, 1, 3, 4), (3, 3, 3, 4)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="attn_mask"):
        build(3, 4, batch=2, heads=5, attn_mask=np.ones(shape, bool))


@pytest.mark.parametrize("dtype", [np.int64, np.int8, np.uint8])
def test_integers_0_and_1_are_boolean_and_that_is_said(dtype: type) -> None:
    given_mask = np.array([[1, 0, 1]], dtype)
    mask = build(1, 3, attn_mask=given_mask)
    assert sets(mask) == [{0, 2}]
    assert "taken as a boolean" in mask.warnings[0]
    assert sets(build(1, 3, attn_mask=given_mask, mask_true=MaskTrue.DROP)) == [{1}]


@pytest.mark.parametrize("wrong", [2, -1, -10000])
def test_other_integers_are_refused(wrong: int) -> None:
    with pytest.raises(DataError, match=f"got {wrong}"):
        build(1, 3, attn_mask=np.array([1, wrong, 0]))


@pytest.mark.parametrize("dtype", [complex, "U1", object])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(DataError, match="attn_mask"):
        build(1, 2, attn_mask=np.array([1, 0]).astype(dtype))


def test_float_masks_are_added_and_minus_infinity_hides() -> None:
    mask = build(1, 3, attn_mask=np.array([[0.0, -np.inf, 2.5]]))
    assert sets(mask) == [{0, 2}]
    np.testing.assert_array_equal(mask.bias(ALL, ALL, ALL, ALL)[0, 0], [[0, -np.inf, 2.5]])
    assert mask.warnings == ()


def test_float_zeros_and_ones_are_questioned() -> None:
    mask = build(1, 3, attn_mask=np.array([[0.0, 1.0, 1.0]]))
    assert sets(mask) == [{0, 1, 2}]
    assert "was a boolean mask meant?" in mask.warnings[0]
    assert build(1, 3, attn_mask=np.zeros((1, 3))).warnings == ()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_finfo_min_stays_a_number_and_a_row_of_it_is_warned_of(dtype: type) -> None:
    low = np.finfo(dtype).min
    mask = build(3, 2, attn_mask=np.array([[low, low], [0, low], [-np.inf, low]], dtype))
    assert sets(mask) == [{0, 1}, {0}, {1}]
    assert len(mask.warnings) == 1
    assert "2 rows hold nothing but" in mask.warnings[0]


def test_rows_of_minus_infinity_are_empty_and_not_warned_of() -> None:
    mask = build(2, 2, attn_mask=np.array([[-np.inf, -np.inf], [0, 0]]))
    assert sets(mask) == [set(), {0, 1}]
    assert mask.warnings == ()


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_nan_and_plus_infinity_are_refused(wrong: float) -> None:
    with pytest.raises(DataError, match="NaN or \\+inf"):
        build(1, 2, attn_mask=np.array([0.0, wrong]))


def test_drop_makes_no_sense_beside_an_additive_mask() -> None:
    with pytest.raises(DataError, match="boolean mask beside mask_true"):
        build(1, 2, attn_mask=np.zeros(2), mask_true=MaskTrue.DROP)


def test_rules_and_mask_files_combine_by_and() -> None:
    given_mask = np.array([[True, True, True], [False, True, True], [True, False, False]])
    assert sets(build(3, 3, attn_mask=given_mask, causal=True)) == [{0}, {1}, {0}]


@pytest.mark.parametrize(
    "padding",
    [np.ones(3, bool), np.ones((2, 4), bool), np.ones((1, 1, 4), bool), np.ones(4)],
)
def test_padding_of_another_shape_or_dtype_is_refused(padding: np.ndarray) -> None:
    with pytest.raises(DataError, match="key_padding"):
        build(3, 4, key_padding=padding)


def test_integer_padding_is_boolean_and_that_is_said() -> None:
    mask = build(2, 3, key_padding=np.array([[1, 1, 0]]))
    assert sets(mask) == [{0, 1}] * 2
    assert "1 = real key" in mask.warnings[0]
    with pytest.raises(DataError, match="got 2"):
        build(2, 3, key_padding=np.array([[1, 2, 0]]))


def test_segments_must_be_integers() -> None:
    with pytest.raises(DataError, match="expected integers"):
        build(2, 2, segments=np.array([0.0, 1.0]))


# Biases and padded queries


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (1, [2**-8]),
        (3, [0.0625, 2**-8, 0.25]),
        (6, [0.25, 0.0625, 0.015625, 2**-8, 0.5, 0.125]),
        (8, [2.0**-h for h in range(1, 9)]),
    ],
)
def test_alibi_slopes(heads: int, expected: list[float]) -> None:
    np.testing.assert_array_equal(alibi_slopes(heads), expected)


def test_alibi_is_added_to_an_additive_mask() -> None:
    given_mask = np.array([[0.0, 1.0, -np.inf]])
    mask = build(1, 3, attn_mask=given_mask, alibi=True, query_offset=2)
    slope = 2.0**-8
    np.testing.assert_array_equal(
        mask.bias(ALL, ALL, ALL, ALL)[0, 0], [[-2 * slope, 1 - slope, -np.inf]]
    )


def test_alibi_counts_the_distance_on_both_sides() -> None:
    mask = build(2, 3, heads=3, alibi=True, query_offset=1)
    np.testing.assert_array_equal(mask.distance(ALL, ALL, ALL)[0, 0], [[1, 0, 1], [2, 1, 0]])
    bias = mask.bias(ALL, slice(2, 3), slice(1, 2), ALL)
    np.testing.assert_array_equal(bias[0, 0], [[-0.5, -0.25, 0.0]])


def test_alibi_takes_slopes_of_ones_own() -> None:
    mask = build(2, 3, heads=2, alibi_slopes=np.array([[3.0, 0.5]]), query_offset=1)
    bias = mask.bias(ALL, slice(1, 2), ALL, ALL)
    np.testing.assert_array_equal(bias[0, 0], [[-0.5, 0, -0.5], [-1, -0.5, 0]])
    both = build(2, 3, heads=2, alibi=True, alibi_slopes=np.array([3.0, 0.5]), query_offset=1)
    np.testing.assert_array_equal(both.bias(ALL, slice(1, 2), ALL, ALL), bias)
    with pytest.raises(UsageError, match=r"alibi_slopes: expected one slope per head \(H=2\)"):
        build(2, 3, heads=2, alibi_slopes=np.ones((2, 2)), query_offset=1)
    with pytest.raises(UsageError, match="alibi_slopes: expected finite slopes"):
        build(2, 2, alibi_slopes=np.array([np.nan]))
    with pytest.raises(UsageError, match="alibi_slopes needs positions"):
        build(2, 3, alibi_slopes=np.ones(1))


def test_padded_queries_are_known_per_batch() -> None:
    mask = build(4, 4, batch=2, query_lengths=(1, 3))
    assert [mask.real_queries(batch) for batch in (0, 1)] == [1, 3]
    assert build(4, 4, batch=2, query_lengths=(2,)).real_queries(1) == 2
    assert build(4, 4, batch=2).real_queries(1) == 4


def test_torch_form_gives_the_same_cells_and_biases() -> None:
    generator = np.random.default_rng(2)
    mask = build(
        5,
        6,
        batch=2,
        heads=2,
        causal=True,
        query_offset=(1, 0),
        segments=generator.integers(0, 2, (2, 6)),
        key_padding=generator.random((2, 6)) > 0.2,
        attn_mask=np.where(generator.random((2, 2, 5, 6)) > 0.7, -np.inf, 1.0),
        alibi=True,
    )
    moved = mask.moved(torch.as_tensor)
    blocks = (slice(1, 2), slice(0, 2), slice(1, 4), slice(0, 5))
    np.testing.assert_array_equal(moved.visible(*blocks).numpy(), mask.visible(*blocks))
    np.testing.assert_array_equal(moved.bias(*blocks).numpy(), mask.bias(*blocks))


# Bottom-right: the last real query at the last real key

RAGGED = np.array([[1, 1, 1, 0, 1, 0], [0, 0, 1, 1, 1, 1]], bool)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"key_lengths": (5, 7)}, [3, 5]),
        ({"key_lengths": (5,)}, [3]),
        ({"query_lengths": (1, 2)}, [7, 6]),
        ({"key_lengths": (5, 7), "query_lengths": (1, 0)}, [4, 7]),
        ({"key_padding": np.arange(8) < np.array([[5], [7]])}, [3, 5]),
        ({"key_padding": np.arange(8) < np.array([[5], [7]]), "key_lengths": (4,)}, [2, 2]),
        ({"key_padding": np.zeros((2, 8), bool)}, [-2, -2]),
        ({}, [6]),
    ],
)
def test_bottom_right_counts_what_is_real(options: dict[str, Any], expected: list[int]) -> None:
    mask = build(2, 8, batch=2, query_offset=Corner.BOTTOM_RIGHT, **options)
    assert mask.offset is not None
    assert mask.offset.tolist() == expected
    assert mask.warnings == ()


def test_bottom_right_counts_up_to_the_last_real_key_and_says_so() -> None:
    mask = build(2, 6, batch=2, query_offset=Corner.BOTTOM_RIGHT, key_padding=RAGGED)
    assert mask.offset is not None
    assert mask.offset.tolist() == [3, 4]
    assert "an offset of 3,4" in mask.warnings[0]


def test_a_cache_that_is_half_filled() -> None:
    options = {"causal": True, "left_window": 3, "key_lengths": (8,)}
    assert sets(build(1, 16, query_offset=Corner.BOTTOM_RIGHT, **options)) == [{4, 5, 6, 7}]


def test_the_error_offers_the_offset_of_what_is_real() -> None:
    with pytest.raises(UsageError) as caught:
        build(2, 8, batch=2, causal=True, key_lengths=(5, 7))
    assert "an offset of 3,5" in caught.value.advice


def test_no_window_is_too_wide_for_any_offset() -> None:
    far = {"query_offset": 2**53, "left_window": 2**62, "right_window": 2**63 - 1}
    assert sets(build(3, 3, causal=True, **far)) == [{0, 1, 2}] * 3


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([0, 1, 2, 0, 1, 2], "the ids count up from key to key, as positions do"),
        ([0, 1, 2, 3], "the ids count up from key to key, as positions do"),
        ([1, 1, 0, 1, 2, 3], "the ids count up from key to key, as positions do"),
        ([0, 1, 2, 0, 1, 2, 1, 1], "the ids count up from key to key, as positions do"),
        ([0, 1, 0, 1], "id 0 comes again at key 2, after others; both are one document"),
        ([3, 3, 7, 3], "id 3 comes again at key 3, after others; both are one document"),
        ([0, 0, 1, 2, 2], None),
        ([4, 3, 2, 1], None),
        ([0, 1], None),
        ([5, 5, 5], None),
        ([], None),
    ],
)
def test_ids_that_look_like_positions_or_recur(ids: list[int], said: str | None) -> None:
    batches = np.array([np.zeros(len(ids), int), ids])
    for segments in (np.array(ids, int), batches):
        options = AttentionOptions(segments=segments)
        found = build_mask(options, Sizes(2, 1, len(ids), len(ids))).warnings
        assert [
            text.partition("»: ")[2].partition(" («")[0].partition("; «")[0] for text in found
        ] == ([] if said is None else [said])
        assert all("«position_ids»" in text for text in found)


def test_positions_that_look_like_ids_of_documents() -> None:
    for ids, said in (([0, 0, 1, 1], 1), ([0, 1, 2, 0, 1], 0), ([1, 1, 1, 0, 1, 2, 1, 1, 1], 0)):
        found = build_mask(
            AttentionOptions(position_ids=np.array(ids)), Sizes(1, 1, *[len(ids)] * 2)
        )
        assert sum("«segments» takes those" in text for text in found.warnings) == said


def test_a_prefix_beside_a_window_is_told_from_first_keys_that_are_kept() -> None:
    mask = build(4, 4, causal=True, prefix=2, left_window=1)
    assert "sink_window=2" in mask.warnings[0]
    assert build(4, 4, causal=True, prefix=2, left_window=1, sink_window=2).warnings == ()


def test_positions_of_some_rows_are_those_of_the_whole() -> None:
    """Of one offset, of one for each batch, and of documents that begin again."""
    for batch, options in (
        (1, {"causal": True, "query_offset": 3}),
        (2, {"causal": True, "query_offset": (1, 4)}),
        (1, {"causal": True, "cu_seqlens_q": (0, 2, 6), "cu_seqlens_k": (0, 3, 9)}),
    ):
        if "cu_seqlens_q" in options:
            options["query_offset"] = Corner.BOTTOM_RIGHT
        mask = build(6, 9, batch=batch, **options)
        whole = mask.positions(ALL, ALL)
        if "cu_seqlens_q" in options:
            assert whole.tolist() == [[1, 2, 5, 6, 7, 8]]
        else:
            offsets = np.atleast_1d(options["query_offset"])  # type: ignore[call-overload]
            assert whole.tolist() == (offsets[:, None] + np.arange(6)).tolist()
        for rows in (slice(2, 5), np.array([5, 0, 3])):
            assert mask.positions(ALL, rows).tolist() == whole[:, rows].tolist()
            assert mask.positions(slice(batch - 1, batch), rows).tolist() == [
                whole[-1, rows].tolist()
            ]


def test_hulls_hold_every_key_that_is_seen() -> None:
    """Of any batch and any neighbouring heads, by rules, by files, and by files of each head."""
    random = np.random.default_rng(9)
    for file in (None, (1, 1, 6, 9), (2, 3, 6, 9), (2, 3, 1, 9), (1, 3, 6, 1)):
        options: dict[str, Any] = {"left_window": 3, "query_offset": (2, 4), "sink_window": 1}
        if file is not None:
            options["attn_mask"] = random.random(file) < 0.5
        mask = build(6, 9, batch=2, heads=3, **options)
        seen = cells(mask)
        for batch in range(2):
            for heads in (None, range(1), range(1, 2), range(1, 3), range(3)):
                hull = mask.hull(batch, heads)
                some = seen[batch, slice(None) if heads is None else heads].any(0)
                keys = np.arange(9)
                inside = (keys >= hull.first[:, None]) & (keys < hull.stop[:, None])
                if hull.kept is not None:
                    assert hull.resumed is not None
                    gap = (keys >= hull.kept[:, None]) & (keys < hull.resumed[:, None])
                    inside &= ~gap
                assert not (some & ~inside).any()
                if hull.exact:
                    every = seen[batch, slice(None) if heads is None else heads]
                    assert all(np.array_equal(one, inside) for one in every)
