"""What is too large for the machine: refused from sizes alone, with the option that needs less."""

from __future__ import annotations

import re
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from plain import Run

from attncli import limits
from attncli.cli import capture_run, terminal
from attncli.cli.app import FRUGAL, subcommand
from attncli.cli.commands import COMMANDS
from attncli.errors import DataError

MEMORY, DISK = 8_000_000_000, 90_000_000_000


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Eight gigabytes of memory, ninety of disk, and an empty folder to work in."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(limits, "available_memory", lambda: MEMORY)
    monkeypatch.setattr(limits.shutil, "disk_usage", lambda _: usage(0, 0, DISK))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("line", "said", "advice"),
    [
        (
            "compute --q-len 2000000 --k-len 2000000 --save x.npz",
            "x.npz: expected a need of at most 90.0 GB on disk, got 64.0 TB",
            "--rows, --head-index, --batch-index or --stage",
        ),
        ("compute --q-len 400000 --k-len 400000 --stage weights --save d", "d: .* 640.0 GB", "--"),
        ("compute --q-len 1000000000", "--q-len: .* 8.0 GB of memory, got 768.0 GB", "smaller"),
        ("compute --q-len 1000000000000000000 --batch 2", "--q-len: .*1.5 ZB", "smaller sizes"),
        ("compute --dk 1000000000000000000", "--dk, --dv: .*288.0 EB", "smaller sizes"),
        ("compute --batch 1000000000000", "--batch: ", "smaller sizes"),
        ("entropy --heads 1000000000", "--heads: .* 18.4 TB", "smaller sizes"),
        ("entropy --k-len 1000000000000", "--k-len: ", "smaller sizes"),
        (
            "compute --max-values 1000000000000 --q-len 20000 --k-len 20000",
            "--max-values: .* 192.2 GB",
            "--format csv, --save, --rows and --stage need less",
        ),
        ("compare --q-len 1000000000 --what-if causal=true", "--q-len: ", "smaller sizes"),
        ("report -o r.html --q-len 1000000000000", "--q-len: ", "smaller sizes"),
        (
            "mask --heads 1000000000 --alibi --causal --q-len 4",
            "--alibi, --heads: expected a need of at most 8.0 GB of memory, got 160.0 GB",
            "fewer --heads need less",
        ),
        ("mask --q-len 1000000000000000000 --k-len 8", "--q-len, --k-len: .* EB", "smaller"),
        ("mask --k-len 100000 --causal --query-offset 0 --max-values 10000000000 -f json",
         "--max-values: .* 240.0 GB", "--save"),
        ("variance --dk 1000000000000000000", "--dk, --keys: .* EB", "smaller"),
        ("variance --keys 1000000000000", "--dk, --keys: .* TB", "smaller"),
    ],
)  # fmt: skip
def test_it_is_refused_with_what_needs_less(
    run: Run, machine: None, line: str, said: str, advice: str
) -> None:
    refused = run(*line.split(), code=1)
    first, second = refused.stderr.splitlines()
    assert re.match(f"attncli: error: {said}", first), first
    assert advice in second
    assert refused.stdout == ""
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("line", "kept", "said"),
    [
        ("--causal", 500000000500000000, "causal"),
        ("--causal --left-window 9 --sink-window 4", None, "the first 4 keys kept"),
        ("--causal --prefix 1000", 500000000500000000 + 999 * 500, "prefix"),
        ("--left-window 7 --right-window 7 --dilation 7", 2999999986, "dilated by 7"),
        ("--key-lengths 1000", 10**12, "length 1000"),
        ("--cu-seqlens-q 0,400000000,1000000000", 52 * 10**16, "2 packed documents"),
    ],
)
def test_rules_alone_are_answered_at_any_length(
    run: Run, machine: None, line: str, kept: int | None, said: str
) -> None:
    given = ["mask", "--q-len", "1000000000", "--k-len", "1000000000", *line.split()]
    told = run(*given, "-f", "json").json
    (record,) = told["data"]
    assert said in record["description"]
    assert kept is None or record["kept"] == kept
    assert record["values"] is None
    assert "each character stands for" in run(*given).stdout


