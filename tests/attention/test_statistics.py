"""Running statistics against NumPy, and where sums of squares would fail."""

from __future__ import annotations

import math
from dataclasses import asdict, astuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attncli.attention.statistics import RunningStatistics

NAN, INF = math.nan, math.inf


def taken(*parts: Any) -> RunningStatistics:
    found = RunningStatistics()
    for part in parts:
        found.add(np.asarray(part))
    return found


@given(
    parts=st.lists(
        st.lists(st.floats(-1e6, 1e6) | st.sampled_from([NAN, INF, -INF]), max_size=6), max_size=6
    )
)
@settings(max_examples=100, deadline=None)
def test_parts_make_the_whole(parts: list[list[float]]) -> None:
    found = taken(*(np.array(part, dtype=np.float64) for part in parts))
    numbers = np.array([number for part in parts for number in part], dtype=np.float64)
    finite = numbers[np.isfinite(numbers)]
    record = asdict(found.result)
    assert record["n_nan"] == np.isnan(numbers).sum()
    assert record["n_finite"] == np.isfinite(numbers).sum()
    assert record["n_posinf"] == (numbers == INF).sum()
    assert record["n_neginf"] == (numbers == -INF).sum()
    if not finite.size:
        assert [record[name] for name in ("min", "max", "mean", "std")] == [None] * 4
        return
    assert (record["min"], record["max"]) == (finite.min(), finite.max())
    assert record["mean"] == pytest.approx(finite.mean(), rel=1e-12, abs=1e-9)
    assert record["std"] == pytest.approx(finite.std(), rel=1e-9, abs=1e-8)


WORKED = [
    ([[3, 0, 1, 2]], 1.25),
    ([[3.0], [0.0], [1.0, 2.0]], 1.25),
    ([np.array([10_000, 10_001, 10_002], np.float32)], 0.666667),
    ([np.float32([10_000]), np.float32([10_001]), np.float32([10_002])], 0.666667),
    ([[1e9, 1e9 + 1], [1e9 + 2]], 0.666667),
    ([np.array([300, -300], np.float16)], 90_000.0),
    ([np.array([127, -128], np.int8)], 127.5**2),
    ([[5.0]], 0.0),
]


@pytest.mark.parametrize(("parts", "variance"), WORKED)
def test_variance_is_of_the_population(parts: list[Any], variance: float) -> None:
    found = taken(*parts)
    assert found.std is not None
    assert found.std**2 == pytest.approx(variance, rel=1e-6)


def test_parts_of_any_rank_and_order() -> None:
    numbers = np.arange(24.0).reshape(2, 3, 4)
    parts = taken(numbers[::-1, :, ::2], numbers.T[1::2]).result
    assert astuple(parts) == pytest.approx(astuple(taken(numbers.ravel()).result))


def test_an_empty_part_changes_nothing() -> None:
    assert taken([], [1.0, 3.0], []).result == taken([1.0, 3.0]).result


@pytest.mark.parametrize("parts", [[[1e308, 1.7e308]], [[1.7e308], [-1.7e308]], [[1e200, -1e200]]])
def test_moments_beyond_the_numbers_are_not_finite_and_warn_of_nothing(parts: list[Any]) -> None:
    found = taken(*parts)
    assert found.std is not None
    assert not math.isfinite(found.std)
    assert math.isfinite(found.maximum)


def test_what_is_not_finite_is_counted_over_all_parts() -> None:
    nan, inf = float("nan"), float("inf")
    parts = ([nan, 1.0], [inf, nan, -inf], [nan], [2.0], [inf, -inf, -inf])
    found = taken(*(np.array(part) for part in parts))
    assert (found.n_nan, found.n_posinf, found.n_neginf, found.count) == (3, 2, 3, 2)
    assert (found.minimum, found.maximum) == (1.0, 2.0)
