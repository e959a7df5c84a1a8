"""What a page of `attncli report` shows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
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
