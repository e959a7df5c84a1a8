"""Files appear whole or not at all, those of one command together, whatever stands in the way."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import file_builders as build
import numpy as np
import pytest

from attncli.errors import AttncliError, CheckFailedError, DataError
from attncli.files.target import atomic_path, once_there, require_target, seekable_path, together
from attncli.files.writer import TensorSaver, write_text
from attncli.limits import full_disk

GRID = np.linspace(-1, 1, 24).reshape(2, 3, 4)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def save(target: Path | str, **arrays: np.ndarray) -> None:
    with TensorSaver(str(target), {n: (a.shape, a.dtype) for n, a in arrays.items()}) as saver:
        for name, array in arrays.items():
            saver.write(name, ..., array)


def test_write_text(tmp_path: Path) -> None:
    target = str(tmp_path / "a.csv")
    write_text(target, iter(["a,√\n", "\udcff\r\n"]))
    assert Path(target).read_bytes() == "a,√\n\\udcff\r\n".encode()


def test_an_interrupted_text_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    target.write_text("old")

    def chunks() -> Iterator[str]:
        yield "new" * 100_000
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_text(str(target), chunks())
    assert left_in(tmp_path) == ["a.json"]
    assert target.read_text() == "old"


def test_permissions_are_those_of_an_ordinary_file(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    before = os.umask(0o027)
    try:
        write_text(str(target), ["x"])
    finally:
        os.umask(before)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    target.chmod(0o600)
    write_text(str(target), ["y"])
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link.txt"
    for name in ("old.txt", "new.txt"):
        link.unlink(missing_ok=True)
        link.symlink_to(Path("real") / name)
        write_text(str(link), [name])
        assert link.is_symlink()
        assert (tmp_path / "real" / name).read_text() == name
    assert left_in(tmp_path / "real") == ["new.txt", "old.txt"]


def test_devices_and_pipes_are_written_as_they_are(tmp_path: Path) -> None:
    write_text(os.devnull, ["x"])
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    write_text(str(pipe), ["through"])
    reader.join()
    assert got == ["through"]
    assert left_in(tmp_path) == ["pipe"]


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("none/a.txt", "expected a folder .*none to write to, got none of this name"),
        ("file/a.txt", "expected a folder .*file to write to, got none of this name"),
        ("dangling", "expected a folder .*away to write to, got none of this name"),
        ("folder", "expected a file to write, got a directory"),
        ("loop", "expected a place that can be written, got: "),
        ("a" * 300, "expected a place that can be written, got: "),
        ("none\x1b/a\n.txt", r"expected a folder .*none\\x1b to write to"),
    ],
)
def test_places_that_cannot_be_written(tmp_path: Path, target: str, line: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("away/a.txt")
    before = left_in(tmp_path)
    with pytest.raises(AttncliError, match=line) as caught:
        write_text(str(tmp_path / target), ["x"])
    build.assert_fit_to_print(caught.value)
    assert left_in(tmp_path) == before


def test_permission_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")

    def deny(*_: object) -> None:
        raise PermissionError(errno.EACCES, "denied")

    # Who runs the tests may be allowed everything.
    monkeypatch.setattr(os, "open", deny)
    with (
        pytest.raises(DataError, match="a place that can be written, got permission denied"),
        atomic_path(target) as path,
    ):
        pytest.fail(f"{path} must not be given")
    assert target.read_text() == "old"


def test_a_private_file_is_private_from_the_first_byte(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.touch()
    target.chmod(0o600)
    made = []
    with atomic_path(target) as path:
        made.append(stat.S_IMODE(path.stat().st_mode))
    assert made == [0o600]


def test_other_names_of_a_file_keep_what_it_held(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")
    (tmp_path / "b.txt").hardlink_to(tmp_path / "a.txt")
    write_text(str(tmp_path / "a.txt"), ["new"])
    assert (tmp_path / "a.txt").read_text() == "new"
    assert (tmp_path / "b.txt").read_text() == "old"


@pytest.mark.parametrize("behind", ["", "old\n"])
def test_a_stream_that_a_shell_has_opened_is_appended_to(tmp_path: Path, behind: str) -> None:
    """`(attncli … -o /dev/stdout; echo last) > file` is one file, in order."""
    target = tmp_path / "a.txt"
    target.write_text(behind)
    descriptor = os.open(target, os.O_WRONLY)
    (tmp_path / "link").symlink_to(f"/dev/fd/{descriptor}")
    try:
        for place in (f"/dev/fd/{descriptor}", str(tmp_path / "link")):
            require_target(place)
            write_text(place, ["text\n"])
        os.write(descriptor, b"last\n")
    finally:
        os.close(descriptor)
    assert target.read_text() == behind + "text\ntext\nlast\n"
    assert left_in(tmp_path) == ["a.txt", "link"]


@pytest.mark.parametrize("kind", ["a.npy", "a.npz", "a.safetensors"])
def test_tensors_go_through_a_pipe(tmp_path: Path, kind: str) -> None:
    pipe = tmp_path / kind
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    save(pipe, q=GRID)
    reader.join()
    pipe.unlink()
    save(pipe, q=GRID)
    if kind != "a.npz":  # whose members have their size behind them where nobody can go back
        assert got == [pipe.read_bytes()]
    assert len(got[0]) > GRID.nbytes


def test_a_pipe_gets_nothing_of_what_fails(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="no"), seekable_path(tmp_path / "pipe"):
        raise ValueError("no")
    assert left_in(tmp_path) == ["pipe"]


# Several files of one command


def test_files_appear_together_and_are_told_then(tmp_path: Path) -> None:
    told: list[list[str]] = []
    with together():
        write_text(str(tmp_path / "a.txt"), ["a"])
        once_there(lambda: told.append([n for n in left_in(tmp_path) if n[0] != "."]))
        save(tmp_path / "stages", q=GRID)
        assert not (tmp_path / "a.txt").exists()
        assert not (tmp_path / "stages" / "q.npy").exists()
    assert left_in(tmp_path) == ["a.txt", "q.npy", "stages"]
    assert told == [["a.txt", "q.npy", "stages"]]
    once_there(lambda: told.append([]))
    assert told[1:] == [[]]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, DataError("x", "y")])
def test_none_appear_after_a_failure(tmp_path: Path, error: type[BaseException]) -> None:
    (tmp_path / "a.txt").write_text("old")
    told: list[int] = []

    def fail() -> None:
        with together():
            write_text(str(tmp_path / "a.txt"), ["a"])
            save(tmp_path / "stages", q=GRID)
            save(tmp_path / "b.npz", q=GRID)
            once_there(lambda: told.append(1))
            raise error

    with pytest.raises(type(error) if isinstance(error, Exception) else error):
        fail()
    assert left_in(tmp_path) == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"
    assert told == []


@pytest.mark.parametrize("error", [CheckFailedError("x", "y"), BrokenPipeError()])
def test_a_failed_check_and_a_reader_that_has_gone_take_nothing_back(
    tmp_path: Path, error: Exception
) -> None:
    def fail() -> None:
        with together():
            write_text(str(tmp_path / "a.txt"), ["a"])
            raise error

    with pytest.raises(type(error)):
        fail()
    assert left_in(tmp_path) == ["a.txt"]


def test_a_place_that_is_taken_meanwhile(tmp_path: Path) -> None:
    with (  # noqa: PT012 - the place has to change in between
        pytest.raises(DataError, match="expected a place that can be written, got: Is a directory"),
        together(),
    ):
        write_text(str(tmp_path / "a.txt"), ["a"])
        (tmp_path / "a.txt").mkdir()
    assert left_in(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("old", ["old", None])
def test_where_one_cannot_be_renamed_the_others_are_put_back(
    tmp_path: Path, old: str | None
) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    if old is not None:
        first.write_text(old)
    with pytest.raises(DataError, match="Is a directory"), together():  # noqa: PT012 - likewise
        write_text(str(first), ["a"])
        write_text(str(second), ["b"])
        second.mkdir()
    assert left_in(tmp_path) == (["a.txt", "b.txt"] if old else ["b.txt"])
    assert old is None or first.read_text() == old


def test_of_two_writers_the_last_one_wins(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    with atomic_path(target) as first:
        with atomic_path(target) as second:
            first.write_text("first")
            second.write_text("second")
        assert target.read_text() == "second"
    assert target.read_text() == "first"
    assert left_in(tmp_path) == ["a.txt"]


def test_an_old_folder_that_is_empty_stays(tmp_path: Path) -> None:
    def fail() -> None:
        with together():
            save(tmp_path, q=GRID)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert left_in(tmp_path) == []
    assert tmp_path.is_dir()


def test_places_are_tried_before_anything_is_computed(tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_text("old")
    for name in ("old.txt", "new.txt"):
        require_target(str(tmp_path / name))
    require_target(os.devnull)
    with pytest.raises(DataError, match="got a directory"):
        require_target(str(tmp_path))
    with pytest.raises(DataError, match=r"expected a folder .*none to write to"):
        require_target(str(tmp_path / "none" / "a.txt"))
    assert left_in(tmp_path) == ["old.txt"]


def test_what_a_full_disk_is_full_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "full")
    assert full_disk(full, tmp_path) == "a full disk"
    assert full_disk(OSError(errno.EFBIG, "large"), tmp_path) == "a limit to the size of files"
    none = os.statvfs_result((1, 1, 1, 1, 1, 10, 0, 0, 0, 255, 0))
    monkeypatch.setattr(os, "statvfs", lambda _: none)
    assert full_disk(full, tmp_path) == "a disk that takes no more files"


def test_many_tensors_need_few_open_files(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (80, before[1]))
    try:
        for target in ("many", "many.npz"):
            save(tmp_path / target, **{f"t{n}": GRID for n in range(150)})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(left_in(tmp_path / "many")) == 150
