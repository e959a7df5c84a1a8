"""Write docs/reference: every command and option, every record, every function for Python.

python .github/make_reference.py

All of it is made of what the program itself reads: the options that commands declare, the schemas
of what they print, signatures and docstrings.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import attncli
from attncli.analysis.options import AttentionWords
from attncli.attention.options import OPTIONS, Kind, MaskTrue, Told
from attncli.cli.commands import COMMANDS
from attncli.cli.documents import DOCUMENTS
from attncli.errors import in_python, on_command_line, option_name
from attncli.report.printer import schema_name
from attncli.report.schema import Document, schema_of_document

PAGES = Path(__file__).parent.parent / "docs" / "reference"
MADE = "<!-- Made by python .github/make_reference.py: change what it reads, and run it. -->\n"
RECORDS = """\
What `--format json`, `ndjson` and `csv` hold, key by key. `attncli schema` says the same to
programs, as JSON Schema.

A JSON document is an object of `schema` (its name and number), `attncli` (the version), `inputs`
(source, shape and dtype of what was read), `params` (every option that counted, as it was used),
`warnings` and `data`: the list of records, for `compute` and `check` an object. NDJSON has a record
a line, CSV a record a row. Of several groups `params` holds what differs under `groups`, and
`compute` has `params` and `data` of each by its name.

A number that is not finite is `null` in JSON and spelt out in CSV. Within a schema number keys are
only ever added.
"""
_DEFAULT = re.compile(r" ?\[default: ([^]]*)\]")
_OF_OPTIONS = ("option", "value", "kind", "default", "")
_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):")

Row = tuple[str, ...]


def table(headings: Row, rows: list[Row]) -> Iterator[str]:
    """A table in Markdown."""
    for row in (headings, ("---",) * len(headings), *rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
    yield ""


def code(text: str) -> str:
    """Text as it is typed."""
    return f"`{text}`" if text else ""


# ── commands ─────────────────────────────────────────────────────────────────────────────────


def commands_page() -> str:
    """Every command, with every option by panel; panels that several have stand at the end."""
    found = {name: dict(_panels(command)) for name, command in COMMANDS.items()}
    shared: dict[tuple[Any, ...], list[str]] = {}
    for name, panels in found.items():
        for panel, rows in panels.items():
            shared.setdefault((panel, *rows), []).append(name)
    headings = _headings(shared)
    lines = [MADE, "# Commands and options", ""]
    lines += ["What each command is for, and all that it takes. `--help` after a command says the"]
    lines += ["same; `--debug` on every command shows the traceback of a failure.", ""]
    for name, panels in found.items():
        lines += [f"## {name}", *_help(COMMANDS[name]), ""]
        for panel, rows in panels.items():
            heading = headings.get((panel, *rows))
            if heading is not None:
                anchor = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
                lines += [f"*{panel}*: [{heading}](#{anchor}).", ""]
            else:
                lines += [f"*{panel}*", "", *table(_OF_OPTIONS, rows)]
    for (_, *rows), heading in headings.items():
        lines += [f"## {heading}", "", *table(_OF_OPTIONS, rows)]
    return "\n".join(lines).rstrip() + "\n"


def _headings(shared: dict[tuple[Any, ...], list[str]]) -> dict[tuple[Any, ...], str]:
    """What the panels of several commands are called."""
    several = {key: users for key, users in shared.items() if len(users) > 1}
    names = [panel for panel, *_ in several]
    return {
        key: key[0] if names.count(key[0]) == 1 else f"{key[0]} of {', '.join(users)}"
        for key, users in several.items()
    }


def _help(command: Callable[..., None]) -> Iterator[str]:
    """The paragraphs of a command's help."""
    for paragraph in (inspect.getdoc(command) or "").split("\n\n"):
        yield from ("", " ".join(paragraph.split()))


def _panels(command: Callable[..., None]) -> Iterator[tuple[str, list[Row]]]:
    """The options of a command by the panel of its help that they stand in."""
    panels: dict[str, list[Row]] = {}
    for name, group in get_type_hints(command).items():
        if name != "return":
            panel = getattr(group, "panel", "What to compute")
            panels.setdefault(panel, []).extend(_options(group))
    yield from panels.items()


def _options(group: Any) -> Iterator[Row]:
    if group is AttentionWords:
        yield from (_row(name, told, None, None) for name, told in OPTIONS.items())
        return
    hints = get_type_hints(group)
    for field in dataclasses.fields(group):
        yield _row(field.name, field.metadata["told"], hints[field.name], field.default)


