"""Two attentions side by side: every column is what materialised weights in float64 say."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from plain_attention import Array, PlainAttention
from test_differential import random_problem

import attncli
from attncli.analysis.compare_columns import HeadComparison, RowComparison
from attncli.results import Compared

Rows = dict[str, Array]


def changed(problem: PlainAttention, number: int) -> PlainAttention:
    """Another problem of the same sizes: other keys, and options of its own."""
    rng = np.random.default_rng(number + 10**6)
    given = dict(problem.given)
    size = [0.0, 1e-6, 0.1, 1.0][number % 4]
    for role in ("q", "k", "v"):
        noise = rng.standard_normal(given[role].shape) * size
        given[role] = given[role] + noise.astype(given[role].dtype)
    options = dict(problem.options)
    if number % 3 == 0:
        options = {name: value for name, value in options.items() if rng.random() < 0.7}
    if number % 5 == 0 and problem.positions is not None:
        options["left_window"] = int(rng.integers(0, 4))
    if number % 7 == 0:
        options["sinks"] = (0.5,) * problem.heads
    if {"left_window", "right_window"}.isdisjoint(options):
        options.pop("dilation", None)
    for name, beside in (("sink_window", "left_window"), ("query_segments", "segments")):
        if beside not in options:
            options.pop(name, None)
    if "attn_mask" not in options:
        options.pop("hide_below", None)
        options.pop("mask_true", None)
    elif options["attn_mask"].dtype == bool and "mask_true" in problem.options:
        options["mask_true"] = "drop"
    if "causal" not in options:
        options.pop("prefix", None)
    if "query_offset" in problem.options:
        options["query_offset"] = problem.options["query_offset"]
    if "attn_mask" in options and options["attn_mask"].dtype.kind == "f":
        options.pop("mask_true", None)
    return PlainAttention(given["q"], given["k"], given["v"], options)


def side(problem: PlainAttention) -> dict[str, Any]:
    return problem.given | problem.options


def told(a: PlainAttention, b: PlainAttention, batch: int, head: int) -> Rows:
    """Every column of rows, of the queries that are real on both sides."""
    real = a.real_queries[batch] & b.real_queries[batch]
    with np.errstate(all="ignore"):
        seen = [one.visible[batch, head][real] for one in (a, b)]
        weights = [
            np.concatenate(
                [one.stages["weights"][batch, head][real], one.sink_weights[batch, head][real]], -1
            )
            for one in (a, b)
        ]
        empty = [~one.any(-1) for one in seen]
        p, q = (each.astype(np.longdouble) for each in weights)  # halves of the least are not 0
        # The sink is one more outcome, seen by a side that has one.
        sinks = [
            np.full((len(p), 1), "sinks" in one.options) & ~none[:, None]
            for one, none in zip((a, b), empty, strict=True)
        ]
        visible = [np.concatenate(pair, -1) for pair in zip(seen, sinks, strict=True)]
        logs = [_logs(one, batch, head, real) for one in (a, b)]
        hidden = visible[0] & ~visible[1]
        kl = np.where(p > 0, p * (logs[0] - logs[1]), 0.0)
        kl = np.where(hidden.any(-1), math.inf, np.where(hidden, 0.0, kl).sum(-1))
        middle = (p + q) / 2
        parts = [np.where(w > 0, w * (np.log(w) - np.log(middle)), 0.0) for w in (p, q)]
        both = ~empty[0] & ~empty[1]
        found = {
            "query": np.flatnonzero(real),
            "kl_nats": np.where(empty[0], math.nan, np.where(empty[1], math.inf, kl)),
            "js_nats": np.where(both, (parts[0] + parts[1]).sum(-1) / 2, math.nan),
            "tv": np.where(both, np.abs(p - q).sum(-1) / 2, math.nan),
            "mass_lost": np.where(
                empty[0], math.nan, np.where(seen[0] & ~seen[1], p[:, :-1], 0.0).sum(-1)
            ),
        }
        outputs = [one.stages["output"][batch, head][real] for one in (a, b)]
        lengths = [np.linalg.norm(one, axis=-1) for one in outputs]
        off = np.linalg.norm(outputs[1] - outputs[0], axis=-1)
        found["output_rel_error"] = np.where(off == 0, 0.0, off / lengths[0])
        found["output_cosine"] = (outputs[0] * outputs[1]).sum(-1) / lengths[0] / lengths[1]
        found["both"] = both
        found["total"] = np.linalg.norm(outputs[1] - outputs[0]) / np.linalg.norm(outputs[0])
    return found


def _logs(one: PlainAttention, batch: int, head: int, real: Array) -> Array:
    """ln of the weights, also of those that are 0 in float64; of the sink last."""
    logits = one.stages["masked"][batch, head][real]
    sinks = one.options.get("sinks", [-math.inf] * one.heads)[head]
    logits = np.concatenate([logits, np.full((len(logits), 1), sinks)], -1)
    most = logits.max(-1, keepdims=True, initial=-math.inf)
    shifted = logits - most
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def assert_close(found: Any, wanted: Array, rtol: float, atol: float, name: str) -> None:
    np.testing.assert_allclose(np.asarray(found), wanted, rtol, atol, equal_nan=True, err_msg=name)


def assert_head(
    head: HeadComparison, rows: RowComparison, wanted: Rows, rtol: float, atol: float
) -> None:
    """One head's record and rows; `atol` is what differences of weights are rounded by."""
    assert rows.query.tolist() == wanted["query"].tolist()
    for name in ("kl_nats", "js_nats", "tv", "mass_lost"):
        assert_close(getattr(rows, name), wanted[name], rtol, atol, name)
    both, infinite = wanted["both"], np.isposinf(wanted["kl_nats"])
    assert head.infinite_kl_rows == infinite.sum()
    means = {
        "kl_nats_mean": wanted["kl_nats"][both & ~infinite],
        "js_nats_mean": wanted["js_nats"][both],
        "tv_mean": wanted["tv"][both],
        "mass_lost_mean": wanted["mass_lost"][~np.isnan(wanted["mass_lost"])],
    }
    for name, values in means.items():
        value = getattr(head, name)
        assert (value is None) == (len(values) == 0), name
        if value is not None:
            assert_close(value, values.mean(), rtol, atol, name)
            most = name.replace("mean", "max")
            if hasattr(head, most):
                assert_close(getattr(head, most), values.max(), rtol, atol, most)
    if head.output_rel_error is not None and np.isfinite(wanted["total"]):
        assert_close(head.output_rel_error, wanted["total"], rtol, atol, "output_rel_error")
    if head.output_cosine_min is not None:
        lowest = np.nanmin(wanted["output_cosine"])
        assert_close(head.output_cosine_min, lowest, rtol, atol, "output_cosine_min")
    if head.kl_nats_max is not None:
        assert head.kl_nats_max >= 0
    if head.js_nats_max is not None and head.tv_max is not None:
        assert 0 <= head.js_nats_max <= math.log(2)
        assert 0 <= head.tv_max <= 1


