"""Whoever works with a mask sees the same cells of it, and those that its rules say."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_masks import plain_mask
from random_problems import Cells, Tensors, masks, positional_options, tensors

from attncli.attention.check.variant import evaluate, right_variant
from attncli.attention.check.walk import all_parts
from attncli.attention.masks.audit import audit as audit_mask
from attncli.attention.masks.mask import head_masks
from attncli.attention.options import AttentionOptions, Stage
from attncli.attention.problem import Problem, cost_of, make_problem
from attncli.attention.stages import select, stage_blocks
from attncli.attention.streaming.stream import stream_rows
from attncli.attention.variance.moments import audit as audit_variance


def cell_by_cell(options: dict[str, Any], cells: Cells) -> np.ndarray:
    """Bool (B, H, S_q, S_k): what a query that is not padded sees, by plain loops."""
    batch, _, q_len, k_len = cells
    seen = np.zeros(cells, bool)
    rules = {name: options[name] for name in ("causal", "left_window", "right_window", "dilation")}
    rules = {name: value for name, value in rules.items() if value is not None}
    rules["prefix"] = options["prefix"] or 0
    rules["sink_window"] = options["sink_window"] or 0
    for b in range(batch):
        if options["key_lengths"] is not None:
            rules["key_length"] = options["key_lengths"][b]
        if options["key_padding"] is not None:
            rules["keep"] = options["key_padding"][b]
        if options["segments"] is not None:
            rules["segments"] = options["segments"][b]
        seen[b] = plain_mask(q_len, k_len, options["query_offset"][b], **rules)
        if options["query_lengths"] is not None:
            seen[b, :, options["query_lengths"][b] :] = False
    file = options["attn_mask"]
    if file is None:
        return seen
    return seen & (file if file.dtype == bool else file > -np.inf)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensors, dict[str, Any]]:
    drawn = draw(tensors())
    options = dict.fromkeys(("prefix", "dilation", "key_padding", "segments", "query_lengths"))
    options["sink_window"] = None
    options |= draw(positional_options(drawn.cells)) | {"attn_mask": draw(masks(drawn.cells))}
    if draw(st.booleans()):
        batch, _, q_len, _ = drawn.cells
        lengths = st.lists(st.integers(0, q_len), min_size=batch, max_size=batch)
        options["query_lengths"] = draw(lengths)
    return drawn, options


@settings(max_examples=150, deadline=None)
@given(drawn=problems())
def test_everybody_sees_the_cells_that_the_rules_say(drawn: tuple[Tensors, dict[str, Any]]) -> None:
    t, options = drawn
    expected = cell_by_cell(options, t.cells)
    lists = ("query_offset", "key_lengths", "query_lengths")
    tuples = {name: options[name] and tuple(options[name]) for name in lists}
    built = AttentionOptions(**(options | tuples))
    problem = make_problem(t.q, t.k, t.v, built)
    of_heads = expected.sum((2, 3))  # (B, H)
    np.testing.assert_array_equal(visible_in_stages(problem), expected)
    np.testing.assert_array_equal(visible_in_check(problem, built), expected)
    rows = list(stream_rows(problem))
    assert [int(one.keys.sum()) for one in rows] == of_heads.ravel().tolist()
    assert [one.cells for one in audit_variance(problem)] == of_heads.ravel().tolist()
    assert cost_of(problem).visible_pairs == expected.sum()
    for record in audit_mask(problem.mask).records:
        where = tuple(slice(None) if i is None else i for i in (record.batch, record.head))
        assert np.all(of_heads[where] == record.kept)


def visible_in_stages(problem: Problem) -> np.ndarray:
    """Bool (B, H, S_q, S_k), True where `masked` is more than −inf and the query is no padding."""
    blocks = stage_blocks(problem, [Stage.MASKED], select(problem))
    sizes = problem.sizes
    seen = np.zeros((sizes.batch, sizes.heads, sizes.q_len, sizes.k_len), bool)
    for block in blocks:
        shown = (block.values > -torch.inf) & block.real[:, None]
        seen[block.batch, block.head, list(block.rows)] = shown
    return seen


def visible_in_check(problem: Problem, options: AttentionOptions) -> np.ndarray:
    """Bool (B, H, S_q, S_k), True where a weight is expected and the query is no padding."""
    variant, sizes = right_variant(problem, options), problem.sizes
    seen = np.zeros((sizes.batch, sizes.heads, sizes.q_len, sizes.k_len), bool)
    for part in all_parts(variant):
        weights = evaluate(variant, part).weights
        seen[part.batch, part.head, part.rows.numpy()] = weights.numpy() > 0
    return seen


@settings(max_examples=100, deadline=None)
@given(drawn=problems())
def test_intervals_are_the_cells(drawn: tuple[Tensors, dict[str, Any]]) -> None:
    t, options = drawn
    lists = ("query_offset", "key_lengths", "query_lengths")
    tuples = {name: options[name] and tuple(options[name]) for name in lists}
    mask = make_problem(t.q, t.k, None, AttentionOptions(**(options | tuples))).mask
    for batch, head, view in head_masks(mask):
        cells = view.cells(slice(0, view.rows))
        if view.interval_mask is not None:
            np.testing.assert_array_equal(view.interval_mask.cells(slice(None)), cells)
        hull, keys = mask.hull(batch or 0, range(head or 0, (head or 0) + 1)), np.arange(view.k_len)
        inside = (keys >= hull.first[:, None]) & (keys < hull.stop[:, None])
        assert not (cells & ~inside).any()
        if hull.resumed is not None:
            gap = (keys >= hull.kept[:, None]) & (keys < hull.resumed[:, None])
            assert not (cells & gap).any()
        if hull.exact:
            np.testing.assert_array_equal(inside, cells)
