"""Work on several processors, a thread each, where single operations are too small to share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def in_threads(
    work: Callable[[int, int], torch.Tensor], bounds: list[tuple[int, int]]
) -> list[torch.Tensor]:
    """The results of work on each pair of bounds, in order.

    A torch operation on some hundred rows spends as long on waking and awaiting its own threads
    as on arithmetic, and far longer where other programs keep the processors busy. So each thread
    here runs its operations alone. How many there are changes no result.
    """
    threads = min(len(bounds), torch.get_num_threads())
    if threads < 2:
        return [work(*pair) for pair in bounds]
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(work, *zip(*bounds, strict=True)))
    finally:
        # The number is each thread's own, but threads that start later take the last one set.
        torch.set_num_threads(before)
