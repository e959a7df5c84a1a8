"""From the input options to groups of Q, K and V, in whatever way they were given."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attncli.analysis.needs import random_shape, require_drawn
from attncli.analysis.options import (
    BIASES,
    PROJECTION_OPTIONS,
    RANDOM_OPTIONS,
    RANDOM_OR_PACKED,
    ROLES,
    FileOptions,
    InputOptions,
    given_of,
    refuse_beside_weights,
    refuse_inputs,
)
from attncli.analysis.tensor_files import (
    LAYOUT,
    FileGroup,
    Labels,
    declared_in,
    groups_in,
    weights_in,
)
from attncli.attention import qkv
from attncli.attention.nonfinite import find_broken, refuse_nonfinite
from attncli.attention.options import Layout, WeightsLayout
from attncli.attention.sizes import RandomShape, axes_text, layout_doubts
from attncli.attention.steps import OutputProjection
from attncli.errors import DataError, UsageError, nearest
from attncli.files.reader import open_file
from attncli.files.roles import fits, names_asked, read_one, split_name, usual_layout
from attncli.files.tensor import doubts
from attncli.files.text import listed, place, shown
from attncli.files.torch_tensors import as_torch, torch_dtype


@dataclass(frozen=True, slots=True)
class Group:
    """Q, K and V that belong together, as they came."""

    # The file they came from, "example" or "random"; None where there are several.
    source: str | None
    name: str  # the group's name in its bundle; "" for none
    # "q", "k" and where given "v", in the rank and dtype they came in.
    tensors: dict[str, torch.Tensor]
    described: dict[str, dict[str, Any]]  # the `inputs` of the record: role → source, shape, dtype
    # Options that the bundle declares for this group, by their names.
    declared: dict[str, Any] = field(default_factory=dict)
    # A token per position, one row of them for all batches or one per batch; None for none.
    labels: Labels | None = None
    seed: int | None = None  # what random tensors were drawn from; None for others
    output_projection: OutputProjection | None = None  # where W_O is given
    warnings: tuple[str, ...] = ()  # what the reader of the results should know

    @property
    def source_name(self) -> str:
        """One name for where the group came from: its file, or that of its queries or of X."""
        if self.source is not None:
            return self.source
        named = [self.described[role] for role in ("q", "qkv", "x") if role in self.described]
        return str((named or list(self.described.values()))[0]["source"])

    @property
    def place(self) -> str:
        """Its file and name, for messages."""
        return f"{self.source_name}, group {self.name}" if self.name else self.source_name

    @property
    def is_projected(self) -> bool:
        """Whether Q, K and V were computed from X."""
        return "x" in self.described

    @property
    def declared_heads(self) -> int | None:
        """H, where the bundle says that its tensors are (B, H, S, d); None elsewhere."""
        q = self.tensors["q"]
        says = self.declared.get(LAYOUT) == Layout.BHSD and q.ndim == 4
        return q.shape[1] if says else None

    @property
    def is_laid_out(self) -> bool:
        """Whether Q, K and V are (B, H, S, d), whatever the order of what they came from."""
        return self.is_projected or "qkv" in self.described or self.source == "random"


def load_groups(options: FileOptions, *, example: bool = False) -> list[Group]:
    """Load, project or draw the tensors that the input options name.

    Args:
        options: as the user gave them.
        example: whether nothing given means the embedded example, not random tensors.

    Raises:
        UsageError: options that exclude each other or lack a partner.
        DataError: files that cannot be read or do not hold what they should.
    """
    refuse_inputs(options)
    named, projecting = given_of(options, ROLES), given_of(options, PROJECTION_OPTIONS)
    if projecting:
        return [_projected(options, projecting)]
    if options.qkv is not None:
        return _fused(options, options.qkv)
    if not options.files and not named:
        assert isinstance(options, InputOptions)  # others are refused without files
        return [_made_up(options, example)]
    if options.files:
        found = groups_in(options.files, options.group or [])
        if options.layout is Layout.BHSD and options.heads is None:
            _doubt_layout(found)
        groups = [read_group(group, options.dtype) for group in found]
    else:
        groups = [Group(None, "", {}, {})]
    if named:
        groups = [_with_named(groups, named, options.dtype)]
    if options.group and not (options.files and any(group.name for group in groups)):
        raise UsageError("«group»", "expected a bundle with groups, got tensors without any")
    return [_complete(group) for group in groups]


def load_weights(options: FileOptions, names: Sequence[str]) -> list[Group]:
    """Attention weights without Q and K: a group for each layer, with the one role "weights".

    Args:
        options: groups and dtype; its files are more of the same.
        names: FILE or FILE::NAME.

    Raises:
        UsageError: options of Q, K and V.
        DataError: files that cannot be read or hold no weights.
    """
    refuse_beside_weights(options)
    found = weights_in([*names, *(options.files or [])], options.group or [])
    return [read_group(group, options.dtype) for group in found]


def _doubt_layout(groups: Sequence[FileGroup]) -> None:
    """Let files say where the names of their tensors stand for another layout than bhsd."""
    for group in groups:
        shapes = {role: header.shape for role, (_, header) in group.roles.items()}
        file, q = group.roles["q"]
        usual = usual_layout(q.name or "", len(q.shape))
        if usual is None or "k" not in shapes or layout_doubts(shapes, Layout.BHSD):
            continue
        last, axes = re.split("[./]", str(q.name))[-1], axes_text(Layout(usual))
        words = f"«layout={usual}»" + (" with «heads»" if usual == "bsh" else "")
        said = f"{place(file.source)}: {shown(last, 80)} is {axes} as a rule, which {words} reads"
        if said not in file.warnings:
            file.warnings.append(said)


def read_tensor(
    spec: str, option: str, dtype: str | None = None, role: str | None = None
) -> tuple[torch.Tensor, list[str]]:
    """One tensor from FILE or FILE::NAME, with warnings about the file; arguments of `read_one`."""
    stored, warnings = read_one(spec, option, role)
    return as_torch(stored, dtype), [*warnings, *doubts(stored, dtype)]


def _made_up(options: InputOptions, example: bool) -> Group:
    """The embedded example, or random tensors where any of their options is given."""
    if example and not given_of(options, (*RANDOM_OPTIONS, *RANDOM_OR_PACKED)):
        kind = torch_dtype(options.dtype or "float64")
        cast = (tensor.to(kind) for tensor in qkv.example())
        return _described_group("example", dict(zip(ROLES, cast, strict=True)))
    shape = random_shape(options) or RandomShape()
    require_drawn(shape)
    seed = options.seed or 0
    drawn = qkv.draw(shape, seed, torch_dtype(options.dtype or "float32"))
    return _described_group("random", dict(zip(ROLES, drawn, strict=True)), seed=seed)


def _described_group(
    source: str, tensors: dict[str, torch.Tensor], seed: int | None = None
) -> Group:
    described = {role: describe(source, tensor) for role, tensor in tensors.items()}
    return Group(source, "", tensors, described, seed=seed)


def describe(source: str, tensor: torch.Tensor) -> dict[str, Any]:
    """What a record says of an input."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"source": source, "shape": list(tensor.shape), "dtype": dtype}


