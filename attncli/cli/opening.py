"""What stands above results for eyes: of what group they are, its sizes, and what shaped it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import RenderableType

from attncli.analysis.attention_arguments import arguments_record
from attncli.analysis.problems import GroupProblem
from attncli.attention.sizes import Chosen
from attncli.files.text import place, shown
from attncli.report import Unit
from attncli.report.printer import heading
from attncli.report.stages import problem_line
from attncli.report.table import chosen_words
from attncli.report.words import ENGLISH, Words

Openings = dict[tuple[str, str], list[RenderableType]]


def opening(
    made: GroupProblem,
    unit: Unit | None = None,
    words: Words = ENGLISH,
    chosen: Chosen = (None, None),
) -> Iterator[RenderableType]:
    """The group, where it is from, its sizes, and what is hidden.

    Args:
        made: the group.
        unit: that of entropies, for a word on how large they can be; None for none.
        words: the language.
        chosen: the batches and heads that are looked at alone.
    """
    group, problem, t = made.group, made.problem, words.text
    if group.name:
        yield heading(t("opening.group", name=shown(group.name)))
    source = place(group.source_name)
    if group.source == "example":
        source = t("opening.example")
    if group.seed is not None:
        source = t("opening.random", seed=group.seed)
    line = problem_line(problem, source, words)
    if unit is not None:
        outcomes = max(1, problem.sizes.k_len + (problem.sinks is not None))
        most = math.log(outcomes, 2 if unit is Unit.BITS else math.e)
        line += f" · {t('opening.entropy', most=f'{most:.4g}', unit=unit)}"
    yield " · ".join((line, *chosen_words(chosen)))
    used = _options_in_use(made, words)
    if used:
        yield t("opening.options", options=used)


def openings(made: Iterable[GroupProblem], unit: Unit | None = None) -> Openings:
    """What stands above the table of each source and group."""
    return {(one.group.source_name, one.group.name): list(opening(one, unit)) for one in made}


def _options_in_use(made: GroupProblem, words: Words) -> str:
    """Options that differ from their defaults, and where query 0 stands if that matters."""
    options = made.arguments.options
    record = arguments_record(made.arguments, made.problem.mask.offset)
    parts = []
    for name, value in record.items():
        is_default = value in (None, False) or (name == "temperature" and value == 1)
        if is_default or name in ("scale", "query_offset", "mask_true"):
            continue
        told = "" if value is True else f" {_told(value)}"
        parts.append(name.replace("_", " ") + told)
    if options.attn_mask is not None and options.attn_mask.dtype == bool:
        parts.append(f"True = {options.mask_true}")
    if options.needs_positions or options.query_offset is not None:
        offset = record["query_offset"]
        where = "position" if isinstance(offset, int | list) else "document"
        parts.append(words.text(f"opening.{where}", offset=_told(offset)))
    return " · ".join(parts)


def _told(value: Any) -> str:
    """An option's value; a long list cut short, those of several batches apart."""
    if isinstance(value, list):
        more = f",… ({len(value)})" if len(value) > 8 else ""
        apart = "; " if value and isinstance(value[0], list) else ","
        return apart.join(map(_told, value[:8])) + more
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:g}" if isinstance(value, float) else str(value)
