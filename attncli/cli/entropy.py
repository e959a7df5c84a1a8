"""`attncli entropy`: what every head does, in memory that grows with n alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from attncli.analysis.options import AttentionWords, InputOptions
from attncli.analysis.values import floats, several
from attncli.cli.command import command
from attncli.cli.options import Many, WorkOptions, make_printer
from attncli.errors import CheckFailedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attncli.cli.emit import Record

FAILURES = ("collapsed", "nan", "max-logit=X")


@dataclass(frozen=True, slots=True)
class EntropyOptions:
    """Which records, of which heads, and what to fail on."""

    per_row: Annotated[bool, Option("--per-row", help="One record per query row.")] = False
    per_key: Annotated[
        bool, Option("--per-key", help="One record per key: the mass it receives.")
    ] = False
    top: Annotated[
        int | None,
        Option("--top", metavar="K", min=1, help="With --per-key: the K heaviest of each head."),
    ] = None
    summary: Annotated[bool, Option("--summary", help="One record per group.")] = False
    grid: Annotated[
        str | None,
        Option("--grid", metavar="COLUMN", help="A picture of all heads, e.g. entropy_bits_mean."),
    ] = None
    histogram: Annotated[
        bool, Option("--histogram", help="Row entropies of one head as a histogram.")
    ] = False
    head_index: Annotated[
        Many, Option("--head-index", metavar="I[,I…]", help="Compute only these query heads.")
    ] = None
    batch_index: Annotated[
        Many, Option("--batch-index", metavar="I[,I…]", help="Compute only these batches.")
    ] = None
    compare_scale: Annotated[
        bool, Option("--compare-scale", help="Beside it, what happens without the scale.")
    ] = False
    temperatures: Annotated[
        Many, Option("--temperatures", metavar="T[,T…]", help="Several, side by side.")
    ] = None
    sample_rows: Annotated[
        int | None,
        Option("--sample-rows", metavar="N", min=1, help="Estimate from N rows of each head."),
    ] = None
    sample_seed: Annotated[
        int, Option("--sample-seed", metavar="N", min=0, help="Which rows --sample-rows takes.")
    ] = 0
    sink_keys: Annotated[
        int, Option("--sink-keys", metavar="N", min=1, help="First keys that count as sinks.")
    ] = 1
    label_limit: Annotated[
        Many,
        Option("--label-limit", metavar="NAME=X", help="Adjust a threshold of the labels."),
    ] = None
    fail_on: Annotated[
        Many,
        Option("--fail-on", metavar="collapsed|nan|max-logit=X", help="Exit 3 if a head is so."),
    ] = None


def register(app: typer.Typer) -> None:
    """Add `entropy` to the program."""

    @command(app, "entropy")
    def entropy(
        inputs: InputOptions, shape: AttentionWords, chosen: EntropyOptions, work: WorkOptions
    ) -> None:
        """Measure every head: entropy, effective keys, largest weight and logit, sink mass.

        Takes any number of bundles. No S_q × S_k matrix is ever built. Each head gets a label:
        previous-token, self, sink, local, uniform, collapsed or mixed.
        """
        from attncli.cli.entropy_run import run_entropy

        _check_options(chosen, shape)
        limits = _failures(chosen.fail_on)
        if "nan" in limits:
            inputs = replace(inputs, allow_nonfinite=True)
        records = run_entropy(inputs, shape, chosen, work, make_printer(work))
        _judge(records, limits)


def _check_options(chosen: EntropyOptions, shape: AttentionWords) -> None:
    """Refuse combinations in which an option would do nothing."""
    views = {
        "--per-row": chosen.per_row,
        "--per-key": chosen.per_key,
        "--summary": chosen.summary,
        "--grid": chosen.grid is not None,
        "--histogram": chosen.histogram,
    }
    asked = [option for option, given in views.items() if given]
    if len(asked) > 1:
        raise UsageError(asked[1], f"expected one view, got {' and '.join(asked)}")
    if chosen.top is not None and not chosen.per_key:
        raise UsageError("--top", "expected --per-key beside it, got --top alone")
    if chosen.temperatures and shape.temperature is not None:
        raise UsageError(
            "--temperature", "expected one of --temperature and --temperatures, got both"
        )
    side_by_side = chosen.compare_scale or bool(chosen.temperatures)
    if side_by_side and asked:
        raise UsageError(asked[0], "expected one scale and temperature beside it, got several")
    if chosen.sample_rows is not None and (asked or chosen.fail_on):
        other = asked[0] if asked else "--fail-on"
        raise UsageError(other, "expected all rows, got --sample-rows")
    for temperature in floats("--temperatures", chosen.temperatures) or ():
        if temperature <= 0:
            raise UsageError("--temperatures", f"expected numbers above 0, got {temperature}")


def _failures(given: list[str] | None) -> dict[str, float]:
    """What to fail on: "collapsed" and "nan" with 0, "max-logit" with its limit."""
    found: dict[str, float] = {}
    for text in several(given):
        name, _, limit = text.partition("=")
        if name == "max-logit" and limit:
            found[name] = (floats("--fail-on", [limit]) or (0.0,))[0]
        elif text in ("collapsed", "nan"):
            found[text] = 0.0
        else:
            raise UsageError("--fail-on", f"expected {', '.join(FAILURES)}, got {text!r}")
    return found


def _judge(records: Sequence[Record], limits: dict[str, float]) -> None:
    """Fail where a head is as `--fail-on` says, naming the heads.

    Raises:
        CheckFailedError: some are.
    """
    tests: dict[str, Callable[[Record, float], bool]] = {
        "collapsed": lambda record, _: record["label"] == "collapsed",
        "nan": lambda record, _: record["nonfinite_rows"] > 0,
        "max-logit": lambda record, limit: (
            record["max_logit"] is not None and record["max_logit"] > limit
        ),
    }
    for name, limit in limits.items():
        found = [record for record in records if tests[name](record, limit)]
        heads = [_named(record, records) for record in found]
        if heads:
            more = f" and {len(heads) - 8} more" if len(heads) > 8 else ""
            what = f"{name}={limit:g}" if name == "max-logit" else name
            raise CheckFailedError(
                f"--fail-on {what}",
                f"expected no such head, got {len(heads)}: {', '.join(heads[:8])}{more}",
            )


def _named(record: Record, records: Sequence[Record]) -> str:
    """A head in words that tell it from the others."""

    def differs(*keys: str) -> bool:
        return len({tuple(other[key] for key in keys) for other in records}) > 1

    words = []
    if differs("source") or not record["group"]:
        words.append(record["source"])
    words.append(record["group"])
    if differs("batch"):
        words.append(f"batch {record['batch']}")
    words.append(f"head {record['head']}")
    if any(differs(key) for key in ("scale", "temperature")):
        words.append(f"(scale {record['scale']:.6g}, temperature {record['temperature']:.6g})")
    return " ".join(word for word in words if word)
