"""What reaches a terminal: digits, signs an encoding lacks, codes in names, notes in groups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from plain import Run
from typer.testing import CliRunner

from attncli.cli.app import app


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("compute", "--temperature=٣.٥"), "--temperature: expected digits 0 to 9"),
        (("compute", "--left-window", "٣"), "--left-window: expected digits 0 to 9"),
        (("compute", "--sinks", "1,٣"), "expected finite numbers"),
        (("mask", "--q-len", "4", "--query-offset", "1,٣"), "whole numbers"),
    ],
)
def test_numbers_are_written_in_ascii_digits(words: tuple[str, ...], named: str, run: Run) -> None:
    assert named in run(*words, code=2).stderr


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_help_appears_where_signs_are_missing(encoding: str) -> None:
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    words = [sys.executable, "-m", "attncli", "--help"]
    done = subprocess.run(words, env=environment, capture_output=True, check=True, timeout=100)
    assert b"Usage" in done.stdout


@pytest.mark.parametrize(
    "words", [("compute", "--\x1b[31mx"), ("compute", "a\x1b[31m\nb.npy"), ("inspect", "\x07")]
)
def test_no_code_of_a_terminal_comes_back(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code in (1, 2)
    assert not set(result.stderr) & set("\x1b\x07\r")


def test_names_of_files_written_are_safe(run: Run, tmp_path: Path) -> None:
    done = run("compute", "--save", tmp_path / "a\x1b[31m.npz", "-o", tmp_path / "b\x1b[31m")
    assert "wrote" in done.stderr
    assert "\x1b" not in done.stderr


def test_one_note_stands_for_heads_that_differ_in_numbers(run: Run) -> None:
    told = run(
        "variance",
        Path(__file__).parents[2] / "sample_inputs" / "minilm.safetensors",
        "--group",
        "layers.0",
    ).stdout
    assert "8 of 12 heads: queries share a mean: 41% to 53% of what softmax sees" in told
    assert told.count("queries share a mean") == 1


def test_nothing_is_saved_where_output_has_no_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (("mask", "--q-len", "4"), ("compute",)):
        told = run(*command, "--save", "dir", "--output", "no/such/x", code=1).stderr
        assert "expected a folder no/such to write to" in told
    assert not list(tmp_path.iterdir())
    assert "--save" in run("compute", "--save", "", code=2).stderr
    assert not list(tmp_path.iterdir())


def test_a_pipe_takes_an_array(run: Run, tmp_path: Path) -> None:
    pipe, got = tmp_path / "p.npy", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    run("compute", "--stage", "output", "--save", pipe)
    reader.join(20)
    (tmp_path / "got.npy").write_bytes(got[0])
    assert np.load(tmp_path / "got.npy").shape == (1, 1, 4, 3)


def test_strides_of_zero_make_no_terabytes(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "t.pt"
    torch.save({"q": torch.zeros(1).expand(2_000_000, 2_000_000)}, file)
    assert "stored in full" in run("inspect", file, code=1).stderr
    torch.save({"q": torch.zeros(1).expand(100, 100)}, file)
    run("inspect", file)


def test_advice_names_options_of_the_command_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("attncli.cli.mask_run.run", refuse)
    told = run("mask", "--q-len", "4", code=1).stderr
    assert "allocation refused" in told
    assert "--head-index" not in told
    monkeypatch.setattr("attncli.cli.compute_run.run", refuse)
    assert "--rows, --head-index, --stage and --precision float32" in run("compute", code=1).stderr


def test_an_expanded_tensor_is_inspected_in_parts(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "t.pt"
    torch.save({"q": torch.tensor([1.0, 3.0]).expand(500, 2).T}, file)
    monkeypatch.setattr("attncli.cli.inspect_run.PART", 300)
    (record,) = run("inspect", file, "-f", "json").json["data"]
    found = [record[name] for name in ("elements", "min", "max", "mean", "std")]
    assert found == pytest.approx([1000, 1, 3, 2, 1])


def test_lines_of_error_are_cut_in_the_middle(run: Run) -> None:
    told = run("inspect", "x" * 5000 + "::q", "-f", "y" * 3000, code=2).stderr
    assert told.startswith("attncli: error: --format: ")
    assert " … " in told
    assert all(len(line) < 1100 for line in told.splitlines())


CODES = "a\x1b[31m\n\x7f\x9b1m\u202e"


def test_names_in_records_hold_nothing_that_a_terminal_obeys(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "t.pt"
    torch.save({CODES: torch.eye(2), "é": torch.eye(2)}, file)
    for form in ("json", "ndjson"):
        out = run("inspect", file, "-f", form).stdout
        assert all(line.isprintable() for line in out.splitlines())
        records = json.loads(out)["data"] if form == "json" else map(json.loads, out.splitlines())
        assert {record["name"] for record in records} == {CODES, "é"}
    lines = run("inspect", file, "-f", "csv").stdout.splitlines()
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)
    assert r"a\x1b[31m\n\x7f\x9b1m\u202e" in lines[1]


LONG = "x" * 300


@pytest.mark.parametrize(
    "line",
    [
        f"mask --save {LONG}",
        f"mask --save {LONG}.npz",
        f"mask --save {LONG}/a.npz",
        f"mask --save {LONG}/a",
        f"entropy b.npz --labels {LONG},b,c",
        f"report b.npz --labels {LONG} -o r.html",
        f"capture {LONG} --text a -o a.safetensors",
        f"inspect {LONG}::q",
    ],
)
def test_names_too_long_for_any_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    np.savez("b.npz", q=np.ones((2, 3)), k=np.ones((2, 3)))
    told = run(*line.split(), code=1).stderr
    assert "unexpected" not in told
    assert [path.name for path in tmp_path.iterdir()] == ["b.npz"]


def test_csv_of_what_fails_at_once_has_no_header(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("b.npz", q=np.ones((2, 3)), k=np.ones((2, 3)))
    outcome = run("compare", "b.npz", "--what-if", "temperature=0", "-f", "csv", code=2)
    assert outcome.stdout == ""
    assert "--temperature" in outcome.stderr


def test_a_mask_for_no_heads_and_documents_that_are_no_numbers(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("e.npy", np.ones((1, 0, 3, 2), np.float32))
    assert "no heads" in run("mask", "e.npy", "e.npy").stdout
    assert len(run("mask", "e.npy", "e.npy", "-f", "csv").stdout.splitlines()) == 1
    np.save("nan.npy", np.full(3, np.nan))
    for option in ("--cu-seqlens-q", "--cu-seqlens-k"):
        told = run("mask", option, "nan.npy", code=1).stderr
        assert "expected a list of integers" in told


def test_logits_as_far_apart_as_numbers_can_be(run: Run) -> None:
    (first, *_) = run("variance", "--logits=-1e308,1e308", "-f", "json").json["data"]
    assert (first["weights"], first["entropy_bits"]) == ([0, 1], 0)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("compute --stage Weights -f JSON", "compute --stage weights -f json"),
        ("compute --dtype BF16 -f Csv", "compute --dtype bfloat16 -f csv"),
        ("mask --q-len 2 --k-len 4 --causal --query-offset Bottom-Right", None),
    ],
)
def test_choices_in_capitals_and_short_names(run: Run, typed: str, meant: str | None) -> None:
    meant = meant or typed.lower()
    assert run(*typed.split()).stdout == run(*meant.split()).stdout
