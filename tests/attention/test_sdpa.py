"""The reference against torch's scaled dot-product attention in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import Cells, masks, positional_options, tensors

import attncli

INF = float("inf")


@given(data=st.data())
@settings(max_examples=70, deadline=None)
def test_sdpa_in_float64(data: st.DataObject) -> None:
    t = data.draw(tensors())
    mask = data.draw(masks(t.cells))
    scale = data.draw(st.sampled_from([None, 0.0, 0.3, -1.0, 2.0]))
    torch_mask = None
    if mask is not None:  # rank 3 is (H, S_q, S_k) for both, since torch broadcasts from the right
        torch_mask = torch.from_numpy(mask).expand(t.cells)
    expected = F.scaled_dot_product_attention(
        t.q, t.k, t.v, attn_mask=torch_mask, scale=scale, enable_gqa=True
    )
    result = attncli.compute(t.q, t.k, t.v, attn_mask=mask, scale=scale, stages="output")
    torch.testing.assert_close(result.stages["output"], expected, rtol=1e-12, atol=1e-12)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_sdpa_causal_with_its_own_flag(data: st.DataObject) -> None:
    t = data.draw(tensors())
    expected = F.scaled_dot_product_attention(t.q, t.k, t.v, is_causal=True, enable_gqa=True)
    result = attncli.compute(t.q, t.k, t.v, causal=True, query_offset="top-left")
    torch.testing.assert_close(result.stages["output"], expected, rtol=1e-12, atol=1e-12)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_sdpa_with_every_rule_written_out(data: st.DataObject) -> None:
    """Offsets, windows, prefix, lengths, padding, segments and ALiBi, cell by cell in Python."""
    t = data.draw(tensors())
    options = data.draw(positional_options(t.cells))
    mask = data.draw(masks(t.cells))
    visible, bias = written_out(options, t.cells)
    if mask is not None and mask.dtype == bool:
        visible &= mask
    elif mask is not None:
        bias = bias + mask
    expected = F.scaled_dot_product_attention(
        t.q,
        t.k,
        t.v,
        attn_mask=torch.from_numpy(np.where(visible, bias, -INF)),
        enable_gqa=True,
    )
    result = attncli.compute(t.q, t.k, t.v, attn_mask=mask, **options)
    assert result.visible is not None
    np.testing.assert_array_equal(result.visible.numpy(), visible & (bias > -INF))
    torch.testing.assert_close(result.stages["output"], expected, rtol=1e-12, atol=1e-12)


def written_out(
    options: dict[str, Any], cells: Cells
) -> tuple[np.ndarray[Any, np.dtype[np.bool_]], np.ndarray[Any, np.dtype[np.float64]]]:
    """Visibility and ALiBi bias, the rules of the options taken one cell at a time."""
    visible, bias = np.ones(cells, bool), np.zeros(cells)
    for b, h, i, j in np.ndindex(cells):
        p = i + options["query_offset"][b]
        rules = [
            not options["causal"] or j <= p or j < (options.get("prefix") or 0),
            options["left_window"] is None
            or j >= p - options["left_window"]
            or j < (options["sink_window"] or 0),
            options["right_window"] is None or j <= p + options["right_window"],
            (p - j) % (options.get("dilation") or 1) == 0,
            options["key_lengths"] is None or j < options["key_lengths"][b],
            "key_padding" not in options or options["key_padding"][b, j],
        ]
        if "segments" in options:
            ids = options["segments"][b]
            rules.append(0 <= p < len(ids) and ids[p] == ids[j])
        visible[b, h, i, j] = all(rules)
        if options["alibi"]:
            bias[b, h, i, j] = -slope(h, cells[1]) * abs(p - j)
    return visible, bias


SLOPES = {
    1: [2**-8],
    2: [2**-4, 2**-8],
    3: [0.0625, 0.00390625, 0.25],
    4: [0.25, 0.0625, 0.015625, 0.00390625],
    6: [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125],
    9: [*(2.0**-n for n in range(1, 9)), 2**-0.5],
}


def slope(head: int, heads: int) -> float:
    return SLOPES[heads][head]
