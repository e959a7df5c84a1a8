"""One small model of each kind of attention: padded, in steps with a cache, and mutilated."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from small_models import MODELS, attentions, build, inputs, tokens

import attncli
from attncli.recording.capture import Capture
from attncli.recording.recorder import Recorder

TRACED = {"bloom"}
OF_TEXT = [name for name in MODELS if name != "whisper"]
TWO_SIDED = ("t5", "bart")
STEPS = 6


class WithHead:
    """Makes models that generate."""

    @staticmethod
    def _from_config(config: Any) -> Any:
        auto = tf.AutoModelForSeq2SeqLM if config.is_encoder_decoder else tf.AutoModelForCausalLM
        return auto.from_config(config)


@cache
def model_of(name: str, implementation: str | None = None, *, generates: bool = False) -> Any:
    """A model, built once."""
    return build(name, implementation, WithHead if generates else None)


@torch.no_grad()
def captured(name: str, given: dict[str, torch.Tensor], path: Path) -> Capture:
    """What is recorded of one pass."""
    with attncli.capture(model_of(name), str(path), trace=name in TRACED) as seen:
        seen.model(**given)
    return seen


def padded(name: str, side: str) -> dict[str, torch.Tensor]:
    """Inputs of two texts, of which the second has four tokens of padding."""
    real = torch.ones(2, 12, dtype=torch.long)
    real[1, slice(4) if side == "left" else slice(8, None)] = 0
    given = {"input_ids": tokens(2) * real, "attention_mask": real}
    if name in TWO_SIDED:
        given["decoder_input_ids"] = tokens(2, 7)
    if name == "clip":
        given["pixel_values"] = inputs(name)["pixel_values"].repeat(2, 1, 1, 1)
    return given


def require_own_weights(
    seen: Capture, truth: list[torch.Tensor], real: torch.Tensor | None = None
) -> None:
    """Fail unless the weights of the bundle are those of the model's eager code.

    Args:
        seen: what was recorded, in the order of `truth`.
        truth: (B, H, S_q, S_k) of each group.
        real: bool (B, S): groups with as many queries are compared where it is True.
    """
    assert len(seen.groups) == len(truth)
    for name, own in zip(seen.groups, truth, strict=True):
        found = seen[name]
        stages = attncli.compute(
            found.q, found.k, stages=("masked", "weights"), precision="float64", **found.options
        ).stages
        weights, logits = stages["weights"], stages["masked"]
        assert weights.shape == own.shape, name
        off = (weights - own.double()).abs()
        if real is not None and own.shape[2] == real.shape[1] and own.shape[0] == len(real):
            off *= real[:, None, :, None]
        largest = float(logits[torch.isfinite(logits)].abs().max())
        assert float(off.max()) <= max(1e-5, 8 * 2**-24 * (1 + largest)), name


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", OF_TEXT)
def test_real_rows_of_a_padded_batch_are_the_models_own(
    name: str, side: str, tmp_path: Path
) -> None:
    given = padded(name, side)
    seen = captured(name, given, tmp_path / "qkv.safetensors")
    assert seen.warnings == []
    own = attentions(name, given)
    require_own_weights(seen, own, given["attention_mask"].bool())


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize(
    "name", [name for name in MODELS if name not in ("bert", "modernbert", "clip", "whisper")]
)
@torch.no_grad()
def test_six_steps_with_a_cache_are_the_models_own(name: str, pad: bool, tmp_path: Path) -> None:
    real = torch.ones(2, 10, dtype=torch.long)
    real[1, : 3 * pad] = 0
    given = {
        "input_ids": tokens(2, 10) * real,
        "attention_mask": real,
        "max_new_tokens": STEPS,
        "min_new_tokens": STEPS,
        "do_sample": False,
        "pad_token_id": 0,
    }
    eager = model_of(name, "eager", generates=True)
    told = eager.generate(**given, output_attentions=True, return_dict_in_generate=True)
    model, path = model_of(name, generates=True), tmp_path / "qkv.safetensors"
    with attncli.capture(model, str(path), trace=name in TRACED) as seen:
        ids = model.generate(**given)
    assert seen.warnings == []
    torch.testing.assert_close(ids, told.sequences)
    if "decoder_attentions" in told:
        steps = zip(told.decoder_attentions, told.cross_attentions, strict=True)
        pairs = [pair for step in steps for pair in zip(*step, strict=True)]
        own = [*told.encoder_attentions, *(one for pair in pairs for one in pair)]
    else:
        own = [one for step in told.attentions for one in step]
    require_own_weights(seen, own, real.bool())


def steps_of_whisper(model: Any, **more: Any) -> list[Any]:
    """Its results for seven tokens, and one more at each step with a cache."""
    given, ids = inputs("whisper"), tokens(length=7 + STEPS)
    results: list[Any] = []
    for step in range(STEPS + 1):
        source: dict[str, Any] = {"input_features": given["input_features"]}
        if results:
            source = {
                "encoder_outputs": (results[-1].encoder_last_hidden_state,),
                "past_key_values": results[-1].past_key_values,
            }
        now = ids[:, 6 + step : 7 + step] if step else ids[:, :7]
        results.append(model(**source, decoder_input_ids=now, use_cache=True, **more))
    return results


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
@torch.no_grad()
def test_six_steps_of_whisper_are_its_own(tmp_path: Path) -> None:
    told = steps_of_whisper(model_of("whisper", "eager"), output_attentions=True)
    with attncli.capture(model_of("whisper"), str(tmp_path / "qkv.safetensors")) as seen:
        steps_of_whisper(seen.model)
    assert seen.warnings == []
    pairs = [
        pair
        for one in told
        for pair in zip(one.decoder_attentions, one.cross_attentions, strict=True)
    ]
    own = [*told[0].encoder_attentions, *(one for pair in pairs for one in pair)]
    require_own_weights(seen, own)


# Which option says what of a model; the padding of which batch, if any.
FORGOTTEN = [
    ("gpt2", None, "causal"),
    ("bert", "right", "key_lengths"),
    ("bert", "left", "key_padding"),
    ("mistral", None, "left_window"),
    ("modernbert", None, "right_window"),
    ("gemma2", None, "softcap"),
    ("gemma2", None, "scale"),
    ("gpt_oss", None, "sinks"),
    ("deepseek_v3", None, "scale"),
    ("llama4", None, "segments"),
    ("t5", None, "attn_mask"),
    ("bloom", None, "attn_mask"),
]


@pytest.mark.parametrize(("name", "side", "option"), FORGOTTEN)
def test_an_option_that_is_forgotten_is_noticed(
    name: str, side: str | None, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs(name) if side is None else padded(name, side)
    record, met = Recorder._record, []

    def forgetful(self: Any, q: Any, k: Any, v: Any, output: Any, keywords: Any) -> Any:
        met.append(keywords.get(option) is not None)
        rest = {key: value for key, value in keywords.items() if key != option}
        return record(self, q, k, v, output, rest)

    monkeypatch.setattr(Recorder, "_record", forgetful)
    seen = captured(name, given, tmp_path / "qkv.safetensors")
    assert any(met)
    failed = [group.failed for group in seen.groups.values()]
    assert any(failed)
    assert len(seen.warnings) == sum(failed)
    assert np.all(np.array(failed) <= np.array(met))
