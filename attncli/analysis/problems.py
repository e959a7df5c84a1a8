"""From a group and the options to a checked problem, and what `params` says of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attncli.analysis.attention_arguments import (
    AttentionArguments,
    arguments_record,
    read_arguments,
)
from attncli.analysis.inputs import Group, labels_of
from attncli.analysis.options import AttentionWords, FileOptions
from attncli.attention.options import BEFORE_WEIGHTS, AttentionOptions, Layout, Precision
from attncli.attention.problem import Problem, make_problem
from attncli.attention.qkv import problem_of_weights
from attncli.errors import AttncliError


def problem_of(
    group: Group,
    inputs: FileOptions,
    words: AttentionWords,
    precision: Precision,
    device: str,
) -> tuple[AttentionArguments, Problem]:
    """Check a group against the options.

    Raises:
        AttncliError: as `make_problem` does, naming the file where it names a role.
    """
    arguments = read_arguments(words, group.declared, group.place)
    problem = checked_problem(
        group,
        arguments.options,
        layout=Layout.BHSD if group.is_laid_out else inputs.layout,
        k_layout=None if group.is_laid_out else inputs.k_layout,
        heads=inputs.heads,
        kv_heads=inputs.kv_heads,
        precision=precision,
        device=device,
        allow_nonfinite=inputs.allow_nonfinite,
    )
    return arguments, problem


def problem_of_given(
    group: Group, words: AttentionWords, precision: Precision, device: str, *, allow_nonfinite: bool
) -> tuple[AttentionArguments, Problem]:
    """Check weights that were given without Q and K; what a bundle says of these does not count.

    Raises:
        AttncliError: as `problem_of_weights` does, naming the file.
    """
    declared = {name: value for name, value in group.declared.items() if name not in BEFORE_WEIGHTS}
    arguments = read_arguments(words, declared, group.place)
    try:
        problem = problem_of_weights(
            group.tensors["weights"],
            arguments.options,
            precision=precision,
            device=device,
            allow_nonfinite=allow_nonfinite,
        )
    except AttncliError as error:
        if error.where != "weights":
            raise
        where = f"weights ({group.place})"
        raise type(error)(where, error.problem, error.advice) from None
    return arguments, problem


def checked_problem(group: Group, options: AttentionOptions, **arguments: Any) -> Problem:
    """Check the tensors of a group against options; further arguments are those of `make_problem`.

    Raises:
        AttncliError: as `make_problem` does, naming the file where it names a role.
    """
    came_as = [getattr(torch, entry["dtype"]) for entry in group.described.values()]
    try:
        q, k, v = group.tensors["q"], group.tensors["k"], group.tensors.get("v")
        return make_problem(q, k, v, options, came_as=came_as, **arguments)
    except AttncliError as error:
        entry = group.described.get(error.where)
        if entry is None:
            raise
        where = f"{error.where} ({entry['source']})"
        raise type(error)(where, error.problem, error.advice) from None


def params_record(group: Group, arguments: AttentionArguments, problem: Problem) -> dict[str, Any]:
    """Every option that decided the numbers, as it was used."""
    record = arguments_record(arguments, problem.mask.offset) | {
        "scale": list(problem.scale) if isinstance(problem.scale, tuple) else problem.scale,
        "heads": problem.sizes.heads,
        "kv_heads": problem.kv_heads,
        "compute_dtype": str(problem.dtype).removeprefix("torch."),
        "device": str(problem.device),
        "seed": group.seed,
    }
    if problem.given is not None:
        nothing = dict.fromkeys(("scale", "temperature", "kv_heads"))
        record |= nothing | {"row_sums": [problem.given.lowest, problem.given.highest]}
    return record


def warnings_of(group: Group, arguments: AttentionArguments, problem: Problem) -> list[str]:
    """Everything worth a warning, with the group's name before it."""
    said = (*group.warnings, *arguments.warnings, *problem.marked_warnings)
    return [f"{group.name}: {text}" if group.name else text for text in said]


def merged(groups: Sequence[Group], params: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`params` of a document: what all groups share, and under "groups" where they differ."""
    first = params[0]
    differing = [key for key in first if any(other[key] != first[key] for other in params)]
    shared = {key: value for key, value in first.items() if key not in differing}
    if not differing:
        return shared
    own = [{key: one[key] for key in differing} for one in params]
    return shared | {"groups": dict(zip(labels_of(groups), own, strict=True))}
