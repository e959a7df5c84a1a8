"""Blocks of rows shared out over threads, one torch thread each.

Torch would split every operation over its threads and wait for all of them after each, some ten
times per tile; blocks of rows have nothing to wait for. On an idle machine that is worth little,
on a busy one a factor of several.
"""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Tool = TypeVar("Tool")
Work = TypeVar("Work")
Result = TypeVar("Result")


def share_out(
    function: Callable[[Work, Tool], Result],
    pieces: Sequence[Work],
    make_tool: Callable[[], Tool],
    device: torch.device,
) -> Iterator[Result]:
    """Results of the function for each piece, in their order.

    Args:
        function: what to do with a piece; it may change its tool.
        pieces: independent of each other.
        make_tool: makes what one thread works with.
        device: on CPUs as many threads work as torch would use; elsewhere one queues the work.
    """
    workers = torch.get_num_threads() if device.type == "cpu" else 1
    workers = min(workers, len(pieces))
    with _one_torch_thread(device):
        if workers <= 1:
            tool = make_tool()
            yield from [function(piece, tool) for piece in pieces]
            return
        tools: queue.SimpleQueue[Tool] = queue.SimpleQueue()
        for _ in range(workers):
            tools.put(make_tool())

        def work(piece: Work) -> Result:
            torch.set_num_threads(1)
            tool = tools.get()
            try:
                return function(piece, tool)
            finally:
                tools.put(tool)

        yield from _in_pool(work, pieces, workers)


def _in_pool(
    work: Callable[[Work], Result], pieces: Sequence[Work], workers: int
) -> Iterator[Result]:
    pool = ThreadPoolExecutor(workers)
    try:
        yield from pool.map(work, pieces)
    finally:  # an interrupted run does not finish what it has not begun
        pool.shutdown(cancel_futures=True)


@contextmanager
def _one_torch_thread(device: torch.device) -> Iterator[None]:
    """Keep torch from splitting operations, and give it back its threads afterwards."""
    before = torch.get_num_threads()
    if device.type != "cpu" or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
