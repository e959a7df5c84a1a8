"""What a learner is promised has its place on the command line: one test a promise.

B1 to B10 are of the interactive lesson that this program grew from, A1 to A7 of the answer that
came before it: what attention computes, why √d_k, and what is often misunderstood. Their places in
the page are tested where it is driven in a browser.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attncli.cli.terminal import page_after

Run = Callable[..., Any]


@pytest.fixture
def steps(run: Run) -> Callable[..., dict[str, Any]]:
    """The explanation of each step, by its name."""

    def explained(*words: object) -> dict[str, Any]:
        data = run("compute", *words, "--explain", "-f", "json").json["data"]
        return {step["name"]: step for step in data["explanation"]}

    return explained


def logits_of(run: Run, *words: object) -> dict[tuple[str, str], dict[str, Any]]:
    records = run("variance", "--logits", *words, "-f", "json").json["data"]
    return {(record["form"], record["dtype"]): record for record in records}


def test_b1_one_head_and_all_of_them_from_the_input_on(run: Run) -> None:
    """B1: the switch between one head and batch × heads, with the shapes of both."""
    words = ("--batch", 2, "--heads", 12, "--q-len", 16, "--k-len", 16, "--dk", 32)
    shown = run("compute", *words, "--shapes").stdout
    assert re.search(r"^scores .* \(16, 16\) +\(2, 12, 16, 16\)", shown, re.MULTILINE)
    assert re.search(r"^output .* \(16, 32\) +\(2, 12, 16, 32\)", shown, re.MULTILINE)


def test_b2_each_step_has_formula_meaning_and_shape(steps: Callable[..., Any]) -> None:
    """B2: five steps, each with formula, meaning and the shape of what it gives."""
    found = steps()
    for name in ("projection", "scores", "scaled", "weights", "output"):
        step = found[name]
        assert step["formula"]
        assert step["purpose"]
        assert "4×" in step["shape"]


def test_b3_the_computation_can_be_walked_through(run: Run) -> None:
    """B3: all numbers of the 4×3 example, forward and back, from Q and K to the output."""
    stages = run("compute", "-f", "json").json["data"]["stages"]
    assert stages["scores"]["values"][0][0][0][0] == pytest.approx(-0.3733)
    assert list(stages) == ["scores", "scaled", "masked", "weights", "output"]
    shown = run("compute", "--stage", "scores,scaled,masked,weights,output", "--heatmap").stdout
    assert shown.count("(4, 4)") == 4
    forward = [page_after("\x1b[C", at, 6) for at in range(6)]
    back = [page_after("\x1b[D", at, 6) for at in range(6)]
    assert forward == [1, 2, 3, 4, 5, 5]
    assert back == [0, 0, 1, 2, 3, 4]


def test_b4_variance_and_entropy_follow_the_width_of_heads(run: Run) -> None:
    """B4: the slider over d_k: variance and entropy of eight keys, scaled and not."""
    words = ("--dk", "8:1024", "--samples", 20000, "-f", "json")
    records = run("variance", *words).json["data"]
    assert [record["dk"] for record in records] == [8, 16, 32, 64, 128, 256, 512, 1024]
    unscaled = [record["entropy_bits_unscaled"] for record in records]
    assert unscaled == sorted(unscaled, reverse=True)
    for record in records:
        assert record["ratio"] == pytest.approx(1, abs=0.1)
        assert record["scaled_var"] == pytest.approx(1, abs=0.1)
        assert record["entropy_bits_scaled"] == pytest.approx(2.49, abs=0.05)
    curves = run("variance", "--dk", "8:1024", "--samples", 20000).stdout
    assert "variance against d_k" in curves


def test_b5_ten_one_one_is_nearly_one_hot_and_has_no_gradient(run: Run) -> None:
    """B5: softmax([10, 1, 1]), vanishing gradients, and √128 ≈ 11.3."""
    found = logits_of(run, "10,1,1", "--dk", 128)
    sharp, scaled = (found[form, "float64"] for form in ("softmax(x)", "softmax(x / √128)"))
    assert sharp["max_weight"] == pytest.approx(1 / (1 + 2 * math.exp(-9)))
    assert sharp["softmax_grad"] < 1e-3 < 0.4 < scaled["softmax_grad"]
    assert scaled["max_weight"] == pytest.approx(1 / (1 + 2 * math.exp(-9 / math.sqrt(128))))
    assert run("compute", "--dk", 128, "--explain").stdout.count("√d_k = 11.3137") == 1


def test_b6_expectation_and_variance_are_derived(run: Run) -> None:
    """B6: E = 0 and Var = d_k before, Var = 1 after, by theory beside measurement."""
    (record,) = run("variance", "--dk", 64, "--samples", 20000, "-f", "json").json["data"]
    assert (record["mean_theory"], record["var_theory"]) == (0, 64)
    assert record["mean"] == pytest.approx(0, abs=0.3)
    assert record["scaled_var"] == pytest.approx(1, abs=0.05)
    shown = run("variance", "--dk", 64, "--samples", 20000).stdout
    assert "q and k independent: Var(q·k) = d_k" in " ".join(shown.split())


def test_b7_the_causal_mask_in_three_steps(run: Run, steps: Callable[..., Any]) -> None:
    """B7: raw scores, the mask of 0 and −∞ that is added, and softmax."""
    words = ("--causal", "--stage", "scaled,masked,weights")
    shown = run("compute", *words).stdout
    raw, masked, weights = (part.splitlines()[2] for part in shown.split("\n\n")[1:4])
    assert raw.split() == ["0", "-0.2155", "0.3447", "-0.3716", "-0.3557"]
    assert masked.split() == ["0", "-0.2155", "·", "·", "·"]
    assert weights.split()[:5] == ["0", "1.0000", "·", "·", "·"]
    told = steps("--causal")["masked"]["findings"][-1]
    assert told.endswith("0 −∞ −∞ −∞; 0 0 −∞ −∞; 0 0 0 −∞; 0 0 0 0")
    assert "██████·" in run("mask", "--q-len", 4, "--causal").stdout


def test_b8_which_architecture_has_which_mask(run: Run) -> None:
    """B8: encoder none or padding, decoder causal, cross-attention padding."""
    said = " ".join(re.sub("[│╭╰─]", " ", run("mask", "--help").stdout).split())
    assert "Encoders hide nothing or padding (--key-lengths), decoders the future" in said
    assert "cross-attention hides padding of the keys" in said


def test_b9_naive_softmax_overflows_and_the_stable_one_does_not(
    run: Run, steps: Callable[..., Any]
) -> None:
    """B9: inf / inf at 1000, the limits of three dtypes, and why subtracting changes nothing."""
    found = logits_of(run, "1000,1000")
    assert found["softmax(x)", "float64"]["weights"] == [0.5, 0.5]
    for dtype in ("float16", "float32", "float64"):
        assert found["exp(x) / Σ exp(x)", dtype]["weights"] == [None, None]  # NaN
    found = logits_of(run, "12,0")
    for dtype, fails in (("float16", True), ("float32", False), ("float64", False)):
        assert (found["exp(x) / Σ exp(x)", dtype]["weights"][0] is None) is fails
    weights = steps()["weights"]
    assert "above 11.09 in float16, 88.72 in float32, 709.78 in float64" in str(weights["findings"])
    assert "exp(x − m) = exp(x) / exp(m) and exp(m) cancels" in weights["purpose"]


def test_b10_a_table_sums_up_all_steps(run: Run) -> None:
    """B10: step, operation, shape and purpose."""
    table = run("compute", "--explain").stdout.split("in short\n")[1].splitlines()
    heading = " ".join(table[0].split())
    assert heading == "step operation one head batch × heads purpose"
    names = [line.split()[0] for line in table[1:] if line]
    assert names == ["Q", "K", "V", "scores", "scaled", "masked", "weights", "output"]


def test_a1_projections_share_dk_and_dv_is_free(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A1: Q = X W_Q, K = X W_K, V = X W_V; Q and K share d_k, V has a width of its own."""
    monkeypatch.chdir(tmp_path)
    shapes = {"x": (5, 6), "wq": (6, 4), "wk": (6, 4), "wv": (6, 3)}
    for name, shape in shapes.items():
        np.save(f"{name}.npy", np.random.default_rng(0).standard_normal(shape))
    words = [word for name in shapes for word in (f"--{name}", f"{name}.npy")]
    found = run("compute", *words, "-f", "json").json["data"]["stages"]
    assert [found[name]["shape"] for name in "qkv"] == [[1, 1, 5, 4], [1, 1, 5, 4], [1, 1, 5, 3]]
    assert "V may have its own" in " ".join(run("compute", *words, "--explain").stdout.split())


