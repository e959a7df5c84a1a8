"""Every classic mistake made by hand, independently of the code under test.

A `Draw` is a random problem; `attend` computes it plainly in float32, the way a program would
that has the mistake in it. Masks are built here from their definitions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from attncli.attention.options import AttentionOptions, MaskTrue
from attncli.attention.problem import Problem, make_problem

Found = dict[str, torch.Tensor]  # "output", "weights", "logsumexp"


@dataclass(frozen=True)
class Draw:
    """A random problem; `None` and `False` mean that a feature is not in it."""

    q: torch.Tensor  # (B, H, S_q, d_k) float32
    k: torch.Tensor  # (B, H_kv, S_k, d_k)
    v: torch.Tensor  # (B, H_kv, S_k, d_v)
    scale: float
    causal: bool = False
    offset: int | None = None
    left: int | None = None
    right: int | None = None
    kept: int | None = None  # first keys that the left window does not hide
    prefix: int | None = None
    step: int | None = None  # of a dilated window
    documents: tuple[int, ...] | None = None  # (S_k,)
    sloped: bool = False  # ALiBi
    key_lengths: tuple[int, ...] | None = None
    keep: torch.Tensor | None = None  # bool (B | 1, 1 | H, S_q, S_k), True = may attend
    drop: bool = False  # the mask is handed over as True = hidden
    added: torch.Tensor | None = None  # float, likewise
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # (H,)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def shared(self) -> list[int]:
        return [head // (self.heads // self.k.shape[1]) for head in range(self.heads)]

    def options(self) -> AttentionOptions:
        mask = None
        if self.keep is not None:
            mask = (~self.keep if self.drop else self.keep).numpy()
        if self.added is not None:
            mask = self.added.numpy()
        return AttentionOptions(
            scale=self.scale,
            causal=self.causal,
            query_offset=self.offset,
            left_window=self.left,
            right_window=self.right,
            sink_window=self.kept,
            prefix=self.prefix,
            dilation=self.step,
            segments=None if self.documents is None else np.array(self.documents),
            alibi=self.sloped,
            key_lengths=self.key_lengths,
            attn_mask=mask,
            mask_true=MaskTrue.DROP if self.drop else MaskTrue.KEEP,
            softcap=self.softcap,
            sinks=None if self.sinks is None else self.sinks.numpy(),
        )

    def problem(self) -> Problem:
        return make_problem(self.q, self.k, self.v, self.options())


def visible(draw: Draw) -> torch.Tensor:
    """Bool (B, H, S_q, S_k), cell by cell from the definitions."""
    batch, heads, q_len, _ = draw.q.shape
    k_len = draw.k.shape[2]
    p = torch.arange(q_len)[:, None] + (draw.offset or 0)
    j = torch.arange(k_len)[None]
    seen = torch.ones(batch, heads, q_len, k_len, dtype=torch.bool)
    if draw.causal:
        seen &= (j <= p) | (j < (draw.prefix or 0))
    if draw.left is not None:
        seen &= (j >= p - draw.left) | (j < (draw.kept or 0))
    if draw.right is not None:
        seen &= j <= p + draw.right
    if draw.step is not None:
        seen &= (p - j) % draw.step == 0
    if draw.documents is not None:
        ids = torch.tensor(draw.documents)
        seen &= (p >= 0) & (p < k_len) & (ids[p.clamp(0, k_len - 1)] == ids[j])
    if draw.key_lengths is not None:
        seen &= (j < torch.tensor(draw.key_lengths)[:, None])[:, None, None]
    if draw.keep is not None:
        seen &= draw.keep
    return seen


def slopes(heads: int) -> torch.Tensor:
    """The slopes of ALiBi, (H, 1, 1): a power of two first, what is missing from the next one."""
    power = 2 ** int(math.log2(heads))
    first = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    second = [2 ** (-4 * h / power) for h in range(1, 2 * power + 1, 2)]
    return torch.tensor([*first, *second][:heads])[:, None, None]


def turned(x: torch.Tensor, positions: torch.Tensor, *, pairs: bool, base: float) -> torch.Tensor:
    """Rotary embedding by complex numbers: neighbours are a pair, or both halves are."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * base ** (-torch.arange(half) / half)  # (S, d / 2)
    parts = (x[..., ::2], x[..., 1::2]) if pairs else (x[..., :half], x[..., half:])
    spun = torch.complex(*parts) * torch.polar(torch.ones_like(angle), angle)
    if pairs:
        return torch.view_as_real(spun).flatten(-2)
    return torch.cat([spun.real, spun.imag], -1)


