"""Write a mask to a file, block by block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncli.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from attncli.attention.masks.mask import Mask

DTYPES = ("bool", "float16", "bfloat16", "float32", "float64")
BLOCK_CELLS = 1 << 24


def save_mask(mask: Mask, target: str, dtype: str) -> int:
    """Write bool (True = may attend) or additive (0 or the bias, −inf = hidden), (B, H, S_q, S_k).

    Axes along which the mask is alike everywhere are written 1 long. Returns the number of visible
    cells whose bias the dtype cannot hold, which come out as −inf.

    Raises:
        UsageError: a dtype that masks are not written in.
        DataError, ResourceError: the place cannot be written.
    """
    import numpy as np

    from attncli.files.writer import TensorSaver

    if dtype not in DTYPES:
        raise UsageError("--dtype", f"expected one of {', '.join(DTYPES[1:])}, got {dtype!r}")
    sizes = mask.sizes
    batches = sizes.batch if mask.differs(0) else 1
    biased = dtype != "bool" and mask.slopes is not None  # ALiBi has a slope for each head
    heads = sizes.heads if biased or mask.differs(1) else 1
    shape = (batches, heads, sizes.q_len, sizes.k_len)
    kind: Any = dtype if dtype == "bfloat16" else np.dtype(dtype)
    step = max(1, BLOCK_CELLS // max(1, sizes.k_len))
    lost = 0
    with TensorSaver(target, {"attn_mask": (shape, kind)}) as saver:
        for batch in range(batches):
            for head in range(heads):
                for start in range(0, sizes.q_len, step):
                    rows = slice(start, min(start + step, sizes.q_len))
                    block, here = _block(mask, batch, head, rows, dtype)
                    lost += here
                    saver.write("attn_mask", (batch, head, rows), block)
    return lost


def _block(mask: Mask, batch: int, head: int, rows: slice, dtype: str) -> tuple[NDArray[Any], int]:
    """(rows, S_k) cells in the dtype to be written, and how many visible ones come out as −inf."""
    import numpy as np

    one = mask.head(batch, head)
    full = (rows.stop - rows.start, mask.sizes.k_len)
    visible = one.cells(rows)
    if dtype == "bool":
        return visible, 0
    bias = one.bias(rows)
    added = np.zeros(full) if bias is None else np.broadcast_to(bias, full)
    values = np.where(visible, added, -np.inf)
    if dtype == "bfloat16":
        from attncli.files.tensor import bfloat16_bits

        bits = bfloat16_bits(values)
        return bits, int(np.count_nonzero(visible & (bits == bfloat16_bits(np.array(-np.inf)))))
    with np.errstate(over="ignore"):
        cast = values.astype(dtype)
    return cast, int(np.count_nonzero(visible & np.isneginf(cast)))
