"""From stored bytes to numbers to compute with: torch tensors or NumPy floats."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from attncli.errors import DataError, UsageError
from attncli.files.elements import BY_NAME, UNDECLARED, require_accepted
from attncli.files.limits import require_memory
from attncli.files.tensor import StoredTensor
from attncli.files.text import place, shown

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

FLOATS = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype that `--dtype` names.

    Raises:
        UsageError: there is no such floating-point type; lists those there are.
    """
    import torch

    if name not in FLOATS:
        raise UsageError("--dtype", f"expected one of {', '.join(FLOATS)}, got {shown(name)}")
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
    import torch

    target = None if dtype is None else torch_dtype(dtype)
    name = _declared(stored, dtype)
    tensor = _shared(stored)
    if BY_NAME[name].is_raw:
        tensor = tensor.view(getattr(torch, name))
    return tensor if target is None else tensor.to(target)


def _declared(stored: StoredTensor, dtype: str | None) -> str:
    """The true element type: the stored name, or for bytes without one what `dtype` says."""
    where = place(stored.source)
    require_accepted(where, stored.dtype)
    if stored.dtype not in UNDECLARED:
        return stored.dtype
    wide = UNDECLARED[stored.dtype].itemsize == 2
    choices = ["bfloat16"] if wide else [name for name in FLOATS if name.startswith("float8")]
    if dtype in choices:
        return dtype
    problem = f"expected a named element type, got {stored.dtype}, {'2' if wide else '1'} raw bytes"
    kind = "bfloat16" if wide else "float8"
    raise DataError(where, problem, f"If they are {kind}, say so: --dtype {choices[0]}.")


def _shared(stored: StoredTensor) -> torch.Tensor:
    """A torch tensor over the array's memory, or over a copy where torch cannot use it."""
    import torch

    array = stored.array
    negative = any(stride < 0 for stride in array.strides)
    uneven = any(stride % array.itemsize for stride in array.strides)
    if negative or uneven or not array.flags.aligned or not array.dtype.isnative:
        require_memory(place(stored.source), array.nbytes)
        array = np.array(array, array.dtype.newbyteorder("="), order="C")
    with warnings.catch_warnings():
        # A map of a file larger than memory is read-only, and nobody writes to inputs.
        warnings.filterwarnings("ignore", message=".*not writable.*", category=UserWarning)
        return torch.from_numpy(array)


def as_float(stored: StoredTensor, dtype: str | None = None) -> NDArray[Any]:
    """Return the values as float32, or as float64 from float64 and integers.

    Integers beyond 2⁵³ are rounded. Needs torch for float8 alone.

    Args:
        stored: a tensor as read from a file.
        dtype: what undeclared bytes are, as in `as_torch`; otherwise not used.

    Raises:
        DataError: the element type is not accepted, or its bytes need `dtype`.
    """
    name = _declared(stored, dtype)
    if name == "bfloat16":
        # bfloat16 is the upper half of a float32.
        return (stored.array.astype(np.uint32) << 16).view(np.float32)
    if name.startswith("float8"):
        return _float8(stored, name)
    if name in ("float32", "float64"):
        return stored.array
    return stored.array.astype(np.float32 if name == "float16" else np.float64)


def _float8(stored: StoredTensor, name: str) -> NDArray[Any]:
    import torch

    tensor = _shared(stored).view(getattr(torch, name))
    values: NDArray[Any] = tensor.to(torch.float32).numpy()
    return values
