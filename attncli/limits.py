"""What the machine has for a run: memory, disk, processors; what needs more is refused at once.

Every refusal by size is made here, from an estimate and before work, with both figures and what of
the command needs less. The least of several limits counts: of the machine, of the process, and of
each control group around it (containers, batch systems), in versions 1 and 2 of these.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from rich.filesize import decimal

from attncli.errors import ResourceError

if sys.platform != "win32":
    import resource

# What the system says of a disk, or of a share of it, that is full, or that a file may be.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
# Limits of memory and what is in use, of version 2 and of 1, and what of it can be dropped.
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def require_memory(where: str, need: int, advice: str = "") -> None:
    """Refuse to go on where `need` bytes would not fit in memory.

    Args:
        where: the file or the options that ask for it.
        need: bytes, estimated.
        advice: what of the command needs less.

    Raises:
        ResourceError: less than `need` bytes are available.
    """
    free = available_memory()
    if free is not None and need > free:
        problem = f"expected a need of at most {decimal(free)} of memory, got {decimal(need)}"
        raise ResourceError(where, problem, advice)


def require_disk(where: str, folder: Path, need: int, advice: str = "") -> None:
    """Refuse to write `need` bytes into a folder whose disk has less room.

    A folder that is not there yet is one of its nearest ancestor's disk.

    Raises:
        ResourceError: less than `need` bytes are free.
    """
    while not os.path.isdir(folder) and folder != folder.parent:  # noqa: PTH112 - of any length
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if need > free:
        problem = f"expected a need of at most {decimal(free)} on disk, got {decimal(need)}"
        raise ResourceError(where, problem, advice)


def full_disk(error: OSError, folder: Path) -> str:
    """What was met in a folder where the system has said one of `DISK_FULL`."""
    if error.errno == errno.EFBIG:
        return "a limit to the size of files"
    with contextlib.suppress(OSError, AttributeError):  # Windows does not tell
        state = os.statvfs(folder)
        if state.f_files and not state.f_favail:
            return "a disk that takes no more files"
    return "a full disk"


def available_memory() -> int | None:
    """Return the bytes that can be allocated without swapping; None where that is unknown."""
    found = (_machine_free(), _process_free(), *_groups_free())
    return min((free for free in found if free is not None), default=None)


def processors() -> int:
    """How many threads can compute at once: processors that may be used, and a share of their time.

    Control groups give a quota of time for each period, which counts as so many processors.
    """
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:  # of Linux alone
        usable = os.cpu_count() or 1
    return min([usable, *_quotas()])


def descriptors() -> int:
    """How many files this process may hold open at once."""
    if sys.platform == "win32":
        return 8192
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if most == resource.RLIM_INFINITY else most


def _machine_free() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (_PROC / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _process_free() -> int | None:
    """What `ulimit -v` leaves of the address space; None where it sets no limit."""
    if sys.platform == "win32":
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    used = 0
    with contextlib.suppress(OSError, ValueError, IndexError):  # where there is no /proc
        used = int((_PROC / "self" / "statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return max(0, limit - used)


def _groups_free() -> Iterator[int]:
    """What each control group leaves: its limit, less what it uses and cannot drop."""
    for group in _groups("memory"):
        for limit, usage, cache in _MEMORY_FILES:
            with contextlib.suppress(OSError, ValueError, KeyError):  # "max", or no such group
                most = int((group / limit).read_text())
                used = int((group / usage).read_text())
                lines = (group / "memory.stat").read_text().splitlines()
                yield max(0, most - used + int(dict(line.split() for line in lines)[cache]))


def _quotas() -> Iterator[int]:
    """How many processors' time each control group has, rounded up."""
    for group in _groups("cpu"):
        with contextlib.suppress(OSError, ValueError):
            quota, period = map(int, (group / "cpu.max").read_text().split())
            yield max(1, math.ceil(quota / period))
        with contextlib.suppress(OSError, ValueError):
            quota = int((group / "cpu.cfs_quota_us").read_text())
            if quota > 0:
                yield max(1, math.ceil(quota / int((group / "cpu.cfs_period_us").read_text())))


def _groups(controller: str) -> Iterator[Path]:
    """The folder of this process's control group and of those around it, innermost first.

    Where a container sees no other groups, what lies at the root is its own.
    """
    lines = ["0::/", f"0:{controller}:/"]
    with contextlib.suppress(OSError):
        lines += (_PROC / "self" / "cgroup").read_text().splitlines()
    seen: set[Path] = set()
    for line in lines:
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names and controller not in names.split(","):
            continue
        inner = PurePosixPath(path.lstrip("/"))
        for each in (inner, *inner.parents):
            folder = (_CGROUP / controller if names else _CGROUP) / each
            if folder not in seen and ".." not in each.parts:
                seen.add(folder)
                yield folder
