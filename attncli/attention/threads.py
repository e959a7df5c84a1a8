"""Blocks of rows shared out over threads, one torch thread each.

Torch would split every operation over its threads and wait for all of them after each, some ten
times per tile; blocks of rows have nothing to wait for. On an idle machine that is worth little,
on a busy one a factor of several.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch

from attncli.limits import processors

Scratch = TypeVar("Scratch")
Work = TypeVar("Work")
Result = TypeVar("Result")


def parallel_map(
    function: Callable[[Work, Scratch], Result],
    pieces: Sequence[Work],
    make_scratch: Callable[[], Scratch],
    workers: int,
) -> Iterator[Result]:
    """Results of the function for each piece, in their order.

    Args:
        function: what to do with a piece; it may overwrite its scratch.
        pieces: independent of each other.
        make_scratch: makes the buffers that one thread works in.
        workers: how many threads work, as `single_threaded_torch` gives it.
    """
    workers = min(workers, len(pieces))
    if workers <= 1:
        scratch = make_scratch()
        yield from (function(piece, scratch) for piece in pieces)
        return
    free: queue.SimpleQueue[Scratch] = queue.SimpleQueue()
    for _ in range(workers):
        free.put(make_scratch())

    def work(piece: Work) -> Result:
        torch.set_num_threads(1)
        scratch = free.get()
        try:
            return function(piece, scratch)
        finally:
            free.put(scratch)

    pool = ThreadPoolExecutor(workers)
    try:
        yield from pool.map(work, pieces)
    finally:  # an interrupted run does not finish what it has not begun
        pool.shutdown(cancel_futures=True)


_processors = cache(processors)  # asking reads files, and this is asked a thousand times a run


@contextmanager
def single_threaded_torch(device: torch.device) -> Iterator[int]:
    """Keep torch from splitting operations, and give it back its threads afterwards.

    Gives the number of threads that may work instead: as many as torch would have used on CPUs, or
    as a container has time for; elsewhere one queues the work. Small operations on a busy machine
    take a hundred times as long where torch splits them, so this holds for what comes before and
    after the tiles as well.
    """
    before = torch.get_num_threads()
    if device.type != "cpu" or before == 1:
        yield 1
        return
    torch.set_num_threads(1)
    try:
        yield min(before, _processors())
    finally:
        torch.set_num_threads(before)


def map_ranges(
    work: Callable[[int, int], Result], bounds: Sequence[tuple[int, int]]
) -> list[Result]:
    """The results of work on each pair of bounds, in order, a thread each on CPUs.

    How many threads there are changes no result.
    """
    with single_threaded_torch(torch.device("cpu")) as workers:
        return list(parallel_map(lambda pair, _: work(*pair), bounds, lambda: None, workers))


# Torch adds up more numbers than twice as many in as many parts as it has threads.
_PIECE = 1 << 14


def sum_along(values: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Σ over the last axis, in an order that the number of torch's threads does not change.

    Args:
        values: (…, n).
        dtype: of the sums; None for that of the values.
    """
    parts = [part.sum(-1, dtype=dtype) for part in torch.split(values, _PIECE, -1)]
    return parts[0] if len(parts) == 1 else torch.stack(parts, -1).sum(-1)


def sum_of(values: torch.Tensor) -> float:
    """Σ of all elements, likewise."""
    return float(sum_along(values.flatten()))


# Rows of a product that one thread computes: by the length alone, so that results never change.
_PRODUCT_ROWS = 256


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right, (…, n, k) and (…, k, m), whose bits the number of threads does not change.

    Libraries choose their kernels by the share of the rows that each thread gets.
    """
    if left.device.type != "cpu":
        return left @ right
    with single_threaded_torch(left.device) as workers:
        pieces = torch.split(left, _PRODUCT_ROWS, -2)
        found = list(parallel_map(lambda rows, _: rows @ right, pieces, lambda: None, workers))
        return found[0] if len(found) == 1 else torch.cat(found, -2)
