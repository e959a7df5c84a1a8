"""What a file is, told by its first bytes and never by its name."""

from __future__ import annotations

import codecs

from attncli.errors import DataError
from attncli.files.text import ACCEPTED

HEAD = 4096

_TORCH_LEGACY = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_DECOMPRESS = "Decompress it first."
_UNPACK = "Unpack it first."
_PICKLE = "Pickles are never loaded, since loading one can run code: save with numpy.save instead."
_EXPORT = "Export the tensors to one of these formats first."

# (where, the bytes there, what the file is, advice)
_MAGICS: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"\x1f\x8b", "gzip-compressed data", _DECOMPRESS),
    (0, b"\x1f\x9d", "compressed data (.Z)", _DECOMPRESS),
    (0, b"\x28\xb5\x2f\xfd", "zstd-compressed data", _DECOMPRESS),
    (0, b"\xfd7zXZ\0", "xz-compressed data", _DECOMPRESS),
    (0, b"BZh", "bzip2-compressed data", _DECOMPRESS),
    (0, b"\x04\x22\x4d\x18", "lz4-compressed data", _DECOMPRESS),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (0, b"Rar!\x1a\x07", "a RAR archive", _UNPACK),
    (257, b"ustar", "a tar archive", _UNPACK),
    (0, b"GGUF", "a GGUF model", _EXPORT),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file", _EXPORT),
    (0, b"PAR1", "a Parquet file", _EXPORT),
    (0, b"ARROW1", "an Arrow file", _EXPORT),
    (0, b"FEA1", "a Feather file", _EXPORT),
    (0, b"MATLAB 5.0", "a MATLAB file", _EXPORT),
    (0, b"CDF\x01", "a NetCDF file", _EXPORT),
    (0, b"CDF\x02", "a NetCDF file", _EXPORT),
    (4, b"TFL3", "a TensorFlow Lite model", _EXPORT),
    (0, b"SQLite format 3\0", "an SQLite database", _EXPORT),
    (0, b"\x89PNG", "a PNG image", ""),
    (0, b"\xff\xd8\xff", "a JPEG image", ""),
    (0, b"%PDF", "a PDF document", ""),
    (0, b"\x7fELF", "a program", ""),
)
_TEXT_PICKLES = ("(dp", "(lp", "cnumpy", "c__builtin__", "ccopy_reg", "cposix", "cos\n")


def format_of(head: bytes, where: str) -> str:
    """Return "npy", "zip", "safetensors" or "pt": the format that a file begins like.

    Args:
        head: the first `HEAD` bytes of the file, or all of a shorter one.

    Raises:
        DataError: the file is empty or of no accepted format; says what it is instead.
    """
    if not head:
        raise DataError(where, f"expected {ACCEPTED}, got an empty file")
    if head.startswith(b"\x93NUMPY"[: len(head)]):
        return "npy"
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "zip"
    if head[8:9] == b"{" and head[5:8] == b"\0\0\0":
        return "safetensors"
    if _TORCH_LEGACY in head[:24] and head.startswith(b"\x80"):
        return "pt"
    what, advice = _stranger(head)
    raise DataError(where, f"expected {ACCEPTED}, got {what}", advice)


def _stranger(head: bytes) -> tuple[str, str]:
    """What an unaccepted file is, and what to do about it."""
    for offset, magic, what, advice in _MAGICS:
        if head.startswith(magic, offset):
            return what, advice
    if len(head) > 1 and head[0] == 0x80 and 1 <= head[1] <= 5:
        return "a Python pickle", _PICKLE
    if _is_onnx(head):
        return "what looks like an ONNX model", _EXPORT
    text = _as_text(head)
    if text is not None:
        return _text_kind(text)
    if not head.strip(b"\0"):
        return "nothing but zero bytes", "Copy or download the file again."
    return f"unknown data that starts with the bytes {head[:8].hex(' ')}", ""


def _is_onnx(head: bytes) -> bool:
    """Whether the head is a protocol buffer of a version number and a producer's name."""
    if len(head) < 5 or head[0] != 0x08 or head[1] > 0x20 or head[2] != 0x12:
        return False
    producer = head[4 : 4 + head[3]]
    return len(producer) == head[3] > 0 and producer.isascii() and producer.decode().isprintable()


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
