"""What shapes attention, as its user declares it, before any tensor is seen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from attncli.errors import UsageError

if TYPE_CHECKING:  # help and usage errors do without NumPy
    import numpy as np
    from numpy.typing import NDArray


class MaskTrue(StrEnum):
    """What True means in a boolean attention mask."""

    KEEP = "keep"
    DROP = "drop"


class Corner(StrEnum):
    """Where a causal triangle sits when queries and keys differ in number."""

    TOP_LEFT = "top-left"
    BOTTOM_RIGHT = "bottom-right"


class Layout(StrEnum):
    """Order of the axes of a tensor of rank 4, or of a packed one of rank 2 or 3."""

    BHSD = "bhsd"
    BSHD = "bshd"
    SBHD = "sbhd"
    BHDS = "bhds"
    BSH = "bsh"
    SBH = "sbh"


class WeightsLayout(StrEnum):
    """Order of the axes of a projection: x @ w, or the weight of a linear layer."""

    IN_OUT = "in-out"
    OUT_IN = "out-in"


class Precision(StrEnum):
    """The dtype that arithmetic is done in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT64 = "float64"


class Stage(StrEnum):
    """The stages, in the order in which they are computed."""

    Q = "q"
    K = "k"
    V = "v"
    SCORES = "scores"
    SCALED = "scaled"
    CAPPED = "capped"
    MASKED = "masked"
    WEIGHTS = "weights"
    OUTPUT = "output"
    PROJECTED = "projected"

    @property
    def over_keys(self) -> bool:
        """Whether its columns are keys, so that cells may be invisible."""
        return self in (Stage.SCORES, Stage.SCALED, Stage.CAPPED, Stage.MASKED, Stage.WEIGHTS)


class Target(StrEnum):
    """What a candidate claims to be."""

    OUTPUT = "output"
    WEIGHTS = "weights"
    LOGSUMEXP = "logsumexp"


def stages_there(*, capped: bool, with_values: bool) -> list[Stage]:
    """The stages from scores on that attention has.

    Args:
        capped: whether it has a soft cap.
        with_values: whether it has V.
    """
    found = [Stage.SCORES, Stage.SCALED, *([Stage.CAPPED] if capped else [])]
    found += [Stage.MASKED, Stage.WEIGHTS]
    return [*found, Stage.OUTPUT] if with_values else found


class DistributionName(StrEnum):
    """What an experiment draws an entry of Q or K from."""

    NORMAL = "normal"
    UNIFORM = "uniform"
    RADEMACHER = "rademacher"
    LAPLACE = "laplace"
    STUDENT_T = "student-t"


class Kind(StrEnum):
    """What values an option takes: how a command line, a bundle and Python callers spell them."""

    NUMBER = "number"
    NUMBERS = "number or list of numbers"
    WHOLE = "whole number"
    FLAG = "true or false"
    OFFSET = "corner, whole number or list of them"
    LENGTHS = "list of whole numbers"
    IDS = "list of integer ids"  # or a file of them
    LOGITS = "list of numbers"  # or a file of them
    MARKS = "list of true and false"  # or a file of them; 1 and 0 as words
    ARRAY = "file of an array"
    CHOICE = "one of its choices"


@dataclass(frozen=True, slots=True)
class Told:
    """What is said of an option, once for all who offer it."""

    help: str  # what it does, in a line that names other options as messages do
    metavar: str | None = None  # what stands for its value in help; None for the name of its type
    kind: Kind | None = None  # what values it takes; None where the type of its field says it all
    names: tuple[str, ...] = ()  # how it is typed; empty for "--" and its field's name
    minimum: int | None = None  # limits of a number
    maximum: int | None = None
    positional: bool = False  # whether it is an argument, which is not named


# The options that tell documents apart, of which there is one at most, or the last two.
DOCUMENTS = ("segments", "position_ids", "cu_seqlens_q", "cu_seqlens_k")

