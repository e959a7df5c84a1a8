"""Documents and streams: strict, complete, the same every time."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain import Run


def cells_of(stages: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Every cell of a JSON document as (stage, batch, head, row, column, value)."""
    return [
        (name, *index, value)
        for name, stage in stages.items()
        for index, value in np.ndenumerate(np.array(stage["values"], object))
    ]


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_every_format_says_the_same(run: Run, files: Path, precision: str) -> None:
    options = ("bundle.npz", "--precision", precision, "--causal", "--query-offset", "0")
    stages = run("compute", *options, "-f", "json").json["data"]["stages"]
    expected = cells_of(stages)
    lines = run("compute", *options, "-f", "ndjson").stdout.splitlines()
    records = [json.loads(line) for line in lines]
    assert [tuple(record.values()) for record in records] == expected
    assert set(map(tuple, records)) == {("stage", "batch", "head", "row", "column", "value")}
    text = run("compute", *options, "-f", "csv").stdout
    rows = list(csv.reader(io.StringIO(text)))
    assert rows[0] == ["stage", "batch", "head", "row", "column", "value"]
    assert "\r" not in text
    for row, (*place, value) in zip(rows[1:], expected, strict=True):
        assert row[:5] == list(map(str, place))
        assert row[5] == ("-inf" if value is None else repr(value))


def test_nothing_is_lost_where_letters_cannot_be_encoded(files: Path) -> None:
    Path("q.npy").rename("é.npy")
    encoding = os.environ | {"PYTHONIOENCODING": "ascii"}
    printed = {
        form: subprocess.run(
            [sys.executable, "-m", "attncli", "inspect", "é.npy", "-f", form],
            env=encoding,
            capture_output=True,
            check=True,
        ).stdout.decode("ascii")
        for form in ("json", "csv")
    }
    assert json.loads(printed["json"])["data"][0]["source"] == "é.npy"
    assert "\n\\xe9.npy,," in printed["csv"]


def test_float32_prints_its_own_shortest_digits(run: Run, files: Path) -> None:
    np.save("tenth.npy", np.array([[0.1]], np.float32))
    np.save("one.npy", np.ones((1, 1), np.float32))
    options = ("tenth.npy", "one.npy", "--precision", "float32", "--stage", "scores")
    assert run("compute", *options, "-f", "csv").stdout.endswith("scores,0,0,0,0,0.1\n")
    assert '"values": [[[[0.1]]]]' in run("compute", *options, "-f", "json").stdout


def test_what_is_not_finite_is_spelt_out_or_null(run: Run, files: Path) -> None:
    np.save("odd.npy", np.array([[np.inf], [-np.inf], [np.nan]]))
    np.save("one.npy", np.ones((1, 1)))
    options = ("odd.npy", "one.npy", "--allow-nonfinite", "--stage", "scores")
    scores = run("compute", *options, "-f", "json").json["data"]["stages"]["scores"]
    assert scores["values"] == [[[[None], [None], [None]]]]
    assert [scores[name] for name in ("n_nan", "n_posinf", "n_neginf")] == [1, 1, 1]
    assert [scores[name] for name in ("min", "max", "mean", "std")] == [None] * 4
    rows = run("compute", *options, "-f", "csv").stdout.splitlines()[1:]
    assert [row.rpartition(",")[2] for row in rows] == ["inf", "-inf", "nan"]
    lines = run("compute", *options, "-f", "ndjson").stdout.splitlines()
    assert [json.loads(line)["value"] for line in lines] == [None] * 3


def test_large_stages_lose_their_values_and_say_so(run: Run, files: Path) -> None:
    options = ("bundle.npz", "--max-values", 2 * 4 * 5 * 6)
    stages = run("compute", *options, "-f", "json").json["data"]["stages"]
    assert stages["weights"]["values"] is None
    assert stages["weights"]["values_omitted"] is True
    assert stages["weights"]["mean"] == pytest.approx(1 / 7)
    assert stages["output"]["values"] is not None
    assert "values_omitted" not in stages["output"]
    table = run("compute", *options).stdout
    assert "corners alone of scores, scaled, masked, weights: above --max-values 240" in table
    lines = run("compute", *options, "-f", "csv").stdout.splitlines()
    assert len(lines) == 1 + 2 * 4 * 5 * (4 * 7 + 6)


@pytest.mark.parametrize("form", ["table", "json", "ndjson", "csv"])
def test_the_same_command_prints_the_same_bytes(run: Run, files: Path, form: str) -> None:
    first = run("compute", "bundle.npz", "--key-lengths", "5,3", "-f", form)
    again = run("compute", "bundle.npz", "--key-lengths", "5,3", "-f", form)
    assert first.stdout == again.stdout
    run("compute", "bundle.npz", "--key-lengths", "5,3", "-f", form, "-o", "out.txt")
    assert Path("out.txt").read_text() == first.stdout


def test_params_say_what_was_used(run: Run, files: Path) -> None:
    np.save("mask.npy", np.ones((5, 7), bool))
    options = "--causal --query-offset bottom-right --attn-mask mask.npy --key-lengths 5,3"
    params = run("compute", "bundle.npz", *options.split(), "-f", "json").json["params"]
    expected = {
        "causal": True,
        "query_offset": [0, -2],
        "attn_mask": "mask.npy",
        "mask_true": "keep",
    }
    expected |= {"key_lengths": [5, 3], "heads": 4, "kv_heads": 2, "softcap": None, "seed": None}
    assert {name: params[name] for name in expected} == expected
    assert params["scale"] == pytest.approx(1 / math.sqrt(8))


def test_no_positions_no_offset(run: Run, files: Path) -> None:
    assert run("compute", "bundle.npz", "-f", "json").json["params"]["query_offset"] is None
    assert run("compute", "-f", "json").json["params"]["query_offset"] == 0
