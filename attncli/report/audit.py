"""Audits of `variance` for eyes: where the variance of each head comes from, and fitted scales."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from attncli.attention.variance.fit_scale import ScaleFit
from attncli.columns import Column
from attncli.report.printer import Printer, paragraph
from attncli.report.table import TableColumn, record_table, table
from attncli.report.variance import numbers

Record = dict[str, Any]

_NUMBER = re.compile(r"\d[\d.]*(?:e[+-]?\d+)?%?(?![\w√])")
SUMMARY_LEGEND = (
    "scaled: mean over the heads of what 1/√d_k is meant to make 1; interaction, query mean: "
    "shares of what softmax sees; key mean: share of all of it, which softmax never sees."
)
LEGEND = (
    "var: of the visible scores; interaction + query mean = what softmax sees of all real pairs; "
    "key mean: constant along rows, so softmax never sees it; scaled: var · (scale / "
    "temperature)², assumed to be 1; unit scale: the one that would make it 1."
)


def audit_tables(
    records: Sequence[Record],
    openings: Mapping[tuple[str, str], Iterable[RenderableType]],
    printer: Printer,
    digits: int,
) -> Iterator[RenderableType]:
    """Where the variance of each head's scores comes from, and a sentence on each head.

    Args:
        records: of heads.
        openings: for each source and group what stands above its table.
        printer, digits: how to print.
    """
    groups = dict.fromkeys((record["source"], record["group"]) for record in records)
    for source, group in groups:
        of_group = [r for r in records if (r["source"], r["group"]) == (source, group)]
        yield from openings[source, group]
        yield f"variance that 1/√d_k assumes: {of_group[0]['var_unit_theory']:g}"
        yield _audit_table(of_group, printer, digits)
        yield ""
        for line in _diagnoses(of_group):
            yield paragraph(line, printer)
        yield ""
    if records:
        yield paragraph(LEGEND, printer)
    else:
        yield "no heads: nothing to measure"


def group_tables(
    columns: Sequence[Column],
    records: Sequence[Record],
    openings: Mapping[tuple[str, str], Iterable[RenderableType]],
    printer: Printer,
    digits: int,
) -> Iterator[RenderableType]:
    """A line a group; above that of one alone what it is of."""
    if len(records) == 1:
        yield from openings[records[0]["source"], records[0]["group"]]
    differing = [
        one for one in columns if not one.is_key or len({record[one.key] for record in records}) > 1
    ]
    yield record_table(differing, records, printer, digits=digits)
    yield ""
    yield paragraph(SUMMARY_LEGEND, printer)


def _diagnoses(records: Sequence[Record]) -> Iterator[str]:
    """A sentence on each head; on several together where it differs in its numbers alone."""
    alike: dict[str, list[Record]] = {}
    for record in records:
        alike.setdefault(_NUMBER.sub("#", record["diagnosis"]), []).append(record)
    for several in alike.values():
        first = several[0]["diagnosis"]
        if len(several) == 1:
            yield f"{_head_name(several[0])}: {first}"
            continue
        numbers = zip(*(_NUMBER.findall(record["diagnosis"]) for record in several), strict=True)
        ranges = map(_range, numbers)
        text = "".join(part + next(ranges, "") for part in _NUMBER.split(first))
        yield f"{len(several)} of {len(records)} heads: {text}"


def _range(numbers: Sequence[str]) -> str:
    """From the least to the largest of some numbers as they are written."""
    low, high = (pick(numbers, key=lambda text: float(text.strip("%"))) for pick in (min, max))
    return low if low == high else f"{low} to {high}"


def fit_tables(
    fit: ScaleFit, records: Sequence[Record], printer: Printer
) -> Iterator[RenderableType]:
    """Scales, best first, with what each leaves unexplained."""
    best = fit.candidates[0]
    yield f"best: {best.name} = {best.scale:.6g}, judged by the {fit.source}"
    columns = [TableColumn("scale", [record["name"] for record in records], True, True)]
    for heading, key in (("value", "scale"), ("rms residual", "rms"), ("largest residual", "max")):
        columns.append(TableColumn(heading, [f"{record[key]:.6g}" for record in records]))
    yield table(columns, printer)
    yield paragraph(
        f"residuals are of recomputed − given, whose root mean square is {fit.target_rms:.4g}, "
        f"over {fit.rows} of {fit.rows_total} rows",
        printer,
    )
    if fit.reason is not None:
        yield paragraph(f"no fitted value: {fit.reason}", printer)


def _audit_table(records: Sequence[Record], printer: Printer, digits: int) -> RenderableType:
    columns_of = {
        "var": "var",
        "interaction": "var_from_interaction",
        "query mean": "var_from_query_mean",
        "key mean": "var_from_key_mean",
        "scaled": "scaled_var",
    }
    columns = [TableColumn("head", [_head_name(record) for record in records], True, True)]
    for heading, key in columns_of.items():
        columns.append(numbers(heading, [record[key] for record in records], digits))
    unit = [record["scale_for_unit_variance"] for record in records]
    small = ["–" if scale is None else f"{scale:.{max(1, digits)}g}" for scale in unit]
    columns.append(TableColumn("unit scale", small))
    return table(columns, printer)


def _head_name(record: Record) -> str:
    batch = f"batch {record['batch']} " if record["batch"] else ""
    return f"{batch}head {record['head']}"
