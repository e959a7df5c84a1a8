"""Blocks of rows along a window, joined so that one call computes what many tiles would."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from attncli.attention.streaming.head_group import (
    ALIGNED_KEYS,
    SLANT_ROWS,
    HeadGroup,
    RowBlock,
    Slant,
    Tile,
    row_blocks,
)
from attncli.attention.streaming.tiles import TILE_CELLS, TILE_KEYS, TILE_ROWS


def joined_blocks(group: HeadGroup) -> list[RowBlock]:
    """The blocks of a group, joined along a window to as many rows as fill a tile.

    But so that each thread still has a few. What comes of a row does not depend on which rows it
    is joined with.
    """
    blocks = list(row_blocks(group.hull, TILE_ROWS, TILE_KEYS))
    if not _may_slant(group):
        return blocks
    lines = [*group.host_bounds, *([group.places] if group.distances else [])]
    # Whether the next row sees the next keys, and stands at the next place.
    steady = np.logical_and.reduce([np.diff(line) == 1 for line in lines])
    rows = len(group.queries)
    most = rows if group.workers == 1 else rows // (4 * group.workers)
    found: list[RowBlock] = []
    for block in blocks:
        slant = None
        if steady[block.start : block.stop - 1].all():
            slant = _slant(group, block)
        last = found[-1] if found else None
        if slant is None:
            found.append(block)
        elif (
            last is not None
            and last.slant is not None
            and steady[block.start - 1]
            and block.stop - block.start == TILE_ROWS
            and (joined := block.stop - last.start) <= most
            and joined * (slant.tile.stop - slant.tile.start) <= TILE_CELLS
        ):
            found[-1] = replace(last, stop=block.stop)
        else:
            found.append(replace(block, slant=slant))
    return found


def _may_slant(group: HeadGroup) -> bool:
    """Whether its logits are products and nothing else, of which sums alone are wanted."""
    one = len(group.heads) == 1 and isinstance(group.scale, float)
    plain = group.base2_logits and not group.may_overflow
    return one and plain and not group.top_key and group.values is None


def _slant(group: HeadGroup, block: RowBlock) -> Slant | None:
    """The keys of the runs of a block whose bounds ascend by one; None where that gains little."""
    if len(block.tiles) != 1 or (block.stop - block.start) % SLANT_ROWS:
        return None
    bounds = group.host_bounds[:, block.start : block.start + SLANT_ROWS]
    first, stop = int(bounds[0, 0]), int(bounds[1, -1])
    start = first // ALIGNED_KEYS * ALIGNED_KEYS
    (tile,) = block.tiles
    if bounds[0, 0] == bounds[1, 0] or 4 * (stop - start) > 3 * (tile.stop - tile.start):
        return None
    return Slant(Tile(start, stop, True, True), bounds - start)
