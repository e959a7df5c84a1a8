"""The variance of q·k in tensors, and the scale that was used on them."""

from __future__ import annotations

import torch

from attncli.attention.check.candidate import Target
from attncli.attention.problem import Problem
from attncli.attention.variance.fit_scale import ScaleCandidate, ScaleFit, fit_scale
from attncli.attention.variance.moments import ScoreMoments
from attncli.columns import Column, columns_of
from attncli.errors import DataError

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
