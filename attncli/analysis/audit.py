"""The variance of q·k in tensors, and the scale that was used on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from statistics import fmean
from typing import Any

import torch

from attncli.attention.options import Target
from attncli.attention.problem import Problem
from attncli.attention.sizes import Chosen
from attncli.attention.variance.fit_scale import ScaleCandidate, ScaleFit, fit_scale
from attncli.attention.variance.moments import ScoreMoments, audit_sharing, sharing
from attncli.columns import Column, column, columns_of, record_of
from attncli.errors import DataError
from attncli.ranks import in_order

Record = dict[str, Any]
_SCALE = float | tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMoments:
    """The heads of a group: how large their scaled scores are, and what makes them so."""

    source: str = column("file", is_key=True, description="where Q came from")
    group: str = column("group", is_key=True, description="its name in the bundle, else empty")
    heads: int = column("heads", description="records of heads: batches × heads")
    dk: int = column("d_k", description="width of a query or key")
    scaled_var_mean: float | None = column(
        "scaled", description="mean over the heads of their scaled_var, which 1/√d_k assumes is 1"
    )
    scaled_var_min: float | None = column(
        "lowest head", description="the lowest scaled_var", is_beside=True
    )
    scaled_var_max: float | None = column(
        "highest head", description="the highest scaled_var", is_beside=True
    )
    interaction_share_mean: float | None = column(
        "interaction", description="mean of var_from_interaction / var_within_rows, 0 to 1"
    )
    query_mean_share_mean: float | None = column(
        "query mean", description="mean of var_from_query_mean / var_within_rows, 0 to 1"
    )
    key_mean_share_mean: float | None = column(
        "key mean", description="mean of var_from_key_mean / var_all_pairs, 0 to 1"
    )


GROUP = columns_of(GroupMoments)
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


def group_records(records: Iterable[Record]) -> Iterator[Record]:
    """A record for each source and group of records of heads, in their order."""
    for (source, group), of_group in groupby(records, itemgetter("source", "group")):
        yield record_of(_summed_up(source, group, list(of_group)))


def _summed_up(source: str, group: str, records: Sequence[Record]) -> GroupMoments:
    scaled = [one["scaled_var"] for one in records if one["scaled_var"] is not None]

    def share(part: str, whole: str) -> float | None:
        known = [(one[part], one[whole]) for one in records if one[part] is not None and one[whole]]
        return fmean(one / all_of_it for one, all_of_it in known) if known else None

    return GroupMoments(
        source=source,
        group=group,
        heads=len(records),
        dk=records[0]["dk"],
        scaled_var_mean=fmean(scaled) if scaled else None,
        scaled_var_min=min(scaled, default=None),
        scaled_var_max=max(scaled, default=None),
        interaction_share_mean=share("var_from_interaction", "var_within_rows"),
        query_mean_share_mean=share("var_from_query_mean", "var_within_rows"),
        key_mean_share_mean=share("var_from_key_mean", "var_all_pairs"),
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
