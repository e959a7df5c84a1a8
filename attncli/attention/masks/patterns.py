"""What a mask is, as numbers, as the options that build it, and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncli.attention.masks.interval_mask import IntervalMask
from attncli.attention.masks.positions import Documents

Option = Any  # a value that AttentionOptions takes under the option's name


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pattern:
    """One batch and head of a mask by its diagonals: the fewest numbers that give its cells.

    Query i sees key j iff all of these hold, None standing for "no such rule":
    lowest ≤ j − i, or j < kept; j − i ≤ highest, or j < prefix; j < length; keep_j; key j and
    position i + position are in the same document; i + position − j is a multiple of dilation.

    Attributes:
        q_len, k_len: S_q and S_k, which say where bottom-right is.
        lowest: first visible diagonal.
        kept: number of keys that `lowest` hides from no query.
        highest: last visible diagonal; the query offset, where it is causal.
        prefix: number of keys that every query sees despite `highest`.
        position: query offset, where documents or dilation need one, or where it is known.
        dilation: from one visible key to the next.
        length: number of real keys.
        keep: bool (S_k,), True = real key, where a length does not say it.
        ids: int64 (S_k,), document of each key.
        hidden_rows: int64, queries that see nothing although the rest would show them keys.
    """

    q_len: int
    k_len: int
    lowest: int | None = None
    kept: int | None = None
    highest: int | None = None
    prefix: int | None = None
    position: int | None = None
    dilation: int | None = None
    length: int | None = None
    keep: NDArray[np.bool_] | None = None
    ids: NDArray[np.int64] | None = None
    hidden_rows: NDArray[np.int64] | None = None

    @property
    def corners(self) -> tuple[int, ...]:
        """Query offsets that have a name: bottom-right first, then top-left."""
        return tuple(dict.fromkeys((self.k_len - self.q_len, 0)))

    @property
    def cost(self) -> int:
        """How much there is to say: of the patterns that fit, the one of the least is chosen."""
        cost = 0 if self.lowest is None else 2
        if self.highest is not None:
            cost += 1 if self.highest in self.corners else 2
        cost += 2 * sum(each is not None for each in (self.prefix, self.length))
        if self.keep is not None:
            cost += 3 if self.padded_left is not None else 6
        if self.ids is not None:
            cost += 4 if (np.diff(self.ids) >= 0).all() else 6
        cost += 3 * sum(each is not None for each in (self.dilation, self.kept))
        if self.documented:
            cost += self.position not in (*self.corners, self.highest)
        return cost + (3 if self.hidden_rows is not None else 0)

    @property
    def documented(self) -> bool:
        """Whether which keys a query sees is not a matter of intervals of the axis alone."""
        return self.ids is not None or self.dilation is not None

    @property
    def shows_in_sums(self) -> bool:
        """Whether a mask with the sums of its rows and columns has its cells."""
        return not self.documented and self.kept is None

    @property
    def padded_left(self) -> int | None:
        """How many keys are hidden, if they are the first ones and no others."""
        if self.keep is None or not self.keep.any():
            return None
        hidden = int(self.keep.argmax())
        return hidden if hidden and bool(self.keep[hidden:].all()) else None

    def interval_mask(self, rows: int) -> IntervalMask:
        """The visible cells of the first `rows` queries."""
        index = np.arange(rows)
        first, stop = np.zeros(rows, np.int64), np.full(rows, self.k_len, np.int64)
        if self.lowest is not None:
            first = np.clip(index + self.lowest, 0, self.k_len)
        if self.highest is not None:
            stop = np.maximum(index + self.highest + 1, self.prefix or 0)
        stop = np.clip(stop, 0, self.k_len if self.length is None else self.length)
        if self.hidden_rows is not None:
            stop[self.hidden_rows] = 0
        position, keys, queries = index + (self.position or 0), None, None
        if self.ids is not None:
            keys, queries = self.ids, Documents(self.ids[None], None).of_queries(position[None])[0]
        elif self.dilation is not None:
            keys, queries = np.arange(self.k_len) % self.dilation, position % self.dilation
        kept = None if self.kept is None else np.full(rows, self.kept)
        return IntervalMask(self.k_len, first, stop, self.keep, keys, queries, kept)

    @property
    def offset(self) -> int | None:
        """Where query 0 stands, of the offsets with these cells the one most likely meant."""
        if self.position is not None:
            return self.position
        if self.lowest is None:
            return self.highest
        if self.highest is None:
            return next((each for each in self.corners if each >= self.lowest), self.lowest)
        if self.prefix is not None or self.highest in self.corners:
            return self.highest
        inside = [corner for corner in self.corners if self.lowest <= corner < self.highest]
        even = [corner for corner in inside if corner - self.lowest == self.highest - corner]
        return (even or inside or [self.highest])[0]

    @property
    def causal(self) -> bool:
        """Whether no query sees beyond its own position."""
        return self.highest is not None and self.highest == self.offset

    @property
    def left(self) -> int | None:
        """Keys to the left that the window holds, without the query's own; None for all."""
        return None if self.lowest is None or self.offset is None else self.offset - self.lowest

    @property
    def right(self) -> int | None:
        """Likewise to the right, where it is not causal."""
        offset, highest = self.offset, self.highest
        if offset is None or highest is None or highest == offset:
            return None
        return highest - offset

    @property
    def numbers(self) -> tuple[Any, ...]:
        """All that tells it from another pattern."""
        values = (getattr(self, field.name) for field in fields(self))
        return tuple(v.tobytes() if isinstance(v, np.ndarray) else v for v in values)


