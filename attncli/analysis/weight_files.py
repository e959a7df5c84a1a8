"""Attention weights in files: a tensor is a group, or one for each layer that its first axis has.

Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from attncli.analysis.tensor_files import Labels, declared_in
from attncli.errors import DataError, UsageError
from attncli.files.reader import open_file
from attncli.files.roles import names_asked, split_name
from attncli.files.tensor import StoredTensor, TensorFile, TensorHeader
from attncli.files.text import listed

# What weights are called in dumps: `attentions` of transformers, `hook_pattern` of TransformerLens.
NAMED = re.compile(
    r"(^|[._/])(\w*attentions|(\w+_)?attn|attention|(\w+_)?weights|(\w+_)?(probs|pattern))"
    r"([._/]\d+)*$",
    re.IGNORECASE,
)
LAYERED = 5  # axes: layer, B, H, S_q, S_k


@dataclass(frozen=True, slots=True)
class WeightsGroup:
    """Weights of one layer, not read yet.

    Attributes:
        file, header: where they are.
        layer: which of the first axis; None where there is none of layers.
        name: the group's name; "" for none.
        declared: options that the bundle declares for this group, by their names.
        labels: a token per position, one row of them for all batches or one per batch; None for
            none.
    """

    file: TensorFile
    header: TensorHeader
    layer: int | None = None
    name: str = ""
    declared: dict[str, Any] = field(default_factory=dict)
    labels: Labels | None = None

    @property
    def place(self) -> str:
        """Its file and name, for messages."""
        return f"{self.file.source}, group {self.name}" if self.name else self.file.source

    def read(self) -> StoredTensor:
        """The tensor, of its layer alone."""
        whole = self.file.read(self.header.name)
        if self.layer is None:
            return whole
        source = f"{whole.source}[{self.layer}]"
        return replace(whole, source=source, array=whole.array[self.layer])


def weights_in(names: Sequence[str], wanted: Sequence[str]) -> list[WeightsGroup]:
    """The groups of files of weights, in the order of the files and of what these hold.

    Args:
        names: FILE, of which all tensors are weights or those called so, or FILE::NAME.
        wanted: groups, as for `names_asked`; empty for all.

    Raises:
        DataError: a file that cannot be opened, or holds nothing like weights.
        UsageError: a group that there is not.
    """
    found = [group for spec in names for group in _in_file(*split_name(spec))]
    asked = names_asked(wanted, {group.name for group in found})
    if not asked:
        return found
    chosen = []
    for name in asked:
        named = [group for group in found if group.name == name]
        if not named:
            known = listed(group.name or '""' for group in found)
            raise UsageError("«group»", f"expected some of {known}, got {name!r}")
        chosen += named
    return chosen


def _in_file(source: str, name: str | None) -> Iterator[WeightsGroup]:
    file = open_file(source)
    several = len(file.headers) > 1
    for header in _headers(file, name):
        own = header.name or ""
        if len(header.shape) == LAYERED:
            prefix = f"{own}." if several else ""
            for layer in range(header.shape[0]):
                group = f"{prefix}layers.{layer}"
                yield WeightsGroup(file, header, layer, group, *declared_in(file, group))
        else:
            group = own if several else ""
            yield WeightsGroup(file, header, None, group, *declared_in(file, group))


def _headers(file: TensorFile, name: str | None) -> list[TensorHeader]:
    """The tensor of that name, or those below it; else what is called weights, or all."""
    if name is not None:
        below = [h for h in file.headers if h.name and h.name.startswith(f"{name}.")]
        there = any(header.name == name for header in file.headers)
        return below if below and not there else [file.find(name)]
    named = [header for header in file.headers if header.name and NAMED.search(header.name)]
    chosen = named or list(file.headers)
    fitting = [header for header in chosen if 2 <= len(header.shape) <= LAYERED]
    if not fitting:
        shapes = listed(f"{header.name or 'one tensor'} {header.shape}" for header in chosen)
        raise DataError(file.source, f"expected weights (B, H, S_q, S_k), got {shapes}")
    left = [header.name for header in file.headers if header not in fitting]
    if left:
        text = f"{file.source}: left out as no weights: {listed(map(str, left))}"
        if text not in file.warnings:
            file.warnings.append(text)
    return fitting
