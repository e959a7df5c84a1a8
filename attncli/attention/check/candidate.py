"""What is compared with the reference, and the shapes that it may come in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from attncli.attention.check.variant import Rearranged
from attncli.attention.options import Layout
from attncli.errors import DataError

if TYPE_CHECKING:
    from attncli.attention.problem import Problem

# So many values have to hold their numbers in few bits before it is called no accident.
_ENOUGH_VALUES = 32
_SCAN_ELEMENTS = 1 << 22


class Target(StrEnum):
    """What a candidate claims to be."""

    OUTPUT = "output"
    WEIGHTS = "weights"
    LOGSUMEXP = "logsumexp"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tensor to be checked, brought to the axes of the reference.

    Attributes:
        target: what it claims to be.
        values: (B, H, S_q, d_v) for an output, (B, H, S_q, S_k) for weights, (B, H, S_q, 1) for a
            log-sum-exp; in the dtype it came in, as a view.
        dtype: the narrowest dtype that holds its values: a float32 file may hold bfloat16.
        reading: the mistake that its shape shows already, such as "layout:output"; None where
            the shape is the expected one.
    """

    target: Target
    values: torch.Tensor
    dtype: torch.dtype
    reading: str | None = None


def read_candidate(
    target: Target, actual: torch.Tensor, problem: Problem, layout: Layout = Layout.BHSD
) -> Candidate:
    """Bring a candidate to the axes of the reference.

    Args:
        target: what it claims to be.
        actual: an output as the inputs lie: (B, H, S_q, d_v), (B, S_q, H, d_v) under `bshd`,
            (B, S_q, H·d_v) or (B, S_q, H, d_v) under `bsh`; weights (B, H, S_q, S_k); a
            log-sum-exp (B, H, S_q) or with a last axis of 1. Axes B, and B and H, may be left
            out where they are 1.
        problem: what it was computed from.
        layout: order of the axes of the inputs.

    Raises:
        DataError: complex numbers, or a shape that is neither the expected one nor that of a
            layout mistake.
    """
    if actual.is_complex():
        raise DataError(f"--actual-{target}", f"expected real numbers, got {actual.dtype}")
    for shape, axes, reading in shapes_of(target, problem, layout):
        if tuple(actual.shape) == shape:
            values = _as_axes(actual, axes, problem, target)
            return Candidate(target, values, values_dtype(actual), reading)
    expected, axes, _ = shapes_of(target, problem, layout)[0]
    width = {Target.OUTPUT: "d_v", Target.WEIGHTS: "S_k"}.get(target, "")
    names = {"b": "B", "h": "H", "s": "S_q", "w": width, "p": "H·d_v"}
    named = ", ".join(names[axis] for axis in axes if names[axis])
    raise DataError(
        f"--actual-{target}", f"expected ({named}) {expected}, got {tuple(actual.shape)}"
    )


def shapes_of(
    target: Target, problem: Problem, layout: Layout = Layout.BHSD
) -> list[tuple[tuple[int, ...], str, str | None]]:
    """The shapes a candidate may come in: shape, its axes, and the mistake that it shows.

    The axes are letters: b, h, s (queries), w (width), p (packed heads). The expected shapes come
    first, their mistake is None.

    Raises:
        DataError: an output is to be checked where there are no values.
    """
    sizes = problem.sizes
    if target is Target.OUTPUT and problem.dv is None:
        raise DataError("--actual-output", "expected v beside it, got q and k alone")
    width = {Target.OUTPUT: problem.dv or 0, Target.WEIGHTS: sizes.k_len, Target.LOGSUMEXP: 1}
    length = {"b": sizes.batch, "h": sizes.heads, "s": sizes.q_len, "w": width[target]}
    length["p"] = length["h"] * length["w"]
    expected, mistaken = _axes_of(target, layout)
    found = []
    for axes, reading in [(a, None) for a in expected] + mistaken:
        for short in _shortened(axes, length):
            if target is Target.LOGSUMEXP:
                found.append((tuple(length[axis] for axis in short[:-1]), short, reading))
            found.append((tuple(length[axis] for axis in short), short, reading))
    if target is Target.WEIGHTS and sizes.heads > 1:
        averaged = [short for short in ("bsw", "sw") if short == "bsw" or sizes.batch == 1]
        found += [(tuple(length[a] for a in axes), axes, "heads:averaged") for axes in averaged]
    return found


