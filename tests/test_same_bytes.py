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
from torch.nn.functional import scaled_dot_product_attention

from attncli.attention.threads import sum_along, sum_of

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
)


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
    return found


@pytest.fixture
def threads() -> Iterator[None]:
    """Give torch back the threads it had."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def arguments(command: str, folder: Path) -> list[str]:
    return [str(folder / word) if word.endswith(".npy") else word for word in command.split()]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_number_of_threads_changes_no_byte(
    command: str, folder: Path, run: Callable[..., Any], threads: None
) -> None:
    printed = set()
    for count in THREADS:
        torch.set_num_threads(count)
        printed.add(run(*arguments(command, folder)).stdout)
    assert len(printed) == 1


def test_hash_seeds_and_processes_change_no_byte(folder: Path) -> None:
    """One process for all commands, under other seeds and numbers of threads."""
    script = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from attncli.cli.app import app\n"
        "for line in sys.stdin.read().splitlines():\n"
        "    print(CliRunner().invoke(app, line.split('\\t')).stdout)\n"
    )
    lines = "\n".join("\t".join(arguments(command, folder)) for command in COMMANDS)
    printed = set()
    for seed, count in (("0", "1"), ("4711", "3")):
        environment = os.environ | {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": count}
        done = subprocess.run(
            [sys.executable, "-c", script],
            input=lines,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        printed.add(done.stdout)
    assert len(printed) == 1
    assert "attncli.check/1" in printed.pop()


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
