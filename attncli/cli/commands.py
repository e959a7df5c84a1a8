"""What the command line takes: a function per command, its options, and its help.

Loads nothing heavy, so that help and usage errors are fast: a function refuses what can be refused
without files, and hands the rest to `run` of the module of its name, which it loads then. Every run
makes every group of options: they have neither equality nor a `repr`, which would take the longest.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from dataclasses import MISSING, dataclass
from enum import StrEnum
from importlib import import_module
from typing import Any, ClassVar

from attncli import ranks
from attncli.analysis.options import AttentionWords, FileOptions, InputOptions, several
from attncli.attention.options import DistributionName, Layout, Precision, Stage, option
from attncli.errors import DataError, UsageError
from attncli.files.floats import FloatType
from attncli.report import Color, ColourScale, Format, Language, PageTheme, Pooling, Unit


@dataclass(slots=True, eq=False, repr=False)
class PrintOptions:
    """How to print, where «output» says where something else goes."""

    panel: ClassVar[str] = "Output"

    format: Format = option(
        None, "What to print. [default: as «output» ends, or table]", names=("--format", "-f")
    )
    columns: list[str] | None = option(
        None,
        "Only these columns of records, e.g. 'head,entropy_*'; of the matrices of compute these "
        "keys: I or A:B.",
        "NAME|PATTERN[,…]",
    )
    digits: int = option(4, "Decimals in tables.", "N", minimum=0, maximum=17)
    color: Color = option(Color.AUTO, "Colour in tables.")
    quiet: bool = option(False, "No warnings and no progress.", names=("--quiet", "-q"))


@dataclass(slots=True, eq=False, repr=False)
class OutputOptions(PrintOptions):
    """How to compute, and what to print where."""

    output: str = option("-", "Where to print it.", "FILE|-", names=("--output", "-o"))
    unit: Unit = option(Unit.BITS, "Unit of entropy in tables.")
    precision: Precision = option(Precision.AUTO, "auto: float64 up to 2^26 scores.")
    device: str = option("auto", "Where torch computes.", "auto|cpu|cuda[:N]")


@dataclass(slots=True, eq=False, repr=False)
class PlotOptions(OutputOptions):
    """The same for commands whose results make a picture."""

    plot: str | None = option(None, "Draw it, too.", "FILE.png|svg|pdf")


@dataclass(slots=True, eq=False, repr=False)
class ComputeOptions:
    """What of the stages to look at."""

    stage: list[str] | None = option(
        None, f"Only these stages, of {', '.join(Stage)}.", "NAME[,NAME…]"
    )
    rows: list[str] | None = option(None, "Only these queries; -1 is the last.", "I|A:B[,…]")
    head_index: list[str] | None = option(None, "Only these heads.", "I|A:B[,…]")
    batch_index: list[str] | None = option(None, "Only these batches.", "I|A:B[,…]")
    max_values: int = option(
        65_536, "Tables and JSON: leave out the values of larger stages.", "N", minimum=0
    )
    save: str | None = option(None, "Write stages as tensors.", "FILE.npz|.safetensors|DIR")
    heatmap: bool = option(
        False, "Draw the weights, or what «stage» names, as wide as the terminal."
    )
    pool: Pooling = option(Pooling.MEAN, "With «heatmap»: what a point is of many cells.")
    scale_colour: ColourScale = option(
        ColourScale.LOG, "How weights become colours; even: multiples of even attention."
    )
    skip_first: int = option(0, "Leave the first N keys out of the colours.", "N", minimum=0)
    explain: bool = option(False, "Walk through the stages: formula, purpose, numbers.")
    step: bool = option(False, "With «explain» on a terminal: walk forward and back by keys.")
    lang: Language = option(Language.EN, "With «explain» or «shapes»: English or Chinese.")
    shapes: bool = option(False, "The shape of each step, for one head and for all of them.")


def compute(
    inputs: InputOptions, words: AttentionWords, options: ComputeOptions, output: PlotOptions
) -> None:
    """Compute attention stage by stage: scores, scaled, masked, weights, output.

    With no input it shows the embedded 4×3 example. Q, K and V come as three files, as a
    bundle (.npz, .safetensors, .pt) with tensors named q, k, v, or are projected from --x.
    """
    if options.explain and options.stage and not (options.save or output.plot):
        raise UsageError("--stage", "expected nothing beside --explain, which tells of all, got it")
    if options.step and not options.explain:
        raise UsageError("--step", "expected --explain beside it, got --step alone")
    if options.lang is not Language.EN and not (options.explain or options.shapes):
        raise UsageError("--lang", "expected --explain or --shapes beside it, got neither")
    ways = [way for way in ("explain", "heatmap", "shapes") if getattr(options, way)]
    if len(ways) > 1:
        wanted = f"expected either --{ways[0]} or --{ways[1]}, got both"
        raise UsageError(f"--{ways[1]}", wanted)
    for name, target in (("--save", options.save), ("--plot", output.plot)):
        if options.shapes and target is not None:
            raise UsageError(name, "expected stages to write, got --shapes, which computes none")
    if options.heatmap and output.format is not Format.TABLE:
        raise UsageError("--heatmap", f"expected --format table, got {output.format}")
    needs, shape = _require_drawn(inputs)
    if shape is not None:
        chosen = {name: getattr(options, name) for name in ("batch_index", "head_index", "rows")}
        listed = output.format in (Format.TABLE, Format.JSON) and not ways
        needs.require_stages(
            shape,
            None if options.stage is None else several(options.stage),
            {name: given and len(several(given)) for name, given in chosen.items()},
            target=None if options.shapes else options.save,
            max_values=options.max_values if listed else None,
            softcap=words.softcap is not None,
            precision=output.precision,
        )
    _run("compute", inputs, words, options, output)


class Shard(StrEnum):
    """What several processes cut work by."""

    ROWS = "rows"
    KEYS = "keys"


@dataclass(slots=True, eq=False, repr=False)
class EntropyOptions:
    """Which records, of which heads, and what to fail on."""

    weights: list[str] | None = option(
        None, "Attention weights alone, (B, H, S_q, S_k), in the place of Q and K.", "FILE[::NAME]"
    )
    per_row: bool = option(False, "One record per query row.")
    per_key: bool = option(False, "One record per key: the mass it receives.")
    top: int | None = option(None, "With «per_key»: the K heaviest of each head.", "K", minimum=1)
    summary: bool = option(False, "One record per group.")
    grid: str | None = option(None, "A picture of all heads, e.g. entropy_bits_mean.", "COLUMN")
    histogram: bool = option(False, "Row entropies of one head as a histogram.")
    head_index: list[str] | None = option(None, "Compute only these query heads.", "I|A:B[,…]")
    batch_index: list[str] | None = option(None, "Compute only these batches.", "I|A:B[,…]")
    compare_scale: bool = option(False, "Beside it, what happens without the scale.")
    temperatures: list[str] | None = option(None, "Several, side by side.", "T[,T…]")
    sample_rows: int | None = option(None, "Estimate from N rows of each head.", "N", minimum=1)
    sample_seed: int = option(0, "Which rows «sample_rows» takes.", "N", minimum=0)
    sink_keys: int = option(1, "First keys that count as sinks.", "N", minimum=1)
    labels: str | None = option(
        None, "Tokens of the keys: a line each, or a list in JSON.", "FILE|A,B,…"
    )
    label_limit: list[str] | None = option(None, "Adjust a threshold of the labels.", "NAME=X")
    fail_on: list[str] | None = option(
        None,
        "Exit 3 if a head is so: entropy or keys on average below X, a logit above it.",
        "collapsed|nan|max-logit=X|entropy-bits=X|effective-keys=X",
    )
    shard: Shard = option(
        Shard.ROWS, "Of several processes each takes some heads and rows, or some of the keys."
    )


def entropy(
    inputs: InputOptions, words: AttentionWords, options: EntropyOptions, output: PlotOptions
) -> None:
    """Measure every head: entropy, effective keys, largest weight and logit, sink mass.

    Takes any number of bundles. No S_q × S_k matrix is ever built. Each head gets a label:
    previous-token, self, sink, local, uniform, collapsed or mixed; where tokens are known and come
    again, induction or duplicate-token, too.

    --weights takes weights without Q and K, a file or several: tensors of any rank from
    (S_q, S_k) to (layers, B, H, S_q, S_k), a tuple of layers in a .pt file. Weights of 0 count as
    hidden where no option says what is.
    """
    _require_drawn(inputs)
    _run("entropy", inputs, words, options, output)


class SaveAs(StrEnum):
    """What a mask is written as."""

    BOOL = "bool"
    ADDITIVE = "additive"


class SaveDtype(StrEnum):
    """Element types of additive masks."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"


