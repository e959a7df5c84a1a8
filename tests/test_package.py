"""What `pip install attncli` gives: the wheel and the sdist as they are built, each installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import attncli

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "attncli"
for needed in ("build", "hatchling", "twine"):
    pytest.importorskip(needed)


def _run(*words: str | Path, folder: Path | None = None) -> str:
    """Standard output of a program that does well, which hears nothing of this checkout."""
    lines = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        list(map(str, words)), cwd=folder, env=lines, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist, and the wheel that is built from it: "tar.gz" and "whl"."""
    target = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", target, ROOT)
    return {ending: next(target.glob(f"*.{ending}")) for ending in ("tar.gz", "whl")}


def _installed(package: Path, home: Path) -> Path:
    """The folder of programs of a new environment, which borrows all other packages from ours."""
    venv.create(home, with_pip=False)
    programs = home / ("Scripts" if os.name == "nt" else "bin")
    variables = {"base": str(home), "platbase": str(home)}
    packages = Path(sysconfig.get_path("purelib", vars=variables))
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--python", programs / "python", "install", "--quiet")
    # Else pip would find this checkout among the borrowed packages, and leave it at that.
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed")
    _run(*pip, *options, package)
    place = "import attncli, pathlib; print(pathlib.Path(attncli.__file__).parent)"
    found = Path(_run(programs / "python", "-c", place, folder=home).strip())
    assert found.is_relative_to(home)
    assert (found / "py.typed").is_file()
    return programs


def test_an_index_would_take_them(built: dict[str, Path]) -> None:
    said = _run(sys.executable, "-m", "twine", "check", "--strict", *built.values())
    assert said.count("PASSED") == len(built)


def test_the_wheel_holds_the_whole_package_and_nothing_else(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["whl"]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        told = {Path(name).name for name in wheel.namelist()} - {Path(n).name for n in names}
    there = {
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == there
    assert {"METADATA", "LICENSE", "entry_points.txt"} <= told


def test_the_sdist_holds_what_its_tests_need(built: dict[str, Path]) -> None:
    with tarfile.open(built["tar.gz"]) as sdist:
        sizes = {member.name.partition("/")[2]: member.size for member in sdist.getmembers()}
    wanted = ["tests/conftest.py", ".github/CONTRIBUTING.md", ".github/make_reference.py"]
    wanted += ["docs/index.md", "sample_inputs/example/q.npy", "CITATION.cff", "LICENSE", ".ci/run"]
    assert [name for name in wanted if name not in sizes] == []
    assert not any("__pycache__" in name or name.endswith(".pyc") for name in sizes)
    assert max(sizes.values()) < 2**20
    assert sum(sizes.values()) < 2**23


def test_the_wheel_runs(built: dict[str, Path], tmp_path: Path) -> None:
    """`compute` runs the whole program, `report` reads every file beside the modules."""
    programs = _installed(built["whl"], tmp_path / "home")
    assert _run(programs / "attncli", "--version") == f"attncli {attncli.__version__}\n"
    assert "weights = softmax(" in _run(programs / "attncli", "compute", folder=tmp_path)
    _run(programs / "python", "-m", "attncli", "report", "-o", "page.html", folder=tmp_path)
    assert "</html>" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_sdist_installs(built: dict[str, Path], tmp_path: Path) -> None:
    """Which builds the same wheel."""
    programs = _installed(built["tar.gz"], tmp_path / "home")
    assert _run(programs / "attncli", "--version") == f"attncli {attncli.__version__}\n"


def test_all_places_say_the_same_version() -> None:
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {attncli.__version__}\n" in cited
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", changes, re.MULTILINE)
    assert newest is not None
    assert newest[1] == attncli.__version__
