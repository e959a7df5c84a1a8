"""`attncli capture` on small models in folders: texts, steps, what is printed, what is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import transformers as tf
from safetensors.torch import load_file, save_file
from small_models import build
from tokenizers import Tokenizer, models, pre_tokenizers

from attncli.limits import require_disk
from attncli.recording import capture as recording
from attncli.recording import models as loading

Run = Callable[..., Any]
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "dog"]


def metadata(path: Path) -> dict[str, Any]:
    """What a bundle declares: group → options."""
    with safetensors.safe_open(path, "numpy") as file:
        found: dict[str, Any] = json.loads(file.metadata()["attncli"])
    return found


def save(folder: Path, name: str, maker: Any = None) -> Path:
    """A model with a tokenizer of whole words in a folder."""
    build(name, maker=maker).save_pretrained(folder)
    numbered = {word: n for n, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(numbered, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tf.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder with a window of five keys, with a head that generates."""
    return save(tmp_path_factory.mktemp("mistral"), "mistral", tf.MistralForCausalLM)


@pytest.fixture(scope="session")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder–decoder, with a head that generates."""
    return save(tmp_path_factory.mktemp("t5"), "t5", tf.T5ForConditionalGeneration)


@pytest.fixture(scope="session")
def bloom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder that writes out its softmax."""
    return save(tmp_path_factory.mktemp("bloom"), "bloom")


def test_a_text_is_captured_with_its_tokens(mistral: Path, run: Run, tmp_path: Path) -> None:
    bundle = tmp_path / "qkv.safetensors"
    done = run("capture", mistral, "--text", "the cat sat on a mat", "-o", bundle)
    assert done.stderr == f"attncli: wrote {bundle}\n"
    first, *_ = [line.split() for line in done.stdout.splitlines() if line.startswith("layers")]
    assert first[:8] == ["layers.0", "4", "2", "6", "6", "8", "8", "float32"]
    assert "--causal --left-window 4" in done.stdout
    assert metadata(bundle)["*"]["labels"] == ["the", "cat", "sat", "on", "a", "mat"]
    shown = run("compute", bundle, "--group", "layers.1", "--stage", "weights", "--rows", "-1")
    assert shown.stderr == ""
    assert "the    cat    sat     on      a    mat" in shown.stdout
    for command in ("entropy", "variance", "mask"):
        assert run(command, bundle).stderr == ""


def test_nothing_stays_in_the_folder_for_temporary_files(mistral: Path, tmp_path: Path) -> None:
    """In a process of its own: torch makes its folder once."""
    (tmp_path / "tmp").mkdir()
    np.save(tmp_path / "ids.npy", np.array([4, 5, 6]))
    subprocess.run(
        [*(sys.executable, "-m", "attncli", "capture"), mistral, "--ids", "ids.npy", "-o", "o.st"],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(tmp_path / "tmp")},
        capture_output=True,
        check=True,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.npy", "o.st", "tmp"]
    assert list((tmp_path / "tmp").iterdir()) == []


def test_what_is_printed_for_programs(mistral: Path, run: Run, tmp_path: Path) -> None:
    words = ["capture", mistral, "--text", "the cat", "-o", tmp_path / "qkv.safetensors"]
    told = run(*words, "--layers", "1", "--format", "json").json
    (record,) = told["data"]
    assert told["schema"] == "attncli.capture/1"
    assert (record["group"], record["module"]) == ("layers.1", "layers.1.self_attn")
    assert record["options"] == {"scale": 8**-0.5, "causal": True}
    assert record["self_check"] < 1e-6 < record["allowed"]
    line = run(*words, "--layers", "1", "--format", "csv").stdout.splitlines()[1]
    assert '""causal"": true' in line


def test_several_texts_are_passes_of_their_own(mistral: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "second.txt").write_text("a dog and a cat")
    bundle = tmp_path / "qkv.safetensors"
    words = ["--text", "the cat", "--text-file", tmp_path / "second.txt", "--layers", "0"]
    run("capture", mistral, *words, "-o", bundle)
    told = metadata(bundle)
    assert [name for name in told if "scale" in told[name]] == [
        "texts.0.layers.0",
        "texts.1.layers.0",
    ]
    shown = run("compute", bundle, "--group", "texts.1.layers.0", "--stage", "weights")
    assert "a    dog    and      a    cat" in shown.stdout
    run("capture", mistral, "--text-file", "-", "-o", bundle, stdin=b"the cat\n")
    assert metadata(bundle)["*"]["labels"] == ["the", "cat"]


def test_a_batch_is_padded_and_says_so(mistral: Path, run: Run, tmp_path: Path) -> None:
    bundle = tmp_path / "qkv.safetensors"
    words = ["--text", "the cat", "--text", "a dog and a cat", "--batch", "--layers", "0"]
    run("capture", mistral, *words, "-o", bundle)
    told = metadata(bundle)
    assert told["layers.0"]["key_lengths"] == told["layers.0"]["query_lengths"] == [2, 5]
    assert told["*"]["labels"][0] == ["the", "cat", "<pad>", "<pad>", "<pad>"]


