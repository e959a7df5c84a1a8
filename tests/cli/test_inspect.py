"""What files hold: against NumPy, and without torch where none is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from plain import Run, Tensors
from safetensors.torch import save_file


def test_records(run: Run, files: Path, tensors: Tensors) -> None:
    odd = np.array([1.0, np.nan, np.inf, -np.inf, 3.0])
    np.save("odd.npy", odd)
    found = run("inspect", "bundle.npz", "odd.npy", "-f", "json").json
    assert found["schema"] == "attncli.inspect/1"
    by_name = {(record["source"], record["name"]): record for record in found["data"]}
    q = by_name["bundle.npz", "q"]
    assert (q["shape"], q["dtype"], q["elements"], q["bytes"]) == (
        [2, 4, 5, 8],
        "float32",
        320,
        1280,
    )
    exact = tensors["q"].astype(np.float64)
    for name in ("min", "max", "mean", "std"):
        assert q[name] == pytest.approx(getattr(exact, name)(), rel=1e-12)
    record = by_name["odd.npy", None]
    assert [record[name] for name in ("n_nan", "n_posinf", "n_neginf")] == [1, 1, 1]
    assert [record[name] for name in ("min", "max", "mean", "std")] == [1, 3, 2, 1]


def test_formats_agree(run: Run, files: Path) -> None:
    data = run("inspect", "bundle.npz", "q.npy", "-f", "json").json["data"]
    lines = run("inspect", "bundle.npz", "q.npy", "-f", "ndjson").stdout.splitlines()
    assert [json.loads(line) for line in lines] == data
    rows = run("inspect", "bundle.npz", "q.npy", "-f", "csv").stdout.splitlines()
    assert rows[0].split(",") == list(data[0])
    assert rows[1].startswith("bundle.npz,q,2 4 5 8,float32,320,1280,0,0,0,")
    assert rows[4].startswith("q.npy,,2 4 5 8,")
    table = run("inspect", "bundle.npz", "q.npy").stdout.splitlines()
    assert len(table) == 5
    assert "(2, 4, 5, 8)" in table[1]


def test_narrow_types_and_names(run: Run, files: Path) -> None:
    narrow = torch.tensor([1.5, -2.0])
    kinds = {"b": torch.bfloat16, "e": torch.float8_e4m3fn, "h": torch.float16}
    save_file({name: narrow.to(kind) for name, kind in kinds.items()}, "n.safetensors")
    found = run("inspect", "n.safetensors", "-f", "json").json["data"]
    assert {record["dtype"] for record in found} == {"bfloat16", "float8_e4m3fn", "float16"}
    assert {(record["min"], record["max"]) for record in found} == {(-2.0, 1.5)}
    (one,) = run("inspect", "n.safetensors::e", "-f", "json").json["data"]
    assert one["name"] == "e"
    missing = run("inspect", "n.safetensors::z", code=1)
    assert "expected a tensor named z, got" in missing.stderr


def test_what_holds_no_numbers_is_listed_all_the_same(run: Run, files: Path) -> None:
    np.savez("mixed.npz", a=np.ones(2), s=np.array(["x"]), c=np.ones(3, complex))
    np.save("raw.npy", np.zeros(2, "V2"))
    outcome = run("inspect", "mixed.npz", "raw.npy", "-f", "json")
    records = outcome.json["data"]
    assert [record["mean"] for record in records] == [1.0, None, None, None]
    assert "got complex128; its values are not looked at" in outcome.stderr
    assert "expected --dtype to say what |V2 is" in outcome.stderr
    (raw,) = run("inspect", "raw.npy", "--dtype", "bfloat16", "-f", "json").json["data"]
    assert raw["mean"] == 0.0


def test_standard_input(run: Run, files: Path) -> None:
    (found,) = run("inspect", "-", "-f", "json", stdin=Path("q.npy").read_bytes()).json["data"]
    assert found["source"] == "-"


def test_no_torch_for_numpy_files(files: Path) -> None:
    script = (
        "import sys\n"
        "from attncli.cli.app import app\n"
        "try:\n    app(['inspect', 'q.npy', 'bundle.npz'])\n"
        "except SystemExit as ended:\n    assert not ended.code\n"
        "assert 'numpy' in sys.modules\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_rest_of_a_file_is_listed(run: Run, files: Path) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    torch.save({"q": nested, "k": torch.ones(2), "made by": Path("x")}, "mixed.pt")
    outcome = run("inspect", "mixed.pt", "-f", "json")
    assert [record["name"] for record in outcome.json["data"]] == ["k"]
    assert "mixed.pt: left out as no dense tensor: q (a nested tensor), made by" in outcome.stderr
    failed = run("entropy", "mixed.pt::q", "mixed.pt::k", code=1).stderr
    assert "mixed.pt::q: expected a dense tensor, got a nested tensor" in failed
    assert "--key-lengths" in failed
    for words in (["mixed.pt"], ["mixed.pt", "mixed.pt"]):
        failed = run("entropy", *words, code=1).stderr
        assert "got no q, only k; no dense tensor is q (a nested tensor)" in failed
        assert "to_padded_tensor" in failed
    torch.save([nested, nested], "nested.pt")
    for command in ("inspect", "entropy"):
        failed = run(command, "nested.pt", code=1).stderr
        assert "expected dense tensors, got a torch file of a nested tensor" in failed
