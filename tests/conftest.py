"""What every test of the command line needs: the program, run in this process."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from printed import arguments_of, check_run
from typer.testing import CliRunner

from attncli.cli.app import app

# A busy machine is slow and not at fault; a check that decides something draws the same each time.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("patient"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "patient")

SAMPLES = Path(__file__).parent.parent / "sample_inputs"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run of the program ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """Standard output as strict JSON."""
        return json.loads(self.stdout, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise AssertionError(f"not strict JSON: {constant}")


Run = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def _documents_fit_their_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test has the program print for programs is checked, in whatever process it runs."""
    in_process, in_another = CliRunner.invoke, subprocess.run

    def invoke(runner: CliRunner, program: Any, args: Any = None, **given: Any) -> Any:
        result = in_process(runner, program, args, **given)
        if program is app and isinstance(args, list):
            check_run(args, result.exit_code, result.stdout)
        return result

    def run(words: Any, *args: Any, **given: Any) -> Any:
        done = in_another(words, *args, **given)
        check_run(arguments_of(words) or [], done.returncode, done.stdout, given.get("cwd") or ".")
        return done

    monkeypatch.setattr(CliRunner, "invoke", invoke)
    monkeypatch.setattr(subprocess, "run", run)


@pytest.fixture
def run() -> Run:
    """Run `attncli ARGS`; fails unless the exit code is the expected one (0)."""

    def run_program(*args: object, stdin: bytes | None = None, code: int = 0) -> Outcome:
        result = CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)
        outcome = Outcome(result.exit_code, result.stdout, result.stderr)
        assert outcome.code == code, (outcome.code, outcome.stderr, result.exception)
        return outcome

    return run_program
