"""Results to files: text, and tensors block by block; whole or not at all.

Where everything stands in a file of tensors is known before any of the data are, so that they can
be written in any order.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import struct
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from attncli.errors import DataError, UsageError
from attncli.files.target import Batch, atomic_path, joined, make_folder, seekable_path
from attncli.files.tensor import BY_NAME, name_of
from attncli.files.text import is_folder, shown
from attncli.limits import DISK_FULL, require_disk

_CHUNK = 1 << 22
_SUFFIXES = (".npz", ".safetensors", ".npy")
_ACCEPTED = "a name that ends in .npz, .safetensors or .npy, or a folder"


def write_text(target: str, chunks: Iterable[str]) -> None:
    """Write UTF-8 text to a file, which appears only once all of it is there.

    Raises:
        DataError: the place cannot be written.
        ResourceError: the disk is full.
    """
    # Undecodable bytes of a file's name become escapes, which JSON understands.
    with (
        atomic_path(Path(target)) as path,
        path.open("a", encoding="utf-8", errors="backslashreplace", newline="") as file,
    ):
        file.writelines(chunks)


class TensorSaver:
    """A file or folder of tensors, written block by block in any order.

    The target's name says the format: `.npz` (uncompressed; its largest tensor is on the disk
    twice for a moment), `.safetensors`, `.npy` for one tensor alone; a name without suffix, or
    one that is a folder or ends in "/", becomes a folder of `.npy` files, where other files
    stay as they are. Everything appears on leaving the context; after an exception nothing
    does. Cells never written are zero.

    Args:
        target: the place as the user named it.
        tensors: name → (shape, element type): a NumPy dtype or torch's name of the type.
            bfloat16 and float8 are written as blocks of uint16 and uint8 bit patterns.

    Raises:
        UsageError: the name says no format, or one that cannot hold these tensors.
        DataError: a tensor's name cannot be the name of a file.

    Entering the context raises:
        DataError: the place cannot be written.
        ResourceError: the disk has too little room.
    """

    def __init__(
        self, target: str, tensors: Mapping[str, tuple[tuple[int, ...], np.dtype[Any] | str]]
    ) -> None:
        self._target = target
        self._kind = saved_format(target, len(tensors))
        self._specs = {name: Spec.of(shape, dtype) for name, (shape, dtype) in tensors.items()}
        self._layouts = _layouts(self._kind, self._specs)
        self._places: dict[str, tuple[Path, int]] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        target = Path(self._target)
        with contextlib.ExitStack() as stack:
            batch = stack.enter_context(joined())
            if self._kind == "folder":
                make_folder(target, batch)
            parent = target if self._kind == "folder" else target.parent
            if is_folder(parent):
                sizes = [layout.size for layout in self._layouts.values()]
                # Each member of an archive is there twice for a moment.
                twice = max(sizes, default=0) if self._kind == ".npz" else 0
                require_disk(shown(self._target), parent, sum(sizes) + twice)
            if self._kind == ".npz":
                self._begin_archive(stack, target, batch)
            else:
                for name, layout in self._layouts.items():
                    path = target / name if self._kind == "folder" else target
                    self._begin(stack.enter_context(seekable_path(path, batch)), layout)
            self._stack = stack.pop_all()
        return self

    def _begin_archive(self, stack: contextlib.ExitStack, target: Path, batch: Batch) -> None:
        """Make a file for each member, beside the archive and packed into it on leaving."""
        archive = stack.enter_context(seekable_path(target, batch))
        parts = {name: batch.temporary(archive.parent, 0o600) for name in self._layouts}
        for name, part in parts.items():
            self._begin(part, self._layouts[name])
        # Runs before the archive is renamed, and undoes it on failure.
        stack.push(lambda kind, *_: _pack(archive, parts) if kind is None else None)

    def _begin(self, path: Path, layout: FileLayout) -> None:
        """Fill a file with everything but the data."""
        with path.open("r+b") as file:
            file.write(layout.head)
            _reserve(file, layout.size)
        for name, offset in layout.offsets.items():
            self._places[name] = path, offset

    def write(self, name: str, index: Any, block: NDArray[Any]) -> None:
        """Write `tensor[index] = block`, as NumPy understands it.

        Memory is taken for the block alone: the file is mapped for this call only.

        Raises:
            TypeError: the block's elements do not fit the tensor's.
        """
        spec = self._specs[name]
        if not np.can_cast(block.dtype, spec.physical, "same_kind"):
            raise TypeError(f"{name}: cannot write {block.dtype} as {spec.physical}")
        if spec.nbytes == 0:
            return
        path, offset = self._places[name]
        place = np.memmap(path, spec.physical, "r+", offset, spec.shape)
        place[index] = block

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._places.clear()
        self._stack.__exit__(kind, error, trace)


def saved_format(target: str, count: int) -> str:
    """Return ".npz", ".safetensors", ".npy" or "folder": how `TensorSaver` would save.

    A command can ask before it computes.

    Args:
        target: the place as the user named it.
        count: how many tensors there will be.

    Raises:
        UsageError: the name says no format, or one that cannot hold so many tensors.
    """
    path = Path(target)
    suffix = path.suffix.lower()
    if not target:
        raise UsageError("«save»", f"expected {_ACCEPTED}, got nothing")
    if target == "-":
        raise UsageError("-", f"expected {_ACCEPTED}, got standard output")
    if target.endswith(("/", os.sep)) or is_folder(path) or not suffix:
        return "folder"
    if suffix not in _SUFFIXES:
        raise UsageError(shown(target), f"expected {_ACCEPTED}, got {shown(suffix)}")
    if suffix == ".npy" and count != 1:
        problem = f"expected one tensor for a .npy file, got {count}"
        raise UsageError(shown(target), problem, "Save to a .npz file or to a folder instead.")
    return suffix


def _layouts(kind: str, specs: Mapping[str, Spec]) -> dict[str, FileLayout]:
    """What stands where in each file, by its name in a folder or an archive."""
    if kind == ".safetensors":
        return {"": safetensors_layout(specs)}
    named = _file_name if kind == "folder" else "{}.npy".format
    return {named(name): npy_layout(name, spec) for name, spec in specs.items()}


def _file_name(name: str) -> str:
    """A tensor's file within a folder; never outside of it."""
    if not name.isprintable() or any(sign in name for sign in '/\\:"*?<>|'):
        problem = f"expected a name that a file can have, got {shown(name, 80)}"
        raise DataError("«save»", problem, "Save to a .npz or .safetensors file instead.")
    return f"{name}.npy"


