"""Experiments: theory against exact moments, intervals, softmax symptoms, reproducibility."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import mpmath
import numpy as np
import pytest

from attncli.attention.options import DistributionName
from attncli.attention.statistics import softmax_stats, student_quantile
from attncli.attention.variance import experiment as experiment_module
from attncli.attention.variance.distributions import Distribution
from attncli.attention.variance.experiment import (
    ClusterSums,
    ExperimentRecord,
    ExperimentSpec,
    ScaleRule,
    experiment,
    parse_scale_rule,
    scale_of,
)
from attncli.attention.variance.moments import ScoreMoments, diagnosis
from attncli.errors import UsageError

NAMES = list(DistributionName)


def one(**given: Any) -> ExperimentRecord:
    """The record of a specification with one scale."""
    (record,) = experiment(ExperimentSpec(**given))
    return record


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [{}, {"mean": 0.7, "std": 1.5}], ids=["own", "moved"])
@pytest.mark.parametrize("correlation", [0.0, 0.5, -0.9])
def test_measured_moments_agree_with_theory(
    name: DistributionName, shape: dict[str, float], correlation: float
) -> None:
    entries = Distribution(name=name, correlation=correlation, df=20.0, **shape)
    found = one(dk=16, samples=80_000, distribution=entries, seed=3)
    assert found.mean_theory is not None
    assert found.var_theory is not None
    assert found.ratio == pytest.approx(found.var / found.var_theory)
    # Six standard errors: the interval's half width is two of them.
    reach = math.log(found.var_ci95_high / found.var_ci95_low) * 1.5
    assert abs(math.log(found.var / found.var_theory)) < reach
    # Keys move together with the query that they share: count queries, not scores.
    assert abs(found.mean - found.mean_theory) < 6 * math.sqrt(found.var_theory / 10_000)


def test_products_that_are_all_alike() -> None:
    opposite = Distribution(name=DistributionName.RADEMACHER, correlation=-1.0)
    found = one(dk=16, samples=800, distribution=opposite)
    assert (found.mean, found.mean_theory) == (-16, -16)
    assert found.var == found.var_theory == found.var_ci95_low == found.var_ci95_high == 0
    assert found.ratio is None


def test_theory_of_two_point_entries_is_exact() -> None:
    """Rademacher entries take four values together: their moments can be summed by hand."""
    mean, std, rho = 0.3, 2.0, 0.25
    mixed = math.sqrt(1 - rho**2)
    products = [
        (mean + std * z) * (mean + std * (rho * z + mixed * e))
        for z, e in itertools.product((-1, 1), repeat=2)
    ]
    entries = Distribution(name=DistributionName.RADEMACHER, mean=mean, std=std, correlation=rho)
    assert entries.dot_mean(5) == pytest.approx(5 * np.mean(products), rel=1e-14)
    assert entries.dot_variance(5) == pytest.approx(5 * np.var(products), rel=1e-14)


@pytest.mark.parametrize("dk", [1, 64])
def test_theory_of_the_shared_page(dk: int) -> None:
    assert Distribution().dot_variance(dk) == dk
    uniform = Distribution(name=DistributionName.UNIFORM)
    assert uniform.dot_mean(dk) == dk / 4
    assert uniform.dot_variance(dk) == pytest.approx(7 * dk / 144, rel=1e-14)
    assert Distribution(correlation=1.0).dot_mean(dk) == dk  # |q|², chi-squared
    assert Distribution(correlation=1.0).dot_variance(dk) == 2 * dk


@pytest.mark.parametrize("name", NAMES)
def test_entries_are_standardised(name: DistributionName) -> None:
    entries = Distribution(name=name)
    z = entries.standardised(np.random.default_rng(0), (400_000,))
    assert z.mean() == pytest.approx(0, abs=0.01)
    assert z.var() == pytest.approx(1, abs=0.02)
    assert (z**4).mean() == pytest.approx(entries.kurtosis, rel=0.1)
    lowest, highest = entries.to_entries(z).min(), z.max()
    if name is DistributionName.UNIFORM:
        assert -1e-15 <= lowest < 1e-4
        assert 1 - 1e-4 < highest <= 1 + 1e-15


@pytest.mark.parametrize("dk", [1, 3, 128])
def test_the_interval_is_near_the_measured_variance(dk: int) -> None:
    found = one(dk=dk, samples=20_000)
    assert 0 < found.var_ci95_low < found.var < found.var_ci95_high
    assert found.interval_reason is None


def test_the_interval_allows_for_keys_that_share_a_query() -> None:
    """Copying each sample eight times within its group must not narrow the interval."""
    x = np.random.default_rng(1).standard_normal((500, 1))
    alone, copied = (ClusterSums.of(s, 0.0, s.size) for s in (x, np.repeat(x, 8, axis=1)))
    assert copied.interval() == pytest.approx(alone.interval(), rel=1e-12)
    assert copied.variance == pytest.approx(float(x.var()), rel=1e-12)


@pytest.mark.parametrize(
    ("entries", "dk", "samples", "keys"),
    [
        ({"mean": 3.0}, 16, 2000, 100),  # 20 queries alone
        ({"correlation": 1.0}, 8, 400, 8),
        ({}, 1, 100, 8),
        ({"name": DistributionName.LAPLACE}, 1, 400, 8),
        ({"name": DistributionName.STUDENT_T, "df": 5.0}, 1, 400, 8),
    ],
)
def test_intervals_of_few_queries_and_heavy_tails_cover_95_percent(
    entries: dict[str, Any], dk: int, samples: int, keys: int
) -> None:
    """No worse than 93 %, nor better than 97, by three standard errors of so many seeds.

    A quick look; `tests/bench/interval_coverage.py` looks properly.
    """
    seeds, distribution = 400, Distribution(**entries)
    inside = 0
    for seed in range(seeds):
        found = one(
            dk=dk, samples=samples, keys=keys, distribution=distribution, seed=seed, threads=1
        )
        inside += found.var_ci95_low <= found.var_theory <= found.var_ci95_high
    allowed = 3 * math.sqrt(0.05 * 0.95 / seeds)
    assert 0.93 - allowed < inside / seeds < 0.97 + allowed


def test_the_parts_of_a_variance_add_up() -> None:
    """Between the means of groups, which their own mean has made too small, and within groups."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((12, 1)) * 3 + rng.standard_normal((12, 50))
    low, high = ClusterSums.of(x, 0.0, x.size).interval() or (0.0, 0.0)
    parts = x.mean(1).var(ddof=1) + x.var(1).mean()
    assert low < parts < high
    steady = np.tile(x - x.mean(1, keepdims=True), (1, 1))  # no group has a mean of its own
    low, high = ClusterSums.of(steady, 0.0, x.size).interval() or (0.0, 0.0)
    within = x.var(1)
    assert low < within.mean() < high
    assert high / low < 1.5


