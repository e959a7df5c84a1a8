"""What queries give to keys where their own token came before, and to those right behind these.

Pairs of a query and such a key are looked up by their token, so that m earlier occurrences of each
cost O(n·m·d). Where that is much of the matrix, or logits are more than scaled products, the tiles
are gone through instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from attncli.attention.streaming.head_group import HeadGroup, RowBlock, row_blocks
from attncli.attention.streaming.rows import (
    RowStatistics,
    Share,
    mark_seen,
    weights_of,
)
from attncli.attention.streaming.tiles import (
    TILE_KEYS,
    TILE_ROWS,
    Workspace,
    exponential,
    score_tile,
)
from attncli.attention.threads import parallel_map

# From one pair in so many cells on, a product of whole tiles takes less time than one a pair.
_CELLS_A_PAIR = 32
# Elements of queries that are laid beside those of keys at once.
_ELEMENTS = 1 << 21
# Numbers that no token has: of the key before the first one, and of a query that stands on no key.
_NO_KEY, _NO_TOKEN = -1, -2


@dataclass(frozen=True, slots=True, eq=False)
class Occurrences:
    """Where the token of each query came before its own position.

    Attributes:
        keys: int64 (S_k,), by their tokens, those of one token from the left to the right.
        start: int64 (R,), where in this order the first key with a query's token stands.
        count: int64 (R,), how many of these are before the query; 0 where it stands on no key.
    """

    keys: NDArray[np.int64]
    start: NDArray[np.int64]
    count: NDArray[np.int64]

    @classmethod
    def of(cls, tokens: NDArray[np.int64], places: NDArray[np.int64]) -> Occurrences:
        """Those of queries that stand at `places` (R,), of tokens (S_k,)."""
        order = np.argsort(tokens, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        first = np.searchsorted(tokens[order], tokens)
        on_key = (places >= 0) & (places < len(tokens))
        start, count = np.zeros((2, len(places)), np.int64)
        start[on_key] = first[places[on_key]]
        count[on_key] = rank[places[on_key]] - start[on_key]
        return cls(order, start, count)

    def pairs(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows, counted from `start`, and keys of the rows [start, stop), int64 (pairs,) each."""
        count = self.count[start:stop]
        rows = np.repeat(np.arange(len(count)), count)
        begin = self.start[start:stop] - (np.cumsum(count) - count)
        return rows, self.keys[begin[rows] + np.arange(len(rows))]

    def runs(self, start: int, stop: int, most: int) -> Iterator[tuple[int, int]]:
        """Rows [start, stop) in runs of at most so many pairs, or of one row."""
        total = np.cumsum(self.count[start:stop])
        at, done = 0, 0
        while at < len(total):
            end = max(at + 1, int(np.searchsorted(total, done + most, side="right")))
            yield start + at, start + end
            at, done = end, int(total[end - 1])


def find_repeats(
    group: HeadGroup, rows: RowStatistics, tokens: NDArray[np.int64]
) -> tuple[Share, Share]:
    """Shares of the keys that have a query's token and stand before it, and of those behind them.

    A key right behind an earlier occurrence counts if it stands before the query itself.

    Args:
        group: the heads, with positions.
        rows: their rows.
        tokens: int64 (S_k,), at least 0, the same number where tokens are the same.
    """
    assert group.places is not None
    found = Occurrences.of(tokens, group.places)
    simple = group.plain and not group.may_overflow and group.given is None
    numbers = torch.as_tensor(tokens, device=group.device)

    def of_block(block: RowBlock, work: Workspace) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = int(found.count[block.start : block.stop].sum())
        cells = (block.stop - block.start) * sum(tile.stop - tile.start for tile in block.tiles)
        if simple and pairs * _CELLS_A_PAIR <= cells:
            return _by_pairs(group, rows, block, found)
        return _by_tiles(group, rows, block, numbers, work)

    blocks = list(row_blocks(group.hull, TILE_ROWS, TILE_KEYS))
    parts = [_nothing(group, 0)]
    parts += parallel_map(of_block, blocks, lambda: Workspace.of(group), group.workers)
    weight, seen = (torch.cat(part, 2) for part in zip(*parts, strict=True))
    weight = weight.clamp(max=1.0).masked_fill(rows.empty, torch.nan)
    return Share(weight[0], seen[0]), Share(weight[1], seen[1])


def _nothing(group: HeadGroup, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros, (2, G, rows): weights and how many keys are seen, of both kinds of keys."""
    shape = (2, len(group.heads), rows)
    weight = torch.zeros(shape, dtype=torch.float64, device=group.device)
    return weight, torch.zeros_like(weight, dtype=torch.int64)


def _by_pairs(
    group: HeadGroup, rows: RowStatistics, block: RowBlock, found: Occurrences
) -> tuple[torch.Tensor, torch.Tensor]:
    """One product for each pair."""
    assert group.positions is not None
    weight, seen = _nothing(group, block.stop - block.start)
    factor = group.factor()
    factor = factor[..., 0] if isinstance(factor, torch.Tensor) else factor  # (G, 1)
    most = max(1, _ELEMENTS // (len(group.heads) * group.keys.shape[1]))
    for start, stop in found.runs(block.start, block.stop, most):
        queries = group.shrunk_queries(start, stop)
        row, key = (torch.as_tensor(part).to(group.device) for part in found.pairs(start, stop))
        first, end = group.bounds[:, start:stop][:, row]
        for kind, keys in enumerate((key, key + 1)):
            seen_keys = (keys >= first) & (keys < end) & (keys < group.positions[start:stop][row])
            of_row, keys = row[seen_keys], keys[seen_keys]
            products = (queries[:, of_row] * group.keys[:, :, keys].mT).sum(-1)
            logits = (products * factor).to(torch.float64)  # (G, pairs)
            of_all = of_row + start
            part = exponential(logits - rows.row_max[:, of_all])
            part /= 1 + rows.sum_exp_minus_1[:, of_all]
            inside = of_all - block.start
            weight[kind].index_add_(1, inside, part)
            seen[kind] += torch.bincount(inside, minlength=block.stop - block.start)
    return weight, seen


def _by_tiles(
    group: HeadGroup, rows: RowStatistics, block: RowBlock, tokens: torch.Tensor, work: Workspace
) -> tuple[torch.Tensor, torch.Tensor]:
    """All cells of the block, of which those that are wanted count."""
    assert group.positions is not None
    inside = slice(block.start, block.stop)
    weight, seen = _nothing(group, block.stop - block.start)
    place = group.positions[inside, None]  # (rows, 1)
    on_key = (place >= 0) & (place < len(tokens))
    own = torch.where(on_key, tokens[place.clamp(0, len(tokens) - 1)], _NO_TOKEN)
    before = torch.cat([tokens.new_full((1,), _NO_KEY), tokens[:-1]])
    queries = group.shrunk_queries(block.start, block.stop)
    for tile in block.tiles:
        some = slice(tile.start, tile.stop)
        earlier = torch.arange(tile.start, tile.stop, device=group.device) < place
        wanted = [(part[some] == own) & earlier for part in (tokens, before)]
        if group.on_host and not bool(torch.stack(wanted).any()):
            continue
        logits, _ = work.tile(len(group.heads), block.stop - block.start, tile.stop - tile.start)
        score_tile(group, block, tile, queries, group.factor(), logits, work)
        mark_seen(group, block, tile, rows, logits)
        weights, known = weights_of(logits, rows, inside)
        for kind, cells in enumerate(wanted):
            counted = cells & known
            weight[kind] += torch.where(counted, weights, 0.0).sum(-1)
            seen[kind] += counted.sum(-1)
    return weight, seen
