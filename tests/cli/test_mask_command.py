"""`attncli mask` as its users meet it: files in, words and records out."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from printed import check_run
from safetensors.numpy import load_file, save_file

import attncli
from attncli.cli.app import app

S = 8
CAUSAL = np.tri(S, dtype=bool)
PADDED = np.arange(S) < np.array([[5], [3]])  # (2, S)
LEAKING = CAUSAL.copy()
LEAKING[2, 5] = LEAKING[3, 6] = True
FINFO = {name: np.finfo(name).min for name in ("float16", "float32")}


class Ran:
    """What a run left behind."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def told(self) -> str:
        """What is printed below the line that says which file it is of."""
        opening, _, told = self.out.partition("\n")
        assert " · B=" in opening
        return told

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run `attncli mask` in an empty folder; arrays given as keywords become NAME.npy there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NO_COLOR", raising=False)

    def run_mask(line: str, **arrays: np.ndarray[Any, Any]) -> Ran:
        for name, array in arrays.items():
            np.save(f"{name}.npy", array)
        with pytest.raises(SystemExit) as ended:
            app(["mask", *line.split()])
        out, err = capsys.readouterr()
        code = int(ended.value.code or 0)
        check_run(["mask", *line.split()], code, out)
        return Ran(code, out, err)

    return run_mask


@pytest.mark.parametrize(
    ("mask", "described"),
    [
        (CAUSAL, "causal"),
        (CAUSAL.astype(np.int64), "causal"),
        (~CAUSAL, "probably inverted: causal"),
        (np.where(CAUSAL, 0, -np.inf).astype(np.float16), "causal"),
        (np.where(CAUSAL, 0, -np.inf), "causal"),
        (PADDED[0], "key padding, length 5"),
        (np.tri(4, 9, 5, dtype=bool), "causal (bottom-right, offset 5)"),
        (CAUSAL & ~np.tri(S, S, -3, dtype=bool), "causal with a window of 2 keys to the left"),
        (LEAKING, "no known pattern; nearest is causal, differing in 2 cells"),
        (np.zeros((S, S), bool), "nothing visible"),
        (np.zeros((S, 0), bool), "nothing visible"),
    ],
)
def test_a_mask_file_is_described(run: Any, mask: Any, described: str) -> None:
    ran = run("--attn-mask m.npy --format json", m=mask)
    assert ran.code == 0
    (record,) = ran.document["data"]
    assert record["description"].startswith(described)


def test_of_no_heads_nothing_is_recognised(run: Any) -> None:
    assert "\nno heads\n" in run("--attn-mask m.npy", m=np.ones((0, S, S), bool)).out
    document = run("--attn-mask m.npy -f json").document
    assert (document["data"], document["params"]["recognised"]) == ([], None)


def test_an_inverted_mask_is_loud(run: Any) -> None:
    table = run("--attn-mask m.npy", m=~CAUSAL)
    assert table.told.startswith("PROBABLY INVERTED: causal")
    assert "--mask-true drop" in table.out
    assert "True and False exchanged?" in table.err
    assert any("inverted" in text for text in run("--attn-mask m.npy -f json").document["warnings"])
    assert run("--attn-mask m.npy --mask-true drop").told.startswith("causal\n")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_finite_values_that_leave_no_weight_hide(run: Any, dtype: str) -> None:
    mask = np.where(CAUSAL, 0, FINFO[dtype]).astype(dtype)
    ran = run("--attn-mask m.npy", m=mask)
    assert ran.told.startswith("causal\n  options: --causal\n")
    assert f"adds {FINFO[dtype]:g} (28 cells), 0 (36 cells)" in ran.out
    assert run("--attn-mask m.npy -f json").document["data"][0]["kept"] == 36
    assert run("--attn-mask m.npy --hide-below -1e308 -f json").document["data"][0]["kept"] == 64
    run("--attn-mask m.npy --as additive --save again.npy")
    assert run("--attn-mask m.npy --against again.npy").code == 0


