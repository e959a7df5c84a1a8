"""The same command on the same input prints the same bytes: any threads, any hash seed, any run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch.nn.functional import scaled_dot_product_attention

from attncli.attention.threads import sum_along, sum_of

Run = Callable[..., Any]

THREADS = (1, 2, 3, 7)
# Torch shares one sum out over its threads from 32,768 numbers on.
LONG, HEADS, LENGTH = 40_000, 2, 300
ROWS = "q.npy k.npy v.npy"
COMMANDS = (
    f"compute {ROWS} --causal -f json",
    f"compute {ROWS} --attn-mask mask.npy --precision float32 -f csv --stage output",
    "compute one.npy long.npy longv.npy --max-values 0 -f json",
    "compute one.npy long.npy longv.npy --stage output --precision float32 -f csv",
    f"compute {ROWS} --explain --quiet",
    "entropy q.npy k.npy --attn-mask add.npy --precision float32 -f json",
    "entropy q.npy k.npy --causal --per-row -f csv",
    "entropy q.npy k.npy --causal --per-key -f ndjson",
    "entropy q.npy k.npy --sample-rows 50 --sinks 0.5,-1 -f json",
    "entropy one.npy long.npy --query-offset 0 -f json",
    "entropy --weights weights.npy -f json",
    "variance q.npy k.npy --attn-mask mask.npy -f json",
    "variance q.npy k.npy --causal --precision float32 -f json",
    "variance q.npy k.npy --fit-scale weights.npy -f json",
    "variance --dk 1,64 --samples 20000 -f json",
    "variance --logits 1,2,3 -f json",
    f"check {ROWS} --causal --actual-output out.npy -f json",
    f"compare {ROWS} --causal --what-if left-window=9 -f json",
    "mask --attn-mask mask.npy -f json --max-values 0",
    "mask one.npy long.npy --key-lengths 39000 --effect --query-offset 0 -f csv",
    "inspect long.npy mask.npy -f json",
    "schema",
    "schema entropy",
    f"compute {ROWS} --causal --max-values 0 -f json --stage weights --save OUT/weights.npz",
    "compute broken.npy k.npy brokenv.npy --allow-nonfinite --causal --max-values 0 -f json",
    f"report {ROWS} --causal --max-size 250kB -o OUT/page.html",
    "report --weights weights.npy --lang zh -o OUT/page.html",
)
# Of what is drawn the numbers are those above, so that two numbers of threads are enough.
PICTURES = (
    f"compute {ROWS} --stage weights --rows 0:40 --max-values 0 -f json --plot OUT/stages.svg",
    "entropy q.npy k.npy --causal -f json --plot OUT/heads.pdf",
    f"compare {ROWS} --what-if scale=0.1 -f json --plot OUT/differences.png",
    "mask --causal --q-len 40 -f json --plot OUT/mask.svg",
    "variance --dk 1,64 --samples 2000 -f json --plot OUT/curves.svg",
)
CAPTURE = "capture model --ids ids.npy --trace -f json -o OUT/qkv.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors and masks for all commands."""
    found, rng = tmp_path_factory.mktemp("same"), np.random.default_rng(0)

    def save(name: str, *shape: int, spread: float = 1.0) -> None:
        np.save(found / f"{name}.npy", rng.standard_normal(shape, np.float32) * np.float32(spread))

    for name in ("q", "k", "v"):
        save(name, 1, HEADS, LENGTH, 64, spread=1.5)
    q, k, v = (torch.from_numpy(np.load(found / f"{name}.npy")) for name in "qkv")
    np.save(found / "out.npy", scaled_dot_product_attention(q, k, v, is_causal=True).numpy())
    save("one", 1, 8)
    save("long", LONG, 8)
    save("longv", LONG, 2)
    mask = np.tril(rng.random((LENGTH, LENGTH)) < 0.7) | np.eye(LENGTH, dtype=bool)
    np.save(found / "mask.npy", mask)
    np.save(found / "add.npy", np.where(mask, rng.random(mask.shape), -np.inf).astype(np.float32))
    weights = rng.random((1, HEADS, LENGTH, LENGTH), np.float32)
    np.save(found / "weights.npy", weights / weights.sum(-1, keepdims=True))
    for name, start in {"q": "broken", "v": "brokenv"}.items():
        values = np.load(found / f"{name}.npy")
        values[0, 0, 5, 3], values[0, 1, 9, 3] = np.nan, np.inf
        np.save(found / f"{start}.npy", values)
    np.save(found / "ids.npy", np.array([1, 5, 9, 3, 7]))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    tf.LlamaModel(tf.LlamaConfig(**sizes, num_attention_heads=4, vocab_size=60)).save_pretrained(
        found / "model"
    )
    return found


