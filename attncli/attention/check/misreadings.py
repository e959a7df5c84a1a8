"""Tensors whose memory was read with the axes in another order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from attncli.attention.check.candidate import mend
from attncli.attention.check.variant import Rearranged, Variant

if TYPE_CHECKING:
    from collections.abc import Sequence

_UNDONE_BY = {
    Rearranged.SWAPPED: Rearranged.SWAPPED,
    Rearranged.BSHD_READ_AS_BHSD: Rearranged.BHSD_READ_AS_BSHD,
    Rearranged.BHSD_READ_AS_BSHD: Rearranged.BSHD_READ_AS_BHSD,
    Rearranged.PACKED_WIDTH_FIRST: Rearranged.PACKED_HEADS_FIRST,
    Rearranged.PACKED_HEADS_FIRST: Rearranged.PACKED_WIDTH_FIRST,
}
_ORDERS = (Rearranged.BSHD_READ_AS_BHSD, Rearranged.BHSD_READ_AS_BSHD)
_PACKINGS = (Rearranged.PACKED_WIDTH_FIRST, Rearranged.PACKED_HEADS_FIRST)


def misread(tensor: torch.Tensor, how: Rearranged) -> torch.Tensor:
    """A right (B, H, S, d) tensor as someone sees it who takes its memory for another order."""
    return mend(tensor, _UNDONE_BY[how])


def misread_input(variant: Variant, roles: Sequence[str]) -> Iterator[Variant]:
    """The variants in which the inputs of these roles ("q", "k", "v", "output") were misread."""
    problem = variant.problem
    if problem.v is None and {"v", "output"} & set(roles):
        return
    shapes = [getattr(problem, role).shape for role in roles if role != "output"]
    for how in (*_ORDERS, Rearranged.SWAPPED):
        fits = how is not Rearranged.SWAPPED or all(s[1] == s[2] > 1 for s in shapes)
        if fits and any(s[1] > 1 and s[2] > 1 for s in shapes):
            changed = _with_inputs(variant, {role: how for role in roles if role != "output"})
            yield replace(changed, misread=how) if "output" in roles else changed
            # A kernel that takes its inputs for one order writes its output in that order too.
            if "output" in roles and how is not Rearranged.SWAPPED:
                yield replace(changed, misread=_UNDONE_BY[how])


def misread_output(variant: Variant) -> Iterator[Variant]:
    """The variants in which the candidate's output was written in another order."""
    sizes = variant.problem.sizes
    if variant.problem.v is None or variant.misread is not None:
        return
    if sizes.heads > 1 and sizes.q_len > 1:
        for how in _ORDERS:
            yield replace(variant, misread=how)
        if sizes.heads == sizes.q_len:
            yield replace(variant, misread=Rearranged.SWAPPED)


def misread_packing(variant: Variant) -> Iterator[Variant]:
    """The variants in which packed heads, of inputs, of the output or of both, were split wrongly.

    Width and heads may be exchanged inside of a row, or one fused row of Q, K and V may have been
    split per head in the place of per tensor, or the reverse.
    """
    problem = variant.problem
    if problem.sizes.heads < 2:
        return
    with_output = problem.v is not None and variant.misread is None
    for how in _PACKINGS:
        roles = ("q", "k", "v") if problem.v is not None else ("q", "k")
        inputs = _with_inputs(variant, dict.fromkeys(roles, how))
        yield inputs
        if with_output:
            yield replace(variant, misread=how)
            for back in _PACKINGS:
                yield replace(inputs, misread=back)
    yield from _fused(variant)


def _fused(variant: Variant) -> Iterator[Variant]:
    """Q, K and V of one projection, split as (3, H, d) where (H, 3, d) was meant, or reversed."""
    problem = variant.problem
    if problem.v is None or not problem.q.shape == problem.k.shape == problem.v.shape:
        return
    three = torch.stack([t.transpose(1, 2) for t in (problem.q, problem.k, problem.v)], 2)
    batch, length, _, heads, width = three.shape  # (B, S, 3, H, d)
    per_head = three.reshape(batch, length, heads, 3, width).transpose(2, 3)
    per_tensor = three.transpose(2, 3).reshape(batch, length, 3, heads, width)
    for split in (per_head, per_tensor):
        q, k, v = (split[:, :, index].transpose(1, 2) for index in range(3))
        yield variant.with_problem(q=q, k=k, v=v)


def _with_inputs(variant: Variant, how: dict[str, Rearranged]) -> Variant:
    changes: dict[str, Any] = {}
    for role, order in how.items():
        tensor = getattr(variant.problem, role)
        changes[role] = misread(tensor, order)
    return variant.with_problem(**changes)
