"""JSON Schema (draft 2020-12) of what is printed, made of the columns of the results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from enum import StrEnum
from pkgutil import resolve_name
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from attncli.columns import Column, columns_of
from attncli.errors import on_command_line
from attncli.report.printer import schema_name

DRAFT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]
# Of a column that holds options as `params` does.
PARAMS: Schema = {"$ref": "#/$defs/params"}

_PLAIN: Mapping[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    # What is not finite is printed as null.
    float: {"type": ["number", "null"]},
    str: {"type": "string"},
    NoneType: {"type": "null"},
    Any: {},
}
_TENSOR = (
    Column("source", None, description="its file, and ::name in a bundle", holds=str),
    Column("shape", None, description="as it came", holds=list[int]),
    Column("dtype", None, description="as it came", holds=str),
)
_MODEL = (
    Column("source", None, description="its folder, file or name", holds=str),
    Column("class", None, description="its class", holds=str),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """One kind of records that a document may hold.

    Attributes:
        columns: columns, or "module:name" of a dataclass or of several where they are declared.
        when: the options that ask for it, or what it is of.
        in_json: whether `data` of JSON is a list of them; if not, lines of NDJSON and CSV alone.
    """

    columns: tuple[str | Column, ...]
    when: str
    in_json: bool = True

    @property
    def found(self) -> tuple[Column, ...]:
        """The columns, for which their modules are loaded."""
        declared = (
            (one,) if isinstance(one, Column) else columns_at(resolve_name(one))
            for one in self.columns
        )
        return tuple(column for some in declared for column in some)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What one schema number is of.

    Attributes:
        name: as `attncli.NAME/1` has it.
        command: the words that print it.
        about: what it holds, in a sentence.
        records: the kinds of records that `data` may hold, each by a name.
        params: columns of `params`, of which a document has those that were used.
        data: columns of `data` where it is an object, in the place of a list; empty for none.
        by_group: whether `params` and `data` of several groups are those of each by name.
    """

    name: str
    command: str
    about: str
    records: dict[str, Records]
    params: tuple[Column, ...]
    data: tuple[Column, ...] = ()
    by_group: bool = False


def columns_at(declared: Any) -> Sequence[Column]:
    """The columns of a dataclass, or columns as they are."""
    return columns_of(declared) if is_dataclass(declared) else declared  # type: ignore[arg-type]


def schema_of_record(document: Document, name: str) -> Schema:
    """Of a line of NDJSON, an entry of `data`, or the columns of CSV."""
    kind = document.records[name]
    return {
        "$schema": DRAFT,
        "$id": f"{schema_name(document.name)}/{name}",
        "title": f"{document.name} {name}",
        "description": f"{document.about} A record: {kind.when}.",
    } | object_schema(kind.found)


def schema_of_document(document: Document) -> Schema:
    """Of a whole JSON document, with those of its records under `$defs`."""
    kinds = document.records.items()
    listed = [_list_of(_ref(name)) for name, kind in kinds if kind.in_json]
    data, params = listed, [PARAMS]
    defs: Schema = {"tensor": object_schema(_TENSOR), "inputs": _inputs(document)}
    defs["params"] = _params(document.params)
    if document.data:
        defs["data"] = object_schema(document.data)
        data = [_ref("data"), *listed]
    if document.by_group:
        data.append(_object({"groups": _map_of(_ref("data"))}, ["groups"]))
        params.append(_map_of(PARAMS))
    defs |= {n: {"description": k.when} | object_schema(k.found) for n, k in kinds}
    name = schema_name(document.name)
    parts = {
        "schema": {"const": name, "description": "name and number of this schema"},
        "attncli": {"type": "string", "description": "version of the program that printed it"},
        "inputs": {"description": "what was read, by role, or by group and role"} | _ref("inputs"),
        "params": {"description": "every option that counted, as it was used"} | _any_of(params),
        "warnings": _list_of({"type": "string"}),
        "data": _any_of(data),
    }
    head = {"$schema": DRAFT, "$id": name, "title": f"attncli {document.command}"}
    return head | {"description": document.about} | _object(parts, list(parts)) | {"$defs": defs}


def object_schema(columns: Iterable[Column]) -> Schema:
    """Of an object with these keys; keys are only ever added, so others may be there."""
    columns = list(columns)
    return _object(
        {column.key: _column_schema(column) for column in columns},
        [column.key for column in columns if column.always],
    )


def type_schema(kind: Any) -> Schema:
    """Of a value of a Python type, as JSON has it.

    Args:
        kind: a type, columns of an object, "module:name" of either, or a schema as it is.
    """
    if isinstance(kind, str):
        kind = resolve_name(kind)
    if isinstance(kind, dict):
        return kind
    if isinstance(kind, tuple) or is_dataclass(kind):
        return object_schema(columns_at(kind))
    if kind in _PLAIN:
        return dict(_PLAIN[kind])
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return {"type": "string", "enum": [str(one) for one in kind]}
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _any_of([type_schema(part) for part in parts])
    if origin is dict:
        return _map_of(type_schema(parts[1]))
    if origin is list or parts[-1] is Ellipsis:
        return _list_of(type_schema(parts[0]))
    return {
        "type": "array",
        "prefixItems": [type_schema(part) for part in parts],
        "minItems": len(parts),
        "maxItems": len(parts),
    }


def _column_schema(column: Column) -> Schema:
    description = on_command_line(column.description)
    said = {"title": column.heading, "description": description, "unit": column.unit}
    return {key: text for key, text in said.items() if text} | type_schema(column.type)


def _params(columns: Sequence[Column]) -> Schema:
    """Of `params`: what several groups do not share stands under `groups`."""
    properties = {column.key: _column_schema(column) for column in columns}
    groups = {"description": "what differs from group to group"} | _map_of(PARAMS)
    return _object({"groups": groups} | properties, [])


def _inputs(document: Document) -> Schema:
    """Of `inputs`: the tensors of one group, those of several by name, or a model."""
    if document.name == "capture":
        model = {"description": "what was run"} | object_schema(_MODEL)
        return _object({"model": model}, ["model"])
    return _map_of(_any_of([_ref("tensor"), _ref("inputs")]))


def _any_of(schemas: Sequence[Schema]) -> Schema:
    """Of a value of one of these kinds: types of plain ones in one list."""
    unique = [one for place, one in enumerate(schemas) if one not in schemas[:place]]
    if len(unique) == 1:
        return unique[0]
    if any(set(one) != {"type"} for one in unique):
        return {"anyOf": unique}
    types = [[t] if isinstance(t, str) else t for t in (one["type"] for one in unique)]
    return {"type": list(dict.fromkeys(t for some in types for t in some))}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _list_of(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def _map_of(schema: Schema) -> Schema:
    return {"type": "object", "additionalProperties": schema}


def _object(properties: Schema, required: list[str]) -> Schema:
    return {"type": "object", "properties": properties, "required": required}
