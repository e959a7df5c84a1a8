"""Pages in Chinese show the commands, the output and the numbers of those in English."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from pages import CHINESE, PAGES, ROOT, blocks

TRANSLATED = {"README.md": ROOT / "README.zh-CN.md"} | {
    f"docs/{path.name}": path for path in sorted(CHINESE.glob("*.md"))
}
GUIDES = ("why-scale", "masks", "check", "capture", "compare", "entropy", "ci", "notebooks")
NUMBER = re.compile(r"[0-9⁰¹²³⁴⁵⁶⁷⁸⁹](?:[0-9.,]*[0-9])?")
LINK = re.compile(r"\]\(([^)]*)\)")


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def numbers(text: str) -> Counter[str]:
    return Counter(NUMBER.findall(re.sub(r"`[^`]+`", "", LINK.sub("]", prose(text)))))


def in_code(text: str) -> Counter[str]:
    return Counter(re.findall(r"`([^`]+)`", LINK.sub("]", prose(text))))


def test_every_guide_is_there() -> None:
    assert set(TRANSLATED) == {"README.md", *(f"docs/{name}.md" for name in GUIDES)}


@pytest.mark.parametrize("page", TRANSLATED)
def test_a_page_shows_what_the_english_one_shows(page: str) -> None:
    english, chinese = PAGES[page], TRANSLATED[page].read_text(encoding="utf-8")
    for ours, theirs in zip(blocks(english), blocks(chinese), strict=True):
        assert theirs == ours
    assert in_code(chinese) == in_code(english)
    assert numbers(chinese) == numbers(english)
    assert len(re.findall(r"^#+ ", chinese, re.MULTILINE)) == len(
        re.findall(r"^#+ ", english, re.MULTILINE)
    )


@pytest.mark.parametrize("page", TRANSLATED)
def test_links_lead_to_files(page: str) -> None:
    path: Path = TRANSLATED[page]
    for target in LINK.findall(prose(path.read_text(encoding="utf-8"))):
        assert (path.parent / target.partition("#")[0]).exists(), target
