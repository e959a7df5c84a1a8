"""Several files that are one bundle: shards, as writers with a limit of size leave them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from numpy.typing import NDArray

from attncli.errors import DataError
from attncli.files.container import TensorFile
from attncli.files.tensor import TensorHeader
from attncli.files.text import place, shown

_MAP = "weight_map"
_LARGEST_INDEX = 100_000_000


def is_index(local: Path) -> bool:
    """Whether a file that begins like JSON says which tensor lies in which shard."""
    if local.stat().st_size > _LARGEST_INDEX:
        return False
    parsed = _parsed(local.read_bytes())
    return isinstance(parsed, dict) and _MAP in parsed


def open_index(local: Path, source: str, open_shard: Callable[[str], TensorFile]) -> TensorFile:
    """Open all shards that an index names, as one bundle; they lie beside it.

    Args:
        local: `model.safetensors.index.json`, or the same for another format.
        source: the index as the user named it.
        open_shard: opens a file of tensors by its name.

    Raises:
        DataError: the index is damaged, or a shard is absent, damaged or holds something else.
    """
    where, folder = place(source), Path() if source == "-" else Path(source).parent
    shard_of = _parsed(local.read_bytes())[_MAP]
    named = isinstance(shard_of, dict) and all(map(_lies_beside, shard_of.values()))
    if not shard_of or not named:
        raise DataError(where, f"expected {_MAP} as tensor → shard beside the index, got another")
    files = []
    for shard in dict.fromkeys(shard_of.values()):
        try:
            file = open_shard(str(folder / shard))
        except DataError as error:
            raise DataError(f"{where}, {error.where}", error.problem, error.advice) from None
        absent = {name for name, one in shard_of.items() if one == shard} - {
            header.name for header in file.headers
        }
        for name in sorted(absent):
            problem = f"expected {shown(name, 80)} as the index says, got none"
            raise DataError(f"{where}, {place(file.source)}", problem)
        files.append(file)
    return join(source, files)


def join(source: str, files: Sequence[TensorFile]) -> TensorFile:
    """One bundle of the tensors of several files.

    Args:
        source: what messages call it.
        files: opened files.

    Raises:
        DataError: two files hold tensors of one name.
    """
    holders: dict[str | None, TensorFile] = {}
    metadata: dict[str, Any] = {}
    for file in files:
        for header in file.headers:
            if header.name in holders:
                name = shown(str(header.name), 80)
                raise DataError(place(source), f"expected each name once, got {name} twice")
            holders[header.name] = file
        for group, options in file.metadata.items():
            metadata[group] = metadata.get(group, {}) | options

    def load(header: TensorHeader, where: str) -> NDArray[Any]:
        return holders[header.name].load(header, where)

    return TensorFile(
        source,
        files[0].format,
        tuple(header for file in files for header in file.headers),
        load,
        metadata,
        warnings=[text for file in files for text in file.warnings],
        holders=holders,
    )


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _lies_beside(shard: object) -> bool:
    if not isinstance(shard, str) or not shard or "\0" in shard:
        return False
    path = PurePosixPath(shard)
    return not path.is_absolute() and ".." not in path.parts
