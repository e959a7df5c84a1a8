"""What twice the length costs: python tests/bench/bench_scaling.py [--only mask ...]

Each command runs as a process of its own on next to nothing, on a length and on twice that length.
Printed is how many times as much CPU the longer one takes, start-up taken off both: 4 is the
square of the length, 2 the length itself; and what each holds in memory beyond start-up.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from bench_entropy import OURS, run

MASK = ["-m", "attncli", "mask", "--causal", "--k-len"]
VARIANCE = ["-m", "attncli", "variance"]
# What is run → the arguments for files of Q and K and a length, and the shorter length.
CASES: dict[str, tuple[Callable[[list[str], int], list[str]], int]] = {
    "entropy": (lambda qk, _: [*OURS, *qk], 32768),
    "entropy --causal": (lambda qk, _: [*OURS, *qk, "--causal"], 32768),
    "entropy --causal --left-window 256": (
        lambda qk, _: [*OURS, *qk, "--causal", "--left-window", "256"],
        262144,
    ),
    "variance": (lambda qk, _: [*VARIANCE, *qk], 1 << 20),
    "variance --causal": (lambda qk, _: [*VARIANCE, *qk, "--causal"], 1 << 20),
    "mask --causal": (lambda _, n: [*MASK, str(n)], 8_000_000),
}


def files(folder: Path, length: int) -> list[str]:
    """Q and K of one head, (1, 1, length, 64) float32."""
    names = [folder / f"{role}.npy" for role in "qk"]
    for seed, name in enumerate(names):
        rng = np.random.default_rng(seed)
        np.save(name, rng.standard_normal((1, 1, length, 64), np.float32))
    return [str(name) for name in names]


def main() -> None:
    """Measure all cases, or some."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    for name in parser.parse_args().only:
        arguments, length = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            start, once, twice = (
                run([*arguments([] if "mask" in name else files(Path(folder), n), n), "--quiet"])
                for n in (2, length, 2 * length)
            )
        print(
            f"{name:36} {length:>9} to {2 * length:>9}: "
            f"{(twice.cpu - start.cpu) / (once.cpu - start.cpu):4.1f} times the CPU "
            f"({once.cpu - start.cpu:.2f} s, {twice.cpu - start.cpu:.2f} s), memory "
            f"+{once.mebibytes - start.mebibytes:.0f}, "
            f"+{twice.mebibytes - start.mebibytes:.0f} MiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