@dataclass(slots=True, eq=False, repr=False)
class MaskOptions:
    """Which mask, and what to do with it."""

    files: list[str] | None = option(
        None,
        "Q and K, or a bundle: only their lengths and options count.",
        "FILE",
        positional=True,
    )
    weights: list[str] | None = option(
        None, "Attention weights: what their zeros hide.", "FILE[::NAME]"
    )
    group: list[str] | None = option(None, "Which group of a bundle.", "NAME")
    layout: Layout = option(Layout.BHSD, "Order of the axes of the files.")
    k_layout: Layout | None = option(None, "That of K, if another.")
    q_len: int | None = option(None, "S_q. [default: S_k]", "N", minimum=0)
    k_len: int | None = option(None, "S_k. [default: S_q, or 8]", "N", minimum=0)
    batch: int | None = option(None, "Batches. [default: as the masks]", "B", minimum=1)
    heads: int | None = option(None, "Heads. [default: as the masks]", "H", minimum=1)
    head_index: list[str] | None = option(None, "Only these heads.", "I|A:B[,…]")
    batch_index: list[str] | None = option(None, "Only these batches.", "I|A:B[,…]")
    against: str | None = option(
        None,
        "Compare with another mask, or «attn_mask» with what the options build.",
        "FILE|options",
    )
    scores: str | None = option(None, "Scaled scores: softmax before and after.", "FILE")
    effect: bool = option(False, "The same with Q·K·scale of the files.", names=("--effect",))
    save: str | None = option(None, "Write the mask, (B, H, S_q, S_k).", "FILE")
    save_as: SaveAs | None = option(None, "What «save» writes. [default: bool]", names=("--as",))
    save_dtype: SaveDtype | None = option(
        None, "Of additive values that are saved. [default: float32]", names=("--dtype",)
    )
    fail_on: list[str] | None = option(
        None, "Exit 3 if there are any.", "empty-rows|unused-keys|leak"
    )
    max_values: int = option(65_536, "JSON: leave out larger masks' values.", "N", minimum=0)


