"""Time and memory of `attncli variance` against the plain scripts it has to keep up with.

Not collected by pytest: run `python tests/bench/bench_variance.py [--pairs 5] [--only NAME …]`.
Whole processes run in turn, ours and theirs, and the median of the ratios of each pair is what
counts: what else the machine does then hits both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

COMMAND = [sys.executable, "-m", "attncli", "variance"]

_DRAW = """
import numpy as np
rng = np.random.default_rng(0)
for _ in range({samples} // 8192):
    rng.standard_normal((1024, {dk}))
    rng.standard_normal((8192, {dk}))
"""
_GRAM = """
import numpy as np
import torch
q, k = (torch.from_numpy(np.load(path)) for path in ({q!r}, {k!r}))
print((q.T @ q).trace(), (k.T @ k).trace())
"""
_SCORES = """
import numpy as np
import torch
q, k = (torch.from_numpy(np.load(path)) for path in ({q!r}, {k!r}))
print((q @ k.T).var(correction=0))
"""
# The computation alone, in one process: what imports cost hides it at this size.
_SHORT = """
import time
import numpy as np
import torch
from attncli.attention.variance.moments import audit
from attncli.attention.options import AttentionOptions
from attncli.attention.problem import make_problem

q, k = (torch.from_numpy(np.load(path)) for path in ({q!r}, {k!r}))
def ours():
    return next(audit(make_problem(q, k, None, AttentionOptions(causal={causal})))).var
def theirs():
    return (q @ k.T).var(correction=0)
ratios = []
for _ in range({pairs}):
    times = []
    for work in (ours, theirs):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    ratios.append(times[0] / times[1])
print(sorted(ratios)[len(ratios) // 2])
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison of whole processes.

    Attributes:
        name: of the case.
        ours: arguments of the command.
        theirs: the Python script to beat.
        limit: the largest ratio of times that is promised.
    """

    name: str
    ours: list[str]
    theirs: str
    limit: float


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds of wall clock, and the most memory held, in MiB."""

    seconds: float
    peak: float


def run(command: list[str]) -> Run:
    """One process from start to end; its output is thrown away.

    Raises:
        RuntimeError: it failed.
    """
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {command[:4]}")
    return Run(seconds, usage.ru_maxrss / 1024)


def compare(case: Case, pairs: int) -> None:
    """Run a case in turns and print the medians."""
    ours, theirs = [], []
    for _ in range(pairs):
        ours.append(run(COMMAND + case.ours))
        theirs.append(run([sys.executable, "-c", case.theirs]))
    ratios = [one.seconds / other.seconds for one, other in zip(ours, theirs, strict=True)]
    columns = [
        f"{statistics.median(one.seconds for one in runs):8.2f} s {runs[0].peak:7.0f} MiB"
        for runs in (ours, theirs)
    ]
    ratio = statistics.median(ratios)
    spread = f"{min(ratios):.2f}–{max(ratios):.2f}"
    print(f"{case.name:14} {columns[0]}  {columns[1]}  {ratio:6.2f} ({spread})  ≤ {case.limit}")


def write_sides(folder: Path, length: int, width: int) -> dict[str, str]:
    """Standard normal float32 Q and K of that size as files; their paths by role."""
    rng = np.random.default_rng(0)
    paths = {}
    for role in ("q", "k"):
        paths[role] = str(folder / f"{role}_{length}.npy")
        with Path(paths[role]).open("wb") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": (length, width)}
            np.lib.format.write_array_header_1_0(file, header)
            # In blocks: a process that is started counts its parent's memory as its own peak.
            for at in range(0, length, 8192):
                rows = min(8192, length - at)
                file.write(rng.standard_normal((rows, width), dtype=np.float32).tobytes())
    return paths


def cases(folder: Path, wanted: list[str]) -> list[Case]:
    """The chosen cases, their files written."""
    samples, dk = 10_000_000, 128
    found = []
    if "experiment" in wanted:
        arguments = ["--dk", str(dk), "--samples", str(samples)]
        found.append(Case("experiment", arguments, _DRAW.format(samples=samples, dk=dk), 1.3))
    if {"all pairs", "causal"} & set(wanted):
        long = write_sides(folder, 1_000_000, 128)
        files, script = [long["q"], long["k"]], _GRAM.format(**long)
        found.append(Case("all pairs", files, script, 2.0))
        found.append(Case("causal", [*files, "--causal"], script, 3.5))
    if "short" in wanted:
        short = write_sides(folder, 16_384, 64)
        found.append(Case("short", [short["q"], short["k"]], _SCORES.format(**short), 1.0))
    return [case for case in found if case.name in wanted]


def main() -> None:
    """Print one line per case."""
    names = ["experiment", "all pairs", "causal", "short", "short alone"]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    given = parser.parse_args()
    print("case              ours (time, peak)      theirs (time, peak)   ratio (least–most)")
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(Path(folder), given.only):
            compare(case, given.pairs)
        if "short alone" in given.only:
            short = write_sides(Path(folder), 16_384, 64)
            for causal in (False, True):
                script = _SHORT.format(**short, causal=causal, pairs=given.pairs)
                found = subprocess.run(
                    [sys.executable, "-c", script], check=True, capture_output=True, text=True
                )
                kind = "causal" if causal else "all pairs"
                print(f"short alone, {kind}: {float(found.stdout):.4f}  ≤ 0.05")


if __name__ == "__main__":
    main()
