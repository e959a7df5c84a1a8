"""How often `attncli check` passes what is right and calls a mistake by its name.

Not collected by pytest: run `python tests/bench/bench_check.py [--kernels 1000] [--draws 40]
[--only scale:none …] [--target output]`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "attention"))

from mistaken import MADE, NOT_LOGSUMEXP, ONLY_OUTPUT, attend, draw_problem, offset_fits
from test_compare import DTYPES, compared, kernel_draw
from test_hypotheses import checked, coincides

from attncli.attention.options import Target


def passes(count: int) -> None:
    """Print how many outputs of torch's kernels pass, and how much of the tolerance they use."""
    for dtype in DTYPES:
        failed, used = 0, 0.0
        for seed in range(count):
            found = compared(*kernel_draw(seed, dtype))
            failed += not found.passed
            assert found.expected is not None
            allowed = found.atol + found.rtol * abs(found.expected)
            used = max(used, found.max_abs_error / allowed)
        name = str(dtype).removeprefix("torch.")
        print(f"{name:10s} {count - failed} of {count} pass; at most {used:.0%} of the tolerance")


def names(name: str, target: Target, draws: int) -> Counter[str]:
    """How one mistake is called over many draws."""
    found: Counter[str] = Counter()
    for seed in range(draws):
        draw = offset_fits(name, draw_problem(name, 10_000 + seed))
        for made in MADE[name](draw):
            found[_verdict(name, target, draw, made[target])] += 1
    return found


def _verdict(name: str, target: Target, draw: object, values: torch.Tensor) -> str:
    result = checked(draw, target, values)  # type: ignore[arg-type]
    if result.passed:
        right = attend(draw)[target]  # type: ignore[arg-type]
        return "no change" if torch.allclose(values, right, 1e-3, 1e-4) else "MISSED"
    matching = [one.name for one in result.hypotheses if one.matches]
    if not matching:
        return "none"
    others = [one for one in matching if one != name]
    if all(one in MADE and coincides(one, draw, target, values) for one in others):  # type: ignore[arg-type]
        return "alone" if not others else "with one that coincides" if name in matching else "WRONG"
    return "WRONG"


def main() -> None:
    """Print one line per dtype, and one per mistake."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", type=int, default=1000)
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--only", choices=MADE, nargs="+", default=list(MADE))
    parser.add_argument("--target", choices=list(Target), default="output")
    given = parser.parse_args()
    torch.set_num_threads(1)
    passes(given.kernels)
    target = Target(given.target)
    left_out = {Target.WEIGHTS: ONLY_OUTPUT, Target.LOGSUMEXP: NOT_LOGSUMEXP}.get(target, ())
    for name in given.only:
        if name not in left_out:
            print(f"{name:22s}", dict(names(name, target, given.draws)), flush=True)


if __name__ == "__main__":
    main()