def attend(draw: Draw, **twist: Any) -> Found:
    """Attention in float32; `twist` names what is done otherwise."""
    q, k, v = draw.q, draw.k, draw.v
    key_heads = twist.get("key_heads", draw.shared)
    value_heads = twist.get("value_heads", key_heads)
    keys, values = k[:, key_heads], v[:, value_heads]
    if twist.get("exchanged"):
        q, keys = keys, q
    if "rotary" in twist:
        p = torch.arange(q.shape[2]) + (draw.offset or 0)
        q = turned(q, twist.get("sign", 1) * p.float(), **twist["rotary"])
        j = torch.arange(keys.shape[2])
        keys = turned(keys, twist.get("sign", 1) * j.float(), **twist["rotary"])
    scores = torch.einsum("bhid,bhjd->bhij", q, keys)
    logits = scores * (1.0 if "late" in twist else draw.scale)
    seen = twist.get("seen", visible(draw))
    bias = 0.0 if draw.added is None else draw.added
    if draw.softcap is not None and not twist.get("cap_late"):
        logits = draw.softcap * torch.tanh(logits / draw.softcap)
    logits = logits + bias
    if draw.sloped:
        p = torch.arange(q.shape[2])[:, None] + (draw.offset or 0)
        logits = logits - slopes(draw.heads) * (p - torch.arange(keys.shape[2])).abs()
    if "fill" in twist:
        seen = seen & (logits > -math.inf)
        logits = torch.where(seen, logits, twist["fill"])
        seen = torch.ones_like(seen)
    hidden = logits.masked_fill(~seen, -math.inf)
    if twist.get("cap_late"):
        hidden = draw.softcap * torch.tanh(hidden / draw.softcap)
        seen = torch.ones_like(seen)
    weights, logsumexp = _softmax(draw, logits, hidden, seen, twist.get("softmax", "keys"))
    if twist.get("averaged"):
        weights = weights.mean(1, keepdim=True).expand(weights.shape)
    weights = weights * twist.get("dropped", 1.0) * twist.get("late", 1.0)
    return {"output": weights @ values, "weights": weights, "logsumexp": logsumexp}


def _softmax(
    draw: Draw, logits: torch.Tensor, hidden: torch.Tensor, seen: torch.Tensor, over: str
) -> tuple[torch.Tensor, torch.Tensor]:
    logsumexp = torch.logsumexp(hidden, -1)
    if over == "queries":
        return torch.softmax(hidden, -2).nan_to_num(0.0), logsumexp
    if over == "heads":
        return torch.softmax(hidden, 1).nan_to_num(0.0), logsumexp
    if over == "before the mask":
        whole = torch.logsumexp(logits, -1)
        return _with_sink(draw, logits) * seen, whole
    if over == "exponentials":
        return torch.exp(hidden - hidden.amax(-1, keepdim=True)).nan_to_num(0.0), logsumexp
    return _with_sink(draw, hidden).nan_to_num(0.0) * seen, logsumexp


def _with_sink(draw: Draw, logits: torch.Tensor) -> torch.Tensor:
    """Softmax over keys and, where there is one, the sink, whose column is then dropped."""
    if draw.sinks is None:
        return torch.softmax(logits, -1)
    sink = draw.sinks.float()[None, :, None, None].expand(*logits.shape[:-1], 1)
    return torch.softmax(torch.cat([logits, sink], -1), -1)[..., :-1]


