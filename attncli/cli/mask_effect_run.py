"""The body of `attncli mask --effect` and `--scores`: softmax before and after the mask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncli.analysis.attention_arguments import read_array
from attncli.analysis.inputs import read_group
from attncli.analysis.mask_effect import EffectMaps, RowEffect, effect_on_problem, effect_on_scores
from attncli.analysis.options import AttentionWords
from attncli.analysis.pictures import MOST_CELLS
from attncli.analysis.problems import checked_problem
from attncli.attention.masks.build import as_rank_4
from attncli.attention.nonfinite import refuse_nonfinite
from attncli.attention.problem import Problem
from attncli.attention.sizes import PACKED
from attncli.cli.commands import MaskOptions, PlotOptions
from attncli.cli.mask_run import Prepared, errors_named, prepare, read_inputs
from attncli.cli.output import make_printer
from attncli.cli.terminal import watched
from attncli.columns import columns_of, record_of
from attncli.errors import DataError
from attncli.files.text import place
from attncli.report import Format
from attncli.report.mask import effect_tables
from attncli.report.table import labels_of_batch, scale_text

# Cells that take seconds, and rows after which progress is told.
WORTH_WATCHING, ROWS_AT_ONCE = 1 << 23, 64


def run(options: MaskOptions, words: AttentionWords, output: PlotOptions) -> None:
    """Print a record per query: row sums, entropies, the mass that the mask removed and moved."""
    prepared = prepare(options, words, output, read_inputs(options, words), make_printer(output))
    params: dict[str, Any] = {"scores": options.scores}
    effects: Iterator[RowEffect]
    maps = None if output.plot is None else EffectMaps.of(prepared.mask, MOST_CELLS)
    if options.scores is None:
        problem = _problem(prepared)
        effects = effect_on_problem(problem, maps, prepared.mask.chosen)
        params |= {name: getattr(problem, name) for name in ("scale", "temperature", "softcap")}
        said = f"scale {scale_text(problem.scale)}"
    else:
        said = f"scores {place(options.scores)}"
        effects = effect_on_scores(_scores(options.scores, prepared), prepared.mask, maps)
    sizes = prepared.mask.sizes
    silent = output.format in (Format.CSV, Format.NDJSON) and prepared.printer.on_terminal
    rows = sizes.batch * sizes.heads * sizes.q_len
    total = rows if sizes.cells >= WORTH_WATCHING and not silent else 0
    effects = watched(effects, prepared.printer, total, "softmax", ROWS_AT_ONCE)
    columns = columns_of(RowEffect)
    shown = [column for column in columns if column.unit in ("", str(output.unit))]
    prepared.write(
        "mask-effect",
        columns,
        map(record_of, effects),
        params,
        lambda records: effect_tables(shown, records, prepared.printer, output.digits),
        said,
        f"mask: {prepared.judged.description}",
    )
    (batch, _), offsets = prepared.mask.first, prepared.mask.offset
    labels = labels_of_batch(prepared.labels, batch)
    offset = None if offsets is None else int(offsets[batch % len(offsets)])
    prepared.draw(lambda plots, title: plots.effect_picture(title, maps, labels, offset))
    prepared.judge()


def _problem(prepared: Prepared) -> Problem:
    """Q and K of the files, with the options that shaped the mask."""
    options, named = prepared.options, prepared.inputs.groups[0]  # --effect takes files
    group = read_group(replace(named, roles={role: named.roles[role] for role in ("q", "k")}))
    for role, tensor in group.tensors.items():
        # Without the mask every row would see what is broken, and there is nothing to compare.
        advice = "`attncli entropy --allow-nonfinite` tells which rows they reach under the mask"
        refuse_nonfinite(tensor, f"{role} ({group.described[role]['source']})", advice)
    kv_heads = None
    if options.layout in PACKED and options.heads is not None:
        q_width, k_width = (group.tensors[role].shape[-1] for role in ("q", "k"))
        kv_heads = k_width * options.heads // max(1, q_width)  # as wide as those of Q
    problem = checked_problem(
        group,
        replace(prepared.arguments.options, sinks=None),
        layout=options.layout,
        k_layout=options.k_layout,
        heads=options.heads,
        kv_heads=kv_heads,
        precision=prepared.output.precision,
        device=prepared.output.device,
    )
    prepared.printer.warn(problem.marked_warnings)
    return problem


def _scores(spec: str, prepared: Prepared) -> NDArray[Any]:
    """Scaled scores of a file, (B, H, S_q, S_k)."""
    warnings: list[str] = []
    array = read_array(spec, "«scores»", warnings)
    prepared.printer.warn(warnings)
    sizes = prepared.mask.sizes
    if array.dtype.kind not in "fiub":
        raise DataError("«scores»", f"expected numbers, got {array.dtype}")
    if array.ndim < 2 or array.shape[-2:] != (sizes.q_len, sizes.k_len):
        raise DataError(
            "«scores»",
            f"expected (…, S_q={sizes.q_len}, S_k={sizes.k_len}) like the mask, got {array.shape}",
        )
    if array.dtype.kind == "f" and (np.isnan(array).any() or np.isposinf(array).any()):
        raise DataError("«scores»", "expected finite values or -inf, got NaN or +inf")
    with errors_named("scores"):
        whole = as_rank_4(array, sizes)
    return np.broadcast_to(whole, (sizes.batch, sizes.heads, *whole.shape[2:]))
