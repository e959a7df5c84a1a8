"""The ranks that have come together, as one of them sees them: who is there, goes on, and fails.

Results go through torch.distributed's collectives. What goes wrong goes through its store, where
each rank also gives a sign of life: whoever waits looks there, so that a rank that fails, is killed
or hangs ends the command everywhere, whatever the others wait for. Collectives run in a thread of
their own: Python's signal handlers would wait for them.

Loads nothing heavy.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from typing import Any, ClassVar, NoReturn, TypeVar

from attncli import errors
from attncli.errors import AttncliError, CheckFailedError, ResourceError, UsageError

Result = TypeVar("Result")

# Seconds without a sign of life after which a rank counts as lost, and within which all have to
# come together.
TIMEOUT_VARIABLE = "ATTNCLI_TIMEOUT"
_TIMEOUT = 300.0
# Seconds between two signs of life, and between two looks at the store.
_BEAT, _LOOK = 0.5, 0.1
# Seconds that rank 0 waits for others: to say the same as it, and to have heard of the end.
_GRACE = 2.0
# Of torch's own limits, which cannot tell a rank that works from one that hangs.
_NO_LIMIT = timedelta(days=365)


@dataclass(frozen=True, slots=True)
class Place:
    """Which of how many ranks a process is, in all and on its machine."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    local_count: int = 1


class StoppedError(Exception):
    """Another rank has ended the command, which rank 0 tells of."""

    exit_code: ClassVar[int] = errors.ExitCode.DATA


@dataclass(slots=True, eq=False)
class Team:
    """All ranks of a command, as one of them sees them."""

    place: Place
    limit: float  # seconds
    store: Any
    # Of each rank its last sign of life, and when this process first saw it.
    _signs: dict[int, tuple[bytes, float]] = field(default_factory=dict)
    _looked: float = 0.0
    _received: AttncliError | None = None  # what another rank says, in its words
    _lost: set[int] = field(default_factory=set)

    @property
    def others(self) -> list[int]:
        """The other ranks."""
        return [rank for rank in range(self.place.count) if rank != self.place.rank]

    def gather(self, mine: Any) -> list[Any]:
        """What each rank has, at rank 0; nothing elsewhere.

        One rank after another sends as many bytes as it has: `gather_object` takes ten times as
        long, and wants room for as many of each as the longest has.
        """
        distributed, torch, packed = _distributed(), import_module("torch"), _packed(mine)
        sizes = self.all_gather(len(packed))

        def exchange() -> list[Any]:
            if self.place.rank:
                distributed.send(torch.frombuffer(packed, dtype=torch.uint8), 0)
                return []
            found = [torch.empty(size, dtype=torch.uint8) for size in sizes[1:]]
            for rank, part in enumerate(found, 1):
                distributed.recv(part, rank)
            return found

        found = [part.numpy() for part in self.wait(exchange)]
        return [] if self.place.rank else [mine, *(pickle.loads(part) for part in found)]

    def all_gather(self, mine: Any) -> list[Any]:
        """What each rank has."""
        packed, found = _packed(mine), [None] * self.place.count
        self.wait(lambda: _distributed().all_gather_object(found, packed))
        return [pickle.loads(part) for part in found]  # type: ignore[arg-type]

    def reduce(self, tensor: Any, how: str) -> Any:
        """The tensor itself, reduced over the ranks in its place."""
        operation = getattr(_distributed().ReduceOp, how)
        self.wait(lambda: _distributed().all_reduce(tensor, op=operation))
        return tensor

    def wait(self, work: Callable[[], Result]) -> Result:
        """Do what waits for others, and look meanwhile whether they go on.

        Raises:
            AttncliError: at rank 0, what another rank says, or that it is lost.
            StoppedError: elsewhere, something has ended the command.
        """
        self.look()
        future = _in_background(work)
        try:
            while True:
                with suppress(TimeoutError):
                    return future.result(_LOOK)
                self.look()
        except RuntimeError as error:  # of torch: a connection has ended
            until = time.monotonic() + 6 * _BEAT
            while time.monotonic() < until:
                self.look(5 * _BEAT)
                time.sleep(_LOOK)
            raise ResourceError("ranks", f"expected an exchange, got: {error}") from error

    def look(self, limit: float | None = None) -> None:
        """Raise what has happened elsewhere; a rank is lost after so many seconds without a sign.

        Raises:
            AttncliError, StoppedError: as for `wait`.
        """
        if self._has("end"):
            raise StoppedError
        if self._has("failed"):
            self._raise_failure()
        if limit is not None or time.monotonic() - self._looked >= _BEAT:
            self._look_for_signs(self.limit if limit is None else limit)

    def _ask(self, work: Callable[[], Result]) -> Result:
        """What the store answers; where it does not, rank 0 is lost, which keeps it as a rule."""
        try:
            return _in_background(work).result(self.limit)
        except (RuntimeError, TimeoutError) as error:
            self._lose(0, error)

    def _has(self, *names: str) -> bool:
        return self._ask(lambda: bool(self.store.check(list(names))))

    def _put(self, name: str, text: str = "") -> None:
        self._ask(lambda: self.store.set(name, text))

    def _look_for_signs(self, limit: float) -> None:
        self._looked = now = time.monotonic()
        names = [f"sign/{rank}" for rank in self.others]
        signs = self._ask(lambda: self.store.multi_get(names))
        for rank, sign in zip(self.others, signs, strict=True):
            known, since = self._signs.get(rank, (b"", now))
            if sign != known:
                self._signs[rank] = (sign, now)
            elif now - since > limit:
                self._lose(rank)

    def _lose(self, rank: int, cause: BaseException | None = None) -> NoReturn:
        if self.place.rank not in (0, 1 if rank == 0 else 0):
            raise StoppedError from cause
        problem = "expected it to go on, got no sign of life"
        self._lost.add(rank)
        self._received = ResourceError(f"rank {rank}", problem)
        raise self._received from cause

    def _raise_failure(self) -> NoReturn:
        failed = next((rank for rank in self.others if self.said(rank) is not None), None)
        said = None if failed is None else self.said(failed)
        if self.place.rank or said is None:
            raise StoppedError
        kind, where, problem, advice = said
        self._received = getattr(errors, kind)(f"rank {failed}: {where}", problem, advice)
        raise self._received

    def said(self, rank: int) -> list[str] | None:
        """The failure of a rank: its class, place, problem and advice; None for none."""
        name = f"failed/{rank}"
        return json.loads(self._ask(lambda: self.store.get(name))) if self._has(name) else None

    def fail(self, error: AttncliError) -> AttncliError | None:
        """Tell the others of a failure; what is to be said of it here, None for nothing."""
        if error is self._received:
            if self.place.rank:  # rank 0 cannot say it
                sys.stderr = os.fdopen(os.dup(_saved), "w")
            return error
        said = [type(error).__name__, error.where, error.problem, error.advice]
        with suppress(AttncliError, StoppedError):
            self._put(f"failed/{self.place.rank}", json.dumps(said))
            self._put("failed")
        if self.place.rank or isinstance(error, CheckFailedError):
            return error if not self.place.rank else None
        until = time.monotonic() + _GRACE
        found: list[list[str] | None] = []
        with suppress(AttncliError):
            while time.monotonic() < until and not self._are_done():
                found = [self.said(rank) for rank in self.others]
                if None not in found:
                    break
                time.sleep(_LOOK / 10)
            if self._are_done() or all(other == said for other in found):
                return error
        return type(error)(f"rank 0: {error.where}", error.problem, error.advice)

    def agree(self) -> None:
        """Wait at rank 0 until all have done their share.

        Raises:
            AttncliError: as for `wait`.
        """
        self._put(f"done/{self.place.rank}")
        while self.place.rank == 0 and not self._are_done():
            self.look()
            time.sleep(_LOOK / 10)

    def _are_done(self) -> bool:
        return self._has(*(f"done/{rank}" for rank in self.others))

    def leave(self, code: int) -> int:
        """Hear of rank 0's exit code, and end with it."""
        if 0 in self._lost:
            return code
        try:
            if self.place.rank == 0:
                self._put("end", str(int(code)))
                until = time.monotonic() + _GRACE
                left = [f"left/{rank}" for rank in self.others if rank not in self._lost]
                while not self._has(*left) and time.monotonic() < until:
                    time.sleep(_LOOK / 10)
                return code
            while not self._has("end"):
                self._look_for_signs(self.limit)
                time.sleep(_LOOK / 2)
            code = int(self._ask(lambda: self.store.get("end")))
            self._put(f"left/{self.place.rank}")
        except (AttncliError, StoppedError):
            return code or errors.ExitCode.DATA
        return code

    def beat(self) -> None:
        """Give signs of life until the program ends."""
        with suppress(RuntimeError):
            for number in itertools.count(1):
                self.store.set(f"sign/{self.place.rank}", str(number))
                time.sleep(_BEAT)


