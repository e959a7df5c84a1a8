"""The program: its name, its version, its subcommands, each loaded only when it is called."""

from __future__ import annotations

import gc
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from attncli import __version__
from attncli.cli.command import refuse_other_digits, subcommand
from attncli.cli.failures import exit_code_of

# A subcommand lives in the module of its name; its line here is the first of its docstring.
COMMANDS = {
    "compute": "Compute attention stage by stage: scores, scaled, masked, weights, output.",
    "entropy": "Measure every head: entropy, effective keys, largest weight and logit, sink mass.",
    "mask": "Build a mask, or say what a given one lets through and what it is.",
    "variance": "Measure the variance of q·k that makes 1/√d_k necessary.",
    "check": "Compare an output with the float64 reference, and name the mistake if it differs.",
    "inspect": "List the tensors of files: names, shapes, dtypes, non-finite counts, moments.",
}


class AttncliGroup(TyperGroup):
    """The group of subcommands, which ends every run as the project says."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run, and exit with a code of `attncli.errors`."""
        kwargs["standalone_mode"] = False
        _stand_in_for_closed_streams()
        for stream in (sys.stdout, sys.stderr):
            _replace_what_it_cannot_encode(stream)

        def work() -> Any:
            given = args[0] if args else kwargs.get("args")
            refuse_other_digits(sys.argv[1:] if given is None else given)
            return super(AttncliGroup, self).main(*args, **kwargs)

        sys.exit(exit_code_of(work))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Put the subcommand itself in the place of what the help lists: load its module now."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, subcommand(str(name)), rest


def _stand_in_for_closed_streams() -> None:
    """A shell's `>&-` leaves no stream at all; what is written there goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 - until the end


def _replace_what_it_cannot_encode(stream: Any) -> None:
    """Let help appear on a terminal of few characters, with signs in place of those it lacks."""
    if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")


app = typer.Typer(
    name="attncli",
    cls=AttncliGroup,
    invoke_without_command=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="attncli COMMAND --help explains a command.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"attncli {__version__}")
        raise typer.Exit


@app.callback()
def attncli(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Attention analysis from the command line.

    Point it at the Q, K and V tensors of an attention layer, or let it draw random ones.
    `attncli compute` shows every stage on a small example.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for _name, _line in COMMANDS.items():
    app.command(_name, help=_line)(lambda: None)


def main() -> None:
    """Entry point of the `attncli` command."""
    # Imports make a million objects, none of them garbage: looking for it takes a tenth of a run.
    gc.set_threshold(50_000, 20, 20)
    app()