def _row(name: str, told: Told, hint: Any, default: Any) -> Row:
    help = on_command_line(told.help)
    said = _DEFAULT.search(help)
    names = () if told.positional else told.names or (option_name(name),)
    if told.kind is Kind.FLAG:
        names = (*names, f"--no-{names[0][2:]}")
    typed = ", ".join(map(code, names)) or "argument"
    shown = said[1] if said else _default_text(default)
    return typed, *_value_text(told, hint), shown, _DEFAULT.sub("", help)


def _default_text(default: Any) -> str:
    if default is dataclasses.MISSING:
        return "required"
    return "" if default is None or default is False else code(str(default))


def _value_text(told: Told, hint: Any) -> tuple[str, str]:
    """What stands for the value, and what kind it is of."""
    if told.kind is Kind.CHOICE:
        return code("|".join(MaskTrue)), "choice"
    if told.kind is not None:
        return code(told.metavar or ""), str(told.kind)
    kinds = set(get_args(hint)) if isinstance(hint, UnionType) else {hint}
    (kind,) = kinds - {NoneType}
    repeated = get_origin(kind) is list
    kind = get_args(kind)[0] if repeated else kind
    words = {bool: "flag", int: "whole number", float: "number", str: "text"}
    word = "file" if "FILE" in (told.metavar or "") else words.get(kind, "choice")
    limits = [word, *(["repeatable"] if repeated else [])]
    limits += [f"at least {told.minimum}"] if told.minimum is not None else []
    limits += [f"at most {told.maximum}"] if told.maximum is not None else []
    value = told.metavar or ("|".join(kind) if issubclass(kind, StrEnum) else "")
    return code(value), ", ".join(limits)


# ── records ──────────────────────────────────────────────────────────────────────────────────


def records_page() -> str:
    """Every document and record, key by key."""
    common = {one.key: one for one in DOCUMENTS["check"].params}
    lines = [MADE, "# Records", "", RECORDS]
    for document in DOCUMENTS.values():
        lines += _document_lines(document, set(common))
    shaping = schema_of_document(DOCUMENTS["check"])["$defs"]["params"]
    lines += ["## params of every analysis", "", *_keys_table(shaping, "params", "groups")]
    return "\n".join(lines).rstrip() + "\n"


def _document_lines(document: Document, common: set[str]) -> Iterator[str]:
    schema = schema_of_document(document)
    defs = schema["$defs"]
    yield from (f"## {document.name}", "")
    yield from (f"`{schema_name(document.name)}`, of `{document.command}`. {document.about}", "")
    for name, kind in document.records.items():
        yield from (f"### {document.name}: {name}", "", f"A record is {kind.when}.", "")
        yield from _keys_table(defs[name], name)
    if "data" in defs:
        yield from (f"### {document.name}: data", "", *_keys_table(defs["data"], "data"))
    offered = set(defs["params"]["properties"]) - {"groups"}
    shared = offered & common
    yield from (f"### {document.name}: params", "")
    if len(shared) > 10:
        some = "" if shared == common else " that shape a mask"
        others = ", and:" if offered > shared else "."
        yield from (f"Those [of every analysis](#params-of-every-analysis){some}{others}", "")
    else:
        shared = set()
    if offered > shared:
        yield from _keys_table(defs["params"], "params", "groups", *shared)


def _keys_table(schema: dict[str, Any], of: str, *without: str) -> Iterator[str]:
    """The keys of an object, and after them those of the objects that it holds."""
    rows, nested = [], []
    for key, said in schema["properties"].items():
        if key in without:
            continue
        found = _object_in(said)
        if found is not None:
            nested.append((f"{of}.{key}", found))
        always = "" if key in schema["required"] or not schema["required"] else "; not always there"
        unit = said.get("unit", "")
        meaning = said.get("description", "") + always
        rows.append((code(key), _type_text(said), unit, said.get("title", ""), meaning))
    yield from table(("key", "type", "unit", "in tables", ""), rows)
    for name, found in nested:
        yield from (f"Each of `{name}`:", "", *_keys_table(found, name))


def _object_in(schema: dict[str, Any]) -> dict[str, Any] | None:
    """The object with keys of its own that a value is, or that a list or map holds."""
    if "properties" in schema:
        return schema
    inside = schema.get("items") or schema.get("additionalProperties")
    return _object_in(inside) if isinstance(inside, dict) else None


