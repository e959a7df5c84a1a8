"""What the machine can take: refuse before allocating, with the figures."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

from attncli.errors import ResourceError
from attncli.files.text import size_text

# What the system says of a disk, or of a share of it, that is full.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def require_memory(where: str, need: int, advice: str = "") -> None:
    """Refuse to go on where `need` bytes would not fit in memory.

    Raises:
        ResourceError: less than `need` bytes are available.
    """
    free = available_memory()
    if free is not None and need > free:
        problem = f"expected a need of at most {size_text(free)} of memory, got {size_text(need)}"
        raise ResourceError(where, problem, advice)


def require_disk(where: str, folder: Path, need: int) -> None:
    """Refuse to write `need` bytes into a folder whose disk has less room.

    Raises:
        ResourceError: less than `need` bytes are free.
    """
    free = shutil.disk_usage(folder).free
    if need > free:
        problem = f"expected a need of at most {size_text(free)} on disk, got {size_text(need)}"
        raise ResourceError(where, problem)


def available_memory() -> int | None:
    """Return the bytes that can be allocated without swapping; None where that is unknown."""
    known = [free for free in (_machine_free(), _container_free()) if free is not None]
    return min(known) if known else None


def _machine_free() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _container_free() -> int | None:
    """A container's own limit (control groups, version 2), less what it uses and cannot drop."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        cache = dict(line.split() for line in lines)["inactive_file"]
        return max(0, limit - used + int(cache))
    return None
