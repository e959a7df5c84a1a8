"""`variance --fit-scale`: which scale made these weights, or this output?"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from attncli.attention.check.candidate import Target
from attncli.errors import DataError, UsageError

if TYPE_CHECKING:
    import torch

    from attncli.analysis.options import AttentionWords, FileOptions
    from attncli.attention.problem import Problem
    from attncli.attention.variance.fit_scale import ScaleFit
    from attncli.cli.options import WorkOptions
    from attncli.report.printer import Printer


def run_fit(
    inputs: FileOptions, given: AttentionWords, spec: str, work: WorkOptions, printer: Printer
) -> None:
    """Rank the classic scales and a fitted one by what they leave unexplained.

    Raises:
        UsageError: several groups to fit one tensor to.
        DataError: a tensor that is neither weights nor output of these Q, K and V.
    """
    from attncli.analysis.inputs import describe, described, load_groups, read_tensor
    from attncli.analysis.problems import params_record, problem_of, warnings_of
    from attncli.cli.emit import emit
    from attncli.report.records import FIT_SCALE
    from attncli.report.variance import fit_tables

    groups = load_groups(inputs)
    if len(groups) > 1:
        raise UsageError(
            "--fit-scale", f"expected one group, got {len(groups)}", "choose with --group"
        )
    shape, problem = problem_of(
        groups[0], inputs, given, precision=work.precision, device=work.device
    )
    tensor, said = read_tensor(spec, "--fit-scale", inputs.dtype)
    printer.warn((*warnings_of(groups[0], shape, problem), *said))
    fit = _fitted(problem, tensor, spec)
    source = str(fit.source)
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


def _fitted(problem: Problem, tensor: torch.Tensor, spec: str) -> ScaleFit:
    """The fit to what the tensor is by its width, or by how well it fits where that is both.

    Raises:
        DataError: it is neither weights nor output; names the file.
    """
    from attncli.attention.variance.fit_scale import fit_scale

    fits = []
    for source in _kinds(problem, tensor, spec):
        try:
            fits.append(fit_scale(problem, source, tensor))
        except DataError as error:
            raise DataError(spec, f"{error.problem}, for {source}", error.advice) from None
    return min(fits, key=_unexplained)


def _unexplained(fit: ScaleFit) -> float:
    """The least residual, as a share of what was fitted."""
    least = min(candidate.rms for candidate in fit.candidates)
    return least / fit.target_rms if fit.target_rms else least


def _records(fit: ScaleFit, problem: Problem) -> list[dict[str, Any]]:
    place = {"source": str(fit.source), "scale_used": problem.scale}
    return [place | asdict(candidate) for candidate in fit.candidates]


def _kinds(problem: Problem, tensor: torch.Tensor, spec: str) -> list[Target]:
    """What a tensor of this width can be."""
    width = tensor.shape[-1] if tensor.ndim else 0
    widths = {Target.WEIGHTS: problem.sizes.k_len, Target.OUTPUT: problem.dv}
    found = [kind for kind, wanted in widths.items() if wanted == width]
    if not found:
        names = (f"{kind} (…, {wanted})" for kind, wanted in widths.items() if wanted)
        raise DataError(spec, f"expected {' or '.join(names)}, got {tuple(tensor.shape)}")
    return found
