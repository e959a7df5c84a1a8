"""Folders in the place of files: what is in them that holds tensors, and what is left alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import file_builders as build
import numpy as np
import pytest

from attncli.errors import DataError
from attncli.files.folder import MOST_FILES, files_in
from attncli.files.reader import open_all, open_file
from attncli.files.roles import groups_of

Put = Callable[[str, bytes], str]
ONE = np.eye(2)


def test_files_of_one_tensor_play_the_roles_of_their_names(put: Put, tmp_path: Path) -> None:
    paths = {name: put(f"{name}.npy", build.npy(ONE)) for name in ("k", "q", "layers.10.v")}
    file = open_file(str(tmp_path))
    assert [header.name for header in file.headers] == ["k", "layers.10.v", "q"]
    assert groups_of(file) == {"": {"q": "q", "k": "k", "v": None}}
    stored = file.read("q")
    assert stored.source == paths["q"]
    assert np.array_equal(stored.array, ONE)


def test_shards_of_a_folder_are_one_bundle(put: Put, tmp_path: Path) -> None:
    put("b.npz", build.npz(**{"l.0.k": ONE}))
    put("a.npz", build.npz(**{"l.0.q": ONE}))
    put("l.0.v.npy", build.npy(ONE))
    file = open_file(str(tmp_path))
    assert groups_of(file) == {"l.0": {"q": "l.0.q", "k": "l.0.k", "v": "l.0.v"}}
    assert len(open_all(str(tmp_path))) == 3


def test_an_index_stands_for_the_shards_that_it_names(put: Put, tmp_path: Path) -> None:
    put("a.npz", build.npz(q=ONE))
    put("b.npz", build.npz(k=ONE))
    index = put("model.safetensors.index.json", b'{"weight_map": {"q": "a.npz"}}')
    assert files_in(str(tmp_path)) == [index]
    assert [header.name for header in open_file(str(tmp_path)).headers] == ["q"]
    put("other.index.json", b"{}")
    with pytest.raises(DataError, match="expected one index of shards, got 2") as caught:
        open_file(str(tmp_path))
    assert caught.value.advice == f"name the one that is meant: {index}"


def test_what_is_no_file_of_tensors_is_left_alone(put: Put, tmp_path: Path) -> None:
    """A pipe would wait for a writer; folders within it and hidden files are not asked for."""
    put("README.md", b"text")
    put(".hidden.npy", build.npy(ONE))
    os.mkfifo(tmp_path / "pipe.npy")
    (tmp_path / "gone.npy").symlink_to(tmp_path / "nowhere.npy")
    (tmp_path / "inner.npy").mkdir()
    (tmp_path / "inner.npy" / "k.npy").write_bytes(build.npy(ONE))
    (tmp_path / "link.npy").symlink_to(put("10.npy", build.npy(ONE)))
    put("9.npy", build.npy(ONE))
    assert [Path(each).name for each in files_in(str(tmp_path))] == ["9.npy", "10.npy", "link.npy"]


def test_files_that_cannot_be_read_are_left_out_with_a_warning(put: Put, tmp_path: Path) -> None:
    put("q.npy", build.npy(ONE))
    cut = put("a.npz", build.npz(k=ONE)[:-30])
    (file,) = open_all(str(tmp_path))
    assert [text.partition(": expected")[0] for text in file.warnings] == [f"left out: {cut}"]
    (tmp_path / "q.npy").unlink()
    with pytest.raises(DataError, match="expected a complete") as caught:
        open_all(str(tmp_path))
    assert caught.value.where == cut


def test_names_that_come_again_are_told_with_their_files(put: Put, tmp_path: Path) -> None:
    first, second = (put(name, build.npz(q=ONE, k=ONE)) for name in ("a.npz", "b.npz"))
    with pytest.raises(DataError, match="expected each name once, got q in") as caught:
        open_file(str(tmp_path))
    assert caught.value.problem.endswith(f"{first} and {second}")
    assert caught.value.advice == "name the file that is meant"
    assert [file.source for file in open_all(str(tmp_path))] == [first, second]


def test_empty_and_overfull_folders(
    put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("notes.txt", b"text")
    with pytest.raises(DataError, match=r"expected files of tensors \(\.npy, .*got none") as caught:
        open_file(str(tmp_path))
    assert caught.value.where == str(tmp_path)
    assert MOST_FILES == 10_000
    monkeypatch.setattr("attncli.files.folder.MOST_FILES", 2)
    for name in ("a.npy", "b.npy", "c.npy"):
        put(name, build.npy(ONE))
    with pytest.raises(DataError, match="expected at most 2 files of tensors in it, got 3"):
        open_file(str(tmp_path))


def test_a_folder_that_cannot_be_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(_: str) -> None:
        raise PermissionError(13, "no")

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(
        DataError, match="expected a folder that can be read, got permission denied"
    ):
        files_in(str(tmp_path))
