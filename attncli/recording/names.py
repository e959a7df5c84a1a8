"""From the paths of modules to names of groups: `layers.3`, `decoder.layers.0.cross`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

_CROSS = re.compile(r"cross|enc_?dec|encoder_attn", re.IGNORECASE)
# Parts of a path that say nothing beside another.
_PLAIN_STACKS = ("encoder", "decoder", "transformer", "layers", "model")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module stands, by its path.

    Attributes:
        stack: what is before its layers: ("encoder",).
        word: what its layers are called: "block".
        layer: index of its layer; None where no part of the path is a number.
        tail: what follows: ("self_attn",).
    """

    stack: tuple[str, ...]
    word: str
    layer: int | None
    tail: tuple[str, ...]

    @classmethod
    def of(cls, path: str) -> Place:
        """The place that a path names."""
        parts = tuple(path.split("."))
        at = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
        if at is None:
            return cls((), "", None, parts)
        word = parts[at - 1] if at else ""
        return cls(parts[: max(0, at - 1)], word, int(parts[at]), parts[at + 1 :])


def is_cross(path: str) -> bool:
    """Whether a module of this path attends to the other side of an encoder–decoder."""
    return bool(_CROSS.search(".".join(Place.of(path).tail)))


def is_decoder(path: str) -> bool:
    """Whether a module of this path is part of a decoder."""
    return "decoder" in Place.of(path).stack


def group_names(calls: Sequence[tuple[str, int]], *, two_sided: bool = False) -> list[str]:
    """A name for each call of one pass through a model.

    Args:
        calls: path of the module, and how often it was called before in this pass.
        two_sided: whether encoder and decoder are named even where there is one of them alone.
    """
    places = {path: Place.of(path) for path, _ in calls}
    stacks = {place.stack for place in places.values()}
    common = len(list(takewhile(lambda parts: len(set(parts)) == 1, zip(*stacks, strict=False))))
    words: dict[tuple[str, ...], set[str]] = {}
    siblings: dict[tuple[Any, ...], set[tuple[str, ...]]] = {}
    for place in places.values():
        words.setdefault(place.stack, set()).add(place.word)
        siblings.setdefault((place.stack, place.word, place.layer), set()).add(place.tail)
    names: list[str] = []
    for path, repeat in calls:
        place = places[path]
        tails = siblings[place.stack, place.word, place.layer]
        head = place.stack[common:] if len(stacks) > 1 else ()
        if two_sided and not head:
            head = place.stack[-1:]
        while len(head) > 1 and head[-1] in _PLAIN_STACKS:
            head = head[:-1]
        # One module for all layers counts them by its calls.
        alone = len(places) == 1 and place.layer is not None
        layer = repeat if alone and repeat else place.layer
        word = place.word if len(words[place.stack]) > 1 else "layers"
        parts = [*head, *(place.tail if layer is None else (word, str(layer)))]
        if layer is not None and len(tails) > 1:
            parts.append(_kind(place.tail, tails))
        if repeat and not alone:
            parts.append(f"call{repeat}")
        name = ".".join(filter(None, parts)) or "attention"
        names.append(name if name not in names else f"{name}.{path}")
    return names


def _kind(tail: tuple[str, ...], siblings: set[tuple[str, ...]]) -> str:
    """What tells a module from the others of its layer."""
    if any(_CROSS.search(".".join(one)) for one in siblings):
        return "cross" if _CROSS.search(".".join(tail)) else "self"
    numbers = [part for part in tail if part.isdecimal()]
    return numbers[0] if numbers else "_".join(tail)
