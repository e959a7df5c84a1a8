"""From groups and the options to checked problems, and what a record says of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attncli.analysis.attention_arguments import (
    AttentionArguments,
    arguments_record,
    read_arguments,
)
from attncli.analysis.inputs import Group, load_groups, load_weights
from attncli.analysis.options import AttentionWords, FileOptions
from attncli.analysis.tensor_files import of_sound_files
from attncli.attention.options import BEFORE_WEIGHTS, AttentionOptions, Layout, Precision
from attncli.attention.problem import Problem, make_problem
from attncli.attention.qkv import problem_of_weights
from attncli.errors import AttncliError, DataError, UsageError
from attncli.files.text import is_file, shown
from attncli.ranks import require_same


@dataclass(frozen=True, slots=True)
class GroupProblem:
    """The checked problem of a group, and what it was made of."""

    group: Group  # Q, K and V as they came, or weights
    arguments: AttentionArguments  # what shapes their attention
    problem: Problem  # both, checked

    @property
    def warnings(self) -> list[str]:
        """Everything worth a warning, with the group's name before it."""
        name = self.group.name
        said = self.group.warnings, self.arguments.warnings, self.problem.marked_warnings
        return [f"{name}: {text}" if name else text for part in said for text in part]

    @property
    def params(self) -> dict[str, Any]:
        """Every option that decided the numbers, as it was used."""
        problem = self.problem
        record = arguments_record(self.arguments, problem.mask.offset) | {
            "scale": list(problem.scale) if isinstance(problem.scale, tuple) else problem.scale,
            "heads": problem.sizes.heads,
            "kv_heads": problem.kv_heads,
            "compute_dtype": str(problem.dtype).removeprefix("torch."),
            "device": str(problem.device),
            "seed": self.group.seed,
        }
        if problem.given is not None:
            nothing = dict.fromkeys(("scale", "temperature", "kv_heads"))
            record |= nothing | {"row_sums": [problem.given.lowest, problem.given.highest]}
        return record


def load_problems(
    inputs: FileOptions,
    words: AttentionWords,
    precision: Precision,
    device: str,
    *,
    weights: Sequence[str] | None = None,
    example: bool = False,
    faults: list[AttncliError] | None = None,
) -> list[GroupProblem]:
    """The problems of all groups that the input options name, or of files of weights.

    Of several bundles those that are at fault are left out, where `faults` is there to tell of
    them. Other arguments and errors as for `load_groups`, `load_weights` and `problem_of`.
    """

    def load(files: list[str] | None) -> list[GroupProblem]:
        if weights is None:
            groups = load_groups(replace(inputs, files=files), example=example)
        else:
            groups = load_weights(replace(inputs, files=None), files or ())
        return [problem_of(one, inputs, words, precision, device) for one in groups]

    files = inputs.files if weights is None else [*weights, *(inputs.files or ())]
    made = load(files) if faults is None or files is None else of_sound_files(files, load, faults)
    require_same([(one.group.place, one.group.described) for one in made], "inputs")
    return made


def labelled(made: Sequence[GroupProblem], text: str) -> list[GroupProblem]:
    """The same with tokens of a file, a line each or a list in JSON, or those words themselves.

    Raises:
        DataError: not one for each key, or a file of something else.
    """
    tokens = _tokens(text)
    for one in made:
        k_len = one.problem.sizes.k_len
        if len(tokens) != k_len:
            got = f"expected {k_len} tokens, one a key, got {len(tokens)}"
            raise DataError("«labels»", got)
    return [replace(one, group=replace(one.group, labels=(tokens,))) for one in made]


def _tokens(text: str) -> tuple[str, ...]:
    path = Path(text)
    if not is_file(path):
        return tuple(text.split(","))
    try:
        found = path.read_text(encoding="utf-8")
        listed = json.loads(found) if found.lstrip().startswith("[") else found.splitlines()
    except ValueError as error:
        raise DataError(shown(text), f"expected tokens, a line each, got: {error}") from None
    return tuple(map(str, listed))


