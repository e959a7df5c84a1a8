"""The run behind `attncli report`: heads measured, and a page about them written."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from attncli.analysis.entropy import ChosenHeads, token_numbers
from attncli.analysis.head_columns import HEAD, GroupPlace, thresholds_typed
from attncli.analysis.options import AttentionWords, InputOptions, indices
from attncli.analysis.problems import GroupProblem, labelled, load_problems
from attncli.analysis.report import (
    ReportedHeads,
    by_batch,
    cells_of,
    most_telling,
    plan_of,
    report_heads,
)
from attncli.analysis.variance import CURVE_SAMPLES, CURVE_WIDTHS, experiment_specs, experiments
from attncli.attention.options import AttentionOptions
from attncli.attention.problem import cost_of
from attncli.attention.stages import select
from attncli.cli.commands import ReportOptions
from attncli.cli.refusals import size_typed
from attncli.cli.terminal import progress
from attncli.columns import record_of
from attncli.errors import on_command_line, option_words
from attncli.files.target import require_target
from attncli.files.text import is_file, shown
from attncli.report.page.contents import Commands, Page, PageGroup
from attncli.report.page.page import map_budget, page_html
from attncli.report.printer import Printer

# Of the options that shape attention those that say nothing of masks.
NO_MASK = ("scale", "mask_true", "hide_below")
WHICH = ("head_index", "batch_index", "sink_keys", "label_limit")
LOOKS = ("labels", "max_size", "title", "theme", "lang", "precision")


def run(inputs: InputOptions, words: AttentionWords, options: ReportOptions) -> None:
    """Measure the heads, and write the page."""
    thresholds = thresholds_typed(options.label_limit, "--label-limit")
    most = size_typed(options.max_size)
    printer = Printer(target=options.output, quiet=options.quiet)
    if options.output != "-":
        require_target(options.output)
    computing = options.precision, options.device
    made = load_problems(inputs, words, *computing, weights=options.weights, example=True)
    if options.labels is not None:
        made = labelled(made, options.labels)
    for one in made:
        printer.warn(one.warnings)
    pairs = [(one, chosen) for one in made for chosen in _chosen(one, options)]
    chosen = [heads for _, heads in pairs]
    heads = sum(len(one.selection.heads) for one in chosen)
    plan = plan_of(chosen, map_budget(most, heads))
    with progress(printer, cells_of(chosen), "attention") as advance:
        found = report_heads(chosen, plan, thresholds, options.sink_keys, advance)
    told = _Told.by(inputs, words, options)
    curves = experiments(experiment_specs(dk=CURVE_WIDTHS, samples=CURVE_SAMPLES))
    page = Page(
        title=options.title or _title(made),
        groups=[
            _page_group(of_heads, one, told)
            for (one, _), of_heads in zip(pairs, found, strict=True)
        ],
        plan=plan,
        columns=HEAD,
        start=most_telling(found),
        curves=[record_of(record) for record in curves],
        sink_keys=options.sink_keys,
        commands=_commands(told),
        language=options.lang,
        theme=options.theme,
    )
    text = page_html(page)
    printer.write([text])
    size = len(text.encode("utf-8", "replace"))
    if size > most:
        printer.note(f"--max-size: the page has {size:,} bytes, of which maps are few")


def _chosen(made: GroupProblem, options: ReportOptions) -> Iterator[ChosenHeads]:
    """The chosen heads of a group, a batch at a time."""
    batches = indices("--batch-index", options.batch_index) or (0,)
    heads = indices("--head-index", options.head_index)
    place = GroupPlace(source=made.group.source_name, group=made.group.name)
    selection = select(made.problem, batches, heads)
    tokens = token_numbers(made.group.labels, made.problem)
    yield from by_batch(ChosenHeads(place, made.problem, selection, tokens))


def _title(made: Sequence[GroupProblem]) -> str:
    """The files' own names."""
    names = dict.fromkeys(_name(one.group.source_name) for one in made)
    return ", ".join(shown(name) for name in names)