# --- mistakes ---------------------------------------------------------------------------------


def _scaled(value: Callable[[Draw], float]) -> Callable[[Draw], Iterator[Found]]:
    return lambda draw: iter([attend(replace(draw, scale=value(draw)))])


def _changed(**changes: Any) -> Callable[[Draw], Iterator[Found]]:
    return lambda draw: iter([attend(replace(draw, **changes))])


def _twisted(*twists: dict[str, Any]) -> Callable[[Draw], Iterator[Found]]:
    return lambda draw: iter([attend(draw, **twist) for twist in twists])


def _added_causal(draw: Draw) -> Iterator[Found]:
    corner = draw.k.shape[2] - draw.q.shape[2]
    for offset in {0, corner} if draw.offset is None else [draw.offset]:
        if not draw.causal:
            yield attend(replace(draw, causal=True, offset=offset))


def _top_left(draw: Draw) -> Iterator[Found]:
    yield attend(replace(draw, offset=0))


def _bottom_right(draw: Draw) -> Iterator[Found]:
    yield attend(replace(draw, offset=draw.k.shape[2] - draw.q.shape[2]))


def _moved(by: int) -> Callable[[Draw], Iterator[Found]]:
    return lambda draw: iter([attend(replace(draw, offset=(draw.offset or 0) + by))])


def _window(by: int) -> Callable[[Draw], Iterator[Found]]:
    def made(draw: Draw) -> Iterator[Found]:
        wider = {
            name: size + by
            for name in ("left", "right")
            if (size := getattr(draw, name)) is not None and size + by >= 0
        }
        for name, size in wider.items():
            yield attend(replace(draw, **{name: size}))
        if len(wider) == 2:
            yield attend(replace(draw, **wider))

    return made


def _inverted(draw: Draw) -> Iterator[Found]:
    assert draw.keep is not None
    yield attend(replace(draw, keep=~draw.keep))


def _as_boolean(draw: Draw) -> Iterator[Found]:
    assert draw.added is not None
    bare = replace(draw, added=None)
    for keep in (draw.added != 0, draw.added == 0, draw.added > -math.inf):
        yield attend(replace(bare, keep=keep))


def _as_additive(draw: Draw) -> Iterator[Found]:
    assert draw.keep is not None
    added = (~draw.keep if draw.drop else draw.keep).float()
    yield attend(replace(draw, keep=None, added=added))


def _on_queries(draw: Draw) -> Iterator[Found]:
    assert draw.key_lengths is not None
    rows = torch.arange(draw.q.shape[2])[None] < torch.tensor(draw.key_lengths)[:, None]
    bare = replace(draw, key_lengths=None)
    for one in (bare, draw):
        yield attend(one, seen=visible(one) & rows[:, None, :, None])


def _tiled(draw: Draw) -> Iterator[Found]:
    yield attend(draw, key_heads=[head % draw.k.shape[1] for head in range(draw.heads)])


def _value_head(draw: Draw) -> Iterator[Found]:
    count = draw.k.shape[1]
    for by in range(1, count):
        yield attend(
            draw, key_heads=draw.shared, value_heads=[(h + by) % count for h in draw.shared]
        )


def _memory_bshd(tensor: torch.Tensor) -> torch.Tensor:
    """A (B, H, S, d) tensor stored as (B, S, H, d) and read without turning it."""
    b, h, s, d = tensor.shape
    return tensor.transpose(1, 2).contiguous().view(b, h, s, d)


def _memory_bhsd(tensor: torch.Tensor) -> torch.Tensor:
    """A (B, H, S, d) tensor read as though it were stored as (B, S, H, d)."""
    b, h, s, d = tensor.shape
    return tensor.contiguous().view(b, s, h, d).transpose(1, 2)


