"""Do these tensors meet the assumption behind 1/√d_k, and if not, what breaks it?"""

from __future__ import annotations

from collections.abc import Iterator

from attncli.attention.problem import Problem
from attncli.attention.variance.moments import ScoreMoments, key_moments, score_moments

# Where a number becomes worth a sentence. Shares of 1: of the variance of all real pairs, what is
# constant along rows; of what softmax sees, what is one bias that all queries share.
INVISIBLE, SHARED = 0.5, 0.4
# Scaled variances of a softmax much flatter or sharper than the assumption's: standard deviations
# of 1/4 and 2 rather than 1.
FLAT, SHARP = 1 / 16, 4.0
# How many times a variance may exceed or fall short of another and be called close to it.
NEAR = 2.0


def audit(problem: Problem) -> Iterator[ScoreMoments]:
    """The moments of every head of every batch, key heads that are shared measured once."""
    per_key_head = problem.sizes.heads // problem.kv_heads
    for batch in range(problem.sizes.batch):
        for kv_head in range(problem.kv_heads):
            keys = key_moments(problem, batch, kv_head)
            for head in range(kv_head * per_key_head, (kv_head + 1) * per_key_head):
                yield score_moments(problem, batch, head, keys=keys)


def diagnosis(record: ScoreMoments) -> str:
    """One sentence on what a head's variance is made of, and whether its scale suits it.

    What breaks the assumption most is named first: a mean of the keys (variance that softmax never
    sees), a mean of the queries (one bias for all), then scaled scores that are too large or too
    small, then a mask that chooses unusual cells.
    """
    var, scaled, total = record.var, record.scaled_var, record.var_all_pairs
    within, by_keys = record.var_within_rows, record.var_from_key_mean
    by_queries = record.var_from_query_mean
    if (var is None or scaled is None or total is None) or (
        within is None or by_keys is None or by_queries is None
    ):
        return "nothing to measure: no visible cells, or scores that are not finite"
    if var == 0:
        return "every visible score is the same: softmax is uniform whatever the scale"
    invisible = by_keys / total if total else 0.0
    shared = by_queries / within if within else 0.0
    findings = []
    if invisible >= INVISIBLE:
        findings.append(
            f"keys share a mean: {invisible:.0%} of the variance is constant along rows and "
            "invisible to softmax"
        )
    if shared >= SHARED:
        findings.append(
            f"queries share a mean: {shared:.0%} of what softmax sees is one bias towards the same "
            "keys, typical of sinks"
        )
    if not FLAT < scaled < SHARP:
        kind = "sharper" if scaled >= SHARP else "flatter"
        scale = record.scale_for_unit_variance
        advice = "" if scale is None else f" (a scale of {scale:.3g} would give 1)"
        findings.append(
            f"scaled variance {scaled:.3g} makes softmax {kind} than the assumed 1{advice}"
        )
    if not findings and total and not 1 / NEAR < var / total < NEAR:
        findings.append(
            f"the mask chooses unusual cells: their variance is {var / total:.2g} times that of "
            "all real pairs"
        )
    if findings:
        return "; ".join(findings)
    kind = "close to the assumption" if 1 / NEAR <= scaled <= NEAR else "no single cause"
    return (
        f"{kind}: scaled variance {scaled:.2g} (assumed: 1), {1 - shared if within else 0.0:.0%} "
        "of what softmax sees is interaction of query and key"
    )
