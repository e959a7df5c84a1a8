"""One line, one code: whatever is wrong with the command line, the data or the machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from plain import Run

PROGRAM = [sys.executable, "-m", "attncli"]

# What comes after the option is Typer's where it finds the fault, in the words of its version.
USAGE = {
    "compute --causel": "--causel: ",
    "compute --digits": "--digits: ",
    "compute --digits x": "--digits: ",
    "compute --digits 18": "--digits: ",
    "compute --max-values -1": "--max-values: ",
    "compute --scale x": "--scale: ",
    "compute --scale nan": "--scale: expected finite numbers, got nan",
    "compute --scale inf": "--scale: expected finite numbers, got inf",
    "compute --scale 1,2": "--scale: expected 1 or one per query head (H=1), got 2",
    "compute --temperature 0": "--temperature: expected a finite number above 0, got 0.0",
    "compute --softcap -1": "--softcap: expected a finite number above 0, got -1.0",
    "compute -f xml": "--format: ",
    "compute --layout sbhd": "--layout: ",
    "compute --causal=yes": "--causal: ",
    "compute --rows x": "--rows: expected whole numbers or A:B, got 'x'",
    "compute --rows 4": "--rows: expected an index from -4 to 3, got 4",
    "compute --rows ,": "--rows: expected at least one value, got none",
    "compute --stage ,": "--stage: expected at least one name, got none",
    "compute --stage softmax": "--stage: expected one of scores, scaled, masked, weights, output",
    "compute --stage capped": "--stage: expected one of scores, scaled, masked, weights, output",
    "compute --prefix 1": "--prefix: expected --causal beside it",
    "compute --left-window -1": "--left-window: expected a whole number of at least 0, got -1",
    "compute --key-lengths 5": "--key-lengths: expected at most 4",
    "compute --mask-true drop": "--mask-true: expected --attn-mask beside it, got none",
    "compute --step": "--step: expected --explain beside it",
    "compute --explain --step": "--step: expected a terminal to wait at, got none",
    "compute --explain -f csv": "--explain: expected --format table or json, got csv",
    "compute --wo q.npy": "--x: expected --x, --wq and --wk together, got only --wo",
    "compute --wv q.npy": "--x: expected --x, --wq and --wk together, got only --wv",
    "compute --x q.npy --wq q.npy --wk q.npy --wo q.npy": "--wo: expected --wv beside it",
    "compute --bo q.npy": "--x: expected --x, --wq and --wk together, got only --bo",
    "compute --x q.npy --wq q.npy --wk q.npy --bv q.npy": "--bv: expected --wv beside it",
    "compute --layout bsh": "--layout: expected files beside it, got none",
    "compute --weights-layout out-in": "--weights-layout: expected --x and weights beside it",
    "compute --group a": "--group: expected a bundle beside it, got no file",
    "compute q.npy k.npy --seed 1": "--seed: expected nothing beside the files, got it",
    "compute q.npy k.npy --q-len 1": "--q-len: expected nothing beside the files, got it",
    "compute q.npy": "--k: expected q and k, got only q",
    "compute q.npy k.npy v.npy q.npy": "FILE: expected q, k and v, got 4 files",
    "compute bundle.npz q.npy": "q.npy: expected either bundles or files of one tensor each",
    "compute bundle.npz bundle.npz": "FILE: expected one bundle, got several",
    "compute - -": "-: expected standard input to be read once, got it several times",
    "compute --q - --k -": "-: expected standard input to be read once, got it several times",
    "variance q.npy k.npy --fit-scale bundle.npz": "--fit-scale: expected one tensor, got a file",
    "compute q.npy k.npy --causal": "--query-offset: expected a value, since --causal needs",
    "compute q.npy k.npy --sinks 1": "--sinks: expected one logit per query head (H=4), got (1,)",
    "compute q.npy k.npy --heads 3": "--heads: expected 4",
    "compute --heads 3 --kv-heads 2": "--kv-heads: expected a divisor of --heads 3, got 2",
    "compute --dk 0": "--dk: expected at least 1, got 0",
    "compute --seed -1": "--seed: expected at least 0, got -1",
    "compute --device tpu": "--device: expected auto, cpu, cuda or cuda:N, got tpu",
    "compute --dtype int8": "--dtype: expected one of float64,",
    "compute --save x.txt": "x.txt: expected a name that ends in .npz, .safetensors or .npy",
    "comput": "attncli: No such command 'comput'",
    "--verbose": "--verbose: ",
    "inspect": "FILE: ",
}


@pytest.mark.parametrize("line", USAGE)
def test_faults_of_the_command_line(run: Run, files: Path, line: str) -> None:
    outcome = run(*line.split(), code=2)
    assert_told(outcome.stdout, outcome.stderr, USAGE[line])


DATA = {
    "compute no.npy k.npy": "no.npy: expected a file, got no file of this name",
    "compute folder k.npy": "folder: expected files of tensors (.npy, .npz, .safetensors, .pt",
    "compute empty k.npy": "empty: expected a .npy, .npz, .safetensors or .pt file, got an empty",
    "compute text k.npy": "text: expected a .npy, .npz, .safetensors or .pt file, got",
    "compute q.npy v.npy": "k (v.npy): expected d_k=8 like q (2, 4, 5, 8), got (2, 2, 7, 6)",
    "compute q.npy k.npy q.npy": "v (q.npy): expected H_kv=2 and S_k=7",
    "compute object.npy k.npy": "object.npy: expected",
    "compute complex.npy k.npy": "complex.npy: expected",
    "compute bundle.npz --group x": "bundle.npz: expected a group x",
    "compute bundle.npz::z k.npy": "bundle.npz: expected a tensor named z, got q, k, v",
    "compute bundle.npz --attn-mask q.npy": "--attn-mask: expected (B=2, H=4, S_q=5, S_k=7)",
    "compute bundle.npz --attn-mask no.npy": "no.npy: expected a file, got no file",
    "compute bundle.npz --key-padding v.npy": "--key-padding: expected (B=2, S_k=7), got",
    "compute --q-len 10000000000": "--q-len: expected a need of at most",
    "compute --device cuda:99": "--device: expected ",
    "compute -o no/where.txt": "no/where.txt: expected a folder no to write to",
    "compute -o .": ".: expected a file to write, got a directory",
    "compute --save no/where.npz": "no/where.npz: expected a folder no to write to",
    "compute -o /dev/full": "/dev/full: expected free space, got a full disk",
    "inspect no.npy": "no.npy: expected a file, got no file of this name",
}


@pytest.mark.parametrize("line", DATA)
def test_faults_of_data_and_machine(run: Run, files: Path, line: str) -> None:
    Path("empty").touch()
    Path("folder").mkdir()
    Path("text").write_text("hello\n")
    np.save("object.npy", np.array([{}, 1], object), allow_pickle=True)
    np.save("complex.npy", np.ones((2, 2), complex))
    outcome = run(*line.split(), code=1)
    assert_told(outcome.stdout, outcome.stderr, DATA[line])


def assert_told(stdout: str, stderr: str, beginning: str) -> None:
    """One line of error, at most one of advice, nothing of results, nothing dangerous."""
    lines = stderr.splitlines()
    assert lines[0].startswith(f"attncli: error: {beginning}")
    assert 1 <= len(lines) <= 2
    assert all(line.startswith("  ") for line in lines[1:])
    assert stdout == ""
    assert "Traceback" not in stderr
    assert "allow_pickle" not in stderr
    assert "weights_only" not in stderr


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("compute --causel", "did you mean --causal"),
        ("comput", "Did you mean 'compute', 'compare'?"),
        ("compute --digits x", "`attncli compute --help` lists what it takes"),
        ("compute k.npu q.npy", "Did you mean"),
        ("compute q.npy k.npy --causal", "top-left"),
    ],
)
def test_advice(run: Run, files: Path, line: str, advice: str) -> None:
    assert advice in run(*line.split(), code=1 if "npu" in line else 2).stderr


@pytest.mark.parametrize(
    "line",
    [
        "compute q.npy k.npy v.npy -o q.npy",
        "compute q.npy k.npy v.npy --save k.npy --stage output",
        "compute q.npy k.npy v.npy -o ./new.png --plot ./new.png",
        "mask --attn-mask q.npy -o q.npy",
        "report q.npy k.npy v.npy -o v.npy",
        "compare q.npy k.npy v.npy --other-k k.npy -o k.npy",
    ],
)
def test_no_input_is_overwritten(run: Run, files: Path, line: str) -> None:
    before = {path: path.read_bytes() for path in files.iterdir()}
    assert "expected a name of its own" in run(*line.split(), code=2).stderr
    assert {path: path.read_bytes() for path in files.iterdir()} == before


def test_a_target_may_be_called_as_a_value_is(run: Run, files: Path) -> None:
    for _ in range(2):
        run(*["compute", "q.npy", "k.npy", "v.npy", "--stage", "output", "-o", "output"])
    assert (files / "output").is_file()


def test_debug_shows_where(run: Run, files: Path) -> None:
    assert "Traceback" in run("compute", "--rows", "9", "--debug", code=2).stderr
    assert "Traceback" in run("compute", "no.npy", "k.npy", "--debug", code=1).stderr


def test_memory_is_refused_before_it_is_taken(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attncli.limits.available_memory", lambda: 1000)
    outcome = run("compute", code=1)
    assert outcome.stderr.startswith("attncli: error: --max-values: expected a need of at most")
    assert "--format csv" in outcome.stderr


def test_a_failed_run_leaves_the_old_file(run: Run, files: Path) -> None:
    Path("out.json").write_text("old")
    np.save("nan.npy", np.full((2, 2), np.nan))
    run("compute", "nan.npy", "nan.npy", "-o", "out.json", code=1)
    assert Path("out.json").read_text() == "old"
    run("compute", "-o", "out.json", "-f", "json")
    assert Path("out.json").read_text().startswith("{")
    assert not list(Path().glob(".*"))


def test_disk_full_at_standard_output(files: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*PROGRAM, "inspect", "q.npy"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == (
        "attncli: error: standard output: expected free space, got a full disk\n"
    )


@pytest.mark.parametrize("line", ["inspect q.npy -f ndjson", "--help", "inspect --help"])
def test_a_reader_that_has_gone_is_no_failure(files: Path, line: str) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*PROGRAM, *line.split()], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    "line",
    [
        "entropy --q-len 900 --k-len 9 --per-row -f csv",
        "compare --q-len 900 --k-len 9 --what-if scale=1 --per-row",
        "variance --dk 1:400 --samples 10 -f ndjson",
    ],
)
def test_a_reader_that_has_gone_takes_no_picture_along(files: Path, line: str) -> None:
    read, write = os.pipe()
    os.close(read)
    words = [*PROGRAM, *line.split(), "--plot", "x.svg"]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"attncli: wrote x.svg\n")
    assert Path("x.svg").read_text().endswith("</svg>\n")


def test_interrupt(files: Path) -> None:
    lengths = ["--q-len", "30000", "--k-len", "30000"]
    running = subprocess.Popen(
        [*PROGRAM, "compute", *lengths, "--stage", "weights", "--save", "w.npz", "-o", "t"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 40
    while not list(Path().glob(".attncli-*")) and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.5)  # well into the writing
    running.send_signal(signal.SIGINT)
    out, said = running.communicate(timeout=120)
    assert (running.returncode, out, said) == (130, "", "attncli: interrupted\n")
    left = sorted(path.name for path in Path().iterdir())
    assert left == ["bundle.npz", "k.npy", "q.npy", "v.npy"]


def test_an_unforeseen_fault_is_one_line_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise ValueError("some\nthing")

    monkeypatch.setattr("attncli.attention.qkv.example", fail)
    outcome = run("compute", code=1)
    assert outcome.stderr.startswith("attncli: error: unexpected ValueError: some thing\n")