def _misread(*roles: str) -> Callable[[Draw], Iterator[Found]]:
    def made(draw: Draw) -> Iterator[Found]:
        for read in (_memory_bshd, _memory_bhsd):
            changes = {role: read(getattr(draw, role)) for role in roles if role != "output"}
            found = attend(replace(draw, **changes))
            if "output" in roles:
                for write in (_memory_bshd, _memory_bhsd):
                    yield found | {"output": write(found["output"])}
            else:
                yield found
        tensors = [draw.q] if "output" in roles else [getattr(draw, role) for role in roles]
        if all(tensor.shape[1] == tensor.shape[2] for tensor in tensors):
            changes = {role: getattr(draw, role).mT.mT for role in roles if role != "output"}
            changes = {role: tensor.transpose(1, 2) for role, tensor in changes.items()}
            found = attend(replace(draw, **changes))
            turned = found["output"].transpose(1, 2)
            yield found | ({"output": turned} if "output" in roles else {})

    return made


def _width_first(tensor: torch.Tensor) -> torch.Tensor:
    """Packed as (S, H·d), split as (S, d, H)."""
    b, h, s, d = tensor.shape
    packed = tensor.transpose(1, 2).reshape(b, s, h * d)
    return packed.view(b, s, d, h).permute(0, 3, 1, 2)


def _heads_first(tensor: torch.Tensor) -> torch.Tensor:
    """Packed as (S, d·H), split as (S, H, d)."""
    b, h, s, d = tensor.shape
    packed = tensor.permute(0, 2, 3, 1).reshape(b, s, h * d)
    return packed.view(b, s, h, d).transpose(1, 2)


def _packed(draw: Draw) -> Iterator[Found]:
    for split in (_width_first, _heads_first):
        inputs = replace(draw, q=split(draw.q), k=split(draw.k), v=split(draw.v))
        found, right = attend(inputs), attend(draw)
        yield found
        yield right | {"output": split(right["output"])}
        yield found | {"output": _width_first(found["output"])}
        yield found | {"output": _heads_first(found["output"])}
    if draw.q.shape == draw.k.shape == draw.v.shape:
        b, h, s, d = draw.q.shape
        rows = [t.transpose(1, 2) for t in (draw.q, draw.k, draw.v)]  # (B, S, H, d)
        one_after_another = torch.cat([row.reshape(b, s, h * d) for row in rows], -1)
        by_head = torch.stack(rows, 3).reshape(b, s, 3 * h * d)
        q, k, v = one_after_another.view(b, s, h, 3, d).permute(3, 0, 2, 1, 4)
        yield attend(replace(draw, q=q, k=k, v=v))
        q, k, v = by_head.view(b, s, 3, h, d).permute(2, 0, 3, 1, 4)
        yield attend(replace(draw, q=q, k=k, v=v))


_WAYS = [{"pairs": pairs, "base": base} for pairs in (False, True) for base in (1e4, 5e5)]


def _rotary(sign: int) -> Callable[[Draw], Iterator[Found]]:
    return lambda draw: iter([attend(draw, rotary=way, sign=sign) for way in _WAYS])


def _late_scale(draw: Draw) -> Iterator[Found]:
    yield attend(draw, late=draw.scale)


def _base_2(draw: Draw) -> Iterator[Found]:
    found = attend(draw)
    yield found | {"logsumexp": found["logsumexp"] / math.log(2)}


def _documents(ids: Callable[[int], int]) -> Callable[[Draw], Iterator[Found]]:
    def made(draw: Draw) -> Iterator[Found]:
        yield attend(replace(draw, documents=tuple(map(ids, range(draw.k.shape[2])))))

    return made


def _padded(draw: Draw) -> Iterator[Found]:
    batch, k_len = draw.q.shape[0], draw.k.shape[2]
    yield attend(replace(draw, key_lengths=tuple(k_len - 1 - b for b in range(batch))))
    yield attend(draw, seen=visible(draw) & (torch.arange(k_len) >= 2))


