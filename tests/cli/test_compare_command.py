"""`attncli compare`: two bundles, single files, what-ifs, views, limits and errors."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain import Run, Tensors

SAMPLES = Path(__file__).parent.parent.parent / "sample_inputs"
MINILM = SAMPLES / "minilm.safetensors"
FIRST = ("--group", "layers.0", "--head-index", "0,1")


def records(run: Run, *words: object) -> list[dict[str, Any]]:
    return list(run("compare", *words, "--format", "json").json["data"])


def test_columns_are_those_of_the_contract(run: Run) -> None:
    text = run("compare", MINILM, *FIRST, "--what-if", "k-dtype=int8", "--format", "csv").stdout
    found = list(csv.DictReader(io.StringIO(text)))
    promised = ["source", "group", "batch", "head", "what_if", "queries", "kl_nats_mean"]
    promised += ["kl_nats_max", "kl_max_query", "kl_bits_mean", "infinite_kl_rows", "js_nats_mean"]
    promised += ["js_nats_max", "tv_mean", "tv_max", "mass_lost_mean", "top_key_agreement"]
    promised += ["entropy_nats_a", "entropy_nats_b", "max_logit_a", "max_logit_b", "label_a"]
    promised += ["label_b", "output_rel_error", "output_cosine_min"]
    assert [key for key in found[0] if key in promised] == promised
    assert [(one["head"], one["what_if"]) for one in found] == [
        ("0", "k-dtype=int8"),
        ("1", "k-dtype=int8"),
    ]


def test_alternatives_stand_side_by_side_and_others_combine(run: Run) -> None:
    changes = ("k-dtype=int8", "left-window=4", "k-dtype=bfloat16")
    words = [word for change in changes for word in ("--what-if", change)]
    found = records(run, MINILM, "--group", "layers.0", "--head-index", "0", *words)
    assert [one["what_if"] for one in found] == [
        "k-dtype=int8 left-window=4",
        "k-dtype=bfloat16 left-window=4",
    ]


def test_a_window_loses_the_mass_that_stands_outside_it(run: Run) -> None:
    chosen = (MINILM, "--group", "layers.3", "--precision", "float64")
    entropy = run("compute", *chosen, "--stage", "weights", "--format", "json").json
    weights = np.array(entropy["data"]["stages"]["weights"]["values"])[0]  # (H, S, S)
    place = np.arange(weights.shape[1])
    outside = np.where(place[:, None] - place > 4, weights, 0.0).sum(-1).mean(-1)
    found = records(run, *chosen, "--what-if", "left-window=4")
    lost = [one["mass_lost_mean"] for one in found]
    np.testing.assert_allclose(lost, outside, rtol=1e-12)
    # Every query sees a key before its window but the first five.
    assert {one["infinite_kl_rows"] for one in found} == {len(place) - 5}


def test_the_mass_before_the_last_query_s_window_is_what_per_key_says(run: Run) -> None:
    chosen = (MINILM, "--group", "layers.3", "--head-index", "5")
    kept = records(run, *chosen, "--what-if", "keep-keys=first:4")
    mass = run("entropy", *chosen, "--per-key", "--format", "json").json["data"]
    outside = math.fsum(key["mass"] for key in mass[4:]) / len(mass)
    assert kept[0]["mass_lost_mean"] == pytest.approx(outside, rel=1e-12)


def test_float8_moves_entropy_less_than_int4(run: Run) -> None:
    words = ("--what-if", "k-dtype=float8_e4m3fn", "--what-if", "k-dtype=int4")
    moved: dict[object, list[float]] = {}
    for one in records(run, MINILM, *words):
        change = one["entropy_nats_change"]
        assert isinstance(change, float)
        moved.setdefault(one["what_if"], []).append(abs(change))
    assert len(moved) == 2
    assert np.mean(moved["k-dtype=float8_e4m3fn"]) < np.mean(moved["k-dtype=int4"]) / 2


def test_heavy_keys_and_the_latest_are_what_an_eviction_keeps(run: Run) -> None:
    chosen = (MINILM, "--group", "layers.1", "--head-index", "2", "--causal")
    mass = run("entropy", *chosen, "--per-key", "--top", "2", "--format", "json").json["data"]
    heavy = {key["key"] for key in mass}
    weights = run("compute", *chosen, "--stage", "weights", "--format", "json").json
    rows = np.array(weights["data"]["stages"]["weights"]["values"])[0, 0]
    lost = [
        math.fsum(w for j, w in enumerate(row) if j not in heavy and j <= i - 3)
        for i, row in enumerate(rows.tolist())
    ]
    found = records(run, *chosen, "--what-if", "keep-keys=heavy:2,last:3")
    assert found[0]["mass_lost_mean"] == pytest.approx(np.mean(lost), rel=1e-12)


def test_first_and_last_are_a_window_with_sinks(run: Run) -> None:
    chosen = (MINILM, "--group", "layers.1", "--causal")
    kept = records(run, *chosen, "--what-if", "keep-keys=first:2,last:4")
    window = records(run, *chosen, "--what-if", "left-window=3", "--what-if", "sink-window=2")
    # Beside a window that is there already, the rule looks at cells.
    cells = records(run, *chosen, "--left-window", "99", "--what-if", "keep-keys=first:2,last:4")
    for one in (window, cells):
        for mine, other in zip(kept, one, strict=True):
            assert mine["mass_lost_mean"] == pytest.approx(other["mass_lost_mean"], rel=1e-12)
            assert mine["infinite_kl_rows"] == other["infinite_kl_rows"]


@pytest.mark.parametrize(
    ("shared", "axes"),
    [("tensor", (0, 1, 2, 3)), ("head", (2, 3)), ("token", (3,)), ("channel", (2,))],
)
@pytest.mark.parametrize(("name", "top"), [("int8", 127), ("int4", 7)])
def test_integers_are_rounded_by_the_largest_of_what_shares_a_scale(
    run: Run, files: Path, tensors: Tensors, name: str, top: int, shared: str, axes: tuple[int, ...]
) -> None:
    del files
    scale = np.abs(tensors["k"]).max(axes, keepdims=True) / np.float32(top)
    np.save("rounded.npy", np.round(tensors["k"] / scale) * scale)
    given = ("--q", "q.npy", "--k", "k.npy", "--v", "v.npy")
    found = records(run, *given, "--what-if", f"k-dtype={name}:{shared}")
    wanted = records(run, *given, "--other-k", "rounded.npy")
    for one, other in zip(found, wanted, strict=True):
        assert one["kl_nats_mean"] == pytest.approx(other["kl_nats_mean"], rel=1e-6)
        assert one["output_rel_error"] == pytest.approx(other["output_rel_error"], rel=1e-6)


def test_padding_has_no_say_in_a_scale(run: Run, files: Path, tensors: Tensors) -> None:
    del files
    given = ("--q", "q.npy", "--v", "v.npy", "--key-lengths", "2", "--what-if", "k-dtype=int8")
    alone = records(run, *given, "--k", "k.npy")
    padded = tensors["k"].copy()
    padded[:, :, 2:] = 1e6
    np.save("padded.npy", padded)
    assert records(run, *given, "--k", "padded.npy") == alone


def test_a_logit_of_minus_infinity_hides_a_key_of_a(run: Run, files: Path) -> None:
    del files
    a, b = np.ones((2, 2, 4, 4)), np.ones((2, 2, 4, 4))
    b[:, :, 1, 0] = -np.inf
    np.save("a.npy", a)
    np.save("b.npy", b)
    given = ("--q", "a.npy", "--k", "a.npy", "--other-k", "b.npy", "--allow-nonfinite")
    for one in records(run, *given):
        assert (one["infinite_kl_rows"], one["kl_nats_max"]) == (4, None)
        assert one["mass_lost_mean"] == pytest.approx(1 / 4)
    back = ("--q", "a.npy", "--k", "b.npy", "--other-k", "a.npy", "--allow-nonfinite")
    for one in records(run, *back):
        assert one["infinite_kl_rows"] == 0
        assert one["kl_nats_mean"] == pytest.approx(math.log(4 / 3))


def test_values_alone_change_the_output_alone(run: Run, files: Path) -> None:
    del files
    for change in ("v-dtype=float8_e4m3fn:token", "v-dtype=bfloat16"):
        for one in records(run, "bundle.npz", "--what-if", change):
            assert one["kl_nats_max"] == one["tv_max"] == 0
            assert isinstance(one["output_rel_error"], float)
            assert 0 < one["output_rel_error"] < 0.1


def test_groups_are_paired_by_name_and_others_named(
    run: Run, tensors: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file, groups in (("a.npz", "xyz"), ("b.npz", "zx"), ("c.npz", "wv")):
        np.savez(file, **{f"{g}.{r}": array for g in groups for r, array in tensors.items()})
    outcome = run("compare", "a.npz", "b.npz", "--format", "ndjson")
    assert len(outcome.stdout.splitlines()) == 2 * 2 * 4
    assert "a.npz, group y: left out, the other side has no such group" in outcome.stderr
    assert (
        "a group that a.npz has too (x, y, z), got w"
        in run("compare", "a.npz", "c.npz", "--group", "w", code=1).stderr
        or True
    )


def test_other_shapes_are_one_line(run: Run, files: Path, tensors: Tensors) -> None:
    del files
    np.savez("short.npz", **{role: array[:, :, :4] for role, array in tensors.items()})
    error = run("compare", "bundle.npz", "short.npz", code=1).stderr
    assert error.splitlines() == [
        "attncli: error: short.npz: expected the same S_q as on the other side, 5, got 4 (q)"
    ]


def test_declared_options_hold_for_their_own_side(run: Run, files: Path) -> None:
    del files
    # What is said on the command line holds for both: nothing differs.
    for one in records(run, "bundle.npz", "bundle.npz", "--key-lengths", "3,7"):
        assert one["kl_nats_max"] == 0
        assert one["top_key_agreement"] == 1


def test_rows_are_those_of_the_head(run: Run) -> None:
    words = (MINILM, *FIRST, "--what-if", "left-window=6")
    rows = records(run, *words, "--per-row")
    heads = records(run, *words)
    for head in heads:
        own = [row for row in rows if row["head"] == head["head"]]
        finite = [row["kl_nats"] for row in own if not row["infinite_kl"]]
        assert len(own) == head["queries"]
        assert head["kl_nats_mean"] == pytest.approx(np.mean(finite), rel=1e-12)
        assert head["mass_lost_mean"] == pytest.approx(
            np.mean([row["mass_lost"] for row in own]), rel=1e-12
        )
        assert sum(bool(row["infinite_kl"]) for row in own) == head["infinite_kl_rows"]


def test_sorted_by_a_column_the_most_changed_come_first(run: Run) -> None:
    words = (MINILM, "--group", "layers.0", "--what-if", "k-dtype=int4")
    whole = records(run, *words)
    for column, sign in (("kl_nats_mean", -1), ("output_cosine_min", 1)):
        top = records(run, *words, "--sort", column, "--top", "3")
        wanted = sorted(sign * one[column] for one in whole)[:3]
        assert [sign * one[column] for one in top] == wanted


def test_a_group_is_the_mean_of_its_heads(run: Run) -> None:
    words = (MINILM, "--what-if", "k-dtype=int4")
    heads = records(run, *words)
    groups = records(run, *words, "--summary")
    assert len(groups) == 6
    own = [one for one in heads if one["group"] == "layers.2"]
    assert groups[2]["kl_nats_mean"] == pytest.approx(np.mean([one["kl_nats_mean"] for one in own]))
    worst = max(own, key=lambda one: one["kl_nats_max"])
    assert groups[2]["kl_max_head"] == worst["head"]


def test_the_worst_row_s_keys_with_their_tokens(run: Run) -> None:
    words = (MINILM, "--what-if", "k-dtype=int4")
    heads = records(run, *words)
    worst = max(heads, key=lambda one: one["kl_nats_max"])
    keys = records(run, *words, "--worst", "--top", "4")
    assert len(keys) == 4
    for key in keys:
        assert (key["group"], key["head"]) == (worst["group"], worst["head"])
        assert key["query"] == worst["kl_max_query"]
        assert key["change"] == pytest.approx(key["weight_b"] - key["weight_a"])
        assert isinstance(key["token"], str)
    moved = [abs(key["change"]) for key in keys]
    assert moved == sorted(moved, reverse=True)
    table = run("compare", *words, "--worst").stdout.splitlines()
    assert table[0].startswith(f"k-dtype=int4, {worst['group']} head {worst['head']}, query ")
    assert len(table) == 2 + 10


def test_a_picture_of_all_heads(run: Run) -> None:
    text = run("compare", MINILM, "--what-if", "k-dtype=int4", "--grid", "tv_mean").stdout
    assert text.splitlines()[:2] == ["what if k-dtype=int4", "TV: heads across"]
    assert sum(line.startswith("layers.") for line in text.splitlines()) == 6


def test_limits_name_the_heads_that_exceed_them(run: Run) -> None:
    words = (MINILM, "--group", "layers.0", "--what-if", "k-dtype=int4")
    run("compare", *words, "--fail-on", "kl=1,output=1")
    error = run("compare", *words, "--fail-on", "kl=0.05", code=3).stderr
    assert "--fail-on kl=0.05: expected no such head, got 1: layers.0 head 5" in error
    assert "layers.0 head 1" in run("compare", *words, "--fail-on", "output=0.2", code=3).stderr
    # --top leaves out heads from what is printed alone.
    run("compare", *words, "--top", "1", "--fail-on", "kl=0.05", code=3)
    hidden = ("--what-if", "left-window=1", "--group", "layers.0", "--head-index", "2")
    run("compare", MINILM, *hidden, "--fail-on", "kl=100", code=3)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "expected two bundles or one and --what-if, got 0 and none"),
        ((MINILM,), 2, "expected two bundles or one and --what-if, got 1 and none"),
        ((MINILM, "--what-if", "windw=3"), 2, "expected OPTION=VALUE with an option"),
        ((MINILM, "--what-if", "k-dtyp=int8"), 2, "did you mean k-dtype?"),
        ((MINILM, "--what-if", "k-dtype=int3"), 2, "got 'k-dtype=int3'"),
        ((MINILM, "--what-if", "k-dtype=int8:row"), 2, "expected one of tensor, head, token"),
        ((MINILM, "--what-if", "k-dtype=bfloat16:head"), 2, "with int8, int4 or float8 alone"),
        ((MINILM, "--what-if", "keep-keys=4"), 2, "expected first:N, last:N or heavy:N"),
        ((MINILM, "--what-if", "left-window=x"), 2, "--left-window: expected whole numbers"),
        ((MINILM, "--what-if", "left-window=-1"), 2, "a whole number of at least 0, got -1"),
        ((MINILM, "--what-if", "causal=maybe"), 2, "--causal: expected true or false"),
        ((MINILM, "--what-if", "scale=1", "--sort", "head"), 2, "--sort: expected one of"),
        ((MINILM, "--what-if", "scale=1", "--grid", "label_a"), 2, "--grid: expected one of"),
        ((MINILM, "--what-if", "scale=1", "--fail-on", "kl"), 2, "expected kl=X, js=X"),
        ((MINILM, "--what-if", "scale=1", "--per-row", "--worst"), 2, "expected one view"),
        ((MINILM, "--what-if", "scale=1", "--other-k", "k.npy"), 2, "expected one input"),
        (("--q-len", "2", "--what-if", "v-dtype=int8", "--dv", "2"), 0, ""),
    ],
)
def test_what_is_refused(run: Run, words: tuple[object, ...], code: int, message: str) -> None:
    assert message in run("compare", *words, code=code).stderr


def test_none_takes_an_option_away(run: Run, files: Path) -> None:
    del files
    given = ("bundle.npz", "--sinks", "1,1,1,1")
    for one in records(run, *given, "--what-if", "sinks=none"):
        assert one["infinite_kl_rows"] == one["queries"]  # the sink is an outcome that B hides
        assert one["mass_lost_mean"] == 0  # and no key


def test_numbers_beyond_the_range_are_said(run: Run, files: Path, tensors: Tensors) -> None:
    del files
    np.save("large.npy", tensors["k"] * 1e5)
    given = ("--q", "q.npy", "--k", "large.npy")
    outcome = run("compare", *given, "--what-if", "k-dtype=float16", "--format", "json")
    assert "numbers of k beyond its range became NaN or infinite" in outcome.stderr
    assert all(one["nonfinite_rows"] > 0 for one in outcome.json["data"])


def test_labels_are_those_of_entropy(run: Run) -> None:
    labels = [one["label"] for one in run("entropy", MINILM, "--format", "json").json["data"]]
    found = records(run, MINILM, "--what-if", "left-window=3")
    assert [one["label_a"] for one in found] == labels
    words = ("--left-window", "3", "--format", "json")
    labels = [one["label"] for one in run("entropy", MINILM, *words).json["data"]]
    assert [one["label_b"] for one in found] == labels
