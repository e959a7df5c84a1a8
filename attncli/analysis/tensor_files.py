"""Q, K and V in files, by their headers: which tensor of which file plays which role.

Needs no torch, and reads no data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from attncli.errors import DataError, UsageError
from attncli.files.container import TensorFile
from attncli.files.names import fits
from attncli.files.reader import open_file
from attncli.files.roles import groups_of, is_spread, split_name
from attncli.files.shards import join
from attncli.files.tensor import TensorHeader
from attncli.files.text import place, shown

ROLES = ("q", "k", "v")


@dataclass(frozen=True, slots=True)
class FileGroup:
    """Tensors that belong together, not read yet.

    Attributes:
        source: the bundle they are in; None for files of one tensor each.
        name: the group's name in its bundle; "" for none.
        roles: "q", "k", "v", those that are there → file and header.
        declared: options that the bundle declares for this group, by their names.
        labels: a token per position; None for none.
        warns: whether it speaks for its files: of a bundle the first group does.
    """

    source: str | None
    name: str
    roles: dict[str, tuple[TensorFile, TensorHeader]]
    declared: dict[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] | None = None
    warns: bool = True

    @property
    def place(self) -> str:
        """Its file and name, for messages."""
        return f"{self.source}, group {self.name}" if self.name else str(self.source)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the reader of the results should know of the files; reading may add to it."""
        files = {id(file): file for file, _ in self.roles.values() if self.warns}
        return tuple(text for file in files.values() for text in file.warnings)


def groups_in(names: Sequence[str], wanted: Sequence[str]) -> list[FileGroup]:
    """The groups of every bundle, or one group of files with a tensor each.

    Args:
        names: FILE or FILE::NAME, Q, K and V in this order, or bundles.
        wanted: the groups of bundles, in this order; empty for all.

    Raises:
        UsageError: bundles beside files of one tensor each, or more than three of those.
        DataError: files that cannot be opened or do not hold what they should.
    """
    files = [(open_file(source), name) for source, name in map(split_name, names)]
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
    return not others and not (several and first.name is not None)


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
        declared, labels = declared_in(file, name)
        groups.append(
            FileGroup(
                file.source,
                name,
                {role: (file, file.find(one)) for role, one in roles.items() if one is not None},
                declared,
                labels,
                warns=not groups,
            )
        )
    return groups


def declared_in(file: TensorFile, group: str) -> tuple[dict[str, Any], tuple[str, ...] | None]:
    """Options and token labels that a file declares for a group; None for no labels.

    Raises:
        DataError: labels that are no list.
    """
    declared = dict(file.metadata.get(group, {}))
    labels = declared.pop("labels", None)
    if labels is not None and not isinstance(labels, list):
        got = type(labels).__name__
        raise DataError(file.source, f"expected labels to be a list, got {got}")
    return declared, None if labels is None else tuple(map(str, labels))
