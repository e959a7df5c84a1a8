"""Masks from options and files: how long they are, what leaks through, what looks wrong.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncli.analysis.attention_arguments import as_array
from attncli.analysis.tensor_files import (
    LAYOUT,
    FileGroup,
    groups_in,
    of_sound_files,
    weights_in,
)
from attncli.attention.masks.audit import MaskAudit, place, undeclared_leaks
from attncli.attention.masks.build import build_mask, padding_doubts
from attncli.attention.masks.compare import Leak, leaks
from attncli.attention.masks.mask import HeadMask, Mask
from attncli.attention.masks.spans import mask_of_spans
from attncli.attention.options import BEFORE_WEIGHTS, OPTIONS, AttentionOptions, Layout
from attncli.attention.sizes import PACKED, Sizes, layout_doubts, to_bhsd
from attncli.errors import AttncliError, DataError, UsageError
from attncli.files.tensor import bfloat16_bits
from attncli.files.writer import TensorSaver

# Options that shape the softmax, not the mask.
SOFTMAX = ("scale", "temperature", "softcap", "sinks")
DEFAULT_LENGTH = 8
# Queries and keys from which on a mask of rules alone is counted without looking at each.
LONG = 1 << 22
BLOCK_CELLS = 1 << 24

_AXES = ("batch", "heads", "q_len", "k_len")
_OF_KEYS = ("batch", "k_len")


@dataclass(frozen=True, slots=True, eq=False)
class MaskInputs:
    """What files of Q and K say of a mask; their data are not read."""

    # Those that have this mask, their tensors and labels; empty without files.
    groups: tuple[FileGroup, ...] = ()
    # "batch", "heads", "q_len", "k_len"; empty without files.
    lengths: dict[str, int] = field(default_factory=dict)
    # Options that a bundle declares and that count.
    declared: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()  # what the reader of the results should know
    mask: NDArray[np.bool_] | None = None  # what weights show; None without weights

    @property
    def place(self) -> str:
        """Where the first of them is, for messages."""
        return self.groups[0].place if self.groups else ""

    @property
    def source(self) -> str:
        """The file of the first of them, or that of its Q; empty without files."""
        for group in self.groups[:1]:
            return group.source or group.roles["q"][0].source
        return ""

    @property
    def names(self) -> list[str]:
        """Of the groups."""
        return [group.name for group in self.groups]

    @property
    def described(self) -> dict[str, Any]:
        """Role → source, shape, dtype, of the first of them."""
        roles = self.groups[0].roles if self.groups else {}
        return {
            role: {
                "source": file.source if header.name is None else f"{file.source}::{header.name}",
                "shape": list(header.shape),
                "dtype": header.dtype,
            }
            for role, (file, header) in roles.items()
            if role in ("q", "k")
        }


def find_inputs(
    files: Sequence[str],
    group: Sequence[str],
    layout: Layout,
    k_layout: Layout | None,
    *,
    softmax: bool,
    typed: Collection[str] = (),
    faults: list[AttncliError] | None = None,
) -> list[MaskInputs]:
    """Read the headers of Q and K: an entry for each kind of mask, one without files.

    Args:
        files: two files, or bundles; empty for none.
        group: which groups of the bundles; empty for all.
        layout: order of their axes.
        k_layout: that of K, where it has one of its own.
        softmax: whether what shapes the softmax beside the mask counts.
        typed: options of which it does not matter what a bundle declares.
        faults: is told of bundles that are left out; None where none may be.

    Raises:
        UsageError: files that do not say which are Q and K.
    """
    if not files:
        return [MaskInputs()]
    if faults is not None:
        return of_sound_files(
            files,
            lambda some: find_inputs(some, group, layout, k_layout, softmax=softmax, typed=typed),
            faults,
        )
    groups = groups_in(files, group)
    if "k" not in groups[0].roles:
        raise UsageError(
            "FILE",
            "expected Q and K, or one bundle, got one file of one tensor",
            f"to read a mask: «attn_mask={files[0]}»",
        )
    kinds: list[MaskInputs] = []
    for one in groups:
        declared = {
            name: value
            for name, value in one.declared.items()
            if name in OPTIONS and name not in typed and (name not in SOFTMAX or softmax)
        }
        lengths = _lengths(one, layout, k_layout)
        warnings = list(one.warnings)
        if declared.pop("sinks", None) is not None:
            warnings.append("«effect» leaves out the sinks that the bundle declares")
        same = next((k for k in kinds if (k.lengths, k.declared) == (lengths, declared)), None)
        if same is not None:
            kinds[kinds.index(same)] = replace(same, groups=(*same.groups, one))
            continue
        shapes = {role: header.shape for role, (_, header) in one.roles.items()}
        if one.declared.get(LAYOUT) != Layout.BHSD:
            warnings += layout_doubts(shapes, layout, k_layout)
        kinds.append(MaskInputs((one,), lengths, declared, tuple(warnings)))
    if softmax and len(kinds) == 1 and len(groups) > 1:
        said = f"the {len(groups)} groups have one mask in common; the files read are of "
        kinds[0] = replace(kinds[0], warnings=(*kinds[0].warnings, said + groups[0].name))
    return kinds


def shown_by_weights(names: Sequence[str], wanted: Sequence[str]) -> MaskInputs:
    """The mask that weights were computed with, as far as their zeros tell.

    Args:
        names: files of weights.
        wanted: which of their groups; empty where the zeros of all are the same.

    Raises:
        DataError: files that cannot be read or do not hold weights.
        UsageError: groups of different zeros.
    """
    first, *others = weights_in(names, wanted)
    shown = _weighted(first)
    for other in others:
        if not np.array_equal(_weighted(other), shown):
            problem = f"expected one mask, got those of {first.place} and {other.place}"
            raise UsageError("«group»", problem, "the zeros of their weights differ: choose one")
    declared = {name: value for name, value in first.declared.items() if name not in BEFORE_WEIGHTS}
    warnings = list(first.warnings)
    if others:
        warnings.append(f"the {len(others) + 1} groups of weights have their zeros in common")
    return MaskInputs(
        groups=(replace(first, roles={}),),
        lengths=dict(zip(_AXES, shown.shape, strict=True)),
        declared=declared,
        mask=shown,
        warnings=tuple(warnings),
    )


def _weighted(group: FileGroup) -> NDArray[np.bool_]:
    """Bool (B, H, S_q, S_k): where the weights are not 0."""
    weights = as_array(group.read("weights"))
    if not 2 <= weights.ndim <= 4 or weights.dtype.kind not in "fiu":
        got = f"{weights.dtype} {weights.shape}"
        raise DataError(group.place, f"expected weights (B, H, S_q, S_k), got {got}")
    if weights.size and weights.min() < 0:
        problem = f"expected weights, of at least 0, got {weights.min():.4g}"
        raise DataError(group.place, problem, "scores before the softmax are no weights yet")
    shown: NDArray[np.bool_] = weights != 0
    return shown[(None,) * (4 - shown.ndim)]


def _lengths(group: FileGroup, layout: Layout, k_layout: Layout | None) -> dict[str, int]:
    """B, H, S_q and S_k from two shapes, of arrays that take no memory."""
    of_q, of_k = (
        to_bhsd(np.broadcast_to(np.float32(0), group.roles[role][1].shape), role, order, 1).shape
        for role, order in (("q", layout), ("k", k_layout or layout))
    )
    found = {"batch": of_q[0], "heads": of_q[1], "q_len": of_q[2], "k_len": of_k[2]}
    if layout in PACKED:
        del found["heads"]  # how many are packed is for the caller to say
    return found


def sizes_of(
    options: AttentionOptions,
    said: Mapping[str, int | None],
    scores: NDArray[Any] | None = None,
) -> Sizes:
    """B, H, S_q and S_k: as said, or as the arrays and lengths need them, or 1, 1, 8 and 8.

    Args:
        options: what shapes the mask.
        said: some of "batch", "heads", "q_len" and "k_len"; None for what is not said.
        scores: what the mask is for, rank 2 (S_q, S_k) to 4; None for nothing in particular.
    """
    found: dict[str, int] = {}
    offset = options.query_offset
    per_batch = offset if isinstance(offset, tuple) else None
    for values in (options.key_lengths, options.query_lengths, per_batch):
        if values is not None and len(values) > 1:
            found["batch"] = len(values)
    for array, axes in (
        (scores, _AXES),
        (options.segments, _OF_KEYS),
        (options.position_ids, _OF_KEYS),
        (options.key_padding, _OF_KEYS),
        (options.attn_mask, _AXES),
        (options.alibi_slopes, ("heads",)),
    ):
        shape = () if array is None else array.shape[-len(axes) :]
        for axis, length in zip(axes[len(axes) - len(shape) :], shape, strict=True):
            if length != 1 or axis not in found:
                found[axis] = length
    if found.get("q_len") == 1 and offset is None and options.needs_positions:
        del found["q_len"]  # one row for all queries; how many there are, the keys say
    if options.query_segments is not None:
        found["q_len"] = options.query_segments.shape[-1]
    for axis, edges in (("q_len", options.cu_seqlens_q), ("k_len", options.cu_seqlens_k)):
        # What is no number is refused where the documents are made.
        if edges is not None and edges.size and np.isfinite(edges.ravel()[-1]):
            found[axis] = int(edges.ravel()[-1])
    found |= {name: length for name, length in said.items() if length is not None}
    shape = () if options.attn_mask is None else options.attn_mask.shape
    if len(shape) == 2 and shape[0] not in (1, found.get("q_len", shape[0])):
        found.setdefault("batch", shape[0])  # which is refused, and it is told what they may be
    default = found.get("q_len", found.get("k_len", DEFAULT_LENGTH))
    return Sizes(
        found.get("batch", 1),
        found.get("heads", 1),
        found.get("q_len", default),
        found.get("k_len", default),
    )


def long_mask(options: AttentionOptions, sizes: Sizes) -> Mask | None:
    """The mask of rules alone, where it is so long that a number for each query would be too much.

    Args:
        options: what shapes it.
        sizes: B, H, S_q and S_k.

    Raises:
        UsageError: as `build_mask` does.
    """
    return mask_of_spans(options, sizes) if sizes.q_len + sizes.k_len > LONG else None


def file_alone(options: AttentionOptions, mask: NDArray[Any] | None) -> AttentionOptions:
    """Options of a mask file without the rules beside it."""
    return AttentionOptions(
        attn_mask=mask,
        mask_true=options.mask_true,
        hide_below=options.hide_below,
        query_lengths=options.query_lengths,
    )


def find_leaks(options: AttentionOptions, mask: Mask, judged: MaskAudit) -> list[Leak]:
    """What a mask file shows although a rule hides it.

    The rules are those that the options declare. Where they declare none, the pattern nearest to
    the mask is taken for the rule; a mask that is a known pattern then leaks nothing.

    Args:
        options: a mask file, and the rules beside it.
        mask: built of these options.
        judged: the audit of it.
    """
    bare = build_mask(file_alone(options, options.attn_mask), mask.sizes)
    alone = replace(bare, chosen=mask.chosen)
    found = leaks(alone, replace(options, attn_mask=None))
    return found or undeclared_leaks(mask, judged.recognition)


def suspicions(
    judged: MaskAudit, options: AttentionOptions, said: Mapping[str, int | None]
) -> Iterator[str]:
    """What looks like a mistake of whoever made the mask.

    Args:
        judged: the audit of it.
        options: what it was built of.
        said: as for `sizes_of`.
    """
    of_queries = options.needs_positions or any(said.get(one) for one in ("batch", "q_len"))
    if options.attn_mask is not None and options.attn_mask.ndim == 2 and not of_queries:
        for _, _, part in judged.recognition.parts:
            yield from padding_doubts(part.view.marginals, options)
    for recognition in (judged.recognition, judged.lenient):
        for batch, head, part in () if recognition is None else recognition.parts:
            where = place(batch, head)
            if part.probably_inverted and part.description.startswith("probably inverted"):
                yield f"the mask{where} is {part.description}; were True and False exchanged?"
            hidden = part.pattern is not None and part.pattern.hidden_rows is not None
            if hidden and part.description.startswith("queries"):
                yield (
                    f"the mask{where} hides whole rows, {part.description}; padding hides keys, "
                    "which are columns: is it transposed?"
                )


def save_mask(mask: Mask, target: str, dtype: str) -> list[str]:
    """Write a mask block by block, (B, H, S_q, S_k); axes along which it is alike are 1 long.

    Args:
        mask: on the host.
        target: the file.
        dtype: "bool", True = may attend; or "float16", "bfloat16", "float32" or "float64", what
            is added to a logit, −inf = hidden.

    Returns:
        What of the mask is not in the file.

    Raises:
        DataError, ResourceError: the place cannot be written.
    """
    sizes, additive = mask.sizes, dtype != "bool"
    batches = mask.indices(0) if mask.differs(0) else mask.first[:1]
    biased = additive and mask.slopes is not None  # ALiBi has a slope for each head
    heads = mask.indices(1) if biased or mask.differs(1) else mask.first[1:]
    kind: Any = dtype if dtype == "bfloat16" else np.dtype(dtype)
    step = max(1, BLOCK_CELLS // max(1, sizes.k_len))
    hidden = bfloat16_bits(np.array(-np.inf)) if dtype == "bfloat16" else -np.inf
    lost = 0
    shape = (len(batches), len(heads), sizes.q_len, sizes.k_len)
    with TensorSaver(target, {"attn_mask": (shape, kind)}) as saver:
        for batch, head in np.ndindex(shape[:2]):
            one = mask.head(batches[batch], heads[head])
            for start in range(0, sizes.q_len, step):
                rows = slice(start, min(start + step, sizes.q_len))
                seen = block = one.cells(rows)
                if additive:
                    block = _values(one, rows, seen, dtype)
                    lost += int(np.count_nonzero(seen & (block == hidden)))
                saver.write("attn_mask", (batch, head, rows), block)
    warnings = []
    if lost:
        warnings.append(
            f"«dtype»: {lost} visible cells are -inf in {dtype}, so they are hidden there"
        )
    if not additive and (mask.slopes is not None or mask.added is not None):
        warnings.append("a boolean mask leaves out what is added; «as=additive» keeps it")
    return warnings


def _values(mask: HeadMask, rows: slice, seen: NDArray[np.bool_], dtype: str) -> NDArray[Any]:
    """(rows, S_k) of what is added, in the dtype to be written; bfloat16 as bits."""
    bias = mask.bias(rows)
    values = np.where(seen, 0.0 if bias is None else bias, -np.inf)
    if dtype == "bfloat16":
        return bfloat16_bits(values)
    with np.errstate(over="ignore"):
        cast: NDArray[Any] = values.astype(dtype)
    return cast
