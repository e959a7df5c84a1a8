"""The .pt format: torch's own reader, held to tensors in lists and dicts and nothing else."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attncli.errors import DataError
from attncli.files.container import TensorFile
from attncli.files.elements import BY_NAME
from attncli.files.limits import require_memory
from attncli.files.tensor import TensorHeader
from attncli.files.text import place, shown

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

# Far beyond any real file: a few bytes can describe endlessly nested lists.
_MOST_ENTRIES = 250_000
_LONGEST_NAME = 10_000

_SAVE = "Save tensors alone, for example torch.save({'q': q, 'k': k, 'v': v}, 'layer.pt')."


def open_torch(local: Path, source: str, *, mapped: bool, expanded: int = 0) -> TensorFile:
    """Open a torch file; nested lists and dicts become dotted names, a bare tensor has none.

    Args:
        mapped: map the data into memory; else read them all (old or compressed files).
        expanded: bytes of the data when they are read and compressed; 0 for the file's size.

    Raises:
        DataError: the file is damaged or holds anything but tensors, lists, dicts and numbers.
        ResourceError: the data must be read at once and do not fit in memory.
    """
    where = place(source)
    if not mapped:
        require_memory(where, expanded or local.stat().st_size)
    tensors = _flatten(_loaded(local, where, mapped), where)
    if not tensors:
        raise DataError(where, "expected tensors, got a torch file without any", _SAVE)
    headers = {name: _header(name, tensor) for name, tensor in tensors.items()}

    def load(header: TensorHeader, where: str) -> NDArray[Any]:
        return _to_numpy(tensors[header.name], header.dtype, where)

    return TensorFile(source, "pt", tuple(headers.values()), load)


def _loaded(local: Path, where: str, mapped: bool) -> object:
    import torch

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
    import torch

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
    import torch

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
    import torch

    if tensor.layout is not torch.strided or tensor.is_nested or tensor.device.type != "cpu":
        raise DataError(where, "expected a dense tensor with its data, got another kind", _SAVE)
    element = BY_NAME[dtype]
    plain = tensor.detach().resolve_neg()
    if element.is_raw:
        plain = plain.view(getattr(torch, element.physical.name))
    array: NDArray[Any] = plain.numpy()
    return array
