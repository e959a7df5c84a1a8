"""All that takes torch: the .pt format, and stored tensors of every format as torch's own.

torch's reader is held to tensors in lists and dicts; whatever else is in a file is only named.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from attncli.errors import DataError, choice_of
from attncli.files.floats import FloatType
from attncli.files.mapped import guard
from attncli.files.npy import DAMAGE
from attncli.files.tensor import (
    BY_NAME,
    StoredTensor,
    TensorFile,
    TensorHeader,
    bits_of,
    byte_size,
    true_dtype,
)
from attncli.files.text import listed, place, shown
from attncli.limits import require_memory

# Far beyond any real file: a few bytes can describe endlessly nested lists.
_MOST_ENTRIES = 250_000
_LONGEST_NAME = 10_000
_MOST_CLASSES = 100

# Where torch's reader says which class it does not know.
_CLASS = re.compile(r"GLOBAL (\S+) was not an allowed")
_TYPES = (torch.Size, torch.dtype, torch.device, torch.layout)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, set, *_TYPES)

# What is no dense tensor: how its class is called, what messages call it, what to do about it.
_KINDS: tuple[tuple[str, str, str], ...] = (
    (r"NestedTensor|_rebuild_njt|_DimRange", "a nested tensor", ""),
    (r"torch\.distributed\.(tensor|device_mesh)", "a DTensor", "Save its full_tensor()."),
    (r"MaskedTensor", "a masked tensor", "Save its data and its mask as tensors of their own."),
    (r"numpy\.", "a NumPy array", "Save arrays with numpy.savez, or as torch.from_numpy(array)."),
    (r"torch\.nn\.", "a module", "Save the tensors that it computes, not the module."),
)
_ADVICE = {
    "a nested tensor": "Save its parts as tensors of their own, or to_padded_tensor(0.0) with "
    "«key_lengths» and «query_lengths» beside it.",
    "a sparse tensor": "Save its to_dense().",
    "a meta tensor": "It has a shape and no data: save the tensor where its data are.",
    "a quantised tensor": "Save its dequantize().",
    "a storage": "Save the tensor that it belongs to, which knows its shape.",
} | {what: advice for _, what, advice in _KINDS if advice}
_OTHERWISE = "Save the tensors themselves, in a dict."
# Expanded tensors, whose strides are 0, may hold each stored number so many times.
_MOST_REPEATED = 1 << 20


class _Other:
    """What stands in the place of an object whose class is not loaded, for it may run code."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __setstate__(self, state: object) -> None:
        """Take any state, and keep none."""


class _OtherTensor(torch.Tensor):
    """The same for a class of tensors: torch makes those itself, and wants such a class for it."""

    path: ClassVar[str]

    def __new__(cls, *_: object, **__: object) -> Any:
        """Not from a tensor, so no tensor."""
        return _Other(cls.path)

    def __setstate__(self, state: object) -> None:
        """Take any state, and keep none."""

    @classmethod
    def __torch_dispatch__(cls, *_: object, **__: object) -> object:
        """Compute nothing."""
        return NotImplemented


