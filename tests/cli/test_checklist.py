"""What a good citizen of the shell does, point by point; some of it is tested where it lives."""

from __future__ import annotations

import io
import re
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain import Run

from attncli import __version__
from attncli.cli.app import app
from attncli.cli.commands import COMMANDS, EXAMPLES

MINILM = Path(__file__).parents[2] / "sample_inputs" / "minilm.safetensors"
# Point → tests elsewhere, each as module.function.
ELSEWHERE = {
    1: "test_startup.test_nothing_heavy",
    3: "test_terminal.test_a_real_terminal",
    5: "test_errors.test_faults_of_data_and_machine",
    6: "test_errors.test_debug_shows_where",
    8: "test_inputs.test_standard_input_and_pipes",
    9: "test_errors.test_no_input_is_overwritten",
    11: "test_formats.test_what_is_not_finite_is_spelt_out_or_null",
    12: "test_formats.test_every_format_says_the_same",
    13: "test_terminal.test_piped_tables_are_complete",
    14: "test_terminal.test_colour_off_a_terminal",
    15: "test_terminal.test_a_real_terminal",
    16: "test_errors.test_a_reader_that_has_gone_is_no_failure",
    20: "test_completion.test_bash",
    21: "test_reference.test_a_page_is_as_it_would_be_made_now",
}


def test_every_point_has_a_test() -> None:
    here = {int(found[1]) for name in globals() if (found := re.match(r"test_(\d\d)_", name))}
    assert here | ELSEWHERE.keys() == set(range(1, 23))
    for place in ELSEWHERE.values():
        module, _, name = place.partition(".")
        assert callable(getattr(import_module(module), name))


@pytest.mark.parametrize("command", COMMANDS)
def test_01_help_has_two_examples_and_a_page_that_is_there(run: Run, command: str) -> None:
    text = run(command, "--help").stdout
    assert "\x1b" not in text
    assert len(re.findall(r"^ \$ attncli [a-z]+", text, re.MULTILINE)) == 2
    *lines, page = EXAMPLES[command]
    assert any(line.split()[0] == command for line in lines)
    assert f"More: {page}" in text
    assert (Path(__file__).parents[2] / page).is_file()


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin1", "cp437", "utf-8"])
@pytest.mark.parametrize("command", ["compute", "variance", None])
def test_01_help_is_whole_under_every_encoding(
    monkeypatch: pytest.MonkeyPatch, encoding: str, command: str | None
) -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(SystemExit) as ended:
        app([*([command] if command else []), "--help"])
    stream.flush()
    text = written.getvalue().decode(encoding)
    assert ended.value.code == 0
    assert "?" not in text.replace("used there?", "")
    assert "Usage:" in text


def test_02_version(run: Run) -> None:
    asked = ("--version",), ("version",), ("compute", "--version")
    assert {run(*words).stdout for words in asked} == {f"attncli {__version__}\n"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("comput", "compute"),
        ("compute --hedas 2", "--heads"),
        ("compute --stage weight", "did you mean weights?"),
        ("compute --dtype flot16", "did you mean float16?"),
        ("mask -f jsn", "did you mean json?"),
        ("entropy --grid entropy_bits", "did you mean entropy_bits_mean?"),
        ("--format json compute", "attncli compute --format json"),
        ("compute -o x.npz", "--save x.npz"),
        ("entropy -o x.svg", "--plot x.svg"),
    ],
)
def test_04_mistakes_are_told_on_standard_error(run: Run, line: str, said: str) -> None:
    failed = run(*line.split(), code=2)
    assert said in failed.stderr
    assert not failed.stdout


def test_04_groups_are_suggested(run: Run) -> None:
    failed = run("entropy", MINILM, "--group", "1", code=1)
    assert "did you mean layers.1?" in failed.stderr


def test_07_results_alone_stand_on_standard_output(run: Run, tmp_path: Path) -> None:
    saved = tmp_path / "w.npz"
    done = run("compute", "--heads", 2, "--save", saved, "--format", "json")
    assert done.json["schema"] == "attncli.compute/1"
    assert "wrote" in done.stderr


@pytest.mark.parametrize("suffix", ["json", "ndjson", "csv", "txt"])
def test_09_the_name_of_a_target_chooses_the_format(run: Run, tmp_path: Path, suffix: str) -> None:
    target = tmp_path / f"x.{suffix}"
    run("entropy", "--heads", 2, "--output", target)
    begun = {"json": '{"schema"', "ndjson": '{"source"', "csv": "source,", "txt": "random, seed 0"}
    assert target.read_text().startswith(begun[suffix])
    run("entropy", "--heads", 2, "--output", target, "--format", "csv")
    assert target.read_text().startswith("source,")


def test_09_tensors_in_the_folder_of_a_target_are_kept(run: Run, tmp_path: Path) -> None:
    for name in ("weights", "k"):
        np.save(tmp_path / f"{name}.npy", np.ones((4, 8)))
    files = tmp_path / "weights.npy", tmp_path / "k.npy"
    failed = run("compute", *files, "--save", tmp_path, code=2)
    assert "--save: expected a name of its own" in failed.stderr
    run("compute", tmp_path / "k.npy", tmp_path / "k.npy", "--save", tmp_path / "out.npz")


@pytest.mark.parametrize("command", COMMANDS)
def test_10_the_options_of_output_are_everywhere(run: Run, command: str) -> None:
    text = run(command, "--help").stdout
    assert all(option in text for option in ("--output", "--quiet", "--debug"))


def test_17_the_seed_stands_in_tables_and_documents(run: Run) -> None:
    for command in ("entropy", "compute"):
        asked = (command, "--heads", 2, "--seed", 3)
        assert run(*asked).stdout.startswith("random, seed 3 · B=1 H=2")
        assert run(*asked, "--format", "json").json["params"]["seed"] == 3
    assert "seed 3" in run("variance", "--seed", 3, "--samples", 100).stdout


def test_18_units_stand_in_names(run: Run) -> None:
    table = run("entropy").stdout
    assert "entropy (bits)" in table
    assert "entropy at most 3 bits" in table
    keys: dict[str, Any] = run("entropy", "--format", "json").json["data"][0]
    assert all(re.search("bits|nats|normalized", key) for key in keys if "entropy" in key)


def test_19_quiet(run: Run, tmp_path: Path) -> None:
    done = run("compute", "--q-len", 4, "--save", tmp_path / "x.npz", "--quiet")
    assert not done.stderr


def test_10_chosen_columns_ranges_and_patterns(run: Run) -> None:
    asked = ("entropy", MINILM, "--group", "layers.[01]", "--head-index", "-2:")
    lines = run(*asked, "--columns", "group,head,entropy_b*", "-f", "csv").stdout.splitlines()
    assert lines[0] == "group,head,entropy_bits_mean"
    assert [line.split(",")[:2] for line in lines[1:]] == [
        [f"layers.{layer}", head] for layer in (0, 1) for head in ("10", "11")
    ]
    failed = run("entropy", "--columns", "entropy_bit", code=2)
    assert "did you mean entropy_bits_mean?" in failed.stderr


def test_05_facts_fail_in_ci(run: Run) -> None:
    sharp = ("entropy", "--scale", 10)
    failed = run(*sharp, "--fail-on", "entropy-bits=0.1,effective-keys=1.05", code=3)
    assert "--fail-on entropy-bits=0.1" in failed.stderr
    run("entropy", "--fail-on", "entropy-bits=0.1,effective-keys=1.05")


def test_22_no_network_and_nothing_kept(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked for")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run("compute")
    run("entropy", MINILM, "--summary")
    assert not list(tmp_path.iterdir())