def mask(options: MaskOptions, words: AttentionWords, output: PlotOptions) -> None:
    """Build a mask, or say what a given one lets through and what it is.

    Encoders hide nothing or padding (--key-lengths), decoders the future (--causal), of which a
    window may be left (--left-window) or a prefix shown (--prefix); cross-attention hides padding
    of the keys, packed sequences other documents (--segments). Padding and --causal go together.

    The options that shape attention build it; --attn-mask FILE is recognised: causal (which
    corner), windows, prefix, padding, packed documents, or probably inverted.

    --fail-on leak: the mask of --attn-mask shows a cell that --causal, a window, --segments or
    key padding beside it hides. Without any of these, one beyond the pattern nearest to it.

    --weights FILE is read as the mask that the zeros of attention weights show.

    Additive values hide where they leave a key no weight at all beside its row's other keys, as
    -10000 and finfo.min do. Rows of nothing else are described in both readings.
    """
    needs_torch = options.effect or options.scores is not None
    _run("mask_effect" if needs_torch else "mask", options, words, output)


@dataclass(slots=True, eq=False, repr=False)
class ExperimentOptions:
    """What to draw, where there are no files."""

    dk: list[str] | None = option(None, "Widths d_k to try. [default: 64]", "N|A:B:xF|A:B:+D")
    samples: int | None = option(None, "Dot products. [default: 100000]", "N")
    keys: int | None = option(None, "Keys of each query. [default: 8]", "N")
    dist: DistributionName | None = option(
        None,
        "What entries are drawn from; uniform is on [0, 1). [default: normal]",
        "normal|uniform|rademacher|laplace|student-t",
    )
    mean: float | None = option(None, "Mean of an entry. [default: its own]", "X")
    std: float | None = option(None, "Deviation of an entry. [default: its own]", "X")
    correlation: float | None = option(None, "Between the entries of q and k. [default: 0]", "R")
    df: float | None = option(None, "Degrees of freedom of student-t. [default: 10]", "N")
    scale_rule: list[str] | None = option(
        None,
        "1/√d_k, 1/d_k, 1, ln(keys)/√d_k or a number, side by side. [default: sqrt]",
        "sqrt|linear|none|log-n|X",
    )
    temperatures: list[str] | None = option(None, "Side by side. [default: 1]", "T[,T…]")
    seed: int | None = option(None, "Of the draws. [default: 0]", "N")
    logits: list[str] | None = option(
        None, "Draw nothing: softmax of these, scaled before and after, and naively.", "X,X,…"
    )


