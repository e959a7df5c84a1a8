"""What `attncli schema` does: list the documents that commands print, or print a JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Collection

from attncli.cli.commands import SchemaOptions
from attncli.cli.documents import DOCUMENTS
from attncli.columns import Column
from attncli.errors import UsageError, nearest
from attncli.files.target import require_target
from attncli.report import Format
from attncli.report.printer import Printer, schema_name
from attncli.report.schema import schema_of_document, schema_of_record
from attncli.report.table import record_table

_LIST = (
    Column("schema", "schema", is_key=True),
    Column("record", "record", is_key=True),
    Column("when", "is"),
    Column("command", "printed by"),
)


def run(options: SchemaOptions) -> None:
    """Print a schema, or the list."""
    if options.output != "-":
        require_target(options.output)
    printer = Printer(target=options.output, quiet=options.quiet)
    if options.name is None:
        printer.show(record_table(_LIST, _listed(), printer, digits=0))
        return
    names = {schema_name(name): name for name in DOCUMENTS}
    name = names.get(options.name, options.name)
    document = DOCUMENTS[_known(name, DOCUMENTS, "NAME")]
    if options.record is None:
        schema = schema_of_document(document)
    else:
        record = _known(options.record, document.records, "RECORD")
        schema = schema_of_record(document, record)
    printer.write([json.dumps(schema, ensure_ascii=False, indent=2), "\n"], Format.JSON)


def _listed() -> list[dict[str, str]]:
    return [
        {
            "schema": document.name,
            "record": name,
            "when": kind.when,
            "command": f"attncli {document.command}",
        }
        for document in DOCUMENTS.values()
        for name, kind in document.records.items()
    ]


def _known(name: str, names: Collection[str], where: str) -> str:
    """The name, if it is one of these.

    Raises:
        UsageError: it is not; advises the nearest.
    """
    if name in names:
        return name
    problem = f"expected one of {', '.join(names)}, got {name!r}"
    raise UsageError(where, problem, nearest(name, names))
