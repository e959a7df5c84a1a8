"""Do these tensors meet the assumption behind 1/√d_k, and if not, what breaks it?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attncli.attention.problem import Problem
from attncli.attention.variance.moments import ScoreMoments, key_moments, score_moments


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisLimits:
    """Where a number becomes worth a sentence; shares are of 1.

    Attributes:
        invisible: of the variance of all real pairs, constant along rows, from this share on.
        shared: of what softmax sees, one bias that all queries share, from this share on.
        sharp: scaled variance from which softmax is much sharper than the assumption's: a
            standard deviation of 2 rather than 1.
        flat: scaled variance up to which it is much flatter: a standard deviation of 1/4.
        near: how many times the scaled variance may exceed or fall short of 1 and be called close.
        gap: how many times the visible cells' variance may exceed or fall short of that of all
            real pairs before the mask itself is named.
    """

    invisible: float = 0.5
    shared: float = 0.4
    sharp: float = 4.0
    flat: float = 1 / 16
    near: float = 2.0
    gap: float = 2.0


LIMITS = DiagnosisLimits()


def audit(problem: Problem) -> Iterator[ScoreMoments]:
    """The moments of every head of every batch, key heads that are shared measured once.

    Args:
        problem: what is measured.
    """
    per_key_head = problem.sizes.heads // problem.kv_heads
    for batch in range(problem.sizes.batch):
        for kv_head in range(problem.kv_heads):
            keys = key_moments(problem, batch, kv_head)
            for head in range(kv_head * per_key_head, (kv_head + 1) * per_key_head):
                yield score_moments(problem, batch, head, keys=keys)


def diagnosis(record: ScoreMoments, limits: DiagnosisLimits = LIMITS) -> str:
    """One sentence on what a head's variance is made of, and whether its scale suits it.

    What breaks the assumption most is named first: a mean of the keys (variance that softmax never
    sees), a mean of the queries (one bias for all), then scaled scores that are too large or too
    small, then a mask that chooses unusual cells.

    Args:
        record: one head.
        limits: where a number becomes worth a sentence.
    """
    parts = _parts(record)
    if record.var is None or record.scaled_var is None or parts is None:
        return "nothing to measure: no visible cells, or scores that are not finite"
    if record.var == 0:
        return "every visible score is the same: softmax is uniform whatever the scale"
    findings = [*parts.findings(limits), *_scale_findings(record, record.scaled_var, limits)]
    if not findings:
        findings = _mask_findings(record, limits)
    if not findings:
        near = 1 / limits.near <= record.scaled_var <= limits.near
        kind = "close to the assumption" if near else "no single cause"
        return (
            f"{kind}: scaled variance {record.scaled_var:.2g} (assumed: 1), "
            f"{parts.interaction:.0%} of what softmax sees is interaction of query and key"
        )
    return "; ".join(findings)


@dataclass(frozen=True, slots=True)
class _Shares:
    """Shares of the variance: what softmax does not see of all, and two parts of what it does."""

    invisible: float
    shared: float
    interaction: float

    def findings(self, limits: DiagnosisLimits) -> list[str]:
        found = []
        if self.invisible >= limits.invisible:
            found.append(
                f"keys share a mean: {self.invisible:.0%} of the variance is constant along rows "
                "and invisible to softmax"
            )
        if self.shared >= limits.shared:
            found.append(
                f"queries share a mean: {self.shared:.0%} of what softmax sees is one bias "
                "towards the same keys, typical of sinks"
            )
        return found


def _parts(record: ScoreMoments) -> _Shares | None:
    total, within = record.var_all_pairs, record.var_within_rows
    by_keys, by_queries = record.var_from_key_mean, record.var_from_query_mean
    if total is None or within is None or by_keys is None or by_queries is None:
        return None
    shared = by_queries / within if within else 0.0
    return _Shares(by_keys / total if total else 0.0, shared, 1 - shared if within else 0.0)


def _scale_findings(record: ScoreMoments, scaled: float, limits: DiagnosisLimits) -> list[str]:
    """Whether the scaled scores are far from unit variance."""
    if limits.flat < scaled < limits.sharp:
        return []
    kind = "sharper" if scaled >= limits.sharp else "flatter"
    advice = ""
    if record.scale_for_unit_variance is not None:
        advice = f" (a scale of {record.scale_for_unit_variance:.3g} would give 1)"
    return [f"scaled variance {scaled:.3g} makes softmax {kind} than the assumed 1{advice}"]


def _mask_findings(record: ScoreMoments, limits: DiagnosisLimits) -> list[str]:
    """Whether the visible cells differ from the rest."""
    total = record.var_all_pairs
    if not total or record.var is None or 1 / limits.gap < record.var / total < limits.gap:
        return []
    return [
        f"the mask chooses unusual cells: their variance is {record.var / total:.2g} times that "
        "of all real pairs"
    ]
