"""What a shell completes beside names of options: tensors, groups, stages and words of a value.

Typer asks; of files a shell completes the names itself, so that nothing is said of these. Headers
are read alone, and of formats that take torch not even they.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from importlib import import_module
from itertools import chain
from pathlib import Path

import typer

from attncli.attention.options import Stage, Told

# Under which a context keeps the words before the one that is typed.
WORDS = "attncli.words"
BASH = "complete_bash"
ASKED = "_ATTNCLI_COMPLETE"
COLONS = "::"

Complete = Callable[..., list[str]]


def completion_of(name: str, told: Told, choices: Iterable[str] = ()) -> Complete | None:
    """What completes the values of an option, of choices; None where that is the shell's."""
    if name == "group":
        return lambda ctx, incomplete: _of_list(incomplete, _groups(ctx.meta.get(WORDS, ())))
    if name == "stage":
        return lambda incomplete: _of_list(incomplete, Stage)
    if "FILE" in (told.metavar or ""):
        return _tensors
    words = [word for word in (told.metavar or "").split("|") if re.match("[a-z]", word)]
    words = [re.sub(r"=.*|\[.*", lambda end: end[0][: end[0].startswith("=")], w) for w in words]
    words = list(map(str, choices)) or words
    return (lambda incomplete: _of_list(incomplete, words)) if len(words) > 1 else None


def join_words_of_bash() -> None:
    """Put together what bash takes apart at a sign of equality, and begin a word behind colons."""
    given, place = os.environ.get("COMP_WORDS", ""), os.environ.get("COMP_CWORD", "")
    if os.environ.get(ASKED) != BASH or not place.isdecimal():
        return
    words: list[str] = []
    for word in re.split(r"[\n ]", given)[: int(place) + 1]:
        if words and (word == "=" or words[-1].endswith("=")):
            words[-1] += word
        else:
            words.append(word)
    words += [""] if words[-1] == COLONS else []
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = "\n".join(words), str(len(words) - 1)


def _of_list(typed: str, words: Iterable[str]) -> list[str]:
    """Words that the last part of a list, joined by commas, begins."""
    before, comma, last = typed.rpartition(",")
    begun = last.casefold()
    return [f"{before}{comma}{word}" for word in words if word.casefold().startswith(begun)]


def _tensors(ctx: typer.Context, incomplete: str) -> list[str]:
    """FILE::NAME for the names that fit what is typed so far.

    Bash has only what follows the colons in hand, behind words of FILE and of the colons.
    """
    words: list[str] = ["", "", *ctx.meta.get(WORDS, ())]
    file, colons = words[-2:]
    if colons == COLONS:
        return [name for name in _names(file) if name.startswith(incomplete)]
    file, colons, begun = incomplete.partition(COLONS)
    names = _names(file) if colons else []
    return [f"{file}{COLONS}{name}" for name in names if name.startswith(begun)]


def _groups(files: Iterable[str]) -> list[str]:
    """The groups of the bundles on the line, by the names before the last part of their tensors."""
    names = chain.from_iterable(map(_names, files))
    return list(dict.fromkeys(re.split(r"[./][^./]*$", name)[0] for name in names if "." in name))


def _names(file: str) -> list[str]:
    """The tensors of a file; none where that is no file, or one that takes torch to read."""
    try:
        if Path(file).is_dir():
            parts = sorted(path for path in Path(file).iterdir() if path.is_file())
            named = [[part.stem] if part.suffix == ".npy" else _names(str(part)) for part in parts]
            return list(chain.from_iterable(named))
        with Path(file).open("rb") as opened:
            begun = opened.read(9)
        is_plain = begun.startswith(b"PK") and file.endswith(".npz")
        if not (is_plain or begun[8:] == b"{"):
            return []
        opened_file = import_module("attncli.files.reader").open_file(file)  # takes NumPy
        return [str(header.name) for header in opened_file.headers if header.name]
    except Exception:
        return []
