"""Stages as records: for JSON with their statistics, for CSV and NDJSON cell by cell."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from attncli.attention.stages import Block, StageResult
from attncli.report.document import field, shortest

CELL_COLUMNS = ("stage", "batch", "head", "row", "column", "value")
GROUPED_CELL_COLUMNS = ("group", *CELL_COLUMNS)


def stage_record(result: StageResult) -> dict[str, Any]:
    """The JSON record of one stage; `values` is null and `values_omitted` true above the limit."""
    record: dict[str, Any] = {"shape": list(result.shape), "n_masked": result.n_masked}
    record |= asdict(result.statistics) | {"values": _nested(result)}
    if record["values"] is None:
        record["values_omitted"] = True
    return record


def csv_cells(blocks: Iterable[Block], group: str | None) -> Iterator[str]:
    """Lines of `stage,batch,head,row,column,value`, after `group` where one is given."""
    lead = "" if group is None else f"{_quoted(group)},"
    for block in blocks:
        for at, row in _real_rows(block):
            texts = map(field, shortest(at).tolist())
            start = f"{lead}{block.stage},{block.batch},{block.head},{row},"
            yield "".join(f"{start}{column},{text}\n" for column, text in enumerate(texts))


def ndjson_cells(blocks: Iterable[Block], group: str | None) -> Iterator[str]:
    """The same as records, one a line."""
    lead = {} if group is None else {"group": group}
    for block in blocks:
        for at, row in _real_rows(block):
            place = lead | {"stage": block.stage, "batch": block.batch, "head": block.head}
            start = json.dumps(place | {"row": row}, ensure_ascii=False)[:-1]
            finite = np.isfinite(at).tolist()
            for column, value in enumerate(shortest(at).tolist()):
                text = repr(value) if finite[column] else "null"
                yield f'{start}, "column": {column}, "value": {text}}}\n'


def _real_rows(block: Block) -> Iterator[tuple[np.ndarray[Any, Any], int]]:
    values = block.values.numpy()
    for place, (row, real) in enumerate(zip(block.rows, block.real.tolist(), strict=True)):
        if real:
            yield values[place], row


def _quoted(text: str) -> str:
    if any(character in text for character in ',"\r\n'):
        return '"' + text.replace('"', '""') + '"'
    return text


def _nested(result: StageResult) -> Any:
    """Values as nested lists (batches, heads, rows, columns); null where not finite or padded."""
    if result.values is None:
        return np.empty(result.shape).tolist() if 0 in result.shape else None
    array = result.values.numpy()
    kept = np.isfinite(array)
    if result.real is not None:
        kept &= result.real.numpy()[:, None, :, None]
    values = shortest(array).astype(object)
    values[~kept] = None
    return values.tolist()
