"""The table of classic mistakes: each turns a variant into the ones that someone may have meant.

A mistake is a name and a function from a variant to its alternatives, none where the mistake
makes no sense for the problem. Adding one is a line of `MISTAKES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attncli.attention.check.candidate import REVERSE, LayoutError, apply_layout_error
from attncli.attention.check.variant import Rotation, SoftmaxOver, Variant
from attncli.attention.masks.build import MINUS_A_LOT
from attncli.attention.masks.rules import AdditiveMask, BooleanMask
from attncli.attention.options import DOCUMENTS, Corner, MaskTrue
from attncli.attention.problem import Problem


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to have made a mistake.

    Attributes:
        variant: attention as it was then computed.
        changes: the fields of `AttentionOptions` that reproduce it, None for one to be left out;
            empty where no option does.
        detail: what was done, where no option tells it in short; empty for nothing to be told.
    """

    variant: Variant
    changes: dict[str, Any] = field(default_factory=dict)
    detail: str = ""

    @classmethod
    def by_options(cls, variant: Variant, **changes: Any) -> Alternative:
        """The variant with other visibility options."""
        return cls(variant.with_options(**changes), changes)


Scale = float | tuple[float, ...]  # one, or one per query head
Alternatives = Callable[[Variant], Iterable[Alternative]]


@dataclass(frozen=True, slots=True)
class Mistake:
    """A classic mistake.

    Attributes:
        name: as in the record, "family:kind".
        alternatives: the variants it leads to; none where it makes no sense.
        paired: whether it is tried together with others as well.
    """

    name: str
    alternatives: Alternatives
    paired: bool = True

    @property
    def family(self) -> str:
        """What goes wrong; of one family only one mistake is made at a time."""
        return self.name.partition(":")[0]


def _scale(of: Callable[[Problem], Scale | None]) -> Alternatives:
    """Another scale, where the problem has one of that kind."""

    def alternatives(variant: Variant) -> Iterator[Alternative]:
        value = of(variant.problem)
        if value is not None and value != variant.problem.scale:
            yield Alternative(variant.with_problem(scale=value), {"scale": value})

    return alternatives


def _squared(scale: Scale, dk: int) -> Scale | None:
    """The scale applied twice; None where that is 1/d_k, which has its own name."""
    if isinstance(scale, tuple):
        return tuple(one * one for one in scale)
    twice = scale * scale
    return None if math.isclose(twice, 1 / dk, rel_tol=1e-12) else twice


def _without(*names: str) -> Alternatives:
    """Visibility options left out; one of `names` has to be in use."""

    def alternatives(variant: Variant) -> Iterator[Alternative]:
        used = [name for name in names if getattr(variant.options, name) is not None]
        if used:
            yield Alternative.by_options(variant, **dict.fromkeys(used))

    return alternatives


def _left_out(name: str) -> Alternatives:
    """A soft cap or sinks left out."""

    def alternatives(variant: Variant) -> Iterator[Alternative]:
        if getattr(variant.problem, name) is not None:
            yield Alternative(variant.with_problem(**{name: None}), {name: None})

    return alternatives


def _computed(*ways: dict[str, Any]) -> Alternatives:
    """Fields of `Variant` that are otherwise; no option tells of them."""
    return lambda variant: [Alternative(replace(variant, **way)) for way in ways]


def _no_causal(variant: Variant) -> Iterator[Alternative]:
    if variant.options.causal:
        # A prefix makes no sense without it.
        prefix = {} if variant.options.prefix is None else {"prefix": None}
        yield Alternative.by_options(variant, causal=False, **prefix)


def _added_causal(variant: Variant) -> Iterator[Alternative]:
    """Causality that was not declared, in either corner where they differ."""
    if not variant.options.causal:
        for declared in positions_to_declare(variant):
            yield Alternative.by_options(variant, causal=True, **declared)


