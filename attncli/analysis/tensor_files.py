"""Q, K and V in files, or weights, by their headers: which tensor of which file is what.

Needs no torch, and reads no data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from attncli.analysis.options import ROLES
from attncli.attention.options import OPTIONS, Kind
from attncli.errors import AttncliError, DataError, ResourceError, UsageError
from attncli.files.reader import join, open_all, open_file
from attncli.files.roles import fits, groups_of, is_spread, names_asked, split_name
from attncli.files.tensor import StoredTensor, TensorFile, TensorHeader
from attncli.files.text import listed, place, shown
from attncli.ranks import alone

Loaded = TypeVar("Loaded")

# In metadata: what holds for every group that does not say otherwise, and tokens.
ALL_GROUPS, LABELS = "*", "labels"
# Which of the labels is that of the group's first key, where a cache has grown or let go of some.
LABELS_FROM = "labels_from"
# That tensors are (B, H, S, d), of which no shape makes doubt then.
LAYOUT = "layout"
# Options that a tensor may be the value of, and other names of such tensors.
_ARRAYS = (Kind.ARRAY, Kind.IDS, Kind.LOGITS, Kind.MARKS)
FROM_FILES = {name for name, told in OPTIONS.items() if told.kind in _ARRAYS}
ALIASES = {
    "attn_mask": ("attn_mask", "attention_mask", "mask"),
    "sinks": ("sinks", "sink", "attn_sinks", "attention_sinks", "s_aux"),
}
# What weights are called in dumps: `attentions` of transformers, `hook_pattern` of TransformerLens.
NAMED = re.compile(
    r"(^|[._/])(\w*attentions|(\w+_)?attn|attention|(\w+_)?weights|(\w+_)?(probs|pattern))"
    r"([._/]\d+)*$",
    re.IGNORECASE,
)
LAYERED = 5  # axes: layer, B, H, S_q, S_k

Labels = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class HeldTensor:
    """A tensor of a bundle that is the value of an option, not read yet."""

    file: TensorFile = field(compare=False)  # the bundle
    name: str  # of the tensor

    @property
    def source(self) -> str:
        """The bundle and the name."""
        return f"{self.file.source}::{self.name}"

    def read(self) -> StoredTensor:
        """The tensor, mapped into memory where the format allows it."""
        return self.file.read(self.name)


@dataclass(frozen=True, slots=True, eq=False)
class FileGroup:
    """Tensors that belong together, not read yet."""

    source: str | None  # the file they are in; None for files of one tensor each
    name: str  # the group's name in its file; "" for none
    # "q", "k", "v", those that are there, or "weights" → file and header.
    roles: dict[str, tuple[TensorFile, TensorHeader]]
    # Options that the bundle declares for this group, by their names: in its metadata, for all
    # groups or this one, and as tensors of the group or of the bundle.
    declared: dict[str, Any] = field(default_factory=dict)
    # A token per position, one row of them for all batches or one per batch; None for none.
    labels: Labels | None = None
    warns: bool = True  # whether it speaks for its files: of a bundle the first group does
    # Which of the first axis of its tensors; None where there is none of layers.
    layer: int | None = None

    @property
    def place(self) -> str:
        """Its file and name, for messages."""
        return f"{self.source}, group {self.name}" if self.name else str(self.source)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the reader of the results should know of the files; reading may add to it."""
        files = {id(file): file for file, _ in self.roles.values() if self.warns}
        return tuple(text for file in files.values() for text in file.warnings)

    def read(self, role: str) -> StoredTensor:
        """The tensor that plays a role, of its layer alone."""
        file, header = self.roles[role]
        whole = file.read(header.name)
        if self.layer is None:
            return whole
        return replace(whole, source=f"{whole.source}[{self.layer}]", array=whole.array[self.layer])


def of_sound_files(
    files: Sequence[str], load: Callable[[list[str]], Loaded], faults: list[AttncliError]
) -> Loaded:
    """What is loaded from several files, without those that alone cannot be.

    Args:
        files: of which each may stand for itself.
        load: loads some of them.
        faults: is given what is wrong with each that is left out.

    Raises:
        AttncliError: there is one file alone, or they do not stand for themselves, or none can be
            loaded.
    """
    try:
        with alone() if len(files) > 1 else nullcontext():  # else each rank may leave out others
            return load(list(files))
    except (DataError, ResourceError) as error:
        sound = []
        for file in files if len(files) > 1 else ():
            try:
                with alone():
                    load([file])
                sound.append(file)
            except UsageError:
                raise error from None
            except (DataError, ResourceError) as fault:
                told = "" if shown(file) in fault.where else f"{place(file)}, "
                faults.append(type(fault)(told + fault.where, fault.problem, fault.advice))
        if not sound:
            faults.clear()
            raise
    with alone():
        return load(sound)


