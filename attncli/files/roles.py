"""Which tensor of a file plays which role: q, k and v by name, prefixes as groups."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path

from attncli.errors import DataError, UsageError
from attncli.files.container import TensorFile
from attncli.files.names import NO_EXAMPLE, dumped_part, example, fits, plain_part
from attncli.files.reader import open_file
from attncli.files.tensor import StoredTensor
from attncli.files.text import listed, place, shown

Group = dict[str, str | None]


def groups_of(file: TensorFile, asked: Sequence[str] = ()) -> dict[str, Group]:
    """Return the groups of a bundle, each role with the name of its tensor.

    A tensor named `layers.3.q` plays the role q in the group `layers.3`; `q` alone plays it in
    the group "". Where no group is complete by such names, those of common dumps count: see
    `dumped_part`. A group without a q or a k is left out, and `file.warnings` says so.

    Args:
        file: an opened bundle.
        asked: the groups wanted, as for `names_asked`; empty for all, in natural order.

    Returns:
        group → {"q": name, "k": name, "v": name or None}.

    Raises:
        DataError: no group is complete, one that was asked for is not, or two tensors of a
            group play one role.
    """
    found = _reading(file, asked)
    if not found:
        raise _no_roles(file)
    asked = names_asked(asked, found)
    complete = [name for name, roles in found.items() if _is_complete(roles)]
    for name in asked or ([] if complete else list(found)[:1]):
        _require(file, found, name)
    if not asked:
        _warn(file, found, complete)
    return {name: _filled(found[name]) for name in asked or complete}


def names_asked(asked: Iterable[str], there: Container[str]) -> list[str]:
    """Names of groups in the order asked for; what names none is split at its commas."""
    return [
        name for text in asked for name in ([text] if text in there else _comma_separated(text))
    ]


def is_spread(file: TensorFile) -> bool:
    """Whether a group of a file that stands for several has its tensors in more than one of them.

    Raises:
        DataError: two tensors of a group play one role.
    """
    return any(
        len({id(file.holders[name]) for name in roles.values()}) > 1
        for roles in _reading(file, ()).values()
        if _is_complete(roles)
    )


def _reading(file: TensorFile, asked: Sequence[str]) -> dict[str, dict[str, str]]:
    """The groups by plain names, or by those of dumps where that completes what is missing."""
    found = _found(file)
    unknown = [name for name in asked if name not in found]
    if unknown or not any(_is_complete(roles) for roles in found.values()):
        found = _found_in_dump(file, found)
    return found


def _comma_separated(text: str) -> list[str]:
    """The parts of a text between commas, without blanks around them and without empty ones."""
    return [part.strip() for part in text.split(",") if part.strip()]


def _is_complete(roles: dict[str, str]) -> bool:
    return {"q", "k"} <= roles.keys()


def _found(file: TensorFile, *, dumped: bool = False) -> dict[str, dict[str, str]]:
    """Every group in natural order and the roles its tensors play, complete or not.

    Args:
        file: an opened bundle.
        dumped: whether names of common dumps count as well.
    """
    groups: dict[str, dict[str, str]] = {}
    stages: dict[tuple[str, str], float] = {}
    for name in filter(None, (header.name for header in file.headers)):
        plain = plain_part(name)
        part = plain or (dumped_part(name) if dumped else None)
        if part is None:
            continue
        place_of = part.group, part.role
        # A name as asked for stands above all others.
        stage = part.stage if plain is None else math.inf
        other = groups.setdefault(part.group, {}).get(part.role)
        if other is not None and stage == stages[place_of]:
            got = f"{shown(other, 80)} and {shown(name, 80)}"
            raise DataError(place(file.source), f"expected one tensor as {part.role}, got {got}")
        if other is not None and plain is None and stages[place_of] < math.inf:
            # By their last parts, which are the same in every layer.
            both = [shown(re.split("[./]", one)[-1], 80) for one in (name, other)]
            used, left = both if stage > stages[place_of] else both[::-1]
            _say(file, f"{used} is taken as {part.role}, {left} is left out")
        if other is None or stage > stages[place_of]:
            groups[part.group][part.role], stages[place_of] = name, stage
    return {name: groups[name] for name in sorted(groups, key=_natural)}


def _found_in_dump(file: TensorFile, found: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """The groups by names of common dumps as well, if that completes any; `found` otherwise."""
    try:
        dumped = _found(file, dumped=True)
    except DataError:
        if found:
            return found
        raise
    return dumped if any(_is_complete(roles) for roles in dumped.values()) else found


def _say(file: TensorFile, text: str) -> None:
    warning = f"{place(file.source)}: {text}"
    if warning not in file.warnings:
        file.warnings.append(warning)


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key that puts layers.2 before layers.10."""
    parts = enumerate(re.split(r"(\d+)", name))
    return [_number(part) if index % 2 else (0, part) for index, part in parts]


