"""The problem that a change makes of a problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from attncli.analysis.changes import INTEGERS, SHARED, Change, Rounding
from attncli.attention.masks.rules import KeptKeys
from attncli.attention.nonfinite import all_finite
from attncli.attention.options import AttentionOptions, Precision
from attncli.attention.problem import Problem, make_problem
from attncli.attention.stages import Selection
from attncli.attention.streaming.stream import Wanted, stream_rows
from attncli.errors import DataError

Tensors = dict[str, torch.Tensor | None]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Floats of at least 32 bits that hold the same numbers."""
    exact = tensor.dtype == torch.float64 or not tensor.is_floating_point()
    return tensor.to(torch.float64 if exact else torch.float32)


def _rounded(tensor: torch.Tensor, real: torch.Tensor, to: Rounding) -> torch.Tensor:
    """The tensor (B, H, S, d) as a cache of less precision would give it back.

    Args:
        tensor: (B, H, S, d).
        real: bool (B, 1, S, 1), False for padding, which has no say in a scale.
        to: which precision.
    """
    dtype = None if to.name in INTEGERS else getattr(torch, to.name)
    if dtype is not None and not to.shared:
        wide = _wide(tensor)
        return wide.to(dtype).to(wide.dtype)
    top = INTEGERS[to.name] if dtype is None else torch.finfo(dtype).max
    return _quantised(tensor, real, dtype, top, SHARED[to.shared or "tensor"])


def _quantised(
    tensor: torch.Tensor,
    real: torch.Tensor,
    dtype: torch.dtype | None,
    top: float,
    axes: tuple[int, ...],
) -> torch.Tensor:
    """Numbers as multiples of a scale that takes the largest to `top`, rounded, and back.

    Args:
        tensor: (B, H, S, d).
        real: bool (B, 1, S, 1), where the largest number is looked for.
        dtype: what the multiples are rounded to; None for integers.
        top: the largest of them.
        axes: over which the largest number is looked for.
    """
    wide = _wide(tensor)
    if not wide.numel():
        return wide
    scale = torch.where(real, wide.abs(), 0.0).amax(axes, keepdim=True) / top
    units = (wide / scale.masked_fill(scale == 0, 1.0)).clamp(-top, top)
    return (units.round() if dtype is None else units.to(dtype).to(wide.dtype)) * scale


def changed(
    problem: Problem, options: AttentionOptions, change: Change, selection: Selection
) -> tuple[Problem, list[str]]:
    """The problem under a change, with what is new to say of it.

    Args:
        problem: as it is.
        options: what it was made of.
        change: what is different.
        selection: batches and heads that will be looked at.

    Raises:
        UsageError: the change does not fit the problem.
        DataError: likewise, of arrays.
    """
    values, kept, said = dict(change.options), dict(change.kept), list(change.warnings)
    window = values.get("left_window", options.left_window)
    if kept.get("last") and "heavy" not in kept and window is None:
        # With first keys a window with sinks, of which streaming knows where it shows nothing.
        values |= {"left_window": kept.pop("last") - 1, "sink_window": kept.pop("first", 0)}
    tensors: Tensors = {role: getattr(problem, role) for role in "qkv"}
    for role, rounding in change.rounded.items():
        tensor = tensors[role]
        if tensor is None:
            raise DataError(role, f"expected values for {change.text}, got none")
        tensors[role] = new = _rounded(tensor, _real(problem, role).to(tensor.device), rounding)
        if all_finite(tensor) and not all_finite(new):
            said.append(f"{change.text}: numbers of {role} beyond its range became NaN or infinite")
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    assert q is not None
    assert k is not None
    made = make_problem(
        q,
        k,
        v,
        replace(options, **values),
        heads=problem.sizes.heads,  # which axes are which is settled
        kv_heads=problem.kv_heads,
        precision=Precision(str(problem.dtype).removeprefix("torch.")),
        device=str(problem.device),
        allow_nonfinite=True,
    )
    fresh = [text for text in made.marked_warnings if text not in problem.marked_warnings]
    said += [f"{change.text}: {text}" for text in fresh]
    if kept:
        made = replace(made, mask=made.mask.also(_cache(problem, made, kept, selection)))
    return made, said


def _real(problem: Problem, role: str) -> torch.Tensor:
    """Which places of a tensor's sequence are no padding, bool (B, 1, S, 1)."""
    mask, sizes = problem.mask, problem.sizes
    batches = range(sizes.batch)
    if role == "q":
        rows = [np.arange(sizes.q_len) < mask.real_queries(batch) for batch in batches]
    else:
        rows = [mask.real_keys(batch) for batch in batches]
    return torch.from_numpy(np.stack(rows))[:, None, :, None]


def _cache(problem: Problem, made: Problem, kept: Mapping[str, int], chosen: Selection) -> KeptKeys:
    """The rule of a cache: the first keys, the heaviest of each head, the latest of each query."""
    sizes = problem.sizes
    shape = (sizes.batch, sizes.heads) if "heavy" in kept else (1, 1)
    stay = np.zeros((*shape, 1, sizes.k_len), np.bool_)
    stay[..., : kept.get("first", 0)] = True
    if "heavy" in kept:
        wanted = Wanted(per_key=True)
        for rows in stream_rows(problem, wanted, batches=chosen.batches, heads=chosen.heads):
            assert rows.received is not None
            mass = rows.received.mass.nan_to_num(-1.0)
            heavy = mass.argsort(descending=True, stable=True)[: kept["heavy"]]
            stay[rows.batch, rows.head, 0, heavy.cpu().numpy()] = True
    latest = np.full((1, sizes.q_len), sizes.k_len, np.int64)
    if kept.get("last"):
        latest = made.mask.positions(slice(None), slice(None)) + 1 - kept["last"]
    return KeptKeys(stay, latest)
