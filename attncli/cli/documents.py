"""What every command prints for programs: documents, their records, and what `params` says.

Loads nothing heavy: columns are named by where they are declared, and found when a schema is asked
for.
"""

from __future__ import annotations

import re
from types import GenericAlias
from typing import Any

from attncli.attention.options import OPTIONS, Kind, MaskTrue
from attncli.columns import Column
from attncli.errors import on_command_line
from attncli.report.schema import PARAMS, Document, Records

# How `params` spells an option of each kind.
_TYPES: dict[Kind | None, Any] = {
    Kind.NUMBER: float | None,
    Kind.NUMBERS: float | list[float] | None,
    Kind.WHOLE: int | None,
    Kind.FLAG: bool,
    Kind.CHOICE: MaskTrue | None,
    Kind.ARRAY: str | None,
    Kind.OFFSET: int | list[int] | str | None,
    Kind.LENGTHS: list[int] | None,
    Kind.IDS: str | list[int] | list[list[int]] | None,
    Kind.MARKS: str | list[bool] | list[list[bool]] | None,
    Kind.LOGITS: str | list[float] | list[list[float]] | None,
}


def _param(key: str, description: str, holds: Any) -> Column:
    return Column(key, None, description=description, holds=holds)


def _shaping() -> tuple[Column, ...]:
    """The options that shape attention."""
    return tuple(
        _param(
            name, re.sub(r" ?\[default: .*\]", "", on_command_line(told.help)), _TYPES[told.kind]
        )
        for name, told in OPTIONS.items()
    )


_DTYPE = _param("compute_dtype", "What the arithmetic was done in: float32 or float64.", str)
_DEVICE = _param("device", "Where torch computed: cpu, cuda:0, ….", str)
_SEED = _param("seed", "Of random tensors or draws; null where there are none.", int | None)
_CHOSEN = (
    _param("batch_index", "Batches that were chosen; null for all.", list[int] | None),
    _param("head_index", "Query heads that were chosen; null for all.", list[int] | None),
)
_OF_PROBLEM = (
    *_shaping(),
    _param("heads", "Query heads.", int),
    _param("kv_heads", "Key and value heads; null of weights.", int | None),
    _DTYPE,
    _DEVICE,
    _SEED,
)
_MASK = (
    *(one for one in _shaping() if one.key not in ("scale", "temperature", "softcap", "sinks")),
    *_CHOSEN,
    _param("batch", "Batches of the mask.", int),
    _param("heads", "Heads of the mask.", int),
    _param("q_len", "S_q, padding included.", int),
    _param("k_len", "S_k, padding included.", int),
    _param(
        "recognised",
        "The options that build the mask; null for no known pattern.",
        dict[str, Any] | None,
    ),
)
_DRAWN = (
    _param("dk", "Widths of queries and keys.", list[int]),
    _param("samples", "Dot products drawn for each width.", int),
    _param("keys", "Keys of each query.", int),
    _param("dist", "What entries were drawn from.", str),
    _param("mean", "Of an entry.", float | None),
    _param("std", "Of an entry.", float | None),
    _param("correlation", "Between the entries of q and k.", float),
    _param("df", "Degrees of freedom of student-t; null of others.", float | None),
    _param("scale_rule", "Names of rules, or numbers.", list[str | float]),
    _param("temperatures", "That divide the scaled scores.", list[float]),
)
HYPOTHESIS = (
    _param("name", "Of the mistake: family:kind, several joined by +.", str),
    _param("options", "That reproduce it; null where none do.", str | None),
    _param("detail", "What was done, where no option tells it in short.", str | None),
    _param(
        "heads", "In which it was made, the others being right; null for all.", list[int] | None
    ),
    _param(
        "max_abs_error",
        "Largest error of the candidates against it; null where a cell is NaN or infinite alone.",
        float,
    ),
    _param("matches", "Whether it explains every cell of every candidate.", bool),
    _param(
        "explained",
        "Share of the squared error that it takes away, at most 1; null where that says nothing.",
        float | None,
    ),
    _param("command", "That verifies it; null where no option does.", str | None),
    Column(
        "candidate",
        None,
        description="With --pair: 1 for the first candidate, 2 for that of --pair.",
        holds=int,
        always=False,
    ),
)
_VALUES = (
    Column("groups", None, description="that have this mask", holds=list[str], always=False),
    Column(
        "values",
        None,
        description="rows of booleans, True for a key that is seen; null where they are too many",
        holds=list[list[bool]] | None,
        always=False,
    ),
    Column("values_omitted", None, description="true where they are", holds=bool, always=False),
)
_SIDES = tuple(_param(side, f"Of side {side.upper()}, if it has a file.", PARAMS) for side in "ab")
_OF_COMPARISON = (
    _param("against", "The other mask: its file, or options.", str),
    _param("cells", "Cells compared; axes along which both are alike count once.", int),
    _param("differing", "Cells visible in one mask alone.", int),
    _param("only_a", "Those visible in the first alone.", int),
    _param("only_b", "Those visible in the other alone.", int),
    _param("bias_differing", "Cells visible in both to which other numbers are added.", int),
)
_OF_EFFECT = (
    _param("scores", "File of scaled scores; null with --effect.", str | None),
    *(one for one in _shaping() if one.key in ("scale", "temperature", "softcap")),
)
_FIT = (
    _param("rows", "Rows that were compared.", int),
    _param("rows_total", "Rows there are.", int),
    _param("target_rms", "Root mean square of what was given.", float),
)

