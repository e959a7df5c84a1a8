"""The program: its name, its version, and its subcommands as Typer reads them.

Typer reads a flat function signature. Every command shares some thirty options, so each group of
them is a dataclass, and `subcommand` writes the signature that Typer sees, once it is called.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperGroup

from attncli import __version__
from attncli.analysis.options import AttentionWords, refuse_beyond_64_bits
from attncli.attention.options import OPTIONS, Kind, MaskTrue, Told
from attncli.cli.commands import COMMANDS
from attncli.cli.failures import exit_code_of
from attncli.errors import UsageError, on_command_line, option_name

# What Typer makes of an option of each kind; text is read later, when a file may be opened for it.
WORDS: dict[Kind | None, Any] = {
    Kind.NUMBER: float,
    Kind.NUMBERS: list[str],
    Kind.WHOLE: int,
    Kind.FLAG: bool,
    Kind.CHOICE: MaskTrue,
    Kind.ARRAY: str,
    Kind.OFFSET: list[str],
    Kind.LENGTHS: list[str],
    Kind.IDS: list[str],
    Kind.MARKS: list[str],
    Kind.LOGITS: list[str],
}

# What takes less memory, of the commands that have it.
FRUGAL = {"rows": "--rows", "head_index": "--head-index", "precision": "--precision float32"}

# What names a file to write.
TARGETS = ("output", "save", "plot")

HELP_NAMES = {"help_option_names": ["-h", "--help"]}
DebugFlag = Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")]


def subcommand(declared: Callable[..., None]) -> Any:
    """The command of a function of `attncli.cli.commands`, as Typer builds it.

    Groups of options are the function's parameters, and its docstring is the help.
    """
    groups = get_type_hints(declared)
    groups.pop("return")

    def run(debug: bool, **values: Any) -> None:
        def work() -> None:
            _refuse_second_stdin(values)
            _refuse_overwriting({name: values[name] for name in files})
            for option, value in values.items():
                if isinstance(value, int):
                    refuse_beyond_64_bits(f"«{option}»", value)
            declared(
                **{
                    group: kind(**{option.name: values[option.name] for option in spread[group]})
                    for group, kind in groups.items()
                }
            )

        raise typer.Exit(exit_code_of(work, debug, frugal))

    spread = {group: list(_parameters(kind)) for group, kind in groups.items()}
    names = {option.name for options in spread.values() for option in options}
    files = [o.name for options in spread.values() for o in options if _may_be_a_file(o)]
    frugal = [words for name, words in FRUGAL.items() if name in names]
    debug_flag = _parameter("debug", DebugFlag, False)
    parameters = [*chain.from_iterable(spread.values()), debug_flag]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    help = escaped(inspect.getdoc(declared))
    app.command(declared.__name__, help=help, context_settings=HELP_NAMES)(run)
    return typer.main.get_command(app)


def _may_be_a_file(parameter: inspect.Parameter) -> bool:
    """Whether the help says FILE of the option's value."""
    _, told = get_args(parameter.annotation)
    return "FILE" in (told.metavar or "")


def escaped(text: str | None) -> str:
    """Help as rich prints it: paragraphs of any width, and brackets that are no markup."""
    paragraphs = (text or "").replace("[", "\\[").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _parameters(kind: Any) -> Iterator[inspect.Parameter]:
    """A parameter of each option in a group."""
    panel = getattr(kind, "panel", "What to compute")
    if kind is AttentionWords:
        for name, told in OPTIONS.items():
            yield _parameter(name, _annotated(name, WORDS[told.kind] | None, told, panel), None)
        return
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        told, hint = field.metadata["told"], hints[field.name]
        yield _parameter(field.name, _annotated(field.name, hint, told, panel), field.default)


def _annotated(name: str, kind: Any, told: Told, panel: str) -> Any:
    """The type of an option with what Typer is to know of it."""
    help = escaped(on_command_line(told.help))
    if told.positional:
        return Annotated[kind, typer.Argument(metavar=told.metavar, help=help)]
    names = told.names or (option_name(name),)
    if told.kind is Kind.FLAG:
        names = (f"{names[0]}/--no-{names[0][2:]}",)
    option = typer.Option(
        *names,
        metavar=told.metavar,
        help=help,
        min=told.minimum,
        max=told.maximum,
        rich_help_panel=panel,
    )
    return Annotated[kind, option]


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    keyword = inspect.Parameter.KEYWORD_ONLY
    missing = default is dataclasses.MISSING
    given = inspect.Parameter.empty if missing else default
    return inspect.Parameter(name, keyword, annotation=annotation, default=given)


def refuse_other_digits(arguments: Sequence[str]) -> None:
    """Python reads numbers in any script as values of options; programs write 0 to 9.

    Raises:
        UsageError: the value of an option is a number in other digits.
    """
    for before, argument in pairwise(["", *arguments]):
        option, joined, value = argument.partition("=")
        if not (joined and option.startswith("-")):
            option, value = before, argument
        if option.startswith("-") and not value.isascii() and _is_number(value):
            raise UsageError(option, f"expected digits 0 to 9, got {value!r}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


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


def _refuse_overwriting(values: dict[str, Any]) -> None:
    """A target that is an input, too, or the target of two options, would be lost.

    Args:
        values: of the options that may name files.

    Raises:
        UsageError: naming the target.
    """
    for target in (name for name in TARGETS if values.get(name)):
        for other, value in values.items():
            if other == target:
                continue
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, str) and _one_file(part.partition("::")[0], values[target]):
                    got = "that of an input" if other == "files" else f"that of «{other}»"
                    raise UsageError(f"«{target}»", f"expected a name of its own, got {got}")


def _one_file(path: str, target: str) -> bool:
    """Whether both name one file; devices such as /dev/null may well be named twice."""
    try:
        if Path(target).exists():
            return Path(path).is_file() and Path(path).samefile(target)
        return path == target != "-"
    except (OSError, ValueError):
        return False


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
        """Put the subcommand itself in the place of what the help lists: build its options now."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, subcommand(COMMANDS[str(name)]), rest


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
    context_settings=HELP_NAMES,
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


for _name, _command in COMMANDS.items():
    app.command(_name, help=escaped(inspect.getdoc(_command)))(lambda: None)


def main() -> None:
    """Entry point of the `attncli` command."""
    # Imports make a million objects, none of them garbage: looking for it takes a tenth of a run.
    gc.set_threshold(50_000, 20, 20)
    app()
