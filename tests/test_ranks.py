"""One command in several ranks prints what it prints in one process, and ends as one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from attncli import ranks, team
from attncli.attention import stages
from attncli.attention.check import variant

Run = Callable[..., Any]
SAMPLES = Path(__file__).parent.parent / "sample_inputs"
SERVER = Path(__file__).with_name("ranks_server.py")
# What one rank does in the place of its first exchange.
AT_THE_EXCHANGE = """
import os, signal, time
from attncli import errors, team
def instead(self, mine):
    {act}
if rank == {rank}:
    team.Team.gather = instead
"""


class InRanks(Protocol):
    """Runs `attncli ARGS` in several ranks: codes, standard output and error of each."""

    def __call__(
        self,
        *args: object,
        count: int = 2,
        started: int | None = None,
        frozen: bool = False,
        before: str = "",
        folders: list[Path] | None = None,
        **env: str,
    ) -> dict[str, Any]: ...


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """One process that has loaded torch, and forks the ranks of every test."""
    with subprocess.Popen(
        [sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def in_ranks(server: subprocess.Popen[str]) -> InRanks:
    def run_ranks(
        *args: object,
        count: int = 2,
        started: int | None = None,
        frozen: bool = False,
        before: str = "",
        folders: list[Path] | None = None,
        **env: str,
    ) -> dict[str, Any]:
        assert server.stdin is not None
        assert server.stdout is not None
        request = {
            "arguments": [str(arg) for arg in args],
            "count": count,
            "started": started or count,
            "frozen": frozen,
            "before": before,
            "folders": [str(folder) for folder in folders or [Path.cwd()] * count],
            "env": env,
        }
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        found: dict[str, Any] = json.loads(server.stdout.readline())
        return found

    return run_ranks


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Three heads of more rows than a block has."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    shapes = {"q": (1, 3, 1300, 16), "k": (1, 3, 1300, 16), "v": (1, 3, 1300, 16)}
    tensors = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    np.savez("b.npz", **{name: one.astype(np.float32) for name, one in tensors.items()})
    return "b.npz"


def assert_same(found: dict[str, Any], alone: Any) -> None:
    """What rank 0 prints is what one process prints, and the others print nothing."""
    assert found["codes"] == [alone.code] * len(found["codes"]), found["err"]
    assert found["out"] == [alone.stdout, *[""] * (len(found["codes"]) - 1)]
    assert found["err"] == [alone.stderr, *[""] * (len(found["codes"]) - 1)]


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("--causal -f json", 2),
        ("--per-row --precision float32 --head-index 0,2 -f csv", 3),
        ("--causal --left-window 300 --per-key --precision float32 -f csv", 3),
        ("--sample-rows 700 --precision float32 -f ndjson", 2),
        ("--compare-scale --precision float32", 2),
    ],
)
def test_entropy_is_that_of_one_process(
    bundle: str, in_ranks: InRanks, run: Run, words: str, count: int
) -> None:
    arguments = ["entropy", bundle, *words.split()]
    assert_same(in_ranks(*arguments, count=count), run(*arguments))


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("variance b.npz b.npz --causal -f json", 3),
        ("compare b.npz --causal --what-if left-window=300 --what-if k-dtype=int8 -f json", 2),
        (
            "compare b.npz --what-if softcap=5 --per-row --precision float32 --head-index 1 -f csv",
            3,
        ),
    ],
)
def test_the_other_commands_likewise(
    bundle: str, in_ranks: InRanks, run: Run, words: str, count: int
) -> None:
    assert_same(in_ranks(*words.split(), count=count), run(*words.split()))


SMALL_BLOCKS = """
from attncli.attention import stages
from attncli.attention.check import variant
stages.BLOCK_CELLS = variant.BLOCK_CELLS = 200
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("check s.npz --actual-output right.npz -f json", 0),
        ("check s.npz --scale 1 --actual-output right.npz", 3),
        ("check s.npz --actual-output right.npz --pair wrong.npz", 3),
        ("compute s.npz --causal --save all.safetensors -f json", 0),
        ("compute s.npz --save all.npz --explain --format json", 0),
    ],
)
def test_blocks_of_check_and_compute(
    in_ranks: InRanks,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    code: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    for module in (stages, variant):
        monkeypatch.setattr(module, "BLOCK_CELLS", 200)
    rng = np.random.default_rng(0)
    np.savez("s.npz", **{name: rng.standard_normal((2, 2, 20, 16)) for name in "qkv"})
    for name, scale in ("right", "0.25"), ("wrong", "1"):
        run("compute", "s.npz", "--stage", "output", "--save", f"{name}.npz", "--scale", scale)
    alone = run(*words.split(), code=code)
    by_one = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert_same(in_ranks(*words.split(), count=2, before=SMALL_BLOCKS), alone)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == by_one


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("--causal --per-row", 2),
        ("--causal --left-window 300 --per-key --sink-keys 2", 3),
        ("--causal --softcap 5 --alibi --sinks 0.5,1,2", 2),
        ("--key-lengths 700 --query-lengths 1200 --per-row --precision float32", 3),
        ("--sample-rows 600 --precision float32", 3),
    ],
)
def test_keys_of_several_ranks(
    bundle: str, in_ranks: InRanks, run: Run, words: str, count: int
) -> None:
    """Numbers within 1e-12 of those of one process, or what float32 rounds by; the rest alike."""
    float32 = "float32" in words
    arguments = ["entropy", bundle, "--head-index", "0,2", *words.split(), "-f", "json"]
    arguments += [] if float32 else ["--precision", "float64"]
    found = in_ranks(*arguments, "--shard", "keys", count=count)
    assert found["codes"] == [0] * count, found["err"]
    alone = run(*arguments).json["data"]
    shared = json.loads(found["out"][0])
    assert shared["params"]["shard"] == "keys"
    assert len(shared["data"]) == len(alone)
    for record, expected in zip(shared["data"], alone, strict=True):
        assert record.keys() == expected.keys()
        for key, value in expected.items():
            if isinstance(value, float) and not float32:
                assert record[key] == pytest.approx(value, rel=1e-12, abs=1e-12), key
            elif isinstance(value, float):
                assert record[key] == pytest.approx(value, rel=2e-5, abs=2e-6), key
            else:
                assert record[key] == value, key


