"""What the functions for Python return: results that show themselves in notebooks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import RenderableType

from attncli.analysis.compare_columns import HEAD as COMPARED
from attncli.analysis.compare_columns import NUMBERS_OF_HEADS as COMPARED_NUMBERS
from attncli.analysis.compare_columns import HeadComparison, RowComparison
from attncli.analysis.compute import StagesAsked
from attncli.analysis.entropy import ChosenHeads, measure, token_numbers, token_scores
from attncli.analysis.head_columns import (
    HEAD,
    OF_TOKENS,
    WORDS_OF_HEADS,
    GroupPlace,
    Setting,
    limits_of,
)
from attncli.analysis.pictures import head_curves, stage_maps
from attncli.analysis.report import by_batch, most_telling, plan_of, report_heads
from attncli.analysis.variance import CURVE_SAMPLES, CURVE_WIDTHS, experiment_specs, experiments
from attncli.attention.check.compare import Comparison
from attncli.attention.check.hypotheses import Check, Hypothesis
from attncli.attention.masks.audit import audit
from attncli.attention.options import Stage
from attncli.attention.problem import Cost, Problem, cost_of
from attncli.attention.stages import Selection, StageResult, StageStatistics, select
from attncli.attention.streaming.head_record import HeadStatistics, Thresholds
from attncli.attention.streaming.stream import HeadRows, Wanted
from attncli.attention.variance.experiment import ExperimentRecord
from attncli.attention.variance.moments import ScoreMoments
from attncli.columns import columns_of, record_of
from attncli.errors import DataError, UsageError, choice_of
from attncli.files.target import require_target
from attncli.files.writer import write_text
from attncli.limits import require_memory
from attncli.report import Language, Unit
from attncli.report.audit import audit_tables
from attncli.report.check import check_tables
from attncli.report.compare import record_tables
from attncli.report.entropy import Style, head_tables
from attncli.report.notebook import DIGITS, Shown
from attncli.report.page.contents import Commands, Page, PageGroup
from attncli.report.page.page import map_budget, page_html
from attncli.report.printer import Printer
from attncli.report.stages import StageView, cost_line, problem_line, stage_tables, summary_table
from attncli.report.variance import experiment_tables

# Values of a stage that are listed; of more its statistics.
MOST_VALUES = 1024
# Heads of which a table has a line each.
MOST_HEADS = 48
WHERE = GroupPlace(source="tensors", group="")


class OfProblem(Shown):
    """A result of an attention problem."""

    __slots__ = ()
    problem: Problem

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was assumed, and what looks like a mistake."""
        return self.problem.warnings

    def _chosen(self) -> Selection:
        """Which batches and heads it is of."""
        return select(self.problem)

    def _labelled(self) -> tuple[Thresholds, int]:
        """What labels and sink masses are made with."""
        return Thresholds(), 1

    def report(
        self,
        path: str,
        *,
        labels: Sequence[str] | None = None,
        title: str = "attention",
        language: Language | str = Language.EN,
        max_bytes: int = 3_000_000,
    ) -> None:
        """Write a page about its heads that needs nothing else: one HTML file.

        Args:
            path: the file, which appears whole or not at all.
            labels: a token per key; None for none.
            title: the page's heading.
            language: "en" or "zh".
            max_bytes: how large it may be.

        Raises:
            DataError: another number of labels than keys, or a place that cannot be written.
            UsageError: no room for any map.
        """
        keys = self.problem.sizes.k_len
        if labels is not None and len(labels) != keys:
            raise DataError("labels", f"expected {keys}, one a key, got {len(labels)}")
        require_target(path)
        language = choice_of(Language, language, "language")
        tokens = None if labels is None else token_numbers((tuple(labels),), self.problem)
        chosen = list(by_batch(ChosenHeads(WHERE, self.problem, self._chosen(), tokens)))
        text = _page(chosen, self._labelled(), labels, title, language, max_bytes)
        write_text(path, [text])


