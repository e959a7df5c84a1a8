"""Time and memory of auditing masks: structured ones of any length, and files of 4 GiB.

python tests/bench/bench_mask.py            # structured masks and a file of 256 MiB
python tests/bench/bench_mask.py --large    # the file has 65,536 × 65,536 booleans, 4 GiB
python tests/bench/bench_mask.py --large --directory /some/disk/with/room
python tests/bench/bench_mask.py --processes 21   # whole commands against importing what they need
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from attncli.attention.masks.audit import audit, cell_counts
from attncli.attention.masks.build import build_mask
from attncli.attention.masks.compare import compare
from attncli.attention.masks.mask import HeadMask, Mask
from attncli.attention.options import AttentionOptions
from attncli.attention.sizes import Sizes

LENGTH = 100_000
MAPPED = "--mapped"


def main() -> None:
    """Print one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="a file of 4 GiB")
    parser.add_argument("--directory", type=Path, help="where the file is written")
    parser.add_argument(MAPPED, type=Path, help="audit this file in this process")
    parser.add_argument("--processes", type=int, help="time so many pairs of whole processes")
    arguments = parser.parse_args()
    if arguments.processes is not None:
        time_processes(arguments.processes)
        return
    if arguments.mapped is not None:
        audit_file(arguments.mapped)
        return
    for name, options in structured_cases().items():
        sizes = Sizes(1, 1, LENGTH, LENGTH)
        measure(name, lambda o=options, s=sizes: build_mask(AttentionOptions(**o), s))
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        path = Path(directory) / "mask.npy"
        for name in ("causal", "leaking"):
            write_file(path, 65_536 if arguments.large else 16_384, leak=name == "leaking")
            # A process of its own, so that the peak of its memory is that of the audit.
            subprocess.run([sys.executable, __file__, MAPPED, str(path)], check=True)


def structured_cases() -> dict[str, dict[str, Any]]:
    """Options for masks of 100,000 × 100,000."""
    generator = np.random.default_rng(0)
    ids = np.sort(generator.integers(0, 50, LENGTH))
    keep = generator.random(LENGTH) > 0.1
    every = {"left_window": 1000, "key_lengths": (90_000,), "prefix": 500, "key_padding": keep}
    return {
        "causal": {"causal": True},
        "causal, window": {"causal": True, "left_window": 4095},
        "key padding file": {"key_padding": keep},
        "packed documents": {"causal": True, "segments": ids},
        "every rule": {"causal": True, "segments": ids, **every},
        "interleaved documents": {"causal": True, "segments": generator.permutation(ids)},
    }


def measure(name: str, build: Any) -> None:
    """Time building, auditing and drawing of one mask."""
    start = time.perf_counter()
    mask: Mask = build()
    (record,) = audit(mask).records
    audited = time.perf_counter()
    cell_counts(HeadMask(mask), 40, 80)
    drawn = time.perf_counter()
    print(
        f"{name:24} audit {audited - start:7.3f} s   picture {drawn - audited:7.3f} s   "
        f"kept {record.kept:13}   {record.description[:60]}",
        flush=True,
    )


def audit_file(path: Path) -> None:
    """Audit a mapped file, compare it with a causal mask, and print the peak of memory."""
    given = np.load(path, mmap_mode="r")
    sizes = Sizes(1, 1, *given.shape)
    before = peak_memory()
    mask = build_mask(AttentionOptions(attn_mask=given), sizes)
    measure(f"file of {given.nbytes >> 20} MiB", lambda: mask)
    start = time.perf_counter()
    found = compare(mask, build_mask(AttentionOptions(causal=True), sizes))
    print(f"{'':24} compare {time.perf_counter() - start:5.3f} s   differing {found.differing}")
    print(f"{'':24} memory: {before} MiB before, {peak_memory()} MiB at most")


def time_processes(pairs: int) -> None:
    """Time commands in turn with a process that imports numpy, typer and rich; print medians."""
    floor = [sys.executable, "-c", "import numpy, typer, rich"]
    for line in ("--causal", f"--causal --left-window 4095 --q-len {LENGTH}"):
        command = [sys.executable, "-m", "attncli", "mask", *line.split()]
        times = [(seconds(floor), seconds(command)) for _ in range(pairs)]
        low, own = (statistics.median(column) for column in zip(*times, strict=True))
        ratio = statistics.median(one / other for other, one in times)
        print(f"mask {line:44} {own:.3f} s, imports alone {low:.3f} s, ratio {ratio:.2f}")


def seconds(command: list[str]) -> float:
    """How long a whole process takes."""
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def peak_memory() -> int:
    """Largest resident memory of this process in MiB, mapped pages included; Linux only."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(r"VmHWM:\s+(\d+)", status)
    return int(found[1]) // 1024 if found else 0


def write_file(path: Path, size: int, *, leak: bool) -> None:
    """Write a causal mask, bool (size, size), in which three future keys may be visible."""
    cells = np.lib.format.open_memmap(path, mode="w+", dtype=bool, shape=(size, size))
    for start in range(0, size, 256):
        cells[start : start + 256] = np.tri(256, size, start, dtype=bool)
    if leak:
        cells[5, 60:63] = True
    cells.flush()


if __name__ == "__main__":
    main()
