"""What the files of `attncli mask` say: lengths, options, labels and a mask; no data are read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncli.analysis.attention_arguments import as_array
from attncli.analysis.options import AttentionWords
from attncli.analysis.values import several
from attncli.attention.options import Layout
from attncli.attention.sizes import to_bhsd
from attncli.cli.mask import MaskOptions
from attncli.errors import UsageError
from attncli.files.container import TensorFile
from attncli.files.reader import open_file
from attncli.files.roles import groups_of, split_name
from attncli.files.tensor import TensorHeader

MASK_NAMES = ("attn_mask", "attention_mask", "mask")
SOFTMAX = ("scale", "temperature", "softcap", "sinks")


@dataclass(frozen=True, slots=True)
class MaskInputs:
    """What the files say.

    Attributes:
        q, k: file and name of the queries and keys; None without files.
        lengths: "batch", "heads", "q_len", "k_len" of Q and K; empty without files.
        described: role → source, shape, dtype.
        declared: options that a bundle declares for the group.
        labels: a token per position; None for none.
        mask: a mask that the bundle holds for the group; None for none.
        mask_source: its file and name.
        warnings: what the reader of the results should know.
    """

    q: tuple[TensorFile, str | None] | None = None
    k: tuple[TensorFile, str | None] | None = None
    lengths: dict[str, int] = field(default_factory=dict)
    described: dict[str, Any] = field(default_factory=dict)
    declared: dict[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] | None = None
    mask: NDArray[Any] | None = None
    mask_source: str | None = None
    warnings: tuple[str, ...] = ()


def find_inputs(options: MaskOptions, words: AttentionWords) -> MaskInputs:
    """Read the headers of the files.

    Raises:
        UsageError: files that do not say which are Q and K, or several groups.
    """
    if not options.files:
        return MaskInputs()
    named = [(open_file(source), name) for source, name in map(split_name, options.files)]
    warnings = tuple(text for file, _ in named for text in file.warnings)
    whole = [file for file, name in named if name is None and len(file.headers) > 1]
    if whole and len(named) == 1:
        return _of_bundle(whole[0], options, words, warnings)
    if whole or len(named) not in (2, 3):
        raise UsageError(
            "FILE",
            f"expected Q and K, or one bundle, got {len(named)} of one tensor each",
            f"to read a mask: attncli mask --attn-mask {options.files[0]}",
        )
    q, k = ((file, file.find(name)) for file, name in named[:2])
    return MaskInputs(
        q=(q[0], q[1].name),
        k=(k[0], k[1].name),
        lengths=_lengths(q[1], k[1], options.layout),
        described={"q": _described(*q), "k": _described(*k)},
        warnings=warnings,
    )


def _of_bundle(
    file: TensorFile, options: MaskOptions, words: AttentionWords, warnings: tuple[str, ...]
) -> MaskInputs:
    groups = groups_of(file, several(options.group))
    if len(groups) > 1 and not _alike(file, groups, options.layout):
        names = ", ".join(list(groups)[:8])
        raise UsageError("--group", f"expected one group, got {len(groups)}: {names}")
    name, roles = next(iter(groups.items()))
    q, k = file.find(roles["q"]), file.find(roles["k"])
    declared = dict(file.metadata.get(name, {}))
    labels = declared.pop("labels", None)
    if declared.pop("sinks", None) is not None and options.effect:
        warnings += ("--effect leaves out the sinks that the bundle declares",)
    if not options.effect:
        declared = _without_softmax(declared)
    elif len(groups) > 1:
        warnings += (
            f"the {len(groups)} groups have one mask in common; the files read are of {name}",
        )
    held = None if words.attn_mask is not None else _mask_name(file, name)
    return MaskInputs(
        q=(file, q.name),
        k=(file, k.name),
        lengths=_lengths(q, k, options.layout),
        described={"q": _described(file, q), "k": _described(file, k)},
        declared=declared,
        labels=None if labels is None else tuple(map(str, labels)),
        mask=None if held is None else as_array(file.read(held)),
        mask_source=None if held is None else f"{file.source}::{held}",
        warnings=warnings,
    )


def _alike(file: TensorFile, groups: Iterable[str], layout: Layout) -> bool:
    """Whether all groups of a bundle have one and the same mask."""
    told = []
    for name, roles in groups_of(file, list(groups)).items():
        declared = _without_softmax(file.metadata.get(name, {}))
        declared.pop("labels", None)
        told.append((_lengths(file.find(roles["q"]), file.find(roles["k"]), layout), declared))
        if _mask_name(file, name) is not None:
            return False
    return all(one == told[0] for one in told)


def _without_softmax(declared: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in declared.items() if name not in SOFTMAX}


def _mask_name(file: TensorFile, group: str) -> str | None:
    """The name of the mask that a bundle holds for a group."""
    prefixes = (f"{group}.", f"{group}/") if group else ("",)
    for header in file.headers:
        for prefix in prefixes:
            if header.name is not None and header.name.removeprefix(prefix) in MASK_NAMES:
                return header.name
    return None


def _lengths(q: TensorHeader, k: TensorHeader, layout: Layout) -> dict[str, int]:
    """B, H, S_q and S_k from two shapes, of arrays that take no memory."""
    of_q, of_k = (
        to_bhsd(np.broadcast_to(np.float32(0), header.shape), role, layout, 1).shape
        for role, header in (("q", q), ("k", k))
    )
    found = {"batch": of_q[0], "heads": of_q[1], "q_len": of_q[2], "k_len": of_k[2]}
    if layout is Layout.BSH:
        del found["heads"]  # how many are packed is for --heads to say
    return found


def _described(file: TensorFile, header: TensorHeader) -> dict[str, Any]:
    named = file.source if header.name is None else f"{file.source}::{header.name}"
    return {"source": named, "shape": list(header.shape), "dtype": header.dtype}
