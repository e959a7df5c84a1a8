"""A page of `attncli report`, read as a browser would, and pages made in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reading import Read

MakePage = Callable[..., Read]


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves over d_k of few draws, which take most of the time of a small page."""
    monkeypatch.setattr("attncli.cli.report_run.SAMPLES", 200)


@pytest.fixture
def page(run: Callable[..., Any], tmp_path: Path) -> MakePage:
    """Run `attncli report ARGS` and read what it wrote."""

    def make(*args: object) -> Read:
        target = tmp_path / "page.html"
        run("report", *args, "-q", "-o", target)
        return Read(target.read_text(encoding="utf-8"))

    return make
