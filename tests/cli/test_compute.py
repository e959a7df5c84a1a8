"""Options that shape attention, selections, and what is saved, against plain NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from plain import Array, Run, Tensors, assert_stages, attention
from safetensors.numpy import load_file

POSITIONS = np.arange(5)[:, None]
KEYS = np.arange(7)[None]


def padded(lengths: tuple[int, int]) -> Array:
    """Visibility (B, 1, 1, S_k) under key lengths."""
    return (np.array(lengths)[:, None] > KEYS)[:, None, None]


@pytest.mark.parametrize(
    ("options", "visible"),
    [
        ("--causal --query-offset top-left", KEYS <= POSITIONS),
        ("--causal --query-offset bottom-right", KEYS <= POSITIONS + 2),
        ("--causal --query-offset -2", KEYS <= POSITIONS - 2),
        (
            "--causal --query-offset 0,2",
            np.stack([KEYS <= POSITIONS, KEYS <= POSITIONS + 2])[:, None],
        ),
        (
            "--causal --left-window 1 --query-offset 0",
            (KEYS <= POSITIONS) & (KEYS >= POSITIONS - 1),
        ),
        (
            "--left-window 1 --right-window 2 --query-offset 1",
            (KEYS <= POSITIONS + 3) & (KEYS >= POSITIONS),
        ),
        ("--causal --prefix 3 --query-offset 0", (KEYS <= POSITIONS) | (KEYS < 3)),
        ("--key-lengths 3", KEYS < 3),
        ("--key-lengths 5,3", padded((5, 3))),
        ("--key-lengths 5 --key-lengths 3", padded((5, 3))),
        ("--key-padding padding.npy", padded((6, 2))),
        ("--attn-mask mask.npy", KEYS % 2 == 0),
        ("--attn-mask mask.npy --mask-true drop", KEYS % 2 == 1),
        (
            "--attn-mask mask.npy --key-lengths 5,3 --causal --query-offset 0",
            (KEYS % 2 == 0) & padded((5, 3)) & (KEYS <= POSITIONS),
        ),
        (
            "--segments 0,0,0,1,1,1,1 --query-offset 1",
            (KEYS >= 3) == (POSITIONS + 1 >= 3),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_visibility(run: Run, files: Path, tensors: Tensors, options: str, visible: Array) -> None:
    np.save("padding.npy", padded((6, 2))[:, 0, 0])
    np.save("mask.npy", np.broadcast_to(KEYS % 2 == 0, (5, 7)))
    found = run("compute", "bundle.npz", *options.split(), "-f", "json").json["data"]
    expected = attention(**tensors, visible=visible)
    assert_stages(found, expected)
    hidden = int((~np.broadcast_to(visible, (2, 4, 5, 7))).sum())
    assert found["stages"]["weights"]["n_masked"] == hidden
    assert found["stages"]["masked"]["n_neginf"] == 0
    assert_statistics(found["stages"]["scores"], expected["scores"], visible)
    assert_statistics(found["stages"]["weights"], expected["weights"], visible)


def assert_statistics(record: dict[str, float], values: Array, visible: Array) -> None:
    """Extremes and moments are NumPy's, over the visible cells."""
    cells = values[np.broadcast_to(visible, values.shape)]
    expected = {"min": cells.min(), "max": cells.max(), "mean": cells.mean(), "std": cells.std()}
    for name, value in expected.items():
        assert record[name] == pytest.approx(value, abs=1e-12), name


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ("--scale 0.3", lambda s, raw: 0.3 * raw),
        ("--scale 0", lambda s, raw: 0 * raw),
        ("--scale -1", lambda s, raw: -raw),
        ("--scale 2,0,-3,.5", lambda s, raw: np.array([2, 0, -3, 0.5])[:, None, None] * raw),
        ("--temperature 2", lambda s, raw: s / 2),
        ("--softcap 1.5", lambda s, raw: 1.5 * np.tanh(s / 1.5)),
        ("--attn-mask bias.npy", lambda s, raw: s + np.arange(7) / 10),
    ],
)
def test_logits(run: Run, files: Path, tensors: Tensors, options: str, change: object) -> None:
    np.save("bias.npy", np.arange(7) / 10)
    found = run("compute", "bundle.npz", *options.split(), "-f", "json").json["data"]
    plain = attention(**tensors)
    masked = change(plain["scaled"], plain["scores"])  # type: ignore[operator]
    weights = np.exp(masked) / np.exp(masked).sum(-1, keepdims=True)
    assert_stages(found, {"scores": plain["scores"], "masked": masked, "weights": weights})
    assert ("capped" in found["stages"]) == ("softcap" in options)


def test_sinks_take_their_share(run: Run, files: Path) -> None:
    np.save("one.npy", np.ones((1, 1)))
    np.save("two.npy", np.array([[1.0], [2.0]]))
    found = run("compute", "one.npy", "two.npy", "--sinks", "0.5", "-f", "json").json["data"]
    weights = found["stages"]["weights"]["values"][0][0][0]
    np.testing.assert_allclose(weights, [0.231224, 0.628532], atol=5e-7)