def test_keys_need_ranks_and_no_tokens(bundle: str, in_ranks: InRanks, run: Run) -> None:
    said = "--shard keys: expected several ranks, as torchrun starts them, got one process"
    assert said in run("entropy", bundle, "--shard", "keys", code=2).stderr
    found = in_ranks("entropy", SAMPLES / "minilm.safetensors", "--shard", "keys")
    assert found["codes"] == [2, 2]
    assert "--shard keys: expected keys without tokens" in found["err"][0]


def test_groups_with_tokens(in_ranks: InRanks, run: Run) -> None:
    arguments = ["entropy", SAMPLES / "minilm.safetensors", "-f", "json"]
    assert_same(in_ranks(*arguments), run(*arguments))


def test_files_are_written_by_rank_0(bundle: str, in_ranks: InRanks, run: Run) -> None:
    arguments = ["entropy", bundle, "-o", "all.json", "--plot", "all.svg", "--fail-on"]
    run(*arguments, "max-logit=0.1", code=3)
    by_one = {path.name: path.read_bytes() for path in Path().iterdir()}
    for name in ("all.json", "all.svg"):
        Path(name).unlink()
    found = in_ranks(*arguments, "max-logit=0.1", count=3)
    assert found["codes"] == [3, 3, 3]
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == by_one


