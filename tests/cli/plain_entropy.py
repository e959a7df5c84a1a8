"""Every column of the entropy records, written out cell by cell in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from attncli.attention import steps
from attncli.attention.masks.build import build_mask
from attncli.attention.options import AttentionOptions
from attncli.attention.sizes import Sizes

Record = dict[str, Any]


def plain_rows(
    q: torch.Tensor, k: torch.Tensor, options: AttentionOptions, batch: int, head: int
) -> list[Record]:
    """Every column of the rows of one head, in float64, cell by cell."""
    sizes = Sizes(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    mask = build_mask(options, sizes).moved(torch.as_tensor)
    b, h = slice(batch, batch + 1), slice(head, head + 1)
    every, keys = slice(0, sizes.q_len), slice(0, sizes.k_len)
    visible = mask.visible(b, h, every, keys).expand(1, 1, sizes.q_len, sizes.k_len)[0, 0]
    bias = mask.bias(b, h, every, keys)
    shared = head // (sizes.heads // k.shape[1])
    scale = 1 / math.sqrt(q.shape[-1]) if options.scale is None else options.scale
    if isinstance(scale, tuple):
        scale = scale[head]
    found = steps.logits(
        q[batch, head].double() @ k[batch, shared].double().T,
        scale=scale,
        temperature=options.temperature,
        softcap=options.softcap,
        visible=visible,
        bias=None if bias is None else bias[0, 0],
    )
    sink = None if options.sinks is None else torch.tensor(options.sinks[head])
    soft = steps.softmax(found.masked, visible, sink)
    lengths = mask.query_lengths
    real = int(lengths[batch if len(lengths) > 1 else 0])
    offset = None if mask.offset is None else int(mask.offset[batch if len(mask.offset) > 1 else 0])
    rows = zip(soft.weights, found.masked, visible, soft.sink, strict=True)
    made = [plain_row(i, *row, offset, sink is not None) for i, row in enumerate(rows) if i < real]
    return [{"batch": batch, "head": head} | row for row in made]


def plain_row(
    query: int,
    weights: torch.Tensor,
    masked: torch.Tensor,
    visible: torch.Tensor,
    sink: torch.Tensor,
    offset: int | None,
    has_sink: bool,
) -> Record:
    seen = visible.nonzero()[:, 0].tolist()
    names = ("entropy_nats", "entropy_bits", "entropy_normalized", "effective_keys", "max_weight")
    names += ("top_key", "max_logit", "logsumexp", "sink_mass", "distance", "sink_weight")
    record: Record = {"query": query, "keys": len(seen), "weights": weights.tolist()}
    record |= {"nonfinite": False, **dict.fromkeys(names)}
    if not seen:
        return record
    outcomes = [float(weights[j]) for j in seen] + ([float(sink)] if has_sink else [])
    nats = -math.fsum(w * math.log(w) for w in outcomes if w > 0)
    logits = [float(masked[j]) for j in seen]
    top = max(range(len(seen)), key=logits.__getitem__)
    record |= {
        "entropy_nats": nats,
        "entropy_bits": nats / math.log(2),
        "entropy_normalized": nats / math.log(len(outcomes)) if len(outcomes) > 1 else None,
        "effective_keys": math.exp(nats),
        "max_weight": max(float(weights[j]) for j in seen),
        "top_key": seen[top],
        "max_logit": logits[top],
        "logsumexp": float(torch.logsumexp(torch.tensor(logits, dtype=torch.float64), 0)),
        "sink_mass": float(weights[0]),
        "sink_weight": float(sink) if has_sink else None,
    }
    if offset is not None:
        position = query + offset
        record["distance"] = math.fsum(float(weights[j]) * abs(position - j) for j in seen)
    return record


def plain_head(rows: list[Record]) -> Record:
    """The head's record from its rows."""
    some = [row for row in rows if row["keys"]]

    def mean(name: str) -> float | None:
        values = [row[name] for row in some if row[name] is not None]
        return math.fsum(values) / len(values) if values else None

    entropies = [row["entropy_nats"] for row in some]
    top = max(some, key=lambda row: (row["max_logit"], -row["query"]), default=None)
    return {
        "queries": len(rows),
        "empty_rows": len(rows) - len(some),
        "keys_mean": mean("keys"),
        "entropy_nats_mean": mean("entropy_nats"),
        "entropy_nats_min": min(entropies, default=None),
        "entropy_nats_max": max(entropies, default=None),
        "entropy_nats_std": float(np.std(entropies)) if some else None,
        "entropy_bits_mean": mean("entropy_bits"),
        "entropy_normalized_mean": mean("entropy_normalized"),
        "effective_keys_mean": mean("effective_keys"),
        "max_weight_mean": mean("max_weight"),
        "max_weight_max": max((row["max_weight"] for row in some), default=None),
        "max_logit": None if top is None else top["max_logit"],
        "max_logit_query": None if top is None else top["query"],
        "max_logit_key": None if top is None else top["top_key"],
        "logsumexp_mean": mean("logsumexp"),
        "sink_mass_mean": mean("sink_mass"),
        "distance_mean": mean("distance"),
        "sink_weight_mean": mean("sink_weight"),
        "nonfinite_rows": 0,
    }


def assert_close(found: Record, expected: Record) -> None:
    """Every expected value is there: None, whole numbers and words exactly."""
    for name, value in expected.items():
        if isinstance(value, float):
            assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-10), name
        else:
            assert found[name] == value, name
