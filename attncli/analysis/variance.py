"""The variance of q·k as it is drawn, for the command line and for Python; it takes no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from attncli.attention.options import DistributionName
from attncli.attention.variance.distributions import Distribution
from attncli.attention.variance.experiment import (
    ExperimentRecord,
    ExperimentSpec,
    ScaleRule,
    experiment,
    parse_scale_rule,
)
from attncli.attention.variance.logits import LogitsRecord
from attncli.columns import columns_of
from attncli.errors import UsageError, choice_of
from attncli.limits import require_memory

# The experiment of a page: enough draws for curves, few enough for a quarter of a second.
CURVE_WIDTHS, CURVE_SAMPLES = [2**power for power in range(11)], 10_000

EXPERIMENT = columns_of(ExperimentRecord)
LOGITS = columns_of(LogitsRecord)


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
        require_memory("«dk», «keys»", spec.bytes_needed, "smaller ones need less")
    return specs


def _listed(value: Any) -> list[Any]:
    several = isinstance(value, Sequence) and not isinstance(value, str)
    return list(value) if several else [value]


def experiments(
    specs: Sequence[ExperimentSpec], tell: Callable[[int], None] | None = None
) -> Iterator[ExperimentRecord]:
    """The records of every d_k, those of one d_k for every rule and temperature.

    Args:
        specs: what to draw.
        tell: as for `experiment`.
    """
    return (record for spec in specs for record in experiment(spec, tell))
