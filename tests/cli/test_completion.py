"""Completion in real shells: commands, options, choices, stages, groups, and tensors after `::`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

PROGRAM = """#!{python}
import sys
sys.argv[0] = "attncli"
from attncli.cli.app import main
main()
"""
# What is typed, and what it is completed to; "|" is where bash takes a word apart.
CASES = [
    ("attncli comp", {"compute", "compare"}),
    ("attncli entropy --left-w", {"--left-window"}),
    ("attncli compute --layout bs", {"bshd", "bsh"}),
    ("attncli compute --layout|=|bs", {"bshd", "bsh"}),
    ("attncli compute --stage scores,wei", {"scores,weights"}),
    ("attncli variance --scale-rule l", {"linear", "log-n"}),
    ("attncli entropy b.npz --group layers.1", {"layers.1", "layers.10"}),
    ("attncli compute --q saved|::|o", {"saved::output", "saved::other"}),
    ("attncli compute --q b.npz|::|layers.1.", {"b.npz::layers.1.q", "b.npz::layers.1.k"}),
    ("attncli compute s.safetensors|::|o", {"s.safetensors::other"}),
    ("attncli compute b.npz|::|nothing", set()),
]


@pytest.fixture
def shell(tmp_path: Path) -> Callable[..., str]:
    """Run a script of a shell where `attncli` is a program, beside some bundles."""
    safetensors = pytest.importorskip("safetensors.numpy")
    arrays = {f"layers.{n}.{role}": np.zeros((2, 2)) for n in (1, 2, 10) for role in "qk"}
    np.savez(tmp_path / "b.npz", **arrays)
    safetensors.save_file({"other": np.zeros(2)}, tmp_path / "s.safetensors")
    (tmp_path / "saved").mkdir()
    safetensors.save_file({"other": np.zeros(2)}, tmp_path / "saved" / "s.safetensors")
    np.save(tmp_path / "saved" / "output.npy", np.zeros(2))
    program = tmp_path / "bin" / "attncli"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)

    def run(name: str, *arguments: str) -> str:
        found = shutil.which(name)
        if found is None:
            pytest.skip(f"there is no {name}")
        path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            [found, *arguments],
            cwd=tmp_path,
            env=os.environ | {"PATH": path, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert not done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize(("typed", "completed"), CASES)
def test_bash(shell: Callable[..., str], typed: str, completed: set[str]) -> None:
    """Bash hands over the parts of a word, and takes what follows the last of them."""
    words = typed.replace("|", " ").split()
    script = (
        '. <(attncli --show-completion bash); COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); '
        '_attncli_completion attncli; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    got = set(shell("bash", "--norc", "-c", script, "bash", *words).split())
    assert got == {one.rpartition("::")[2] for one in completed}


@pytest.mark.parametrize(("typed", "completed"), CASES[4:8])
def test_fish(shell: Callable[..., str], typed: str, completed: set[str]) -> None:
    line = typed.replace("|", "")
    script = f"attncli --show-completion fish | source; complete -C '{line}'"
    got = {one.split("\t")[0] for one in shell("fish", "--no-config", "-c", script).split("\n")}
    assert got - {""} == completed


@pytest.mark.parametrize(("typed", "completed"), CASES[4:8])
def test_zsh(shell: Callable[..., str], typed: str, completed: set[str]) -> None:
    """What zsh is told of: `_arguments` and `_files` are its own."""
    script = (
        "compdef() { }; _files() { }; "
        "_arguments() { spec=${1#*\\(\\(}; print -r -- ${spec%\\)\\)} }; "
        'eval "$(attncli --show-completion zsh)"; words=(${(z)1}); CURRENT=$#words; '
        "_attncli_completion"
    )
    got = shell("zsh", "-f", "-c", script, "zsh", typed.replace("|", ""))
    found = {one.split('":"')[0] for one in re.findall(r'"((?:[^"]|":")*)"', got)}
    assert {one.replace("\\", "") for one in found} == completed


def test_of_a_header_torch_is_not_loaded(shell: Callable[..., str]) -> None:
    script = (
        "import os, sys; sys.argv = ['attncli']\n"
        "from attncli.cli.app import main\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules, file=sys.stdout)"
    )
    words = "attncli compute --q b.npz::layers.2."
    asked = f"_ATTNCLI_COMPLETE=complete_zsh _TYPER_COMPLETE_ARGS='{words}' {sys.executable} -c"
    got = shell("bash", "-c", f'{asked} "$1"', "bash", script)
    assert "layers.2.q" in got
    assert got.splitlines()[-1] == "False"
