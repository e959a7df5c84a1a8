"""Pictures hold the numbers of the commands, name what they show, and are the same bytes twice."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from safetensors.numpy import save_file

from attncli.report.canvas import Picture

Run = Callable[..., Any]
SAMPLES = Path(__file__).parents[2] / "sample_inputs"

MINILM = SAMPLES / "minilm.safetensors"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Picture]:
    """The pictures that commands make, in the place of files; a folder of one's own."""
    made: list[Picture] = []
    monkeypatch.setattr(Picture, "write", lambda self, target: made.append(self))
    monkeypatch.chdir(tmp_path)
    return made


def panels(figure: Figure) -> dict[str, Axes]:
    """The axes of a picture by their titles, without those of colour scales."""
    return {axes.get_title(loc="left"): axes for axes in figure.axes if axes.get_title(loc="left")}


def values(axes: Axes) -> Any:
    """The numbers of a map, NaN where it shows none."""
    return np.ma.filled(axes.images[0].get_array().astype(float), np.nan)


def texts(axes: Axes, which: str) -> list[str]:
    return [label.get_text() for label in getattr(axes, f"get_{which}ticklabels")()]


# ── what they show ───────────────────────────────────────────────────────────────────────────


def test_stages_are_side_by_side_with_their_numbers(run: Run, drawn: list[Picture]) -> None:
    stages = run("compute", "--causal", "--plot", "x.png", "-f", "json").json["data"]["stages"]
    (figure,) = drawn
    shown = panels(figure)
    assert [title.split()[0].rstrip(":") for title in shown] == list(stages)
    for axes, stage in zip(shown.values(), stages.values(), strict=True):
        cells = np.array(stage["values"], float)[0, 0]
        found = values(axes)
        expected = np.where(np.isnan(found), np.nan, cells)
        np.testing.assert_allclose(
            found, expected, atol=0.026 if "weight" in axes.get_title(loc="left") else 1e-12
        )
        assert axes.get_xlabel() in ("key", "value dimension")
    weights = shown["weights = softmax(masked)"]
    assert np.isnan(values(weights)).tolist() == np.triu(np.ones((4, 4), bool), 1).tolist()
    assert [text.get_text() for text in weights.texts] == [
        f"{cell:.4f}"
        for row, cells in enumerate(np.array(stages["weights"]["values"])[0, 0])
        for cell in cells[: row + 1]
    ]
    assert figure.texts[0].get_text() == "attncli compute --causal"


def test_heads_stand_below_each_other_with_their_tokens(run: Run, drawn: list[Picture]) -> None:
    run(
        "compute",
        MINILM,
        "--group",
        "layers.0",
        "--group",
        "layers.3",
        "--head-index",
        "1,2",
        "--stage",
        "weights",
        "--plot",
        "x.svg",
    )
    maps = [axes for axes in drawn[0].axes if axes.images]
    assert [axes.get_ylabel() for axes in maps] == [
        f"query of layers.{n} head {h}" for n in (0, 3) for h in (1, 2)
    ]
    assert texts(maps[0], "x")[:3] == ["[CLS]", "the", "animal"]
    assert texts(maps[0], "y")[0] == "[CLS]"


def test_no_more_heads_than_have_room(run: Run, drawn: list[Picture]) -> None:
    run("compute", MINILM, "--group", "layers.0", "--plot", "x.png", "--stage", "scaled")
    assert sum(bool(axes.images) for axes in drawn[0].axes) == 4
    assert drawn[0].texts[0].get_text().endswith("4 of 12 heads")


def test_large_maps_are_means_and_say_so(run: Run, drawn: list[Picture]) -> None:
    sizes = "--q-len", 300, "--k-len", 200, "--dk", 4
    run("compute", *sizes, "--max-values", 0, "--plot", "x.png", "-q", "-o", "out")
    figure = drawn[0]
    assert "300 × 200 cells as 128 × 128 means" in figure.texts[0].get_text()
    assert {values(axes).shape[0] for axes in panels(figure).values()} == {128}


