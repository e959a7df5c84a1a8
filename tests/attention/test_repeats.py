"""Heads that look for earlier occurrences of their token, or for what came after these."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import attncli
from attncli.attention.options import AttentionOptions
from attncli.attention.problem import make_problem
from attncli.attention.streaming import repeats
from attncli.attention.streaming.stream import Wanted, stream_rows
from attncli.errors import UsageError

NAMES = ("induction", "duplicate_token")


def repeated(length: int = 32, seed: int = 0) -> np.ndarray:
    """Random tokens, twice."""
    once = np.random.default_rng(seed).permutation(1000)[:length]
    return np.concatenate([once, once])


def cells_of(tokens: np.ndarray, places: np.ndarray) -> dict[str, np.ndarray]:
    """Which cells (S_q, S_k) each score is about, as the words have it, one by one."""
    found = {name: np.zeros((len(places), len(tokens)), bool) for name in NAMES}
    for row, place in enumerate(places):
        for key in range(min(place, len(tokens))):
            if 0 <= place < len(tokens) and tokens[key] == tokens[place]:
                found["duplicate_token"][row, key] = True
                if key + 1 < place:
                    found["induction"][row, key + 1] = True
    return found


def counted(
    tokens: np.ndarray, places: np.ndarray, weights: np.ndarray, seen: np.ndarray, more: int
) -> dict[str, float | None]:
    """The scores from weights and visibility, both (S_q, S_k), and so many outcomes beside."""
    scores: dict[str, float | None] = {}
    for name, cells in cells_of(tokens, places).items():
        even = (cells & seen).sum(1) / np.maximum(seen.sum(1) + more, 1)
        counts = (even > 0) & (even < 1)
        chance = even[counts].mean() if counts.any() else 0.0
        got = (weights * cells).sum(1)[counts].mean() if counts.any() else 0.0
        enough = counts.sum() >= 8
        scores[name] = max(0.0, (got - chance) / (1 - chance)) if enough else None
    return scores


def built(tokens: np.ndarray, name: str) -> attncli.Entropies:
    """A head that gives all it can to the cells of one score, and of other rows to the first."""
    logits = 40.0 * cells_of(tokens, np.arange(len(tokens)))[name]
    logits[:, 0] += 20.0
    keys = torch.eye(len(tokens), dtype=torch.float64)
    return attncli.entropy(logits, keys, scale=1.0, causal=True, labels=list(map(str, tokens)))


@pytest.mark.parametrize("name", NAMES)
def test_built_heads_get_their_label(name: str) -> None:
    (head,) = built(repeated(), name).heads
    assert head.label == name.replace("_", "-")
    assert getattr(head.scores, name) == pytest.approx(1.0, abs=1e-3)
    (other,) = set(NAMES) - {name}
    assert getattr(head.scores, other) == pytest.approx(0.0, abs=1e-3)


def test_other_heads_score_nothing() -> None:
    tokens = repeated()
    size = len(tokens)
    flat, previous = torch.zeros(size, size), 40.0 * torch.diag(torch.ones(size - 1), -1)
    q = torch.stack([flat, previous])[None].double()
    k = torch.eye(size, dtype=torch.float64).expand(1, 2, -1, -1)
    found = attncli.entropy(q, k, scale=1.0, causal=True, labels=list(map(str, tokens)))
    for head, label in zip(found.heads, ("uniform", "previous-token"), strict=True):
        assert head.label == label
        assert (head.scores.induction, head.scores.duplicate_token) == pytest.approx((0, 0))


CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "all keys": {"query_offset": 0},
    "window": {"causal": True, "left_window": 30},
    "soft cap": {"causal": True, "softcap": 2.0},
    "ALiBi": {"causal": True, "alibi": True},
    "sinks": {"causal": True, "sinks": np.array([0.5, -1.0])},
    "padding": {"causal": True, "key_lengths": (70, 41), "query_lengths": (70, 41)},
    "an offset": {"causal": True, "query_offset": 7},
    "past the keys": {"query_offset": 30},
    "a mask": {"causal": True, "attn_mask": np.random.default_rng(3).random((70, 70)) < 0.7},
    "logits near the largest number": {"causal": True, "scale": 3e306},
}


@pytest.mark.parametrize("vocabulary", [3, 25])
@pytest.mark.parametrize("case", CASES)
def test_equal_to_what_the_whole_matrix_gives(
    case: str, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether pairs are multiplied one by one, in several runs, or whole tiles are."""
    rng, options = np.random.default_rng(1), CASES[case]
    tokens = rng.integers(0, vocabulary, (2, 70))
    q, k = rng.standard_normal((2, 2, 70, 8)), rng.standard_normal((2, 1, 70, 8))
    labels = [list(map(str, row)) for row in tokens]
    weights = attncli.compute(q, k, precision="float64", stages="weights", **options)
    matrices, every = weights.stages["weights"].numpy(), slice(None)
    visible = weights.problem.mask.visible(every, every, every, every)
    visible = np.broadcast_to(visible, matrices.shape)
    seen = []
    for cells in (1, 1000):
        monkeypatch.setattr(repeats, "_CELLS_A_PAIR", cells)
        monkeypatch.setattr(repeats, "_ELEMENTS", 400)
        found = attncli.entropy(q, k, precision="float64", labels=labels, **options)
        for head, place in zip(found.heads, np.ndindex(2, 2), strict=True):
            row, of_head = place[0], matrices[place][: head.queries]
            offset = options.get("query_offset", 0)
            shown, places = visible[place][: head.queries], np.arange(head.queries) + offset
            expected = counted(tokens[row], places, of_head, shown, "sinks" in options)
            got = {name: getattr(head.scores, name) for name in NAMES}
            assert got == pytest.approx(expected, abs=1e-12)
            seen += got.values()
    assert max(score for score in seen if score is not None) > 0