def test_the_sums_do_not_depend_on_the_reference_or_the_blocks() -> None:
    x = 5 + np.random.default_rng(2).standard_normal((60, 4))
    whole = ClusterSums.of(x, 5.0, x.size)
    halves = ClusterSums.of(x[:20], 5.0, 80) + ClusterSums.of(x[20:], 5.0, 160)
    moved = ClusterSums.of(x, 4.0, x.size)
    assert whole.variance == pytest.approx(float(x.var()), rel=1e-13)
    for other in (halves, moved):
        assert other.interval() == pytest.approx(whole.interval(), rel=1e-9)


@pytest.mark.parametrize("df", [1, 2, 3, 10, 200])
def test_student_quantiles(df: int) -> None:
    found = student_quantile(0.975, df)
    tail = mpmath.betainc(df / 2, 0.5, 0, df / (df + found**2), regularized=True)
    assert float(tail) == pytest.approx(0.05, rel=0.02 if df == 3 else 1e-4)


def test_quantile_of_endless_degrees_of_freedom_is_normal() -> None:
    assert student_quantile(0.975, 10**9) == pytest.approx(NormalDist().inv_cdf(0.975), rel=1e-8)


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"df": 4.0}, "no fourth moment"),
        ({"df": 8.0, "correlation": 0.1}, "df above 8"),
        ({"df": 2.0}, "no fourth moment"),
        ({"df": 0.9}, "no fourth moment"),
    ],
)
def test_no_interval_where_the_fourth_moment_is_missing(
    entries: dict[str, float], says: str
) -> None:
    student = Distribution(name=DistributionName.STUDENT_T, **entries)
    found = one(dk=4, samples=800, distribution=student)
    assert found.var_ci95_low is found.var_ci95_high is None
    assert says in (found.interval_reason or "")
    assert (found.var_theory is None) == (entries["df"] <= 2)
    assert (found.mean_theory is None) == (entries["df"] <= 1)