def test_all_heads_in_four_panels(run: Run, drawn: list[Picture]) -> None:
    records = run("entropy", MINILM, "--plot", "x.png", "-f", "json").json["data"]
    shown = panels(drawn[0])
    assert list(shown) == [
        "Mean entropy (bits)",
        "Mean weight on the first key (0 to 1)",
        "Entropy along the sequence",
        "Mean weight of each key",
    ]
    for title, key in (
        ("Mean entropy (bits)", "entropy_bits_mean"),
        ("Mean weight on the first key (0 to 1)", "sink_mass_mean"),
    ):
        expected = np.array([record[key] for record in records]).reshape(6, 12)
        np.testing.assert_allclose(values(shown[title]), expected, rtol=1e-12)
        assert texts(shown[title], "y") == [f"layers.{n}" for n in range(6)]
        assert shown[title].get_xlabel() == "head"
    rows = run("entropy", MINILM, "--per-row", "-f", "json").json["data"]
    curves = {
        line.get_label(): line.get_ydata() for line in shown["Entropy along the sequence"].lines
    }
    of_rows = np.array([row["entropy_bits"] for row in rows]).reshape(6, 12, 16).mean(1)
    for layer, expected in enumerate(of_rows):
        np.testing.assert_allclose(curves[f"layers.{layer}"], expected, rtol=1e-9)
    keys = run("entropy", MINILM, "--per-key", "-f", "json").json["data"]
    means = np.array([key["mass_mean"] for key in keys]).reshape(6, 12, 16).mean(1)
    np.testing.assert_allclose(values(shown["Mean weight of each key"]), means, rtol=1e-6)
    assert shown["Entropy along the sequence"].get_ylabel().startswith("entropy (bits)")


@pytest.mark.parametrize(
    ("view", "title"),
    [
        (["--per-row"], "Entropy along the sequence"),
        (["--per-key"], "Mean weight of each key"),
        (["--grid", "max_logit"], "Max logit"),
        (["--histogram", "--head-index", "1"], "Entropy of 16 rows"),
    ],
)
def test_a_view_is_drawn_alone(run: Run, drawn: list[Picture], view: list[str], title: str) -> None:
    run("entropy", MINILM, "--group", "layers.1", *view, "--unit", "nats", "--plot", "x.pdf")
    assert list(panels(drawn[0])) == [title]


def test_a_histogram_counts_rows(run: Run, drawn: list[Picture]) -> None:
    run(
        "entropy",
        MINILM,
        "--group",
        "layers.1",
        "--head-index",
        "1",
        "--histogram",
        "--plot",
        "x.pdf",
    )
    (axes,) = panels(drawn[0]).values()
    assert sum(bar.get_height() for bar in axes.patches) == 16
    assert axes.get_xlabel() == "entropy (bits)"


def test_a_sweep_beside_its_theory(run: Run, drawn: list[Picture]) -> None:
    command = ("variance", "--dk", "4,16,64", "--samples", "2000", "--scale-rule", "sqrt,linear")
    records = run(*command, "--plot", "x.png", "-f", "json").json["data"]
    shown = list(panels(drawn[0]).values())
    for axes, keys in zip(
        shown,
        (
            ("var", "scaled_var"),
            ("entropy_bits_unscaled", "entropy_bits_scaled"),
            ("softmax_grad_unscaled", "softmax_grad_scaled"),
        ),
        strict=True,
    ):
        curves = {line.get_label(): line.get_ydata() for line in axes.lines}
        rules = {
            "not scaled": ("sqrt", keys[0]),
            "÷ √dₖ": ("sqrt", keys[1]),
            "scale linear": ("linear", keys[1]),
        }
        for name, (rule, key) in rules.items():
            assert list(curves[name]) == [r[key] for r in records if r["rule"] == rule]
        assert axes.get_xlabel() == "dₖ (entries of a query)"
        assert texts(axes, "x") == ["4", "16", "64"]
        assert {text.get_text() for text in axes.texts} == set(rules)
    theory = [line for line in shown[0].lines if line.get_linestyle() == ":"]
    assert list(theory[0].get_ydata()) == [4, 16, 64]
    assert "95 % interval" in shown[0].get_ylabel()


def test_parts_of_real_heads_add_up(run: Run, drawn: list[Picture]) -> None:
    records = run("variance", MINILM, "--plot", "x.png", "-f", "json").json["data"]
    above, below = panels(drawn[0]).values()
    assert list(above.lines[0].get_ydata()) == [record["var"] for record in records]
    first = [bar.get_height() for bar in below.containers[0]]
    assert first == [record["var_from_interaction"] / record["var_all_pairs"] for record in records]
    assert "layers.5" in [text.get_text() for text in above.texts]
    drawn[0].draw_without_rendering()
    boxes = [label.get_window_extent() for label in below.get_xticklabels()]
    assert all(one.x1 < other.x0 for one, other in pairwise(boxes))
    totals = np.sum([[bar.get_height() for bar in bars] for bars in below.containers], axis=0)
    np.testing.assert_allclose(totals, 1, rtol=1e-9)


def test_a_mask_is_filled_where_it_shows(run: Run, drawn: list[Picture]) -> None:
    run("mask", "--causal", "--left-window", "2", "--q-len", "7", "--plot", "x.png")
    (axes,) = panels(drawn[0]).values()
    band = np.tri(7, dtype=bool) & ~np.tri(7, k=-3, dtype=bool)
    np.testing.assert_array_equal(values(axes), np.where(band, 1.0, np.nan))
    assert axes.get_xlabel() == "18 of 49 visible · keys a query 1–3"