def test_finite_masks_that_differ_by_batch_are_described_together(run: Any) -> None:
    mask = np.where(PADDED[:, None, None, :] & CAUSAL, 0, FINFO["float32"]).astype(np.float32)
    assert run("--attn-mask m.npy", m=mask).told.startswith("causal; key padding, lengths 5,3\n")


def test_both_readings_of_rows_without_anything_else_are_told(run: Any) -> None:
    left = np.arange(S) > 1
    ran = run("--attn-mask m.npy", m=np.where(left & CAUSAL, 0, -1e4))
    said = "with values of -10000 or less as hidden everywhere: causal; key padding, the first 2"
    assert said in ran.out
    assert "2 rows hold nothing but values of -10000 or less" in ran.err
    ran = run("--attn-mask m.npy --hide-below -10000")
    assert ran.told.startswith("causal; key padding, the first 2 keys hidden\n")
    assert ran.err == ""


def test_values_that_leave_some_weight_are_warned_of(run: Any) -> None:
    ran = run("--attn-mask m.npy", m=np.where(CAUSAL, 0, -100.0))
    assert ran.told.startswith("full\n")
    assert "--hide-below -100 counts them as hidden" in ran.err
    ran = run("--attn-mask m.npy --hide-below -100")
    assert ran.told.startswith("causal\n")
    assert ran.err == ""


DOCUMENTS = np.array([[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 2, 2, 2, 2]])
HOLES = np.arange(200) % 3 != 1


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (
            (CAUSAL & (DOCUMENTS[:, :, None] == DOCUMENTS[:, None]))[:, None],
            "--causal --segments 0,0,0,1,1,1,1,1/0,0,1,1,2,2,2,2",
        ),
        (CAUSAL & HOLES[:S], "--causal --key-padding 1,0,1,1,0,1,1,0"),
        (np.tri(200, dtype=bool) & HOLES, "--causal --key-padding 1,0,1,1,0,1"),
        (
            np.tri(200, dtype=bool) & (np.arange(200)[:, None] // 70 == np.arange(200) // 70),
            "--causal --segments 0,0,0",
        ),
    ],
)
def test_the_options_that_are_printed_build_the_mask(
    run: Any, mask: np.ndarray[Any, Any], words: str
) -> None:
    (line,) = re.findall("^  options: (.*)$", run("--attn-mask m.npy", m=mask).out, re.MULTILINE)
    assert line.startswith(words)
    assert run(f"--attn-mask m.npy --against options {line}").code == 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--segments 0,0,1/1", "--segments: expected rows of one length between '/', got several"),
        ("--key-padding 1,0,-1", "--key-padding: expected 0 and 1, got -1"),
    ],
)
def test_lists_are_checked(run: Any, words: str, problem: str) -> None:
    ran = run(words)
    assert ran.code == 2
    assert problem in ran.err


def test_hidden_rows_are_suspected_of_being_transposed(run: Any) -> None:
    rows = np.repeat(PADDED[0][:, None], S, axis=1)
    assert "is it transposed?" in run("--attn-mask m.npy", m=rows).err


def drawn_mask() -> np.ndarray[Any, Any]:
    """Bool (2, 4, 5, 6); head 2 of batch 1 is causal at offset 1."""
    mask = np.random.default_rng(0).random((2, 4, 5, 6)) < 0.6
    mask[1, 2] = np.tri(5, 6, 1, dtype=bool)
    return mask


@pytest.mark.parametrize("heads", [[2], [1, 3], [-1], [3, 0]])
@pytest.mark.parametrize("batches", [[1], [0, 1]])
def test_chosen_heads_are_those_of_a_file_with_no_others(
    run: Any, heads: list[int], batches: list[int]
) -> None:
    m, places = drawn_mask(), [[one % 2 for one in batches], [one % 4 for one in heads]]
    few, typed = m[np.ix_(*places)], [",".join(map(str, one)) for one in (batches, heads)]
    words = f"--attn-mask m.npy --batch-index {typed[0]} --head-index {typed[1]}"
    alone = run(f"{words} --save s.npy -f json", m=m).document
    cut = run("--attn-mask few.npy -f json", few=few).document
    assert np.array_equal(np.load("s.npy"), few)
    chosen = [(batch, head) for batch in places[0] for head in places[1]]
    assert [(one.pop("batch"), one.pop("head")) for one in alone["data"]] == chosen
    assert alone["data"] == [
        {key: value for key, value in one.items() if key not in ("batch", "head")}
        for one in cut["data"]
    ]
    named = [
        [found["params"][f"{axis}_index"] for axis in ("batch", "head")] for found in (alone, cut)
    ]
    assert named == [places, [None, None]]