def test_a2_the_cost_grows_with_the_square_of_the_length(run: Run) -> None:
    """A2: O(n²·d_k) operations, and bytes of n × n matrices against streaming."""
    costs = [
        run("compute", "--q-len", n, "--k-len", n, "-f", "json").json["data"]["cost"]
        for n in (64, 128)
    ]
    assert costs[1]["scores_operations"] == 4 * costs[0]["scores_operations"] == 2 * 128**2 * 64
    assert costs[1]["matrix_bytes"] == 4 * costs[0]["matrix_bytes"]
    assert costs[1]["streamed_bytes"] == 2 * costs[0]["streamed_bytes"]


def test_a3_padding_goes_together_with_causal(run: Run) -> None:
    """A3: both hide, so that a key must be allowed by each."""
    shown = run("compute", "--causal", "--key-lengths", 3, "--stage", "weights").stdout
    rows = [line.split()[1:5] for line in shown.splitlines()[5:9]]
    hidden = [[column for column, text in enumerate(row) if text == "·"] for row in rows]
    assert hidden == [[1, 2, 3], [2, 3], [3], [3]]


def test_a4_temperature_sharpens_and_flattens(run: Run, steps: Callable[..., Any]) -> None:
    """A4: softmax(x / τ), and that the scale is a temperature, which may be learned."""
    records = run("entropy", "--q-len", 4, "--temperatures", "0.25,1,4", "-f", "json").json["data"]
    entropies = [record["entropy_bits_mean"] for record in records]
    assert entropies == sorted(entropies)
    found = logits_of(run, "3,1,0", "--temperatures", "0.5,4")
    weights = [found[f"softmax(x / {t})", "float64"]["max_weight"] for t in ("0.5", "4")]
    assert weights[0] > found["softmax(x)", "float64"]["max_weight"] > weights[1]
    assert "√d_k = 1.7321 itself is one, and some models learn theirs" in str(steps()["scaled"])


