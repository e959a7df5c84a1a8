"""Rules and numbers that a candidate follows and the reference lacks: they are read off exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from attncli.attention.check.added import added_rules
from attncli.attention.check.candidate import Target, read_candidate
from attncli.attention.check.evidence import (
    Evidence,
    find_dropout,
    fitted_scale,
    fitted_sinks,
    fitted_softcap,
    judge,
    other_value_heads,
    sample_rows,
)
from attncli.attention.check.mistakes import Alternative
from attncli.attention.check.variant import Variant, evaluate, parts_of, right_variant
from attncli.attention.options import AttentionOptions
from attncli.attention.problem import make_problem

LENGTH = 14
TARGETS = list(Target)


def evidence_of(
    declared: dict[str, Any],
    made: dict[str, Any],
    targets: list[Target],
    batch: int = 1,
    q_len: int = LENGTH,
) -> Evidence:
    """Candidates made with other options than are declared, of two heads in float64."""
    random = torch.Generator().manual_seed(7)
    q = torch.randn(batch, 2, q_len, 4, generator=random, dtype=torch.float64)
    k, v = torch.randn(2, batch, 2, LENGTH, 4, generator=random, dtype=torch.float64)

    def variant_of(given: dict[str, Any]) -> Variant:
        options = AttentionOptions(**given)
        return right_variant(make_problem(q, k, v, options), options)

    other = variant_of({**declared, **made})
    (part,) = parts_of(other, torch.arange(q_len), range(batch), all_heads=True)
    expected = evaluate(other, part)
    base = variant_of(declared)
    candidates = [read_candidate(one, expected.of(one), base.problem) for one in targets]
    return sample_rows(base, candidates)


def found(name: str, evidence: Evidence) -> list[Alternative]:
    (rule,) = (one for one in added_rules(evidence) if one.name == name)
    return list(rule.alternatives(evidence.base))


RULES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("window:added", {"causal": True}, {"left_window": 3}),
    ("window:added", {"causal": True}, {"left_window": 0}),
    ("window:added", {}, {"right_window": 4}),
    ("window:added", {}, {"left_window": 2, "right_window": 3}),
    ("window:added", {"right_window": 1}, {"left_window": 5}),
    ("window:added", {"left_window": 6}, {"right_window": 2}),
    ("sink-window:added", {"causal": True, "left_window": 3}, {"sink_window": 2}),
    ("sink-window:added", {"causal": True}, {"left_window": 4, "sink_window": 3}),
    ("prefix:added", {"causal": True}, {"prefix": 5}),
    ("prefix:added", {"causal": True}, {"prefix": 13}),
    ("padding:added", {}, {"key_lengths": (9,)}),
    ("padding:added", {"causal": True}, {"key_lengths": (13,)}),
    ("dilation:added", {"causal": True, "left_window": 9}, {"dilation": 3}),
    ("dilation:added", {"right_window": 4}, {"dilation": 2}),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("name", "declared", "made"), RULES)
def test_the_size_of_a_rule_is_read_off(
    name: str, declared: dict[str, Any], made: dict[str, Any], target: Target
) -> None:
    evidence = evidence_of(declared, made, [target])
    wanted = dict(made)
    if name == "padding:added":
        wanted = {"key_lengths": made["key_lengths"][0]}
    elif name == "sink-window:added":
        wanted = {"left_window": 3, **made}
    explaining = [one for one in found(name, evidence) if judge(one.variant, evidence).explains]
    assert explaining[0].changes == wanted


def test_a_rule_is_read_off_several_candidates_at_once_and_beside_sinks() -> None:
    declared = {"causal": True, "sinks": np.array([0.5, -1.0])}
    evidence = evidence_of(declared, {"left_window": 3}, TARGETS)
    assert [one.changes for one in found("window:added", evidence)] == [{"left_window": 3}]
    evidence = evidence_of(declared, {"prefix": 4}, TARGETS)
    assert [one.changes for one in found("prefix:added", evidence)] == [{"prefix": 4}]


def test_rules_of_positions_are_tried_in_both_corners() -> None:
    evidence = evidence_of({}, {"left_window": 2, "query_offset": 4}, [Target.WEIGHTS], q_len=10)
    tried = [one.changes for one in found("window:added", evidence)]
    assert {"left_window": 2, "query_offset": 4} in tried
    assert {one["query_offset"] for one in tried} == {0, 4}
    declared = {"query_offset": 4}
    evidence = evidence_of(declared, {"left_window": 2}, [Target.WEIGHTS], q_len=10)
    assert {"left_window": 2} in [one.changes for one in found("window:added", evidence)]


def test_padding_of_each_batch_at_either_end() -> None:
    evidence = evidence_of({}, {"key_lengths": (14, 6, 9)}, [Target.OUTPUT], batch=3)
    lengths, _ = found("padding:added", evidence)
    assert lengths.changes == {"key_lengths": (14, 6, 9)}
    keep = np.arange(LENGTH) >= np.array([[0], [5], [2]])
    evidence = evidence_of({}, {"key_padding": keep}, [Target.OUTPUT], batch=3)
    _, padding = found("padding:added", evidence)
    assert padding.detail == "the first 0, 5, 2 keys hidden"
    assert judge(padding.variant, evidence).explains
    off = evidence.off.clone()
    off[1] = 0  # nothing is off there: nothing is hidden
    lengths, padding = found("padding:added", replace(evidence, off=off))
    assert padding.detail == "the first 0, 2 keys hidden"
    declared = evidence_of({"key_lengths": (9, 9, 9)}, {}, [Target.OUTPUT], batch=3)
    assert found("padding:added", declared) == []


DOCUMENTS = np.repeat([0, 1, 2], [5, 2, 7])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("causal", [True, False])
def test_documents_are_found_from_their_last_rows(target: Target, causal: bool) -> None:
    declared = {"causal": causal}
    evidence = evidence_of(declared, {"segments": DOCUMENTS}, [target])
    (packed,) = found("segments:added", evidence)
    assert packed.changes == {"segments": tuple(DOCUMENTS.tolist())}
    assert packed.detail == "documents of 5, 2, 7 keys"
    assert judge(packed.variant, evidence).explains


def test_documents_of_each_batch() -> None:
    ids = np.stack([DOCUMENTS, np.repeat([0, 1], [9, 5])])
    evidence = evidence_of({"causal": True}, {"segments": ids}, [Target.WEIGHTS], batch=2)
    (packed,) = found("segments:added", evidence)
    assert packed.changes == {}
    assert packed.detail == "documents of 5, 2, 7 keys"
    assert judge(packed.variant, evidence).explains
    off = evidence.off.clone()
    off[1] = 0
    (packed,) = found("segments:added", replace(evidence, off=off))
    assert packed.variant.options.segments is not None
    assert packed.variant.options.segments.tolist() == [DOCUMENTS.tolist(), [0] * LENGTH]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("length", [4, 7])
def test_chunks_are_told_as_such_and_not_as_documents(target: Target, length: int) -> None:
    ids = np.arange(LENGTH) // length
    evidence = evidence_of({"causal": True}, {"segments": ids}, [target])
    (packed,) = found("chunk:added", evidence)
    assert packed.detail == f"chunks of {length} keys"
    assert packed.changes == {"segments": tuple(ids.tolist())}
    assert found("segments:added", evidence) == []


def test_rules_that_are_there_already_are_not_added() -> None:
    packed = evidence_of({"causal": True, "segments": DOCUMENTS}, {}, [Target.OUTPUT])
    assert found("segments:added", packed) == found("chunk:added", packed) == []
    full = {"causal": True, "left_window": 3, "sink_window": 1, "prefix": 2, "right_window": 2}
    evidence = evidence_of(full, {}, [Target.OUTPUT])
    for name in ("window:added", "sink-window:added", "prefix:added"):
        assert found(name, evidence) == []
    assert found("prefix:added", evidence_of({}, {}, [Target.OUTPUT])) == []
    assert found("dilation:added", evidence_of({"causal": True}, {}, [Target.OUTPUT])) == []
    steps = [one.changes["dilation"] for one in found("dilation:added", evidence)]
    assert steps == list(range(2, 9))
    averaged = replace(evidence, base=replace(evidence.base, heads_averaged=True))
    assert added_rules(averaged) == []


# Numbers


@pytest.mark.parametrize(
    ("scale", "target"),
    [(0.137, Target.OUTPUT), (-0.3, Target.WEIGHTS), (3.25, Target.LOGSUMEXP)],
)
def test_a_scale_is_fitted_to_its_last_digit(scale: float, target: Target) -> None:
    evidence = evidence_of({"causal": True}, {"scale": scale}, [target])
    (fitted,) = fitted_scale(evidence.base, evidence)
    assert fitted.changes == {"scale": scale}
    assert judge(fitted.variant, evidence).explains


def test_scores_that_are_alike_tell_no_scale() -> None:
    evidence = evidence_of({}, {}, [Target.WEIGHTS])
    problem = evidence.base.problem
    flat = evidence.base.with_problem(q=torch.zeros_like(problem.q))
    even = torch.full((1, 2, LENGTH, LENGTH), 1 / LENGTH, dtype=torch.float64)
    candidate = read_candidate(Target.WEIGHTS, even, problem)
    assert list(fitted_scale(flat, sample_rows(flat, [candidate]))) == []


@pytest.mark.parametrize(
    ("softcap", "target"),
    [(0.8, Target.OUTPUT), (2.5, Target.WEIGHTS), (11.0, Target.LOGSUMEXP)],
)
def test_a_soft_cap_is_fitted(softcap: float, target: Target) -> None:
    evidence = evidence_of({"scale": 4.0}, {"softcap": softcap}, [target])
    (fitted,) = fitted_softcap(evidence.base, evidence)
    assert fitted.changes == {"softcap": softcap}
    assert judge(fitted.variant, evidence).explains


def test_no_soft_cap_is_fitted_where_none_helps() -> None:
    assert list(fitted_softcap((right := evidence_of({}, {}, TARGETS)).base, right)) == []
    capped = evidence_of({"softcap": 3.0}, {"softcap": 2.0}, TARGETS)
    assert list(fitted_softcap(capped.base, capped)) == []
    other = evidence_of({}, {"scale": -0.5}, TARGETS)
    assert list(fitted_softcap(other.base, other)) == []


@pytest.mark.parametrize("target", [Target.OUTPUT, Target.WEIGHTS])
def test_the_sink_of_each_head_is_fitted(target: Target) -> None:
    sinks = (1.25, -0.5)
    evidence = evidence_of({"causal": True}, {"sinks": np.array(sinks)}, [target])
    (fitted,) = fitted_sinks(evidence.base, evidence)
    assert fitted.changes == {"sinks": sinks}
    assert judge(fitted.variant, evidence).explains


def test_no_sinks_are_fitted_where_nothing_tells_them() -> None:
    for declared, made, targets in (
        ({}, {"sinks": np.ones(2)}, [Target.LOGSUMEXP]),
        ({"sinks": np.zeros(2)}, {"sinks": np.ones(2)}, [Target.OUTPUT]),
        ({}, {}, [Target.WEIGHTS]),
    ):
        evidence = evidence_of(declared, made, targets)
        assert list(fitted_sinks(evidence.base, evidence)) == []
    # Of a head without one it is so low that it takes nothing.
    evidence = evidence_of({}, {"sinks": np.array([2.0, -40.0])}, [Target.WEIGHTS])
    (fitted,) = fitted_sinks(evidence.base, evidence)
    assert fitted.changes["sinks"] == (2.0, -10000.0)


@pytest.mark.parametrize("chosen", [(1, 0), (0, 0), (1, 1), (0, 1)])
def test_other_value_heads_are_found(chosen: tuple[int, int]) -> None:
    evidence = evidence_of({"causal": True}, {}, [Target.OUTPUT])
    made = replace(evidence.base, value_heads=chosen)
    (part,) = parts_of(made, torch.arange(LENGTH), range(1), all_heads=True)
    output = evaluate(made, part).of(Target.OUTPUT)
    candidates = [read_candidate(Target.OUTPUT, output, made.problem)]
    evidence = sample_rows(evidence.base, candidates)
    found_heads = [one.variant.value_heads for one in other_value_heads(evidence.base, evidence)]
    assert found_heads == ([] if chosen == (0, 1) else [chosen])
    weights = evidence_of({}, {}, [Target.WEIGHTS])
    assert list(other_value_heads(weights.base, weights)) == []


def dropped(probability: float, factor: float, target: Target = Target.WEIGHTS) -> Evidence:
    """Weights, and what follows from them, of which some are 0 and the others larger."""
    base = evidence_of({}, {}, [Target.WEIGHTS]).base
    (part,) = parts_of(base, torch.arange(LENGTH), range(1), all_heads=True)
    right = evaluate(base, part)
    keep = torch.rand(right.weights.shape, generator=torch.Generator().manual_seed(1))
    other = right.with_weights(torch.where(keep >= probability, right.weights * factor, 0.0))
    targets = [Target.WEIGHTS] if target is Target.WEIGHTS else [target, Target.WEIGHTS]
    return sample_rows(base, [read_candidate(t, other.of(t), base.problem) for t in targets])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_dropout_is_seen_by_its_zeros_and_what_is_left(probability: float, target: Target) -> None:
    evidence = dropped(probability, 1 / (1 - probability), target)
    result = find_dropout(evidence.base, evidence)
    assert result is not None
    assert result.explains
    assert result.differs


@pytest.mark.parametrize(
    ("probability", "factor", "seen"),
    [(0.5, 1.1, True), (0.0, 1.25, True), (0.2, 1.0, False), (0.3, 0.7, False)],
)
def test_weights_that_are_no_dropout(probability: float, factor: float, seen: bool) -> None:
    """Too many or too few zeros for what the others are, or nothing that grew."""
    evidence = dropped(probability, factor)
    result = find_dropout(evidence.base, evidence)
    assert (result is not None) == seen
    assert result is None or not result.explains
    output = evidence_of({}, {}, [Target.OUTPUT])
    assert find_dropout(output.base, output) is None