def test_steps_have_the_tokens_that_their_keys_are(mistral: Path, run: Run, tmp_path: Path) -> None:
    bundle = tmp_path / "qkv.safetensors"
    run("capture", mistral, "--text", "the cat sat on a mat", "--generate", "2", "-o", bundle)
    told = metadata(bundle)
    groups = [name for name in told if "scale" in told[name]]
    assert groups == [f"{step}layers.{n}" for step in ("", "steps.1.", "steps.2.") for n in (0, 1)]
    tokens = told["*"]["labels"]
    assert len(tokens) == 8
    # The cache holds four keys beside the newest.
    assert told["steps.2.layers.0"]["labels_from"] == 3
    shown = run("compute", bundle, "--group", "steps.2.layers.0", "--stage", "weights").stdout
    assert re.search(r"\s+".join(map(re.escape, [*tokens[3:], "entropy"])), shown)


def test_an_encoder_decoder_goes_on_by_itself(t5: Path, run: Run, tmp_path: Path) -> None:
    bundle = tmp_path / "qkv.safetensors"
    done = run("capture", t5, "--text", "the cat sat", "-o", bundle, code=1)
    assert "decoder_input_ids" in done.stderr
    assert not bundle.exists()
    run("capture", t5, "--text", "the cat sat", "--generate", "2", "-o", bundle, "--strict")
    told = metadata(bundle)
    assert "steps.1.decoder.layers.0.self" in told
    assert told["steps.1.decoder.layers.0.self"]["labels"] == "decoder.tokens"
    assert told["*"]["labels"] == ["the", "cat", "sat"]


def test_inputs_by_name_and_token_ids(t5: Path, mistral: Path, run: Run, tmp_path: Path) -> None:
    bundle, given = tmp_path / "qkv.safetensors", tmp_path / "given.npz"
    ids = np.array([[4, 5, 6]])
    np.savez(given, input_ids=ids, decoder_input_ids=ids[:, :2])
    run("capture", t5, "--inputs", given, "-o", bundle)
    assert metadata(bundle)["decoder.tokens"]["labels"] == ["the", "cat"]
    np.save(tmp_path / "ids.npy", ids[0])
    (tmp_path / "ids.txt").write_text("4 5 6")
    for name in ("ids.npy", "ids.txt"):
        run("capture", mistral, "--ids", tmp_path / name, "-o", bundle)
        assert metadata(bundle)["*"]["labels"] == ["the", "cat", "sat"]