def test_one_chosen_head_is_described_compared_and_measured_alone(run: Any) -> None:
    words = "--attn-mask m.npy --batch-index 1 --head-index 2"
    ran = run(words, m=drawn_mask())
    assert ran.told.startswith("causal (bottom-right, offset 1)\n")
    assert ran.out.partition("\n")[0].endswith(" · batch 1 · head 2")
    assert run(f"{words} --against options --causal --query-offset 1").code == 0
    assert run(f"{words} --fail-on leak --causal --query-offset 1").code == 0
    assert run(f"{words[:-1]}3 --fail-on leak --causal --query-offset 1").code == 3
    scores = np.random.default_rng(1).standard_normal((2, 4, 5, 6))
    lines = run("--attn-mask m.npy --scores s.npy -f csv", s=scores).out.splitlines()
    chosen = run(f"{words} --scores s.npy -f csv").out.splitlines()
    assert chosen == [lines[0], *(line for line in lines if line.startswith("1,2,"))]
    assert len(chosen) == 6
    slopes = run("--k-len 3 --heads 4 --alibi --head-index -1").out
    assert "slope of each head: 0.00390625\nbias of head 3, first" in slopes
    found = attncli.mask(attn_mask=drawn_mask(), head_index=2, batch_index=-1)
    assert found.description == "causal (bottom-right, offset 1)"
    assert [(one.batch, one.head) for one in found.records] == [(1, 2)]
    beyond = run("--attn-mask m.npy --head-index 4")
    assert (beyond.code, "expected an index from -4 to 3, got 4" in beyond.err) == (2, True)


# Rows of real keys, as a tokenizer gives them: longest first, shortest first, padded on the left.
UNSORTED = np.arange(6) < np.array([[5], [3], [4]])
SORTED = np.arange(6) < np.array([[4], [5]])


@pytest.mark.parametrize(
    ("mask", "words", "said"),
    [
        (UNSORTED, "", "True runs from the left in every row; meant as --key-padding, (B, S_k)?"),
        (SORTED, "", "True runs from the left in every row; meant"),
        (SORTED.astype(np.int64), "", "True runs from the left in every row; meant"),
        (UNSORTED[:, ::-1], "", "True runs up to the right end in every row; meant"),
        (~UNSORTED, "--mask-true drop", "False runs from the left in every row; meant"),
        (SORTED, "--q-len 2", ""),
        (SORTED, "--batch 3", ""),
        (SORTED.astype(np.float32), "", ""),
        (SORTED[None], "", ""),
        (np.tile(SORTED[:1], (2, 1)), "", ""),
        (np.tri(2, 6, 4, dtype=bool), "", ""),
        (np.tri(2, 6, dtype=bool), "", ""),
        (np.maximum(np.tri(4, 6, 2), np.arange(6) < 4) > 0, "", ""),
        (np.tri(6, 6, 1, dtype=bool), "", ""),
        (np.repeat(np.repeat(np.tri(3, dtype=bool), 2, 0), 2, 1), "", ""),
        (np.array([[True, False, True], [True, True, False]]), "", ""),
        (np.array([[True, False], [False, False]]), "", ""),
    ],
)
def test_rows_that_look_like_batches_are_doubted(
    run: Any, mask: np.ndarray[Any, Any], words: str, said: str
) -> None:
    ran = run(f"--attn-mask m.npy {words}", m=mask)
    assert said in ran.err
    assert ("meant as --key-padding" in ran.err) == bool(said)


