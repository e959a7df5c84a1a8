"""Small random models of transformers, lively enough that what shapes attention shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf

VOCABULARY = 60
_SHARED: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = _SHARED | {"num_key_value_heads": 2}
_OF_GPT2 = {
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 32,
    "n_positions": 64,
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT = {  # of DeepSeek: keys of 8 + 4 dimensions, values of 6
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 5,
}
_TWO_SIDED = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_OF_IMAGES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_ONE_OF_TWO = ["sliding_attention", "full_attention"]
_OF_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}

# Name → the class of the model, and its configuration.
MODELS: dict[str, tuple[Any, Callable[[], Any]]] = {
    "gpt2": (tf.GPT2Model, lambda: tf.GPT2Config(**_OF_GPT2)),
    "bert": (tf.BertModel, lambda: tf.BertConfig(**_SHARED)),
    "llama": (tf.LlamaModel, lambda: tf.LlamaConfig(**_GROUPED)),
    "mistral": (tf.MistralModel, lambda: tf.MistralConfig(**_GROUPED, sliding_window=5)),
    "gemma2": (
        tf.Gemma2Model,
        lambda: tf.Gemma2Config(
            **_GROUPED,
            head_dim=8,
            sliding_window=6,
            query_pre_attn_scalar=16,
            attn_logit_softcapping=5.0,
        ),
    ),
    "qwen3": (tf.Qwen3Model, lambda: tf.Qwen3Config(**_GROUPED, head_dim=8)),
    "gemma3": (
        tf.Gemma3TextModel,
        lambda: tf.Gemma3TextConfig(
            **_GROUPED,
            head_dim=8,
            sliding_window=5,
            query_pre_attn_scalar=16,
            layer_types=_ONE_OF_TWO,
        ),
    ),
    "gpt_oss": (
        tf.GptOssModel,
        lambda: tf.GptOssConfig(
            **_GROUPED,
            head_dim=8,
            sliding_window=4,
            num_local_experts=2,
            num_experts_per_tok=1,
            layer_types=_ONE_OF_TWO,
        ),
    ),
    "deepseek_v3": (
        tf.DeepseekV3Model,
        lambda: tf.DeepseekV3Config(
            **_SHARED,
            **_LATENT,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16,
            },
        ),
    ),
    "llama4": (
        tf.Llama4TextModel,
        lambda: tf.Llama4TextConfig(
            **_GROUPED,
            head_dim=8,
            intermediate_size_mlp=48,
            num_local_experts=2,
            attention_chunk_size=5,
            moe_layers=[],
            no_rope_layers=[1, 0],
            layer_types=["chunked_attention", "full_attention"],
        ),
    ),
    "falcon": (
        tf.FalconModel,
        lambda: tf.FalconConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=VOCABULARY,
            alibi=False,
            multi_query=True,
            new_decoder_architecture=False,
        ),
    ),
    "modernbert": (
        tf.ModernBertModel,
        lambda: tf.ModernBertConfig(
            **_SHARED,
            local_attention=6,
            global_attn_every_n_layers=2,
            cls_token_id=1,
            sep_token_id=2,
        ),
    ),
    "bart": (tf.BartModel, lambda: tf.BartConfig(**_TWO_SIDED, max_position_embeddings=64)),
    "whisper": (
        tf.WhisperModel,
        lambda: tf.WhisperConfig(
            **_TWO_SIDED, num_mel_bins=8, max_source_positions=20, max_target_positions=32
        ),
    ),
    "clip": (
        tf.CLIPModel,
        lambda: tf.CLIPConfig(text_config=_SHARED, vision_config=_OF_IMAGES, projection_dim=16),
    ),
    "t5": (
        tf.T5Model,
        lambda: tf.T5Config(**_OF_T5, vocab_size=VOCABULARY, decoder_start_token_id=0),
    ),
    "bloom": (
        tf.BloomModel,
        lambda: tf.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=VOCABULARY),
    ),
}


def build(name: str, implementation: str | None = None, maker: Any = None) -> Any:
    """A model in evaluation mode, the same for every attention implementation.

    Args:
        name: of `MODELS`.
        implementation: "eager" for what is judged by; None for what transformers chooses.
        maker: another class for the configuration: with a head that generates.
    """
    of_model, configuration = MODELS[name]
    config = configuration()
    if implementation is not None:
        config._attn_implementation = implementation
    with torch.random.fork_rng():
        torch.manual_seed(0)  # for what is not drawn below: the embedding of CLIP's class
        model = (maker or of_model)._from_config(config)
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        # As initialised attention is all but even: a soft cap forgotten would not be seen.
        for of, parameter in sorted(model.named_parameters()):
            draw = torch.randn(parameter.shape, generator=drawn)
            if "sinks" in of:
                parameter.copy_(draw)
            elif parameter.ndim >= 2:
                parameter.copy_(draw * (1.5 / parameter.shape[-1] ** 0.5))
            elif "bias" in of or not bool(torch.isfinite(parameter).all()):
                parameter.copy_(draw * 0.1)
    return model.eval()


def tokens(batch: int = 1, length: int = 12) -> torch.Tensor:
    """Token ids (batch, length), none of them special."""
    drawn = torch.Generator().manual_seed(0)
    return torch.randint(5, VOCABULARY, (batch, length), generator=drawn)


def inputs(name: str) -> dict[str, torch.Tensor]:
    """What a model of `MODELS` is run on."""
    drawn = torch.Generator().manual_seed(0)
    if name == "whisper":
        sound = torch.randn(1, 8, 40, generator=drawn)
        return {"input_features": sound, "decoder_input_ids": tokens(length=7)}
    if name in ("t5", "bart"):
        return {"input_ids": tokens(), "decoder_input_ids": tokens(length=7)}
    if name == "clip":
        image = torch.randn(1, 3, 32, 32, generator=drawn)
        return {"input_ids": tokens(), "pixel_values": image}
    return {"input_ids": tokens()}


def attentions(name: str, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The weights (B, H, S_q, S_k) that the model's own eager code computes, in the order of calls.

    Those of an encoder first, then self and cross of each layer of a decoder.
    """
    with torch.no_grad():
        out = build(name, "eager")(**given, output_attentions=True)
    if name == "clip":
        return [*out.vision_model_output.attentions, *out.text_model_output.attentions]
    if "decoder_attentions" not in out:
        return list(out["attentions"])
    pairs = zip(out["decoder_attentions"], out["cross_attentions"], strict=True)
    return [*out["encoder_attentions"], *(one for pair in pairs for one in pair)]
