"""What people see: within the terminal's width, with what is left out announced."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain import Run
from safetensors.numpy import save_file

from attncli.cli.terminal import page_after
from attncli.report import Color
from attncli.report.printer import Printer
from attncli.report.table import TableColumn, decimals, positions_above, table, text_width

ANSI = re.compile(r"\x1b\[[0-9;]*[mJH]")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output is a terminal of 80 columns, without colour unless it is asked for."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(Printer, "on_terminal", property(lambda self: self.target == "-"))


def widest(text: str) -> int:
    return max(text_width(ANSI.sub("", line)) for line in text.splitlines())


@pytest.mark.parametrize(
    "line",
    [
        "compute",
        "compute --digits 17",
        "compute --digits 0 --softcap 2 --temperature 3 --causal --left-window 2",
        "compute --heads 6 --q-len 40 --k-len 40",
        "compute wide.npy wide.npy --digits 9",
        "compute --explain",
        "compute --explain --digits 15 --heads 2 --alibi",
        "inspect bundle.npz q.npy a-name-that-is-far-too-long-for-any-narrow-terminal-of-ours.npy",
    ],
)
@pytest.mark.usefixtures("terminal")
def test_nothing_is_wider_than_the_terminal(run: Run, files: Path, line: str) -> None:
    np.save("wide.npy", np.array([[123456.789, -1e12], [1e-9, 99999.5]]))
    np.save("a-name-that-is-far-too-long-for-any-narrow-terminal-of-ours.npy", np.ones(3))
    out = run(*line.split()).stdout
    assert widest(out) <= 80, [text for text in out.splitlines() if len(text) > 80]


@pytest.mark.usefixtures("terminal")
def test_what_is_left_out_is_announced(run: Run) -> None:
    out = run("compute", "--heads", 6, "--q-len", 40, "--k-len", 40, "--stage", "weights").stdout
    assert "25 of 40 rows not shown: --rows, or --format csv" in out
    assert re.search(r"\d+ of 40 columns not shown: --columns, --format csv, or a wider", out)
    assert "2 of 6 heads not shown: --head-index, --batch-index" in out
    assert re.search(r"^ +39 ", out, re.MULTILINE), "the last row is always there"


LARGE = ("compute", "--heads", 2, "--q-len", 300, "--k-len", 300, "--causal", "--stage", "weights")


@pytest.mark.usefixtures("terminal")
def test_below_corners_stands_a_picture_of_the_whole(run: Run) -> None:
    out = run(*LARGE).stdout
    assert widest(out) <= 80
    above, title, below = out.partition("\nweights   head 0   (300, 300)\n")
    assert re.search(r"^ +299 ", above, re.MULTILINE)
    assert title
    picture = below.split("\n\n")[0].splitlines()
    assert len(picture) < 25
    assert picture[-1].strip().startswith("each point is the mean of up to ")
    rows = [line for line in picture if re.match(r" *\d+(–\d+)? [·░▒▓█]", line)]
    assert rows[-1].split()[0].endswith("299")
    assert [len(row) for row in rows] == sorted(len(row) for row in rows), "the future is blank"


def test_a_pipe_has_no_picture_below_corners(run: Run) -> None:
    assert "each point is" not in run(*LARGE).stdout


def test_piped_tables_are_complete(run: Run) -> None:
    sizes = ("--heads", 6, "--q-len", 40, "--k-len", 40)
    out = run("compute", *sizes, "--stage", "weights").stdout
    assert "not shown" not in out
    assert out.count("batch 0, head ") == 6
    rows = [line for line in out.splitlines() if re.match(r" +\d+ 0\.\d{4} ", line)]
    assert len(rows) == 6 * 40
    assert {len(row.split()) for row in rows} == {1 + 40 + 1}


@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        ((), {}, False),
        (("--color", "always"), {}, True),
        (("--color", "always"), {"NO_COLOR": "1"}, True),
        (("--color", "always"), {"TERM": "dumb"}, True),
        (("--color", "never"), {"FORCE_COLOR": "1"}, False),
        ((), {"FORCE_COLOR": "1"}, False),
    ],
)
def test_colour_off_a_terminal(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    environment: dict[str, str],
    expected: bool,
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    out = run("compute", *options).stdout
    assert ("\x1b[" in out) is expected
    assert ANSI.sub("", out) == run("compute").stdout


def test_weights_are_shaded_by_size(run: Run) -> None:
    out = run("compute", "--stage", "weights", "--color", "always").stdout
    shades = set(re.findall(r"48;[0-9;]*", out))
    assert len(shades) > 2
    assert "48;" not in run("compute", "--stage", "output", "--color", "always").stdout


def test_masked_cells_are_dots_and_entropies_stand_beside(run: Run) -> None:
    out = run("compute", "--causal", "--stage", "masked,weights").stdout
    row = next(line for line in out.splitlines() if line.strip().startswith("2 0.3866"))
    assert row.split() == ["2", "0.3866", "0.5145", "0.0989", "·", "1.3535"]
    assert "-inf" not in out
    nats = run("compute", "--causal", "--stage", "weights", "--unit", "nats").stdout
    assert "entropy (nats)" in nats
    assert f"{1.353528 * np.log(2):.4f}" in nats


def test_names_are_neither_markup_nor_terminal_codes(run: Run, files: Path) -> None:
    for name in ("[red]x[red]", "[bold]", ":smile:"):
        Path(name).write_bytes(Path("bundle.npz").read_bytes())
        assert run("compute", name, "--stage", "output").stdout.startswith(name)
    np.savez("g.npz", **{f"a\x1b[31m.{role}": np.eye(2) for role in "qk"})
    assert "\x1b" not in run("compute", "g.npz").stdout
    assert "\x1b" not in run("inspect", "g.npz").stdout
    for line in (
        "entropy g.npz",
        "entropy g.npz --grid sink_mass_mean",
        "entropy g.npz --histogram",
        "variance g.npz",
        "mask g.npz",
        "compare g.npz --what-if scale=1 --worst",
        "compare g.npz --what-if scale=1 --grid tv_mean",
    ):
        assert "\x1b" not in run(*line.split()).stdout
    options = {"attncli": json.dumps({"a": {"labels": ["\x1b[31m", "b"]}})}
    save_file({f"a.{role}": np.eye(2) for role in "qk"}, "t.safetensors", options)
    assert "\x1b" not in run("mask", "t.safetensors").stdout


def test_digits(run: Run) -> None:
    assert " 0.22 " in run("compute", "--digits", 2).stdout
    first = json.loads(run("compute", "-f", "json").stdout)["data"]["stages"]["weights"]
    value = first["values"][0][0][0][0]
    assert f" {value:.17f} " in run("compute", "--digits", 17).stdout
    assert run("compute", "--digits", 2, "-f", "csv").stdout == run("compute", "-f", "csv").stdout


def test_names_with_slashes_are_no_closing_tags(run: Run, files: Path) -> None:
    Path("[").mkdir()
    Path("[/tmp]").write_bytes(Path("bundle.npz").read_bytes())
    assert run("compute", "[/tmp]", "--stage", "output").stdout.startswith("[/tmp] ")


@pytest.mark.parametrize(
    ("value", "digits", "expected"),
    [
        (0.0, 4, "0.0000"),
        (-0.0, 4, "0.0000"),
        (-0.00001, 2, "0.00"),
        (-0.3, 0, "0"),
        (1e-9, 4, "1.00e-09"),
        (123456789.0, 4, "1.23e+08"),
        (float("nan"), 4, "nan"),
        (float("-inf"), 4, "-inf"),
        (None, 4, "–"),
    ],
)
def test_numbers(value: float | None, digits: int, expected: str) -> None:
    assert decimals(value, digits) == expected


@pytest.mark.usefixtures("terminal")
def test_a_table_too_wide_is_split_and_keeps_its_keys() -> None:
    key = TableColumn("name", ["a", "b"], is_text=True, is_key=True)
    others = [TableColumn(f"column {n}", ["1" * 20, "2"]) for n in range(6)]
    text = table([key, *others], Printer(color=Color.NEVER))
    assert widest(text) <= 80
    assert text.count("name") == 2
    assert [f"column {n}" in text for n in range(6)] == [True] * 6


@pytest.mark.usefixtures("terminal")
def test_a_column_wider_than_the_terminal_is_wrapped_not_cut() -> None:
    words = " ".join(f"word{n}" for n in range(30))
    columns = [TableColumn("head", ["0"], is_key=True), TableColumn("why", [words], is_text=True)]
    text = table(columns, Printer(color=Color.NEVER))
    assert widest(text) <= 80
    assert " ".join(text.split()).endswith(words)


def test_a_long_table_has_one_heading_and_every_line() -> None:
    numbers = [f"{n}" for n in range(2345)]
    text = table([TableColumn("n", numbers, is_key=True), TableColumn("twice", numbers)], Printer())
    assert text.splitlines() == ["   n  twice", *(f"{n:>4}  {n:>5}" for n in range(2345))]


@pytest.mark.parametrize("heading", ["[bold]head[/bold]", ":smile:", "[red]x[red]"])
def test_cells_and_headings_are_no_markup(heading: str) -> None:
    columns = [TableColumn(heading, [heading], is_text=True), TableColumn("n", ["1"])]
    text = table(columns, Printer(color=Color.ALWAYS))
    assert ANSI.sub("", text).count(heading) == 2


# Opening a terminal as the leader of a new session makes it the one that ^C comes from.
LEADER = "import os, sys; os.open(os.ttyname(0), os.O_RDWR); os.execv(sys.argv[1], sys.argv[1:])"
PROMPT = b"q: quit "


def on_a_terminal(arguments: list[str], *answers: bytes, **environment: str) -> tuple[int, str]:
    """Run the program on a pseudo-terminal of 80 columns; its exit code and what it shows.

    Each answer is typed once the program has asked for it, and again where it came before the
    program read single keys: what is there by then is thrown away.
    """
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    forgotten = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "COLORTERM")
    kept = {name: value for name, value in os.environ.items() if name not in forgotten}
    running = subprocess.Popen(
        [sys.executable, "-c", LEADER, sys.executable, "-m", "attncli", *arguments],
        stdin=child,
        stdout=child,
        stderr=child,
        env=kept | {"TERM": "xterm-256color"} | environment,
        start_new_session=True,
    )
    os.close(child)
    shown, typed = b"", 0
    try:
        for _ in range(20):
            while select.select([parent], [], [], 5)[0]:
                shown += os.read(parent, 65536)
                if shown.count(PROMPT) > typed < len(answers):
                    time.sleep(0.1)
                    os.write(parent, answers[typed])
                    typed += 1
            if typed and shown.count(PROMPT) == typed:
                os.write(parent, answers[typed - 1])
    except OSError:  # how Linux says that nobody is left at the other end
        return running.wait(timeout=120), shown.decode().replace("\r\n", "\n")
    finally:
        running.kill()
        os.close(parent)
    raise AssertionError(f"no end after {shown!r}")


def test_a_real_terminal() -> None:
    code, shown = on_a_terminal(["compute", "--heads", "5", "--k-len", "30", "--stage", "weights"])
    assert code == 0
    assert widest(shown) <= 80
    assert "48;5;" in shown
    assert "of 30 columns not shown" in shown


def test_a_real_terminal_without_colour_or_unicode() -> None:
    plain = {"PYTHONIOENCODING": "ascii", "TERM": "dumb", "LC_ALL": "C"}
    code, shown = on_a_terminal(["compute", "--causal"], **plain)
    assert code == 0
    assert shown.isascii()
    assert "\x1b" not in shown
    assert "scores = Q K^T" in shown
    assert widest(shown) <= 80


@pytest.mark.parametrize(
    ("answers", "code", "pages"),
    [
        ((b"\n", b"\x1b[C", b"b", b"q"), 0, [1, 2, 3, 2]),
        ((b"\x1b[F", b"\x1b[C", b"\x1b[D", b"5", b"\x1b[H", b"\x04"), 0, [1, 11, 11, 10, 5, 1]),
        ((b"\x1b[F", b"\n"), 0, [1, 11]),
        ((b"n", b"\x03"), 130, [1, 2]),
    ],
    ids=["back-and-quit", "arrows", "enter-at-the-end", "interrupt"],
)
def test_step_by_step(answers: tuple[bytes, ...], code: int, pages: list[int]) -> None:
    found, shown = on_a_terminal(["compute", "--explain", "--step"], *answers)
    assert found == code
    assert [int(page) for page in re.findall(r"\[(\d+)/11\] → next", shown)] == pages
    assert "Traceback" not in shown
    assert widest(shown) <= 80


def test_steps_show_their_matrices() -> None:
    _, shown = on_a_terminal(["compute", "--explain", "--step"], b"5", b"c", b"c", b"q")
    _, plain, causal, again = ANSI.sub("", shown).split("5. weights")[0:4]
    for page, first in ((plain, "0.2234"), (causal, "1.0000"), (again, "0.2234")):
        assert "weights = softmax(masked)   (4, 4)" in page
        assert re.search(rf"^ +0 +{first} ", page, re.MULTILINE), page
    assert "48;5;" in shown


@pytest.mark.parametrize(
    ("keys", "at", "following"),
    [
        (("\r", "\n", "n", " ", "\x1b[C", "\x1b[B", "\x1bOC", "\x1b[6~", "\xe0M"), 3, 4),
        (("p", "b", "\x7f", "\x1b[D", "\x1b[A", "\x1bOD", "\x1b[5~", "\xe0K"), 3, 2),
        (("\x1b[H", "\x1b[1~", "g", "1"), 3, 0),
        (("\x1b[F", "\x1b[4~", "G", "0"), 3, 9),
        (("\x1b[D", "1"), 0, 0),
        (("\x1b[C", "9"), 9, 8),
        (("q", "Q", "\x1b"), 3, None),
        (("x", "\x1b[Z", "²"), 3, 3),
    ],
)
def test_keys_lead_to_pages(keys: tuple[str, ...], at: int, following: int | None) -> None:
    for key in keys:
        expected = 9 if key == "\x1b[C" and at == 9 else following
        assert page_after(key, at, 10) == expected, repr(key)
    assert page_after("\r", 9, 10) is None


@pytest.mark.parametrize(
    ("line", "module", "total", "what"),
    [
        ("compute q.npy k.npy v.npy --stage output", "compute_run", 2 * 4 * 5 * 6, "computing"),
        ("variance q.npy k.npy", "audit_run", 2 * 4, "heads"),
        ("mask --effect q.npy k.npy", "mask_effect_run", 2 * 4 * 5, "softmax"),
        ("mask --attn-mask m.npy", "mask_run", None, "reading the mask"),
    ],
)
def test_what_takes_long_shows_that_it_goes_on(
    run: Run,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    module: str,
    total: int | None,
    what: str,
) -> None:
    np.save("m.npy", np.tri(5, dtype=bool))
    asked: list[tuple[int | None, str]] = []
    told: list[int] = []

    @contextmanager
    def recorded(_: Printer, total: int | None, what: str) -> Iterator[Any]:
        asked.append((total, what))
        yield told.append

    monkeypatch.setattr("attncli.cli.terminal.progress", recorded)
    importlib.import_module(f"attncli.cli.{module}")
    if module in ("compute_run", "mask_run"):
        monkeypatch.setattr(f"attncli.cli.{module}.progress", recorded)
    run(*line.split(), *(["--query-offset", "0"] if "--effect" in line else []))
    assert asked[-1][0] == 0, "too small to be worth it"
    told.clear()
    monkeypatch.setattr(f"attncli.cli.{module}.WORTH_WATCHING", 1)
    monkeypatch.setattr("attncli.cli.mask_effect_run.ROWS_AT_ONCE", 1)
    shown = run(*line.split(), *(["--query-offset", "0"] if "--effect" in line else []))
    assert shown.stdout
    assert (total, what) in asked
    assert total is None or sum(told) == total


@pytest.mark.parametrize(
    ("room", "line"), [(100, "0   4   300 304"), (15, "0   4   300 304"), (14, "0   4   300")]
)
def test_names_of_columns_are_whole_or_not_there(room: int, line: str) -> None:
    edges = [*range(8), *range(300, 306)]
    assert positions_above(edges, 1, 4, room) == line
