"""`attncli schema`: a true JSON Schema of every document and record that any command prints."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from plain import Run, Tensors
from printed import BY_SCHEMA, check_document, check_header, check_lines
from safetensors.numpy import save_file

from attncli.cli.documents import DOCUMENTS
from attncli.columns import Column
from attncli.report.schema import schema_of_document, type_schema

RECORDS = [(name, record) for name, one in DOCUMENTS.items() for record in one.records]
# Together they print every kind of record and every param that is declared.
PRINTING = """
compute --causal
compute --format ndjson
compute --explain
compute --shapes
compute bundle.npz --max-values 0
compute groups.npz --format csv
entropy q.npy k.npy
entropy tokens.safetensors
entropy --weights w.npy
entropy q.npy k.npy --per-row
entropy q.npy k.npy --per-key --top 2
entropy groups.npz --summary
entropy tokens.safetensors --sample-rows 2
entropy q.npy k.npy --temperatures 1,2 --compare-scale
mask --causal --q-len 3
mask --causal --q-len 3 --max-values 1
mask --attn-mask m.npy --causal --q-len 3 --fail-on leak
mask --attn-mask additive.npy
mask tokens.safetensors groups.npz
mask --causal --q-len 3 --against m.npy
mask q.npy k.npy --effect
variance --dk 4 --samples 10
variance q.npy k.npy
variance q.npy k.npy --fit-scale w.npy
variance groups.npz --summary
variance --logits 1,2
check q.npy k.npy v.npy --actual-output o.npy
check q.npy k.npy v.npy --actual-output o.npy --pair o.npy
check q.npy k.npy v.npy --actual-output o.npy --format ndjson
compare q.npy k.npy --what-if scale=1
compare --q q.npy --k k.npy --other-q q.npy
compare q.npy k.npy --what-if scale=1 --per-row
compare q.npy k.npy --what-if scale=1 --summary
compare q.npy k.npy --what-if scale=1 --worst
inspect q.npy
"""
# Needs a model: tests/recording prints it.
ELSEWHERE = {"capture"}


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
    for part in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(part, dict | list):
            yield from _parts(part)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_schema_is_one_and_names_itself_as_documents_do(run: Run, name: str) -> None:
    schema = run("schema", name).json
    jsonschema_rs.meta.validate(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["$id"] == schema["properties"]["schema"]["const"] == f"attncli.{name}/1"
    assert run("schema", schema["$id"]).json == schema


@pytest.mark.parametrize(("name", "record"), RECORDS)
def test_the_schema_of_a_record_is_that_of_its_document(run: Run, name: str, record: str) -> None:
    alone = run("schema", name, record).json
    jsonschema_rs.meta.validate(alone)
    within = run("schema", name).json["$defs"][record]
    assert {key: alone[key] for key in ("type", "properties", "required")} == {
        key: within[key] for key in ("type", "properties", "required")
    }


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_key_is_described(name: str) -> None:
    for part in _parts(schema_of_document(DOCUMENTS[name])["$defs"]):
        for key, said in part.get("properties", {}).items():
            assert {"description", "$ref"} & set(said), key
            assert "«" not in said.get("description", ""), key


def test_the_list_names_every_record(run: Run) -> None:
    lines = [line.split()[:2] for line in run("schema").stdout.splitlines()[1:]]
    assert [tuple(words) for words in lines] == RECORDS


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["entrpy"], "did you mean entropy?"),
        (["mask-efect"], "did you mean mask-effect?"),
        (["entropy", "rows"], "did you mean row?"),
    ],
)
def test_an_unknown_name_is_answered_by_the_nearest(run: Run, words: list[str], said: str) -> None:
    stderr = run("schema", *words, code=2).stderr
    assert f"got {words[-1]!r}" in stderr
    assert said in stderr
    assert "did you mean" not in run("schema", "xyz", code=2).stderr


def test_it_goes_to_a_file(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "entropy.json"
    assert run("schema", "entropy", "-o", target).stdout == ""
    assert json.loads(target.read_text())["$id"] == "attncli.entropy/1"
    assert run("schema", "entropy", "-o", tmp_path / "no" / "x.json", code=1).stdout == ""


@pytest.fixture
def printing(files: Path, tensors: Tensors) -> Path:
    """The folder in which the commands above find what they read."""
    q, k = tensors["q"][:1], tensors["k"][:1]
    np.savez("groups.npz", **{"a.q": q, "a.k": k, "b.q": q[..., :3, :], "b.k": k})
    np.save("w.npy", np.full((2, 4, 5, 7), 1 / 7, np.float32))
    np.save("o.npy", np.zeros((2, 4, 5, 6), np.float32))
    np.save("m.npy", np.tril(np.ones((3, 3), bool), 1))
    np.save("additive.npy", np.full((3, 3), -1e9, np.float32))
    tokens = {"attncli": json.dumps({"t": {"labels": list("abcdefg")}})}
    save_file({"t.q": q, "t.k": k}, "tokens.safetensors", metadata=tokens)
    return files


@pytest.mark.usefixtures("printing")
def test_everything_declared_is_printed(run: Run) -> None:
    """A key that no command prints any more would go unnoticed otherwise."""
    params: dict[str, set[str]] = {}
    data: dict[str, set[str]] = {}
    keys: dict[tuple[str, str], set[str]] = {}
    for line in PRINTING.splitlines()[1:]:
        words = line.split()
        name, records = words[0], []
        if "--format" in words:
            printed = run(*words, code=_code(line)).stdout.splitlines()
            is_csv = words[-1] == "csv"
            records = list(csv.DictReader(printed)) if is_csv else list(map(json.loads, printed))
        else:
            document = run(*words, "--format", "json", code=_code(line)).json
            name, found = BY_SCHEMA[document["schema"]].name, document["data"]
            params.setdefault(name, set()).update(_used(name, document["params"]))
            if isinstance(found, list):
                records = found
            else:
                data.setdefault(name, set()).update(found)
        for record in records:
            kinds = [n for n in DOCUMENTS[name].records if set(record) <= _keys(name, n)]
            keys.setdefault((name, kinds[0]), set()).update(record)
    for name in DOCUMENTS.keys() - ELSEWHERE:
        assert params[name] == {one.key for one in DOCUMENTS[name].params}, name
        assert data.get(name, set()) - {"groups"} == {one.key for one in DOCUMENTS[name].data}, name
    assert {place for place in RECORDS if place[0] not in ELSEWHERE} == set(keys)
    for place, found in keys.items():
        assert found == _keys(*place), place


def _code(line: str) -> int:
    return 3 if "--against" in line or "leak" in line or "--actual" in line else 0


def _keys(name: str, record: str) -> set[str]:
    return {one.key for one in DOCUMENTS[name].records[record].found}


def _used(name: str, params: dict[str, Any]) -> Iterator[str]:
    """The options that are there, those of groups and sides too."""
    declared = {one.key for one in DOCUMENTS[name].params}
    for key, value in params.items():
        if key in declared:
            yield key
        if isinstance(value, dict) and (key not in declared or key in "ab"):
            yield from _used(name, value)


def test_what_is_not_described_would_be_noticed(run: Run) -> None:
    document = run("compute", "--shapes", "--format", "json").json
    check_document(document)
    step = document["data"][0]
    for wrong in (
        step | {"new": 1},
        step | {"purpose": 1},
        {key: value for key, value in step.items() if key != "purpose"},
    ):
        with pytest.raises(AssertionError):
            check_document(document | {"data": [wrong]})
        with pytest.raises(AssertionError):
            check_lines("compute", [step, wrong])
    with pytest.raises(AssertionError, match="step"):
        check_header("compute", "step,group,operation,one_head,all_heads,purpose")
    with pytest.raises(AssertionError):
        check_document(document | {"params": {"new": 1}})


def test_keys_that_are_added_fit_the_schema_of_before(run: Run) -> None:
    document = run("entropy", "--format", "json").json
    added = document | {"data": [document["data"][0] | {"new": 1}], "later": 2}
    assert jsonschema_rs.is_valid(run("schema", "entropy").json, added)
    assert not jsonschema_rs.is_valid(run("schema", "entropy").json, document | {"data": [{}]})


class _Word(StrEnum):
    ONE = "one"


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        (int, {"type": "integer"}),
        (float, {"type": ["number", "null"]}),
        (float | None, {"type": ["number", "null"]}),
        (bool | float | None, {"type": ["boolean", "number", "null"]}),
        (_Word, {"type": "string", "enum": ["one"]}),
        (_Word | None, {"anyOf": [{"type": "string", "enum": ["one"]}, {"type": "null"}]}),
        (dict[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
        (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
        (Any, {}),
        (
            tuple[int, str],
            {
                "type": "array",
                "prefixItems": [{"type": "integer"}, {"type": "string"}],
                "minItems": 2,
                "maxItems": 2,
            },
        ),
        (
            (
                Column("a", "A", "nats", "of «causal»", holds=int),
                Column("b", None, holds=Any, always=False),
            ),
            {
                "type": "object",
                "properties": {
                    "a": {
                        "title": "A",
                        "description": "of --causal",
                        "unit": "nats",
                        "type": "integer",
                    },
                    "b": {},
                },
                "required": ["a"],
            },
        ),
    ],
)
def test_types_as_json_has_them(kind: Any, schema: Any) -> None:
    assert type_schema(kind) == schema
    assert type_schema("attncli.attention.problem:Cost")["required"][0] == "pairs"


@pytest.mark.parametrize("words", ["schema", "schema mask", "schema variance experiment"])
def test_schemas_load_what_declares_them_alone(words: str) -> None:
    script = "import sys; from attncli.cli.app import app\ntry: app()\nexcept SystemExit: pass\n"
    script += "print('torch' in sys.modules)"
    ran = [sys.executable, "-c", script, *words.split()]
    done = subprocess.run(ran, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("line", ["entropy -f json", "entropy -o x.json", "mask -f json -o x.txt"])
def test_every_run_of_a_test_is_checked(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    command = line.split()[0]
    wrong = f'{{"schema": "attncli.{command}/1"}}'
    monkeypatch.setattr("attncli.cli.output.document", lambda *_, **__: iter([wrong]))
    with pytest.raises(AssertionError, match="required"):
        run(*line.split())


def test_processes_of_their_own_are_checked_too(tmp_path: Path) -> None:
    said = 'import sys; print(\'{"schema": "attncli.entropy/1"}\')'
    (tmp_path / "attncli.py").write_text(said)
    words = [sys.executable, "-m", "attncli", "entropy", "-f", "json"]
    with pytest.raises(AssertionError, match="required"):
        subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
