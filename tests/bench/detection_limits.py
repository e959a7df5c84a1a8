"""The smallest fault of an output that `attncli check` calls off, by dtype: see docs/check.md.

Not collected by pytest: run `python tests/bench/detection_limits.py [--length 4096]`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch

from attncli.attention.check.candidate import read_candidate
from attncli.attention.check.compare import compare
from attncli.attention.options import AttentionOptions, Target
from attncli.attention.problem import Problem, make_problem

WIDTH = 64
WINDOW = 255
SIZES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def attention(problem: Problem, seen: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """The output in float64, (1, H, S, d), of scores times a scale, one or (H, S, 1)."""
    q, k, v = (tensor.double() for tensor in (problem.q, problem.k, problem.v))
    logits = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
    return torch.softmax(logits, -1) @ v


def is_off(problem: Problem, options: AttentionOptions, output: torch.Tensor) -> bool:
    """Whether an output, rounded to the dtype of the inputs, is off."""
    actual = output.to(problem.q.dtype)
    found = compare(problem, options, [read_candidate(Target.OUTPUT, actual, problem)])
    return not found[0].passed


def drawn(heads: int, length: int, dtype: torch.dtype, options: AttentionOptions) -> Problem:
    """Q, K and V of standard normal entries, rounded to a dtype."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, WIDTH).to(dtype) for _ in range(3))
    return make_problem(q, k, v, options)


def smallest(off: Callable[[float], bool], sizes: Sequence[float] = SIZES) -> str:
    """The smallest relative error that is off, such that all larger ones are as well."""
    limit = None
    for size in reversed(sizes):
        if not off(size):
            break
        limit = size
    return "–" if limit is None else f"{limit:g}"


def limits(dtype: torch.dtype, length: int) -> dict[str, str]:
    """What is found in one dtype, by name of the fault."""
    causal, full, windowed = (
        AttentionOptions(causal=True),
        AttentionOptions(),
        AttentionOptions(causal=True, left_window=WINDOW),
    )
    place = torch.arange(length)
    ahead = place[:, None] - place  # (S, S): how far a key lies before its query
    one, many = drawn(1, length, dtype, causal), drawn(32, length // 8, dtype, causal)
    seen, short = ahead >= 0, (ahead >= 0)[: length // 8, : length // 8]
    right = attention(one, seen, one.scale)

    def with_scale(problem: Problem, seen: torch.Tensor, where: torch.Tensor) -> str:
        """`where`: 1 for the heads and queries whose scale is off, (H, S, 1)."""
        return smallest(
            lambda size: is_off(
                problem, causal, attention(problem, seen, problem.scale * (1 + size * where))
            )
        )

    def found(options: AttentionOptions, seen: torch.Tensor) -> str:
        problem = drawn(1, length, dtype, options)
        return "off" if is_off(problem, options, attention(problem, seen, problem.scale)) else "–"

    row, head = torch.zeros(1, length, 1), torch.zeros(32, 1, 1)
    row[0, length // 2], head[7] = 1, 1
    all_keys = torch.ones(length, length, dtype=torch.bool)
    return {
        "output × (1 + x)": smallest(lambda size: is_off(one, causal, right * (1 + size))),
        "scale × (1 + x)": with_scale(one, seen, torch.ones(1, 1, 1)),
        f"the same in one row of {length}": with_scale(one, seen, row),
        f"the same in one head of 32, {length // 8} keys": with_scale(many, short, head),
        "a window of one key less": found(windowed, seen & (ahead < WINDOW)),
        "a window of one key more": found(windowed, seen & (ahead <= WINDOW + 1)),
        "the last key seen by no query": found(full, all_keys & (place < length - 1)),
        "one future key for the last quarter": found(
            causal, seen | ((ahead == -1) & (place[:, None] >= length * 3 // 4))
        ),
        "three padded keys not hidden": found(
            AttentionOptions(key_lengths=(length - 3,)), all_keys
        ),
        "all zeros": "off" if is_off(one, causal, 0 * right) else "–",
        "twice the output": "off" if is_off(one, causal, 2 * right) else "–",
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=4096)
    given = parser.parse_args()
    columns = [limits(dtype, given.length) for dtype in DTYPES]
    print("| fault | " + " | ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES) + " |")
    print("|---|---|---|---|")
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(column[name] for column in columns) + " |")


if __name__ == "__main__":
    main()
