"""Windows, whose blocks of rows are joined, against the whole matrices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from attncli.api import as_problem
from attncli.attention.problem import Problem
from attncli.attention.streaming.head_group import make_group
from attncli.attention.streaming.rows import RowStatistics
from attncli.attention.streaming.slant import joined_blocks
from attncli.attention.streaming.stream import HeadRows, Wanted, planned_cells, stream_rows

LENGTH = 2752  # five blocks of 512, and one of 192

WINDOWS: list[dict[str, Any]] = [
    {"causal": True, "left_window": 255},
    {"causal": True, "left_window": 31},
    {"left_window": 100, "right_window": 30},
    {"left_window": 3, "right_window": 400},
    {"causal": True, "left_window": 200, "query_offset": 333},
    {"causal": True, "left_window": 200, "query_offset": -700},
    {"causal": True, "left_window": 255, "key_lengths": [2752, 1999]},
    {"causal": True, "left_window": 100, "segments": np.repeat([0, 1], [1300, LENGTH - 1300])},
]
NAMES = ["256", "32", "both sides", "ahead", "later", "before", "padding", "documents"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So that as much is joined as can be: several threads get a few blocks each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def windowed(window: dict[str, Any], **options: Any) -> Problem:
    rng = torch.Generator().manual_seed(7)
    q, k = (2 * torch.randn(2, 1, LENGTH, 24, generator=rng) for _ in "qk")
    return as_problem(q, k, None, window | options, precision="float32")


def blocks_joined(problem: Problem, workers: int = 1) -> list[int]:
    """Of each slant of the first head how many rows it has."""
    queries = np.arange(problem.mask.real_queries(0))
    group = make_group(problem, problem.mask_on_device(), 0, range(1), queries, with_values=False)
    group = dataclasses.replace(group, workers=workers)
    return [block.stop - block.start for block in joined_blocks(group) if block.slant]


def bits(rows: HeadRows, inside: slice) -> dict[str, torch.Tensor]:
    """All that is known of some rows."""
    fields = {field.name: getattr(rows, field.name) for field in dataclasses.fields(RowStatistics)}
    for name in ("first", "own", "previous", "local"):
        fields[name] = getattr(rows.shares, name).weight
    return {name: value[inside] for name, value in fields.items() if value is not None}


@pytest.mark.parametrize("window", WINDOWS, ids=NAMES)
@pytest.mark.parametrize("distances", [False, True])
def test_a_window_is_what_the_matrix_says(window: dict[str, Any], distances: bool) -> None:
    problem = windowed(window)
    assert max(blocks_joined(problem)) >= 512
    mask, everything = problem.mask.moved(torch.as_tensor), slice(None)
    told: list[int] = []
    wanted = Wanted(distances=distances)
    for rows in stream_rows(problem, wanted, advance=told.append):
        at, real = slice(rows.batch, rows.batch + 1), len(rows.queries)
        seen = mask.visible(at, slice(1), everything, everything)[0, 0, :real]
        scores = problem.q[rows.batch, 0, :real].double() @ problem.k[rows.batch, 0].double().T
        logits = (scores * problem.scale).masked_fill(~seen, -torch.inf)
        some = seen.any(-1)
        assert torch.equal(rows.keys, seen.sum(-1))
        assert torch.equal(~rows.empty, some)
        weights = torch.softmax(logits[some], -1)
        entropy = torch.special.entr(weights).sum(-1)
        assert torch.allclose(rows.entropy_nats[some], entropy, rtol=1e-5, atol=1e-6)
        assert torch.allclose(rows.max_weight[some], weights.amax(-1), rtol=1e-5)
        assert rows.logsumexp is not None
        assert torch.allclose(
            rows.logsumexp[some], logits[some].logsumexp(-1), rtol=1e-6, atol=2e-6
        )
        positions = torch.as_tensor(problem.mask.positions(at, np.arange(real))[0])
        steps = (positions[:, None] - torch.arange(LENGTH)).abs()[some]
        near = torch.where(steps <= 4, weights, 0.0).sum(-1)
        assert torch.allclose(rows.shares.local.weight[some], near, atol=1e-5)  # type: ignore[union-attr]
        first = rows.shares.first.weight[some]
        assert torch.allclose(first, weights[:, 0], atol=1e-6)
        assert (rows.distance is None) is not distances
        if rows.distance is not None:
            assert torch.allclose(rows.distance[some], (weights * steps).sum(-1), rtol=1e-5)
    assert sum(told) == planned_cells(problem, wanted)


@pytest.mark.parametrize("window", WINDOWS, ids=NAMES)
def test_a_part_of_the_rows_is_what_it_is_among_all(window: dict[str, Any]) -> None:
    problem, part = windowed(window), slice(512, 1536)
    pairs = zip(stream_rows(problem), stream_rows(problem, part=part), strict=True)
    for whole, some in pairs:
        for (name, mine), own in zip(
            bits(whole, part).items(), bits(some, slice(None)).values(), strict=True
        ):
            same = (mine == own) | (mine.isnan() & own.isnan())
            assert bool(same.all()), name
            assert mine.dtype == own.dtype


def test_blocks_are_joined_to_as_many_rows_as_fill_a_tile() -> None:
    assert blocks_joined(windowed({"causal": True, "left_window": 255})) == [1536, 512, 192]
    assert blocks_joined(windowed({"causal": True, "left_window": 31})) == [2048, 192]


def test_every_thread_has_some_blocks() -> None:
    problem = windowed({"causal": True, "left_window": 31})
    assert blocks_joined(problem, workers=2) == [512, 512, 512, 512, 192]


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": True, "left_window": 800},
        {"causal": True, "left_window": 255, "softcap": 5.0},
        {"causal": True, "left_window": 255, "alibi": True},
    ],
    ids=["causal", "wide", "softcap", "alibi"],
)
def test_what_is_no_narrow_window_of_products_is_left_in_tiles(options: dict[str, Any]) -> None:
    assert blocks_joined(windowed(options)) == []


def test_documents_join_within_themselves_alone() -> None:
    ids = np.repeat([0, 1], [1300, LENGTH - 1300])
    problem = windowed({"causal": True, "left_window": 100, "segments": ids})
    assert blocks_joined(problem) == [512, 1024, 192]
