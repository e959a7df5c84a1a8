"""What the pages show: command lines and their output, read from Markdown, run, and compared."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = ROOT / "docs" / "zh"  # commands and output there are those of the same page in English
# Every page is read as the README is.
PAGES = {"README.md": README} | {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in sorted(ROOT.glob("docs/**/*.md"))
    if path.parent != CHINESE
}
# What stands between the words of one command and the rest of a line of shell.
# Programs that come with Python, by its own name.
_OF_PYTHON = """
python() { "$PYTHON" "$@"; }
torchrun() { "$PYTHON" -m torch.distributed.run "$@"; }
"""
_END_OF_COMMAND = re.compile(r"\s+(?:#|\||>|2>|&&|;)|;|\)$")


@dataclass(kw_only=True)
class Shown:
    """A command line of a page, and the lines that stand under it, if it is of a terminal."""

    line: str
    output: list[str] = field(default_factory=list)
    line_of_terminal: bool = False

    @property
    def command(self) -> str:
        """The program and its arguments, without pipes, redirections and comments."""
        start = max(self.line.find("attncli "), 0)
        return _END_OF_COMMAND.split(self.line[start:])[0]

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


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str

    @property
    def commands(self) -> list[Shown]:
        """Its command lines, continued ones joined: of a terminal, of a list, of a workflow."""
        found: list[Shown] = []
        lines = self.text.replace("\\\n", " ").splitlines() if self.language in ("", "yaml") else []
        for line in lines:
            listed = re.search(r"^(?:.*&& |\s*(?:- )?run: |\s*)(attncli .*)", line)
            if line.startswith("$ "):
                found.append(Shown(line=_single_spaced(line[2:]), line_of_terminal=True))
            elif found and found[-1].line_of_terminal:
                found[-1].output.append(line)
            elif listed:
                found.append(Shown(line=_single_spaced(listed[1])))
        return found


def _single_spaced(line: str) -> str:
    return re.sub(r"\s{2,}(?!#)", " ", line)


def blocks(text: str) -> Iterator[Block]:
    """All fenced blocks of a page."""
    for language, inside in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield Block(language, inside)


def in_prose(text: str) -> Iterator[Shown]:
    """Commands between backticks that say more than the name of a command."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for line in re.findall(r"`(attncli [^`]+)`", text):
        yield Shown(line=line)


def all_shown(text: str) -> list[Shown]:
    """Every command of a page, in order of appearance within blocks and prose."""
    in_blocks = [shown for block in blocks(text) for shown in block.commands]
    return [*in_blocks, *in_prose(text)]


def printed_by(shown: Shown, run: Any) -> str | None:
    """What a terminal would show of a line: what it prints, then what it says beside it.

    One `attncli` runs in this process, and a shell that does the rest of the line hears what it
    has said; a line of several, as in a loop, or with a pipe into one, runs as it stands.

    Args:
        run: the fixture of that name.

    Returns: None where the line needs a program that is not there.
    """
    single = shown.line.startswith("attncli ") and shown.line.count("attncli ") == 1
    replay = 'attncli() { "$PYTHON" -m attncli "$@"; }'
    if single:
        # A sweep whose numbers are not shown needs few draws.
        sweep = re.match(r"attncli variance --dk \d+:", shown.command) and not shown.output
        fewer = ["--samples", "1000"] if sweep else []
        outcome = run(*shown.arguments, *fewer, code=shown.code)
        if shown.line.partition(" #")[0].strip() == shown.command.strip():
            return str(outcome.stdout + outcome.stderr)
        replay = f'attncli() {{ cat "$SAID/1"; cat "$SAID/2" >&2; return {outcome.code}; }}'
    if re.search(r"\bjq\b", shown.line) and not shutil.which("jq"):
        return None
    with tempfile.TemporaryDirectory() as said:
        for name, text in (("1", outcome.stdout), ("2", outcome.stderr)) if single else ():
            (Path(said) / name).write_text(text, encoding="utf-8")
        ran = subprocess.run(
            ["bash", "-c", f"{replay}\n{_OF_PYTHON}\n{shown.line}"],
            env=os.environ | {"PYTHON": sys.executable, "SAID": said},
            capture_output=True,
            text=True,
            check=False,
        )
    assert single or ran.returncode == shown.code, (shown.line, ran.stderr)
    return ran.stdout + ran.stderr


def assert_printed(shown: Shown, text: str) -> None:
    """All that was printed is shown; around "…", some of it in order."""
    printed = [line for line in text.splitlines() if line]
    wanted = [line for line in shown.output if line not in ("", "…")]
    if "…" not in shown.output:
        assert len(wanted) == len(printed), (shown.line, printed)
    rest = iter(printed)
    for line in wanted:
        assert any(same(line, other) for other in rest), (shown.line, line, printed)


def same(shown: str, printed: str) -> bool:
    """Whether two lines agree, numbers up to what another machine may round differently."""
    words, others = (re.sub(r"([][(),:{}])", r" \1 ", line).split() for line in (shown, printed))
    return len(words) == len(others) and all(map(_same_word, words, others))


def _same_word(shown: str, printed: str) -> bool:
    if shown == printed:
        return True
    try:
        return math.isclose(float(shown), float(printed), rel_tol=1e-3, abs_tol=2e-7)
    except ValueError:
        return False
