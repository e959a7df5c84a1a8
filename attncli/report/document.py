"""The envelope of every JSON answer, and the records of NDJSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from attncli import __version__
from attncli.report.numbers import field, strict

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