_WORDS = {
    "number": ("number", "numbers"),
    "integer": ("whole number", "whole numbers"),
    "string": ("text", "texts"),
    "boolean": ("true or false", "true or false"),
    "null": ("null", "null"),
    "object": ("object", "objects"),
}


def _type_text(schema: dict[str, Any], several: bool = False) -> str:
    """A type in words."""
    if "anyOf" in schema:
        return "; or ".join(_type_text(one, several) for one in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(map(code, schema["enum"]))
    if "$ref" in schema or "additionalProperties" in schema:
        return "objects" if several else "object"
    kinds = schema.get("type", "any")
    if kinds == "array":
        if "prefixItems" in schema:
            parts = schema["prefixItems"]
            return f"list of {len(parts)} {_type_text(parts[0], True)}"
        return f"{'lists' if several else 'list'} of {_type_text(schema['items'], True)}"
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return " or ".join(_WORDS.get(kind, (kind, kind))[several] for kind in kinds)


# ── Python ───────────────────────────────────────────────────────────────────────────────────


def python_page() -> str:
    """Every public name: signature and docstring."""
    lines = [MADE, "# Python", ""]
    lines += [
        "`import attncli` loads nothing heavy; each name comes with its first use. Keywords that"
    ]
    lines += ["shape attention are the options of the commands, with `_` for `-`.", ""]
    found = {name: getattr(attncli, name) for name in attncli.__all__ if name != "__version__"}
    functions = {name: one for name, one in found.items() if inspect.isfunction(one)}
    lines += ["## Functions", ""]
    for name, function in functions.items():
        lines += [f"### attncli.{name}", "", "```text", *_signature(name, function), "```", ""]
        lines += [*_docstring(function), ""]
    lines += ["## Classes", ""]
    for name, one in found.items():
        if name not in functions:
            lines += [f"### attncli.{name}", "", *_docstring(one), "", *_members(one)]
            if issubclass(one, StrEnum):
                lines += [f"One of {', '.join(code(str(member)) for member in one)}.", ""]
    return "\n".join(lines).rstrip() + "\n"


def _signature(name: str, function: Callable[..., Any]) -> Iterator[str]:
    """One parameter a line."""
    signature = inspect.signature(function)
    yield f"attncli.{name}("
    starred = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            starred = True
            yield "    *,"
        yield f"    {_parameter(parameter)},"
    result = str(signature.return_annotation).strip("'")
    yield f") -> {result}"


def _parameter(parameter: inspect.Parameter) -> str:
    """As it is written."""
    stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
    default = parameter.default
    if isinstance(default, StrEnum):
        default = str(default)
    given = "" if default is parameter.empty else f" = {default!r}"
    return f"{stars}{parameter.name}: {parameter.annotation}{given}"


def _docstring(documented: Any) -> Iterator[str]:
    """A docstring as Markdown: sections as lists, examples as they are."""
    in_section = in_example = False
    for line in in_python(inspect.getdoc(documented) or "").splitlines():
        section = _SECTION.fullmatch(line)
        if line.startswith(">>> ") and not in_example:
            in_example = True
            yield "```text"
        elif in_example and not line:
            in_example = False
            yield "```"
        if section:
            in_section = True
            yield from (f"**{section[1]}**", "")
        elif in_section and re.match(r"    \w", line):
            name, colon, text = line.strip().partition(": ")
            yield f"- {code(name)}: {text}" if colon else f"- {line.strip()}"
        elif in_section and line.startswith("     "):
            yield f"  {line.strip()}"
        else:
            in_section = in_section and not line
            yield line
    if in_example:
        yield "```"


def _members(documented: Any) -> Iterator[str]:
    """The public properties and methods of a class, with the first line of what they say."""
    rows = []
    for name, member in inspect.getmembers(documented):
        said = inspect.getdoc(member) if inspect.isroutine(member) else None
        if isinstance(member, property):
            said = inspect.getdoc(member)
        own = any(name in vars(base) for base in documented.__mro__ if _is_ours(base))
        if name[0] != "_" and said and own:
            shown = f"{name}()" if inspect.isroutine(member) else name
            rows.append((code(shown), in_python(said.splitlines()[0])))
    if rows:
        yield from table(("", ""), rows)


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("attncli")


def pages() -> dict[Path, str]:
    """Every page: its file and its text."""
    made = {"commands": commands_page, "records": records_page, "python": python_page}
    return {PAGES / f"{name}.md": make() for name, make in made.items()}


if __name__ == "__main__":
    PAGES.mkdir(exist_ok=True)
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
        print(f"wrote {page.relative_to(PAGES.parent.parent)}")