@dataclass(slots=True, eq=False, repr=False)
class AuditOptions:
    """What to look for in tensors from files."""

    fit_scale: str | None = option(
        None, "Weights or output from elsewhere: which scale was used there?", "FILE"
    )
    summary: bool = option(False, "One record per group.")
    head_index: list[str] | None = option(None, "Only these query heads.", "I|A:B[,…]")
    batch_index: list[str] | None = option(None, "Only these batches.", "I|A:B[,…]")


def variance(
    inputs: FileOptions,
    words: AttentionWords,
    experiment: ExperimentOptions,
    audit: AuditOptions,
    output: PlotOptions,
) -> None:
    """Measure the variance of q·k that makes 1/√d_k necessary.

    Without files it draws queries and keys: variance against theory, and softmax with and
    without the scale. With files it takes the exact variance of all visible scores of every
    head apart: which part softmax sees, and what the assumption behind 1/√d_k predicts.

    --logits takes the softmax of a few numbers: scaled before it and after it, at temperatures,
    and without subtracting the maximum in float16, float32 and float64.
    """
    # Experiments do without torch.
    has_files = any(getattr(inputs, name) for name in ("files", "q", "k", "v", "x"))
    _run("audit" if has_files else "variance", inputs, words, experiment, audit, output)


@dataclass(slots=True, eq=False, repr=False)
class CheckOptions:
    """What is to be checked, and how strictly."""

    actual_output: str | None = option(None, "The output to check, (B, H, S_q, d_v).", "FILE")
    actual_weights: str | None = option(None, "The weights to check.", "FILE")
    actual_logsumexp: str | None = option(None, "The log-sum-exp to check, (B, H, S_q).", "FILE")
    pair: str | None = option(
        None, "A second candidate for the same: which is closer, where do they part?", "FILE"
    )
    head_index: list[str] | None = option(None, "Only these query heads.", "I|A:B[,…]")
    batch_index: list[str] | None = option(None, "Only these batches.", "I|A:B[,…]")
    rtol: float | None = option(None, "Relative tolerance. [default: by the dtype]", "X")
    atol: float | None = option(None, "Absolute tolerance. [default: by the dtype]", "X")


def check(
    inputs: FileOptions, words: AttentionWords, options: CheckOptions, output: PlotOptions
) -> None:
    """Compare an output with the float64 reference, and name the mistake if it differs.

    The options say what should have been computed. A candidate that is off is tried against
    the classic mistakes: scale, causal corner, mask polarity, padding, soft cap, head
    grouping, layout, precision; where one explains every cell, the command that verifies it
    is printed. Exit 3 if it is off.

    NDJSON and CSV hold one record per candidate, whose explanation names the mistake; all
    mistakes that were tried are in the JSON document, under data.hypotheses.
    """
    _run("check", inputs, words, options, output)


@dataclass(slots=True, eq=False, repr=False)
class CompareOptions:
    """What to compare with, and which records."""

    other_q: str | None = option(None, "Q of the other side. [default: the same]", "FILE[::NAME]")
    other_k: str | None = option(None, "K of the other side, likewise.", "FILE[::NAME]")
    other_v: str | None = option(None, "V of the other side, likewise.", "FILE[::NAME]")
    what_if: list[str] | None = option(
        None, "Compare with itself under a change; again for more.", "OPTION=VALUE"
    )
    per_row: bool = option(False, "One record per query row.")
    worst: bool = option(False, "The keys whose weight moved most in the row that changed most.")
    summary: bool = option(False, "One record per group and what-if.")
    grid: str | None = option(None, "A picture of all heads, e.g. kl_nats_mean.", "COLUMN")
    sort: str | None = option(None, "By a column, the most changed first.", "COLUMN")
    top: int | None = option(None, "Only the first N records; keys of «worst».", "N", minimum=1)
    head_index: list[str] | None = option(None, "Only these query heads.", "I|A:B[,…]")
    batch_index: list[str] | None = option(None, "Only these batches.", "I|A:B[,…]")
    fail_on: list[str] | None = option(
        None, "Exit 3 if a head exceeds it.", "kl|js|tv|mass-lost|output|COLUMN=X"
    )


