"""`attncli variance`: experiments, audits against brute force, and scales that are fitted."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from plain import Run, attention
from safetensors.torch import save_file

import attncli
from attncli.report.variance import Curve, plot

SAMPLES = Path(__file__).parents[2] / "sample_inputs"
Array = NDArray[Any]

EXPERIMENT = (
    "dk,samples,dist,keys,scale,mean,mean_theory,var,var_theory,var_ci95_low,var_ci95_high,ratio,"
    "scaled_var,entropy_bits_unscaled,entropy_bits_scaled,entropy_bits_max,max_weight_unscaled,"
    "max_weight_scaled,softmax_grad_unscaled,softmax_grad_scaled"
)
AUDIT = (
    "source,group,batch,head,dk,cells,mean,var,std,var_within_rows,var_all_pairs,scale,"
    "scaled_mean,scaled_var,scaled_std,q_mean_norm,k_mean_norm,q_var,k_var,var_unit_theory,"
    "var_from_interaction,var_from_query_mean,var_from_key_mean,scale_for_unit_variance"
)


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


# ── experiments ──────────────────────────────────────────────────────────────────────────────


def test_an_experiment_shows_why(run: Run) -> None:
    (record,) = run("variance", "--dk", 128, "--samples", 20_000, "-f", "json").json["data"]
    assert record["var_theory"] == 128
    assert record["var_ci95_low"] < 128 < record["var_ci95_high"]
    assert record["scaled_var"] == pytest.approx(1, abs=0.05)
    assert record["entropy_bits_unscaled"] < 0.5 < 2.4 < record["entropy_bits_scaled"] < 3


def test_columns_of_the_contract_come_first(run: Run, files: Path) -> None:
    header = run("variance", "--samples", 100, "-f", "csv").stdout.splitlines()[0]
    assert header.startswith(EXPERIMENT + ",")
    header = run("variance", "q.npy", "k.npy", "-f", "csv").stdout.splitlines()[0]
    assert header.startswith(AUDIT + ",")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--dk", "8", "--dk", "64"], [8, 64]),
        (["--dk", "8:70"], [8, 16, 32, 64]),
        (["--dk", "2:60:x3"], [2, 6, 18, 54]),
        (["--dk", "8:32:+8"], [8, 16, 24, 32]),
        (["--dk", "8,8,4"], [8, 4]),
        ([], [64]),
    ],
)
def test_sweeps(run: Run, options: list[str], expected: list[int]) -> None:
    answer = run("variance", *options, "--samples", 200, "-f", "json").json
    assert [record["dk"] for record in answer["data"]] == expected
    assert answer["params"]["dk"] == expected


@pytest.mark.parametrize(
    ("options", "mean", "var"),
    [
        (["--dist", "uniform"], 16 / 4, 16 * 7 / 144),
        (["--dist", "rademacher"], 0, 16),
        (["--dist", "laplace", "--std", "2"], 0, 16 * 16),
        (["--dist", "student-t", "--df", "6"], 0, 16),
        (["--mean", "1"], 16, 16 * 3),
        (["--mean", "2", "--std", "0.5"], 64, 16 * (1 / 16 + 2)),
        (["--correlation", "0.5"], 8, 16 * 1.25),
        (["--correlation", "-1"], -16, 32),
    ],
)
def test_theory_where_the_assumption_fails(
    run: Run, options: list[str], mean: float, var: float
) -> None:
    (record,) = run("variance", "--dk", 16, *options, "-f", "json").json["data"]
    assert record["mean_theory"] == pytest.approx(mean)
    assert record["var_theory"] == pytest.approx(var)
    assert record["var"] == pytest.approx(var, rel=0.05)
    assert record["mean"] == pytest.approx(mean, abs=6 * math.sqrt(var / 12_500))


def test_params_say_all_that_decided_the_numbers(run: Run) -> None:
    options = ["--dist", "student-t", "--mean", "1", "--std", "2", "--correlation", "0.1"]
    options += ["--scale-rule", "sqrt,0.3", "--temperatures", "1,2", "--samples", "80"]
    params = run("variance", *options, "-f", "json").json["params"]
    assert params == {
        "dk": [64],
        "samples": 80,
        "keys": 8,
        "dist": "student-t",
        "mean": 1.0,
        "std": 2.0,
        "correlation": 0.1,
        "df": 10.0,
        "scale_rule": ["sqrt", 0.3],
        "temperatures": [1.0, 2.0],
        "compute_dtype": "float64",
        "device": "cpu",
        "seed": 0,
    }


def test_rules_and_temperatures_side_by_side(run: Run) -> None:
    options = ["--scale-rule", "sqrt", "--scale-rule", "linear,none,log-n,0.5"]
    options += ["--temperatures", "1,4", "--samples", "800", "--keys", "4"]
    records = run("variance", *options, "-f", "json").json["data"]
    assert [record["scale"] for record in records[::2]] == pytest.approx(
        [1 / 8, 1 / 64, 1, math.log(4) / 8, 0.5]
    )
    assert [record["temperature"] for record in records] == [1.0, 4.0] * 5
    for record in records:
        factor = record["scale"] / record["temperature"]
        assert record["scaled_var"] == pytest.approx(record["var"] * factor**2)


def test_no_interval_without_a_fourth_moment(run: Run) -> None:
    text = run("variance", "--dist", "student-t", "--df", 4, "--samples", 400).stdout
    words = " ".join(text.split())
    assert "none" in words
    assert "has no fourth moment" in words
    assert "Var(q·k) = d_k·(σ⁴ + 2μ²σ²) = d_k" in words
    csv_text = run(
        "variance", "--dist", "student-t", "--df", 1.5, "--samples", 400, "-f", "csv"
    ).stdout
    (record,) = rows(csv_text)
    assert (record["var_theory"], record["var_ci95_low"], record["ratio"]) == ("", "", "")


def test_a_sweep_names_its_assumption_once_and_draws_curves(run: Run) -> None:
    text = run("variance", "--dk", "8:64", "--dist", "uniform", "--samples", 800).stdout
    assert text.count("expected: entries uniform on [0, 1)") == 1
    assert "= 0.0486111·d_k" in text
    assert "scaled variance of 0.0486111, not 1" in text
    assert "variance against d_k" in text
    assert "entropy (bits) against d_k" in text


def test_tables_in_nats_with_few_digits(run: Run) -> None:
    text = run("variance", "--samples", 800, "--unit", "nats", "--digits", 1).stdout
    assert "at most 2.1 nats" in text
    assert "entropy (nats)" in text


@pytest.mark.parametrize("what", ["drawn", "file", "causal"])
def test_the_same_bytes_whatever_the_threads(tmp_path: Path, what: str) -> None:
    rng = np.random.default_rng(7)
    for name in "qk":
        np.save(tmp_path / f"{name}.npy", rng.standard_normal((2600, 48)).astype(np.float32) + 3)
    np.save(tmp_path / "mask.npy", rng.random((2600, 2600)) > 0.4)
    audit = ["q.npy", "k.npy", "--precision", "float32"]
    options = {
        "drawn": ["--dk", "8:64", "--samples", "9000"],
        "file": [*audit, "--attn-mask", "mask.npy"],
        "causal": [*audit, "--causal"],
    }
    found = {
        subprocess.run(
            [sys.executable, "-m", "attncli", "variance", *options[what], "-f", "json"],
            check=True,
            capture_output=True,
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
        ).stdout
        for threads in ("1", "2", "3")
    }
    assert len(found) == 1


def test_ndjson_is_strict_and_the_seed_matters(run: Run) -> None:
    first, other = (
        [
            json.loads(line)
            for line in run(
                "variance", "--samples", 80, "-f", "ndjson", "--seed", seed
            ).stdout.splitlines()
        ]
        for seed in (0, 1)
    )
    assert first[0]["seed"] == 0
    assert other[0]["seed"] == 1
    assert first[0]["var"] != other[0]["var"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--causal"], "--causal: expected files beside it"),
        (["--no-causal"], "--no-causal: expected files beside it"),
        (["--softcap", "3"], "--softcap: expected files beside it"),
        (["--heads", "2"], "--heads: expected files beside it"),
        (["--fit-scale", "w.npy"], "--fit-scale: expected files of Q and K beside it"),
        (["--df", "5"], "--df: expected --dist student-t beside it"),
        (["--precision", "float32"], "--precision: expected auto or float64"),
        (["--device", "cuda"], "--device: expected auto or cpu"),
        (["--dist", "cauchy"], "--dist: expected one of normal, uniform"),
        (["--scale", "nan"], "--scale: expected finite numbers"),
        (["--scale", "1", "--scale-rule", "sqrt"], "--scale: expected one of"),
        (["--temperature", "0"], "--temperature: expected a finite number above 0"),
        (["--temperatures", "0"], "--temperatures: expected finite numbers above 0"),
        (["--scale-rule", ""], "--scale-rule: expected at least one value"),
        (["--scale-rule", "cube"], "--scale-rule: expected sqrt"),
        (["--dk", "0"], "--dk: expected at least 1"),
        (["--dk", "64:8"], "--dk: expected a range that climbs"),
        (["--std", "1e200"], "--std: expected 0, or from"),
        (["--mean", "1e20"], "--mean: expected at most"),
        (["--correlation", "2"], "--correlation: expected from -1 to 1"),
        (["q.npy", "k.npy", "--dk", "8"], "--dk: expected no files beside it"),
        (["q.npy", "k.npy", "--seed", "0"], "--seed: expected no files beside it"),
        (["q.npy", "k.npy", "--scale-rule", "sqrt"], "--scale-rule: expected no files"),
    ],
)
def test_options_that_make_no_sense(run: Run, files: Path, options: list[str], says: str) -> None:
    outcome = run("variance", *options, code=2)
    assert says in outcome.stderr
    assert outcome.stdout == ""


def test_what_does_not_fit_memory_is_refused(run: Run) -> None:
    assert "of memory" in run("variance", "--dk", 10**13, code=1).stderr


def test_curves_put_points_where_they_belong() -> None:
    curve = Curve("y", "o", [(1, 1.0), (10, 10.0), (100, 100.0), (1000, None)])
    lines = plot("title", [curve], log_y=True)
    places = [(at, line.index("o")) for at, line in enumerate(lines[2:11]) if "o" in line]
    assert [row for row, _ in places] == [0, 4, 8]
    columns = [column for _, column in places]
    assert columns[0] > columns[1] > columns[2]
    assert abs((columns[0] - columns[1]) - (columns[1] - columns[2])) <= 1
    assert plot("title", [Curve("y", "o", [(1, None)])], log_y=True) == []


# ── audits ───────────────────────────────────────────────────────────────────────────────────

ROW, KEY = np.arange(7)[:, None], np.arange(7)[None, :]
DOCUMENTS = np.array([0, 0, 1, 1, 1, 2, 2])
KEEP = np.random.default_rng(5).random((7, 7)) > 0.4
PADDING = np.array([[True] * 5 + [False] * 2, [True, False] * 3 + [True]])
BIAS = np.where(KEEP, 0.5, -np.inf)
PADDED = PADDING[:, None, None, :]
FEW = np.reshape([5, 3], (2, 1, 1, 1))
OFFSETS = np.reshape([1, -1], (2, 1, 1, 1))

MASKS: list[tuple[list[str], Array]] = [
    ([], ROW >= 0),
    (["--causal"], KEY <= ROW),
    (["--causal", "--query-offset", "2"], KEY <= ROW + 2),
    (["--causal", "--query-offset", "-3"], KEY <= ROW - 3),
    (["--causal", "--query-offset", "1,-1"], KEY <= ROW + OFFSETS),
    (["--left-window", "2"], KEY >= ROW - 2),
    (["--causal", "--left-window", "2"], (KEY <= ROW) & (KEY >= ROW - 2)),
    (["--left-window", "1", "--right-window", "2"], (KEY <= ROW + 2) & (KEY >= ROW - 1)),
    (["--causal", "--prefix", "3"], (KEY <= ROW) | (KEY < 3)),
    (["--key-lengths", "5"], KEY < 5),
    (["--key-lengths", "5,3", "--causal"], (KEY < FEW) & (KEY <= ROW)),
    (["--query-lengths", "4"], ROW < 4),
    (["--segments", "0,0,1,1,1,2,2"], DOCUMENTS[:, None] == DOCUMENTS[None, :]),
    (["--key-padding", "padding.npy"], PADDED),
    (["--attn-mask", "keep.npy"], KEEP),
    (["--attn-mask", "keep.npy", "--mask-true", "drop"], ~KEEP),
    (["--attn-mask", "bias.npy", "--causal"], KEEP & (KEY <= ROW)),
    (["--attn-mask", "keep.npy", "--key-padding", "padding.npy"], KEEP & PADDED),
]


@pytest.fixture
def square(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Array, Array]:
    """q.npy and k.npy, B=2, H=4, H_kv=2, S=7, d_k=5, with means; and masks."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(3)
    q, k = rng.standard_normal((2, 4, 7, 5)) + 0.5, rng.standard_normal((2, 2, 7, 5)) - 1
    named = {"q": q, "k": k, "padding": PADDING, "keep": KEEP, "bias": BIAS}
    for name, array in named.items():
        np.save(f"{name}.npy", array)
    return q, k


