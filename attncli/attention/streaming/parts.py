"""The rows of heads in parts that several compute, and joined again as if one had.

A part begins at a multiple of TILE_ROWS, so that its blocks are blocks of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from attncli.attention.streaming.mass import KeyMass
from attncli.attention.streaming.stream import HeadRows


def join_rows(parts: Sequence[HeadRows]) -> HeadRows:
    """The rows of one head, of which each part has the next ones; bins are not joined."""
    assert parts[0].pooled is None
    best = max(parts, key=_largest_logit)  # the first of equal ones
    received = [part.received for part in parts if part.received is not None]
    joined: HeadRows = join_tensors([replace(part, received=None) for part in parts])
    return replace(
        joined,
        max_logit_query=best.max_logit_query,
        max_logit_key=best.max_logit_key,
        received=KeyMass.joined(received) if received else None,
    )


def _largest_logit(rows: HeadRows) -> float:
    if rows.max_logit is None or rows.max_logit_query is None:
        return -torch.inf
    return float(rows.max_logit.nan_to_num(-torch.inf, torch.inf, -torch.inf).max())


def join_tensors(parts: Sequence[Any]) -> Any:
    """Tensors of rows one after another, or results whose fields are such; else the first."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts))
    if not is_dataclass(first) or isinstance(first, type):
        return first
    names = [field.name for field in fields(first)]
    return replace(first, **{n: join_tensors([getattr(p, n) for p in parts]) for n in names})
