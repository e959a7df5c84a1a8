"""A folder in the place of a file: which of its files hold tensors, and under which names."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from attncli.errors import DataError
from attncli.files.tensor import TensorFile
from attncli.files.text import natural_order, place, shown

# Of all that lies in a folder what is looked at; what it is, its bytes say.
ENDINGS = (".npy", ".npz", ".safetensors", ".pt", ".pth")
INDEX = ".index.json"
MOST_FILES = 10_000


def files_in(folder: str) -> list[str]:
    """The files of tensors of a folder in natural order, or the one index that names its shards.

    Folders within it, hidden files, and what is no regular file are left alone.

    Raises:
        DataError: it cannot be read, or holds no file of tensors, too many, or several indexes.
    """
    where = place(folder)
    try:
        with os.scandir(folder) as entries:
            names = [
                entry.name
                for entry in entries
                if entry.name.lower().endswith((*ENDINGS, INDEX))
                and not entry.name.startswith(".")
                and entry.is_file()
            ]
    except OSError as error:
        got = os.strerror(error.errno).lower() if error.errno else "an error"
        raise DataError(where, f"expected a folder that can be read, got {got}") from error
    names.sort(key=natural_order)
    indexes = [name for name in names if name.lower().endswith(INDEX)]
    if len(indexes) > 1:
        got = ", ".join(shown(name, 80) for name in indexes[:4])
        advice = f"name the one that is meant: {shown(str(Path(folder) / indexes[0]))}"
        raise DataError(where, f"expected one index of shards, got {len(indexes)}: {got}", advice)
    if not names:
        kinds = ", ".join(ENDINGS)
        advice = "folders within it are not looked at"
        raise DataError(where, f"expected files of tensors ({kinds}) in it, got none", advice)
    if len(names) > MOST_FILES:
        problem = f"expected at most {MOST_FILES:,} files of tensors in it, got {len(names):,}"
        raise DataError(where, problem, "name those that are meant")
    return [str(Path(folder) / name) for name in indexes or names]


def named_by_file(file: TensorFile) -> TensorFile:
    """A file of one tensor without a name, under that of the file: q.npy holds q."""
    (header,) = file.headers
    named = replace(header, name=Path(file.source).stem)
    return replace(file, headers=(named,), load=lambda _, where: file.load(header, where))
