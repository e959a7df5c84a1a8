"""Packed documents with queries of their own: positions count inside each document."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_masks import plain_mask

import attncli
from attncli.attention.masks.build import build_mask
from attncli.attention.masks.compare import leaks
from attncli.attention.masks.mask import HeadMask, Mask
from attncli.attention.options import AttentionOptions, Corner
from attncli.attention.problem import make_problem
from attncli.attention.sizes import Sizes
from attncli.attention.streaming.stream import HeadRows, Wanted, stream_rows
from attncli.errors import DataError, UsageError

ALL = slice(None)


def build(q_len: int, k_len: int, batch: int = 1, **options: Any) -> Mask:
    return build_mask(AttentionOptions(**options), Sizes(batch, 1, q_len, k_len))


def cells(mask: Mask, batch: int = 0) -> np.ndarray:
    return HeadMask(mask, batch).cells(ALL)


def edges(counts: list[int]) -> np.ndarray:
    return np.cumsum([0, *counts])


def blocks(queries: list[int], keys: list[int], corner: Corner | int, **rules: Any) -> np.ndarray:
    """Bool (S_q, S_k): the mask of each document by itself, along the diagonal."""
    seen = np.zeros((sum(queries), sum(keys)), bool)
    q, k = edges(queries), edges(keys)
    for d, (rows, columns) in enumerate(zip(queries, keys, strict=True)):
        named = {Corner.TOP_LEFT: 0, Corner.BOTTOM_RIGHT: columns - rows}
        offset = named.get(corner, corner) if isinstance(corner, Corner) else corner
        seen[q[d] : q[d + 1], k[d] : k[d + 1]] = plain_mask(rows, columns, int(offset), **rules)
    return seen


@st.composite
def packed(draw: st.DrawFn) -> tuple[list[int], list[int], Corner | int, dict[str, Any]]:
    count = draw(st.integers(1, 4))
    queries, keys = (
        draw(st.lists(st.integers(0, 6), min_size=count, max_size=count)) for _ in range(2)
    )
    corner = draw(st.sampled_from(list(Corner)) | st.integers(-2, 3))
    rules: dict[str, Any] = {"causal": draw(st.booleans())}
    if rules["causal"]:
        rules["prefix"] = draw(st.integers(0, 3))
    if draw(st.booleans()):
        rules["left_window"] = draw(st.integers(0, 3))
        rules["sink_window"] = draw(st.integers(0, 2))
        rules["dilation"] = draw(st.integers(1, 2))
    if draw(st.booleans()):
        rules["right_window"] = draw(st.integers(0, 3))
    return queries, keys, corner, rules


@settings(max_examples=200, deadline=None)
@given(drawn=packed(), by_ids=st.booleans())
def test_each_document_has_the_mask_of_its_own(drawn: Any, by_ids: bool) -> None:
    queries, keys, corner, rules = drawn
    expected = blocks(queries, keys, corner, **rules)
    if by_ids:
        names = np.array([7, -1, 3, 0])[: len(queries)]
        ids = {"segments": np.repeat(names, keys), "query_segments": np.repeat(names, queries)}
    else:
        ids = {"cu_seqlens_q": edges(queries), "cu_seqlens_k": edges(keys)}
    mask = build(*expected.shape, query_offset=corner, **ids, **rules)
    np.testing.assert_array_equal(cells(mask), expected)
    view = HeadMask(mask)
    assert view.interval_mask is not None
    np.testing.assert_array_equal(view.interval_mask.cells(ALL), expected)
    np.testing.assert_array_equal(view.marginals.counts, expected.sum(1))
    hull, index = mask.hull(0), np.arange(expected.shape[1])
    inside = (index >= hull.first[:, None]) & (index < hull.stop[:, None])
    if hull.kept is not None and hull.resumed is not None:
        inside &= (index < hull.kept[:, None]) | (index >= hull.resumed[:, None])
    assert not (expected & ~inside).any()


@settings(max_examples=30, deadline=None)
@given(drawn=packed(), seed=st.integers(0, 2**32))
def test_packed_documents_come_to_what_each_comes_to_alone(drawn: Any, seed: int) -> None:
    queries, keys, corner, rules = drawn
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((1, 2, sum(n), 4)) for n in (queries, keys, keys))
    q_at, k_at = edges(queries), edges(keys)
    rules |= {"alibi": True, "query_offset": corner}
    ids = {"cu_seqlens_q": q_at, "cu_seqlens_k": k_at}
    together = streamed(q, k, v, **ids, **rules)
    for d in range(len(queries)):
        rows, columns = slice(q_at[d], q_at[d + 1]), slice(k_at[d], k_at[d + 1])
        alone = streamed(q[:, :, rows], k[:, :, columns], v[:, :, columns], **rules)
        for one, own in zip(together, alone, strict=True):
            pairs = [(getattr(one, name)[rows], getattr(own, name)) for name in FIGURES]
            pairs += [
                (getattr(one.shares, name).weight[rows], getattr(own.shares, name).weight)
                for name in ("own", "previous", "local")
            ]
            for found, expected in pairs:
                torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


FIGURES = ("entropy_nats", "distance", "keys", "max_logit", "output", "logsumexp")


def streamed(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> list[HeadRows]:
    tensors = (torch.from_numpy(each) for each in (q, k, v))
    problem = make_problem(*tensors, AttentionOptions(**options))
    return list(stream_rows(problem, Wanted(output=True, per_key=True)))


def test_ragged_decode_needs_no_positions() -> None:
    ids = {"segments": np.repeat([0, 1, 2], [5, 2, 4]), "query_segments": np.arange(3)}
    mask = build(3, 11, **ids)
    np.testing.assert_array_equal(cells(mask), ids["segments"] == np.arange(3)[:, None])
    assert mask.shift is None
    again = build(3, 11, cu_seqlens_q=np.arange(4), cu_seqlens_k=edges([5, 2, 4]))
    np.testing.assert_array_equal(cells(again), cells(mask))


def test_ids_of_each_batch() -> None:
    own = np.array([[0, 0, 1], [0, 1, 1]])
    ids = {"segments": np.array([[0, 1, 1, 1], [0, 0, 0, 1]]), "query_segments": own}
    mask = build(3, 4, batch=2, causal=True, query_offset=Corner.BOTTOM_RIGHT, **ids)
    np.testing.assert_array_equal(cells(mask, 0), blocks([2, 1], [1, 3], BOTTOM, causal=True))
    np.testing.assert_array_equal(cells(mask, 1), blocks([1, 2], [3, 1], BOTTOM, causal=True))


BOTTOM = Corner.BOTTOM_RIGHT


def test_as_many_documents_as_queries_are_questioned() -> None:
    ids = np.repeat([4, 0, 2], [5, 2, 4])
    mask = build(3, 11, segments=ids, query_offset=BOTTOM)
    assert "query_segments=4,0,2" in mask.warnings[0]
    assert build(2, 11, segments=ids, query_offset=BOTTOM).warnings == ()
    with pytest.raises(UsageError) as caught:
        build(3, 11, segments=ids)
    assert "query_segments" in caught.value.advice


def test_bottom_right_counts_what_is_real_in_each_document() -> None:
    packed: dict[str, Any] = {"cu_seqlens_q": edges([2, 2]), "cu_seqlens_k": edges([4, 4])}
    keep = np.array([1, 1, 1, 0, 1, 1, 0, 0], bool)
    mask = build(4, 8, causal=True, query_offset=BOTTOM, key_padding=keep, **packed)
    assert mask.positions(ALL, ALL)[0].tolist() == [1, 2, 4, 5]
    assert mask.warnings == ()
    keep[1] = False
    mask = build(4, 8, causal=True, query_offset=BOTTOM, key_padding=keep, **packed)
    assert "last real key of each document" in mask.warnings[0]


def test_offsets_of_one_document_are_offsets() -> None:
    mask = build(2, 6, causal=True, query_offset=BOTTOM, cu_seqlens_q=[0, 2], cu_seqlens_k=[0, 6])
    assert mask.offset is not None
    assert mask.offset.tolist() == [4]


@pytest.mark.parametrize("axis", ["cu_seqlens_q", "cu_seqlens_k"])
def test_one_list_serves_queries_and_keys_of_the_same_number(axis: str) -> None:
    mask = build(5, 5, causal=True, **{axis: edges([2, 3])})
    np.testing.assert_array_equal(cells(mask), blocks([2, 3], [2, 3], 0, causal=True))
    with pytest.raises(UsageError) as caught:
        build(5, 5, **{axis: edges([2, 2])})
    assert caught.value.where == f"«{axis}»"
    assert mask.offset is not None


def test_position_ids_begin_documents_where_they_restart() -> None:
    mask = build(6, 6, causal=True, position_ids=np.array([0, 1, 2, 0, 1, 0]))
    np.testing.assert_array_equal(cells(mask), blocks([3, 2, 1], [3, 2, 1], 0, causal=True))
    assert mask.warnings == ()
    both = np.array([[0, 1, 0, 1], [3, 4, 5, 6]])
    mask = build(4, 4, batch=2, position_ids=both)
    np.testing.assert_array_equal(cells(mask, 0), blocks([2, 2], [2, 2], 0))
    assert cells(mask, 1).all()
    cached = build(2, 4, causal=True, position_ids=both[0], query_offset=BOTTOM)
    np.testing.assert_array_equal(cells(cached), blocks([0, 2], [2, 2], 0, causal=True))
    assert "skip" in build(3, 3, position_ids=np.array([0, 1, 5])).warnings[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"query_segments": [0, 1]}, "segments beside it"),
        ({"segments": [0, 0, 1, 1], "query_segments": [0, 1, 2]}, "one id per query, .S_q=2."),
        ({"segments": [0, 0, 1, 1], "position_ids": [0, 1, 0, 1]}, "one way to tell documents"),
        ({"segments": [0, 0, 1, 1], "cu_seqlens_k": [0, 4]}, "one way to tell documents"),
        ({"cu_seqlens_k": [0, 2, 4]}, "cu_seqlens_q: expected a value, since S_q=2 differs"),
        ({"cu_seqlens_q": [0, 2], "cu_seqlens_k": [0, 2, 4]}, "expected 2 documents"),
        ({"cu_seqlens_q": [0, 2], "cu_seqlens_k": [0, 5]}, "ascend from 0 to S_k=4, got 0,5"),
        ({"cu_seqlens_q": [0, 2], "cu_seqlens_k": [1, 4]}, "ascend from 0 to S_k=4, got 1,4"),
        ({"cu_seqlens_q": [0, 3, 2], "cu_seqlens_k": [0, 2, 4]}, "ascend from 0 to S_q=2"),
        ({"cu_seqlens_q": [], "cu_seqlens_k": [0, 4]}, "list of integers"),
        ({"cu_seqlens_q": [0.0, 2.0], "cu_seqlens_k": [0, 4]}, "list of integers"),
        (
            {"cu_seqlens_q": [0, 1, 2], "cu_seqlens_k": [0, 1, 4], "causal": True},
            "causal needs positions and document 1 has 1 queries and 3 keys",
        ),
        (
            {"segments": [0, 1, 0, 1], "query_segments": [0, 1], "query_offset": 0},
            "each document in one run",
        ),
    ],
)
def test_documents_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    given = {
        name: np.array(value) if isinstance(value, list) else value
        for name, value in options.items()
    }
    with pytest.raises((UsageError, DataError), match=message):
        build(2, 4, **given)


def test_the_error_offers_one_query_of_each_document() -> None:
    with pytest.raises(UsageError) as caught:
        build(3, 11, cu_seqlens_k=edges([5, 2, 4]))
    assert "cu_seqlens_q=0,1,2,3" in caught.value.advice


def test_leaks_are_told_by_the_positions_in_each_document() -> None:
    packed = {"cu_seqlens_q": edges([1, 2]), "cu_seqlens_k": edges([2, 3])}
    options = AttentionOptions(causal=True, query_offset=BOTTOM, **packed)
    shown = build_mask(options, Sizes(1, 1, 3, 5))
    assert [leak.cells for leak in leaks(shown, options)] == [0, 0]
    full = build(3, 5)
    assert [leak.cells for leak in leaks(full, options)] == [3 + 1, 3 + 2 * 2]


@pytest.mark.parametrize(
    ("declared", "made", "name"),
    [
        ({"causal": True, "query_offset": BOTTOM}, {"query_offset": 0}, "offset:top-left"),
        ({"query_offset": BOTTOM}, {"causal": True}, "causal:added"),
        ({}, {"causal": True, "query_offset": BOTTOM}, "causal:added"),
        ({"query_offset": BOTTOM, "left_window": 1}, {"left_window": None}, "window:missing"),
        ({}, {"cu_seqlens_q": None, "cu_seqlens_k": None}, "segments:missing"),
    ],
)
def test_mistakes_with_packed_documents_are_named(
    declared: dict[str, Any], made: dict[str, Any], name: str
) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, n, 8)) for n in (5, 12, 12))
    declared |= {"cu_seqlens_q": [0, 2, 5], "cu_seqlens_k": [0, 5, 12]}
    wrong = attncli.compute(q, k, v, stages="output", **(declared | made)).stages["output"]
    found = attncli.check(q, k, v, actual_output=wrong, **declared)
    assert [one.name for one in found.mistakes][:1] == [name]
