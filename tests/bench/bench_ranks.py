"""Several processes against one: python tests/bench/bench_ranks.py [--ranks 2] [--length 65536]

Each side computes the same files with one thread a process, in turn, several times. Printed is how
many times as fast the ranks are: with start-up, and without, which is the time of the same command
on two queries. The machine needs a free core for each rank.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from bench_entropy import OURS
from bench_scaling import files


def seconds(arguments: list[str], ranks: int) -> float:
    """How long a command takes in so many processes, by the clock."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    begun = time.perf_counter()
    running = [
        subprocess.Popen(
            [sys.executable, *arguments, "--quiet"],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
        )
        for rank in range(ranks)
    ]
    assert all(process.wait() == 0 for process in running)
    return time.perf_counter() - begun


def main() -> None:
    """Measure causal and full attention, cut by rows and by keys."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--length", type=int, default=65536)
    parser.add_argument("--pairs", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        few = files(Path(folder), 2)
        start = [median(seconds([*OURS, *few], n) for _ in range(3)) for n in (1, asked.ranks)]
        long = files(Path(folder), asked.length)
        for options in ([], ["--causal"], ["--shard", "keys"], ["--per-key", "--top", "10"]):
            alone = [one for one in options if one not in ("--shard", "keys")]
            whole, net = [], []
            for _ in range(asked.pairs):
                times = (
                    seconds([*OURS, *long, *alone], 1),
                    seconds([*OURS, *long, *options], asked.ranks),
                )
                whole.append(times[0] / times[1])
                net.append((times[0] - start[0]) / (times[1] - start[1]))
            print(
                f"entropy {' '.join(options):16} {asked.length}: {asked.ranks} ranks are "
                f"{median(whole):.2f} times as fast, net of start-up {median(net):.2f} "
                f"(start-up {start[0]:.1f} s and {start[1]:.1f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