def groups_in(names: Sequence[str], wanted: Sequence[str]) -> list[FileGroup]:
    """The groups of every bundle, or one group of files with a tensor each.

    Args:
        names: FILE or FILE::NAME, Q, K and V in this order, or bundles.
        wanted: the groups of bundles, in this order; empty for all.

    Raises:
        UsageError: bundles beside files of one tensor each, or more than three of those.
        DataError: files that cannot be opened or do not hold what they should.
    """
    files = [
        (file, name)
        for source, name in map(split_name, names)
        for file in (open_all(source) if name is None else [open_file(source)])
    ]
    several = len(files) > len(ROLES)
    several |= any(name is None and len(file.headers) > 1 for file, name in files)
    single = [file for file, name in files if name is not None or _is_alone(file, several)]
    if single and len(single) < len(files):
        raise UsageError(
            single[0].source,
            "expected either bundles or files of one tensor each, got both",
            "name tensors one by one as FILE::NAME",
        )
    if len(single) > len(ROLES):
        raise UsageError("FILE", f"expected q, k and v, got {len(single)} files of one tensor each")
    if single:
        roles = {}
        for role, (file, name) in zip(ROLES, files, strict=False):
            header = file.find(name)
            roles[role] = file, header
            said = [one for one in ROLES if fits(header.name or "", one)]
            if name is None and said not in ([], [role]):
                told = f"{place(file.source)}: {shown(str(header.name), 80)} is taken as {role}"
                file.warnings.append(f"{told}: files are Q, K and V in this order")
        return [FileGroup(None, "", roles)]
    opened = [file for file, _ in files]
    whole = _put_together(opened)
    if whole is None:
        return [group for file in opened for group in _in_bundle(file, wanted)]
    return [
        replace(group, source=whole.holders[group.roles["q"][1].name].source)
        for group in _in_bundle(whole, wanted)
    ]


def _is_alone(file: TensorFile, several: bool) -> bool:
    """Whether a file is that of one tensor; beside bundles it may be a shard like them."""
    (first, *others) = file.headers
    lacking = any(fits(name, role) for name in file.others for role in ROLES)
    return not others and not lacking and not (several and first.name is not None)


def _put_together(files: list[TensorFile]) -> TensorFile | None:
    """The bundles as one, if a group has its tensors in several of them."""
    if len(files) < 2:
        return None
    try:
        whole = join(", ".join(file.source for file in files), files)
        return whole if is_spread(whole) else None
    except DataError:  # the same names in several of them, so each stands for itself
        return None


def _in_bundle(file: TensorFile, wanted: Sequence[str]) -> list[FileGroup]:
    groups: list[FileGroup] = []
    for name, roles in groups_of(file, wanted).items():
        found = {role: (file, file.find(one)) for role, one in roles.items() if one is not None}
        declared, labels = declared_in(file, name, found["k"][1].shape[-2:-1])
        group = FileGroup(file.source, name, found, declared, labels, warns=not groups)
        groups.append(_with_padding(group))
    return groups


def declared_in(
    file: TensorFile, group: str, k_len: Sequence[int] = ()
) -> tuple[dict[str, Any], Labels | None]:
    """Options and token labels that a file declares for a group; None for no labels.

    What metadata say of the group counts before its own tensors, and these before what holds for
    all groups. Labels may be the name of another entry that says them, and of a longer text, if the
    group says which of them is that of its first key.

    Args:
        file: the bundle.
        group: its name.
        k_len: S_k alone; nothing where it is not known.

    Raises:
        DataError: labels that are no list, or the name of a tensor that is not there.
    """
    own = (_held(file, group) if group else {}) | _declared(file, group)
    declared = _held(file, "") | _declared(file, ALL_GROUPS) | own
    labels, first = declared.pop(LABELS, None), declared.pop(LABELS_FROM, None)
    if isinstance(labels, str) and labels in file.metadata:  # said once, in an entry of that name
        labels = file.metadata[labels].get(LABELS)
    rows = _labels(labels, file)
    if rows is not None and isinstance(first, int) and k_len:
        rows = tuple(row[first : first + k_len[0]] for row in rows)
    return declared, rows


