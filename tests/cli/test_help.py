"""Help and completion, which are Typer's: what it is told of every option arrives."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from plain import Run

from attncli.attention.options import OPTION_NAMES

PANELS = ("Inputs", "What shapes attention", "What to compute", "Output")


@pytest.mark.parametrize("command", ["compute", "entropy", "variance", "check"])
def test_options_stand_in_panels(run: Run, command: str) -> None:
    text = run(command, "--help").stdout
    places = [text.index(f"─ {panel} ─") for panel in PANELS]
    shaping = text[places[1] :]
    assert [f"--{name.replace('_', '-')}" in shaping for name in OPTION_NAMES] == [True] * len(
        OPTION_NAMES
    )


def test_brackets_of_help_are_no_markup(run: Run) -> None:
    assert "[default: H]" in run("compute", "--help").stdout


def test_help_of_all_lists_the_commands_and_completion(run: Run) -> None:
    text = run("--help").stdout
    assert "Measure the variance of q·k that makes 1/√d_k necessary." in text
    assert "--install-completion" in text
    assert "--show-completion" in text


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("attncli ent", "entropy"),
        ("attncli entropy --left-w", "--left-window"),
        ("attncli entropy --format nd", "ndjson"),
    ],
)
def test_completion(words: str, completed: str) -> None:
    program = "import sys; sys.argv = ['attncli']; from attncli.cli.app import main; main()"
    asked = {"_ATTNCLI_COMPLETE": "complete_bash", "COMP_WORDS": words}
    environment = os.environ | asked | {"COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.stdout.split() == [completed]