def test_given_weights_and_chosen_rows() -> None:
    tokens = repeated(20)
    cells = cells_of(tokens, np.arange(40))["induction"].astype(float)
    cells[:, 0] += cells.sum(1) == 0
    found = attncli.entropy(weights=cells, causal=True, labels=list(map(str, tokens)))
    assert found.heads[0].label == "induction"


def test_none_where_it_cannot_be_told() -> None:
    tokens, q = [str(token) for token in repeated(6)], np.ones((12, 2))
    few = attncli.entropy(q, q, causal=True, labels=tokens).heads[0].scores
    crossed = attncli.entropy(q[:5], q, labels=tokens).heads[0].scores
    unknown = attncli.entropy(q, q, causal=True).heads[0].scores
    for scores in (few, crossed, unknown):
        assert (scores.induction, scores.duplicate_token) == (None, None)


@pytest.mark.parametrize("labels", [["a"], [], [["a"] * 12] * 3])
def test_labels_that_fit_no_keys(labels: Any) -> None:
    with pytest.raises(UsageError, match="expected one for each of 12 keys"):
        attncli.entropy(np.ones((12, 2)), np.ones((12, 2)), labels=labels)


def test_occurrences_of_each_token_before_its_query() -> None:
    """As a loop finds them, for queries on keys, before the first one and behind the last."""
    random = np.random.default_rng(2)
    for tokens in (np.array([5, 5]), np.array([3]), random.integers(0, 3, 12)):
        places = np.concatenate([[-2, -1], random.permutation(len(tokens)), [len(tokens), 40]])
        found = repeats.Occurrences.of(tokens, places)
        wanted = [
            [key for key in range(place) if tokens[key] == tokens[place]]
            if 0 <= place < len(tokens)
            else []
            for place in places.tolist()
        ]
        assert found.count.tolist() == [len(keys) for keys in wanted]
        for begin, end in ((0, len(places)), (3, len(places)), (0, 2), (2, 3)):
            rows, keys = found.pairs(begin, end)
            pairs = [(row, key) for row, some in enumerate(wanted[begin:end]) for key in some]
            assert sorted(zip(rows.tolist(), keys.tolist(), strict=True)) == pairs


def test_rows_in_runs_of_so_many_pairs() -> None:
    counts = np.array([0, 3, 1, 5, 0, 2, 2], np.int64)
    found = repeats.Occurrences(np.arange(9), np.zeros(7, np.int64), counts)
    assert list(found.runs(0, 7, 4)) == [(0, 3), (3, 4), (4, 7)]
    assert list(found.runs(0, 7, 1)) == [(row, row + 1) for row in range(7)]
    assert list(found.runs(2, 6, 6)) == [(2, 5), (5, 6)]
    assert list(found.runs(0, 7, 100)) == [(0, 7)]
    assert list(found.runs(3, 3, 4)) == []


@pytest.mark.parametrize("batches", [1, 2])
def test_tokens_of_all_batches_or_of_each(batches: int) -> None:
    random = np.random.default_rng(4)
    q, k = (torch.from_numpy(random.standard_normal((2, 1, 40, 4))) for _ in range(2))
    tokens = random.integers(0, 5, (batches, 40))
    problem = make_problem(q, k, None, AttentionOptions(causal=True))
    for rows in stream_rows(problem, Wanted(tokens=tokens)):
        own = tokens[rows.batch % batches]
        logits = q[rows.batch, 0] @ k[rows.batch, 0].T / 2
        hidden = torch.ones(40, 40).tril() == 0
        weights = logits.masked_fill(hidden, -torch.inf).softmax(-1).numpy()
        for name, share in (
            ("duplicate_token", rows.shares.repeated),
            ("induction", rows.shares.behind_repeated),
        ):
            wanted = cells_of(own, np.arange(40))[name]
            assert share is not None
            np.testing.assert_allclose(share.weight.numpy(), (weights * wanted).sum(1), rtol=1e-9)
            assert share.seen.tolist() == wanted.sum(1).tolist()
