"""Masks of rules alone, counted in closed form: the same as cell by cell, at any length."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attncli.attention.masks.audit import audit, cell_counts
from attncli.attention.masks.build import build_mask
from attncli.attention.masks.span_audit import audit_spans
from attncli.attention.masks.spans import mask_of_spans
from attncli.attention.options import AttentionOptions, Corner
from attncli.attention.sizes import Sizes
from attncli.errors import UsageError

SHORT, ANY = st.integers(0, 14), st.integers(-9, 20)


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


@st.composite
def problems(draw: st.DrawFn) -> tuple[AttentionOptions, Sizes]:
    """Options of rules alone and sizes that they fit."""
    batch, q_len, k_len = draw(st.integers(1, 3)), draw(SHORT), draw(SHORT)
    offset = st.sampled_from([Corner.TOP_LEFT, Corner.BOTTOM_RIGHT]) | ANY
    offset |= st.lists(ANY, min_size=batch, max_size=batch).map(tuple)
    given: dict[str, Any] = {
        "causal": draw(st.booleans()),
        "query_offset": draw(offset),
        "left_window": draw(maybe(SHORT)),
        "right_window": draw(maybe(SHORT)),
    }
    if given["causal"]:
        given["prefix"] = draw(maybe(SHORT))
    if given["left_window"] is not None:
        given["sink_window"] = draw(maybe(SHORT))
    if draw(st.booleans()):
        count = draw(st.integers(1, 4))
        for axis, length in (("q", q_len), ("k", k_len)):
            inner = draw(st.lists(st.integers(0, length), min_size=count, max_size=count))
            given[f"cu_seqlens_{axis}"] = np.array([0, *sorted(inner), length])
    else:
        if given["left_window"] is not None or given["right_window"] is not None:
            given["dilation"] = draw(maybe(st.integers(1, 6)))
        for name, most in (("key_lengths", k_len), ("query_lengths", q_len)):
            size = draw(st.sampled_from([1, batch]))
            lengths = st.lists(st.integers(0, most), min_size=size, max_size=size)
            given[name] = draw(maybe(lengths.map(tuple)))
    return AttentionOptions(**given), Sizes(batch, 1, q_len, k_len)


def drawn(seed: int) -> tuple[AttentionOptions, Sizes]:
    """Rules that nearly all leave something to see, in sizes that differ."""
    random = np.random.default_rng(seed)

    def number(low: int, high: int) -> int:
        return int(random.integers(low, high + 1))

    batch, q_len, k_len = number(1, 2), number(1, 9), number(1, 12)
    causal, packed = bool(number(0, 3)), not number(0, 3)
    given: dict[str, Any] = {"causal": causal}
    given["query_offset"] = (
        Corner.BOTTOM_RIGHT,
        Corner.TOP_LEFT,
        number(-2, 6),
        tuple(number(-2, 6) for _ in range(batch)),
    )[number(0, 3)]
    if number(0, 1):
        given["left_window"] = number(0, 4)
        given["sink_window"] = number(0, 3)
    if number(0, 2) == 0:
        given["right_window"] = number(0, 4)
    if causal and number(0, 1):
        given["prefix"] = number(0, 5)
    if packed:
        for axis, length in (("q", q_len), ("k", k_len)):
            inner = sorted(number(0, length) for _ in range(2))
            given[f"cu_seqlens_{axis}"] = np.array([0, *inner, length])
        return AttentionOptions(**given), Sizes(batch, 1, q_len, k_len)
    if number(0, 1) and (given.keys() & {"left_window", "right_window"}):
        given["dilation"] = number(1, 4)
    if number(0, 1):
        given["key_lengths"] = tuple(number(1, k_len) for _ in range(batch))
    if number(0, 2) == 0:
        given["query_lengths"] = tuple(number(1, q_len) for _ in range(batch))
    return AttentionOptions(**given), Sizes(batch, 1, q_len, k_len)


def test_seeded_problems_in_every_respect() -> None:
    """Cells, counts, positions and what is told of them, as the plain mask has them."""
    for seed in range(250):
        options, sizes = drawn(seed)
        mask, plain = mask_of_spans(options, sizes), build_mask(options, sizes)
        assert mask is not None
        if options.cu_seqlens_k is None and plain.offset is not None:
            assert mask.offset is not None
            both = [np.broadcast_to(each.offset, sizes.batch).tolist() for each in (mask, plain)]
            assert both[0] == both[1], seed
        for batch in range(sizes.batch):
            head, expected = mask.head(batch, 0), plain.head(batch, 0)
            cells = expected.cells(slice(0, expected.rows))
            assert np.array_equal(head.cells(slice(0, head.rows)), cells), seed
            grid = cell_counts(head, 3, 4)
            edges = grid.query_edges.tolist(), grid.key_edges.tolist()
            found = [
                [int(cells[top:end, left:stop].sum()) for left, stop in pairwise(edges[1])]
                for top, end in pairwise(edges[0])
            ]
            assert grid.counts.tolist() == found, seed
        told, counted = audit_spans(mask, options).records, audit(plain, options).records
        bare = [replace(record, description="", batch=None) for record in counted]
        alike = [replace(record, description="", batch=None) for record in told]
        assert alike == (bare * len(alike) if len(bare) == 1 else bare), seed


@given(problems())
@settings(max_examples=100)
def test_counts_are_those_of_the_cells(problem: tuple[AttentionOptions, Sizes]) -> None:
    options, sizes = problem
    mask, plain = mask_of_spans(options, sizes), build_mask(options, sizes)
    assert mask is not None
    for batch in range(sizes.batch):
        head, expected = mask.head(batch, 0), plain.head(batch, 0)
        assert head.rows == expected.rows
        cells = expected.cells(slice(0, expected.rows))
        assert np.array_equal(head.cells(slice(0, head.rows)), cells)
        grid, right = cell_counts(head, 3, 4), cell_counts(expected, 3, 4)
        if len(grid.query_edges) == len(right.query_edges):
            assert np.array_equal(grid.counts, right.counts)
        assert grid.counts.sum() == cells.sum()
    told, counted = audit_spans(mask, options).records, audit(plain, options).records
    bare = [replace(record, description="", batch=None) for record in counted]
    found = [replace(record, description="", batch=None) for record in told]
    if len(bare) == 1:  # of batches that differ in what does not show as well
        bare *= len(found)
    assert found == bare


@pytest.mark.parametrize(
    "option",
    [
        {"attn_mask": np.ones((8, 8), bool)},
        {"key_padding": np.ones(8, bool)},
        {"segments": np.zeros(8, np.int64)},
        {"position_ids": np.arange(8)},
        {"alibi": True},
        {"alibi_slopes": np.ones(1)},
        {"left_window": 3, "dilation": 5000},
        {"cu_seqlens_q": np.array([0, 8]), "key_lengths": (3,)},
    ],
)
def test_what_needs_a_look_at_each_key_is_left_to_others(option: dict[str, Any]) -> None:
    assert mask_of_spans(AttentionOptions(**option), Sizes(1, 1, 8, 8)) is None


@pytest.mark.parametrize("sizes", [Sizes(1, 1, 2**31, 2**31), Sizes(1, 1, 1, 2**56)])
def test_so_are_counts_beyond_64_bits(sizes: Sizes) -> None:
    assert mask_of_spans(AttentionOptions(), sizes) is None


@pytest.mark.parametrize(
    ("option", "sizes"),
    [
        ({"causal": True}, Sizes(1, 1, 4, 9)),
        ({"causal": True, "cu_seqlens_q": np.array([0, 4, 8]), "cu_seqlens_k": np.array([0, 5, 8])},
         Sizes(1, 1, 8, 8)),
        ({"key_lengths": (9,)}, Sizes(1, 1, 8, 8)),
        ({"query_lengths": (1, 2, 3)}, Sizes(2, 1, 8, 8)),
        ({"causal": True, "query_offset": (1, 2, 3)}, Sizes(2, 1, 8, 8)),
        ({"cu_seqlens_q": np.array([0, 5])}, Sizes(1, 1, 8, 8)),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_in_the_same_words(
    option: dict[str, Any], sizes: Sizes
) -> None:
    said = []
    for make in (mask_of_spans, build_mask):
        with pytest.raises(UsageError) as refused:
            make(AttentionOptions(**option), sizes)
        said.append((refused.value.where, refused.value.problem, refused.value.advice))
    assert said[0] == said[1]


def test_a_thousand_million_queries_and_keys() -> None:
    n, sizes = 10**9, Sizes(1, 1, 10**9, 10**9)
    for options, kept in (
        (AttentionOptions(causal=True), n * (n + 1) // 2),
        (AttentionOptions(causal=True, left_window=99), 100 * n - 99 * 100 // 2),
        (AttentionOptions(causal=True, prefix=10), n * (n + 1) // 2 + 45),
        (AttentionOptions(left_window=7, right_window=7, dilation=7), 3 * n - 14),
        (AttentionOptions(cu_seqlens_q=np.array([0, 10, n])), 100 + (n - 10) ** 2),
    ):
        mask = mask_of_spans(options, sizes)
        assert mask is not None
        (record,) = audit_spans(mask, options).records
        assert record.kept == kept
        assert cell_counts(mask.head(0, 0), 9, 5).counts.sum() == kept


def test_documents_of_queries_and_keys_alike_stand_where_the_axes_do() -> None:
    cuts = (0, 3, 8)
    options = AttentionOptions(cu_seqlens_q=cuts, cu_seqlens_k=cuts)
    mask = mask_of_spans(options, Sizes(1, 1, 8, 8))
    assert mask is not None
    assert mask.positions(slice(None), slice(None)).tolist() == [list(range(8))]
    found = audit_spans(mask, options)
    assert found.description == "2 packed documents"
    causal = replace(options, causal=True)
    told = mask_of_spans(causal, Sizes(1, 1, 8, 8))
    assert told is not None
    said = "causal; 2 packed documents, positions counted in each"
    assert audit_spans(told, causal).description == said
    apart = AttentionOptions(cu_seqlens_q=(0, 2, 8), cu_seqlens_k=cuts)
    other = mask_of_spans(apart, Sizes(1, 1, 8, 8))
    assert other is not None
    assert other.shift is None
