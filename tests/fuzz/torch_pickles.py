"""Torch files, opcode by opcode: tensors of any strides, classes of any module, damaged pickles."""

from __future__ import annotations

import functools
import io
import pickletools
import struct
import warnings
import zipfile
from collections.abc import Sequence

import numpy as np
import torch
from chance import NAMES, NUMBERS, Chance
from containers import Sample, archive, names_of, shape_of

# What a pickle may ask for: to run, to import, to load without protection, or just of odd kinds.
GLOBALS = (
    *("os system", "posix system", "posix mkdir", "subprocess Popen", "builtins exec"),
    *("builtins eval",),
    *("builtins getattr", "builtins __import__", "builtins open", "antigravity x", "this s"),
    *("pty spawn",),
    *("fuzz_canary run", "importlib import_module", "webbrowser open", "shutil rmtree"),
    *("socket socket",),
    *("torch load", "torch.hub load", "torch.serialization load", "torch.storage _load_from_bytes"),
    *("torch.jit load", "torch.ops load_library", "torch.utils.cpp_extension load", "pickle loads"),
    *("numpy.core.multiarray _reconstruct", "numpy ndarray", "numpy dtype", "numpy.lib.npyio load"),
    *("torch._utils _rebuild_tensor", "torch._utils _rebuild_parameter"),
    *("torch._utils _rebuild_qtensor",),
    *("torch._utils _rebuild_sparse_tensor", "torch._utils _rebuild_meta_tensor_no_storage"),
    *("torch._utils _rebuild_nested_tensor", "torch._utils _rebuild_wrapper_subclass"),
    *("torch._tensor _rebuild_from_type_v2", "torch Tensor", "torch.nn.parameter Parameter"),
    *("torch Size",),
    *("torch device", "torch float32", "torch qint8", "torch.nn.modules.linear Linear"),
    *("torch Storage",),
    *("collections OrderedDict", "collections defaultdict", "collections deque"),
    *("collections Counter",),
    *("builtins set", "builtins bytearray", "builtins complex", "builtins int", "_codecs encode"),
    *("a.b C", "x y", " ", "\x1b[31m z", "é ü", "a" * 3000 + " b", "torch nn.Module"),
    *("torch _C._nn",),
)
# Class of a storage → bytes of an element, what NumPy reads, and what torch calls it.
STORAGES = {
    "FloatStorage": (4, "<f4", "float32"),
    "DoubleStorage": (8, "<f8", "float64"),
    "HalfStorage": (2, "<f2", "float16"),
    "BFloat16Storage": (2, "<u2", "bfloat16"),
    "LongStorage": (8, "<i8", "int64"),
    "IntStorage": (4, "<i4", "int32"),
    "ShortStorage": (2, "<i2", "int16"),
    "CharStorage": (1, "|i1", "int8"),
    "ByteStorage": (1, "|u1", "uint8"),
}
ODD_STORAGES = ("ComplexFloatStorage", "QInt8Storage", "UntypedStorage", "NoStorage", "Tensor")


def whole(number: int) -> bytes:
    """The opcodes of a whole number."""
    if 0 <= number < 256:
        return b"K" + bytes((number,))
    if -(2**31) <= number < 2**31:
        return b"J" + struct.pack("<i", number)
    size = number.bit_length() // 8 + 1
    return b"\x8a" + bytes((size,)) + number.to_bytes(size, "little", signed=True)


def text(value: str) -> bytes:
    """The opcodes of a text."""
    encoded = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def named(path: str) -> bytes:
    """The opcodes of a class or function, "module name"."""
    module, _, name = path.partition(" ")
    return b"c" + f"{module}\n{name}\n".encode()


def several(items: Sequence[bytes]) -> bytes:
    """The opcodes of a tuple."""
    return b"(" + b"".join(items) + b"t"