def _dropout(draw: Draw) -> Iterator[Found]:
    p = float(draw.random.uniform(0.1, 0.5))
    shape = (*draw.q.shape[:3], draw.k.shape[2])
    kept = torch.from_numpy(draw.random.random(shape) >= p)
    yield attend(draw, dropped=kept.float() / (1 - p))


def _float16(draw: Draw) -> Iterator[Found]:
    """Scores stored in float16, before the scale and after it."""
    q, k = draw.q.half().float(), draw.k[:, draw.shared].half().float()
    stored = torch.einsum("bhid,bhjd->bhij", q, k).half()
    logits = (stored * torch.tensor(draw.scale, dtype=torch.float16)).float()
    hidden = logits.masked_fill(~visible(draw), -math.inf)
    weights = torch.softmax(hidden, -1).nan_to_num(0.0)
    output = weights @ draw.v[:, draw.shared]
    yield {"output": output, "weights": weights, "logsumexp": torch.logsumexp(hidden, -1)}


MADE: dict[str, Callable[[Draw], Iterator[Found]]] = {
    "scale:none": _scaled(lambda d: 1.0),
    "scale:dv": _scaled(lambda d: 1 / math.sqrt(d.v.shape[-1])),
    "scale:model": _scaled(lambda d: 1 / math.sqrt(d.heads * d.q.shape[-1])),
    "scale:dk": _scaled(lambda d: 1 / d.q.shape[-1]),
    "scale:squared": _scaled(lambda d: d.scale**2),
    "scale:fitted": _scaled(lambda d: d.scale * float(d.random.uniform(0.3, 3))),
    "scale:after-softmax": _late_scale,
    "causal:missing": _changed(causal=False, prefix=None),
    "causal:added": _added_causal,
    "offset:top-left": _top_left,
    "offset:bottom-right": _bottom_right,
    "offset:-1": _moved(-1),
    "offset:+1": _moved(1),
    "window:-1": _window(-1),
    "window:+1": _window(1),
    "window:missing": _changed(left=None, right=None, kept=None, step=None),
    "sink-window:missing": _changed(kept=None),
    "window:added": lambda draw: _changed(left=2, right=None if draw.causal else 1)(draw),
    "sink-window:added": _changed(kept=2, left=3),
    "chunk:added": _documents(lambda key: key // 4),
    "segments:added": _documents(lambda key: int(key >= 2) + int(key >= 5)),
    "prefix:added": _changed(prefix=3),
    "dilation:added": _changed(step=2),
    "padding:added": _padded,
    "prefix:missing": _changed(prefix=None),
    "dilation:missing": _changed(step=None),
    "segments:missing": _changed(documents=None),
    "alibi:missing": _changed(sloped=False),
    "alibi:added": _changed(sloped=True),
    "mask:inverted": _inverted,
    "mask:as-boolean": _as_boolean,
    "mask:as-additive": _as_additive,
    "mask:missing": _changed(keep=None, added=None),
    "mask:fill-zero": _twisted({"fill": 0.0}, {"fill": 1e-9}),
    "mask:after-softmax": _twisted({"softmax": "before the mask"}),
    "padding:queries": _on_queries,
    "padding:ignored": _changed(key_lengths=None),
    "softcap:missing": _changed(softcap=None),
    "softcap:added": _changed(softcap=1.5),
    "sinks:added": lambda draw: _changed(sinks=torch.linspace(-1, 1, draw.heads))(draw),
    "softcap:after-mask": _twisted({"cap_late": True}),
    "heads:tiled": _tiled,
    "heads:averaged": _twisted({"averaged": True}),
    "heads:value-head": _value_head,
    "layout:q": _misread("q"),
    "layout:k": _misread("k"),
    "layout:v": _misread("v"),
    "layout:output": _misread("output"),
    "layout:packed": _packed,
    "softmax:axis": _twisted({"softmax": "queries"}, {"softmax": "heads"}),
    "softmax:unnormalised": _twisted({"softmax": "before the mask"}, {"softmax": "exponentials"}),
    "sinks:missing": _changed(sinks=None),
    "sinks:renormalised": _changed(sinks=None),
    "qk:exchanged": _twisted({"exchanged": True}),
    "logsumexp:base2": _base_2,
    "rope:missing": _rotary(1),
    "rope:twice": _rotary(-1),
    "precision:float16": _float16,
    "dropout": _dropout,
}

# What a problem must have in it for the mistake to be possible at all.
NEEDS: dict[str, tuple[str, ...]] = {
    "scale:squared": ("scale",),
    "causal:missing": ("causal",),
    "causal:added": ("acausal",),
    "offset:top-left": ("causal", "cross"),
    "offset:bottom-right": ("causal", "cross"),
    "offset:-1": ("causal",),
    "offset:+1": ("causal",),
    "window:-1": ("window",),
    "window:+1": ("window",),
    "window:missing": ("window",),
    "sink-window:missing": ("window", "kept"),
    "window:added": ("unwindowed", "self"),
    "sink-window:added": ("unwindowed", "causal"),
    "chunk:added": ("self", "open"),
    "segments:added": ("self", "open"),
    "prefix:added": ("causal", "unwindowed"),
    "dilation:added": ("window", "wide"),
    "padding:added": ("unpadded",),
    "prefix:missing": ("causal", "prefix"),
    "dilation:missing": ("window", "step"),
    "segments:missing": ("documents", "self"),
    "alibi:missing": ("sloped",),
    "mask:fill-zero": ("causal",),
    "mask:after-softmax": ("causal",),
    "mask:inverted": ("mask",),
    "mask:as-boolean": ("added",),
    "mask:as-additive": ("mask",),
    "mask:missing": ("mask",),
    "padding:queries": ("padding", "self"),
    "padding:ignored": ("padding",),
    "softcap:missing": ("softcap",),
    "softcap:added": ("uncapped",),
    "sinks:added": ("sinkless",),
    "softcap:after-mask": ("softcap", "causal"),
    "heads:tiled": ("grouped",),
    "heads:averaged": ("heads",),
    "heads:value-head": ("kv-heads",),
    "layout:q": ("heads",),
    "layout:k": ("kv-heads",),
    "layout:v": ("kv-heads",),
    "layout:output": ("heads",),
    "layout:packed": ("heads",),
    "scale:model": ("heads",),
    "softmax:axis": ("heads",),
    "sinks:missing": ("sinks",),
    "sinks:renormalised": ("sinks",),
    "qk:exchanged": ("self",),
    "precision:float16": ("plain",),
}
# Those of which values or the output are no part show in the weights and the log-sum-exp too.
ONLY_OUTPUT = ("heads:value-head", "layout:v", "layout:output")
NOT_LOGSUMEXP = (
    *ONLY_OUTPUT,
    "heads:averaged",
    "softmax:axis",
    "softmax:unnormalised",
    "sinks:missing",
    "sinks:renormalised",
    "sinks:added",
    "scale:after-softmax",
    "mask:after-softmax",
    "dropout",
)
ONLY_LOGSUMEXP = ("logsumexp:base2",)


def draw_problem(name: str, seed: int) -> Draw:
    """A random problem in which the mistake can be made."""
    random = np.random.default_rng(seed)
    needs = NEEDS.get(name, ())
    likely = {"causal": 0.4, "window": 0.2, "mask": 0.15, "padding": 0.3, "softcap": 0.2}
    likely |= {"sinks": 0.2, "cross": 0.4, "added": 0.1}
    has = {what for what, share in likely.items() if random.random() < share} | set(needs)
    if "self" in has:
        has.discard("cross")
    if "acausal" in has:
        has.discard("causal")
    if "added" in needs:
        has.discard("mask")
    has -= {"window"} if "unwindowed" in has else set()
    has -= {"window", "mask", "added"} if "open" in has else set()
    has -= {"softcap"} if "uncapped" in has else set()
    has -= {"sinks"} if "sinkless" in has else set()
    has -= {"padding"} if "unpadded" in has else set()
    if "plain" in has:
        has -= {"softcap", "sinks", "mask", "added"}
    return _draw(random, has)


def _draw(random: np.random.Generator, has: set[str]) -> Draw:
    batch = int(random.integers(1, 4))
    kv_heads, group = int(random.integers(1, 4)), int(random.integers(1, 4))
    if has & {"kv-heads", "grouped"}:
        kv_heads = int(random.integers(2, 4))
    if "grouped" in has or ("heads" in has and kv_heads == 1):
        group = int(random.integers(2, 4))
    q_len = int(random.integers(6, 18))
    k_len = q_len + (int(random.integers(2, 7)) if "cross" in has else 0)
    dk, dv = int(random.choice([8, 12, 16, 24])), int(random.choice([5, 10, 18, 32]))
    width = np.float32
    if "plain" in has:
        dk, width = 64, np.float16

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal(shape).astype(width).astype(np.float32))

    draw = Draw(
        q=normal(batch, kv_heads * group, q_len, dk),
        k=normal(batch, kv_heads, k_len, dk),
        v=normal(batch, kv_heads, k_len, dv),
        scale=float(random.uniform(0.3, 0.8)) if "scale" in has else 1 / math.sqrt(dk),
        random=random,
    )
    return _with_features(draw, random, has)


