"""Whole processes, paired: the row statistics of files against what one would run instead.

    python tests/bench/bench_entropy.py [--pairs 3] [--only causal ...]

Both sides of a pair start from nothing, import what they need, read the same .npy files and end.
They alternate, so that a machine that slows down slows both; the medians of the ratios are
printed, and the largest resident sets. On a machine with other work the ratio of CPU seconds is
the steadier one, though it counts what a side spends waiting for its own threads. Ratios "net" of
start-up have the time of each side's command on next to nothing taken off it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

ROOT = Path(__file__).parent.parent.parent
MINILM = ROOT / "sample_inputs" / "minilm.safetensors"

OURS = ["-m", "attncli", "entropy"]

SDPA = """
import sys
import numpy as np
import torch

q, k, v = (torch.from_numpy(np.load(name)) for name in sys.argv[1:4])
attend = torch.nn.functional.scaled_dot_product_attention
print(attend(q, k, v, is_causal="--causal" in sys.argv).mean())
"""

MATERIALISE = """
import sys
import numpy as np
import torch

q, k, v = (torch.from_numpy(np.load(name)) for name in sys.argv[1:4])
hidden = None
if "--causal" in sys.argv:
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
for head in range(q.shape[1]):
    scores = q[0, head] @ k[0, head].T / q.shape[-1] ** 0.5
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    weights = torch.softmax(scores, -1)
    print(-(weights * torch.log(weights.clamp(min=1e-30))).sum(-1).mean())
"""


@dataclass(frozen=True, slots=True)
class Run:
    """How one process went: seconds by the clock and of CPU, and its largest resident set."""

    seconds: float
    cpu: float
    mebibytes: float


@dataclass(frozen=True, slots=True)
class Case:
    """One pair, and what must hold.

    Attributes:
        ours, theirs: arguments of the interpreter.
        limit: the ratio of times may be at most this; None where only memory counts.
        extra: how many MiB above theirs our resident set may be; None for no such limit.
        start_up: arguments of the runs whose times are taken off ours and theirs; None for none.
        threads: how many torch uses on either side; None for as many as it likes.
    """

    ours: list[str]
    theirs: list[str]
    limit: float | None
    extra: float | None = None
    start_up: tuple[list[str], list[str]] | None = None
    threads: tuple[int, int] | None = None


def run(arguments: list[str], threads: int | None = None) -> Run:
    """Run the interpreter with these arguments to its end, on so many threads of torch."""
    environment = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    words = [sys.executable, *arguments]
    started = time.perf_counter()
    process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode} of {arguments[:2]}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def files(folder: Path, heads: int, length: int) -> list[str]:
    """Q, K and V of (1, heads, length, 64), float32, drawn once."""
    names = [folder / f"{role}-{heads}-{length}.npy" for role in "qkv"]
    rng = np.random.default_rng(0)
    for name in names:
        if not name.exists():
            np.save(name, rng.standard_normal((1, heads, length, 64), dtype=np.float32))
    return [str(name) for name in names]


def cases(folder: Path) -> dict[str, Callable[[], Case]]:
    """Every case by name; its files are drawn when it is asked for."""

    def against(
        script: str, heads: int, length: int, options: list[str], limit: float | None
    ) -> Callable[[], Case]:
        def make() -> Case:
            given = files(folder, heads, length)
            causal = [option for option in options if option == "--causal"]
            ours, theirs = [*OURS, *given, *options], ["-c", script, *given, *causal]
            return Case(ours, theirs, limit, 300 if script is SDPA else None)

        return make

    def window(heads: int) -> Case:
        given, tiny = files(folder, heads, 65_536), files(folder, heads, 64)
        full, start = ([*OURS, *names, "--causal"] for names in (given, tiny))
        cut = ["--left-window", "255"]  # a number, to read which takes start-up longer
        return Case([*full, *cut], full, 1 / 20, start_up=([*start, *cut], start))

    def computing() -> Case:
        given, tiny = files(folder, 32, 8192), files(folder, 32, 64)
        ours, theirs = ([*words, *given, "--causal"] for words in (OURS, ["-c", SDPA]))
        start = tuple([*words, *tiny, "--causal"] for words in (OURS, ["-c", SDPA]))
        return Case(ours, theirs, 1.0, start_up=(start[0], start[1]))

    def threads(words: list[str], heads: int, length: int, limit: float | None) -> Case:
        given, tiny = files(folder, heads, length), files(folder, heads, 64)
        ours, start = ([*words, *names, "--causal"] for names in (given, tiny))
        return Case(ours, ours, limit, start_up=(start, start), threads=(2, 1))

    def memory() -> Case:
        ours = [*OURS, *files(folder, 1, 131_072), "--causal"]
        # Beside an interpreter that has imported torch: 96 MiB of inputs, and 400 more.
        return Case(ours, ["-c", "import torch"], None, 96 + 400)

    def many_heads() -> Case:
        return Case([*OURS, str(MINILM)], ["-c", "import torch"], 1.4)

    return {
        "causal": against(SDPA, 8, 16_384, ["--causal"], 1.0),
        "full": against(SDPA, 8, 16_384, [], 0.95),
        # A table of 131,072 keys is rich's work, not attention's: the heaviest, and all as CSV.
        "per-key": against(SDPA, 8, 16_384, ["--causal", "--per-key", "--top", "10"], 1.6),
        "all keys": against(SDPA, 8, 16_384, ["--causal", "--per-key", "-f", "csv"], None),
        "materialise": against(MATERIALISE, 8, 16_384, ["--causal"], 1 / 6),
        "computing": computing,
        "window": partial(window, 1),
        "4 windows": partial(window, 4),
        "threads": partial(threads, OURS, 8, 16_384, 1 / 1.9),
        "long": partial(threads, OURS, 1, 65_536, 1 / 1.9),
        "SDPA's own": partial(threads, ["-c", SDPA], 8, 16_384, None),
        "memory": memory,
        "many-heads": many_heads,
    }


def measure(case: Case, pairs: int) -> str:
    """Run a case and say what came out."""
    ours, theirs, ratios = [], [], []
    on_ours, on_theirs = case.threads or (None, None)
    for _ in range(pairs):
        off = [0.0, 0.0]
        if case.start_up is not None:  # each time anew: a machine's pace changes within minutes
            a, b = case.start_up
            off = [run(a, on_ours).seconds, run(b, on_theirs).seconds]
        ours.append(run(case.ours, on_ours))
        theirs.append(run(case.theirs, on_theirs))
        ratios.append((ours[-1].seconds - off[0]) / (theirs[-1].seconds - off[1]))
    ratio = median(ratios)
    cpu = median(a.cpu / b.cpu for a, b in zip(ours, theirs, strict=True))
    most, other = (max(each.mebibytes for each in side) for side in (ours, theirs))
    net = " net of start-up" if case.start_up else ""
    clocks = [median(each.seconds for each in side) for side in (ours, theirs)]
    said = f"{ratio:6.3f}{net} ({clocks[0]:.2f} s against {clocks[1]:.2f} s; CPU {cpu:.2f}), "
    said += f"{most:.0f} MiB ({most - other:+.0f})"
    if case.limit is not None:
        said += f"  {'holds' if ratio <= case.limit else 'MISSES'}: at most {case.limit:.3g}"
    if case.extra is not None:
        said += f"  {'holds' if most - other <= case.extra else 'MISSES'}: +{case.extra:.0f} MiB"
    return said


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
