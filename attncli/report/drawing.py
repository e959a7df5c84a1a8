"""Pictures where matplotlib is installed, and the one error where it is not."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from attncli.errors import UsageError
from attncli.files.text import shown
from attncli.files.writer import require_folder

SUFFIXES = (".png", ".svg", ".pdf")


def require_picture(target: str) -> None:
    """Refuse a picture that cannot be drawn or written, before anything is computed.

    Raises:
        DataError: there is no such folder.
        UsageError: a name that says no format, or no matplotlib to draw with.
    """
    if target == "-" or Path(target).suffix.lower() not in SUFFIXES:
        got = "standard output" if target == "-" else shown(target)
        raise UsageError("«plot»", f"expected a name that ends in .png, .svg or .pdf, got {got}")
    require_folder(target)
    pictures("canvas")


def pictures(module: str = "plots") -> Any:
    """A module that draws, loaded with its first use.

    Raises:
        UsageError: there is no matplotlib.
    """
    try:
        return import_module(f"attncli.report.{module}")
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != "matplotlib":
            raise
        advice = "pip install 'attncli[plot]'"
        raise UsageError("«plot»", "expected matplotlib, got none", advice) from None
