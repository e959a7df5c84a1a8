"""What is compared with the reference, and the shapes that it may come in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from attncli.attention.options import Layout, Target
from attncli.attention.problem import Problem
from attncli.errors import DataError

# So many values have to hold their numbers in few bits before it is called no accident.
_ENOUGH_VALUES = 32
_SCAN_ELEMENTS = 1 << 22


# Orders of the axes that an output of each layout, or anything else, may have, expected ones first,
# and the mistake that the others show.
_AXES: dict[Layout | None, list[tuple[str, str | None]]] = {
    Layout.BHSD: [("bhsw", None), ("bshw", "layout:output"), ("bsp", "layout:packed")],
    Layout.BSHD: [("bshw", None), ("bhsw", "layout:output"), ("bsp", "layout:packed")],
    Layout.SBHD: [("sbhw", None), ("bshw", "layout:output"), ("bhsw", "layout:output")],
    Layout.BHDS: [("bhws", None), ("bhsw", "layout:output"), ("bshw", "layout:output")],
    Layout.BSH: [("bsp", None), ("bshw", None), ("bhsw", "layout:output")],
    Layout.SBH: [("sbp", None), ("sbhw", None), ("bsp", "layout:output")],
    None: [("bhsw", None), ("bshw", "layout:output")],
}


class LayoutError(StrEnum):
    """How the memory of a (B, H, S, d) tensor was misread."""

    SWAPPED = "axes H and S exchanged"
    BSHD_READ_AS_BHSD = "(B, S, H, d) in memory, read as (B, H, S, d)"
    BHSD_READ_AS_BSHD = "(B, H, S, d) in memory, read as (B, S, H, d)"
    DH_SPLIT_AS_HD = "packed as d·H, split as H·d"
    HD_SPLIT_AS_DH = "packed as H·d, split as d·H"


# The error that takes another one back.
REVERSE = {
    LayoutError.SWAPPED: LayoutError.SWAPPED,
    LayoutError.BSHD_READ_AS_BHSD: LayoutError.BHSD_READ_AS_BSHD,
    LayoutError.BHSD_READ_AS_BSHD: LayoutError.BSHD_READ_AS_BHSD,
    LayoutError.DH_SPLIT_AS_HD: LayoutError.HD_SPLIT_AS_DH,
    LayoutError.HD_SPLIT_AS_DH: LayoutError.DH_SPLIT_AS_HD,
}


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

    def read_as(self, error: LayoutError | None) -> torch.Tensor:
        """Its values where an output was laid out wrongly in that way."""
        return undo_layout(self.values, error) if self.target is Target.OUTPUT else self.values


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
        raise DataError(f"«actual_{target}»", f"expected real numbers, got {actual.dtype}")
    shapes = shapes_of(target, problem, layout)
    for shape, axes, reading in shapes:
        if tuple(actual.shape) == shape:
            values = _as_axes(actual, axes, problem, target)
            return Candidate(target, values, values_dtype(actual), reading)
    expected, axes, _ = shapes[0]
    width = {Target.OUTPUT: "d_v", Target.WEIGHTS: "S_k"}.get(target, "")
    names = {"b": "B", "h": "H", "s": "S_q", "w": width, "p": "H·d_v"}
    named = ", ".join(names[axis] for axis in axes if names[axis])
    raise DataError(
        f"«actual_{target}»", f"expected ({named}) {expected}, got {tuple(actual.shape)}"
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
        raise DataError("«actual_output»", "expected v beside it, got q and k alone")
    width = {Target.OUTPUT: problem.dv or 0, Target.WEIGHTS: sizes.k_len, Target.LOGSUMEXP: 1}
    length = {"b": sizes.batch, "h": sizes.heads, "s": sizes.q_len, "w": width[target]}
    length["p"] = length["h"] * length["w"]
    left_out = ["", "b"][: 1 + (sizes.batch == 1)] + ["bh"] * (sizes.batch == sizes.heads == 1)
    found = []
    for axes, reading in _AXES[layout if target is Target.OUTPUT else None]:
        for without in left_out:
            if without == "bh" and "h" not in axes:
                continue
            short = "".join(axis for axis in axes if axis not in without)
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
    flat = actual.reshape(-1)
    if int((flat[:_SCAN_ELEMENTS] != 0).sum()) < _ENOUGH_VALUES:
        return actual.dtype
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        parts = torch.split(flat, _SCAN_ELEMENTS)
        if all(torch.equal(p.nan_to_num(), p.to(dtype).to(p.dtype).nan_to_num()) for p in parts):
            return dtype
    return actual.dtype


def undo_layout(values: torch.Tensor, error: LayoutError | None) -> torch.Tensor:
    """A (B, H, S, w) tensor as it was before its memory was misread."""
    batch, heads, length, width = values.shape
    if error is None:
        return values
    if error is LayoutError.SWAPPED:
        return values.transpose(1, 2)
    if error is LayoutError.BSHD_READ_AS_BHSD:
        return values.reshape(batch, length, heads, width).transpose(1, 2)
    by_row = values.transpose(1, 2)  # (B, S, H, w)
    if error is LayoutError.BHSD_READ_AS_BSHD:
        return by_row.reshape(batch, heads, length, width)
    if error is LayoutError.DH_SPLIT_AS_HD:
        return by_row.reshape(batch, length, width, heads).permute(0, 3, 1, 2)
    swapped = by_row.transpose(2, 3)  # (B, S, w, H)
    return swapped.reshape(batch, length, heads, width).transpose(1, 2)


def apply_layout_error(tensor: torch.Tensor, error: LayoutError) -> torch.Tensor:
    """A right (B, H, S, d) tensor as someone sees it who takes its memory for another order."""
    return undo_layout(tensor, REVERSE[error])


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
