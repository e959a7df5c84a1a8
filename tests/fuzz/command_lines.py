"""Command lines of every option there is, right and wrong: `command_lines.py N --seed S`.

Each runs in this process, in a folder of sound, odd and broken files. Whatever the words are, the
program answers in its own manner, and leaves nothing behind that nobody asked for.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import re
import shutil
import stat
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import loaders
import torch
import typer
from chance import Chance
from folder import fill
from guards import Guard, Spent, StandardError, confine, names_in, scratch
from option_words import has_other_digits, random_line, targets_of
from running import main
from torch_pickles import other_files

from attncli.cli.app import app
from attncli.cli.commands import COMMANDS

SECONDS, MEGABYTES = 20.0, 300

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class _Stream(io.TextIOWrapper):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class CommandLines:
    """Command lines by their number, in one folder that is put in order after each.

    Args:
        seed: of all choices.
        work: an empty folder, the working one from now on.
    """

    def __init__(self, seed: int, work: Path, stderr: StandardError | None = None) -> None:
        self.seed, self.work, self.stderr = seed, work, stderr
        os.chdir(work)
        fill(work)
        other_files()  # makes a folder for temporary files of its own
        self.kept = work.parent / "kept"
        shutil.copytree(work, self.kept, symlinks=True)
        self.before = _listing(work)
        self.spool = work.parent / "tmp"
        self.spooled = names_in(self.spool)
        self.guard, self.cost = Guard(work, self.spool), Spent(SECONDS, MEGABYTES)
        self.command = typer.main.get_command(app)

    def spent(self) -> tuple[float, float]:
        """The seconds and the megabytes that the costliest line took."""
        return self.cost.slowest, self.cost.grown

    def warm_up(self) -> None:
        """Let Python and libraries load what they load late, and make their folders."""
        lines = [[name, "-h"] for name in COMMANDS]
        lines += [["compute", "--plot", f"a.{kind}"] for kind in ("png", "svg", "pdf")]
        lines += [["report", "-o", "a.html"], ["capture", "absent", "-o", "a", "--text", "a"]]
        lines += [["compare", "b.npz", "--what-if", "k-dtype=int8"], ["entropy", "q.npy", "k.npy"]]
        for words in lines:
            self.run(Chance(0), words)
        for number in range(-150, 0):
            chance = Chance(f"{self.seed}/{number}")
            self.run(chance, random_line(chance))
        self._put_in_order()
        self.watch()

    def watch(self) -> None:
        """From now on, watch what is done, and what it takes."""
        self.spooled = names_in(self.spool)
        self.guard.is_on, self.cost = True, Spent(SECONDS, MEGABYTES)

    def one(self, number: int) -> str:
        """Make a command line and run it; return the command and its exit code."""
        chance = Chance(f"{self.seed}/{number}")
        makers = tuple(loaders.KINDS)
        data = b"\x93NUMPY"
        if chance.random() < 0.3:
            data = chance.choices(makers, tuple(loaders.KINDS.values()))[0](chance).data
        Path("sample").write_bytes(data)
        self.before = _listing(self.work)
        words = random_line(chance)
        try:
            named = words[0] if words and words[0] in COMMANDS else "(other)"
            return f"{named}: exit {self.hold(chance, words)}"
        except BaseException as error:
            error.add_note(f"the words are {words!r}"[:2000])
            raise
        finally:
            self._put_in_order()

    def hold(self, chance: Chance, words: list[str]) -> int:
        """Run a command line and return its exit code.

        Raises:
            AssertionError: it has not behaved.
        """
        with self.cost.counting(), self.guard.watching():
            code, out, said = self.run(chance, words)
        assert_manners(words, code, out, said)
        self._assert_asked_for(words, code)
        assert names_in(self.spool) == self.spooled, names_in(self.spool)
        if self.stderr is not None:
            self.stderr.assert_empty()
        return code

    def run(self, chance: Chance, words: list[str]) -> tuple[int, str, str]:
        """The exit code of a command line, and what it writes to its two streams."""
        encoding = chance.choice(("utf-8",) * 8 + ("ascii", "cp1252"))
        kind = _Stream if chance.random() < 0.15 else io.TextIOWrapper
        out = kind(io.BytesIO(), encoding, newline="")
        said = io.TextIOWrapper(io.BytesIO(), encoding, "backslashreplace", newline="")
        given = Path(chance.choice(("q.npy", "b.npz", "bad.npy", "sample", "none"))).read_bytes()
        usual = sys.stdin, sys.stdout, sys.stderr
        sys.stdin, sys.stdout, sys.stderr = io.TextIOWrapper(io.BytesIO(given)), out, said
        try:
            self.command.main(args=words, prog_name="attncli")
            code: Any = None
        except SystemExit as ended:
            code = ended.code
        finally:
            sys.stdin, sys.stdout, sys.stderr = usual
        written = []
        for stream in (out, said):
            stream.flush()
            written.append(stream.buffer.getvalue().decode(encoding))  # type: ignore[attr-defined]
        return code, written[0], written[1]

    def _assert_asked_for(self, words: list[str], code: int) -> None:
        """Nothing is new or changed but what was named as a target, and that only on success."""
        after = _listing(self.work)
        changed = {path for path in after | self.before if after.get(path) != self.before.get(path)}
        if not changed:
            return
        done = code in (0, 3) or (code == 1 and is_in_part(words))
        assert done, f"exit {code} has left or changed {changed}"
        asked = {os.path.normpath(target) for target in targets_of(words)}
        for path in changed:
            parents = {path, *map(str, Path(path).parents)} - {"."}
            assert parents & asked or "." in asked, f"nobody has asked for {path!r}"

    def _put_in_order(self) -> None:
        after = _listing(self.work)
        for path in sorted(after.keys() - self.before.keys(), reverse=True):
            Path(path).rmdir() if Path(path).is_dir() else Path(path).unlink()
        for path in [path for path, was in self.before.items() if after.get(path) != was]:
            if (self.kept / path).is_file():
                Path(path).unlink(missing_ok=True)
                shutil.copy(self.kept / path, path)
        self.before = _listing(self.work)


def _listing(root: Path) -> dict[str, tuple[int, ...]]:
    """Every path below a folder, with what tells whether it has changed."""
    found: dict[str, tuple[int, ...]] = {}
    for path in root.rglob("*"):
        status = path.lstat()
        is_folder = stat.S_ISDIR(status.st_mode)
        told = () if is_folder else (status.st_size, status.st_mtime_ns, status.st_ino)
        found[str(path.relative_to(root))] = told
    return found


def assert_manners(words: Sequence[str], code: Any, out: str, said: str) -> None:
    """An exit code of ours; one line of error and one of advice; nothing a terminal would obey."""
    assert code in (0, 1, 2, 3), f"exit {code}"
    assert "Traceback" not in said or "--debug" in words, said
    assert "a fault of attncli" not in said, said
    lines = said.removesuffix("\n").split("\n") if said else []
    assert all(line.isprintable() for line in lines), said
    in_part = code in (1, 2) and is_in_part(words)
    if "--debug" not in words:
        _assert_lines(lines, code, said, in_part)
    plain = _COLOURS.sub("", out)
    assert not [c for c in plain if c != "\n" and (c < " " or "\x7f" <= c <= "\x9f")], out
    if code in (1, 2):
        assert not out or (in_part and code == 1), out
    elif not {"-h", "--help"} & set(words):
        _assert_document(words, out)
    assert code in (1, 2) or not has_other_digits(words), "digits of another script are read"


def _assert_lines(lines: list[str], code: int, said: str, in_part: bool) -> None:
    errors = [at for at, line in enumerate(lines) if line.startswith("attncli: error: ")]
    assert len(errors) == (code != 0) or (in_part and errors), said
    for at in errors:
        assert len(lines) - at <= 2 or in_part, said
        following = ("  ", "attncli: ") if in_part else "  "
        assert not lines[at + 1 :] or lines[at + 1].startswith(following), said
        assert len(lines[at]) < 2000, said
    for line in lines[: errors[0] if errors else None]:
        assert line.startswith("attncli: "), said


def is_in_part(words: Sequence[str]) -> bool:
    """Whether it names several files, or a folder: the broken ones are told, the others read."""
    named = [word for word in words[1:] if word == "-" or word[:1] != "-"]
    several = len(named) > 1 or any(map(os.path.isdir, named))
    return several and words[0] in ("entropy", "variance", "mask", "inspect")


def _assert_document(words: Sequence[str], out: str) -> None:
    forms = [words[at + 1] for at, word in enumerate(words[:-1]) if word in ("--format", "-f")]
    if (
        not forms
        or not out
        or any(word.startswith(("--format=", "-f")) for word in words if word != "-f")
    ):
        return
    if forms[-1] == "json":
        json.loads(out, parse_constant=_refuse)
    elif forms[-1] == "ndjson":
        for line in out.split("\n")[:-1]:
            json.loads(line, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise AssertionError(f"not strict JSON: {constant}")


@contextlib.contextmanager
def command_lines(seed: int) -> Iterator[CommandLines]:
    """The inputs of a seed, in a process that does nothing else."""
    os.environ.update({"HF_HUB_OFFLINE": "1", "COLUMNS": "80"})
    torch.set_num_threads(1)
    with scratch() as work:
        back = Path.cwd()
        inputs = CommandLines(seed, work, StandardError())
        inputs.warm_up()
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)  # as the program has it
        warnings.simplefilter("error")
        confine(1024)
        try:
            yield inputs
        finally:
            os.chdir(back)


if __name__ == "__main__":
    sys.exit(main(command_lines, "command lines"))
