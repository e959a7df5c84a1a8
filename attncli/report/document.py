"""What programs read: the envelope of JSON, records in NDJSON and CSV, and their numbers."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncli import __version__

SCHEMA = 1


def document(
    command: str,
    *,
    inputs: dict[str, Any],
    params: dict[str, Any],
    warnings: Sequence[str],
    data: Any,
) -> Iterator[str]:
    """One JSON document, as text in pieces.

    Args:
        command: the subcommand, which names the schema.
        inputs: role → source, shape and dtype of each tensor.
        params: every option as it was used.
        warnings: what the reader of the numbers should know.
        data: the results; numbers that are not finite become null.
    """
    whole = {
        "schema": f"attncli.{command}/{SCHEMA}",
        "attncli": __version__,
        "inputs": inputs,
        "params": params,
        "warnings": list(warnings),
        "data": data,
    }
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
    yield from encoder.iterencode(strict(whole))
    yield "\n"


def ndjson(records: Iterable[dict[str, Any]]) -> Iterator[str]:
    """One strict JSON record a line."""
    for record in records:
        yield json.dumps(strict(record), ensure_ascii=False, allow_nan=False) + "\n"


def csv_lines(columns: Sequence[str], records: Iterable[dict[str, Any]]) -> Iterator[str]:
    """A header, always, and one line a record."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    yield buffer.getvalue()
    for record in records:
        buffer.seek(0)
        buffer.truncate()
        writer.writerow([field(record[column]) for column in columns])
        yield buffer.getvalue()


def strict(value: Any) -> Any:
    """A value as strict JSON can hold it: a number that is not finite becomes None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: strict(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [strict(part) for part in value]
    if isinstance(value, np.ndarray):
        return strict(value.tolist())
    return value


def shortest(array: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """float64 values that print as the shortest decimal that gives back the array's own value.

    float32 0.1 is 0.10000000149011612 in float64; a reader wants to see 0.1.
    """
    short = array if array.dtype == np.float64 else array.astype(np.str_)
    return short.astype(np.float64, copy=False)


def field(value: Any) -> str:
    """A CSV field: empty for None, nan, inf and -inf spelt out, true and false as in JSON."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return repr(value) if isinstance(value, float) else str(value)
