"""Which tensor of a file plays which role: q, k and v by name, prefixes as groups.

`q`, `layers.3.q` and `layers.3.query` are names that attncli asks for. Dumps of models have their
own: `blocks.3.attn.hook_q`, `self_attn.q_proj`, `layer3_query_states`, `xq`.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from attncli.errors import DataError, UsageError, nearest
from attncli.files.reader import open_file
from attncli.files.tensor import StoredTensor, TensorFile
from attncli.files.text import listed, natural_order, place, shown

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
    for name in found if not asked else ():
        if name not in complete:
            _say(file, f"{_group_text(name)} has no {_missing(found[name])} and is left out")
    chosen = ((name, found[name]) for name in asked or complete)
    return {name: {"q": of["q"], "k": of["k"], "v": of.get("v")} for name, of in chosen}


def names_asked(asked: Iterable[str], there: Collection[str]) -> list[str]:
    """Names of groups in the order asked for.

    What names none is split at its commas, and a part that names none is a pattern of names, such
    as layers.*, or stays as it is.
    """
    split = (
        [text] if text in there else filter(None, map(str.strip, text.split(","))) for text in asked
    )
    found: dict[str, None] = {}
    for name in itertools.chain.from_iterable(split):
        alike = [] if name in there else [one for one in there if fnmatch.fnmatchcase(one, name)]
        found |= dict.fromkeys(alike or [name])
    return list(found)


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
    if not unknown and any(map(_is_complete, found.values())):
        return found
    try:
        dumped = _found(file, dumped=True)
    except DataError:
        if found:
            return found
        raise
    return dumped if any(map(_is_complete, dumped.values())) else found


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
    return {name: groups[name] for name in sorted(groups, key=natural_order)}


def _say(file: TensorFile, text: str) -> None:
    warning = f"{place(file.source)}: {text}"
    if warning not in file.warnings:
        file.warnings.append(warning)


def _missing(roles: dict[str, str]) -> str:
    return " and no ".join(role for role in ("q", "k") if role not in roles)


def _require(file: TensorFile, found: dict[str, dict[str, str]], name: str) -> None:
    """Refuse a group that is absent or incomplete."""
    where = place(file.source)
    if name not in found:
        asked, groups = shown(name, 80) or '""', listed(group or '""' for group in found)
        raise DataError(where, f"expected a group {asked}, got {groups}", nearest(name, found))
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


def _group_text(name: str) -> str:
    return f"group {shown(name, 80)}" if name else "the file"


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
    elif example(names, "weights") != NO_EXAMPLE:
        advice = f"attention weights alone are for entropy «weights={source}»"
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
    # Every way to split at a "::", the longest file name first.
    places = [match.start() for match in re.finditer("(?=::)", text)][::-1]
    splits = [(text[:at], text[at + 2 :]) for at in places]
    file, name = next((split for split in splits if _exists(split[0])), splits[-1])
    if not file or not name:
        raise UsageError(shown(text), "expected FILE or FILE::NAME, got an empty part")
    return file, name


def _exists(name: str) -> bool:
    try:
        return name == "-" or Path(name).exists()
    except OSError:
        return False


def read_one(spec: str, option: str, role: str | None = None) -> tuple[StoredTensor, list[str]]:
    """Read the tensor that `FILE` or `FILE::NAME` stands for, with the file's warnings.

    Args:
        spec: what the user gave; "-" reads standard input.
        option: the option it was given to, for messages.
        role: what the tensor is, whose name it may have among several; None for the option's.

    Raises:
        UsageError: the file holds several tensors and no NAME says which.
        DataError: the file cannot be read, or holds no tensor of that name.
    """
    source, name = split_name(spec)
    file = open_file(source)
    wanted = role or option.strip("«»-").replace("-", "_").removeprefix("actual_")
    meant = [header.name for header in file.headers if header.name == wanted]
    if name is None and len(meant) == 1:
        name = wanted
    if name is None and len(file.headers) > 1:
        present = listed(header.name for header in file.headers)
        problem = f"expected one tensor, got a file of {len(file.headers):,}: {present}"
        names = (header.name for header in file.headers)
        fitting = example(names, option.strip("«»-").replace("-", "_"))
        advice = f"Say which: {shown(source)}::{shown(fitting, 80)}."
        raise UsageError(option, problem, advice)
    stored = file.read(name)
    return stored, file.warnings


ROLES = {
    **dict.fromkeys(("q", "query", "queries"), "q"),
    **dict.fromkeys(("k", "key", "keys"), "k"),
    **dict.fromkeys(("v", "value", "values"), "v"),
}
_IN_DUMPS = ROLES | {f"x{role}": role for role in "qkv"} | {f"{role}cur": role for role in "qkv"}

# Words around a role that say nothing of it, and what of several such tensors attention uses: what
# a projection gave before what was normalised, the rest, and what was rotated.
_STAGE = {
    **dict.fromkeys(("proj", "projection", "projected", "lin", "linear", "to", "mixed"), 0),
    **dict.fromkeys(("norm", "normed", "normalized", "layernorm", "ln"), 1),
    **dict.fromkeys(("hook", "state", "states", "layer", "head", "heads", "tensor"), 2),
    **dict.fromkeys(("cache", "cached", "past", "present", "out", "output", "outputs", "act"), 2),
    **dict.fromkeys(("vec", "vector", "vectors", "mat", "matrix", "data", "call"), 2),
    **dict.fromkeys(("rot", "rotary", "rotated", "rope", "roped", "embed", "post"), 3),
    "pre": -1,  # before a rotation that is named too
}
_LATEST = 2

_PLAIN = re.compile(r"(?:(?P<group>.*)[./])?(?P<last>[^./]+)", re.DOTALL)
_WORD = r"[A-Z]?[a-z]+\d*|[A-Z]+\d*|\d+|[^\W_a-zA-Z\d]+"
_NUMBERED = re.compile(r"(?:[a-z]*\D)?\d+")

# What stands for a name where none is known to fit.
NO_EXAMPLE = "NAME"

# Names that fit an option, by their last words.
_FIT = {
    "sinks": r"(\w+_)?sinks?|s_aux",
    "attn_mask": r"(attn_|attention_|causal_)?mask|(attn|attention|position|relative)_bias",
    "key_padding": r"(key_)?padding(_mask)?|attention_mask",
    "segments": r"segments?(_ids)?|document(_id)?s|seq_idx",
    "position_ids": r"position(_id)?s",
    "x": r"x|hidden(_states)?|inputs?|input_embeds|resid\w*",
    "wq": r"wq|w_q|(q_proj|query|to_q|q_lin|q)\.weight",
    "wk": r"wk|w_k|(k_proj|key|to_k|k_lin|k)\.weight",
    "wv": r"wv|w_v|(v_proj|value|to_v|v_lin|v)\.weight",
    "wo": r"wo|w_o|(o_proj|out_proj|dense|to_out(\.0)?|out_lin|c_proj)\.weight",
    "bq": r"bq|b_q|(q_proj|query|to_q|q_lin|q)\.bias",
    "bk": r"bk|b_k|(k_proj|key|to_k|k_lin|k)\.bias",
    "bv": r"bv|b_v|(v_proj|value|to_v|v_lin|v)\.bias",
    "bo": r"bo|b_o|(o_proj|out_proj|dense|to_out(\.0)?|out_lin|c_proj)\.bias",
    "qkv": r"\w*qkv\w*|query_key_value|c_attn|in_proj|mixed_x_layer",
    "actual_output": r"\w*(out|output|context|hook_z|attn)|o|z",
    "actual_weights": r"(\w+_)?(weights|attentions?|probs|pattern)",
    "weights": r"(\w+_)?(weights|attentions?|probs|pattern)",
    "against": r"(attn_|attention_|causal_)?mask",
    "actual_logsumexp": r"(\w+_)?(lse|logsumexp)",
    "scores": r"(\w+_)?(scores|logits)",
}


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What a name says."""

    group: str  # whose part the tensor is; "" for nobody's
    role: str  # "q", "k" or "v"
    stage: int = _LATEST  # which of several tensors in one role attention uses: the largest