def test_one_query_has_no_interval() -> None:
    found = one(dk=4, samples=5, keys=8)
    assert found.var_ci95_low is None
    assert "one query" in (found.interval_reason or "")


def test_surplus_keys_of_the_last_query_are_not_counted() -> None:
    some, all_of_them = (ClusterSums.of(np.arange(12.0).reshape(3, 4), 0.0, n) for n in (9, 12))
    # 0 … 3 and 4 … 7 differ by 5 about their means 1.5 and 5.5, and 8 is alone.
    assert some.first.tolist() == [10, 4 * 1.5**2 + 4 * 5.5**2 + 64, 36, 9]
    assert some.groups == all_of_them.groups == 3
    assert ClusterSums.of(np.ones((3, 4)), 0.0, 8).groups == 2


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("name", NAMES)
def test_threads_change_nothing(threads: int, name: DistributionName) -> None:
    spec = ExperimentSpec(dk=48, samples=6001, distribution=Distribution(name=name), threads=1)
    assert experiment(replace(spec, threads=threads)) == experiment(spec)


def test_seeds_and_widths_change_the_draws() -> None:
    found = {one(dk=8, samples=800, seed=seed).mean for seed in range(3)}
    assert len(found) == 3
    assert one(dk=8, samples=800).var == one(dk=8, samples=800).var


def test_a_query_with_more_keys_than_a_chunk_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment_module, "CHUNK_NUMBERS", 64)
    found = one(dk=8, samples=6000, keys=1000)
    assert found.var == pytest.approx(8, rel=0.9)
    assert found.samples == 6000


def test_scaled_columns_follow_scale_and_temperature() -> None:
    spec = ExperimentSpec(
        dk=64,
        samples=4000,
        rules=(ScaleRule.SQRT, ScaleRule.LINEAR, ScaleRule.NONE, ScaleRule.LOG_N, 0.25),
        temperatures=(1.0, 2.0),
    )
    found = experiment(spec)
    scales = [1 / 8, 1 / 64, 1, math.log(8) / 8, 0.25]
    assert [record.scale for record in found[::2]] == pytest.approx(scales)
    assert [record.rule for record in found[::2]] == ["sqrt", "linear", "none", "log-n", "0.25"]
    for record in found:
        expected = record.var * (record.scale / record.temperature) ** 2
        assert record.scaled_var == pytest.approx(expected)
        assert record.var == found[0].var
    none = found[4]
    assert none.entropy_bits_scaled == none.entropy_bits_unscaled
    assert none.softmax_grad_scaled == none.softmax_grad_unscaled


