"""Labels on heads built to be one thing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attncli.attention.options import AttentionOptions
from attncli.attention.problem import make_problem
from attncli.attention.streaming.heads import (
    Estimate,
    HeadStatistics,
    Label,
    LabelScores,
    Thresholds,
    choose_label,
    draw_rows,
    estimate,
    estimates_of,
    head_statistics,
    nearest_label,
)
from attncli.attention.streaming.stream import stream_rows

N = 24


def head_of(logits: torch.Tensor, **options: object) -> HeadStatistics:
    """Statistics of one head with these logits (S_q, S_k): q the rows, k the unit vectors."""
    keys = torch.eye(logits.shape[1], dtype=torch.float64)
    problem = make_problem(
        logits.double(),
        keys,
        None,
        AttentionOptions(scale=1.0, **options),  # type: ignore[arg-type]
    )
    (rows,) = stream_rows(problem)
    return head_statistics(rows)


def looking(steps: list[int], strength: float = 30.0) -> torch.Tensor:
    """Logits of queries that look so many keys to the left, cyclically."""
    logits = torch.zeros(N, N)
    for step in steps:
        logits[torch.arange(N), (torch.arange(N) - step) % N] = strength
    return logits


def first_key() -> torch.Tensor:
    logits = torch.zeros(N, N)
    logits[:, 0] = 30.0
    return logits


def far_keys() -> torch.Tensor:
    logits = torch.zeros(N, N)
    logits[torch.arange(N), torch.from_numpy(np.random.default_rng(3).permutation(N))] = 30.0
    return logits


BUILT = {
    Label.PREVIOUS_TOKEN: looking([1]),
    Label.SELF: looking([0]),
    Label.SINK: first_key(),
    Label.LOCAL: looking([-2, -1, 0, 1, 2]),
    Label.UNIFORM: torch.zeros(N, N),
    Label.COLLAPSED: far_keys(),
    Label.MIXED: torch.from_numpy(np.random.default_rng(4).standard_normal((N, N)) * 2),
}


@pytest.mark.parametrize("label", BUILT)
def test_built_heads_get_their_label(label: Label) -> None:
    found = head_of(BUILT[label])
    assert found.label == label
    assert found.label_score is not None
    assert 0 < found.label_score <= 1


@pytest.mark.parametrize("keys", [2, 3, 50])
def test_even_attention_scores_nothing_on_any_place(keys: int) -> None:
    found = head_of(torch.zeros(keys, keys), causal=True)
    places = (found.scores.previous_token, found.scores.self, found.scores.sink)
    assert [score for score in places if score is not None] == pytest.approx([0.0] * 3, abs=1e-12)
    assert found.scores.uniform == pytest.approx(1.0)


def test_without_positions_only_labels_without_positions() -> None:
    found = head_of(torch.zeros(3, 7))
    assert (found.scores.previous_token, found.scores.self, found.scores.local) == (None,) * 3
    assert found.label is Label.UNIFORM
    assert found.distance_mean is None


def test_no_label_without_a_choice() -> None:
    found = head_of(torch.zeros(4, 4), causal=True, left_window=0)
    assert (found.label, found.label_score) == (None, None)
    assert found.entropy_normalized_mean is None
    assert found.entropy_nats_mean == 0


def test_a_sink_logit_counts_as_sink() -> None:
    found = head_of(torch.zeros(N, N), sinks=np.array([20.0]))
    assert found.label is Label.SINK
    assert found.sink_mass_mean is not None
    assert found.sink_mass_mean < 1e-3


def test_thresholds_can_be_moved() -> None:
    scores = LabelScores(
        previous_token=0.4, self=0.3, sink=0.2, local=0.6, uniform=0.5, collapsed=0.5
    )
    assert choose_label(scores)[0] is Label.LOCAL
    assert choose_label(scores, Thresholds(previous_token=0.3))[0] is Label.PREVIOUS_TOKEN
    mixed = choose_label(scores, Thresholds(local=0.9))
    assert mixed[0] is Label.MIXED
    assert mixed[1] == pytest.approx(1 - 0.8)


def test_a_mixed_head_says_what_it_is_nearest_to() -> None:
    scores = LabelScores(
        previous_token=None, self=0.3, sink=0.2, local=0.5, uniform=0.7, collapsed=0.3
    )
    assert choose_label(scores) == (Label.MIXED, pytest.approx(1 - 0.5 / 0.6))
    assert nearest_label(scores) == (Label.LOCAL, pytest.approx(0.5 / 0.6))
    assert nearest_label(scores, Thresholds(self=0.31)) == (Label.SELF, pytest.approx(0.3 / 0.31))
    flat = head_of(torch.zeros(4, 9))
    assert (flat.label, flat.nearest_label) == (Label.UNIFORM, None)
    tilted = head_of(torch.linspace(0, 3, 9).expand(4, 9))
    assert (tilted.label, tilted.nearest_label) == (Label.MIXED, Label.UNIFORM)


def test_worked_values_of_uniform_causal_rows() -> None:
    """S = 4: entropies 0, ln 2, ln 3, ln 4, normalised nothing, 1, 1, 1."""
    found = head_of(torch.zeros(4, 4), causal=True)
    assert found.entropy_nats_mean == pytest.approx(np.log([1, 2, 3, 4]).mean())
    assert found.entropy_nats_std == pytest.approx(np.log([1, 2, 3, 4]).std())
    assert found.entropy_normalized_mean == pytest.approx(1.0)
    assert found.effective_keys_mean == pytest.approx(2.5)
    assert found.keys_mean == 2.5
    assert found.distance_mean == pytest.approx(np.mean([0, 0.5, 1, 1.5]))
    assert (found.max_logit, found.max_logit_query, found.max_logit_key) == (0.0, 0, 0)


def test_empty_rows_are_counted_and_left_out() -> None:
    mask = np.ones((4, 4), bool)
    mask[1] = False
    found = head_of(torch.zeros(4, 4), attn_mask=mask, query_lengths=(3,))
    assert (found.queries, found.empty_rows) == (3, 1)
    assert found.keys_mean == 4
    assert found.entropy_bits_mean == pytest.approx(2.0)


def test_a_head_of_empty_rows_has_no_numbers() -> None:
    found = head_of(torch.zeros(4, 4), key_lengths=(0,))
    assert found.empty_rows == 4
    numbers = (found.entropy_nats_mean, found.keys_mean, found.max_logit, found.label)
    assert numbers == (None,) * 4


class TestSample:
    def problem(self) -> object:
        rng = np.random.default_rng(5)
        q, k = (torch.from_numpy(rng.standard_normal((2, 2, 400, 8))) for _ in range(2))
        return make_problem(
            q, k, None, AttentionOptions(causal=True, query_lengths=(400, 90), alibi=True)
        )

    def test_sampled_rows_are_the_rows(self) -> None:
        problem = self.problem()
        whole = {(rows.batch, rows.head): rows for rows in stream_rows(problem)}
        for rows in stream_rows(problem, queries=draw_rows(problem, 50, 0)):
            full = whole[rows.batch, rows.head]
            for name in ("entropy_nats", "max_logit", "sink_mass", "distance", "keys"):
                torch.testing.assert_close(getattr(rows, name), getattr(full, name)[rows.queries])
            assert torch.equal(rows.shares.local.seen, full.shares.local.seen[rows.queries])
            assert len(rows.queries) == 50

    def test_estimates_are_unbiased_and_know_their_error(self) -> None:
        """Over many samples errors average out, and their spread is the standard error."""
        problem = self.problem()
        first = next(stream_rows(problem))
        values = first.entropy_nats
        truth = float(values.mean())
        errors, stated = [], []
        for seed in range(400):
            rows = draw_rows(problem, 40, seed)[0]
            found = values[rows]
            errors.append(float(found.mean()) - truth)
            stated.append(float(found.std()) / 40**0.5 * (1 - 40 / 400) ** 0.5)
        assert abs(np.mean(errors)) < 4 * np.mean(stated) / 400**0.5
        assert np.std(errors) == pytest.approx(np.mean(stated), rel=0.15)
        rows = next(stream_rows(problem, queries=draw_rows(problem, 40, 7)))
        sample = estimates_of(rows, 400)["entropy_nats"]
        assert sample.standard_error == pytest.approx(stated[7])
        assert sample.mean == pytest.approx(errors[7] + truth)

    def test_rows_are_drawn_once_each(self) -> None:
        problem = self.problem()
        first, second = draw_rows(problem, 60, 3)
        for rows, real in ((first, 400), (second, 90)):
            assert len(np.unique(rows)) == 60
            assert rows.tolist() == sorted(rows.tolist())
            assert rows[0] >= 0
            assert rows[-1] < real
        assert [len(rows) for rows in draw_rows(problem, 100, 0)] == [100, 90]
        assert draw_rows(problem, 60, 3)[1].tolist() == second.tolist()
        assert draw_rows(problem, 60, 4)[1].tolist() != second.tolist()

    def test_all_rows_leave_no_error(self) -> None:
        problem = self.problem()
        for rows in stream_rows(problem, queries=draw_rows(problem, 1000, 0)):
            estimates = estimates_of(rows, [400, 90][rows.batch])
            assert {each.standard_error for each in estimates.values()} == {0.0}


def test_an_estimate_is_that_of_a_textbook() -> None:
    """s/√n · √(1 − sampled/queries), and a quantile of Student's t with n − 1 degrees."""
    values = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64)
    found = estimate(values, 5, 20)  # one of the five rows has no value
    error = np.std(values.numpy(), ddof=1) / 2 * np.sqrt(0.75)
    assert found.mean == 4
    assert found.standard_error == pytest.approx(error)
    assert found.reach == pytest.approx(3.182446 * error, rel=2e-3)
    assert estimate(values, 5, 5) == Estimate(4.0, 0.0, 0.0)
    assert estimate(values[:1], 1, 1) == Estimate(1.0, 0.0, 0.0)
    assert estimate(values[:1], 1, 2) == Estimate(1.0, None, None)
    pair = estimate(values[:2], 2, 4)
    assert pair.standard_error == pytest.approx(0.5 * np.sqrt(0.5))
    assert pair.reach == pytest.approx(12.7062 * 0.5 * np.sqrt(0.5), rel=1e-5)
