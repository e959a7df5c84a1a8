"""Results to files: text, and tensors block by block; whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from attncli.errors import DataError, UsageError
from attncli.files.atomic import atomic_path, folder
from attncli.files.limits import require_disk
from attncli.files.text import shown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from attncli.files.layout import Layout, Spec

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

    The target's name says the format: `.npz` (uncompressed), `.safetensors`, `.npy` for one
    tensor alone; a name without suffix, or one that is a folder or ends in "/", becomes a
    folder of `.npy` files, where other files stay as they are. Everything appears on leaving
    the context; after an exception nothing does. Cells never written are zero.

    Args:
        target: the place as the user named it.
        tensors: name → (shape, element type): a NumPy dtype or torch's name of the type.
            bfloat16 and float8 are written as blocks of uint16 and uint8 bit patterns.
        metadata: text for the metadata of a `.safetensors` file.

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
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._target = target
        self._kind = saved_format(target, len(tensors))
        self._specs = _specs(tensors)
        if metadata and self._kind != ".safetensors":
            problem = "expected a .safetensors file, the only format that holds metadata"
            raise UsageError(shown(target), problem)
        self._layouts = _layouts(Path(target), self._kind, self._specs, metadata or {})
        self._files: dict[str, tuple[BinaryIO, int]] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            parent = Path(self._target)
            if self._kind == "folder":
                stack.enter_context(folder(parent))
            else:
                parent = parent.parent
            need = sum(layout.size for layout in self._layouts.values())
            if parent.is_dir():
                require_disk(shown(self._target), parent, need)
            for path, layout in self._layouts.items():
                self._begin(stack, path, layout)
            self._stack = stack.pop_all()
        return self

    def _begin(self, stack: contextlib.ExitStack, path: Path, layout: Layout) -> None:
        """Make one file, with everything in place but the data."""
        temporary = stack.enter_context(atomic_path(path))
        file = stack.enter_context(temporary.open("r+b"))
        _reserve(file, layout.size)
        for offset, data in layout.fixed:
            file.seek(offset)
            file.write(data)
        file.flush()
        for name, offset in layout.offsets.items():
            self._files[name] = file, offset
        # Runs before the file is closed and renamed, and undoes both if it fails.
        stack.push(lambda kind, *_: _fill_checksums(file, layout) if kind is None else None)

    def write(self, name: str, index: Any, block: NDArray[Any]) -> None:
        """Write `tensor[index] = block`, as NumPy understands it.

        Memory is taken for the block alone: the file is mapped for this call only.

        Raises:
            TypeError: the block's elements do not fit the tensor's.
        """
        import numpy as np

        spec = self._specs[name]
        if not np.can_cast(block.dtype, spec.physical, "same_kind"):
            raise TypeError(f"{name}: cannot write {block.dtype} as {spec.physical}")
        if spec.nbytes == 0:
            return
        file, offset = self._files[name]
        place = np.memmap(file, spec.physical, "r+", offset, spec.shape)
        place[index] = block

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.clear()
        self._stack.__exit__(kind, error, trace)


def saved_format(target: str, count: int) -> str:
    """Return ".npz", ".safetensors", ".npy" or "folder": how `TensorSaver` would save.

    Loads no tensor library, so that a command can ask before it computes.

    Args:
        target: the place as the user named it.
        count: how many tensors there will be.

    Raises:
        UsageError: the name says no format, or one that cannot hold so many tensors.
    """
    path = Path(target)
    suffix = path.suffix.lower()
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


def _specs(tensors: Mapping[str, tuple[tuple[int, ...], np.dtype[Any] | str]]) -> dict[str, Spec]:
    from attncli.files.layout import Spec

    return {name: Spec.of(shape, dtype) for name, (shape, dtype) in tensors.items()}


def _layouts(
    path: Path, kind: str, specs: Mapping[str, Spec], metadata: Mapping[str, str]
) -> dict[Path, Layout]:
    """The files to write and what stands where in each."""
    from attncli.files.layout import npy_layout, safetensors_layout
    from attncli.files.ziplayout import npz_layout

    if kind == ".npz":
        return {path: npz_layout(specs)}
    if kind == ".safetensors":
        return {path: safetensors_layout(specs, metadata)}
    single = kind == ".npy"
    return {
        path if single else path / _file_name(name): npy_layout(name, spec)
        for name, spec in specs.items()
    }


def _file_name(name: str) -> str:
    """A tensor's file within a folder; never outside of it."""
    if not name.isprintable() or any(sign in name for sign in '/\\:"*?<>|'):
        problem = f"expected a name that a file can have, got {shown(name, 80)}"
        raise DataError("--save", problem, "Save to a .npz or .safetensors file instead.")
    return f"{name}.npy"


def _reserve(file: BinaryIO, size: int) -> None:
    """Take the room on disk now: a full disk would end a later write to mapped memory."""
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        file.truncate(size)


def _fill_checksums(file: BinaryIO, layout: Layout) -> None:
    for checksum in layout.checksums:
        value, left = 0, checksum.stop - checksum.start
        file.seek(checksum.start)
        while left:
            chunk = file.read(min(_CHUNK, left))
            if not chunk:
                raise OSError(errno.EIO, "the file became shorter")
            value, left = zlib.crc32(chunk, value), left - len(chunk)
        for place in checksum.places:
            file.seek(place)
            file.write(value.to_bytes(4, "little"))
    file.flush()
