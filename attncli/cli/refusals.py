"""What is refused of a command's words alone, before its body loads torch.

Words are read here as the body reads them, by the same functions: no file is looked into, and what
only a file can tell is left to the body. A function for each command that needs torch, with its
groups of options.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Sequence
from typing import Any

from attncli import ranks
from attncli.analysis import compare_columns, head_columns
from attncli.analysis.attention_arguments import names_file, refuse_words
from attncli.analysis.changes import read_changes
from attncli.analysis.head_columns import thresholds_typed
from attncli.analysis.needs import sizes_known
from attncli.analysis.options import (
    AttentionWords,
    FileOptions,
    InputOptions,
    floats,
    indices,
    integers,
    refuse_beside_weights,
    refuse_given,
    refuse_inputs,
    several,
    stages_named,
)
from attncli.attention.options import (
    OPTIONS,
    Stage,
    Target,
    require_candidates,
    require_device_name,
    stages_there,
)
from attncli.attention.sizes import Sizes, places
from attncli.cli.commands import (
    AuditOptions,
    CaptureOptions,
    CheckOptions,
    CompareOptions,
    ComputeOptions,
    EntropyOptions,
    ExperimentOptions,
    MaskOptions,
    OutputOptions,
    PlotOptions,
    PrintOptions,
    ReportOptions,
    Shard,
)
from attncli.columns import Column
from attncli.errors import UsageError, nearest
from attncli.files.target import require_target
from attncli.files.writer import saved_format
from attncli.report import Format, Language
from attncli.report.drawing import require_picture
from attncli.report.printer import Printer

FAILURES = ("collapsed", "nan", "max-logit=X", "entropy-bits=X", "effective-keys=X")
NUMBERS = {column.key: column for column in head_columns.NUMBERS_OF_HEADS}
COMPARED_NUMBERS = {column.key: column for column in compare_columns.NUMBERS_OF_HEADS}
# Short names of what to fail on.
LIMITED = {
    "kl": "kl_nats_mean",
    "js": "js_nats_mean",
    "tv": "tv_mean",
    "mass_lost": "mass_lost_mean",
    "output": "output_rel_error",
}
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


# ── commands ─────────────────────────────────────────────────────────────────────────────────


def compute(
    inputs: InputOptions, words: AttentionWords, options: ComputeOptions, output: PlotOptions
) -> None:
    """Refuse stages, indices, targets and words of attention."""
    sizes = _inputs(inputs, words, example=True)
    if options.stage is not None:
        there = stages_there(capped=words.softcap is not None, with_values=True)
        stages_named("--stage", several(options.stage), list(Stage) if sizes is None else there)
    _indices(options, sizes)
    keys = indices("«columns»", output.columns)
    if sizes is not None:
        places("«columns»", keys, sizes.k_len)
    if options.save is not None:
        saved_format(options.save, 1)
    _where_useless(options, output)
    _output(output)


def entropy(
    inputs: InputOptions, words: AttentionWords, options: EntropyOptions, output: PlotOptions
) -> None:
    """Refuse views, columns, limits, indices and words of attention."""
    _views(options, words, plot=output.plot is not None)
    failures_typed(options.fail_on)
    thresholds_typed(options.label_limit, "--label-limit")
    _indices(options, _inputs(inputs, words, weights=options.weights))
    _output(output)


def audit(
    inputs: FileOptions,
    words: AttentionWords,
    experiment: ExperimentOptions,
    options: AuditOptions,
    output: PlotOptions,
) -> None:
    """Refuse options of experiments beside files, indices, and words of attention."""
    refuse_given(experiment, "expected no files beside it, which are not drawn")
    for name in ("head_index", "batch_index", "summary"):
        if options.fit_scale is not None and getattr(options, name):
            raise UsageError(f"«{name}»", "expected no «fit_scale» beside it, got both")
    _indices(options, _inputs(inputs, words))
    _output(output)


def check(
    inputs: FileOptions, words: AttentionWords, options: CheckOptions, output: PlotOptions
) -> None:
    """Refuse what makes no check."""
    for option, given_to in (("--wo", inputs.wo), ("--bo", inputs.bo)):
        if given_to is not None:
            raise UsageError(option, "expected none, got it; an output is checked before W_O")
    given = [target for target in Target if getattr(options, f"actual_{target}") is not None]
    require_candidates(given, options.rtol, options.atol, pair=options.pair is not None)
    _indices(options, _inputs(inputs, words))
    _output(output)


def compare(
    inputs: InputOptions, words: AttentionWords, options: CompareOptions, output: PlotOptions
) -> None:
    """Refuse columns, limits, changes, indices and words of attention."""
    compared_columns(options)
    limits_typed(options.fail_on)
    sizes = _inputs(inputs, words)
    pairs = [text.partition("=") for text in options.what_if or ()]
    named = [(name.strip().replace("-", "_"), value) for name, _, value in pairs]
    texts = zip(options.what_if or (), named, strict=True)
    read_changes([t for t, (n, value) in texts if n not in OPTIONS or not names_file(n, [value])])
    _indices(options, sizes)
    _output(output)


def report(inputs: InputOptions, words: AttentionWords, options: ReportOptions) -> None:
    """Refuse limits, indices, targets and words of attention."""
    thresholds_typed(options.label_limit, "--label-limit")
    size_typed(options.max_size)
    _indices(options, _inputs(inputs, words, weights=options.weights, example=True))
    require_device_name(options.device)
    if options.output != "-":
        require_target(options.output)


def mask_effect(options: MaskOptions, words: AttentionWords, output: PlotOptions) -> None:
    """Refuse indices and words of attention."""
    _indices(options, None)
    refuse_words(words, None)
    _output(output)


def capture(options: CaptureOptions, _: PrintOptions) -> None:
    """Refuse layers, a device and a target."""
    integers("«layers»", options.layers)
    require_device_name(options.device)
    require_target(options.output)


# ── what several of them share ───────────────────────────────────────────────────────────────


def _inputs(
    inputs: FileOptions,
    words: AttentionWords,
    *,
    weights: Sequence[str] | None = None,
    example: bool = False,
) -> Sizes | None:
    """Refuse inputs and words of attention; the sizes, where no file has to say them."""
    if weights is None:
        refuse_inputs(inputs)
    else:
        refuse_beside_weights(inputs)
    sizes = sizes_known(inputs, example=example) if weights is None else None
    refuse_words(words, sizes)
    return sizes


def _indices(options: Any, sizes: Sizes | None) -> None:
    """Refuse chosen batches, heads and rows."""
    lengths = {"batch_index": "batch", "head_index": "heads", "rows": "q_len"}
    for name, length in lengths.items():
        chosen = indices(f"«{name}»", getattr(options, name, None))
        if sizes is not None:
            places(f"«{name}»", chosen, getattr(sizes, length))


def _output(output: OutputOptions) -> None:
    """Refuse a device that is none, and targets that cannot be written."""
    require_device_name(output.device)
    if not ranks.is_first():
        return
    if output.output != "-":
        require_target(output.output)
    if isinstance(output, PlotOptions) and output.plot is not None:
        require_picture(output.plot)


def _require_one_of(option: str, name: str | None, names: Collection[str]) -> None:
    if name is not None and name not in names:
        problem = f"expected one of {', '.join(names)}, got {name!r}"
        raise UsageError(option, problem, nearest(name, names))


# ── compute ──────────────────────────────────────────────────────────────────────────────────


def _where_useless(options: ComputeOptions, output: OutputOptions) -> None:
    """Refuse what has no room for prose or its letters, and waiting where nobody can answer."""
    printer = Printer(target=output.output)
    if options.lang is Language.ZH and not printer.sign("中文", ""):
        got = f"expected an output that Chinese can be written to, got {sys.stdout.encoding}"
        raise UsageError("--lang", got, "PYTHONIOENCODING=utf-8 writes it")
    if options.explain and output.format in (Format.CSV, Format.NDJSON):
        raise UsageError("--explain", f"expected --format table or json, got {output.format}")
    if options.step and output.format is not Format.TABLE:
        raise UsageError("--step", f"expected --format table beside it, got {output.format}")
    if options.step and not (printer.on_terminal and sys.stdin.isatty()):
        raise UsageError(
            "--step", "expected a terminal to wait at, got none", "--explain alone prints it all"
        )


# ── entropy ──────────────────────────────────────────────────────────────────────────────────


def _views(options: EntropyOptions, words: AttentionWords, *, plot: bool) -> None:
    """Refuse combinations in which an option would do nothing."""
    views = {
        "--per-row": options.per_row,
        "--per-key": options.per_key,
        "--summary": options.summary,
        "--grid": options.grid is not None,
        "--histogram": options.histogram,
    }
    asked = [option for option, given in views.items() if given]
    if len(asked) > 1:
        raise UsageError(asked[1], f"expected one view, got {' and '.join(asked)}")
    asked += ["--plot"] if plot else []
    if options.top is not None and not options.per_key:
        raise UsageError("--top", "expected --per-key beside it, got --top alone")
    if options.temperatures and words.temperature is not None:
        raise UsageError(
            "--temperature", "expected one of --temperature and --temperatures, got both"
        )
    if asked and (options.compare_scale or options.temperatures):
        raise UsageError(asked[0], "expected one scale and temperature beside it, got several")
    if options.weights:
        for option, given in (
            ("--compare-scale", options.compare_scale),
            ("--temperatures", options.temperatures),
            ("--fail-on max-logit", any("max-logit" in text for text in options.fail_on or ())),
        ):
            if given:
                problem = "expected nothing beside --weights, got it; it needs logits"
                raise UsageError(option, problem)
    if options.shard is Shard.KEYS and ranks.place().count == 1:
        problem = "expected several ranks, as torchrun starts them, got one process"
        raise UsageError("--shard keys", problem)
    if options.shard is Shard.KEYS and options.weights:
        raise UsageError("--shard keys", "expected Q and K beside it, got --weights")
    if options.sample_rows is not None and (asked or options.fail_on):
        other = asked[0] if asked else "--fail-on"
        raise UsageError(other, "expected all rows, got --sample-rows")
    for temperature in floats("--temperatures", options.temperatures) or ():
        if temperature <= 0:
            raise UsageError("--temperatures", f"expected numbers above 0, got {temperature}")
    _require_one_of("--grid", options.grid, NUMBERS)


def failures_typed(given: list[str] | None) -> dict[str, float]:
    """What to fail on: "collapsed" and "nan" with 0, the others with their limits."""
    found: dict[str, float] = {}
    for text in several(given):
        name, _, limit = text.partition("=")
        if limit and f"{name}=X" in FAILURES:
            found[name] = (floats("--fail-on", [limit]) or (0.0,))[0]
        elif text in ("collapsed", "nan"):
            found[text] = 0.0
        else:
            raise UsageError("--fail-on", f"expected {', '.join(FAILURES)}, got {text!r}")
    return found


# ── compare and report ───────────────────────────────────────────────────────────────────────


def compared_columns(options: CompareOptions) -> Sequence[Column]:
    """The columns of what is asked for, among which are those to sort by and to draw."""
    _require_one_of("--grid", options.grid, COMPARED_NUMBERS)
    columns: Sequence[Column] = compare_columns.HEAD
    if options.per_row or options.summary or options.worst:
        columns = compare_columns.ROW if options.per_row else compare_columns.GROUP
        columns = compare_columns.KEY if options.worst else columns
    named = (*compare_columns.WORDS_OF_HEADS, "token")
    offered = [one.key for one in columns if not (one.is_key or one.key in named)]
    _require_one_of("--sort", options.sort, offered)
    return columns


def limits_typed(given: list[str] | None) -> dict[str, float]:
    """What to fail on: a short name or a column → its limit."""
    found: dict[str, float] = {}
    for text in several(given):
        name, _, limit = text.partition("=")
        column = name.strip().replace("-", "_")
        if column not in (*LIMITED, *COMPARED_NUMBERS) or not limit:
            offered = ", ".join(f"{one.replace('_', '-')}=X" for one in LIMITED)
            raise UsageError("--fail-on", f"expected {offered} or COLUMN=X, got {text!r}")
        found[column] = (floats("--fail-on", [limit]) or (0.0,))[0]
    return found


def size_typed(text: str) -> int:
    """A size as it is typed: 3MB, 800kB, 2.5MiB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(k|[KMG]i|[MG]|)B?", text.strip())
    if found is None:
        raise UsageError("--max-size", f"expected a size such as 3MB, got {text!r}")
    return int(float(found[1]) * UNITS[found[2]])