def _declared(file: TensorFile, group: str) -> dict[str, Any]:
    """What the metadata say of a group; names of tensors as the tensors themselves."""
    said = dict(file.metadata.get(group, {}))
    for option in FROM_FILES & said.keys():
        if isinstance(said[option], str):
            file.find(said[option])
            said[option] = HeldTensor(file, said[option])
    return said


def _held(file: TensorFile, group: str) -> dict[str, Any]:
    """The tensors of a group that are named like an option."""
    names = {header.name for header in file.headers}
    prefixes = (f"{group}_", f"{group}.", f"{group}/") if group else ("",)
    return {
        option: HeldTensor(file, prefix + name)
        for prefix in prefixes
        for option in FROM_FILES
        for name in reversed(ALIASES.get(option, (option,)))
        if prefix + name in names
    }


def _with_padding(group: FileGroup) -> FileGroup:
    """A mask (B, S_k) of a tokenizer, which cannot be (S_q, S_k), as the padding that it is."""
    mask = group.declared.get("attn_mask")
    if not isinstance(mask, HeldTensor) or mask.name.endswith("attn_mask"):
        return group
    shape, (of_q, of_k) = mask.file.find(mask.name).shape, (group.roles[r][1].shape for r in "qk")
    if len(shape) != 2 or len(of_q) < 3 or shape[0] != of_q[0] or len(of_q) != len(of_k):
        return group
    queries = {of_q[axis] for axis in range(1, len(of_q) - 1) if of_k[axis] == shape[1]}
    if not queries or shape[0] in {1} | queries:
        return group
    said = f"{mask.source} is taken as key padding (B, S_k); named attn_mask it would be a mask"
    if said not in mask.file.warnings:
        mask.file.warnings.append(said)
    declared = {name: value for name, value in group.declared.items() if name != "attn_mask"}
    return replace(group, declared={"key_padding": mask} | declared)


def _labels(given: Any, file: TensorFile) -> Labels | None:
    """A token per position, for all batches or for each.

    Raises:
        DataError: something else.
    """
    if given is None:
        return None
    rows = given if isinstance(given, list) and given and isinstance(given[0], list) else [given]
    for row in rows:
        if not isinstance(row, list):
            got = type(row).__name__
            raise DataError(file.source, f"expected labels to be a list, got {got}")
    return tuple(tuple(map(str, row)) for row in rows)


def weights_in(names: Sequence[str], wanted: Sequence[str]) -> list[FileGroup]:
    """The groups of files of weights, which is their one role, in the order of the files.

    Args:
        names: FILE, of which all tensors are weights or those called so, or FILE::NAME.
        wanted: groups, as for `names_asked`; empty for all.

    Raises:
        DataError: a file that cannot be opened, or holds nothing like weights.
        UsageError: a group that there is not.
    """
    found = [group for spec in names for group in _weights_in_file(*split_name(spec))]
    asked = names_asked(wanted, {group.name for group in found})
    for name in asked:
        if all(group.name != name for group in found):
            known = listed(group.name or '""' for group in found)
            raise UsageError("«group»", f"expected some of {known}, got {name!r}")
    if asked:
        found = [group for name in asked for group in found if group.name == name]
    sources = [group.source for group in found]
    return [
        replace(group, warns=group.source not in sources[:place])
        for place, group in enumerate(found)
    ]


def _weights_in_file(source: str, name: str | None) -> Iterator[FileGroup]:
    """A group for each tensor, or for each of its layers."""
    file = open_file(source)
    several = len(file.headers) > 1
    for header in _headers_of_weights(file, name):
        own = (header.name or "") if several else ""
        layers = range(header.shape[0]) if len(header.shape) == LAYERED else (None,)
        for layer in layers:
            group = own if layer is None else ".".join(filter(None, (own, f"layers.{layer}")))
            declared, labels = declared_in(file, group)
            roles = {"weights": (file, header)}
            yield FileGroup(file.source, group, roles, declared, labels, layer=layer)


def _headers_of_weights(file: TensorFile, name: str | None) -> list[TensorHeader]:
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
