"""Reports of any kind in a browser: quiet, within the window, legible, safe from scripts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browsing import HOSTILE, Open, Report

RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]}
# Whether nothing is wider than the window.
FITS = """() => {
    const map = document.getElementById("cells").getBoundingClientRect();
    return document.documentElement.scrollWidth === innerWidth && map.left > 0 && map.width > 0
        && map.right <= innerWidth;
}"""
# Every demonstration used once, so that what they show is looked at as well.
USE_ALL = """() => {
    const press = id => document.getElementById(id).click();
    const radios = [...document.querySelectorAll("[role=radio]")];
    for (const name of ["× even", "[10, 1, 1]", "documents", "float16", "one head", "entropy"])
        radios.find(e => e.textContent === name).click();
    ["snext", "snext", "snext", "snext", "mback", "after", "next"].forEach(press);
    document.querySelector("#chips button").click();
    document.querySelector("#table th:last-child button").click();
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["lesson", "minilm", "pooled", "chinese", "hostile"])
def test_a_page_is_quiet_at_every_width(
    report: Report, open_page: Open, name: str, scheme: str
) -> None:
    page = open_page(report(name), scheme=scheme)
    for width in (2000, 1200, 400):
        page.page.set_viewport_size({"width": width, "height": 900})
        # Soon, for what the window's size decides is drawn anew when it has come to rest.
        page.page.wait_for_function(FITS, timeout=5000)


@pytest.mark.parametrize(("name", "scheme"), [("causal", "light"), ("lesson", "dark")])
def test_a_page_is_accessible(report: Report, open_page: Open, name: str, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = open_page(report(name), scheme=scheme, reduced_motion="reduce")
    page.run(USE_ALL)
    for context in (None, "#help"):
        found = axe.run(page.page, context=context, options=RULES).response["violations"]
        assert [(rule["id"], rule["nodes"]) for rule in found] == []
        page.press("?")


# Groups whose arrow keys choose, and what is pressed, slid or ticked.
GROUPS = ("metric", "scale", "pool", "sdots", "shapemode", "draw", "mdots", "mkind", "dtype")
BUTTONS = (
    *("#chips button:last-child", "#prev", "#next", "#sback", "#snext", "#sreset", "#splay"),
    *("#presets button:nth-child(3)", "#mback", "#mnext", "#mreset", "#theme"),
    "#table th:first-child button",
)
INPUTS = {"#skip": "ArrowUp", "#scausal": "Space", "#dk": "ArrowRight", "#tau": "ArrowRight"}
INPUTS |= {"#after": "Space", "#mval": "ArrowRight", "#shift": "ArrowRight"}
LOOK = """() => JSON.stringify([
    document.querySelector("main").innerText, document.documentElement.dataset.theme,
    ...[...document.querySelectorAll("[aria-pressed]")].map(button => button.ariaPressed),
    ...[...document.querySelectorAll("canvas")].map(canvas => canvas.toDataURL()),
])"""
# In the middle of every walk and slider, so that both ways are open.
MIDDLE = """() => {
    for (const id of ["sdots", "mdots"]) document.getElementById(id).children[1].click();
    for (const first of ["#mkind button:last-child", "#presets button:nth-child(2)"])
        document.querySelector(first).click();
}"""


def test_every_control_changes_what_is_seen(report: Report, open_page: Open) -> None:
    """By mouse and by keys."""
    page = open_page(report("pooled"))

    def changes(selector: str, use: Callable[[Any], None]) -> None:
        page.run(MIDDLE)
        before = page.run(LOOK)
        use(page.page.locator(selector))
        assert page.run(LOOK) != before, selector

    for group in GROUPS:
        changes(f"#{group} [tabindex='-1'] >> nth=0", lambda radio: radio.click())
        changes(f"#{group} [tabindex='0']", lambda radio: radio.press("ArrowRight"))
    for button in BUTTONS:
        changes(button, lambda control: control.click())
        changes(button, lambda control: control.press("Enter"))
    for control, key in INPUTS.items():
        changes(control, lambda e, key=key: e.press(key))
        if control != "#skip":
            changes(control, lambda e: e.click())


def test_scripts_of_others_do_not_run(report: Report, open_page: Open, tmp_path: Path) -> None:
    attack = (
        "<script>window.evil = 1</script>"
        "<img src='https://example.com/x.png' onerror='window.evil = 1'>"
        "<p style='position: fixed' id='styled'>x</p></main>"
    )
    file = tmp_path / "attacked.html"
    whole = report("minilm").read_text(encoding="utf-8")
    file.write_text(whole.replace("</main>", attack, 1), encoding="utf-8")
    page = open_page(file, quiet=False)
    assert page.run("window.evil") is None
    assert page.run("getComputedStyle(document.getElementById('styled')).position") == "static"
    assert page.text("#headname")
    assert any("Content Security Policy" in message for message in page.messages)
    asked = [url for url in page.requests if url.startswith("http")]
    assert all(page.run("document.querySelector('img').naturalWidth") == 0 for _ in asked or [1])


def test_names_of_tokens_stay_text(report: Report, open_page: Open) -> None:
    page = open_page(report("hostile"))
    assert page.run("window.evil") is None
    assert page.page.locator("#map img, #read img, #map script, #trio script").count() == 0
    names = page.run("[...document.querySelectorAll('#ylab span')].map(e => e.textContent)")
    shown = {"\n": "⏎", "": "∅", "Ġthe": "␣the"}
    assert names == [shown.get(token, token) for token in HOSTILE]
    page.page.locator("#map").focus()
    for _ in HOSTILE:
        page.press("ArrowDown", "ArrowRight")
    assert "{name}" in page.text("#live")


def test_without_scripts_the_numbers_are_there(report: Report, open_page: Open) -> None:
    page = open_page(report("minilm"), java_script_enabled=False)
    assert page.page.locator("#table tbody tr").count() == 72
    assert page.page.locator("noscript p").is_visible()
    for section in ("overview", "head", "steps", "scaling", "masks", "softmax", "theme"):
        assert not page.page.locator(f"#{section}").is_visible()
    assert page.page.locator("#numbers").is_visible()


def test_on_paper_there_are_no_controls(report: Report, open_page: Open) -> None:
    page = open_page(report("causal"))
    page.page.emulate_media(media="print")
    for control in (".bar", "#metric", "#snext", "#dk"):
        assert not page.page.locator(control).is_visible()
    assert page.page.locator("#table").is_visible()
    assert page.page.locator("#cells").is_visible()


def test_a_page_is_quick(report: Report, open_page: Open) -> None:
    """Time of the main thread, by its own clock: loose, for machines are shared."""
    page = open_page(report("minilm"), reduced_motion="no-preference")
    session: Any = page.page.context.new_cdp_session(page.page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def spent() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return float(next(m["value"] for m in metrics if m["name"] == "TaskDuration"))

    frames = "new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))"
    before = spent()
    page.page.reload()
    page.run(frames)
    assert spent() - before < 1.5
    before = spent()
    for _ in range(4):
        page.click("#next")
        page.run(frames)
    assert (spent() - before) / 4 < 0.15
