"""From whatever went wrong to one line on standard error and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import typer

from attncli import ranks
from attncli.errors import (
    AttncliError,
    DataError,
    ExitCode,
    LeftOutError,
    ResourceError,
    UsageError,
    on_command_line,
    printable,
)
from attncli.team import StoppedError

# Characters; what is longer is cut in the middle.
LONGEST_LINE = 1000

# What torch and NumPy say of sizes that no machine has room for.
TOO_LARGE = ("allocate", "array is too big", "Maximum allowed dimension", "invalid storage size")


def exit_code_of(work: Callable[[], Any], debug: bool = False, frugal: str = "") -> int:
    """Run, tell what ends the run early in one line, and return the exit code.

    Args:
        work: what to run; what it returns is an exit code, None stands for 0.
        debug: whether to show the traceback of a failure as well.
        frugal: what of the command takes less memory, as advice.
    """
    try:
        code: int | None = work()
        sys.stdout.flush()
        return code or ExitCode.OK
    except BrokenPipeError:  # `| head`: the reader has seen enough, and nothing failed
        abandon_stdout()
        return ExitCode.OK
    except SystemExit as error:
        # So Typer ends its help where the reader has gone.
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        abandon_stdout()
        return ExitCode.OK
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, OSError) and error.filename is None:
            abandon_stdout()
        if debug and not isinstance(error, typer.Exit):
            traceback.print_exc()
        return explain_failure(error, frugal)


def explain_failure(error: BaseException, frugal: str = "") -> int:
    """Print what happened in one line, and at most one of advice; return the exit code."""
    if isinstance(error, typer.Exit | LeftOutError | StoppedError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        _print("attncli: interrupted")
        return ExitCode.INTERRUPTED
    known = _known(error, frugal)
    if known is None:
        kind = type(error).__name__
        known = DataError(
            f"unexpected {kind}", str(error), "this is a fault of attncli; --debug shows where"
        )
    said = ranks.failed(known)
    if said is not None:
        tell(said)
    if said is not None and said.advice:
        _print(on_command_line(f"  {said.advice}"))
    return known.exit_code


def tell(error: AttncliError) -> None:
    """Print an error in its one line."""
    _print(on_command_line(f"attncli: error: {error.where}: {error.problem}"))


def abandon_stdout() -> None:
    """Send what is left to nowhere: the reader has gone, or the disk behind it is full.

    Otherwise Python tries once more on its way out, and complains in its own words.
    """
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - it lives as long as the process


def _known(error: BaseException, frugal: str) -> AttncliError | None:
    """The project's own error for this one; None for a fault that nobody foresaw."""
    if isinstance(error, AttncliError):
        return error
    if getattr(error, "exit_code", None) == ExitCode.USAGE and hasattr(error, "format_message"):
        return _in_our_shape(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = error.filename or "standard output"
        return ResourceError(str(where), "expected free space, got a full disk")
    if isinstance(error, OSError) and error.filename is None and error.errno is not None:
        return ResourceError("standard output", f"expected to write, got: {error.strerror}")
    refused = isinstance(error, MemoryError) or any(words in str(error) for words in TOO_LARGE)
    if refused and isinstance(error, MemoryError | RuntimeError | ValueError):
        return ResourceError("memory", "expected more, got an allocation refused", frugal)
    return None


def _in_our_shape(error: Any) -> UsageError:
    """What Typer says of a command line, in its words: it keeps the classes of these to itself."""
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    path = "attncli COMMAND" if context is None else context.command_path
    advice = f"`{path} --help` lists what it takes"
    where, problem = getattr(error, "option_name", path), error.message or error.format_message()
    if parameter is not None:
        names = [name for name in parameter.opts if name.startswith("-")]
        where = max(names, key=len, default=parameter.metavar or parameter.name)
    if getattr(error, "possibilities", None):
        advice = f"did you mean {' or '.join(error.possibilities[:2])}?"
    return UsageError(where, problem.rstrip("."), advice)


def _print(message: str) -> None:
    lead = message[: len(message) - len(message.lstrip())]
    line = lead + " ".join(message.split())
    if len(line) > LONGEST_LINE:  # somebody has put a file's content in the place of its name
        line = f"{line[: LONGEST_LINE - 200]} … {line[-200:]}"
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    safe = printable(line)  # names of files and options may hold codes of terminals
    print(safe.encode(encoding, "backslashreplace").decode(encoding), file=sys.stderr)
