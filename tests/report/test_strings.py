"""Every text of the page is there in both languages, and used."""

from __future__ import annotations

import json
import re
from pathlib import Path

import attncli
from attncli.analysis.entropy import HEAD
from attncli.attention.streaming.heads import Label
from attncli.report.page.data import DRAWN

PAGE = Path(attncli.__file__).parent / "report" / "page"
STRINGS = json.loads((PAGE / "strings.json").read_text(encoding="utf-8"))
SOURCES = "\n".join(
    path.read_text(encoding="utf-8")
    for pattern in ("*.html", "*.py", "js/*.js")
    for path in sorted(PAGE.glob(pattern))
)
# A key is a literal of the sources, or begins as one that is completed there.
BUILT = {f"{name}." for name in re.findall(r"""["'`]([\w.-]+)\.(?:\$\{|["'] [+~])""", SOURCES)}
BUILT |= {f"{name}." for name in re.findall(r"""f"([\w.-]+)\.\{""", SOURCES)}


def placeholders(text: str) -> set[str]:
    return set(re.findall(r"\{(\w+)\}", text))


def test_both_languages_say_the_same_of_the_same() -> None:
    for key, texts in STRINGS.items():
        assert set(texts) == {"en", "zh"}, key
        assert placeholders(texts["en"]) == placeholders(texts["zh"]), key
        assert texts["en"], key
        assert texts["zh"], key


def test_what_is_words_in_english_is_chinese_in_the_other() -> None:
    chinese = re.compile(r"[\u4e00-\u9fff]")
    for key, texts in STRINGS.items():
        same = texts["en"] == texts["zh"]
        assert same or chinese.search(texts["zh"]) or not re.search("[a-z]{4}", texts["en"]), key


def test_every_text_is_used_and_every_text_used_is_there() -> None:
    quoted = set(re.findall(r"""["'`]([a-z]+(?:\.[\w-]+)+)["'`]""", SOURCES))
    for key in STRINGS:
        assert key in quoted or any(key.startswith(prefix) for prefix in BUILT), key
    roots = {key.partition(".")[0] for key in STRINGS}
    for key in re.findall(r"""\bt(?:ext)?\(\s*["'`]([a-z]+\.[\w.-]+)["'`]""", SOURCES):
        assert key.partition(".")[0] in roots
        assert key in STRINGS or f"{key}" in BUILT or key + "." in BUILT, key


def test_columns_and_labels_are_called_as_everywhere() -> None:
    for label in Label:
        assert STRINGS[f"label.{label}"]["en"] == label
    for column in HEAD:
        if column.heading is not None and column.unit != "nats":
            assert STRINGS[f"column.{column.key}"]["en"] == column.heading
    assert set(DRAWN) <= {column.key for column in HEAD}
