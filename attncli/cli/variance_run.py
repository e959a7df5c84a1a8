"""What `attncli variance` does without files: an experiment, or softmax of given logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from attncli.analysis import variance as analysis
from attncli.analysis.options import (
    AttentionWords,
    FileOptions,
    floats,
    int_ranges,
    refuse_given,
    several,
)
from attncli.attention.options import DistributionName, Precision
from attncli.attention.variance.experiment import ExperimentSpec
from attncli.attention.variance.logits import DEFAULT_DK, softmax_of_logits
from attncli.cli.commands import AuditOptions, ExperimentOptions, PlotOptions
from attncli.cli.output import Record, kept, make_printer, write_picture, write_result
from attncli.cli.terminal import progress
from attncli.columns import record_of
from attncli.errors import UsageError
from attncli.report import Format
from attncli.report.printer import Printer
from attncli.report.variance import experiment_tables, logits_tables


def run(
    inputs: FileOptions,
    words: AttentionWords,
    experiment: ExperimentOptions,
    audit: AuditOptions,
    output: PlotOptions,
) -> None:
    """Do what the options ask for, and refuse those that would do nothing there."""
    printer, given = make_printer(output), (inputs, words, experiment, audit, output)
    refuse_given(inputs, "expected files beside it, since experiments draw no Q, K and V")
    refuse_given(audit, "expected files of Q and K beside it")
    why = "expected files beside it, since experiments have no mask"
    refuse_given(words, why, besides=("scale", "temperature"))
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
    # Where records run down the same terminal, a bar would be drawn across them.
    silent = output.format in (Format.CSV, Format.NDJSON) and printer.on_terminal
    total = 0 if silent else sum(spec.numbers for spec in specs)
    with progress(printer, total, "drawing") as tell:
        write_result(
            output,
            printer,
            command="variance",
            columns=analysis.EXPERIMENT,
            records=kept(map(record_of, analysis.experiments(specs, tell)), drawn),
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
    refuse_given(options, why, besides=("logits", "dk", "temperatures"))
    if output.plot is not None or words.scale is not None:
        name = "«scale»" if output.plot is None else "--plot"
        raise UsageError(name, "expected no «logits» beside it, got both")
    logits = floats("«logits»", options.logits) or ()
    widths = int_ranges("«dk»", options.dk) or (DEFAULT_DK,)
    temperatures = _temperatures(options, words) or ()
    write_result(
        output,
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
