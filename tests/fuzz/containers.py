"""Files of tensors, built field by field, each field now and then wrong."""

from __future__ import annotations

import bz2
import json
import lzma
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from chance import NAMES, NUMBERS, Chance

from attncli.files.tensor import BY_CODE

DTYPES = ("<f4", "<f8", "<f2", ">f4", ">f8", "|b1", "|u1", "|i1", "<u2", ">u2", "<i4", "<i8", "|V2")
DESCRS = (
    *("|O", "O", "<U3", ">U3", "|S3", "f", "?", "<c8", "<c16", "|V1", "|V4", "<M8[ns]", "m8"),
    *("<f16",),
    *("(2,)f4", "2f4", "f4,f4", "", " ", "<q9", "<f3", "=f4", "i0", "S0", "U0", "V0", "\x1b[31m"),
    *("é",),
    *([("a", "<f4"), ("b", "<i4")], [("a", "|O")], [("", "f4")], [("a", [("b", "<f4")], (2,))]),
    *([("a\x1b", "f4", (2**40,))], [], (), None, 3, True, ("f4", (2, 2)), {"names": ["a"]}, b"f4"),
)
NOISE_HEADERS = (
    *("", "{}", "[1]", "None", "(" * 9000, "-" * 9000 + "1", "9" * 6000, "os.system('ls')"),
    *("{" * 99,),
    *("{'descr': '<f4', 'fortran_order': False, 'shape': (2L,)}", "{'descr': '<f4'}", "1\x00"),
    *("\n",),
    *("__import__('os').system('ls')", "'" * 3, "{1: 2}", "{[]: 1}", "{'shape': (1,), **{}}"),
    *("f'{1}'",),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """A file, and what is in it as long as nothing was made wrong."""

    kind: str
    data: bytes
    # name → (what the reader calls the element type, the values or their bits); None where the
    # file is damaged, or holds what is not to be read.
    sound: dict[str | None, tuple[str, np.ndarray]] | None = None


def shape_of(chance: Chance, most: int = 4) -> tuple[int, ...]:
    """Lengths of axes, none of them large."""
    return tuple(chance.choices((0, 1, 1, 2, 2, 3, 4), k=chance.randint(0, most)))


def names_of(chance: Chance, count: int) -> list[str]:
    """Names of tensors: roles as a rule."""
    prefix = chance.choice(("", "", "layers.0.", "a/"))
    return [chance.amiss(prefix + name, NAMES) for name in ("q", "k", "v", "w", "x")[:count]]


def array_of(chance: Chance, descr: str, shape: tuple[int, ...]) -> np.ndarray:
    dtype = np.dtype(descr)
    count = int(np.prod(shape, dtype=np.int64))
    raw = bytes(chance.choices((0, 1), k=count)) if descr == "|b1" else None
    return np.frombuffer(raw or chance.randbytes(count * dtype.itemsize), dtype).reshape(shape)


def npy(chance: Chance) -> tuple[bytes, tuple[str, np.ndarray] | None]:
    """A .npy file, and what is read from it while it is sound."""
    descr, shape = chance.choice(DTYPES), shape_of(chance)
    array = array_of(chance, descr, shape)
    fortran = chance.random() < 0.3
    told = {
        "descr": chance.amiss(descr, DESCRS),
        "fortran_order": chance.amiss(fortran, (None, 1, "F", [], 2**70)),
        "shape": chance.amiss(
            tuple(map(chance.near, shape)),
            (
                None,
                3,
                [2],
                (1,) * 33,
                (1,) * 70,
                (2.0,),
                (True,),
                ("2",),
                (2**40, 2**40),
                (0, 2**63),
            ),
        ),
    }
    for key in list(told):
        if chance.amiss(False, (True,)):
            del told[key]
    if chance.amiss(False, (True,)):
        told[chance.choice(NAMES)] = 1
    text = chance.amiss(repr(told), NOISE_HEADERS).encode("utf-8", "surrogatepass")
    version = chance.amiss(chance.choice((1, 1, 1, 2, 3)), (0, 4, 7, 255))
    wide = 2 if version == 1 else 4
    room = -(10 + wide - 2 + len(text) + 1) % chance.choice((16, 64))
    text += b" " * room + chance.amiss(b"\n", (b"", b"\0", b" " * 20_000, b"\xff\n"))
    length = chance.near(len(text)) % (1 << 8 * wide)
    head = (
        b"\x93NUMPY" + bytes((version, chance.amiss(0, (1, 255)))) + length.to_bytes(wide, "little")
    )
    data = array.tobytes("F" if fortran else "C") + chance.amiss(b"", (b"\0", bytes(100)))
    bits = {"|V2": "u2"}.get(descr, np.dtype(descr).newbyteorder("="))
    name = "|V2" if descr == "|V2" else np.dtype(descr).name
    read = array.view(bits) if descr == "|V2" else array.astype(bits)
    return head + text + data, (name, read) if chance.is_sound else None


_PACK: dict[int, Callable[[bytes], bytes]] = {
    0: bytes,
    8: lambda data: zlib.compress(data, 1, -15),
    12: bz2.compress,
    14: lambda data: (
        b"\x09\x04\x05\0\x5d\0\0\x01\0" + lzma.compress(data, lzma.FORMAT_RAW, filters=_LZMA)
    ),
}
_LZMA = [{"id": lzma.FILTER_LZMA1, "dict_size": 1 << 16}]
_FLAGS = (0, 1, 2, 8, 0x20, 0x40, 0x800, 0x2000, 0xFFFF)


def archive(chance: Chance, members: Sequence[tuple[str, bytes]], methods: Sequence[int]) -> bytes:
    """A zip archive; whatever its headers say may be wrong, in one place or in both."""
    body, directory, count = bytearray(chance.amiss(b"", (b"#!", bytes(40)))), bytearray(), 0
    for name, data in members:
        for _ in range(chance.amiss(1, (0, 2))):
            local, central = _member(chance, name, data, chance.choice(methods), len(body))
            body += local
            directory += central
            count += 1
    start, size, count = (chance.near(n) for n in (len(body), len(directory), count))
    comment = chance.amiss(b"", (b"note\x1b[31m", bytes(70), b"PK\5\6"))
    if chance.random() < 0.1:
        far = (
            b"PK\6\6",
            44,
            45,
            45,
            0,
            0,
            count % 2**64,
            count % 2**64,
            size % 2**64,
            start % 2**64,
        )
        directory += struct.pack("<4sQHHIIQQQQ", *far)
        at = chance.near(len(body) + len(directory) - 56) % 2**64
        directory += struct.pack("<4sIQI", b"PK\6\7", 0, at, 1)
        start = size = 2**32 - 1
    end = (b"PK\5\6", 0, 0, count % 2**16, count % 2**16, size % 2**32, start % 2**32)
    return bytes(body + directory) + struct.pack("<4sHHHHIIH", *end, len(comment)) + comment


def _member(
    chance: Chance, name: str, data: bytes, method: int, offset: int
) -> tuple[bytes, bytes]:
    """One member as it stands among the data and in the directory."""
    text = name.encode("utf-8", "surrogatepass")[:60_000]
    flags = 0 if name.isascii() else 0x800
    packed = chance.mutated(_PACK[method](data))
    crc, size, room = zlib.crc32(data), chance.near(len(data)), chance.near(len(packed))
    extra = b""
    if chance.random() < 0.1:
        extra = struct.pack("<HHQQ", 1, chance.amiss(16, (0, 8, 24)), size % 2**64, room % 2**64)
        size = room = 2**32 - 1
    halves = []
    for _ in range(2):
        halves.append(
            struct.pack(
                "<HHHHHIIIHH",
                chance.amiss(45, (0, 63, 255)),
                chance.amiss(flags, _FLAGS),
                chance.amiss(method, (0, 1, 8, 9, 12, 14, 93, 99)),
                chance.amiss(0, (0xFFFF,)),
                chance.amiss(0x21, (0, 0xFFFF)),
                chance.amiss(crc, (0, crc ^ 1)),
                chance.near(room) % 2**32,
                chance.near(size) % 2**32,
                chance.amiss(len(text), (0, len(text) // 2, len(text) + 5)),
                chance.amiss(len(extra), (0, 4, 200)),
            )
        )
    local = b"PK\3\4" + halves[0] + text + extra + packed
    offset = chance.near(offset) % 2**32
    made = chance.amiss(0, (3 << 8, 63)).to_bytes(2, "little")
    tail = struct.pack("<HHHII", 0, 0, 0, chance.amiss(0, (0xFFFFFFFF,)), offset)
    return local, b"PK\1\2" + made + halves[1] + tail + text + extra


def npz(chance: Chance) -> Sample:
    members, sound = [], {}
    for name in names_of(chance, chance.randint(1, 3)):
        data, read = npy(chance)
        suffix = chance.amiss(".npy", ("", ".NPY", ".txt", "/"))
        members.append((name + suffix, chance.amiss(data, (b"", b"hello", b"\x93NUM"))))
        sound[name] = read
    if chance.random() < 0.1:
        members.append(("notes.txt", b"hello"))
    methods = chance.choice(((0,), (0,), (8,), (0, 8, 12, 14)))
    return _sealed(chance, "npz", archive(chance, members, methods), sound)


_CODES = (
    "F4",
    "F6_E2M3",
    "F8_E8M0",
    "C64",
    "F128",
    "f32",
    "",
    "\x1b[31m",
    "é",
    3,
    None,
    [],
    "BOOL",
)
_OPTIONS = (
    *(None, 3, [], {}, "x", {"": {}}, {"": 3}, {"": {"scale": 0.5}}, {"": {"scale": "x"}}),
    *({"*": {}},),
    *({"": {"labels": ["a", "\x1b[31m"]}}, {"": {"labels": 3}}, {"": {"labels": [[1]]}}, {"é": {}}),
    *({"": {"causal": 7}}, {"": {"query_offset": "middle"}}, {"": {"query_offset": 2**63}}),
    *({"": {"attn_mask": "w"}}, {"": {"sinks": [1e400]}}, {"": {"\x1b[31m": 1}}, {"layers.0": {}}),
    *({"": {"segments": [[0, 1], [2]]}}, {"": {"labels_from": -(10**30)}}, {"": {"scal": 1}}),
)


def metadata(chance: Chance) -> dict[str, object]:
    """Metadata of a safetensors file, options of groups among them."""
    told = chance.amiss({"": {"scale": 0.5}}, _OPTIONS)
    wrong = "{oops", "[" * 9000, "NaN", "", 3, None
    found: dict[str, object] = {"attncli": chance.amiss(json.dumps(told), wrong)}
    if chance.random() < 0.2:
        found[chance.amiss("by", NAMES)] = chance.amiss("text", NAMES)
    return found


def anything(chance: Chance, depth: int = 3) -> object:
    """JSON of any kind, with the keys that headers have."""
    if depth == 0 or chance.random() < 0.3:
        return chance.choice(
            (None, True, 1, -1, 2**70, 0.5, "", "F32", "BF16", "q", "\x1b[31m", "é")
        )
    inner = [anything(chance, depth - 1) for _ in range(chance.randint(0, 3))]
    keys = "dtype", "shape", "data_offsets", "q", "__metadata__", "attncli", ""
    return inner if chance.random() < 0.4 else {chance.choice(keys): one for one in inner}


def safetensors(chance: Chance) -> Sample:
    header: dict[str, object] = {}
    body, sound = b"", {}
    for name in names_of(chance, chance.randint(1, 3)):
        element, shape = BY_CODE[chance.choice(tuple(BY_CODE))], shape_of(chance)
        array = array_of(chance, element.physical.str, shape)
        offsets = [len(body), len(body) + array.nbytes]
        body += array.tobytes()
        entry = {
            "dtype": chance.amiss(element.code, _CODES),
            "shape": chance.amiss(
                list(map(chance.near, shape)), (None, 3, [1] * 70, [2.5], ["2"], [[1]], [0, 2**63])
            ),
            "data_offsets": chance.amiss(
                list(map(chance.near, offsets)), ([0], [], None, [0, 0, 0])
            ),
        }
        for key in list(entry):
            if chance.amiss(False, (True,)):
                del entry[key]
        header[name], sound[name] = chance.amiss(entry, (None, 3, [], {})), (element.name, array)
    if chance.random() < 0.3:
        header["__metadata__"] = chance.amiss(metadata(chance), (3, [], {"a": 1}, {"a": {}}, None))
    header = chance.amiss(header, (anything(chance),))
    text = json.dumps(header, ensure_ascii=chance.random() < 0.8).encode("utf-8", "surrogatepass")
    if chance.amiss(False, (True,)):  # a name twice
        text = text[:-1] + b"," + text[1:]
    text = chance.amiss(
        text, (b"{", b"{}", b"[]", b"{{}}", b'{"a":' * 9000, b'{"a": NaN}', b"\xff")
    )
    text += b" " * (-len(text) % chance.choice((8, 8, 1))) + chance.amiss(b"", (b"\0", b"\n", b"x"))
    length = chance.near(len(text)) % 2**64
    body += chance.amiss(b"", (b"\0", bytes(64)))
    return _sealed(chance, "safetensors", length.to_bytes(8, "little") + text + body, sound)


def bare_npy(chance: Chance) -> Sample:
    data, read = npy(chance)
    return _sealed(chance, "npy", data, {None: read})


def _sealed(chance: Chance, kind: str, data: bytes, sound: dict) -> Sample:  # type: ignore[type-arg]
    changed = chance.mutated(data)
    return Sample(kind, changed, sound if chance.is_sound else None)


SHARDS = (
    "q.npy",
    "sound.safetensors",
    "../x",
    "/etc/passwd",
    "",
    "\0",
    "a" * 300,
    3,
    None,
    "index",
)


def index(chance: Chance) -> Sample:
    """An index of shards that lie beside it, or do not."""
    shard_of = {name: chance.choice(SHARDS) for name in names_of(chance, 3)}
    told = {"metadata": {}, "weight_map": chance.amiss(shard_of, ({}, [], None, {"q": []}))}
    return Sample("index", chance.mutated(json.dumps(told).encode()))


_STARTS = (
    *(b"", b"PK\3\4", b"PK\5\6", b"\x93NUMPY", b"\x93NUMPY\1\0", b"\x80\2", b"\x80\4", b"{", b"["),
    *(b"<",),
    *(b"\x1f\x8b", b"GGUF", b"\x89HDF\r\n\x1a\n", b"BZh", b"version https://git-lfs", b"\xff\xfe"),
    *(b"\x80\2\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", bytes(8) + b"{", b"\x02\0\0\0\0\0\0\0{}", b"(dp"),
    *(b"cos\n",),
)


def noise(chance: Chance) -> Sample:
    """Bytes that begin like something, or text."""
    tail = chance.randbytes(chance.choice((0, 1, 8, 100, 5000)))
    text = "".join(chance.choices(("a", "1", ",", "\n", "é", "\x1b", "\0", "日"), k=9)).encode()
    return Sample("noise", chance.choice(_STARTS) + chance.choice((tail, text)))


__all__ = ["NUMBERS", "Sample", "archive", "bare_npy", "index", "noise", "npz", "safetensors"]
