"""The floating-point types that tensors may have, by torch's names and by those in use for them."""

from __future__ import annotations

from enum import StrEnum


class FloatType(StrEnum):
    """A floating-point type by torch's name; made from a short name, too, as "half"."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    FLOAT8_E4M3FNUZ = "float8_e4m3fnuz"
    FLOAT8_E5M2FNUZ = "float8_e5m2fnuz"
    FLOAT8_E8M0FNU = "float8_e8m0fnu"

    @classmethod
    def _missing_(cls, value: object) -> FloatType | None:
        name = SHORT_FLOATS.get(str(value))
        return None if name is None else cls(name)


SHORT_FLOATS = {"half": "float16", "fp16": "float16", "f16": "float16", "bf16": "bfloat16"}
SHORT_FLOATS |= {"float": "float32", "fp32": "float32", "f32": "float32"}
SHORT_FLOATS |= {"double": "float64", "fp64": "float64", "f64": "float64"}
