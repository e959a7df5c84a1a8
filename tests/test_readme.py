"""The README and the pages keep their word: commands run and print what is shown; names exist."""

from __future__ import annotations

import inspect
import json
import math
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command

from attncli.cli import commands
from attncli.cli.app import app
from attncli.cli.commands import COMMANDS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Every page is read as the README is.
PAGES = {"README.md": README} | {
    f"docs/{path.name}": path.read_text(encoding="utf-8") for path in ROOT.glob("docs/*.md")
}

# Not run here: they need files of the reader's own, or only stand for a command.
OF_THE_READER = {
    'attncli capture MODEL --text "…" -o qkv.safetensors',
    "attncli capture smollm2.gguf --ids twice.ids -o twice.safetensors",
    "attncli entropy twice.safetensors --grid induction_score",
    "attncli entropy twice.safetensors --group layers.18 --digits 2",
    "attncli entropy twice.safetensors --group layers.18 --head-index 6 --per-row --digits 2",
    "attncli compute layer.safetensors --stage weights --rows 0,-1",
    "attncli mask --attn-mask mask.npy",
    "attncli entropy --weights attentions.pt",
    "attncli check q.npy k.npy v.npy --actual-output out.npy",
    "attncli compute q.npy k.npy v.npy",
    "attncli entropy BUNDLE…",
    "attncli mask BUNDLE",
    "attncli mask --weights FILE",
    "attncli entropy --weights FILE…",
    "attncli COMMAND --help",
}


@dataclass(kw_only=True)
class Shown:
    """A command line of the README, and the lines that stand under it, if it is of a terminal."""

    line: str
    output: list[str] = field(default_factory=list)
    line_of_terminal: bool = False

    @property
    def command(self) -> str:
        """The line up to a pipe, a redirection or a comment."""
        return re.split(r"\s+(?:#|\||>|2>|&&)", self.line)[0]

    @property
    def arguments(self) -> list[str]:
        """What follows `attncli`, braces expanded as a shell would."""
        words: list[str] = []
        for word in shlex.split(self.command):
            brace = re.search(r"\{([^}]*)\}", word)
            choices = brace[1].split(",") if brace else [""]
            words += [word.replace(brace[0], one) if brace else word for one in choices]
        return words[1:]

    @property
    def code(self) -> int:
        """The exit code that the comment announces; 0 without one."""
        announced = re.search(r"# exit code (\d+)$", self.line)
        return int(announced[1]) if announced else 0


def in_blocks(text: str) -> Iterator[Shown]:
    """Commands of a page's code blocks, continued lines joined."""
    for block in re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        shown = None
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                shown = Shown(line=re.sub(r"\s{2,}(?!#)", " ", line[2:]), line_of_terminal=True)
                yield shown
            elif shown is not None:
                shown.output.append(line)
            elif "attncli " in line:
                yield Shown(line="attncli " + line.partition("&& attncli ")[2])


def in_prose(text: str) -> Iterator[Shown]:
    """Commands between backticks that say more than the name of a command."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for line in re.findall(r"`(attncli [^`]+)`", text):
        yield Shown(line=line)


def all_shown(text: str) -> list[Shown]:
    """Every command of a page, in order of appearance within blocks and prose."""
    return [*in_blocks(text), *in_prose(text)]


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
        if shown.command in OF_THE_READER or _is_a_name(shown):
            continue
        # A sweep whose numbers are not shown needs few draws.
        fewer = ["--samples", "1000"] if ":" in shown.command and not shown.output else []
        outcome = run(*shown.arguments, *fewer, code=shown.code)
        if "| jq" in shown.line:
            _assert_extracted(shown, outcome.json)
        elif shown.line_of_terminal:
            assert_printed(shown, outcome.stdout, outcome.stderr)


def test_the_list_of_what_is_not_run_is_true() -> None:
    shown_anywhere = {shown.command for text in PAGES.values() for shown in all_shown(text)}
    assert shown_anywhere >= OF_THE_READER
    for line in OF_THE_READER:
        files = [word for word in line.split() if word.endswith((".npy", ".safetensors"))]
        assert not any((ROOT / file).exists() for file in files), line


def test_enough_is_run_to_mean_something() -> None:
    run_here = [one for one in all_shown(README) if one.command not in OF_THE_READER]
    assert len(run_here) >= 25
    assert sum(bool(one.output) for one in run_here) >= 12
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
    assert blocks or page != "README.md"
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


def _assert_extracted(shown: Shown, document: Any) -> None:
    """What `jq -c .a.b` takes out of a document, up to the last digits."""
    path = re.search(r"jq -c \.(\S+)", shown.line)
    assert path is not None
    found = reduce(lambda inner, key: inner[key], path[1].split("."), document)
    pieces = [re.sub(r"[][,]", " ", text) for text in (*shown.output, json.dumps(found))]
    assert len(pieces) == 2
    assert _same(*pieces)


def assert_printed(shown: Shown, stdout: str, stderr: str) -> None:
    """All that was printed is shown; under a pipe, or around "…", some of it in order."""
    redirected = re.search(r"(?<!2)> ", shown.line)
    silenced = "2> /dev/null" in shown.line
    text = ("" if redirected else stdout) + ("" if silenced else stderr)
    printed = [line for line in text.splitlines() if line]
    wanted = [line for line in shown.output if line not in ("", "…")]
    if "|" not in shown.line and "…" not in shown.output:
        assert len(wanted) == len(printed), (shown.line, printed)
    rest = iter(printed)
    for line in wanted:
        assert any(_same(line, other) for other in rest), (shown.line, line, printed)


def _same(shown: str, printed: str) -> bool:
    """Whether two lines agree, numbers up to what another machine may round differently."""
    words, others = shown.split(), printed.split()
    return len(words) == len(others) and all(map(_same_word, words, others))


def _same_word(shown: str, printed: str) -> bool:
    if shown == printed:
        return True
    try:
        return math.isclose(float(shown), float(printed), rel_tol=1e-3, abs_tol=2e-7)
    except ValueError:
        return False
