"""Open a file of tensors: the one way in. What it is, its first bytes tell, never its name.

Standard input and pipes are copied to files that can be mapped into memory; several files may be
one bundle: shards, as writers with a limit of size leave them.
"""

from __future__ import annotations

import codecs
import contextlib
import difflib
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from weakref import WeakKeyDictionary

from numpy.typing import NDArray

from attncli.errors import AttncliError, DataError, ResourceError
from attncli.files.folder import files_in, named_by_file
from attncli.files.npy import archive_format, open_npy, open_npz
from attncli.files.safetensorsfile import open_safetensors
from attncli.files.temporary import spool
from attncli.files.tensor import TensorFile, TensorHeader
from attncli.files.text import ACCEPTED, is_folder, place, shown
from attncli.limits import DISK_FULL, full_disk

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
        name: a path, a pipe, or "-" for standard input, which is read once for all calls; or a
            folder, whose files are one bundle then.

    Raises:
        DataError: the file is absent, unreadable, damaged, or of another format.
        ResourceError: memory or disk do not suffice.
    """
    if is_folder(name):
        return join(name, open_all(name))
    if name == "-" and sys.stdin in _STANDARD_INPUT:
        return _STANDARD_INPUT[sys.stdin]
    with local_file(name) as local:
        file = _READERS[_format_of(local, place(name))](local, name)
    if not file.headers:
        raise DataError(place(name), "expected tensors, got a file that holds none")
    if name == "-":
        _STANDARD_INPUT[sys.stdin] = file
    return file


def open_all(name: str) -> list[TensorFile]:
    """`open_file`, but of a folder the bundles in it, and one of its files of a tensor each.

    Those that cannot be read are left out with a warning, unless all are.
    """
    if not is_folder(name):
        return [open_file(name)]
    bundles: list[TensorFile] = []
    single: list[TensorFile] = []
    left: list[AttncliError] = []
    for path in files_in(name):
        try:
            file = open_file(path)
        except (DataError, ResourceError) as error:
            left.append(error)
            continue
        alone = len(file.headers) == 1 and file.headers[0].name is None
        (single if alone else bundles).append(named_by_file(file) if alone else file)
    found = [*([join(name, single)] if single else []), *bundles]
    if not found:
        raise left[0]
    found[0].warnings.extend(f"left out: {error.where}: {error.problem}" for error in left)
    return found


def _open_torch(local: Path, source: str) -> TensorFile:
    """Open a .pt file, the one kind for which torch is loaded: `mask` and `inspect` do without."""
    file: TensorFile = import_module("attncli.files.torch_tensors").open_torch(local, source)
    return file


def _open_index(local: Path, source: str) -> TensorFile:
    """Open all shards that an index names, as one bundle; they lie beside it.

    Args:
        local: `model.safetensors.index.json`, or the same for another format.
        source: the index as the user named it.

    Raises:
        DataError: the index is damaged, or a shard is absent, damaged or holds something else.
    """
    where, folder = place(source), Path() if source == "-" else Path(source).parent
    shard_of = _parsed(local.read_bytes())[_MAP]
    named = isinstance(shard_of, dict) and all(map(_lies_beside, shard_of.values()))
    if not shard_of or not named:
        raise DataError(where, f"expected {_MAP} as tensor → shard beside the index, got another")
    files = []
    for shard in dict.fromkeys(shard_of.values()):
        try:
            file = _open_shard(str(folder / shard))
        except DataError as error:
            raise DataError(f"{where}, {error.where}", error.problem, error.advice) from None
        absent = {name for name, one in shard_of.items() if one == shard} - {
            header.name for header in file.headers
        }
        for name in sorted(absent):
            problem = f"expected {shown(name, 80)} as the index says, got none"
            raise DataError(f"{where}, {place(file.source)}", problem)
        files.append(file)
    return join(source, files)


def _open_shard(name: str) -> TensorFile:
    with local_file(name) as shard:
        kind = _format_of(shard, place(name))
        if kind == "index":
            raise DataError(place(name), "expected a shard, got another index")
        return _READERS[kind](shard, name)


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
    if head.lstrip().startswith(b"{") and _is_index(local):
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


_MAP = "weight_map"
_LARGEST_INDEX = 100_000_000


def _is_index(local: Path) -> bool:
    """Whether a file that begins like JSON says which tensor lies in which shard."""
    if local.stat().st_size > _LARGEST_INDEX:
        return False
    parsed = _parsed(local.read_bytes())
    return isinstance(parsed, dict) and _MAP in parsed


def join(source: str, files: Sequence[TensorFile]) -> TensorFile:
    """One bundle of the tensors of several files.

    Args:
        source: what messages call it.
        files: opened files.

    Raises:
        DataError: two files hold tensors of one name.
    """
    holders: dict[str | None, TensorFile] = {}
    metadata: dict[str, Any] = {}
    for file in files:
        for header in file.headers:
            if header.name in holders:
                name = shown(str(header.name), 80)
                both = f"in {place(holders[header.name].source)} and {place(file.source)}"
                advice = "name the file that is meant" if is_folder(source) else ""
                raise DataError(
                    place(source), f"expected each name once, got {name} {both}", advice
                )
            holders[header.name] = file
        for group, options in file.metadata.items():
            metadata[group] = metadata.get(group, {}) | options

    def load(header: TensorHeader, where: str) -> NDArray[Any]:
        return holders[header.name].load(header, where)

    return TensorFile(
        source,
        files[0].format,
        tuple(header for file in files for header in file.headers),
        load,
        metadata,
        warnings=[text for file in files for text in file.warnings],
        holders=holders,
    )


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _lies_beside(shard: object) -> bool:
    if not isinstance(shard, str) or not shard or "\0" in shard:
        return False
    path = PurePosixPath(shard)
    return not path.is_absolute() and ".." not in path.parts


@contextlib.contextmanager
def local_file(name: str) -> Iterator[Path]:
    """Give a regular file that can be read and holds the bytes that `name` stands for.

    Standard input ("-") and pipes are copied to a temporary file first, which is unlinked on
    leaving: open or map it before.

    Raises:
        DataError: there is no such file, or it cannot be read.
        ResourceError: the disk has no room for the copy.
    """
    where = place(name)
    if name == "-":
        with _spooled(where, _standard_input(where)) as copy:
            yield copy
        return
    path = Path(name)
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise DataError(where, f"expected {ACCEPTED}, got a directory")
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise DataError(where, f"expected {ACCEPTED}, got a device or a socket")
        stream = path.open("rb")
    except (OSError, ValueError) as error:
        raise _unreadable(where, path, error) from error
    if stat.S_ISFIFO(mode):
        with stream, _spooled(where, stream) as copy:
            yield copy
        return
    stream.close()
    yield path


def _unreadable(where: str, path: Path, error: Exception) -> DataError:
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        return DataError(where, "expected a file, got a link to a file that is not there")
    if isinstance(error, FileNotFoundError):
        return DataError(where, "expected a file, got no file of this name", _suggestion(path))
    if isinstance(error, PermissionError):
        return DataError(where, "expected a file that can be read, got permission denied")
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "bad name"
    return DataError(where, f"expected a file that can be read, got: {reason}")


def _suggestion(path: Path) -> str:
    """The neighbour that was probably meant."""
    with contextlib.suppress(OSError):
        if not path.parent.is_dir():
            return f"There is no folder {shown(str(path.parent))} either."
        neighbours = [entry.name for entry in path.parent.iterdir()]
        for close in difflib.get_close_matches(path.name, neighbours, n=1, cutoff=0.75):
            return f"Did you mean {shown(str(path.parent / close))}?"
    return ""


def _standard_input(where: str) -> BinaryIO:
    stream = getattr(sys.stdin, "buffer", None)
    if stream is None:
        raise DataError(where, f"expected {ACCEPTED}, got no standard input")
    if stream.isatty():
        raise DataError(where, f"expected {ACCEPTED}, got a terminal")
    binary: BinaryIO = stream
    return binary


@contextlib.contextmanager
def _spooled(where: str, stream: BinaryIO) -> Iterator[Path]:
    """A temporary file with all that a stream holds."""
    with contextlib.ExitStack() as stack:
        try:
            copy = stack.enter_context(spool())
        except OSError as error:
            problem = "expected a folder for temporary files, got none that can be written"
            raise ResourceError(where, problem) from error
        try:
            with copy.open("wb") as file:
                shutil.copyfileobj(stream, file, 1 << 20)
        except OSError as error:
            if error.errno in DISK_FULL:
                found = full_disk(error, copy.parent)
                problem = f"expected room for a copy in {copy.parent}, got {found}"
                raise ResourceError(where, problem) from error
            reason = os.strerror(error.errno) if error.errno else "an error"
            raise DataError(where, f"expected {ACCEPTED}, got: {reason}") from error
        yield copy
