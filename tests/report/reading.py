"""A page of `attncli report` as elements, text and numbers."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import cached_property
from html.parser import HTMLParser
from typing import Any

import numpy as np


class Read(HTMLParser):
    """What stands in a page.

    Attributes:
        text: the file.
        elements: tag and attributes of each element, in order.
        words: of each element that holds text directly, its tag, its id or "", and the text.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.words: list[tuple[str, str, str]] = []
        self._last = ("", "")
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.elements.append((tag, given))
        self._last = (tag, given.get("id", ""))

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.words.append((*self._last, data))

    def block(self, tag: str, which: int = -1) -> str:
        """What stands in the first style or one of the scripts, with nothing left out."""
        return [words for name, _, words in self.words if name == tag][which]

    @cached_property
    def data(self) -> dict[str, Any]:
        """The numbers, as scripts read them."""
        (found,) = (words for tag, name, words in self.words if (tag, name) == ("script", "data"))
        data: dict[str, Any] = json.loads(found)
        return data

    @cached_property
    def rows(self) -> list[list[str]]:
        """The cells of the table of all heads, headings first; what stands beside labels too."""
        start = self.text.index('<table id="table"')
        reader = _Rows()
        reader.feed(self.text[start : self.text.index("</table>", start)])
        return [[cell.strip() for cell in row] for row in reader.rows]

    def plane(self, group: int = 0, how: str = "mean", of: str = "maps") -> np.ndarray:
        """Maps of a group, (heads, bins of queries, bins of keys); −1 where hidden."""
        given = self.data["groups"][group]
        stored = given[of]
        edges = given["edges"] if of == "maps" else stored["edges"]
        shape = (-1, len(edges["q"]) - 1, len(edges["k"]) - 1)
        if stored["encoding"] == "f4":
            return floats(stored[how]).reshape(shape)
        words = np.frombuffer(base64.b64decode(stored[how]), "<u2").astype(np.float64)
        weights = np.where(words == 65534, np.nan, (words / 65533) ** 2)
        return np.where(words == 65535, -1.0, weights).reshape(shape)

    def strips(self, name: str, group: int = 0) -> np.ndarray:
        """Numbers of queries or keys, one row a head."""
        given = self.data["groups"][group]
        heads = 1 if name == "keys" else given["heads"]
        return floats(given[name]).reshape(heads, -1)


# Runs `attncli report` with these arguments and reads what it wrote.
MakePage = Callable[..., Read]


class _Rows(HTMLParser):
    """The cells of a table as text."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def floats(text: str) -> np.ndarray:
    """Numbers of base64."""
    return np.frombuffer(base64.b64decode(text), "<f4").astype(np.float64)
