"""What the scripts of a page read: numbers of heads as lists, maps as base64, the page's words."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncli import __version__
from attncli.attention.maps import HIDDEN, Encoding, Plan
from attncli.attention.qkv import EXAMPLE_K, EXAMPLE_Q, EXAMPLE_V
from attncli.attention.streaming.head_record import Label
from attncli.report.page.contents import Page, PageGroup
from attncli.report.palette import Theme, diverging, hexes, sequential
from attncli.report.words import Words

Record = dict[str, Any]

SCHEMA = 1
# Of the records of heads what the pictures use; the table has the rest.
DRAWN = (
    "entropy_bits_mean",
    "entropy_normalized_mean",
    "effective_keys_mean",
    "max_weight_mean",
    "max_logit",
    "sink_mass_mean",
    "distance_mean",
)
CURVES = (
    "dk",
    "var",
    "var_ci95_low",
    "var_ci95_high",
    "var_theory",
    "scaled_var",
    "entropy_bits_unscaled",
    "entropy_bits_scaled",
    "softmax_grad_unscaled",
    "softmax_grad_scaled",
)
# Tokens of a bin that are named, and characters of each.
TOKENS, TOKEN_LENGTH = 12, 60
# Of the seeds 0 … 399 the one whose draw has a variance nearest to d_k throughout, so that a
# slider over d_k shows what is typical; it is off by a factor of 2.04 at most.
WALK_SEED, WALK_KEYS, WALK_WIDTH = 226, 8, 1024


def data_text(page: Page, words: Words) -> str:
    """The numbers and words as JSON that no parser of HTML takes for a tag."""
    data = _data(page, words)
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _data(page: Page, words: Words) -> dict[str, Any]:
    tokens: list[list[list[str]]] = []
    groups = [_group(page, number, name, tokens) for number, name in enumerate(page.names)]
    told = {"js", "label"}
    return {
        "schema": SCHEMA,
        "version": __version__,
        "lang": str(page.language),
        "strings": {k: text for k, text in words.table.items() if k.partition(".")[0] in told},
        "labels": [str(label) for label in Label],
        "heads": _heads(page),
        "start": page.start,
        "sink_keys": page.sink_keys,
        "groups": groups,
        "tokens": tokens,
        "ramps": {
            "light": hexes(sequential(Theme.LIGHT)),
            "dark": hexes(sequential(Theme.DARK)),
            "diverging_light": hexes(diverging(Theme.LIGHT)),
            "diverging_dark": hexes(diverging(Theme.DARK)),
        },
        "example": {"q": EXAMPLE_Q, "k": EXAMPLE_K, "v": EXAMPLE_V, "dk": len(EXAMPLE_Q[0])},
        "walk": _floats(walk()),
        "curves": {key: [_number(record[key]) for record in page.curves] for key in CURVES},
        "commands": asdict(page.commands),
    }


def _heads(page: Page) -> dict[str, list[Any]]:
    """Numbers of all heads, column by column."""
    order = {str(label): number for number, label in enumerate(Label)}
    records = page.records
    columns: dict[str, list[Any]] = {
        "group": [number for number, group in enumerate(page.groups) for _ in group.records],
        "head": [record["head"] for record in records],
        "label": [order.get(str(record["label"])) for record in records],
        "label_score": [_number(record["label_score"]) for record in records],
        "nearest": [order.get(str(record["nearest_label"])) for record in records],
        "nearest_score": [
            None if record["nearest_label"] is None else _number(1 - record["label_score"])
            for record in records
        ],
    }
    return columns | {key: [_number(record[key]) for record in records] for key in DRAWN}


def _group(page: Page, number: int, name: str, tokens: list[list[list[str]]]) -> dict[str, Any]:
    group = page.groups[number]
    problem, maps, plan = group.problem, group.maps, page.plan
    first = sum(len(other.records) for other in page.groups[:number])
    offset = problem.mask.offset
    shift = None if offset is None else int(offset[group.batch if len(offset) > 1 else 0])
    scale = problem.scale if problem.given is None else None
    q_len, k_len = group.lengths
    alike = bool((maps.keys == maps.keys[0]).all())
    found: dict[str, Any] = {
        "name": name or group.name or group.source,
        "short": page.short_names[number],
        "source": group.source,
        "batch": group.batch,
        "batches": problem.sizes.batch,
        "first": first,
        "heads": len(group.records),
        "kv_heads": problem.kv_heads,
        "q_len": q_len,
        "k_len": k_len,
        "dk": problem.dk if problem.given is None else None,
        "dv": problem.dv,
        "scale": list(scale) if isinstance(scale, tuple) else scale,
        "mask": group.mask,
        "edges": {"q": maps.bins.queries.tolist(), "k": maps.bins.keys.tolist()},
        "offset": shift,
        "tokens": {
            "q": _tokens(group.tokens, maps.bins.queries, shift, tokens),
            "k": _tokens(group.tokens, maps.bins.keys, 0, tokens),
        },
        "maps": _maps(group, plan),
        "keys": _floats(maps.keys[:1] if alike else maps.keys),
        "rows": _floats(maps.entropy[_kept(group)]),
        "mass": _floats(maps.mass[_kept(group)]),
        "pooled": maps.pooled,
        "commands": {"compute": group.compute, "entropy": group.entropy},
    }
    if plan.thumbnail_bins is not None:
        bins, mean = maps.coarse(plan.thumbnail_bins)
        edges = {"q": bins.queries.tolist(), "k": bins.keys.tolist()}
        encoding = Encoding.U2SQRT
        found["thumbs"] = {"edges": edges, "encoding": encoding, "mean": _packed(mean, encoding)}
    elif maps.corner is not None:
        found["corner"] = _floats(maps.corner)
    return found


def _kept(group: PageGroup) -> Any:
    """An index of the heads of which maps are kept."""
    return slice(None) if group.detailed is None else list(group.detailed)


def _maps(group: PageGroup, plan: Plan) -> dict[str, Any]:
    planes = {"mean": group.maps.mean[_kept(group)]}
    if plan.with_largest and group.maps.pooled:
        planes["max"] = group.maps.largest[_kept(group)]
    packed = {name: _packed(plane, plan.encoding) for name, plane in planes.items()}
    heads = None if group.detailed is None else list(group.detailed)
    return {"encoding": str(plan.encoding), "heads": heads} | packed


def _tokens(
    tokens: Sequence[str] | None,
    edges: NDArray[np.int64],
    shift: int | None,
    known: list[list[list[str]]],
) -> int | None:
    """Where in `known` the first tokens of each bin stand; None for none."""
    if tokens is None or shift is None or shift < 0 or int(edges[-1]) + shift > len(tokens):
        return None
    bins = [
        [text[:TOKEN_LENGTH] for text in tokens[a + shift : min(b, a + TOKENS) + shift]]
        for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    ]
    if bins not in known:
        known.append(bins)
    return known.index(bins)


@cache
def walk() -> NDArray[np.float32]:
    """Products of one query with eight keys over their first 1 … 1024 components, (8, 1024)."""
    return walk_of(WALK_SEED).astype(np.float32)


def walk_of(seed: int) -> NDArray[np.float64]:
    """The same of another draw."""
    draw = np.random.default_rng(seed).standard_normal((WALK_KEYS + 1, WALK_WIDTH))
    return np.cumsum(draw[:1] * draw[1:], axis=1)


def _packed(weights: NDArray[np.float32], encoding: str) -> str:
    """Weights as base64; `HIDDEN` and NaN have words of their own where there are 16 bits."""
    if encoding == Encoding.F4:
        return _floats(weights)
    with np.errstate(invalid="ignore"):
        words = np.rint(np.sqrt(weights.clip(0, 1)) * 65533)
    words = np.where(np.isnan(weights), 65534, np.where(weights == HIDDEN, 65535, words))
    return base64.b64encode(words.astype("<u2").tobytes()).decode()


def _floats(values: NDArray[Any]) -> str:
    return base64.b64encode(np.asarray(values, "<f4").tobytes()).decode()


def _number(value: Any) -> Any:
    """A number with six significant digits; None for what is none."""
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None
