"""A few of the runs of `signals.py`; and that what it looks for would be found."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from signals import HEAVY, LIGHT, OLD, Bench, Whole, disturb


def test_a_signal_at_any_moment(tmp_path: Path) -> None:
    counts, faults = disturb(tmp_path, [LIGHT[2], HEAVY[0]], runs=6, seed=5, jobs=2)
    assert faults == []
    assert counts.total() == 6


@pytest.mark.parametrize(
    ("code", "said", "left", "found"),
    [
        (143, "attncli: terminated\n", {}, []),
        (0, "", {"t.json": b"new"}, []),
        (0, "", {}, ["exit code 0 without all of its files"]),
        (-15, "", {}, ["exit code -15 after SIGTERM"]),
        (1, "Traceback\nattncli/x.py", {}, ["exit code 1", "said"]),
        (143, "", {"t.json": b"ne"}, ["left {'t.json': 2}"]),
        (143, "", {"t.json": b"new", ".attncli-0": b""}, ["left {'.attncli-0': 0}"]),
        (143, "", {"t.json": OLD}, ["left {'t.json': 'old'}"]),
        (143, "", {"empty/": b""}, ["left {'empty/': 0}"]),
    ],
)
def test_what_is_wrong_is_noticed(
    tmp_path: Path, code: int, said: str, left: dict[str, bytes], found: list[str]
) -> None:
    bench, case = Bench(tmp_path, []), LIGHT[6]
    bench.whole[case] = Whole(1.0, {"t.json": b"new"})
    (tmp_path / "tmp").mkdir()
    for name, data in left.items():
        path = tmp_path / "work" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if name.endswith("/") else path.write_bytes(data)
    ended = bench.judged(case, tmp_path, {}, code, said, signal.SIGTERM, is_ready=True)
    assert len(ended.faults) == len(found)
    assert all(fault.startswith(begin) for fault, begin in zip(ended.faults, found, strict=True))
