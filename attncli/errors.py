"""Everything that can end a run early, and the exit code each one means.

Messages and warnings name options as «causal» or «layout=bshd»: how an option is spelt is known
only where it was typed, so the command line and Python each read the mark in their own way.
"""

import re
from enum import IntEnum
from typing import ClassVar

_OPTION = re.compile("«([a-z_]+)(?:=([^»]*))?»")


class ExitCode(IntEnum):
    """What the shell learns about how a run ended."""

    OK = 0
    DATA = 1
    USAGE = 2
    CHECK_FAILED = 3
    INTERRUPTED = 130


class AttncliError(Exception):
    """A fault that the user can act on, told in one line and one more of advice.

    Args:
        where: the file, tensor or option («name») at fault.
        problem: what is wrong, as "expected …, got …" where that makes sense.
        advice: what to do about it, if that is not plain from the problem.
    """

    exit_code: ClassVar[ExitCode]

    def __init__(self, where: str, problem: str, advice: str = "") -> None:
        super().__init__(in_python(f"{where}: {problem}"))
        self.where = where
        self.problem = problem
        self.advice = advice


class UsageError(AttncliError):
    """The command line asks for something that makes no sense, whatever the data."""

    exit_code = ExitCode.USAGE


class DataError(AttncliError):
    """A file or a tensor is not what it has to be."""

    exit_code = ExitCode.DATA


class ResourceError(AttncliError):
    """The machine has too little memory, disk or hardware for the request."""

    exit_code = ExitCode.DATA


class CheckFailedError(AttncliError):
    """A check that the user asked for found what it looks for."""

    exit_code = ExitCode.CHECK_FAILED


def printable(text: str) -> str:
    """The text with everything unprintable escaped: codes of terminals, line ends, lone bytes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def in_python(text: str) -> str:
    """A message with its options as keywords: prefix, layout=bshd."""
    return _OPTION.sub(lambda found: "=".join(filter(None, found.groups())), text)


def on_command_line(text: str) -> str:
    """A message with its options as they are typed: --prefix, --layout bshd."""

    def typed(found: re.Match[str]) -> str:
        option = "--" + found[1].replace("_", "-")
        return f"{option} {found[2]}" if found[2] else option

    return _OPTION.sub(typed, text)
