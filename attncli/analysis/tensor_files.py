"""Q, K and V in files, by their headers: which tensor of which file plays which role.

Needs no torch, and reads no data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from attncli.errors import DataError, UsageError
from attncli.files.container import TensorFile
from attncli.files.reader import open_file
from attncli.files.roles import groups_of, split_name
from attncli.files.tensor import TensorHeader

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
    single = [file for file, name in files if name is not None or len(file.headers) == 1]
    if single and len(single) < len(files):
        raise UsageError(
            single[0].source,
            "expected either bundles or files of one tensor each, got both",
            "name tensors one by one as FILE::NAME",
        )
    if len(single) > len(ROLES):
        raise UsageError("FILE", f"expected q, k and v, got {len(single)} files of one tensor each")
    if single:
        named = zip(ROLES, files, strict=False)
        return [FileGroup(None, "", {role: (f, f.find(name)) for role, (f, name) in named})]
    return [group for file, _ in files for group in _in_bundle(file, wanted)]


def _in_bundle(file: TensorFile, wanted: Sequence[str]) -> list[FileGroup]:
    groups: list[FileGroup] = []
    for name, roles in groups_of(file, wanted).items():
        declared = dict(file.metadata.get(name, {}))
        labels = declared.pop("labels", None)
        if labels is not None and not isinstance(labels, list):
            got = type(labels).__name__
            raise DataError(file.source, f"expected labels to be a list, got {got}")
        groups.append(
            FileGroup(
                file.source,
                name,
                {role: (file, file.find(one)) for role, one in roles.items() if one is not None},
                declared,
                None if labels is None else tuple(map(str, labels)),
                warns=not groups,
            )
        )
    return groups
