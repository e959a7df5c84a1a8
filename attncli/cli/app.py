"""The program: its name, its version, its subcommands, each loaded only when it is called."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from attncli import __version__
from attncli.cli.failures import abandon_stdout, explain_failure

# A subcommand lives in the module of its name; its line here is the first of its docstring.
COMMANDS = {
    "compute": "Compute attention stage by stage: scores, scaled, masked, weights, output.",
    "entropy": "Measure every head: entropy, effective keys, largest weight and logit, sink mass.",
    "mask": "Build a mask, or say what a given one lets through and what it is.",
    "variance": "Measure the variance of q·k that makes 1/√d_k necessary.",
    "check": "Compare an output with the float64 reference, and name the mistake if it differs.",
    "inspect": "List the tensors of files: names, shapes, dtypes, non-finite counts, moments.",
}


class Program(TyperGroup):
    """The group of subcommands, which reports usage errors as everything else is reported."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run, and exit with a code of `attncli.errors`."""
        kwargs["standalone_mode"] = False
        _stand_in_for_closed_streams()
        try:
            code = _run(lambda: super(Program, self).main(*args, **kwargs))
            sys.stdout.flush()
        except BrokenPipeError:
            abandon_stdout()
            code = 0
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, OSError) and error.filename is None:
                abandon_stdout()
            code = explain_failure(error)
        sys.exit(code)

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the subcommands, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a subcommand and have Typer build it."""
        if cmd_name not in COMMANDS:
            return None
        one = typer.Typer(rich_markup_mode=None, add_completion=False)
        import_module(f"attncli.cli.{cmd_name}").register(one)
        return typer.main.get_command(one)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the subcommands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _run(work: Callable[[], Any]) -> Any:
    """Run Typer, which turns a reader that has gone into an exit of its own."""
    try:
        return work()
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):
            raise error.__context__ from None
        raise


def _stand_in_for_closed_streams() -> None:
    """A shell's `>&-` leaves no stream at all; what is written there goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 - until the end


app = typer.Typer(
    name="attncli",
    cls=Program,
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    # Typer's own options for these are converted by a library that costs more than all of help.
    add_help_option=False,
    add_completion="completion" in " ".join(sys.argv[1:2]),
    epilog="attncli COMMAND --help explains a command. attncli --install-completion teaches the "
    "shell to complete.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"attncli {__version__}")
        raise typer.Exit


def _show_help(context: typer.Context, wanted: bool) -> None:
    if wanted:
        print(context.get_help())
        raise typer.Exit


@app.callback()
def attncli(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
    help: Annotated[
        bool,
        typer.Option("--help", "-h", callback=_show_help, is_eager=True, help="Show this."),
    ] = False,
) -> None:
    """Attention analysis from the command line.

    Point it at the Q, K and V tensors of an attention layer, or let it draw random ones.
    `attncli compute` shows every stage on a small example.
    """
    if context.invoked_subcommand is None:
        _show_help(context, True)


def main() -> None:
    """Entry point of the `attncli` command."""
    # Imports make a million objects, none of them garbage: looking for it takes a tenth of a run.
    gc.set_threshold(50_000, 20, 20)
    app()
