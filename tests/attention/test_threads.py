"""Work shared out over threads: in order, each with scratch of its own, the same bits always."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import pytest
import torch

from attncli.attention import threads
from attncli.attention.threads import (
    map_ranges,
    parallel_map,
    product,
    single_threaded_torch,
    sum_along,
    sum_of,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _as_many_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "_processors", lambda: 8)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_come_in_order_and_no_scratch_is_shared(workers: int) -> None:
    made: list[set[int]] = []
    own_threads: list[int] = []
    used: set[int] = set()
    lock = threading.Lock()

    def scratch() -> set[int]:
        made.append(set())
        return made[-1]

    def work(piece: int, mine: set[int]) -> int:
        with lock:
            assert id(mine) not in used
            used.add(id(mine))
        own_threads.append(torch.get_num_threads())
        mine.add(piece)
        with lock:
            used.remove(id(mine))
        return piece * piece

    pieces = list(range(40))
    assert list(parallel_map(work, pieces, scratch, workers)) == [n * n for n in pieces]
    assert len(made) == workers
    assert sorted(n for each in made for n in each) == pieces
    assert workers == 1 or set(own_threads) == {1}
    assert list(parallel_map(work, [], scratch, workers)) == []
    assert list(parallel_map(work, [7], scratch, workers)) == [49]


def test_torch_works_alone_meanwhile_and_gets_its_threads_back() -> None:
    torch.set_num_threads(3)
    with single_threaded_torch(CPU) as workers:
        assert (workers, torch.get_num_threads()) == (3, 1)
        with single_threaded_torch(CPU) as inner:
            assert inner == 1
    assert torch.get_num_threads() == 3
    with pytest.raises(ValueError, match="stop"), single_threaded_torch(CPU):
        raise ValueError("stop")
    assert torch.get_num_threads() == 3
    assert map_ranges(lambda at, end: (at, end), [(0, 2), (2, 5)]) == [(0, 2), (2, 5)]


@pytest.mark.parametrize("rows", [0, 1, 256, 257, 600])
def test_products_have_the_same_bits_with_any_number_of_threads(rows: int) -> None:
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randn(2, *size, generator=random) for size in ((rows, 33), (33, 17)))
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(product(left, right))
    torch.testing.assert_close(found[0], left @ right)
    assert found[0].shape == (2, rows, 17)
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("length", [0, 5, 1 << 14, (1 << 14) + 1, 50_000])
def test_sums_have_the_same_bits_with_any_number_of_threads(length: int) -> None:
    values = torch.randn(3, length, generator=torch.Generator().manual_seed(1))
    exact = [math.fsum(row) for row in values.double().tolist()]
    for dtype in (None, torch.float64):
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(sum_along(values, dtype))
        assert found[0].dtype == (dtype or torch.float32)
        tolerance = 1e-9 if dtype else 2e-2
        assert found[0].tolist() == pytest.approx(exact, rel=0, abs=tolerance)
        assert all(torch.equal(one, found[0]) for one in found)
    assert sum_of(values.double()) == pytest.approx(math.fsum(exact), rel=0, abs=1e-9)
