"""`attncli inspect`: what a file holds, before anything is computed from it."""

from __future__ import annotations

from dataclasses import MISSING, dataclass

from attncli.attention.options import option
from attncli.cli.options import OutputOptions


@dataclass(frozen=True, slots=True)
class InspectOptions:
    """What to look at."""

    files: list[str] = option(MISSING, "Files of tensors; '-' is stdin.", "FILE", positional=True)
    dtype: str | None = option(None, "What the bits of '|V2' or integer tensors are.", "NAME")


def inspect(options: InspectOptions, output: OutputOptions) -> str:
    """List the tensors of files: names, shapes, dtypes, non-finite counts, moments.

    Minimum, maximum, mean and standard deviation (population) are of the finite values.
    """
    return "attncli.cli.inspect_run"
