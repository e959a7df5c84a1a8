"""Texts in the languages there are, kept in a file of JSON: key → language → text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from attncli.columns import Column
from attncli.report import Language


@dataclass(frozen=True)
class Words:
    """The texts of a file in one language."""

    language: Language
    path: Path

    @cached_property
    def table(self) -> dict[str, str]:
        """Every text by its key."""
        both = json.loads(self.path.read_text(encoding="utf-8"))
        return {key: texts[str(self.language)] for key, texts in both.items()}

    def text(self, key: str, **values: Any) -> str:
        """A text with its {placeholders} filled in."""
        return self.table[key].format(**values) if values else self.table[key]

    def counted(self, name: str, count: int) -> str:
        """So many of something."""
        form = f"count.{name}" if count == 1 else f"count.{name}.many"
        return self.text(form, count=count)

    def heading(self, column: Column) -> str:
        """The name of a column with its unit."""
        name = self.table.get(f"column.{column.key}", column.heading or column.key)
        return f"{name} ({self.text('column.bits')})" if column.unit == "bits" else name


def walk_words(language: Language) -> Words:
    """The texts of the walk through the stages, and of what stands above results."""
    return Words(language, Path(__file__).with_name("explanation.json"))


ENGLISH = walk_words(Language.EN)