def test_a_row_of_a_picture_is_named_whole_or_says_that_it_is_not(run: Run) -> None:
    line = "mask --q-len 1000000000 --k-len 1000000000 --causal"
    names = [each.split()[0] for each in run(*line.split()).stdout.splitlines() if "–" in each]
    assert names[:2] == ["0–31249999", "31250000–62499…"]
    assert all(name.endswith("…") for name in names[1:])


def test_what_is_shown_of_a_long_mask_is_what_is_saved(run: Run, tmp_path: Path) -> None:
    target, line = tmp_path / "m.npy", "--q-len 6000000 --k-len 2 --query-offset -3 --causal"
    told = run("mask", *line.split(), "--save", target, "-f", "json").json["data"][0]
    saved = np.load(target)
    assert saved.shape == (1, 1, 6_000_000, 2)
    assert (saved.sum(), (~saved.any(-1)).sum()) == (told["kept"], told["empty_rows"])
    assert told["first_empty_rows"] == [0, 1, 2]


@pytest.mark.parametrize("command", ["variance", "variance --logits 1,2"])
def test_a_range_of_more_numbers_than_anyone_draws(run: Run, command: str) -> None:
    line = f"{command} --dk 1:9000000000000000000:+1"
    refused = run(*line.split(), code=2)
    assert "--dk: expected at most 10,000 numbers, got 9,000,000,000,000,000,000" in refused.stderr
    assert "a larger step D" in refused.stderr


@pytest.mark.parametrize("command", ["inspect", "entropy", "mask --attn-mask"])
def test_endless_files_are_refused(run: Run, machine: None, command: str) -> None:
    refused = run(*command.split(), "/dev/zero", code=1)
    assert refused.stderr.startswith("attncli: error: /dev/zero: expected a")


def test_so_are_endless_texts() -> None:
    with pytest.raises(DataError, match="/dev/zero: expected a text, got a device"):
        capture_run._read("/dev/zero")


def test_a_link_to_nothing_is_called_one(run: Run, machine: None) -> None:
    Path("link.npy").symlink_to("nowhere.npy")
    told = run("inspect", "link.npy", code=1).stderr
    assert told == (
        "attncli: error: link.npy: expected a file, got a link to a file that is not there\n"
    )


def test_what_is_saved_is_what_is_chosen(run: Run, machine: None) -> None:
    line = "compute --q-len 300000 --k-len 300000 --dk 1 --dv 1 --save x.npz --stage weights"
    run(*line.split(), "--rows", "0,-1", "-q", code=0)
    assert Path("x.npz").stat().st_size < 3_000_000


@pytest.mark.parametrize("name", FRUGAL)
def test_the_advice_of_a_command_is_its_own(name: str) -> None:
    there = {word for option in subcommand(COMMANDS[name]).params for word in option.opts}
    assert set(re.findall(r"--[a-z-]+", FRUGAL[name])) <= there


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(31, "31 s"), (119, "119 s"), (125, "2 min"), (7_200, "2 h"), (1e6, "12 days")],
)
def test_durations_are_told_in_one_unit(seconds: float, said: str) -> None:
    assert terminal.duration(seconds) == said


def test_a_long_run_says_once_how_long_it_takes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10**6, 2))
    monkeypatch.setattr(terminal.time, "monotonic", lambda: float(next(clock)))
    told = run("variance", "--samples", "1000000", "--dk", "4")
    assert re.fullmatch(r"attncli: drawing: about \d+ (s|min) left\n", told.stderr)
    quiet = run("variance", "--samples", "1000000", "--dk", "4", "-q")
    assert quiet.stderr == ""
    assert quiet.stdout == told.stdout


def test_progress_is_told_of_all_that_is_drawn(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(
        terminal, "_foretelling", lambda _, total, __: told.append(-total) or told.append
    )
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    run("variance", "--samples", "100001", "--dk", "3,50", "--keys", "7")
    assert len(told) > 3
    assert sum(told) == 0
