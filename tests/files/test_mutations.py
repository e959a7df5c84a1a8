"""Whatever happens to a file's bytes, it loads or is refused in one line."""

from __future__ import annotations

import functools
import io
from pathlib import Path

import file_builders as build
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attncli.errors import AttncliError
from attncli.files.reader import open_file
from attncli.files.roles import groups_of
from attncli.files.tensor import as_float

QUICK = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@functools.cache
def sound_files() -> dict[str, bytes]:
    import torch

    q, k = np.arange(6.0).reshape(2, 3), np.asfortranarray(np.ones((2, 3), ">f4"))
    deflated = io.BytesIO()
    np.savez_compressed(deflated, q=q, k=k)
    header = {
        "__metadata__": {"attncli": '{"": {"scale": 0.5}}'},
        "q": build.entry("BF16", [2, 2], 0, 8),
        "k": build.entry("F64", [1], 8, 16),
    }
    tensors = {"a": [{"q": torch.eye(2), "k": torch.ones(2, dtype=torch.bfloat16)}], "n": 1}
    return {
        "npy": build.npy(q),
        "npz": build.npz(q=q, k=k),
        "deflated": deflated.getvalue(),
        "safetensors": build.safetensors(header, bytes(16)),
        "pt": build.torch_file(tensors),
        "legacy": build.torch_file(tensors, legacy=True),
    }


def survive(path: Path, data: bytes) -> None:
    """Open a file, group it and read all of it: only the project's errors may come."""
    path.write_bytes(data)
    try:
        file = open_file(str(path))
        assert all(warning.isprintable() for warning in file.warnings)
    except AttncliError as error:
        build.assert_fit_to_print(error)
        return
    for step in (
        lambda: groups_of(file),
        *(functools.partial(read, file, h) for h in file.headers),
    ):
        try:
            step()
        except AttncliError as error:
            build.assert_fit_to_print(error)


def read(file, header) -> None:  # type: ignore[no-untyped-def]
    stored = file.read(header.name)
    assert stored.shape == header.shape
    if stored.array.size < 10**6:
        as_float(stored, "bfloat16" if stored.dtype == "|V2" else "float8_e5m2")


@pytest.mark.parametrize("kind", ["npy", "npz", "deflated", "safetensors", "pt", "legacy"])
@QUICK
@given(choice=st.data())
def test_changed_bytes(tmp_path: Path, kind: str, choice: st.DataObject) -> None:
    data = bytearray(sound_files()[kind])
    places = st.lists(st.integers(0, len(data) - 1), min_size=1, max_size=4)
    for place in choice.draw(places):
        data[place] = choice.draw(st.integers(0, 255))
    survive(tmp_path / "mutant", bytes(data))


@pytest.mark.parametrize("kind", ["npy", "npz", "deflated", "safetensors", "pt", "legacy"])
@QUICK
@given(choice=st.data())
def test_cut_and_spliced_files(tmp_path: Path, kind: str, choice: st.DataObject) -> None:
    data = sound_files()[kind]
    start = choice.draw(st.integers(0, len(data)))
    stop = choice.draw(st.integers(start, len(data)))
    filling = choice.draw(st.binary(max_size=20))
    survive(tmp_path / "mutant", data[:start] + filling + data[stop:])


@QUICK
@given(data=st.binary(max_size=300), head=st.sampled_from([b"", b"PK\x03\x04", b"\x93NUMPY\x01\0"]))
def test_noise(tmp_path: Path, data: bytes, head: bytes) -> None:
    survive(tmp_path / "noise", head + data)


@QUICK
@given(text=st.text(max_size=100))
def test_text(tmp_path: Path, text: str) -> None:
    survive(tmp_path / "text", text.encode("utf-8", "surrogatepass"))


@QUICK
@given(
    header=st.recursive(
        st.none() | st.booleans() | st.integers(-5, 2**70) | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["dtype", "shape", "data_offsets", "q", "__metadata__", "attncli"]),
                inner | st.sampled_from(["F32", "BF16", "F4"]),
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_safetensors_headers(tmp_path: Path, header: object) -> None:
    survive(tmp_path / "header", build.safetensors(header, bytes(8)))


@QUICK
@given(
    descr=st.sampled_from(["<f4", "|V2", "|O", "<U3", "f", "?", ">i8", "(2,)f4", "M8[s]", "a5"])
    | st.text(max_size=4),
    shape=st.lists(st.integers(-1, 2**65) | st.integers(0, 3), max_size=40),
    order=st.booleans() | st.none(),
)
def test_npy_headers(tmp_path: Path, descr: str, shape: list[int], order: bool | None) -> None:
    fields = {"descr": descr, "fortran_order": order, "shape": tuple(shape)}
    text = repr(fields).encode("ascii", "backslashreplace").decode()
    survive(tmp_path / "header", build.npy_header(text) + bytes(64))