def test_key_padding_given_as_a_mask_is_refused_with_the_option_that_takes_it(run: Any) -> None:
    """Beside tensors, or a number of queries, a row per batch does not fit."""
    q = np.zeros((2, 1, 6, 4), np.float32)
    advice = "for a row per batch: --key-padding, True = real, or reshape it to (2, 1, 1, 6)"
    for line in ("q.npy q.npy --attn-mask m.npy", "--attn-mask m.npy --q-len 6"):
        ran = run(line, q=q, m=SORTED)
        assert ran.code == 1
        assert "expected (S_q=6, S_k=6) or 1s, got (2, 6)" in ran.err
        assert advice in ran.err
    alone = run("q.npy q.npy --attn-mask m.npy", q=q[:1], m=SORTED)
    assert (alone.code, advice in alone.err) == (1, False)
    reshaped = run("q.npy q.npy --attn-mask m.npy", q=q, m=SORTED[:, None, None])
    assert reshaped.told == run("q.npy q.npy --key-padding m.npy", q=q, m=SORTED).told


def test_where_rows_may_be_batches_or_queries_only_the_padding_is_doubted(run: Any) -> None:
    """With B = S_q the shape does not tell."""
    q = np.zeros((3, 1, 3, 4), np.float32), np.zeros((3, 1, 6, 4), np.float32)
    doubted = run("q.npy k.npy --attn-mask m.npy", q=q[0], k=q[1], m=UNSORTED)
    assert "--attn-mask: True runs from the left in every row; meant" in doubted.err
    causal = run("q.npy k.npy --attn-mask m.npy", q=q[0], k=q[1], m=np.tri(3, 6, 3, dtype=bool))
    assert causal.err == ""
    found = attncli.mask(attn_mask=UNSORTED)
    assert found.warnings[-1].endswith("meant as key_padding, (B, S_k)?")


def test_records_of_every_batch_in_every_format(run: Any) -> None:
    mask = PADDED[:, None, None, :] & CAUSAL
    lines = run("--attn-mask m.npy -f csv", m=mask).out
    rows = list(csv.DictReader(io.StringIO(lines)))
    assert [row["batch"] for row in rows] == ["0", "1"]
    assert [int(row["kept"]) for row in rows] == mask.sum((1, 2, 3)).tolist()
    data = run("--attn-mask m.npy -f json").document["data"]
    np.testing.assert_array_equal([record["values"] for record in data], mask[:, 0])
    records = run("--attn-mask m.npy -f ndjson").out.splitlines()
    assert [json.loads(line)["unused_keys"] for line in records] == [3, 5]
    omitted = run("--attn-mask m.npy -f json --max-values 63").document["data"][0]
    assert omitted["values"] is None
    assert omitted["values_omitted"] is True


def test_a_row_for_all_queries_meets_causality(run: Any) -> None:
    ran = run("--attn-mask m.npy --causal -f json", m=PADDED[:, None, None, :])
    assert [record["q_len"] for record in ran.document["data"]] == [S, S]


@pytest.mark.parametrize("dtype", ["bool", "float16", "float32", "float64"])
def test_a_saved_mask_reads_back(run: Any, dtype: str) -> None:
    kind = "--as bool" if dtype == "bool" else f"--as additive --dtype {dtype}"
    assert run(f"--causal --key-lengths 5,3 --save out.npz {kind}").code == 0
    saved = np.load("out.npz")["attn_mask"]
    expected = PADDED[:, None, None, :] & CAUSAL
    assert saved.dtype == dtype
    np.testing.assert_array_equal(saved if dtype == "bool" else saved == 0, expected)
    assert dtype == "bool" or bool(np.isneginf(saved[~expected]).all())


def test_a_saved_bfloat16_mask_reads_back(run: Any) -> None:
    assert run("--causal --save out.safetensors --as additive --dtype bfloat16").code == 0
    assert run("--attn-mask out.safetensors --against options --causal").code == 0


def test_alibi_is_saved_for_every_head(run: Any) -> None:
    run("--alibi --causal --heads 2 --save out.safetensors --as additive --dtype float64")
    saved = load_file("out.safetensors")["attn_mask"]
    distance = abs(np.arange(S)[:, None] - np.arange(S))
    slopes = np.array([2.0**-4, 2.0**-8])[:, None, None]
    np.testing.assert_array_equal(saved[0], np.where(CAUSAL, -slopes * distance, -np.inf))


