"""`check` for real: mistakes made by hand, on files, named and verified through the command."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain import Run

sys.path.insert(0, str(Path(__file__).parents[1] / "attention"))

from mistaken import MADE, NOT_LOGSUMEXP, ONLY_OUTPUT, Draw, attend, draw_problem, offset_fits

# Mistakes that options of the command make on purpose, whatever the problem.
BY_OPTIONS = [
    *("scale:none", "scale:dv", "scale:model", "scale:dk", "scale:squared", "scale:fitted"),
    *("causal:missing", "offset:top-left", "offset:bottom-right", "offset:-1", "offset:+1"),
    *("window:-1", "window:+1", "window:missing", "mask:inverted", "mask:missing"),
    *("padding:ignored", "softcap:missing", "sinks:missing", "sinks:renormalised"),
]


@pytest.fixture(autouse=True)
def _one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)


def written(draw: Draw) -> list[str]:
    """The draw as files, and the command line that declares it, without candidates."""
    for role in ("q", "k", "v"):
        np.save(f"{role}.npy", getattr(draw, role).contiguous().numpy())
    words = ["check", "q.npy", "k.npy", "v.npy", "--scale", repr(draw.scale)]
    words += ["--causal"] if draw.causal else []
    mask = draw.keep if draw.added is None else draw.added
    if mask is not None:
        np.save("mask.npy", (~mask if draw.drop else mask).numpy())
        words += ["--attn-mask", "mask.npy"] + (["--mask-true", "drop"] if draw.drop else [])
    numbers: dict[str, Any] = {"--query-offset": draw.offset, "--softcap": draw.softcap}
    numbers |= {"--left-window": draw.left, "--right-window": draw.right}
    for option, value in numbers.items():
        words += [] if value is None else [option, str(value)]
    if draw.key_lengths is not None:
        words += ["--key-lengths", ",".join(map(str, draw.key_lengths))]
    if draw.sinks is not None:
        words += ["--sinks", ",".join(str(float(sink)) for sink in draw.sinks)]
    return words


def candidate(target: str, values: torch.Tensor) -> list[str]:
    """The candidate as a file, and the option that names it."""
    np.save(f"{target}.npy", values.contiguous().numpy())
    return [f"--actual-{target}", f"{target}.npy"]


def matching(run: Run, words: list[str]) -> list[dict[str, Any]]:
    found = run(*words, "--format", "json", code=3).json["data"]
    return [one for one in found["hypotheses"] if one["matches"]]


def assert_verified(run: Run, hypotheses: list[dict[str, Any]]) -> None:
    """The command that is printed passes: what is named is what was done."""
    for one in hypotheses:
        program, *words = shlex.split(one["command"])
        assert program == "attncli"
        run(*words)


def assert_named(run: Run, name: str, target: str, seed: int) -> None:
    """The mistake is named, and passes when made on purpose."""
    draw = offset_fits(name, draw_problem(name, seed))
    words = written(draw)
    for made in MADE[name](draw):
        line = words + candidate(target, made[target])
        if torch.allclose(made[target], attend(draw)[target], 1e-3, 1e-4):
            continue  # this mistake changes nothing on this problem
        found = matching(run, line)
        assert name in [one["name"] for one in found]
        for one in found:
            assert (one["options"] is None) == (one["command"] is None) or "qk:" in one["name"]
        if name in BY_OPTIONS:
            assert all(one["command"] for one in found if one["name"] == name)
        assert_verified(run, [one for one in found if one["command"]])


@pytest.mark.parametrize("name", [name for name in MADE if name != "dropout"])
def test_a_mistake_is_named_by_its_output_and_verified(run: Run, name: str) -> None:
    assert_named(run, name, "output", 3)


@pytest.mark.parametrize("name", [name for name in BY_OPTIONS if name not in ONLY_OUTPUT])
def test_a_mistake_is_named_by_its_weights_and_verified(run: Run, name: str) -> None:
    assert_named(run, name, "weights", 4)


@pytest.mark.parametrize("name", [name for name in BY_OPTIONS if name not in NOT_LOGSUMEXP])
def test_a_mistake_is_named_by_its_logsumexp_and_verified(run: Run, name: str) -> None:
    assert_named(run, name, "logsumexp", 5)