def _no_alibi(variant: Variant) -> Iterator[Alternative]:
    used: dict[str, Any] = {"alibi": False} if variant.options.alibi else {}
    if variant.options.alibi_slopes is not None:
        used["alibi_slopes"] = None
    if used:
        yield Alternative.by_options(variant, **used)


def _added_alibi(variant: Variant) -> Iterator[Alternative]:
    """ALiBi that was not declared, or its usual slopes where others were."""
    if not variant.options.alibi:
        for declared in positions_to_declare(variant):
            given = variant.options.alibi_slopes is not None
            other = {"alibi_slopes": None} if given else {}
            yield Alternative.by_options(variant, alibi=True, **other, **declared)


def positions_to_declare(variant: Variant) -> Iterator[dict[str, Any]]:
    """What has to be declared before a rule of positions is added: both corners if nothing is."""
    sizes = variant.problem.sizes
    if variant.problem.mask.shift is not None:
        yield {}
        return
    packed = variant.options.has_packed_queries  # corners are those of each document
    for corner in Corner if packed else (0, sizes.k_len - sizes.q_len):
        yield {"query_offset": corner}


def _offset(of: Callable[[int, int], int], named: Corner | None = None) -> Alternatives:
    """Query 0 elsewhere: from its position and the bottom-right one to a new position.

    Its name holds in each document where each has positions of its own.
    """

    def alternatives(variant: Variant) -> Iterator[Alternative]:
        offset, sizes = variant.problem.mask.offset, variant.problem.sizes
        if variant.problem.mask.shift is None or not variant.options.needs_positions:
            return
        if offset is None:
            if named not in (None, variant.options.query_offset):
                yield Alternative.by_options(variant, query_offset=named)
            return
        corner = sizes.k_len - sizes.q_len
        old = [int(position) for position in offset]
        new = tuple(of(position, corner) for position in old)
        if list(new) != old:
            told = new[0] if len(set(new)) == 1 else new
            yield Alternative(variant.with_options(query_offset=new), {"query_offset": told})

    return alternatives


def _window(by: int) -> Alternatives:
    """Windows wider or narrower by one key: on the left, on the right, on both sides."""

    def alternatives(variant: Variant) -> Iterator[Alternative]:
        sizes = {
            name: value
            for name in ("left_window", "right_window")
            if (value := getattr(variant.options, name)) is not None and value + by >= 0
        }
        both = [tuple(sizes)] if len(sizes) == 2 else []
        for names in [(name,) for name in sizes] + both:
            yield Alternative.by_options(variant, **{name: sizes[name] + by for name in names})

    return alternatives


def _mask_missing(variant: Variant) -> Iterator[Alternative]:
    if variant.options.attn_mask is not None:
        mask = variant.problem.mask.with_file(None)
        yield Alternative(variant.with_problem(mask=mask), {"attn_mask": None})


def _mask_inverted(variant: Variant) -> Iterator[Alternative]:
    mask = variant.problem.mask
    if isinstance(mask.file, BooleanMask):
        inverted = mask.with_file(replace(mask.file, shown=not mask.file.shown))
        meaning = MaskTrue.DROP if mask.file.shown else MaskTrue.KEEP
        yield Alternative(variant.with_problem(mask=inverted), {"mask_true": meaning})


def _mask_as_boolean(variant: Variant) -> Iterator[Alternative]:
    """An additive mask whose values were read as booleans, or only as −inf or not."""
    mask = variant.problem.mask
    if mask.added is None:
        return
    for allowed in (mask.added != 0, mask.added == 0, mask.added > MINUS_A_LOT):
        changed = mask.with_file(BooleanMask(allowed, shown=True))
        yield Alternative(variant.with_problem(mask=changed))


def _mask_as_additive(variant: Variant) -> Iterator[Alternative]:
    """A boolean mask whose 0 and 1 were added to the logits."""
    mask = variant.problem.mask
    if isinstance(mask.file, BooleanMask):
        added = mask.with_file(AdditiveMask(mask.file.values, lowest=0.0))
        yield Alternative(variant.with_problem(mask=added))