def test_padded_queries_are_in_no_record(run: Run, files: Path, tensors: Tensors) -> None:
    options = ("bundle.npz", "--query-lengths", "5,2", "--stage", "weights")
    found = run("compute", *options, "-f", "json").json["data"]["stages"]["weights"]
    values = np.array(found["values"], float)
    assert np.isnan(values[1, :, 2:]).all()
    assert np.isfinite(values[0]).all()
    assert found["mean"] == pytest.approx(1 / 7)
    lines = run("compute", *options, "-f", "csv").stdout.splitlines()
    assert len(lines) == 1 + 4 * (5 + 2) * 7
    assert "(padding)" in run("compute", *options).stdout


def test_empty_rows(run: Run, files: Path) -> None:
    np.save("i.npy", np.eye(2))
    np.save("v2.npy", np.array([[1.0, 2.0], [3.0, 4.0]]))
    np.save("m.npy", np.array([[True, False], [False, False]]))
    found = run("compute", "i.npy", "i.npy", "v2.npy", "--attn-mask", "m.npy", "-f", "json").json
    assert found["data"]["stages"]["output"]["values"] == [[[[1.0, 2.0], [0.0, 0.0]]]]


def test_non_finite_input_is_named_and_may_be_let_through(run: Run, files: Path) -> None:
    q = np.eye(3)
    q[1, 2] = np.nan
    np.save("nan.npy", q)
    failed = run("compute", "nan.npy", "nan.npy", code=1)
    assert "q (nan.npy): expected finite values, got 1 NaN or inf, the first at" in failed.stderr
    assert "--allow-nonfinite" in failed.stderr
    found = run("compute", "nan.npy", "nan.npy", "--allow-nonfinite", "-f", "json").json
    scores = found["data"]["stages"]["scores"]
    assert (scores["n_nan"], scores["values"][0][0][0][0]) == (5, 1.0)
    assert scores["values"][0][0][1][0] is None


def test_selections(run: Run, files: Path, tensors: Tensors) -> None:
    options = ("--rows", "0,-1", "--rows", "2", "--head-index", "-1", "--batch-index", "1")
    found = run("compute", "bundle.npz", *options, "-f", "json").json["data"]
    plain = attention(**tensors)
    chosen = {name: array[1:, 3:, [0, 4, 2]] for name, array in plain.items()}
    assert_stages(found, chosen)
    assert (found["batches"], found["heads"], found["rows"]) == ([1], [3], [0, 4, 2])
    lines = run("compute", "bundle.npz", *options, "--stage", "output", "-f", "csv").stdout
    assert lines.splitlines()[7].startswith("output,1,3,4,0,")
    assert "not shown" not in run("compute", "bundle.npz", *options).stdout


def test_precision_and_what_it_was(run: Run, files: Path) -> None:
    for asked, used in (("auto", "float64"), ("float32", "float32"), ("float64", "float64")):
        found = run("compute", "bundle.npz", "--precision", asked, "-f", "json").json
        assert found["params"]["compute_dtype"] == used
    assert found["params"]["device"] == "cpu"


@pytest.mark.parametrize("target", ["out.npz", "out.safetensors", "folder", "folder/"])
def test_saved_stages(run: Run, files: Path, tensors: Tensors, target: str) -> None:
    options = ("--stage", "weights,output", "--causal", "--query-offset", "0", "--rows", "1,3")
    outcome = run("compute", "bundle.npz", *options, "--save", target)
    assert f"wrote {target}" in outcome.stderr
    if target == "out.safetensors":
        saved = load_file(target)
    elif target == "out.npz":
        saved = dict(np.load(target))
    else:
        saved = {path.stem: np.load(path) for path in Path("folder").iterdir()}
    plain = attention(**tensors, visible=KEYS <= POSITIONS)
    assert sorted(saved) == ["output", "weights"]
    for name, array in saved.items():
        np.testing.assert_allclose(array, plain[name][:, :, [1, 3]], atol=1e-12)


def test_saved_groups_keep_their_names_in_every_format(run: Run, files: Path) -> None:
    np.savez("g.npz", **{f"{g}.{r}": np.eye(2) for g in "ab" for r in "qk"})
    for form in ("table", "json", "csv", "ndjson"):
        run("compute", "g.npz", "--stage", "weights", "--save", f"{form}.npz", "-f", form)
        assert sorted(np.load(f"{form}.npz")) == ["a.weights", "b.weights"]


def test_the_cost_is_in_the_record(run: Run, files: Path) -> None:
    cost = run("compute", "bundle.npz", "-f", "json").json["data"]["cost"]
    pairs = 2 * 4 * 5 * 7
    assert cost["scores_operations"] == 2 * pairs * 8
    assert cost["output_operations"] == 2 * pairs * 6
    assert cost["matrix_bytes"] == 8 * pairs


def test_saved_stages_say_that_they_keep_no_layout(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for role in "qkv":
        np.save(f"{role}.npy", np.random.default_rng(0).standard_normal((1, 3, 2, 4)))
    words = ["q.npy", "k.npy", "v.npy", "--layout", "bshd"]
    answer = run("compute", *words, "--stage", "output", "--save", "o.npz")
    assert "o.npz is (B, H, S, d) whatever --layout says" in answer.stderr
    with np.load("o.npz") as saved:
        assert saved["output"].shape == (1, 2, 3, 4)
    # A plain run has nothing to say of it.
    assert "whatever" not in run("compute", "--save", "e.npz").stderr
