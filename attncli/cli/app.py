"""The program: its name, its version, and its subcommands as Typer reads them.

Typer reads a flat function signature. Every command shares some thirty options, so each group of
them is a dataclass, and `subcommand` writes the signature that Typer sees, once it is called.
"""

from __future__ import annotations

import codecs
import dataclasses
import gc
import inspect
import json
import os
import shlex
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperGroup

from attncli import __version__, ranks
from attncli.analysis.options import AttentionWords, refuse_beyond_64_bits
from attncli.attention.options import OPTIONS, Kind, MaskTrue, Stage, Told
from attncli.cli.commands import COMMANDS, EXAMPLES
from attncli.cli.completion import WORDS as WORDS_BEFORE
from attncli.cli.completion import completion_of, join_words_of_bash
from attncli.cli.failures import exit_code_of
from attncli.errors import UsageError, choice_of, on_command_line, option_name
from attncli.report import FALLBACKS, Format

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

# What takes less memory, of the commands that have something.
FRUGAL = {
    "compute": "--rows, --head-index, --stage and --precision float32 need less",
    "entropy": "--head-index, --sample-rows and --precision float32 need less",
    "mask": "smaller --q-len and --k-len need less",
    "variance": "smaller --dk and --keys need less, or for files --precision float32",
    "check": "--precision float32 needs less",
    "compare": "--head-index and --precision float32 need less",
    "report": "--head-index and --precision float32 need less",
    "capture": "--layers and a smaller --max-length need less",
}

# What names a file to write.
TARGETS = ("output", "save", "plot")
# What a name says that is printed to it, and names of what another option writes.
FORMATS = {".json": Format.JSON, ".ndjson": Format.NDJSON, ".jsonl": Format.NDJSON}
FORMATS |= {".csv": Format.CSV}
WRITTEN_BY = dict.fromkeys((".npy", ".npz", ".safetensors", ".pt"), "save")
WRITTEN_BY |= dict.fromkeys((".png", ".svg", ".pdf"), "plot")

# The options of a group, or of a command: what is said of each, and its default.
Options = dict[str, tuple[Told, Any]]

HELP_NAMES = {"help_option_names": ["-h", "--help"]}
DebugFlag = Annotated[
    bool, typer.Option("--debug", metavar="", help="Show the traceback of a failure.")
]


