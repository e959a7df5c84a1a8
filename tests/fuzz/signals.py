"""Runs of the program that a signal ends at a random moment, and what each leaves behind.

python tests/fuzz/signals.py 1000              # so many runs, two at a time
python tests/fuzz/signals.py 1000 --seed 7 --jobs 4

Right is: the exit code is that of the signal, or 0 where the program was done by then; standard
error holds one line at most; every target holds what it held before or, all of them, what a whole
run writes; nothing else lies beside them, in the working directory or where temporary files go.

What comes before the first line of the package is read cannot be the package's: such runs, told
by the signals that the process has a handler for, count as "before the program".
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

PACKAGE = Path(__file__).parents[2]
SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
SAID = re.compile(r"(attncli: (interrupted|terminated|hung up)\n)?")
OLD = b"what was there"
# How the console script that pip writes starts the program, and the other way.
SCRIPT = "import re, sys; from attncli.__main__ import main; sys.exit(main())"
WAYS = (["-c", SCRIPT], ["-m", "attncli"])


@dataclass(frozen=True, slots=True)
class Case:
    """A command.

    Attributes:
        line: its words; `{in}` is the folder of inputs.
        stdin: the input that comes from standard input.
        weight: how often it is drawn.
    """

    line: str
    stdin: str | None = None
    weight: float = 2.0


LIGHT = [
    Case("mask --causal --q-len 2500 --save m.npz"),
    Case("mask --causal --q-len 2500 --save m.safetensors"),
    Case("mask --causal --q-len 2500 --save m.npy -o t.json -f json"),
    Case("mask --left-window 4 --causal --q-len 2500 --save m/"),
    Case("mask --attn-mask - --save m.npz", "mask.npy"),
    Case("inspect - -o t.csv -f csv", "q.npy"),
    Case("inspect {in}/bundle.npz -o t.json -f json"),
    Case("variance --dk 8,64 --samples 20000 -o t.csv -f csv"),
    Case("mask --causal --plot p.png -o t.txt", weight=1),
    Case("--help", weight=0.5),
]
HEAVY = [
    Case("compute {in}/bundle.npz --save x.npz -o t.txt"),
    Case("compute {in}/bundle.npz --save x.safetensors"),
    Case("compute {in}/bundle.npz --save stages"),
    Case("compute - --stage weights --save w.npy -f csv -o t.csv", "bundle.npz"),
    Case("compute {in}/bundle.npz --plot p.svg", weight=0.5),
    Case("entropy {in}/bundle.npz --per-row -f ndjson -o t.ndjson"),
    Case("variance {in}/q.npy {in}/k.npy -f json -o t.json", weight=0.5),
    Case("compare {in}/bundle.npz --what-if scale=1 -f csv -o t.csv", weight=0.5),
    Case("report {in}/bundle.npz -o p.html", weight=0.5),
    Case("capture {in}/model --ids {in}/ids.npy -o qkv.safetensors", weight=0.5),
]


@dataclass(frozen=True, slots=True)
class Whole:
    """What a case does when nothing disturbs it: how long it takes, and what it writes."""

    seconds: float
    content: dict[str, bytes]


@dataclass(slots=True)
class Ended:
    """How a run ended.

    Attributes:
        how: in a word or two.
        faults: what is wrong with that; empty for nothing.
    """

    how: str
    faults: list[str] = field(default_factory=list)


def make_inputs(folder: Path, *, with_model: bool) -> None:
    """Tensors of a problem, a mask, and a model for `capture`, which needs transformers."""
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal((2, 400, 16)).astype("f4") for name in "qkv"}
    for name, array in tensors.items():
        np.save(folder / f"{name}.npy", array)
    np.savez(folder / "bundle.npz", **tensors)
    np.save(folder / "mask.npy", rng.random((1500, 1500)) < 0.5)
    np.save(folder / "ids.npy", np.arange(1, 30)[None])
    if with_model:
        words = "hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=60"
        program = (
            "import sys, transformers as tf; tf.LlamaModel(tf.LlamaConfig(num_attention_heads=4, "
            f"{words})).save_pretrained(sys.argv[1])"
        )
        command = [sys.executable, "-c", program, folder / "model"]
        subprocess.run(command, check=True, capture_output=True)


def content_of(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, and empty folders, with what is in them."""
    return {
        str(path.relative_to(folder)) + ("/" if path.is_dir() else ""): b""
        if path.is_dir()
        else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() or not any(path.iterdir())
    }


