"""Stages against what one would write by hand: python tests/bench/bench_compute.py [PAIRS].

8 heads of 4,096 × 4,096 cells in float32, d 64. Both sides of a pair run in turn on as many
threads as OMP_NUM_THREADS says, so that both see the same machine; the medians of the ratios are
printed, of CPU seconds beside wall time, since a busy machine stretches the latter. Whole
processes read the same .npy files.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

import attncli

SHAPE = (1, 8, 4096, 64)

SCRIPT = """
import sys
import numpy as np
import torch

q, k = (torch.from_numpy(np.load(name)) for name in sys.argv[1:3])
np.save(sys.argv[3], torch.softmax(q @ k.mT * 0.125, -1).numpy())
"""

Cost = tuple[float, float]  # wall and CPU seconds


def main(pairs: int) -> None:
    """Print one line for each case."""
    q, k, v = (torch.randn(SHAPE, generator=torch.Generator().manual_seed(n)) for n in range(3))

    def by_hand() -> object:
        return torch.softmax(q @ k.mT * 0.125, -1)

    def fused(causal: bool) -> object:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def everything(causal: bool) -> object:
        return attncli.compute(q, k, v, causal=causal).statistics

    compute = partial(attncli.compute, q, k, v)
    cases: list[tuple[str, Callable[[], object], Callable[[], object], float | None]] = [
        ("weights / by hand", partial(compute, stages=["weights"]), by_hand, 2),
        (
            "the same, causal / by hand",
            partial(compute, stages="weights", causal=True),
            by_hand,
            None,
        ),
        ("all stages with statistics / by hand", partial(everything, False), by_hand, 6),
        ("the same, causal / by hand", partial(everything, True), by_hand, None),
        ("output / SDPA", partial(compute, stages=["output"]), partial(fused, False), 1.5),
        (
            "the same, causal / SDPA",
            partial(compute, stages=["output"], causal=True),
            partial(fused, True),
            1.5,
        ),
    ]
    for name, ours, theirs, limit in cases:
        report(name, limit, partial(in_process, ours), partial(in_process, theirs), pairs)
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder) / f"{name}.npy") for name in "qkw"]
        for name, tensor in zip(files, (q, k), strict=False):
            np.save(name, tensor.numpy())
        program = ["-m", "attncli", "compute", *files[:2], "--stage", "weights"]
        command = [*program, "--save", str(Path(folder) / "w.npz"), "--format", "json", "-q"]
        report(
            "compute --stage weights --save / a script that saves",
            None,
            partial(whole_process, command),
            partial(whole_process, ["-c", SCRIPT, *files]),
            pairs,
        )


def report(
    name: str, limit: float | None, ours: Callable[[], Cost], theirs: Callable[[], Cost], pairs: int
) -> None:
    """The medians of the ratios of two sides that run in turn."""
    found = [(ours(), theirs()) for _ in range(pairs + 1)][1:]  # the first warms up
    wall, used = (statistics.median(o[i] / t[i] for o, t in found) for i in (0, 1))
    print(f"{name}: wall {wall:.2f}, CPU {used:.2f} (limit {limit or 'none'})", flush=True)


def in_process(work: Callable[[], object]) -> Cost:
    """Wall and CPU seconds of a function."""
    wall, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - used


def whole_process(arguments: list[str]) -> Cost:
    """Wall and CPU seconds of a Python process."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, arguments
    return time.perf_counter() - started, used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