def test_slopes_say_how_many_heads_there_are(run: Any) -> None:
    run("--alibi-slopes 2,3 --k-len 4 --save out.safetensors --as additive --dtype float64")
    saved = load_file("out.safetensors")["attn_mask"]
    np.testing.assert_array_equal(saved[0, :, 3, 1], [-4, -6])


def test_a_bias_beyond_the_dtype_is_warned_of(run: Any) -> None:
    mask = np.where(CAUSAL, 0, -1e6)
    words = "--attn-mask m.npy --hide-below -1e7 --save o.npy --as additive --dtype float16"
    ran = run(words, m=mask)
    assert "28 visible cells are -inf in float16" in ran.err


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("--attn-mask leaking.npy --against causal.npy", 3, "2 cells that differ"),
        ("--attn-mask leaking.npy --against options --causal", 3, "the first at query 2, key 5"),
        ("--causal --against causal.npy", 0, ""),
        ("--causal --against short.npy", 1, "--against: expected (S_q=8, S_k=8)"),
        ("--attn-mask leaking.npy --fail-on leak", 3, 'that "causal" hides, got 2'),
        ("--attn-mask leaking.npy --causal --fail-on leak", 3, "query 2, key 5"),
        ("--attn-mask causal.npy --fail-on leak", 0, ""),
        ("--attn-mask causal.npy --segments 0,0,0,0,1,1,1,1 --fail-on leak", 3, "segments"),
        ("--causal --query-offset -1 --fail-on empty-rows", 3, "no empty rows, got 1: 0"),
        ("--key-lengths 6 --fail-on unused-keys", 3, "no unused keys, got 2: 6, 7"),
        ("--key-lengths 6 --fail-on empty-rows", 0, ""),
        ("--causal --fail-on leak", 2, "expected --attn-mask"),
        ("--causal --against causal.npy --fail-on empty-rows", 2, "--fail-on"),
        ("--fail-on typo", 2, "expected one of"),
        ("--as bool", 2, "--as: expected --save"),
        ("--save o.npy --dtype float16", 2, "--as additive"),
        ("--scale 2", 0, "--scale shapes the softmax"),
        ("--temperature 2", 0, "is not used here"),
        ("--group x", 2, "expected a bundle"),
        ("--layout bshd", 2, "expected files"),
        ("--effect", 2, "expected files of Q and K"),
        ("--q-len 3 --k-len 5 --causal", 2, "top-left"),
        ("--attn-mask twos.npy", 1, "expected integers 0 and 1"),
        ("--attn-mask nan.npy", 1, "NaN"),
        ("causal.npy", 2, "expected Q and K"),
    ],
)
def test_exit_codes_and_errors(run: Any, line: str, code: int, said: str) -> None:
    files = {"causal": CAUSAL, "leaking": LEAKING, "short": CAUSAL[:4]}
    ran = run(line, twos=CAUSAL * 2, nan=np.full((S, S), np.nan), **files)
    assert ran.code == code
    assert said in ran.err


def softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    weights: np.ndarray[Any, Any] = powers / powers.sum(-1, keepdims=True)
    return weights


def check_effect(text: str, scores: np.ndarray[Any, Any]) -> None:
    """Compare CSV records of a causal mask with the softmax of scores (B, H, S, S)."""
    rows = list(csv.DictReader(io.StringIO(text)))
    before, after = softmax(scores), softmax(np.where(CAUSAL, scores, -np.inf))
    removed = np.where(CAUSAL, 0, before).sum(-1)
    terms = -after * np.log(np.where(after > 0, after, 1))
    for name, expected in (
        ("mass_removed", removed),
        ("entropy_after_nats", terms.sum(-1)),
        ("mass_moved", abs(after - before).sum(-1) / 2),
    ):
        got = [float(row[name]) for row in rows]
        np.testing.assert_allclose(got, expected.ravel(), atol=1e-12)


