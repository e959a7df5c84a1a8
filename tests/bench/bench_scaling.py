"""What twice the length costs: python tests/bench/bench_scaling.py [--growth] [--only mask ...]

Each command runs as a process of its own on next to nothing, on a length and on twice that length.
Printed is how many times as much CPU the longer one takes, start-up taken off both: 4 is the
square of the length, 2 the length itself; and what each holds in memory beyond start-up.

With --growth it runs on seven lengths, each twice the one before: `entropy` on 2,048 to 131,072.
Printed are the exponents p of the length n that CPU seconds and memory grow with: of the fit
a + b·n^p, a being start-up, in which each is believed within 5 % and a tenth of a second, or 4 MiB.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from bench_entropy import OURS, Run, run
from numpy.typing import NDArray

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
    # In a process of its own: what is run next would count the largest that this one has ever been.
    with ProcessPoolExecutor(1) as apart:
        list(apart.map(_draw, names, range(2), [length] * 2))
    return [str(name) for name in names]


def _draw(name: Path, seed: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    np.save(name, rng.standard_normal((1, 1, length, 64), np.float32))


def costs(name: str, length: int) -> Run:
    """What a case costs on a length: the least of five runs, or of as many as take ten seconds."""
    with tempfile.TemporaryDirectory() as folder:
        given = [] if "mask" in name else files(Path(folder), length)
        arguments = [*CASES[name][0](given, length), "--quiet"]
        found: list[Run] = []
        while len(found) < 5 and sum(one.seconds for one in found) < 10:
            found.append(run(arguments, threads=1))
    return min(found, key=lambda one: one.cpu)


def twice(name: str) -> str:
    """What twice the length costs."""
    length = CASES[name][1]
    start, *both = (costs(name, n) for n in (2, length, 2 * length))
    cpu, memory = zip(
        *((one.cpu - start.cpu, one.mebibytes - start.mebibytes) for one in both), strict=True
    )
    return (
        f"{length:>9} to {2 * length:>9}: {cpu[1] / cpu[0]:4.1f} times the CPU "
        f"({cpu[0]:.2f} s, {cpu[1]:.2f} s), memory +{memory[0]:.0f}, +{memory[1]:.0f} MiB"
    )


def growth(name: str) -> str:
    """The exponents over seven lengths."""
    lengths = [CASES[name][1] * 4 >> step for step in range(6, -1, -1)]
    runs = [costs(name, n) for n in (2, *lengths)]
    said = f"{lengths[0]:>9} to {lengths[-1]:>9}:"
    for what, least in (("cpu", 0.1), ("mebibytes", 4.0)):
        values = np.array([getattr(one, what) for one in runs])
        found = "does not grow"
        if values[-1] - values[0] > 2 * least:
            found = f"{exponent(np.array([2, *lengths]), values, least):.2f}"
        said += f" {what} {found}"
    return said


def exponent(lengths: NDArray[np.int64], values: NDArray[np.float64], least: float) -> float:
    """The p of which a + b·n^p is nearest to the values, each within 5 % and so much."""
    weights = 1 / (least + 0.05 * values)

    def misses(p: float) -> float:
        terms = np.stack([np.ones(len(lengths)), (lengths / lengths[-1]) ** p], 1)
        found = np.linalg.lstsq(terms * weights[:, None], values * weights, rcond=None)[0]
        return float(np.square((terms @ found - values) * weights).sum())

    return min(np.arange(0.1, 3.0, 0.01).tolist(), key=misses)


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