# What an option needs beside it, one of several.
_BESIDE = {
    "query_segments": ("segments",),
    "prefix": ("causal",),
    "sink_window": ("left_window",),
    "dilation": ("left_window", "right_window"),
}


def option(default: Any, help: str, *args: Any, **told: Any) -> Any:
    """A field of a dataclass that is an option; arguments after the default as for `Told`."""
    return field(default=default, metadata={"told": Told(help, *args, **told)})


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """Everything beside Q, K and V that decides what attention computes.

    Attributes:
        scale: multiplies the scores, one number or one per query head; None means 1/√d_k. 0 and
            negative values are values.
        temperature: divides the scaled scores; finite, > 0.
        softcap: c of c·tanh(scaled/c), before the mask; finite, > 0; None for none.
        causal: key j is visible to a query at position p iff j ≤ p.
        query_offset: position of query 0 on the key axis: a corner, one integer, or one integer
            per batch. None means 0 where S_q = S_k and "not declared" elsewhere.
        left_window: keys before p − left_window are invisible; None for unbounded.
        right_window: keys after p + right_window are invisible; None for unbounded.
        sink_window: with `left_window`, it does not hide the first `sink_window` keys.
        prefix: with `causal`, it does not hide the first `prefix` keys.
        dilation: with a window, key j is visible only if p − j is a multiple of it; ≥ 1.
        key_lengths: number of real keys, one for all batches or one per batch.
        query_lengths: number of real queries, one for all batches or one per batch.
        key_padding: bool (B, S_k) or (S_k,), True = real key.
        attn_mask: bool (True as `mask_true` says), 0/1 integer, or additive float; rank 1 (S_k),
            2 (S_q, S_k), 3 (H, S_q, S_k) or 4 (B, H, S_q, S_k), broadcast from the right.
        mask_true: what True means in a boolean `attn_mask`.
        hide_below: numbers of an additive `attn_mask` at or below it hide their keys; None for
            those that leave a key no weight at all beside its row's other keys.
        segments: integer document ids of the keys, (S_k,) or (B, S_k).
        query_segments: those of the queries, (S_q,) or (B, S_q), beside `segments`; None for those
            of the keys at their positions.
        position_ids: integers, (S_k,) or (B, S_k), of which one that is no larger than the one
            before it begins a document.
        cu_seqlens_q: integers (documents + 1,), 0, ascending, S_q: where those of the queries begin
            and end.
        cu_seqlens_k: likewise of the keys, up to S_k; either serves both where S_q = S_k.
        alibi: add the bias −mₕ·|p − j|, with the slopes mₕ of its paper.
        alibi_slopes: add that bias with these slopes, (H,) or (1, H).
        sinks: one logit per query head, (H,), that joins the softmax denominator.
    """

    scale: float | tuple[float, ...] | None = option(
        None, "Multiply the scores by X, or one per head. [default: 1/√d_k]", "X[,X…]", Kind.NUMBERS
    )
    temperature: float = option(1.0, "Divide the scaled scores by T.", "T", Kind.NUMBER)
    softcap: float | None = option(None, "C·tanh(scaled/C), before the mask.", "C", Kind.NUMBER)
    causal: bool = option(False, "Key j is visible to position p iff j ≤ p.", None, Kind.FLAG)
    query_offset: Corner | int | tuple[int, ...] | None = option(
        None,
        "Position of query 0 on the key axis. [default: 0 where S_q = S_k]",
        "top-left|bottom-right|N[,N…]",
        Kind.OFFSET,
    )
    left_window: int | None = option(
        None, "Hide keys before p − L; L excludes the query.", "L", Kind.WHOLE
    )
    right_window: int | None = option(None, "Hide keys after p + R.", "R", Kind.WHOLE)
    sink_window: int | None = option(
        None, "«left_window» does not hide the first N keys (StreamingLLM).", "N", Kind.WHOLE
    )
    prefix: int | None = option(
        None, "«causal» does not hide the first P keys; a window may (prefix-LM).", "P", Kind.WHOLE
    )
    dilation: int | None = option(
        None, "With a window: only every D-th key, counted from the query.", "D", Kind.WHOLE
    )
    key_lengths: tuple[int, ...] | None = option(
        None, "Real keys, one number or per batch.", "N[,N…]", Kind.LENGTHS
    )
    query_lengths: tuple[int, ...] | None = option(
        None, "Real queries, likewise.", "N[,N…]", Kind.LENGTHS
    )
    key_padding: NDArray[Any] | None = option(
        None, "Boolean (B, S_k), True = real key.", "FILE|1,0,…", Kind.MARKS
    )
    attn_mask: NDArray[Any] | None = option(
        None, "Boolean, or floats that are added.", "FILE", Kind.ARRAY
    )
    mask_true: MaskTrue = option(
        MaskTrue.KEEP,
        "What True means in a boolean «attn_mask». [default: keep]",
        None,
        Kind.CHOICE,
    )
    hide_below: float | None = option(
        None,
        "Values of a float «attn_mask» at or below X hide their keys. "
        "[default: those that leave no weight]",
        "X",
        Kind.NUMBER,
    )
    segments: NDArray[Any] | None = option(
        None, "Document of each key: no leaks.", "FILE|ID,ID,…", Kind.IDS
    )
    query_segments: NDArray[Any] | None = option(
        None,
        "Document of each query, where its position does not say it.",
        "FILE|ID,ID,…",
        Kind.IDS,
    )
    position_ids: NDArray[Any] | None = option(
        None,
        "Position of each key in its document: one begins where they restart.",
        "FILE|N,N,…",
        Kind.IDS,
    )
    cu_seqlens_q: NDArray[Any] | None = option(
        None,
        "Where documents of the queries begin and end, as FlashAttention has it.",
        "FILE|0,N,…",
        Kind.IDS,
    )
    cu_seqlens_k: NDArray[Any] | None = option(
        None, "Likewise of the keys.", "FILE|0,N,…", Kind.IDS
    )
    alibi: bool = option(False, "Add the bias −mₕ·|p − j|.", None, Kind.FLAG)
    alibi_slopes: NDArray[np.float64] | None = option(
        None, "Add it with these slopes mₕ, one per head.", "FILE|X,X,…", Kind.LOGITS
    )
    sinks: NDArray[np.float64] | None = option(
        None, "A logit per head in the denominator.", "FILE|X,X,…", Kind.LOGITS
    )

    def __post_init__(self) -> None:
        """Refuse values that make no sense for any tensors.

        Raises:
            UsageError: naming the option, what it takes and what it got.
        """
        require_values({each.name: getattr(self, each.name) for each in fields(self)})
        ways = [name for name in DOCUMENTS if getattr(self, name) is not None]
        if len(ways) > 1 and ways != ["cu_seqlens_q", "cu_seqlens_k"]:
            wanted = f"expected one way to tell documents, got «{ways[0]}» too"
            raise UsageError(f"«{ways[1]}»", wanted)
        for name, beside in _BESIDE.items():
            there = [getattr(self, other) for other in beside]
            lacking = all(each is None or each is False for each in there)
            if getattr(self, name) is not None and lacking:
                wanted = " or ".join(f"«{other}»" for other in beside)
                raise UsageError(f"«{name}»", f"expected {wanted} beside it, got «{name}» alone")

    @property
    def has_documents(self) -> bool:
        """Whether keys are told apart by document."""
        return any(getattr(self, name) is not None for name in DOCUMENTS)

    @property
    def has_packed_queries(self) -> bool:
        """Whether queries have documents wherever they stand, and positions in each of these."""
        own = self.query_segments, self.cu_seqlens_q, self.cu_seqlens_k
        return any(each is not None for each in own)

    @property
    def needs_positions(self) -> list[str]:
        """The options in use that cannot be read without knowing where query 0 stands."""
        used = {
            "causal": self.causal,
            "left_window": self.left_window is not None,
            "right_window": self.right_window is not None,
            "segments": self.segments is not None and self.query_segments is None,
            "position_ids": self.position_ids is not None,
            "alibi": self.alibi,
            "alibi_slopes": self.alibi_slopes is not None,
        }
        return [name for name, given in used.items() if given]