def open_torch(local: Path, source: str) -> TensorFile:
    """Open a torch file; nested lists and dicts become dotted names, a bare tensor has none.

    Its data are mapped into memory; those of an old or a compressed file are read at once. What
    is no dense tensor (nested ones, modules, objects of any class) is named, never loaded.

    Raises:
        DataError: the file is damaged or holds no dense tensor.
        ResourceError: the data must be read at once and do not fit in memory.
    """
    where = place(source)
    members = zipfile.ZipFile(local).infolist() if _begins(local, b"PK") else []
    mapped = bool(members) and all(member.compress_type == 0 for member in members)
    if not mapped:
        expanded = sum(member.file_size for member in members)
        require_memory(where, expanded or local.stat().st_size)
    found = _flatten(_loaded(local, where, mapped), where)
    others = {name: what for name, item in found.items() if (what := _kind(item))}
    tensors = {name: item for name, item in found.items() if name not in others}
    if not tensors:
        raise _no_tensors(where, list(others.values()))
    for name, tensor in tensors.items():
        _refuse_boundless(where, name, tensor)
        if mapped:
            storage = tensor.untyped_storage()
            guard(storage.data_ptr(), storage.nbytes(), local)
    headers = [
        TensorHeader(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    ]

    def load(header: TensorHeader, where: str) -> NDArray[Any]:
        tensor = tensors[header.name]
        if tensor.nbytes > tensor.untyped_storage().nbytes():  # whoever copies it needs all of it
            require_memory(where, tensor.nbytes)
        return to_numpy(tensor)

    told = {str(name): (what, _ADVICE.get(what, _OTHERWISE)) for name, what in others.items()}
    return TensorFile(source, "pt", tuple(headers), load, others=told)


def _refuse_boundless(where: str, name: str | None, tensor: torch.Tensor) -> None:
    """Refuse strides of 0 that make terabytes of a few bytes, and lengths that NumPy has not.

    Raises:
        DataError: such a tensor.
    """
    at = where if name is None else f"{where}::{shown(name, 80)}"
    byte_size(at, tuple(tensor.shape), tensor.element_size())
    stored = max(1, tensor.untyped_storage().nbytes() // tensor.element_size())
    if tensor.numel() > _MOST_REPEATED * stored:
        got = f"{shown(name or 'a tensor', 80)} {tuple(tensor.shape)} of {stored:,} stored"
        raise DataError(where, f"expected tensors that are stored in full, got {got}")


def _no_tensors(where: str, others: list[str]) -> DataError:
    if not others:
        return DataError(where, "expected tensors, got a torch file without any", _OTHERWISE)
    problem = f"expected dense tensors, got a torch file of {listed(dict.fromkeys(others), 3)}"
    return DataError(where, problem, _ADVICE.get(others[0], _OTHERWISE))


def _loaded(local: Path, where: str, mapped: bool) -> object:
    """What the file holds; objects of classes that torch's reader does not know as `_Other`.

    A damaged file makes torch raise nearly anything; its text is not fit to show, since it holds
    terminal codes and advice to load without protection.
    """
    unknown: list[str] = []
    while True:
        stand_ins = [(_stand_in(path), path) for path in unknown]
        try:
            with (
                torch.serialization.safe_globals([*stand_ins, (_Other, "_Other")]),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")
                return torch.load(local, "cpu", weights_only=True, mmap=mapped)
        except Exception as error:
            more = [] if len(unknown) > _MOST_CLASSES else _unknown_classes(local, error)
        if not set(more) - set(unknown):
            break
        unknown += sorted(set(more) - set(unknown))
    if unknown:
        raise _no_tensors(where, sorted({_what(path) for path in unknown})) from None
    raise _unreadable(local, where) from None


def _unknown_classes(local: Path, error: Exception) -> list[str]:
    """The classes in a file that torch's reader, which raised `error`, does not know."""
    try:
        return torch.serialization.get_unsafe_globals_in_checkpoint(local)
    except Exception:
        # An old or a damaged file, or one of another protocol.
        named = _CLASS.search(str(error))
    return [] if named is None else [named[1] if "." in named[1] else f"builtins.{named[1]}"]


def _unreadable(local: Path, where: str) -> DataError:
    protocol = _protocol(local)
    if protocol is not None and protocol > 2:
        problem = f"expected a torch file of pickle protocol 2, got one of protocol {protocol}"
        return DataError(where, problem, "Save it without pickle_protocol.")
    problem = "expected a torch file that can be read, got a damaged or unsupported one"
    return DataError(where, problem, "Copy or write it again with torch.save.")


def _protocol(local: Path) -> int | None:
    """The pickle protocol that a file was written with, which two bytes tell."""
    try:
        if _begins(local, b"PK"):
            with zipfile.ZipFile(local) as archive:
                (pickled,) = (n for n in archive.namelist() if n.endswith("data.pkl"))
                head = archive.open(pickled).read(2)
        else:
            with local.open("rb") as stream:
                head = stream.read(2)
    except DAMAGE:
        return None
    return head[1] if len(head) == 2 and head[0] == 0x80 else None


def _begins(local: Path, start: bytes) -> bool:
    with local.open("rb") as stream:
        return stream.read(len(start)) == start


def _stand_in(path: str) -> Callable[..., object]:
    """What makes an `_Other`, or the container that it is like, in the place of a class."""
    if path == "collections.defaultdict":
        return lambda *_: OrderedDict()
    if path == "collections.deque":
        return lambda *_: []
    return type("_OtherTensor", (_OtherTensor,), {"path": path})


def _what(path: str) -> str:
    """What messages call an object of a class."""
    for pattern, what, _ in _KINDS:
        if re.search(pattern, path):
            return what
    return f"an object of {shown(path, 80)}"


def _kind(item: object) -> str | None:
    """What messages call an item that is no dense tensor with its data; None for one that is."""
    path = getattr(item, "path", None)
    if path is not None:
        return _what(path)
    if isinstance(item, (torch.TypedStorage, torch.UntypedStorage)):
        return "a storage"
    if isinstance(item, torch.Tensor) and item.is_nested:
        return "a nested tensor"
    if type(item) not in (torch.Tensor, torch.nn.Parameter):
        return _what(f"{type(item).__module__}.{type(item).__qualname__}")
    assert isinstance(item, torch.Tensor)
    if item.layout is not torch.strided:
        return "a sparse tensor"
    if item.device.type != "cpu":
        return f"a {item.device.type} tensor"
    return "a quantised tensor" if item.is_quantized else None


def _flatten(value: object, where: str) -> dict[str | None, Any]:
    """What lies within lists and dicts, but for plain values, by dotted name, in order."""
    found: dict[str | None, Any] = {}
    pending: list[tuple[str | None, Any]] = [(None, value)]
    entries = 0
    while pending:
        name, item = pending.pop()
        entries += 1
        if entries + len(pending) > _MOST_ENTRIES or len(name or "") > _LONGEST_NAME:
            raise DataError(where, "expected tensors in lists and dicts, got endless nesting")
        if isinstance(item, (Mapping, list, tuple)):
            prefix = "" if name is None else f"{name}."
            pairs = item.items() if isinstance(item, Mapping) else enumerate(item)
            children = [(f"{prefix}{key}", child) for key, child in pairs if _may_hold(child)]
            pending.extend(reversed(children))
        elif not _may_hold(item):
            continue
        elif name in found:
            raise DataError(where, f"expected each name once, got {shown(str(name))} twice")
        else:
            found[name] = item
    return found


def _may_hold(item: object) -> bool:
    """Whether an item may be or hold a tensor: plain values do not."""
    return not isinstance(item, _PLAIN)


def to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """The memory of a tensor on the CPU as an array; bfloat16 and float8 as their bit patterns."""
    element = BY_NAME[str(tensor.dtype).removeprefix("torch.")]
    plain = tensor.detach().resolve_neg()
    if element.is_raw:
        plain = plain.view(getattr(torch, element.physical.name))
    array: NDArray[Any] = plain.numpy()
    return array


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype that «dtype» names.

    Raises:
        UsageError: there is no such floating-point type; lists those there are.
    """
    dtype: torch.dtype = getattr(torch, choice_of(FloatType, name, "«dtype»"))
    return dtype


def as_torch(stored: StoredTensor, dtype: str | None = None) -> torch.Tensor:
    """Return the tensor on the CPU, bit for bit, sharing its memory where torch can.

    Args:
        stored: a tensor as read from a file.
        dtype: the floating-point type to cast to; None keeps the stored one. For bytes that
            the file does not name ("|V2", "|V1", and integers of the width of a narrow float) it
            says what they are, and nothing is cast.
            A value too large for it becomes infinite.

    Raises:
        DataError: the element type is not accepted, or its bytes need `dtype`.
        UsageError: `dtype` is no floating-point type.
        ResourceError: torch cannot share the memory, and a copy does not fit.
    """
    target = None if dtype is None else torch_dtype(dtype)
    name = true_dtype(stored, dtype)
    array = bits_of(stored, name)
    negative = any(stride < 0 for stride in array.strides)
    uneven = any(stride % array.itemsize for stride in array.strides)
    if negative or uneven or not array.flags.aligned or not array.dtype.isnative:
        require_memory(place(stored.source), array.nbytes)
        array = np.array(array, array.dtype.newbyteorder("="), order="C")
    with warnings.catch_warnings():
        # A map of a file larger than memory is read-only, and nobody writes to inputs.
        warnings.filterwarnings("ignore", message=".*not writable.*", category=UserWarning)
        tensor = torch.from_numpy(array)
    if BY_NAME[name].is_raw:
        tensor = tensor.view(getattr(torch, name))
    return tensor if target is None else tensor.to(target)
