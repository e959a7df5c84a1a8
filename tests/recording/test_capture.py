"""What is captured of models against what their own eager code computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
import transformers as tf
from small_models import MODELS, attentions, build, inputs, tokens

import attncli

Run = Callable[..., Any]


def metadata(path: Path) -> dict[str, Any]:
    """What a bundle declares: group → options."""
    with safetensors.safe_open(path, "numpy") as file:
        found: dict[str, Any] = json.loads(file.metadata()["attncli"])
    return found


def require_same_weights(
    run: Run, bundle: Path, truth: list[torch.Tensor], real: Any = None
) -> None:
    """Fail unless `compute` derives the model's own weights from a bundle, with no option.

    Args:
        run: the program.
        bundle: groups in the order of `truth`.
        truth: (B, H, S_q, S_k) of each group.
        real: broadcastable to these, False where nothing is compared.
    """
    groups = [name for name, said in metadata(bundle).items() if "scale" in said]
    assert len(groups) == len(truth)
    saved = bundle.with_suffix(".npz")
    run("compute", bundle, "--stage", "weights", "--save", saved, "--quiet")
    with np.load(saved) as file:
        found = dict(file)
    for group, own in zip(groups, truth, strict=True):
        weights = found[f"{group}.weights"]
        assert weights.shape == tuple(own.shape)
        off = np.abs(weights - own.double().numpy())
        assert (off if real is None else off * real).max() <= 1e-5, group


@pytest.mark.parametrize("name", [*MODELS])
def test_the_weights_of_a_bundle_are_the_models_own(name: str, run: Run, tmp_path: Path) -> None:
    bundle = tmp_path / "qkv.safetensors"
    with torch.no_grad(), attncli.capture(build(name), str(bundle), trace=name == "bloom") as seen:
        build(name)  # another model is no matter of this capture
        seen.model(**inputs(name))
    assert seen.warnings == []
    assert max(group.self_check for group in seen.groups.values()) < 2e-6
    require_same_weights(run, bundle, attentions(name, inputs(name)))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {"scale": 8**-0.5, "causal": True}),
        ("bert", {"scale": 8**-0.5}),
        ("mistral", {"scale": 8**-0.5, "causal": True, "left_window": 4}),
        ("gemma2", {"scale": 0.25, "softcap": 5.0, "causal": True, "left_window": 5}),
    ],
)
def test_what_shapes_attention_is_declared_as_options(name: str, options: dict[str, Any]) -> None:
    with torch.no_grad(), attncli.capture(build(name)) as seen:
        seen.model(**inputs(name))
    found = seen.groups["layers.0"]
    assert found.options == pytest.approx(options)
    assert (found.heads, found.q_len, found.k_len, found.dk) == (4, 12, 12, 8)


def test_heads_in_the_batch_are_told_apart_where_they_are_followed() -> None:
    """XGLM packs (B, H) into one axis before its softmax."""
    config = tf.XGLMConfig(vocab_size=60, d_model=32, ffn_dim=48, num_layers=1, attention_heads=4)
    torch.manual_seed(0)
    model = tf.XGLMModel(config).eval()
    with torch.no_grad(), attncli.capture(model, trace=True) as seen:
        model(tokens(3))
    (group,) = seen.groups.values()
    assert (group.batch, group.heads, group.options) == (3, 4, {"scale": 1.0, "causal": True})


def test_layers_with_one_bias_share_it(tmp_path: Path) -> None:
    bundle = tmp_path / "qkv.safetensors"
    with torch.no_grad(), attncli.capture(build("t5"), str(bundle)) as seen:
        seen.model(**inputs("t5"))
    assert [*seen.groups] == [
        *("encoder.layers.0", "encoder.layers.1"),
        *("decoder.layers.0.self", "decoder.layers.0.cross"),
        *("decoder.layers.1.self", "decoder.layers.1.cross"),
    ]
    told = [group.options.get("attn_mask") for group in seen.groups.values()]
    assert told == ["masks.0", "masks.0", "masks.1", None, "masks.1", None]
    assert seen.groups["decoder.layers.0.self"].options["causal"] is True


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "mistral", "gemma2", "bloom"])
def test_padding_is_told(name: str, side: str, run: Run, tmp_path: Path) -> None:
    ids, real = tokens(2), torch.ones(2, 12, dtype=torch.long)
    real[1, slice(4) if side == "left" else slice(8, None)] = 0
    given = {"input_ids": ids * real, "attention_mask": real}
    bundle = tmp_path / "qkv.safetensors"
    with torch.no_grad(), attncli.capture(build(name), str(bundle), trace=name == "bloom") as seen:
        seen.model(**given)
    assert seen.warnings == []
    rows = real.bool().numpy()[:, None, :, None]
    require_same_weights(run, bundle, attentions(name, given), rows)
    if side == "right" and name != "bloom":
        assert metadata(bundle)["layers.0"]["key_lengths"] == [12, 8]
        assert metadata(bundle)["layers.0"]["query_lengths"] == [12, 8]
