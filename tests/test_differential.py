"""Random problems over all options: every column of every command is what brute force says.

`ATTNCLI_PROBLEMS=5000 ATTNCLI_FIRST=100 pytest tests/test_differential.py` tries those with the
numbers 100 to 4,999. A number makes the same problem everywhere, and a failure names it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain_attention import LIMITS, PLACES, Array, PlainAttention, Record

Run = Callable[..., Any]

FIRST = int(os.environ.get("ATTNCLI_FIRST", "0"))
PROBLEMS = int(os.environ.get("ATTNCLI_PROBLEMS", "40"))
# Options that the mask does not depend on; `mask` refuses them.
OF_THE_SOFTMAX = ("scale", "temperature", "softcap", "sinks", "alibi", "alibi_slopes")
FILES = ("key_padding", "attn_mask", "segments")
LOW = [-1e4, -1e9, float(np.finfo(np.float32).min)]


@pytest.mark.parametrize("part", range(4))
def test_every_column_is_what_brute_force_says(
    part: int, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(FIRST + part, PROBLEMS, 4):
        problem = random_problem(number)
        try:
            assert_commands(run, problem)
        except BaseException as error:
            error.add_note(
                f"problem {number}: {problem.q.shape} {problem.k.shape} {problem.options}"
            )
            raise


def random_problem(number: int) -> PlainAttention:
    """The problem of that number."""
    rng = np.random.default_rng(number)

    def maybe(share: float = 0.4) -> bool:
        return bool(rng.random() < share)

    def whole(low: int, high: int) -> int:
        return int(rng.integers(low, high + 1))

    batch, kv_heads, q_len, k_len = whole(1, 3), whole(1, 2), whole(0, 7), whole(0, 8)
    heads, dk, dv = kv_heads * whole(1, 3), whole(1, 6), whole(1, 4)
    if maybe(0.03):  # beyond a tile
        batch, heads, kv_heads, q_len, k_len = 1, 1, 1, whole(500, 540), whole(1000, 1100)
    dtype = [np.float64, np.float32, np.float16][whole(0, 2)]
    spread, shared = [0.1, 1.0, 4.0][whole(0, 2)], 1 if maybe(0.1) else batch
    shapes = (batch, heads, q_len, dk), (shared, kv_heads, k_len, dk), (shared, kv_heads, k_len, dv)
    tensors = [(rng.standard_normal(shape) * spread).astype(dtype) for shape in shapes]
    if maybe(0.2):  # small whole numbers, of which many products are equal
        tensors = [rng.integers(-2, 3, shape).astype(dtype) for shape in shapes]
    if maybe(0.1):
        for tensor in tensors[:2]:
            odd = rng.random(tensor.shape) < 0.05
            tensor[odd] = rng.choice([math.nan, math.inf, -math.inf], int(odd.sum()))
    options: dict[str, Any] = {}
    if maybe():
        each = [float(rng.choice([0.0, -0.5, 0.7, 2.0])) for _ in range(heads)]
        options["scale"] = tuple(each) if maybe() else each[0]
    for name in ("temperature", "softcap"):
        if maybe(0.3):
            options[name] = float(rng.choice([0.5, 1.5, 3.0, 30.0]))
    for name in ("sinks", "alibi_slopes"):
        if maybe(0.25):
            options[name] = tuple(float(x) for x in rng.choice([0.5, -1.5, 0.0, 3.0], heads))
    for name in ("causal", "alibi"):
        if maybe(0.5 if name == "causal" else 0.2):
            options[name] = True
    for name, most in (("left_window", 6), ("right_window", 4)):
        if maybe(0.35):
            options[name] = whole(0, most)
    if "left_window" in options and maybe():
        options["sink_window"] = whole(0, 3)
    if {"left_window", "right_window"} & options.keys() and maybe():
        options["dilation"] = whole(1, 3)
    if "causal" in options and maybe(0.3):
        options["prefix"] = whole(0, 4)
    if k_len and maybe(0.3):
        shape = (batch, k_len) if maybe() else (k_len,)
        options["segments"] = np.sort(rng.integers(0, 3, shape))
    for name, most in (("key_lengths", k_len), ("query_lengths", q_len)):
        if maybe(0.25):
            options[name] = tuple(whole(0, most) for _ in range(batch if maybe() else 1))
    if maybe(0.2):
        options["key_padding"] = rng.random((batch, k_len)) < 0.8
    options |= _mask(rng, (batch, heads, q_len, k_len))
    positional = {"causal", "alibi", "alibi_slopes", "segments", "left_window", "right_window"}
    if maybe(0.6) or (q_len != k_len and positional & options.keys()):
        offsets = [whole(-3, 6) for _ in range(batch)]
        kinds: list[Any] = ["top-left", "bottom-right", offsets[0], tuple(offsets)]
        options["query_offset"] = kinds[whole(0, 3)]
    if q_len and "segments" in options and maybe(0.4):  # ids that keys of every batch have
        shared_ids = [n for n in range(3) if (np.atleast_2d(options["segments"]) == n).any(1).all()]
        if shared_ids:
            options["query_segments"] = np.sort(rng.choice(shared_ids, q_len))
            if options.get("query_offset", "bottom-right") == "bottom-right":
                options["query_offset"] = "top-left"
    return PlainAttention(*tensors, options)


def _mask(rng: np.random.Generator, cells: tuple[int, int, int, int]) -> dict[str, Any]:
    batch, heads, q_len, k_len = cells
    kind = rng.choice(["none", "none", "keep", "drop", "integers", "added", "weightless"])
    if kind == "none":
        return {}
    shapes: list[tuple[int, ...]] = [cells, cells[2:], cells[3:], (batch, 1, 1, k_len), (q_len, 1)]
    if batch == 1 or batch != heads:  # else rank 3 could begin with either
        shapes.append(cells[1:])
    shape = shapes[rng.integers(len(shapes))]
    keep = rng.random(shape) < 0.7
    if kind == "drop":
        return {"attn_mask": ~keep, "mask_true": "drop"}
    if kind in ("keep", "integers"):
        return {"attn_mask": keep if kind == "keep" else keep.astype(np.int32)}
    if kind == "added":
        return {"attn_mask": np.where(keep, rng.standard_normal(shape), -math.inf)}
    low = np.where(rng.random(shape) < 0.1, -math.inf, rng.choice(LOW))
    mask = np.where(keep, 0.0, low)
    if rng.random() < 0.3:
        return {"attn_mask": np.where(keep, 0.0, -100.0), "hide_below": -50.0}
    return {"attn_mask": mask.astype(np.float32)}


def words(options: dict[str, Any], without: tuple[str, ...] = ()) -> list[str]:
    """The options as a command line has them; arrays are saved beside it."""
    said = []
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        if name in without:
            continue
        if isinstance(value, np.ndarray):
            np.save(f"{name}.npy", value)
            said += [option, f"{name}.npy"]
        elif value is True:
            said.append(option)
        else:
            said.append(f"{option}={','.join(map(str, np.atleast_1d(value)))}")
    return said


def assert_commands(run: Run, problem: PlainAttention) -> None:
    np.savez("t.npz", **problem.given)
    finite = all(np.isfinite(tensor).all() for tensor in problem.given.values())
    same = [*words(problem.options), "-q", "-f", "json", *([] if finite else ["--allow-nonfinite"])]
    computed = run("compute", "t.npz", *same, "--save", "stages.npz").json["data"]
    with np.load("stages.npz") as saved:
        assert_compute(computed, {name: saved[name] for name in saved.files}, problem)
    assert_entropy(run, ["t.npz", *same], problem)
    for one in run("variance", "t.npz", *same).json["data"]:
        assert_record(one, problem.variance(one["batch"], one["head"]) if finite else {}, problem)
    assert_mask(run, problem)
    if finite:
        assert_check(run, ["t.npz", *same], problem)


def assert_compute(computed: Any, saved: dict[str, Array], problem: PlainAttention) -> None:
    seen, real = problem.visible, problem.real_queries[:, None, :, None]
    assert list(computed["stages"]) == list(problem.stages)
    assert computed["cost"]["visible_pairs"] == seen.sum()
    assert computed["cost"]["pairs"] == seen.size
    for name, expected in problem.stages.items():
        chosen = np.broadcast_to(real, expected.shape) if name == "output" else seen
        found, values = saved[name][chosen], expected[chosen]
        np.testing.assert_allclose(found, values, rtol=1e-9, atol=1e-11, err_msg=name)
        if name in ("masked", "weights"):
            hidden = saved[name][~chosen]
            assert (hidden == (0.0 if name == "weights" else -math.inf)).all(), name
        told, finite = computed["stages"][name], values[np.isfinite(values)]
        assert told["shape"] == list(expected.shape)
        counts = {
            "n_masked": 0 if name == "output" else int((real & ~seen).sum()),
            "n_nan": int(np.isnan(values).sum()),
            "n_posinf": int(np.isposinf(values).sum()),
            "n_neginf": int(np.isneginf(values).sum()),
            "n_finite": int(np.isfinite(values).sum()),
        }
        assert {key: told[key] for key in counts} == counts, name
        for key in ("min", "max", "mean", "std"):
            assert_number(
                told[key], getattr(finite, key)() if finite.size else None, f"{name} {key}"
            )


def assert_entropy(run: Run, arguments: list[str], problem: PlainAttention) -> None:
    every = [(b, h) for b in range(problem.batch) for h in range(problem.heads)]
    rows = run("entropy", *arguments, "--per-row").json["data"]
    expected = {(b, h, i): row for b, h in every for i, row in problem.rows(b, h).items()}
    assert [(one["batch"], one["head"], one["query"]) for one in rows] == list(expected)
    for one, row in zip(rows, expected.values(), strict=True):
        assert_record(one, {k: v for k, v in row.items() if k != "outcomes"}, problem, "query")
    heads = run("entropy", *arguments).json["data"]
    assert [(one["batch"], one["head"]) for one in heads] == every
    for one in heads:
        assert_label(one, problem.labels(one["batch"], one["head"]))
        assert_record(one, problem.head(one["batch"], one["head"]), problem, *SAID_ELSEWHERE)
    keys = run("entropy", *arguments, "--per-key").json["data"]
    expected_keys = [(*each, j) for each in every for j in range(problem.k_len)]
    assert [(one["batch"], one["head"], one["key"]) for one in keys] == expected_keys
    for one in keys:
        assert_record(one, problem.key(one["batch"], one["head"], one["key"]), problem, "key")


SAID_ELSEWHERE = ("label", "label_score", "nearest_label", "scale", "temperature")


def assert_record(found: Record, expected: Record, problem: PlainAttention, *besides: str) -> None:
    """Every column is there with its value; None and what is not finite are both null."""
    known = {
        "source",
        "group",
        "batch",
        "head",
        "diagnosis",
        "description",
        "values",
        "values_omitted",
        *besides,
    }
    if not expected:
        return
    assert set(expected) <= set(found)
    for name, value in found.items():
        if name in known:
            continue
        if name.startswith(("top_key", "max_logit_")):
            assert_place(found, expected, name, problem)
        else:
            assert_number(value, expected.get(name), name)


def assert_place(found: Record, expected: Record, name: str, problem: PlainAttention) -> None:
    """Where the largest logit stands; exactly where rounding cannot have a say."""
    place, right = found[name], expected.get(name)
    if place == right:
        return
    masked = problem.stages["masked"][found["batch"], found["head"]]
    queries = found["query"] if name == "top_key" else found["max_logit_query"]
    key = place if name == "top_key" else found["max_logit_key"]
    assert place is not None, name
    assert right is not None, name
    exact = (
        np.isin(problem.q, np.arange(-2, 3)).all() and np.isin(problem.k, np.arange(-2, 3)).all()
    )
    plain = not {"softcap", "alibi", "alibi_slopes", "attn_mask"} & problem.options.keys()
    assert not (exact and plain), name
    assert_number(float(masked[queries, key]), found["max_logit"], name)


def assert_number(found: Any, expected: Any, name: str) -> None:
    if isinstance(expected, float | np.floating) and not math.isfinite(expected):
        expected = None
    if isinstance(expected, float | np.floating):
        assert found is not None, (name, expected)
        assert found == pytest.approx(float(expected), rel=1e-9, abs=1e-11), name
    else:
        assert found == expected, name


def assert_label(one: Record, scores: dict[str, float]) -> None:
    fitting = [name for name, score in scores.items() if score >= LIMITS[name]]
    places = [name for name in PLACES if name in fitting]
    if places:
        best: str | None = max(places, key=scores.__getitem__)
    else:
        best = next((name for name in LIMITS if name in fitting), None)
    if not scores:
        assert (one["label"], one["label_score"]) == (None, None)
        return
    mixed = 1 - max(score / LIMITS[name] for name, score in scores.items())
    told = one["label"]
    near = any(abs(score - LIMITS[name]) < 1e-9 for name, score in scores.items())
    near |= best in PLACES and told in PLACES and abs(scores[best] - scores.get(told, 9.0)) < 1e-9
    assert told == (best or "mixed") or near, (told, scores)
    assert_number(one["label_score"], mixed if told == "mixed" else scores[told], "label_score")
    nearest = one["nearest_label"]
    if told != "mixed":
        assert nearest is None
        return
    assert_number(1 - scores[nearest] / LIMITS[nearest], mixed, "nearest_label")


def assert_mask(run: Run, problem: PlainAttention) -> None:
    sizes = {"batch": problem.batch, "heads": problem.heads}
    sizes |= {"q_len": problem.q_len, "k_len": problem.k_len}
    said = words(sizes) + words(problem.options, without=OF_THE_SOFTMAX)
    records = run("mask", *said, "-q", "-f", "json").json["data"]
    told = set()
    for one in records:
        for b, h in np.ndindex(problem.batch, problem.heads):
            if one["batch"] in (None, b) and one["head"] in (None, h):
                told.add((b, h))
                expected = problem.mask(b, h)
                for name in ("first_empty_rows", "first_unused_keys"):
                    expected[name] = expected[name][: len(one[name])]
                assert_record(one, expected, problem)
                if "values_omitted" in one:
                    continue
                cells = np.array(one["values"], bool).reshape(problem.q_len, problem.k_len)
                real = problem.real_queries[b]
                assert np.array_equal(cells[real], problem.visible[b, h][real])
    assert len(told) == problem.batch * problem.heads


def assert_check(run: Run, arguments: list[str], problem: PlainAttention) -> None:
    """What is right passes, and an output that is off by a thousandth does not."""
    stages, empty = problem.stages, ~problem.visible.any(-1)
    with np.errstate(all="ignore"):
        most = stages["masked"].max(-1, initial=-math.inf)
        sums = most + np.log(np.exp(stages["masked"] - most[..., None]).sum(-1))
    np.savez("c.npz", o=stages["output"], w=stages["weights"], s=np.where(empty, -math.inf, sums))
    told = [f"--actual-{name}=c.npz::{name[0]}" for name in ("output", "weights")]
    records = run("check", *arguments, *told, "--actual-logsumexp=c.npz::s").json["data"]["records"]
    assert [(one["target"], one["passed"]) for one in records] == [
        ("output", True),
        ("weights", True),
        ("logsumexp", True),
    ]
    np.save("off.npy", stages["output"] * 1.001)
    wrong = np.abs(stages["output"]).max(initial=0.0) > 1e-6
    run("check", *arguments, "--actual-output", "off.npy", code=3 if wrong else 0)
