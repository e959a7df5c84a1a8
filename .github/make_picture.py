"""Draw the pictures of README and docs: real output of commands in colour, docs/{report,heads}.png.

python .github/make_picture.py     # needs the extra `dev`, and Chromium for the report
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
# Name of the picture → its width in columns, and the command.
PICTURES = {
    "compute": (88, "compute --causal --stage scaled,masked,weights,output"),
    "heatmap": (
        112,
        "compute sample_inputs/minilm.safetensors --group layers.3 --head-index 1 --digits 2 "
        "--heatmap",
    ),
}

# Where a report shows all heads, in points from its corner.
ALL_HEADS = {"x": 0, "y": 280, "width": 1120, "height": 660}


def draw(name: str, width: int, command: str) -> None:
    """Run a command and write what it printed next to this script."""
    environment = os.environ | {"COLORTERM": "truecolor"}
    program = [sys.executable, "-m", "attncli", *command.split(), "--color", "always"]
    ran = subprocess.run(
        program, env=environment, capture_output=True, text=True, check=True, cwd=HERE.parent
    )
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(f"[bold]$[/bold] attncli {command}", highlight=False)
    console.print(Text.from_ansi(ran.stdout.rstrip()))
    console.save_svg(str(HERE / f"{name}.svg"), title="attncli", unique_id="attncli")


def draw_page() -> None:
    """Write the page about MiniLM, and take a picture of its top, and one of all heads there."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as browsers:
        page = Path(folder) / "heads.html"
        report = ["report", "sample_inputs/minilm.safetensors", "-o", str(page), "--quiet"]
        subprocess.run([sys.executable, "-m", "attncli", *report], check=True, cwd=HERE.parent)
        chromium = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
        browser = browsers.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1120, "height": 1640}, color_scheme="light")
        tab.goto(page.as_uri())
        tab.wait_for_timeout(500)
        top = Image.open(io.BytesIO(tab.screenshot()))
        top.convert("RGB").quantize(256).save(DOCS / "report.png", optimize=True)
        tab.screenshot(path=DOCS / "heads.png", clip=ALL_HEADS)
        browser.close()


if __name__ == "__main__":
    draw_page()
    for name, (width, command) in PICTURES.items():
        draw(name, width, command)
