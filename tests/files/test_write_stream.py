"""A file whose header is known in the end: whole or absent, in the format's own library's words."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from attncli.errors import DataError, ResourceError
from attncli.files import stream
from attncli.files.reader import open_file
from attncli.files.stream import TensorStream


def parts(array: np.ndarray) -> list[np.ndarray]:
    """Row by row, as views of any strides."""
    return [np.ascontiguousarray(row) for row in array]


def write(target: Path, arrays: dict[str, np.ndarray], metadata: dict[str, Any]) -> None:
    with TensorStream(str(target)) as file:
        for name, array in arrays.items():
            file.write(f"key of {name}", array.shape, array.dtype.name, parts(array))
        file.finish({f"key of {name}": name for name in arrays}, metadata)


@pytest.mark.parametrize(
    ("room", "moved"),
    [(1 << 20, 1 << 26), (1 << 20, 0), (8, 1 << 26), (8, 0)],
    ids=["moved down", "padded", "moved up", "moved up though large"],
)
def test_the_header_takes_the_room_it_needs(
    room: int, moved: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_ROOM", room)
    monkeypatch.setattr(stream, "_MOVED_AT_MOST", moved)
    monkeypatch.setattr(stream, "_PART", 100)
    rng = np.random.default_rng(0)
    arrays = {f"layers.{n}.q": rng.standard_normal((7, 5)).astype(np.float32) for n in range(9)}
    arrays["masks.0"] = rng.random((3, 3)) < 0.5
    target = tmp_path / "a.safetensors"
    write(target, arrays, {"*": {"causal": True}})
    found = safetensors.torch.load_file(target)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name].numpy(), array)
    assert open_file(str(target)).metadata == {"*": {"causal": True}}
    assert (target.stat().st_size > 1 << 20) == (room > 8 and not moved)
    assert [*tmp_path.iterdir()] == [target]


def test_bit_patterns_keep_their_type(tmp_path: Path) -> None:
    target, values = tmp_path / "a.safetensors", torch.randn(3, 4).bfloat16()
    with TensorStream(str(target)) as file:
        file.write("q", (3, 4), "bfloat16", [values.view(torch.uint16).numpy()])
        file.finish({"q": "q"}, {})
    assert torch.equal(safetensors.torch.load_file(target)["q"], values)


def test_what_is_not_finished_is_not_there(tmp_path: Path) -> None:
    target = tmp_path / "a.safetensors"
    target.write_text("old")
    with TensorStream(str(target)) as file:
        file.write("q", (4,), "float32", [np.zeros(4, np.float32)])
    with pytest.raises(KeyboardInterrupt), TensorStream(str(target)):
        raise KeyboardInterrupt
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_it_goes_through_a_pipe_once_it_is_whole(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    array = np.arange(6, dtype=np.float32)
    write(pipe, {"q": array}, {})
    reader.join()
    assert safetensors.torch.load(got[0])["q"].tolist() == array.tolist()
    assert [*tmp_path.iterdir()] == [pipe]


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected a folder"), TensorStream(str(tmp_path / "a/b")):
        raise AssertionError
    with pytest.raises(DataError, match="got a directory"), TensorStream(str(tmp_path)):
        raise AssertionError


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, ResourceError), (errno.EIO, DataError)]
)
def test_a_full_disk_is_told(number: int, kind: type[Exception], tmp_path: Path) -> None:
    class Full:
        def write(self, data: object) -> int:
            raise OSError(number, "no")

    with TensorStream(str(tmp_path / "a")) as file:
        whole, file._file = file._file, Full()  # type: ignore[assignment]
        with pytest.raises(kind, match="disk" if kind is ResourceError else "Input/output"):
            file.write("q", (4,), "float32", [np.zeros(4, np.float32)])
        file._file = whole
    assert [*tmp_path.iterdir()] == []