def compare(
    inputs: InputOptions, words: AttentionWords, options: CompareOptions, output: PlotOptions
) -> None:
    """Say what a change does to every head: KL, total variation, mass lost, error of the output.

    Two inputs, A and B: `compare BASE OTHER` pairs the groups of two bundles by name; single files
    are --q --k --v and --other-q --other-k --other-v. The options a bundle declares hold for its
    own side, those of the command line for both.

    One input, and what if: --what-if left-window=64, scale=1, sinks=none or any other option that
    shapes attention; k-dtype=float8_e4m3fn, v-dtype=int8:token, q-dtype=bfloat16 round as a cache
    would (float types; int8 and int4, with a scale per tensor, head, token or channel, as float8
    may have one); keep-keys=first:4,last:64,heavy:16 is what an eviction policy keeps: the first
    keys, the latest of each query, the heaviest of each head.

    Several --what-if of the same option stand side by side, a record each; different options
    combine, each with each.
    """
    asked = [n for n in ("per_row", "worst", "summary", "grid") if getattr(options, n)]
    if len(asked) > 1:
        raise UsageError(f"«{asked[1]}»", f"expected one view, got «{asked[0]}» too")
    for name in ("worst", "grid"):
        if getattr(options, name) and options.sort:
            raise UsageError("«sort»", f"expected records to sort, got «{name}»")
    if options.grid and options.top:
        raise UsageError("«top»", "expected records to count, got «grid»")
    others = [n for n in ("other_q", "other_k", "other_v") if getattr(options, n)]
    if options.what_if and others:
        raise UsageError("«what_if»", f"expected one input, got «{others[0]}» too")
    if not options.what_if and not others and len(inputs.files or ()) != 2:
        raise UsageError(
            "FILE",
            f"expected two bundles or one and «what_if», got {len(inputs.files or ())} and none",
            "attncli compare BASE OTHER, or attncli compare BASE «what_if» k-dtype=int8",
        )
    _require_drawn(inputs)
    _run("compare", inputs, words, options, output)


@dataclass(slots=True, eq=False, repr=False)
class ReportOptions:
    """What the page is about, and how it looks."""

    output: str = option(MISSING, "The page to write.", "FILE.html", names=("--output", "-o"))
    weights: list[str] | None = option(
        None, "Attention weights alone, (B, H, S_q, S_k), in the place of Q and K.", "FILE[::NAME]"
    )
    head_index: list[str] | None = option(None, "Only these query heads.", "I|A:B[,…]")
    batch_index: list[str] | None = option(None, "These batches. [default: 0]", "I|A:B[,…]")
    labels: str | None = option(
        None, "Tokens of the keys: a line each, or a list in JSON.", "FILE|A,B,…"
    )
    sink_keys: int = option(1, "First keys that count as sinks.", "N", minimum=1)
    label_limit: list[str] | None = option(None, "Adjust a threshold of the labels.", "NAME=X")
    max_size: str = option("3MB", "Pool maps until the file is no larger.", "SIZE")
    title: str | None = option(None, "Its heading. [default: the files]", "TEXT")
    theme: PageTheme = option(PageTheme.AUTO, "Colours; auto is what the system asks for.")
    lang: Language = option(Language.EN, "English or Chinese.")
    precision: Precision = option(Precision.AUTO, "auto: float64 up to 2^26 scores.")
    device: str = option("auto", "Where torch computes.", "auto|cpu|cuda[:N]")
    quiet: bool = option(False, "No warnings and no progress.", names=("--quiet", "-q"))


