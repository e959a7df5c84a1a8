"""Several files of which some are broken: the rest count, each broken one has its line, exit 1."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from plain import Run

NPZ = "bad.npz: expected a complete .npz or .pt archive, got a damaged zip archive"


@pytest.fixture
def bundles(files: Path) -> Path:
    """Two bundles, one cut short, and one whose Q holds NaN."""
    whole = Path("bundle.npz").read_bytes()
    Path("other.npz").write_bytes(whole)
    Path("bad.npz").write_bytes(whole[:-40])
    nan = dict(np.load("bundle.npz"))
    nan["q"][0, 0, 0, 0] = np.nan
    np.savez("nan.npz", **nan)
    return files


@pytest.mark.parametrize("command", ["entropy", "variance"])
@pytest.mark.parametrize("flags", ["", "-q"])
def test_the_rest_is_analysed(run: Run, bundles: Path, command: str, flags: str) -> None:
    offset = ["--query-offset", "0", *flags.split()]
    line = [command, "bundle.npz", "bad.npz", "nan.npz", "other.npz", "-f", "json", *offset]
    found = run(*line, code=1)
    alone = run(command, "bundle.npz", "other.npz", "-f", "json", *offset)
    assert found.json["data"] == alone.json["data"]
    first, second = [line for line in found.stderr.splitlines() if "error" in line]
    assert first == f"attncli: error: {NPZ}"
    assert "q (nan.npz::q): expected" in second
    left_out = [text for text in found.json["warnings"] if text not in alone.json["warnings"]]
    assert left_out[0] == f"left out: {NPZ}"
    assert len(left_out) == 2


def test_what_is_written_appears(run: Run, bundles: Path) -> None:
    found = run("entropy", "bundle.npz", "bad.npz", "-f", "csv", "-o", "out.csv", code=1)
    assert "attncli: wrote out.csv" in found.stderr
    assert Path("out.csv").read_text() == run("entropy", "bundle.npz", "-f", "csv").stdout


def test_mask_and_inspect_do_the_same(run: Run, bundles: Path) -> None:
    for line in (
        ["mask", "bundle.npz", "bad.npz", "other.npz", "--causal", "--query-offset", "0"],
        ["inspect", "bundle.npz", "bad.npz", "other.npz"],
    ):
        without = [word for word in line if word != "bad.npz"]
        found = run(*line, "-f", "ndjson", code=1)
        assert found.stdout == run(*without, "-f", "ndjson").stdout
        assert found.stderr.splitlines() == [f"attncli: error: {NPZ}"]


def test_inspect_shows_what_is_there(run: Run, files: Path) -> None:
    found = run("inspect", "q.npy", "missing.npy", "k.npy", code=1)
    assert [line.split()[0] for line in found.stdout.splitlines()] == ["file", "q.npy", "k.npy"]
    assert found.stderr == (
        "attncli: error: missing.npy: expected a file, got no file of this name\n"
    )


def test_weights_of_several_files(run: Run, files: Path) -> None:
    for name in ("a", "b"):
        np.save(f"{name}.npy", np.full((2, 3, 4, 4), 0.25, np.float32))
    Path("c.npy").write_bytes(Path("a.npy").read_bytes()[:200])
    line = ["entropy", "--weights", "a.npy", "--weights", "c.npy", "--weights", "b.npy"]
    found = run(*line, "-f", "json", code=1)
    assert {record["source"] for record in found.json["data"]} == {"a.npy", "b.npy"}
    assert found.stderr.startswith("attncli: error: c.npy: expected 384 bytes")


@pytest.mark.parametrize(
    "line",
    [
        "entropy q.npy k.npy missing.npy",
        "entropy q.npy missing.npy",
        "variance missing.npz absent.npz",
        "mask missing.npz absent.npz",
        "inspect missing.npy absent.npy",
        "inspect missing.npy",
        "mask bundle.npz bad.npz --save m.npy",
    ],
)
def test_what_belongs_together_fails_together(run: Run, bundles: Path, line: str) -> None:
    failed = run(*line.split(), code=1)
    assert failed.stdout == ""
    assert len([text for text in failed.stderr.splitlines() if "error" in text]) == 1


def test_what_is_left_out_comes_before_what_is_asked_for(run: Run, bundles: Path) -> None:
    line = ["entropy", "bundle.npz", "bad.npz", "--fail-on", "max-logit=-100"]
    assert "fail-on" not in run(*line, code=1).stderr
    assert "fail-on" in run(*line[:2], *line[3:], code=3).stderr


def test_more_bundles_than_descriptors(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "0.npz", q=rng.random((2, 2)), k=rng.random((2, 2)))
    for number in range(1, 100):
        os.link(tmp_path / "0.npz", tmp_path / f"{number}.npz")
    (tmp_path / "50.npz").unlink()
    (tmp_path / "50.npz").write_text("no bundle")
    names = [f"{number}.npz" for number in range(100)]
    done = subprocess.run(
        [sys.executable, "-m", "attncli", "entropy", *names, "-f", "csv"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48)),
    )
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 1 + 99
    assert done.stderr.splitlines()[0].startswith("attncli: error: 50.npz: expected a .npy")
    assert len(done.stderr.splitlines()) == 1