def subcommand(declared: Callable[..., None], words: Sequence[str] | None = None) -> Any:
    """The command of a function of `attncli.cli.commands`, as Typer builds it.

    Groups of options are the function's parameters, and its docstring is the help.

    Args:
        declared: the function.
        words: what the command is given. Typer has a validator built for every option it knows,
            and pydantic loaded for the first: it is told of those alone that these words name.
            None tells it of all.
    """
    groups = get_type_hints(declared)
    groups.pop("return")
    spread = {group: _options_of(kind) for group, kind in groups.items()}
    options = {name: o for options in spread.values() for name, o in options.items()}
    needed = options if words is None else _needed(options, words)
    files = [name for name, (told, _) in options.items() if "FILE" in (told.metavar or "")]
    frugal = FRUGAL.get(declared.__name__, "")

    def run(debug: bool, **given: Any) -> None:
        values = {name: default for name, (_, default) in options.items()} | given

        def work() -> None:
            if values.get("format", "") is None:
                values["format"] = FORMATS.get(_suffix(values["output"]), Format.TABLE)
            _refuse_second_stdin(values)
            _refuse_overwriting({name: values[name] for name in files})
            _refuse_other_names(declared.__name__, values)
            for option, value in values.items():
                if isinstance(value, int):
                    refuse_beyond_64_bits(f"«{option}»", value)
            declared(
                **{
                    group: kind(**{name: values[name] for name in spread[group]})
                    for group, kind in groups.items()
                }
            )

        raise typer.Exit(exit_code_of(work, debug, frugal))

    parameters = [
        *(p for group, kind in groups.items() for p in _parameters(kind, spread[group], needed)),
        _parameter("debug", DebugFlag, False),
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    help = escaped(inspect.getdoc(declared))
    app.command(
        declared.__name__,
        help=help,
        epilog=_examples_of(declared.__name__).replace("[", "\\["),
        context_settings=HELP_NAMES,
        add_help_option=len(needed) == len(options),
    )(run)
    return typer.main.get_command(app)


def _examples_of(name: str) -> str:
    """What stands at the end of a command's help."""
    *lines, page = EXAMPLES[name]
    # Blank lines between them: old versions of Typer join the others.
    return "\n\n".join(["Examples:", *(f"$ attncli {line}" for line in lines), f"More: {page}"])


def _options_of(kind: Any) -> Options:
    """The options of a group by name."""
    if kind is AttentionWords:
        return {name: (told, None) for name, told in OPTIONS.items()}
    return {f.name: (f.metadata["told"], f.default) for f in dataclasses.fields(kind)}


def _needed(options: Options, words: Sequence[str]) -> set[str]:
    """The names of options without which these words cannot be read."""
    spelt = {word.partition("=")[0] for word in words if word.startswith("-") and word != "-"}
    named = {
        name: spelt.intersection(_spellings(name, told)) for name, (told, _) in options.items()
    }
    if spelt - {"--debug"}.union(*named.values()):  # help, -qf, -1, a mistake: all may matter
        return set(options)
    alone = all(word in spelt for word in words)  # no word is a value, none an argument
    return {
        name
        for name, (told, default) in options.items()
        if named[name] or default is dataclasses.MISSING or (told.positional and not alone)
    }


def _spellings(name: str, told: Told) -> list[str]:
    """How an option is typed, with what turns a flag off; nothing for an argument."""
    if told.positional:
        return []
    if told.kind is Kind.FLAG:
        return [option_name(name), option_name(f"no_{name}")]
    return list(told.names or (option_name(name),))


def escaped(text: str | None) -> str:
    """Help as rich prints it: paragraphs of any width, and brackets that are no markup."""
    paragraphs = (text or "").replace("[", "\\[").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _parameters(kind: Any, options: Options, needed: Container[str]) -> Iterator[inspect.Parameter]:
    """A parameter of each option in a group that is needed."""
    panel = getattr(kind, "panel", "What to compute")
    hints = {} if kind is AttentionWords else get_type_hints(kind)
    for name, (told, default) in options.items():
        if name in needed:
            hint = hints[name] if told.kind is None else WORDS[told.kind] | None
            yield _parameter(name, _annotated(name, hint, told, panel), default)


def _annotated(name: str, kind: Any, told: Told, panel: str) -> Any:
    """The type of an option with what Typer is to know of it."""
    help = escaped(on_command_line(told.help))
    if told.positional:
        complete = completion_of(name, told)
        argument = typer.Argument(metavar=told.metavar, help=help, autocompletion=complete)
        return Annotated[kind, argument]
    names, choices = _spellings(name, told), _choices_of(kind)
    option = typer.Option(
        *(["/".join(names)] if told.kind is Kind.FLAG else names),
        metavar="" if kind is bool or told.kind is Kind.FLAG else told.metavar,
        help=help,
        parser=None if choices is None else partial(choice_of, choices, where=f"«{name}»"),
        autocompletion=completion_of(name, told, choices or ()),
        min=told.minimum,
        max=told.maximum,
        rich_help_panel=panel,
    )
    return Annotated[kind, option]


def _choices_of(kind: Any) -> type[StrEnum] | None:
    """The enumeration that values of a type are of; None where they are not."""
    found = (kind, *get_args(kind))
    return next((one for one in found if isinstance(one, type) and issubclass(one, StrEnum)), None)


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
    """Standard input can be read once: two options that name it are a mistake, or two ranks."""
    named = [
        name
        for name, value in values.items()
        for part in (value if isinstance(value, list) else [value])
        if part == "-" and name != "output"
    ]
    if len(named) > 1:
        raise UsageError("-", "expected standard input to be read once, got it several times")
    if named and ranks.place().count > 1:
        raise UsageError("-", "expected a file that every rank can read, got standard input")


def _refuse_overwriting(values: dict[str, Any]) -> None:
    """A target that is an input, too, or the target of two options, would be lost.

    Args:
        values: of the options that may name files.

    Raises:
        UsageError: naming the target.
    """
    for target in (name for name in TARGETS if values.get(name) not in (None, "-")):
        for other, value in values.items():
            if other == target:
                continue
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, str) and any(
                    _one_file(file, values[target]) for file in _files_of(other, part)
                ):
                    got = "that of an input" if other == "files" else f"that of «{other}»"
                    raise UsageError(f"«{target}»", f"expected a name of its own, got {got}")


