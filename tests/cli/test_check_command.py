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

from mistaken import (
    MADE,
    NOT_LOGSUMEXP,
    ONLY_LOGSUMEXP,
    ONLY_OUTPUT,
    Draw,
    attend,
    draw_problem,
    offset_fits,
)

# Mistakes that options of the command make on purpose, whatever the problem.
BY_OPTIONS = [
    *("scale:none", "scale:dv", "scale:model", "scale:dk", "scale:squared", "scale:fitted"),
    *("causal:missing", "offset:top-left", "offset:bottom-right", "offset:-1", "offset:+1"),
    *("window:-1", "window:+1", "window:missing", "mask:inverted", "mask:missing"),
    *("sink-window:missing", "prefix:missing", "dilation:missing", "segments:missing"),
    *("alibi:missing", "alibi:added"),
    *("padding:ignored", "softcap:missing", "sinks:missing", "sinks:renormalised"),
]


@pytest.fixture(autouse=True)
def _one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)


def told(out: Any) -> str:
    """The verdict, below what says which files it is of."""
    opening, _, rest = out.stdout.partition("\n\n")
    assert " · B=" in opening
    return str(rest).splitlines()[0]


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
    numbers |= {"--sink-window": draw.kept, "--prefix": draw.prefix, "--dilation": draw.step}
    words += ["--alibi"] if draw.sloped else []
    words += ["--segments", ",".join(map(str, draw.documents))] if draw.documents else []
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


@pytest.mark.parametrize(
    "name", [name for name in MADE if name not in ("dropout", *ONLY_LOGSUMEXP)]
)
def test_a_mistake_is_named_by_its_output_and_verified(run: Run, name: str) -> None:
    assert_named(run, name, "output", 3)


@pytest.mark.parametrize("name", [name for name in BY_OPTIONS if name not in ONLY_OUTPUT])
def test_a_mistake_is_named_by_its_weights_and_verified(run: Run, name: str) -> None:
    assert_named(run, name, "weights", 4)


@pytest.mark.parametrize("name", [name for name in BY_OPTIONS if name not in NOT_LOGSUMEXP])
def test_a_mistake_is_named_by_its_logsumexp_and_verified(run: Run, name: str) -> None:
    assert_named(run, name, "logsumexp", 5)


def test_all_candidates_together_have_one_explanation(run: Run) -> None:
    """Weights are small and their tolerance is; they must not drown what the output says."""
    draw = draw_problem("layout:output", 20)
    words, right = written(draw), attend(draw)
    b, h, s, w = right["output"].shape
    turned = right["output"].transpose(1, 2).contiguous().view(b, h, s, w)
    values = right | {"output": turned}
    line = words + [word for target in values for word in candidate(target, values[target])]
    assert [one["name"] for one in matching(run, line)] == ["layout:output"]
    found = run(*line, "--format", "json", code=3).json["data"]["records"]
    assert [(one["target"], one["passed"]) for one in found] == [
        ("output", False),
        ("weights", True),
        ("logsumexp", True),
    ]


# ── the example of most tests below: B=2, H=4, H_kv=2, S_q=5, S_k=7 ─────────────────────────────

DECLARED = ("check", "q.npy", "k.npy", "v.npy", "--causal", "--query-offset", "bottom-right")


