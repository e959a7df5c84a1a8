"""`attncli.variance`: why √d_k, measured on random draws or on tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack, overload

from attncli.analysis.variance import experiment_specs, experiments
from attncli.api.arguments import as_problem
from attncli.api.keywords import OptionKeywords, TensorLike, as_choice, as_options
from attncli.attention.options import DistributionName, Layout, Precision
from attncli.attention.problem import Problem
from attncli.attention.variance.audit import audit, diagnosis
from attncli.attention.variance.experiment import ExperimentRecord, ScaleRule, parse_scale_rule
from attncli.attention.variance.moments import ScoreMoments
from attncli.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """What the scores of every head vary by, and why.

    Attributes:
        records: one per head, the heads of batch 0 first.
        diagnoses: a sentence for each record.
        problem: the checked input: sizes, scale, mask, dtype and device of the arithmetic.
    """

    records: tuple[ScoreMoments, ...]
    diagnoses: tuple[str, ...]
    problem: Problem

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was assumed, and what looks like a mistake."""
        return self.problem.warnings


@overload
def variance(
    q: TensorLike,
    k: TensorLike,
    *,
    layout: Layout | str = Layout.BHSD,
    heads: int | None = None,
    kv_heads: int | None = None,
    precision: Precision | str = Precision.AUTO,
    device: str = "auto",
    allow_nonfinite: bool = False,
    **options: Unpack[OptionKeywords],
) -> Audited: ...


@overload
def variance(
    *,
    dk: int | Sequence[int] = 64,
    samples: int = 100_000,
    keys: int = 8,
    dist: DistributionName | str = DistributionName.NORMAL,
    mean: float | None = None,
    std: float | None = None,
    correlation: float = 0.0,
    df: float | None = None,
    scale_rule: ScaleRule | str | float | Sequence[ScaleRule | str | float] = ScaleRule.SQRT,
    temperatures: float | Sequence[float] = 1.0,
    seed: int = 0,
) -> tuple[ExperimentRecord, ...]: ...


def variance(q: TensorLike = None, k: TensorLike = None, **keywords: Any) -> Any:
    """Measure the variance of q·k: of tensors exactly, in linear time, or of random draws.

    With tensors the result says what the variance of all visible scores of every head is made of.
    Without, it is an experiment: variance against theory, and softmax with and without the scale.

    >>> audited = attncli.variance([[3.0], [1.0]], [[1.0], [0.0]])
    >>> audited.records[0].var
    1.5
    >>> audited.diagnoses[0].split(":")[0]
    'queries share a mean'
    >>> [round(record.scaled_var) for record in attncli.variance(dk=[16, 256], samples=10_000)]
    [1, 1]

    Args:
        q: (S_q, d_k), (H, S_q, d_k) or (B, H, S_q, d_k), or as `layout` says: a torch tensor, a
            NumPy array or nested lists, of any real dtype.
        k: like q, with S_k in the place of S_q and H_kv in the place of H.
        layout: "bhsd", "bshd" for (B, S, H, d), or "bsh" for packed (B, S, H·d).
        heads: H, needed where the layout packs heads, checked elsewhere.
        kv_heads: H_kv, likewise; None means `heads`.
        precision: dtype of the arithmetic: "float32", "float64", or "auto", which is float64
            for float64 input or up to 2²⁶ scores.
        device: "auto", "cpu", "cuda" or "cuda:N".
        allow_nonfinite: whether NaN and inf are let through; what they reach is None.
        options: any field of `AttentionOptions`: causal=True, scale=0.1, key_lengths=[5, 3], …
            What comes after the scaled scores (soft cap, biases, sinks) changes nothing.
        dk: without tensors, width of queries and keys; several for a sweep.
        samples: number of dot products for each d_k.
        keys: keys of each query.
        dist: "normal", "uniform" on [0, 1), "rademacher", "laplace" or "student-t".
        mean: of an entry of Q and K; None for the distribution's own.
        std: of an entry; likewise.
        correlation: between the entries of a query and its keys, −1 to 1.
        df: degrees of freedom of student-t; None for 10.
        scale_rule: "sqrt", "linear", "none", "log-n" or a number; several side by side.
        temperatures: divide the scaled scores; several side by side.
        seed: of the draws.

    Raises:
        DataError: shapes that do not fit each other, or NaN and inf that are not allowed.
        ResourceError: a device that is not there, or more memory than there is.
        TypeError: keywords of audits without tensors, or of experiments with them.
        UsageError: options that make no sense, or do not fit the shapes.
    """
    if q is None and k is None:
        return _experiments(**keywords)
    if q is None or k is None:
        raise UsageError("q" if q is None else "k", "expected q and k, got one of them")
    return _audited(q, k, **keywords)


def _experiments(
    *,
    dk: int | Sequence[int] = 64,
    dist: DistributionName | str = DistributionName.NORMAL,
    scale_rule: ScaleRule | str | float | Sequence[ScaleRule | str | float] = ScaleRule.SQRT,
    temperatures: float | Sequence[float] = 1.0,
    **others: Any,
) -> tuple[ExperimentRecord, ...]:
    """The records of every d_k, those of one d_k for every rule and temperature."""
    specs = experiment_specs(
        _listed(dk),
        [parse_scale_rule(str(rule)) for rule in _listed(scale_rule)],
        [float(temperature) for temperature in _listed(temperatures)],
        dist=as_choice(DistributionName, dist, "dist"),
        **others,
    )
    return tuple(experiments(specs))


def _listed(value: Any) -> list[Any]:
    several = isinstance(value, Sequence) and not isinstance(value, str)
    return list(value) if several else [value]


def _audited(
    q: TensorLike,
    k: TensorLike,
    *,
    layout: Layout | str = Layout.BHSD,
    heads: int | None = None,
    kv_heads: int | None = None,
    precision: Precision | str = Precision.AUTO,
    device: str = "auto",
    allow_nonfinite: bool = False,
    **options: Unpack[OptionKeywords],
) -> Audited:
    """The audit of every head."""
    attention_options = as_options(options)
    problem = as_problem(
        q,
        k,
        None,
        attention_options,
        layout=layout,
        heads=heads,
        kv_heads=kv_heads,
        precision=precision,
        device=device,
        allow_nonfinite=allow_nonfinite,
    )
    records = tuple(audit(problem))
    return Audited(records=records, diagnoses=tuple(map(diagnosis, records)), problem=problem)
