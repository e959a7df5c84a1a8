"""A tensor between file and mathematics: its bytes in NumPy, its true dtype beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a file says about one tensor before its data are read.

    Attributes:
        name: the tensor's name in the file; None for the one tensor of a `.npy` file.
        shape: lengths of the axes.
        dtype: torch's name of the element type: "float32", "bfloat16", "float8_e4m3fn",
            "int64", "bool"; NumPy's spelling such as "|V2" or "<U3" where torch has no such type.
    """

    name: str | None
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as it was stored.

    Attributes:
        source: the file as the user named it, with "::NAME" where the file holds several.
        name: the tensor's name in the file; None for a `.npy` file.
        dtype: as in `TensorHeader`.
        array: the data, native byte order. bfloat16 is held as its bit pattern in uint16 and
            float8 in uint8, since NumPy has neither, and so are the raw bytes of "|V2" and "|V1";
            every other dtype is itself.
    """

    source: str
    name: str | None
    dtype: str
    array: NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes."""
        shape: tuple[int, ...] = self.array.shape
        return shape

    @property
    def physical(self) -> np.dtype[Any]:
        """The NumPy dtype that holds the bytes."""
        return self.array.dtype