@pytest.mark.parametrize("words", ["mask --k-len 4 --causal", "--version", "variance --dk 4"])
def test_what_is_not_shared_is_done_once(in_ranks: InRanks, run: Run, words: str) -> None:
    assert_same(in_ranks(*words.split()), run(*words.split()))


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("entropy nothing.npz", 1, "nothing.npz: expected a file, got no file of this name"),
        ("entropy b.npz --nonsense", 2, "--nonsense: No such option: --nonsense"),
        ("entropy -", 2, "-: expected a file that every rank can read, got standard input"),
    ],
)
def test_a_failure_of_all_is_told_once(
    bundle: str, in_ranks: InRanks, words: str, code: int, said: str
) -> None:
    found = in_ranks(*words.split())
    assert found["codes"] == [code, code]
    assert found["err"][0].splitlines()[0] == f"attncli: error: {said}"
    assert found["err"][1] == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_of_one_names_it(
    bundle: str, in_ranks: InRanks, tmp_path: Path, rank: int
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folders = [elsewhere if at == rank else tmp_path for at in range(2)]
    found = in_ranks("entropy", bundle, folders=folders)
    problem = "expected a file, got no file of this name"
    assert found["codes"] == [1, 1]
    assert found["err"] == [f"attncli: error: rank {rank}: b.npz: {problem}\n", ""]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_all(
    bundle: str, in_ranks: InRanks, rank: int, number: signal.Signals
) -> None:
    """Killed, or frozen: one line, told by a rank that is still there, and no file."""
    act = AT_THE_EXCHANGE.format(rank=rank, act=f"os.kill(os.getpid(), {int(number)})")
    found = in_ranks(
        "entropy",
        bundle,
        "-o",
        "out.json",
        count=3,
        before=act,
        frozen=number is signal.SIGSTOP,
        ATTNCLI_TIMEOUT="5",
    )
    said = f"attncli: error: rank {rank}: expected it to go on, got no sign of life\n"
    assert found["codes"] == [-9 if at == rank else 1 for at in range(3)]
    assert found["err"] == [said if at == 1 - rank else "" for at in range(3)]
    assert not list(Path().glob("out*"))


def test_ctrl_c_while_waiting(bundle: str, in_ranks: InRanks) -> None:
    """Rank 1 sends it to all, as a terminal does, when rank 0 waits for it."""
    act = "time.sleep(0.3); os.killpg(0, signal.SIGINT); time.sleep(60)"
    before = AT_THE_EXCHANGE.format(rank=1, act=act)
    found = in_ranks("entropy", bundle, "-o", "out.json", before=before)
    assert (found["codes"], found["err"]) == ([130, 130], ["attncli: interrupted\n", ""])
    assert not list(Path().glob("out*"))


def test_ranks_that_do_not_come(bundle: str, in_ranks: InRanks) -> None:
    found = in_ranks("entropy", bundle, started=1, ATTNCLI_TIMEOUT="1")
    assert found["codes"] == [1]
    assert "expected 2 ranks to meet there within 1 s, got" in found["err"][0]
    assert found["err"][0].count("\n") == 1


def test_a_limit_that_is_none(bundle: str, in_ranks: InRanks) -> None:
    found = in_ranks("entropy", bundle, ATTNCLI_TIMEOUT="soon")
    said = "attncli: error: ATTNCLI_TIMEOUT: expected seconds, more than 0, got 'soon'\n"
    assert (found["codes"], found["err"]) == ([2, 2], [said, ""])


# How work is cut.


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "costs",
    [[[1.0]], [[1.0], [1.0], [1.0]], [[1.0, 2.0, 3.0, 4.0]], [[5.0, 1.0], [1.0], [2.0] * 9]],
)
def test_shares_are_all_the_work_in_order(costs: list[list[float]], count: int) -> None:
    found = ranks.shares(costs, count)
    assert len(found) == count
    done = [(item, at) for share in found for item, part in share for at in range(99)[part]]
    assert done == [(item, at) for item, parts in enumerate(costs) for at in range(len(parts))]
    whole, largest = sum(map(sum, costs)), max(map(max, costs))
    for share in found:
        cost = sum(sum(costs[item][part]) for item, part in share)
        assert cost <= whole / count + largest


def test_equal_items_are_not_cut() -> None:
    shares = ranks.shares([[1.0, 2.0, 3.0]] * 4, 2)
    assert shares == [[(0, slice(0, 3)), (1, slice(0, 3))], [(2, slice(0, 3)), (3, slice(0, 3))]]


def test_causal_rows_are_cut_where_half_the_cells_are() -> None:
    costs = [float(row) for row in range(1, 1001)]
    edges = [part.start for share in ranks.shares([costs], 2) for _, part in share]
    assert edges == [0, 707]
    assert all(low < high for low, high in pairwise(edges))


def test_one_process_does_all_itself() -> None:
    done = list(ranks.in_order([3, 4], lambda _: [1.0], lambda item, part: (item, part), max))
    assert done == [(3, slice(None)), (4, slice(None))]
    assert (ranks.count(), ranks.everywhere(5), ranks.reduce(6, "SUM")) == (1, [5], 6)
    assert ranks.leave(0) is None


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_all_of_the_environment_has_to_be_there(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert ranks.place() == team.Place(1, 2, 0, 1)
    monkeypatch.delenv(missing)
    assert ranks.place() == team.Place()
    assert ranks.is_first()
