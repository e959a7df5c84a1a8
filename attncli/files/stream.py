"""A safetensors file written tensor by tensor, as they come, whose header is known in the end."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from attncli.files.safetensorsfile import OPTIONS_KEY
from attncli.files.target import seekable_path, told
from attncli.files.tensor import BY_NAME

# Kept free before the data; a header of another size moves them, unless they are many.
_ROOM = 1 << 20
_MOVED_AT_MOST = 64 << 20
_PART = 1 << 22


class _Abandoned(Exception):  # noqa: N818 - no error: it takes the file back, and goes no further
    """Ends the writing of a file that is not to appear."""


class TensorStream:
    """A safetensors file that appears whole on `finish`, and never if that is not reached.

    Args:
        target: the place as the user named it.

    Entering the context raises:
        DataError: the place cannot be written.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.size = 0
        self._entries: dict[str, dict[str, Any]] = {}
        self._stack = contextlib.ExitStack()
        self._file: BinaryIO

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            path = stack.enter_context(seekable_path(Path(self.target)))
            self._file = stack.enter_context(path.open("r+b", buffering=0))
            self._file.seek(8 + _ROOM)
            self._stack = stack.pop_all()
        return self

    def write(
        self, key: str, shape: tuple[int, ...], dtype: str, parts: Iterable[NDArray[Any]]
    ) -> None:
        """Append a tensor.

        Args:
            key: what `finish` names it by.
            shape: lengths of its axes.
            dtype: torch's name of its element type.
            parts: its data in order, bit patterns where NumPy lacks the type.

        Raises:
            ResourceError: the disk is full.
        """
        start = self.size
        for part in parts:
            self._put(np.ascontiguousarray(part).reshape(-1).view(np.uint8))
            self.size += part.nbytes
        code, offsets = BY_NAME[dtype].code, [start, self.size]
        self._entries[key] = {"dtype": code, "shape": shape, "data_offsets": offsets}

    def finish(self, names: Mapping[str, str], metadata: Mapping[str, Any]) -> None:
        """Write the header and let the file appear.

        Args:
            names: key → the tensor's name in the file.
            metadata: group → options.

        Raises:
            ResourceError: the disk is full.
        """
        header: dict[str, Any] = {"__metadata__": {OPTIONS_KEY: json.dumps(metadata)}}
        header |= {names[key]: entry for key, entry in self._entries.items()}
        text = json.dumps(header, separators=(",", ":")).encode()
        room = len(text) + -len(text) % 8
        if room <= _ROOM and self.size > _MOVED_AT_MOST:
            room = _ROOM
        self._move(8 + _ROOM, 8 + room)
        self._file.truncate(8 + room + self.size)
        self._file.seek(0)
        self._put(np.frombuffer(room.to_bytes(8, "little") + text.ljust(room), np.uint8))
        self._stack.close()

    def _move(self, source: int, target: int) -> None:
        """Move the data within the file, from the side that leaves none of them overwritten."""
        starts = range(0, self.size, _PART) if source != target else range(0)
        for start in starts if target < source else reversed(starts):
            self._file.seek(source + start)
            part = self._file.read(min(_PART, self.size - start))
            self._file.seek(target + start)
            self._put(np.frombuffer(part, np.uint8))

    def _put(self, data: NDArray[np.uint8]) -> None:
        """Write bytes, all of them: an unbuffered file may take fewer at a time."""
        with told(Path(self.target)):
            while len(data):
                data = data[self._file.write(data.data) :]

    def __exit__(self, *_: object) -> None:
        """Take back what is not finished; whatever has ended it is not this file's matter."""
        with contextlib.suppress(_Abandoned):
            abandoned = _Abandoned()
            self._stack.__exit__(_Abandoned, abandoned, None)
