"""Rules that a candidate follows and the reference lacks: their sizes are read off exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from attncli.attention.check.added import added_rules
from attncli.attention.check.candidate import Target, read_candidate
from attncli.attention.check.evidence import Evidence, judge, sample_rows
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
    (part,) = parts_of(other.problem, torch.arange(q_len), range(batch), all_heads=True)
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
