"""Whatever the words of a command line are, the program answers in its own manner."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from attncli.cli.app import app

WHOLE = ["0", "1", "-1", "3", "8", "x", "", "1.5", "9" * 20, "0,1", "2,99"]
NUMBERS = ["0", "0.5", "-1", "nan", "inf", "1e400", "1e-30", "x", "", "1,2,3,4"]
FILES = [
    "q.npy",
    "b.npz",
    "b.npz::q",
    "b.npz::zz",
    "nan.npy",
    "empty.npy",
    "bad.npy",
    "absent",
    ".",
]
MASKS = ["mask.npy", "additive.npy", *FILES]

SHAPE = {
    "--scale": NUMBERS,
    "--temperature": NUMBERS,
    "--softcap": NUMBERS,
    "--causal": [],
    "--query-offset": ["top-left", "bottom-right", "middle", *WHOLE],
    "--left-window": WHOLE,
    "--right-window": WHOLE,
    "--sink-window": WHOLE,
    "--prefix": WHOLE,
    "--key-lengths": WHOLE,
    "--query-lengths": WHOLE,
    "--key-padding": ["padding.npy", *FILES],
    "--attn-mask": MASKS,
    "--mask-true": ["keep", "drop", "x"],
    "--segments": ["0,0,1,1,1,2,2", *WHOLE],
    "--query-segments": ["0,0,1,1,1,2,2", *WHOLE],
    "--position-ids": ["0,1,2,0,1,2,3", *WHOLE],
    "--cu-seqlens-q": ["0,3,7", *WHOLE],
    "--cu-seqlens-k": ["0,3,7", *WHOLE],
    "--alibi": [],
    "--alibi-slopes": NUMBERS,
    "--sinks": NUMBERS,
}
WORK = {
    "--format": ["json", "ndjson", "csv", "table", "x"],
    "--digits": WHOLE,
    "--unit": ["bits", "nats", "x"],
    "--precision": ["float32", "float64", "x"],
    "--device": ["cpu", "x", "cuda:99"],
    "--color": ["always", "never", "x"],
    "--quiet": [],
}
INPUTS = {
    "--layout": ["bhsd", "bshd", "bsh"],
    "--heads": WHOLE,
    "--kv-heads": WHOLE,
    "--dtype": ["float16", "bfloat16", "int8", "complex64", "x"],
    "--allow-nonfinite": [],
    "--group": ["x"],
    "--v": FILES,
}
SIZES = dict.fromkeys(("--batch", "--q-len", "--k-len", "--dk", "--dv", "--seed"), WHOLE)
OWN = {
    "compute": INPUTS | SIZES | {"--stage": ["weights", "capped", "x"], "--rows": WHOLE},
    "entropy": INPUTS | SIZES | {"--per-row": [], "--per-key": [], "--top": WHOLE, "--summary": []},
    "variance": INPUTS | {"--samples": ["100"], "--keys": WHOLE, "--mean": NUMBERS},
    "mask": {"--q-len": WHOLE, "--batch": WHOLE, "--against": MASKS, "--fail-on": ["leak", "x"]},
    "check": INPUTS | {"--actual-output": FILES, "--actual-logsumexp": ["lse.npy"]},
    "inspect": {"--dtype": ["bfloat16", "x"]},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B=2, H=4, H_kv=2, S=7 in q.npy, k.npy, v.npy and a bundle; masks; files that are amiss."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((2, heads, 7, 8)).astype(np.float32) for heads in (4, 2, 2))
    keep = rng.random((7, 7)) < 0.7
    arrays = {"q": q, "k": k, "v": v, "mask": keep, "additive": np.where(keep, 0.0, -np.inf)}
    arrays |= {"padding": rng.random((2, 7)) < 0.7, "lse": q[..., 0], "nan": q * np.nan}
    for name, array in (arrays | {"empty": q[:, :, :0]}).items():
        np.save(f"{name}.npy", array)
    np.savez("b.npz", q=q, k=k, v=v)
    Path("bad.npy").write_bytes(b"not an array")


def random_words(command: str, chance: random.Random) -> list[str]:
    words = [command]
    if command == "inspect" or chance.random() < 0.2:
        words += chance.choices(FILES, k=chance.randint(1, 3))
    else:
        words += chance.choice([["q.npy", "k.npy", "v.npy"], ["b.npz"], []])
    if command == "check":
        words += ["--actual-output", "q.npy"]
    options = OWN[command] | (SHAPE if command != "inspect" else {})
    chosen = chance.sample(sorted(options), min(len(options), chance.randint(0, 3)))
    for option in (*chosen, *chance.sample(sorted(WORK), chance.randint(0, 2))):
        values = (options | WORK)[option]
        words += [option, chance.choice(values)] if values else [option]
    return words


@pytest.mark.parametrize("command", OWN)
@pytest.mark.usefixtures("folder")
def test_random_words(command: str) -> None:
    chance = random.Random(command)
    for _ in range(80):
        words = random_words(command, chance)
        assert_manners(CliRunner().invoke(app, words), words)


def assert_manners(result: Result, words: list[str]) -> None:
    """One line of error and one of advice at most; documents that programs can read.

    Of several files those that are broken have a line each, where the others are told.
    """
    said = (result.exit_code, words, result.stderr, result.exception)
    assert result.exit_code in (0, 1, 2, 3), said
    lines = result.stderr.splitlines()
    errors = [place for place, line in enumerate(lines) if line.startswith("attncli: error: ")]
    left_out = result.exit_code == 1 and bool(result.stdout)
    assert left_out or len(errors) == (result.exit_code != 0), said
    assert errors or not left_out, said
    for place in errors:
        typers_own = lines[-1].endswith("--help` lists what it takes")
        assert "expected " in lines[place] or typers_own, said
        assert "unexpected " not in lines[place], said
        assert left_out or len(lines) - place <= 2, said
    if result.exit_code in (1, 2) and not left_out:
        assert not result.stdout, said
    elif "--format" in words:
        assert_document(result.stdout, words[words.index("--format") + 1])


def assert_document(text: str, form: str) -> None:
    if form == "json":
        json.loads(text, parse_constant=refuse)
    elif form == "ndjson":
        for line in text.splitlines():
            json.loads(line, parse_constant=refuse)
    elif form == "csv":
        assert len({line.count(",") > 0 for line in text.splitlines()}) == 1


def refuse(constant: str) -> None:
    raise AssertionError(f"not strict JSON: {constant}")
