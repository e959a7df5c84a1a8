"""Files of every kind, sound and broken, as bytes."""

from __future__ import annotations

import io
import json
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from attncli.errors import AttncliError


def npy(array: np.ndarray, allow_pickle: bool = False) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=allow_pickle)
    return stream.getvalue()


def npy_header(text: str) -> bytes:
    """A version 1 file with whatever stands in the place of the header's dictionary."""
    data = text.encode("latin-1")
    return b"\x93NUMPY\x01\x00" + len(data).to_bytes(2, "little") + data


def archive(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return stream.getvalue()


def npz(**arrays: np.ndarray) -> bytes:
    return archive({f"{name}.npy": npy(array) for name, array in arrays.items()})


def twice(name: str, data: bytes) -> bytes:
    """An archive in which two members share a name."""
    stream = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(stream, "w") as file:
        warnings.simplefilter("ignore")
        file.writestr(name, data)
        file.writestr(name, data)
    return stream.getvalue()


def flagged(data: bytes, flag: int) -> bytes:
    """An archive of one member with a flag set in both of its headers."""
    changed = bytearray(data)
    changed[6] |= flag
    changed[data.index(b"PK\x01\x02") + 8] |= flag
    return bytes(changed)


def safetensors(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def torch_file(value: object, legacy: bool = False) -> bytes:
    import torch

    stream = io.BytesIO()
    torch.save(value, stream, _use_new_zipfile_serialization=not legacy)
    return stream.getvalue()


class Trap:
    """An object whose unpickling makes a file at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def assert_fit_to_print(error: AttncliError) -> None:
    """One line of problem, at most one of advice, nothing a terminal would obey."""
    for line in (str(error), error.advice):
        assert line.isprintable(), repr(line)
        assert len(line) < 600, line
        assert "weights_only" not in line
        assert "allow_pickle" not in line
    assert ": " in str(error)