def test_the_symptoms_of_a_missing_scale() -> None:
    found = one(dk=128, samples=8000)
    assert found.entropy_bits_max == 3
    assert found.entropy_bits_unscaled < 0.5 < 2 < found.entropy_bits_scaled
    assert found.max_weight_scaled < 0.5 < 0.85 < found.max_weight_unscaled
    assert found.softmax_grad_unscaled < 0.15 < 0.3 < found.softmax_grad_scaled
    assert found.assumption.endswith("= d_k")


@pytest.mark.parametrize(
    ("row", "grad"), [([0.0] * 8, 0.330719), ([10.0, 1.0, 1.0], 0.000390), ([4.0], 0.0)]
)
def test_worked_softmax_gradients(row: list[float], grad: float) -> None:
    found = softmax_stats(np.array([row]))
    assert found.softmax_grad[0] == pytest.approx(grad, abs=5e-7)


def test_symptoms_against_many_digits() -> None:
    rows = np.array([[0.3, -1.2, 2.0], [900.0, 860.0, -900.0], [5.0, 5.0, -80.0], [1e308, 0, 0]])
    with np.errstate(under="ignore"):
        found = softmax_stats(rows)
    for index, row in enumerate(rows.tolist()):
        with mpmath.workdps(60):
            exps = [mpmath.exp(mpmath.mpf(x) - max(row)) for x in row]
            w = [e / mpmath.fsum(exps) for e in exps]
            entropy = -mpmath.fsum(p * mpmath.log(p, 2) for p in w if p)
            jacobian = mpmath.matrix(3, 3)
            for i, j in itertools.product(range(3), repeat=2):
                jacobian[i, j] = (w[i] if i == j else 0) - w[i] * w[j]
            norm = mpmath.sqrt(mpmath.fsum(cell**2 for cell in jacobian))
        assert found.entropy_bits[index] == pytest.approx(float(entropy), rel=1e-13, abs=1e-300)
        assert found.max_weight[index] == pytest.approx(float(max(w)), rel=1e-14)
        assert found.softmax_grad[index] == pytest.approx(float(norm), rel=1e-13, abs=1e-300)


def test_flat_rows_have_all_the_entropy_and_never_negative_zero() -> None:
    found = softmax_stats(np.zeros((1, 4)))
    assert found.entropy_bits[0] == pytest.approx(2, rel=1e-15)
    assert math.copysign(1, softmax_stats(np.zeros((1, 1))).entropy_bits[0]) == 1


@pytest.mark.parametrize(
    ("text", "scale"),
    [("sqrt", 0.25), ("linear", 1 / 16), ("none", 1.0), ("log-n", math.log(10) / 4), ("-2", -2)],
)
def test_scale_rules(text: str, scale: float) -> None:
    assert scale_of(parse_scale_rule(text), dk=16, keys=10) == pytest.approx(scale)


@pytest.mark.parametrize("text", ["nan", "inf", "root", ""])
def test_other_scale_rules_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected sqrt, linear, none, log-n or a finite number"):
        parse_scale_rule(text)


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"dk": 0}, "dk"),
        ({"dk": 1, "samples": 0}, "samples"),
        ({"dk": 1, "keys": 0}, "keys"),
        ({"dk": 1, "seed": -1}, "seed"),
        ({"dk": 1, "temperatures": (0.0,)}, "temperatures"),
    ],
)
def test_specifications_that_make_no_sense(given: dict[str, Any], option: str) -> None:
    with pytest.raises(UsageError, match=f"^{option}: "):
        ExperimentSpec(**given)


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"mean": math.nan}, "mean"),
        ({"std": -1.0}, "std"),
        ({"correlation": 1.5}, "correlation"),
        ({"df": 0.0}, "df"),
        ({"name": DistributionName.STUDENT_T, "df": 2.0, "std": 1.0}, "std"),
        ({"name": DistributionName.STUDENT_T, "df": 2.0, "correlation": 0.1}, "correlation"),
    ],
)
def test_distributions_that_make_no_sense(given: dict[str, Any], option: str) -> None:
    with pytest.raises(UsageError, match=f"^{option}: "):
        Distribution(**given)


