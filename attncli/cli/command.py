"""How a subcommand is made: options grouped in dataclasses, errors turned into exit codes.

Typer reads a flat function signature. Every command shares some thirty options, so each group of
them is a dataclass whose annotations are Typer's, and `command` spreads the groups over the
signature that Typer sees.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from attncli.analysis.options import AttentionWords
from attncli.attention.options import OPTIONS, Kind, MaskTrue, Told
from attncli.cli.failures import abandon_stdout, explain_failure
from attncli.cli.parser import Reader, command_class
from attncli.errors import UsageError, on_command_line

Registration = Callable[[Callable[..., None]], Callable[..., None]]

# What Typer makes of an option of each kind; text is read later, when a file may be opened for it.
WORDS: dict[Kind, Any] = {
    Kind.NUMBER: float,
    Kind.WHOLE: int,
    Kind.FLAG: bool,
    Kind.CHOICE: MaskTrue,
    Kind.ARRAY: str,
} | dict.fromkeys((Kind.OFFSET, Kind.LENGTHS, Kind.IDS, Kind.LOGITS), list[str])

DebugFlag = Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")]


def command(app: typer.Typer, name: str) -> Registration:
    """Register a function, whose parameters are dataclasses of options, as a subcommand."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        groups = get_type_hints(function)
        groups.pop("return", None)

        def run(**values: Any) -> None:
            debug = values.pop("debug")
            given = {group: _fill(kind, values) for group, kind in groups.items()}
            _guarded(lambda: _checked(function, values, given), debug)

        found = [part for kind in groups.values() for part in _parameters(kind)]
        found.append(("debug", DebugFlag, False))
        readers = {part: Reader.of(part, *rest) for part, *rest in found}
        parameters = [_parameter(*part) for part in found]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        names = {"help_option_names": ["-h", "--help"]}
        register_with_typer = app.command(
            name,
            cls=command_class(readers),
            help=inspect.getdoc(function),
            context_settings=names,
        )
        register_with_typer(run)
        return function

    return register


def _parameters(kind: type) -> list[tuple[str, Any, Any]]:
    """Name, annotation and default of every field."""
    if kind is AttentionWords:
        return [(name, _annotated(name, None, told), None) for name, told in OPTIONS.items()]
    hints = get_type_hints(kind, include_extras=True)
    return [
        (f.name, _annotated(f.name, hints[f.name], f.metadata.get("told")), f.default)
        for f in dataclasses.fields(kind)
    ]


def _annotated(name: str, hint: Any, told: Told | None) -> Any:
    """The type of an option with what Typer is to know of it."""
    if told is None:  # annotated for Typer already
        return hint
    help = on_command_line(told.help)
    if told.positional:
        return Annotated[hint, typer.Argument(metavar=told.metavar, help=help)]
    names = told.names or ("--" + name.replace("_", "-"),)
    if told.kind is Kind.FLAG:
        names = (f"{names[0]}/--no-{names[0][2:]}",)
    kind = hint if told.kind is None else WORDS[told.kind] | None
    low, high = told.minimum, told.maximum
    info = typer.Option(*names, metavar=told.metavar, help=help, min=low, max=high)
    return Annotated[kind, info]


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    keyword = inspect.Parameter.KEYWORD_ONLY
    missing = default is dataclasses.MISSING
    given = inspect.Parameter.empty if missing else default
    return inspect.Parameter(name, keyword, annotation=annotation, default=given)


def _fill(kind: type, values: dict[str, Any]) -> Any:
    return kind(**{name: values[name] for name, *_ in _parameters(kind)})


def _checked(function: Callable[..., None], values: dict[str, Any], given: dict[str, Any]) -> None:
    _refuse_second_stdin(values)
    function(**given)


def _refuse_second_stdin(values: dict[str, Any]) -> None:
    """Standard input can be read once: two options that name it are a mistake."""
    named = [
        name
        for name, value in values.items()
        for part in (value if isinstance(value, list) else [value])
        if part == "-" and name != "output"
    ]
    if len(named) > 1:
        raise UsageError("-", "expected standard input to be read once, got it several times")


def _guarded(work: Callable[[], None], debug: bool) -> None:
    """Run, and leave with the exit code of whatever ends the run early."""
    try:
        work()
        sys.stdout.flush()
    except BrokenPipeError:  # `| head`: the reader has seen enough, and nothing failed
        abandon_stdout()
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, OSError) and error.filename is None:
            abandon_stdout()
        if debug and not isinstance(error, typer.Exit):
            import traceback

            traceback.print_exc()
        raise typer.Exit(explain_failure(error)) from None
