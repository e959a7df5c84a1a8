"""The pages make a site, without a warning."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from pages import PAGES, ROOT

NEEDED = ("sphinx", "myst_parser", "furo")


@pytest.mark.skipif(not all(map(find_spec, NEEDED)), reason="pip install 'attncli[docs]'")
def test_every_page_is_in_the_site(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "docs", str(tmp_path)]
    ran = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    index = (tmp_path / "index.html").read_text(encoding="utf-8")
    for page in PAGES:
        if page.startswith("docs/"):
            address = page.removeprefix("docs/").removesuffix(".md") + ".html"
            assert (tmp_path / address).is_file()
            assert address == "index.html" or f'href="{address}"' in index
