"""What is kept of maps within a number of bytes, and how small a page of many heads is."""

from __future__ import annotations

import numpy as np
import pytest

from attncli.attention.maps import CORNER, Encoding, HeadMaps, MapShape, Plan, plan_maps
from attncli.attention.pooling import edges_of
from attncli.attention.streaming.pooling import Bins

ROOM = 2_400_000


def taken(plan: Plan, shapes: list[MapShape]) -> float:
    """Bytes of base64 that a plan takes, counted from what it says."""
    total = 0.0
    for shape in shapes:
        q, k = min(shape.q_len, plan.bins), min(shape.k_len, plan.bins)
        planes = 2 if plan.with_largest else 1
        heads = shape.heads if plan.detailed is None else 0
        total += 4 / 3 * heads * q * k * planes * plan.encoding.width
        total += 4 / 3 * 4 * heads * (q + k + CORNER**2)
    if plan.detailed is not None:
        assert plan.thumbnail_bins is not None
        total += 4 / 3 * plan.detailed * (4 * plan.bins**2 + 4 * (2 * plan.bins + CORNER**2))
        cells = sum(shape.heads for shape in shapes) * plan.thumbnail_bins**2
        total += 4 / 3 * 2 * cells
    return total


@pytest.mark.parametrize(
    ("heads", "length", "plan"),
    [
        (72, 16, Plan(16, Encoding.F4, False)),
        (72, 64, Plan(64, Encoding.F4, False)),
        (72, 100, Plan(100, Encoding.U2SQRT, False)),
        (1, 512, Plan(512, Encoding.F4, False)),
        (1, 513, Plan(128, Encoding.U2SQRT, True)),
        (72, 512, Plan(77, Encoding.U2SQRT, True)),
        (72, 4096, Plan(77, Encoding.U2SQRT, True)),
        (400, 300, Plan(44, Encoding.U2SQRT, False)),
    ],
)
def test_as_much_is_kept_as_there_is_room_for(heads: int, length: int, plan: Plan) -> None:
    shapes = [MapShape(heads, length, length)]
    found = plan_maps(shapes, ROOM)
    assert found == plan
    assert taken(found, shapes) <= ROOM


def test_of_many_heads_all_have_thumbnails_and_few_have_maps() -> None:
    shapes = [MapShape(32, 4096, 4096)] * 32
    found = plan_maps(shapes, ROOM)
    assert found is not None
    assert (found.thumbnail_bins, found.bins) == (24, 96)
    assert found.detailed is not None
    assert found.detailed >= 15
    assert taken(found, shapes) <= ROOM
    larger = plan_maps(shapes, 7_000_000)
    assert larger is not None
    assert larger.detailed is None
    assert plan_maps(shapes, 100_000) is None


def test_no_length_takes_more_than_another() -> None:
    for length in (200, 4096, 1 << 20):
        shapes = [MapShape(72, length, length), MapShape(8, 5, length)]
        found = plan_maps(shapes, ROOM)
        assert found is not None
        assert taken(found, shapes) <= ROOM
        bins = found.bins_of(5, length, sink_keys=1)
        assert len(bins.queries) == 6
        assert len(bins.keys) <= found.bins + 1


def test_sinks_stay_alone_however_many_there_are() -> None:
    bins = Plan(75, Encoding.U2SQRT, True).bins_of(500, 500, sink_keys=7)
    assert np.diff(bins.keys)[:7].tolist() == [1] * 7


def test_coarse_maps_keep_the_sum_of_rows() -> None:
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(200), (2, 200)).astype(np.float32)
    edges = edges_of(200, 96)
    pooled = np.add.reduceat(np.add.reduceat(weights, edges[:-1], 1), edges[:-1], 2)
    mean = (pooled / np.outer(np.diff(edges), np.diff(edges))).astype(np.float32)
    nothing = np.zeros((2, 96), np.float32)
    maps = HeadMaps(Bins(edges, edges), mean, mean, nothing, nothing, nothing, None)
    bins, coarse = maps.coarse(24)
    assert coarse.shape == (2, 24, 24)
    assert set(bins.keys) <= set(edges)
    np.testing.assert_allclose((coarse * np.diff(bins.keys)).sum(-1), 1, rtol=1e-5)
