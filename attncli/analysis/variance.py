"""The variance of q·k, drawn or in tensors: one assembly for the command line and for Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from attncli.analysis.options import choice_of
from attncli.attention.check.candidate import Target
from attncli.attention.options import DistributionName
from attncli.attention.problem import Problem
from attncli.attention.variance.distributions import Distribution
from attncli.attention.variance.experiment import (
    ExperimentRecord,
    ExperimentSpec,
    ScaleRule,
    experiment,
    parse_scale_rule,
)
from attncli.attention.variance.fit_scale import ScaleCandidate, ScaleFit, fit_scale
from attncli.attention.variance.logits import LogitsRecord
from attncli.attention.variance.moments import ScoreMoments
from attncli.columns import Column, columns_of
from attncli.errors import DataError, UsageError
from attncli.files.limits import require_memory

# The experiment of a page: enough draws for curves, few enough for a quarter of a second.
CURVE_WIDTHS, CURVE_SAMPLES = [2**power for power in range(11)], 10_000

EXPERIMENT = columns_of(ExperimentRecord)
LOGITS = columns_of(LogitsRecord)
AUDIT = (
    Column("source", "file", is_key=True),
    Column("group", "group", is_key=True),
    *columns_of(ScoreMoments),
    Column("diagnosis", "diagnosis"),
)
FIT_SCALE = (
    Column("source", None, is_key=True),
    Column("scale_used", None),
    *columns_of(ScaleCandidate),
)


def experiment_specs(
    *,
    dk: int | Sequence[int] = 64,
    scale_rule: ScaleRule | str | float | Sequence[ScaleRule | str | float] = ScaleRule.SQRT,
    temperatures: float | Sequence[float] = 1.0,
    dist: DistributionName | str = DistributionName.NORMAL,
    mean: float | None = None,
    std: float | None = None,
    correlation: float = 0.0,
    df: float | None = None,
    **sizes: int,
) -> list[ExperimentSpec]:
    """What to draw for each d_k, each once.

    Args:
        dk: width of queries and keys.
        scale_rule, temperatures: side by side on the same draws.
        dist, mean, std, correlation, df: of the entries, as in `Distribution`; None for its own.
        sizes: samples, keys and seed, as in `ExperimentSpec`.

    Raises:
        UsageError: values that make no sense.
        ResourceError: they take more memory than there is.
    """
    name = choice_of(DistributionName, dist, "dist")
    if df is not None and name is not DistributionName.STUDENT_T:
        raise UsageError("«df»", f"expected «dist=student-t» beside it, got {name}")
    moments = {"mean": mean, "std": std, "correlation": correlation, "df": df}
    given = {key: value for key, value in moments.items() if value is not None}
    specs = [
        ExperimentSpec(
            dk=width,
            distribution=Distribution(name=name, **given),
            rules=tuple(dict.fromkeys(parse_scale_rule(str(one)) for one in _listed(scale_rule))),
            temperatures=tuple(dict.fromkeys(map(float, _listed(temperatures)))),
            **sizes,
        )
        for width in dict.fromkeys(_listed(dk))
    ]
    for spec in specs:
        require_memory("«dk», «keys»", spec.bytes_needed)
    return specs


def _listed(value: Any) -> list[Any]:
    several = isinstance(value, Sequence) and not isinstance(value, str)
    return list(value) if several else [value]


def experiments(specs: Sequence[ExperimentSpec]) -> Iterator[ExperimentRecord]:
    """The records of every d_k, those of one d_k for every rule and temperature."""
    return (record for spec in specs for record in experiment(spec))


def fit_to(problem: Problem, given: torch.Tensor, where: str) -> ScaleFit:
    """The scale that made a tensor: weights or output, as its width says or as it fits better.

    Args:
        problem: what it was made from.
        given: the tensor.
        where: its file.

    Raises:
        DataError: it is neither weights nor output; names the file.
    """
    width = given.shape[-1] if given.ndim else 0
    widths = {Target.WEIGHTS: problem.sizes.k_len, Target.OUTPUT: problem.dv}
    fits = []
    for source in (source for source, wanted in widths.items() if wanted == width):
        try:
            fits.append(fit_scale(problem, source, given))
        except DataError as error:
            raise DataError(where, f"{error.problem}, for {source}", error.advice) from None
    if not fits:
        names = (f"{source} (…, {wanted})" for source, wanted in widths.items() if wanted)
        raise DataError(where, f"expected {' or '.join(names)}, got {tuple(given.shape)}")
    return min(fits, key=lambda fit: fit.unexplained)