@pytest.fixture
def right(files: Path, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """What torch computes for DECLARED; the inputs lie in the working directory."""
    monkeypatch.chdir(files)
    q, k, v = (torch.from_numpy(np.load(f"{role}.npy")) for role in ("q", "k", "v"))
    k, v = (tensor.repeat_interleave(2, 1) for tensor in (k, v))
    seen = torch.ones(5, 7, dtype=torch.bool).tril(2)
    found: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    return found


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_float32", [False, True])
def test_right_in_any_precision(
    run: Run, right: torch.Tensor, kind: torch.dtype, in_float32: bool
) -> None:
    rounded = right.to(kind)
    torch.save(rounded.float() if in_float32 else rounded, "out.pt")
    out = run(*DECLARED, "--actual-output", "out.pt", "--rtol", "1e-5" if kind.itemsize > 4 else 1)
    assert told(out) == "output: right"
    assert out.stderr == ""


def test_coarser_than_its_dtype_fails(run: Run, right: torch.Tensor) -> None:
    found = right.bfloat16().float()
    found[0, 0, 0, 0] += 1e-5 * found[0, 0, 0, 0]  # no longer bfloat16: held to float32
    words = [*DECLARED, *candidate("output", found)]
    assert told(run(*words, code=3)) == "output: OFF"
    run(*words, "--rtol", "0.01", "--atol", "0.01")


def test_one_wrong_cell_is_located(run: Run, right: torch.Tensor) -> None:
    found = right.clone()
    found[1, 2, 3, 4] += 1
    words = [*DECLARED, *candidate("output", found)]
    (record,) = run(*words, "--format", "json", code=3).json["data"]["records"]
    assert record["worst_index"] == [1, 2, 3, 4]
    assert (record["mismatches"], record["cells"]) == (1, found.numel())
    assert record["max_abs_error"] == pytest.approx(1, abs=1e-5)
    shown = run(*words, code=3).stdout
    assert "only batch 1 of 2, only head 2 of 4, only row 3 of 5, only column 4 of 6" in shown
    assert "nor comes near" in shown


@pytest.mark.parametrize(
    ("value", "count"), [("nan", "n_nan"), ("inf", "n_posinf"), ("-inf", "n_neginf")]
)
def test_what_is_not_finite_is_counted_and_null(
    run: Run, right: torch.Tensor, value: str, count: str
) -> None:
    found = right.clone()
    found[1, 2, 3] = float(value)
    words = [*DECLARED, *candidate("output", found)]
    data = run(*words, "--format", "json", code=3).json["data"]
    (record,) = data["records"]
    assert record["actual"] is None
    assert {name: record[name] for name in ("n_nan", "n_posinf", "n_neginf") if record[name]} == {
        count: 6
    }
    assert all(one["max_abs_error"] is None for one in data["hypotheses"])
    csv = run(*words, "--format", "csv", code=3).stdout.splitlines()
    assert len(csv) == 2
    assert f",{value}," in csv[1]
    shown = run(*words, code=3).stdout
    assert "NaN or inf in 1 row, the first (batch, head, row) (1, 2, 3)" in shown
    assert "every finite cell is right" in shown


def test_an_empty_row_that_is_nan_is_explained(run: Run, files: Path) -> None:
    mask = np.ones((5, 7), bool)
    mask[1] = False
    np.save("mask.npy", mask)
    tensors = run("compute", "q.npy", "k.npy", "v.npy", "--attn-mask", "mask.npy", "-f", "json")
    output = torch.tensor(tensors.json["data"]["stages"]["output"]["values"])
    output[:, :, 1] = float("nan")
    words = ["check", "q.npy", "k.npy", "v.npy", "--attn-mask", "mask.npy"]
    shown = run(*words, *candidate("output", output), code=3).stdout
    assert "all of them see no key" in shown


def test_nan_that_a_kernel_swallows_is_told(run: Run, right: torch.Tensor) -> None:
    q = np.load("q.npy")
    q[0, 1, 2, 0] = np.nan
    np.save("q.npy", q)
    words = [*DECLARED, *candidate("output", right)]
    assert "--allow-nonfinite" in run(*words, code=1).stderr
    shown = run(*words, "--allow-nonfinite", code=3).stdout
    assert "finite in 1 rows where NaN or inf of the inputs makes the reference NaN" in shown
    right[0, 1, 2] = float("nan")
    run(*DECLARED, *candidate("output", right), "--allow-nonfinite")


def test_ndjson_and_csv_hold_the_records_alone(run: Run, right: torch.Tensor) -> None:
    words = [*DECLARED, *candidate("output", right + 1)]
    for form in ("ndjson", "csv"):
        out = run(*words, "--format", form, code=3)
        assert len(out.stdout.splitlines()) == (1 if form == "ndjson" else 2)
        assert "scale:none" not in out.stdout
    assert "data.hypotheses" in " ".join(run("check", "--help").stdout.split())


def test_the_failure_names_the_mistake(run: Run, right: torch.Tensor) -> None:
    q, k, v = (torch.from_numpy(np.load(f"{role}.npy")) for role in ("q", "k", "v"))
    k, v = (tensor.repeat_interleave(2, 1) for tensor in (k, v))
    found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    out = run(*DECLARED, *candidate("output", found), code=3)
    first, second, third = out.stdout.splitlines()[3:6]
    assert first == "output: OFF, explained by offset:top-left"
    assert second.startswith("  offset:top-left (--query-offset 0): largest error left ")
    assert third == (
        "  $ attncli check q.npy k.npy v.npy --causal --query-offset 0 --actual-output output.npy"
    )
    assert out.stderr.splitlines()[1] == "  explained by offset:top-left"
    quiet = run(*DECLARED, "--actual-output", "output.npy", "-q", "-o", "report.txt", code=3)
    assert quiet.stdout == ""
    assert Path("report.txt").read_text() == out.stdout


def test_a_partial_mistake_is_listed_with_its_share(run: Run, right: torch.Tensor) -> None:
    """Twice the scale, and a little noise that nothing explains."""
    words = ["check", "q.npy", "k.npy", "v.npy", "--scale", "1"]
    computed = run(*(["compute", *words[1:4], "--format", "json"]))
    values = torch.tensor(computed.json["data"]["stages"]["output"]["values"])
    values += 1e-2 * torch.randn(values.shape, generator=torch.Generator().manual_seed(0))
    line = [*words, *candidate("output", values)]
    hypotheses = run(*line, "--format", "json", code=3).json["data"]["hypotheses"]
    assert not any(one["matches"] for one in hypotheses)
    share = {one["name"]: one["explained"] for one in hypotheses}
    assert share["scale:fitted"] > 0.99
    assert "scale:fitted" in run(*line, code=3).stdout.split("the nearest:")[1]


@pytest.mark.parametrize("layout", ["bshd", "bsh"])
def test_other_layouts(run: Run, right: torch.Tensor, layout: str) -> None:
    rows = {role: np.load(f"{role}.npy").swapaxes(1, 2) for role in ("q", "k", "v")}
    packed = layout == "bsh"
    for role, array in rows.items():
        b, s, h, d = array.shape
        np.save(f"{role}.npy", array.reshape(b, s, h * d) if packed else array)
    turned = right.transpose(1, 2)
    words = [*DECLARED, "--layout", layout, "--heads", 4, "--kv-heads", 2]
    shaped = turned.reshape(2, 5, 24) if packed else turned
    run(*words, *candidate("output", shaped))
    out = run(*words, *candidate("output", right), code=3)
    assert told(out) == "output: OFF, explained by layout:output"
    assert "expected the axes of the reference, got those of layout:output" in out.stderr


def declare(**options: Any) -> None:
    """A bundle whose group L declares options, and a group M that does not."""
    import json

    from safetensors.numpy import save_file

    tensors = {f"{g}.{r}": np.load(f"{r}.npy") for g in "LM" for r in ("q", "k", "v")}
    save_file(tensors, "b.safetensors", {"attncli": json.dumps({"L": options})})


UNDONE = [
    ({"softcap": 1.5}, {}, "softcap:missing"),
    ({"causal": True, "query_offset": 2, "left_window": 1}, ["left_window"], "window:missing"),
    ({"key_lengths": [3, 7]}, {}, "padding:ignored"),
    ({"sinks": [0.5, 1, 0, 2]}, {}, "sinks:missing"),
    ({"causal": True, "query_offset": 2, "prefix": 1}, {}, "causal:missing"),
]


@pytest.mark.parametrize(("declared", "left_out", "name"), UNDONE)
@pytest.mark.usefixtures("right")
def test_what_a_bundle_declares_is_undone(
    run: Run, declared: dict[str, Any], left_out: list[str], name: str
) -> None:
    kept = {k: v for k, v in declared.items() if left_out and k not in left_out}
    options = ["--causal", "--query-offset", "2"] if kept else []
    computed = run("compute", "q.npy", "k.npy", "v.npy", *options, "-f", "json").json
    values = torch.tensor(computed["data"]["stages"]["output"]["values"])
    declare(**declared)
    line = ["check", "b.safetensors", "--group", "L", *candidate("output", values)]
    found = [one for one in matching(run, line) if one["name"] == name]
    assert len(found) == 1
    assert_verified(run, found)


FAILURES = [
    ("q.npy k.npy v.npy", 2, "check: expected one of --actual-output"),
    ("--actual-output o.npy", 2, "FILE: expected files of Q and K, got none"),
    ("q.npy k.npy --actual-output o.npy", 1, "--actual-output: expected v beside it"),
    (
        "q.npy k.npy v.npy --actual-output q.npy",
        1,
        "--actual-output: expected (B, H, S_q, d_v) (2, 4, 5, 6), got (2, 4, 5, 8)",
    ),
    (
        "q.npy k.npy v.npy --actual-weights o.npy",
        1,
        "--actual-weights: expected (B, H, S_q, S_k) (2, 4, 5, 7), got (2, 4, 5, 6)",
    ),
    (
        "q.npy k.npy v.npy --actual-logsumexp o.npy",
        1,
        "--actual-logsumexp: expected (B, H, S_q) (2, 4, 5), got (2, 4, 5, 6)",
    ),
    ("q.npy k.npy v.npy --actual-output no.npy", 1, "no.npy: expected a file"),
    ("q.npy k.npy v.npy --actual-output o.npy --rtol -1", 2, "--rtol: expected a finite number"),
    ("q.npy k.npy v.npy --actual-output o.npy --atol inf", 2, "--atol: expected a finite number"),
    ("q.npy k.npy v.npy --pair o.npy", 2, "check: expected one of --actual-output"),
    (
        "q.npy k.npy v.npy --pair o.npy --actual-output o.npy --actual-weights o.npy",
        2,
        "--pair: expected one candidate beside it, got 2",
    ),
    ("--x q.npy --wq q.npy --wk q.npy --wo q.npy --actual-output o.npy", 2, "--wo: expected none"),
    ("b.safetensors --actual-output o.npy", 2, "--group: expected one group, got 2"),
    ("q.npy k.npy v.npy --causal --actual-output o.npy", 2, "--query-offset"),
]


@pytest.mark.parametrize(("line", "code", "message"), FAILURES)
def test_faults_are_told(run: Run, right: torch.Tensor, line: str, code: int, message: str) -> None:
    np.save("o.npy", right.numpy())
    declare(causal=False)
    out = run("check", *line.split(), code=code)
    assert out.stderr.startswith(f"attncli: error: {message}")
    assert out.stdout == ""


def test_the_reference_is_float64_and_says_so(run: Run, right: torch.Tensor) -> None:
    words = [*DECLARED, *candidate("output", right), "--format", "json"]
    assert run(*words).json["params"]["compute_dtype"] == "float64"
    assert run(*words, "--precision", "float32").json["params"]["compute_dtype"] == "float32"


def test_a_pair(run: Run, right: torch.Tensor) -> None:
    near, far = right + 1e-3, right.clone()
    far[1, :, 2:] += 0.1
    np.save("far.npy", far.numpy())
    words = [*DECLARED, *candidate("output", near), "--pair", "far.npy"]
    out = run(*words, code=3)
    assert told(out) == "closer to the reference: output.npy"
    found = run(*words, "--format", "json", code=3).json["data"]
    assert found["pair"]["closer"] == 1
    assert found["pair"]["first_part"] == [0, 0, 0]
    assert found["pair"]["max_abs_error"] == pytest.approx(0.099, abs=1e-6)
    assert [one["passed"] for one in found["records"]] == [False, False]
    np.save("output.npy", right.numpy())
    out = run(*words, code=3)
    assert out.stderr.startswith("attncli: error: --pair: expected the reference")
    np.save("far.npy", right.numpy())
    assert told(run(*words)) == "closer to the reference: both are equally close"


@pytest.mark.parametrize("wrong", [1, 2])
def test_a_pair_keeps_the_diagnosis_of_each(run: Run, right: torch.Tensor, wrong: int) -> None:
    """The same mistake, told and verified, as without --pair."""
    bare = [word for word in DECLARED if word != "--causal"]
    names = ["causal.npy", "plain.npy"][:: 1 if wrong == 1 else -1]
    np.save("causal.npy", right.numpy())
    run("compute", *bare[1:], "--stage", "output", "--save", "plain.npy", "--quiet")
    alone = [*bare, "--actual-output", "causal.npy"]
    words = [*bare, "--actual-output", names[0], "--pair", names[1]]
    out = run(*words, code=3)
    assert "causal.npy (output): OFF, explained by causal:added\n" in out.stdout
    assert "plain.npy (output): right\n" in out.stdout
    assert out.stderr.endswith("  explained by causal:added\n")
    one, both = (run(*each, "-f", "json", code=3).json["data"] for each in (alone, words))
    assert [{**each, "candidate": wrong} for each in one["hypotheses"]] == both["hypotheses"]
    assert one["records"][0] == both["records"][wrong - 1]
    matching = next(each for each in both["hypotheses"] if each["matches"])
    assert told(run(*shlex.split(matching["command"])[1:])) == "output: right"


def test_chosen_heads_alone_are_judged(run: Run, right: torch.Tensor) -> None:
    wrong = right.clone()
    wrong[1, 0] += 1
    words = [*DECLARED, *candidate("output", wrong)]
    run(*words, code=3)
    for chosen in (("--head-index", "1:"), ("--batch-index", "0"), ("--head-index", "-1")):
        out = run(*words, *chosen)
        assert told(out) == "output: right"
    out = run(*words, "--head-index", "0", "--batch-index", "1", code=3)
    assert " · batch 1 · head 0\n" in out.stdout
    document = run(*words, "--head-index", "0,1", "-f", "json", code=3).json
    assert document["params"]["head_index"] == [0, 1]
    assert document["params"]["batch_index"] is None
    assert document["data"]["records"][0]["cells"] == wrong[:, :2].numel()
    refused = run(*words, "--head-index", str(len(right[0])), code=2).stderr
    assert "--head-index: expected an index from" in refused
    assert run(*words, "--head-index", "a", code=2).stderr.startswith(
        "attncli: error: --head-index"
    )


def test_numbers_that_look_equal_are_told_apart(run: Run, right: torch.Tensor) -> None:
    near = right.clone()
    near[0, 1, 2, 3] += 1e-5
    words = [*DECLARED, *candidate("output", near), "--rtol", "0", "--atol", "5e-6"]
    (record,) = run(*words, "-f", "json", code=3).json["data"]["records"]
    assert record["error"] == abs(record["actual"] - record["expected"])
    assert record["allowed"] == 5e-6
    out = run(*words, "--digits", "1", code=3).stdout
    told, apart = out.partition("worst at   batch 0, head 1, row 2, column 3: ")[2].splitlines()[:2]
    assert len(set(told.split(", expected "))) == 1
    assert apart.split() == [f"{record['error']:.3g}", "apart,", "5e-06", "allowed"]


@pytest.mark.usefixtures("right")
def test_a_terminal_breaks_commands_where_a_shell_joins_them(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attncli.report.printer import Printer

    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(Printer, "on_terminal", property(lambda self: self.target == "-"))
    computed = run("compute", "q.npy", "k.npy", "v.npy", "-f", "json").json
    values = torch.tensor(computed["data"]["stages"]["output"]["values"])
    np.save("a name that needs quotes.npy", values.numpy())
    line = [*DECLARED, "--actual-output", "a name that needs quotes.npy"]
    shown = run(*line, code=3).stdout
    assert max(map(len, shown.splitlines())) <= 60
    command = shown.partition("  $ attncli ")[2].partition("\n\n")[0]
    run(*shlex.split(command.replace("\\\n", "")))
    assert "\x1b[1m" in run(*line, "--color", "always", code=3).stdout


def test_python_finds_the_same(right: torch.Tensor) -> None:
    import attncli

    q, k, v = (np.load(f"{role}.npy") for role in ("q", "k", "v"))
    declared: Any = {"causal": True, "query_offset": "bottom-right"}
    assert attncli.check(q, k, v, actual_output=right, **declared).passed
    found = attncli.check(q, k, v, actual_output=right, causal=True, query_offset=0)
    assert not found.passed
    assert [(one.name, one.options) for one in found.mistakes] == [
        ("offset:bottom-right", "--query-offset 2")
    ]
    with pytest.raises(attncli.UsageError, match="got none"):
        attncli.check(q, k, v)


@pytest.mark.parametrize(("q_len", "k_len"), [(0, 3), (3, 0), (0, 0), (1, 1)])
def test_axes_of_length_none_and_one(run: Run, q_len: int, k_len: int) -> None:
    for role, length in (("q", q_len), ("k", k_len), ("v", k_len)):
        np.save(f"{role}.npy", np.ones((1, 1, length, 3), np.float32))
    words = ["check", "q.npy", "k.npy", "v.npy"]
    expected = torch.full((1, 1, q_len, 3), 1.0 if k_len else 0.0)
    run(*words, *candidate("output", expected))
    off = run(*words, *candidate("output", expected + 2), "-f", "json", code=3 if q_len else 0)
    assert off.json["data"]["records"][0]["mismatches"] == 3 * q_len
    logsumexp = torch.full((1, 1, q_len), 3 / 3**0.5 if k_len else -torch.inf)
    run(*words, *candidate("logsumexp", logsumexp))
    assert (
        run(
            *words, *candidate("weights", torch.full((1, 1, q_len, k_len), 1 / max(1, k_len)))
        ).stderr
        == ""
    )


def test_padded_queries_may_hold_anything(run: Run, right: torch.Tensor) -> None:
    right[1, :, 2:] = float("nan")
    # The corner would count real queries alone: the same offset as a number.
    words = ["check", "q.npy", "k.npy", "v.npy", "--causal", "--query-offset", "2"]
    words += candidate("output", right)
    run(*words, "--query-lengths", "5,2")
    run(*words, code=3)


def test_q_and_k_exchanged_are_verified_by_exchanging_them(run: Run) -> None:
    for seed, role in enumerate(("q", "k", "v")):
        np.save(f"{role}.npy", np.random.default_rng(seed).standard_normal((1, 2, 6, 4)))
    computed = run("compute", "k.npy", "q.npy", "v.npy", "-f", "json").json
    values = torch.tensor(computed["data"]["stages"]["output"]["values"], dtype=torch.float64)
    named = ["--q", "q.npy", "--k", "k.npy", "--v", "v.npy"]
    for files in (["q.npy", "k.npy", "v.npy"], named):
        found = matching(run, ["check", *files, *candidate("output", values)])
        assert [one["name"] for one in found] == ["qk:exchanged"]
        assert_verified(run, found)


@pytest.mark.parametrize("offset", ["-2", "-9"])
def test_queries_before_the_first_key_do_not_end_the_search(
    offset: str, run: Run, files: Path
) -> None:
    np.save("off.npy", np.ones((2, 4, 5, 6), np.float32))
    words = ("--causal", f"--query-offset={offset}", "--actual-output", "off.npy")
    told = run("check", "q.npy", "k.npy", "v.npy", *words, code=3)
    assert "OFF" in told.stdout
