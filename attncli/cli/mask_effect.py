"""`mask --scores` and `mask --effect`: softmax before and after the mask, row by row."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from attncli.errors import DataError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from attncli.analysis.attention_arguments import AttentionArguments
    from attncli.attention.masks.mask import Mask
    from attncli.cli.mask import MaskOptions
    from attncli.cli.mask_sizes import Sized
    from attncli.cli.options import WorkOptions
    from attncli.report.printer import Printer

Record = dict[str, Any]


def run_effect(
    chosen: MaskOptions,
    built: Mask,
    sized: Sized,
    read: AttentionArguments,
    work: WorkOptions,
    printer: Printer,
) -> None:
    """Print a record per query: row sums, entropies, the mass that the mask removed and moved."""
    from attncli.cli.emit import emit
    from attncli.cli.mask import described_masks, params_of
    from attncli.report.mask import effect_tables
    from attncli.report.records import MASK_EFFECT

    warnings: list[str] = []
    scores, used = _scores(chosen, built, sized, read, warnings)
    printer.warn(warnings)
    emit(
        work.format,
        printer,
        command="mask-effect",
        columns=MASK_EFFECT,
        records=_records(scores, built),
        inputs=sized.described | described_masks(read),
        params=params_of(built, read) | {"scores": chosen.scores} | used,
        show=lambda found: effect_tables(found, printer, work.digits, work.unit),
    )


def _records(scores: NDArray[Any], built: Mask) -> Iterator[Record]:
    import numpy as np

    from attncli.attention.masks.effect import mask_effect

    names = ("sum_before", "sum_after", "entropy_before", "entropy_after", "mass_removed")
    names += ("mass_moved", "top_before", "top_after")  # type: ignore[assignment]
    for batch, head in np.ndindex(scores.shape[:2]):
        found = mask_effect(scores[batch, head], built.head(batch, head))
        columns = [getattr(found, name).tolist() for name in names]
        for query, values in enumerate(zip(*columns, strict=True)):
            row = dict(zip(names, values, strict=True))
            for key in ("entropy_before", "entropy_after"):
                nats = None if math.isnan(row[key]) else row[key]
                row[key + "_nats"] = nats
                row[key + "_bits"] = None if nats is None else nats / math.log(2)
                del row[key]
            for key in ("top_before", "top_after"):
                row[key] = None if row[key] < 0 else row[key]
            yield {"batch": batch, "head": head, "query": query} | row


def _scores(
    chosen: MaskOptions, built: Mask, sized: Sized, read: AttentionArguments, warnings: list[str]
) -> tuple[NDArray[Any], Record]:
    """Scaled scores (B, H, S_q, S_k), from a file or from Q and K, and the options used on them."""
    import numpy as np

    from attncli.attention.masks.build import as_rank_4
    from attncli.cli.mask_compare import told_of

    sizes = built.sizes
    if chosen.scores is None:
        scores, used = _products(chosen, built, sized, read)
        return np.broadcast_to(scores, (sizes.batch, sizes.heads, *scores.shape[2:])), used
    from attncli.analysis.attention_arguments import read_array

    array = read_array(chosen.scores, "--scores", warnings)
    if array.dtype.kind not in "fiub":
        raise DataError("--scores", f"expected numbers, got {array.dtype}")
    if array.ndim < 2 or array.shape[-2:] != (sizes.q_len, sizes.k_len):
        raise DataError(
            "--scores",
            f"expected (…, S_q={sizes.q_len}, S_k={sizes.k_len}) like the mask, got {array.shape}",
        )
    with told_of("--scores"):
        whole = as_rank_4(array, sizes)
    return np.broadcast_to(whole, (sizes.batch, sizes.heads, *whole.shape[2:])), {}


def _products(
    chosen: MaskOptions, built: Mask, sized: Sized, read: AttentionArguments
) -> tuple[NDArray[Any], Record]:
    """Q Kᵀ in float64, scaled and capped, every head of Q with its own head of K; and by what."""
    import numpy as np

    from attncli.attention.options import Layout
    from attncli.files.limits import require_memory
    from attncli.files.tensor import as_float

    assert sized.queries is not None
    assert sized.keys is not None
    sizes = built.sizes
    if chosen.layout is Layout.BSH and chosen.heads is None:
        raise UsageError("--layout bsh", "expected --heads beside it for --effect, got none")
    require_memory("--effect", 16 * sizes.batch * sizes.heads * sizes.q_len * sizes.k_len)

    def read_side(side: Any) -> NDArray[np.float64]:
        file, name = side
        array = as_float(file.read(name)).astype(np.float64)
        whole = array.reshape((1,) * (4 - array.ndim) + array.shape)
        swapped = chosen.layout is Layout.BSHD and array.ndim > 2
        return whole.swapaxes(1, 2) if swapped else whole  # (B, H, S, d)

    queries, keys = read_side(sized.queries), read_side(sized.keys)
    if chosen.layout is Layout.BSH:
        width = queries.shape[-1] // (chosen.heads or 1)
        queries, keys = (_unpacked(side, width) for side in (queries, keys))
    if queries.shape[-1] != keys.shape[-1] or queries.shape[1] % keys.shape[1]:
        raise DataError("--effect", f"expected K like Q {queries.shape}, got {keys.shape}")
    keys = keys.repeat(queries.shape[1] // keys.shape[1], axis=1)
    options = read.options
    scores: NDArray[Any] = queries @ keys.swapaxes(-1, -2)  # (B, H, S_q, S_k)
    scale = 1 / math.sqrt(queries.shape[-1]) if options.scale is None else options.scale
    scores *= scale / options.temperature
    if options.softcap is not None:
        scores = options.softcap * np.tanh(scores / options.softcap)
    used = {"scale": scale, "temperature": options.temperature, "softcap": options.softcap}
    return scores, used


def _unpacked(side: NDArray[Any], width: int) -> NDArray[Any]:
    """(B, H, S, d) of packed (1, B, S, H·d)."""
    batch, length, packed = side.shape[1:]
    if not width or packed % width:
        raise DataError("--layout bsh", f"expected a width of H·{width}, got {packed}")
    return side.reshape(batch, length, packed // width, width).swapaxes(1, 2)