def _reserve(file: BinaryIO, size: int) -> None:
    """Take the room on disk now: a full disk would end a later write to mapped memory."""
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise
        file.truncate(size)


def _pack(target: Path, parts: Mapping[str, Path]) -> None:
    """Move files into an archive that is stored as it is, under the names of `parts`."""
    with zipfile.ZipFile(target, "w") as archive:
        for name, part in parts.items():
            # Without the time of day: the same tensors make the same bytes.
            member = zipfile.ZipInfo(name)
            member.external_attr = 0o644 << 16
            with part.open("rb") as source, archive.open(member, "w", force_zip64=True) as sink:
                shutil.copyfileobj(source, sink, _CHUNK)
            part.unlink()


Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor to be written: its shape and torch's name of its element type."""

    shape: Shape
    dtype: str

    @classmethod
    def of(cls, shape: Shape, dtype: np.dtype[Any] | str) -> Spec:
        """Return the spec for a NumPy dtype or for torch's name of one.

        Raises:
            TypeError: torch has no such element type.
        """
        name = dtype if isinstance(dtype, str) else name_of(np.dtype(dtype))
        if name not in BY_NAME:
            raise TypeError(f"no such element type: {name}")
        return cls(tuple(int(length) for length in shape), name)

    @property
    def physical(self) -> np.dtype[Any]:
        """The NumPy dtype of the blocks: unsigned integers for bfloat16 and float8."""
        return BY_NAME[self.dtype].physical

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.physical.itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class FileLayout:
    """What stands where in one file."""

    head: bytes  # the bytes before the data
    size: int  # bytes of the whole file
    offsets: dict[str, int]  # tensor → first byte of its data


def npy_layout(name: str, spec: Spec) -> FileLayout:
    """Lay out a .npy file of one tensor."""
    # What NumPy has no name for is stored as it would store it: raw bytes.
    element = BY_NAME[spec.dtype]
    raw = f"|V{element.physical.itemsize}"
    descr = raw if element.is_raw else np.lib.format.dtype_to_descr(element.physical)
    stream = io.BytesIO()
    fields = {"descr": descr, "fortran_order": False, "shape": spec.shape}
    np.lib.format.write_array_header_1_0(stream, fields)
    header = stream.getvalue()
    return FileLayout(header, len(header) + spec.nbytes, {name: len(header)})


def safetensors_layout(specs: Mapping[str, Spec]) -> FileLayout:
    """Lay out a safetensors file: the widest elements first, so that all data are aligned."""
    header: dict[str, Any] = {}
    places, end = {}, 0
    for name, spec in sorted(specs.items(), key=lambda item: -item[1].physical.itemsize):
        places[name] = end
        end += spec.nbytes
        code = BY_NAME[spec.dtype].code
        offsets = [places[name], end]
        header[name] = {"dtype": code, "shape": spec.shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    offsets_of = {name: len(head) + place for name, place in places.items()}
    return FileLayout(head, len(head) + end, offsets_of)