def _files_of(option: str, value: str) -> Iterator[str]:
    """The files that a value names: its own, one within it, those of a folder or index."""
    file = value.partition("::")[0]
    yield file.partition("=")[2] if option == "what_if" else file
    if option not in TARGETS and os.path.isdir(file):  # noqa: PTH112 - long names are answered
        with suppress(OSError):  # which is said when it is read
            inside = [str(path) for path in Path(file).iterdir() if path.is_file()]
            yield from (part for path in inside for part in _files_of(option, path))
    if file.endswith(".index.json"):
        try:
            parts = json.loads(Path(file).read_text(encoding="utf-8"))["weight_map"].values()
            yield from (str(Path(file).parent / str(part)) for part in set(parts))
        except (OSError, ValueError, LookupError, AttributeError):  # said when it is read
            return


def _suffix(name: str) -> str:
    return Path(name).suffix.lower()


def _refuse_other_names(command: str, values: dict[str, Any]) -> None:
    """Text in a file that is named as if it held tensors or a picture helps nobody.

    Raises:
        UsageError: naming the option that writes such files.
    """
    target = values.get("output")
    suffix = _suffix(target or "")
    other = WRITTEN_BY.get(suffix)
    if command == "report" and (other or suffix in FORMATS):
        raise UsageError("«output»", f"expected a page, FILE.html, got {target}")
    if other is None or command in ("report", "capture"):
        return
    wanted = "expected .txt, .json, .ndjson, .csv or another name of text"
    advice = f"«{other}={target}» writes it" if other in values else ""
    raise UsageError("«output»", f"{wanted}, got {target}", advice)


def _one_file(path: str, target: str) -> bool:
    """Whether both name one file; devices such as /dev/null may well be named twice."""
    try:
        if Path(target).is_dir():  # of tensors, each in a file of its stage
            here = Path(path).is_file() and Path(path).parent.samefile(target)
            return here and Path(path).stem.rpartition(".")[2] in tuple(Stage)[3:]
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
        join_words_of_bash()
        _stand_in_for_closed_streams()
        for stream in (sys.stdout, sys.stderr):
            _replace_what_it_cannot_encode(stream)

        def work() -> Any:
            given = args[0] if args else kwargs.get("args")
            refuse_other_digits(sys.argv[1:] if given is None else given)
            return super(AttncliGroup, self).main(*args, **kwargs)

        code = exit_code_of(work)
        ranks.leave(code)
        sys.exit(code)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read what stands before the subcommand, for which Typer loads pydantic: often nothing."""
        if args[:1] == ["help"]:
            args = [*args[1:2], "--help"]
        if args[:1] == ["version"] or args[1:] == ["--version"]:
            args = ["--version"]
        _refuse_before(args)
        if args and args[0] in COMMANDS:
            self.params, self.add_help_option = [], False
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Put the subcommand itself in the place of what the help lists: build its options now."""
        name, _, rest = super().resolve_command(ctx, args)
        if rest == ["help"] and not Path("help").exists():
            rest = ["--help"]
        if ctx is not None:
            ctx.meta[WORDS_BEFORE] = tuple(rest)
        is_run = ctx is not None and not ctx.resilient_parsing  # not completed, nor documented
        return name, subcommand(COMMANDS[str(name)], rest if is_run else None), rest


def _refuse_before(args: list[str]) -> None:
    """Options of a command stand behind it.

    Raises:
        UsageError: one stands before it; with the line as it should be.
    """
    at = next((place for place, word in enumerate(args) if word in COMMANDS), 0)
    if at and args[0].startswith("-"):
        line = shlex.join(["attncli", args[at], *args[:at], *args[at + 1 :]])
        raise UsageError(args[0], f"expected it behind {args[at]}, got it before", line)


def _stand_in_for_closed_streams() -> None:
    """A shell's `>&-` leaves no stream at all; what is written there goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 - until the end


def _replace_what_it_cannot_encode(stream: Any) -> None:
    """Let help appear on a terminal of few characters, with words in place of those it lacks."""
    if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
        codecs.register_error("attncli", _in_other_words)
        stream.reconfigure(errors="attncli")


def _in_other_words(error: UnicodeError) -> tuple[str, int]:
    """What stands for characters that a stream lacks, and where it goes on."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(FALLBACKS.get(ord(sign), "?") for sign in lacking), error.end


app = typer.Typer(
    name="attncli",
    cls=AttncliGroup,
    invoke_without_command=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings=HELP_NAMES,
    epilog="attncli COMMAND --help explains a command.\nMore: docs/index.md",
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
        typer.Option(
            "--version", metavar="", callback=_show_version, is_eager=True, help="Show the version."
        ),
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
    if "--debug" not in sys.argv:
        ranks.silence()
    app()