def _page(
    chosen: Sequence[ChosenHeads],
    labelled: tuple[Thresholds, int],
    labels: Sequence[str] | None,
    title: str,
    language: Language,
    most: int,
) -> str:
    (thresholds, sink_keys), problem = labelled, chosen[0].problem
    heads = sum(len(one.selection.heads) for one in chosen)
    plan = plan_of(chosen, map_budget(most, heads))
    found = report_heads(chosen, plan, thresholds, sink_keys)
    mask = audit(problem.mask).description if problem.mask.hides else ""
    call = "attncli.entropy(weights=…)" if problem.given is not None else "attncli.entropy(q, k, …)"
    curves = experiments(experiment_specs(dk=CURVE_WIDTHS, samples=CURVE_SAMPLES))
    groups = [
        PageGroup(
            name="",
            source="",
            batch=one.batch,
            problem=problem,
            records=one.records,
            maps=one.maps,
            detailed=one.detailed,
            tokens=labels,
            mask=mask,
            cost=None if problem.given is not None else cost_of(problem),
            compute=None,
            entropy=None,
            warnings=problem.warnings,
        )
        for one in found
    ]
    return page_html(
        Page(
            title=title,
            groups=groups,
            plan=plan,
            columns=HEAD,
            start=most_telling(found),
            curves=[record_of(record) for record in curves],
            sink_keys=sink_keys,
            commands=Commands(
                overview=call,
                numbers=call,
                report=f"{call}.report(path)",
                scaling=f"attncli.variance(dk={CURVE_WIDTHS}, samples={CURVE_SAMPLES})",
            ),
            language=language,
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Computed(OfProblem):
    """The stages of one attention problem, for the selected batches, heads and queries.

    Attributes:
        stages: name → (batches, heads, rows, columns), float32 or float64 on the CPU. Columns are
            keys, and the value width for `output`; invisible cells of `masked` hold −inf.
        visible: bool (batches, heads, rows, S_k), True where the query sees the key; None where
            no stage over keys was asked for.
        real: bool (batches, rows), True for queries that are not padding.
        batches, heads, rows: what was selected, as indices into the tensors.
        cost: operations and bytes of the whole problem.
        problem: the checked input: sizes, scale, mask, dtype and device of the arithmetic.
        results: the same by stage, with what statistics are made of.
    """

    stages: Mapping[str, torch.Tensor]
    visible: torch.Tensor | None
    real: torch.Tensor
    batches: tuple[int, ...]
    heads: tuple[int, ...]
    rows: tuple[int, ...]
    cost: Cost
    problem: Problem
    results: tuple[StageResult, ...]

    @property
    def statistics(self) -> Mapping[str, StageStatistics]:
        """Name → statistics of the stage's visible cells, computed when first asked for."""
        return MappingProxyType({str(one.stage): one.statistics for one in self.results})

    def _said(self) -> str:
        batches, heads, rows = map(len, (self.batches, self.heads, self.rows))
        sizes = f"{batches} × {heads} × {rows} rows, {self.problem.sizes.k_len} keys"
        return f"{', '.join(self.stages)}; {sizes}"

    def _asked(self) -> StagesAsked:
        selection = Selection(self.batches, self.heads, self.rows)
        return StagesAsked(self.problem, selection, tuple(map(Stage, self.stages)))

    def _chosen(self) -> Selection:
        return select(self.problem, self.batches, self.heads)

    def _tables(self, printer: Printer) -> Iterator[RenderableType]:
        yield problem_line(self.problem, None)
        keys = range(self.problem.sizes.k_len)
        view = StageView(self.problem, self._asked().selection, keys, None, printer, DIGITS)
        for result in self.results:
            if 0 < math.prod(result.shape) <= MOST_VALUES:
                yield from stage_tables(result, view)
        yield summary_table(self.results, printer, DIGITS)
        yield ""
        yield cost_line(self.cost)
        if any(math.prod(result.shape) > MOST_VALUES for result in self.results):
            yield f"stages of more than {MOST_VALUES} values are not listed: .stages, .plot()"

    def _picture(self, plots: Any) -> Any:
        maps = [("", None, one) for one in stage_maps(self._asked())]
        return plots.stage_picture("attncli.compute", maps, DIGITS)


def computed(asked: StagesAsked) -> Computed:
    """All values of the stages asked for, where there is memory for them.

    Raises:
        ResourceError: there is not.
    """
    advice = "fewer «rows», «head_index», «batch_index» or «stages» need less"
    require_memory("«stages»", asked.needed_bytes, advice)
    problem, selection, results = asked.problem, asked.selection, asked.results()
    asked.gather(results, measure=False)
    over_keys = [result for stage, result in results.items() if stage.over_keys]
    rows = torch.tensor(selection.rows, dtype=torch.int64)
    lengths = [problem.mask.real_queries(batch) for batch in selection.batches]
    return Computed(
        stages=MappingProxyType({str(s): _values(problem, r) for s, r in results.items()}),
        visible=_visible(over_keys[0]) if over_keys else None,
        real=rows < torch.tensor(lengths, dtype=torch.int64)[:, None],
        batches=selection.batches,
        heads=selection.heads,
        rows=tuple(selection.rows),
        cost=cost_of(problem),
        problem=problem,
        results=tuple(results.values()),
    )


def _values(problem: Problem, result: StageResult) -> torch.Tensor:
    """Its values; where there is no query there was no block, and they are as empty."""
    if result.values is None:
        return torch.empty(result.shape, dtype=problem.dtype)
    return result.values


def _visible(result: StageResult) -> torch.Tensor:
    if result.visible is None:
        return torch.ones((), dtype=torch.bool).expand(result.shape)
    return result.visible


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Entropies(OfProblem):
    """What the chosen heads of one attention problem do.

    Attributes:
        heads: one record per batch and head, batches first, in the order asked for.
        rows: the rows of each of them as tensors on the device of the arithmetic, with `received`,
            the mass of each key, if that was asked for; None unless either was.
        batches, head_indices: what was selected, as indices into the tensors.
        problem: the checked input: sizes, scale, mask, dtype and device of the arithmetic.
        thresholds, sink_keys: what labels and sink masses were made with.
        tokens: int64 (B | 1, S_k), numbers of the tokens; None where they are not known.
    """

    heads: tuple[HeadStatistics, ...]
    rows: tuple[HeadRows, ...] | None
    batches: tuple[int, ...]
    head_indices: tuple[int, ...]
    problem: Problem
    thresholds: Thresholds
    sink_keys: int
    tokens: NDArray[np.int64] | None = None

    def column(self, name: str) -> torch.Tensor:
        """One number of all heads, float64 (batches, heads) on the CPU; NaN for none.

        Args:
            name: a column of `HeadStatistics` that holds numbers, such as "entropy_bits_mean".

        Raises:
            UsageError: it does not.
        """
        columns = [each.key for each in columns_of(HeadStatistics)]
        offered = [key for key in columns if key not in WORDS_OF_HEADS]
        if name not in offered:
            raise UsageError("name", f"expected one of {', '.join(offered)}, got {name!r}")
        values = [getattr(head, name) for head in self.heads]
        known = [float("nan") if value is None else float(value) for value in values]
        shape = (len(self.batches), len(self.head_indices))
        return torch.tensor(known, dtype=torch.float64).reshape(shape)

    def _said(self) -> str:
        batches, heads = len(self.batches), len(self.head_indices)
        labels = Counter(head.label for head in self.heads if head.label is not None)
        told = ", ".join(f"{count} {label}" for label, count in labels.most_common())
        sizes = self.problem.sizes
        said = f"{batches} × {heads} heads, {sizes.q_len} queries, {sizes.k_len} keys"
        return f"{said}; {told}" if told else said

    def _chosen(self) -> Selection:
        return select(self.problem, self.batches, self.head_indices)

    def _labelled(self) -> tuple[Thresholds, int]:
        return self.thresholds, self.sink_keys

    def _records(self) -> list[dict[str, Any]]:
        given = self.problem.given is not None
        temperature = None if given else self.problem.temperature
        scales = [None if given else self.problem.scale_of(one.head) for one in self.heads]
        settings = (
            Setting(scale=s, temperature=temperature, sink_weight_mean=None) for s in scales
        )
        return [
            record_of(WHERE, head, setting, token_scores(head))
            for head, setting in zip(self.heads, settings, strict=True)
        ]

    def _tables(self, printer: Printer) -> Iterator[RenderableType]:
        limits = limits_of(self.thresholds, tokens=self.tokens is not None)
        style = Style(printer, DIGITS, Unit.BITS, limits)
        yield problem_line(self.problem, None)
        records = self._records()
        yield from head_tables(records[:MOST_HEADS], (*HEAD, *OF_TOKENS), style)
        yield from _more(records, "heads")

    def _picture(self, plots: Any) -> Any:
        rows: Iterable[HeadRows] = self.rows or ()
        if self.rows is None or any(one.received is None for one in self.rows):
            wanted = Wanted(per_key=True, sink_keys=self.sink_keys)
            chosen = ChosenHeads(WHERE, self.problem, self._chosen(), self.tokens)
            found = measure(chosen, wanted, self.thresholds)
            rows = (one for one, _ in found)
        queries = self.problem.sizes.q_len
        drawn = [
            record | {"curves": head_curves(one, queries)}
            for record, one in zip(self._records(), rows, strict=True)
        ]
        return plots.entropy_picture("attncli.entropy", drawn, Unit.BITS, None, self.sink_keys)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Audited(OfProblem):
    """What the scores of every head vary by, and why.

    Attributes:
        records: one per head, the heads of batch 0 first.
        diagnoses: a sentence for each record.
        problem: the checked input: sizes, scale, mask, dtype and device of the arithmetic.
    """

    records: tuple[ScoreMoments, ...]
    diagnoses: tuple[str, ...]
    problem: Problem
    drawn_by = "variance_plots"

    def _said(self) -> str:
        first = f"; {self.diagnoses[0]}" if len(self.diagnoses) == 1 else ""
        return f"{len(self.records)} heads, d_k {self.problem.dk}{first}"

    def _records(self) -> list[dict[str, Any]]:
        pairs = zip(self.records, self.diagnoses, strict=True)
        return [record_of(WHERE, one) | {"diagnosis": said} for one, said in pairs]

    def _tables(self, printer: Printer) -> Iterator[RenderableType]:
        records = self._records()
        opened = {(str(WHERE.source), WHERE.group): [problem_line(self.problem, None)]}
        yield from audit_tables(records[:MOST_HEADS], opened, printer, DIGITS)
        yield from _more(records, "heads")

    def _picture(self, plots: Any) -> Any:
        return plots.audit_picture("attncli.variance", self._records())


class Experiments(Shown, tuple[ExperimentRecord, ...]):
    """The records of an experiment, those of one d_k for every rule and temperature."""

    __slots__ = ()
    drawn_by = "variance_plots"

    def _said(self) -> str:
        widths = dict.fromkeys(record.dk for record in self)
        return f"{len(self)} records, d_k {', '.join(map(str, widths))}"

    def _records(self) -> list[dict[str, Any]]:
        return [record_of(record) for record in self]

    def _tables(self, printer: Printer) -> Iterator[RenderableType]:
        records = self._records()
        yield from experiment_tables(records[:MOST_HEADS], printer, DIGITS, Unit.BITS)
        yield from _more(records, "records")

    def _picture(self, plots: Any) -> Any:
        return plots.experiment_picture("attncli.variance", self._records(), Unit.BITS)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Checked(OfProblem):
    """What a check found.

    Attributes:
        comparisons: one per candidate: errors, tolerance, the worst cell, where mismatches sit.
        hypotheses: every classic mistake that was tried; none where all candidates passed.
        problem: the checked input: sizes, scale, mask, dtype and device of the arithmetic.
    """

    comparisons: tuple[Comparison, ...]
    hypotheses: tuple[Hypothesis, ...]
    problem: Problem
    drawn_by = "check_plots"

    @property
    def passed(self) -> bool:
        """Whether every candidate is right."""
        return all(comparison.passed for comparison in self.comparisons)

    @property
    def mistakes(self) -> tuple[Hypothesis, ...]:
        """The mistakes that explain every cell of every candidate."""
        return tuple(one for one in self.hypotheses if one.matches)

    def _said(self) -> str:
        verdicts = [f"{one.target} {'right' if one.passed else 'OFF'}" for one in self.comparisons]
        explained = " or ".join(one.told for one in self.mistakes)
        return ", ".join(verdicts) + (f"; explained by {explained}" if explained else "")

    def _tables(self, printer: Printer) -> Iterator[RenderableType]:
        found = Check(self.comparisons, self.hypotheses)
        yield problem_line(self.problem, None)
        yield from check_tables(found, lambda _: None, printer, DIGITS)

    def _picture(self, plots: Any) -> Any:
        explained = " or by ".join(one.told for one in self.mistakes)
        return plots.check_picture("attncli.check", self.comparisons, explained)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Compared(Shown):
    """What the chosen heads of one attention become in another.

    Attributes:
        heads: one per what-if, batch and head, batches first, in the order asked for.
        rows: the rows of each of them; None unless asked for.
        warnings: what was assumed, and what looks like a mistake.
    """

    heads: tuple[HeadComparison, ...]
    rows: tuple[RowComparison, ...] | None
    warnings: tuple[str, ...] = ()

    def column(self, name: str) -> torch.Tensor:
        """One number of all heads, float64 (what-ifs, batches, heads); NaN for none.

        Args:
            name: a column of `HeadComparison` that holds numbers, such as "kl_nats_mean".

        Raises:
            UsageError: it does not.
        """
        offered = [each.key for each in COMPARED_NUMBERS]
        if name not in offered:
            raise UsageError("name", f"expected one of {', '.join(offered)}, got {name!r}")
        values = [getattr(head, name) for head in self.heads]
        known = [math.nan if value is None else float(value) for value in values]
        shape = [len({getattr(h, key) for h in self.heads}) for key in ("what_if", "batch", "head")]
        return torch.tensor(known, dtype=torch.float64).reshape(shape)

    def _said(self) -> str:
        worst = max(self.heads, key=lambda head: head.tv_max or 0.0, default=None)
        most = (
            f"; largest TV {worst.tv_max:.4g}, head {worst.head}" if worst and worst.tv_max else ""
        )
        changes = list(dict.fromkeys(head.what_if for head in self.heads if head.what_if))
        return f"{len(self.heads)} heads{''.join(f', {one}' for one in changes[:4])}{most}"

    def _records(self) -> list[dict[str, Any]]:
        return [record_of(WHERE, head) for head in self.heads]

    def _tables(self, printer: Printer) -> Iterator[RenderableType]:
        records = self._records()
        style = Style(printer, DIGITS, Unit.BITS, {})
        yield from record_tables(records[:MOST_HEADS], COMPARED, style)
        yield from _more(records, "heads")

    def _picture(self, plots: Any) -> Any:
        return plots.compare_picture("attncli.compare", self._records(), Unit.BITS, None, DIGITS)


def _more(records: Sequence[Any], what: str) -> Iterator[str]:
    """A line that says how many are not shown."""
    left = len(records) - MOST_HEADS
    if left > 0:
        yield f"… {left} more {what}"
