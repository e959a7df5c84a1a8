"""What a report teaches, in a browser: steps, shapes, √dₖ, masks, softmax; by the numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsing import Layer, Open, Opened, Report, fixed

from attncli.attention.statistics import softmax_stats
from attncli.report.page.data import walk


@pytest.fixture
def lesson(report: Report, open_page: Open) -> Opened:
    return open_page(report("lesson"))


def cells(opened: Opened, table: str) -> list[str]:
    """The figures of a table."""
    return opened.texts(f"{table} tbody td")


def radio(opened: Opened, name: str) -> Any:
    """A button of a group by its name."""
    return opened.page.get_by_role("radio", name=name, exact=True)


@pytest.mark.parametrize("causal", [True, False])
def test_steps_show_what_compute_prints(lesson: Opened, run: Any, causal: bool) -> None:
    stages = run("compute", *["--causal"][: int(causal)], "-f", "json").json["data"]["stages"]
    if not causal:
        lesson.page.locator("#scausal").uncheck()
    seen = []
    for name in ("", "scores", "scaled", "masked", "weights", "output"):
        seen.append(lesson.text("#sformula"))
        if name:
            values = [x if x is not None else -math.inf for x in np.ravel(stages[name]["values"])]
            digits = [fixed(x) for x in values]
            if name == "weights":
                digits = ["0" if x == 0 else fixed(x) for x in values]
            assert cells(lesson, "#flow table:last-child") == digits
        if name != "output":
            lesson.click("#snext")
    assert [text[:2] for text in seen] == ["1.", "2.", "3.", "4.", "5.", "6."]
    assert lesson.page.locator("#snext").is_disabled()
    assert lesson.text("#scmd") == "attncli compute" + " --causal" * causal
    lesson.click("#sback")
    assert lesson.text("#sformula") == seen[4]
    lesson.page.locator("#sdots button").nth(1).click()
    assert lesson.text("#sformula") == seen[1]
    lesson.press("End")
    assert lesson.text("#sformula") == seen[5]
    lesson.press("Home", "ArrowRight")
    assert lesson.text("#sformula") == seen[1]
    lesson.click("#sreset")
    assert lesson.text("#sformula") == seen[0]
    assert lesson.page.locator("#sback").is_disabled()


def test_any_cell_tells_its_arithmetic(lesson: Opened) -> None:
    lesson.click("#snext")
    result = "#flow table:last-child"
    lesson.page.locator(f"{result} tbody tr:nth-child(3) td:nth-of-type(2)").hover()
    assert lesson.text("#swork") == "−0.79·(−0.17) + 0.97·0.81 − 0.74·(−0.10) = 0.9940"
    lesson.page.locator(result).focus()
    lesson.press("ArrowRight")
    assert lesson.text("#swork").endswith("= −1.8617")
    lesson.press("Home", "PageUp")
    assert lesson.text("#swork").endswith(
        lesson.run("attncli.T.i + '' + attncli.T.j") and "= −0.3733"
    )
    for step, end in [(2, "÷ 1.7321 = −0.2155"), (3, "−0.2155 + 0 = −0.2155")]:
        lesson.page.locator("#sdots button").nth(step).click()
        assert lesson.text("#swork").endswith(end)
    lesson.page.locator(f"{result} tbody tr:first-child td:nth-of-type(3)").click()
    assert lesson.text("#swork").startswith("token 3 comes after token 1")
    assert lesson.text("#swork").endswith("+ (−∞) = −∞")
    lesson.click("#snext")
    assert lesson.text("#swork").startswith("exp(−∞ − (−0.22)) ÷ 1.0000 = 0.0000")
    lesson.click("#snext")
    assert lesson.text("#swork").endswith("= 0.0000")


def test_play_walks_through_every_cell(report: Report, open_page: Open) -> None:
    page = open_page(report("lesson"), reduced_motion="no-preference")
    page.page.clock.install()
    page.click("#splay")
    assert page.text("#splay") == "Pause"
    page.page.clock.run_for(400)
    assert page.text("#sformula").startswith("2.")
    result = "#flow table:last-child"
    assert [text != "" for text in cells(page, result)] == [True] + 15 * [False]
    page.page.clock.run_for(400)
    assert sum(text != "" for text in cells(page, result)) == 2
    page.click("#splay")
    assert page.text("#splay") == "▸ Play"
    assert all(cells(page, result))
    page.click("#splay")
    page.page.clock.run_for(400 * (4 * 16 + 12 + 1))
    assert page.text("#sformula").startswith("6.")
    assert page.text("#splay") == "▸ Play"
    still = open_page(report("lesson"), reduced_motion="reduce")
    assert not still.page.locator("#splay").is_visible()


def test_shapes_are_the_bundles(report: Report, open_page: Open) -> None:
    page = open_page(report("minilm"))
    shapes = page.texts("#strip code")
    of_head = ["(1, 12, 16, 32)"] * 3
    assert shapes[:4] == ["(1, 16, 384)", *of_head]
    assert shapes[4:6] == ["(1, 12, 16, 16)"] * 2
    radio(page, "one head").click()
    assert page.texts("#strip code")[1:6] == ["(16, 32)"] * 3 + ["(16, 16)"] * 2
    assert page.texts("#summary tbody td:nth-child(3)")[:4] == ["(16, 16)"] * 4
    assert page.texts("#summary tbody th") == ["scores", "scaled", "masked", "weights", "output"]
    page.press("ArrowRight")
    assert page.texts("#strip code") == shapes


def panel_of(scores: np.ndarray[Any, Any], tau: float = 1) -> list[str]:
    """What a panel says of the softmax of some scores."""
    stats = softmax_stats(scores[None] / tau)
    most = float(stats.max_weight[0])
    return [
        fixed(scores.var(ddof=1)),
        f"{fixed(stats.entropy_bits[0], 3)} bits",
        fixed(most, 3),
        fixed(most * len(scores)),
        fixed(stats.softmax_grad[0], 3),
        "1.000",
    ]


def test_the_slider_over_dk_shows_the_draw(lesson: Opened) -> None:
    draw = walk().astype(np.float32).astype(float)
    spread = []
    for slider, dk in [(0, 1), (60, 64), (100, 1024)]:
        lesson.slide("#dk", slider)
        assert lesson.text("#dkv") == str(dk)
        scores = draw[:, dk - 1]
        facts = lesson.texts("#duo b")
        assert facts == panel_of(scores) + panel_of(scores / math.sqrt(dk))
        spread.append([float(x.split()[0]) for x in facts])
        assert lesson.page.locator("#duo svg").first.get_attribute("aria-label").count(",") >= 5
    assert all(1 / 2.5 < facts[6] < 2.5 for facts in spread)
    entropies = [facts[1] for facts in spread]
    assert entropies == sorted(entropies, reverse=True)
    line = lesson.page.locator("#curves line.now").first
    right = line.get_attribute("x1")
    lesson.page.locator("#dk").focus()
    lesson.press("Home")
    assert lesson.text("#dkv") == "1"
    assert lesson.page.locator("#curves line.now").first.get_attribute("x1") != right
    assert lesson.page.locator("#curves svg").count() == 3


def test_presets_temperature_and_scaling_too_late(lesson: Opened) -> None:
    lesson.page.get_by_role("button", name="dₖ = 128").click()
    assert lesson.text("#dkv") == "128"
    radio(lesson, "[10, 1, 1]").click()
    scores = np.array([10.0, 1, 1])
    facts = panel_of(scores) + panel_of(scores / math.sqrt(128))
    assert lesson.texts("#duo b") == facts
    assert "√128 = 11.31" in lesson.text("#duo")
    assert "100 % on one key" in lesson.text("#scalesay")
    lesson.slide("#tau", 20)
    assert lesson.text("#tauv") == "4"
    assert lesson.texts("#duo b") == panel_of(scores, 4) + panel_of(scores / math.sqrt(128), 4)
    lesson.slide("#tau", 0)
    lesson.page.locator("#after").check()
    late = 1 / math.sqrt(128)
    assert lesson.texts("#duo b")[:6] == facts[:6]
    assert lesson.texts("#duo b")[-1] == fixed(late, 3)
    assert lesson.texts("#duo b")[7] == "–"
    assert fixed(late, 3) in lesson.text("#scalesay")
    lesson.page.locator("#after").press("Space")
    assert lesson.texts("#duo b") == facts


MASKS = ["none", "causal", "window", "prefix", "padding", "padding + causal", "documents"]


@pytest.mark.parametrize("kind", MASKS)
def test_masks_are_what_the_command_builds(
    report: Report, open_page: Open, run: Any, tmp_path: Path, layers: list[Layer], kind: str
) -> None:
    page = open_page(report("causal"), "#head=0,4")
    radio(page, kind).click()
    layer = layers[3]
    scaled = (layer.q[0, 4, :8].double() @ layer.k[0, 4, :8].double().T).numpy() * layer.scale
    sliders = [1, 3, 7] if page.page.locator("#mval").is_visible() else [2]
    assert (sliders == [2]) == (kind in MASKS[:2])
    for value in sliders:
        page.slide("#mval", value)
        file = tmp_path / f"{value}.npy"
        run(*page.text("#mcmd").split()[1:], "--save", file, "--quiet")
        sees = np.load(file).reshape(8, 8)
        page.page.locator("#mdots button").nth(1).click()
        added = cells(page, "#trio table:nth-of-type(2)")
        assert added == ["0" if visible else "−∞" for visible in sees.flat]
        masked = np.where(sees, scaled, -np.inf)
        assert cells(page, "#trio table:last-child") == [fixed(x, 1) for x in masked.flat]
        page.click("#mnext")
        assert page.page.locator("#mnext").is_disabled()
        shares = np.exp(masked - masked.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        shown = cells(page, "#trio table:last-child")
        assert shown == [fixed(x) if x else "0" for x in shares.flat]
        assert f"{sees.sum()} of 64 cells" in page.text("#msay")


def test_masks_in_three_steps(lesson: Opened) -> None:
    said = []
    lesson.click("#mreset")
    for _ in range(3):
        said.append((lesson.text("#msay"), lesson.texts("#trio caption")))
        if not lesson.page.locator("#mnext").is_disabled():
            lesson.click("#mnext")
    assert [tables for _, tables in said] == [
        ["scaled scores", "weights without a mask"],
        ["scaled scores", "mask M", "masked scores"],
        ["weights without a mask", "mask M", "weights with it"],
    ]
    lesson.click("#mback")
    assert lesson.text("#msay") == said[1][0]
    lesson.page.locator("#mdots button").nth(1).press("Home")
    assert lesson.text("#msay") == said[0][0]
    assert lesson.page.locator("#mback").is_disabled()
    assert lesson.page.locator("#archs tbody tr").count() == 6
    assert "Cross attention" in lesson.text("#archs")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_naive_softmax_overflows_where_the_type_ends(lesson: Opened, dtype: str) -> None:
    radio(lesson, dtype).click()
    limit = math.log(float(np.finfo(dtype).max))
    below = math.floor(limit - 2)  # the largest logit is 2
    for shift in (below, below + 1):
        lesson.slide("#shift", shift)
        assert lesson.text("#shiftv") == str(shift)
        with np.errstate(over="ignore", invalid="ignore"):
            x = (np.array([2, 1, 0.2, -1], dtype) + np.array(shift, dtype)).astype(dtype)
            naive = np.exp(x) / np.exp(x).sum(dtype=dtype)
            stable = np.exp(x - x.max())
            stable = stable / stable.sum(dtype=dtype)
        left, right = (cells(lesson, f"#soft .pan:nth-child({i})")[2::3] for i in (1, 2))
        assert ("NaN" in left) == (shift == below + 1) == bool(np.isnan(naive).any())
        assert right == [fixed(float(w), 4) for w in stable]
        if shift == below:
            assert left == [fixed(float(w), 4) for w in naive]
    assert f"above {limit:.2f}" in lesson.text("#soft .pan:nth-child(1)")
    lesson.page.locator("#shift").focus()
    lesson.press("Home")
    assert "NaN" not in lesson.text("#soft")


# What the page promises to those who learn, and the words by which its place is known.
PROMISES = {
    "one head, or batch and heads": ("#shapemode", "batch × heads"),
    "steps with formula, meaning and shape": ("#summary", "softmax of each row"),
    "the computation played cell by cell": ("#steps", "Play"),
    "a slider over d_k beside both softmaxes": ("#duo", "entropy"),
    "presets: [10, 1, 1], and a width of 128": ("#scaling .tools", "dₖ = 128"),
    "why the variance is d_k, and 1 afterwards": ("#scaling", "Var[q·k] = dₖ"),
    "the causal mask in three steps": ("#masks", "Reset"),
    "masks by architecture": ("#archs", "Cross attention"),
    "overflow, and the proof of the remedy": ("#softmax", "e⁻ᵐ exp(xᵢ)"),
    "what each step is for": ("#summary", "shares that sum to 1"),
    "projections from X": ("#strip", "X W"),
    "what it costs": (".facts", "operations"),
    "padding with causal": ("#mkind", "padding + causal"),
    "temperature": ("#scaling", "temperature τ"),
    "scaling after softmax is too late": ("#scaling", "scale after softmax instead"),
    "how many keys a head really uses": ("#headlabel", "effective keys"),
    "several heads side by side": ("#grid", "0"),
}


def test_every_promise_has_its_place(lesson: Opened) -> None:
    """Shown, and with the words that say so."""
    missing = {
        promise: place
        for promise, (place, words) in PROMISES.items()
        if not any(words in text for text in lesson.texts(place))
    }
    assert missing == {}