def test_two_masks_in_three_colours(run: Run, drawn: list[Picture]) -> None:
    np.save("other.npy", np.tri(6, k=1, dtype=bool))
    run(
        "mask",
        "--causal",
        "--left-window",
        "2",
        "--q-len",
        6,
        "--against",
        "other.npy",
        "--plot",
        "x.png",
        code=3,
    )
    (axes,) = panels(drawn[0]).values()
    mine, other = np.tri(6, dtype=bool) & ~np.tri(6, k=-3, dtype=bool), np.tri(6, k=1, dtype=bool)
    expected = np.select([other & ~mine, mine & ~other, mine & other], [3, 2, 1], 0)
    np.testing.assert_array_equal(values(axes), expected)
    counts = [int(part.sum()) for part in (mine & other, mine & ~other, other & ~mine)]
    assert axes.get_xlabel() == "visible in both {} · this alone {} · other alone {}".format(
        *counts
    )


def test_weights_before_the_mask_and_after(run: Run, drawn: list[Picture]) -> None:
    run("mask", MINILM, "--group", "layers.2", "--effect", "--causal", "--plot", "x.png")
    before, seen, after = panels(drawn[0]).values()
    weights = [
        run(
            "compute",
            MINILM,
            "--group",
            "layers.2",
            "--head-index",
            0,
            "--stage",
            "weights",
            *more,
            "-f",
            "json",
        ).json
        for more in ([], ["--causal"])
    ]
    plain, masked = (
        np.array(one["data"]["stages"]["weights"]["values"], float)[0, 0] for one in weights
    )
    np.testing.assert_allclose(values(before), plain, rtol=1e-6)
    visible = np.tri(16, dtype=bool)
    np.testing.assert_array_equal(values(seen), np.where(visible, 1.0, np.nan))
    np.testing.assert_allclose(values(after)[visible], masked[visible], rtol=1e-6)


def test_what_a_change_does_to_every_head(run: Run, drawn: list[Picture]) -> None:
    of = MINILM, "--group", "layers.0", "--what-if", "temperature=2", "--what-if", "temperature=4"
    records = run("compare", *of, "--plot", "x.png", "-f", "json").json["data"]
    shown = panels(drawn[0])
    titles = ("Weight that moved, mean over rows (0 to 1)", "Change of the output (÷ its size)")
    for title, key in zip(titles, ("tv_mean", "output_rel_error"), strict=True):
        found = {(one["what_if"], one["head"]): one[key] for one in records}
        expected = [[found[f"temperature={t}", head] for head in range(12)] for t in (2, 4)]
        np.testing.assert_allclose(values(shown[title]), expected, rtol=1e-12)
    run("compare", *of, "--grid", "kl_bits_mean", "--plot", "x.png", "-o", "out")
    assert list(panels(drawn[1])) == ["KL (bits)"]


def test_where_a_candidate_is_off(run: Run, drawn: list[Picture]) -> None:
    of = MINILM, "--group", "layers.0"
    run("compute", *of, "--causal", "--stage", "output", "--save", "a.npz", "-q", "-o", "out")
    run("check", *of, "--actual-output", "a.npz", "--plot", "x.png", "-o", "out", code=3)
    figure = drawn[0]
    assert "explained by causal:added" in figure.texts[0].get_text()
    shown = panels(figure)
    assert list(shown) == ["output: OFF", "Largest of each query"]
    off, along = shown.values()
    cells = values(off)
    # The last query sees every key, causal or not: it is right and grey.
    assert np.isnan(cells).all(-1).tolist() == [False] * 15 + [True]
    heights = along.lines[0].get_ydata()
    np.testing.assert_allclose(heights[:15], cells[:15].max(-1), rtol=1e-12)
    assert heights[15] == 1e-3
    assert along.lines[1].get_ydata() == [1, 1]
    worst = run("check", *of, "--actual-output", "a.npz", "-f", "json", code=3).json["data"]
    _, _, row, column = worst["records"][0]["worst_index"]
    assert off.patches[0].get_xy() == (column - 0.5, row - 0.5)


def test_a_candidate_that_passes_stays_below_what_is_allowed(
    run: Run, drawn: list[Picture]
) -> None:
    of = MINILM, "--group", "layers.0"
    run("compute", *of, "--stage", "weights", "--save", "a.npz", "--precision", "float32", "-q")
    run("check", *of, "--actual-weights", "a.npz", "--plot", "x.png")
    shown = panels(drawn[0])
    assert list(shown) == ["weights: passed", "Largest of each query"]
    assert 0 < np.nanmax(values(shown["weights: passed"])) <= 1
    assert shown["weights: passed"].get_xlabel() == "key"


