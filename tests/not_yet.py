"""What tests/test_architecture.py asks and does not find yet. This list only shrinks."""

from __future__ import annotations

# Packages within which modules import each other in circles.
CIRCLES: tuple[str, ...] = ("attncli.cli",)
IMPORTS_PUT_OFF: set[str] = {
    "attncli.cli.app",
    "attncli.cli.options",
    "attncli.cli.progress",
}
OPTIONS_SPELT: set[str] = set()
