"""All that takes torch: the .pt format, and stored tensors of every format as torch's own.

torch's reader is held to tensors in lists and dicts and nothing else.
"""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attncli.errors import DataError, UsageError
from attncli.files.container import TensorFile
from attncli.files.limits import require_memory
from attncli.files.tensor import BY_NAME, FLOATS, StoredTensor, TensorHeader, true_dtype
from attncli.files.text import place, shown

# Far beyond any real file: a few bytes can describe endlessly nested lists.
_MOST_ENTRIES = 250_000
_LONGEST_NAME = 10_000

_SAVE = "Save tensors alone, for example torch.save({'q': q, 'k': k, 'v': v}, 'layer.pt')."


def open_torch(local: Path, source: str) -> TensorFile:
    """Open a torch file; nested lists and dicts become dotted names, a bare tensor has none.

    Its data are mapped into memory; those of an old or a compressed file are read at once.

    Raises:
        DataError: the file is damaged or holds anything but tensors, lists, dicts and numbers.
        ResourceError: the data must be read at once and do not fit in memory.
    """
    where = place(source)
    members = zipfile.ZipFile(local).infolist() if zipfile.is_zipfile(local) else []
    mapped = bool(members) and all(member.compress_type == 0 for member in members)
    if not mapped:
        expanded = sum(member.file_size for member in members)
        require_memory(where, expanded or local.stat().st_size)
    tensors = _flatten(_loaded(local, where, mapped), where)
    if not tensors:
        raise DataError(where, "expected tensors, got a torch file without any", _SAVE)
    headers = {name: _header(name, tensor) for name, tensor in tensors.items()}

    def load(header: TensorHeader, where: str) -> NDArray[Any]:
        return _to_numpy(tensors[header.name], header.dtype, where)

    return TensorFile(source, "pt", tuple(headers.values()), load)


def _loaded(local: Path, where: str, mapped: bool) -> object:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value: object = torch.load(local, "cpu", weights_only=True, mmap=mapped)
    # A damaged file makes torch raise nearly anything; its text is not fit to show, since it
    # holds terminal codes and advice to load without protection.
    except Exception as error:
        if any(word in str(error).lower() for word in ("global", "instantiate")):
            problem = "expected tensors in lists and dicts, got other Python objects"
            raise DataError(where, problem, _SAVE) from None
        problem = "expected a torch file that can be read, got a damaged or unsupported one"
        raise DataError(where, problem, "Copy or write it again with torch.save.") from None
    return value


def _flatten(value: object, where: str) -> dict[str | None, torch.Tensor]:
    """The tensors within lists and dicts by dotted name, in order."""
    found: dict[str | None, torch.Tensor] = {}
    pending: list[tuple[str | None, Any]] = [(None, value)]
    entries = 0
    while pending:
        name, item = pending.pop()
        entries += 1
        if entries + len(pending) > _MOST_ENTRIES or len(name or "") > _LONGEST_NAME:
            raise DataError(where, "expected tensors in lists and dicts, got endless nesting")
        if not isinstance(item, torch.Tensor):
            pending.extend(reversed(_children(name, item)))
        elif name in found:
            raise DataError(where, f"expected each name once, got {shown(str(name))} twice")
        else:
            found[name] = item
    return found


def _children(name: str | None, item: object) -> list[tuple[str, Any]]:
    """What a list or dict holds that is or may hold a tensor; nothing for other objects."""
    prefix = "" if name is None else f"{name}."
    pairs: list[tuple[Any, Any]] = []
    if isinstance(item, Mapping):
        pairs = list(item.items())
    elif isinstance(item, (list, tuple)):
        pairs = list(enumerate(item))
    inner = (torch.Tensor, Mapping, list, tuple)
    return [(f"{prefix}{key}", child) for key, child in pairs if isinstance(child, inner)]


def _header(name: str | None, tensor: torch.Tensor) -> TensorHeader:
    return TensorHeader(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _to_numpy(tensor: torch.Tensor, dtype: str, where: str) -> NDArray[Any]:
    """The tensor's memory as an array; bfloat16 and float8 as their bit patterns."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.device.type != "cpu":
        raise DataError(where, "expected a dense tensor with its data, got another kind", _SAVE)
    element = BY_NAME[dtype]
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
    if name not in FLOATS:
        raise UsageError("«dtype»", f"expected one of {', '.join(FLOATS)}, got {shown(name)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def as_torch(stored: StoredTensor, dtype: str | None = None) -> torch.Tensor:
    """Return the tensor on the CPU, bit for bit, sharing its memory where torch can.

    Args:
        stored: a tensor as read from a file.
        dtype: the floating-point type to cast to; None keeps the stored one. For bytes that
            the file does not name ("|V2", "|V1") it says what they are, and nothing is cast.
            A value too large for it becomes infinite.

    Raises:
        DataError: the element type is not accepted, or its bytes need `dtype`.
        UsageError: `dtype` is no floating-point type.
        ResourceError: torch cannot share the memory, and a copy does not fit.
    """
    target = None if dtype is None else torch_dtype(dtype)
    name = true_dtype(stored, dtype)
    array = stored.array
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
