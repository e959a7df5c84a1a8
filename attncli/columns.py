"""Columns of records: a field of a result says itself how programs and people read it."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Any, get_type_hints

_COLUMN = "column"


@dataclass(frozen=True, slots=True)
class Column:
    """One field of a record.

    Attributes:
        key: its name in JSON, NDJSON and CSV.
        heading: its name in tables; None for a field that tables leave out.
        unit: what it is measured in, where that is not plain: "nats", "bits".
        description: what it is, in a sentence.
        of_sample: whether some of the rows can tell it of all of them.
        is_key: whether it names the record, and comes again in each part of a folded table.
        holds: the type of a value, or "module:name" of one; None for that of the field.
        always: whether every record has it.
        field_of: the dataclass that it is a field of; None for a column without one.
        is_extra: whether tables show it only where it is asked for by name.
        is_beside: whether a folded table keeps it beside the column before.
    """

    key: str
    heading: str | None
    unit: str = ""
    description: str = ""
    of_sample: bool = True
    is_key: bool = False
    is_extra: bool = False
    is_beside: bool = False
    holds: Any = None
    always: bool = True
    field_of: type | None = field(default=None, compare=False, repr=False)

    @property
    def type(self) -> Any:
        """The type of a value, or "module:name" of one."""
        if self.holds is not None or self.field_of is None:
            return self.holds
        return get_type_hints(self.field_of)[self.key]


def column(
    heading: str | None,
    *,
    unit: str = "",
    description: str = "",
    of_sample: bool = True,
    is_key: bool = False,
    holds: Any = None,
    always: bool = True,
    is_extra: bool = False,
    is_beside: bool = False,
    default: Any = MISSING,
) -> Any:
    """A field of a dataclass that is a column of its records under the field's own name.

    Args:
        heading, unit, description, of_sample, is_key, is_extra, is_beside, holds, always: as in
            `Column`.
        default: of the field.
    """
    told = {
        "heading": heading,
        "unit": unit,
        "description": description,
        "of_sample": of_sample,
        "is_key": is_key,
        "holds": holds,
        "always": always,
        "is_extra": is_extra,
        "is_beside": is_beside,
    }
    return field(default=default, metadata={_COLUMN: told})


def columns_of(*results: type) -> tuple[Column, ...]:
    """The columns of records made of these dataclasses one after another, in field order."""
    return tuple(
        Column(part.name, **part.metadata[_COLUMN], field_of=result)
        for result in results
        for part in fields(result)
        if _COLUMN in part.metadata
    )


def record_of(*results: Any) -> dict[str, Any]:
    """The record made of these dataclass instances one after another: key → value."""
    return {
        part.name: getattr(result, part.name)
        for result in results
        for part in fields(result)
        if _COLUMN in part.metadata
    }
