"""What bundles declare: the same figures as of the options, in every command."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from attncli.cli.app import app

B, H, S, D = 2, 2, 6, 4
CAUSAL = np.tri(S, dtype=bool)
PADDED = np.array([[0, 0, 1, 1, 1, 1], [1] * S], bool)
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2]])
FLOATS = np.where(CAUSAL, 0, np.finfo(np.float32).min).astype(np.float32)
COMMANDS = ["entropy --per-key", "variance", "compute --stage weights", "check"]
Save = Callable[..., None]


@pytest.fixture
def save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Save:
    """Write b.safetensors: q, k and v of the groups l0, l1, …, more tensors, and metadata."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    plain = {f"l{n}.{role}": rng.standard_normal((B, H, S, D)) for n in range(4) for role in "qkv"}
    np.save("o.npy", np.zeros((B, H, S, D)))

    def write(declared: dict[str, Any], **tensors: Any) -> None:
        more = {name.replace("__", "."): array for name, array in tensors.items()}
        save_file(plain | more, "b.safetensors", metadata={"attncli": json.dumps(declared)})
        for name, array in more.items():
            np.save(f"{name}.npy", array)

    return write


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


def run(line: str) -> Ran:
    result = CliRunner().invoke(app, line.split())
    return Ran(result.exit_code, result.stdout, result.stderr)


def data_of(command: str, group: str, options: str = "") -> Any:
    """What a command prints of one group, without the words that say where options are from."""
    actual = "--actual-output o.npy" if command == "check" else ""
    ran = run(f"{command} b.safetensors --group {group} {actual} {options} -f json")
    assert ran.code in (0, 3), ran.err
    data = json.loads(ran.out)["data"]
    return data["records"] if command == "check" else data


def assert_equal(one: Any, other: Any) -> None:
    """Two documents have the same words, and numbers equal to the last digits."""
    number = r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?"
    texts = json.dumps(one), json.dumps(other)
    assert re.split(number, texts[0]) == re.split(number, texts[1])
    numbers = [np.array(re.findall(number, text), float) for text in texts]
    np.testing.assert_allclose(*numbers, rtol=1e-12, atol=1e-12)


WAYS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"l1__attn_mask": CAUSAL}, "--attn-mask l1.attn_mask.npy"),
    ({}, {"l1__attn_mask": FLOATS}, "--attn-mask l1.attn_mask.npy"),
    ({}, {"attn_mask": CAUSAL}, "--attn-mask attn_mask.npy"),
    ({"l1": {"attn_mask": "masks.0"}}, {"masks__0": CAUSAL}, "--attn-mask masks.0.npy"),
    ({"*": {"attn_mask": "masks.0"}}, {"masks__0": CAUSAL}, "--attn-mask masks.0.npy"),
    (
        {"l1": {"attn_mask": "m", "mask_true": "drop"}},
        {"m": ~CAUSAL},
        "--attn-mask m.npy --mask-true drop",
    ),
    (
        {"*": {"hide_below": -5}},
        {"attn_mask": np.where(CAUSAL, 0.0, -5.0)},
        "--attn-mask attn_mask.npy --hide-below -5",
    ),
    ({}, {"l1__key_padding": PADDED}, "--key-padding l1.key_padding.npy"),
    ({"l1": {"key_padding": PADDED.tolist()}}, {"p": PADDED}, "--key-padding p.npy"),
    ({"l1": {"key_padding": "pads"}}, {"pads": PADDED}, "--key-padding pads.npy"),
    ({"l1": {"segments": SEGMENTS.tolist()}}, {"s": SEGMENTS}, "--segments s.npy"),
    ({"l1": {"segments": "s", "causal": True}}, {"s": SEGMENTS}, "--segments s.npy --causal"),
    ({"*": {"causal": True}}, {}, "--causal"),
    ({"*": {"causal": True}, "l1": {"causal": False, "softcap": 2}}, {}, "--softcap 2"),
    ({"l1": {"sinks": "s"}}, {"s": np.array([0.5, -1.0])}, "--sinks s.npy"),
]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("declared", "tensors", "options"), WAYS)
def test_every_command_honours_what_a_bundle_declares(
    save: Save, command: str, declared: Any, tensors: Any, options: str
) -> None:
    save(declared, **tensors)
    by_bundle = data_of(command, "l1")
    save({}, **{f"unused_{name}": array for name, array in tensors.items()})
    for name, array in tensors.items():
        np.save(f"{name.replace('__', '.')}.npy", array)
    assert_equal(by_bundle, data_of(command, "l1", options))


