"""Ranks: several processes that do one command together, as torchrun and others start them.

Each of them runs the whole command line. What is much work comes as pieces in order, which are
shared out; the results arrive in their order at rank 0, which alone prints and writes. In one
process that is plain iteration.

Loads nothing heavy.
"""

from __future__ import annotations

import itertools
import os
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from attncli import team
from attncli.errors import AttncliError, DataError
from attncli.team import Place, Team

Item = TypeVar("Item")
Found = TypeVar("Found")
Result = TypeVar("Result")


def place() -> Place:
    """What torchrun, or whoever started the process, has put into its environment."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    rank, count, *meeting_point = (os.environ.get(name, "") for name in names)
    if not (all(meeting_point) and rank.isdecimal() and count.isdecimal()) or int(count) < 2:
        return Place()
    local = (os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    local_rank, local_count = (int(text) if text.isdecimal() else None for text in local)
    return Place(int(rank), int(count), local_rank or 0, local_count or 1)


def is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    return place().rank == 0


# ── pieces of work ───────────────────────────────────────────────────────────────────────────


def count() -> int:
    """How many ranks share the work of this process; 1 where none do."""
    return 1 if _TEAM is None else _TEAM.place.count


def in_order(
    items: Sequence[Item],
    costs: Callable[[Item], Sequence[float]],
    work: Callable[[Item, slice], Found],
    join: Callable[[Sequence[Found]], Found],
) -> Iterator[Found]:
    """What comes of each item, in order; at other ranks than the first nothing comes.

    As many items as there are ranks are done together: by equal shares of their cost, each of
    neighbours, so that rank 0 never holds more than these.

    Args:
        items: what to do.
        costs: what each part of an item costs, more than 0; it has at least one.
        work: does some neighbouring parts of an item.
        join: makes one of what came of an item's parts in different places.
    """
    for start in range(0, len(items), count()):
        some = items[start : start + count()]
        if _TEAM is None:
            yield work(some[0], slice(None))
            continue
        mine = shares([costs(item) for item in some], count())[_TEAM.place.rank]
        found = _TEAM.gather([(at, work(some[at], part)) for at, part in mine])
        for at in range(len(some)) if found else ():
            parts = [result for of_rank in found for where, result in of_rank if where == at]
            yield parts[0] if len(parts) == 1 else join(parts)


def shares(costs: Sequence[Sequence[float]], count: int) -> list[list[tuple[int, slice]]]:
    """Cut items in a row into so many shares of about equal cost.

    Args:
        costs: of the parts of each item.
        count: of shares.

    Returns:
        Of each share its items, by their number, with the parts of each.
    """
    ends = list(itertools.accumulate(itertools.chain.from_iterable(costs), initial=0.0))
    edges = [_nearest(ends, ends[-1] * share / count) for share in range(count + 1)]
    found: list[list[tuple[int, slice]]] = []
    starts = list(itertools.accumulate(map(len, costs), initial=0))
    for low, high in itertools.pairwise(edges):
        inside = [
            (item, slice(max(low, first) - first, min(high, last) - first))
            for item, (first, last) in enumerate(itertools.pairwise(starts))
            if max(low, first) < min(high, last)
        ]
        found.append(inside)
    return found


def _nearest(ascending: Sequence[float], value: float) -> int:
    above = min(bisect_left(ascending, value), len(ascending) - 1)
    below = max(0, above - 1)
    return below if value - ascending[below] < ascending[above] - value else above


def require_same(mine: object, what: str) -> None:
    """Refuse ranks that have not found the same.

    Raises:
        DataError: naming what they have found.
    """
    if len(set(map(repr, everywhere(repr(mine))))) > 1:
        raise DataError("ranks", f"expected the same {what} on all of them, got others on some")


def share_of(length: int) -> range:
    """Which of so many things in a row are this rank's: about as many as any other's."""
    here = Place() if _TEAM is None else _TEAM.place
    start, stop = (length * at // here.count for at in (here.rank, here.rank + 1))
    return range(start, stop)


def everywhere(mine: Result) -> list[Result]:
    """What each rank has, at every rank; that of this process where it is alone."""
    return [mine] if _TEAM is None else _TEAM.all_gather(mine)


def reduce(tensor: Any, how: str) -> Any:
    """The sum ("SUM"), largest ("MAX") or smallest ("MIN") of a tensor over the ranks."""
    return tensor if _TEAM is None else _TEAM.reduce(tensor, how)


# The ranks that this process has joined; None where it is alone.
_TEAM: Team | None = None


def silence() -> None:
    """Let other ranks than the first print nothing: what they say, rank 0 says."""
    if not is_first():
        team.silence()


@contextmanager
def joined() -> Iterator[None]:
    """Share the work that is done within with the other ranks, if there are any.

    Raises:
        AttncliError: a rank does not come, fails, or is lost.
    """
    global _TEAM
    here = place()
    if here.count == 1:
        yield
        return
    _TEAM = team.meet(here)
    yield
    _TEAM.agree()


@contextmanager
def alone() -> Iterator[None]:
    """Share nothing that is done within: the others have left it to this rank."""
    global _TEAM
    others, _TEAM = _TEAM, None
    try:
        yield
    finally:
        _TEAM = others


def failed(error: AttncliError) -> AttncliError | None:
    """What this process is to say of a failure; None for nothing, where rank 0 says it."""
    return error if _TEAM is None else _TEAM.fail(error)


def leave(code: int) -> None:
    """End a rank, all of them with the exit code of rank 0; do nothing where there is one."""
    if _TEAM is None:
        return
    code = _TEAM.leave(code)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    # Not by way of Python: a thread may wait for a rank that will never answer.
    os._exit(code)