def plain_part(name: str) -> Part | None:
    """What a name as attncli asks for says; None for any other."""
    found = _PLAIN.fullmatch(name)
    role = ROLES.get(found["last"].lower()) if found else None
    return None if found is None or role is None else Part(found["group"] or "", role)


def dumped_part(name: str) -> Part | None:
    """What a name as dumps of models have it says; None where it names no role, or several.

    The role is a word of its own, and what follows it says nothing or is a number:
    `blocks.0.attn.hook_q` is q of the group `blocks.0.attn`, `layer3_q` of `layer3`, `q.0` of `0`;
    `q_proj.weight` and `key_padding_mask` are not.
    """
    pieces = re.split(r"[./]", name)
    words = [_words(piece) for piece in pieces]
    at = max((index for index, some in enumerate(words) if _roles(some)), default=None)
    if at is None or len(_roles(words[at])) > 1:
        return None
    (middle,) = _roles(words[at])
    before = words[at][:middle]
    after = [*words[at][middle + 1 :], *(word for some in words[at + 1 :] for word in some)]
    numbers = [word for word in after if _NUMBERED.fullmatch(word)]
    if any(word.lower() not in _STAGE and word not in numbers for word in after):
        return None
    stages = [_STAGE[word.lower()] for word in (*before, *after) if word.lower() in _STAGE]
    rotated = 3 in stages and -1 not in stages
    stage = max(stages) if rotated else max(0, min(stages, default=_LATEST))
    kept = "_".join(word for word in before if word.lower() not in _STAGE)
    group = [name[: len(".".join(pieces[:at]))], kept, *numbers]
    return Part(".".join(filter(None, group)), _IN_DUMPS[words[at][middle].lower()], stage)


