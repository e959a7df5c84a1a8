"""A signal that ends the program takes back what must not stay, and is never taken from others."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attncli import signals

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


class Exited(Exception):  # noqa: N818 - stands in for the end of the process
    """Raised in the place of the end of the process."""


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The handlers as the program has them, in this process, which they do not end."""

    def leave(code: int) -> None:
        raise Exited(code)

    before = {number: signal.getsignal(number) for number in CODES}
    for number in CODES:
        signal.signal(number, signal.SIG_DFL)
    signals.end_cleanly()
    monkeypatch.setattr(os, "_exit", leave)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("exits")
@pytest.mark.parametrize("number", CODES)
def test_what_must_not_stay_is_undone_the_latest_first(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    done: list[int] = []

    def fail() -> None:
        done.append(3)
        raise ValueError

    with (
        signals.undoing(lambda: done.append(1)),
        signals.undoing(fail),
        pytest.raises(Exited, match=str(CODES[number])),
        signals.undoing(lambda: done.append(2)),
    ):
        signal.raise_signal(number)
    assert done == [2, 3, 1]
    assert capfd.readouterr().err == f"attncli: {WORDS[number]}\n"
    assert signal.getsignal(number) is signal.SIG_DFL  # should anything hold the first one up


@pytest.mark.usefixtures("exits")
def test_what_was_left_behind_is_not_undone() -> None:
    done: list[int] = []
    with signals.undoing(lambda: done.append(1)):
        pass
    with pytest.raises(Exited):
        signal.raise_signal(signal.SIGTERM)
    assert done == []


@pytest.mark.usefixtures("exits")
def test_signals_wait_for_what_is_quick() -> None:
    steps: list[str] = []

    def work() -> None:
        with signals.held_back():
            with signals.held_back():
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGINT)
                steps.append("inner")
            steps.append("outer")

    with pytest.raises(Exited, match="143"):
        work()
    assert steps == ["inner", "outer"]
    with signals.held_back():
        pass  # and there is none


@pytest.mark.usefixtures("exits")
def test_what_is_said_may_reach_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no terminal any more")

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(Exited, match="129"):
        signal.raise_signal(signal.SIGHUP)


# The whole program, where a signal comes while it is being loaded.

PROGRAM = """
import os, signal, sys
class Hook:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.{signal})
sys.meta_path.insert(0, Hook())
sys.argv = ["attncli", *{arguments!r}]
from attncli.__main__ import main
main()
"""


def run_program(
    module: str, number: signal.Signals, arguments: list[str], before: Callable[[], object]
) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(module=module, signal=number.name, arguments=arguments)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, preexec_fn=before
    )


@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize("module", ["attncli.cli.app", "attncli.cli.mask_run"])
def test_signals_while_modules_load(module: str, number: signal.Signals) -> None:
    done = run_program(module, number, ["mask"], lambda: None)
    assert (done.returncode, done.stdout) == (CODES[number], "")
    assert done.stderr == f"attncli: {WORDS[number]}\n"


def test_an_interrupt_before_the_handlers_are_there() -> None:
    done = run_program("attncli.signals", signal.SIGINT, ["mask"], lambda: None)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "attncli: interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_signals_that_are_ignored_stay_so(number: signal.Signals) -> None:
    """As `nohup` and shells have it for what runs in the background."""
    arguments = ["mask", "-f", "csv"]
    ignore = lambda: signal.signal(number, signal.SIG_IGN)  # noqa: E731
    done = run_program("attncli.cli.mask_run", number, arguments, ignore)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("batch,head")


def test_functions_of_python_leave_signals_alone() -> None:
    program = (
        "import signal, attncli\n"
        "before = [signal.getsignal(n) for n in signal.valid_signals()]\n"
        "attncli.mask(q_len=3, k_len=3, causal=True)\n"
        "assert before == [signal.getsignal(n) for n in signal.valid_signals()]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_both_ways_to_start_it_are_one() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"attncli": "attncli.__main__:main"}


def test_little_is_loaded_before_the_handlers_are_there() -> None:
    program = "import sys, attncli.__main__; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {ROOT!r}); {program}"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {name for name in done.stdout.split() if re.match("attncli", name)}
    assert loaded == {"attncli", "attncli.__main__", "attncli.signals"}
    assert not {"typing", "pathlib", "typer"} & set(done.stdout.split())


ROOT = str(Path(signals.__file__).parents[1])