@pytest.mark.parametrize(
    ("options", "visible"), MASKS, ids=[" ".join(options) for options, _ in MASKS]
)
def test_audits_are_brute_force(
    run: Run, square: tuple[Array, Array], options: list[str], visible: Array
) -> None:
    q, k = square
    scores = attention(q, k, k)["scores"]
    seen = np.broadcast_to(visible, scores.shape)
    records = run("variance", "q.npy", "k.npy", *options, "-f", "json").json["data"]
    assert [(record["batch"], record["head"]) for record in records] == list(np.ndindex(2, 4))
    for record in records:
        place = record["batch"], record["head"]
        cells = scores[place][seen[place]]
        assert record["cells"] == len(cells)
        assert record["mean"] == pytest.approx(cells.mean(), rel=1e-12, abs=1e-12)
        assert record["var"] == pytest.approx(cells.var(), rel=1e-12)
        assert record["scaled_var"] == pytest.approx(cells.var() / 5, rel=1e-12)
        assert record["scale_for_unit_variance"] == pytest.approx(1 / cells.std(), rel=1e-12)


def test_parts_add_up_and_softmax_sees_two_of_them(run: Run, square: tuple[Array, Array]) -> None:
    q, k = square
    scores = attention(q, k, k)["scores"]
    for record in run("variance", "q.npy", "k.npy", "--causal", "-f", "json").json["data"]:
        of_head = scores[record["batch"], record["head"]]
        within = of_head.var(axis=-1).mean()
        assert record["var_all_pairs"] == pytest.approx(of_head.var(), rel=1e-12)
        assert record["var_within_rows"] == pytest.approx(within, rel=1e-12)
        parts = record["var_from_interaction"] + record["var_from_query_mean"]
        assert parts == pytest.approx(record["var_within_rows"], rel=1e-12)
        assert parts + record["var_from_key_mean"] == pytest.approx(of_head.var(), rel=1e-12)


