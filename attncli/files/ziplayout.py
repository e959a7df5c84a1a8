"""A zip archive laid out in advance: members stored as they are, sizes of 64 bits.

After PKWARE's APPNOTE 6.3.3. Only the checksums are unknown until the data are written.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from attncli.files.layout import Checksum, Layout, Spec, npy_header

_VERSION = 45  # the first that knows 64-bit sizes
_UTF8 = 0x800
_STORED = 0
_TIME, _DATE = 0, 0x21  # 1980-01-01: the same tensors make the same bytes
_WIDE = 0xFFFFFFFF  # look for the value among the 64-bit fields
_MADE_ON_UNIX = 3 << 8
_READABLE = 0o644 << 16
_CRC_IN_LOCAL, _CRC_IN_CENTRAL = 14, 16


def npz_layout(specs: Mapping[str, Spec]) -> Layout:
    """Lay out an uncompressed .npz file."""
    fixed: list[tuple[int, bytes]] = []
    offsets: dict[str, int] = {}
    members: list[tuple[bytes, int, int, int]] = []  # name, first byte, size, place of its header
    end = 0
    for name, spec in specs.items():
        member, header = f"{name}.npy".encode(), npy_header(spec)
        size = len(header) + spec.nbytes
        head = _local(member, size)
        fixed.append((end, head + header))
        members.append((member, end + len(head), size, end))
        offsets[name] = end + len(head) + len(header)
        end += len(head) + size
    return _with_directory(end, fixed, offsets, members)


def _with_directory(
    start: int,
    fixed: list[tuple[int, bytes]],
    offsets: dict[str, int],
    members: list[tuple[bytes, int, int, int]],
) -> Layout:
    directory, checksums = b"", []
    for name, first, size, place in members:
        places = (place + _CRC_IN_LOCAL, start + len(directory) + _CRC_IN_CENTRAL)
        checksums.append(Checksum(first, first + size, places))
        directory += _central(name, size, place)
    tail = directory + _end(len(members), start, len(directory))
    return Layout(start + len(tail), (*fixed, (start, tail)), offsets, tuple(checksums))


def _local(name: bytes, size: int) -> bytes:
    """What stands before a member's bytes."""
    extra = struct.pack("<HHQQ", 1, 16, size, size)
    fields = (_VERSION, _UTF8, _STORED, _TIME, _DATE, 0, _WIDE, _WIDE, len(name), len(extra))
    return b"PK\x03\x04" + struct.pack("<5H3I2H", *fields) + name + extra


def _central(name: bytes, size: int, place: int) -> bytes:
    """A member's entry in the directory."""
    extra = struct.pack("<HHQQQ", 1, 24, size, size, place)
    made = (_MADE_ON_UNIX | _VERSION, _VERSION, _UTF8, _STORED, _TIME, _DATE)
    lengths = (0, _WIDE, _WIDE, len(name), len(extra), 0, 0, 0, _READABLE, _WIDE)
    return b"PK\x01\x02" + struct.pack("<6H3I5H2I", *made, *lengths) + name + extra


def _end(count: int, start: int, size: int) -> bytes:
    """The end of the directory, in its 64-bit form and the old one that points to it."""
    wide = struct.pack("<Q2H2I4Q", 44, _VERSION, _VERSION, 0, 0, count, count, size, start)
    locator = struct.pack("<IQI", 0, start + size, 1)
    few = min(count, 0xFFFF)
    old = struct.pack("<4H2IH", 0, 0, few, few, _WIDE, _WIDE, 0)
    return b"PK\x06\x06" + wide + b"PK\x06\x07" + locator + b"PK\x05\x06" + old
