"""How a subcommand is made: options grouped in dataclasses, errors turned into exit codes.

Typer reads a flat function signature. Every command shares some thirty options, so each group of
them is a dataclass whose annotations are Typer's, and `command` spreads the groups over the
signature that Typer sees.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from attncli.cli.failures import explain_failure

Registration = Callable[[Callable[..., None]], Callable[..., None]]

DebugFlag = Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")]


def command(app: typer.Typer, name: str) -> Registration:
    """Register a function, whose parameters are dataclasses of options, as a subcommand."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        groups = get_type_hints(function)
        groups.pop("return", None)

        def run(**values: Any) -> None:
            debug = values.pop("debug")
            given = {group: _fill(kind, values) for group, kind in groups.items()}
            _guarded(lambda: function(**given), debug)

        parameters = [p for kind in groups.values() for p in _parameters(kind)]
        parameters.append(_parameter("debug", DebugFlag, False))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        names = {"help_option_names": ["-h", "--help"]}
        app.command(name, help=inspect.getdoc(function), context_settings=names)(run)
        return function

    return register


def _parameters(kind: type) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [_parameter(f.name, hints[f.name], f.default) for f in dataclasses.fields(kind)]


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, annotation=annotation, default=default)


def _fill(kind: type, values: dict[str, Any]) -> Any:
    return kind(**{field.name: values[field.name] for field in dataclasses.fields(kind)})


def _guarded(work: Callable[[], None], debug: bool) -> None:
    """Run, and leave with the exit code of whatever ends the run early."""
    try:
        work()
        sys.stdout.flush()
    except BrokenPipeError:
        _abandon_stdout()
    except Exception as error:
        if debug and not isinstance(error, typer.Exit):
            import traceback

            traceback.print_exc()
        raise typer.Exit(explain_failure(error)) from None


def _abandon_stdout() -> None:
    """The reader has seen enough (`| head`): nothing failed, and nobody listens any more."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - it lives as long as the process
