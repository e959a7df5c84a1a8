"""From a group and the options to a checked problem, and what `params` says of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncli.cli.shape import read_shape, shape_record
from attncli.errors import AttncliError

if TYPE_CHECKING:
    from attncli.attention.problem import Problem
    from attncli.cli.inputs import Group
    from attncli.cli.options import FileOptions, ShapeOptions, WorkOptions
    from attncli.cli.shape import Shape


def problem_of(
    group: Group, inputs: FileOptions, given: ShapeOptions, work: WorkOptions
) -> tuple[Shape, Problem]:
    """Check a group against the options.

    Raises:
        AttncliError: as `make_problem` does, naming the file where it names a role.
    """
    import torch

    from attncli.attention.options import Layout
    from attncli.attention.problem import make_problem

    try:
        shape = read_shape(given, group.declared)
    except AttncliError as error:
        raise _with_bundle(error, group) from None
    made_here = group.is_projected or group.source == "random"
    layout = Layout.BHSD if made_here else inputs.layout
    came_as = [getattr(torch, entry["dtype"]) for entry in group.described.values()]
    try:
        problem = make_problem(
            group.tensors["q"],
            group.tensors["k"],
            group.tensors.get("v"),
            shape.options,
            layout=layout,
            heads=inputs.heads,
            kv_heads=inputs.kv_heads,
            precision=work.precision,
            device=work.device,
            allow_nonfinite=inputs.allow_nonfinite,
            came_as=came_as,
        )
    except AttncliError as error:
        raise _with_file(error, group) from None
    return shape, problem


def params_record(group: Group, shape: Shape, problem: Problem) -> dict[str, Any]:
    """Every option that decided the numbers, as it was used."""
    record = shape_record(shape, problem.mask.offset)
    record |= {
        "scale": problem.scale,
        "heads": problem.sizes.heads,
        "kv_heads": problem.kv_heads,
        "compute_dtype": str(problem.dtype).removeprefix("torch."),
        "device": str(problem.device),
        "seed": group.seed,
    }
    return record


def warnings_of(group: Group, shape: Shape, problem: Problem) -> list[str]:
    """Everything worth a warning, with the group's name before it."""
    said = (*group.warnings, *shape.warnings, *problem.warnings)
    return [f"{group.name}: {text}" if group.name else text for text in said]


def _with_bundle(error: AttncliError, group: Group) -> AttncliError:
    """The same error, with the file and group where it only spoke of a bundle."""
    if error.where != "bundle":
        return error
    place = f"{group.source_name}, group {group.name}" if group.name else group.source_name
    return type(error)(place, error.problem, error.advice)


def _with_file(error: AttncliError, group: Group) -> AttncliError:
    """The same error, with the file where it only named q, k or v."""
    entry = group.described.get(error.where)
    if entry is None:
        return error
    return type(error)(f"{error.where} ({entry['source']})", error.problem, error.advice)
