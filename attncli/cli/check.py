"""`attncli check`: is this output right, and if not, which mistake is it?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from attncli.cli.command import command
from attncli.cli.options import FileOptions, ShapeOptions, WorkOptions, make_printer
from attncli.errors import CheckFailedError, UsageError

if TYPE_CHECKING:
    from attncli.attention.check.candidate import Candidate
    from attncli.attention.compare import Comparison
    from attncli.attention.hypotheses import Hypothesis
    from attncli.attention.problem import Problem
    from attncli.cli.emit import Record
    from attncli.cli.shape import Shape
    from attncli.report.printer import Printer

TARGETS = ("output", "weights", "logsumexp")


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
        inputs: FileOptions, shape: ShapeOptions, chosen: CheckOptions, work: WorkOptions
    ) -> None:
        """Compare an output with the float64 reference, and name the mistake if it differs.

        The options say what should have been computed. A candidate that is off is tried against
        the classic mistakes: scale, causal corner, mask polarity, padding, soft cap, head
        grouping, layout, precision. Exit 3 if it is off.
        """
        from attncli.cli.inputs import load_groups
        from attncli.cli.problems import problem_of, warnings_of

        specs = _specs(chosen)
        printer = make_printer(work)
        groups = load_groups(inputs)
        if len(groups) > 1:
            raise UsageError(
                "--group", f"expected one group, got {len(groups)}", "choose with --group NAME"
            )
        read, problem = problem_of(groups[0], inputs, shape, work)
        printer.warn(warnings_of(groups[0], read, problem))
        run = _Run(groups[0], read, problem, inputs, chosen, work, printer)
        if chosen.pair is not None:
            _run_pair(run, *next(iter(specs.items())))
        else:
            _run_check(run, specs)


@dataclass(frozen=True, slots=True)
class _Run:
    """One problem, and how to talk about it."""

    group: Any
    shape: Shape
    problem: Problem
    inputs: FileOptions
    chosen: CheckOptions
    work: WorkOptions
    printer: Printer

    def read(self, target: str, spec: str) -> tuple[Candidate, Record]:
        """A candidate from a file, and what `inputs` says of it."""
        from attncli.attention.check.candidate import Target, read_candidate
        from attncli.cli.inputs import describe, read_tensor

        tensor, said = read_tensor(spec, f"--actual-{target}", self.inputs.dtype)
        self.printer.warn(said)
        candidate = read_candidate(Target(target), tensor, self.problem, self.inputs.layout)
        return candidate, describe(spec, tensor)

    @property
    def params(self) -> Record:
        from attncli.cli.problems import params_record

        record = params_record(self.group, self.shape, self.problem)
        # The reference is float64, whatever the precision of other commands would be.
        return record | {"compute_dtype": "float64"}


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
    from attncli.attention.hypotheses import check
    from attncli.cli.emit import emit
    from attncli.report.check import check_tables
    from attncli.report.records import CHECK

    candidates, described = [], dict(run.group.described)
    for target, spec in specs.items():
        candidate, described[f"actual_{target}"] = run.read(target, spec)
        candidates.append(candidate)
    found = check(
        run.problem, run.shape.options, candidates, rtol=run.chosen.rtol, atol=run.chosen.atol
    )
    hypotheses = [_hypothesis_record(one) for one in found.hypotheses]
    emit(
        run.work.format,
        run.printer,
        command="check",
        columns=CHECK,
        records=[comparison_record(one) for one in found.comparisons],
        inputs=described,
        params=run.params,
        show=lambda _: check_tables(found, run.problem, run.printer, run.work.digits),
        wrap=lambda records: {"records": records, "hypotheses": hypotheses},
    )
    _judge(found.comparisons)


def _run_pair(run: _Run, target: str, spec: str) -> None:
    from attncli.attention.check.pair import compare_pair
    from attncli.cli.emit import emit
    from attncli.report.check import pair_tables
    from attncli.report.records import CHECK

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
        "first_part": None if found.first_part is None else list(found.first_part),
    }
    inputs = run.group.described | {f"actual_{target}": of_first, "pair": of_second}
    emit(
        run.work.format,
        run.printer,
        command="check",
        columns=CHECK,
        records=[comparison_record(found.first), comparison_record(found.second)],
        inputs=inputs,
        params=run.params,
        show=lambda _: pair_tables(
            found, (spec, str(run.chosen.pair)), run.printer, run.work.digits
        ),
        wrap=lambda records: {"records": records, "hypotheses": [], "pair": between},
    )
    _judge((found.first, found.second))


def comparison_record(found: Comparison) -> Record:
    """One candidate as a record; numbers that are not finite become null there."""
    names = ("max_abs_error", "max_rel_error", "rms_error", "cosine", "mismatches")
    after = ("actual", "expected", "rtol", "atol", "explanation")
    return (
        {"target": str(found.target), "passed": found.passed}
        | {name: getattr(found, name) for name in names}
        | {"worst_index": None if found.worst_index is None else list(found.worst_index)}
        | {name: getattr(found, name) for name in after}
        | {"cells": found.cells, "dtype": str(found.dtype).removeprefix("torch.")}
        | {name: getattr(found, name) for name in ("n_nan", "n_posinf", "n_neginf")}
    )


def _hypothesis_record(found: Hypothesis) -> Record:
    return {
        "name": found.name,
        "options": found.options or None,
        "max_abs_error": found.max_abs_error,
        "matches": found.matches,
    }


def _judge(comparisons: tuple[Comparison, ...]) -> None:
    """Fail if a candidate is off.

    Raises:
        CheckFailedError: naming the first that is, and why.
    """
    for found in comparisons:
        if not found.passed:
            raise CheckFailedError(
                f"--actual-{found.target}",
                f"expected the reference within {found.atol:.3g} + {found.rtol:.3g}·|expected|, "
                f"got {found.mismatches} of {found.cells} cells beyond it",
            )
