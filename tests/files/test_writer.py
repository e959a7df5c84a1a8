"""What is written is whole or absent, and reads back bit for bit in the formats' own libraries."""

from __future__ import annotations

import errno
import subprocess
import sys
import zipfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import file_builders as build
import numpy as np
import pytest

from attncli.errors import DataError, ResourceError, UsageError
from attncli.files.reader import open_file
from attncli.files.torch_tensors import as_torch
from attncli.files.writer import TensorSaver, saved_format

TARGETS = ["a.npz", "a.safetensors", "folder"]
GRID = np.linspace(-1, 1, 24).reshape(2, 3, 4)


def read_back(target: Path, name: str) -> np.ndarray:
    return (
        open_file(str(target / f"{name}.npy" if target.is_dir() else target))
        .read(None if target.is_dir() else name)
        .array
    )


def save(target: Path | str, **arrays: np.ndarray) -> None:
    with TensorSaver(str(target), {n: (a.shape, a.dtype) for n, a in arrays.items()}) as saver:
        for name, array in arrays.items():
            saver.write(name, ..., array)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "array",
    [
        GRID,
        GRID.astype(np.float32),
        GRID > 0,
        GRID.astype(np.float16),
        (GRID * 100).astype(np.int64),
        GRID[::-1, :, ::-1],
        np.asfortranarray(GRID),
        GRID.transpose(2, 0, 1)[:, ::2],
        GRID.astype(">f8"),
        np.zeros((0, 4)),
        np.array(3.5),
    ],
    ids=lambda a: f"{a.dtype}{a.shape}{a.strides}",
)
def test_what_is_written_reads_back(tmp_path: Path, target: str, array: np.ndarray) -> None:
    # One byte before it: nothing is aligned by luck.
    save(tmp_path / target, flag=np.array(True), q=array)
    back = read_back(tmp_path / target, "q")
    assert np.array_equal(back, array)
    assert back.dtype == array.dtype.newbyteorder("=")
    assert read_back(tmp_path / target, "flag").tolist() is True
    assert not [name for name in left_in(tmp_path) if name.endswith(".tmp")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e8m0fnu"])
@pytest.mark.parametrize("target", [*TARGETS, "a.npy"])
def test_types_that_numpy_lacks(tmp_path: Path, target: str, dtype: str) -> None:
    import torch

    expected = torch.tensor([1.0, 2.0, 0.5, 4.0]).to(getattr(torch, dtype))
    block = as_block(expected)
    with TensorSaver(str(tmp_path / target), {"q": ((2, 4), dtype)}) as saver:
        saver.write("q", 0, block)
        saver.write("q", (1, slice(1, None)), block[1:])
    file = open_file(str(tmp_path / target / "q.npy" if target == "folder" else tmp_path / target))
    back = as_torch(file.read(), dtype)
    assert torch.equal(back.view(torch.uint8)[0], expected.view(torch.uint8))
    assert as_block(back)[1].tolist() == [0, *block[1:].tolist()]


def as_block(tensor) -> np.ndarray:  # type: ignore[no-untyped-def]
    import torch

    if tensor.dtype == torch.float16:
        return tensor.numpy()
    return tensor.view(torch.uint16 if tensor.itemsize == 2 else torch.uint8).numpy()


def test_the_formats_own_libraries_read_it(tmp_path: Path) -> None:
    import safetensors.numpy
    import torch
    from safetensors import safe_open

    arrays = {"flag": np.array([True, False, True]), "q": GRID, "ключ": GRID.astype(np.float32)}
    save(tmp_path / "a.npz", **arrays)
    save(tmp_path / "a.safetensors", **arrays)
    with np.load(tmp_path / "a.npz") as loaded:
        assert {n: loaded[n].tolist() for n in loaded} == {n: a.tolist() for n, a in arrays.items()}
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        assert archive.testzip() is None
        assert archive.infolist()[0].compress_type == zipfile.ZIP_STORED
    loaded = safetensors.numpy.load_file(tmp_path / "a.safetensors")
    assert all(np.array_equal(loaded[n], a) for n, a in arrays.items())
    tensors = {"b": ((1,), "bfloat16")}
    with TensorSaver(str(tmp_path / "b.safetensors"), tensors) as saver:
        saver.write("b", ..., np.array([0x3FC0], np.uint16))
    with safe_open(tmp_path / "b.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("b"), torch.tensor([1.5], dtype=torch.bfloat16))


def test_the_same_tensors_make_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.npz", "a.safetensors"):
        save(tmp_path / name, q=GRID)
        first = (tmp_path / name).read_bytes()
        monkeypatch.setattr("time.time", lambda: 2e9)
        save(tmp_path / name, q=GRID)
        assert (tmp_path / name).read_bytes() == first


def test_members_may_be_packed_to_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    save(tmp_path / "a.npz", q=GRID)
    before = (tmp_path / "a.npz").read_bytes()
    monkeypatch.setattr("shutil.copyfileobj", fail)
    with pytest.raises(ResourceError, match="expected free space, got a full disk"):
        save(tmp_path / "a.npz", q=GRID + 1)
    assert left_in(tmp_path) == ["a.npz"]
    assert (tmp_path / "a.npz").read_bytes() == before


@pytest.mark.parametrize("target", TARGETS)
def test_blocks_at_any_index(tmp_path: Path, target: str) -> None:
    expected = np.zeros((2, 3, 5), np.float32)
    blocks = [
        ((0,), np.ones((3, 5))),
        ((1, slice(None), slice(1, 4)), np.arange(9.0).reshape(3, 3)),
        ((slice(None), [0, 2], 4), np.full((2, 2), 7.0)),
        ((1, 1, 0), np.array(9.0)),
    ]
    with TensorSaver(str(tmp_path / target), {"w": (expected.shape, np.dtype("f4"))}) as saver:
        for index, block in blocks:
            saver.write("w", index, block)
            expected[index] = block
    assert np.array_equal(read_back(tmp_path / target, "w"), expected)


def test_blocks_of_another_kind_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(TypeError, match="q: cannot write float64 as uint16"),
        TensorSaver(str(tmp_path / "a.npz"), {"q": ((2,), "bfloat16")}) as saver,
    ):
        saver.write("q", ..., np.ones(2))
    with pytest.raises(TypeError, match="no such element type: complex64"):
        TensorSaver(str(tmp_path / "a.npz"), {"q": ((2,), np.dtype("c8"))})
    assert left_in(tmp_path) == []


def test_one_npy_file(tmp_path: Path) -> None:
    save(tmp_path / "A.NPY", q=GRID)
    assert np.array_equal(np.load(tmp_path / "A.NPY", mmap_mode="r"), GRID)
    with pytest.raises(UsageError, match=r"expected one tensor for a \.npy file, got 2") as caught:
        save(tmp_path / "b.npy", q=GRID, k=GRID)
    assert "folder" in caught.value.advice


@pytest.mark.parametrize("suffix", [".txt", ".pt", ".json", ".npz2", ".\x1b"])
def test_other_suffixes_are_refused(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(UsageError, match=r"ends in \.npz, \.safetensors or \.npy, or a") as caught:
        save(f"a{suffix}", q=GRID)
    build.assert_fit_to_print(caught.value)
    with pytest.raises(UsageError, match="got standard output"):
        saved_format("-", 1)


def test_folders_keep_what_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "keep.npy").write_bytes(b"mine")
    (tmp_path / "q.npy").write_bytes(b"old")
    save(tmp_path, q=GRID)
    assert (tmp_path / "keep.npy").read_bytes() == b"mine"
    assert np.array_equal(np.load(tmp_path / "q.npy"), GRID)
    save(f"{tmp_path}/v1.0/", q=GRID)
    assert left_in(tmp_path) == ["keep.npy", "q.npy", "q.npy", "v1.0"]


@pytest.mark.parametrize("name", ["../q", "a/b", "a\\b", "a\nb", "C:q", "\x1b[31m"])
def test_names_never_lead_out_of_a_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="expected a name that a file can have") as caught:
        TensorSaver(str(tmp_path / "d"), {name: ((1,), "float32")})
    build.assert_fit_to_print(caught.value)
    with TensorSaver(str(tmp_path / "a.npz"), {name: ((1,), "float32")}):
        pass
    assert open_file(str(tmp_path / "a.npz")).headers[0].name == name