def report(inputs: InputOptions, words: AttentionWords, options: ReportOptions) -> None:
    """Write a page that shows all heads, and what attention does step by step.

    It is one file, which loads nothing and sends nothing: maps of every head with tokens and
    values, the stages of an example, what √d_k, masks and a stable softmax are for, and a table
    of all heads. Without input it is about the embedded 4×3 example.

    Long inputs are pooled: means and largest weights over blocks of cells, the first keys apart.
    No S_q × S_k matrix is ever built.
    """
    _require_drawn(inputs)
    _run("report", inputs, words, options)


@dataclass(slots=True, eq=False, repr=False)
class InspectOptions:
    """What to look at."""

    files: list[str] = option(MISSING, "Files of tensors; '-' is stdin.", "FILE", positional=True)
    dtype: FloatType | None = option(None, "What the bits of '|V2' or integer tensors are.", "NAME")


def inspect(options: InspectOptions, output: OutputOptions) -> None:
    """List the tensors of files: names, shapes, dtypes, non-finite counts, moments.

    Minimum, maximum, mean and standard deviation (population) are of the finite values.
    """
    _run("inspect", options, output)


@dataclass(slots=True, eq=False, repr=False)
class CaptureOptions:
    """Which model, and what to run it on."""

    panel: ClassVar[str] = "What to capture"

    model: str = option(
        MISSING,
        "A folder, a .gguf file, or a name in the hub's cache or on the hub.",
        "MODEL",
        positional=True,
    )
    output: str = option(
        MISSING, "The bundle to write.", "FILE.safetensors", names=("--output", "-o")
    )
    text: list[str] | None = option(
        None, "What to run it on; several texts are run one by one.", "TEXT"
    )
    text_file: list[str] | None = option(None, "A text from a file.", "FILE|-")
    ids: str | None = option(None, "Token ids, (S) or (B, S), or words of a text file.", "FILE")
    inputs: str | None = option(
        None, "Arrays named as the model's keywords: pixel_values, input_features, …", "FILE.npz"
    )
    batch: bool = option(False, "All texts in one padded batch.")
    generate: int | None = option(
        None, "After the text N cached steps: steps.T.layers.L.", "N", minimum=1
    )
    layers: list[str] | None = option(None, "Only these layers; -1 is the last.", "I[,I…]")
    max_length: int | None = option(None, "Cut texts to N tokens.", "N", minimum=1)
    dtype: FloatType | None = option(
        None, "Run the model in this type. [default: as it is stored]", "NAME"
    )
    device: str = option("auto", "Where to run it.", "auto|cpu|cuda[:N]")
    trace: bool = option(False, "Follow softmax that a model writes out, too (BLOOM, DeBERTa).")
    strict: bool = option(False, "Exit 3 if the self-check of a layer fails.")


def capture(options: CaptureOptions, output: PrintOptions) -> None:
    """Run a model, and write Q, K and V of every layer with what shaped attention there.

    The bundle carries scale, causality, windows, soft cap, sinks, padding, biases and the tokens:
    the other commands need no option for it. At every layer a few rows of the model's own output
    are compared with attention as it was recorded, in float64: the column self-check.

    Needs transformers: pip install 'attncli[capture]'. Code of a model's own is never run.
    """
    given = [name for name in ("text", "text_file", "ids", "inputs") if getattr(options, name)]
    if not given:
        raise UsageError("--text", "expected what to run the model on, got nothing")
    texts = {"text", "text_file"} & set(given)
    if len(given) > 1 and (len(texts) < len(given)):
        other = next(name for name in given if name not in ("text", "text_file"))
        raise UsageError(f"«{other}»", "expected nothing to run on beside it, got more")
    for name in ("batch", "max_length"):
        if getattr(options, name) and not texts:
            raise UsageError(f"«{name}»", "expected «text» beside it, got none")
    if options.generate is not None and options.inputs is not None:
        raise UsageError("«generate»", "expected «text» or «ids» beside it, got «inputs»")
    _run("capture", options, output)


@dataclass(slots=True, eq=False, repr=False)
class SchemaOptions:
    """Which schema."""

    panel: ClassVar[str] = "What to print"

    name: str | None = option(
        None,
        "A document, as its key schema names it: entropy or attncli.entropy/1. [default: a list]",
        "NAME",
        positional=True,
    )
    record: str | None = option(
        None, "One kind of its records alone, as NDJSON has a line each.", "RECORD", positional=True
    )
    output: str = option("-", "Where to print it.", "FILE|-", names=("--output", "-o"))
    quiet: bool = option(False, "No word of what was written.", names=("--quiet", "-q"))