_HEADS = "attncli.analysis.head_columns"
_ENTROPY = "attncli.analysis.entropy"
_COMPARE = "attncli.analysis.compare_columns"
_LISTED = (
    Document(
        name="compute",
        command="compute",
        about="Every stage of attention: statistics, and values where they are few.",
        records={
            "cell": Records(
                columns=("attncli.report.stages:CELLS",),
                when="a selected cell of a stage, in NDJSON and CSV",
                in_json=False,
            ),
            "shape": Records(columns=("attncli.cli.explain:SHAPES",), when="a step, with --shapes"),
        },
        params=(
            *_OF_PROBLEM,
            _param("stage", "The stages that were computed.", list[str]),
            _param("max_values", "Values of stages with more cells are left out.", int),
        ),
        data=(
            Column(
                "explanation",
                None,
                description="the steps in words, with --explain",
                holds=GenericAlias(list, "attncli.report.explanation:Step"),
                always=False,
            ),
            _param(
                "stages",
                "Stage → its numbers.",
                GenericAlias(dict, (str, "attncli.report.stages:STAGE")),
            ),
            _param("cost", "Operations and bytes of the whole.", "attncli.attention.problem:Cost"),
            _param("batches", "Indices of the selected ones.", list[int]),
            _param("heads", "Indices of the selected ones.", list[int]),
            _param("rows", "Indices of the selected queries; null for all.", list[int] | None),
        ),
        by_group=True,
    ),
    Document(
        name="entropy",
        command="entropy",
        about="What every head does: entropy, largest weight and logit, sink mass, a label.",
        records={
            "head": Records(
                columns=(f"{_HEADS}:HEAD", f"{_HEADS}:OF_TOKENS"), when="a head of a batch"
            ),
            "row": Records(
                columns=(f"{_ENTROPY}:ROW",), when="a query row, with --per-row or --histogram"
            ),
            "key": Records(columns=(f"{_HEADS}:KEY",), when="a key, with --per-key"),
            "group": Records(columns=(f"{_HEADS}:GROUP",), when="a group, with --summary"),
            "sample": Records(
                columns=(f"{_HEADS}:SAMPLED", f"{_HEADS}:OF_TOKENS"),
                when="a head of a batch, estimated with --sample-rows",
            ),
        },
        params=(
            *_OF_PROBLEM,
            _param("row_sums", "Of weights: the lowest and the highest sum of a row.", list[float]),
            _param("path", "How it was computed: in tiles.", str),
            _param("sink_keys", "First keys that count as sinks.", int),
            _param("labels", "Label → score from which on a head may get it.", dict[str, float]),
            _param("sample_rows", "Rows of each head that were looked at.", int),
            _param("sample_seed", "Which rows were taken.", int),
            _param("temperatures", "Side by side.", list[float]),
            _param("compare_scale", "Whether heads are shown without the scale, too.", bool),
        ),
    ),
    Document(
        name="mask",
        command="mask",
        about="What a mask lets through, and what it is.",
        records={
            "head": Records(
                columns=("attncli.attention.masks.audit:MaskRecord", *_VALUES),
                when="a batch and head of the mask, or all that are equal",
            )
        },
        params=(
            *_MASK,
            _param(
                "recognised_finite_as_hidden",
                "What the mask is if very low values hide, in words; null where none do.",
                str | None,
            ),
            _param(
                "leaks",
                "Cells shown although a rule hides them, with --fail-on leak.",
                GenericAlias(list, "attncli.attention.masks.compare:Leak"),
            ),
        ),
    ),
    Document(
        name="mask-compare",
        command="mask --against FILE",
        about="Where two masks differ.",
        records={
            "cell": Records(
                columns=("attncli.attention.masks.compare:Cell",),
                when="a cell that differs; in JSON the first ones",
            )
        },
        params=(*_MASK, *_OF_COMPARISON),
    ),
    Document(
        name="mask-effect",
        command="mask --effect",
        about="Softmax of every query before and after a mask.",
        records={
            "row": Records(
                columns=("attncli.analysis.mask_effect:RowEffect",),
                when="a query row, with --effect or --scores",
            )
        },
        params=(*_MASK, *_OF_EFFECT),
    ),
    Document(
        name="variance",
        command="variance",
        about="The variance of q·k: of random draws, or of the heads of files.",
        records={
            "experiment": Records(
                columns=("attncli.analysis.variance:EXPERIMENT",),
                when="a d_k, a scale rule and a temperature, without files",
            ),
            "head": Records(
                columns=("attncli.analysis.audit:AUDIT",), when="a head of a batch, with files"
            ),
            "group": Records(
                columns=("attncli.analysis.audit:GROUP",), when="a group, with files and --summary"
            ),
        },
        params=(*_OF_PROBLEM, *_CHOSEN, *_DRAWN),
    ),
    Document(
        name="variance-fit",
        command="variance FILES --fit-scale FILE",
        about="Which scale made given weights or outputs: those tried, the best first.",
        records={
            "scale": Records(columns=("attncli.analysis.audit:FIT_SCALE",), when="a scale tried")
        },
        params=(*_OF_PROBLEM, *_FIT),
    ),
    Document(
        name="variance-logits",
        command="variance --logits X,X",
        about="Softmax of a few numbers, scaled, at temperatures, and naively.",
        records={
            "softmax": Records(
                columns=("attncli.analysis.variance:LOGITS",), when="a way to take the softmax"
            )
        },
        params=(
            _param("logits", "As given.", list[float]),
            _param("dk", "Widths of the scales 1/√d_k.", list[int]),
            _param("temperatures", "That divide the scaled logits.", list[float]),
        ),
    ),
    Document(
        name="check",
        command="check",
        about="A candidate against the float64 reference, and the mistakes that were tried.",
        records={
            "candidate": Records(
                columns=("attncli.attention.check.compare:Comparison",),
                when="a compared tensor, in NDJSON and CSV",
                in_json=False,
            )
        },
        params=(*_OF_PROBLEM, *_CHOSEN),
        data=(
            _param(
                "records",
                "One per compared tensor.",
                GenericAlias(list, "attncli.attention.check.compare:Comparison"),
            ),
            Column(
                "hypotheses",
                None,
                description="Mistakes that were tried, the likeliest first; none if all passed.",
                holds=GenericAlias(list, "attncli.cli.documents:HYPOTHESIS"),
            ),
            Column(
                "pair",
                None,
                description="Both candidates against each other, with --pair.",
                holds="attncli.attention.check.compare:Pair",
                always=False,
            ),
        ),
    ),
    Document(
        name="compare",
        command="compare",
        about="What a change does to every head: A is the first side, B the other.",
        records={
            "head": Records(
                columns=(f"{_COMPARE}:HEAD",), when="a head of a batch under one what-if"
            ),
            "row": Records(columns=(f"{_COMPARE}:ROW",), when="a query row, with --per-row"),
            "group": Records(columns=(f"{_COMPARE}:GROUP",), when="a group, with --summary"),
            "key": Records(
                columns=(f"{_COMPARE}:KEY",),
                when="a key of the row that changed most, with --worst",
            ),
        },
        params=(
            *_OF_PROBLEM,
            _param("what_if", "The changes, as given.", list[str]),
            *_SIDES,
        ),
    ),
    Document(
        name="inspect",
        command="inspect",
        about="The tensors of files.",
        records={
            "tensor": Records(
                columns=("attncli.cli.inspect_run:COLUMNS",), when="a tensor of a file"
            )
        },
        params=(_param("dtype", "What the bits were said to be.", str | None),),
    ),
    Document(
        name="capture",
        command="capture",
        about="What was recorded of a model, in the bundle that was written.",
        records={
            "group": Records(
                columns=("attncli.recording.recorder:CapturedGroup",),
                when="an attention call that was recorded",
            )
        },
        params=(
            _param("generate", "Cached steps after the text; null for none.", int | None),
            _param("layers", "Those recorded; null for all.", list[int] | None),
            _param("trace", "Whether softmax that a model writes out was followed.", bool),
            _param("device", "Where the model ran.", str),
        ),
    ),
)
DOCUMENTS = {one.name: one for one in _LISTED}
