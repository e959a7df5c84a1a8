"""The walk through the stages: all of them, with the numbers of this problem."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from plain import Run, Tensors, attention
from typer.testing import CliRunner

from attncli.cli.app import app


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


def test_shapes_of_one_head_and_of_all(run: Run, files: Path) -> None:
    words = ("compute", "bundle.npz", "--causal", "--query-offset", 2, "--softcap", 5, "--shapes")
    records = run(*words, "-f", "json").json["data"]
    shapes = {one["step"]: (one["one_head"], one["all_heads"]) for one in records}
    assert shapes == {
        "Q": ("(5, 8)", "(2, 4, 5, 8)"),
        "K": ("(7, 8)", "(2, 2, 7, 8)"),
        "V": ("(7, 6)", "(2, 2, 7, 6)"),
        **dict.fromkeys(("scores", "scaled", "capped"), ("(5, 7)", "(2, 4, 5, 7)")),
        **dict.fromkeys(("masked", "weights"), ("(5, 7)", "(2, 4, 5, 7)")),
        "output": ("(5, 6)", "(2, 4, 5, 6)"),
    }
    table = run(*words).stdout
    assert run("compute", *words[1:-1], "--explain").stdout.endswith(f"in short\n{table}\n")
    assert "--shapes, which computes none" in run(*words, "--save", "x.npz", code=2).stderr


def test_shapes_of_a_projection(run: Run, files: Path) -> None:
    for name, shape in (("x", (5, 6)), ("wq", (6, 8)), ("wk", (6, 8)), ("wo", (8, 3))):
        np.save(f"{name}.npy", np.ones(shape))
    words = [word for name in ("x", "wq", "wk", "wo") for word in (f"--{name}", f"{name}.npy")]
    found = run("compute", *words, "--wv", "wk.npy", "--heads", 2, "--shapes", "-f", "json").json
    shapes = [(one["step"], one["operation"], one["all_heads"]) for one in found["data"]]
    assert shapes[:2] == [("X", "given", "(1, 5, 6)"), ("Q", "X W_Q", "(1, 2, 5, 4)")]
    assert shapes[-1] == ("projected", "concat(output) W_O", "(1, 5, 3)")


def test_a_small_mask_is_told_cell_by_cell(run: Run) -> None:
    steps = steps_of(run, "--causal")
    told = "M, which is added, row by row: 0 −∞ −∞ −∞; 0 0 −∞ −∞; 0 0 0 −∞; 0 0 0 0"
    assert told in steps["masked"]["findings"]
    assert "M, which" not in str(steps_of(run, "--q-len", 9, "--k-len", 9, "--causal"))


def test_chinese_tells_the_same_numbers(run: Run) -> None:
    numbers = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")
    for words in ((), ("--causal", "--softcap", 2), ("--heads", 4, "--kv-heads", 2, "--alibi")):
        english, chinese = (
            run("compute", *words, "--explain", "--lang", lang).stdout for lang in ("en", "zh")
        )
        assert sorted(numbers.findall(english)) == sorted(numbers.findall(chinese))
        assert "注意力分数" in chinese
        assert "每个键与查询的匹配程度" in chinese
        assert not re.search("[a-z]{3} [a-z]{3} [a-z]{3}", chinese.split("\n\n", 1)[1])


def test_chinese_wants_an_encoding_that_has_it(run: Run) -> None:
    words = ["compute", "--explain", "--lang", "zh"]
    refused = CliRunner(charset="ascii").invoke(app, words)
    assert refused.exit_code == 2
    assert "--lang: expected an output that Chinese can be written to, got ascii" in refused.stderr
    assert run("compute", "--lang", "zh", code=2).stderr.startswith(
        "attncli: error: --lang: expected --explain or --shapes beside it"
    )


def test_what_stands_above_the_walk_is_chinese_too(run: Run) -> None:
    above = run("compute", "--causal", "--heads", 2, "--explain", "--lang", "zh").stdout
    first, second = above.splitlines()[:2]
    assert first.startswith("随机，种子 0 · B=1 H=2 ")
    assert first.endswith("缩放 0.125 · 以 float64 在 cpu 上计算")
    assert second == "选项：causal · 查询 0 位于位置 0"