def test_large_means_and_halves(run: Run, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sides = [(1000 + rng.uniform(-1, 1, (300, 16))).astype(np.float32) for _ in range(2)]
    halves = np.full((6, 4), 300, np.float16) * np.array([[1], [-1]] * 3, np.float16)
    paths = [tmp_path / name for name in ("q.npy", "k.npy", "half.npy")]
    arrays: list[Array] = [*sides, halves]
    for path, array in zip(paths, arrays, strict=True):
        np.save(path, array)
    (record,) = run("variance", *paths[:2], "-f", "json").json["data"]
    exact = (sides[0].astype(np.float64) @ sides[1].astype(np.float64).T).var()
    assert record["var"] == pytest.approx(exact, rel=1e-6)
    (record,) = run("variance", paths[2], paths[2], "-f", "json").json["data"]
    assert record["var"] == pytest.approx((4 * 300**2) ** 2)


def test_bundles_groups_and_declared_scales(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    q, k = torch.randn(2, 6, 4).bfloat16(), torch.randn(1, 6, 4).bfloat16()
    tensors = {f"{group}.{role}": t.clone() for group in "ab" for role, t in (("q", q), ("k", k))}
    save_file(tensors, "one.safetensors", metadata={"attncli": '{"a": {"scale": 0.25}}'})
    save_file({"q": q, "k": k}, "two.safetensors")
    answer = run("variance", "one.safetensors", "two.safetensors", "--causal", "-f", "json").json
    places = [(record["source"], record["group"], record["head"]) for record in answer["data"]]
    sources = [("one.safetensors", "a"), ("one.safetensors", "b"), ("two.safetensors", "")]
    assert places == [(*source, head) for source in sources for head in (0, 1)]
    assert [record["scale"] for record in answer["data"]] == [0.25, 0.25, 0.5, 0.5, 0.5, 0.5]
    scores = torch.einsum("hid,hjd->hij", q.double(), k.double().expand(2, 6, 4))
    lower = torch.ones(6, 6).tril().bool()
    expected = [float(head[lower].var(correction=0)) for head in scores] * 3
    assert [record["var"] for record in answer["data"]] == pytest.approx(expected, rel=1e-12)
    text = run("variance", "one.safetensors", "--group", "b").stdout
    assert text.startswith("group b\none.safetensors · B=1 H=2 ")
    assert "· a" not in text


def test_every_head_of_a_real_model_gets_a_sentence(run: Run) -> None:
    path = SAMPLES / "minilm.safetensors"
    records = rows(run("variance", path, "-f", "csv").stdout)
    assert len(records) == 72
    assert all(record["diagnosis"] for record in records)
    text = run("variance", path, "--group", "layers.0").stdout
    told = re.findall(r"^ *(?:(\d+) of 12 heads|head \d+):", text, re.MULTILINE)
    assert sum(int(count or 1) for count in told) == 12


def test_what_comes_after_the_scores_is_said_to_change_nothing(run: Run, files: Path) -> None:
    plain = run("variance", "q.npy", "k.npy", "-f", "csv")
    capped = run("variance", "q.npy", "k.npy", "--softcap", 3, "-f", "csv")
    assert capped.stdout == plain.stdout
    assert "does not depend on it" in capped.stderr


def test_nan_is_refused_or_counted_out(
    run: Run, square: tuple[Array, Array], tmp_path: Path
) -> None:
    q, _ = square
    q[0, 0, 0, 0] = np.nan
    np.save("nan.npy", q)
    assert "1 NaN or inf" in run("variance", "nan.npy", "k.npy", code=1).stderr
    answer = run("variance", "nan.npy", "k.npy", "--allow-nonfinite", "-f", "json").json
    assert answer["data"][0]["var"] is None
    assert answer["data"][1]["var"] is not None


@pytest.mark.parametrize("lengths", [(0, 3), (3, 0), (0, 0)])
def test_nothing_to_measure(run: Run, tmp_path: Path, lengths: tuple[int, int]) -> None:
    for name, length in zip("qk", lengths, strict=True):
        np.save(tmp_path / f"{name}.npy", np.zeros((length, 4)))
    outcome = run("variance", tmp_path / "q.npy", tmp_path / "k.npy")
    assert "nothing to measure" in outcome.stdout


# ── fitted scales ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stage", ["weights", "output"])
@pytest.mark.parametrize("dv", [7, 3])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "left_window": 3, "sinks": [0.1, 0.2, 0.3, 0.4]}]
)
@pytest.mark.parametrize(("scale", "name"), [(5**-0.5, "1/√d_k"), (1.0, "1"), (0.3, "fitted")])
def test_the_scale_that_was_used(
    run: Run,
    square: tuple[Array, Array],
    stage: str,
    dv: int,
    options: dict[str, Any],
    scale: float,
    name: str,
) -> None:
    q, k = square
    v = np.random.default_rng(1).standard_normal((2, 2, 7, dv))
    found = attncli.compute(q, k, v, scale=scale, **options)
    np.save("v.npy", v)
    np.save("found.npy", found.stages[stage].numpy())
    shape = ["--causal", "--left-window", 3, "--sinks", "0.1,0.2,0.3,0.4"] if options else []
    command = ["variance", "q.npy", "k.npy", "v.npy", "--fit-scale", "found.npy", *shape]
    answer = run(*command, "-f", "json").json
    best = answer["data"][0]
    assert (best["name"], best["source"]) == (name, stage)
    assert best["scale"] == pytest.approx(scale, rel=1e-6)
    assert best["rms"] < 1e-9 < min(record["rms"] for record in answer["data"][2:])
    assert f"best: {name} = " in run(*command).stdout