def read_group(group: FileGroup, dtype: str | None = None) -> Group:
    """The tensors of files, cast where a dtype is asked for."""
    tensors, described, own = {}, {}, []
    for role, (file, _) in group.roles.items():
        stored = group.read(role)
        tensors[role] = as_torch(stored, dtype)
        described[role] = describe(stored.source, tensors[role])
        new = [text for text in doubts(stored, dtype) if text not in file.warnings]
        file.warnings.extend(new)
        own += new
    return Group(
        group.source,
        group.name,
        tensors,
        described,
        declared=group.declared,
        labels=group.labels,
        warnings=group.warnings if group.warns else tuple(own),
    )


def _read_named(
    named: dict[str, str], dtype: str | None
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]], list[str]]:
    """The tensors that options name, what a record says of each, and warnings."""
    tensors, described, warnings = {}, {}, []
    for name, spec in named.items():
        tensors[name], said = read_tensor(spec, f"«{name}»", dtype)
        described[name] = describe(spec, tensors[name])
        warnings += said
    return tensors, described, warnings


def _with_named(groups: list[Group], named: dict[str, str], dtype: str | None) -> Group:
    """A group in which q, k and v of their own fill or replace roles."""
    if len(groups) > 1:
        problem = f"expected one group to put it into, got {len(groups)}"
        raise UsageError(f"«{next(iter(named))}»", problem, "choose with «group»")
    tensors, described, warnings = _read_named(named, dtype)
    return replace(
        groups[0],
        tensors=groups[0].tensors | tensors,
        described=groups[0].described | described,
        warnings=(*groups[0].warnings, *warnings),
    )


def _complete(group: Group) -> Group:
    """The group, if it has both queries and keys."""
    for role in ("q", "k"):
        if role not in group.tensors:
            got = ", ".join(group.tensors)
            advice = f"if Q, K and V are fused in one: «qkv={group.source_name}»"
            if role == "k" and group.tensors["q"].shape[-1:] == group.tensors["q"].shape[-2:-1]:
                advice += f"; attention weights alone are for entropy «weights={group.source_name}»"
            problem = f"expected q and k, got only {got}"
            raise UsageError(f"«{role}»", problem, advice if role == "k" else "")
    return group