def values_dtype(actual: torch.Tensor) -> torch.dtype:
    """The narrowest dtype that holds every value, where there are enough values to tell."""
    if not actual.is_floating_point():
        return torch.float64
    if actual.dtype not in (torch.float32, torch.float64):
        return actual.dtype
    narrower = [torch.bfloat16, torch.float16]
    if actual.dtype == torch.float64:
        narrower.append(torch.float32)
    flat = actual.reshape(-1)
    if int((flat[:_SCAN_ELEMENTS] != 0).sum()) < _ENOUGH_VALUES:
        return actual.dtype
    for dtype in narrower:
        parts = torch.split(flat, _SCAN_ELEMENTS)
        if all(torch.equal(p.nan_to_num(), p.to(dtype).to(p.dtype).nan_to_num()) for p in parts):
            return dtype
    return actual.dtype


def mend(values: torch.Tensor, misread: Rearranged | None) -> torch.Tensor:
    """Undo a misreading of a (B, H, S, w) tensor."""
    batch, heads, length, width = values.shape
    if misread is None:
        return values
    if misread is Rearranged.SWAPPED:
        return values.transpose(1, 2)
    if misread is Rearranged.BSHD_READ_AS_BHSD:
        return values.reshape(batch, length, heads, width).transpose(1, 2)
    by_row = values.transpose(1, 2)  # (B, S, H, w)
    if misread is Rearranged.BHSD_READ_AS_BSHD:
        return by_row.reshape(batch, heads, length, width)
    if misread is Rearranged.PACKED_WIDTH_FIRST:
        return by_row.reshape(batch, length, width, heads).permute(0, 3, 1, 2)
    swapped = by_row.transpose(2, 3)  # (B, S, w, H)
    return swapped.reshape(batch, length, heads, width).transpose(1, 2)


def _axes_of(target: Target, layout: Layout) -> tuple[list[str], list[tuple[str, str]]]:
    """Expected orders of the axes, and those of layout mistakes with their names."""
    if target is Target.OUTPUT and layout is Layout.BSHD:
        return ["bshw"], [("bhsw", "layout:output"), ("bsp", "layout:packed")]
    if target is Target.OUTPUT and layout is Layout.BSH:
        return ["bsp", "bshw"], [("bhsw", "layout:output")]
    if target is Target.OUTPUT:
        return ["bhsw"], [("bshw", "layout:output"), ("bsp", "layout:packed")]
    return ["bhsw"], [("bshw", "layout:output")]


def _shortened(axes: str, length: dict[str, int]) -> list[str]:
    """The axes, and without those of length 1 that the inputs may leave out as well."""
    found = [axes]
    if length["b"] == 1:
        found.append(axes.replace("b", ""))
        if length["h"] == 1 and "h" in axes:
            found.append(axes.replace("b", "").replace("h", ""))
    return found


def _as_axes(actual: torch.Tensor, axes: str, problem: Problem, target: Target) -> torch.Tensor:
    """View a tensor with the given axes as (B, H, S_q, w)."""
    heads = problem.sizes.heads
    if target is Target.LOGSUMEXP and actual.ndim < len(axes):
        actual = actual[..., None]
    if "p" in axes:
        actual = actual.reshape(*actual.shape[:-1], heads, actual.shape[-1] // heads)
        axes = axes.replace("p", "hw")
    for axis in "hb":  # the missing ones lead
        if axis not in axes:
            actual, axes = actual[None], axis + axes
    order = [axes.index(axis) for axis in "bhsw"]
    return actual.permute(order).expand(-1, heads, -1, -1)
