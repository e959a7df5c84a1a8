"""Attention with one thing done otherwise, evaluated for chosen queries by the reference steps.

Most mistakes are another `Problem`; the few that are not (another softmax, another order) are
fields of `Variant`, so that any two can be combined.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

import torch

from attncli.attention import steps
from attncli.attention.check.candidate import LayoutError
from attncli.attention.masks.build import build_mask
from attncli.attention.options import AttentionOptions, Target
from attncli.attention.problem import Problem
from attncli.attention.sizes import Chosen
from attncli.attention.threads import product

# Cells of one block: 2¹⁸ float64 are 2 MiB, so that a handful of such arrays stay in the cache.
BLOCK_CELLS = 1 << 18
# Keys and values are cast once per block: long ones want more rows to be worth it, up to 32 MiB.
_MOST_CELLS = 1 << 22
_ROWS_PER_CAST = 256
# Beyond so many nats below a row's maximum a weight is too small for its rounding to be seen.
_FAR_BELOW = 50.0


class SoftmaxOver(StrEnum):
    """What a softmax sums over."""

    KEYS = "visible keys"
    ALL_KEYS = "all keys, the mask coming after it"
    ADDED_KEYS = "keys that an additive mask leaves, every other rule coming after it"
    QUERIES = "queries"
    HEADS = "heads"
    NOTHING = "nothing: exponentials as they are"


class RoundedAt(StrEnum):
    """Where scores pass through half precision."""

    INPUTS = "queries and keys"
    SCORES = "scores, rounded when stored"
    SCALED = "queries scaled first, scores rounded when stored"


@dataclass(frozen=True, slots=True)
class HalfPrecision:
    """Scores computed in float32 and rounded to float16 or bfloat16 on their way."""

    dtype: torch.dtype
    at: RoundedAt


@dataclass(frozen=True, slots=True)
class Storage:
    """How numbers were kept."""

    dtype: torch.dtype  # what they were rounded to, to nearest
    # Axes over which the largest |number| was scaled to the largest of the dtype; None for numbers
    # that were rounded as they are.
    shared: tuple[int, ...] | None = None

    def rounded(self, x: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor (B, H, S, d) as it is read back, in its own dtype; scaled as `like` needs it."""
        integer = self.dtype == torch.int8
        most = 127.0 if integer else float(torch.finfo(self.dtype).max)
        wide = x.to(torch.float64)
        scale = torch.ones((), dtype=torch.float64, device=x.device)
        if self.shared is not None:
            source = wide if like is None else like.to(torch.float64)
            scale = source.abs().amax(self.shared, keepdim=True) / most
            scale = torch.where(scale > 0, scale, 1.0)
        scaled = (wide / scale).clamp(-most, most)
        kept = scaled.round() if integer else scaled.float().to(self.dtype).to(torch.float64)
        return (kept * scale).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary position embedding (RoPE): pairs of entries turned, the further the later."""

    base: float  # θ of the angles p·θ^(−2i/width)
    interleaved: bool  # entries 2i and 2i + 1 make a pair, not i and i + width/2
    offset: tuple[int, ...]  # position of query 0, one per batch or one for all
    share: float = 1.0  # of the entries of a query or key that are turned, the first ones
    queries: bool = True  # whether they are turned
    keys: bool = True  # likewise
    backwards: bool = False  # turned back, by −p
    in_own_dtype: bool = False  # computed in the dtype of the tensor, rounded at each step

    def of_queries(self, q: torch.Tensor, rows: torch.Tensor, batch: slice) -> torch.Tensor:
        """Queries (b, h, R, d_k) at rows int64 (R,), turned if they are to be."""
        offsets = self.offset if len(self.offset) == 1 else self.offset[batch]
        positions = torch.tensor(offsets, device=rows.device)[:, None] + rows  # (b | 1, R)
        return self._turned(q, positions) if self.queries else q

    def of_keys(self, k: torch.Tensor) -> torch.Tensor:
        """Keys (b, h, S_k, d_k), turned if they are to be."""
        positions = torch.arange(k.shape[-2], device=k.device)[None]
        return self._turned(k, positions) if self.keys else k

    def _turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        width = int(x.shape[-1] * self.share) // 2 * 2
        dtype = x.dtype if self.in_own_dtype else torch.float64
        exponents = torch.arange(0, width, 2, dtype=torch.float64, device=x.device) / width
        angles = positions[:, None, :, None] * self.base**-exponents  # (b | 1, 1, R, width / 2)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        sin = -sin if self.backwards else sin
        turned, rest = x[..., :width].to(dtype), x[..., width:].to(dtype)
        if self.interleaved:
            one, two = turned[..., ::2], turned[..., 1::2]
        else:
            one, two = turned.chunk(2, -1)
        pair = one * cos - two * sin, two * cos + one * sin
        joined = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return torch.cat([joined, rest], -1)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute attention, right or wrong."""

    problem: Problem  # its mask lies on the device already
    options: AttentionOptions  # what the problem's mask was built from
    softmax: SoftmaxOver = SoftmaxOver.KEYS  # what the softmax sums over
    # The soft cap is applied to masked logits, so that hidden keys get weight.
    cap_after_mask: bool = False
    heads_averaged: bool = False  # every head uses the mean of all heads' weights
    # The value head of each query head; None for the right ones.
    value_heads: tuple[int, ...] | None = None
    # How the candidate's output was laid out wrongly; None if it was not.
    layout_error: LayoutError | None = None
    # Where scores were rounded to half precision; None for nowhere.
    half_precision: HalfPrecision | None = None
    fill: float | None = None  # what stood in the place of hidden logits; None for −∞
    late_scale: bool = False  # the scale multiplies the weights in the place of the scores
    base_2: bool = False  # the log-sum-exp is log₂ Σ 2^…, 1/ln 2 times the natural one
    # How queries and keys were turned before the product; None if they were not.
    rotation: Rotation | None = None
    # How outputs and weights lost digits when they were stored; None if they did not.
    result: Storage | None = None
    # The batches and heads of which candidates are looked at; None for all of them.
    chosen: Chosen = (None, None)
    # Column sums of a softmax over queries need every row: found once. Not copied by `replace`.
    _columns: dict[tuple[int, int], torch.Tensor] = field(
        init=False, default_factory=dict, compare=False
    )

    @property
    def needs_all_heads(self) -> bool:
        """Whether no head can be computed alone."""
        return self.heads_averaged or self.softmax is SoftmaxOver.HEADS

    def with_problem(self, **changes: Any) -> Variant:
        """The same, for a problem with other fields."""
        return replace(self, problem=replace(self.problem, **changes))

    def with_options(self, **changes: Any) -> Variant:
        """The same for other visibility options, the mask built anew.

        Raises:
            UsageError: options that do not fit the sizes.
        """
        options = replace(self.options, **changes)
        old = self.problem.mask
        keep = "attn_mask" not in changes and "mask_true" not in changes
        # A mask file may be large, and reading it again would only say the same.
        read = replace(options, attn_mask=None) if keep else options
        problem = replace(self.problem, mask=build_mask(read, self.problem.sizes))
        mask = problem.mask_on_device()
        problem = replace(problem, mask=mask.with_file(old.file) if keep else mask)
        return replace(self, options=options, problem=problem)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Some query rows of some neighbouring heads and batches."""

    batch: slice
    head: slice
    rows: torch.Tensor  # int64 (R,)


@dataclass(frozen=True, slots=True)
class Expected:
    """What a variant gives for a part: b batches, h heads, R rows.

    Attributes:
        output: (b, h, R, d_v); None without values.
        weights, visible: (b, h, R, S_k), the latter bool.
        logsumexp: (b, h, R, 1).
        empty: bool (b, h, R, 1), True for a query that sees no key.
        logits: (b, h, R, S_k), what the softmax was given, −inf at invisible cells.
        logit_size: (b, h, R, 1), what no |logit| of the row exceeds, nor the terms that it is
            summed of: ‖q‖·|scale| times the largest ‖k‖ that is seen, or more beside a bias or a
            sink.
        seen: bool (b, h, S_k), keys that some of the rows see.
        v: (b, h, S_k, d_v), the values of each head; None without an output.
    """

    output: torch.Tensor | None
    weights: torch.Tensor
    logsumexp: torch.Tensor
    empty: torch.Tensor
    logits: torch.Tensor
    logit_size: torch.Tensor
    visible: torch.Tensor
    seen: torch.Tensor
    v: torch.Tensor | None

    def of(self, target: Target) -> torch.Tensor:
        """The array of a target, (b, h, R, w)."""
        if target is Target.OUTPUT:
            assert self.output is not None
            return self.output
        return self.weights if target is Target.WEIGHTS else self.logsumexp

    @property
    def of_rows(self) -> Expected:
        """What is known of whole rows, and the first of their keys: all that is small."""
        few = {"weights": self.empty, "logits": self.empty, "visible": self.visible[..., :1]}
        return replace(self, output=None, v=None, **few)

    def with_weights(self, weights: torch.Tensor) -> Expected:
        """The same with other weights, and the output that follows from them."""
        if self.v is None:
            return replace(self, weights=weights)
        output = steps.weighted_sum(weights, self.v, self.visible)  # (b, h, R, d_v)
        return replace(self, weights=weights, output=output)


def right_variant(
    problem: Problem, options: AttentionOptions, chosen: Chosen = (None, None)
) -> Variant:
    """The problem as it was declared: no mistake."""
    return Variant(replace(problem, mask=problem.mask_on_device()), options, chosen=chosen)


def parts_of(
    variant: Variant, rows: torch.Tensor, batches: range, *, all_heads: bool
) -> Iterator[Part]:
    """Cut queries int64 (R,) of neighbouring batches into parts of a bounded number of cells.

    Each holds some neighbouring heads of those to be looked at, or all there are.
    """
    problem, sizes = variant.problem, variant.problem.sizes
    runs = [range(sizes.heads)] if all_heads else _runs(variant.chosen[1], sizes.heads)
    per_head = max(1, sizes.k_len) * max(1, min(len(rows), problem.dk))
    heads = sizes.heads if all_heads else max(1, BLOCK_CELLS // per_head)
    heads = min(heads, sizes.heads)
    per_row = max(1, sizes.k_len) * heads
    step = max(1, BLOCK_CELLS // per_row, min(_ROWS_PER_CAST, _MOST_CELLS // per_row))
    several = heads == sizes.heads and per_row * max(1, len(rows)) * len(batches) <= BLOCK_CELLS
    for batch in [batches] if several else [range(b, b + 1) for b in batches]:
        for run in runs:
            for head in range(run.start, run.stop, heads):
                for at in range(0, len(rows), step):
                    yield Part(
                        slice(batch.start, batch.stop),
                        slice(head, min(head + heads, run.stop)),
                        rows[at : at + step],
                    )


def real_rows(variant: Variant) -> Iterator[tuple[torch.Tensor, range]]:
    """The queries that are not padding, int64 (R,), with the batches that have just these.

    Of the batches to be looked at.
    """
    problem = variant.problem
    runs = _runs(variant.chosen[0], problem.sizes.batch)
    lengths = {batch: problem.mask.real_queries(batch) for run in runs for batch in run}
    if len(set(lengths.values())) > 1:
        runs = [range(batch, batch + 1) for batch in lengths]
    for run in runs:
        yield torch.arange(lengths[run.start], device=problem.device), run


def _runs(chosen: Sequence[int] | None, length: int) -> list[range]:
    """Neighbours among chosen indices in ascending order; all in one where none are chosen."""
    if chosen is None:
        return [range(length)] if length else []
    ordered = sorted(chosen)
    starts = [at for at, one in enumerate(ordered) if not at or one > ordered[at - 1] + 1]
    return [
        range(ordered[start], ordered[stop - 1] + 1)
        for start, stop in pairwise([*starts, len(ordered)])
    ]


def evaluate(variant: Variant, part: Part, *, with_output: bool = True) -> Expected:
    """Compute a part of a variant, by the steps that define the reference; the output if asked."""
    problem = variant.problem
    heads = range(*part.head.indices(problem.sizes.heads))
    visible, found, size = _logits(variant, part)
    soft = _softmax(variant, part, found, visible)
    weights = soft.weights
    if variant.heads_averaged:
        weights = weights.mean(1, keepdim=True).expand_as(weights)
    if variant.late_scale:
        weights = weights * problem.scales_of(heads)
    v = None
    if with_output and problem.v is not None:
        chosen = variant.value_heads or [problem.kv_head(h) for h in range(problem.sizes.heads)]
        v = _heads_of(problem, problem.v, part.batch, [chosen[head] for head in heads])
    bare = Expected(
        output=None,
        weights=weights,
        logsumexp=soft.logsumexp[..., None],
        empty=soft.empty[..., None],
        logits=found.masked,
        logit_size=size,
        visible=visible.expand(weights.shape),
        seen=visible.any(-2).expand(weights.shape[0], weights.shape[1], -1),
        v=v,
    )
    return bare.with_weights(weights)


def _logits(variant: Variant, part: Part) -> tuple[torch.Tensor, steps.Logits, torch.Tensor]:
    """What is visible, broadcastable to (b, h, R, S_k), what the softmax is given in its place, and
    how large logits and their terms are, (b, h, R, 1).
    """
    problem = variant.problem
    heads = range(*part.head.indices(problem.sizes.heads))
    shared = [problem.kv_head(head) for head in heads]
    place = part.batch, part.head, part.rows, slice(None)
    shown, bias = problem.mask.visible(*place), problem.mask.bias(*place)
    visible = shown
    if variant.softmax is SoftmaxOver.ALL_KEYS or variant.fill is not None:
        visible = torch.ones_like(visible)
        bias = None if bias is None else torch.where(torch.isinf(bias), 0.0, bias)
    elif variant.softmax is SoftmaxOver.ADDED_KEYS:
        visible = torch.ones_like(visible) if bias is None else bias != -math.inf
    q = problem.cast(problem.q[part.batch, part.head][:, :, part.rows])  # (b, h, R, d_k)
    k = _heads_of(problem, problem.k, part.batch, shared)
    if variant.rotation is not None:
        if variant.rotation.in_own_dtype:
            q, k = q.to(problem.q.dtype), k.to(problem.k.dtype)
        q = problem.cast(variant.rotation.of_queries(q, part.rows, part.batch))
        k = problem.cast(variant.rotation.of_keys(k))
    scale = 1.0 if variant.late_scale else problem.scales_of(heads)
    factor = scale / problem.temperature
    if variant.half_precision is None:
        scores, temperature = product(q, k.transpose(-1, -2)), problem.temperature
    else:
        scores = _in_half(variant.half_precision, q, k, factor)
        scale = temperature = 1.0
    found = steps.logits(
        scores,
        scale=scale,
        temperature=temperature,
        softcap=None if variant.cap_after_mask else problem.softcap,
        visible=visible,
        bias=bias,
    )
    if variant.fill is not None:
        found = replace(found, masked=torch.where(shown, found.masked, variant.fill))
    lengths = torch.where(visible.any(-2), k.norm(dim=-1), 0.0)  # (b, h, S_k)
    longest = lengths.amax(-1)[..., None, None] if lengths.shape[-1] else lengths.new_zeros(1)
    size = q.norm(dim=-1, keepdim=True) * longest * abs(factor)
    if bias is not None and lengths.shape[-1]:
        # The largest |logit| of keys with a weight that could be seen.
        near = found.masked >= found.masked.amax(-1, keepdim=True) - _FAR_BELOW
        largest = torch.where(near, found.masked.abs(), 0.0).amax(-1, keepdim=True)
        size = torch.maximum(size, largest.nan_to_num(0.0, 0.0))
    if problem.sinks is not None:  # a sink above the keys is subtracted from them
        size = torch.maximum(size, problem.cast(problem.sinks[part.head])[:, None, None])
    if variant.cap_after_mask and problem.softcap is not None:
        capped = problem.softcap * torch.tanh(found.masked / problem.softcap)
        found = replace(found, masked=capped, visible=torch.ones_like(found.visible))
    return shown, found, size


def _in_half(
    half: HalfPrecision, q: torch.Tensor, k: torch.Tensor, scale: float | torch.Tensor
) -> torch.Tensor:
    """Scaled scores (b, h, R, S_k) as programs have them that round on the way."""

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(half.dtype).to(torch.float32)

    q32, k32 = rounded(q), rounded(k).transpose(-1, -2)
    if half.at is RoundedAt.INPUTS:
        scaled = product(q32, k32) * scale
    elif half.at is RoundedAt.SCORES:
        scaled = rounded(rounded(product(q32, k32)) * scale)
    else:
        scaled = rounded(product(rounded(q32 * scale), k32))
    return scaled.to(q.dtype)


def _softmax(
    variant: Variant, part: Part, found: steps.Logits, visible: torch.Tensor
) -> steps.Softmax:
    """The weights, however the variant comes by them."""
    problem = variant.problem
    sink = None
    if problem.sinks is not None:
        sink = problem.cast(problem.sinks[part.head])[None, :, None]  # (1, h, 1)
    soft = steps.softmax(found.masked, found.visible, sink)
    if variant.softmax is SoftmaxOver.KEYS or not found.masked.shape[-1]:  # no keys, no sums
        return soft
    if variant.softmax in (SoftmaxOver.ALL_KEYS, SoftmaxOver.ADDED_KEYS):
        return replace(soft, weights=torch.where(visible, soft.weights, 0.0))
    if variant.softmax is SoftmaxOver.NOTHING:
        whole = found.masked.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    elif variant.softmax is SoftmaxOver.HEADS:
        whole = torch.logsumexp(found.masked, 1, keepdim=True)
    else:
        whole = _over_queries(variant, part)[:, :, None]  # (b, h, 1, S_k)
    weights = torch.where(found.visible, torch.exp(found.masked - whole), 0.0)
    return replace(soft, weights=weights)


def _over_queries(variant: Variant, part: Part) -> torch.Tensor:
    """Log-sum-exp of each key's logits over all queries, (b, h, S_k); found once per head."""
    problem, known = variant.problem, variant._columns
    batches = range(*part.batch.indices(problem.sizes.batch))
    heads = range(*part.head.indices(problem.sizes.heads))
    step = max(1, _MOST_CELLS // max(1, problem.sizes.k_len))
    every = torch.arange(problem.sizes.q_len, device=problem.device)
    for b, h in {(b, h) for b in batches for h in heads} - known.keys():
        total = problem.q.new_full((problem.sizes.k_len,), -math.inf, dtype=problem.dtype)
        for rows in torch.split(every, step):
            one = Part(slice(b, b + 1), slice(h, h + 1), rows)
            masked = _logits(variant, one)[1].masked[0, 0]  # (R, S_k)
            total = torch.logaddexp(total.to(masked.device), torch.logsumexp(masked, 0))
        known[b, h] = total
    return torch.stack([torch.stack([known[b, h] for h in heads]) for b in batches])


def _heads_of(
    problem: Problem, tensor: torch.Tensor, batch: slice, heads: list[int]
) -> torch.Tensor:
    """Heads of (B, H_kv, S, d) as the query heads use them, in the dtype of the arithmetic."""
    if heads == list(range(tensor.shape[1])):
        return problem.cast(tensor[batch])
    return problem.cast(tensor[batch][:, torch.tensor(heads, device=tensor.device)])
