"""Opened files of tensors, whatever their format, and tensors between file and mathematics.

A tensor is its bytes in NumPy, with its true element type beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from attncli.errors import DataError
from attncli.files.floats import FloatType
from attncli.files.text import listed, place, shown


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a file says about one tensor before its data are read."""

    name: str | None  # the tensor's name in the file; None for the one tensor of a `.npy` file
    shape: tuple[int, ...]  # lengths of the axes
    # Torch's name of the element type: "float32", "bfloat16", "float8_e4m3fn", "int64", "bool";
    # NumPy's spelling such as "|V2" or "<U3" where torch has no such type.
    dtype: str


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """One tensor as it was stored."""

    source: str  # the file as the user named it, with "::NAME" where the file holds several
    name: str | None  # the tensor's name in the file; None for a `.npy` file
    dtype: str  # as in `TensorHeader`
    # The data, native byte order. bfloat16 is held as its bit pattern in uint16 and float8 in
    # uint8, since NumPy has neither, and so are the raw bytes of "|V2" and "|V1"; every other dtype
    # is itself.
    array: NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes."""
        shape: tuple[int, ...] = self.array.shape
        return shape


@dataclass(frozen=True, slots=True, eq=False)
class Element:
    """One element type."""

    name: str  # torch's name
    physical: np.dtype[Any]  # the NumPy dtype that holds the bytes, native byte order
    code: str  # the name in a safetensors header

    @property
    def is_raw(self) -> bool:
        """Whether NumPy can only hold the bit pattern."""
        return self.physical.name != self.name


_TABLE = (
    ("bool", "?", "BOOL"),
    ("uint8", "u1", "U8"),
    ("int8", "i1", "I8"),
    ("uint16", "u2", "U16"),
    ("int16", "i2", "I16"),
    ("uint32", "u4", "U32"),
    ("int32", "i4", "I32"),
    ("uint64", "u8", "U64"),
    ("int64", "i8", "I64"),
    ("float64", "f8", "F64"),
    ("float32", "f4", "F32"),
    ("float16", "f2", "F16"),
    ("bfloat16", "u2", "BF16"),
    ("float8_e4m3fn", "u1", "F8_E4M3"),
    ("float8_e5m2", "u1", "F8_E5M2"),
    ("float8_e4m3fnuz", "u1", "F8_E4M3FNUZ"),
    ("float8_e5m2fnuz", "u1", "F8_E5M2FNUZ"),
    ("float8_e8m0fnu", "u1", "F8_E8M0"),
)
BY_NAME = {name: Element(name, np.dtype(char), code) for name, char, code in _TABLE}
BY_CODE = {element.code: element for element in BY_NAME.values()}
FLOATS = tuple(map(str, FloatType))

# Bytes without a meaning of their own: how NumPy stores bfloat16 and float8.
UNDECLARED: dict[str, np.dtype[Any]] = {"|V2": np.dtype("u2"), "|V1": np.dtype("u1")}

# Integers of this size are no queries or keys, but the bits of any ordinary bfloat16 are.
LIKE_BITS = 0x2000

# What to do about types that are not accepted, by their names without their width.
_ADVICE = {
    "object": "Object arrays hold pickled Python objects, which are never loaded.",
    "complex": "Save the real and the imaginary part as two arrays.",
    "structured": "Save each field as an array of its own.",
}
_ACCEPTED = "float16, bfloat16, float32, float64, float8, integers or bool"


def name_of(dtype: np.dtype[Any]) -> str:
    """Return torch's name of a NumPy dtype, or NumPy's where torch has no such type."""
    if dtype.names is not None or dtype.subdtype is not None:
        return "structured"
    if dtype.kind in "biufc":
        return dtype.name
    return str(dtype)


def require_accepted(where: str, dtype: str) -> None:
    """Refuse an element type with which no attention can be computed.

    Raises:
        DataError: `dtype` (as in `TensorHeader`) is not accepted.
    """
    if dtype not in BY_NAME and dtype not in UNDECLARED:
        advice = _ADVICE.get(dtype.rstrip("0123456789"), "")
        raise DataError(where, f"expected {_ACCEPTED}, got {dtype}", advice)


def true_dtype(stored: StoredTensor, declared: str | None = None) -> str:
    """Return the element type: the stored name, or for bytes without one the declared one.

    Integers beside a declared float of their own width below 32 bits are bytes without one: NumPy
    has no bfloat16 and no float8, so people keep their bits as such.

    Raises:
        DataError: the type is not accepted, or its bytes need a declaration that fits them.
    """
    where = place(stored.source)
    require_accepted(where, stored.dtype)
    if declared is not None and _are_bits(stored.dtype, declared):
        return declared
    if stored.dtype not in UNDECLARED:
        return stored.dtype
    wide = UNDECLARED[stored.dtype].itemsize == 2
    choices = ["bfloat16"] if wide else [name for name in FLOATS if name.startswith("float8")]
    if declared in choices:
        return declared
    problem = f"expected a named element type, got {stored.dtype}, {'2' if wide else '1'} raw bytes"
    kind = "bfloat16" if wide else "float8"
    raise DataError(where, problem, f"If they are {kind}, say so: «dtype={choices[0]}».")


def _are_bits(dtype: str, declared: str) -> bool:
    if declared in ("bfloat16", "float16"):
        return dtype in ("uint16", "int16")
    return dtype in ("uint8", "int8") and declared in FLOATS and declared.startswith("float8")


def bits_of(stored: StoredTensor, name: str) -> NDArray[Any]:
    """The array with its bytes as those of an element type of their width."""
    physical = BY_NAME[name].physical
    same = stored.array.dtype.name == physical.name  # in whatever byte order
    return stored.array if same else stored.array.view(physical)


def doubts(stored: StoredTensor, declared: str | None = None) -> list[str]:
    """What to say where integers may be numbers or the bits of floats.

    Args:
        stored: a tensor as read from a file.
        declared: what «dtype» says.
    """
    file = place(stored.source.partition("::")[0])
    if declared is not None and _are_bits(stored.dtype, declared):
        return [
            f"{file}: {stored.dtype} values are taken as the bits of {declared}; without "
            "«dtype» they are numbers"
        ]
    if declared is None and stored.dtype in ("uint16", "int16") and stored.array.size:
        largest = max(int(stored.array.max()), -int(stored.array.min()))
        if largest >= LIKE_BITS:
            return [
                f"{file}: {stored.dtype} values as large as {largest} are taken as numbers; if "
                "they are the bits of floats, say «dtype=bfloat16» or «dtype=float16»"
            ]
    return []


def as_float(stored: StoredTensor, declared: str | None = None) -> NDArray[Any]:
    """Return the values as float32, or as float64 from float64 and integers, without torch.

    Integers beyond 2⁵³ are rounded.

    Args:
        stored: a tensor as read from a file.
        declared: what bytes that the file does not name are ("|V2", "|V1", and integers of the
            width of a narrow float); else not used.

    Raises:
        DataError: the element type is not accepted, or its bytes need `declared`.
    """
    name = true_dtype(stored, declared)
    array = bits_of(stored, name)
    if name == "bfloat16":
        # bfloat16 is the upper half of a float32.
        return (array.astype(np.uint32) << 16).view(np.float32)
    if name.startswith("float8"):
        values: NDArray[Any] = _float8_values(name)[array]
        return values
    if name in ("float32", "float64"):
        return array
    return array.astype(np.float32 if name == "float16" else np.float64)


def _float8_values(name: str) -> NDArray[Any]:
    """What each of the 256 bytes of a float8 type stands for: float32, (256,).

    Source: Micikevicius et al. 2022 (e4m3, e5m2), Noune et al. 2022 (fnuz), OCP MX 1.0 (e8m0).
    """
    code = np.arange(256)
    if name == "float8_e8m0fnu":
        return np.where(code < 255, np.exp2(code - 127.0), np.nan).astype(np.float32)
    digits = 3 if "e4m3" in name else 2
    own_zero = name.endswith("fnuz")  # no −0, whose byte is the only NaN
    bias = (1 << (6 - digits)) - (0 if own_zero else 1)
    exponent, mantissa = (code & 127) >> digits, (code & ((1 << digits) - 1)) / (1 << digits)
    size: NDArray[Any] = np.where(exponent > 0, 1 + mantissa, 2 * mantissa)
    size = size * np.exp2(exponent - bias)
    if own_zero:
        size[128] = np.nan
    elif name == "float8_e4m3fn":
        size[[127, 255]] = np.nan
    else:
        size[exponent == 31] = np.where(mantissa[exponent == 31] == 0, np.inf, np.nan)
    return np.where(code < 128, size, -size).astype(np.float32)


def bfloat16_bits(values: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Bit patterns of the nearest bfloat16, ties to even; NaN must not be among the values.

    A bfloat16 is the upper half of a float32.
    """
    with np.errstate(over="ignore"):
        bits = values.astype(np.float32).view(np.uint32)
    nearest = bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)  # carries into the upper half
    return (nearest >> 16).astype(np.uint16)


@dataclass(frozen=True, slots=True, eq=False)
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
    # Beside an axis of length 0 the others may be anything, even below 0 in torch's files; 16 is
    # room for whatever the elements are converted to.
    held = math.prod(max(length, 1) for length in shape) * max(itemsize, 16) < 2**63
    if len(shape) > 32 or min(shape, default=0) < 0 or not held:
        raise DataError(where, f"expected a shape that can be held, got {shape_text(shape)}")
    return itemsize * math.prod(shape)


def shape_text(shape: tuple[int, ...]) -> str:
    """Return a shape for a message, cut short where it is absurd."""
    return shown(str(shape), 80)