def usual_layout(name: str, rank: int) -> str | None:
    """The order of axes that dumps give a tensor of that name and rank; None for no one order.

    Hooks of TransformerLens see (B, S, H, d), and a projection gives (B, S, H·d).
    """
    part = None if plain_part(name) else dumped_part(name)
    if part is None:
        return None
    if rank == 4 and re.search(r"(^|[._/])hook_[^./]*$", name):
        return "bshd"
    return "bsh" if rank < 4 and part.stage == 0 else None


def _roles(words: list[str]) -> list[int]:
    """Where among the words those stand that are a role."""
    return [index for index, word in enumerate(words) if word.lower() in _IN_DUMPS]


def _words(piece: str) -> list[str]:
    """The words between underscores, hyphens and capitals; layer_3 is one, q3 is two."""
    found: list[str] = []
    for word in re.findall(r"(?:layer|block|head)_\d+|" + _WORD, piece):
        letters = word.rstrip("0123456789")
        apart = letters.lower() in _IN_DUMPS and letters != word
        found += [letters, word[len(letters) :]] if apart else [word]
    return found


def fits(name: str, option: str) -> bool:
    """Whether a tensor of that name may be meant by an option: "k", "sinks", "attn_mask"."""
    if option in ("q", "k", "v"):
        part = plain_part(name) or dumped_part(name)
        return part is not None and part.role == option
    pattern = _FIT.get(option)
    return pattern is not None and bool(re.fullmatch(rf"(?i)(.*[./])?({pattern})", name, re.DOTALL))


def example(names: Iterable[str | None], option: str) -> str:
    """A name that fits an option, or the word that stands for one."""
    return next((name for name in names if name is not None and fits(name, option)), NO_EXAMPLE)
