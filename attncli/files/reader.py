"""Open a file of tensors: the one way in."""

from __future__ import annotations

import sys
from pathlib import Path
from weakref import WeakKeyDictionary

from attncli.errors import DataError
from attncli.files.archive import open_archive
from attncli.files.container import TensorFile
from attncli.files.npy import open_npy
from attncli.files.safetensorsfile import open_safetensors
from attncli.files.sniff import HEAD, format_of
from attncli.files.source import local_file
from attncli.files.text import place
from attncli.files.torchfile import open_torch

__all__ = ["TensorFile", "open_file"]

# What came through standard input can be asked for again: `--q -::q --k -::k`.
_STANDARD_INPUT: WeakKeyDictionary[object, TensorFile] = WeakKeyDictionary()


def open_file(name: str) -> TensorFile:
    """Open a .npy, .npz, .safetensors or .pt file, told apart by content.

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
        file = _open(local, name)
    if not file.headers:
        raise DataError(place(name), "expected tensors, got a file that holds none")
    if name == "-":
        _STANDARD_INPUT[sys.stdin] = file
    return file


def _open(local: Path, name: str) -> TensorFile:
    with local.open("rb") as stream:
        kind = format_of(stream.read(HEAD), place(name))
    if kind == "npy":
        return open_npy(local, name)
    if kind == "zip":
        return open_archive(local, name)
    if kind == "safetensors":
        return open_safetensors(local, name)
    return open_torch(local, name, mapped=False)
