"""What a command needs, from sizes alone: asked before anything is drawn or torch is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attncli.analysis.options import FileOptions, InputOptions, indices
from attncli.attention.options import AttentionOptions, Precision
from attncli.attention.sizes import FLOAT64_CELLS, Chosen, RandomShape, Sizes, places
from attncli.limits import require_disk, require_memory

# S_q and S_k where nothing is said, each on its own.
RANDOM_LENGTH = 8
# Of the embedded example.
EXAMPLE = Sizes(1, 1, 4, 4)
# Options that name files of Q, K and V, or what these are projected from.
_NAMING = ("files", "q", "k", "v", "qkv", "x", "wq", "wk", "wv")

# Of random tensors a number takes 4 bytes as drawn and 8 as computed with.
_BYTES_A_NUMBER = 12
# What a value that is kept takes on its way to a table or to JSON: tensors, objects and text.
_BYTES_A_VALUE = 120
# What a query or key of a mask takes: positions, ends of intervals, counts, orders. Measured, as
# the most of causal, windowed, padded, dilated and packed masks.
_BYTES_A_POSITION = 170
# What a slope of ALiBi takes: numbers, and their text.
_BYTES_A_SLOPE = 160
# What a cell takes in JSON, as true or false.
_BYTES_A_BOOLEAN = 24

_SMALLER = "smaller sizes need less"


def random_shape(options: InputOptions) -> RandomShape | None:
    """The sizes of the random tensors that are asked for; None where none are."""
    sizes = ("batch", "heads", "kv_heads", "q_len", "k_len", "dk", "dv")
    typed = {name: getattr(options, name) for name in (*sizes, "seed")}
    given = {name: value for name, value in typed.items() if value is not None}
    if not given or any(getattr(options, name) for name in _NAMING):
        return None
    given.pop("seed", None)
    return RandomShape(**{"q_len": RANDOM_LENGTH, "k_len": RANDOM_LENGTH} | given)


def sizes_known(options: FileOptions, *, example: bool) -> Sizes | None:
    """The sizes of the problem where no file has to say them; None where one has.

    Args:
        options: of the inputs.
        example: whether nothing given means the embedded example, not random tensors.
    """
    if not isinstance(options, InputOptions) or any(getattr(options, name) for name in _NAMING):
        return None
    shape = random_shape(options)
    if shape is None and example:
        return EXAMPLE
    shape = shape or RandomShape()
    return Sizes(shape.batch, shape.heads, shape.q_len, shape.keys)


def require_drawn(shape: RandomShape) -> None:
    """Refuse random tensors that do not fit in memory.

    Raises:
        ResourceError: naming the sizes that make them so large.
    """
    axes = {
        "batch": shape.batch,
        "heads": shape.heads,
        "q_len": shape.q_len,
        "k_len": shape.keys,
        "dk": shape.dk,
        "dv": shape.values,
    }
    largest = max(axes.values())
    where = ", ".join(f"«{name}»" for name, length in axes.items() if length == largest)
    require_memory(where, _BYTES_A_NUMBER * sum(shape.numbers), _SMALLER)


def require_stages(
    shape: RandomShape,
    stages: Sequence[str] | None,
    chosen: Mapping[str, int | None],
    *,
    target: str | None,
    max_values: int | None,
    softcap: bool,
    precision: Precision,
) -> None:
    """Refuse stages of random tensors that the disk has no room for, or the memory for values.

    Args:
        shape: of the tensors.
        stages: names; None for all.
        chosen: "batch_index", "head_index" and "rows" → how many; None for all.
        target: the file to be; None for none.
        max_values: the values of stages of at most so many cells are kept; None for those of none.
        softcap: whether there is a stage of its own for it.
        precision: of the arithmetic.

    Raises:
        ResourceError: naming what makes them fewer.
    """
    over_keys = {"scores", "scaled", "masked", "weights"} | ({"capped"} if softcap else set())
    names = over_keys | {"output"} if stages is None else set(stages)
    lengths = {"batch_index": shape.batch, "head_index": shape.heads, "rows": shape.q_len}
    rows = math.prod(
        length if (count := chosen[name]) is None else count for name, length in lengths.items()
    )
    widths = [shape.keys] * len(names & over_keys) + [shape.values] * ("output" in names)
    if max_values is not None:
        require_values(sum(rows * width for width in widths if rows * width <= max_values))
    if target is None:
        return
    cells = shape.batch * shape.heads * shape.q_len * shape.keys
    small = cells <= FLOAT64_CELLS and precision is not Precision.FLOAT32
    size = 8 if small or precision is Precision.FLOAT64 else 4
    advice = "fewer of «rows», «head_index», «batch_index» or «stage» need less"
    require_disk(target, Path(target).parent, rows * sum(widths) * size, advice)


def require_values(count: int) -> None:
    """Refuse to keep so many values for a table or for JSON.

    Raises:
        ResourceError: naming what needs none.
    """
    advice = "«format=csv», «save», «rows» and «stage» need less"
    require_memory("«max_values»", _BYTES_A_VALUE * count, advice)


def require_mask(sizes: Sizes, options: AttentionOptions) -> None:
    """Refuse a mask that takes more memory than there is, where its cells are never held.

    Raises:
        ResourceError: naming the lengths.
    """
    batches = sizes.batch if _differs_by_batch(options) else 1
    need = _BYTES_A_POSITION * batches * (sizes.q_len + sizes.k_len)
    where = "«q_len», «k_len»" if batches == 1 else "«batch», «q_len», «k_len»"
    require_memory(where, need, _SMALLER)
    if options.alibi:
        require_memory("«alibi», «heads»", _BYTES_A_SLOPE * sizes.heads, "fewer «heads» need less")


def _differs_by_batch(options: AttentionOptions) -> bool:
    offset, lengths = options.query_offset, (options.key_lengths, options.query_lengths)
    return isinstance(offset, tuple) or any(len(one or ()) > 1 for one in lengths)


def require_booleans(cells: int) -> None:
    """Refuse so many cells of a mask in a JSON document.

    Raises:
        ResourceError: naming the option that leaves them out.
    """
    advice = "a smaller «max_values» leaves them out; «save» needs no memory for them"
    require_memory("«max_values»", _BYTES_A_BOOLEAN * cells, advice)


def chosen_of(options: Any, sizes: Sizes) -> Chosen:
    """The batches and heads that «batch_index» and «head_index» name.

    Raises:
        UsageError: an index beyond its axis.
    """
    found: list[Sequence[int] | None] = []
    for name, length in (("batch_index", sizes.batch), ("head_index", sizes.heads)):
        wanted = indices(f"«{name}»", getattr(options, name))
        found.append(None if wanted is None else places(f"«{name}»", wanted, length))
    return found[0], found[1]


def chosen_record(chosen: Chosen) -> dict[str, Any]:
    """What `params` says of them."""
    listed = [one if one is None else list(one) for one in chosen]
    return dict(zip(("batch_index", "head_index"), listed, strict=True))
