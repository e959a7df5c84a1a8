"""A short run of each fuzzer, and proof that they see what they look for."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import option_words
import pytest
from chance import Chance
from command_lines import CommandLines, assert_manners
from containers import Sample, bare_npy, index, noise, npz, safetensors
from guards import Guard, Spent, Violation, scratch
from loaders import Files
from running import Found, look_at
from torch_pickles import other_file, torch_file

from attncli.files.tensor import TensorFile

KINDS = (bare_npy, npz, safetensors, torch_file, other_file, index, noise)


@pytest.fixture
def files() -> Iterator[Files]:
    usual = sys.stdin
    with scratch() as work:
        inputs = Files(0, work)
        inputs.warm_up(60)
        yield inputs
    sys.stdin = usual


def assert_sound(found: Found, least: int) -> None:
    assert not found.faults, "\n".join(story for _, story in found.faults.values())
    assert len(found.outcomes) >= least


def test_files(files: Files) -> None:
    assert_sound(look_at(files, range(400)), least=15)


@pytest.mark.parametrize("make", KINDS)
def test_the_same_number_makes_the_same_file(make: Callable[[Chance], Sample]) -> None:
    samples = [make(Chance("0/7")) for _ in range(2)]
    assert samples[0].data == samples[1].data


def test_command_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib.figure")  # makes folders when it is loaded
    # Each takes as long as fifty of the others; they have tests of their own.
    monkeypatch.setattr(option_words, "HEAVY", {"capture": 0, "report": 0, "check": 0.2})
    monkeypatch.chdir(".")
    with scratch() as work:
        lines = CommandLines(0, work)
        lines.guard.may_load = True
        lines.watch()
        found = look_at(lines, range(120))
        os.chdir("/")
    assert_sound(found, least=8)


def test_running_code_is_seen(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(files.work / "trap"),)

    opened = TensorFile.read

    def unpickling(self: TensorFile, name: str | None = None) -> object:
        with contextlib.suppress(Exception):
            pickle.loads(pickle.dumps(Trap()))
        return opened(self, name)

    monkeypatch.setattr(TensorFile, "read", unpickling)
    sample = npz(sound_chance())
    with pytest.raises(Violation, match=r"pickle\.find_class"):
        files.read(sample)
    assert not (files.work / "trap").exists()


def sound_chance() -> Chance:
    chance = Chance(0)
    chance.rate = 0.0
    return chance


def test_wrong_values_and_stray_files_are_seen(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = npz(sound_chance())
    assert files.read(sample) == "sound"
    for dtype, values in (sample.sound or {}).values():
        if values.size:
            wrong = dict.fromkeys(sample.sound or {}, (dtype, values + 1))
            with pytest.raises(AssertionError):
                files.read(Sample("npz", sample.data, wrong))
    (files.work / "left").touch()
    with pytest.raises(AssertionError, match="left"):
        files.read(sample)


@pytest.mark.parametrize(
    "act",
    [
        lambda folder: subprocess.run(["true"], check=False),
        lambda folder: os.system("true"),
        lambda folder: (folder.parent / "beside").write_text(""),
        lambda folder: (folder.parent / "beside").mkdir(),
        lambda folder: __import__("antigravity"),
    ],
)
def test_what_is_forbidden_is_not_done_and_told(
    act: Callable[[Path], object], tmp_path: Path
) -> None:
    folder = tmp_path / "allowed"
    folder.mkdir()
    guard = Guard(folder)
    guard.is_on = True
    with pytest.raises((Violation, AssertionError)), guard.watching():
        act(folder)
    hidden = contextlib.suppress(Violation)
    with pytest.raises(AssertionError, match="done while"), guard.watching(), hidden:
        act(folder)
    with guard.watching():
        (folder / "file").write_text("")
    assert {path.name for path in tmp_path.iterdir()} == {"allowed"}


def busy_until(seconds: float) -> None:
    while time.process_time() < seconds:
        pass


def test_time_and_memory_are_counted() -> None:
    spent = Spent(seconds=10, megabytes=50)
    # What counts is beyond the most that this process has had, which other tests may have raised.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    now = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    with pytest.raises(AssertionError, match="of memory"), spent.counting():
        np.ones(peak - now + (300 << 20), np.uint8).sum()
    spent, began = Spent(seconds=0.05, megabytes=50), time.process_time()
    with pytest.raises(AssertionError, match="took"), spent.counting():
        busy_until(began + 0.1)
    with pytest.raises(Violation, match="does not end"), spent.counting():
        busy_until(began + 60)


@pytest.mark.parametrize(
    ("words", "code", "out", "said"),
    [
        (["compute"], 4, "", ""),
        (["compute"], 1, "", "attncli: error: a: expected b\n  advice\n  more\n"),
        (["compute"], 1, "", "Traceback\nattncli: error: a: expected b\n"),
        (["compute"], 1, "", "UserWarning: x\nattncli: error: a: expected b\n"),
        (["compute"], 1, "half a table\n", "attncli: error: a: expected b\n"),
        (["compute"], 1, "", "attncli: error: unexpected X: this is a fault of attncli\n"),
        (["compute"], 1, "", "attncli: error: \x1b[31m: expected b\n"),
        (["compute"], 0, "a\x1b[2Jb\n", ""),
        (["compute"], 0, "a\tb\n", ""),
        (["compute", "--scale", "٣"], 0, "", ""),
        (["compute", "-f", "json"], 0, "NaN\n", ""),
    ],
)
def test_bad_manners_are_seen(words: list[str], code: int, out: str, said: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        assert_manners(words, code, out, said)
