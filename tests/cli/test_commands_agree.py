"""One problem under one set of options: every command tells the same of it, and the truth."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain import Array, Run, Tensors
from plain_masks import plain_mask

# Options that the mask does not depend on; `mask` refuses them.
OF_THE_SOFTMAX = ("--scale", "--temperature", "--softcap", "--sinks")


@dataclass(frozen=True)
class Asked:
    """A random problem: the arrays of its files, and option → value of the command line."""

    arrays: Tensors
    options: dict[str, str | None]

    def words(self, *, without: tuple[str, ...] = ()) -> list[str]:
        """The options as a command line has them."""
        chosen = {name: value for name, value in self.options.items() if name not in without}
        return [part for pair in chosen.items() for part in pair if part is not None]

    @property
    def real_queries(self) -> Array:
        """Bool (B, S_q), True = not taken out by --query-lengths."""
        q_len = self.arrays["q"].shape[2]
        return np.arange(q_len) < np.array(self.per_batch("--query-lengths", q_len))[:, None]

    def per_batch(self, name: str, default: int) -> list[int]:
        """What an option says of each batch, as one number for all or several."""
        batch = len(self.arrays["q"])
        numbers = [int(n) for n in (self.options.get(name) or str(default)).split(",")]
        return numbers * batch if len(numbers) == 1 else numbers

    @property
    def visible(self) -> Array:
        """Bool (B, H, S_q, S_k), cell by cell: what a query that is not padded may see."""
        batch, heads, q_len, _ = self.arrays["q"].shape
        k_len = self.arrays["k"].shape[2]
        rules: dict[str, Any] = {"causal": "--causal" in self.options}
        for name in ("left_window", "right_window", "sink_window", "prefix", "dilation"):
            if (option := "--" + name.replace("_", "-")) in self.options:
                rules[name] = int(self.options[option] or 0)
        if "--segments" in self.options:
            rules["segments"] = [int(n) for n in str(self.options["--segments"]).split(",") if n]
        declared = str(self.options["--query-offset"])
        lengths = self.per_batch("--key-lengths", k_len)
        queries = self.per_batch("--query-lengths", q_len)
        cells = np.zeros((batch, heads, q_len, k_len), bool)
        for b in range(batch):
            keep = self.arrays["padding"][b] if "padding" in self.arrays else np.ones(k_len, bool)
            real = [j + 1 for j in range(lengths[b]) if keep[j]]
            corners = {"top-left": 0, "bottom-right": max(real, default=0) - queries[b]}
            offset = int((declared.split(",") * batch)[b]) if declared not in corners else 0
            own = rules | {"key_length": lengths[b], "keep": keep}
            cells[b] = plain_mask(q_len, k_len, corners.get(declared, offset), **own)
        return cells & self._kept_by_file & self.real_queries[:, None, :, None]

    @property
    def _kept_by_file(self) -> Array:
        mask = self.arrays.get("mask", np.ones(1, bool))
        if mask.dtype != bool:
            return mask > -math.inf
        return ~mask if "--mask-true" in self.options else mask


FEW = st.sampled_from(["0.5", "1.5", "3"])


@st.composite
def problems(draw: st.DrawFn) -> Asked:
    batch, kv_heads, group = (draw(st.integers(1, 2)) for _ in range(3))
    q_len, k_len = draw(st.integers(0, 5)), draw(st.integers(0, 6))
    heads, dk, dv = kv_heads * group, draw(st.integers(1, 5)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.1, 1.0, 4.0]))
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    shapes = {
        "q": (batch, heads, q_len, dk),
        "k": (batch, kv_heads, k_len, dk),
        "v": (batch, kv_heads, k_len, dv),
    }
    arrays = {
        name: (rng.standard_normal(shape) * spread).astype(dtype) for name, shape in shapes.items()
    }
    cells = (batch, heads, q_len, k_len)
    numbers, masks = draw(_numbers(heads)), draw(_masks(cells, arrays))
    return Asked(arrays, numbers | masks | draw(_positions(batch, heads, k_len)))


@st.composite
def _numbers(draw: st.DrawFn, heads: int) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in ("--temperature", "--softcap"):
        if draw(st.booleans()):
            found[name] = draw(FEW)
    if draw(st.booleans()):
        scale = st.sampled_from(["0", "-0.5", "0.7"])
        found["--scale"] = ",".join(draw(scale) for _ in range(draw(st.sampled_from([1, heads]))))
    if draw(st.booleans()):
        found["--sinks"] = ",".join(draw(FEW) for _ in range(heads))
    return found


@st.composite
def _positions(draw: st.DrawFn, batch: int, heads: int, k_len: int) -> dict[str, str | None]:
    offset = st.integers(-3, 4).map(str)
    several = st.lists(offset, min_size=batch, max_size=batch).map(",".join)
    corners = ["top-left", "bottom-right"]
    found: dict[str, str | None] = {"--query-offset": draw(st.sampled_from(corners) | several)}
    if draw(st.booleans()):
        found["--alibi"] = None
    if draw(st.booleans()):
        found["--alibi-slopes"] = ",".join(draw(FEW) for _ in range(heads))
    for name in ("--left-window", "--right-window"):
        if draw(st.booleans()):
            found[name] = str(draw(st.integers(0, 4)))
    if "--left-window" in found and draw(st.booleans()):
        found["--sink-window"] = str(draw(st.integers(0, 3)))
    if found.keys() & {"--left-window", "--right-window"} and draw(st.booleans()):
        found["--dilation"] = str(draw(st.integers(1, 3)))
    if draw(st.booleans()):
        found["--causal"] = None
        if draw(st.booleans()):
            found["--prefix"] = str(draw(st.integers(0, 3)))
    if k_len and draw(st.booleans()):
        ids = draw(st.lists(st.integers(0, 2), min_size=k_len, max_size=k_len))
        found["--segments"] = ",".join(map(str, sorted(ids))) + "," * (k_len == 1)
    return found


@st.composite
def _masks(
    draw: st.DrawFn, cells: tuple[int, int, int, int], arrays: Tensors
) -> dict[str, str | None]:
    batch, _, q_len, k_len = cells
    found: dict[str, str | None] = {}
    for name, length in (("--key-lengths", k_len), ("--query-lengths", q_len)):
        if draw(st.booleans()):
            found[name] = ",".join(str(draw(st.integers(0, length))) for _ in range(batch))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        arrays["padding"] = rng.random((batch, k_len)) < 0.8
        found["--key-padding"] = "padding.npy"
    kind = draw(st.sampled_from(["none", "keep", "drop", "additive"]))
    if kind != "none":
        every = [cells, cells[2:], cells[3:], (batch, 1, 1, k_len), (q_len, 1)]
        if batch == 1 or batch != cells[1]:  # else rank 3 could begin with either
            every.append(cells[1:])
        shape = draw(st.sampled_from(every))
        keep = rng.random(shape) < 0.7
        added = np.where(keep, rng.standard_normal(shape), -math.inf)
        arrays["mask"] = {"keep": keep, "drop": ~keep, "additive": added}[kind]
        found["--attn-mask"] = "mask.npy"
    if kind == "drop":
        found["--mask-true"] = "drop"
    return found


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(asked=problems())
def test_commands_agree(
    asked: Asked, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, array in asked.arrays.items():
        np.save(f"{name}.npy", array)
    files, same = ("q.npy", "k.npy", "v.npy"), (*asked.words(), "-q", "-f", "json")
    computed = run("compute", *files, *same, "--save", "stages.npz").json["data"]
    with np.load("stages.npz") as saved:
        stages = {name: saved[name] for name in saved.files}
    assert np.array_equal(_seen(stages, asked), asked.visible)
    assert computed["cost"]["visible_pairs"] == asked.visible.sum()
    _assert_entropy(run("entropy", *files, *same, "--per-row").json["data"], stages, asked)
    _assert_variance(run("variance", *files, *same).json["data"], stages, asked)
    mask_words = asked.words(without=OF_THE_SOFTMAX)
    masks = run("mask", "q.npy", "k.npy", *mask_words, "-q", "-f", "json").json["data"]
    _assert_mask(masks, stages, asked)
    _assert_compute(computed["stages"], stages, asked)
    _assert_check_accepts(run, [*files, *same], stages)


def _assert_compute(computed: Any, stages: Tensors, asked: Asked) -> None:
    """Statistics of `compute` are those of what it saves."""
    seen = _seen(stages, asked)
    hidden = ~seen & asked.real_queries[:, None, :, None]
    for name in ("scores", "scaled", "masked", "weights"):
        assert computed[name]["n_masked"] == hidden.sum(), name
        expected = _moments(stages[name][seen])
        _assert_close({key: computed[name][key] for key in expected}, expected, 1e-9)


def _assert_entropy(records: Any, stages: Tensors, asked: Asked) -> None:
    """Rows of `entropy` are those of the weights and logits that `compute` saves."""
    batches, heads = stages["weights"].shape[:2]
    rows = [
        (batch, head, int(query))
        for batch in range(batches)
        for head in range(heads)
        for query in np.flatnonzero(asked.real_queries[batch])
    ]
    assert [(one["batch"], one["head"], one["query"]) for one in records] == rows
    for one, row in zip(records, rows, strict=True):
        _assert_row(one, stages["masked"][row], stages["weights"][row], "--sinks" in asked.options)


def _assert_row(one: Any, logits: Array, weights: Array, has_sink: bool) -> None:
    """A row of one head: logits (S_k,) with -inf for hidden keys, weights (S_k,)."""
    seen = logits > -math.inf
    assert one["keys"] == seen.sum()
    if not seen.any():
        assert [one[name] for name in ("entropy_nats", "max_logit", "top_key")] == [None] * 3
        return
    outcomes = np.append(weights, 1 - weights.sum()) if has_sink else weights
    outcomes = outcomes[outcomes > 1e-300]
    highest = logits.max()
    expected = {
        "entropy_nats": -(outcomes * np.log(outcomes)).sum(),
        "max_weight": weights.max(),
        "max_logit": highest,
        "logsumexp": highest + math.log(np.exp(logits - highest).sum()),
        "sink_mass": weights[0],
    }
    _assert_close({name: one[name] for name in expected}, expected, 1e-7)


def _assert_variance(records: Any, stages: Tensors, asked: Asked) -> None:
    """Moments of `variance` are those of the visible cells that `compute` saves."""
    seen = _seen(stages, asked)
    assert len(records) == seen.shape[0] * seen.shape[1]
    for one in records:
        head = one["batch"], one["head"]
        assert one["cells"] == seen[head].sum()
        for stage, prefix in (("scores", ""), ("scaled", "scaled_")):
            moments = _moments(stages[stage][head][seen[head]])
            expected = {f"{prefix}mean": moments["mean"], f"{prefix}std": moments["std"]}
            _assert_close({key: one[key] for key in expected}, expected, 1e-9)


def _assert_mask(records: Any, stages: Tensors, asked: Asked) -> None:
    """Cells that `mask` keeps are those that `compute` does not hide."""
    seen = _seen(stages, asked)
    for one in records:
        for head in np.ndindex(*seen.shape[:2]):
            if one["batch"] in (None, head[0]) and one["head"] in (None, head[1]):
                assert one["kept"] == seen[head].sum()
                cells = np.array(one["values"], bool).reshape(seen.shape[2:])
                real = asked.real_queries[head[0]]
                assert np.array_equal(cells[real], seen[head][real])


def _assert_check_accepts(run: Run, words: list[str], stages: Tensors) -> None:
    """What `compute` saves passes `check`."""
    with np.errstate(divide="ignore"):
        np.save("sums.npy", np.log(np.exp(stages["masked"]).sum(-1)))
    candidates = [
        *("--actual-output", "stages.npz::output"),
        *("--actual-weights", "stages.npz::weights"),
        *("--actual-logsumexp", "sums.npy"),
    ]
    records = run("check", *words, *candidates).json["data"]["records"]
    assert [(one["target"], one["passed"]) for one in records] == [
        ("output", True),
        ("weights", True),
        ("logsumexp", True),
    ]


def _seen(stages: Tensors, asked: Asked) -> Array:
    """Bool (B, H, S_q, S_k): visible to a query that is not padded."""
    return (stages["masked"] > -math.inf) & asked.real_queries[:, None, :, None]


def _moments(values: Array) -> dict[str, float]:
    if not values.size:
        return {"mean": math.nan, "std": math.nan}
    return {"mean": values.mean(), "std": values.std()}


def _assert_close(found: dict[str, Any], expected: dict[str, float], tolerance: float) -> None:
    """Numbers are alike, null standing for NaN."""
    numbers = {key: math.nan if value is None else value for key, value in found.items()}
    assert numbers == pytest.approx(expected, rel=tolerance, abs=tolerance, nan_ok=True)