def test_a_tensor_that_is_neither_weights_nor_output(run: Run, files: Path) -> None:
    outcome = run("variance", "q.npy", "k.npy", "v.npy", "--fit-scale", "q.npy", code=1)
    assert "q.npy: expected weights (…, 7) or output (…, 6)" in outcome.stderr


# ── Python ───────────────────────────────────────────────────────────────────────────────────


def test_python_says_what_the_command_says(run: Run, square: tuple[Array, Array]) -> None:
    audited = attncli.variance(*square, causal=True, key_lengths=[5, 3])
    options = ["--causal", "--key-lengths", "5,3", "-f", "json"]
    records = run("variance", "q.npy", "k.npy", *options).json["data"]
    assert [record.var for record in audited.records] == [record["var"] for record in records]
    assert list(audited.diagnoses) == [record["diagnosis"] for record in records]
    drawn = attncli.variance(dk=[8, 16], samples=400, scale_rule=["sqrt", 0.5], dist="laplace")
    options = ["--samples", "400", "--scale-rule", "sqrt,0.5", "--dist", "laplace", "-f", "json"]
    records = run("variance", "--dk", "8,16", *options).json["data"]
    assert [record.scaled_var for record in drawn] == [record["scaled_var"] for record in records]


def test_python_refuses_a_mixture() -> None:
    with pytest.raises(TypeError, match="causal"):
        attncli.variance(causal=True)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="dk"):
        attncli.variance([[1.0]], [[1.0]], dk=3)  # type: ignore[call-overload]
    with pytest.raises(attncli.UsageError, match="expected q and k"):
        attncli.variance([[1.0]])  # type: ignore[call-overload]
    with pytest.raises(attncli.UsageError, match="student-t"):
        attncli.variance(df=3.0)


