"""Runs command lines in several ranks: loads torch once, then forks the ranks of each.

Reads requests from standard input, a line of JSON each, and answers likewise; `tests/test_ranks.py`
tells what is in them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed

import attncli.cli.check_run
import attncli.cli.compare_run
import attncli.cli.compute_run
import attncli.cli.entropy_run  # noqa: F401 - loaded once for all
from attncli.cli import app
from attncli.signals import end_cleanly


def start(request: dict[str, Any], rank: int, port: int, folder: Path, group: int) -> int:
    """Fork one rank of a process group, which runs the command line; its process id."""
    child = os.fork()
    os.setpgid(child, group)
    if child:
        return child
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(request["count"]),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(request["count"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **request["env"],
    }
    os.chdir(request["folders"][rank])
    for stream, name in ((0, os.devnull), (1, folder / f"out{rank}"), (2, folder / f"err{rank}")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), stream)
    sys.argv = ["attncli", *request["arguments"]]
    end_cleanly()
    exec(request["before"], {"rank": rank})
    try:
        app.main()
    except SystemExit as error:
        sys.stdout.flush()
        os._exit(error.code if isinstance(error.code, int) else 1)
    os._exit(99)


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run all ranks, and say how each ended; those that never would are ended."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as name:
        probe.bind(("127.0.0.1", 0))
        port, folder = probe.getsockname()[1], Path(name)
        probe.close()
        ranks: list[int] = []
        for rank in range(request["started"]):
            ranks.append(start(request, rank, port, folder, ranks[0] if ranks else 0))
        codes: dict[int, int] = {}
        until = time.monotonic() + 60
        while len(codes) < len(ranks):
            for child in set(ranks) - codes.keys():
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    codes[child] = os.waitstatus_to_exitcode(status)
            left = set(ranks) - codes.keys()
            frozen = request["frozen"] and len(left) == 1
            if frozen or time.monotonic() > until:
                for child in left:
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.01)
        read = lambda kind: [(folder / f"{kind}{r}").read_text() for r in range(len(ranks))]  # noqa: E731
        return {"codes": [codes[child] for child in ranks], "out": read("out"), "err": read("err")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