def _number(digits: str) -> tuple[int, str]:
    # By length, then digits: it may be too long to convert.
    significant = digits.lstrip("0")
    return len(significant), significant


def _filled(roles: dict[str, str]) -> Group:
    return {"q": roles["q"], "k": roles["k"], "v": roles.get("v")}


def _missing(roles: dict[str, str]) -> str:
    return " and no ".join(role for role in ("q", "k") if role not in roles)


def _require(file: TensorFile, found: dict[str, dict[str, str]], name: str) -> None:
    """Refuse a group that is absent or incomplete."""
    where = place(file.source)
    if name not in found:
        raise DataError(where, f"expected a group {_called(name)}, got {_groups_text(found)}")
    missing = _missing(found[name])
    if missing:
        present = listed(found[name].values())
        problem = f"expected q and k in {_group_text(name)}, got no {missing}, only {present}"
        raise _with_others(DataError(where, problem), file)


def _with_others(error: DataError, file: TensorFile) -> DataError:
    """The same error, with those in a role that are no dense tensors."""
    others = {n: o for n, o in file.others.items() if any(fits(n, role) for role in "qkv")}
    if not others:
        return error
    told = listed(f"{name} ({what})" for name, (what, _) in others.items())
    advice = next(iter(others.values()))[1]
    return DataError(error.where, f"{error.problem}; no dense tensor is {told}", advice)


def _warn(file: TensorFile, found: dict[str, dict[str, str]], complete: list[str]) -> None:
    for name in found:
        if name not in complete:
            _say(file, f"{_group_text(name)} has no {_missing(found[name])} and is left out")


def _called(name: str) -> str:
    return shown(name, 80) or '""'


def _group_text(name: str) -> str:
    return f"group {shown(name, 80)}" if name else "the file"


def _groups_text(found: dict[str, dict[str, str]]) -> str:
    return listed(name or '""' for name in found)


def _no_roles(file: TensorFile) -> DataError:
    where = place(file.source)
    first = next((header.name for header in file.headers if header.name), None)
    if first is None:
        problem = "expected tensors named q and k, got one tensor without a name"
        return DataError(where, problem, "Name a file for each role: «q=FILE» «k=FILE».")
    names = [header.name for header in file.headers]
    source = shown(file.source)
    q, k = (shown(example(names, role), 80) for role in ("q", "k"))
    advice = f"Point at single tensors: «q={source}::{q}» «k={source}::{k}»."
    fused, weight = (shown(example(names, option), 80) for option in ("qkv", "wq"))
    if fused != NO_EXAMPLE:
        advice = f"If Q, K and V are fused in one, split it: «qkv={source}::{fused}»."
    elif weight != NO_EXAMPLE:
        advice = f"Weights project what «x» gives: «x=FILE» «wq={source}::{weight}»."
    error = DataError(where, f"expected tensors named q and k, got {listed(names)}", advice)
    return _with_others(error, file)


def split_name(text: str) -> tuple[str, str | None]:
    """Split `FILE::NAME`; a file whose own name holds "::" and that exists wins.

    Raises:
        UsageError: FILE or NAME is empty.
    """
    if "::" not in text or _exists(text):
        return text, None
    splits = list(_splits(text))
    file, name = next((split for split in splits if _exists(split[0])), splits[-1])
    if not file or not name:
        raise UsageError(shown(text), "expected FILE or FILE::NAME, got an empty part")
    return file, name


def _splits(text: str) -> Iterator[tuple[str, str]]:
    """Every way to split at a "::", the longest file name first."""
    for place_of in reversed([match.start() for match in re.finditer("(?=::)", text)]):
        yield text[:place_of], text[place_of + 2 :]


def _exists(name: str) -> bool:
    try:
        return name == "-" or Path(name).exists()
    except OSError:
        return False


def read_one(spec: str, option: str) -> tuple[StoredTensor, list[str]]:
    """Read the tensor that `FILE` or `FILE::NAME` stands for, with the file's warnings.

    Args:
        spec: what the user gave; "-" reads standard input.
        option: the option it was given to, for messages.

    Raises:
        UsageError: the file holds several tensors and no NAME says which.
        DataError: the file cannot be read, or holds no tensor of that name.
    """
    source, name = split_name(spec)
    file = open_file(source)
    if name is None and len(file.headers) > 1:
        present = listed(header.name for header in file.headers)
        problem = f"expected one tensor, got a file of {len(file.headers):,}: {present}"
        fitting = example(
            (header.name for header in file.headers), option.strip("«»-").replace("-", "_")
        )
        advice = f"Say which: {shown(source)}::{shown(fitting, 80)}."
        raise UsageError(option, problem, advice)
    stored = file.read(name)
    return stored, file.warnings
