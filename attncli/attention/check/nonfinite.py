"""Why a candidate holds NaN or inf where the reference does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from attncli.attention.check.candidate import Candidate
    from attncli.attention.check.places import Tally
    from attncli.attention.check.variant import Variant

# Rows looked into: what broke one, as a rule broke all.
_ROWS = 64
HALF_LIMIT = 65504.0


def why_broken(candidate: Candidate, tally: Tally, variant: Variant) -> list[str]:
    """Clauses that locate the broken rows and say what broke them; empty where none is.

    Args:
        candidate: what was compared.
        tally: of every block.
        variant: what it was compared with.
    """
    broken = tally.broken
    if bool(tally.mended.any()):
        mended = f"finite in {int(tally.mended.sum())} rows where NaN or inf of the inputs"
        return [
            f"{mended} makes the reference NaN or inf",
            *_why(broken, candidate, tally, variant),
        ]
    return _why(broken, candidate, tally, variant)


def _why(broken: torch.Tensor, candidate: Candidate, tally: Tally, variant: Variant) -> list[str]:
    """Clauses on the rows that are broken in the candidate alone."""
    count = int(broken.sum())
    if not count:
        return []
    first = tuple(broken.nonzero()[0].tolist())
    said = [f"NaN or inf in {count} row{'s' * (count > 1)}, the first (batch, head, row) {first}"]
    in_empty = int((broken & tally.empty).sum())
    if in_empty:
        which = "all" if in_empty == count else f"{in_empty}"
        said.append(f"{which} of them see no key: a softmax over −inf alone is NaN, expected 0")
    rest = (broken & ~tally.empty).nonzero()[:_ROWS]
    return said if not len(rest) else [*said, *_of_rows(rest, candidate, variant)]


def _of_rows(rows: torch.Tensor, candidate: Candidate, variant: Variant) -> list[str]:
    """What inputs and scores of broken rows (n, 3) say."""
    problem = variant.problem
    largest, inputs_broken = 0.0, 0
    for batch, head, row in rows.tolist():
        shared = problem.kv_head(head)
        q, k = problem.q[batch, head, row], problem.k[batch, shared]
        scores = k.to(torch.float64) @ q.to(torch.float64)  # (S_k,)
        values = [] if problem.v is None else [problem.v[batch, shared]]
        if not all(
            bool(torch.isfinite(tensor.to(torch.float64)).all()) for tensor in (q, k, *values)
        ):
            inputs_broken += 1
        largest = max(largest, float(scores.nan_to_num(0.0, 0.0, 0.0).abs().max()))
    half = torch.float16 in (candidate.dtype, problem.q.dtype)
    said = []
    if largest > HALF_LIMIT:
        where = "" if half else ", if it was used"
        said.append(
            f"|q·k| reaches {largest:.4g} there before the scale, beyond float16's 65504{where}"
        )
    if inputs_broken:
        said.append("q, k or v hold NaN or inf for these rows, at keys that the mask may hide")
    return said
