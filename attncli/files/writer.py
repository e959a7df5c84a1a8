"""Results to files: text, and tensors block by block; whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from attncli.errors import DataError, UsageError
from attncli.files.atomic import atomic_path, folder
from attncli.files.file_layout import FileLayout, Spec, npy_layout, safetensors_layout
from attncli.files.limits import require_disk
from attncli.files.text import shown

__all__ = ["TensorSaver", "atomic_path", "saved_format", "write_text"]

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
        path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file,
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
        self,
        target: str,
        tensors: Mapping[str, tuple[tuple[int, ...], np.dtype[Any] | str]],
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
            if self._kind == "folder":
                stack.enter_context(folder(target))
            parent = target if self._kind == "folder" else target.parent
            if parent.is_dir():
                require_disk(shown(self._target), parent, self._room())
            if self._kind == ".npz":
                self._begin_archive(stack, target)
            else:
                for name, layout in self._layouts.items():
                    path = target / name if self._kind == "folder" else target
                    self._begin(stack.enter_context(_mappable(path)), layout)
            self._stack = stack.pop_all()
        return self

    def _room(self) -> int:
        """Bytes on disk at the most: each member of an archive is there twice for a moment."""
        sizes = [layout.size for layout in self._layouts.values()]
        return sum(sizes) + (max(sizes, default=0) if self._kind == ".npz" else 0)

    def _begin_archive(self, stack: contextlib.ExitStack, target: Path) -> None:
        """Make a file for each member, beside the archive and packed into it on leaving."""
        archive = stack.enter_context(atomic_path(target))
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix=".", dir=archive.parent))
        # Numbered, since a member's name need not be one that a file can have.
        parts = {name: Path(scratch, str(n)) for n, name in enumerate(self._layouts)}
        for name, part in parts.items():
            part.touch()
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


@contextlib.contextmanager
def _mappable(target: Path) -> Iterator[Path]:
    """`atomic_path`, or for a pipe or device a file that is copied there on leaving."""
    with atomic_path(target) as path:
        if path.is_file():
            yield path
            return
        with tempfile.TemporaryDirectory() as scratch:
            part = Path(scratch, "part")
            part.touch()
            yield part
            with part.open("rb") as source, path.open("wb") as sink:
                shutil.copyfileobj(source, sink, _CHUNK)


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
    if target.endswith(("/", os.sep)) or path.is_dir() or not suffix:
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
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
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
