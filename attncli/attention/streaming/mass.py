"""What each key receives from all queries, in sums that do not depend on who adds them up.

The sums of blocks of rows are the leaves of a binary tree, numbered from 0: two neighbours of which
the left one is even add up to a node of the level above, as soon as both are there. So whoever has
some blocks in a row has a few nodes of the one tree, and nodes of several make the same sums, bit
for bit, as all blocks in one place do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class BlockMass:
    """What the queries of a block give to each key from a first one on, (G, keys)."""

    number: int  # which block of rows it is
    first: int  # the key
    mass: torch.Tensor  # float64, Σ of their weights
    # Int64, how many of them see the key; 0 where that is known already.
    queries: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Node:
    """A sum of masses over some blocks, float64 (G, keys), from a key on."""

    first: int
    mass: torch.Tensor

    def __add__(self, other: _Node) -> _Node:
        first = min(self.first, other.first)
        stop = max(one.first + one.mass.shape[-1] for one in (self, other))
        total = self.mass.new_zeros(*self.mass.shape[:-1], stop - first)
        for one in (self, other):
            total[..., one.first - first : one.first - first + one.mass.shape[-1]] += one.mass
        return _Node(first, total)


@dataclass(frozen=True, slots=True)
class KeyMass:
    """What each key receives from all queries, (G, S_k) or (S_k,)."""

    queries: torch.Tensor  # int64, how many queries see the key
    # Level and number of each node that has no sibling yet: what it has so far.
    _nodes: dict[tuple[int, int], _Node] = field(default_factory=dict, repr=False)

    @property
    def mass(self) -> torch.Tensor:
        """Float64, Σ of the weights that queries give to the key."""
        whole = _Node(0, torch.zeros_like(self.queries, dtype=torch.float64))
        nodes = sorted(self._nodes.items(), key=lambda item: item[0][1] << item[0][0])
        for _, node in reversed(nodes):
            whole += node
        return whole.mass

    def add(self, block: BlockMass) -> None:
        """Take in one block."""
        if block.mass.shape[-1]:
            inside = slice(block.first, block.first + block.queries.shape[-1])
            self.queries[..., inside] += block.queries
            self._put((0, block.number), _Node(block.first, block.mass))

    def of_head(self, index: int) -> KeyMass:
        """One head of the group."""
        nodes = {at: _Node(node.first, node.mass[index]) for at, node in self._nodes.items()}
        return KeyMass(self.queries[index], nodes)

    @classmethod
    def joined(cls, parts: Sequence[KeyMass]) -> KeyMass:
        """Those of several runs of blocks as one."""
        whole = cls(sum((part.queries for part in parts[1:]), parts[0].queries))
        for part in parts:
            for at, node in part._nodes.items():
                whole._put(at, node)
        return whole

    @classmethod
    def side_by_side(cls, parts: Sequence[KeyMass]) -> KeyMass:
        """Those of keys one after another."""
        mass = torch.cat([part.mass for part in parts], -1)
        whole = cls(torch.cat([part.queries for part in parts], -1))
        whole._put((0, 0), _Node(0, mass))
        return whole

    def _put(self, at: tuple[int, int], node: _Node) -> None:
        level, number = at
        while (sibling := self._nodes.pop((level, number ^ 1), None)) is not None:
            node, level, number = sibling + node, level + 1, number // 2
        self._nodes[level, number] = node
