"""Rows of NaN and infinities, and numbers near the ends of a dtype, as the steps have them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from attncli.attention import steps
from attncli.attention.options import AttentionOptions, Precision
from attncli.attention.problem import Problem, make_problem
from attncli.attention.streaming.heads import head_statistics, score_labels
from attncli.attention.streaming.stream import HeadRows, Wanted, stream_rows

INF, NAN = math.inf, math.nan
LOGITS = [
    [NAN],
    [-INF],
    [INF],
    [-INF, -INF],
    [-INF, NAN],
    [NAN, 1.0],
    [-INF, 1.0, 0.0],
    [INF, 1.0],
    [1.0, -INF, 2.0],
]


def column(values: list[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """(S, 1)."""
    return torch.tensor(values, dtype=dtype)[:, None]


def broken(q: torch.Tensor, k: torch.Tensor, **options: object) -> Problem:
    chosen = AttentionOptions(**{"scale": 1.0, **options})  # type: ignore[arg-type]
    dtype = Precision(str(q.dtype).removeprefix("torch."))
    return make_problem(q, k, None, chosen, precision=dtype, allow_nonfinite=True)


def only_head(problem: Problem, wanted: Wanted | None = None) -> HeadRows:
    (rows,) = stream_rows(problem, wanted)
    return rows


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sink", [None, 0.5])
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("logits", LOGITS)
def test_rows_of_nan_and_infinities_are_those_of_the_steps(
    logits: list[float], hidden: bool, sink: float | None, dtype: torch.dtype
) -> None:
    """With a key before them that is hidden, or not."""
    keys = column([7.0, *logits] if hidden else logits, dtype)
    keep = torch.ones(len(keys), dtype=torch.bool)
    keep[0] = not hidden
    sinks = None if sink is None else np.array([sink])
    problem = broken(
        column([1.0], dtype), keys, attn_mask=keep.numpy(), sinks=sinks, query_offset=0
    )
    rows = only_head(problem, Wanted(top_key=True, per_key=True))
    masked = torch.where(keep, keys[:, 0], -INF)
    soft = steps.softmax(masked, keep, None if sink is None else torch.tensor(sink, dtype=dtype))
    weights = soft.weights.double()
    whole = weights if sink is None else torch.cat([weights, soft.sink.double()[None]])
    entropy = torch.special.entr(whole).sum()
    tell = {"rtol": 0, "atol": 1e-6, "equal_nan": True, "check_dtype": False}
    torch.testing.assert_close(rows.entropy_nats[0], entropy, **tell)
    torch.testing.assert_close(rows.max_weight[0], weights.max(), **tell)
    assert rows.sink_mass is not None
    torch.testing.assert_close(rows.sink_mass[0], weights[0], **tell)
    assert rows.distance is not None
    torch.testing.assert_close(rows.distance[0], weights @ torch.arange(len(keys)).double(), **tell)
    assert rows.received is not None
    torch.testing.assert_close(rows.received.mass, weights, **tell)
    assert rows.received.queries.tolist() == keep.int().tolist()
    if sink is not None:
        assert rows.sink_weight is not None
        torch.testing.assert_close(rows.sink_weight[0], soft.sink, **tell)


@pytest.mark.parametrize(
    ("logits", "max_logit", "top_key", "logsumexp"),
    [
        ([NAN], NAN, -1, NAN),
        ([NAN, NAN], NAN, -1, NAN),
        ([-INF], -INF, -1, -INF),
        ([-INF, NAN], NAN, -1, NAN),
        ([NAN, 1.0], 1.0, 1, NAN),
        ([-INF, 1.0], 1.0, 1, 1.0),
    ],
)
def test_the_largest_logit_of_such_rows(
    logits: list[float], max_logit: float, top_key: int, logsumexp: float
) -> None:
    rows = only_head(broken(column([1.0]), column(logits)), Wanted(top_key=True))
    assert rows.top_key is not None
    assert rows.top_key.tolist() == [top_key]
    found = [float(rows.max_logit[0]), float(rows.logsumexp[0])]
    assert found == pytest.approx([max_logit, logsumexp], nan_ok=True)
    assert rows.max_logit_key == (None if top_key < 0 else top_key)
    assert bool(rows.nonfinite[0])


def test_a_key_takes_no_nan_from_a_query_that_does_not_see_it() -> None:
    problem = broken(column([1, NAN, 2, 1]), column([1, 2, 3, 0.5]), causal=True, query_offset=(2,))
    assert only_head(problem, Wanted(per_key=True)).received is not None
    problem = broken(column([1, NAN, 2, 1]), column([1, 2, 3, 0.5]), causal=True)
    received = only_head(problem, Wanted(per_key=True)).received
    assert received is not None
    assert received.mass.tolist() == pytest.approx(
        [NAN, NAN, 1.497609, 0.051779], 1e-5, nan_ok=True
    )
    assert received.queries.tolist() == [4, 3, 2, 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}, {"alibi_slopes": np.zeros(1)}])
def test_ties_go_to_the_lowest_key_and_share_evenly(
    options: dict[str, object], dtype: torch.dtype
) -> None:
    """Both products are 15, and the scale must not tell them apart."""
    q = torch.tensor([[5.0, 3, 0]], dtype=dtype)
    k = torch.tensor([[3.0, 0, 0], [0, 5, 0]], dtype=dtype)
    problem = broken(q, k, scale=None, query_offset=0, **options)
    rows = only_head(problem, Wanted(top_key=True))
    assert rows.top_key is not None
    assert rows.top_key.tolist() == [0]
    assert rows.max_weight.tolist() == [0.5]


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_tiny_soft_cap_makes_rows_uniform(precision: str) -> None:
    tensor = column([1.0, 0.0, -3.0, 4.0])
    options = AttentionOptions(softcap=1e-320)
    problem = make_problem(tensor, tensor, None, options, precision=Precision(precision))
    assert only_head(problem).entropy_nats.tolist() == pytest.approx([math.log(4)] * 4)


def test_scores_beyond_float32_are_shrunk_before_they_are_summed() -> None:
    """Scores of 1e39 with a scale that makes ordinary logits of them."""
    q, k = column([1e20, 2e20], torch.float32), column([1e19, 3e19], torch.float32)
    rows = only_head(broken(q, k, scale=1e-39), Wanted(per_key=True))
    exact = only_head(broken(q.double(), k.double(), scale=1e-39))
    torch.testing.assert_close(rows.entropy_nats, exact.entropy_nats, rtol=1e-5, atol=0)


def test_a_score_of_a_label_has_all_its_digits() -> None:
    """Of 3 keys the first gets 0.9: (0.9 − 1/3) / (1 − 1/3) = 0.85."""
    keys = column([math.log(18.0), 0.0, 0.0])
    found = head_statistics(only_head(broken(column([1.0]), keys)))
    assert found.label_score == pytest.approx(0.85, rel=1e-14)


def test_a_visible_key_at_minus_infinity_is_one_of_those_looked_at() -> None:
    """Both keys of the row are near it, so that even attention would put everything there."""
    rows = only_head(broken(column([1.0, 1.0]), column([1.0, -INF]), query_offset=0))
    assert rows.shares.local is not None
    assert rows.shares.local.seen.tolist() == [2, 2]
    assert rows.shares.local.weight.tolist() == [1.0, 1.0]
    assert score_labels(rows).local is None