def _padding_on_queries(variant: Variant) -> Iterator[Alternative]:
    """Padding that hides rows of padded queries, in the place of padded keys or beside them."""
    options, problem = variant.options, variant.problem
    padded = options.key_lengths is not None or options.key_padding is not None
    if not padded or problem.sizes.q_len != problem.sizes.k_len:
        return
    real = torch.stack(
        [torch.as_tensor(problem.mask.real_keys(b)) for b in range(problem.sizes.batch)]
    ).to(problem.device)  # (B, S_k)
    for bare in (variant.with_options(key_lengths=None, key_padding=None), variant):
        mask = bare.problem.mask
        hiding = BooleanMask(real[:, None, :, None], shown=True)  # (B, 1, S_q, 1)
        yield Alternative(bare.with_problem(mask=mask.also(hiding)))


def _rotary(*, backwards: bool) -> Alternatives:
    """Q and K turned as RoPE does it: none of both, or one alone, had been, or both were twice."""

    def alternatives(variant: Variant) -> Iterator[Alternative]:
        for changes in positions_to_declare(variant):
            offset = variant.problem.mask.offset
            if variant.options.has_packed_queries:
                return  # whose positions no offset tells
            told = [changes["query_offset"]] if offset is None else [int(p) for p in offset]
            for how in _ROTATIONS:
                turned = Rotation(offset=tuple(told), backwards=backwards, **how)
                yield Alternative(replace(variant, rotation=turned))
                if variant.problem.q.dtype in (torch.float16, torch.bfloat16):
                    rounded = replace(turned, in_own_dtype=True)
                    yield Alternative(replace(variant, rotation=rounded))

    return alternatives


# Bases and shares that models have; the program may have turned queries or keys alone.
_ROTATIONS: tuple[dict[str, Any], ...] = tuple(
    {"interleaved": interleaved, **how}
    for interleaved in (False, True)
    for how in (
        *({"base": base} for base in (1e4, 5e5, 1e6)),
        *({"base": 1e4, "share": share} for share in (0.5, 0.25)),
        *({"base": 1e4, role: False} for role in ("queries", "keys")),
    )
)


def _softcap_after_mask(variant: Variant) -> Iterator[Alternative]:
    if variant.problem.softcap is not None:
        yield Alternative(replace(variant, cap_after_mask=True))


def _softmax(*over: SoftmaxOver) -> Alternatives:
    """A softmax over something else than the visible keys."""

    def alternatives(variant: Variant) -> Iterator[Alternative]:
        for kind in over:
            if kind is not SoftmaxOver.HEADS or variant.problem.sizes.heads > 1:
                yield Alternative(replace(variant, softmax=kind))

    return alternatives


def _heads_tiled(variant: Variant) -> Iterator[Alternative]:
    """Query head h with key head h mod H_kv."""
    problem = variant.problem
    heads, shared = problem.sizes.heads, problem.kv_heads
    if 1 < shared < heads:
        chosen = [head % shared for head in range(heads)]
        yield Alternative(_with_kv_heads(variant, chosen))


def _heads_averaged(variant: Variant) -> Iterator[Alternative]:
    if variant.problem.sizes.heads > 1 and not variant.heads_averaged:
        yield Alternative(replace(variant, heads_averaged=True))


def _exchanged(variant: Variant) -> Iterator[Alternative]:
    """K in the place of Q and Q in that of K."""
    problem = variant.problem
    if problem.sizes.q_len != problem.sizes.k_len:
        return
    own = [problem.kv_head(head) for head in range(problem.sizes.heads)]
    spread = _with_kv_heads(variant, own)
    yield Alternative(spread.with_problem(q=spread.problem.k, k=problem.q))


def _with_kv_heads(variant: Variant, chosen: list[int]) -> Variant:
    """The variant with one key and value head per query head, picked from those there are."""
    problem = variant.problem
    if chosen == list(range(problem.kv_heads)):
        return variant
    v = None if problem.v is None else problem.v[:, chosen]
    return variant.with_problem(k=problem.k[:, chosen], v=v)


