"""Help, version and usage errors load neither torch nor NumPy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import requires
from typing import Any

import pytest

from attncli.analysis.options import AttentionWords
from attncli.cli.app import subcommand
from attncli.cli.commands import MaskOptions, PlotOptions

HEAVY = ("torch", "numpy")
SCRIPT = """
import sys
from attncli.cli.app import app
try:
    app(sys.argv[1:])
except SystemExit:
    pass
print("loaded:", *(name for name in {heavy} if name in sys.modules))
"""


def loaded(arguments: list[str], heavy: tuple[str, ...] = HEAVY) -> list[str]:
    """The heavy libraries that a run of the program imports."""
    script = [sys.executable, "-c", SCRIPT.format(heavy=heavy), *arguments]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()[1:]


LIGHT = """

--help
--version
compute --help
inspect --help
nonsense
compute --nope
compute --digits
compute --digits x
compute -f xml
compute --step
inspect
"""


@pytest.mark.parametrize("line", LIGHT.splitlines()[1:])
def test_nothing_heavy(line: str) -> None:
    assert loaded(line.split()) == []


def test_the_check_can_fail() -> None:
    assert loaded(["compute"]) == ["torch", "numpy"]


@pytest.mark.parametrize("line", ["variance --samples 100", "variance --logits 10,1,1"])
def test_experiments_do_without_torch(line: str) -> None:
    assert loaded(line.split()) == ["numpy"]


def test_flags_are_read_without_validators() -> None:
    assert loaded(["mask", "--causal"], ("pydantic",)) == []
    if any(name.startswith("pydantic") for name in requires("typer") or ()):  # of newer versions
        assert loaded(["mask", "--causal", "--k-len", "3"], ("pydantic",)) == ["pydantic"]


def given(words: list[str], told: Sequence[str] | None) -> dict[str, Any]:
    """What reaches a command of these words, where Typer is told of the options in `told`."""
    found: dict[str, Any] = {}

    def mask(options: MaskOptions, words: AttentionWords, output: PlotOptions) -> None:
        found.update(asdict(options) | vars(words) | asdict(output))

    subcommand(mask, told)(words, standalone_mode=False)
    return found


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--causal",
        "a.npy --no-causal -f json",
        "--left-window=3 --save x.npy a.npy --as additive",
        "-qf json --alibi",
        "--hide-below -1 - --debug",
        "--fail-on --causal",
        "-- --causal",
    ],
)
def test_options_that_are_not_named_keep_their_defaults(line: str) -> None:
    words = line.split()
    found = given(words, words)
    assert found == given(words, None)
    assert len(found) > 40