class Pickle:
    """A torch pickle in the making, and the storages that it names."""

    def __init__(self, chance: Chance) -> None:
        self.chance = chance
        self.storages: list[tuple[str, int, bytes]] = []  # class, elements, data

    def file(self) -> tuple[bytes, dict[str | None, tuple[str, np.ndarray]]]:
        """The opcodes of a dict of tensors, and what is in it while it is sound."""
        chance, sound = self.chance, {}
        entries = b""
        for name in names_of(chance, chance.randint(1, 3)):
            item, read = self._tensor()
            sound[name] = read
            key = chance.amiss(text(name), (whole(3), b"N", b"(t", text("\x1b"), named("a b")))
            entries += key + chance.amiss(item, self._odd())
        body = b"}(" + entries + b"u"
        if chance.random() < 0.1:
            body = named("collections OrderedDict") + b")R(" + entries + b"u"
        if chance.random() < 0.1:
            body = b"](" + body + b"e"
            sound = {f"0.{name}": read for name, read in sound.items()}
        return b"\x80" + chance.amiss(
            b"\2", (b"\0", b"\3", b"\4", b"\5", b"\xff")
        ) + body + b".", sound

    def _tensor(self) -> tuple[bytes, tuple[str, np.ndarray]]:
        chance = self.chance
        kind = chance.choice(tuple(STORAGES))
        size, physical, name = STORAGES[kind]
        shape = shape_of(chance, 3)
        extent = int(np.prod(shape, dtype=np.int64))
        offset, order = chance.choice((0, 0, 2)), list(range(len(shape)))
        count = extent + offset + chance.choice((0, 0, 3))
        data = chance.randbytes(count * size)
        chance.shuffle(order)
        strides = _strides(shape, order)
        shared = self.storages and chance.random() < 0.1 and chance.amiss(False, (True,))
        at = chance.randrange(len(self.storages)) if shared else len(self.storages)
        if not shared:
            self.storages.append((kind, count, data))
        stored = (
            text("storage"),
            named("torch " + chance.amiss(kind, ODD_STORAGES)),
            text(str(at)),
        )
        place = chance.amiss("cpu", ("cuda:0", "meta", "xla", "\x1b", "", "mps"))
        stored = (*stored, text(place), whole(chance.near(count)))
        arguments = [
            chance.amiss(several(stored), (b"N", b"(t", several(stored[:3]))) + b"Q",
            whole(chance.near(offset)),
            several([whole(chance.near(length)) for length in shape]),
            several([whole(chance.amiss(chance.near(step), (0,))) for step in strides]),
            chance.amiss(b"\x89", (b"\x88", b"N", whole(7))),
            named("collections OrderedDict") + b")R",
        ]
        rebuild = chance.amiss("torch._utils _rebuild_tensor_v2", GLOBALS)
        item = named(rebuild) + several(arguments) + b"R"
        flat = np.frombuffer(data, physical)[offset:]
        steps = [step * size for step in strides]
        return item, (name, np.lib.stride_tricks.as_strided(flat, shape, steps))

    def _odd(self) -> tuple[bytes, ...]:
        """Things that are no tensor, or no pickle."""
        chance = self.chance
        asked = named(chance.choice(GLOBALS))
        argument = chance.choice(
            (text("touch fuzz-canary"), whole(chance.choice(NUMBERS)), b"N", b"(t")
        )
        called = several([argument] * chance.randint(0, 3))
        new = text(chance.choice(NAMES)) + text("x") + b"\x93"
        return (
            *(asked, asked + called + b"R", asked + called + b"\x81"),
            *(b"(" + asked + argument + b"o",),
            *(asked + called + b"R}b", asked + called + b"R(" + text("a") + argument + b"db"),
            *(b"(i" + asked[1:], new + b")R", b"\x82\1", b"\x83\1\0", b"h\5", b"j" + b"\xff" * 4),
            *(b"\x8b" + struct.pack("<i", 2**31 - 1), b"X" + b"\xff" * 4),
            *(b"B" + struct.pack("<I", 2**31),),
            *(b"\x8a\xff", b"\x8e" + b"\xff" * 8, b"\x95" + b"\xff" * 8, b"I1" * 3000 + b"\n"),
            *(b"V\\ud800\n",),
            *(b"(" * 3000, b"]" * 3000, b"0" * 5, b"2" * 5, b"R", b"t", b"u", b"s", b"e", b"a"),
            *(b"b", b"Q"),
            *(b"]q\0h\0a", b"}q\0" + text("a") + b"h\0s", b")" * 10 + b"\x85" * 500),
            *(b"G" + b"\x7f" * 8,),
            *(b"N", b"\x88", whole(2**70), text("\x1b[31m"), b"](K\1K\2e", b"\x8f(K\1\x90"),
            *(b"C\3abc",),
            *(asked + b"(t\x81q\1h\1" + called + b"b", b"P0\n", text("storage") + b"Q"),
            *(whole(1) + b"Q",),
        )


