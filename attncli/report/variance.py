"""`variance` for eyes: experiments beside their theory, audits with a diagnosis per head."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from attncli.report.choices import Unit
from attncli.report.curve import Curve, plot
from attncli.report.numbers import decimals
from attncli.report.stage_tables import paragraph

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from attncli.attention.fit_scale import ScaleFit
    from attncli.report.printer import Printer

Record = dict[str, Any]


def experiment_tables(
    records: Sequence[Record], printer: Printer, digits: int, unit: Unit
) -> Iterator[RenderableType]:
    """Variance against theory, what softmax makes of it, and curves where d_k is swept."""
    first = records[0]
    drawn = f"{first['dist']}, {first['samples']} dot products, seed {first['seed']}"
    yield f"Var(q·k) of {drawn}"
    yield _variance_table(records, digits)
    yield from _notes(records, printer)
    yield ""
    yield f"softmax over {first['keys']} keys, without the scale and with it"
    yield _softmax_table(records, digits, unit)
    yield from _curves(records, unit)


def audit_tables(
    records: Sequence[Record], printer: Printer, digits: int
) -> Iterator[RenderableType]:
    """Where the variance of each head's scores comes from, and a sentence on each head."""
    groups = dict.fromkeys((record["source"], record["group"]) for record in records)
    for source, group in groups:
        of_group = [r for r in records if (r["source"], r["group"]) == (source, group)]
        named = f"{source} · {group}" if group else source
        first = of_group[0]
        yield (
            f"{named} · d_k={first['dk']}, scale {first['scale']:.6g}, "
            f"variance that 1/√d_k assumes: {first['var_unit_theory']:g}"
        )
        yield _audit_table(of_group, digits)
        yield ""
        for record in of_group:
            yield paragraph(f"{_head_name(record)}: {record['diagnosis']}", printer)
        yield ""
    yield paragraph(
        "var: of the visible scores; interaction + query mean = what softmax sees of all real "
        "pairs; key mean: constant along rows, so softmax never sees it; scaled: var · scale², "
        "assumed to be 1; unit scale: the one that would make it 1.",
        printer,
    )


def fit_tables(
    fit: ScaleFit, records: Sequence[Record], printer: Printer
) -> Iterator[RenderableType]:
    """Scales, best first, with what each leaves unexplained."""
    best = fit.candidates[0]
    yield f"best: {best.name} = {best.scale:.6g}, judged by the {fit.source}"
    table = _table("scale", "value", "rms residual", "largest residual")
    for record in records:
        table.add_row(record["name"], *(f"{record[key]:.6g}" for key in ("scale", "rms", "max")))
    yield table
    yield paragraph(
        f"residuals are of recomputed − given, whose root mean square is {fit.target_rms:.4g}, "
        f"over {fit.rows} of {fit.rows_total} rows",
        printer,
    )
    if fit.reason is not None:
        yield paragraph(f"no fitted value: {fit.reason}", printer)


def _variance_table(records: Sequence[Record], digits: int) -> Table:
    table = _table("d_k", "mean", "theory", "var", "95 % interval", "theory", "ratio")
    for record in _once_per(records, "dk"):
        low, high = record["var_ci95_low"], record["var_ci95_high"]
        interval = "none" if low is None else f"{_short(low)} to {_short(high)}"
        table.add_row(
            str(record["dk"]),
            _short(record["mean"]),
            _short(record["mean_theory"]),
            _short(record["var"]),
            interval,
            _short(record["var_theory"]),
            decimals(record["ratio"], digits),
        )
    return table


def _notes(records: Sequence[Record], printer: Printer) -> Iterator[RenderableType]:
    for reason in dict.fromkeys(record["interval_reason"] for record in records):
        if reason is not None:
            yield paragraph(f"no interval: {reason}", printer)
    several = len({record["dk"] for record in records}) > 1
    which = "theory, for the first line" if several else "theory"
    yield paragraph(f"{which}: {records[0]['assumption']}", printer)


def _softmax_table(records: Sequence[Record], digits: int, unit: Unit) -> Table:
    """The three symptoms of a missing scale; a line for no scale, and one per rule."""
    most = _entropy(records[0]["entropy_bits_max"], unit)
    heading = f"entropy of {decimals(most, digits)} {unit}"
    table = _table("d_k", "scale", "scaled var", heading, "largest weight", "gradient")
    for dk in dict.fromkeys(record["dk"] for record in records):
        of_dk = [record for record in records if record["dk"] == dk]
        _symptoms(table, of_dk[0], "unscaled", "none: 1", of_dk[0]["var"], digits, unit)
        for record in of_dk:
            named = f"{record['rule']}: {record['scale']:.4g}"
            if record["temperature"] != 1:
                named += f" / {record['temperature']:g}"
            if record["rule"] != "none" or record["temperature"] != 1:
                _symptoms(table, record, "scaled", named, record["scaled_var"], digits, unit)
    return table


def _symptoms(
    table: Table, record: Record, which: str, named: str, var: float, digits: int, unit: Unit
) -> None:
    table.add_row(
        str(record["dk"]),
        named,
        decimals(var, digits),
        decimals(_entropy(record[f"entropy_bits_{which}"], unit), digits),
        decimals(record[f"max_weight_{which}"], digits),
        decimals(record[f"softmax_grad_{which}"], digits),
    )


def _curves(records: Sequence[Record], unit: Unit) -> Iterator[str]:
    swept = list(_once_per(records, "dk"))
    if len(swept) < 2:
        return
    measured = [(record["dk"], record["var"]) for record in swept]
    scaled = [(record["dk"], record["scaled_var"]) for record in swept]
    yield ""
    yield from plot(
        "variance against d_k",
        [Curve("Var(q·k)", "o", measured), Curve("after the scale", "+", scaled)],
        log_y=True,
    )
    curves = [
        Curve(name, marker, [(r["dk"], _entropy(r[f"entropy_bits_{which}"], unit)) for r in swept])
        for name, marker, which in (("unscaled", "o", "unscaled"), ("scaled", "+", "scaled"))
    ]
    yield ""
    yield from plot(f"entropy ({unit}) against d_k", curves, log_y=False)


def _audit_table(records: Sequence[Record], digits: int) -> Table:
    table = _table("head", "var", "interaction", "query mean", "key mean", "scaled", "unit scale")
    parts = ("var", "var_from_interaction", "var_from_query_mean", "var_from_key_mean")
    for record in records:
        shown = [_short(record[key]) for key in (*parts, "scaled_var", "scale_for_unit_variance")]
        table.add_row(_head_name(record), *shown)
    return table


def _head_name(record: Record) -> str:
    return f"{record['batch']}.{record['head']}" if record["batch"] else f"head {record['head']}"


def _table(*headings: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _once_per(records: Sequence[Record], key: str) -> Iterator[Record]:
    seen = set()
    for record in records:
        if record[key] not in seen:
            seen.add(record[key])
            yield record


def _entropy(bits: float, unit: Unit) -> float:
    return bits if unit is Unit.BITS else bits * math.log(2)


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.5g}"