def test_a5_it_is_not_about_small_numbers_and_not_after_softmax(
    run: Run, steps: Callable[..., Any]
) -> None:
    """A5: the variance is made independent of the width; scaling after softmax does nothing."""
    found = logits_of(run, "10,1,1", "--dk", 128)
    before, after = (found[f, "float64"] for f in ("softmax(x)", "softmax(x) / √128"))
    assert after["sum"] == pytest.approx(1 / math.sqrt(128))
    shares = np.array(after["weights"]) / after["sum"]
    np.testing.assert_allclose(shares, before["weights"], rtol=1e-12)
    scaled = steps()["scaled"]
    assert scaled["purpose"].startswith("Not to make numbers small")
    assert "after softmax instead would change no share" in str(scaled["findings"])


def test_a6_weights_that_are_too_sharp_mix_no_tokens(run: Run) -> None:
    """A6: effective keys say how many tokens a query mixes, and a label says where they are."""
    words = ("--q-len", 16, "--k-len", 16, "--compare-scale", "-f", "json")
    scaled, sharp = run("entropy", *words).json["data"]
    assert sharp["scale"] == 1
    assert sharp["effective_keys_mean"] < 3 < 6 < scaled["effective_keys_mean"]
    assert sharp["max_weight_mean"] > 0.7


def test_a7_several_heads_cost_what_one_does(steps: Callable[..., Any], run: Run) -> None:
    """A7: many narrow heads against one wide one, and how d_k follows from their number."""
    found = steps("--heads", 4, "--q-len", 8, "--dk", 16)["heads"]
    assert "d_model = 4·16 = 64 one head would cost the same" in found["shape"]
    many = run("compute", "--heads", 4, "--dk", 16, "-f", "json").json["data"]["cost"]
    one = run("compute", "--heads", 1, "--dk", 64, "-f", "json").json["data"]["cost"]
    assert many["scores_operations"] == one["scores_operations"]