AUDITED = ScoreMoments(
    batch=0,
    head=0,
    dk=64,
    cells=100,
    mean=0.0,
    var=64.0,
    std=8.0,
    var_within_rows=60.0,
    var_all_pairs=64.0,
    scale=0.125,
    scaled_mean=0.0,
    scaled_var=1.0,
    scaled_std=1.0,
    q_mean_norm=1.0,
    k_mean_norm=1.0,
    q_var=1.0,
    k_var=1.0,
    var_unit_theory=64.0,
    var_from_interaction=58.0,
    var_from_query_mean=2.0,
    var_from_key_mean=4.0,
    scale_for_unit_variance=0.125,
)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "close to the assumption: scaled variance 1 (assumed: 1), 97% of what softmax sees"),
        (
            {"var_from_query_mean": 34.8, "var_from_interaction": 25.2},
            "queries share a mean: 58% of what softmax sees is one bias towards the same keys",
        ),
        (
            {"var_within_rows": 18.56, "var_from_key_mean": 45.44, "var_from_query_mean": 0.0},
            "71% of the variance is constant along rows and invisible to softmax",
        ),
        ({"scaled_var": 9.0, "scale_for_unit_variance": 1 / 24}, "sharper than the assumed 1"),
        ({"scaled_var": 0.05}, "flatter than the assumed 1"),
        ({"var": 20.0}, "the mask chooses unusual cells"),
        ({"var": 0.0, "scaled_var": 0.0}, "every visible score is the same"),
        ({"var": None, "scaled_var": None, "cells": 0}, "nothing to measure"),
    ],
)
def test_diagnosis(changes: dict[str, Any], says: str) -> None:
    assert says in diagnosis(replace(AUDITED, **changes))


def test_a_far_mean_rounds_nothing_away() -> None:
    """Entries of 1e8 ± 1 whose means cancel exactly: the variance is the interaction's alone."""
    far = Distribution(name=DistributionName.NORMAL, mean=1e8, correlation=-1.0)
    (record,) = experiment(ExperimentSpec(dk=8, distribution=far))
    assert record.var_theory == 16
    assert record.var_ci95_low is not None
    assert record.var_ci95_high is not None
    assert record.var_ci95_low < 16 < record.var_ci95_high


def test_intervals_of_few_heavy_groups_are_wider_than_those_of_normal_ones() -> None:
    """By Satterthwaite: half of the sums of squares in one group leave few degrees of freedom."""
    rng = np.random.default_rng(3)
    light, heavy = rng.standard_normal((40, 8)), rng.standard_normal((40, 8))
    heavy[0] *= 6
    widths = []
    for samples in (light, heavy):
        sums = ClusterSums.of(samples.copy(), 0.0, samples.size)
        low, high = sums.interval() or (0.0, 0.0)
        widths.append(high / low)
    assert widths[1] > 2 * widths[0]


def test_the_assumption_names_the_family_and_its_degrees_of_freedom() -> None:
    said = Distribution(name=DistributionName.STUDENT_T, df=6.0).assumption(4)
    assert said.startswith("student-t (df 6) entries: mean 0, std 1")


def test_degrees_of_freedom_are_told_of_student_t_alone() -> None:
    for name in NAMES:
        found = one(dk=4, samples=400, distribution=Distribution(name=name, df=6.0))
        assert found.df == (6.0 if name is DistributionName.STUDENT_T else None)


