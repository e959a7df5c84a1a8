"""The sample inputs are small, say what they are, and can be regenerated."""

import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

SAMPLES = Path(__file__).resolve().parents[1] / "sample_inputs"
MINILM = SAMPLES / "minilm.safetensors"
BF16 = SAMPLES / "minilm-bf16.safetensors"
ROLES = ("q", "k", "v")


@pytest.fixture(scope="module")
def make_small() -> ModuleType:
    """The script that writes everything but `minilm.safetensors`."""
    spec = importlib.util.spec_from_file_location("make_small", SAMPLES / "make_small.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def minilm() -> dict[str, torch.Tensor]:
    return load_file(MINILM)


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as bundle:
        return bundle.metadata()


def options_of(path: Path) -> dict[str, dict[str, Any]]:
    return json.loads(metadata_of(path)["attncli"])


def weights_of(tensors: dict[str, torch.Tensor], layer: int, head: int) -> torch.Tensor:
    """Attention weights of one head, (S, S) float64."""
    q, k = (tensors[f"layers.{layer}.{role}"][0, head].double() for role in ("q", "k"))
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(dim=-1)


def data_files(folder: Path) -> set[Path]:
    return {
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.is_file() and path.suffix in {".npy", ".safetensors"}
    }


def test_every_file_is_small() -> None:
    sizes = {path: (SAMPLES / path).stat().st_size for path in data_files(SAMPLES)}
    assert max(sizes.values()) < 1_000_000
    assert sum(sizes.values()) < 1_000_000


def test_readme_names_every_file() -> None:
    readme = (SAMPLES / "README.md").read_text(encoding="utf-8")
    assert not [path for path in data_files(SAMPLES) if path.name not in readme]


def test_regenerating_gives_the_same_bytes(make_small: ModuleType, tmp_path: Path) -> None:
    written = {path.relative_to(tmp_path) for path in make_small.write_all(tmp_path)}
    assert written == data_files(tmp_path) == data_files(SAMPLES) - {Path(MINILM.name)}
    for path in written:
        assert (tmp_path / path).read_bytes() == (SAMPLES / path).read_bytes(), path


def test_rewriting_minilm_gives_the_same_bytes(
    make_small: ModuleType, minilm: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    # The library alone would shuffle the metadata.
    rewritten = make_small.write_bundle(tmp_path / "again", minilm, metadata_of(MINILM))
    assert rewritten.read_bytes() == MINILM.read_bytes()


def test_example_gives_the_values_of_the_theory() -> None:
    q, k, v = (np.load(SAMPLES / "example" / f"{role}.npy") for role in ROLES)
    assert [array.shape for array in (q, k, v)] == [(4, 3)] * 3
    assert {array.dtype for array in (q, k, v)} == {np.dtype(np.float64)}
    np.testing.assert_allclose(q[0] @ k.T, [-0.3733, 0.5970, -0.6437, -0.6161], atol=5e-5)
    exponentials = np.exp(q[0] @ k.T / math.sqrt(3))
    weights = exponentials / exponentials.sum()
    np.testing.assert_allclose(weights, [0.223429, 0.391231, 0.191135, 0.194205], atol=5e-7)
    np.testing.assert_allclose(weights @ v, [0.417634, 0.585436, 0.385340], atol=1e-6)


def test_minilm_tensors(minilm: dict[str, torch.Tensor]) -> None:
    assert set(minilm) == {f"layers.{layer}.{role}" for layer in range(6) for role in ROLES}
    assert {tuple(tensor.shape) for tensor in minilm.values()} == {(1, 12, 16, 32)}
    assert {tensor.dtype for tensor in minilm.values()} == {torch.float32}
    assert all(tensor.isfinite().all() for tensor in minilm.values())


def test_minilm_metadata() -> None:
    metadata = metadata_of(MINILM)
    assert set(metadata) == {"attncli", "origin", "license"}
    assert "all-MiniLM-L6-v2" in metadata["origin"]
    assert metadata["license"] == "Apache-2.0"

    options = json.loads(metadata["attncli"])
    assert list(options) == [f"layers.{layer}" for layer in range(6)]
    for group in options.values():
        assert set(group) == {"scale", "causal", "labels"}
        assert group["scale"] == pytest.approx(1 / math.sqrt(32), rel=1e-12)
        assert group["causal"] is False
        assert len(group["labels"]) == 16
        assert (group["labels"][0], group["labels"][-1]) == ("[CLS]", "[SEP]")


def test_minilm_rows_sum_to_one(minilm: dict[str, torch.Tensor]) -> None:
    for head in range(12):
        sums = weights_of(minilm, 0, head).sum(dim=-1)
        torch.testing.assert_close(sums, torch.ones(16, dtype=torch.float64))


def test_minilm_heads_do_what_the_readme_says(minilm: dict[str, torch.Tensor]) -> None:
    # Swapped roles, layers or heads would not pass here.
    labels = options_of(MINILM)["layers.0"]["labels"]
    it, animal = labels.index("it"), labels.index("animal")
    assert (it, animal) == (10, 2)
    assert weights_of(minilm, 0, 2).diagonal(-1).min() > 0.98
    assert weights_of(minilm, 1, 8).diagonal(1).mean() == pytest.approx(0.57, abs=0.005)
    assert weights_of(minilm, 1, 8)[:, 0].mean() == pytest.approx(0.35, abs=0.005)
    assert weights_of(minilm, 4, 5)[:, 0].mean() == pytest.approx(0.90, abs=0.005)
    assert weights_of(minilm, 3, 1)[it, animal] == pytest.approx(0.68, abs=0.005)
    assert weights_of(minilm, 5, 11)[it, animal] == pytest.approx(0.67, abs=0.005)
    even = weights_of(minilm, 0, 3)
    normalised = -(even * even.log()).sum(dim=-1).mean() / math.log(16)
    assert normalised == pytest.approx(0.91, abs=0.005)


def test_bfloat16_bundle_is_minilm_rounded(minilm: dict[str, torch.Tensor]) -> None:
    rounded = load_file(BF16)
    assert set(rounded) == {f"layers.{layer}.{role}" for layer in (0, 5) for role in ROLES}
    for name, tensor in rounded.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, minilm[name].to(torch.bfloat16))
    everything = options_of(MINILM)
    assert options_of(BF16) == {group: everything[group] for group in ("layers.0", "layers.5")}


def test_bfloat16_arrays_hold_one_head_of_the_bundle() -> None:
    bundle = load_file(BF16)
    for role in ("q", "k"):
        array = np.load(SAMPLES / f"bf16-{role}.npy")
        assert (array.dtype.str, array.shape) == ("|V2", (16, 32))
        head = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        assert torch.equal(head, bundle[f"layers.0.{role}"][0, 2])


@pytest.mark.parametrize(
    ("name", "message"), [("truncated.npy", "reshape|read all data"), ("text.npy", "pickle")]
)
def test_broken_arrays_cannot_be_read(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        np.load(SAMPLES / "broken" / name)


def test_broken_pointer_cannot_be_read() -> None:
    with pytest.raises(SafetensorError):
        load_file(SAMPLES / "broken" / "lfs-pointer.safetensors")


def test_sound_files_with_the_wrong_contents() -> None:
    q = np.load(SAMPLES / "broken" / "nonfinite-q.npy")
    assert q.shape == (4, 3)
    assert np.argwhere(np.isnan(q)).tolist() == [[1, 0]]
    assert np.argwhere(np.isinf(q)).tolist() == [[2, 2]]
    assert np.load(SAMPLES / "broken" / "wrong-width-k.npy").shape == (4, 4)
