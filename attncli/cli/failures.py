"""From whatever went wrong to one line on standard error and an exit code."""

from __future__ import annotations

import errno
import os
import re
import sys

import typer

from attncli.errors import (
    AttncliError,
    DataError,
    ExitCode,
    ResourceError,
    UsageError,
    on_command_line,
)

# Typer keeps its parser's exceptions to itself; the public one leads to their common ancestor.
PARSER_ERROR: type[Exception] = typer.BadParameter.__mro__[2]
# What torch and NumPy say of sizes that no machine has room for.
TOO_LARGE = ("allocate", "array is too big", "Maximum allowed dimension", "invalid storage size")


def explain_failure(error: BaseException) -> ExitCode:
    """Print what happened in one line, and at most one of advice; return the exit code."""
    if isinstance(error, typer.Exit):
        return ExitCode(error.exit_code)
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        _print("attncli: interrupted")
        return ExitCode.INTERRUPTED
    known = parser_error_in_words(error) if isinstance(error, PARSER_ERROR) else _known(error)
    if known is None:
        kind = type(error).__name__
        known = DataError(
            f"unexpected {kind}", str(error), "this is a fault of attncli; --debug shows where"
        )
    _print(on_command_line(f"attncli: error: {known.where}: {known.problem}"))
    if known.advice:
        _print(on_command_line(f"  {known.advice}"))
    return known.exit_code


def parser_error_in_words(error: Exception) -> UsageError:
    """A fault that Typer's parser found in the command line, as the project tells its own."""
    kind, text = type(error).__name__, str(getattr(error, "message", error))
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "attncli"
    advice = f"`{path} --help` lists what it takes"
    option = getattr(error, "option_name", None)
    if kind == "NoSuchOption":
        near = _near(str(option), _options(context))
        return UsageError(str(option), f"expected an option of `{path}`, got no such one", near)
    if kind == "BadOptionUsage":
        takes_none = "not take" in text
        problem = "expected no value, got one" if takes_none else "expected a value, got none"
        return UsageError(str(option), problem, advice)
    unknown = re.search(r"No such command ['\"](.*?)['\"]\.", text)
    if unknown:
        names = [] if context is None else context.command.list_commands(context)
        near = _near(unknown[1], names) or f"`{path} --help` lists them"
        return UsageError(unknown[1], "expected a command, got no such one", near)
    extra = re.search(r"unexpected extra arguments? \((.*)\)", text)
    if extra:
        return UsageError(extra[1], "expected options alone, got an argument", advice)
    return UsageError(path, text.rstrip("."), advice)


def abandon_stdout() -> None:
    """Send what is left to nowhere: the reader has gone, or the disk behind it is full.

    Otherwise Python tries once more on its way out, and complains in its own words.
    """
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - it lives as long as the process


def _options(context: object) -> list[str]:
    parameters = getattr(getattr(context, "command", None), "params", [])
    return [name for parameter in parameters for name in parameter.opts if name.startswith("--")]


def _near(given: str, names: list[str]) -> str:
    """Advice that names what was probably meant."""
    import difflib

    close = difflib.get_close_matches(given, names, n=2, cutoff=0.7)
    return f"did you mean {' or '.join(close)}?" if close else ""


def _known(error: BaseException) -> AttncliError | None:
    """The project's own error for this one; None for a fault that nobody foresaw."""
    if isinstance(error, AttncliError):
        return error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = error.filename or "standard output"
        return ResourceError(str(where), "expected free space, got a full disk")
    if isinstance(error, OSError) and error.filename is None and error.errno is not None:
        return ResourceError("standard output", f"expected to write, got: {error.strerror}")
    refused = isinstance(error, MemoryError) or any(words in str(error) for words in TOO_LARGE)
    if refused and isinstance(error, MemoryError | RuntimeError | ValueError):
        advice = "--rows, --head-index and --precision float32 need less"
        return ResourceError("memory", "expected more, got an allocation refused", advice)
    return None


def _print(message: str) -> None:
    lead = message[: len(message) - len(message.lstrip())]
    line = lead + " ".join(message.split())
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    print(line.encode(encoding, "backslashreplace").decode(encoding), file=sys.stderr)
