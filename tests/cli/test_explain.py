"""The walk through the stages: all of them, with the numbers of this problem."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from plain import Run, Tensors, attention


def steps_of(run: Run, *arguments: object) -> dict[str, Any]:
    found = run("compute", *arguments, "--explain", "-f", "json").json["data"]["explanation"]
    return {step["name"]: step for step in found}


def test_every_stage_is_there_with_its_numbers(run: Run, files: Path, tensors: Tensors) -> None:
    steps = steps_of(run, "bundle.npz")
    assert list(steps) == [
        *("projection", "scores", "scaled", "masked", "weights", "entropy", "online softmax"),
        *("output", "heads", "cost"),
    ]
    for step in steps.values():
        assert step["formula"]
        assert step["purpose"]
    plain = attention(**tensors)
    before, after = plain["scores"].var(), plain["scaled"].var()
    told = " ".join(steps["scaled"]["findings"])
    assert f"variance {before:.4f} before, {after:.4f} after" in told
    assert "(5×8) · (8×7) = (5×7)" in steps["scores"]["shape"]
    weights = plain["weights"]
    entropies = -(weights * np.log2(weights)).sum(-1)
    assert f"{entropies[0, 0, 0]:.4f}" in steps["entropy"]["findings"][0]
    assert f"mean {entropies.mean():.4f} bits" in steps["entropy"]["findings"]
    assert f"{2 * 280 * (8 + 6):,} operations" in steps["cost"]["shape"]


def test_the_mask_tells_what_it_removed(run: Run) -> None:
    steps = steps_of(run, "--causal", "--softcap", 2)
    assert "6 of 16 cells hidden (37.5%)" in steps["masked"]["findings"]
    assert "a query sees 1 to 4 keys" in steps["masked"]["findings"]
    assert steps["capped"]["formula"] == "capped = 2 · tanh(scaled / 2)"


def test_naive_softmax_fails_where_it_would(run: Run) -> None:
    told = " ".join(steps_of(run, "--scale", 1000)["weights"]["findings"])
    assert "the naive form exp(x) / Σ exp(x) fails in float32" in told
    told = " ".join(steps_of(run)["weights"]["findings"])
    assert "the naive form would do here" in told


def test_the_table_walks_through_every_group(run: Run, files: Path) -> None:
    np.savez("g.npz", **{f"{g}.{r}": np.eye(2) for g in "ab" for r in "qk"})
    out = run("compute", "g.npz", "--explain").stdout
    assert out.count("1. projection") == 2
    assert "group a" in out
    assert "group b" in out
    run("compute", "g.npz", "--explain", "-o", "out.txt")
    assert Path("out.txt").read_text() == out
    run("compute", "g.npz", "-o", "out.txt")
    assert "group a" in Path("out.txt").read_text()
