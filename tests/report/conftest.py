"""Reports: read as a browser would, and opened in one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsing import HOSTILE, Layer, Open, Opened, bundle
from reading import MakePage, Read
from safetensors import safe_open
from typer.testing import CliRunner

from attncli.cli.app import app

SAMPLES = Path(__file__).parent.parent.parent / "sample_inputs"
MINILM = SAMPLES / "minilm.safetensors"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves over d_k of few draws, which take most of the time of a small page."""
    monkeypatch.setattr("attncli.cli.report_run.CURVE_SAMPLES", 200)


@pytest.fixture
def page(run: Callable[..., Any], tmp_path: Path) -> MakePage:
    """Run `attncli report ARGS` and read what it wrote."""

    def make(*args: object) -> Read:
        target = tmp_path / "page.html"
        run("report", *args, "-q", "-o", target)
        return Read(target.read_text(encoding="utf-8"))

    return make


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Reports by name, each written once."""
    folder = tmp_path_factory.mktemp("reports")

    @cache
    def written(name: str) -> Path:
        options: dict[str, list[object]] = {
            "minilm": [MINILM],
            "causal": [MINILM, "--group", "layers.3", "--causal"],
            "lesson": [],
            "chinese": [MINILM, "--group", "layers.0", "--lang", "zh"],
        }
        if name == "pooled":
            tokens = [f"word{i}" for i in range(300)]
            source = bundle(folder / "pooled.safetensors", 300, tokens)
            options[name] = [source, "--causal", "--max-size", "300kB"]
        if name == "thumbnails":
            source = bundle(folder / "many.safetensors", 100, [f"w{i}" for i in range(100)], 48)
            options[name] = [source, "--max-size", "350kB"]
        if name == "hostile":
            options[name] = [bundle(folder / "hostile.safetensors", len(HOSTILE), [*HOSTILE])]
        file = folder / f"{name}.html"
        arguments = ["report", *map(str, options[name]), "-o", str(file)]
        ran = CliRunner().invoke(app, arguments)
        assert ran.exit_code == 0, ran.stderr
        return file

    return written


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, where the machine has one."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if program is None:
        pytest.skip(f"there is none of {', '.join(CHROMIUM)} on this machine")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def shared_page(browser: Any) -> Any:
    """A page for one test after another: a context of its own costs half a second."""
    return browser.new_context().new_page()


@pytest.fixture
def open_page(browser: Any, request: pytest.FixtureRequest) -> Iterator[Open]:
    """Open a file; in the end nothing may have been said in the console, or asked of the network.

    `quiet=False` leaves that out; `scheme` is the system's; other keywords are those of a context,
    which is then a new one.
    """
    contexts: list[Any] = []
    watched: list[tuple[Opened, str]] = []

    def opened(
        file: Path, fragment: str = "", *, quiet: bool = True, scheme: str = "light", **options: Any
    ) -> Opened:
        if options:
            contexts.append(browser.new_context(**options))
            page = contexts[-1].new_page()
        else:
            page = request.getfixturevalue("shared_page")
            page.goto("about:blank")
            page.mouse.move(0, 0)
        page.set_viewport_size({"width": 1200, "height": 900})
        page.emulate_media(color_scheme=scheme, media="screen")
        seen = Opened(page)
        page.on("console", seen.hear_console)
        page.on("pageerror", seen.hear_error)
        page.on("request", seen.hear_request)
        watched.append((seen, file.as_uri() if quiet else ""))
        page.goto(file.as_uri() + fragment)
        return seen

    yield opened
    for seen, _ in watched:
        seen.page.remove_listener("console", seen.hear_console)
        seen.page.remove_listener("pageerror", seen.hear_error)
        seen.page.remove_listener("request", seen.hear_request)
    for context in contexts:
        context.close()
    for seen, address in watched:
        if address:
            assert seen.messages == []
            assert [url for url in seen.requests if not url.startswith((address, "data:"))] == []


@pytest.fixture(scope="session")
def layers() -> list[Layer]:
    """All of MiniLM."""
    with safe_open(MINILM, "pt") as file:
        told = json.loads(file.metadata()["attncli"])
        return [
            Layer(
                file.get_tensor(f"{name}.q"),
                file.get_tensor(f"{name}.k"),
                options["scale"],
                list(np.ravel(options["labels"])),
            )
            for name, options in told.items()
        ]