# ── how they are written ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_every_format_opens_and_is_the_same_twice(run: Run, tmp_path: Path, suffix: str) -> None:
    targets = [tmp_path / f"{n}.{suffix}" for n in range(2)]
    for target in targets:
        outcome = run("mask", "--causal", "--q-len", 5, "--plot", target)
        assert outcome.stderr.endswith(f"attncli: wrote {target}\n")
    first, second = (target.read_bytes() for target in targets)
    assert first == second
    assert sorted(tmp_path.iterdir()) == targets
    if suffix == "png":
        with Image.open(io.BytesIO(first)) as image:
            assert min(image.size) > 500
    elif suffix == "svg":
        words = "".join(ElementTree.fromstring(first).itertext())
        assert all(
            word in words
            for word in ("attncli mask --q-len 5 --causal", "query", "15 of 25 visible")
        )
    else:
        assert first.startswith(b"%PDF-")
        assert first.rstrip().endswith(b"%%EOF")


def test_tokens_of_any_script_are_drawn_or_named(run: Run, tmp_path: Path) -> None:
    """Warnings are errors here: a glyph that no font has would be one."""
    tokens = ["[CLS]", "注意", "🤖", "$x^2$", "</b>", "\n", "", "é", "ब", "a" * 60]
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal((1, 1, 10, 4), np.float32) for name in "qkv"}
    save_file(
        tensors, tmp_path / "b.safetensors", {"attncli": json.dumps({"*": {"labels": tokens}})}
    )
    for suffix in ("png", "svg", "pdf"):
        target = tmp_path / f"x.{suffix}"
        run("compute", tmp_path / "b.safetensors", "--stage", "weights", "--plot", target)
    run("entropy", tmp_path / "b.safetensors", "--plot", tmp_path / "y.png")
    words = (tmp_path / "x.svg").read_text("utf-8")
    assert "U+1F916" in words
    assert "$x^2$" in words


@pytest.mark.parametrize("target", ["x.gif", "x", "-"])
def test_other_names_are_refused(
    run: Run, tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run("mask", "--plot", target, code=2)
    assert "--plot: expected a name that ends in .png, .svg or .pdf, got" in outcome.stderr
    assert outcome.stdout == ""
    assert not any(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_refused_before_anything_is_printed(
    run: Run, tmp_path: Path
) -> None:
    outcome = run("compute", "--plot", tmp_path / "no" / "x.png", code=1)
    assert "expected a folder" in outcome.stderr
    assert outcome.stdout == ""


def test_without_matplotlib_it_says_what_to_install(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "attncli.report.canvas", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    outcome = run("entropy", MINILM, "--plot", tmp_path / "x.png", code=2)
    assert outcome.stderr.splitlines() == [
        "attncli: error: --plot: expected matplotlib, got none",
        "  pip install 'attncli[plot]'",
    ]


@pytest.mark.parametrize(
    "more", [["--sample-rows", "4"], ["--compare-scale"], ["--temperatures", "1,2"]]
)
def test_what_has_no_picture_is_refused(run: Run, tmp_path: Path, more: list[str]) -> None:
    outcome = run("entropy", MINILM, *more, "--plot", tmp_path / "x.png", code=2)
    assert outcome.stderr.startswith("attncli: error: --plot: expected")


@pytest.mark.parametrize("command", ["compute", "entropy", "mask"])
@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (1, 1)])
def test_no_cell_is_drawn_as_a_hidden_one(
    run: Run, drawn: list[Picture], command: str, sizes: tuple[int, int]
) -> None:
    q_len, k_len = sizes
    run(command, "--q-len", q_len, "--k-len", k_len, "--plot", "x.png", "-q", "-o", "out")
    drawn[0].draw_without_rendering()
    first = next(axes for axes in drawn[0].axes if axes.images)
    assert values(first).shape == (1, 1)
    assert np.isnan(values(first)).all() == (0 in sizes)


def test_one_large_head_does_not_wash_out_the_others(run: Run, drawn: list[Picture]) -> None:
    run("compute", MINILM, "--group", "layers.0", "--stage", "scores", "--plot", "x.png")
    maps = [axes.images[0] for axes in drawn[0].axes if axes.images][:4]
    reach = [float(np.abs(image.get_array()).max()) for image in maps]
    assert max(reach) > 3 * np.median(reach)
    assert {image.norm.vmax for image in maps} == {3 * np.median(reach)}
    assert maps[-1].colorbar.extend == "both"


def test_curves_that_end_together_have_names_apart(run: Run, drawn: list[Picture]) -> None:
    run(
        "variance",
        "--dk",
        "8,64",
        "--samples",
        "500",
        "--scale-rule",
        "sqrt,1,2,3,4",
        "--plot",
        "x.png",
    )
    figure = drawn[0]
    figure.draw_without_rendering()
    for axes in panels(figure).values():
        boxes = sorted(text.get_window_extent().y0 for text in axes.texts)
        assert min(np.diff(boxes)) > 10
    assert math.isfinite(boxes[0])