class Stop(BaseException):
    """An interrupt, as the program sees it."""


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, Stop])
def test_an_interrupted_save_leaves_what_was_there(
    tmp_path: Path, target: str, error: type[BaseException]
) -> None:
    def interrupted() -> None:
        with TensorSaver(str(tmp_path / target), {"q": ((4,), "float64")}) as saver:
            saver.write("q", 0, np.array(1.0))
            raise error

    with pytest.raises(error):
        interrupted()
    assert left_in(tmp_path) == []
    save(tmp_path / target, q=GRID)
    before = left_in(tmp_path)
    with pytest.raises(error):
        interrupted()
    assert left_in(tmp_path) == before
    assert np.array_equal(read_back(tmp_path / target, "q"), GRID)


def test_a_failure_while_finishing_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("attncli.files.writer._pack", fail)
    with pytest.raises(ResourceError, match="expected free space, got a full disk"):
        save(tmp_path / "a.npz", q=GRID)
    assert left_in(tmp_path) == []


def test_too_little_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**6, 0, 10**6))
    for target, need in zip(TARGETS, ("8.0", "4.0", "4.0"), strict=True):
        saver = TensorSaver(str(tmp_path / target), {"q": ((10**6,), "float32")})
        with pytest.raises(ResourceError, match=f"at most 1.0 MB on disk, got {need} MB"), saver:
            pytest.fail("the disk is too small")
    assert left_in(tmp_path) == []


def test_a_disk_that_cannot_reserve_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int) -> Callable[..., None]:
        def fail(*_: object) -> None:
            raise OSError(number, "refused")

        return fail

    monkeypatch.setattr("os.posix_fallocate", refuse(errno.EOPNOTSUPP), raising=False)
    save(tmp_path / "a.npy", q=GRID)
    assert np.array_equal(np.load(tmp_path / "a.npy"), GRID)
    monkeypatch.setattr("os.posix_fallocate", refuse(errno.ENOSPC))
    with pytest.raises(ResourceError, match="free space, got a full disk"):
        save(tmp_path / "b.npy", q=GRID)
    assert left_in(tmp_path) == ["a.npy"]


def test_a_large_tensor_takes_little_memory(tmp_path: Path) -> None:
    program = (
        "import resource, sys, numpy as np\n"
        "from attncli.files.writer import TensorSaver\n"
        "block = np.ones((1000, 8000), np.float32)\n"
        "with TensorSaver(sys.argv[1], {'w': ((8000, 8000), 'float32')}) as saver:\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "    for row in range(0, 8000, 1000):\n"
        "        saver.write('w', slice(row, row + 1000), block)\n"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(after - before)\n"
    )
    run = [sys.executable, "-c", program, str(tmp_path / "a.npz")]
    grown = int(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    unit = 1 if sys.platform == "darwin" else 1024
    assert grown * unit < 100_000_000  # of 256 MB


def test_tensors_to_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for target in ("none/a.npz", "none/folder", "file"):
        with pytest.raises(DataError, match="expected a folder"):
            save(tmp_path / target, q=GRID)
    assert left_in(tmp_path) == ["file"]
