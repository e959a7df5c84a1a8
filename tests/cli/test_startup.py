"""Help, version and usage errors load neither torch nor NumPy."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy")
SCRIPT = """
import sys
from attncli.cli.app import app
try:
    app(sys.argv[1:])
except SystemExit:
    pass
print("loaded:", *(name for name in {heavy} if name in sys.modules))
"""


def loaded(arguments: list[str]) -> list[str]:
    """The heavy libraries that a run of the program imports."""
    script = [sys.executable, "-c", SCRIPT.format(heavy=HEAVY), *arguments]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()[1:]


LIGHT = """

--help
--version
compute --help
inspect --help
nonsense
compute --nope
compute --digits
compute --digits x
compute -f xml
compute --step
inspect
"""


@pytest.mark.parametrize("line", LIGHT.splitlines()[1:])
def test_nothing_heavy(line: str) -> None:
    assert loaded(line.split()) == []


def test_the_check_can_fail() -> None:
    assert loaded(["compute"]) == ["torch", "numpy"]


@pytest.mark.parametrize("line", ["variance --samples 100", "variance --logits 10,1,1"])
def test_experiments_do_without_torch(line: str) -> None:
    assert loaded(line.split()) == ["numpy"]
