"""Temporary files go when they are left, and after a kill with the next program that comes by."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attncli.files import temporary
from attncli.files.temporary import spool, temporaries

# Makes two files and waits; says so first.
WRITER = """
import sys, time
from pathlib import Path
from attncli.files.temporary import temporaries
with temporaries(Path(sys.argv[1])) as make:
    make(0o666), make(0o666)
    print("made", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _as_a_new_program() -> Iterator[None]:
    temporary._sweep.cache_clear()
    yield
    temporary._sweep.cache_clear()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def sweep(folder: Path) -> None:
    """Be the next program that writes there."""
    temporary._sweep.cache_clear()
    with temporaries(folder):
        pass


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another program with temporary files in the folder."""
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "made\n"
        yield running
        running.kill()


def test_they_go_when_they_are_left_but_for_what_was_renamed(tmp_path: Path) -> None:
    with temporaries(tmp_path) as make:
        paths = [make(0o666) for _ in range(3)]
        assert len({path.name for path in paths}) == 3
        assert all(path.parent == tmp_path and path.name.startswith(".") for path in paths)
        paths[1].rename(tmp_path / "kept")
    assert names_in(tmp_path) == ["kept"]

    def fail() -> None:
        with temporaries(tmp_path) as make:
            make(0o666)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert names_in(tmp_path) == ["kept"]


def test_what_a_killed_program_has_left_is_swept(
    tmp_path: Path, writer: subprocess.Popen[str]
) -> None:
    (tmp_path / ".attncli-notes").write_text("mine")
    held = [name for name in names_in(tmp_path) if name != ".attncli-notes"]
    assert len(held) == 3
    sweep(tmp_path)
    assert len(names_in(tmp_path)) == 4  # it lives
    writer.kill()
    writer.wait()
    assert len(names_in(tmp_path)) == 4
    sweep(tmp_path)
    assert names_in(tmp_path) == [".attncli-notes"]


def test_nobody_sweeps_what_he_writes_himself(tmp_path: Path) -> None:
    with temporaries(tmp_path) as make:
        path = make(0o666)
        sweep(tmp_path)
        assert path.exists()


def test_a_sweeper_may_come_between_making_and_locking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it removes the file, once it holds the lock that is wanted."""
    locked, seen = temporary._locked, []

    def meddle(descriptor: int) -> bool | None:
        seen.append(descriptor)
        if len(seen) == 1:
            for path in tmp_path.iterdir():
                path.unlink()
        return False if len(seen) == 2 else locked(descriptor)

    monkeypatch.setattr(temporary, "_locked", meddle)
    with temporaries(tmp_path) as make:
        assert make(0o666).exists()
        assert len(seen) == 3
    assert names_in(tmp_path) == []


def test_where_there_are_no_locks_nothing_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks")

    stale = tmp_path / ".attncli-0123456789ab"
    stale.touch()
    monkeypatch.setattr(fcntl, "flock", refuse)
    with temporaries(tmp_path) as make:
        make(0o666)
    assert names_in(tmp_path) == [stale.name]


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_files_are_swept(tmp_path: Path, kind: str) -> None:
    """A folder for temporary files is everybody's."""
    other = tmp_path / ".attncli-0123456789ab"
    (tmp_path / "file").write_text("mine")
    if kind == "link":
        other.symlink_to("file")
    elif kind == "pipe":
        os.mkfifo(other)
    else:
        other.mkdir()
    sweep(tmp_path)
    assert names_in(tmp_path) == [other.name, "file"]


def test_a_copy_of_an_input_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with spool() as path:
        assert path.parent == tmp_path
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert names_in(tmp_path) == []