def _fused(options: FileOptions, spec: str) -> list[Group]:
    """Q, K and V split from one tensor, or from every such tensor of a bundle."""
    source, name = split_name(spec)
    file = open_file(source)
    specs = {"": spec}
    if name is None and len(file.headers) > 1:
        names = [str(one.name) for one in file.headers if fits(str(one.name), "qkv")]
        specs = {re.sub(r"[./]?[^./]*$", "", one): f"{source}::{one}" for one in names}
    if options.group and "" in specs:
        raise UsageError("«group»", "expected a bundle with groups, got tensors without any")
    groups = []
    for group in names_asked(options.group or (), specs) or specs or [""]:
        if specs and group not in specs:
            got = f"expected one of {listed(specs)}, got {shown(group, 80)}"
            raise DataError("«group»", got, nearest(group, specs))
        whole = specs.get(group, spec)
        tensor, warnings = read_tensor(whole, "«qkv»", options.dtype)
        split = qkv.split_fused(tensor, options.layout, options.heads, options.kv_heads)
        warnings += split[1]
        if tensor.ndim < 4 and whole.lower().endswith("query_key_value"):
            warnings.append(
                f"{whole} is split as all of Q, then of K, then of V; models that name it so keep "
                "those of each head together: then reshape it to (B, S, H, 3, d)"
            )
        declared, labels = declared_in(file, group) if name is None else ({}, None)
        described = {"qkv": describe(whole, tensor)}
        groups.append(
            Group(source, group, split[0], described, declared, labels, warnings=(*warnings,))
        )
    return groups


def _projected(options: FileOptions, projecting: dict[str, str]) -> Group:
    """Q, K and V projected from X by weight files."""
    loaded, described, warnings = _read_named(projecting, options.dtype)
    for name, tensor in loaded.items():
        warnings += _broken_source(name, projecting[name], tensor, options.allow_nonfinite)
    out_in = options.weights_layout is WeightsLayout.OUT_IN
    weights = {
        name: weight.mT if out_in and weight.ndim == 2 else weight
        for name, weight in loaded.items()
        if name.startswith("w")
    }
    heads = options.heads or 1
    for names in (("wq", "wk", "wv"), ("bq", "bk", "bv")):
        given = {name: (loaded | weights).get(name) for name in names}
        parts = _parts_of_one(options, given, loaded["x"].shape[-1], heads)
        if parts:
            told = ", ".join(f"«{name}»" for name in parts)
            warnings.append(f"{told} name one tensor: Q, K and V are its parts, in this order")
        weights |= {name: part for name, part in parts.items() if name in weights}
        loaded |= parts
    for bias, name in BIASES.items():
        if bias in loaded and loaded[bias].shape != weights[name].shape[1:]:
            width = tuple(weights[name].shape[1:])
            problem = f"expected {width} like the columns of «{name}», got "
            raise DataError(f"«{bias}»", problem + str(tuple(loaded[bias].shape)))
    wo, bo = weights.pop("wo", None), loaded.pop("bo", None)
    biases = {BIASES[name]: bias for name, bias in loaded.items() if name in BIASES}
    tensors = qkv.project(loaded["x"], weights, heads, options.kv_heads or heads, biases)
    group = Group(None, "", tensors, described, warnings=tuple(warnings))
    if wo is None:
        return group
    packed = heads * tensors["v"].shape[-1]
    return replace(group, output_projection=_output_projection(wo, bo, packed))


def _broken_source(name: str, spec: str, tensor: torch.Tensor, allowed: bool) -> list[str]:
    """What to say of NaN and infinities in what Q, K and V are projected from.

    Raises:
        DataError: there are some, and none are allowed.
    """
    rows = tensor[(None,) * max(0, 2 - tensor.ndim)]  # a bias is one
    if not allowed:
        refuse_nonfinite(rows, f"«{name}» ({spec})")
    found = find_broken(rows, name)
    return [] if found is None else [f"{found.entry}, before the projection"]


def _parts_of_one(
    options: FileOptions, given: dict[str, torch.Tensor | None], width: int, heads: int
) -> dict[str, torch.Tensor]:
    """The columns of each projection where several name the fused one of Q, K and V.

    `in_proj_weight` of nn.MultiheadAttention is one, and `c_attn` of GPT-2.
    """
    names = list(given)
    same = [name for name in names if getattr(options, name) == getattr(options, names[0])]
    whole = given[names[0]]
    kv_width = width * (options.kv_heads or heads) // heads
    if len(same) < 2 or whole is None or whole.ndim < 1 or whole.shape[-1] != width + 2 * kv_width:
        return {}
    parts = dict(zip(names, torch.split(whole, [width, kv_width, kv_width], -1), strict=True))
    return {name: parts[name] for name in same}


def _output_projection(
    weight: torch.Tensor, bias: torch.Tensor | None, width: int
) -> OutputProjection:
    if weight.ndim != 2 or weight.shape[0] != width:
        problem = f"expected (H·d_v, d) with H·d_v={width}, got {tuple(weight.shape)}"
        advice = "«weights_layout=out-in» takes the weight of an nn.Linear"
        raise DataError("«wo»", problem, advice)
    return OutputProjection(weight, bias)