def test_formulas_in_an_encoding_without_greek() -> None:
    command = [sys.executable, "-m", "attncli", "variance", "--samples", "80"]
    found = subprocess.run(
        [*command, "--correlation", "0.5"],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert b"sigma^4(1 + rho^2(kappa-2))" in b" ".join(found.stdout.split())
    assert b"?" not in found.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--seed 3", "--seed: expected no --logits beside it, which are not drawn"),
        ("--scale 3", "--scale: expected no --logits beside it, got both"),
        ("--plot x.png", "--plot: expected no --logits beside it, got both"),
        ("--dk 0", "--dk: expected finite numbers above 0, got 0"),
        ("--temperatures 1,-2", "--temperatures: expected finite numbers above 0, got -2"),
        ("--logits nan", "--logits: expected finite numbers"),
        ("q.npy k.npy", "expected no files beside it"),
    ],
)
def test_what_does_not_go_with_logits(run: Run, words: str, message: str) -> None:
    assert message in run("variance", "--logits", "1,2", *words.split(), code=2).stderr


def test_logits_at_the_least_temperature_there_is(run: Run) -> None:
    """Divided by it the largest and the others are beyond all numbers."""
    found = run("variance", "--logits", "1,3,3", "--temperatures", "1e-320", "-f", "json").json[
        "data"
    ]
    (cold,) = [one for one in found if one["form"].startswith("softmax(x / 9.99989e-321")]
    assert cold["weights"] == [0.0, 0.5, 0.5]
    assert cold["entropy_bits"] == pytest.approx(1.0)


