"""Whatever stands in the way of writing: one line, exit code 1, nothing new and nothing lost."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from plain import Run

PROGRAM = [sys.executable, "-m", "attncli"]
# Commands that need no torch, each with what it writes.
WRITERS = {
    "mask --causal --q-len 400 --save {}/m.npz": "{}/m.npz",
    "mask --causal --q-len 400 --save {}/m.npy": "{}/m.npy",
    "mask --causal --q-len 400 --save {}/m.safetensors": "{}/m.safetensors",
    "mask --causal --q-len 400 --save {}/m/": "{}/m/mask.npy",
    "mask --causal --q-len 400 -f json --max-values 160000 -o {}/t.json": "{}/t.json",
    "mask --causal --plot {}/p.png -o /dev/null": "{}/p.png",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def mount(place: Path) -> Iterator[Callable[[str], None]]:
    """Mount a small file system at `small`, with these options."""
    folder = place / "small"
    folder.mkdir()
    mounted = []

    def at(options: str) -> None:
        verb = ["mount", *(["-t", "tmpfs", "tmpfs"] if not mounted else []), "-o", options]
        done = subprocess.run([*verb, str(folder)], capture_output=True)
        if done.returncode:
            pytest.skip("mounting is not allowed here")
        mounted.append(options)

    yield at
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}


def assert_refused(run: Run, line: str, said: str) -> None:
    """One line and nothing else, on standard error and on the disk."""
    before = content_of(Path())
    outcome = run(*line.split(), code=1)
    assert outcome.stdout == ""
    assert outcome.stderr.startswith("attncli: error: ")
    assert outcome.stderr.count("\n") == 1
    assert said in outcome.stderr
    assert content_of(Path()) == before


@pytest.mark.parametrize("line", WRITERS)
@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
def test_a_full_disk(
    run: Run, place: Path, mount: Callable[[str], None], line: str, old: bool
) -> None:
    mount("size=16k")
    target = Path(WRITERS[line].format("small"))
    if old:
        target.parent.mkdir(exist_ok=True)
        target.write_text("old")
    assert_refused(run, line.format("small"), "expected ")


@pytest.mark.parametrize("line", WRITERS)
def test_a_disk_that_takes_no_more_files(
    run: Run, place: Path, mount: Callable[[str], None], line: str
) -> None:
    mount("size=4m,nr_inodes=4")
    for name in "abc":
        Path("small", name).touch()
    assert_refused(run, line.format("small"), "got a disk that takes no more files")


@pytest.mark.parametrize("line", WRITERS)
@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
def test_a_disk_that_cannot_be_written(
    run: Run, place: Path, mount: Callable[[str], None], line: str, old: bool
) -> None:
    mount("size=4m")
    target = Path(WRITERS[line].format("small"))
    if old:
        target.parent.mkdir(exist_ok=True)
        target.write_text("old")
    mount("remount,ro")
    assert_refused(run, line.format("small"), "got: Read-only file system")


@pytest.mark.parametrize("line", list(WRITERS)[:5])
def test_a_limit_to_the_size_of_files(run: Run, place: Path, line: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        assert_refused(run, line.format("."), "got a limit to the size of files")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("folder", "got a directory"),
        ("loop", "got: Too many levels of symbolic links"),
        ("no/such", "expected a folder no to write to, got none of this name"),
        ("/dev/full", "expected free space, got a full disk"),
        ("x" * 300, "got: File name too long"),
    ],
)
def test_targets_that_are_none(run: Run, place: Path, target: str, said: str) -> None:
    Path("folder").mkdir()
    Path("loop").symlink_to("loop")
    assert_refused(run, f"mask --causal -o {target}", said)
    assert_refused(run, f"mask --causal --save first.npz -o {target}", said)


@pytest.mark.parametrize(
    "second", ["-o no/t.json", "--plot no/p.png", "-o small/t.json -f json --max-values 90000"]
)
def test_nothing_is_left_of_a_command_that_fails_after_saving(
    run: Run, place: Path, mount: Callable[[str], None], second: str
) -> None:
    if "small" in second:
        mount("size=16k")
    for saved in ("m.npz", "m/"):
        assert_refused(run, f"mask --causal --q-len 300 --save {saved} {second}", "expected ")


def test_standard_output_that_is_full_after_saving(place: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [*PROGRAM, "mask", "--causal", "--save", "m.npz"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    line = "attncli: error: standard output: expected free space, got a full disk\n"
    assert (done.returncode, done.stderr) == (1, line)
    assert content_of(place) == {}


def test_links_lead_to_what_is_written(run: Run, place: Path) -> None:
    Path("folder").mkdir()
    Path("folder/old.json").write_text("old")
    for name in ("old.json", "new.json"):
        Path(f"to-{name}").symlink_to(f"folder/{name}")
        run("mask", "--causal", "-f", "json", "-o", f"to-{name}")
        assert Path(f"to-{name}").is_symlink()
        assert Path("folder", name).read_text().startswith("{")


def test_a_working_directory_that_was_deleted(place: Path) -> None:
    program = (
        "import os, sys; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone');"
        "from attncli.__main__ import main; sys.argv = ['attncli', *sys.argv[1:]]; main()"
    )
    line = (
        "attncli: error: working directory: expected one that is there, got one that was deleted\n"
    )
    for words, told in ((["compute"], (1, line)), (["--version"], (0, ""))):
        command = [sys.executable, "-c", program, *words]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == told


@pytest.mark.parametrize("home", [{}, {"HOME": "/proc/none"}], ids=["none", "unwritable"])
def test_pictures_without_a_home(place: Path, home: dict[str, str]) -> None:
    """matplotlib says at length what it does then; a signal is not to leave that behind either."""
    (place / "tmp").mkdir()
    environment = {k: v for k, v in os.environ.items() if k not in ("HOME", "MPLCONFIGDIR")}
    environment |= {"TMPDIR": str(place / "tmp")} | home
    program = (
        "import os, signal; from attncli.signals import end_cleanly\n"
        "from attncli.report.drawing import pictures\n"
        "end_cleanly(); pictures('canvas')\n"
        "print(len(os.listdir(os.environ['TMPDIR'])), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (143, "attncli: terminated\n")
    assert done.stdout == ("1\n" if home else "0\n")
    assert content_of(place / "tmp") == {}
