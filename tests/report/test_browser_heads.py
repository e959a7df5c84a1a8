"""All heads and one head in a browser: what is drawn, said and reached, by mouse and by keys."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browsing import Layer, Open, Opened, Report, fixed, weight

import attncli
from attncli.report.palette import Theme, diverging, sequential


@pytest.fixture
def minilm(report: Report, open_page: Open) -> Opened:
    return open_page(report("minilm"))


@pytest.fixture(scope="module")
def weights(layers: list[Layer]) -> np.ndarray[Any, Any]:
    """Weights of MiniLM as a report keeps them, float32 (6, 12, 16, 16)."""
    found = [
        attncli.compute(layer.q, layer.k, stages="weights", scale=layer.scale).stages["weights"][0]
        for layer in layers
    ]
    return torch.stack(found).numpy().astype(np.float32)


def cell_centre(opened: Opened, query: int, key: int, length: int = 16) -> tuple[float, float]:
    """Where a cell of the map is on the screen, which is scrolled to it."""
    cells = opened.page.locator("#cells")
    cells.evaluate("e => e.scrollIntoView({ block: 'center' })")
    box = cells.bounding_box()
    side = box["width"] / length
    return box["x"] + (key + 0.5) * side, box["y"] + (query + 0.5) * side


def select(opened: Opened, layer: int, head: int) -> None:
    opened.run(f"attncli.S.pinned = false; attncli.select({12 * layer + head})")


def pixel(opened: Opened, query: int, key: int, length: int = 16) -> list[int]:
    """Red, green, blue and opacity of a corner of a cell."""
    script = """([q, k, n]) => {
        const c = document.getElementById("cells"), side = c.width / n;
        const one = new OffscreenCanvas(1, 1).getContext("2d");
        one.drawImage(c, Math.round(k * side), Math.round(q * side), 1, 1, 0, 0, 1, 1);
        return [...one.getImageData(0, 0, 1, 1).data];
    }"""
    return list(opened.run(script, [query, key, length]))


def test_values_under_the_pointer_are_the_librarys(
    minilm: Opened, weights: np.ndarray[Any, Any]
) -> None:
    chosen = random.Random(1)
    minilm.page.set_viewport_size({"width": 1200, "height": 1100})
    for _ in range(10):
        layer, head = chosen.randrange(6), chosen.randrange(12)
        select(minilm, layer, head)
        for _ in range(5):
            query, key = chosen.randrange(16), chosen.randrange(16)
            minilm.page.mouse.move(*cell_centre(minilm, query, key))
            minilm.page.wait_for_function(f"attncli.S.q === {query} && attncli.S.k === {key}")
            minilm.run("new Promise(requestAnimationFrame)")
            row = weights[layer, head, query]
            assert minilm.text("#read .big") == weight(row[key])
            facts = minilm.texts("#read dd")
            assert facts[1] == f"{1 + (row > row[key]).sum()} of 16"
            entropy = -(row * np.log2(np.where(row > 0, row, 1)).astype(float)).sum()
            assert facts[2] == f"{fixed(entropy)} of 4.00 bits"
            assert facts[3] == weight(np.float32(weights[layer, head, :, key].mean(dtype=float)))


def test_pooled_values_are_means_of_blocks(report: Report, open_page: Open) -> None:
    page = open_page(report("pooled"))
    edges = page.run("attncli.D.groups[0].edges.k")
    bins = len(edges) - 1
    assert edges[:5] == [0, 1, 2, 3, 4]
    assert edges[-1] == 300 > bins
    q, k = (page_tensor(name) for name in "qk")
    of = attncli.compute(q, k, stages="weights", causal=True, scale=8**-0.5).stages["weights"]
    known = np.add.reduceat(np.add.reduceat(of[0, 1].numpy(), edges[:-1], 0), edges[:-1], 1)
    known /= np.outer(np.diff(edges), np.diff(edges))
    page.run("attncli.select(1)")
    for query, key in [(bins - 1, 0), (bins - 1, bins - 1), (9, 2), (3, 8)]:
        page.page.mouse.click(*cell_centre(page, query, key, bins))
        shown = page.text("#read .big")
        if edges[key] >= edges[query + 1]:
            assert shown == "masked"
            assert page.texts("#read dt")[0] == "the query must not see this key"
        elif known[query, key] >= 1e-3:
            assert abs(float(shown.removeprefix("≈ ")) - known[query, key]) < 6e-4
        else:
            assert "·10" in shown
        page.press("Escape")
    page.page.mouse.click(*cell_centre(page, bins - 1, 6, bins))
    assert f"word{edges[6]} word{edges[6] + 1}" in page.text("#read .inside")
    before = page.text("#read .big"), pixel(page, bins - 1, 6, bins)
    page.page.get_by_role("radio", name="max", exact=True).click()
    assert (page.text("#read .big"), pixel(page, bins - 1, 6, bins)) != before


def test_a_head_without_a_map_shows_its_thumbnail(report: Report, open_page: Open) -> None:
    page = open_page(report("thumbnails"))
    (detailed,) = page.run("attncli.D.groups[0].maps.heads")
    sizes = {}
    for head in (detailed, 0):
        page.run(f"attncli.select({head})")
        sizes[head] = page.run("document.querySelectorAll('#ylab span').length")
        told = "Only a small picture" in page.text("#read")
        assert told == page.page.locator("#top").is_hidden() == (head == 0)
        assert page.page.locator("#right").is_hidden() == (head == 0)
    assert sizes[0] < sizes[detailed] < 100
    page.page.locator("#map").focus()
    page.press("End", "PageDown")
    assert page.run("attncli.S.q") == sizes[0] - 1
    page.run(f"attncli.select({detailed})")
    page.page.get_by_role("radio", name="max", exact=True).click()
    assert page.text("#read .big")


def page_tensor(name: str) -> torch.Tensor:
    """Q or K of the pooled report."""
    draw = torch.Generator().manual_seed(1)
    both = {each: torch.randn(1, 2, 300, 8, generator=draw) for each in "qk"}
    return both[name]


def test_the_keyboard_reaches_all(minilm: Opened) -> None:
    minilm.page.locator("#chips button").last.focus()
    minilm.press("Tab")
    assert minilm.run("document.activeElement.getAttribute('role')") == "gridcell"
    minilm.press("Home", "ArrowDown", "ArrowRight", "ArrowRight")
    start = minilm.run("attncli.HEADS[attncli.D.start].group")
    assert minilm.text("#headname") == f"Layer {start + 1}, head 2"
    assert minilm.page.url.endswith(f"#head={start + 1},2")
    minilm.press("End")
    assert minilm.text("#headname") == f"Layer {start + 1}, head 11"
    minilm.press("Enter", "Tab", "Tab", "Tab", "Tab")
    assert minilm.run("document.activeElement.id") == "skip"
    minilm.press("Tab", "Home", "ArrowDown", "ArrowRight")
    assert minilm.run("document.activeElement.id") == "map"
    said = minilm.text("#live")
    assert said.startswith("query ")
    assert said.endswith(minilm.text("#read .big"))
    assert minilm.run("attncli.S.k") == 1
    minilm.press("PageDown", "End")
    assert [minilm.run(f"attncli.S.{axis}") for axis in "qk"] == [15, 15]
    minilm.press("Enter")
    assert "pin" in minilm.page.locator("#cursor").get_attribute("class")
    minilm.press("Escape")
    assert "pin" not in minilm.page.locator("#cursor").get_attribute("class")
    minilm.run("attncli.select(71)")
    minilm.press("]")
    assert minilm.text("#headname") == "Layer 0, head 0"
    minilm.press("[")
    assert minilm.text("#headname") == "Layer 5, head 11"


def test_a_pinned_cell_stays(minilm: Opened) -> None:
    minilm.page.mouse.click(*cell_centre(minilm, 3, 5))
    minilm.page.mouse.move(*cell_centre(minilm, 9, 9))
    assert [minilm.run(f"attncli.S.{axis}") for axis in "qk"] == [3, 5]
    command = minilm.text("#hcmd")
    minilm.click("#next")
    assert [minilm.run(f"attncli.S.{axis}") for axis in "qk"] == [3, 5]
    assert minilm.text("#hcmd") != command
    assert command.endswith("--stage weights --rows 3")
    minilm.click("#prev")
    assert minilm.text("#hcmd") == command


def test_the_command_below_a_head_prints_its_row(
    minilm: Opened, run: Any, monkeypatch: pytest.MonkeyPatch, weights: np.ndarray[Any, Any]
) -> None:
    minilm.page.mouse.click(*cell_centre(minilm, 10, 2))
    words = minilm.text("#hcmd").split()
    monkeypatch.chdir(Path(__file__).parent.parent.parent / "sample_inputs")
    printed = run(*words[1:], "-f", "json").json["data"]["stages"]["weights"]["values"]
    h = minilm.run("attncli.HEADS[attncli.S.at]")
    assert np.ravel(printed) == pytest.approx(weights[h["group"], h["head"], 10], abs=1e-6)


def test_the_address_names_the_head(report: Report, open_page: Open) -> None:
    page = open_page(report("minilm"), "#head=2,7")
    assert page.text("#headname") == "Layer 2, head 7"
    page.run("location.hash = '#head=4,1'")
    page.page.wait_for_function("attncli.S.at === 49")
    assert page.text("#headname") == "Layer 4, head 1"


def test_scales_colour_as_the_palette_says(minilm: Opened, weights: np.ndarray[Any, Any]) -> None:
    select(minilm, 3, 1)
    seen = weights[3, 1].astype(float)
    floor = 0.1 / 16
    places = {
        "log": np.where(seen > floor, 1 - np.log(np.maximum(seen, 1e-30)) / math.log(floor), 0),
        "√": np.sqrt(seen / seen.max()),
        "linear": seen / seen.max(),
        "× even": 0.5 + np.log2(np.maximum(seen, 1e-30) * 16) / 10,
    }
    ticks = set()
    for name, place in places.items():
        minilm.page.get_by_role("radio", name=name, exact=True).click()
        ramp = (diverging if name == "× even" else sequential)(Theme.LIGHT)
        for query, key in [(0, 0), (10, 2), (5, 14)]:
            colour = ramp[math.floor(np.clip(place[query, key], 0, 1) * 255 + 0.5)]
            assert pixel(minilm, query, key) == [*map(int, colour), 255]
        ticks.add(minilm.text("#ticks"))
    assert len(ticks) == 4
    minilm.page.get_by_role("radio", name="linear", exact=True).press("ArrowRight")
    assert minilm.run("document.activeElement.textContent") == "× even"
    assert minilm.run("attncli.S.scale") == "even"
    minilm.press("ArrowLeft")
    minilm.page.locator("#skip").fill("1")
    colour = sequential(Theme.LIGHT)[math.floor(seen[10, 2] / seen[:, 1:].max() * 255 + 0.5)]
    assert pixel(minilm, 10, 2) == [*map(int, colour), 255]
    assert pixel(minilm, 10, 0)[3] == 70


def test_masked_cells_have_no_weights_colour(report: Report, open_page: Open) -> None:
    page = open_page(report("causal"), "#head=0,1")
    red, green, blue, opacity = pixel(page, 0, 9)
    assert opacity == 26
    assert max(red, green, blue) - min(red, green, blue) <= 10
    page.page.mouse.click(*cell_centre(page, 0, 9))
    assert page.text("#read .big") == "masked"


def test_the_theme_follows_the_system_and_a_button(report: Report, open_page: Open) -> None:
    page = open_page(report("causal"), scheme="dark")
    colour = "getComputedStyle(document.body).backgroundColor"

    def seen() -> tuple[Any, list[int]]:
        return page.run(colour), pixel(page, 0, 0)

    dark = seen()
    page.page.emulate_media(color_scheme="light")
    for _ in range(100):  # the system tells the page in its own time
        light = seen()
        if light[0] != dark[0] and light[1] != dark[1]:
            break
        page.run("new Promise(done => setTimeout(done, 20))")
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    names = []
    for expected in (dark, light, light):  # dark, then light, then as the system
        page.click("#theme")
        names.append(page.page.locator("#theme").get_attribute("aria-label"))
        assert seen() == expected
    assert names == ["Dark colours", "Light colours", "Colours as the system has them"]


def test_the_overview_shows_numbers_and_labels(minilm: Opened, layers: list[Layer]) -> None:
    heads = [
        head
        for layer in layers
        for head in attncli.entropy(layer.q, layer.k, scale=layer.scale).heads
    ]
    columns = {
        "entropy": ("entropy_bits_mean", 1),
        "sink mass": ("sink_mass_mean", 2),
        "largest weight": ("max_weight_mean", 2),
        "distance": ("distance_mean", 1),
        "max logit": ("max_logit", 0),
    }
    for name, (column, digits) in columns.items():
        minilm.page.get_by_role("radio", name=name, exact=True).click()
        numbers = [fixed(float(f"{getattr(head, column):.6g}"), digits) for head in heads]
        if digits == 2:
            numbers = [number.removeprefix("0") for number in numbers]
        assert minilm.texts("#grid .cell b") == numbers
    minilm.page.get_by_role("radio", name="pictures", exact=True).click()
    assert set(minilm.texts("#grid .cell b")) == {""}
    counts = {text.split()[0]: int(text.split()[1]) for text in minilm.texts("#chips button")}
    assert sum(counts.values()) == 72
    minilm.page.locator("#chips button", has_text="sink").click()
    assert minilm.page.locator("#grid .cell:not(.off)").count() == counts["sink"]
    minilm.page.locator("#chips button", has_text="sink").press("Enter")
    assert minilm.page.locator("#grid .cell.off").count() == 0
    titles = minilm.run("[...document.querySelectorAll('#grid .cell')].map(e => e.title)")
    mixed = [title for title in titles if "mixed" in title]
    assert len(mixed) == counts["mixed"]
    assert any("nearest" in title for title in mixed)


def test_the_table_sorts(minilm: Opened) -> None:
    heading = minilm.page.locator("#table th", has_text="largest weight")
    column = heading.evaluate("e => e.cellIndex") + 1

    def values() -> list[float]:
        return [float(text) for text in minilm.texts(f"#table td:nth-child({column})")]

    heading.locator("button").click()
    assert values() == sorted(values(), reverse=True)
    heading.locator("button").press("Enter")
    assert values() == sorted(values())
    assert heading.get_attribute("aria-sort") == "ascending"
    label = minilm.page.locator("#table th", has_text="label")
    label.locator("button").click()
    assert heading.get_attribute("aria-sort") is None
    assert "sink" in minilm.text("#table tbody tr:first-child")


def test_the_keys_are_listed(minilm: Opened) -> None:
    minilm.press("?")
    assert minilm.page.locator("#help").is_visible()
    assert "previous, next head" in minilm.text("#help")
    minilm.press("]")
    minilm.press("Escape")
    assert not minilm.page.locator("#help").is_visible()
    minilm.click("#helpbutton")
    minilm.click("#help button")
    assert not minilm.page.locator("#help").is_visible()


def test_the_page_speaks_chinese(report: Report, open_page: Open) -> None:
    page = open_page(report("chinese"))
    assert page.run("document.documentElement.lang") == "zh"
    assert page.text("#headname").startswith(("第", "layers"))
    for words in ("注意力头", "缩放", "因果", "查询"):
        assert words in page.text("main")
    shown = page.text("main")
    for words in ("Step by step", "Why divide", "looks", "effective keys", "Next"):
        assert words not in shown
