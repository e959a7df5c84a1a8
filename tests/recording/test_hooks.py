"""Attention of plain PyTorch, seen once by whatever name it is called; and recording by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from small_models import build, inputs, tokens
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import attncli

Run = Callable[..., Any]


class Own(nn.Module):
    """Attention of somebody's own: grouped heads, a scale, by the function's own name or F's."""

    def __init__(self, *, by_name: bool, options: dict[str, Any]) -> None:
        super().__init__()
        self.by_name = by_name
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, 32) to (B, 4, S, 8)."""
        q, kv = x.unflatten(-1, (4, 8)).transpose(1, 2), x[..., :16].unflatten(-1, (2, 8))
        k = kv.transpose(1, 2)
        attend = scaled_dot_product_attention if self.by_name else F.scaled_dot_product_attention
        return attend(q, k, k, **self.options, enable_gqa=True)


@pytest.fixture
def x() -> torch.Tensor:
    """(B, S, width)."""
    return torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(
    ("options", "declared"),
    [
        ({}, {"scale": 8**-0.5}),
        ({"is_causal": True, "scale": 0.5}, {"scale": 0.5, "causal": True}),
        ({"attn_mask": torch.ones(6, 6).tril().bool()}, {"scale": 8**-0.5, "causal": True}),
        ({"attn_mask": torch.ones(6, 6)}, {"scale": 8**-0.5, "attn_mask": "masks.0"}),
    ],
)
def test_sdpa_is_seen_once_by_any_name(
    by_name: bool, options: dict[str, Any], declared: dict[str, Any], x: torch.Tensor
) -> None:
    model = nn.ModuleDict({"attention": Own(by_name=by_name, options=options)})
    with attncli.capture(model) as seen:
        model["attention"](x)
    (group,) = seen.groups.values()
    assert group.group == group.module == "attention"
    assert group.options == pytest.approx(declared)
    assert (group.batch, group.heads, group.kv_heads) == (2, 4, 2)
    assert group.self_check is not None
    assert group.self_check < 1e-6


def of_modules(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """A module of torch's own, in evaluation mode, and keywords of its forward."""
    causal = nn.Transformer.generate_square_subsequent_mask(6)
    padded = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    if kind == "encoder":
        layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
        return nn.TransformerEncoder(layer, 2).eval(), {"src_key_padding_mask": padded}
    module = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    return module, {"attn_mask": causal, "need_weights": kind == "weights"}


@pytest.mark.parametrize("kind", ["encoder", "weights", "no weights"])
@pytest.mark.filterwarnings("ignore:.*nested tensor.*")
def test_modules_of_torch_are_seen_once(kind: str, x: torch.Tensor) -> None:
    module, given = of_modules(kind)
    sources = (x,) if kind == "encoder" else (x, x, x)
    with torch.no_grad():
        alone = module(*sources, **given)
        with attncli.capture(module) as seen:
            out = module(*sources, **given)
    names = ["layers.0", "layers.1"] if kind == "encoder" else ["attention"]
    assert [*seen.groups] == names
    assert seen.warnings == []
    if kind == "encoder":
        assert seen.groups["layers.0"].options["key_lengths"] == [6, 4]
        return
    assert seen.groups["attention"].options["causal"] is True
    torch.testing.assert_close(out[0], alone[0])
    assert (out[1] is None) == (kind == "no weights")
    recorded = seen["attention"]
    weights = attncli.compute(recorded.q, recorded.k, **recorded.options).stages["weights"]
    if out[1] is not None:
        torch.testing.assert_close(weights.mean(1).float(), out[1])


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_one_query_is_the_newest_token_of_a_cache_alone() -> None:
    """Pooling by one query is none: where it stands on the key axis nobody says."""
    pooling = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    with torch.no_grad(), attncli.capture(pooling) as seen:
        pooling(torch.ones(1, 1, 32), torch.ones(1, 6, 32), torch.ones(1, 6, 32))
    assert [*seen.groups["attention"].options] == ["scale"]
    model = build("gpt2")
    with torch.no_grad(), attncli.capture(model) as seen:
        cache = model(tokens()).past_key_values
        model(tokens(length=1), past_key_values=cache)
    assert seen.groups["steps.1.layers.0"].options["query_offset"] == [12]


def test_everything_is_as_before_afterwards() -> None:
    model, before = build("llama"), F.scaled_dot_product_attention
    with torch.no_grad():
        plain = model(**inputs("llama"))[0]
        with pytest.raises(RuntimeError, match="of the caller"), attncli.capture(model):
            raise RuntimeError("of the caller")
        again = model(**inputs("llama"))[0]
    assert F.scaled_dot_product_attention is before
    assert torch.backends.mha.get_fastpath_enabled()
    assert all(not module._forward_hooks for module in model.modules())
    torch.testing.assert_close(again, plain, rtol=0, atol=0)