def test_the_effect_on_scores_of_q_and_k_and_of_a_file(run: Any) -> None:
    generator = np.random.default_rng(0)
    q, k = generator.standard_normal((2, 2, 4, S, 6))
    k = k[:, :2]  # grouped heads
    scores = q @ k.repeat(2, axis=1).swapaxes(-1, -2)
    given = run("q.npy k.npy --effect --causal -f csv", q=q, k=k)
    check_effect(given.out, scores / np.sqrt(6))
    capped = run("q.npy k.npy --effect --causal --scale .5 --temperature 2 --softcap 3 -f csv")
    check_effect(capped.out, 3 * np.tanh(scores / 4 / 3))
    params = run("q.npy k.npy --effect --causal --softcap 3 -f json", q=q, k=k).document["params"]
    used = {name: params[name] for name in ("scale", "temperature", "softcap")}
    assert used == {"scale": pytest.approx(1 / np.sqrt(6)), "temperature": 1.0, "softcap": 3.0}
    packed = {n: t.swapaxes(1, 2).reshape(2, S, -1) for n, t in (("pq", q), ("pk", k))}
    flat = run("pq.npy pk.npy --layout bsh --heads 4 --effect --causal -f csv", **packed)
    check_effect(flat.out, scores / np.sqrt(6))
    check_effect(run("--scores s.npy --causal -f csv", s=scores).out, scores)


def test_queries_that_are_not_finite_stop_the_effect(run: Any) -> None:
    q = np.ones((S, 4))
    q[1, 2] = np.nan
    ran = run("q.npy k.npy --effect --causal", q=q, k=np.ones((S, 4)))
    assert ran.code == 1
    assert (
        "q (q.npy): expected finite values, got 1 NaN or inf, the first at (1, 2)\n"
        "  `attncli entropy --allow-nonfinite` tells which rows they reach" in ran.err
    )
    ran = run("--scores s.npy --causal", s=np.full((S, S), np.nan))
    assert ran.code == 1
    assert "--scores: expected finite values or -inf, got NaN or +inf" in ran.err


@pytest.mark.parametrize("form", ["csv", "ndjson"])
def test_every_differing_cell_is_in_the_formats_for_programs(run: Any, form: str) -> None:
    ran = run(f"--attn-mask m.npy --against full.npy -f {form}", m=CAUSAL, full=CAUSAL | True)
    lines = ran.out.splitlines()
    assert len(lines) == (S * S - S) // 2 + (form == "csv")
    assert ran.code == 3
    assert len(run("--attn-mask m.npy --against full.npy -f json").document["data"]) == 10


def test_tensors_of_a_file_are_named_like_everywhere(run: Any) -> None:
    save_file({"z.q": np.ones((5, 4)), "z.k": np.ones((7, 4))}, "g.safetensors")
    line = "g.safetensors::z.q g.safetensors::z.k --key-lengths 6 -f json"
    (record,) = run(line).document["data"]
    assert (record["q_len"], record["k_len"], record["kept"]) == (5, 7, 30)
    assert run(line).document["inputs"]["q"]["source"] == "g.safetensors::z.q"
    ran = run("g.safetensors::z.q g.safetensors::z.k --effect -f csv")
    assert len(ran.out.splitlines()) == 6


def test_a_bundle_brings_its_mask_scale_and_labels(run: Any) -> None:
    generator = np.random.default_rng(1)
    q, k = generator.standard_normal((2, 1, 1, S, 4))
    declared = {"l0": {"scale": 2.0, "labels": list("abcdefgh")}}
    tensors = {"l0.q": q, "l0.k": k, "l0.attn_mask": CAUSAL}
    save_file(tensors, "b.safetensors", metadata={"attncli": json.dumps(declared)})
    ran = run("b.safetensors -f json")
    assert ran.document["params"]["attn_mask"] == "b.safetensors::l0.attn_mask"
    assert "0 a ██·" in run("b.safetensors").out
    check_effect(run("b.safetensors --effect -f csv").out, 2 * q @ k.swapaxes(-1, -2))


