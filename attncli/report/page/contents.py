"""What a page of `attncli report` shows, and its words in the languages there are."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from attncli.attention.maps import HeadMaps, Plan
from attncli.attention.problem import Cost, Problem
from attncli.columns import Column
from attncli.report import Language, PageTheme

Record = dict[str, Any]

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Some heads of one batch, as the page shows them.

    Attributes:
        name: the group's in its bundle; "" for none.
        source: its file.
        batch: which batch they are of.
        problem: what they are heads of.
        records: one a head.
        maps: of all of them.
        detailed: indices of those whose maps are kept; None for all.
        tokens: one per key; None for none.
        mask: the options that hide keys, in words; "" for none.
        cost: of the whole problem; None of weights.
        compute, entropy: the commands that are about the group; None where there is none.
        warnings: what the reader should know.
    """

    name: str
    source: str
    batch: int
    problem: Problem
    records: Sequence[Record]
    maps: HeadMaps
    detailed: Sequence[int] | None
    tokens: Sequence[str] | None
    mask: str
    cost: Cost | None
    compute: str | None
    entropy: str | None
    warnings: Sequence[str]

    @property
    def lengths(self) -> tuple[int, int]:
        """Real queries, and keys."""
        return int(self.maps.bins.queries[-1]), int(self.maps.bins.keys[-1])

    @property
    def hides_zeros(self) -> bool:
        """Whether weights were given of which those of 0 count as hidden."""
        return self.problem.given is not None and self.problem.given.zeros_hidden


@dataclass(frozen=True, slots=True)
class Commands:
    """What prints the same as a section does."""

    overview: str
    numbers: str
    report: str
    scaling: str
    steps: str = "attncli compute"
    steps_causal: str = "attncli compute --causal"
    softmax: str = "attncli compute --explain"


@dataclass(frozen=True, slots=True)
class Page:
    """All that a page shows.

    Attributes:
        title: its heading.
        groups: in order.
        plan: how their maps are kept.
        columns: of the records.
        start: which head is shown first, counted through all groups.
        curves: records of the experiment over d_k.
        sink_keys: how many of the first keys count as sinks.
        commands: for readers who want to see it in a terminal.
        language, theme: of the page.
    """

    title: str
    groups: Sequence[PageGroup]
    plan: Plan
    columns: Sequence[Column]
    start: int
    curves: Sequence[Record]
    sink_keys: int
    commands: Commands
    language: Language = Language.EN
    theme: PageTheme = PageTheme.AUTO

    @property
    def records(self) -> list[Record]:
        """All heads."""
        return [record for group in self.groups for record in group.records]

    @property
    def names(self) -> list[str]:
        """What tells the groups apart; "" for one without a name."""
        several_files = len({group.source for group in self.groups}) > 1
        several_batches = len({group.batch for group in self.groups}) > 1
        names = []
        for group in self.groups:
            words = [group.source] if several_files or not group.name else []
            words += [group.name] if group.name else []
            words += [f"[{group.batch}]"] if several_batches else []
            names.append(" ".join(words) if len(self.groups) > 1 or group.name else "")
        return names

    @property
    def short_names(self) -> list[str]:
        """The numbers of layers, where these alone tell the groups apart; else the names."""
        names = self.names
        digits = [re.findall(r"\d+", name) for name in names]
        frames = {re.sub(r"\d+", "#", name) for name in names}
        alone = len(frames) == 1 and all(len(one) == 1 for one in digits)
        return [one[0] for one in digits] if alone else names

    @property
    def kind(self) -> str:
        """What the groups are, as `Words` counts them."""
        if len({group.name for group in self.groups}) == 1:
            return "batch" if len({group.source for group in self.groups}) == 1 else "file"
        return "layer" if self.short_names[0].isdigit() else "group"


@dataclass(frozen=True)
class Words:
    """The page's texts in one language."""

    language: Language

    @cached_property
    def table(self) -> dict[str, str]:
        """Every text by its key."""
        both = json.loads((HERE / "strings.json").read_text(encoding="utf-8"))
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
