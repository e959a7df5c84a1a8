"""What tests/test_architecture.py asks and does not find yet. This list only shrinks."""

from __future__ import annotations

# Packages within which modules import each other in circles.
CIRCLES: tuple[str, ...] = ()
IMPORTS_PUT_OFF: set[str] = set()
OPTIONS_SPELT: set[str] = set()
