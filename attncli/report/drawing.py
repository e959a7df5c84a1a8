"""Pictures where matplotlib is installed, and the one error where it is not."""

from __future__ import annotations

import logging
import os
import shutil
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from attncli.errors import UsageError
from attncli.files.target import require_target
from attncli.files.text import shown
from attncli.signals import held_back, undo_from_now

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
    require_target(target)
    pictures("canvas")


def pictures(module: str = "plots") -> Any:
    """A module that draws, loaded with its first use.

    Raises:
        UsageError: there is no matplotlib.
    """
    try:
        _find_home()
        return import_module(f"attncli.report.{module}")
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != "matplotlib":
            raise
        advice = "pip install 'attncli[plot]'"
        raise UsageError("«plot»", "expected matplotlib, got none", advice) from None


@cache
def _find_home() -> None:
    """Let matplotlib choose where it keeps its cache of fonts.

    Where the user has no home that can be written it makes a temporary folder, says so at length,
    and removes it in the end, but not when a signal ends the program.
    """
    given, log = os.environ.get("MPLCONFIGDIR"), logging.getLogger("matplotlib")
    level = log.level
    log.setLevel(logging.ERROR)
    with held_back():
        chosen = import_module("matplotlib").get_cachedir()
        if os.environ.get("MPLCONFIGDIR") != given:
            undo_from_now(partial(shutil.rmtree, chosen, ignore_errors=True))
    log.setLevel(level)