def require_values(values: Mapping[str, Any]) -> None:
    """Refuse values of options that make no sense for any tensors, whatever stands beside them.

    Args:
        values: some fields of `AttentionOptions`, by their names.

    Raises:
        UsageError: naming the option, what it takes and what it got.
    """
    scale = values.get("scale")
    for one in scale if isinstance(scale, tuple) else (scale,):
        if one is not None and not math.isfinite(one):
            raise UsageError("«scale»", f"expected a finite number, got {one}")
    hide_below = values.get("hide_below")
    if hide_below is not None and math.isnan(hide_below):
        raise UsageError("«hide_below»", "expected a number, got nan")
    for name in ("temperature", "softcap"):
        value = values.get(name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UsageError(f"«{name}»", f"expected a finite number above 0, got {value}")
    least = dict.fromkeys(("left_window", "right_window", "sink_window", "prefix"), 0)
    for name, fewest in (least | {"dilation": 1}).items():
        _require_counts(name, (values.get(name),), fewest)
    for name in ("key_lengths", "query_lengths"):
        _require_counts(name, values.get(name) or (), 0)


def _require_counts(name: str, counts: Sequence[int | None], fewest: int) -> None:
    for count in counts:
        if count is not None and count < fewest:
            wanted = f"expected a whole number of at least {fewest}"
            raise UsageError(f"«{name}»", f"{wanted}, got {count}")


def require_heads(options: AttentionOptions, heads: int) -> None:
    """Refuse scales and sink logits that are not one per query head.

    Raises:
        UsageError: there are more or fewer.
    """
    if isinstance(options.scale, tuple) and len(options.scale) != heads:
        got = len(options.scale)
        raise UsageError("«scale»", f"expected 1 or one per query head (H={heads}), got {got}")
    shape = (heads,) if options.sinks is None else tuple(options.sinks.shape)
    if shape != (heads,):
        raise UsageError("«sinks»", f"expected one logit per query head (H={heads}), got {shape}")


def require_candidates(
    given: Iterable[str], rtol: float | None, atol: float | None, *, pair: bool = False
) -> None:
    """Refuse what makes no check, before anything is loaded.

    Args:
        given: the targets of the candidates.
        rtol, atol: tolerances of the caller; None for those of the dtype.
        pair: whether a second candidate is to be compared with the one given.

    Raises:
        UsageError: no candidate, several of them for a pair, or a tolerance that is none.
    """
    count = len(list(given))
    if not count:
        names = ", ".join(f"«actual_{target}»" for target in Target)
        raise UsageError("check", f"expected one of {names}, got none")
    if pair and count > 1:
        raise UsageError("«pair»", f"expected one candidate beside it, got {count}")
    for name, value in (("«rtol»", rtol), ("«atol»", atol)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise UsageError(name, f"expected a finite number of at least 0, got {value}")


def require_device_name(name: str) -> None:
    """Refuse what names no device, be it there or not.

    Raises:
        UsageError: it does not.
    """
    kind, colon, index = name.partition(":")
    if not ((kind in ("cpu", "cuda") and index.isdecimal() == bool(colon)) or name == "auto"):
        raise UsageError("«device»", f"expected auto, cpu, cuda or cuda:N, got {name}")


OPTIONS = {entry.name: entry.metadata["told"] for entry in fields(AttentionOptions)}
OPTION_NAMES = tuple(OPTIONS)
# What has shaped weights before they are there, beside the mask.
BEFORE_WEIGHTS = ("scale", "temperature", "softcap", "alibi", "alibi_slopes", "sinks")
