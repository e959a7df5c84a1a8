"""What `attncli entropy` shows on a terminal, and how it ends there."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain import Run

from attncli.cli.terminal import progress
from attncli.report.entropy import ValueRange
from attncli.report.printer import Printer

MINILM = Path(__file__).parents[2] / "sample_inputs" / "minilm.safetensors"


def numbers(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


def on_terminal(*arguments: object, environment: dict[str, str] | None = None) -> tuple[str, str]:
    """Standard output and error of the program on a terminal of 80 columns each."""
    out, out_end = pty.openpty()
    error, error_end = pty.openpty()
    settings = os.environ | {"COLUMNS": "80", "TERM": "xterm-256color"} | (environment or {})
    process = subprocess.Popen(
        [sys.executable, "-m", "attncli", *map(str, arguments)],
        stdout=out_end,
        stderr=error_end,
        env=settings,
    )
    os.close(out_end)
    os.close(error_end)
    found = drained(out, error)
    assert process.wait(30) == 0, found
    return found


def drained(*ends: int) -> Any:
    """All that comes from several terminals until they close."""
    import select

    texts = dict.fromkeys(ends, b"")
    open_ends = set(ends)
    while open_ends:
        for end in select.select(list(open_ends), [], [], 60)[0]:
            try:
                part = os.read(end, 65536)
            except OSError:
                part = b""
            texts[end] += part
            if not part:
                open_ends.discard(end)
                os.close(end)
    return tuple(text.decode().replace("\r\n", "\n") for text in texts.values())


def test_nothing_is_wider_than_the_terminal(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process for all: a terminal is what `isatty` says, and its width COLUMNS'."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("attncli.report.printer.Printer.on_terminal", property(lambda self: True))
    monkeypatch.setenv("NO_COLOR", "1")
    tensors = {}
    for layer in range(80):
        shape = (1, 4, 3, 4) if layer else (1, 130, 3, 4)
        tensors |= {f"model.layers.{layer}.attention.{role}": numbers(*shape) for role in "qk"}
    np.savez(tmp_path / "big.npz", **tensors)
    views = ("", "--summary", "--grid entropy_bits_mean", "--compare-scale", "--sample-rows 2")
    views += ("--per-row", "--per-key", "--temperatures 0.5,1,2")
    cases = [(MINILM, view) for view in views]
    cases += [(tmp_path / "big.npz", "--grid max_logit_key")]
    for file, view in cases:
        lines = run("entropy", file, *view.split()).stdout.splitlines()
        assert max(map(len, lines)) <= 80, view
    picture = run("entropy", tmp_path / "big.npz", "--grid", "entropy_bits_mean").stdout
    assert picture.count("s.79.attention") == 1
    assert picture.count("rs.0.attention") >= 2  # 130 heads take more than one line
    assert re.search(r"· at 0 to █ at \d", picture)
    rows = run("entropy", MINILM, "--per-row").stdout
    assert "more: --format csv" in rows


def test_records_go_where_they_are_sent_while_a_bar_is_drawn(tmp_path: Path) -> None:
    here, there = pty.openpty()
    words = ["entropy", "--q-len", "3000", "--k-len", "3000", "--per-row", "-f", "csv"]
    with (tmp_path / "rows.csv").open("wb") as rows:
        process = subprocess.Popen(
            [sys.executable, "-m", "attncli", *words],
            stdout=rows,
            stderr=there,
            env=os.environ | {"TERM": "xterm-256color"},
        )
    os.close(there)
    shown = drained(here)[0]
    assert process.wait(60) == 0
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 3001
    assert "attention" in shown
    assert "random" not in shown


def test_an_encoding_without_blocks_gets_other_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The five shades stay apart, which a letter-by-letter replacement would not keep."""
    out = subprocess.run(
        [
            sys.executable,
            "-m",
            "attncli",
            "entropy",
            "--heads",
            "60",
            "--q-len",
            "3",
            "--k-len",
            "3",
            "--grid",
            "max_logit",
        ],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        check=True,
    ).stdout
    out.decode("ascii")
    marks = {ValueRange(0.0, 1.0, Printer()).mark(share / 4) for share in range(5)}
    assert len(marks) == 5
    monkeypatch.setattr("attncli.report.printer.Printer.sign", lambda self, usual, plain: plain)
    marks = {ValueRange(0.0, 1.0, Printer()).mark(share / 4) for share in range(5)}
    assert marks == set(".:+*#")


def test_colour_only_where_it_is_wanted(run: Run) -> None:
    asked = ("entropy", MINILM, "--grid", "entropy_bits_mean")
    assert "\x1b[" not in run(*asked).stdout
    assert "\x1b[" in run(*asked, "--color", "always").stdout


def test_progress_shows_on_a_terminal_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("entropy", "--q-len", 2000, "--k-len", 2000, "--dk", 8)
    out, error = on_terminal(*asked)
    assert "attention" in error
    assert "attention" not in out
    assert not run(*asked).stderr
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with progress(Printer(quiet=True), 10, "attention") as advance:
        assert advance is None


def test_an_interrupt_ends_it_cleanly() -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "attncli",
            "entropy",
            "--q-len",
            "60000",
            "--k-len",
            "60000",
            "--heads",
            "8",
            "--dk",
            "8",
            "-f",
            "csv",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.read(6) == "source"  # it has begun
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert error.splitlines()[-1] == "attncli: interrupted"
