"""A signal that ends a command gives the terminal back as it was."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from attncli import signals
from attncli.cli.terminal import progress
from attncli.report.printer import Printer


def test_the_cursor_comes_back(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with progress(Printer(), 10, "attention"):
        for undo in signals._undo:
            undo()
    assert "\x1b[?25h" in capfd.readouterr().err
    assert signals._undo == []


def test_typing_is_seen_again(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    command = [sys.executable, "-m", "attncli", "compute", "--explain", "--step"]
    running = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE)
    until = time.monotonic() + 120
    while termios.tcgetattr(theirs)[3] & termios.ECHO and time.monotonic() < until:
        time.sleep(0.02)  # until it waits for a key
    assert not termios.tcgetattr(theirs)[3] & termios.ECHO
    running.send_signal(signal.SIGTERM)
    _, said = running.communicate(timeout=60)
    assert (running.returncode, said) == (143, b"attncli: terminated\n")
    assert termios.tcgetattr(theirs) == before
    for descriptor in (ours, theirs):
        os.close(descriptor)
