"""Every broken file gets its own line: what was expected, what was there, nothing more."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import pickle
import socket
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import file_builders as build
import numpy as np
import pytest

from attncli import limits
from attncli.errors import AttncliError, DataError, ResourceError
from attncli.files.reader import open_file

Put = Callable[[str, bytes], str]

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)
NPY = build.npy(ROWS)
ACCEPTED = "expected a .npy, .npz, .safetensors or .pt file, got "
F32 = build.entry("F32", [2], 0, 8)
FIRST, SECOND = (json.dumps(build.entry("F32", [2], at, at + 8)).encode() for at in (0, 8))

# name, bytes, what the line says after the name, what the advice says
BROKEN: list[tuple[str, bytes, str, str]] = [
    ("empty.npy", b"", ACCEPTED + "an empty file", ""),
    ("magic.npy", NPY[:4], "expected a complete .npy header, got a file cut short", ""),
    ("nine.npy", NPY[:9], "expected a complete .npy header, got a file cut short", ""),
    ("head.npy", NPY[:60], "expected a complete .npy header, got a file cut short", ""),
    (
        "data.npy",
        NPY[:-5],
        "expected 48 bytes for shape (4, 3) of float32, got 43",
        "The file is cut short: copy or write it again.",
    ),
    (
        "huge.npy",
        build.npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000, 1000000)}"),
        "expected 4,000,000,000,000 bytes for shape (1000000, 1000000) of float32, got 0",
        "cut short",
    ),
    (
        "absurd.npy",
        build.npy_header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({10**30},)}}"),
        f"expected a shape that can be held, got ({10**30},)",
        "",
    ),
    (
        "absurd-empty.npy",
        build.npy_header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': (0, {10**30})}}"),
        f"expected a shape that can be held, got (0, {10**30})",
        "",
    ),
    ("version.npy", b"\x93NUMPY\x07\x00" + NPY[8:], "expected .npy version 1, 2 or 3, got 7.0", ""),
    ("garbage.npy", build.npy_header("os.system('ls')"), "expected a .npy header, got damaged", ""),
    ("deep.npy", build.npy_header("(" * 9000), "expected a .npy header, got damaged", ""),
    ("minus.npy", build.npy_header("-" * 9000 + "1"), "expected a .npy header, got damaged", ""),
    ("escape.npy", build.npy_header(r"'\d'"), "expected a .npy header, got damaged data", ""),
    ("list.npy", build.npy_header("[1]"), "expected a .npy header, got damaged data", ""),
    (
        "negative.npy",
        build.npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}"),
        "expected a .npy header, got damaged data in its place",
        "",
    ),
    (
        "descr.npy",
        build.npy_header("{'descr': '<q9', 'fortran_order': False, 'shape': (1,)}"),
        "expected a .npy header, got damaged data in its place",
        "",
    ),
    (
        "long.npy",
        b"\x93NUMPY\x02\x00" + (2**31).to_bytes(4, "little") + bytes(20_000),
        "expected a .npy header below 10 kB, got a longer one",
        "",
    ),
    (
        "promise.npy",
        b"\x93NUMPY\x02\x00" + (2**31).to_bytes(4, "little"),
        "expected a complete .npy header, got a file cut short",
        "",
    ),
    ("text.npy", b"0.1 0.2\n0.3 0.4\n", ACCEPTED + "a text file", ""),
    ("csv.npz", b"a,b\n1,2\n", ACCEPTED + "a CSV file", "numpy.save"),
    ("page.pt", b"\n<!DOCTYPE html><html></html>", ACCEPTED + "an HTML page", "download it again"),
    ("feed.npy", b"<?xml version='1.0'?>", ACCEPTED + "an XML document", ""),
    ("config.safetensors", b'{"hidden_size": 384}', ACCEPTED + "a JSON document", ""),
    ("utf16.npy", "1 2".encode("utf-16"), ACCEPTED + "a text file", ""),
    (
        "model.safetensors",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        ACCEPTED + "a git-lfs pointer",
        "git lfs pull",
    ),
    ("q.npy.gz", gzip.compress(NPY), ACCEPTED + "gzip-compressed data", "Decompress it first."),
    ("q.zst", b"\x28\xb5\x2f\xfd1234", ACCEPTED + "zstd-compressed data", "Decompress it first."),
    ("q.tar", b"q.npy".ljust(257, b"\0") + b"ustar\0", ACCEPTED + "a tar archive", "Unpack it"),
    ("m.gguf", b"GGUF\x03\0\0\0", ACCEPTED + "a GGUF model", "Export the tensors"),
    ("m.h5", b"\x89HDF\r\n\x1a\n\0", ACCEPTED + "an HDF5 file", "Export the tensors"),
    ("m.parquet", b"PAR1\x15", ACCEPTED + "a Parquet file", "Export the tensors"),
    ("zeros.npy", bytes(64), ACCEPTED + "nothing but zero bytes", "again"),
    (
        "noise.npy",
        b"\xf0\x9f\x01\x02\x03\x04\x05\x06\x07",
        ACCEPTED + "unknown data that starts with the bytes f0 9f 01 02 03 04 05 06",
        "",
    ),
    ("ansi.npy", b"\x1b[31mred\x1b[0m\n", ACCEPTED + "a text file", ""),
    ("old.pkl", pickle.dumps([1], 0), ACCEPTED + "a Python pickle", "save with numpy.save"),
    ("new.pkl", pickle.dumps([1.5], 4), ACCEPTED + "a Python pickle", "save with numpy.save"),
    ("none.zip", build.archive({}), ACCEPTED + "an empty zip archive", ""),
    (
        "doc.docx",
        build.archive({"a\x1b[31m.xml": b"", "b": b"", "c": b"", "d": b""}),
        ACCEPTED + r"a zip archive of a\x1b[31m.xml, b, c and 1 more",
        "",
    ),
    (
        "cut.npz",
        build.npz(q=ROWS)[:-30],
        "expected a complete .npz or .pt archive, got a damaged zip archive",
        "copy or write it again",
    ),
    ("bare.zip", b"PK\x03\x04", "expected a complete .npz or .pt archive, got a damaged", ""),
    (
        "twice.npz",
        build.twice("q.npy", NPY),
        "expected each name once, got q.npy more than once",
        "",
    ),
    (
        "secret.npz",
        build.flagged(build.npz(q=ROWS), 1),
        "expected a plain archive, got an encrypted member q.npy",
        "password",
    ),
    (
        "fake.npz",
        build.archive({"q.npy": b"hello"}),
        "::q: expected a .npy array, got something else under that name",
        "",
    ),
    (
        "short.npz",
        build.archive({"q.npy": NPY[:-4]}),
        "::q: expected 48 bytes for shape (4, 3) of float32, got 44",
        "cut short",
    ),
    (
        "script.pt",
        build.archive({"m/data.pkl": b"", "m/constants.pkl": b"", "m/code/m.py": b""}),
        "expected a torch file of tensors, got TorchScript code",
        "state_dict",
    ),
    (
        "broken.pt",
        build.archive({"m/data.pkl": b"\x80\x02}", "m/version": b"3"}),
        "expected a torch file that can be read, got a damaged or unsupported one",
        "Copy or write it again with torch.save.",
    ),
    ("h.safetensors", build.safetensors(b"{{}}"), "expected a safetensors header, got dam", ""),
    ("deep.safetensors", build.safetensors(b'{"a":' * 200_000), "expected a safetensors head", ""),
    (
        "cut.safetensors",
        build.safetensors({"q": F32}, bytes(8))[:30],
        "expected a complete safetensors header, got a file cut short",
        "cut short",
    ),
    (
        "data.safetensors",
        build.safetensors({"q": F32}, bytes(7)),
        "expected tensors that fill the file, got too few bytes or too many",
        "cut short",
    ),
    (
        "more.safetensors",
        build.safetensors({"q": F32}, bytes(9)),
        "expected tensors that fill the file, got too few bytes or too many",
        "copy or download it again",
    ),
    (
        "long.safetensors",
        (10**11).to_bytes(8, "little") + b"{}",
        "expected a safetensors header below 100 MB, got a larger one",
        "",
    ),
    (
        "overlap.safetensors",
        build.safetensors({"q": F32, "k": build.entry("F32", [2], 4, 12)}, bytes(12)),
        "expected tensors side by side, got overlapping data or a gap at k",
        "",
    ),
    (
        "gap.safetensors",
        build.safetensors({"q": build.entry("F32", [2], 4, 12)}, bytes(12)),
        "expected tensors side by side, got overlapping data or a gap at q",
        "",
    ),
    (
        "size.safetensors",
        build.safetensors({"q\n": build.entry("F32", [3], 0, 8)}, bytes(8)),
        "expected as many bytes as shape and element type need, got more or fewer",
        "",
    ),
    (
        "twice.safetensors",
        build.safetensors(b'{"q":%b,"q":%b}' % (FIRST, SECOND), bytes(16)),
        "expected tensors side by side, got overlapping data or a gap at q",
        "",
    ),
    ("entry.safetensors", build.safetensors({"q": 3}), "expected a safetensors header", ""),
    (
        "backwards.safetensors",
        build.safetensors({"q\n": build.entry("F32", [0], 8, 0)}, bytes(8)),
        r"expected tensors side by side, got overlapping data or a gap at q\n",
        "",
    ),
    (
        "type.safetensors",
        build.safetensors({"q": build.entry("F3", [2], 0, 8)}, bytes(8)),
        "expected element types that safetensors has, got another",
        "newer version",
    ),
    (
        "axes.safetensors",
        build.safetensors({"q": build.entry("F32", [1] * 70 + [2], 0, 8)}, bytes(8)),
        "::q: expected a shape that can be held, got (1, 1, ",
        "",
    ),
    ("none.safetensors", build.safetensors({}), "expected tensors, got a file that holds none", ""),
    (
        "meta.safetensors",
        build.safetensors({"__metadata__": {"attncli": "{oops"}, "q": F32}, bytes(8)),
        "expected metadata 'attncli' as JSON (group → options), got something else",
        "",
    ),
    (
        "meta-list.safetensors",
        build.safetensors({"__metadata__": {"attncli": '{"": [NaN]}'}, "q": F32}, bytes(8)),
        "expected metadata 'attncli' as JSON (group → options), got something else",
        "",
    ),
]


# Named by the file alone: some of the bytes hold the time of day.
@pytest.mark.parametrize(("name", "data", "line", "advice"), BROKEN, ids=[one[0] for one in BROKEN])
def test_each_broken_file_has_its_own_line(
    put: Put, name: str, data: bytes, line: str, advice: str
) -> None:
    path = put(name, data)
    with pytest.raises(DataError) as caught:
        open_file(path)
    assert str(caught.value).startswith(path)
    assert line in str(caught.value)
    assert advice in caught.value.advice
    build.assert_fit_to_print(caught.value)


# array, what the line says when it is read
STRANGE: list[tuple[np.ndarray, str]] = [
    (np.array([None, {}], dtype=object), "got object"),
    (np.array(["abc"]), "got <U3"),
    (np.array([b"abc"]), "got |S3"),
    (np.zeros(2, [("a", "f4"), ("b", "i4")]), "got structured"),
    (np.zeros(2, np.complex64), "got complex64"),
    (np.zeros(2, "M8[ns]"), "got datetime64[ns]"),
    (np.zeros(2, "m8[s]"), "got timedelta64[s]"),
    (np.zeros(2, "V4"), "got |V4"),
]


@pytest.mark.parametrize(("array", "line"), STRANGE, ids=lambda v: str(v)[-12:])
def test_other_element_types_are_refused_on_reading(put: Put, array: np.ndarray, line: str) -> None:
    data = build.npy(array, allow_pickle=True)
    for file in (put("a.npy", data), put("a.npz", build.archive({"x.npy": data}))):
        opened = open_file(file)
        assert opened.headers[0].shape == array.shape
        with pytest.raises(DataError, match="expected float16, bfloat16, float32") as caught:
            opened.read()
        assert line in str(caught.value)
        build.assert_fit_to_print(caught.value)


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="no wider float here")
def test_extended_precision_is_refused(put: Put) -> None:
    file = open_file(put("a.npy", build.npy(np.zeros(2, np.longdouble))))
    with pytest.raises(DataError, match="got float"):
        file.read()


def test_safetensors_of_unknown_or_complex_elements_are_refused_on_reading(put: Put) -> None:
    header = {"a": build.entry("F4", [4], 0, 2), "b": build.entry("C64", [1], 2, 10)}
    file = open_file(put("a.safetensors", build.safetensors(header, bytes(10))))
    assert [tensor.dtype for tensor in file.headers] == ["F4", "complex64"]
    for name in ("a", "b"):
        with pytest.raises(DataError, match=f"::{name}: expected float16"):
            file.read(name)


def test_absent_file_and_a_near_name(put: Put, tmp_path: Path) -> None:
    put("query.npy", NPY)
    with pytest.raises(DataError, match="expected a file, got no file of this name") as caught:
        open_file(str(tmp_path / "qurey.npy"))
    assert caught.value.advice == f"Did you mean {tmp_path / 'query.npy'}?"
    with pytest.raises(DataError) as caught:
        open_file(str(tmp_path / "none" / "q.npy"))
    assert caught.value.advice == f"There is no folder {tmp_path / 'none'} either."


@pytest.mark.parametrize("name", ["a\x1b[31m\n.npy", "a" * 5000, "\udcff", "a\0b"])
def test_strange_names_are_safe_to_print(name: str) -> None:
    with pytest.raises(DataError) as caught:
        open_file(name)
    build.assert_fit_to_print(caught.value)


def test_directory_device_and_socket(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected files of tensors .* in it, got none"):
        open_file(str(tmp_path))
    with pytest.raises(DataError, match="got a device or a socket"):
        open_file(os.devnull)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        with pytest.raises(DataError, match="got a device or a socket"):
            open_file(str(tmp_path / "s"))


def test_permission_denied(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put("q.npy", NPY)

    def refuse(self: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied")

    # Who runs the tests may be allowed everything.
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match="a file that can be read, got permission denied"):
        open_file(path)


def test_a_member_of_damaged_bytes_is_told_by_its_checksum(put: Put) -> None:
    large = np.arange(50_000.0)
    data = bytearray(build.npz(q=large, k=large))
    data[data.index(large[-3:].tobytes())] ^= 1
    file = open_file(put("a.npz", bytes(data)))
    assert np.array_equal(file.read("k").array, large)
    with pytest.raises(DataError, match="::q: expected intact data, got a damaged archive member"):
        file.read("q")


def test_a_deflated_bomb_is_refused_before_it_expands(
    put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = build.npy(np.zeros(1_000_000))
    file = open_file(put("a.npz", build.archive({"q.npy": member}, zipfile.ZIP_DEFLATED)))
    monkeypatch.setattr(limits, "available_memory", lambda: 1_000_000)
    with pytest.raises(ResourceError, match=r"::?.*at most 1.0 MB of memory, got 8.0 MB"):
        file.read("q")


def test_missing_tensor_names_those_present(put: Put) -> None:
    file = open_file(put("a.npz", build.npz(q=ROWS, k=ROWS)))
    with pytest.raises(DataError, match="expected a tensor named w, got q, k"):
        file.read("w")
    with pytest.raises(DataError, match="expected one tensor, got q, k"):
        file.read()


@pytest.mark.parametrize("kind", ["npy", "npz", "pt", "legacy.pt", "pkl"])
def test_nothing_in_a_file_is_executed(put: Put, tmp_path: Path, kind: str) -> None:
    trap = build.Trap(tmp_path / "sprung")
    objects = build.npy(np.array([trap], dtype=object), allow_pickle=True)
    data = {
        "npy": objects,
        "npz": build.archive({"q.npy": objects}),
        "pt": build.torch_file({"q": trap}),
        "legacy.pt": build.torch_file({"q": trap}, legacy=True),
        "pkl": pickle.dumps(trap),
    }[kind]
    with pytest.raises(DataError) as caught:
        open_file(put(f"a.{kind}", data)).read()
    build.assert_fit_to_print(caught.value)
    assert caught.value.__cause__ is None or "weights_only" not in str(caught.value.__cause__)
    assert not trap.path.exists()
    pickle.loads(pickle.dumps(trap))
    assert stat.S_ISDIR(trap.path.stat().st_mode), "the trap itself must work"


def test_members_compressed_in_a_way_that_nothing_here_reads(put: Put) -> None:
    data = bytearray(build.npz(q=ROWS))
    at = data.index(b"PK\x01\x02") + 10
    data[at : at + 2] = (93).to_bytes(2, "little")  # zstd
    with pytest.raises(DataError, match=r"got q\.npy compressed otherwise"):
        open_file(put("a.npz", bytes(data)))


@pytest.mark.parametrize(
    ("number", "kind", "line"),
    [
        (errno.ENOSPC, ResourceError, "standard input: expected room for a copy in "),
        (errno.EIO, DataError, f"standard input: {ACCEPTED.rstrip()}: Input/output error"),
    ],
)
def test_standard_input_that_cannot_be_copied(
    monkeypatch: pytest.MonkeyPatch, number: int, kind: type[AttncliError], line: str
) -> None:
    class Broken(io.BytesIO):
        def read(self, _: int | None = None) -> bytes:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=Broken()))
    with pytest.raises(kind) as caught:
        open_file("-")
    assert str(caught.value).startswith(line)


def test_standard_input_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace())
    with pytest.raises(DataError, match="got no standard input"):
        open_file("-")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=SimpleNamespace(isatty=lambda: True)))
    with pytest.raises(DataError, match="got a terminal"):
        open_file("-")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(NPY)))
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    with pytest.raises(ResourceError, match="expected a folder for temporary files, got none"):
        open_file("-")


def test_endless_nesting_in_a_torch_file(put: Put) -> None:
    endless: list[object] = []
    endless.append(endless)
    bomb: list[object] = []
    for _ in range(40):
        bomb = [bomb, bomb]
    for value in (endless, bomb):
        with pytest.raises(DataError, match="endless nesting"):
            open_file(put("a.pt", build.torch_file(value)))


def test_complex_torch_tensors(put: Put) -> None:
    import torch

    file = open_file(put("a.pt", build.torch_file({"complex": torch.eye(2) * 1j})))
    with pytest.raises(DataError, match=r"a\.pt: expected float16.*, got complex64"):
        file.read()


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("kind", build.OTHER_KINDS)
def test_what_is_no_dense_tensor_is_named_and_the_rest_is_read(
    put: Put, kind: str, legacy: bool
) -> None:
    import torch

    name = build.OTHER_KINDS[kind]
    value = build.other_kind(kind)
    if legacy and kind in build.NOT_IN_OLD_FILES:
        return
    file = open_file(put("a.pt", build.torch_file({"other": value, "k": torch.eye(2)}, legacy)))
    assert [header.name for header in file.headers] == ["k"]
    assert np.array_equal(file.read("k").array, np.eye(2))
    assert file.warnings == [f"{file.source}: left out as no dense tensor: other ({name})"]
    with pytest.raises(DataError, match=r"a\.pt::other: expected a dense tensor, got ") as caught:
        file.read("other")
    assert caught.value.problem.endswith(f", got {name}")
    alone = put("a.pt", build.torch_file(value, legacy))
    with pytest.raises(DataError) as whole:
        open_file(alone)
    assert whole.value.problem == f"expected dense tensors, got a torch file of {name}"
    for error in (caught.value, whole.value):
        build.assert_fit_to_print(error)
        assert error.advice
        assert "torch.save" not in error.advice


def test_a_pickle_protocol_that_torch_does_not_read_back(put: Put) -> None:
    import torch

    for legacy in (False, True):
        stream = io.BytesIO()
        new = not legacy
        torch.save(
            {"q": torch.eye(2)},
            stream,
            pickle_protocol=4,
            _use_new_zipfile_serialization=new,
        )
        with pytest.raises(DataError, match="got one of protocol 4") as caught:
            open_file(put("a.pt", stream.getvalue()))
        assert caught.value.advice == "Save it without pickle_protocol."


def test_torch_names_that_collide(put: Put) -> None:
    import torch

    value = {"a.b": torch.eye(2), "a": {"b": torch.eye(2)}}
    with pytest.raises(DataError, match=r"expected each name once, got a\.b twice"):
        open_file(put("a.pt", build.torch_file(value)))


def test_torch_file_without_tensors(put: Put) -> None:
    with pytest.raises(DataError, match="expected tensors, got a torch file without any"):
        open_file(put("a.pt", build.torch_file({"n": 3, "s": "text", "l": list(range(10))})))


def test_metadata_must_be_json_objects(put: Put) -> None:
    for text in ("3", "[]", json.dumps({"": 3}), "[" * 100_000):
        header = {"__metadata__": {"attncli": text}, "q": F32}
        with pytest.raises(AttncliError, match="group → options"):
            open_file(put("a.safetensors", build.safetensors(header, bytes(8))))


def test_lengths_below_0_beside_one_of_0_in_a_torch_file(put: Put) -> None:
    import torch

    data = build.torch_file({"q": torch.empty(0, 77), "k": torch.eye(2)})
    shape, wrong = b"K\0KM\x86", b"K\0J\xfc\xff\xff\xff\x86"  # (0, 77) and (0, -4)
    with zipfile.ZipFile(io.BytesIO(data)) as packed:
        members = {name: packed.read(name) for name in packed.namelist()}
    (pickled,) = (name for name in members if name.endswith("data.pkl"))
    assert shape in members[pickled]
    members[pickled] = members[pickled].replace(shape, wrong)
    with pytest.raises(DataError, match=r"::q: expected a shape that can be held, got \(0, -4\)"):
        open_file(put("a.pt", build.archive(members)))


def test_empty_arrays_of_endless_lengths(put: Put) -> None:
    """NumPy holds them as they are, and fails where they are converted."""
    text = f"{{'descr': '|i1', 'fortran_order': False, 'shape': ({2**62}, 0)}}"
    header = {"q": build.entry("I8", [2**62, 0], 0, 0)}
    files = put("a.npy", build.npy_header(text)), put("a.st", build.safetensors(header))
    for file in files:
        with pytest.raises(DataError, match=f"shape that can be held, got .{2**62}, 0"):
            open_file(file)


def test_a_member_whose_shape_holds_true_for_1(put: Put) -> None:
    text = "{'descr': '<f4', 'fortran_order': True, 'shape': (2, True)}"
    member = build.npy_header(text) + ROWS[0, :2].tobytes()
    file = open_file(put("a.npz", build.archive({"q.npy": member})))
    assert file.read().array.tolist() == [[0], [1]]


def promising(data: bytes, size: int) -> bytes:
    """An archive whose directory says another size of its first member, unpacked."""
    at = data.index(b"PK\x01\x02") + 24
    return data[:at] + size.to_bytes(4, "little") + data[at + 4 :]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_sizes_that_no_member_can_have(put: Put, method: int) -> None:
    """Readers take memory for what the directory says: 4 GB for a file of a few hundred bytes."""
    import torch

    with zipfile.ZipFile(io.BytesIO(build.torch_file(torch.eye(2)))) as packed:
        members = {name: packed.read(name) for name in packed.namelist()}
    for data in (build.archive(members, method), build.archive({"q.npy": NPY}, method)):
        open_file(put("a", data)).read()
        with pytest.raises(DataError, match="expected intact data, got a damaged archive member"):
            open_file(put("a", promising(data, 2**32 - 2)))


def test_members_that_share_their_bytes(put: Put) -> None:
    """As bombs do, which are larger than all that is on the disk by far."""
    data = build.archive(dict.fromkeys(("a.npy", "b.npy", "c.npy"), NPY * 9))
    start = data.index(b"PK\x01\x02")
    second = data.index(b"b.npy") - 30
    shared = data[:second] + data[start:]
    moved = shared.replace(data[-6:-2], second.to_bytes(4, "little"))
    with pytest.raises(DataError, match="damaged archive member"):
        open_file(put("a.npz", moved))


def test_a_torch_file_compressed_as_torch_does_not_read(put: Put) -> None:
    import torch

    with zipfile.ZipFile(io.BytesIO(build.torch_file(torch.eye(2)))) as packed:
        members = {name: packed.read(name) for name in packed.namelist()}
    with pytest.raises(DataError, match="expected stored or deflated members") as caught:
        open_file(put("a.pt", build.archive(members, zipfile.ZIP_LZMA)))
    assert "torch.save" in caught.value.advice


def test_a_member_that_asks_for_more_memory_than_there_is(
    put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = open_file(put("a.npz", build.npz(q=ROWS)))

    def refuse(*_: object) -> bytes:
        raise MemoryError

    monkeypatch.setattr(zipfile.ZipExtFile, "read", refuse)
    with pytest.raises(ResourceError, match="needs more memory to be decompressed"):
        file.read()


def test_an_expanded_tensor_that_memory_does_not_hold(
    put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    file = open_file(put("a.pt", build.torch_file({"q": torch.ones(1).expand(1000, 1000)})))
    assert file.read().array.shape == (1000, 1000)
    monkeypatch.setattr(limits, "available_memory", lambda: 1_000_000)
    with pytest.raises(ResourceError, match=r"at most 1\.0 MB of memory, got 4\.0 MB"):
        file.read()
