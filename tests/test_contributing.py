"""What CONTRIBUTING changes by way of example can be changed so, and then does what it shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import assert_printed, blocks

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")
DIFF = re.compile(r"^```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Heading → its text, of every section that shows a change.
CHANGES = {
    title: text
    for title, text in re.findall(r"^### (.*?)\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    if DIFF.search(text)
}


def apply_diff(diff: str, root: Path) -> None:
    """Make the changes of a diff, but for those that are made already.

    Each hunk has to be found where it says, once; a file that is not there is made of one hunk.
    """
    for part in re.split(r"^--- ", diff, flags=re.MULTILINE)[1:]:
        name, _, hunks = part.partition("\n")
        path = root / name
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for hunk in re.split(r"^@@.*\n", hunks, flags=re.MULTILINE)[1:]:
            lines = hunk.splitlines(keepends=True)
            old = "".join(line[1:] or "\n" for line in lines if not line.startswith("+"))
            new = "".join(line[1:] or "\n" for line in lines if not line.startswith("-"))
            if text.count(new) != 1:
                assert not text if not old else text.count(old) == 1, (name, old)
                text = text.replace(old, new) if old else new
        path.write_text(text, encoding="utf-8")


def changed(text: str, root: Path) -> None:
    """Copy the package and make the changes of a section."""
    shutil.copytree(
        ROOT / "attncli", root / "attncli", ignore=shutil.ignore_patterns("__pycache__")
    )
    for diff in re.findall(r"^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        apply_diff(diff, root)


@pytest.mark.parametrize("title", CHANGES)
def test_a_change_that_is_shown_does_what_is_shown(title: str, tmp_path: Path) -> None:
    changed(CHANGES[title], tmp_path)
    (tmp_path / "sample_inputs").symlink_to(ROOT / "sample_inputs", target_is_directory=True)
    shown = [one for block in blocks(CHANGES[title]) for one in block.commands]
    assert shown
    # Nobody measures the copy, whose lines are covered where they come from.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    for one in shown:
        ran = subprocess.run(
            one.line.replace("attncli ", f"{sys.executable} -m attncli ", 1),
            shell=True,
            cwd=tmp_path,
            env=kept | {"PYTHONPATH": str(tmp_path), "COLUMNS": "100"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == one.code, ran.stderr
        assert_printed(one, ran.stdout + ran.stderr)


def test_five_changes_are_shown() -> None:
    assert len(CHANGES) == 5


def test_a_change_that_no_longer_fits_would_be_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one\ntwo\n\nthree\n")
    apply_diff("--- a.py\n@@\n two\n \n-three\n+four\n", tmp_path)
    assert (tmp_path / "a.py").read_text() == "one\ntwo\n\nfour\n"
    with pytest.raises(AssertionError):
        apply_diff("--- a.py\n@@\n-three\n+five\n", tmp_path)
    apply_diff("--- b.py\n@@\n+new\n--- a.py\n@@\n one\n+and\n two\n", tmp_path)
    apply_diff("--- a.py\n@@\n one\n+and\n two\n", tmp_path)  # made already
    assert (tmp_path / "a.py").read_text() == "one\nand\ntwo\n\nfour\n"
    assert (tmp_path / "b.py").read_text() == "new\n"
