"""Bundles in several files: an index of shards, and groups whose tensors lie in several."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import file_builders as build
import numpy as np
import pytest

from attncli.errors import DataError
from attncli.files.reader import join, open_file
from attncli.files.roles import groups_of

Put = Callable[[str, bytes], str]
INDEX = "model.safetensors.index.json"


def index(**shard_of: str) -> bytes:
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": shard_of}).encode()


def test_an_index_is_a_bundle(put: Put) -> None:
    first = put("a-00001-of-00002.npz", build.npz(**{"l.0.q": np.eye(2), "l.0.v": np.eye(3)}))
    second = put("a-00002-of-00002.npz", build.npz(**{"l.0.k": 2 * np.eye(2), "other": np.ones(1)}))
    names = {"l.0.q": first, "l.0.v": first, "l.0.k": second, "other": second}
    source = put(INDEX, index(**{name: Path(shard).name for name, shard in names.items()}))
    file = open_file(source)
    assert (file.source, file.format) == (source, "npz")
    assert [header.name for header in file.headers] == ["l.0.q", "l.0.v", "l.0.k", "other"]
    stored = file.read("l.0.k")
    assert stored.source == f"{second}::l.0.k"
    assert np.array_equal(stored.array, 2 * np.eye(2))
    assert groups_of(file) == {"l.0": {"q": "l.0.q", "k": "l.0.k", "v": "l.0.v"}}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (index(q="gone.npz"), "gone.npz: expected a file, got no file of this name"),
        (index(q="a.npz", w="a.npz"), "a.npz: expected w as the index says, got none"),
        (index(q="../a.npz"), "expected weight_map as tensor → shard beside the index"),
        (index(q="/a.npz"), "expected weight_map as tensor → shard beside the index"),
        (json.dumps({"weight_map": {"q": 3}}).encode(), "expected weight_map as tensor → shard"),
        (json.dumps({"weight_map": [1]}).encode(), "expected weight_map as tensor → shard"),
        (index(), "expected weight_map as tensor → shard beside the index"),
        (index(q=INDEX), "expected a shard, got another index"),
        (index(q="cut.npz"), "cut.npz: expected a complete .npz or .pt archive"),
        (b'{"weights": {}}', "got a JSON document"),
        (b'{"weight_map": {', "got a JSON document"),
    ],
)
def test_faults_of_an_index(put: Put, data: bytes, problem: str) -> None:
    put("a.npz", build.npz(q=np.eye(2)))
    put("cut.npz", build.npz(q=np.eye(2))[:-30])
    with pytest.raises(DataError, match=problem) as caught:
        open_file(put(INDEX, data))
    assert INDEX in caught.value.where
    build.assert_fit_to_print(caught.value)


def test_names_that_two_files_share(put: Put) -> None:
    files = [open_file(put(name, build.npz(q=np.eye(2)))) for name in ("a.npz", "b.npz")]
    with pytest.raises(DataError, match=r"expected each name once, got q in .*a\.npz and .*b\.npz"):
        join("both", files)
