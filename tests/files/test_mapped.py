"""Files that change while they are read, and more of them than a process may hold open."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from attncli.errors import DataError
from attncli.files.reader import open_file

ROWS = np.ones((512, 1024), np.float32)  # 2 MiB


def write(path: Path, kind: str) -> None:
    if kind == ".npy":
        np.save(path, ROWS)
    elif kind == ".npz":
        np.savez(path, q=ROWS)
    elif kind == ".pt":
        torch.save({"q": torch.from_numpy(ROWS)}, path)
    else:
        save_file({"q": ROWS}, path)


@pytest.mark.parametrize("kind", [".npy", ".npz", ".safetensors", ".pt"])
def test_a_file_cut_short_while_it_is_read_is_a_line(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"cut{kind}"
    write(path, kind)
    file = open_file(str(path))
    if kind == ".npz":  # read at once, so before
        os.truncate(path, 4096)
        with pytest.raises(DataError, match=r"cut\.npz"):
            file.read()
        return
    array = file.read().array
    assert float(array.sum()) == ROWS.size
    os.truncate(path, 4096)
    with pytest.raises(DataError, match="got it cut short meanwhile") as caught:
        array.sum()
    assert caught.value.where == str(path)


PROGRAM = """
import os, sys
from attncli.cli import entropy_run
from attncli.cli.app import main

load = entropy_run.load_problems
def cut(*given, **more):
    made = load(*given, **more)
    os.truncate("q.npy", 4096)
    return made
entropy_run.load_problems = cut
sys.argv = ["attncli", "entropy", "q.npy", "k.npy"]
main()
"""


def test_a_command_ends_with_one_line_whatever_thread_looked(tmp_path: Path) -> None:
    array = np.ones((1, 4, 4096, 64), np.float32)
    for name in "qk":
        np.save(tmp_path / f"{name}.npy", array)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[0] == (
        "attncli: error: q.npy: expected the whole file as long as it is read, got it cut short "
        "meanwhile"
    )
    assert done.stdout == ""


def test_a_file_that_is_replaced_is_read_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "q.npy"
    np.save(path, ROWS)
    array = open_file(str(path)).read().array
    np.save(tmp_path / "new.npy", ROWS * 2)
    (tmp_path / "new.npy").replace(path)
    assert float(array.sum()) == ROWS.size


@pytest.mark.parametrize("kind", [".npy", ".npz", ".safetensors", ".pt"])
def test_more_files_than_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    write(tmp_path / f"one{kind}", kind)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 40, before[1]))
    try:
        opened = [open_file(str(tmp_path / f"one{kind}")) for _ in range(200)]
        arrays = [file.read().array for file in opened]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert all(float(array[-1, -1]) == 1.0 for array in arrays)


def test_a_fault_of_what_others_map_ends_the_process_as_before(tmp_path: Path) -> None:
    np.save(tmp_path / "ours.npy", ROWS)
    np.save(tmp_path / "other.npy", ROWS)
    code = (
        "import numpy as np, os, threading\n"
        "from attncli.files.reader import open_file\n"
        "kept = open_file('ours.npy')\n"
        "other = np.load('other.npy', mmap_mode='r')\n"
        "os.truncate('other.npy', 4096)\n"
        "thread = threading.Thread(target=other.sum)\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=120)
    assert done.returncode == -signal.SIGBUS
