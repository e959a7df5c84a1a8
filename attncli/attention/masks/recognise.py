"""Say what a mask is: exactly, as the inverse of something, or nearest to something.

Of the patterns that give the same cells the one with the fewest numbers is named (`Pattern.cost`):
"full" before padding, padding by a length before causality with a window, those before packed
documents, and padding key by key last. Rules that do not show at the mask's size are not named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from attncli.attention.masks.build import build_mask
from attncli.attention.masks.compare import Leak, distinct_heads, leak
from attncli.attention.masks.fit import Nearest, complete, fit, nearest_of
from attncli.attention.masks.mask import HeadMask, Mask
from attncli.attention.masks.patterns import Option, Pattern, describe, merge, options_of
from attncli.attention.masks.positions import read_documents
from attncli.attention.options import DOCUMENTS, AttentionOptions


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Recognition:
    """What one batch and head of a mask is.

    Attributes:
        description: in words.
        pattern: gives exactly the cells, in the fewest numbers; None where no known pattern does.
        buildable: likewise, and options build it; None where no options do.
        inverse: gives exactly the hidden cells, where that is the likelier intention or the only
            pattern there is; None elsewhere.
        nearest: the known pattern that differs in the fewest cells, where none is exact.
    """

    description: str
    pattern: Pattern | None = None
    buildable: Pattern | None = None
    inverse: Pattern | None = None
    nearest: Nearest | None = None

    @property
    def options(self) -> dict[str, Any] | None:
        """Options, by their names in AttentionOptions, that build the mask; None if none do."""
        return None if self.buildable is None else options_of([self.buildable])

    @property
    def probably_inverted(self) -> bool:
        """Whether true and false have probably been exchanged."""
        return self.inverse is not None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MaskRecognition:
    """What a mask is as a whole.

    Attributes:
        description: in words, of all batches and heads together.
        options: options, by their names in AttentionOptions, that build it for its number of
            batches; None if none do, or if its heads differ.
        parts: batch (None where all are alike), head (likewise), and what each of them is.
    """

    description: str
    options: dict[str, Any] | None
    parts: tuple[tuple[int | None, int | None, Recognition], ...]

    @property
    def probably_inverted(self) -> bool:
        """Whether true and false have probably been exchanged in some batch or head."""
        return any(part.probably_inverted for _, _, part in self.parts)


def recognise(view: HeadMask) -> Recognition:
    """Say what one batch and head of a mask is."""
    pattern, buildable = fit(view)
    if pattern is not None:
        said, inverse = _with_suspicion([pattern]), _suspected(pattern)
        return Recognition(description=said, pattern=pattern, buildable=buildable, inverse=inverse)
    inverse, _ = fit(view.inverse)
    if inverse is not None and inverse.offset in (None, *inverse.corners):
        said = f"probably inverted: {describe([inverse])}"
        return Recognition(description=said, inverse=inverse)
    nearest = nearest_of(view)
    return Recognition(description=f"no known pattern; {nearest.words}", nearest=nearest)


def recognise_mask(mask: Mask) -> MaskRecognition:
    """Say what a mask is.

    Args:
        mask: on the host.
    """
    found = distinct_heads(mask)
    return combine([(batch, head, view, recognise(view)) for batch, head, view in found])


def described(mask: Mask, options: AttentionOptions, said: str, found: Option) -> str:
    """What a mask is, in words that leave out nothing that its options ask for.

    Args:
        mask: on the host, built of the options.
        options: what was asked for.
        said: what the mask is by its cells alone.
        found: the options that build these; None if none do.
    """
    asked = _asked_words(mask, options)
    padding = {"key_lengths", "key_padding"} & (found or {}).keys()
    for name in ("causal", "left_window", "right_window", *_LOOSER, *_PADDING, *DOCUMENTS):
        value = getattr(options, name)
        nothing = value is None or value is False or (name in _LOOSER and value == _LOOSER[name])
        told = name in (found or {}) or (name in _PADDING and padding) or asked == said
        told = told or (name in DOCUMENTS and "segments" in (found or {}))
        if nothing or told:
            continue
        if options.attn_mask is not None:
            return f"{said}; asked for beside the file: {asked}"
        return asked if found is None else f"{asked}; here the same as: {said}"
    return said


# Options that change nothing at these values.
_LOOSER = {"sink_window": 0, "prefix": 0, "dilation": 1}
_PADDING = ("key_lengths", "key_padding")


def _asked_words(mask: Mask, options: AttentionOptions) -> str:
    """What the options ask for, whatever of it shows."""
    batches = range(mask.sizes.batch if mask.differs(0) else 1)
    said = describe(merge([_asked(options, mask, batch) for batch in batches]))
    if mask.shift is None or mask.offset is not None:
        return said
    offset = options.query_offset
    offsets = ",".join(map(str, offset)) if isinstance(offset, tuple) else offset
    at = f"at offset {offsets}" if isinstance(offset, int | tuple) else f"{offset}"
    return f"{said}; positions counted in each document, {at}"


def _asked(options: AttentionOptions, mask: Mask, batch: int) -> Pattern:
    """The pattern that the options ask for in one batch, whatever of it shows."""
    sizes, own = mask.sizes, mask.shift is not None and mask.offset is None
    offset = 0 if own else None
    if mask.offset is not None and options.needs_positions:
        offset = int(mask.offset[batch if len(mask.offset) > 1 else 0])
    ends = [0] if options.causal else []
    ends += [] if options.right_window is None else [options.right_window]
    documents, _ = read_documents(options, sizes)
    keys = None if documents is None else documents.keys
    padded = None if options.key_padding is None else mask.real_keys(batch)
    lengths = options.key_lengths
    return Pattern(
        q_len=sizes.k_len if own else sizes.q_len,  # no corner is that of the whole
        k_len=sizes.k_len,
        lowest=None if options.left_window is None else (offset or 0) - options.left_window,
        kept=options.sink_window or None,
        highest=(offset or 0) + min(ends) if ends else None,
        prefix=options.prefix or None,
        position=offset,
        dilation=options.dilation if options.dilation != 1 else None,
        length=None if lengths is None or padded is not None else lengths[batch % len(lengths)],
        keep=padded,
        ids=None if keys is None else keys[batch % len(keys)],
    )


def undeclared_leaks(mask: Mask, recognition: MaskRecognition, named: int = 10) -> list[Leak]:
    """What a mask that is no known pattern shows beyond the pattern nearest to it.

    Where no rule is declared, this is the best guess at the rule that was meant. One leak for each
    batch and head that has such a pattern, even if it shows nothing beyond it.

    Args:
        mask: on the host.
        recognition: what `recognise_mask` says of it.
        named: how many cells to name for each batch and head.
    """
    found = []
    for batch, head, part in recognition.parts:
        if part.nearest is None or part.nearest.inverted:
            continue
        pattern, view = part.nearest.pattern, mask.head(batch or 0, head or 0)
        options = AttentionOptions(**(options_of([pattern]) or {}))
        rule = build_mask(options, replace(mask.sizes, batch=1, heads=1)).head(0, 0)
        found.append(leak(describe([pattern]), [(batch, head, view, rule, view.rows)], named))
    return found


def combine(
    found: Sequence[tuple[int | None, int | None, HeadMask, Recognition]],
) -> MaskRecognition:
    """What the recognised batches and heads of one mask are together."""
    parts = tuple((batch, head, part) for batch, head, _, part in found)
    if not parts:
        return MaskRecognition(description="full", options={}, parts=())
    views = [view for _, _, view, _ in found]
    if len({head for _, head, _ in parts}) == 1:
        built = _joint(views, [part.buildable for _, _, part in parts])
        options = None if built is None else options_of(built)
        joint = _joint(views, [part.pattern for _, _, part in parts])
        if joint is not None:
            said = _with_suspicion(joint)
            return MaskRecognition(description=said, options=options, parts=parts)
    words = {part.description for _, _, part in parts}
    if len(words) == 1:
        options = parts[0][2].options if _same_options(parts) else None
        return MaskRecognition(description=words.pop(), options=options, parts=parts)
    return MaskRecognition(description=_listed(parts), options=None, parts=parts)


def _with_suspicion(patterns: Sequence[Pattern]) -> str:
    """The words of the patterns, and of what they may be the inverse of by mistake."""
    said = describe(patterns)
    inverse = [_suspected(pattern) for pattern in patterns]
    suspected = [pattern for pattern in inverse if pattern is not None]
    if len(suspected) < len(patterns):
        return said
    inverted = f"probably inverted: {describe(suspected)}"
    lowest = patterns[0].lowest
    if lowest is not None and lowest > max(patterns[0].corners):
        return inverted  # only the future is visible: nobody declares that
    return f"{said}; or {inverted}"


def _suspected(pattern: Pattern) -> Pattern | None:
    """What a mistaken True or False would have made of another pattern to give this one.

    Only the future visible is causality the wrong way round. Only the last keys visible is padding
    on the left, or padding on the right the wrong way round.
    """
    p = pattern
    if p.hidden_rows is not None or p.highest is not None or p.kept is not None:
        return None
    if p.lowest is None:
        return None if p.ids is not None or p.padded_left is None else _right_padding(p)
    if p.ids is not None or not (p.lowest - 1 in p.corners or p.lowest >= max(p.corners)):
        return None
    inverse = replace(p, lowest=None, highest=p.lowest - 1)
    if p.padded_left is None:
        return inverse
    return replace(inverse, keep=None, prefix=p.padded_left)  # hidden before, so visible after


def _right_padding(pattern: Pattern) -> Pattern:
    return replace(pattern, keep=None, length=pattern.padded_left)


def _joint(views: Sequence[HeadMask], found: Sequence[Pattern | None]) -> Sequence[Pattern] | None:
    """The patterns of all batches, told so that they differ in numbers only, where they can be."""
    own = [pattern for pattern in found if pattern is not None]
    if len(own) < len(found):
        return None
    if len({_shape(pattern) for pattern in own}) == 1:
        return merge(own)
    bare = [replace(pattern, length=None, keep=None) for pattern in own]
    for pattern in {pattern.numbers: pattern for pattern in bare}.values():
        if not pattern.shows_in_sums or pattern.hidden_rows is not None:
            continue  # read from the cells of one batch
        fitted = [complete(pattern, view.marginals) for view in views]
        patterns = [pattern for pattern in fitted if pattern is not None]
        if len(patterns) == len(own):
            return merge(patterns)
    return None


def _shape(p: Pattern) -> tuple[Any, ...]:
    """What must be alike for two patterns to be told as one."""
    hidden = None if p.hidden_rows is None else p.hidden_rows.tobytes()
    shape = (p.causal, p.offset is None, p.left, p.right, p.kept, p.prefix, p.dilation)
    return *shape, p.ids is None, hidden


def _same_options(parts: Sequence[tuple[int | None, int | None, Recognition]]) -> bool:
    patterns = [part.buildable for _, _, part in parts]
    return len({None if pattern is None else pattern.numbers for pattern in patterns}) == 1


_LISTED = 4


def _listed(parts: Sequence[tuple[int | None, int | None, Recognition]]) -> str:
    """The words of each batch and head; those of the first few where there are many."""
    said = []
    for batch, head, part in parts[:_LISTED]:
        names = {"batch": batch, "head": head}
        where = " ".join(f"{name} {index}" for name, index in names.items() if index is not None)
        said.append(f"{where}: {part.description}")
    return " | ".join(said) + (f" | … {len(parts)} in all" if len(parts) > _LISTED else "")