def schema(options: SchemaOptions) -> None:
    """Print the JSON Schema of what a command prints, or list those there are.

    Each schema is made of the results themselves (draft 2020-12): types, units and what every key
    means. Keys are only ever added within a schema number, so others than these may be there.
    """
    _run("schema", options)


def _require_drawn(inputs: InputOptions) -> tuple[Any, Any]:
    """Refuse random tensors that are too large, before torch loads; what knows needs, and sizes.

    Raises:
        ResourceError: they are.
    """
    needs = import_module("attncli.analysis.needs")
    shape = needs.random_shape(inputs)
    if shape is not None:
        needs.require_drawn(shape)
    return needs, shape


# Bodies that load no torch.
_LIGHT = ("mask", "variance", "inspect", "schema")


def _run(name: str, *given: Any) -> None:
    """Load the body of a command, which is heavy, and run it: its files appear together, or none.

    Of several ranks all run what they share, and rank 0 alone runs the rest.

    Raises:
        DataError: the working directory has been deleted; torch would end the program.
    """
    try:
        os.getcwd()  # noqa: PTH109 - no path is wanted
    except FileNotFoundError:
        problem = "expected one that is there, got one that was deleted"
        raise DataError("working directory", problem) from None
    is_shared = name in SHARED or (name == "compute" and given[2].save is not None)
    if not (is_shared or ranks.is_first()):
        return
    steps = {} if name in _LIGHT else {"refusals": name}
    with (
        import_module("attncli.files.target").together(),
        ranks.joined() if is_shared else nullcontext(),
    ):
        for module, work in (steps | {f"{name}_run": "run"}).items():
            getattr(import_module(f"attncli.cli.{module}"), work)(*given)
        sys.stdout.flush()  # a full disk behind it is a failure, too


# Bodies of commands whose work ranks share, as they share what is computed to be saved.
SHARED = ("audit", "check", "compare", "entropy")


# For each command two that show what it does, and the page that says more.
EXAMPLES = {
    "compute": (
        "compute --causal --explain",
        "compute --heads 4 --head-index 2 --rows 0:4 --stage weights",
        "docs/why-scale.md",
    ),
    "entropy": (
        "entropy --heads 4 --causal",
        "entropy sample_inputs/minilm.safetensors --grid entropy_bits_mean",
        "docs/entropy.md",
    ),
    "mask": (
        "mask --k-len 8 --causal --left-window 3",
        "mask --k-len 6 --causal --segments 0,0,0,1,1,1",
        "docs/masks.md",
    ),
    "variance": (
        "variance --dk 8:128 --samples 20000",
        "variance sample_inputs/minilm.safetensors --group layers.0",
        "docs/why-scale.md",
    ),
    "check": (
        "compute sample_inputs/example/{q,k,v}.npy --save out.npz",
        "check sample_inputs/example/{q,k,v}.npy --actual-output out.npz",
        "docs/check.md",
    ),
    "compare": (
        "compare sample_inputs/minilm.safetensors --what-if scale=1",
        "compare --heads 2 --q-len 16 --k-len 16 --what-if k-dtype=int8",
        "docs/compare.md",
    ),
    "report": (
        "report -o report.html",
        "report sample_inputs/minilm.safetensors -o minilm.html --lang zh",
        "docs/report.md",
    ),
    "inspect": (
        "inspect sample_inputs/minilm.safetensors",
        "inspect sample_inputs/example/q.npy -f csv",
        "docs/inputs.md",
    ),
    "capture": (
        'capture MODEL --text "The cat sat." -o qkv.safetensors',
        "capture MODEL --text-file FILE --layers 0,-1 -o qkv.safetensors",
        "docs/capture.md",
    ),
    "schema": ("schema", "schema entropy row", "docs/output.md"),
}


# In the order of the help.
COMMANDS = {
    command.__name__: command
    for command in (
        compute,
        entropy,
        mask,
        variance,
        check,
        compare,
        report,
        inspect,
        capture,
        schema,
    )
}
