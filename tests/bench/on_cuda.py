"""The tiles on a CUDA device: right, how fast, in how much memory. Run by `on_cuda.sh`.

Right: random problems over every option, as `tests/attention/test_stream.py` draws them, and some
of several tiles, against the same on the CPU. Fast: seconds against scaled dot-product attention on
the same device, which takes flash attention in bfloat16 and its kernel of little memory in float32.
Memory: the most that is held beside Q, K and V.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from statistics import median

import torch
from hypothesis import HealthCheck, Phase, given, settings

sys.path.insert(0, str(Path(__file__).parents[1] / "attention"))

from test_stream import EVERYTHING, problems

from attncli.attention.options import AttentionOptions, MaskTrue
from attncli.attention.problem import Precision, Problem, make_problem
from attncli.attention.streaming.rows import RowStatistics
from attncli.attention.streaming.stream import Wanted, stream_outputs, stream_rows

HEADS, LENGTH, WIDTH = 8, 32_768, 64
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@settings(
    max_examples=150,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(problems())
def same_as_on_the_cpu(drawn: tuple[Problem, AttentionOptions]) -> None:
    """Every column of every row of one problem."""
    assert_same(drawn[0])


def assert_same(problem: Problem) -> None:
    """A problem has the same rows and masses on both devices."""
    off = 1e-10 if problem.dtype == torch.float64 else 5e-5
    sides = [stream_rows(replace(problem, device=each), EVERYTHING) for each in (CPU, CUDA)]
    for here, there in zip(*sides, strict=True):
        for field in fields(RowStatistics):
            expected, found = getattr(here, field.name), getattr(there, field.name)
            if expected is not None and field.name != "top_key":
                torch.testing.assert_close(
                    found.cpu(), expected, rtol=off, atol=off, equal_nan=True, msg=field.name
                )
        assert here.received is not None
        assert there.received is not None
        torch.testing.assert_close(
            there.received.mass.cpu(), here.received.mass, rtol=off, atol=off
        )


def same_over_several_tiles() -> None:
    """Masks of intervals, and one that is none, at 3,000 queries and keys."""
    q, k, v = (torch.randn(1, 4, 3000, WIDTH) for _ in range(3))
    cells = torch.rand(3000, 3000).numpy() < 0.5
    for options in (
        AttentionOptions(),
        AttentionOptions(causal=True, alibi=True),
        AttentionOptions(causal=True, left_window=200, softcap=5.0),
        AttentionOptions(attn_mask=cells, mask_true=MaskTrue.KEEP),
    ):
        for precision in (Precision.FLOAT64, Precision.FLOAT32):
            assert_same(make_problem(q, k, v, options, precision=precision))


def seconds(work: Callable[[], object]) -> float:
    """The median of three runs after one that warms up."""
    found = []
    for _ in range(4):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return median(found[1:])


def measure(dtype: torch.dtype, causal: bool) -> None:
    """One line for each kind of work."""
    q, k, v = (torch.randn(1, HEADS, LENGTH, WIDTH, device=CUDA, dtype=dtype) for _ in range(3))
    options, attend = (
        AttentionOptions(causal=causal),
        torch.nn.functional.scaled_dot_product_attention,
    )
    problem = make_problem(q, k, v, options, precision=Precision.FLOAT32, device="cuda")
    fused = seconds(lambda: attend(q, k, v, is_causal=causal))
    works: dict[str, Callable[[], object]] = {
        "entropy": lambda: list(stream_rows(problem, Wanted())),
        "entropy, per key": lambda: list(stream_rows(problem, Wanted(per_key=True))),
        "output": lambda: list(stream_outputs(problem)),
    }
    for name, work in works.items():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        took = seconds(work)
        held = (torch.cuda.max_memory_allocated() - before) / 2**20
        kind = f"{str(dtype).removeprefix('torch.')}{', causal' if causal else ''}"
        print(
            f"{name:17} {kind:17} {took / fused:7.1f} × SDPA ({took:.3f} s against {fused:.4f} s), "
            f"+{held:.0f} MiB",
            flush=True,
        )


def main() -> None:
    """Write what was found, line by line."""
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    try:
        same_as_on_the_cpu()
        same_over_several_tiles()
        print("150 random problems, and 8 of 3,000 queries: as on the CPU", flush=True)
    except AssertionError as error:
        print(f"problems: NOT as on the CPU: {error}", flush=True)
    print(f"{HEADS} heads, {LENGTH} queries and keys, d {WIDTH}", flush=True)
    for dtype in (torch.bfloat16, torch.float32):
        for causal in (False, True):
            measure(dtype, causal)


if __name__ == "__main__":
    main()
