"""Files of every kind that attncli reads, sound and damaged: `loaders.py N --seed S --workers W`.

Each is read the way commands do it. Sound ones give what was put in; of all others, only the
project's own errors may come, in little time and memory, and nothing that a file asks for is done.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from chance import Chance
from containers import Sample, bare_npy, index, noise, npz, safetensors
from guards import Guard, Spent, StandardError, confine, names_in, scratch
from running import main
from torch_pickles import other_file, torch_file

from attncli.analysis.tensor_files import groups_in
from attncli.cli import inspect_run
from attncli.cli.commands import InspectOptions, OutputOptions
from attncli.errors import AttncliError, ResourceError
from attncli.files.reader import open_file
from attncli.files.tensor import TensorFile, TensorHeader, as_float
from attncli.files.torch_tensors import as_torch
from attncli.report import Format

KINDS: dict[Callable[[Chance], Sample], int] = {
    bare_npy: 5,
    npz: 5,
    safetensors: 5,
    torch_file: 6,
    other_file: 2,
    index: 1,
    noise: 1,
}
SECONDS, MEGABYTES = 2.0, 64


class Files:
    """Files by their number, each in the place of the one before.

    Args:
        seed: of all choices.
        work: a folder that holds nothing else.
    """

    def __init__(self, seed: int, work: Path, stderr: StandardError | None = None) -> None:
        self.seed, self.work, self.stderr = seed, work, stderr
        self.spool = work.parent / "tmp"
        self.spooled: list[str] = []
        self.guard, self.cost = Guard(self.spool), Spent(SECONDS, MEGABYTES)
        np.save(work / "q.npy", np.ones((1, 1, 2, 2), np.float32))
        sound = safetensors(_always_sound())
        (work / "sound.safetensors").write_bytes(sound.data)
        self.names = sorted([*names_in(work), "file"])

    def spent(self) -> tuple[float, float]:
        """The seconds and the megabytes that the costliest input took."""
        return self.cost.slowest, self.cost.grown

    def warm_up(self, count: int = 300) -> None:
        """Let Python and torch load what they load late, and make their folders."""
        for number in range(-count, 0):
            with contextlib.suppress(Exception):
                self.one(number)
        self.spooled = names_in(self.spool)
        self.guard.is_on, self.cost = True, Spent(SECONDS, MEGABYTES)

    def one(self, number: int) -> str:
        """Make a file and read it; return its kind and what came of it."""
        chance = Chance(f"{self.seed}/{number}")
        make = chance.choices(tuple(KINDS), tuple(KINDS.values()))[0]
        sample = make(chance)
        return f"{sample.kind}: {self.read(sample, number)}"

    def read(self, sample: Sample, number: int = 0) -> str:
        """Read a file in every way that commands do, from standard input now and then."""
        path = self.work / "file"
        path.write_bytes(sample.data)
        name = "-" if number % 8 == 3 else str(path)
        sys.stdin = io.TextIOWrapper(io.BytesIO(sample.data))
        out = io.StringIO()
        with self.cost.counting(), self.guard.watching(), contextlib.redirect_stdout(out):
            outcome = _opened(name, sample)
            if number % 4 == 1:
                _survive(lambda: _grouped(name))
            if number % 16 == 3:
                _survive(lambda: _inspected(name))
        for line in out.getvalue().splitlines():
            assert line.isprintable()
            json.loads(line, parse_constant=_refuse)
        sys.stdin = None  # lets go of what was mapped
        assert names_in(self.spool) == self.spooled, names_in(self.spool)
        assert names_in(self.work) == self.names, names_in(self.work)
        if self.stderr is not None:
            self.stderr.assert_empty()
        return outcome


def _always_sound() -> Chance:
    chance = Chance(0)
    chance.rate = 0.0
    return chance


def _refuse(constant: str) -> None:
    raise AssertionError(f"not strict JSON: {constant}")


def _survive(step: Callable[[], object]) -> bool:
    """Whether a step succeeds; it may fail with an error of the project that is fit to print."""
    try:
        step()
    except AttncliError as error:
        assert_fit_to_print(error)
        return False
    return True


def assert_fit_to_print(error: AttncliError) -> None:
    """One line of problem, at most one of advice, nothing a terminal would obey."""
    for line in (str(error), error.advice):
        assert line.isprintable(), repr(line)
        assert len(line) < 700, line
        assert "weights_only" not in line, line
        assert "allow_pickle" not in line, line
    assert ": expected " in str(error) or ": needs " in str(error), str(error)
    cause: BaseException | None = None if isinstance(error, ResourceError) else error
    while cause is not None:  # refused for its own sake, not since it ate the machine
        assert not isinstance(cause, MemoryError) or _of_parser(cause), repr(error)
        cause = cause.__cause__ or cause.__context__


def _of_parser(error: BaseException) -> bool:
    """Whether it is what Python's parser calls brackets that are too many."""
    return traceback.extract_tb(error.__traceback__)[-1].filename.endswith("ast.py")


def _opened(name: str, sample: Sample) -> str:
    """Open a file and read all of it."""
    try:
        file = open_file(name)
    except AttncliError as error:
        assert_fit_to_print(error)
        if sample.sound is not None:
            raise AssertionError(f"a sound file is refused: {error}") from error
        return "refused"
    read = [_survive(lambda header=header: _read(file, header, sample)) for header in file.headers]
    assert all(warning.isprintable() for warning in file.warnings), file.warnings
    if sample.sound is not None:
        assert all(read), "a sound file is not read"
        there = {header.name for header in file.headers}
        assert there == set(sample.sound) or len(sample.sound) == 1, (there, set(sample.sound))
        return "sound"
    return "read" if all(read) else "read in part"


def _read(file: TensorFile, header: TensorHeader, sample: Sample) -> None:
    stored = file.read(header.name)
    assert stored.shape == header.shape
    declared = "bfloat16" if stored.dtype == "|V2" else None
    if sample.sound is not None:
        dtype, values = sample.sound[header.name]
        assert stored.dtype == dtype, (stored.dtype, dtype)
        assert stored.array.tobytes() == values.tobytes()
    tensor = as_torch(stored, declared)
    assert tuple(tensor.shape) == header.shape
    if header.dtype not in ("|V1",):
        as_float(stored, declared)


def _grouped(name: str) -> None:
    """Tell groups and options, and read the roles."""
    for group in groups_in([name], []):
        assert all(warning.isprintable() for warning in group.warnings), group.warnings
        for role in group.roles:
            group.read(role)


def _inspected(name: str) -> None:
    inspect_run.run(InspectOptions([name]), OutputOptions(format=Format.NDJSON, quiet=True))


@contextlib.contextmanager
def files(seed: int) -> Iterator[Files]:
    """The inputs of a seed, in a process that does nothing else."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    with scratch() as work:
        inputs = Files(seed, work, StandardError())
        inputs.warm_up()
        confine(5000)  # more than it may take: what takes it is to be seen, not refused
        yield inputs


if __name__ == "__main__":
    sys.exit(main(files, "files"))
