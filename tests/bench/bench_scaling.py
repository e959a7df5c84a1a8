"""What twice the length costs: python tests/bench/bench_scaling.py [--growth] [--only mask ...]

Each command runs as a process of its own on next to nothing, on a length and on twice that length.
Printed is how many times as much CPU the longer one takes, start-up taken off both: 4 is the
square of the length, 2 the length itself; and what each holds in memory beyond start-up.

With --growth it runs on seven lengths, each twice the one before: `entropy` on 2,048 to 131,072.
Printed are the exponents of the length that CPU seconds and memory grow with, start-up taken off,
fitted where they are a tenth of a second, or 4 MiB, and more.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from bench_entropy import OURS, Run, run

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


def measured(name: str, lengths: Sequence[int]) -> list[Run]:
    """What a case costs on each length, beyond what it costs on next to nothing."""
    arguments, found = CASES[name][0], []
    for length in (2, *lengths):
        with tempfile.TemporaryDirectory() as folder:
            given = [] if "mask" in name else files(Path(folder), length)
            found.append(run([*arguments(given, length), "--quiet"], threads=1))
    start, *rest = found
    return [
        Run(one.seconds - start.seconds, one.cpu - start.cpu, one.mebibytes - start.mebibytes)
        for one in rest
    ]


def twice(name: str) -> str:
    """What twice the length costs."""
    length = CASES[name][1]
    a, b = measured(name, (length, 2 * length))
    return (
        f"{length:>9} to {2 * length:>9}: {b.cpu / a.cpu:4.1f} times the CPU "
        f"({a.cpu:.2f} s, {b.cpu:.2f} s), memory +{a.mebibytes:.0f}, +{b.mebibytes:.0f} MiB"
    )


def growth(name: str) -> str:
    """The exponents over seven lengths."""
    lengths = [CASES[name][1] * 4 >> step for step in range(6, -1, -1)]
    runs = measured(name, lengths)
    said = f"{lengths[0]:>9} to {lengths[-1]:>9}:"
    for what, least in (("cpu", 0.1), ("mebibytes", 4.0)):
        points = [(n, getattr(one, what)) for n, one in zip(lengths, runs, strict=True)]
        x, y = np.log([point for point in points if point[1] >= least]).T
        said += f" {what} {np.polyfit(x, y, 1)[0]:.2f} (of {len(x)})"
    return said


def main() -> None:
    """Measure all cases, or some."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--growth", action="store_true", help="fit exponents over seven lengths")
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    asked = parser.parse_args()
    for name in asked.only:
        print(f"{name:36} {(growth if asked.growth else twice)(name)}", flush=True)


if __name__ == "__main__":
    main()