@pytest.fixture
def threads() -> Iterator[None]:
    """Give torch back the threads it had."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def arguments(command: str, folder: Path, out: Path) -> list[str]:
    """The words of a command, with inputs of one folder and outputs to another."""
    words = (word.replace("OUT", str(out)) for word in command.split())
    return [str(folder / word) if (folder / word).exists() else word for word in words]


def assert_alike(command: str, folder: Path, run: Run, out: Path, threads: tuple[int, ...]) -> None:
    """It prints and writes the same for any of these numbers of threads."""
    found = set()
    for count in threads:
        torch.set_num_threads(count)
        printed = run(*arguments(command, folder, out)).stdout
        written = [path.read_bytes() for path in sorted(out.iterdir())]
        assert bool(written) == ("OUT" in command)
        found.add((printed, *written))
    assert len(found) == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_the_number_of_threads_changes_no_byte(
    command: str, folder: Path, run: Run, tmp_path: Path, threads: None
) -> None:
    assert_alike(command, folder, run, tmp_path, THREADS)


@pytest.mark.parametrize("command", PICTURES)
def test_pictures_do_not_depend_on_threads_either(
    command: str, folder: Path, run: Run, tmp_path: Path, threads: None
) -> None:
    assert_alike(command, folder, run, tmp_path, (1, 3))


SCRIPT = """
import hashlib
from pathlib import Path
import torch
from typer.testing import CliRunner
from attncli.cli.app import app
for line in Path("commands").read_text().splitlines():
    if line.startswith("capture"):  # a model is torch's alone
        torch.set_num_threads(1)
    done = CliRunner().invoke(app, line.split("\t"))
    assert done.exit_code == 0, (line, done.stderr)
    print(done.stdout)
    for path in sorted(Path("out").iterdir()):
        print(path, hashlib.sha256(path.read_bytes()).hexdigest())
        path.unlink()
"""


def test_hash_seeds_and_processes_change_no_byte(folder: Path, tmp_path: Path) -> None:
    """One process for all commands, under each of two seeds and numbers of threads."""
    commands = [arguments(c, folder, Path("out")) for c in (*COMMANDS, *PICTURES, CAPTURE)]
    started = []
    for seed, count in (("0", "1"), ("4711", "3")):
        place = tmp_path / seed
        (place / "out").mkdir(parents=True)
        (place / "commands").write_text("\n".join(map("\t".join, commands)))
        with (place / "printed").open("wb") as printed:
            process = subprocess.Popen(
                [sys.executable, "-c", SCRIPT],
                cwd=place,
                env=os.environ | {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": count},
                stdout=printed,
            )
        started.append(process)
    assert [process.wait() for process in started] == [0, 0]
    one, other = ((tmp_path / seed / "printed").read_text() for seed in ("0", "4711"))
    assert one == other
    assert "attncli.check/1" in one
    assert all(f"out/{name} " in one for name in ("page.html", "qkv.safetensors", "stages.svg"))


@pytest.mark.parametrize("shape", [(1, LONG), (3, LONG), (LONG,), (2, 0), (0,)])
def test_sums_do_not_depend_on_threads(shape: tuple[int, ...], threads: None) -> None:
    values = torch.from_numpy(np.random.default_rng(1).standard_normal(shape, np.float32))
    along, whole = set(), set()
    for count in THREADS:
        torch.set_num_threads(count)
        along.add(sum_along(values).numpy().tobytes())
        whole.add(sum_of(values))
    assert len(along) == len(whole) == 1
    exact = values.double().sum(-1)
    torch.testing.assert_close(sum_along(values, torch.float64), exact, rtol=1e-12, atol=1e-12)
    assert whole.pop() == pytest.approx(float(exact.sum()), rel=1e-4, abs=1e-3)
