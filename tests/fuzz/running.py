"""Many inputs in processes of their own, and what came of them."""

from __future__ import annotations

import argparse
import multiprocessing as mp
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol


class Inputs(Protocol):
    """Inputs by their number, in a folder of their own."""

    def one(self, number: int) -> str:
        """Make an input, hand it in, and return in a word or two what came of it.

        Raises:
            BaseException: what should not have come of it.
        """

    def spent(self) -> tuple[float, float]:
        """The seconds and the megabytes that the costliest input took."""


Make = Callable[[int], AbstractContextManager[Inputs]]


@dataclass(slots=True)
class Found:
    """What came of some inputs.

    Attributes:
        outcomes: how often each.
        faults: where it failed and how → the numbers of the inputs, and the whole story of one.
        slowest: seconds that the slowest input took.
        largest: megabytes that the largest took.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: dict[str, tuple[list[int], str]] = field(default_factory=dict)
    slowest: float = 0.0
    largest: float = 0.0

    def add(self, other: Found) -> None:
        """Add what came of more inputs, and tell of a new kind of fault at once."""
        self.outcomes += other.outcomes
        for where, (numbers, story) in other.faults.items():
            if where not in self.faults:
                print(f"\n{where}\n  e.g. {numbers[0]}", file=sys.stderr)
            self.faults.setdefault(where, ([], story))[0].extend(numbers)
        self.slowest = max(self.slowest, other.slowest)
        self.largest = max(self.largest, other.largest)

    def fault(self, where: str, number: int, story: str) -> None:
        self.faults.setdefault(where, ([], story))[0].append(number)


def look_at(inputs: Inputs, numbers: range, at: Any = None) -> Found:
    """Try these inputs one by one; `at` is told which one it is."""
    found = Found()
    for number in numbers:
        if at is not None:
            at.value = number
        try:
            found.outcomes[inputs.one(number)] += 1
        except BaseException as error:
            found.outcomes["FAULT"] += 1
            found.fault(_where(error), number, "".join(traceback.format_exception(error)))
            if isinstance(error, KeyboardInterrupt):
                break
    found.slowest, found.largest = inputs.spent()
    return found


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    last = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames[-2:]]
    return f"{type(error).__name__} {' '.join(last)}: {str(error)[:80]!r}"


def _worker(make: Make, seed: int, numbers: range, at: Any, results: Any) -> None:
    with make(seed) as inputs:
        part = 1000
        for start in range(0, len(numbers), part):
            results.put(look_at(inputs, numbers[start : start + part], at))


def main(make: Make, what: str) -> int:
    """Try as many inputs as the command line says; return 1 if any was a fault.

    Args:
        make: enters a folder and gives the inputs of a seed.
        what: what they are called.
    """
    parser = argparse.ArgumentParser(description=f"Try random {what}.")
    parser.add_argument("count", type=int, help=f"how many {what}")
    parser.add_argument("--seed", type=int, default=0, help="of all choices (default: 0)")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--workers", type=int, default=1, help="processes (default: 1)")
    given = parser.parse_args()
    began = time.monotonic()
    found = Found()
    numbers = range(given.first, given.first + given.count)
    shares = [numbers[at :: given.workers] for at in range(given.workers)]
    _in_processes(make, given.seed, shares, found)
    _tell(found, what, time.monotonic() - began)
    return bool(found.faults)


def _in_processes(make: Make, seed: int, shares: list[range], found: Found) -> None:
    """A process for each share; where one dies, another goes on behind the input it died of."""
    spawning = mp.get_context("spawn")
    results = spawning.Queue()
    running: dict[Any, tuple[Any, range]] = {}

    def start(share: range) -> None:
        at = spawning.Value("q", -1, lock=False)
        process = spawning.Process(target=_worker, args=(make, seed, share, at, results))
        process.start()
        running[process] = at, share

    for share in shares:
        start(share)
    while running:
        while not results.empty():
            found.add(results.get())
            done = sum(found.outcomes.values())
            print(f"\r{done:,} done, {len(found.faults)} kinds of fault", end="", file=sys.stderr)
        for process in [process for process in running if not process.is_alive()]:
            at, share = running.pop(process)
            if process.exitcode:
                found.fault(f"the process ended with {process.exitcode}", at.value, "")
                left = share[share.index(at.value) + 1 :] if at.value in share else share[:0]
                if left:
                    start(left)
        time.sleep(0.05)
    while not results.empty():
        found.add(results.get())


def _tell(found: Found, what: str, seconds: float) -> None:
    total = sum(found.outcomes.values())
    print(f"\n{total:,} {what} in {seconds:,.0f} s, {len(found.faults)} kinds of fault")
    for outcome, count in found.outcomes.most_common():
        print(f"{count:>10,}  {outcome}")
    print(f"the slowest took {found.slowest:.2f} s, the largest {found.largest:.0f} MB")
    for where, (numbers, story) in found.faults.items():
        shown = ", ".join(map(str, numbers[:5]))
        print(f"\n{len(numbers):,} × {where}\n  e.g. {shown}\n{story}")
