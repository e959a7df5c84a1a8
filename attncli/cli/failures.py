"""From whatever went wrong to one line on standard error and an exit code."""

from __future__ import annotations

import errno
import sys

import typer

from attncli.errors import AttncliError, ExitCode, ResourceError

# Typer keeps its parser's exceptions to itself; the public one leads to their common ancestor.
PARSER_ERROR: type[Exception] = typer.BadParameter.__mro__[2]


def explain_failure(error: Exception) -> ExitCode:
    """Print what happened in one line, and at most one of advice; return the exit code."""
    if isinstance(error, typer.Exit):
        return ExitCode(error.exit_code)
    known = _known(error)
    if known is None:
        kind = type(error).__name__
        _print(f"unexpected {kind}: {error}", "this is a fault of attncli; --debug shows where")
        return ExitCode.DATA
    _print(str(known), known.advice)
    return known.exit_code


def explain_parser_error(error: Exception) -> ExitCode:
    """Print a fault that Typer's parser found in the command line."""
    message = error.format_message()  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "attncli"
    _print(message.rstrip("."), f"`{path} --help` lists what it takes")
    return ExitCode.USAGE


def _known(error: Exception) -> AttncliError | None:
    """The project's own error for this one; None for a fault that nobody foresaw."""
    if isinstance(error, AttncliError):
        return error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(error.filename or "disk", "expected free space, got a full disk")
    out_of_memory = isinstance(error, MemoryError) or "allocate" in str(error)
    if out_of_memory and isinstance(error, MemoryError | RuntimeError):
        advice = "--rows, --head-index and --precision float32 need less"
        return ResourceError("memory", "expected more, got an allocation refused", advice)
    return None


def _print(message: str, advice: str) -> None:
    one_line = " ".join(message.split())
    print(f"attncli: error: {one_line}", file=sys.stderr)
    if advice:
        print(f"  {advice}", file=sys.stderr)
