"""An opened file of tensors, whatever its format."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from attncli.errors import DataError
from attncli.files.tensor import StoredTensor, TensorHeader, require_accepted
from attncli.files.text import listed, place, shown


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A file of tensors whose headers are known and whose data are read on demand.

    Attributes:
        source: the file as the user named it; "-" for standard input.
        format: "npy", "npz", "safetensors" or "pt", told by content.
        headers: what the file holds, in file order; never empty.
        load: reads the data of a header, given what messages call it; use `read`.
        metadata: group → that group's own options and labels (safetensors key "attncli").
        warnings: what the user should know of the file; reading may add to it.
        others: what the file holds beside dense tensors: name → what it is, and advice.
        holders: name → the file that holds the tensor, where this one stands for several.
    """

    source: str
    format: str
    headers: tuple[TensorHeader, ...]
    load: Callable[[TensorHeader, str], NDArray[Any]]
    metadata: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    others: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    holders: Mapping[str | None, TensorFile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Say what is left out."""
        if self.others:
            told = listed(f"{name} ({what})" for name, (what, _) in self.others.items())
            self.warnings.append(f"{place(self.source)}: left out as no dense tensor: {told}")

    def read(self, name: str | None = None) -> StoredTensor:
        """Read one tensor: mapped into memory where the format allows it.

        Args:
            name: a name of `headers`; None for the only tensor of the file.

        Raises:
            DataError: there is no such tensor, its data are damaged or not numbers.
            ResourceError: the data do not fit in memory.
        """
        header = self.find(name)
        if header.name in self.holders:
            return self.holders[header.name].read(header.name)
        where = place(self.source) + self._suffix(header)
        require_accepted(where, header.dtype)
        source = shown(self.source) + self._suffix(header)
        return StoredTensor(source, header.name, header.dtype, self.load(header, where))

    def find(self, name: str | None = None) -> TensorHeader:
        """The header of a name; of the only tensor of the file for None.

        Raises:
            DataError: there is no such tensor.
        """
        if name is None and len(self.headers) == 1:
            return self.headers[0]
        for header in self.headers:
            if header.name == name:
                return header
        if name is not None and name in self.others:
            what, advice = self.others[name]
            where = f"{place(self.source)}::{shown(name)}"
            raise DataError(where, f"expected a dense tensor, got {what}", advice)
        wanted = "one tensor" if name is None else f"a tensor named {shown(name)}"
        present = listed(header.name for header in self.headers)
        raise DataError(place(self.source), f"expected {wanted}, got {present}")

    def _suffix(self, header: TensorHeader) -> str:
        if header.name is None or len(self.headers) + len(self.others) == 1:
            return ""
        return "::" + shown(header.name)


def map_file(local: Path) -> NDArray[np.uint8]:
    """Map a whole file that is not empty: uint8, (bytes,), private to this process."""
    try:
        # Copy-on-write: torch warns of arrays that cannot be written.
        data = np.memmap(local, np.uint8, "c")
    except OSError:
        # Private pages count as memory: a file larger than the machine's must be read-only.
        data = np.memmap(local, np.uint8, "r")
    return np.asarray(data)


def array_at(
    data: NDArray[np.uint8],
    start: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    order: Literal["C", "F"] = "C",
) -> NDArray[Any]:
    """Return the array of `shape` and `dtype` that starts at byte `start` of `data`."""
    nbytes = math.prod(shape) * dtype.itemsize
    return data[start : start + nbytes].view(dtype).reshape(shape, order=order)


def byte_size(where: str, shape: tuple[int, ...], itemsize: int) -> int:
    """Return the size of a tensor in the unit of `itemsize`.

    Raises:
        DataError: NumPy cannot hold an array of this shape.
    """
    if len(shape) > 32 or itemsize * math.prod(max(length, 1) for length in shape) >= 2**63:
        raise DataError(where, f"expected a shape that can be held, got {shape_text(shape)}")
    return itemsize * math.prod(shape)


def shape_text(shape: tuple[int, ...]) -> str:
    """Return a shape for a message, cut short where it is absurd."""
    return shown(str(shape), 80)
