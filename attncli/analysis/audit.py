"""The variance of q·k in tensors, and the scale that was used on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch

from attncli.attention.options import Target
from attncli.attention.problem import Problem
from attncli.attention.sizes import Chosen
from attncli.attention.variance.fit_scale import ScaleCandidate, ScaleFit, fit_scale
from attncli.attention.variance.moments import ScoreMoments, audit_sharing, sharing
from attncli.columns import Column, columns_of
from attncli.errors import DataError
from attncli.ranks import in_order

_SCALE = float | tuple[float, ...]

AUDIT = (
    Column("source", "file", is_key=True, description="where Q came from", holds=str),
    Column("group", "group", is_key=True, description="its name in the bundle", holds=str),
    *columns_of(ScoreMoments),
    Column("diagnosis", "diagnosis", description="what the numbers say, in words", holds=str),
)
FIT_SCALE = (
    Column("source", None, is_key=True, description="weights or output", holds=Target),
    Column(
        "scale_used", None, description="that of the options: one, or one per head", holds=_SCALE
    ),
    *columns_of(ScaleCandidate),
)


def audited(
    problems: Sequence[Problem], chosen: Sequence[Chosen]
) -> Iterator[tuple[int, ScoreMoments]]:
    """The moments of every head with the number of its problem, shared out over the ranks.

    Args:
        problems: whose heads.
        chosen: which batches and heads of each.
    """
    places = [
        (at, batch, heads)
        for at, (problem, some) in enumerate(zip(problems, chosen, strict=True))
        for batch, heads in sharing(problem, some)
    ]

    def costs(place: tuple[int, int, Sequence[int]]) -> list[float]:
        sizes = problems[place[0]].sizes
        return [1.0 + sizes.q_len + sizes.k_len] * len(place[2])

    def work(place: tuple[int, int, Sequence[int]], part: slice) -> list[ScoreMoments]:
        at, batch, heads = place
        return audit_sharing(problems[at], batch, heads[part])

    def join(parts: Sequence[list[ScoreMoments]]) -> list[ScoreMoments]:
        return list(chain.from_iterable(parts))

    found = in_order(places, costs, work, join)
    for (at, *_), heads in zip(places, found, strict=False):  # none at other ranks
        yield from ((at, moments) for moments in heads)


def fit_to(problem: Problem, given: torch.Tensor, where: str) -> ScaleFit:
    """The scale that made a tensor: weights or output, as its width says or as it fits better.

    Args:
        problem: what it was made from.
        given: the tensor.
        where: its file.

    Raises:
        DataError: it is neither weights nor output; names the file.
    """
    width = given.shape[-1] if given.ndim else 0
    widths = {Target.WEIGHTS: problem.sizes.k_len, Target.OUTPUT: problem.dv}
    fits = []
    for source in (source for source, wanted in widths.items() if wanted == width):
        try:
            fits.append(fit_scale(problem, source, given))
        except DataError as error:
            raise DataError(where, f"{error.problem}, for {source}", error.advice) from None
    if not fits:
        names = (f"{source} (…, {wanted})" for source, wanted in widths.items() if wanted)
        raise DataError(where, f"expected {' or '.join(names)}, got {tuple(given.shape)}")
    return min(fits, key=lambda fit: fit.unexplained)