def test_other_errors_of_the_caller_stay_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "qkv.safetensors"
    with pytest.raises(FileNotFoundError), attncli.capture(build("llama"), str(path)):
        (tmp_path / "nowhere").read_text()
    assert not path.exists()


@pytest.mark.parametrize("passes", [0, 1])
def test_nothing_recorded_is_an_error_with_the_reason(passes: int) -> None:
    model = nn.Linear(3, 3)
    seen = attncli.capture(model)
    seen.__enter__()
    for _ in range(passes):
        model(torch.ones(1, 3))
    with pytest.raises(attncli.DataError, match="got none from Linear") as caught:
        seen.__exit__(None, None, None)
    said = "calls neither transformers' attention interface" if passes else "did not run"
    assert said in caught.value.advice


def test_kept_tensors_are_what_functions_take() -> None:
    model = build("gemma2")
    with torch.no_grad(), attncli.capture(model, layers=[-1]) as seen:
        model(**inputs("gemma2"))
    assert [*seen.groups] == ["layers.1"]
    found = seen["layers.1"]
    weights = attncli.compute(found.q, found.k, found.v, **found.options).stages["weights"]
    own = build("gemma2", "eager")(**inputs("gemma2"), output_attentions=True).attentions[1]
    torch.testing.assert_close(weights.float(), own, rtol=0, atol=1e-5)
    with pytest.raises(KeyError):
        seen["layers.0"]


def test_a_group_is_read_from_the_bundle(tmp_path: Path) -> None:
    path, model = str(tmp_path / "qkv.safetensors"), build("t5")
    with torch.no_grad(), attncli.capture(model, path) as seen:
        model(**inputs("t5"))
    with torch.no_grad(), attncli.capture(model) as kept:
        model(**inputs("t5"))
    for name in kept.groups:
        one, other = seen[name], kept[name]
        assert torch.equal(one.k, other.k)
        assert one.options.keys() == other.options.keys()
        if "attn_mask" in one.options:
            np.testing.assert_array_equal(one.options["attn_mask"], other.options["attn_mask"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_kept_and_judged_by_their_rounding(
    dtype: torch.dtype, tmp_path: Path, run: Run
) -> None:
    path, model = tmp_path / "qkv.safetensors", build("gemma2").to(dtype)
    with torch.no_grad(), attncli.capture(model, str(path)) as seen:
        model(**inputs("gemma2"))
    group = seen.groups["layers.0"]
    assert group.dtype == str(dtype).removeprefix("torch.")
    assert seen["layers.0"].q.dtype == dtype
    assert seen.warnings == []
    run("entropy", path)


def test_dropout_is_noticed() -> None:
    model = build("gpt2").train()
    with torch.no_grad(), attncli.capture(model) as seen:
        model(tokens())
    assert any("layers.0: the model's own output" in text for text in seen.warnings)
    assert "training mode" in seen.warnings[-1]


def test_three_lines_record_any_other_code(tmp_path: Path, run: Run) -> None:
    q, k, v = torch.randn(3, 1, 4, 5, 8, generator=torch.Generator().manual_seed(0))
    bias = np.linspace(0, 1, 25, dtype=np.float32).reshape(1, 1, 5, 5)
    options = {"causal": True, "softcap": 2.0, "attn_mask": bias}
    out = attncli.compute(q, k, v, **options).stages["output"]
    path = tmp_path / "qkv.safetensors"
    with attncli.recorder(str(path), labels=list("abcde")) as recorded:
        recorded.add("layers.0", q, k, v, output=out, **options)
        recorded.add("layers.1", q, k, v, output=out.float(), causal=True, attn_mask=bias)
        with pytest.raises(attncli.UsageError, match="not taken"):
            recorded.add("layers.1", q, k, v)
    assert recorded.groups["layers.0"].self_check == pytest.approx(0, abs=1e-12)
    (warning,) = recorded.warnings
    assert warning.startswith("layers.1: the model's own output is ")
    with safetensors.safe_open(path, "numpy") as file:
        declared = json.loads(file.metadata()["attncli"])
        assert sorted(file.keys())[-1] == "masks.0"
    assert declared["layers.0"]["attn_mask"] == declared["layers.1"]["attn_mask"] == "masks.0"
    told = run("compute", path, "--group", "layers.0", "--stage", "output", "--format", "json").json
    np.testing.assert_allclose(told["data"]["stages"]["output"]["values"], out, atol=1e-12)
