"""What `attncli variance` does with files: an audit of every head, or the fit of a scale."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from attncli.analysis import audit as analysis
from attncli.analysis.inputs import describe, read_tensor
from attncli.analysis.needs import chosen_of, chosen_record
from attncli.analysis.options import AttentionWords, FileOptions
from attncli.analysis.problems import (
    GroupProblem,
    inputs_record,
    load_problem,
    load_problems,
    params_record,
)
from attncli.attention.sizes import Chosen
from attncli.attention.variance.moments import diagnosis
from attncli.cli.commands import AuditOptions, ExperimentOptions, PlotOptions
from attncli.cli.opening import opening, openings
from attncli.cli.output import (
    Record,
    end_with,
    kept,
    leave_out,
    make_printer,
    write_picture,
    write_result,
)
from attncli.cli.terminal import watched
from attncli.columns import record_of
from attncli.errors import AttncliError, UsageError
from attncli.report import Format
from attncli.report.audit import audit_tables, fit_tables, group_tables
from attncli.report.printer import Printer

# Cells that take seconds.
WORTH_WATCHING = 1 << 25


def run(
    inputs: FileOptions,
    words: AttentionWords,
    experiment: ExperimentOptions,
    audit: AuditOptions,
    output: PlotOptions,
) -> None:
    """Do what the options ask for, and refuse those that would do nothing there."""
    printer, given = make_printer(output), (inputs, words, experiment, audit, output)
    if audit.fit_scale is not None:
        if output.plot is not None:
            raise UsageError("--plot", "expected no --fit-scale beside it, got both")
        _run_fit(inputs, words, audit.fit_scale, output, printer)
        return
    faults: list[AttncliError] = []
    found = _run_audit(inputs, words, audit, output, printer, faults)
    write_picture(
        "variance",
        given,
        printer,
        lambda plots, title: plots.audit_picture(title, found),
        "variance_plots",
    )
    end_with(faults)


def _run_audit(
    inputs: FileOptions,
    words: AttentionWords,
    options: AuditOptions,
    output: PlotOptions,
    printer: Printer,
    faults: list[AttncliError],
) -> list[Record]:
    drawn: list[Record] = []
    made = load_problems(inputs, words, output.precision, output.device, faults=faults)
    leave_out(printer, faults)
    printer.warn(
        f"«{name}» comes after the scaled scores: their variance does not depend on it"
        for name in ("softcap", "alibi", "alibi_slopes", "sinks")
        if getattr(words, name)
    )
    for one in made:
        printer.warn(one.warnings)
    opened = openings(made)
    chosen = [chosen_of(options, one.problem.sizes) for one in made]
    heads: Iterable[Record] = kept(_audited(made, chosen, output, printer), drawn)
    write_result(
        output,
        printer,
        command="variance",
        columns=analysis.GROUP if options.summary else analysis.AUDIT,
        records=analysis.group_records(heads) if options.summary else heads,
        inputs=inputs_record(made),
        params=params_record(made, [chosen_record(one) for one in chosen]),
        show=lambda found: (
            group_tables(analysis.GROUP, found, opened, printer, output.digits)
            if options.summary
            else audit_tables(found, opened, printer, output.digits)
        ),
        above=next(iter(opened.values())) if len(opened) == 1 else (),
    )
    return drawn


def _audited(
    made: Sequence[GroupProblem], chosen: Sequence[Chosen], output: PlotOptions, printer: Printer
) -> Iterator[Record]:
    problems = [one.problem for one in made]
    heads = 0
    for one, (batches, some) in zip(problems, chosen, strict=True):
        in_batch = one.sizes.heads if some is None else len(some)
        heads += in_batch * (one.sizes.batch if batches is None else len(batches))
    # Where records run down the same terminal, a bar would be drawn across them.
    silent = output.format in (Format.CSV, Format.NDJSON) and printer.on_terminal
    worth = sum(problem.sizes.cells for problem in problems) >= WORTH_WATCHING and not silent
    found = watched(analysis.audited(problems, chosen), printer, heads if worth else 0, "heads")
    for at, moments in found:
        group = made[at].group
        place = {"source": group.source_name, "group": group.name}
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
    opened = list(opening(made))
    sample = {"rows": fit.rows, "rows_total": fit.rows_total, "target_rms": fit.target_rms}
    write_result(
        output,
        printer,
        command="variance-fit",
        columns=analysis.FIT_SCALE,
        records=(used | record_of(candidate) for candidate in fit.candidates),
        inputs=made.group.described | {str(fit.source): describe(file, tensor)},
        params=made.params | sample,
        show=lambda found: (*opened, *fit_tables(fit, found, printer)),
        above=opened,
    )
