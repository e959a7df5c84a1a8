"""Numbers that lost digits when they were stored: Q, K, V or a result in few bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from attncli.attention.check.mistakes import Alternative, Alternatives, Mistake
from attncli.attention.check.variant import Storage, Variant

# Axes of (B, H, S, d) that share a scale: all, those of a head, a row, a channel of a head.
_OF_TENSOR, _OF_HEAD, _OF_ROW, _OF_CHANNEL = (0, 1, 2, 3), (2, 3), (3,), (2,)
_SHARED = (_OF_TENSOR, _OF_HEAD, _OF_ROW, _OF_CHANNEL)
_ROLES = (("k", "v"), ("q", "k", "v"), ("q", "k"), ("k",), ("v",), ("q",))
_TOLD: dict[tuple[int, ...] | None, str] = {
    None: "",
    _OF_TENSOR: ", scaled by tensor",
    _OF_HEAD: ", scaled by head",
    _OF_ROW: ", scaled by row",
    _OF_CHANNEL: ", scaled by channel",
}


_STORAGES = {
    "float16": (Storage(torch.float16),),
    "bfloat16": (Storage(torch.bfloat16),),
    **{
        str(dtype).removeprefix("torch."): tuple(Storage(dtype, on) for on in (None, *_SHARED))
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    },
    "int8": tuple(Storage(torch.int8, on) for on in _SHARED),
}


def storage_mistakes() -> list[Mistake]:
    """What rounding of each kind makes of the inputs, or of the result."""
    return [
        Mistake(f"precision:{name}", _alternatives(storages), paired=False)
        for name, storages in _STORAGES.items()
    ]


def _alternatives(storages: tuple[Storage, ...]) -> Alternatives:
    def alternatives(variant: Variant) -> Iterator[Alternative]:
        problem = variant.problem
        for storage in storages:
            how = _TOLD[storage.shared]
            kept = {
                role: storage.rounded(tensor)
                for role in ("q", "k", "v")
                if (tensor := getattr(problem, role)) is not None
            }
            changed = {r for r, t in kept.items() if not torch.equal(t, getattr(problem, r))}
            for roles in _ROLES:
                if changed.issuperset(roles):
                    stored = variant.with_problem(**{role: kept[role] for role in roles})
                    detail = f"{', '.join(roles)} stored{how}"
                    yield Alternative(stored, {}, detail)
            yield Alternative(replace(variant, result=storage), {}, f"the result stored{how}")

    return alternatives