def _page_group(found: ReportedHeads, made: GroupProblem, told: _Told) -> PageGroup:
    group, problem = made.group, made.problem
    rows = group.labels
    tokens = None if rows is None else list(rows[found.batch if len(rows) > 1 else 0])
    words = told.of_group(group.source, group.name, found.batch if problem.sizes.batch > 1 else 0)
    weights = problem.given is not None
    return PageGroup(
        name=group.name,
        source=_name(group.source_name),
        batch=found.batch,
        problem=problem,
        records=found.records,
        maps=found.maps,
        detailed=found.detailed,
        tokens=tokens,
        mask=", ".join(_mask_words(made.arguments.options)),
        cost=None if weights else cost_of(problem),
        compute=None if weights else shlex.join(["attncli", "compute", *words]),
        entropy=shlex.join(["attncli", "entropy", *words]) if words else None,
        warnings=[on_command_line(text) for text in made.warnings],
    )


def _mask_words(options: AttentionOptions) -> Iterator[str]:
    """The options that decide what is seen, or change the logits, as they were used."""
    for entry in fields(options):
        value, name = getattr(options, entry.name), entry.name.replace("_", " ")
        if entry.name in NO_MASK or value is None:
            continue
        if value is True or isinstance(value, np.ndarray):
            yield name
        elif value != entry.default:
            several = value if isinstance(value, tuple) else (value,)
            yield f"{name} {', '.join(map(str, several))}".replace(" -", " −")


@dataclass(frozen=True, slots=True)
class _Told:
    """What the user said, as words of a command line without folders.

    Attributes:
        files: the inputs.
        groups: which of their groups.
        shaped: how inputs are read, and what shapes attention.
        which: which heads, and how these are labelled.
        looks: how the page looks.
    """

    files: list[str]
    groups: list[str]
    shaped: list[str]
    which: list[str]
    looks: list[str]

    @classmethod
    def by(cls, inputs: InputOptions, words: AttentionWords, options: ReportOptions) -> _Told:
        """The words of what differs from the defaults."""

        def spelt(owner: object, names: Sequence[str]) -> list[str]:
            told = {name: getattr(owner, name) for name in names}
            changed = {name: v for name, v in told.items() if v != defaults.get(name)}
            parts = [word for name, v in changed.items() for word in option_words(name, v)]
            return [_name(p) if is_file(p.partition("::")[0]) else p for p in parts]

        defaults = {
            each.name: each.default for owner in (inputs, options) for each in fields(owner)
        }
        reading = [entry.name for entry in fields(inputs) if entry.name not in ("files", "group")]
        return cls(
            files=[_name(file) for file in inputs.files or ()],
            groups=option_words("group", inputs.group),
            shaped=[
                *spelt(options, ["weights"]),
                *spelt(inputs, reading),
                *spelt(words, list(vars(words))),
            ],
            which=spelt(options, WHICH),
            looks=spelt(options, LOOKS),
        )

    def of_group(self, source: str | None, name: str, batch: int) -> list[str]:
        """Those about one group: of several bundles its own, of several batches this one."""
        own = [_name(source)] if self.files and name and source else self.files
        words = [*own, *(["--group", name] if name else []), *self.shaped]
        return [*words, "--batch-index", str(batch)] if batch else words


def _commands(told: _Told) -> Commands:
    """The commands under the sections."""
    inputs = [*told.files, *told.groups, *told.shaped]
    heads = ["entropy", *inputs, *told.which] if inputs else ["compute", "--stage", "weights"]
    page = ["report", *inputs, *told.which, *told.looks, "-o", "report.html"]
    return Commands(
        overview=shlex.join(["attncli", *heads]),
        numbers=shlex.join(["attncli", *heads]),
        report=shlex.join(["attncli", *page]),
        scaling=f"attncli variance --dk 1:{CURVE_WIDTHS[-1]} --samples {CURVE_SAMPLES}",
    )


def _name(path: str) -> str:
    """A file's own name; what stands behind "::" stays."""
    file, mark, tensor = path.partition("::")
    return file.rsplit("/")[-1] + mark + tensor