def test_colour_only_where_it_is_asked_for(run: Any) -> None:
    assert "\x1b[" in run("--causal --color always").out
    assert "\x1b[" not in run("--causal").out


def test_every_picture_is_written_off_a_terminal(run: Any) -> None:
    heads = np.stack([np.tri(S, S, -diagonal, dtype=bool) for diagonal in range(6)])
    ran = run("--attn-mask m.npy", m=heads)
    assert all(f"head {head}: " in ran.out for head in range(6))


def process(code: str) -> str:
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ran.stdout


RUN = "import sys; sys.argv = ['attncli', 'mask', '--causal', '-q', '-o', '/dev/null']\n"
ASK = "\nprint('torch' in sys.modules)"


def test_no_torch_is_imported() -> None:
    command = "from attncli.cli.app import app\ntry: app()\nexcept SystemExit: pass"
    assert process(RUN + command + ASK).endswith("False\n")
    assert process(f"import sys, attncli; attncli.mask(4, causal=True){ASK}") == "False\n"


def test_that_an_imported_torch_would_be_seen() -> None:
    assert process(f"import sys, torch{ASK}") == "True\n"


def test_a_hundred_thousand_tokens_cost_no_cells(run: Any) -> None:
    tracemalloc.start()
    ran = run("--q-len 100000 --causal --left-window 4095 -f csv")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000_000  # bytes, of 10 GB
    kept = 100_000 * 4096 - 4096 * 4095 // 2
    assert f",{kept}," in ran.out


def test_python_builds_the_same_masks() -> None:
    found = attncli.mask(S, causal=True, left_window=2)
    expected = CAUSAL & ~np.tri(S, S, -3, dtype=bool)
    np.testing.assert_array_equal(found.visible(), expected)
    assert found.options == {"causal": True, "left_window": 2}
    assert found.records[0].kept == expected.sum()
    assert attncli.mask(attn_mask=~CAUSAL).probably_inverted
    assert attncli.mask(key_lengths=[5, 3], k_len=S).visible(1)[0].tolist() == PADDED[1].tolist()
    with pytest.raises(TypeError, match="got keyword 'softcap'"):
        attncli.mask(S, softcap=3)
    with pytest.raises(attncli.UsageError, match="batch: expected 0 to 0, got 1"):
        found.visible(1)


def test_a_large_file_is_never_held_in_memory(tmp_path: Path) -> None:
    np.save(tmp_path / "m.npy", np.tri(6000, dtype=bool))  # 36 MB, as a list of lists 290
    code = (
        f"import sys; sys.argv = ['attncli', 'mask', '--attn-mask', {str(tmp_path / 'm.npy')!r}]\n"
        "from attncli.cli.app import app\ntry: app()\nexcept SystemExit: pass\n"
        "import re; print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc")
    assert int(process(code).splitlines()[-1]) < 150 * 1024


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--q-len 1 --k-len 16 --causal --query-offset bottom-right",
            "causal (bottom-right, offset 15); here the same as: full",
        ),
        (
            "--q-len 1 --k-len 16 --key-lengths 8 --causal --left-window 3 "
            "--query-offset bottom-right",
            "causal (offset 7) with a window of 3 keys to the left (4 with the query's own); key "
            "padding, length 8; here the same as: window of 11 keys to the left and all keys to "
            "the right (bottom-right, offset 15); key padding, length 8",
        ),
        ("--k-len 6 --causal --right-window 2", "causal"),
        ("--k-len 6 --causal --prefix 0", "causal"),
        (
            "--attn-mask tri.npy --causal --left-window 9",
            "causal; asked for beside the file: causal with a window of 9 keys to the left "
            "(10 with the query's own)",
        ),
        (
            "--k-len 4 --causal --segments 5,5,5,5",
            "causal; one packed document: segments 0–3; here the same as: causal",
        ),
    ],
)
def test_what_is_asked_for_is_said_where_it_does_not_show(run: Any, words: str, said: str) -> None:
    ran = run(f"{words} -f json", tri=np.tri(6, dtype=bool))
    assert ran.document["data"][0]["description"] == said
