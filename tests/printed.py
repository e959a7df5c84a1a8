"""Whether what a command prints is what its schema says: every key described, every type right."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema_rs import Draft202012Validator, meta

from attncli.cli.app import FORMATS
from attncli.cli.commands import COMMANDS
from attncli.cli.documents import DOCUMENTS
from attncli.report.printer import schema_name
from attncli.report.schema import Document, Records, schema_of_document, schema_of_record

BY_SCHEMA = {schema_name(name): document for name, document in DOCUMENTS.items()}


def closed(schema: Any) -> Any:
    """The same schema, which allows no keys but those that it describes."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {key: closed(part) for key, part in schema.items()}
    if isinstance(parts.get("properties"), dict) and parts.get("type") == "object":
        parts["additionalProperties"] = False
    return parts


@cache
def of_document(name: str) -> Draft202012Validator:
    """Checks a document of a name, strictly."""
    schema = schema_of_document(DOCUMENTS[name])
    meta.validate(schema)
    return Draft202012Validator(closed(schema))


@cache
def of_record(name: str, record: str) -> Draft202012Validator:
    """Checks a record of a document, strictly."""
    schema = schema_of_record(DOCUMENTS[name], record)
    meta.validate(schema)
    return Draft202012Validator(closed(schema))


def check_run(
    arguments: Sequence[str], code: int, printed: str | bytes | None, folder: str | Path = "."
) -> None:
    """Fail unless what a run printed for programs fits its schema, be it to a file.

    Args:
        arguments: behind the program's name.
        code: that it ended with.
        printed: to standard output; None where that is not known.
        folder: where it ran.
    """
    text = printed.decode(errors="replace") if isinstance(printed, bytes) else printed or ""
    printing = set(COMMANDS) - {"schema"}
    if not arguments or arguments[0] not in printing or {"--help", "-h", "help"} & {*arguments}:
        return
    if code in (0, 3) or (code == 1 and text):  # some of the files were left out
        check_printed(arguments, text, Path(folder) if code != 1 else None)


def arguments_of(words: Any) -> list[str] | None:
    """What follows the program's name in a command line; None where that is another's."""
    found = [str(word) for word in words] if isinstance(words, list | tuple) else []
    names = [place for place, word in enumerate(found) if Path(word).name == "attncli"]
    is_ours = names and (names[0] == 0 or found[names[0] - 1] == "-m")
    return found[names[0] + 1 :] if is_ours else None


def check_printed(arguments: Sequence[str], printed: str, folder: Path | None) -> None:
    """The same of a run that printed something, in a folder; None for no look at files."""
    command, form = arguments[0], _value(arguments, "--format", "-f").casefold()
    named = _value(arguments, "--output", "-o")
    form = form or FORMATS.get(Path(named).suffix.lower(), "")
    if named not in ("", "-") and command != "capture":  # whose bundle it is
        target = None if folder is None else folder / named
        if target is None or not target.is_file():
            return
        printed = target.read_text(encoding="utf-8")
    elif not printed and form != "ndjson":
        return
    if form == "json":
        check_document(json.loads(printed))
    elif "--columns" in arguments:
        return  # records of some of the keys
    elif form == "ndjson":
        check_lines(command, [json.loads(line) for line in printed.splitlines()])
    elif form == "csv":
        check_header(command, printed.partition("\n")[0])


def check_document(document: dict[str, Any]) -> None:
    """Fail unless a document fits the schema that it names."""
    for error in of_document(BY_SCHEMA[document["schema"]].name).iter_errors(document):
        place = "/".join(map(str, error.instance_path))
        alternatives = getattr(error.kind, "context", [])
        failed = [one for errors in alternatives for one in errors]
        causes = [f"  {one.instance_path}: {one.message[:300]}" for one in failed]
        raise AssertionError("\n".join([f"{place}: {error.message[:600]}", *causes[:12]]))


def check_lines(command: str, records: Iterable[dict[str, Any]]) -> None:
    """Fail unless all records are of one kind that the command has."""
    left = list(_kinds(command))
    for record in records:
        left = [(d, n) for d, n in left if of_record(d.name, n).is_valid(record)]
        assert left, f"no kind of record of {command} is {record}"


def check_header(command: str, header: str) -> None:
    """Fail unless the columns are those of one kind of record, in order."""
    offered = [d.records[n] for d, n in _kinds(command)]
    assert any(header.split(",") in _headers(kind) for kind in offered), header


def _headers(kind: Records) -> Iterator[list[str]]:
    """With the columns that are not always there, and without them."""
    yield [one.key for one in kind.found]
    yield [one.key for one in kind.found if one.always]
    # A mask's kinds name their groups; values of masks are in JSON alone.
    yield [one.key for one in kind.found if one.always or one.key == "groups"]


def _kinds(command: str) -> Iterator[tuple[Document, str]]:
    for document in DOCUMENTS.values():
        if document.command.split()[0] == command:
            yield from ((document, name) for name in document.records)


def _value(arguments: Sequence[str], *names: str) -> str:
    """The value of an option, the last where it is given again; empty where it is not."""
    for place in reversed(range(len(arguments))):
        option, joined, value = arguments[place].partition("=")
        if option in names:
            return value if joined else arguments[place + 1]
    return ""