@pytest.mark.parametrize("queries", [1, 3, 7, 9])
def test_a_last_chunk_of_fewer_queries_counts_no_more_than_these(
    queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three queries a chunk: means over queries of a flat softmax are those of a flat softmax."""
    monkeypatch.setattr(experiment_module, "CHUNK_NUMBERS", 3 * 6 * 2)
    drawn: list[int] = []
    spec = ExperimentSpec(dk=2, keys=5, samples=5 * queries - 1, rules=(1e-12,), threads=2)
    (found,) = experiment(spec, drawn.append)
    assert found.entropy_bits_scaled == pytest.approx(math.log2(5), rel=1e-9)
    assert found.max_weight_scaled == pytest.approx(0.2, rel=1e-9)
    assert drawn == [12 * min(3, queries - at) for at in range(0, queries, 3)]
    assert found.samples == 5 * queries - 1


def test_kurtosis_is_the_fourth_moment_of_a_standardised_entry() -> None:
    known = {"normal": 3, "uniform": 1.8, "rademacher": 1, "laplace": 6}
    assert {name: Distribution(name=DistributionName(name)).kurtosis for name in known} == known
    of_t = [Distribution(name=DistributionName.STUDENT_T, df=df).kurtosis for df in (3, 4, 5, 10)]
    assert of_t == [None, None, 9, 4]


def plain_interval(groups: list[np.ndarray]) -> tuple[float, float]:
    """The interval as its sources have it, group by group, by plain sums."""
    count, many = sum(map(len, groups)), len(groups)
    grand = sum(float(x.sum()) for x in groups) / count
    sizes = np.array([len(x) for x in groups])
    unbiased = many / (many - 1)
    between = np.array([len(x) * (x.mean() - grand) ** 2 for x in groups])
    within = np.array([((x - x.mean()) ** 2).sum() for x in groups])
    parts = []
    for of_group, factor in ((between, unbiased), (within, 1.0)):
        mean = of_group.sum() / count
        strays = (of_group - sizes * mean) * factor
        squares = (strays**2).sum()
        error = math.sqrt(squares * unbiased) / count / (mean * factor)
        kurtosis = many * (strays**4).sum() / squares**2
        kurtosis *= 1 + kurtosis * (kurtosis + 4) / (2 * many)
        freedom = min(many - 1, max(3.0, (many - 1) / max(1.0, (kurtosis - 1) / 2)))
        reach = student_quantile(0.975, freedom) * error
        low, high = -math.expm1(error**2 - reach), math.expm1(error**2 + reach)
        parts.append((mean * factor, low * mean * factor, high * mean * factor, strays))
    (a, low_a, high_a, of_a), (b, low_b, high_b, of_b) = parts
    rho = (of_a * of_b).sum() / math.sqrt((of_a**2).sum() * (of_b**2).sum())
    below = math.sqrt(low_a**2 + low_b**2 + 2 * rho * low_a * low_b)
    above = math.sqrt(high_a**2 + high_b**2 + 2 * rho * high_a * high_b)
    return max(0.0, a + b - below), a + b + above


@pytest.mark.parametrize(("many", "width", "left_out"), [(3, 5, 0), (9, 4, 3), (60, 7, 2)])
@pytest.mark.parametrize("heavy", [False, True])
def test_intervals_are_those_of_their_sources(
    many: int, width: int, left_out: int, heavy: bool
) -> None:
    random = np.random.default_rng(many)
    x = random.standard_normal((many, width)) + random.standard_normal((many, 1))
    x = x**3 if heavy else x
    counted = x.size - left_out
    groups = [row[: max(0, counted - width * at)] for at, row in enumerate(x)]
    found = ClusterSums.of(x.copy(), 0.3, counted).interval()
    assert found == pytest.approx(plain_interval(groups), rel=1e-9)


@pytest.mark.parametrize("std", [1e-30, 1e-20, 1e20, 1e30])
def test_intervals_of_very_small_and_large_entries(std: float) -> None:
    """Their squares of squares are no ordinary numbers."""
    found, usual = (
        experiment(ExperimentSpec(dk=4, samples=400, distribution=Distribution(std=each)))[0]
        for each in (std, 1.0)
    )
    for end in ("var_ci95_low", "var_ci95_high"):
        assert getattr(found, end) == pytest.approx(getattr(usual, end) * std**4, rel=0.1)