def test_what_is_typed_wins_over_tensors(save: Save) -> None:
    save({}, l1__attn_mask=CAUSAL, full=np.ones((S, S), bool))
    ran = run("entropy b.safetensors --group l1 --attn-mask full.npy -f json")
    assert {record["keys_mean"] for record in json.loads(ran.out)["data"]} == {S}
    assert json.loads(ran.out)["params"]["attn_mask"] == "full.npy"
    ran = run("entropy b.safetensors --group l1 --attn-mask none -f json")
    assert json.loads(ran.out)["params"]["attn_mask"] is None
    assert {record["keys_mean"] for record in json.loads(ran.out)["data"]} == {S}
    ran = run("entropy b.safetensors --group l1 --mask-true drop -f json")
    assert json.loads(ran.out)["params"]["attn_mask"] == "b.safetensors::l1.attn_mask"
    assert {record["keys_mean"] for record in json.loads(ran.out)["data"]} == {15 / 5}


def test_null_takes_a_default_away(save: Save) -> None:
    save({"l1": {"attn_mask": None}}, attn_mask=CAUSAL)
    ran = run("entropy b.safetensors --group l0,l1 -f json")
    assert [record["keys_mean"] for record in json.loads(ran.out)["data"]] == [3.5] * 4 + [6] * 4


def test_masks_of_tokenizers_are_padding(save: Save) -> None:
    save({}, l1__attention_mask=PADDED.astype(np.int64))
    by_bundle = data_of("entropy", "l1")
    assert_equal(by_bundle, data_of("entropy", "l1", "--key-padding l1.attention_mask.npy"))
    assert "is taken as key padding (B, S_k)" in run("entropy b.safetensors --group l1").err


def test_a_reference_to_nothing_is_named(save: Save) -> None:
    save({"l1": {"attn_mask": "masks.9"}})
    ran = run("entropy b.safetensors")
    assert ran.code == 1
    assert "expected a tensor named masks.9" in ran.err


def test_descriptive_keys_do_not_warn_and_near_misses_do(save: Save) -> None:
    save({"*": {"module": "model.layers", "self_check": 1e-6, "tokens": [1, 2]}})
    assert run("entropy b.safetensors").err == ""
    save({"l1": {"casual": True, "left_windows": 3}})
    said = run("entropy b.safetensors").err
    assert "declares 'casual', which attncli does not know; did you mean causal?" in said
    assert "did you mean left_window?" in said


def test_labels_of_another_entry_and_from_a_key_on(save: Save) -> None:
    """A cache holds the last keys of a text whose tokens are said once."""
    said = {"tokens": {"labels": list("abcdefghij")}}
    from_the_fourth = {"labels": "tokens", "labels_from": 3}
    save(said | {"l0": from_the_fourth, "l1": {"labels": "tokens"}, "l2": {"labels": "nobody"}})
    words = "compute b.safetensors --stage weights --group"
    assert re.search("d +e +f +g +h +i", run(f"{words} l0").out)
    for group in ("l1", "l2"):  # ten tokens are none of six keys
        assert not re.search("a +b +c", run(f"{words} {group}").out)


def test_a_layout_that_is_declared_is_not_doubted(save: Save) -> None:
    few = {f"l9.{role}": np.ones((1, 3, 2, 4)) for role in "qkv"}
    for declared, doubted in (({}, True), ({"*": {"layout": "bhsd"}}, False)):
        save(declared, **{name.replace(".", "__"): array for name, array in few.items()})
        for command in ("entropy", "variance", "compute", "mask"):
            assert ("--layout bshd" in run(f"{command} b.safetensors --group l9").err) == doubted


def test_labels_per_batch_and_for_all_groups(save: Save) -> None:
    save({"*": {"labels": [list("abcdef"), list("ghijkl")]}})
    ran = run("entropy b.safetensors --group l2 --per-key --head-index 0")
    rows = [line.split() for line in ran.out.splitlines()[-12:]]
    assert [row[2] for row in rows] == list("abcdefghijkl")
    ran = run("compute b.safetensors --group l2 --stage weights --head-index 0")
    assert "  a 0" in ran.out
    assert "  l 5" in ran.out
    pictures = run("mask b.safetensors --group l2 --key-lengths 5,3").out
    assert "0 a ██" in pictures
    assert "0 g ██" in pictures


