"""Help, version and usage errors load neither torch nor NumPy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import requires
from typing import Any

import pytest

from attncli.analysis.options import AttentionWords
from attncli.cli.app import subcommand
from attncli.cli.commands import MaskOptions, PlotOptions

HEAVY = ("torch", "numpy")
SCRIPT = """
import sys
from attncli.cli.app import app
try:
    app(sys.argv[1:])
except SystemExit:
    pass
print("loaded:", *(name for name in {heavy} if name in sys.modules))
"""


def loaded(arguments: list[str], heavy: tuple[str, ...] = HEAVY) -> list[str]:
    """The heavy libraries that a run of the program imports."""
    script = [sys.executable, "-c", SCRIPT.format(heavy=heavy), *arguments]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()[1:]


LIGHT = """

--help
--version
compute --help
inspect --help
nonsense
compute --nope
compute --digits
compute --digits x
compute -f xml
compute --step
inspect
"""


@pytest.mark.parametrize("line", LIGHT.splitlines()[1:])
def test_nothing_heavy(line: str) -> None:
    assert loaded(line.split()) == []


def test_the_check_can_fail() -> None:
    assert loaded(["compute"]) == ["torch", "numpy"]


@pytest.mark.parametrize("line", ["variance --samples 100", "variance --logits 10,1,1"])
def test_experiments_do_without_torch(line: str) -> None:
    assert loaded(line.split()) == ["numpy"]


# Mistakes in values, each of which is answered without waiting for torch.
MISTYPED = """
compute --rows a
compute --rows 1:2:3
compute --rows ,
compute --rows 9
compute --head-index x
compute --heads 2 --head-index 7
compute --batch-index 7
compute --columns a
compute --columns 77
compute --scale nan
compute --scale x
compute --scale 1,2
compute --temperature 0
compute --softcap -1
compute --left-window -1
compute --sink-window 3
compute --prefix 3
compute --dilation 0 --left-window 3
compute --query-offset foo
compute --query-offset 1,2
compute --q-len 2 --k-len 6 --causal
compute --key-lengths a
compute --key-lengths 99
compute --query-lengths 1,2,3
compute --key-padding 1,2
compute --mask-true drop
compute --hide-below 3
compute --segments 0,1
compute --segments 0,0,0 --position-ids 0,0,0
compute --cu-seqlens-q 1,2
compute --query-segments 0,0
compute --alibi-slopes 1,2,3
compute --sinks 1,2,3
compute --dtype int8
compute --stage foo
compute --stage ,
compute --stage capped
compute --save x.txt
compute --plot x.foo
compute --device foo
compute --layout bshd
compute --layout x
compute --weights-layout out-in
compute --group x
compute --heads 0
compute --heads 4 --kv-heads 3
compute --q-len -1
compute --seed -1
compute --explain -f csv
compute --explain --step
compute --bq x.npy
compute --wo x.npy --x a.npy --wq b.npy --wk c.npy
compute --qkv x.npy --q a.npy
compute a.npy --q-len 3
compute a.npy b.npy --rows a
compute a.npy b.npy --scale nan
compute a.npy b.npy --dtype int8
compute a.npy b.npy --stage foo
entropy --grid banana
entropy --grid entropy_bits
entropy --per-row --per-key
entropy --top 3
entropy --temperatures a
entropy --temperatures 0
entropy --temperatures 1,2 --temperature 2
entropy --fail-on foo=1
entropy --fail-on max-logit=x
entropy --label-limit foo=1
entropy --label-limit sink=2
entropy --sample-rows 3 --per-row
entropy --head-index 9
entropy --compare-scale --weights w.npy
entropy --weights w.npy --q q.npy
variance a.npy b.npy --dk 64
variance a.npy b.npy --scale nan
check a.npy b.npy
check --actual-output x.npy
check a.npy b.npy c.npy --actual-output x.npy --rtol -1
check a.npy b.npy c.npy --actual-output x.npy --wo w.npy
check a.npy b.npy c.npy --actual-output x.npy --left-window -1
compare --what-if foo=1
compare --what-if scal=1
compare --what-if scale=x
compare --what-if causal=maybe
compare --what-if left-window=-1
compare --what-if k-dtype=int9
compare --what-if keep-keys=foo:1
compare --what-if scale=1 --sort foo
compare --what-if scale=1 --grid foo
compare --what-if scale=1 --per-row --sort foo
compare --what-if scale=1 --fail-on foo=1
compare --what-if scale=1 --head-index x
report -o x.html --max-size foo
report -o x.html --label-limit foo=1
report -o x.html --batch-index 9
report -o x.html --scale nan
report -o x.html --device foo
mask --effect q.npy k.npy --scale nan
capture x --text a -o y.safetensors --dtype foo
capture x --text a -o y.safetensors --layers a
capture x --text a -o y.safetensors --device foo
"""

# Runs each line in a child of its own, which says how it ended and whether it had torch.
CHILDREN = """
import os, sys
from attncli.cli import refusals
from attncli.cli.app import app
for line in sys.argv[1:]:
    if not os.fork():
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        try:
            app(line.split())
        except SystemExit as end:
            os.write(1, f"{int(end.code)} {'torch' in sys.modules}\\n".encode())
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def ended() -> dict[str, str]:
    """How each mistyped line ended, and one that is right."""
    lines = [*MISTYPED.split("\n")[1:-1], "compute --quiet --output /dev/null"]
    script = [sys.executable, "-c", CHILDREN, *lines]
    done = subprocess.run(script, capture_output=True, check=True)
    return dict(zip(lines, done.stdout.decode().splitlines(), strict=True))


@pytest.mark.parametrize("line", MISTYPED.split("\n")[1:-1])
def test_mistyped_values_do_not_wait_for_torch(line: str, ended: dict[str, str]) -> None:
    assert ended[line] == "2 False"


def test_a_line_that_is_right_has_it(ended: dict[str, str]) -> None:
    assert ended["compute --quiet --output /dev/null"] == "0 True"


def test_flags_are_read_without_validators() -> None:
    assert loaded(["mask", "--causal"], ("pydantic",)) == []
    if any(name.startswith("pydantic") for name in requires("typer") or ()):  # of newer versions
        assert loaded(["mask", "--causal", "--k-len", "3"], ("pydantic",)) == ["pydantic"]


def given(words: list[str], told: Sequence[str] | None) -> dict[str, Any]:
    """What reaches a command of these words, where Typer is told of the options in `told`."""
    found: dict[str, Any] = {}

    def mask(options: MaskOptions, words: AttentionWords, output: PlotOptions) -> None:
        found.update(asdict(options) | vars(words) | asdict(output))

    subcommand(mask, told)(words, standalone_mode=False)
    return found


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--causal",
        "a.npy --no-causal -f json",
        "--left-window=3 --save x.npy a.npy --as additive",
        "-qf json --alibi",
        "--hide-below -1 - --debug",
        "--fail-on --causal",
        "-- --causal",
    ],
)
def test_options_that_are_not_named_keep_their_defaults(line: str) -> None:
    words = line.split()
    found = given(words, words)
    assert found == given(words, None)
    assert len(found) > 40
