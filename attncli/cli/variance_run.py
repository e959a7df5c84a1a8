"""What `attncli variance` does: an experiment, an audit, or the fit of a scale."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from attncli.analysis import variance as analysis
from attncli.analysis.inputs import describe, read_tensor
from attncli.analysis.options import (
    AttentionWords,
    FileOptions,
    defaults_of,
    floats,
    int_ranges,
    several,
)
from attncli.analysis.problems import (
    GroupProblem,
    inputs_record,
    load_problem,
    load_problems,
    params_record,
)
from attncli.attention.options import DistributionName, Precision
from attncli.attention.variance.experiment import ExperimentSpec
from attncli.attention.variance.logits import DEFAULT_DK, softmax_of_logits
from attncli.attention.variance.moments import audit, diagnosis
from attncli.cli.commands import AuditOptions, ExperimentOptions, PlotOptions
from attncli.cli.output import Record, kept, make_printer, write_picture, write_result
from attncli.columns import record_of
from attncli.errors import UsageError, option_name
from attncli.report.printer import Printer
from attncli.report.variance import audit_tables, experiment_tables, fit_tables, logits_tables


def run(
    inputs: FileOptions,
    words: AttentionWords,
    experiment: ExperimentOptions,
    audit: AuditOptions,
    output: PlotOptions,
) -> None:
    """Do what the options ask for, and refuse those that would do nothing there."""
    printer, given = make_printer(output), (inputs, words, experiment, audit, output)
    if any(getattr(inputs, name) for name in ("files", "q", "k", "v", "x")):
        _refuse_given(experiment, "expected no files beside it, which are not drawn")
        if audit.fit_scale is not None:
            if output.plot is not None:
                raise UsageError("--plot", "expected no --fit-scale beside it, got both")
            _run_fit(inputs, words, audit.fit_scale, output, printer)
            return
        found = _run_audit(inputs, words, output, printer)
        write_picture(
            "variance",
            given,
            printer,
            lambda plots, title: plots.audit_picture(title, found),
            "variance_plots",
        )
        return
    _refuse_given(inputs, "expected files beside it, since experiments draw no Q, K and V")
    _refuse_given(audit, "expected files of Q and K beside it")
    why = "expected files beside it, since experiments have no mask"
    _refuse_given(words, why, besides=("scale", "temperature"))
    if experiment.logits is not None:
        _run_logits(experiment, words, output, printer)
        return
    if output.precision is Precision.FLOAT32:
        raise UsageError("«precision»", "expected auto or float64 for an experiment, got float32")
    if output.device not in ("auto", "cpu"):
        problem = f"expected auto or cpu for an experiment, got {output.device}"
        raise UsageError("«device»", problem)
    found = _run_experiment(experiment, words, output, printer)
    write_picture(
        "variance",
        given,
        printer,
        lambda plots, title: plots.experiment_picture(title, found, output.unit),
        "variance_plots",
    )


def _refuse_given(options: Any, why: str, besides: tuple[str, ...] = ()) -> None:
    """Refuse options that would do nothing here."""
    for name, default in defaults_of(options).items():
        value = getattr(options, name)
        if value != default and value is not None and name not in besides:
            option = option_name(f"no_{name}" if value is False else name)
            raise UsageError(option, f"{why}, got {option} alone")


def _run_experiment(
    options: ExperimentOptions, words: AttentionWords, output: PlotOptions, printer: Printer
) -> list[Record]:
    drawn: list[Record] = []
    asked = asdict(options) | {
        "dk": int_ranges("«dk»", options.dk),
        "scale_rule": _rules(options, words),
        "temperatures": _temperatures(options, words),
    }
    given = {key: value for key, value in asked.items() if value is not None}
    specs = analysis.experiment_specs(**given)
    write_result(
        output.format,
        printer,
        command="variance",
        columns=analysis.EXPERIMENT,
        records=kept(map(record_of, analysis.experiments(specs)), drawn),
        inputs={},
        params=_drawn(specs),
        show=lambda found: experiment_tables(found, printer, output.digits, output.unit),
    )
    return drawn


def _run_logits(
    options: ExperimentOptions, words: AttentionWords, output: PlotOptions, printer: Printer
) -> None:
    """Softmax of logits from the command line.

    Raises:
        UsageError: options that decide what is drawn, or how it is pictured.
    """
    why = "expected no «logits» beside it, which are not drawn"
    _refuse_given(options, why, besides=("logits", "dk", "temperatures"))
    if output.plot is not None or words.scale is not None:
        name = "«scale»" if output.plot is None else "--plot"
        raise UsageError(name, "expected no «logits» beside it, got both")
    logits = floats("«logits»", options.logits) or ()
    widths = int_ranges("«dk»", options.dk) or (DEFAULT_DK,)
    temperatures = _temperatures(options, words) or ()
    write_result(
        output.format,
        printer,
        command="variance-logits",
        columns=analysis.LOGITS,
        records=map(record_of, softmax_of_logits(logits, widths, temperatures)),
        inputs={},
        params={"logits": list(logits), "dk": list(widths), "temperatures": list(temperatures)},
        show=lambda found: logits_tables(found, printer, output.digits, output.unit),
    )


def _drawn(specs: list[ExperimentSpec]) -> dict[str, Any]:
    """`params` of an experiment: all that decided its numbers."""
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


def _rules(options: ExperimentOptions, words: AttentionWords) -> Sequence[str | float] | None:
    if words.scale is None:
        if options.scale_rule is not None and not several(options.scale_rule):
            raise UsageError("«scale_rule»", "expected at least one value, got none")
        return several(options.scale_rule) or None
    if options.scale_rule:
        raise UsageError("«scale»", "expected one of «scale» and «scale_rule», got both")
    return floats("«scale»", words.scale)


def _temperatures(options: ExperimentOptions, words: AttentionWords) -> Sequence[float] | None:
    if words.temperature is None:
        return floats("«temperatures»", options.temperatures)
    if options.temperatures:
        problem = "expected one of «temperature» and «temperatures», got both"
        raise UsageError("«temperature»", problem)
    if not (math.isfinite(words.temperature) and words.temperature > 0):
        problem = f"expected a finite number above 0, got {words.temperature}"
        raise UsageError("«temperature»", problem)
    return (words.temperature,)


def _run_audit(
    inputs: FileOptions, words: AttentionWords, output: PlotOptions, printer: Printer
) -> list[Record]:
    made, drawn = load_problems(inputs, words, output.precision, output.device), list[Record]()
    printer.warn(
        f"«{name}» comes after the scaled scores: their variance does not depend on it"
        for name in ("softcap", "alibi", "alibi_slopes", "sinks")
        if getattr(words, name)
    )
    for one in made:
        printer.warn(one.warnings)
    write_result(
        output.format,
        printer,
        command="variance",
        columns=analysis.AUDIT,
        records=kept((record for one in made for record in _audited(one)), drawn),
        inputs=inputs_record(made),
        params=params_record(made),
        show=lambda found: audit_tables(found, printer, output.digits),
    )
    return drawn


def _audited(made: GroupProblem) -> Iterator[Record]:
    place = {"source": made.group.source_name, "group": made.group.name}
    for moments in audit(made.problem):
        yield place | record_of(moments) | {"diagnosis": diagnosis(moments)}


def _run_fit(
    inputs: FileOptions, words: AttentionWords, file: str, output: PlotOptions, printer: Printer
) -> None:
    """Rank the classic scales and a fitted one by what they leave unexplained.

    Raises:
        UsageError: several groups to fit one tensor to.
        DataError: a tensor that is neither weights nor output of these Q, K and V.
    """
    made = load_problem(inputs, words, output.precision, output.device)
    tensor, said = read_tensor(file, "«fit_scale»", inputs.dtype)
    printer.warn((*made.warnings, *said))
    fit = analysis.fit_to(made.problem, tensor, file)
    used = {"source": str(fit.source), "scale_used": made.problem.scale}
    sample = {"rows": fit.rows, "rows_total": fit.rows_total, "target_rms": fit.target_rms}
    write_result(
        output.format,
        printer,
        command="variance-fit",
        columns=analysis.FIT_SCALE,
        records=(used | record_of(candidate) for candidate in fit.candidates),
        inputs=made.group.described | {str(fit.source): describe(file, tensor)},
        params=made.params | sample,
        show=lambda found: fit_tables(fit, found, printer),
    )