_ORDERS = (LayoutError.BSHD_READ_AS_BHSD, LayoutError.BHSD_READ_AS_BSHD)
_PACKINGS = (LayoutError.DH_SPLIT_AS_HD, LayoutError.HD_SPLIT_AS_DH)


def _layout(*roles: str) -> Alternatives:
    """The inputs of these roles ("q", "k", "v") misread, and the output ("output") with them."""
    inputs = [role for role in roles if role != "output"]

    def alternatives(variant: Variant) -> Iterator[Alternative]:
        problem = variant.problem
        if problem.v is None and {"v", "output"} & set(roles):
            return
        shapes = [getattr(problem, role).shape for role in inputs]
        if not any(s[1] > 1 and s[2] > 1 for s in shapes):
            return
        square = all(s[1] == s[2] > 1 for s in shapes)
        for error in (*_ORDERS, *([LayoutError.SWAPPED] if square else [])):
            changed = _misread(variant, inputs, error)
            if "output" not in roles:
                yield Alternative(changed)
                continue
            # A kernel that takes its inputs for one order writes its output in that order too.
            for written in dict.fromkeys((error, REVERSE[error])):
                yield Alternative(replace(changed, layout_error=written))

    return alternatives


def _layout_of_output(variant: Variant) -> Iterator[Alternative]:
    """The candidate's output written in another order."""
    sizes = variant.problem.sizes
    if variant.problem.v is None or variant.layout_error is not None:
        return
    if sizes.heads > 1 and sizes.q_len > 1:
        square = [LayoutError.SWAPPED] if sizes.heads == sizes.q_len else []
        for error in (*_ORDERS, *square):
            yield Alternative(replace(variant, layout_error=error))


def _packed_wrongly(variant: Variant) -> Iterator[Alternative]:
    """Packed heads, of inputs, of the output or of both, split wrongly.

    Width and heads may be exchanged inside of a row, or one fused row of Q, K and V may have been
    split per head in the place of per tensor, or the reverse.
    """
    problem = variant.problem
    if problem.sizes.heads < 2:
        return
    with_output = problem.v is not None and variant.layout_error is None
    for error in _PACKINGS:
        roles = ("q", "k", "v") if problem.v is not None else ("q", "k")
        inputs = _misread(variant, roles, error)
        yield Alternative(inputs)
        if with_output:
            yield Alternative(replace(variant, layout_error=error))
            for written in _PACKINGS:
                yield Alternative(replace(inputs, layout_error=written))
    yield from _fused(variant)


def _fused(variant: Variant) -> Iterator[Alternative]:
    """Q, K and V of one projection, split as (3, H, d) where (H, 3, d) was meant, or reversed."""
    problem = variant.problem
    if problem.v is None or not problem.q.shape == problem.k.shape == problem.v.shape:
        return
    three = torch.stack([t.transpose(1, 2) for t in (problem.q, problem.k, problem.v)], 2)
    batch, length, _, heads, width = three.shape  # (B, S, 3, H, d)
    per_head = three.reshape(batch, length, heads, 3, width).transpose(2, 3)
    per_tensor = three.transpose(2, 3).reshape(batch, length, 3, heads, width)
    for split in (per_head, per_tensor):
        q, k, v = (split[:, :, index].transpose(1, 2) for index in range(3))
        yield Alternative(variant.with_problem(q=q, k=k, v=v))


def _misread(variant: Variant, roles: Iterable[str], error: LayoutError) -> Variant:
    tensors = {role: getattr(variant.problem, role) for role in roles}
    return variant.with_problem(
        **{role: apply_layout_error(tensor, error) for role, tensor in tensors.items()}
    )


_WINDOW = ("left_window", "right_window", "sink_window", "dilation")
_OVER_ALL = (SoftmaxOver.ALL_KEYS, SoftmaxOver.ADDED_KEYS)

