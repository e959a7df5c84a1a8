"""What the standard library raises for a damaged archive: more than its manual says."""

from __future__ import annotations

import lzma
import struct
import zipfile
import zlib

ARCHIVE_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    OSError,
    ValueError,
    OverflowError,
    RuntimeError,  # includes NotImplementedError: an unknown way of compressing
    MemoryError,
    IndexError,
)
