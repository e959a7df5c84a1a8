"""`variance --fit-scale`: which scale made these weights, or this output?"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from attncli.errors import DataError, UsageError

if TYPE_CHECKING:
    import torch

    from attncli.attention.fit_scale import ScaleFit
    from attncli.attention.problem import Problem
    from attncli.cli.options import FileOptions, ShapeOptions, WorkOptions
    from attncli.report.printer import Printer

# How far a row of weights may sum from 1 (or 0), and still be taken for weights.
SUM_TOLERANCE = 0.02


def run_fit(
    inputs: FileOptions, given: ShapeOptions, spec: str, work: WorkOptions, printer: Printer
) -> None:
    """Rank the classic scales and a fitted one by what they leave unexplained.

    Raises:
        UsageError: several groups to fit one tensor to.
        DataError: a tensor that is neither weights nor output of these Q, K and V.
    """
    from attncli.cli.emit import described, emit
    from attncli.cli.inputs import describe, load_groups, read_tensor
    from attncli.cli.problems import params_record, problem_of, warnings_of
    from attncli.report.records import FIT_SCALE
    from attncli.report.variance import fit_tables

    groups = load_groups(inputs)
    if len(groups) > 1:
        raise UsageError(
            "--fit-scale", f"expected one group, got {len(groups)}", "choose with --group"
        )
    shape, problem = problem_of(groups[0], inputs, given, work)
    tensor, said = read_tensor(spec, "--fit-scale", inputs.dtype)
    printer.warn((*warnings_of(groups[0], shape, problem), *said))
    source = _kind(problem, tensor, spec)
    fit = _fitted(problem, source, tensor, spec)
    records = _records(fit, problem)
    emit(
        work.format,
        printer,
        command="variance-fit",
        columns=FIT_SCALE,
        records=records,
        inputs=described(groups) | {source: describe(spec, tensor)},
        params=params_record(groups[0], shape, problem)
        | {"rows": fit.rows, "rows_total": fit.rows_total, "target_rms": fit.target_rms},
        show=lambda found: fit_tables(fit, found, printer),
    )


def _fitted(problem: Problem, source: str, tensor: torch.Tensor, spec: str) -> ScaleFit:
    """The fit; errors name the file."""
    from attncli.attention.fit_scale import fit_scale

    try:
        return fit_scale(problem, **{source: tensor})
    except DataError as error:
        raise DataError(spec, f"{error.problem}, for {source}", error.advice) from None


def _records(fit: ScaleFit, problem: Problem) -> list[dict[str, Any]]:
    place = {"source": str(fit.source), "scale_used": problem.scale}
    return [place | asdict(candidate) for candidate in fit.candidates]


def _kind(problem: Problem, tensor: torch.Tensor, spec: str) -> str:
    """Whether a tensor is the weights or the output, by its width and, if need be, its sums."""
    width, k_len, dv = tensor.shape[-1] if tensor.ndim else 0, problem.sizes.k_len, problem.dv
    if width not in (k_len, dv):
        expected = f"weights (…, {k_len})" + (f" or output (…, {dv})" if dv else "")
        raise DataError(spec, f"expected {expected}, got {tuple(tensor.shape)}")
    if k_len != dv:
        return "weights" if width == k_len else "output"
    exact = tensor.double()
    sums = exact.sum(-1)
    near = ((sums - 1).abs() < SUM_TOLERANCE) | (sums.abs() < SUM_TOLERANCE)
    return "weights" if bool((exact >= 0).all()) and bool(near.all()) else "output"