# Where standard error led before it was silenced.
_saved = 2


def silence() -> None:
    """Let this rank print nothing: what it says, rank 0 says."""
    global _saved
    _saved = os.dup(2)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def meet(here: Place) -> Team:
    """Wait for the other ranks, at the address that all have been given."""
    distributed, torch = _distributed(), import_module("torch")
    limit = _limit()
    if here.local_count > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // here.local_count))
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices:
        torch.cuda.set_device(here.local_rank % devices)
    backend = "cpu:gloo,cuda:nccl" if devices and distributed.is_nccl_available() else "gloo"

    def meet() -> Any:
        within = timedelta(seconds=limit)
        store, _, _ = next(distributed.rendezvous("env://", timeout=within))
        store.set_timeout(within)
        own = distributed.PrefixStore("attncli", store)
        own.set(f"sign/{here.rank}", "0")
        own.wait([f"sign/{rank}" for rank in range(here.count)], within)
        distributed.init_process_group(
            backend, store=store, rank=here.rank, world_size=here.count, timeout=_NO_LIMIT
        )
        return own

    try:
        store = _in_background(meet).result()
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        problem = f"expected {here.count} ranks to meet there within {limit:g} s"
        raise ResourceError(where, f"{problem}, got: {str(error).splitlines()[0]}") from error
    team = Team(here, limit, store)
    threading.Thread(target=team.beat, daemon=True).start()
    return team


def _limit() -> float:
    given = os.environ.get(TIMEOUT_VARIABLE, str(_TIMEOUT))
    with suppress(ValueError):
        if 0 < float(given) < float("inf"):
            return float(given)
    raise UsageError(TIMEOUT_VARIABLE, f"expected seconds, more than 0, got {given!r}")


def _in_background(work: Callable[[], Result]) -> Future[Result]:
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _distributed() -> Any:
    return import_module("torch.distributed")


# ── results on their way ─────────────────────────────────────────────────────────────────────


class _Packer(pickle.Pickler):
    """Sends tensors as what they show: torch would send all of what a view is a part of."""

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, import_module("torch").Tensor):
            return _tensor, (item.detach().cpu().numpy(), item.device.type)
        return NotImplemented


def _packed(result: Any) -> bytearray:
    with io.BytesIO() as packed:
        _Packer(packed, protocol=5).dump(result)
        return bytearray(packed.getbuffer())


def _tensor(array: Any, device: str) -> Any:
    return import_module("torch").from_numpy(array).to(device)