def test_mask_says_which_groups_see_what(save: Save) -> None:
    save(
        {
            "*": {"causal": True, "module": "x"},
            "l1": {"left_window": 1, "module": "y"},
            "l2": {"attn_mask": "m", "causal": False},
        },
        m=CAUSAL,
    )
    lines = run("mask b.safetensors").out.splitlines()
    assert [line.split("  ")[0] for line in lines[2:4]] == ["l0, l3, l2", "l1"]
    assert "causal with a window of 1 key to the left" in lines[3]
    records = json.loads(run("mask b.safetensors -f json").out)["data"]
    assert [record["groups"] for record in records] == [["l0", "l3", "l2"], ["l1"]]
    assert [record["kept"] for record in records] == [21, 11]
    ran = run("mask b.safetensors --save m.npy")
    assert ran.code == 2
    assert "--group: expected one group, got 4" in ran.err
    assert run("mask b.safetensors --group l1 --save w.npy").code == 0
    ran = run("mask b.safetensors --fail-on unused-keys --query-offset -1")
    assert ran.code == 3
    assert "error: mask of l0, l3: expected no unused keys, got 1: 5" in ran.err


class TestTokens:
    """What tokens tell of heads: of a bundle, or typed."""

    TEXT = [*"abcdefghijkl"] * 2

    @pytest.fixture
    def bundles(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """b.safetensors, a head that looks behind earlier occurrences; c.safetensors, no tokens."""
        monkeypatch.chdir(tmp_path)
        logits = np.zeros((24, 24))
        logits[np.arange(12, 24), np.arange(1, 13)] = 30
        logits[:12, 0] = 30
        tensors = {"q": logits, "k": np.eye(24)}
        declared = {"causal": True, "scale": 1.0}
        for name, said in (("b", declared | {"labels": self.TEXT}), ("c", declared)):
            save_file(tensors, f"{name}.safetensors", metadata={"attncli": json.dumps({"": said})})

    @pytest.mark.usefixtures("bundles")
    def test_of_a_bundle_or_typed(self) -> None:
        found = json.loads(run("entropy b.safetensors -f json").out)
        (head,) = found["data"]
        assert (head["label"], head["duplicate_token_score"]) == ("induction", 0)
        assert head["label_score"] == head["induction_score"] > 0.99
        assert found["params"]["labels"]["duplicate-token"] == 0.5
        typed = run(f"entropy c.safetensors -f json --labels {','.join(self.TEXT)}")
        assert json.loads(typed.out)["data"] == [head | {"source": "c.safetensors"}]
        moved = run("entropy b.safetensors --label-limit induction=1")
        assert "induction ≥ 1, duplicate-token ≥ 0.5" in " ".join(moved.out.split())
        assert "induction 0.99" not in moved.out
        assert "induction: heads across" in run("entropy b.safetensors --grid induction_score").out
        sampled = json.loads(run("entropy b.safetensors --sample-rows 24 -f json").out)
        assert sampled["data"][0]["induction_score"] == head["induction_score"]

    @pytest.mark.usefixtures("bundles")
    def test_labels_of_comparisons_know_them(self) -> None:
        found = json.loads(run("compare b.safetensors --what-if scale=0 -f json").out)["data"]
        assert [(head["label_a"], head["label_b"]) for head in found] == [("induction", "uniform")]

    @pytest.mark.usefixtures("bundles")
    def test_without_tokens_nothing_is_said_of_them(self) -> None:
        for form in ("json", "csv", "table"):
            said = run(f"entropy c.safetensors -f {form}").out
            assert said
            assert "induction" not in said
        both = json.loads(run("entropy c.safetensors b.safetensors -f json").out)["data"]
        assert [head["induction_score"] is None for head in both] == [True, False]
        refused = run("entropy c.safetensors --grid induction_score")
        assert (refused.code, refused.out) == (2, "")
        assert "expected tokens for induction_score, got none" in refused.err
        few = run("entropy c.safetensors --labels a,b")
        assert "--labels: expected 24 tokens, one a key, got 2" in few.err