def _with_features(draw: Draw, random: np.random.Generator, has: set[str]) -> Draw:
    batch, heads, q_len, _ = draw.q.shape
    k_len = draw.k.shape[2]
    changes: dict[str, Any] = {}
    if "causal" in has:
        changes["causal"] = True
    if "window" in has:
        changes["left"] = int(random.integers(1, max(2, q_len // 2)))
        if "causal" not in has:
            changes["right"] = int(random.integers(1, max(2, q_len // 2)))
        if "kept" in has:
            changes["kept"] = int(random.integers(1, 3))
        if has & {"step", "wide"}:
            changes |= {"left": 4, "step": 2 if "step" in has else None}
    if "prefix" in has:
        changes["prefix"] = int(random.integers(2, 5))
    if "documents" in has:
        first = int(random.integers(2, k_len - 1))
        changes["documents"] = (0,) * first + (1,) * (k_len - first)
    changes["sloped"] = "sloped" in has
    if k_len != q_len:
        changes["offset"] = int(random.choice([0, k_len - q_len]))
    if "padding" in has:
        lengths = random.integers(max(1, k_len // 2), k_len, size=batch)
        changes["key_lengths"] = tuple(int(length) for length in lengths)
    if "mask" in has or "added" in has:
        shape = (int(random.choice([1, batch])), int(random.choice([1, heads])), q_len, k_len)
        keep = torch.from_numpy(random.random(shape) < 0.7)
        if "mask" in has:
            changes |= {"keep": keep, "drop": bool(random.random() < 0.3)}
        else:
            normal = torch.from_numpy(random.standard_normal(shape).astype(np.float32))
            changes["added"] = normal.masked_fill(~keep, -math.inf)
    if "softcap" in has:
        changes["softcap"] = float(random.uniform(0.7, 2))
    if "sinks" in has:
        changes["sinks"] = torch.from_numpy(random.standard_normal(heads))
    return replace(draw, **changes)


def offset_fits(name: str, draw: Draw) -> Draw:
    """The draw declared at the other corner, for the mistake of taking the wrong one."""
    corner = draw.k.shape[2] - draw.q.shape[2]
    if name == "offset:top-left":
        return replace(draw, offset=corner)
    return replace(draw, offset=0) if name == "offset:bottom-right" else draw
