"""What starting costs, as whole processes in pairs: python tests/bench/bench_startup.py [PAIRS].

Prints the median of the ratios; CPU time beside wall time, since a busy machine stretches the
latter. Byte code is cached, as it is for users.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time

# The least that a program of two commands takes to print its help.
TRIVIAL = """
import typer
app = typer.Typer()
@app.command()
def one(number: int = 1): "One."
@app.command()
def other(number: int = 2): "Another."
app(["--help"], standalone_mode=False)
"""
IMPORTS = "import numpy, typer, rich"
PAIRS = (
    ("--help / a trivial app's", ["--help"], TRIVIAL, 1.3),
    ("mask / import numpy, typer, rich", ["mask", "--causal"], IMPORTS, 2.0),
    ("the same with a number", ["mask", "--causal", "--k-len", "8"], IMPORTS, None),
    ("mask / a trivial app's help", ["mask", "--causal"], TRIVIAL, None),
    ("compute / import torch", ["compute"], "import torch", 1.35),
)


def cost(arguments: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of one Python process."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, arguments
    return time.perf_counter() - started, used.ru_utime + used.ru_stime


def main(pairs: int) -> None:
    """Measure each pair in turn, so that both see the same machine."""
    for name, command, base, limit in PAIRS:
        program = ["-m", "attncli", *command]
        cost(program)
        cost(["-c", base])
        found = [(cost(program), cost(["-c", base])) for _ in range(pairs)]
        wall = statistics.median(ours[0] / theirs[0] for ours, theirs in found)
        used = statistics.median(ours[1] / theirs[1] for ours, theirs in found)
        print(f"{name}: wall {wall:.2f}, CPU {used:.2f} (limit {limit or 'none'})", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"PYTHONPYCACHEPREFIX": cache}
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
