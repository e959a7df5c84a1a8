"""What the machine has: the least of its own figures, the process's, and every control group's."""

from __future__ import annotations

import os
import resource
from collections import namedtuple
from pathlib import Path

import pytest

from attncli import limits
from attncli.attention.variance.experiment import default_threads
from attncli.errors import ResourceError

FREE = 8_000_000 * 1024


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 million kB of free memory and 8 processors, and no control groups yet."""
    put(tmp_path / "proc/meminfo", "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n")
    (tmp_path / "sys").mkdir()
    monkeypatch.setattr(limits, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(limits, "_CGROUP", tmp_path / "sys")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    return tmp_path


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def group_v2(folder: Path, most: str, used: int, cache: int = 0) -> None:
    put(folder / "memory.max", f"{most}\n")
    put(folder / "memory.current", f"{used}\n")
    put(folder / "memory.stat", f"anon 7\ninactive_file {cache}\n")


def group_v1(folder: Path, most: int, used: int, cache: int = 0) -> None:
    put(folder / "memory.limit_in_bytes", f"{most}\n")
    put(folder / "memory.usage_in_bytes", f"{used}\n")
    put(folder / "memory.stat", f"inactive_file 1\ntotal_inactive_file {cache}\n")


def test_without_limits_the_machine_counts(root: Path) -> None:
    assert limits.available_memory() == FREE
    assert limits.processors() == 8


def test_without_proc_all_memory_counts(root: Path) -> None:
    (root / "proc/meminfo").unlink()
    everything = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert limits.available_memory() == everything


def test_a_container_that_sees_its_own_group_as_the_root(root: Path) -> None:
    put(root / "proc/self/cgroup", "0::/\n")
    group_v2(root / "sys", "4000", 3000, 500)
    assert limits.available_memory() == 1500
    group_v2(root / "sys", "max", 3000, 500)
    assert limits.available_memory() == FREE


def test_the_tightest_of_nested_groups_counts(root: Path) -> None:
    put(root / "proc/self/cgroup", "0::/batch/job/step\n")
    group_v2(root / "sys/batch", "9000", 2000)
    group_v2(root / "sys/batch/job", "5000", 1000, 100)
    group_v2(root / "sys/batch/job/step", "max", 10)
    assert limits.available_memory() == 4100
    group_v2(root / "sys/batch", "9000", 8000)
    assert limits.available_memory() == 1000


def test_a_path_that_the_container_does_not_see(root: Path) -> None:
    put(root / "proc/self/cgroup", "0::/docker/0123abcd\n")
    group_v2(root / "sys", "7000", 1000)
    assert limits.available_memory() == 6000
    put(root / "proc/self/cgroup", "0::/../../elsewhere\n")
    assert limits.available_memory() == 6000


def test_groups_of_version_1(root: Path) -> None:
    put(root / "proc/self/cgroup", "11:cpu,cpuacct:/a\n8:memory:/a/b\n0::/\n")
    group_v1(root / "sys/memory/a/b", 2**63 - 4096, 100)
    assert limits.available_memory() == FREE
    group_v1(root / "sys/memory/a", 6000, 2000, 50)
    assert limits.available_memory() == 4050
    put(root / "sys/cpu/a/cpu.cfs_quota_us", "250000\n")
    put(root / "sys/cpu/a/cpu.cfs_period_us", "100000\n")
    assert limits.processors() == 3


def test_a_group_that_uses_more_than_it_may_leaves_nothing(root: Path) -> None:
    group_v2(root / "sys", "4000", 9000)
    assert limits.available_memory() == 0
    with pytest.raises(ResourceError, match="at most 0 bytes of memory, got 1 byte"):
        limits.require_memory("here", 1)


@pytest.mark.parametrize("quota", ["max 100000", "", "garbage", "1 2 3"])
def test_no_quota_of_time(root: Path, quota: str) -> None:
    put(root / "sys/cpu.max", quota)
    assert limits.processors() == 8


def test_a_quota_of_time_is_so_many_threads(root: Path) -> None:
    put(root / "proc/self/cgroup", "0::/a/b\n")
    put(root / "sys/a/cpu.max", "150000 100000\n")
    assert limits.processors() == 2
    assert default_threads() == 2
    put(root / "sys/a/b/cpu.max", "50000 100000\n")
    assert limits.processors() == 1


def test_the_address_space_of_the_process(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root / "proc/self/statm", "100 9 9 9 9 9 9\n")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1_000_000, resource.RLIM_INFINITY))
    assert limits.available_memory() == 1_000_000 - 100 * os.sysconf("SC_PAGE_SIZE")
    (root / "proc/self/statm").unlink()
    assert limits.available_memory() == 1_000_000
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert limits.available_memory() == FREE


def test_a_folder_to_be_made_is_on_the_disk_of_the_one_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    asked: list[Path] = []

    def disk_usage(path: Path) -> usage:
        asked.append(path)
        return usage(10, 3, 7)

    monkeypatch.setattr(limits.shutil, "disk_usage", disk_usage)
    limits.require_disk("out", tmp_path / "new/inner", 7)
    with pytest.raises(ResourceError, match="at most 7 bytes on disk, got 8 bytes") as caught:
        limits.require_disk("out", tmp_path / "new/inner", 8, "«rows» needs less")
    assert caught.value.advice == "«rows» needs less"
    assert asked == [tmp_path, tmp_path]