def test_softmax_of_logits_in_every_format(run: Run) -> None:
    words = ("variance", "--logits", "2,1,0.5", "--dk", "4,9", "--temperature", 2)
    records = run(*words, "-f", "json").json["data"]
    assert [record["form"] for record in records] == [
        *("softmax(x)", "softmax(x / √4)", "softmax(x) / √4", "softmax(x / √9)"),
        *("softmax(x) / √9", "softmax(x / 2)", *["exp(x) / Σ exp(x)"] * 3),
    ]
    assert records[1]["weights"] == records[5]["weights"]
    lines = run(*words, "-f", "csv").stdout.splitlines()
    assert len(lines) == 1 + len(records)
    assert [float(text) for text in lines[1].split(",")[2].split()] == records[0]["weights"]
    table = run(*words, "--digits", 2, "--unit", "nats").stdout
    assert "entropy (nats)" in table
    assert table.splitlines()[1].split()[1:4] == ["float64", "0.63", "0.23"]


@pytest.mark.parametrize("room", [20, 36, 50, 80, 1000])
def test_a_chart_is_as_wide_as_the_terminal_has_room(room: int) -> None:
    curve = Curve("Var", "o", [(8, 8.0), (16, 16.0), (128, 128.0)])
    title, _, *chart = plot("title", [curve], log_y=True, room=room)
    assert title == "title"
    assert max(map(len, chart)) == min(max(room, 27), 63)
    assert [line.count("o") for line in chart].count(1) == 3
    assert chart[-1].split() == ["8", "128"]


