"""Open a file of tensors: the one way in. What it is, its first bytes tell, never its name."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from weakref import WeakKeyDictionary

from attncli.errors import DataError
from attncli.files.archive import archive_format, open_npz
from attncli.files.container import TensorFile
from attncli.files.npy import open_npy
from attncli.files.safetensorsfile import open_safetensors
from attncli.files.shards import is_index, open_index
from attncli.files.source import local_file
from attncli.files.text import ACCEPTED, place

__all__ = ["TensorFile", "open_file"]

_HEAD = 4096
_TORCH_LEGACY = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_DECOMPRESS = "Decompress it first."
_UNPACK = "Unpack it first."
_PICKLE = "Pickles are never loaded, since loading one can run code: save with numpy.save instead."
_EXPORT = "Export the tensors to one of these formats first."

# What people mistake for a file of tensors: (where, the bytes there, what it is, advice)
_MAGICS: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"\x1f\x8b", "gzip-compressed data", _DECOMPRESS),
    (0, b"\x28\xb5\x2f\xfd", "zstd-compressed data", _DECOMPRESS),
    (0, b"\xfd7zXZ\0", "xz-compressed data", _DECOMPRESS),
    (0, b"BZh", "bzip2-compressed data", _DECOMPRESS),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (257, b"ustar", "a tar archive", _UNPACK),
    (0, b"GGUF", "a GGUF model", _EXPORT),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file", _EXPORT),
    (0, b"PAR1", "a Parquet file", _EXPORT),
    (0, b"ARROW1", "an Arrow file", _EXPORT),
    (0, b"MATLAB 5.0", "a MATLAB file", _EXPORT),
)
_TEXT_PICKLES = ("(dp", "(lp", "cnumpy", "c__builtin__", "ccopy_reg", "cposix", "cos\n")

# What came through standard input can be asked for again: `--q -::q --k -::k`.
_STANDARD_INPUT: WeakKeyDictionary[object, TensorFile] = WeakKeyDictionary()


def open_file(name: str) -> TensorFile:
    """Open a .npy, .npz, .safetensors or .pt file, or an index of shards, told by content.

    Only headers are read; nothing in the file is ever executed.

    Args:
        name: a path, a pipe, or "-" for standard input, which is read once for all calls.

    Raises:
        DataError: the file is absent, unreadable, damaged, or of another format.
        ResourceError: memory or disk do not suffice.
    """
    if name == "-" and sys.stdin in _STANDARD_INPUT:
        return _STANDARD_INPUT[sys.stdin]
    with local_file(name) as local:
        file = _READERS[_format_of(local, place(name))](local, name)
    if not file.headers:
        raise DataError(place(name), "expected tensors, got a file that holds none")
    if name == "-":
        _STANDARD_INPUT[sys.stdin] = file
    return file


def _open_torch(local: Path, source: str) -> TensorFile:
    """Open a .pt file, the one kind for which torch is loaded: `mask` and `inspect` do without."""
    file: TensorFile = import_module("attncli.files.torch_tensors").open_torch(local, source)
    return file


def _open_index(local: Path, source: str) -> TensorFile:
    """Open the shards that an index names; none of them may be an index in turn."""

    def open_shard(name: str) -> TensorFile:
        with local_file(name) as shard:
            kind = _format_of(shard, place(name))
            if kind == "index":
                raise DataError(place(name), "expected a shard, got another index")
            return _READERS[kind](shard, name)

    return open_index(local, source, open_shard)


_READERS: dict[str, Callable[[Path, str], TensorFile]] = {
    "npy": open_npy,
    "npz": open_npz,
    "safetensors": open_safetensors,
    "pt": _open_torch,
    "index": _open_index,
}


def _format_of(local: Path, where: str) -> str:
    """A name of `_READERS`: the format that a file begins like.

    Raises:
        DataError: the file is empty or of no accepted format; says what it is instead.
    """
    with local.open("rb") as stream:
        head = stream.read(_HEAD)
    if not head:
        raise DataError(where, f"expected {ACCEPTED}, got an empty file")
    if head.startswith(b"\x93NUMPY"[: len(head)]):
        return "npy"
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return archive_format(local, where)
    if head[8:9] == b"{" and head[5:8] == b"\0\0\0":
        return "safetensors"
    if _TORCH_LEGACY in head[:24] and head.startswith(b"\x80"):
        return "pt"
    if head.lstrip().startswith(b"{") and is_index(local):
        return "index"
    what, advice = _stranger(head)
    raise DataError(where, f"expected {ACCEPTED}, got {what}", advice)


def _stranger(head: bytes) -> tuple[str, str]:
    """What an unaccepted file is, and what to do about it."""
    for offset, magic, what, advice in _MAGICS:
        if head.startswith(magic, offset):
            return what, advice
    if len(head) > 1 and head[0] == 0x80 and 1 <= head[1] <= 5:
        return "a Python pickle", _PICKLE
    text = _as_text(head)
    if text is not None:
        return _text_kind(text)
    if not head.strip(b"\0"):
        return "nothing but zero bytes", "Copy or download the file again."
    return f"unknown data that starts with the bytes {head[:8].hex(' ')}", ""


def _as_text(head: bytes) -> str | None:
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return head.decode("utf-16", errors="replace")
    try:
        # The head may end inside a character.
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(head)
    except UnicodeDecodeError:
        return None
    return text if all(c.isprintable() or c in "\t\r\n\f\x1b" for c in text) else None


def _text_kind(text: str) -> tuple[str, str]:
    start = text.lstrip().lower()
    if start.startswith("version https://git-lfs.github.com/spec/"):
        return "a git-lfs pointer", "Fetch the data that it stands for: git lfs pull."
    if start.startswith(("<!doctype html", "<html", "<head")):
        return "an HTML page", "A download that went wrong often leaves one: download it again."
    if start.startswith("<"):
        return "an XML document", ""
    if start.startswith(_TEXT_PICKLES):
        return "a Python pickle", _PICKLE
    if start.startswith(("{", "[")):
        return "a JSON document", ""
    lines = text.splitlines()
    if lines and all(line.count(",") == lines[0].count(",") > 0 for line in lines[:2]):
        return "a CSV file", "Save the numbers with numpy.save first."
    return "a text file", ""
