"""Everything that can end a run early, the exit code each one means, and how options are spelt.

Messages and warnings name options as «causal» or «layout=bshd»: how an option is spelt is known
only where it was typed, so the command line and Python each read the mark in their own way.
"""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from enum import IntEnum, StrEnum
from typing import Any, ClassVar, TypeVar

# Between the numbers of one batch and those of the next, where an option is typed.
ROWS = "/"

Choice = TypeVar("Choice", bound=StrEnum)

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


class LeftOutError(AttncliError):
    """Some of several files were left out, which is told by now, as are the results of others."""

    exit_code = ExitCode.DATA


def nearest(name: str, among: Iterable[str], *, in_part: bool = True) -> str:
    """Advice that names what a name was probably meant to be; "" where nothing is like it.

    Args:
        name: as it is written.
        among: the names there are.
        in_part: whether to begin a name, or to be a part of it, is to be like it, too.
    """
    names = {other.casefold().replace("_", "-"): other for other in reversed(list(among))}
    word = name.casefold().replace("_", "-")
    close = get_close_matches(word, names, 1, 0.7)
    if in_part and word:
        close += [other for other in names if other.startswith(word)]
        close += [other for other in names if word in re.split("[./-]", other)]
    return f"did you mean {printable(names[close[0]])}?" if close else ""


def choice_of(kind: type[Choice], value: str, where: str) -> Choice:
    """The member of an enumeration that a word names, in capitals or not.

    Raises:
        UsageError: there is none; lists those there are.
    """
    try:
        return kind(str(value).casefold())
    except ValueError:
        problem = f"expected one of {', '.join(kind)}, got {value!r}"
        raise UsageError(where, problem, nearest(str(value), kind)) from None


def printable(text: str) -> str:
    """The text with everything unprintable escaped: codes of terminals, line ends, lone bytes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def in_python(text: str) -> str:
    """A message with its options as keywords: prefix, layout=bshd."""
    return _OPTION.sub(lambda found: "=".join(filter(None, found.groups())), text)


def on_command_line(text: str) -> str:
    """A message with its options as they are typed: --prefix, --layout bshd."""

    def typed(found: re.Match[str]) -> str:
        option = option_name(found[1])
        return f"{option} {found[2]}" if found[2] else option

    return _OPTION.sub(typed, text)


def option_name(field: str) -> str:
    """The option of a field: key_lengths is --key-lengths."""
    return "--" + field.replace("_", "-")


def option_words(field: str, value: Any) -> list[str]:
    """One option as words of a command line that read back as its value; none for None.

    Args:
        field: its name in Python.
        value: a number, a text, True or False, several (a tuple or an array, joined by commas, rows
            of one by `ROWS`) or a list, for each of which the option is repeated.
    """
    if value is None:
        return []
    if isinstance(value, bool):
        return [option_name(field if value else f"no_{field}")]
    if isinstance(value, list):
        return [word for one in value for word in (option_name(field), _text(one))]
    return [option_name(field), _joined(value)]


def _joined(value: Any) -> str:
    if not isinstance(value, tuple) and not getattr(value, "shape", ()):
        return _text(value)
    return (ROWS if len(getattr(value, "shape", ())) > 1 else ",").join(map(_joined, value))


def options_text(changes: Mapping[str, Any]) -> str:
    """Options side by side, those to be left out, whose value is None, last."""
    words = [word for field, value in changes.items() for word in option_words(field, value)]
    left_out = [option_name(field) for field, value in changes.items() if value is None]
    return " ".join([*words, *(["without", *left_out] if left_out else [])])


def _text(value: Any) -> str:
    if isinstance(value, StrEnum) or not hasattr(value, "item"):
        return repr(value) if isinstance(value, float) else str(value)
    item = value.item()  # of an array, which lists True and False as 1 and 0
    return _text(int(item) if isinstance(item, bool) else item)
