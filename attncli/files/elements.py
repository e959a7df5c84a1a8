"""Element types: what torch, NumPy and safetensors call them, and which are accepted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from attncli.errors import DataError


@dataclass(frozen=True, slots=True)
class Element:
    """One element type.

    Attributes:
        name: torch's name.
        physical: the NumPy dtype that holds the bytes, native byte order.
        code: the name in a safetensors header; None where that format has none.
    """

    name: str
    physical: np.dtype[Any]
    code: str | None

    @property
    def is_raw(self) -> bool:
        """Whether NumPy can only hold the bit pattern."""
        return self.physical.name != self.name


_TABLE: tuple[tuple[str, str, str | None], ...] = (
    ("bool", "?", "BOOL"),
    ("uint8", "u1", "U8"),
    ("int8", "i1", "I8"),
    ("uint16", "u2", "U16"),
    ("int16", "i2", "I16"),
    ("uint32", "u4", "U32"),
    ("int32", "i4", "I32"),
    ("uint64", "u8", "U64"),
    ("int64", "i8", "I64"),
    ("float16", "f2", "F16"),
    ("bfloat16", "u2", "BF16"),
    ("float32", "f4", "F32"),
    ("float64", "f8", "F64"),
    ("float8_e4m3fn", "u1", "F8_E4M3"),
    ("float8_e5m2", "u1", "F8_E5M2"),
    ("float8_e4m3fnuz", "u1", "F8_E4M3FNUZ"),
    ("float8_e5m2fnuz", "u1", "F8_E5M2FNUZ"),
    ("float8_e8m0fnu", "u1", "F8_E8M0"),
)
BY_NAME = {name: Element(name, np.dtype(char), code) for name, char, code in _TABLE}
BY_CODE = {element.code: element for element in BY_NAME.values() if element.code}

# Bytes without a meaning of their own: how NumPy stores bfloat16 and float8.
UNDECLARED: dict[str, np.dtype[Any]] = {"|V2": np.dtype("u2"), "|V1": np.dtype("u1")}

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
    if dtype in BY_NAME or dtype in UNDECLARED:
        return
    advice = ""
    if dtype == "object":
        advice = "Object arrays hold pickled Python objects, which are never loaded."
    elif dtype.startswith("complex"):
        advice = "Save the real and the imaginary part as two arrays."
    elif dtype == "structured":
        advice = "Save each field as an array of its own."
    raise DataError(where, f"expected {_ACCEPTED}, got {dtype}", advice)
