"""Heat maps say what the numbers are in every way of drawing, and fit where they are drawn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from attncli.analysis.compute import ask_stages
from attncli.attention import stages
from attncli.attention.options import AttentionOptions, Stage
from attncli.attention.pooling import edges_of
from attncli.attention.problem import make_problem
from attncli.report import ColourScale
from attncli.report.heatmap import MOST_LINES
from attncli.report.printer import Printer
from attncli.report.shading import HIDDEN, RAMP, SIGNED_RAMP, Shading
from attncli.report.table import SHADES, text_width

Run = Callable[..., Any]

ANSI = re.compile(r"\x1b\[[0-9;]*m")
TRUE_COLOUR = {"COLORTERM": "truecolor", "TERM": "xterm-256color"}


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two heads of 40 queries and keys, peaked, with a token for each."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(3)
    tensors = {role: 2 * rng.standard_normal((1, 2, 40, 8)) for role in "qkv"}
    declared = {"*": {"labels": [f"token{n}" for n in range(40)]}}
    save_file(tensors, "peaked.safetensors", metadata={"attncli": json.dumps(declared)})
    return Path("peaked.safetensors")


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Standard output is a terminal of 80 columns and 24 lines, in true colour."""
    for name, value in TRUE_COLOUR.items() | {"COLUMNS": "80", "LINES": "24"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(Printer, "on_terminal", property(lambda self: self.target == "-"))
    return monkeypatch


def plain(text: str) -> str:
    return ANSI.sub("", text)


def colours_of_line(line: str) -> Iterator[tuple[str, tuple[int, ...] | None, tuple[int, ...]]]:
    """The text of each stretch of a line that has a background, and its two colours."""
    for codes, text in re.findall(r"\x1b\[([0-9;]*)m([^\x1b]*)", line):
        found = {
            kind: tuple(map(int, rgb.split(";")))
            for kind, rgb in re.findall(r"([34]8);2;(\d+;\d+;\d+)", codes)
        }
        if "48" in found:
            yield text, found.get("38"), found["48"]


# ── pooling ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("length", "most"), [(0, 5), (5, 5), (9, 5), (100, 7), (7, 1), (10, 3)])
def test_runs_cover_every_position_once(length: int, most: int) -> None:
    edges = edges_of(length, most)
    assert edges[0] == 0
    assert edges[-1] == length
    assert len(edges) - 1 == min(length, most)
    assert (np.diff(edges) > 0).all()


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("stage", [Stage.SCORES, Stage.MASKED, Stage.WEIGHTS, Stage.OUTPUT])
def test_points_are_what_their_cells_are(
    stage: Stage, largest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "BLOCK_CELLS", 3 * 29)  # three rows at once
    rng = np.random.default_rng(0)
    q, k, v = (torch.from_numpy(rng.standard_normal((1, 2, n, 13))) for n in (23, 29, 29))
    problem = make_problem(q, k, v, AttentionOptions(causal=True, query_offset=2))
    chosen = [*range(5, 23), 0]
    asked = ask_stages(problem, [stage], option="«stages»", batches=None, heads=[1], rows=chosen)
    (found,) = asked.pooled(stage, 6, 7, largest=largest)
    results = asked.results()
    asked.gather(results)
    values, visible = results[stage].values, results[stage].visible
    assert values is not None
    cells = values[0, 0].numpy()
    seen = np.ones(cells.shape, bool) if visible is None else visible[0, 0].numpy()
    if stage is Stage.SCORES:
        seen = np.ones_like(seen)
    rows, columns = found.row_edges, found.column_edges
    assert found.values.shape == (len(rows) - 1, len(columns) - 1) == (6, 7)
    for i in range(6):
        for j in range(7):
            part = np.s_[rows[i] : rows[i + 1], columns[j] : columns[j + 1]]
            there = cells[part].ravel() if stage is Stage.WEIGHTS else cells[part][seen[part]]
            expected = np.nan if not there.size else there.max() if largest else there.mean()
            np.testing.assert_allclose(found.values[i, j], expected, rtol=1e-12)
            assert found.hidden[i, j] == (not seen[part].any())


# ── drawing ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
@pytest.mark.parametrize(
    "words",
    [
        ("peaked.safetensors", "--stage", "scaled,weights,output"),
        ("--q-len", 3, "--k-len", 5, "--causal", "--query-offset", 2, "--stage", "masked"),
        ("--q-len", 300, "--k-len", 301, "--pool", "max", "--scale-colour", "even"),
        ("--rows", "-1,0", "--skip-first", 2, "--scale-colour", "sqrt"),
    ],
    ids=["stages", "small", "long", "rows"],
)
def test_no_line_is_wider_than_the_terminal(
    run: Run,
    bundle: Path,
    on_terminal: pytest.MonkeyPatch,
    columns: int,
    environment: dict[str, str],
    words: tuple[object, ...],
) -> None:
    on_terminal.setenv("COLUMNS", str(columns))
    for name, value in environment.items():
        on_terminal.setenv(name, value)
    shown = run("compute", *words, "--heatmap").stdout
    lines = plain(shown).splitlines()
    assert max(map(text_width, lines)) <= columns
    assert len(lines) <= MOST_LINES + 5
    assert ("\x1b" in shown) is not bool(environment)
    assert (set(shown) & set(SHADES[1:]) != set()) is bool(environment)


def test_figures_stand_on_the_colour_of_their_weight(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLORTERM", "truecolor")
    shown = run("compute", "--causal", "--heatmap", "--color", "always").stdout
    rows = [line for line in shown.splitlines() if re.match(r" +\d +\d\.", plain(line))]
    weights = np.array([[1, 0, 0, 0], [0.5998, 0.4002, 0, 0]])
    shading = Shading(ColourScale.LOG, 1 / 4, 1.0)
    for line, expected in zip(rows[:2], weights, strict=True):
        cells = list(colours_of_line(line))
        assert [float(text) for text, _, _ in cells] == expected[expected > 0].tolist()
        places = np.rint(shading.places(expected[None])[0] * (len(RAMP) - 1)).astype(int)
        for (_, _, back), place in zip(cells, places, strict=False):
            assert np.abs(RAMP[place].astype(int) - back).max() <= 3  # of four decimals


def test_two_rows_stand_in_a_line_of_colour(
    run: Run, bundle: Path, on_terminal: pytest.MonkeyPatch
) -> None:
    words = ("compute", "peaked.safetensors", "--head-index", 1, "--causal", "--heatmap")
    shown = run(*words).stdout
    weights = np.array(
        run(*words[:-1], "--stage", "weights", "-f", "json").json["data"]["stages"]["weights"][
            "values"
        ]
    )[0, 0]
    lines = [line for line in shown.splitlines() if "▀" in line]
    assert len(lines) == 20
    shading = Shading.of(weights, ColourScale.LOG, 40)
    hidden = np.triu(np.ones((40, 40), bool), 1)
    expected = shading.colours(weights, hidden)
    for at, line in enumerate(lines):
        found = list(colours_of_line(line))
        assert sum(len(text) for text, _, _ in found) == 40
        upper = [front for text, front, _ in found for _ in text]
        lower = [back for text, _, back in found for _ in text]
        assert np.array(upper).tolist() == expected[2 * at].tolist()
        assert np.array(lower).tolist() == expected[2 * at + 1].tolist()
    assert tuple(expected[0, 1]) == HIDDEN
    assert "grey: hidden" in plain(shown)


def test_tokens_stand_at_the_edges(run: Run, bundle: Path, on_terminal: pytest.MonkeyPatch) -> None:
    on_terminal.setenv("COLUMNS", "200")
    words = ("compute", "peaked.safetensors", "--head-index", 0, "--heatmap")
    shown = plain(run(*words, "--rows", "3,39").stdout)
    assert "token3 3" in shown
    assert "token39 39" in shown
    on_terminal.setenv("COLUMNS", "400")
    assert "head 0" in shown
    few = plain(run("compute", "--q-len", 2, "--k-len", 2, "--heatmap").stdout)
    assert re.search(r"^ +0 +1 *$", few, re.MULTILINE)


def test_without_colour_there_are_five_shades(run: Run) -> None:
    shown = run("compute", "--causal", "--heatmap").stdout
    assert [line.split(maxsplit=1)[1] for line in shown.splitlines()[5:9]] == [
        "██",
        "██▓▓",
        "▓▓██░░",
        "▓▓▓▓▒▒▒▒",
    ]
    assert "· to 0.052, ░ to 0.11, ▒ to 0.23, ▓ to 0.48, █ to 1; blank: hidden" in shown


def test_where_the_encoding_lacks_shades_weights_are_tenths(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Printer, "sign", lambda self, usual, plain: plain)
    shown = run("compute", "--causal", "--heatmap").stdout
    assert [line.split()[1:] for line in shown.splitlines()[5:9]] == [
        ["#"],
        ["6", "4"],
        ["4", "5", "1"],
        ["3", "4", "1", "2"],
    ]
    assert "tenths: . below 0.05, 1 to 9, # from 0.95" in shown
    signed = run("compute", "--heatmap", "--stage", "scores").stdout
    assert ". from -1.9 to -1.1, : to -0.37, + to 0.37, * to 1.1, # to 1.9" in signed


def test_titles_say_whose_matrix_it_is(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shapes = {"x": (5, 6), "wq": (6, 8), "wk": (6, 4), "wv": (6, 4), "wo": (8, 6)}
    for name, shape in shapes.items():
        np.save(f"{name}.npy", np.ones(shape))
    words = [word for name in shapes for word in (f"--{name}", f"{name}.npy")]
    stages = ("--heads", 2, "--kv-heads", 1, "--stage", "q,k,projected", "--heatmap")
    titles = [line for line in run("compute", *words, *stages).stdout.splitlines() if " = " in line]
    assert titles == [
        "q = X W_Q   head 0   (5, 4)",
        "q = X W_Q   head 1   (5, 4)",
        "k = X W_K   key head 0   (5, 4)",
        "projected = concat(output) W_O   all heads   (5, 6)",
    ]


def test_pooling_is_said(run: Run) -> None:
    sizes = ("compute", "--q-len", 500, "--k-len", 500, "--heatmap")
    assert "each point is the mean of up to 7×4 cells" in run(*sizes).stdout
    assert "each point is the largest of up to 7×4 cells" in run(*sizes, "--pool", "max").stdout


def test_a_terminal_shows_some_heads_and_a_pipe_all(
    run: Run, bundle: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    words = ("compute", "--heads", 9, "--q-len", 40, "--k-len", 40, "--heatmap")
    assert run(*words).stdout.count("weights = ") == 9
    request.getfixturevalue("on_terminal")
    shown = plain(run(*words).stdout)
    assert shown.count("weights = ") == 3
    assert "6 more not drawn: --group, --head-index, --batch-index, --stage" in shown


# ── scales ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("scale", [None, *ColourScale])
def test_places_and_values_undo_each_other(scale: ColourScale | None) -> None:
    shading = Shading(scale, 1 / 16, 0.8)
    values = np.array([[shading.value_at(place) for place in (0.1, 0.5, 0.9)]])
    if scale is ColourScale.EVEN:
        values = values / 16  # multiples of even attention
    np.testing.assert_allclose(shading.places(values), [[0.1, 0.5, 0.9]], atol=1e-12)


def test_even_attention_is_in_the_middle_whatever_a_query_sees() -> None:
    shading = Shading(ColourScale.EVEN, 1 / 4, 1.0)
    weights = np.array([[0.5, 0.5, 0, 0], [0.25, 0.25, 0.25, 0.25]])
    assert shading.ramp is SIGNED_RAMP
    places = shading.places(weights, np.array([2.0, 4.0]))
    assert places[0, :2].tolist() == [0.5, 0.5]
    assert places[1].tolist() == [0.5] * 4
    assert places[0, 2] == 0


def test_the_first_keys_are_left_out_of_the_scale_and_fade() -> None:
    weights = np.array([[0.9, 0.1, 0.05]])
    nothing = np.zeros(weights.shape, bool)
    whole = Shading.of(weights, ColourScale.LINEAR, 3)
    rest = Shading.of(weights, ColourScale.LINEAR, 3, skip_first=1)
    assert (whole.top, rest.top) == (0.9, 0.1)
    assert rest.colours(weights, nothing)[0, 1].tolist() == RAMP[-1].tolist()
    faded = rest.colours(weights, nothing)[0, 0]
    expected = RAMP[-1] * 0.28 + RAMP[0] * 0.72
    np.testing.assert_allclose(faded, expected, atol=1)


def test_keys_that_are_left_out_are_points_of_their_own(run: Run) -> None:
    words = ("compute", "--q-len", 3, "--k-len", 400, "--heatmap", "--skip-first", 9)
    above = run(*words).stdout.splitlines()[3]
    assert above.split()[:3] == ["0", "8", "28"]


def test_tables_shade_scores_on_both_sides_of_zero(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLORTERM", "truecolor")
    words = ("compute", "--stage", "scores,weights,output")
    shown = run(*words, "--color", "always").stdout
    assert plain(shown) == run(*words).stdout
    cells = {
        float(text): back
        for line in shown.splitlines()
        for text, _, back in colours_of_line(line)
        if text.strip()
    }
    lowest = cells[-1.8617]
    assert lowest == tuple(SIGNED_RAMP[0])
    assert cells[0.9940][0] > cells[0.9940][2], "above 0 is orange"
    linear = run(*words, "--color", "always", "--scale-colour", "linear").stdout
    assert linear != shown
    assert plain(linear) == plain(shown)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-f", "json"), "--heatmap: expected --format table, got json"),
        (("--explain",), "--heatmap: expected either --explain or --heatmap, got both"),
    ],
)
def test_what_does_not_go_with_pictures(run: Run, words: tuple[str, ...], message: str) -> None:
    assert message in run("compute", "--heatmap", *words, code=2).stderr
