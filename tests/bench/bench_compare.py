"""Whole processes, paired: `attncli compare` against `attncli entropy --per-key`, and its memory.

    python tests/bench/bench_compare.py [--pairs 3] [--only causal ...]

What a pair is, and how ratios and memory are read, is told in `bench_entropy.py`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench_entropy import MINILM, OURS, Case, files, measure

COMPARE = ["-m", "attncli", "compare"]
ROUNDED = ["--what-if", "k-dtype=bfloat16"]
# A table with a line for each key takes longer than the keys.
PER_KEY = ["--per-key", "--top", "1"]


def cases(folder: Path) -> dict[str, Callable[[], Case]]:
    """Every case by name; its files are drawn when it is asked for."""

    def against_entropy(options: list[str], change: list[str]) -> Callable[[], Case]:
        def make() -> Case:
            given = [*files(folder, 4, 16_384), *options]
            return Case([*COMPARE, *given, *change], [*OURS, *given, *PER_KEY], 2.5)

        return make

    def memory() -> Case:
        ours = [*COMPARE, *files(folder, 1, 131_072), "--causal", *ROUNDED]
        # Beside an interpreter that has imported torch: 96 MiB of inputs, and 600 more.
        return Case(ours, ["-c", "import torch"], None, 96 + 600)

    def many_heads() -> Case:
        return Case([*COMPARE, str(MINILM), *ROUNDED], [*OURS, str(MINILM), *PER_KEY], 2.5)

    return {
        "causal": against_entropy(["--causal"], ROUNDED),
        "full": against_entropy([], ROUNDED),
        "window": against_entropy(["--causal"], ["--what-if", "left-window=1024"]),
        "memory": memory,
        "many-heads": many_heads,
    }


def main() -> None:
    """Run the cases that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3, help="runs of each side")
    parser.add_argument("--only", nargs="*", help="names of cases")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        known = cases(Path(folder))
        for name in arguments.only or known:
            print(f"{name:12} {measure(known[name](), arguments.pairs)}", flush=True)


if __name__ == "__main__":
    main()
