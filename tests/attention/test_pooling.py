"""Pooled weights are sums and maxima of the weights themselves, whatever is hidden."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import attncli
from attncli.attention.options import AttentionOptions
from attncli.attention.pooling import Pool, edges_of
from attncli.attention.problem import make_problem
from attncli.attention.streaming.pooling import Bins
from attncli.attention.streaming.stream import Wanted, stream_rows


def test_the_first_positions_have_bins_of_their_own_and_the_rest_is_even() -> None:
    assert edges_of(5, 8).tolist() == [0, 1, 2, 3, 4, 5]
    assert edges_of(24, 8).tolist() == [0, 1, 2, 3, 4, 9, 14, 19, 24]
    edges = edges_of(4096, 79)
    assert (edges[0], edges[-1], len(edges)) == (0, 4096, 80)
    assert np.diff(edges)[:4].tolist() == [1, 1, 1, 1]
    assert set(np.diff(edges)[4:].tolist()) == {54, 55}
    assert edges_of(0, 8).tolist() == [0]


@pytest.mark.parametrize(
    ("q_len", "k_len", "bins", "options"),
    [
        (9, 9, 9, {}),
        (30, 30, 12, {"causal": True}),
        (30, 44, 12, {"causal": True, "query_offset": 14, "left_window": 9}),
        (30, 30, 7, {"key_lengths": (17,), "softcap": 2.0}),
        (620, 1100, 20, {}),  # several blocks of rows, and tiles of keys
        (620, 620, 50, {"causal": True, "left_window": 100}),
    ],
)
def test_pooled_weights_are_those_of_the_cells(
    q_len: int, k_len: int, bins: int, options: dict[str, Any]
) -> None:
    q, k = torch.randn(1, 2, q_len, 4), torch.randn(1, 2, k_len, 4)
    edges = Bins(edges_of(q_len, bins), edges_of(k_len, bins))
    problem = make_problem(q, k, None, AttentionOptions(**options))
    whole = attncli.compute(q, k, stages="weights", **options).stages["weights"][0].numpy()
    for rows in stream_rows(problem, Wanted(per_key=True, bins=edges)):
        assert rows.pooled is not None
        for found, how in ((rows.pooled.sums, np.add), (rows.pooled.largest, np.maximum)):
            of_rows = how.reduceat(whole[rows.head], edges.queries[:-1], 0)
            expected = how.reduceat(of_rows, edges.keys[:-1], 1)
            np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-15)


def test_a_row_that_is_no_number_leaves_the_others_alone() -> None:
    q, k = torch.randn(1, 1, 12, 4), torch.randn(1, 1, 12, 4)
    q[0, 0, 5] = torch.nan
    problem = make_problem(q, k, None, AttentionOptions(), allow_nonfinite=True)
    edges = Bins(edges_of(12, 12), edges_of(12, 6))
    (rows,) = stream_rows(problem, Wanted(per_key=True, bins=edges))
    assert rows.pooled is not None
    lost = rows.pooled.sums.isnan()
    assert lost[5].all()
    assert int(lost.sum()) == lost.shape[1]


def test_a_pool_holds_the_means_and_peaks_of_rectangles_of_what_counts() -> None:
    rng = np.random.default_rng(0)
    values, counted = rng.standard_normal((30, 50)), rng.random((30, 50)) < 0.7
    values[3, 4], values[5, 6] = np.nan, np.inf
    counted[20:, 40:] = False
    pool = Pool.of(30, 50, 10)
    for rows in np.array_split(rng.permutation(30), 7):  # blocks in any order
        pool.add(rows, values[rows], counted[rows])
    assert pool.pooled
    assert pool.shape == (30, 50)
    assert pool.sums.shape == (10, 10)
    for row, column in np.ndindex(10, 10):
        inside = tuple(
            slice(*edges[place : place + 2])
            for edges, place in ((pool.row_edges, row), (pool.column_edges, column))
        )
        cells = values[inside][counted[inside] & np.isfinite(values[inside])]
        if len(cells):
            np.testing.assert_allclose(pool.means[row, column], cells.mean(), rtol=1e-12)
            assert pool.peaks[row, column] == cells.max()
        else:
            assert np.isnan(pool.means[row, column])
    twice = Pool.joined([pool, pool])
    np.testing.assert_array_equal(twice.means, pool.means)
    higher = Pool.of(30, 50, 10)
    higher.add(np.arange(30), np.full((30, 50), 9.0))
    np.testing.assert_array_equal(Pool.joined([pool, higher]).peaks, higher.peaks)


def test_a_pool_of_few_cells_is_the_matrix_itself() -> None:
    values = np.arange(12.0).reshape(3, 4)
    pool = Pool.of(3, 4, 8)
    pool.add([0, 1, 2], values)
    assert not pool.pooled
    np.testing.assert_array_equal(pool.means, values)
