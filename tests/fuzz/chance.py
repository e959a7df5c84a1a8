"""Random choices of which most are right, so that one field of a file or a line is wrong alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

# Lengths, offsets and counts that somebody may not have thought of.
NUMBERS = (
    *(0, 1, 2, 3, -1, -2, 7, 8, 9, 15, 16, 17, 64, 255, 256, 65535, 65536, 2**31 - 1, 2**31),
    *(2**32 - 1, 2**32, 2**33, 2**53, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30),
    *(-(2**31), -(2**63), -(2**63) - 1),
)

# Names of tensors, groups and files: what terminals obey, what paths mean, what no encoding has.
NAMES = (
    *("q", "k", "v", "Q", "key", "layers.0.q", "layers.0.k", "layers.10.q", "blocks.3.attn.hook_q"),
    *("attn_mask", "sinks", "key_padding", "segments", "", ".", "..", "q.", ".q", "q/", "/q", "*"),
    *("a\x1b[31mred\x1b[0m", "q\n", "k\r", "\x07", "\u202eq", "\x9b2J", "\0", "q\0", "\t", "\x7f"),
    *("é", "日本", "٣", "\ud800", "q\udcff", "🙂", "../../x.q", "/etc/passwd", "-", "::", "q::k"),
    *("a" * 300, "b" * 5000, "é" * 300, "q.npy", "__MACOSX/q", "layers.99999999999999999999.q"),
    *("a_" * 3000, "q_" * 3000 + "x", "layer." * 1000 + "q", "A" * 5000 + "b", "1" * 5000),
    *("._" * 900,),
    *("x.0.q", "self_attn.q_proj", "__metadata__", "attncli", "«q»", "[red]q[/red]", "%s", "{0}"),
)


class Chance(random.Random):
    """Random choices; `is_sound` as long as every one that had a right answer was right."""

    def __init__(self, seed: int | str) -> None:
        super().__init__(seed)
        self.rate = self.choice((0.0, 0.02, 0.02, 0.05, 0.2))
        self.is_sound = True

    def amiss(self, right: T, wrong: Sequence[Any]) -> T | Any:
        """The right value as a rule, else one of the others."""
        if self.random() >= self.rate:
            return right
        self.is_sound = False
        return self.choice(wrong)

    def near(self, right: int) -> int:
        """A number that is right as a rule, else near it or far from anything."""
        if self.random() >= self.rate:
            return right
        self.is_sound = False
        off = right + self.choice((-8, -2, -1, 1, 2, 8)), right * 2, -right, right ^ 1 << 31
        return self.choice((*off, *self.choices(NUMBERS, k=4)))

    def mutated(self, data: bytes, others: Sequence[bytes] = ()) -> bytes:
        """The bytes with up to three changes that know nothing of their structure."""
        if self.random() >= 3 * self.rate:
            return data
        self.is_sound = False
        changed = bytearray(data)
        for _ in range(self.randint(1, 3)):
            self._change(changed, others)
        return bytes(changed)

    def _change(self, data: bytearray, others: Sequence[bytes]) -> None:
        start = self.randrange(len(data) + 1)
        stop = min(len(data), start + self.choice((0, 1, 2, 4, 8, 40, 4000)))
        match self.randrange(7 if others else 6):
            case 0:  # one bit
                if start < len(data):
                    data[start] ^= 1 << self.randrange(8)
            case 1:  # a number of a header
                width = self.choice((1, 2, 4, 8))
                number = self.choice(NUMBERS) % (1 << 8 * width)
                data[start : start + width] = number.to_bytes(width, self.choice(("little", "big")))
            case 2:  # cut short
                del data[start:]
            case 3:  # a piece is missing
                del data[start:stop]
            case 4:  # or there twice
                data[start:start] = data[start:stop]
            case 5:  # or noise
                data[start:stop] = self.randbytes(stop - start or 3)
            case 6:  # or of another file
                other = self.choice(others)
                at = self.randrange(len(other) + 1)
                data[start:stop] = other[at : at + self.choice((1, 8, 100, 4000))]
