"""Attention weights without Q and K: what can be known of them is what Q and K would have told."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import attncli

Run = Any
WITHOUT_LOGITS = ("max_logit", "max_logit_query", "max_logit_key", "logsumexp_mean")
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "query_lengths": [5, 9]},
    {"left_window": 2, "right_window": 1},
    {"segments": [0, 0, 0, 0, 1, 1, 1, 1, 1], "causal": True},
    {"key_lengths": [3, 9]},
]


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(3)
    q, k = (torch.from_numpy(rng.standard_normal(shape)) for shape in ((2, 4, 9, 8), (2, 2, 9, 8)))
    return 3 * q, k


def weights_of(**options: Any) -> torch.Tensor:
    return attncli.compute(*tensors(), stages="weights", **options).stages["weights"]


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("said", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_every_column_is_as_from_q_and_k(
    options: dict[str, Any], said: bool, precision: str
) -> None:
    lengths = {name: value for name, value in options.items() if name == "query_lengths"}
    asked: dict[str, Any] = {"precision": precision, "per_row": True, "per_key": True}
    right = attncli.entropy(*tensors(), **asked, **options)
    found = attncli.entropy(
        weights=weights_of(precision=precision, **options),
        **asked,
        **(options if said else lengths),
    )
    near = {"rel": 1e-9, "abs": 1e-9} if precision == "float64" else {"rel": 2e-5, "abs": 2e-5}
    assert found.warnings == ()
    for head, expected in zip(found.heads, right.heads, strict=True):
        told, plain = dataclasses.asdict(head), dataclasses.asdict(expected)
        assert [told.pop(name) for name in WITHOUT_LOGITS] == [None] * 4
        told |= told.pop("scores")
        plain |= plain.pop("scores")
        for name in ("label", "nearest_label"):
            assert told.pop(name) == plain.pop(name)
        for name, value in told.items():
            assert value == (None if plain[name] is None else pytest.approx(plain[name], **near))
    assert found.rows is not None
    assert right.rows is not None
    for rows, expected_rows in zip(found.rows, right.rows, strict=True):
        for name in ("keys", "entropy_bits", "top_key", "max_weight", "sink_mass", "distance"):
            values, wanted = getattr(rows, name), getattr(expected_rows, name)
            np.testing.assert_allclose(values, wanted, rtol=near["rel"], atol=near["abs"])
        assert rows.received is not None
        assert expected_rows.received is not None
        assert torch.equal(rows.received.queries, expected_rows.received.queries)
        masses = rows.received.mass, expected_rows.received.mass
        np.testing.assert_allclose(*masses, rtol=near["rel"], atol=near["abs"])


def test_weights_wider_than_a_tile_and_of_some_rows() -> None:
    weights = torch.softmax(4 * torch.randn(1, 2, 40, 2500, generator=torch.manual_seed(0)), -1)
    entropies = torch.special.entr(weights.double()).sum(-1).mean(-1)
    found = attncli.entropy(weights=weights)
    torch.testing.assert_close(found.column("entropy_nats_mean"), entropies, rtol=1e-6, atol=0)
    assert found.heads[0].distance_mean is None  # S_q differs from S_k


WEIGHTS = torch.softmax(torch.randn(1, 2, 6, 6, generator=torch.manual_seed(1)), -1)
REFUSED = [
    (WEIGHTS.mT.contiguous(), {}, "expected rows that sum to 1, got columns that do"),
    (WEIGHTS - 0.5, {}, "expected weights, of at least 0, got -0"),
    (WEIGHTS * 10, {}, "expected rows that sum to 1, got sums from 10 to 10"),
    (WEIGHTS > 0, {}, "expected real numbers, got torch.bool"),
    (WEIGHTS[0, 0, 0], {}, r"expected \(S_q, S_k\), .* got \(6,\)"),
    (WEIGHTS / 0, {}, "expected finite values, got 72 NaN or inf"),
    (WEIGHTS, {"scale": 2}, "scale: expected nothing beside weights"),
    (WEIGHTS, {"alibi": True}, "alibi: expected nothing beside weights"),
    (WEIGHTS, {"sinks": [0.0, 1.0]}, "sinks: expected nothing beside weights"),
    (WEIGHTS, {"q": WEIGHTS}, "weights: expected no q, k and v beside them"),
    (None, {"q": WEIGHTS}, "k: expected q and k, or weights"),
]


@pytest.mark.parametrize(("weights", "options", "message"), REFUSED)
def test_what_is_no_weights_is_refused(
    weights: torch.Tensor | None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(attncli.AttncliError, match=message):
        attncli.entropy(weights=weights, **options)


def test_doubts_are_said() -> None:
    causal = torch.tril(torch.ones(6, 6)) / torch.arange(1, 7)[:, None]
    for weights, options, message in (
        (WEIGHTS * 0.5, {}, "sum from 0.5 to 0.5, not to 1"),
        (WEIGHTS, {"causal": True}, "of a row of weights is on keys that the options hide"),
        (causal, {"left_window": 6}, "of the weights that the options show are 0"),
    ):
        (said,) = attncli.entropy(weights=weights, **options).warnings
        assert message in said
    for dtype in (torch.float16, torch.bfloat16):
        assert attncli.entropy(weights=WEIGHTS.to(dtype)).warnings == ()


def test_nonfinite_rows_are_counted() -> None:
    weights = WEIGHTS.clone()
    weights[0, 0, 2] = torch.nan
    found = attncli.entropy(weights=weights, allow_nonfinite=True)
    assert [head.nonfinite_rows for head in found.heads] == [1, 0]


def test_rows_of_zeros_are_empty() -> None:
    weights = WEIGHTS.clone()
    weights[0, :, 0] = 0
    for options in ({}, {"key_lengths": 6}):
        heads = attncli.entropy(weights=weights, **options).heads
        assert [head.empty_rows for head in heads] == [1, 1]


LAYERS = [
    torch.softmax(torch.randn(2, 3, 5, 5, generator=torch.manual_seed(n)), -1) for n in (1, 2)
]


def saved(kind: str) -> tuple[list[str], list[str]]:
    """Files of two layers, and the names of the groups in them."""
    if kind == "rank 5":
        np.save("w.npy", torch.stack(LAYERS).numpy())
        return ["w.npy"], ["layers.0", "layers.1"]
    if kind == "tuple":
        torch.save(tuple(LAYERS), "w.pt")
        return ["w.pt"], ["0", "1"]
    if kind == "model output":
        torch.save({"logits": torch.randn(2, 5, 9), "attentions": tuple(LAYERS)}, "w.pt")
        return ["w.pt"], ["attentions.0", "attentions.1"]
    if kind == "chosen":
        torch.save({"cross": tuple(reversed(LAYERS)), "own": tuple(LAYERS)}, "w.pt")
        return ["w.pt::own"], ["own.0", "own.1"]
    if kind == "safetensors":
        names = ["layers.0.attn_weights", "layers.1.attn_weights"]
        stored = dict(zip(names, LAYERS, strict=True)) | {"layers.0.q": torch.randn(5, 8)}
        save_file(stored, "w.safetensors")
        return ["w.safetensors"], names
    for name, layer in zip("ab", LAYERS, strict=True):
        np.save(f"{name}.npy", layer.numpy())
    return ["a.npy", "b.npy"], ["", ""]


KINDS = ["rank 5", "tuple", "model output", "chosen", "safetensors", "a file each"]


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_weights(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    files, names = saved(kind)
    found = run("entropy", "--weights", *files, "-f", "json").json
    heads = found["data"]
    assert [head["group"] for head in heads] == [name for name in names for _ in range(6)]
    entropies = torch.special.entr(torch.stack(LAYERS).double()).sum(-1).mean(-1).flatten()
    np.testing.assert_allclose([head["entropy_nats_mean"] for head in heads], entropies, rtol=1e-6)
    assert all(head["scale"] is None for head in heads)
    assert found["params"]["scale"] is None
    if names[0]:
        some = run("entropy", "--weights", *files, "--group", names[1], "--per-key").stdout
        assert len(some.splitlines()) == 3 + 30  # below what they are of, and headings


def test_how_far_rows_are_from_1_is_said(run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("w.npy", WEIGHTS.numpy().astype(np.float16))
    outcome = run("entropy", "--weights", "w.npy", "-f", "json")
    low, high = json.loads(outcome.stdout)["params"]["row_sums"]
    sums = WEIGHTS.half().double().sum(-1)
    assert (low, high) == pytest.approx((float(sums.min()), float(sums.max())), abs=1e-12)
    assert f"rows of weights sum to 1 within {max(1 - low, high - 1):.2g}" in outcome.stderr


def test_the_mask_that_zeros_show(run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    layers = [weights_of(causal=True, left_window=3, temperature=t) for t in (1.0, 2.0)]
    torch.save(tuple(layers), "w.pt")
    found = run("mask", "--weights", "w.pt")
    assert "\ncausal with a window of 3 keys to the left" in found.stdout
    assert "the 2 groups of weights have their zeros in common" in found.stderr
    assert run("mask", "--weights", "w.pt", "--causal", "--fail-on", "leak").code == 0
    leaking = run(
        "mask", "--weights", "w.pt", "--causal", "--left-window", 2, "--fail-on", "leak", code=3
    )
    assert "expected no visible cell that" in leaking.stderr
    same = ("--against", "options", "--causal", "--left-window", 3)
    assert run("mask", "--weights", "w.pt", "--group", "1", *same).code == 0
    np.save("other.npy", weights_of(causal=True).numpy())
    differ = run("mask", "--weights", "w.pt", "other.npy", code=2)
    assert "--group: expected one mask, got those of w.pt, group 0 and other.npy" in differ.stderr
    np.save("scores.npy", WEIGHTS.numpy() - 0.5)
    assert (
        "expected weights, of at least 0" in run("mask", "--weights", "scores.npy", code=1).stderr
    )
    both = run("mask", "--weights", "w.pt", "--attn-mask", "other.npy", code=2)
    assert "--attn-mask: expected nothing of --weights beside it" in both.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("w.npy --scale 2", "--scale: expected nothing beside --weights"),
        ("w.npy --q w.npy", "--q: expected nothing beside --weights"),
        ("w.npy --heads 2", "--heads: expected nothing beside --weights"),
        ("w.npy --layout bshd", "--layout: expected nothing beside --weights"),
        ("w.npy --compare-scale", "--compare-scale: expected nothing beside --weights"),
        ("w.npy --temperatures 1,2", "--temperatures: expected nothing beside --weights"),
        ("w.npy --fail-on max-logit=1", "--fail-on max-logit: expected nothing beside --weights"),
        ("w.npy --group x", "--group: expected some of"),
    ],
)
def test_options_that_weights_do_not_have(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("w.npy", WEIGHTS.numpy())
    assert message in run("entropy", "--weights", *words.split(), code=2).stderr


def test_labels_of_a_bundle(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = {"attn": {"labels": list("abcdef"), "causal": False}}
    save_file(
        {"attn": WEIGHTS, "other": torch.ones(3)}, "w.safetensors", {"attncli": json.dumps(own)}
    )
    told = run("entropy", "--weights", "w.safetensors", "--per-key", "--head-index", 0).stdout
    assert "f" in told.split()