@pytest.mark.parametrize("part", range(4))
def test_every_column_is_what_materialised_weights_say(part: int) -> None:
    compared = 0
    for number in range(part, 60, 4):
        a = random_problem(number)
        if any(not np.isfinite(one).all() for one in a.given.values()):
            continue
        b = changed(a, number)
        try:
            compared += _assert_all(a, b)
        except BaseException as error:
            error.add_note(f"problem {number}: {a.q.shape} {a.options} {b.options}")
            raise
    assert compared > 20


def _assert_all(a: PlainAttention, b: PlainAttention) -> int:
    for precision, rtol, atol in (("float64", 1e-12, 1e-14), ("float32", 1e-4, 2e-6)):
        found = attncli.compare(side(a), side(b), per_row=True, precision=precision)
        assert found.rows is not None
        for head, rows in zip(found.heads, found.rows, strict=True):
            wanted = told(a, b, head.batch, head.head)
            assert_head(head, rows, wanted, rtol, atol)
    return len(found.heads)


def test_of_itself_nothing_differs() -> None:
    for number in range(0, 60, 3):
        a = random_problem(number)
        if any(not np.isfinite(one).all() for one in a.given.values()):
            continue
        for precision in ("float32", "float64"):
            assert_nothing(attncli.compare(side(a), side(a), per_row=True, precision=precision))


def assert_nothing(found: Compared) -> None:
    for head in found.heads:
        for name in ("kl_nats_max", "js_nats_max", "tv_max", "mass_lost_mean", "output_rel_error"):
            assert getattr(head, name) in (0.0, None), name
        assert head.entropy_nats_change in (0.0, None)
        assert head.top_key_agreement in (1.0, None)
        assert head.output_cosine_min in (1.0, None)
        assert head.infinite_kl_rows == 0


def test_a_result_shows_itself() -> None:
    rng = np.random.default_rng(0)
    a = {role: rng.standard_normal((1, 2, 6, 4)) for role in "qkv"}
    found = attncli.compare(a, what_if=["k-dtype=int4", "k-dtype=bfloat16"])
    assert repr(found).startswith("Compared(4 heads, k-dtype=int4, k-dtype=bfloat16; largest TV ")
    assert "k-dtype=bfloat16" in found._repr_html_()
    assert found.column("tv_mean").shape == (2, 1, 2)
    with pytest.raises(attncli.UsageError, match="expected one of queries"):
        found.column("label_a")
    assert found.plot().axes


@pytest.mark.parametrize("both", [True, False])
def test_one_of_b_and_what_if_is_needed(both: bool) -> None:
    a = {"q": [[1.0]], "k": [[1.0]]}
    with pytest.raises(attncli.UsageError, match="expected one of b and what_if"):
        attncli.compare(a, a if both else None, what_if="scale=1" if both else None)


def test_rows_of_nan_agree_in_nothing() -> None:
    rng = np.random.default_rng(5)
    a: dict[str, Any] = {name: rng.standard_normal((1, 1, 6, 4)) for name in "qk"}
    broken = a["q"].copy()
    broken[0, 0, 2, 1] = math.nan
    found = attncli.compare(a, {"q": broken, "k": a["k"]}, allow_nonfinite=True).heads[0]
    assert found.nonfinite_rows == 1
    assert found.top_key_agreement is not None
    assert math.isnan(found.top_key_agreement)
    assert found.kl_max_query is None