def options_of(patterns: Sequence[Pattern]) -> dict[str, Option] | None:
    """The options, by their names in AttentionOptions, that build one pattern per batch.

    None where no options do: queries that are hidden altogether.
    """
    first = patterns[0]
    if any(pattern.hidden_rows is not None for pattern in patterns):
        return None
    options: dict[str, Option] = {"causal": True} if first.causal else {}
    offsets = _alike([pattern.offset for pattern in patterns])
    if first.offset is not None and (first.q_len != first.k_len or offsets != (0,)):
        options["query_offset"] = offsets[0] if len(offsets) == 1 else offsets
    named = {"left_window": first.left, "right_window": first.right, "sink_window": first.kept}
    named |= {"prefix": first.prefix, "dilation": first.dilation}
    options |= {name: value for name, value in named.items() if value is not None}
    if any(pattern.length is not None for pattern in patterns):
        options["key_lengths"] = _alike([_length(pattern) for pattern in patterns])
    if any(pattern.keep is not None for pattern in patterns):
        options["key_padding"] = _alike_rows([_keep(pattern) for pattern in patterns])
    if first.ids is not None:
        options["segments"] = _alike_rows([pattern.ids for pattern in patterns])
    return options


def describe(patterns: Sequence[Pattern]) -> str:
    """What the patterns of all batches are, in words; they differ in numbers only."""
    parts = [_position_words(patterns), _padding_words(patterns), _document_words(patterns)]
    hidden = patterns[0].hidden_rows
    if hidden is not None:
        parts.append(f"queries {ranges(hidden)} hidden")
    said = "; ".join(part for part in parts if part)
    if all(_length(pattern) == 0 for pattern in patterns):
        return "nothing visible"
    return said or "full"


def _position_words(patterns: Sequence[Pattern]) -> str:
    first = patterns[0]
    if not first.causal and first.left is None and first.right is None:
        return ""
    where, dilation = _where(patterns), first.dilation
    kept = "" if first.kept is None else f", the first {_keys(first.kept)} kept"
    beside = kept.replace(" 1 ", " ") + ("" if dilation is None else f", dilated by {dilation}")
    if not first.causal:
        left, right = (
            f"all keys to the {name}" if width is None else f"{_keys(width)} to the {name}"
            for width, name in ((first.left, "left"), (first.right, "right"))
        )
        return f"window of {left} and {right}{where}{beside}"
    said = f"causal{where}"
    if first.left is None:
        return ("" if first.prefix is None else f"prefix of {first.prefix}, then ") + said + beside
    if first.prefix is not None:  # of which a query sees what lies in its window
        said += f" but for the first {_keys(first.prefix)} (prefix-LM),".replace(" 1 ", " ")
    own = f"{first.left + 1} with the query's own"
    return f"{said} with a window of {_keys(first.left)} to the left ({own}){beside}"


