"""Errors of the reference and of the tiles, in both precisions, against 50 digits (mpmath).

Not collected by pytest: run `python tests/bench/accuracy.py [--keys 256] [--seeds 4]`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import mpmath
import numpy as np
import torch

from attncli.attention.options import AttentionOptions, Precision, Stage
from attncli.attention.problem import Problem, make_problem
from attncli.attention.stages import select, stage_blocks
from attncli.attention.steps import entropy_of_weights
from attncli.attention.streaming.stream import Wanted, stream_rows

SPREADS = (1.0, 4.0, 16.0)  # of the entries of Q: standard deviations of the logits
QUERIES, WIDTH = 8, 16


def exact_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[dict[str, list]]:
    """Weights, output, log-sum-exp, entropy and variance of each row, in 50 digits."""
    scale = mpmath.mpf(1 / WIDTH**0.5)
    keys, values = ([[mpmath.mpf(x) for x in row] for row in t.tolist()] for t in (k, v))
    for query in q.tolist():
        scores = [mpmath.fdot(query, key) for key in keys]
        logits = [score * scale for score in scores]
        top = max(logits)
        exps = [mpmath.exp(logit - top) for logit in logits]
        total = mpmath.fsum(exps)
        weights = [one / total for one in exps]
        yield {
            "scores": scores,
            "weights": weights,
            "output": [mpmath.fdot(weights, column) for column in zip(*values, strict=True)],
            "logsumexp": [top + mpmath.log(total)],
            "entropy": [-mpmath.fsum(w * mpmath.log(w) for w in weights)],
        }


def found_by_stages(problem: Problem) -> dict[str, torch.Tensor]:
    """The same by whole rows, as `compute` has them."""
    stages = [Stage.SCORES, Stage.WEIGHTS, Stage.OUTPUT]
    blocks = stage_blocks(problem, stages, select(problem))
    found = {str(block.stage): block.values for block in blocks}
    return found | {"entropy": entropy_of_weights(found["weights"])[:, None]}


def found_by_tiles(problem: Problem) -> dict[str, torch.Tensor]:
    """The same in tiles, as `entropy` has them."""
    (rows,) = stream_rows(problem, Wanted(output=True))
    assert rows.output is not None
    assert rows.logsumexp is not None
    return {
        "output": rows.output,
        "logsumexp": rows.logsumexp[:, None],
        "entropy": rows.entropy_nats[:, None],
    }


def error(found: torch.Tensor, exact: list[list], relative: bool) -> float:
    """The largest error, absolute or relative."""
    off = 0.0
    for row, expected in zip(found.tolist(), exact, strict=True):
        for one, right in zip(row, expected, strict=True):
            difference = abs(mpmath.mpf(one) - right)
            if relative:
                difference = difference / abs(right) if abs(right) > 1e-30 else mpmath.mpf(0)
            off = max(off, float(difference))
    return off


def main() -> None:
    """Print the largest error of each figure for each way and spread."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=4)
    given = parser.parse_args()
    mpmath.mp.dps = 50
    figures = {"weights": False, "output": False, "logsumexp": True, "entropy": False}
    print("largest error    logits' std" + "".join(f"{name:>12}" for name in figures))
    for spread in SPREADS:
        worst: dict[tuple[str, str], dict[str, float]] = {}
        for seed in range(given.seeds):
            rng = np.random.default_rng(seed)
            shapes = (QUERIES, WIDTH), (given.keys, WIDTH), (given.keys, WIDTH)
            q, k, v = (torch.from_numpy(rng.standard_normal(s).astype(np.float32)) for s in shapes)
            q *= spread
            rows = list(exact_rows(q, k, v))
            for precision in ("float64", "float32"):
                problem = make_problem(q, k, v, AttentionOptions(), precision=Precision(precision))
                for way, how in (("rows", found_by_stages), ("tiles", found_by_tiles)):
                    found = how(problem)
                    of_way = worst.setdefault((precision, way), dict.fromkeys(figures, 0.0))
                    for name, relative in figures.items():
                        if name in found:
                            off = error(found[name], [row[name] for row in rows], relative)
                            of_way[name] = max(of_way[name], off)
        for (precision, way), of_way in worst.items():
            cells = (f"{value:12.1e}" if value else f"{'–':>12}" for value in of_way.values())
            print(f"{precision} {way:6} {spread:11g}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
