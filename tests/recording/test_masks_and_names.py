"""Masks of models as options, and paths of modules as names."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from attncli.recording.masks import MaskReader, split
from attncli.recording.names import group_names, is_cross, is_decoder

S = 6
CAUSAL = torch.ones(S, S).tril().bool()
LOWEST = torch.finfo(torch.float32).min
ALIBI = -0.25 * (torch.arange(S)[:, None] - torch.arange(S)).float()
BIAS = torch.arange(S * S).reshape(1, 1, S, S) / 7


def additive(visible: torch.Tensor, hidden: float = LOWEST) -> torch.Tensor:
    """What eager code adds."""
    return torch.zeros(visible.shape).masked_fill(~visible, hidden)


@pytest.mark.parametrize(
    ("mask", "bias", "found"),
    [
        (None, None, {}),
        (CAUSAL, None, {"causal": True}),
        (CAUSAL[None, None].expand(2, 1, S, S), None, {"causal": True}),
        (additive(CAUSAL), None, {"causal": True}),
        (additive(CAUSAL, -math.inf), None, {"causal": True}),
        (additive(CAUSAL) + additive(CAUSAL), None, {"causal": True}),
        (additive(CAUSAL).half() * 0 + additive(CAUSAL, -65504.0).half(), None, {"causal": True}),
        (additive(CAUSAL, -1e9) + ALIBI * 0, None, {"causal": True}),
        (torch.zeros(1, 1, S, S), None, {}),
        (torch.ones(S, S).bool(), None, {}),
        (None, torch.zeros(1, 4, S, S), {}),
        (CAUSAL & (torch.ones(S, S).triu(-2) > 0), None, {"causal": True, "left_window": 2}),
        (torch.cat([CAUSAL, torch.zeros(S, 2).bool()], -1)[:, :S], None, {"causal": True}),
    ],
)
def test_known_masks_are_options(mask: Any, bias: Any, found: dict[str, Any]) -> None:
    assert MaskReader().keywords(mask, bias, S, S) == found


@pytest.mark.parametrize(
    ("mask", "bias"),
    [(additive(CAUSAL) + ALIBI, None), (CAUSAL, ALIBI), (additive(CAUSAL), ALIBI)],
)
def test_a_bias_outlives_the_mask_that_is_recognised(mask: Any, bias: Any) -> None:
    found = MaskReader().keywords(mask, bias, S, S)
    assert found.keys() == {"causal", "attn_mask"}
    seen = CAUSAL.numpy()
    np.testing.assert_array_equal(found["attn_mask"][0, 0][seen], ALIBI.numpy()[seen])


def test_a_mask_that_no_options_build_is_kept() -> None:
    odd = CAUSAL.clone()
    odd[5, 2] = odd[4, 0] = False
    found = MaskReader().keywords(odd, None, S, S)
    np.testing.assert_array_equal(found.pop("attn_mask")[0, 0], odd.numpy())
    assert found == {}
    with_bias = MaskReader().keywords(odd, BIAS, S, S)["attn_mask"]
    np.testing.assert_array_equal(with_bias[0, 0] == -math.inf, ~odd.numpy())
    np.testing.assert_array_equal(with_bias[0, 0][odd], BIAS[0, 0].numpy()[odd])


def test_a_bias_of_heads_is_not_multiplied_by_a_mask_of_batches() -> None:
    bias, padded = BIAS.expand(1, 4, S, S), torch.ones(3, 1, S, S).bool()
    padded[1, ..., 4:] = False
    found = MaskReader().keywords(additive(padded), bias, S, S)
    assert found["key_lengths"] == (6, 4, 6)
    assert found["attn_mask"].shape == (1, 4, S, S)


def test_a_mask_is_looked_at_once_and_kept_for_as_long() -> None:
    reader = MaskReader()
    first = reader.keywords(CAUSAL, None, S, S)
    assert reader.keywords(CAUSAL, None, S, S) is first
    assert any(CAUSAL is kept for (kept, _), _ in reader.known.values())
    reader.forget()
    assert reader.keywords(CAUSAL, None, S, S) is not first


def test_what_hides_and_what_adds_are_told_apart() -> None:
    visible, added = split(additive(CAUSAL) + ALIBI)
    assert visible is not None
    assert added is not None
    assert torch.equal(visible, CAUSAL)
    assert torch.equal(added, torch.where(CAUSAL, ALIBI, 0.0))
    assert split(ALIBI * 0) == (None, None)


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["h.0.attn", "h.1.attn"], ["layers.0", "layers.1"]),
        (["model.layers.3.self_attn"], ["layers.3"]),
        (
            [
                *("encoder.block.0.layer.0.SelfAttention", "decoder.block.0.layer.0.SelfAttention"),
                "decoder.block.0.layer.1.EncDecAttention",
            ],
            ["encoder.layers.0", "decoder.layers.0.self", "decoder.layers.0.cross"],
        ),
        (
            [
                *("model.encoder.layers.0.self_attn", "model.decoder.layers.0.self_attn"),
                "model.decoder.layers.0.encoder_attn",
            ],
            ["encoder.layers.0", "decoder.layers.0.self", "decoder.layers.0.cross"],
        ),
        (
            ["vision_model.encoder.layers.0.self_attn", "text_model.encoder.layers.0.self_attn"],
            ["vision_model.layers.0", "text_model.layers.0"],
        ),
        (
            [
                "encoder.layers.0.blocks.0.attention.self",
                "encoder.layers.0.blocks.1.attention.self",
            ],
            ["layers.0.0", "layers.0.1"],
        ),
        (["layers.0.first", "layers.0.second"], ["layers.0.first", "layers.0.second"]),
        (["attention"], ["attention"]),
        ([""], ["attention"]),
        (["down.0.x.attn", "up.0.x.attn", "up.0.x.attn"], ["down.0", "up.0", "up.0.call1"]),
    ],
)
def test_names_of_groups(paths: list[str], names: list[str]) -> None:
    assert group_names([(path, paths[:n].count(path)) for n, path in enumerate(paths)]) == names


def test_one_module_for_all_layers_counts_them() -> None:
    path = "encoder.groups.0.layers.0.attention"
    assert group_names([(path, n) for n in range(3)]) == ["layers.0", "layers.1", "layers.2"]


def test_sides_are_named_where_one_of_them_is_alone() -> None:
    paths = [("decoder.block.0.layer.0.SelfAttention", 0)]
    assert group_names(paths, two_sided=True) == ["decoder.layers.0"]
    assert is_decoder(paths[0][0])
    assert not is_cross(paths[0][0])
    assert is_cross("decoder.layers.0.encoder_attn")