MISTAKES = (
    Mistake("scale:none", _scale(lambda p: 1.0)),
    Mistake("scale:dv", _scale(lambda p: 1 / math.sqrt(p.dv) if p.dv else None)),
    Mistake("scale:model", _scale(lambda p: 1 / math.sqrt(p.sizes.heads * p.dk))),
    Mistake("scale:dk", _scale(lambda p: 1 / p.dk)),
    Mistake("scale:squared", _scale(lambda p: _squared(p.scale, p.dk))),
    Mistake("scale:after-softmax", _computed({"late_scale": True}), paired=False),
    Mistake("causal:missing", _no_causal),
    Mistake("causal:added", _added_causal),
    Mistake("offset:top-left", _offset(lambda old, corner: 0, Corner.TOP_LEFT)),
    Mistake("offset:bottom-right", _offset(lambda old, corner: corner, Corner.BOTTOM_RIGHT)),
    Mistake("offset:-1", _offset(lambda old, corner: old - 1)),
    Mistake("offset:+1", _offset(lambda old, corner: old + 1)),
    Mistake("window:-1", _window(-1)),
    Mistake("window:+1", _window(1)),
    Mistake("window:missing", _without(*_WINDOW)),
    Mistake("sink-window:missing", _without("sink_window")),
    Mistake("prefix:missing", _without("prefix")),
    Mistake("dilation:missing", _without("dilation")),
    Mistake("segments:missing", _without(*DOCUMENTS, "query_segments")),
    Mistake("alibi:missing", _no_alibi),
    Mistake("alibi:added", _added_alibi, paired=False),
    Mistake("mask:inverted", _mask_inverted),
    Mistake("mask:as-boolean", _mask_as_boolean),
    Mistake("mask:as-additive", _mask_as_additive),
    Mistake("mask:missing", _mask_missing),
    # Hidden logits set to 0, or to 10⁻⁹ where −10⁹ was meant.
    Mistake("mask:fill-zero", _computed({"fill": 0.0}, {"fill": 1e-9}), paired=False),
    Mistake("mask:after-softmax", _softmax(*_OVER_ALL), paired=False),
    Mistake("padding:queries", _padding_on_queries),
    Mistake("padding:ignored", _without("key_lengths", "key_padding")),
    Mistake("softcap:missing", _left_out("softcap")),
    Mistake("softcap:after-mask", _softcap_after_mask),
    Mistake("heads:tiled", _heads_tiled),
    Mistake("heads:averaged", _heads_averaged),
    Mistake("layout:q", _layout("q")),
    Mistake("layout:k", _layout("k")),
    Mistake("layout:v", _layout("v")),
    Mistake("layout:output", _layout_of_output),
    Mistake("layout:packed", _packed_wrongly),
    Mistake("softmax:axis", _softmax(SoftmaxOver.QUERIES, SoftmaxOver.HEADS)),
    Mistake("softmax:unnormalised", _softmax(*_OVER_ALL, SoftmaxOver.NOTHING)),
    # To renormalise after dropping their column comes to the same.
    Mistake("sinks:missing", _left_out("sinks")),
    Mistake("sinks:renormalised", _left_out("sinks")),
    Mistake("qk:exchanged", _exchanged),
    Mistake("logsumexp:base2", _computed({"base_2": True})),
    Mistake("rope:missing", _rotary(backwards=False), paired=False),
    Mistake("rope:twice", _rotary(backwards=True), paired=False),
)

# Several tensors misread alike: one wrong idea of the layout, though it has several names.
TOGETHER = (
    Mistake("layout:q+layout:k", _layout("q", "k")),
    Mistake("layout:k+layout:v", _layout("k", "v")),
    Mistake("layout:q+layout:k+layout:v", _layout("q", "k", "v")),
    Mistake("layout:q+layout:k+layout:v+layout:output", _layout("q", "k", "v", "output")),
)
