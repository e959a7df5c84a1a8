"""What each classic mistake of the table is tried as, and where it makes no sense."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from attncli.attention.check.candidate import LayoutError
from attncli.attention.check.mistakes import MISTAKES, TOGETHER, Alternative
from attncli.attention.check.variant import SoftmaxOver, Variant, evaluate, parts_of, right_variant
from attncli.attention.options import AttentionOptions, Corner, MaskTrue
from attncli.attention.problem import make_problem

TABLE = {one.name: one for one in (*MISTAKES, *TOGETHER)}


def variant_of(
    heads: int = 4,
    kv_heads: int = 2,
    q_len: int = 5,
    k_len: int = 7,
    dv: int | None = 6,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Variant:
    random = torch.Generator().manual_seed(0)
    q = torch.randn(2, heads, q_len, 4, generator=random).to(dtype)
    k = torch.randn(2, kv_heads, k_len, 4, generator=random).to(dtype)
    v = None if dv is None else torch.randn(2, kv_heads, k_len, dv, generator=random).to(dtype)
    declared = AttentionOptions(**options)
    return right_variant(make_problem(q, k, v, declared), declared)


def tried(name: str, variant: Variant) -> list[Alternative]:
    return list(TABLE[name].alternatives(variant))


def changes(name: str, variant: Variant) -> list[dict[str, Any]]:
    return [one.changes for one in tried(name, variant)]


def weights(variant: Variant) -> torch.Tensor:
    """All weights of a variant, (B, H, S_q, S_k)."""
    rows = torch.arange(variant.problem.sizes.q_len)
    (part,) = parts_of(variant, rows, range(2), all_heads=True)
    return evaluate(variant, part, with_output=False).weights


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("scale:none", 1.0),
        ("scale:dv", 1 / math.sqrt(6)),
        ("scale:model", 1 / math.sqrt(16)),
        ("scale:dk", 0.25),
    ],
)
def test_other_scales(name: str, scale: float) -> None:
    found = tried(name, variant_of())
    assert [one.changes for one in found] == [{"scale": pytest.approx(scale)}]
    assert found[0].variant.problem.scale == pytest.approx(scale)
    assert changes(name, variant_of(scale=scale)) == []


def test_a_scale_that_is_applied_twice() -> None:
    assert changes("scale:squared", variant_of()) == []  # 1/d_k, which has its own name
    assert changes("scale:squared", variant_of(scale=0.3)) == [{"scale": pytest.approx(0.09)}]
    each = (0.5, 0.25, 2.0, 1.0)
    assert changes("scale:squared", variant_of(scale=each)) == [{"scale": (0.25, 0.0625, 4.0, 1.0)}]


def test_no_scale_by_the_width_of_values_without_any() -> None:
    assert changes("scale:dv", variant_of(dv=None)) == []
    assert changes("scale:dv", variant_of(dv=0)) == []


def test_softmax_over_heads_needs_several() -> None:
    def over(name: str, variant: Variant) -> list[SoftmaxOver]:
        return [one.variant.softmax for one in tried(name, variant)]

    queries, heads = SoftmaxOver.QUERIES, SoftmaxOver.HEADS
    masked = [SoftmaxOver.ALL_KEYS, SoftmaxOver.ADDED_KEYS]
    assert over("softmax:axis", variant_of()) == [queries, heads]
    assert over("softmax:axis", variant_of(heads=1, kv_heads=1)) == [queries]
    assert over("mask:after-softmax", variant_of(heads=1, kv_heads=1)) == masked
    assert over("softmax:unnormalised", variant_of()) == [*masked, SoftmaxOver.NOTHING]


def test_causality_left_out_takes_its_prefix_along() -> None:
    assert changes("causal:missing", variant_of()) == []
    assert changes("causal:missing", variant_of(causal=True, query_offset=0)) == [{"causal": False}]
    found = changes("causal:missing", variant_of(causal=True, query_offset=0, prefix=2))
    assert found == [{"causal": False, "prefix": None}]


def test_added_causality_is_tried_in_both_corners() -> None:
    both = [{"causal": True, "query_offset": 0}, {"causal": True, "query_offset": 2}]
    assert changes("causal:added", variant_of()) == both
    assert changes("causal:added", variant_of(left_window=3, query_offset=1)) == [{"causal": True}]
    assert changes("causal:added", variant_of(causal=True, query_offset=0)) == []
    packed = variant_of(q_len=7, segments=np.array([0, 0, 0, 1, 1, 1, 1]))
    assert changes("causal:added", packed) == [{"causal": True}]


def test_slopes_left_out_and_added() -> None:
    usual = variant_of(alibi=True, query_offset=0)
    own = variant_of(alibi_slopes=np.array([0.5, 0.25, 0.1, 0.0]), query_offset=0)
    assert changes("alibi:missing", usual) == [{"alibi": False}]
    assert changes("alibi:missing", own) == [{"alibi_slopes": None}]
    assert changes("alibi:missing", variant_of()) == []
    assert changes("alibi:added", usual) == []
    assert changes("alibi:added", own) == [{"alibi": True, "alibi_slopes": None}]
    corners = [{"alibi": True, "query_offset": 0}, {"alibi": True, "query_offset": 2}]
    assert changes("alibi:added", variant_of()) == corners


def test_other_positions_of_query_0() -> None:
    one = variant_of(causal=True, query_offset=1)
    assert changes("offset:top-left", one) == [{"query_offset": 0}]
    assert changes("offset:bottom-right", one) == [{"query_offset": 2}]
    assert changes("offset:-1", one) == [{"query_offset": 0}]
    assert changes("offset:+1", one) == [{"query_offset": 2}]
    assert changes("offset:top-left", variant_of(causal=True, query_offset=0)) == []
    assert changes("offset:bottom-right", variant_of(causal=True, query_offset=2)) == []
    # A position that no rule asks for.
    assert changes("offset:+1", variant_of(query_offset=1)) == []
    assert changes("offset:+1", variant_of()) == []


def test_other_positions_of_each_batch() -> None:
    several = variant_of(causal=True, query_offset=(0, 2))
    assert changes("offset:+1", several) == [{"query_offset": (1, 3)}]
    assert changes("offset:top-left", several) == [{"query_offset": 0}]
    assert changes("offset:bottom-right", several) == [{"query_offset": 2}]
    found = tried("offset:+1", several)[0].variant
    assert torch.equal(found.problem.mask.offset, torch.tensor([1, 3]))


def test_documents_with_positions_of_their_own_have_corners_alone() -> None:
    options: dict[str, Any] = {"causal": True, "cu_seqlens_k": (0, 3, 7), "cu_seqlens_q": (0, 2, 5)}
    packed = variant_of(query_offset=Corner.TOP_LEFT, **options)
    assert changes("offset:+1", packed) == []
    assert changes("offset:top-left", packed) == []
    assert changes("offset:bottom-right", packed) == [{"query_offset": Corner.BOTTOM_RIGHT}]
    other = variant_of(query_offset=Corner.BOTTOM_RIGHT, **options)
    assert changes("offset:top-left", other) == [{"query_offset": Corner.TOP_LEFT}]
    bare = variant_of(cu_seqlens_k=(0, 3, 7), cu_seqlens_q=(0, 2, 5))
    both = [{"causal": True, "query_offset": corner} for corner in Corner]
    assert changes("causal:added", bare) == both


def test_windows_wider_and_narrower() -> None:
    both = variant_of(left_window=2, right_window=0, query_offset=1)
    assert changes("window:+1", both) == [
        {"left_window": 3},
        {"right_window": 1},
        {"left_window": 3, "right_window": 1},
    ]
    assert changes("window:-1", both) == [{"left_window": 1}]
    assert changes("window:+1", variant_of()) == []


def test_windows_left_out_with_what_belongs_to_them() -> None:
    full = variant_of(left_window=2, sink_window=1, dilation=2, query_offset=1)
    missing = {"left_window": None, "sink_window": None, "dilation": None}
    assert changes("window:missing", full) == [missing]
    assert changes("sink-window:missing", full) == [{"sink_window": None}]
    assert changes("dilation:missing", full) == [{"dilation": None}]
    for name in ("window:missing", "sink-window:missing", "prefix:missing", "segments:missing"):
        assert changes(name, variant_of()) == []


def test_boolean_masks_read_otherwise() -> None:
    keep = np.tri(5, 7, 2, dtype=bool)
    for meaning, other in ((MaskTrue.KEEP, MaskTrue.DROP), (MaskTrue.DROP, MaskTrue.KEEP)):
        given = keep if meaning is MaskTrue.KEEP else ~keep
        variant = variant_of(attn_mask=given, mask_true=meaning)
        (inverted,) = tried("mask:inverted", variant)
        assert inverted.changes == {"mask_true": other}
        assert torch.equal(
            weights(inverted.variant) > 0, torch.from_numpy(~keep).expand(2, 4, 5, 7)
        )
        (added,) = tried("mask:as-additive", variant)
        logits = (weights(added.variant) / weights(variant_of())).log()  # up to one number a row
        expected = torch.from_numpy(given).to(torch.float64)
        for i in range(5):
            shift = logits[0, 0, i] - expected[i]
            assert torch.allclose(shift, shift[:1].expand(7), atol=1e-4)
        assert changes("mask:missing", variant) == [{"attn_mask": None}]
        assert changes("mask:as-boolean", variant) == []


def test_additive_masks_read_as_booleans() -> None:
    added = np.tile(np.array([0.0, 1.0, -1e9, -np.inf, 0.0, -2.0, 0.0]), (5, 1))
    variant = variant_of(attn_mask=added)
    seen = [
        (weights(one.variant) > 0)[0, 0, 0].tolist() for one in tried("mask:as-boolean", variant)
    ]
    line = added[0]
    assert seen == [(line != 0).tolist(), (line == 0).tolist(), (line > -1e8).tolist()]
    assert changes("mask:inverted", variant) == []
    assert changes("mask:as-additive", variant) == []
    for name in ("mask:missing", "mask:inverted", "mask:as-boolean", "mask:as-additive"):
        assert changes(name, variant_of()) == []


def test_padding_of_keys_laid_on_queries() -> None:
    variant = variant_of(q_len=7, key_lengths=(4, 6))
    rows = torch.arange(7) < torch.tensor([[4], [6]])  # (B, S_q)
    instead, beside = (weights(one.variant) > 0 for one in tried("padding:queries", variant))
    assert torch.equal(instead, rows[:, None, :, None].expand(2, 4, 7, 7))
    assert torch.equal(beside, (rows[:, None, :, None] & rows[:, None, None]).expand(2, 4, 7, 7))
    assert changes("padding:queries", variant_of(key_lengths=(4, 6))) == []  # 5 queries, 7 keys
    assert changes("padding:queries", variant_of(q_len=7)) == []
    keep = np.arange(7) != 2
    marked = tried("padding:queries", variant_of(q_len=7, key_padding=np.stack([keep, keep])))
    assert len(marked) == 2
    assert changes("padding:ignored", variant) == [{"key_lengths": None}]


def test_rotations_are_tried_at_each_position_and_precision() -> None:
    def rotations(name: str, **given: Any) -> list[Any]:
        return [one.variant.rotation for one in tried(name, variant_of(**given))]

    found = rotations("rope:missing")
    assert len(found) == 2 * 14
    assert {one.offset for one in found} == {(0,), (2,)}
    assert not any(one.backwards or one.in_own_dtype for one in found)
    assert {one.base for one in found} == {1e4, 5e5, 1e6}
    assert {one.share for one in found} == {1.0, 0.5, 0.25}
    assert sum(not one.queries for one in found) == sum(not one.keys for one in found) == 4
    assert all(one.backwards for one in rotations("rope:twice"))
    assert {one.offset for one in rotations("rope:missing", causal=True, query_offset=(0, 1))} == {
        (0, 1)
    }
    halves = rotations("rope:missing", dtype=torch.bfloat16)
    assert [one.in_own_dtype for one in halves] == [False, True] * 28
    assert len(rotations("rope:missing", dtype=torch.float64)) == 28
    assert rotations("rope:missing", cu_seqlens_k=(0, 3, 7), cu_seqlens_q=(0, 2, 5)) == []


def test_mistakes_of_heads_need_several() -> None:
    (tiled,) = tried("heads:tiled", variant_of())
    variant = variant_of()
    k, v = variant.problem.k, variant.problem.v
    assert v is not None
    assert torch.equal(tiled.variant.problem.k, k[:, [0, 1, 0, 1]])
    assert tiled.variant.problem.v is not None
    assert torch.equal(tiled.variant.problem.v, v[:, [0, 1, 0, 1]])
    assert changes("heads:tiled", variant_of(kv_heads=1)) == []
    assert changes("heads:tiled", variant_of(kv_heads=4)) == []
    (averaged,) = tried("heads:averaged", variant)
    assert averaged.variant.heads_averaged
    assert tried("heads:averaged", averaged.variant) == []
    assert tried("heads:averaged", variant_of(heads=1, kv_heads=1)) == []


def test_queries_and_keys_change_places_where_they_are_as_many() -> None:
    variant = variant_of(q_len=7)
    (found,) = tried("qk:exchanged", variant)
    assert torch.equal(found.variant.problem.q, variant.problem.k[:, [0, 0, 1, 1]])
    assert torch.equal(found.variant.problem.k, variant.problem.q)
    assert found.variant.problem.v is not None
    assert variant.problem.v is not None
    assert torch.equal(found.variant.problem.v, variant.problem.v[:, [0, 0, 1, 1]])
    assert tried("qk:exchanged", variant_of()) == []
    alone = variant_of(q_len=7, kv_heads=4)
    (found,) = tried("qk:exchanged", alone)
    assert torch.equal(found.variant.problem.q, alone.problem.k)


def test_soft_caps_and_sinks_left_out() -> None:
    variant = variant_of(softcap=3.0, sinks=np.zeros(4))
    assert changes("softcap:missing", variant) == [{"softcap": None}]
    assert changes("sinks:missing", variant) == [{"sinks": None}]
    assert [one.variant.cap_after_mask for one in tried("softcap:after-mask", variant)] == [True]
    for name in ("softcap:missing", "softcap:after-mask", "sinks:missing", "sinks:renormalised"):
        assert changes(name, variant_of()) == []


def layouts(name: str, variant: Variant) -> list[LayoutError | None]:
    return [one.variant.layout_error for one in tried(name, variant)]


def test_layouts_of_inputs() -> None:
    orders = [LayoutError.BSHD_READ_AS_BHSD, LayoutError.BHSD_READ_AS_BSHD]
    assert layouts("layout:q", variant_of()) == [None, None]
    assert layouts("layout:q", variant_of(heads=5, kv_heads=5)) == [None] * 3  # H and S exchanged
    assert layouts("layout:k", variant_of(kv_heads=1)) == []
    assert layouts("layout:q", variant_of(q_len=1)) == []
    assert layouts("layout:v", variant_of(dv=None)) == []
    assert layouts("layout:k+layout:v", variant_of(dv=None)) == []
    variant = variant_of()
    for one, other in zip(tried("layout:q", variant), orders, strict=True):
        q = variant.problem.q
        memory = q.transpose(1, 2).reshape(2, 4, 5, 4)
        if other is LayoutError.BHSD_READ_AS_BSHD:
            memory = q.reshape(2, 5, 4, 4).transpose(1, 2)
        assert torch.equal(one.variant.problem.q, memory)
        assert torch.equal(one.variant.problem.k, variant.problem.k)


def test_layouts_of_inputs_and_output_together() -> None:
    first, second = LayoutError.BSHD_READ_AS_BHSD, LayoutError.BHSD_READ_AS_BSHD
    name = "layout:q+layout:k+layout:v+layout:output"
    assert layouts(name, variant_of()) == [first, second, second, first]
    square = layouts(name, variant_of(heads=5, kv_heads=5, k_len=5))
    assert square == [first, second, second, first, LayoutError.SWAPPED]
    assert layouts(name, variant_of(dv=None)) == []


def test_layouts_of_the_output_alone() -> None:
    orders = [LayoutError.BSHD_READ_AS_BHSD, LayoutError.BHSD_READ_AS_BSHD]
    assert layouts("layout:output", variant_of()) == orders
    square = variant_of(heads=5, kv_heads=5)
    assert layouts("layout:output", square) == [*orders, LayoutError.SWAPPED]
    for variant in (
        variant_of(dv=None),
        variant_of(heads=1, kv_heads=1),
        variant_of(q_len=1),
        tried("layout:output", square)[0].variant,
    ):
        assert layouts("layout:output", variant) == []


def test_packed_heads() -> None:
    packings = [LayoutError.DH_SPLIT_AS_HD, LayoutError.HD_SPLIT_AS_DH]
    one_error = [[None, error, *packings] for error in packings]
    assert layouts("layout:packed", variant_of()) == [*one_error[0], *one_error[1]]
    assert layouts("layout:packed", variant_of(dv=None)) == [None, None]
    assert layouts("layout:packed", variant_of(heads=1, kv_heads=1)) == []
    (inputs, *_) = tried("layout:packed", variant_of())
    q = variant_of().problem.q
    rows = q.transpose(1, 2)  # (B, S, H, d)
    expected = rows.transpose(2, 3).reshape(2, 5, 4, 4).transpose(1, 2)
    assert torch.equal(inputs.variant.problem.q, expected)


def test_one_fused_row_split_otherwise() -> None:
    variant = variant_of(heads=2, kv_heads=2, q_len=7, dv=4)
    problem = variant.problem
    assert problem.v is not None
    per_head, per_tensor = (one.variant.problem for one in tried("layout:packed", variant)[-2:])
    fused = torch.stack([problem.q, problem.k, problem.v])  # (3, B, H, S, d)
    rows = fused.permute(1, 3, 0, 2, 4).reshape(2, 7, 6, 4)  # as it lies in memory: (3, H)
    assert torch.equal(per_head.q, rows[:, :, [0, 3]].transpose(1, 2))
    assert torch.equal(per_head.k, rows[:, :, [1, 4]].transpose(1, 2))
    rows = fused.permute(1, 3, 2, 0, 4).reshape(2, 7, 6, 4)  # (H, 3)
    assert torch.equal(per_tensor.q, rows[:, :, [0, 1]].transpose(1, 2))
    assert per_tensor.v is not None
    assert torch.equal(per_tensor.v, rows[:, :, [4, 5]].transpose(1, 2))
    assert len(tried("layout:packed", variant_of(heads=2, kv_heads=2, dv=4))) == 8  # 5 queries
