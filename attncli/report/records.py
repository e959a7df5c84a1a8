"""Columns of every record: the keys programs read, the headings and units people read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Column:
    """One field of a record.

    Attributes:
        key: its name in JSON, NDJSON and CSV.
        heading: its name in tables; None for a field that tables leave out.
        unit: what it is measured in, where that is not plain: "nats", "bits".
    """

    key: str
    heading: str | None
    unit: str = ""


INSPECT = (
    Column("source", "file"),
    Column("name", "name"),
    Column("shape", "shape"),
    Column("dtype", "dtype"),
    Column("elements", None),
    Column("bytes", "bytes"),
    Column("n_nan", "nan"),
    Column("n_posinf", "inf"),
    Column("n_neginf", "-inf"),
    Column("min", "min"),
    Column("max", "max"),
    Column("mean", "mean"),
    Column("std", "std"),
)