def load_problem(
    inputs: FileOptions, words: AttentionWords, precision: Precision, device: str
) -> GroupProblem:
    """The problem of the one group that the input options name.

    Raises:
        UsageError: they name several.
        AttncliError: as for `load_groups` and `problem_of`.
    """
    groups = load_groups(inputs)
    if len(groups) > 1:
        several = f"expected one group, got {len(groups)}"
        raise UsageError("«group»", several, "choose with «group» NAME")
    return problem_of(groups[0], inputs, words, precision, device)


def problem_of(
    group: Group, inputs: FileOptions, words: AttentionWords, precision: Precision, device: str
) -> GroupProblem:
    """Check a group against the options.

    Raises:
        AttncliError: as `make_problem` or `problem_of_weights` does, naming the file.
    """
    if "weights" not in group.tensors:
        arguments = read_arguments(words, group.declared, group.place)
        problem = checked_problem(
            group,
            arguments.options,
            layout=Layout.BHSD if group.is_laid_out else inputs.layout,
            k_layout=None if group.is_laid_out else inputs.k_layout,
            heads=inputs.heads or group.declared_heads,
            kv_heads=inputs.kv_heads,
            precision=precision,
            device=device,
            allow_nonfinite=inputs.allow_nonfinite,
        )
        return GroupProblem(group, arguments, problem)
    # What a bundle says of Q and K does not count.
    declared = {name: value for name, value in group.declared.items() if name not in BEFORE_WEIGHTS}
    arguments = read_arguments(words, declared, group.place)
    with _naming_files({"weights": group.place}):
        problem = problem_of_weights(
            group.tensors["weights"],
            arguments.options,
            precision=precision,
            device=device,
            allow_nonfinite=inputs.allow_nonfinite,
        )
    return GroupProblem(group, arguments, problem)


def checked_problem(group: Group, options: AttentionOptions, **arguments: Any) -> Problem:
    """Check the tensors of a group against options; further arguments are those of `make_problem`.

    Raises:
        AttncliError: as `make_problem` does, naming the file where it names a role.
    """
    came_as = [getattr(torch, entry["dtype"]) for entry in group.described.values()]
    q, k, v = group.tensors["q"], group.tensors["k"], group.tensors.get("v")
    with _naming_files({role: entry["source"] for role, entry in group.described.items()}):
        return make_problem(q, k, v, options, came_as=came_as, **arguments)


@contextmanager
def _naming_files(files: dict[str, str]) -> Iterator[None]:
    """Name the file of the role in errors."""
    try:
        yield
    except AttncliError as error:
        if error.where not in files:
            raise
        where = f"{error.where} ({files[error.where]})"
        raise type(error)(where, error.problem, error.advice) from None


def inputs_record(made: Sequence[GroupProblem]) -> dict[str, Any]:
    """`inputs` of a document: by role for one group, by group and role for several."""
    described = [one.group.described for one in made]
    return described[0] if len(made) == 1 else _by_group(made, described)


def params_record(
    made: Sequence[GroupProblem], more: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """`params` of a document: what all groups share, and under "groups" where they differ.

    Args:
        made: the groups.
        more: of each what is to be said beside its own options.
    """
    params = [one.params | own for one, own in zip(made, more or [{}] * len(made), strict=True)]
    first = params[0]
    differing = [key for key in first if any(other[key] != first[key] for other in params)]
    shared = {key: value for key, value in first.items() if key not in differing}
    own = [{key: one[key] for key in differing} for one in params]
    return shared | {"groups": _by_group(made, own)} if differing else shared


def _by_group(made: Sequence[GroupProblem], records: list[dict[str, Any]]) -> dict[str, Any]:
    """Each record under its group's name, after its file's where there are several files.

    A name that comes again is told apart by how often it came before: "b.npz::a", "b.npz::a (2)".
    """
    groups = [one.group for one in made]
    if len({group.source_name for group in groups}) == 1:
        names = [group.name for group in groups]
    else:
        names = [f"{g.source}::{g.name}" if g.name else str(g.source) for g in groups]
    times = [names[:place].count(name) + 1 for place, name in enumerate(names)]
    told = (name if n == 1 else f"{name} ({n})" for name, n in zip(names, times, strict=True))
    return dict(zip(told, records, strict=True))