def test_softmax_that_is_written_out_is_followed_on_demand(
    bloom: Path, run: Run, tmp_path: Path
) -> None:
    words = ["capture", bloom, "--text", "the cat sat", "-o", tmp_path / "qkv.safetensors"]
    done = run(*words, code=1)
    assert "got none from BloomModel" in done.stderr
    assert "--trace follows a softmax" in done.stderr
    assert [*tmp_path.iterdir()] == []
    done = run(*words, "--trace", "--strict")
    assert "--causal --attn-mask masks.0" in done.stdout


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["no/such/folder", "--text", "a"], 1, "expected a folder of a model, got nothing of"),
        (["./nowhere", "--text", "a"], 1, "expected a folder of a model, got nothing of this name"),
        (["org/name", "--text", "a"], 1, "HF_HUB_OFFLINE is set, so only the cache was searched"),
        (["MISTRAL"], 2, "--text: expected what to run the model on, got nothing"),
        (
            ["MISTRAL", "--text", "a", "--ids", "x"],
            2,
            "--ids: expected nothing to run on beside it",
        ),
        (["MISTRAL", "--ids", "x", "--batch"], 2, "--batch: expected --text beside it, got none"),
        (
            ["MISTRAL", "--text", "a", "--layers", "7"],
            2,
            "expected some of the layers 0 to 1, got 7",
        ),
        (["MISTRAL", "--text", "a " * 65], 1, "expected at most 64 tokens, got 65"),
        (["MISTRAL", "--text", ""], 1, "--text: expected a token at least, got none"),
        (["MISTRAL", "--text", "a", "--dtype", "int3"], 2, "--dtype: expected one of float64"),
        (["MISTRAL", "--ids", "words.txt"], 1, "(S) or (B, S) whole numbers, got other words"),
        (["MISTRAL", "--inputs", "odd.npz"], 1, "expected inputs that MistralModel takes"),
        (["EMPTY", "--text", "a"], 1, "expected config.json or one .gguf file in it, got neither"),
        (["BARE", "--text", "a"], 1, "expected a tokenizer beside the model for --text, got none"),
    ],
)
def test_what_is_refused(
    words: list[str],
    code: int,
    said: str,
    mistral: Path,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "words.txt").write_text("four five")
    np.savez("odd.npz", pixels=np.ones(3))
    Path("empty").mkdir()
    Path("bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        Path("bare", name).write_bytes((mistral / name).read_bytes())
    places = {"MISTRAL": str(mistral), "EMPTY": "empty", "BARE": "bare"}
    done = run(
        "capture", *(places.get(word, word) for word in words), "-o", "q.safetensors", code=code
    )
    assert said in done.stderr
    assert len(done.stderr.splitlines()) <= 2
    assert not Path("q.safetensors").exists()


@pytest.mark.parametrize(
    ("names", "model", "code", "said"),
    [
        (["a.gguf", "b.gguf"], ".", 1, "expected config.json or one .gguf file in it, got 2 .gguf"),
        (["a.bin"], "a.bin", 1, "expected a folder or a .gguf file, got another file"),
        ([], "a.gguf", 1, "expected a folder of a model, got nothing of this name"),
        (["a.gguf"], "a.gguf", 2, "expected gguf to be installed for GGUF, got none"),
        (["a.gguf"], ".", 2, "pip install gguf accelerate"),
        (["config.json"], ".", 1, "expected a model that transformers reads, got: "),
    ],
)
def test_files_that_are_no_model(
    names: list[str],
    model: str,
    code: int,
    said: str,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    for name in names:
        Path(name).write_text("no model")
    done = run("capture", model, "--text", "a", "-o", "qkv.safetensors", code=code)
    assert said in done.stderr
    assert len(done.stderr.splitlines()) <= 2


def test_code_of_a_models_own_is_not_run(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    own = {"AutoConfig": "own.Config", "AutoModel": "own.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": own}))
    (folder / "own.py").write_text("raise SystemExit('it was run')")
    done = run("capture", folder, "--text", "a", "-o", tmp_path / "q.safetensors", code=1)
    assert "got one with code of its own" in done.stderr
    assert "such code is never run" in done.stderr


def test_half_precision_is_said(mistral: Path, run: Run, tmp_path: Path) -> None:
    words = ["--text", "the cat", "--dtype", "bfloat16", "-o", tmp_path / "qkv.safetensors"]
    done = run("capture", mistral, *words, "--strict", "--format", "ndjson")
    assert "attncli: the model ran in bfloat16: its own weights carry that rounding" in done.stderr
    assert '"dtype": "bfloat16"' in done.stdout


def test_weights_that_a_model_lacks_are_told(run: Run, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "mistral", tf.MistralForCausalLM)
    weights = load_file(folder / "model.safetensors")
    kept = {key: value for key, value in weights.items() if "0.self_attn.k" not in key}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    done = run("capture", folder, "--text", "the cat", "-o", tmp_path / "qkv.safetensors")
    assert "random numbers stand for the weights it lacks: layers.0.self_attn.k_proj.weight" in (
        done.stderr
    )


def test_long_texts_are_cut_where_it_is_asked_for(mistral: Path, run: Run, tmp_path: Path) -> None:
    words = ["capture", mistral, "--text", "a " * 65, "--max-length", "8"]
    done = run(*words, "-o", tmp_path / "qkv.safetensors", "--format", "json")
    assert done.json["data"][0]["q_len"] == 8


def test_without_transformers_the_extra_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "attncli.recording.models", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = run("capture", "any", "--text", "a", "-o", tmp_path / "qkv.safetensors", code=2)
    assert "pip install 'attncli[capture]'" in done.stderr


def test_a_disk_too_small_is_told_after_the_first_layer(
    mistral: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def too_small(where: str, folder: Path, need: int) -> None:
        asked.append(need)
        require_disk(where, folder, 1 << 62)

    monkeypatch.setattr(recording, "require_disk", too_small)
    done = run("capture", mistral, "--text", "the cat", "-o", tmp_path / "q.safetensors", code=1)
    assert "on disk, got 4.6 EB" in done.stderr
    assert asked == [2 * 8 * 4 * (4 + 2 + 2)]  # tokens · d · bytes · heads of Q, K and V, once more
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("forgotten", ["left_window", "causal", "scale"])
def test_strict_fails_where_something_is_missing(
    forgotten: str, mistral: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = recording.Capture._keywords

    def incomplete(self: Any, call: Any) -> dict[str, Any]:
        return {name: value for name, value in complete(self, call).items() if name != forgotten}

    monkeypatch.setattr(recording.Capture, "_keywords", incomplete)
    if forgotten == "scale":
        monkeypatch.setattr(
            recording.Capture, "_keywords", lambda s, c: complete(s, c) | {"scale": 0.3}
        )
    words = ["capture", mistral, "--text", "the cat sat on a mat and saw a dog"]
    words += ["-o", tmp_path / "qkv.safetensors"]
    done = run(*words)
    assert "attncli: warning: layers.0: the model's own output is " in done.stderr
    done = run(*words, "--strict", code=3)
    assert "expected no layer to be off, got layers.0" in done.stderr


def test_an_interrupt_leaves_what_was_there(
    mistral: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = recording.Capture._receive

    def stop(self: Any, call: Any) -> None:
        receive(self, call)
        raise KeyboardInterrupt

    monkeypatch.setattr(recording.Capture, "_receive", stop)
    bundle = tmp_path / "qkv.safetensors"
    bundle.write_text("as it was")
    done = run("capture", mistral, "--text", "the cat", "-o", bundle, code=130)
    assert done.stderr == "attncli: interrupted\n"
    assert [path.read_text() for path in tmp_path.iterdir()] == ["as it was"]
