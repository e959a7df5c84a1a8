"""Columns that fields of results declare."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from attncli.columns import Column, column, columns_of, record_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    head: int = column("head", is_key=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbers:
    entropy: float | None = column("entropy", unit="nats", description="of the row")
    scratch: str = ""
    largest: float = column(None, of_sample=False, default=1.0)


def test_columns_stand_in_field_order_and_other_fields_are_none() -> None:
    assert columns_of(_Place, _Numbers) == (
        Column("head", "head", is_key=True),
        Column("entropy", "entropy", "nats", "of the row"),
        Column("largest", None, of_sample=False),
    )


def test_a_record_holds_the_columns_alone() -> None:
    record = record_of(_Place(head=3), _Numbers(entropy=None, scratch="no column"))
    assert list(record.items()) == [("head", 3), ("entropy", None), ("largest", 1.0)]


def test_a_column_without_a_default_is_asked_for() -> None:
    with pytest.raises(TypeError, match="entropy"):
        _Numbers()  # type: ignore[call-arg]