class Bench:
    """Where runs are made, and what whole ones write."""

    def __init__(self, root: Path, cases: Sequence[Case]) -> None:
        self.root = root
        self.inputs = root / "in"
        self.inputs.mkdir()
        make_inputs(self.inputs, with_model=any("capture" in case.line for case in cases))
        self.whole = {case: self._whole(n, case) for n, case in enumerate(cases)}

    def start(self, case: Case, way: list[str], place: Path) -> subprocess.Popen[bytes]:
        """Start a case in a place of its own."""
        (place / "tmp").mkdir(parents=True)
        (place / "work").mkdir(exist_ok=True)
        words = [word.replace("{in}", str(self.inputs)) for word in case.line.split()]
        quiet = [] if case.line == "--help" else ["--quiet"]
        environment = os.environ | {
            "TMPDIR": str(place / "tmp"),
            "PYTHONPATH": str(PACKAGE),
            "COLUMNS": "80",
        }
        source = subprocess.DEVNULL
        if case.stdin is not None:
            source = os.open(self.inputs / case.stdin, os.O_RDONLY)
        running = subprocess.Popen(
            [sys.executable, *way, *words, *quiet],
            cwd=place / "work",
            env=environment,
            stdin=source,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        if case.stdin is not None:
            os.close(source)
        return running

    def _whole(self, number: int, case: Case) -> Whole:
        began = time.monotonic()
        place = self.root / f"whole-{number}"
        running = self.start(case, WAYS[0], place)
        _, said = running.communicate(timeout=300)
        assert running.returncode == 0, (case.line, said)
        assert not content_of(place / "tmp"), case.line
        return Whole(time.monotonic() - began, content_of(place / "work"))

    def run(self, number: int, case: Case, rng: random.Random) -> Ended:
        """Run a case, disturb it, and judge what it leaves."""
        place = self.root / f"run-{number}"
        (place / "work").mkdir(parents=True)
        before = self._put_old(case, place / "work") if rng.random() < 0.5 else {}
        sent = rng.choice(list(SIGNALS))
        running = self.start(case, rng.choice(WAYS), place)
        if rng.random() < 0.5:
            time.sleep(rng.uniform(0, 1.05 * self.whole[case].seconds))
        else:
            self._wait_for_a_temporary_file(running, place, self.whole[case].seconds)
            time.sleep(rng.random() ** 2 * 0.4)
        is_ready = _handles_signals(running.pid)
        running.send_signal(sent)
        _, said = running.communicate(timeout=300)
        ended = self.judged(case, place, before, running.returncode, said.decode(), sent, is_ready)
        if not ended.faults:
            shutil.rmtree(place)
        return ended

    def _put_old(self, case: Case, work: Path) -> dict[str, bytes]:
        """Let there be something in the places of the targets."""
        for name in self.whole[case].content:
            (work / name).parent.mkdir(exist_ok=True)
            (work / name).write_bytes(OLD)
        return content_of(work)

    def _wait_for_a_temporary_file(
        self, running: subprocess.Popen[bytes], place: Path, most: float
    ) -> None:
        until = time.monotonic() + 2 * most
        while running.poll() is None and time.monotonic() < until:
            names = [path.name for path in (*place.glob("*/.*"), *place.glob("work/*/.*"))]
            if any(name.startswith(".attncli-") for name in names):
                return
            time.sleep(0.001)

    def judged(
        self,
        case: Case,
        place: Path,
        before: dict[str, bytes],
        code: int,
        said: str,
        sent: signal.Signals,
        is_ready: bool,
    ) -> Ended:
        """Judge a run.

        Args:
            case: what was run.
            place: where.
            before: what lay there.
            code: how it ended.
            said: on standard error.
            sent: which signal.
            is_ready: whether the program had handlers when it was sent.
        """
        left, whole = content_of(place / "work"), self.whole[case].content
        ended = Ended("another way")
        if code == 0:
            ended.how = "done by then"
        elif code == SIGNALS[sent]:
            ended.how = f"{code}"
        elif not is_ready and left == before and (code in (1, -sent)) and "attncli/" not in said:
            ended.how, said = "before the program", ""
        elif code == -sent and left == whole | (before if before.keys() - whole else {}):
            ended.how = "while Python left, all done"
        if ended.how == "another way":
            ended.faults.append(f"exit code {code} after {sent.name}")
        if SAID.fullmatch(said) is None:
            ended.faults.append(f"said {said!r}")
        if left not in (before, whole):
            wrong = {n: "old" if d == OLD else len(d) for n, d in left.items() if whole.get(n) != d}
            ended.faults.append(f"left {wrong}")
        if code == 0 and left != whole:
            ended.faults.append("exit code 0 without all of its files")
        if left := sorted(content_of(place / "tmp")):
            ended.faults.append(f"temporary files {left}")
        return ended


def _handles_signals(pid: int) -> bool:
    """Whether the program has got as far as to have a handler for SIGTERM."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    found = re.search(r"^SigCgt:\s*(\w+)$", status, re.MULTILINE)
    return found is None or bool(int(found[1], 16) >> (signal.SIGTERM - 1) & 1)


def disturb(
    root: Path, cases: Sequence[Case], runs: int, seed: int, jobs: int = 1
) -> tuple[Counter[str], list[str]]:
    """Make so many runs; return how they ended, and what is wrong with which."""
    bench, rng = Bench(root, cases), random.Random(seed)
    drawn = rng.choices(cases, [case.weight for case in cases], k=runs)
    seeds = [rng.random() for _ in drawn]
    counts: Counter[str] = Counter()
    faults: list[str] = []

    def one(number: int) -> None:
        case = drawn[number]
        ended = bench.run(number, case, random.Random(seeds[number]))
        counts[ended.how] += 1
        faults.extend(f"run {number}, {case.line}: {fault}" for fault in ended.faults)
        for fault in ended.faults:
            print(f"run {number}, {case.line}: {fault}", flush=True)
        if counts.total() % 50 == 0:
            print(f"{counts.total()} runs: {dict(counts)}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, range(runs)))
    return counts, faults


def main() -> None:
    """Make the runs that the command line asks for, and print how they ended."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--light", action="store_true", help="only commands that load no torch")
    given = parser.parse_args()
    cases = LIGHT if given.light else LIGHT + HEAVY
    with tempfile.TemporaryDirectory() as root:
        counts, faults = disturb(Path(root), cases, given.runs, given.seed, given.jobs)
    print(f"{given.runs} runs, {len(faults)} faults")
    for how, count in counts.most_common():
        print(f"{count:6} {how}")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
