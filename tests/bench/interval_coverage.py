"""How often the 95 % interval of `attncli variance` holds the true variance, over many seeds.

Not collected by pytest: run `python tests/bench/interval_coverage.py [--seeds 1000] [--dk 64 …]`.
"""

from __future__ import annotations

import argparse
import math
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from attncli.attention.options import DistributionName
from attncli.attention.variance.distributions import Distribution
from attncli.attention.variance.experiment import ExperimentSpec, experiment

CASES = {
    "normal": Distribution(),
    "uniform": Distribution(name=DistributionName.UNIFORM),
    "rademacher": Distribution(name=DistributionName.RADEMACHER),
    "laplace": Distribution(name=DistributionName.LAPLACE),
    "student-t, df 10": Distribution(name=DistributionName.STUDENT_T),
    "student-t, df 5": Distribution(name=DistributionName.STUDENT_T, df=5.0),
    "normal, mean 1": Distribution(mean=1.0),
    "normal, correlation 0.5": Distribution(correlation=0.5),
}


def where_the_truth_lies(distribution: Distribution, dk: int, samples: int, seed: int) -> int:
    """0 inside the interval, −1 below it, 1 above it."""
    spec = ExperimentSpec(dk=dk, samples=samples, distribution=distribution, seed=seed, threads=1)
    record = experiment(spec)[0]
    assert record.var_theory is not None
    assert record.var_ci95_low is not None
    assert record.var_ci95_high is not None
    return (record.var_theory > record.var_ci95_high) - (record.var_theory < record.var_ci95_low)


def main() -> None:
    """Print one line per distribution and d_k."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--dk", type=int, nargs="+", default=[64])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", choices=CASES, nargs="+", default=list(CASES))
    given = parser.parse_args()
    print("distribution               d_k  covered   below   above  (chance error ±σ)")
    with ProcessPoolExecutor(given.workers) as pool:
        for name in given.only:
            for dk in given.dk:
                found = list(
                    pool.map(
                        partial(where_the_truth_lies, CASES[name], dk, given.samples),
                        range(given.seeds),
                        chunksize=10,
                    )
                )
                shares = [found.count(side) / given.seeds for side in (0, -1, 1)]
                chance = math.sqrt(0.95 * 0.05 / given.seeds)
                columns = "  ".join(f"{share:6.1%}" for share in shares)
                print(f"{name:24} {dk:5}   {columns}  ±{chance:.1%}", flush=True)


if __name__ == "__main__":
    main()