def _where(patterns: Sequence[Pattern]) -> str:
    """Where query 0 stands, in brackets; nothing where it is at key 0 of a square."""
    first = patterns[0]
    offsets = _alike([pattern.offset for pattern in patterns])
    if offsets == (None,):
        return ""
    if len(offsets) > 1:
        return f" (offsets {','.join(map(str, offsets))})"
    offset = offsets[0]
    if first.q_len == first.k_len:
        return f" (offset {offset})" if offset else ""
    if offset == 0:
        return " (top-left)"
    corner = "bottom-right, " if offset == first.k_len - first.q_len else ""
    return f" ({corner}offset {offset})"


def _padding_words(patterns: Sequence[Pattern]) -> str:
    if any(pattern.keep is not None for pattern in patterns):
        return "key padding, " + _each([_hidden_words(pattern) for pattern in patterns])
    if all(pattern.length is None for pattern in patterns):
        return ""
    lengths = _alike([_length(pattern) for pattern in patterns])
    return f"key padding, length{'s' * (len(lengths) > 1)} {','.join(map(str, lengths))}"


def _hidden_words(pattern: Pattern) -> str:
    if pattern.padded_left is not None:
        count = pattern.padded_left
        return "the first key hidden" if count == 1 else f"the first {count} keys hidden"
    hidden = np.flatnonzero(~_keep(pattern))
    if not len(hidden):
        return "none hidden"
    return f"{len(hidden)} of {pattern.k_len} keys hidden: {ranges(hidden)}"


def _document_words(patterns: Sequence[Pattern]) -> str:
    if patterns[0].ids is None:
        return ""
    said = _each([_segment_words(pattern) for pattern in patterns])
    first = patterns[0]
    positional = first.causal or first.left is not None or first.right is not None
    return said if positional else said + _where(patterns)


def _segment_words(pattern: Pattern) -> str:
    assert pattern.ids is not None
    ids, firsts = np.unique(pattern.ids, return_index=True)
    ids = ids[np.argsort(firsts)]
    shown = [ranges(np.flatnonzero(pattern.ids == each)) for each in ids[:_SHOWN]]
    contiguous = all("," not in each for each in shown)
    rest = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
    count = _NUMBERS.get(len(ids), str(len(ids)))
    between = ", " if contiguous else " | "
    noun = "document" if len(ids) == 1 else "documents"
    return f"{count} packed {noun}: segments {between.join(shown)}{rest}"


_SHOWN = 8
_NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight"}


def ranges(index: NDArray[np.int64]) -> str:
    """Sorted indices as ranges, "0–2, 5", cut short after some."""
    if not len(index):
        return "none"
    breaks = np.flatnonzero(np.diff(index) > 1)
    starts = index[np.concatenate([[0], breaks + 1])]
    ends = index[np.concatenate([breaks, [len(index) - 1]])]
    shown = [
        str(start) if start == end else f"{start}–{end}"
        for start, end in zip(starts[:_SHOWN], ends[:_SHOWN], strict=True)
    ]
    return ", ".join(shown) + (", …" if len(starts) > _SHOWN else "")


def merge(patterns: Sequence[Pattern]) -> Sequence[Pattern]:
    """Padding said in one way for all batches: by lengths, or else key by key."""
    if all(pattern.keep is None for pattern in patterns):
        return patterns
    return [replace(pattern, length=None, keep=_keep(pattern)) for pattern in patterns]


def _keys(count: int) -> str:
    return f"{count} key" if count == 1 else f"{count} keys"


def _length(pattern: Pattern) -> int:
    return pattern.k_len if pattern.length is None else pattern.length


def _keep(pattern: Pattern) -> NDArray[np.bool_]:
    if pattern.keep is not None:
        return pattern.keep
    return np.arange(pattern.k_len) < _length(pattern)


def _alike(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(values[:1]) if all(value == values[0] for value in values) else tuple(values)


def _alike_rows(rows: Sequence[Any]) -> NDArray[Any]:
    alike = all(np.array_equal(row, rows[0]) for row in rows)
    return np.stack([rows[0]] if alike else list(rows))


def _each(words: Sequence[str]) -> str:
    """The words of each batch, said once where they are the same."""
    if all(each == words[0] for each in words):
        return words[0]
    said = [f"batch {batch}: {each}" for batch, each in enumerate(words[:_SHOWN])]
    return "; ".join(said) + ("; …" if len(words) > _SHOWN else "")
