"""Every bound of speed and memory in one run: python tests/bench/bench_bounds.py [--pairs 3].

Whole processes in turn, as `bench_entropy.py` tells, then the stages of `bench_compute.py`. Each
line says what came out and whether it holds. It takes some ten minutes of a machine that does
nothing else.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import bench_compute
import bench_entropy


def main() -> None:
    """Run all that has a bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3, help="runs of each side")
    pairs = parser.parse_args().pairs
    with tempfile.TemporaryDirectory() as folder:
        for name, make in bench_entropy.cases(Path(folder)).items():
            print(f"{name:12} {bench_entropy.measure(make(), pairs)}", flush=True)
    bench_compute.main(pairs)


if __name__ == "__main__":
    main()
