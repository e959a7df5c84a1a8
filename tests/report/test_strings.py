"""Every text of the page is there in both languages, and used."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import attncli
from attncli.analysis.head_columns import HEAD
from attncli.attention.streaming.head_record import Label
from attncli.report.page.data import DRAWN

REPORT = Path(attncli.__file__).parent / "report"
PAGE = REPORT / "page"
TEXTS = {
    "page": json.loads((PAGE / "strings.json").read_text(encoding="utf-8")),
    "walk": json.loads((REPORT / "explanation.json").read_text(encoding="utf-8")),
}
STRINGS = TEXTS["page"]
FILES = {
    "page": [*PAGE.glob("*.html"), *PAGE.glob("*.py"), *PAGE.glob("js/*.js")],
    "walk": [
        *(REPORT / name for name in ("explanation.py", "stages.py")),
        *(REPORT.parent / "cli" / name for name in ("explain.py", "opening.py", "terminal.py")),
    ],
}
SOURCES = {
    name: "\n".join(path.read_text(encoding="utf-8") for path in sorted(paths))
    for name, paths in FILES.items()
}
both = pytest.mark.parametrize("of", TEXTS)


def built(sources: str) -> set[str]:
    """Keys are literals of the sources, or begin as one that is completed there."""
    found = re.findall(r"""["'`]([\w.-]+)\.(?:\$\{|["'] [+~])|f"([\w.-]+)\.\{""", sources)
    return {f"{one or other}." for one, other in found}


def placeholders(text: str) -> set[str]:
    return set(re.findall(r"\{(\w+)(?::,)?\}", text))


@both
def test_both_languages_say_the_same_of_the_same(of: str) -> None:
    for key, texts in TEXTS[of].items():
        assert set(texts) == {"en", "zh"}, key
        assert placeholders(texts["en"]) == placeholders(texts["zh"]), key
        assert texts["en"], key
        assert texts["zh"], key


@both
def test_what_is_words_in_english_is_chinese_in_the_other(of: str) -> None:
    chinese = re.compile(r"[\u4e00-\u9fff]")
    for key, texts in TEXTS[of].items():
        same = texts["en"] == texts["zh"]
        assert same or chinese.search(texts["zh"]) or not re.search("[a-z]{4}", texts["en"]), key


@both
def test_every_text_is_used_and_every_text_used_is_there(of: str) -> None:
    strings, sources = TEXTS[of], SOURCES[of]
    begun = built(sources) | built((REPORT / "words.py").read_text(encoding="utf-8"))
    quoted = set(re.findall(r"""["'`]([a-z]+(?:\.[\w-]+)+)["'`]""", sources))
    for key in strings:
        assert key in quoted or any(key.startswith(prefix) for prefix in begun), key
    roots = {key.partition(".")[0] for key in strings}
    for key in re.findall(r"""\bt(?:ext)?\(\s*["'`]([a-z]+\.[\w.-]+)["'`]""", sources):
        assert key.partition(".")[0] in roots
        assert key in strings or f"{key.rstrip('.')}." in begun, key


def test_columns_and_labels_are_called_as_everywhere() -> None:
    for label in Label:
        assert STRINGS[f"label.{label}"]["en"] == label
    for column in HEAD:
        if column.heading is not None and column.unit != "nats":
            assert STRINGS[f"column.{column.key}"]["en"] == column.heading
    assert set(DRAWN) <= {column.key for column in HEAD}