def test_a_summary_has_a_record_for_each_group(run: Run) -> None:
    words = ["variance", str(SAMPLES / "minilm.safetensors"), "--head-index", "1:4"]
    heads = run(*words, "-f", "json").json["data"]
    groups = run(*words, "--summary", "-f", "json").json["data"]
    assert [one["group"] for one in groups] == [f"layers.{layer}" for layer in range(6)]
    for one in groups:
        own = [head for head in heads if head["group"] == one["group"]]
        scaled = [head["scaled_var"] for head in own]
        assert (one["heads"], one["dk"]) == (3, 32)
        assert one["scaled_var_mean"] == pytest.approx(sum(scaled) / 3, rel=1e-14)
        assert (one["scaled_var_min"], one["scaled_var_max"]) == (min(scaled), max(scaled))
        shares = [head["var_from_query_mean"] / head["var_within_rows"] for head in own]
        assert one["query_mean_share_mean"] == pytest.approx(sum(shares) / 3, rel=1e-14)
        both = one["query_mean_share_mean"] + one["interaction_share_mean"]
        assert both == pytest.approx(1, rel=1e-12)
        hidden = [head["var_from_key_mean"] / head["var_all_pairs"] for head in own]
        assert one["key_mean_share_mean"] == pytest.approx(sum(hidden) / 3, rel=1e-14)
    table = run(*words, "--summary").stdout.splitlines()
    assert table[0].split()[:3] == ["group", "heads", "d_k"]
    assert table[1].split()[:3] == ["layers.0", "3", "32"]
    alone = run(*words, "--summary", "--group", "layers.2").stdout
    assert alone.startswith("group layers.2\n")
    refused = run(*words[:2], "--summary", "--fit-scale", "w.npy", code=2).stderr
    assert "--summary: expected no --fit-scale beside it, got both" in refused
    assert "expected files of Q and K beside it" in run("variance", "--summary", code=2).stderr


def test_chosen_heads_are_audited_alone(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 6, 4, generator=generator) for heads in (4, 2))
    save_file({"q": q, "k": k}, "b.safetensors")
    records = run("variance", "b.safetensors", "-f", "json").json["data"]
    every = {(record["batch"], record["head"]): record for record in records}
    for heads, batches, wanted in (
        ("3,0", None, [(0, 3), (0, 0), (1, 3), (1, 0)]),
        ("1:3", "-1", [(1, 1), (1, 2)]),
        (None, "0", [(0, head) for head in range(4)]),
    ):
        words = [] if heads is None else ["--head-index", heads]
        words += [] if batches is None else ["--batch-index", batches]
        found = run("variance", "b.safetensors", *words, "-f", "json").json
        assert found["data"] == [every[place] for place in wanted]
        chosen = found["params"]["head_index"]
        assert chosen == (None if heads is None else [h for b, h in wanted if b == wanted[0][0]])
    audited = attncli.variance(q, k, head_index=[3, 0], batch_index=1)
    assert [(one.batch, one.head) for one in audited.records] == [(1, 3), (1, 0)]
    assert audited.records[0].var == every[1, 3]["var"]
    for words, said in (
        (["b.safetensors", "--head-index", "4"], "--head-index: expected an index from -4 to 3"),
        (["--head-index", "1"], "--head-index: expected files of Q and K beside it"),
        (
            ["b.safetensors", "--fit-scale", "w.npy", "--batch-index", "1"],
            "--batch-index: expected no --fit-scale beside it, got both",
        ),
    ):
        assert said in run("variance", *words, code=2).stderr
