"""`attncli variance`: why √d_k, by experiment without files, by audit of tensors with them."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer import Option

from attncli.analysis.options import AttentionWords, FileOptions
from attncli.analysis.values import floats, ladder, several
from attncli.cli.command import command
from attncli.cli.emit import Record, emit
from attncli.cli.options import Many, WorkOptions, defaults_of, make_printer
from attncli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from attncli.analysis.inputs import Group
    from attncli.attention.variance.experiment import ExperimentSpec
    from attncli.attention.variance.scale_rule import ScaleRule
    from attncli.report.printer import Printer

Value = TypeVar("Value", bound=Hashable)


@dataclass(frozen=True, slots=True)
class ExperimentOptions:
    """What to draw, where there are no files."""

    dk: Annotated[
        Many,
        Option("--dk", metavar="N|A:B:xF|A:B:+D", help="Widths d_k to try. [default: 64]"),
    ] = None
    samples: Annotated[
        int | None, Option("--samples", metavar="N", help="Dot products. [default: 100000]")
    ] = None
    keys: Annotated[
        int | None, Option("--keys", metavar="N", help="Keys of each query. [default: 8]")
    ] = None
    dist: Annotated[
        str | None,
        Option(
            "--dist",
            metavar="normal|uniform|rademacher|laplace|student-t",
            help="What entries are drawn from; uniform is on [0, 1). [default: normal]",
        ),
    ] = None
    mean: Annotated[
        float | None, Option("--mean", metavar="X", help="Mean of an entry. [default: its own]")
    ] = None
    std: Annotated[
        float | None, Option("--std", metavar="X", help="Deviation of an entry. [default: its own]")
    ] = None
    correlation: Annotated[
        float | None,
        Option("--correlation", metavar="R", help="Between the entries of q and k. [default: 0]"),
    ] = None
    df: Annotated[
        float | None,
        Option("--df", metavar="N", help="Degrees of freedom of student-t. [default: 10]"),
    ] = None
    scale_rule: Annotated[
        Many,
        Option(
            "--scale-rule",
            metavar="sqrt|linear|none|log-n|X",
            help="1/√d_k, 1/d_k, 1, ln(keys)/√d_k or a number, side by side. [default: sqrt]",
        ),
    ] = None
    temperatures: Annotated[
        Many, Option("--temperatures", metavar="T[,T…]", help="Side by side. [default: 1]")
    ] = None
    seed: Annotated[
        int | None, Option("--seed", metavar="N", help="Of the draws. [default: 0]")
    ] = None


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """What to look for in tensors from files."""

    fit_scale: Annotated[
        str | None,
        Option(
            "--fit-scale",
            metavar="FILE",
            help="Weights or output from elsewhere: which scale was used there?",
        ),
    ] = None


def register(app: typer.Typer) -> None:
    """Add `variance` to the program."""

    @command(app, "variance")
    def variance(
        inputs: FileOptions,
        shape: AttentionWords,
        experiment: ExperimentOptions,
        audit: AuditOptions,
        work: WorkOptions,
    ) -> None:
        """Measure the variance of q·k that makes 1/√d_k necessary.

        Without files it draws queries and keys: variance against theory, and softmax with and
        without the scale. With files it takes the exact variance of all visible scores of every
        head apart: which part softmax sees, and what the assumption behind 1/√d_k predicts.
        """
        printer = make_printer(work)
        if _has_files(inputs):
            _refuse_given(experiment, "expected no files beside it, which are not drawn")
            if audit.fit_scale is not None:
                from attncli.cli.variance_fit import run_fit

                run_fit(inputs, shape, audit.fit_scale, work, printer)
            else:
                _run_audit(inputs, shape, work, printer)
            return
        _refuse_given(inputs, "expected files beside it, since experiments draw no Q, K and V")
        _refuse_given(audit, "expected files of Q and K beside it")
        shapes = "expected files beside it, since experiments have no mask"
        _refuse_given(shape, shapes, besides=("scale", "temperature"))
        _refuse_work(work)
        _run_experiment(experiment, shape, work, printer)


def _has_files(inputs: FileOptions) -> bool:
    named = ("files", "q", "k", "v", "x")
    return any(getattr(inputs, name) for name in named)


def _refuse_given(options: Any, why: str, besides: tuple[str, ...] = ()) -> None:
    """Refuse options that would do nothing here."""
    for name, default in defaults_of(options).items():
        value = getattr(options, name)
        if value != default and value is not None and name not in besides:
            prefix = "--no-" if value is False else "--"
            option = prefix + name.replace("_", "-")
            raise UsageError(option, f"{why}, got {option} alone")


def _refuse_work(work: WorkOptions) -> None:
    """Refuse to be told to do what experiments never do."""
    from attncli.attention.options import Precision

    if work.precision is Precision.FLOAT32:
        raise UsageError("--precision", "expected auto or float64 for an experiment, got float32")
    if work.device not in ("auto", "cpu"):
        raise UsageError("--device", f"expected auto or cpu for an experiment, got {work.device}")


def _run_experiment(
    options: ExperimentOptions, shape: AttentionWords, work: WorkOptions, printer: Printer
) -> None:
    from attncli.attention.variance.experiment import experiment
    from attncli.files.limits import require_memory
    from attncli.report.records import EXPERIMENT
    from attncli.report.variance import experiment_tables

    specs = list(_specs(options, shape))
    for spec in specs:
        require_memory("--dk, --keys", spec.bytes_needed)
    records = (asdict(record) for spec in specs for record in experiment(spec))
    emit(
        work.format,
        printer,
        command="variance",
        columns=EXPERIMENT,
        records=records,
        inputs={},
        params=_drawn_record(specs),
        show=lambda found: experiment_tables(found, printer, work.digits, work.unit),
    )


def _drawn_record(specs: list[ExperimentSpec]) -> dict[str, Any]:
    """`params` of an experiment: all that decided its numbers."""
    from attncli.attention.variance.distributions import DistributionName

    first = specs[0]
    entries = first.distribution
    drawn_t = entries.name is DistributionName.STUDENT_T
    return {
        "dk": [spec.dk for spec in specs],
        "samples": first.samples,
        "keys": first.keys,
        "dist": str(entries.name),
        "mean": entries.entry_mean,
        "std": entries.entry_std,
        "correlation": entries.correlation,
        "df": entries.df if drawn_t else None,
        "scale_rule": [rule if isinstance(rule, float) else str(rule) for rule in first.rules],
        "temperatures": list(first.temperatures),
        "compute_dtype": "float64",
        "device": "cpu",
        "seed": first.seed,
    }


def _specs(options: ExperimentOptions, shape: AttentionWords) -> Iterator[ExperimentSpec]:
    from attncli.attention.variance.distributions import Distribution, DistributionName
    from attncli.attention.variance.experiment import ExperimentSpec

    name = options.dist or "normal"
    if name not in tuple(DistributionName):
        choices = ", ".join(DistributionName)
        raise UsageError("--dist", f"expected one of {choices}, got {name!r}")
    if options.df is not None and name != DistributionName.STUDENT_T:
        raise UsageError("--df", f"expected --dist student-t beside it, got {name}")
    chosen = {"mean": options.mean, "std": options.std}
    chosen |= {"correlation": options.correlation, "df": options.df}
    given = {key: value for key, value in chosen.items() if value is not None}
    distribution = Distribution(name=DistributionName(name), **given)
    sizes = {"samples": options.samples, "keys": options.keys, "seed": options.seed}
    for dk in _each_once(ladder("--dk", options.dk) or (64,)):
        yield ExperimentSpec(
            dk=dk,
            distribution=distribution,
            rules=_rules(options, shape),
            temperatures=_temperatures(options, shape),
            **{size: value for size, value in sizes.items() if value is not None},
        )


def _rules(options: ExperimentOptions, shape: AttentionWords) -> tuple[ScaleRule | float, ...]:
    from attncli.attention.variance.scale_rule import ScaleRule, parse_scale_rule

    if shape.scale is None:
        if options.scale_rule is not None and not several(options.scale_rule):
            raise UsageError("--scale-rule", "expected at least one value, got none")
        given = several(options.scale_rule) or [ScaleRule.SQRT]
        return _each_once(parse_scale_rule(text) for text in given)
    if options.scale_rule:
        raise UsageError("--scale", "expected one of --scale and --scale-rule, got both")
    if not math.isfinite(shape.scale):
        raise UsageError("--scale", f"expected a finite number, got {shape.scale}")
    return (shape.scale,)


def _temperatures(options: ExperimentOptions, shape: AttentionWords) -> tuple[float, ...]:
    if shape.temperature is None:
        return _each_once(floats("--temperatures", options.temperatures) or (1.0,))
    if options.temperatures:
        raise UsageError(
            "--temperature", "expected one of --temperature and --temperatures, got both"
        )
    if not (math.isfinite(shape.temperature) and shape.temperature > 0):
        problem = f"expected a finite number above 0, got {shape.temperature}"
        raise UsageError("--temperature", problem)
    return (shape.temperature,)


def _each_once(values: Iterable[Value]) -> tuple[Value, ...]:
    return tuple(dict.fromkeys(values))


def _run_audit(
    inputs: FileOptions, given: AttentionWords, work: WorkOptions, printer: Printer
) -> None:
    from attncli.analysis.inputs import described, load_groups
    from attncli.analysis.problems import merged, params_record, problem_of, warnings_of
    from attncli.report.records import AUDIT
    from attncli.report.variance import audit_tables

    groups = load_groups(inputs)
    printer.warn(_without_effect(given))
    prepared = [
        (group, *problem_of(group, inputs, given, work.precision, work.device)) for group in groups
    ]
    for group, shape, problem in prepared:
        printer.warn(warnings_of(group, shape, problem))
    params = [params_record(group, shape, problem) for group, shape, problem in prepared]
    records = (record for group, shape, problem in prepared for record in _audited(group, problem))
    emit(
        work.format,
        printer,
        command="variance",
        columns=AUDIT,
        records=records,
        inputs=described(groups),
        params=merged(groups, params),
        show=lambda found: audit_tables(found, printer, work.digits),
    )


def _without_effect(given: AttentionWords) -> list[str]:
    """Warnings about options that come after `scaled`, which is where variance is taken."""
    after = ("softcap", "alibi", "sinks")
    return [
        f"--{name} comes after the scaled scores: their variance does not depend on it"
        for name in after
        if getattr(given, name)
    ]


def _audited(group: Group, problem: Any) -> Iterator[Record]:
    from attncli.attention.variance.audit import audit, diagnosis

    for record in audit(problem):
        place = {"source": group.source_name, "group": group.name}
        yield place | asdict(record) | {"diagnosis": diagnosis(record)}
