"""`attncli entropy` against every column written out plainly, and its manners."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain import Run
from plain_entropy import Record, assert_close, plain_head, plain_rows

from attncli.attention.masks.build import build_mask
from attncli.attention.options import AttentionOptions
from attncli.attention.sizes import Sizes

SAMPLES = Path(__file__).parents[2] / "sample_inputs"
MINILM = SAMPLES / "minilm.safetensors"


def numbers(*shape: int, seed: int = 3) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 2


KEEP = np.random.default_rng(8).random((2, 4, 6, 9)) < 0.5
KEEP[1, 2] = False
BIAS = np.where(KEEP, numbers(2, 4, 6, 9, seed=9), -np.inf)
PADDING = np.random.default_rng(5).random((2, 9)) < 0.6
SINKS = np.array([0.5, -3.0, 8.0, 0.0])


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ("", {}),
        ("--causal --query-offset bottom-right", {"causal": True, "query_offset": 3}),
        ("--causal --query-offset=-2", {"causal": True, "query_offset": -2}),
        (
            "--causal --left-window 2 --query-offset 0,3 --prefix 1",
            {"causal": True, "left_window": 2, "query_offset": (0, 3), "prefix": 1},
        ),
        (
            "--left-window 1 --right-window 1 --query-offset 0",
            {"left_window": 1, "right_window": 1, "query_offset": 0},
        ),
        ("--key-lengths 5,0 --query-lengths 6,2", {"key_lengths": (5, 0), "query_lengths": (6, 2)}),
        ("--key-padding padding.npy", {"key_padding": PADDING}),
        ("--attn-mask keep.npy", {"attn_mask": KEEP}),
        ("--attn-mask keep.npy --mask-true drop", {"attn_mask": ~KEEP}),
        ("--attn-mask bias.npy --sinks sinks.npy", {"attn_mask": BIAS, "sinks": SINKS}),
        (
            "--segments 0,0,0,1,1,1,2,2,2 --query-offset 1",
            {"segments": np.repeat([0, 1, 2], 3), "query_offset": 1},
        ),
        ("--alibi --query-offset 2", {"alibi": True, "query_offset": 2}),
        (
            "--alibi-slopes=1,-0.5,0,2 --query-offset 2",
            {"alibi_slopes": np.array([1, -0.5, 0, 2]), "query_offset": 2},
        ),
        ("--sinks 0.5,-3,8,0 --softcap 1.5", {"sinks": SINKS, "softcap": 1.5}),
        ("--scale=-0.7 --temperature 0.5", {"scale": -0.7, "temperature": 0.5}),
        ("--scale 0", {"scale": 0.0}),
        ("--scale=2,-0.5,0,1 --softcap 3", {"scale": (2.0, -0.5, 0.0, 1.0), "softcap": 3.0}),
    ],
)
def test_every_column_of_every_record(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, options: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    q, k = numbers(2, 4, 6, 8), numbers(2, 2, 9, 8, seed=4)
    for name, array in {"q": q, "k": k, "keep": KEEP, "bias": BIAS, "padding": PADDING}.items():
        np.save(f"{name}.npy", array)
    np.save("sinks.npy", SINKS)
    asked = ("entropy", "q.npy", "k.npy", *arguments.split(), "-f")
    known = AttentionOptions(**options)
    tensors = (torch.from_numpy(q), torch.from_numpy(k))
    plain = {(b, h): plain_rows(*tensors, known, b, h) for b in range(2) for h in range(4)}
    every = [row for rows in plain.values() for row in rows]
    rows = run(*asked, "json", "--per-row").json["data"]
    assert len(rows) == len(every)
    for found, expected in zip(rows, every, strict=True):
        assert_close(found, {name: v for name, v in expected.items() if name != "weights"})
    heads = run(*asked, "json").json["data"]
    assert [(head["batch"], head["head"]) for head in heads] == list(plain)
    for found, expected_rows in zip(heads, plain.values(), strict=True):
        assert_close(found, plain_head(expected_rows))
    keys = run(*asked, "json", "--per-key").json["data"]
    assert len(keys) == 8 * 9
    mask = build_mask(known, Sizes(2, 4, 6, 9))
    for found in keys:
        assert_key(found, plain[found["batch"], found["head"]], mask)
    # Chosen heads alone give the same bytes as when they are computed among all.
    one = run(*asked, "ndjson", "--head-index", "-1,1", "--batch-index", "1").stdout.splitlines()
    same = [
        head for index in (3, 1) for head in heads if (head["batch"], head["head"]) == (1, index)
    ]
    for line, expected in zip(one, same, strict=True):
        assert_close(json.loads(line), expected)


def assert_key(found: Record, rows: list[Record], mask: Any) -> None:
    batch, head, key = (slice(found[name], found[name] + 1) for name in ("batch", "head", "key"))
    real = [row["query"] for row in rows]
    seen = np.broadcast_to(
        mask.visible(batch, head, np.array(real, int), key), (1, 1, len(real), 1)
    )
    mass = math.fsum(row["weights"][found["key"]] for row in rows)
    count = int(seen.sum())
    mean = mass / count if count else None
    assert_close(found, {"queries": count, "mass": mass, "mass_mean": mean})


def test_heads_come_in_the_order_asked_for(run: Run) -> None:
    sizes = ("--heads", 4, "--batch", 2, "--q-len", 3, "-f")
    asked = (*sizes, "json", "--head-index", "3,1", "--batch-index", "-1,0")
    heads = run("entropy", *asked).json["data"]
    order = [(1, 3), (1, 1), (0, 3), (0, 1)]
    assert [(head["batch"], head["head"]) for head in heads] == order
    stages = run("compute", *asked, "--stage", "weights").json["data"]["stages"]
    largest = np.max(stages["weights"]["values"], axis=-1).mean(axis=-1).ravel()
    np.testing.assert_allclose([head["max_weight_mean"] for head in heads], largest, rtol=1e-12)


def test_without_positions_nothing_is_said_of_them(run: Run) -> None:
    asked = ("entropy", "--q-len", 5, "--k-len", 9, "--heads", 3)
    document = run(*asked, "-f", "json").json
    assert document["params"]["query_offset"] is None
    for record in document["data"]:
        assert record["distance_mean"] is None
        assert record["label"] not in ("previous-token", "self", "local")
    assert "distance" not in run(*asked).stdout


def test_distances_are_there_where_a_table_is_asked_for_them(run: Run) -> None:
    asked = ("entropy", "--seed", 1, "--causal")
    assert "distance" not in run(*asked).stdout
    named = run(*asked, "--columns", "head,distance_mean").stdout
    (record,) = run(*asked, "-f", "json").json["data"]
    assert f"{record['distance_mean']:.4f}" in named


def test_summary_sums_up_heads(run: Run) -> None:
    heads = run("entropy", MINILM, "-f", "json").json["data"]
    groups = run("entropy", MINILM, "--summary", "-f", "json").json["data"]
    assert [group["group"] for group in groups] == [f"layers.{index}" for index in range(6)]
    for group in groups:
        own = [head for head in heads if head["group"] == group["group"]]
        bits = [head["entropy_bits_mean"] for head in own]
        expected = {
            "heads": 12,
            "entropy_bits_mean": float(np.mean(bits)),
            "entropy_bits_min": min(bits),
            "entropy_bits_max": max(bits),
            "max_logit": max(head["max_logit"] for head in own),
            "sink_mass_mean": float(np.mean([head["sink_mass_mean"] for head in own])),
        }
        assert_close(group, expected)
        assert sum(int(part.split()[0]) for part in group["labels"].split(", ")) == 12


def test_a_broken_key_reaches_those_who_see_it_alone(run: Run, tmp_path: Path) -> None:
    q, k = numbers(1, 2, 6, 4), numbers(1, 1, 6, 4, seed=1)
    np.savez(tmp_path / "sound.npz", q=q, k=k)
    k[0, 0, 2, 1] = np.nan
    np.savez(tmp_path / "broken.npz", q=q, k=k)
    asked = ("--causal", "--allow-nonfinite", "-f", "json")
    rows = run("entropy", tmp_path / "broken.npz", "--per-row", *asked).json["data"]
    sound = run("entropy", tmp_path / "sound.npz", "--per-row", *asked).json["data"]
    for found, expected in zip(rows, sound, strict=True):
        assert found["nonfinite"] == (found["query"] >= 2)
        if found["nonfinite"]:
            assert found["entropy_nats"] is None
            assert found["keys"] == expected["keys"]
        else:
            place = {"source": found["source"]}
            assert_close(found, expected | place)
    heads = run("entropy", tmp_path / "broken.npz", *asked).json["data"]
    assert [head["nonfinite_rows"] for head in heads] == [4, 4]


def test_several_bundles_keep_their_names(run: Run) -> None:
    other = SAMPLES / "minilm-bf16.safetensors"
    asked = ("entropy", MINILM, other, "--group", "layers.0,layers.5")
    document = run(*asked, "-f", "json").json
    places = {(r["source"], r["group"]) for r in document["data"]}
    assert places == {(str(f), f"layers.{n}") for f in (MINILM, other) for n in (0, 5)}
    assert len(document["inputs"]) == 4
    assert f"group layers.5\n{other} · " in run(*asked).stdout
    failed = run(*asked, "--head-index", "2", "--fail-on", "max-logit=20", "-q", code=3)
    assert f"{other} layers.0 head 2" in failed.stderr


def test_groups_with_scales_of_their_own_stand_side_by_side(run: Run, tmp_path: Path) -> None:
    tensors = {
        f"{name}.{role}": numbers(1, 2, 5, d) for name, d in (("a", 4), ("b", 9)) for role in "qk"
    }
    np.savez(tmp_path / "b.npz", **tensors)
    shown = run("entropy", tmp_path / "b.npz", "--compare-scale").stdout
    assert "scale 0.5" in shown
    assert "scale 0.333333" in shown
    records = run("entropy", tmp_path / "b.npz", "--temperatures", "0.5,2", "-f", "json").json[
        "data"
    ]
    for name, heat in {(r["group"], r["temperature"]) for r in records}:
        single = run(
            "entropy", tmp_path / "b.npz", "--group", name, "--temperature", heat, "-f", "json"
        ).json["data"]
        same = [r for r in records if (r["group"], r["temperature"]) == (name, heat)]
        assert same == single


def test_a_sample_of_all_rows_is_exact(run: Run) -> None:
    whole = run("entropy", MINILM, "--group", "layers.1", "-f", "json").json["data"]
    sampled = run("entropy", MINILM, "--group", "layers.1", "--sample-rows", 99, "-f", "json")
    for found, expected in zip(sampled.json["data"], whole, strict=True):
        assert_close(found, expected)
        assert found["entropy_nats_se"] == 0
        ends = found["entropy_nats_ci95_low"], found["entropy_nats_ci95_high"]
        assert ends == (found["entropy_nats_mean"],) * 2
        assert found["sampled_queries"] == 16


def test_a_sample_claims_nothing_of_rows_it_has_not_seen(run: Run) -> None:
    asked = ("entropy", MINILM, "--group", "layers.1", "--sample-rows", 6)
    document = run(*asked, "-f", "json").json
    assert document["params"]["sample_rows"] == 6
    rows = run("entropy", MINILM, "--group", "layers.1", "--per-row", "-f", "json").json["data"]
    drawn = np.sort(np.random.default_rng(0).choice(16, 6, replace=False))
    for record in document["data"]:
        for name in (
            "entropy_nats_min",
            "entropy_nats_max",
            "entropy_nats_std",
            "max_weight_max",
            "max_logit",
            "max_logit_query",
            "max_logit_key",
            "empty_rows",
            "nonfinite_rows",
        ):
            assert record[name] is None, name
        own = [r for r in rows if r["head"] == record["head"] and r["query"] in drawn]
        for name in (
            "keys",
            "entropy_nats",
            "entropy_bits",
            "entropy_normalized",
            "max_weight",
            "effective_keys",
            "logsumexp",
            "sink_mass",
            "distance",
        ):
            values = np.array([row[name] for row in own], float)
            error = values.std(ddof=1) / math.sqrt(6) * math.sqrt(1 - 6 / 16)
            assert record[f"{name}_mean"] == pytest.approx(values.mean(), rel=1e-9), name
            assert record[f"{name}_se"] == pytest.approx(error, rel=1e-9, abs=1e-12), name
            for end, sign in (("low", -1), ("high", 1)):  # 2.5706: Student's t with 5 degrees
                reach = sign * 2.570582 * error
                expected = pytest.approx(values.mean() + reach, abs=2e-3 * error + 1e-12)
                assert record[f"{name}_ci95_{end}"] == expected, name
        top = max(row["max_logit"] for row in own)
        assert record["sampled_max_logit"] == pytest.approx(top, rel=1e-12)
    one = run(*asked, "--head-index", "3", "-f", "json").json["data"]
    assert_close(one[0], document["data"][3])
    shown = run(*asked).stdout
    assert "6 of 16" in shown
    assert "estimated from the sampled rows" in shown
    assert "max logit of the sample" in shown
    assert " ±?" in run("entropy", MINILM, "--group", "layers.1", "--sample-rows", 1).stdout
    assert " ±?" not in shown
    first = document["data"][0]
    reach = first["entropy_bits_ci95_high"] - first["entropy_bits_mean"]
    assert f"{first['entropy_bits_mean']:.4f} ±{reach:.4f}" in shown
    assert "fewer than 20 rows" in " ".join(document["warnings"])


@pytest.mark.parametrize(
    "arguments",
    [
        "--per-row --per-key",
        "--top 3",
        "--grid nothing",
        "--grid label",
        "--histogram",
        "--temperatures 0",
        "--temperatures 1,nan",
        "--temperature 2 --temperatures 1,2",
        "--compare-scale --summary",
        "--sample-rows 3 --per-key",
        "--sample-rows 3 --fail-on nan",
        "--sample-rows 0",
        "--head-index 12",
        "--head-index x",
        "--label-limit sink=2",
        "--label-limit nothing=0.5",
        "--fail-on tired",
        "--fail-on max-logit",
        "--sink-keys 0",
    ],
)
def test_what_makes_no_sense_is_refused(run: Run, arguments: str) -> None:
    failed = run("entropy", MINILM, *arguments.split(), code=2)
    assert not failed.stdout
    assert failed.stderr.startswith("attncli: error: --")


def test_labels_follow_their_limits(run: Run) -> None:
    asked = ("entropy", MINILM, "--group", "layers.0", "--head-index", 2)
    assert run(*asked, "-f", "json").json["data"][0]["label"] == "previous-token"
    assert "previous-token ≥ 0.5" in run(*asked).stdout
    moved = ("--label-limit", "sink=0.01,uniform=0.5")
    document = run("entropy", MINILM, *moved, "-f", "json").json
    assert document["params"]["labels"]["sink"] == 0.01
    assert any(r["label"] == "sink" and r["label_score"] < 0.5 for r in document["data"])


def test_failing_names_the_heads_beside_a_valid_document(run: Run, tmp_path: Path) -> None:
    failed = run("entropy", MINILM, "--fail-on", "max-logit=20", "-f", "json", code=3)
    assert len(failed.json["data"]) == 72
    assert "layers.0 head 2" in failed.stderr
    run("entropy", MINILM, "--fail-on", "max-logit=100,collapsed")
    q = numbers(1, 2, 4, 8)
    q[0, 1, 2, 0] = np.nan
    np.savez(tmp_path / "b.npz", q=q, k=numbers(1, 2, 4, 8, seed=1))
    broken = run("entropy", tmp_path / "b.npz", "--fail-on", "nan", "-f", "json", code=3)
    assert "head 1" in broken.stderr
    assert [r["nonfinite_rows"] for r in broken.json["data"]] == [0, 1]
    run("entropy", tmp_path / "b.npz", code=1)
    once = np.zeros((1, 1, 4, 2), np.float32)
    once[..., 0] = 100
    keys = np.zeros((1, 1, 4, 2), np.float32)
    keys[0, 0, 2, 0] = 100
    np.savez(tmp_path / "c.npz", q=once, k=keys)
    assert "head 0" in run("entropy", tmp_path / "c.npz", "--fail-on", "collapsed", code=3).stderr


@pytest.mark.parametrize(
    "view",
    [
        "",
        "--per-row",
        "--per-key --top 2",
        "--summary",
        "--grid entropy_bits_mean",
        "--grid max_logit",
        "--histogram",
    ],
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_broken_numbers_reach_every_view(run: Run, tmp_path: Path, view: str, value: float) -> None:
    q = numbers(1, 1, 4, 8)
    q[0, 0, 1] = value
    np.savez(tmp_path / "b.npz", q=q, k=numbers(1, 1, 4, 8, seed=1))
    asked = ("entropy", tmp_path / "b.npz", "--allow-nonfinite", *view.split())
    run(*asked)
    document = run(*asked, "-f", "json").json
    assert document["data"]
    if view == "--per-row":
        assert [row["nonfinite"] for row in document["data"]] == [False, True, False, False]
        assert document["data"][1]["entropy_nats"] is None
        lines = list(csv.DictReader(io.StringIO(run(*asked, "-f", "csv").stdout)))
        assert lines[1]["entropy_nats"] == "nan"


def test_tokens_stand_beside_queries_and_keys(run: Run) -> None:
    asked = ("entropy", MINILM, "--group", "layers.0", "--head-index", 2)
    rows = run(*asked, "--per-row").stdout.splitlines()
    assert rows[5].split()[:2] == ["2", "animal"]
    assert rows[5].split().count("the") == 1
    keys = run(*asked, "--per-key", "--top", 1).stdout.splitlines()
    assert keys[3].split()[:2] == ["0", "[CLS]"]
    assert len(keys) == 4


def test_units_and_digits_are_of_tables_alone(run: Run) -> None:
    asked = ("entropy", MINILM, "--group", "layers.0", "--head-index", 0)
    nats = run(*asked, "--unit", "nats", "--digits", 2).stdout
    assert "entropy (nats)" in nats
    record = run(*asked, "-f", "json").json["data"][0]
    assert f"{record['entropy_nats_mean']:.2f}" in nats
    assert f"{record['entropy_bits_mean']:.4f}" in run(*asked).stdout
    for view in ("--summary", "--per-row"):
        shown = run(*asked, view, "--unit", "nats").stdout
        assert "(nats)" in shown
        assert "bits" not in shown


def test_empty_problems_have_records_and_tables(run: Run) -> None:
    for sizes in (("--q-len", 0), ("--k-len", 0), ("--q-len", 0, "--k-len", 0)):
        for view in (
            (),
            ("--per-row",),
            ("--per-key",),
            ("--histogram",),
            ("--summary",),
            ("--grid", "entropy_bits_mean"),
            ("--sample-rows", 2),
            ("--compare-scale",),
        ):
            run("entropy", *sizes, *view)
            run("entropy", *sizes, *view, "-f", "json")


def test_row_entropies_of_one_head_as_a_histogram(run: Run) -> None:
    asked = ("entropy", MINILM, "--group", "layers.0", "--head-index", 2, "--histogram")
    lines = run(*asked).stdout.splitlines()
    assert lines[2].startswith("row entropies of layers.0 head 2")
    assert sum(int(line.split()[3]) for line in lines[4:-1]) == 16
    assert len(lines[4:-1]) == 4  # as many bars as the root of the rows
    assert lines[-1].startswith("16 rows, mean 0.0019 bits")
    even = run("entropy", "--scale", 0, "--q-len", 6, "--histogram").stdout
    assert re.search("3.0000 to 3.0000 +6 +█+\n", even)
    masked = run("entropy", "--causal", "--query-offset=-3", "--histogram").stdout
    assert "3 empty rows left out" in masked


def test_a_picture_changes_no_record(run: Run, tmp_path: Path) -> None:
    arguments = ["entropy", "--heads", "2", "--q-len", "9", "--k-len", "9", "-f", "json"]
    alone = run(*arguments).stdout
    assert "distance_mean" in alone
    assert run(*arguments, "--plot", tmp_path / "heads.svg").stdout == alone
