"""How long the axes of a mask are: said, or read from tensors, masks and padding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attncli.attention.options import Layout
from attncli.errors import DataError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from attncli.analysis.options import AttentionWords
    from attncli.attention.options import AttentionOptions
    from attncli.attention.sizes import Sizes
    from attncli.cli.mask import MaskOptions
    from attncli.files.container import TensorFile
    from attncli.files.tensor import TensorHeader

DEFAULT_LENGTH = 8
MASK_NAMES = ("attn_mask", "attention_mask", "mask")


@dataclass(frozen=True, slots=True)
class Sized:
    """What the files say.

    Attributes:
        lengths: "batch", "heads", "q_len", "k_len" of Q and K; empty without files.
        described: role → source, shape, dtype.
        declared: options that a bundle declares for the group.
        labels: a token per position; None for none.
        mask: a mask that the bundle holds for the group; None for none.
        mask_source: its file and name.
        queries, keys: file and tensor name of Q and K, for --effect.
        implied: lengths that a file of scores has, where nothing else says them.
        warnings: what the reader of the results should know.
    """

    lengths: dict[str, int] = field(default_factory=dict)
    described: dict[str, Any] = field(default_factory=dict)
    declared: dict[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] | None = None
    mask: NDArray[Any] | None = None
    mask_source: str | None = None
    queries: tuple[TensorFile, str | None] | None = None
    keys: tuple[TensorFile, str | None] | None = None
    implied: dict[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def find_sizes(chosen: MaskOptions, shape: AttentionWords) -> Sized:
    """Read the headers of the files, not their data.

    Raises:
        UsageError: files that do not say which are Q and K, or several groups.
    """
    if not chosen.files:
        if chosen.effect:
            raise UsageError("--effect", "expected files of Q and K beside it, got none")
        return Sized(implied=_of_scores(chosen.scores))
    from attncli.files.reader import open_file

    files = [open_file(name) for name in chosen.files]
    warnings = tuple(text for file in files for text in file.warnings)
    if len(files) == 1 and len(files[0].headers) > 1:
        return _of_bundle(files[0], chosen, shape, warnings)
    if len(files) not in (2, 3) or any(len(file.headers) > 1 for file in files):
        raise UsageError(
            "FILE",
            f"expected Q and K, or one bundle, got {len(files)} of one tensor each",
            f"to read a mask: attncli mask --attn-mask {chosen.files[0]}",
        )
    queries, keys = files[0], files[1]
    lengths = _lengths(queries.headers[0], keys.headers[0], chosen.layout)
    described = {
        role: _describe(file.source, file.headers[0])
        for role, file in (("q", queries), ("k", keys))
    }
    return Sized(
        lengths=lengths,
        described=described,
        queries=(queries, None),
        keys=(keys, None),
        warnings=warnings,
    )


def sizes_of(chosen: MaskOptions, options: AttentionOptions, sized: Sized) -> Sizes:
    """B, H, S_q and S_k: as said, as the files have them, as the masks need them, or 8.

    Raises:
        UsageError: a length that is said differs from that of the files.
    """
    from attncli.attention.sizes import Sizes

    implied = sized.implied | _implied(options)
    found = {}
    for name in ("batch", "heads", "q_len", "k_len"):
        said, of_files = getattr(chosen, name), sized.lengths.get(name)
        if said is not None and of_files is not None and said != of_files:
            option = "--" + name.replace("_", "-")
            raise UsageError(option, f"expected {of_files} as in the files, got {said}")
        found[name] = next(
            (value for value in (said, of_files, implied.get(name)) if value is not None), None
        )
    q_len, k_len = found["q_len"], found["k_len"]
    told = chosen.q_len is not None or "q_len" in sized.lengths or options.query_offset is not None
    if q_len == 1 and not told and options.needs_positions:
        q_len = None  # one row for all queries; how many there are, the keys say
    known = k_len if q_len is None else q_len
    length = DEFAULT_LENGTH if known is None else known
    return Sizes(
        1 if found["batch"] is None else found["batch"],
        1 if found["heads"] is None else found["heads"],
        length if q_len is None else q_len,
        length if k_len is None else k_len,
    )


def _of_scores(spec: str | None) -> dict[str, int]:
    """The lengths of a file of scores, rank 2 (S_q, S_k) to 4."""
    if spec is None:
        return {}
    from attncli.files.roles import read_one

    shape = read_one(spec, "--scores")[0].shape
    names = ("batch", "heads", "q_len", "k_len")
    return dict(zip(names[-len(shape) :], shape, strict=True)) if 2 <= len(shape) <= 4 else {}


def _implied(options: AttentionOptions) -> dict[str, int]:
    """Lengths that masks, padding and per-batch options need."""
    found: dict[str, int] = {}
    per_batch = [options.key_lengths, options.query_lengths]
    if isinstance(options.query_offset, tuple):
        per_batch.append(options.query_offset)
    for values in per_batch:
        if values is not None and len(values) > 1:
            found["batch"] = len(values)
    for array, names in (
        (options.segments, ("batch", "k_len")),
        (options.key_padding, ("batch", "k_len")),
        (options.attn_mask, ("batch", "heads", "q_len", "k_len")),
    ):
        if array is not None and 0 < array.ndim <= len(names):
            shape = zip(names[-array.ndim :], array.shape, strict=True)
            found |= {name: length for name, length in shape if length != 1 or name not in found}
    return found


def _of_bundle(
    file: TensorFile, chosen: MaskOptions, shape: AttentionWords, warnings: tuple[str, ...]
) -> Sized:
    from attncli.analysis.attention_arguments import as_array
    from attncli.files.roles import groups_of

    groups = groups_of(file, chosen.group or ())
    if len(groups) > 1 and not _alike(file, groups, chosen.layout):
        names = ", ".join(list(groups)[:8])
        raise UsageError("--group", f"expected one group, got {len(groups)}: {names}")
    name, roles = next(iter(groups.items()))
    headers = {header.name: header for header in file.headers}
    queries, keys = headers[roles["q"]], headers[roles["k"]]
    declared = dict(file.metadata.get(name, {}))
    labels = declared.pop("labels", None)
    for softmax_only in ("scale", "temperature", "softcap"):
        if not chosen.effect:
            declared.pop(softmax_only, None)
    if declared.pop("sinks", None) is not None and chosen.effect:
        warnings = (*warnings, "--effect leaves out the sinks that the bundle declares")
    if len(groups) > 1:
        said = f"the {len(groups)} groups have one mask in common; the files read are of {name}"
        warnings = (*warnings, said) if chosen.effect else warnings
    held = None if shape.attn_mask is not None else _mask_name(file, name)
    source = file.source
    return Sized(
        lengths=_lengths(queries, keys, chosen.layout),
        described={"q": _describe(source, queries), "k": _describe(source, keys)},
        declared=declared,
        labels=None if labels is None else tuple(map(str, labels)),
        mask=None if held is None else as_array(file.read(held)),
        mask_source=None if held is None else f"{source}::{held}",
        queries=(file, roles["q"]),
        keys=(file, roles["k"]),
        warnings=warnings,
    )


def _alike(file: TensorFile, groups: Iterable[str], layout: Layout) -> bool:
    """Whether all groups of a bundle have one and the same mask."""
    from attncli.files.roles import groups_of

    found = groups_of(file, list(groups))
    headers = {header.name: header for header in file.headers}
    told = []
    for name, roles in found.items():
        declared = dict(file.metadata.get(name, {}))
        for elsewhere in ("scale", "temperature", "softcap", "sinks", "labels"):
            declared.pop(elsewhere, None)
        told.append((_lengths(headers[roles["q"]], headers[roles["k"]], layout), declared))
        if _mask_name(file, name) is not None:
            return False
    return all(one == told[0] for one in told)


def _mask_name(file: TensorFile, group: str) -> str | None:
    """The name of the mask that a bundle holds for a group."""
    prefixes = (f"{group}.", f"{group}/") if group else ("",)
    for header in file.headers:
        for prefix in prefixes:
            if header.name is not None and header.name.removeprefix(prefix) in MASK_NAMES:
                return header.name
    return None


def _lengths(queries: TensorHeader, keys: TensorHeader, layout: Layout) -> dict[str, int]:
    """B, H, S_q and S_k from two shapes."""
    of_q, of_k = (_axes(header, layout) for header in (queries, keys))
    found = {"batch": of_q[0], "heads": of_q[1], "q_len": of_q[2], "k_len": of_k[2]}
    if layout is Layout.BSH:
        del found["heads"]  # how many are packed is for --heads to say
    return found


def _axes(header: TensorHeader, layout: Layout) -> tuple[int, int, int]:
    """(B, H, S) of a shape; packed heads count as one."""
    shape = header.shape
    if layout is Layout.BSH:
        whole = (1,) * (3 - len(shape)) + shape
        batch, length, heads = whole[0], whole[1], 1
    else:
        whole = (1,) * (4 - len(shape)) + shape
        batch, heads, length = whole[:3]
        if layout is Layout.BSHD and len(shape) > 2:
            heads, length = length, heads
    if not 2 <= len(shape) <= 4 or len(whole) > (3 if layout is Layout.BSH else 4):
        raise DataError(str(header.name or "FILE"), f"expected rank 2 to 4, got {shape}")
    return batch, heads, length


def _describe(source: str, header: TensorHeader) -> dict[str, Any]:
    named = source if header.name is None else f"{source}::{header.name}"
    return {"source": named, "shape": list(header.shape), "dtype": header.dtype}
