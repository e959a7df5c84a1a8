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
    if name == "t5":
        return {"input_ids": tokens(), "decoder_input_ids": tokens(length=7)}
    return {"input_ids": tokens()}


def attentions(name: str, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The weights (B, H, S_q, S_k) that the model's own eager code computes, in the order of calls.

    Those of an encoder first, then self and cross of each layer of a decoder.
    """
    with torch.no_grad():
        out = build(name, "eager")(**given, output_attentions=True)
    if "decoder_attentions" not in out:
        return list(out["attentions"])
    pairs = zip(out["decoder_attentions"], out["cross_attentions"], strict=True)
    return [*out["encoder_attentions"], *(one for pair in pairs for one in pair)]