def _strides(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    """Strides of a tensor whose axes lie in memory in the given order, the last one densest."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis], step = step, step * max(shape[axis], 1)
    return strides


def torch_file(chance: Chance) -> Sample:
    """A file of either of torch's two formats."""
    made = Pickle(chance)
    pickled, sound = made.file()
    pickled = _shaken(chance, pickled)
    if chance.random() < 0.3:
        return _finished(chance, "legacy", _legacy(chance, made, pickled), sound)
    root = chance.amiss("archive", NAMES)
    members = [
        (f"{root}/data.pkl", pickled),
        (f"{root}/byteorder", chance.amiss(b"little", (b"big", b"x"))),
    ]
    for at, (_, _, data) in enumerate(made.storages):
        members.append((f"{root}/data/{at}", chance.mutated(data)))
    members.append((f"{root}/version", chance.amiss(b"3\n", (b"", b"99", b"x", b"-1"))))
    methods = chance.choice(((0,), (0,), (0,), (8,)))
    return _finished(chance, "pt", archive(chance, members, methods), sound)


def _finished(chance: Chance, kind: str, data: bytes, sound: dict) -> Sample:  # type: ignore[type-arg]
    changed = chance.mutated(data)
    if len(sound) == 1 and chance.is_sound:  # one tensor among plain values keeps its name
        return Sample(kind, changed, sound)
    return Sample(kind, changed, sound if chance.is_sound else None)


def _legacy(chance: Chance, made: Pickle, pickled: bytes) -> bytes:
    """The format of before 1.6: five pickles, then the storages."""
    magic = b"\x80\2\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
    protocol = b"\x80\2M" + chance.amiss(b"\xe9\3", (b"\0\0", b"\xff\xff")) + b"."
    order = chance.amiss(b"\x88", (b"\x89", b"N"))
    system = b"\x80\2}(" + text("little_endian") + order + text("protocol_version") + b"M\xe9\3"
    keys = b"".join(text(str(at)) for at in range(len(made.storages)))
    data = b"".join(
        struct.pack("<Q", chance.near(count) % 2**64) + stored for _, count, stored in made.storages
    )
    # Its storages carry a sixth field, the view they are of.
    old = pickled.replace(b"tQ", b"NtQ")
    return magic + protocol + system + b"u." + old + b"\x80\2](" + keys + b"e." + data


def _shaken(chance: Chance, pickled: bytes) -> bytes:
    """The pickle with whole opcodes missing, there twice, or replaced."""
    if chance.random() >= chance.rate:
        return pickled
    chance.is_sound = False
    try:
        starts = [at for _, _, at in pickletools.genops(pickled) if at is not None]
    except ValueError:
        return pickled
    a, b = sorted(chance.choices(starts, k=2))
    odd = chance.choice(Pickle(chance)._odd())
    return (
        pickled[:a] + chance.choice((odd, b"", pickled[a:b] * 2, odd + pickled[a:b])) + pickled[b:]
    )


@functools.cache
def other_files() -> tuple[list[tuple[str, bytes]], ...]:
    """The members of torch files that hold what is no dense tensor, as torch itself writes them."""
    dense = torch.ones(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is no longer meant to be used
        kinds = (
            dense.to_sparse(),
            dense.to_sparse_csr(),
            torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
            torch.quantize_per_channel(dense, torch.ones(2), torch.zeros(2), 0, torch.qint8),
            torch.nested.nested_tensor([dense, dense[:1]]),
            torch.nested.nested_tensor([dense, dense[:1]], layout=torch.jagged),
            dense.to("meta"),
            dense.expand(5, 2, 3),
            torch.ones(1).expand(1000),
            torch.view_as_real(torch.ones(3) * 1j),
            (torch.ones(3) * 1j).conj(),
            torch.nn.Parameter(dense),
            torch.nn.Linear(2, 2),
            dense.storage(),
            dense.numpy(),
            dense.to(torch.float8_e4m3fn),
        )
        files = []
        for kind in kinds:
            stream = io.BytesIO()
            torch.save({"q": dense, "other": kind, "meta": {"n": 1, "s": {2}}}, stream)
            with zipfile.ZipFile(stream) as packed:
                files.append([(name, packed.read(name)) for name in packed.namelist()])
    return tuple(files)


def other_file(chance: Chance) -> Sample:
    """One of those, with its pickle shaken and its archive built anew."""
    members = [
        (name, _shaken(chance, data) if name.endswith("data.pkl") else chance.mutated(data))
        for name, data in chance.choice(other_files())
    ]
    return Sample("other pt", chance.mutated(archive(chance, members, (0,))))
