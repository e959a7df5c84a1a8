"""How option values are read: here, not by Typer, whose messages and converters cost too much.

Since 0.29 Typer converts values with a library that takes longer to import than all of `--help`,
and every version words its complaints differently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, get_args, get_origin

from typer.core import TyperCommand
from typer.models import ArgumentInfo

from attncli.analysis.values import refuse_beyond_64_bits
from attncli.cli.failures import PARSER_ERROR
from attncli.errors import UsageError


@dataclasses.dataclass(frozen=True, slots=True)
class Reader:
    """How one option or argument is read.

    Attributes:
        option: its name in messages.
        kind: bool, int, float, str or a StrEnum; of each value where there are many.
        many: whether it may be given several times.
        default: what not giving it means; `dataclasses.MISSING` where it must be given.
        low, high: limits of a number; None for none.
    """

    option: str
    kind: type
    many: bool
    default: Any
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, name: str, annotation: Any, default: Any) -> Reader:
        """Take it from a field annotated for Typer."""
        (info,) = annotation.__metadata__
        kinds = [kind for kind in get_args(annotation.__origin__) if kind is not type(None)]
        kind = annotation.__origin__
        if kinds and get_origin(kind) is not list:
            (kind,) = kinds
        many = get_origin(kind) is list
        if isinstance(info, ArgumentInfo):
            option = (info.metavar or name).strip("[].")
        else:
            # Typer takes the first name of an option for its default, and sorts it out later.
            option = "--" + name.replace("_", "-")
            if isinstance(info.default, str):
                option = info.default.split("/")[0]
        return cls(option, get_args(kind)[0] if many else kind, many, default, info.min, info.max)

    def read(self, given: Any) -> Any:
        """The value of what the command line gives, or the default where it gives nothing.

        Raises:
            UsageError: a value of another kind, or none where one must be given.
        """
        if self.many and isinstance(given, list | tuple) and given:
            return [self._one(part) for part in given]
        # Versions differ in what stands for "not given": None, () or a marker of their own.
        if self.many or not isinstance(given, str | int | float | Enum):
            if self.default is dataclasses.MISSING:
                raise UsageError(self.option, "expected at least one, got none")
            return self.default
        return self._one(given)

    def _one(self, given: Any) -> Any:
        if isinstance(given, self.kind) and not isinstance(given, int | float):
            return given
        try:
            value = self.kind(given)
        except ValueError:
            raise UsageError(self.option, f"expected {self._expected}, got {given!r}") from None
        if self.kind is int:
            refuse_beyond_64_bits(self.option, value)
        below = self.low is not None and value < self.low
        if below or (self.high is not None and value > self.high):
            raise UsageError(self.option, f"expected {self._expected}, got {given}")
        return value

    @property
    def _expected(self) -> str:
        if issubclass(self.kind, Enum):
            return "one of " + ", ".join(str(choice.value) for choice in self.kind)
        kind = "a whole number" if self.kind is int else "a number"
        if self.high is not None:
            return f"{kind} from {self.low} to {self.high}"
        return kind if self.low is None else f"{kind} of at least {self.low}"


def command_class(readers: Mapping[str, Reader]) -> type[TyperCommand]:
    """A command whose parameters are read by these readers."""

    class Command(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            for parameter in self.get_params(ctx):  # `--help` included
                # A hook of every version of the parser, the old ones too.
                hook = _hook(readers.get(parameter.name or ""), parameter.process_value)
                object.__setattr__(parameter, "process_value", hook)
            try:
                return super().parse_args(ctx, args)
            except PARSER_ERROR as error:
                if getattr(error, "ctx", None) is None:
                    error.ctx = ctx  # type: ignore[attr-defined]
                raise

    return Command


def _hook(reader: Reader | None, otherwise: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """What reads a parameter; Typer itself reads its own `--help`, if that is given."""

    def process_value(ctx: Any, value: Any) -> Any:
        if reader is None:
            return otherwise(ctx, value) if value is True else None
        return None if ctx.resilient_parsing else reader.read(value)

    return process_value
