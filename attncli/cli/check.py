"""`attncli check`: is this output right, and if not, which mistake is it?"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from attncli.analysis.options import AttentionWords, FileOptions
from attncli.attention.options import Precision
from attncli.cli.command import command
from attncli.cli.options import WorkOptions, make_printer
from attncli.columns import columns_of, record_of
from attncli.errors import CheckFailedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from attncli.analysis.attention_arguments import AttentionArguments
    from attncli.attention.check.candidate import Candidate
    from attncli.attention.check.compare import Comparison
    from attncli.attention.check.hypotheses import Hypothesis
    from attncli.attention.problem import Problem
    from attncli.cli.emit import Record
    from attncli.report.printer import Printer

TARGETS = ("output", "weights", "logsumexp")
# Cells that take seconds.
WORTH_WATCHING = 1 << 25


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """What is to be checked, and how strictly."""

    actual_output: Annotated[
        str | None,
        Option("--actual-output", metavar="FILE", help="The output to check, (B, H, S_q, d_v)."),
    ] = None
    actual_weights: Annotated[
        str | None,
        Option("--actual-weights", metavar="FILE", help="The weights to check."),
    ] = None
    actual_logsumexp: Annotated[
        str | None,
        Option("--actual-logsumexp", metavar="FILE", help="The log-sum-exp to check, (B, H, S_q)."),
    ] = None
    pair: Annotated[
        str | None,
        Option(
            "--pair",
            metavar="FILE",
            help="A second candidate for the same: which is closer, where do they part?",
        ),
    ] = None
    rtol: Annotated[
        float | None,
        Option("--rtol", metavar="X", help="Relative tolerance. [default: by the dtype]"),
    ] = None
    atol: Annotated[
        float | None,
        Option("--atol", metavar="X", help="Absolute tolerance. [default: by the dtype]"),
    ] = None


def register(app: typer.Typer) -> None:
    """Add `check` to the program."""

    @command(app, "check")
    def check(
        inputs: FileOptions, shape: AttentionWords, chosen: CheckOptions, work: WorkOptions
    ) -> None:
        """Compare an output with the float64 reference, and name the mistake if it differs.

        The options say what should have been computed. A candidate that is off is tried against
        the classic mistakes: scale, causal corner, mask polarity, padding, soft cap, head
        grouping, layout, precision; where one explains every cell, the command that verifies it
        is printed. Exit 3 if it is off.

        NDJSON and CSV hold one record per candidate, whose explanation names the mistake; all
        mistakes that were tried are in the JSON document, under data.hypotheses.
        """
        from attncli.analysis.inputs import load_groups
        from attncli.analysis.problems import problem_of, warnings_of

        if inputs.wo is not None:
            raise UsageError("--wo", "expected none, got it; an output is checked before W_O")
        specs = _specs(chosen)
        printer = make_printer(work)
        groups = load_groups(inputs)
        if len(groups) > 1:
            raise UsageError(
                "--group", f"expected one group, got {len(groups)}", "choose with --group NAME"
            )
        # The reference is float64 whatever the size, unless float32 is asked for.
        auto = work.precision is Precision.AUTO
        exact = replace(work, precision=Precision.FLOAT64) if auto else work
        read, problem = problem_of(
            groups[0], inputs, shape, precision=exact.precision, device=exact.device
        )
        printer.warn(warnings_of(groups[0], read, problem))
        run = _Run(groups[0], read, problem, (inputs, shape, chosen, work), printer)
        if chosen.pair is not None:
            _run_pair(run, *next(iter(specs.items())))
        else:
            _run_check(run, specs)


@dataclass(frozen=True, slots=True)
class _Run:
    """One problem, and how to talk about it."""

    group: Any
    shape: AttentionArguments
    problem: Problem
    given: tuple[FileOptions, AttentionWords, CheckOptions, WorkOptions]
    printer: Printer

    @property
    def inputs(self) -> FileOptions:
        return self.given[0]

    @property
    def chosen(self) -> CheckOptions:
        return self.given[2]

    @property
    def work(self) -> WorkOptions:
        return self.given[3]

    def command(self, found: Hypothesis) -> list[str] | None:
        """The words of the command that verifies a mistake; None where no option makes it."""
        from attncli.cli.check_again import command_words, with_q_and_k_exchanged

        changes = dict(found.changes)
        if found.name == "qk:exchanged" and self.problem.kv_heads == self.problem.sizes.heads:
            changes = with_q_and_k_exchanged(self.inputs)
        if not changes:
            return None
        return command_words(self.given, changes, self.group.declared, self.problem)

    def read(self, target: str, spec: str) -> tuple[Candidate, Record]:
        """A candidate from a file, and what `inputs` says of it."""
        from attncli.analysis.inputs import describe, read_tensor
        from attncli.attention.check.candidate import Target, read_candidate

        tensor, said = read_tensor(spec, f"--actual-{target}", self.inputs.dtype)
        self.printer.warn(said)
        candidate = read_candidate(Target(target), tensor, self.problem, self.inputs.layout)
        return candidate, describe(spec, tensor)

    @property
    def params(self) -> Record:
        from attncli.analysis.problems import params_record

        return params_record(self.group, self.shape, self.problem)


def _specs(chosen: CheckOptions) -> dict[str, str]:
    """Target → file, for the candidates given.

    Raises:
        UsageError: none is given, or a pair is to be made of several.
    """
    given = {target: getattr(chosen, f"actual_{target}") for target in TARGETS}
    specs = {target: spec for target, spec in given.items() if spec is not None}
    if not specs:
        options = ", ".join(f"--actual-{target}" for target in TARGETS)
        raise UsageError("check", f"expected one of {options}, got none")
    if chosen.pair is not None and len(specs) > 1:
        raise UsageError("--pair", f"expected one candidate beside it, got {len(specs)}")
    for option, value in (("--rtol", chosen.rtol), ("--atol", chosen.atol)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise UsageError(option, f"expected a finite number of at least 0, got {value}")
    return specs


def _run_check(run: _Run, specs: dict[str, str]) -> None:
    from attncli.attention.check.compare import Comparison
    from attncli.attention.check.hypotheses import check
    from attncli.cli.emit import emit
    from attncli.cli.progress import progress
    from attncli.report.check import check_tables

    candidates, described = [], dict(run.group.described)
    for target, spec in specs.items():
        candidate, described[f"actual_{target}"] = run.read(target, spec)
        candidates.append(candidate)
    sizes = run.problem.sizes
    rows = sizes.batch * sizes.heads * sizes.q_len
    shown = rows if rows * sizes.k_len >= WORTH_WATCHING else 0
    with progress(run.printer, shown, "comparing") as tell:
        found = check(
            run.problem,
            run.shape.options,
            candidates,
            rtol=run.chosen.rtol,
            atol=run.chosen.atol,
            tell=tell,
        )
    hypotheses = [_hypothesis_record(one, run.command(one)) for one in found.hypotheses]
    emit(
        run.work.format,
        run.printer,
        command="check",
        columns=columns_of(Comparison),
        records=[comparison_record(one) for one in found.comparisons],
        inputs=described,
        params=run.params,
        show=lambda _: check_tables(found, run.problem, run.command, run.printer, run.work.digits),
        wrap=lambda records: {"records": records, "hypotheses": hypotheses},
    )
    _judge(found.comparisons, [one.name for one in found.hypotheses if one.matches])


def _run_pair(run: _Run, target: str, spec: str) -> None:
    from attncli.attention.check.compare import Comparison, compare_pair
    from attncli.cli.emit import emit
    from attncli.report.check import pair_tables

    assert run.chosen.pair is not None
    first, of_first = run.read(target, spec)
    second, of_second = run.read(target, run.chosen.pair)
    found = compare_pair(
        run.problem,
        run.shape.options,
        first,
        second,
        rtol=run.chosen.rtol,
        atol=run.chosen.atol,
    )
    between = {
        "closer": found.closer,
        "max_abs_error": found.max_abs_error,
        "rms_error": found.rms_error,
        "cosine": found.cosine,
        "mismatches": found.mismatches,
        "worst_index": None if found.worst_index is None else list(found.worst_index),
        "values": None if found.values is None else list(found.values),
        "first_part": None if found.first_part is None else list(found.first_part),
    }
    inputs = run.group.described | {f"actual_{target}": of_first, "pair": of_second}
    emit(
        run.work.format,
        run.printer,
        command="check",
        columns=columns_of(Comparison),
        records=[comparison_record(found.first), comparison_record(found.second)],
        inputs=inputs,
        params=run.params,
        show=lambda _: pair_tables(
            found, run.problem, (spec, str(run.chosen.pair)), run.printer, run.work.digits
        ),
        wrap=lambda records: {"records": records, "hypotheses": [], "pair": between},
    )
    _judge((found.first,))
    _judge((found.second,), option="--pair")


def comparison_record(found: Comparison) -> Record:
    """One candidate as a record; numbers that are not finite become null there."""
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in record_of(found).items()
    }


def _hypothesis_record(found: Hypothesis, command: list[str] | None) -> Record:
    return {
        "name": found.name,
        "options": found.options or None,
        "max_abs_error": found.max_abs_error,
        "matches": found.matches,
        "explained": found.explained,
        "command": None if command is None else shlex.join(command),
    }


def _judge(
    comparisons: Iterable[Comparison], mistakes: Sequence[str] = (), option: str | None = None
) -> None:
    """Fail if a candidate is off.

    Raises:
        CheckFailedError: naming the first that is, and the mistakes that explain it.
    """
    advice = f"explained by {' or by '.join(mistakes)}" if mistakes else ""
    for found in comparisons:
        if not found.passed:
            raise CheckFailedError(option or f"--actual-{found.target}", _failure(found), advice)


def _failure(found: Comparison) -> str:
    if found.mismatches:
        cells = f"{found.mismatches} of {found.cells} cells"
        return f"expected the reference, got {cells} further from it than allowed"
    if found.heads_off:
        heads = f"{found.heads_off} head{'s' * (found.heads_off > 1)}"
        return f"expected errors such as rounding explains, got {heads} with more"
    return f"expected the axes of the reference, got those of {found.reading}"
