"""What goes into a file comes out of it, whatever the container, the element type or the pipe."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import file_builders as build
import numpy as np
import pytest

from attncli.errors import DataError
from attncli.files.reader import open_file
from attncli.files.roles import read_one
from attncli.files.tensor import as_float
from attncli.files.torch_tensors import as_torch

Put = Callable[[str, bytes], str]

SIMPLE = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
FLOATS = ["float16", "float32", "float64"]
RAW = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
OLD = {*SIMPLE, *FLOATS, "bfloat16"} - {"uint16", "uint32", "uint64"}
CONTAINERS = ["npy", "npz", "safetensors", "pt", "legacy.pt"]


def sample(dtype: str):  # type: ignore[no-untyped-def]
    """A (2, 3) torch tensor with a sign, a fraction and, where there is one, an infinity."""
    import torch

    values = torch.tensor([[0.0, 1.0, 3.0], [5.0, 6.0, 1.5]])
    if dtype in ("float16", "bfloat16", "float32", "float64"):
        values[0] = torch.tensor([-0.0, float("inf"), -2.5])
    return values.to(getattr(torch, dtype))


def stored_bytes(tensor, container: str) -> bytes:  # type: ignore[no-untyped-def]
    """The tensor under the name q in a container, as other programs write it."""
    import safetensors.torch
    import torch

    if container == "safetensors":
        return safetensors.torch.save({"q": tensor})
    if container.endswith("pt"):
        return build.torch_file({"q": tensor}, legacy=container.startswith("legacy"))
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype in RAW:
        bits = tensor.view(torch.uint8).numpy()
        array = bits.view("V2" if dtype == "bfloat16" else "V1")
    else:
        array = tensor.numpy()
    return build.npy(array) if container == "npy" else build.npz(q=array)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("dtype", SIMPLE + FLOATS + RAW)
def test_every_element_type_in_every_container(put: Put, container: str, dtype: str) -> None:
    import torch

    expected = sample(dtype)
    if container == "legacy.pt" and dtype not in OLD:
        # torch itself writes such files and then fails to read them.
        with pytest.raises(DataError, match="got a damaged or unsupported one"):
            open_file(put("a.pt", stored_bytes(expected, container)))
        return
    file = open_file(put(f"a.{container}", stored_bytes(expected, container)))
    assert file.format == container.removeprefix("legacy.")
    assert file.warnings == []
    (header,) = file.headers
    assert (header.name, header.shape) == (None if container == "npy" else "q", (2, 3))
    stored = file.read()
    assert stored.source == file.source
    undeclared = header.dtype in ("|V2", "|V1")
    assert header.dtype == dtype or (dtype in RAW and undeclared)
    tensor = as_torch(stored, dtype if undeclared else None)
    assert tensor.dtype == expected.dtype
    assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))
    values = as_float(stored, dtype)
    assert np.array_equal(values, expected.to(torch.float64).numpy())
    assert values.dtype == (np.float64 if dtype == "float64" or dtype in SIMPLE else np.float32)


@pytest.mark.parametrize("container", ["npy", "npz"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [">f4", "<f4", ">i8", ">u2"])
def test_byte_and_axis_order(put: Put, container: str, order: str, dtype: str) -> None:
    array = np.asarray(np.arange(24).reshape(2, 3, 4), dtype, order=order)  # type: ignore[call-overload]
    data = build.npy(array) if container == "npy" else build.npz(q=array)
    stored = open_file(put("a", data)).read()
    assert stored.array.dtype.isnative
    assert np.array_equal(stored.array, array)
    assert as_torch(stored).tolist() == array.tolist()


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (3, 0, 2), (1, 1, 1, 1)])
@pytest.mark.parametrize("container", CONTAINERS)
def test_empty_and_scalar_arrays(put: Put, container: str, shape: tuple[int, ...]) -> None:
    import torch

    file = open_file(put("a", stored_bytes(torch.ones(shape), container)))
    assert file.headers[0].shape == shape
    assert as_torch(file.read()).shape == shape


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_archives(put: Put, method: int) -> None:
    array = np.arange(100_000.0)
    data = build.archive({"deep/q.npy": build.npy(array)}, method)
    file = open_file(put("a.npz", data))
    assert file.headers[0].name == "deep/q"
    assert np.array_equal(file.read().array, array)


def test_a_recompressed_torch_file(put: Put) -> None:
    import torch

    with zipfile.ZipFile(io.BytesIO(build.torch_file({"q": torch.arange(3.0)}))) as plain:
        members = {name: plain.read(name) for name in plain.namelist()}
    file = open_file(put("a.pt", build.archive(members, zipfile.ZIP_DEFLATED)))
    assert file.read().array.tolist() == [0, 1, 2]


def test_npy_of_all_versions_and_of_python_2(put: Put) -> None:
    text = "{'descr': '<f4', 'fortran_order': False, 'shape': (2L,), }"
    data = np.ones(2, np.float32).tobytes()
    old = build.npy_header(text) + data
    for file in (put("a", old), put("a.npz", build.archive({"q.npy": old}))):
        assert open_file(file).read().array.tolist() == [1, 1]
    for version in ((2, 0), (3, 0)):
        stream = io.BytesIO()
        np.lib.format.write_array(stream, np.ones(2), version)
        assert open_file(put("a", stream.getvalue())).read().array.tolist() == [1, 1]


def test_trailing_bytes_are_told(put: Put) -> None:
    data = build.npy(np.ones(2)) + b"more"
    for file in (
        open_file(put("a.npy", data)),
        open_file(put("b.npz", build.archive({"q.npy": data}))),
    ):
        assert [w.partition(": ")[2].partition(" after")[0] for w in file.warnings] == ["4 bytes"]
        assert file.read().shape


def test_other_members_of_an_npz_are_told(put: Put) -> None:
    one = build.npy(np.ones(1))
    file = open_file(put("a.npz", build.archive({"q.npy": one, "notes.txt": b"", "d/": b""})))
    assert len(file.headers) == 1
    assert file.warnings == [
        f"{file.source}: members that are no .npy arrays are ignored: notes.txt"
    ]
    # A name that begins with a zero byte is empty to Python.
    nameless = build.archive({"q.npy": one, "nameless": b""}).replace(b"nameless", b"\0ameless")
    assert len(open_file(put("c.npz", nameless)).warnings) == 1
    file = open_file(put("b.npz", build.archive({"q.npy": one, "__MACOSX/._q.npy": b"junk"})))
    assert [header.name for header in file.headers] == ["q"]


def test_torch_files_flatten_to_dotted_names(put: Put) -> None:
    import torch

    one = torch.ones(1)
    value = {"layers": [{"q": one, "k": one}, (one,)], "step": 3, 7: torch.nn.Parameter(one)}
    file = open_file(put("a.pt", build.torch_file(value)))
    assert [h.name for h in file.headers] == ["layers.0.q", "layers.0.k", "layers.1.0", "7"]
    assert file.read("7").array.tolist() == [1]
    assert file.read("layers.0.k").source == f"{file.source}::layers.0.k"
    bare = open_file(put("b.pt", build.torch_file(torch.eye(2).T[:, 1:])))
    assert bare.headers[0].name is None
    assert bare.read(None).array.tolist() == [[0], [1]]


def test_safetensors_metadata(put: Put) -> None:
    entry = build.entry("F32", [1], 0, 4)
    meta = {"format": "pt", "attncli": '{"layers.0": {"scale": 0.5, "tokens": ["a"]}}'}
    file = open_file(put("a", build.safetensors({"__metadata__": meta, "q": entry}, bytes(4))))
    assert file.metadata == {"layers.0": {"scale": 0.5, "tokens": ["a"]}}
    assert open_file(put("b", build.safetensors({"q": entry}, bytes(4)))).metadata == {}


def test_safetensors_of_all_widths_are_found_in_the_order_of_the_data(put: Put) -> None:
    header = {
        "z": build.entry("F32", [2], 13, 21),
        "packed": build.entry("F4", [2, 4], 0, 4),
        "none": build.entry("F64", [0, 3], 13, 13),
        "flag": build.entry("BOOL", [1], 4, 5),
        "wide": build.entry("C64", [1], 5, 13),
    }
    data = bytes(4) + b"\1" + bytes(8) + np.array([1.5, -2.5], "<f4").tobytes()
    file = open_file(put("a", build.safetensors(header, data)))
    names = [header.name for header in file.headers]
    assert [name for name in names if name != "none"] == ["packed", "flag", "wide", "z"]
    assert file.read("z").array.tolist() == [1.5, -2.5]
    assert file.read("flag").array.tolist() == [True]
    assert file.read("none").shape == (0, 3)


def test_unaligned_data_load_bit_for_bit(put: Put) -> None:
    values = np.array([1.5, -2.5])
    header = build.safetensors({"q": build.entry("F64", [2], 0, 16)})
    assert len(header) % 8 != 0
    stored = open_file(put("a", header + values.tobytes())).read()
    assert as_torch(stored).tolist() == values.tolist()
    assert as_float(stored).tolist() == values.tolist()


class Stdin:
    """Standard input that holds the given bytes and cannot seek."""

    def __init__(self, data: bytes) -> None:
        self.buffer = io.BufferedReader(io.BytesIO(data))  # type: ignore[arg-type]


@pytest.mark.parametrize("container", CONTAINERS)
def test_standard_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, container: str) -> None:
    import torch

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", Stdin(stored_bytes(torch.eye(2), container)))
    file = open_file("-")
    assert file.source == "-"
    assert list(tmp_path.iterdir()) == []
    assert file.read().source == "-"
    assert as_torch(file.read()).tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("container", ["npz", "safetensors", "pt"])
def test_standard_input_named_twice(monkeypatch: pytest.MonkeyPatch, container: str) -> None:
    q, k = np.arange(3.0), np.ones((2, 2))
    header = {"q": build.entry("F64", [3], 0, 24), "k": build.entry("F64", [2, 2], 24, 56)}
    data = {
        "npz": build.npz(q=q, k=k),
        "safetensors": build.safetensors(header, q.tobytes() + k.tobytes()),
        "pt": build.torch_file({name: torch_tensor(a) for name, a in (("q", q), ("k", k))}),
    }[container]
    monkeypatch.setattr(sys, "stdin", Stdin(data))
    assert np.array_equal(read_one("-::q", "--q")[0].array, q)
    assert np.array_equal(read_one("-::k", "--k")[0].array, k)
    assert np.array_equal(read_one("-::q", "--v")[0].array, q)
    # Another standard input is another file.
    monkeypatch.setattr(sys, "stdin", Stdin(build.npy(k)))
    assert np.array_equal(open_file("-").read().array, k)
    assert np.array_equal(open_file("-").read().array, k)


def torch_tensor(array: np.ndarray):  # type: ignore[no-untyped-def]
    import torch

    return torch.from_numpy(array)


def test_standard_input_that_is_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", Stdin(b""))
    with pytest.raises(DataError, match=r"^standard input: expected .* got an empty file"):
        open_file("-")
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(DataError, match=r"^standard input: expected .* got no standard input"):
        open_file("-")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_pipes(tmp_path: Path) -> None:
    named = tmp_path / "pipe"
    os.mkfifo(named)
    data = build.npz(q=np.ones(200_000))
    writer = threading.Thread(target=named.write_bytes, args=(data,))
    writer.start()
    file = open_file(str(named))
    writer.join()
    assert file.read("q").array.sum() == 200_000


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="no /dev/fd here")
def test_process_substitution() -> None:
    read, write = os.pipe()
    with os.fdopen(read), os.fdopen(write, "wb") as stream:
        stream.write(build.npy(np.ones(3)))
        stream.close()
        assert open_file(f"/dev/fd/{read}").read().array.tolist() == [1, 1, 1]


def test_a_large_file_is_mapped_and_not_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse.npy"
    text = "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000, 1000000)}"
    header = build.npy_header(text.ljust(118))
    path.write_bytes(header)
    os.truncate(path, len(header) + 4 * 10**12)
    stored = open_file(str(path)).read()
    assert stored.array[999_999, 999_999] == 0
    assert as_torch(stored)[-1, -1] == 0


def test_npy_and_safetensors_need_no_torch(put: Put) -> None:
    import torch

    paths = [put(name, stored_bytes(torch.eye(2), name)) for name in ("npy", "npz", "safetensors")]
    program = (
        "import sys, attncli.files.roles, attncli.files.writer\n"
        "from attncli.files.reader import open_file\n"
        "from attncli.files.tensor import as_float\n"
        "assert all(as_float(open_file(p).read()).sum() == 2 for p in sys.argv[1:])\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program, *paths], check=True)
