"""Files of every kind, sound and broken, as bytes."""

from __future__ import annotations

import io
import json
import os
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attncli.errors import AttncliError


def npy(array: np.ndarray, allow_pickle: bool = False) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=allow_pickle)
    return stream.getvalue()


def npy_header(text: str) -> bytes:
    """A version 1 file with whatever stands in the place of the header's dictionary."""
    data = text.encode("latin-1")
    return b"\x93NUMPY\x01\x00" + len(data).to_bytes(2, "little") + data


def archive(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return stream.getvalue()


def npz(**arrays: np.ndarray) -> bytes:
    return archive({f"{name}.npy": npy(array) for name, array in arrays.items()})


def twice(name: str, data: bytes) -> bytes:
    """An archive in which two members share a name."""
    stream = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(stream, "w") as file:
        warnings.simplefilter("ignore")
        file.writestr(name, data)
        file.writestr(name, data)
    return stream.getvalue()


def flagged(data: bytes, flag: int) -> bytes:
    """An archive of one member with a flag set in both of its headers."""
    changed = bytearray(data)
    changed[6] |= flag
    changed[data.index(b"PK\x01\x02") + 8] |= flag
    return bytes(changed)


def safetensors(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def torch_file(value: object, legacy: bool = False) -> bytes:
    import torch

    stream = io.BytesIO()
    torch.save(value, stream, _use_new_zipfile_serialization=not legacy)
    return stream.getvalue()


@dataclass
class Record:
    """What somebody kept tensors in."""

    q: Any


# What torch.save takes beside dense tensors, and what messages call it.
OTHER_KINDS = {
    "nested": "a nested tensor",
    "jagged": "a nested tensor",
    "sparse": "a sparse tensor",
    "compressed": "a sparse tensor",
    "meta": "a meta tensor",
    "quantised": "a quantised tensor",
    "masked": "a masked tensor",
    "distributed": "a DTensor",
    "subclass": f"an object of {__name__}.Subclass",
    "storage": "a storage",
    "array": "a NumPy array",
    "module": "a module",
    "dataclass": f"an object of {__name__}.Record",
}
NOT_IN_OLD_FILES = ("nested", "module")  # where torch fails to read anything back


def other_kind(kind: str) -> Any:
    """One of `OTHER_KINDS`."""
    import torch

    dense = torch.ones(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of prototypes
        match kind:
            case "nested" | "jagged":
                layout = torch.jagged if kind == "jagged" else torch.strided
                return torch.nested.nested_tensor([dense, dense[:1]], layout=layout)
            case "quantised":
                return torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8)
            case "masked":
                return torch.masked.masked_tensor(dense, dense > 0)
            case "distributed":
                return _distributed(dense)
            case "subclass":
                global Subclass
                Subclass = type("Subclass", (torch.Tensor,), {"__module__": __name__})
                return dense.as_subclass(Subclass)
            case "module":
                return torch.nn.Linear(2, 2)
            case "sparse":
                return dense.to_sparse()
            case "compressed":
                return dense.to_sparse_csr()
            case "storage":
                return dense.storage()
            case "dataclass":
                return Record(dense)
    return dense.to("meta") if kind == "meta" else dense.numpy()


def _distributed(dense: Any) -> Any:
    import torch.distributed as dist
    from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return distribute_tensor(dense, DeviceMesh("cpu", [0]), [Replicate()])
    finally:
        dist.destroy_process_group()


class Trap:
    """An object whose unpickling makes a file at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def assert_fit_to_print(error: AttncliError) -> None:
    """One line of problem, at most one of advice, nothing a terminal would obey."""
    for line in (str(error), error.advice):
        assert line.isprintable(), repr(line)
        assert len(line) < 600, line
        assert "weights_only" not in line
        assert "allow_pickle" not in line
    assert ": " in str(error)
