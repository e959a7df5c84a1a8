"""The page without a browser: what it holds is right, safe, small and the same each time."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reading import MakePage, Read, floats
from safetensors import safe_open
from safetensors.torch import save_file

import attncli
from attncli.analysis.head_columns import HEAD
from attncli.cli.report_run import _name
from attncli.report.page.data import WALK_KEYS, WALK_WIDTH, walk, walk_of

MINILM = Path("sample_inputs/minilm.safetensors").resolve()
HOSTILE = ["</script><script>alert(1)</script>", "<!--", '"><img src=x onerror=alert(1)>', "中文"]
HOSTILE += ["שלום", "x" * 200, "\n", "", "\u2028", "\ud800", "&lt;", "Ġthe"]


def bundle(path: Path, lengths: list[int], heads: int = 2, dk: int = 4, **declared: Any) -> Path:
    """Layers of these lengths, with names and declared options."""
    generator = torch.Generator().manual_seed(1)
    tensors, told = {}, {}
    for layer, length in enumerate(lengths):
        for role in "qk":
            drawn = torch.randn(1, heads, length, dk, generator=generator) * 2
            tensors[f"layers.{layer}.{role}"] = drawn
        told[f"layers.{layer}"] = declared
    save_file(tensors, path, metadata={"attncli": json.dumps(told)})
    return path


def weights_of(path: Path, layer: int = 0, **options: Any) -> np.ndarray:
    with safe_open(path, "pt") as file:
        q, k = (file.get_tensor(f"layers.{layer}.{role}") for role in "qk")
    computed = attncli.compute(q, k, stages="weights", **options)
    return computed.stages["weights"][0].double().numpy()


# ── the file as a file ───────────────────────────────────────────────────────────────────────


def test_the_page_is_well_formed_and_loads_nothing(page: MakePage) -> None:
    read = page(MINILM)
    ids = [given["id"] for _, given in read.elements if "id" in given]
    assert len(ids) == len(set(ids))
    for tag, given in read.elements:
        assert tag != "label" or "for" not in given or given["for"] in ids
        for name in ("aria-labelledby", "aria-describedby"):
            assert name not in given or set(given[name].split()) <= set(ids)
        assert not {name for name in given if name.startswith("on")} | ({"style", "src"} & {*given})
        assert "href" not in given or given["href"][0] == "#" or given["href"] == "data:,"
    assert [tag for tag, _ in read.elements].count("h1") == 1
    assert {given["href"][1:] for tag, given in read.elements if tag == "a"} <= set(ids)
    rest = read.text.replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"https?:|url\(|@import|//[a-z]+\.[a-z]", rest)


def test_the_policy_names_the_blocks_that_are_there(page: MakePage) -> None:
    read = page(MINILM)
    (policy,) = (g["content"] for _, g in read.elements if g.get("http-equiv"))
    blocks = {"style": read.block("style"), "script": read.block("script")}
    for name, text in blocks.items():
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert [tag for tag, _ in read.elements].count("script") == 2


def test_the_same_input_gives_the_same_bytes_without_folders_and_dates(
    run: Any, tmp_path: Path
) -> None:
    texts = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        path = bundle(tmp_path / folder / "bundle.safetensors", [9, 5])
        target = tmp_path / folder / "page.html"
        run("report", path, "-q", "-o", target)
        texts.append(target.read_text())
    assert texts[0] == texts[1]
    assert str(tmp_path) not in texts[0]
    assert "attncli report bundle.safetensors -o report.html" in texts[0]


def test_hostile_names_stay_text(page: MakePage, tmp_path: Path) -> None:
    labels = tmp_path / "labels.json"
    labels.write_text(json.dumps(HOSTILE))
    path = bundle(tmp_path / "<b>&'.safetensors", [12])
    read = page(path, "--labels", labels, "--title", "<script>alert(1)</script>")
    assert [tag for tag, _ in read.elements].count("script") == 2
    assert "img" not in [tag for tag, _ in read.elements]
    assert ("h1", "", "<script>alert(1)</script>") in read.words
    told = [[text[:60] for text in one] for one in ([token] for token in HOSTILE)]
    (tokens,) = read.data["tokens"]
    assert tokens == told
    assert read.data["groups"][0]["source"] == "<b>&'.safetensors"


def test_what_is_wrong_is_said(run: Any, tmp_path: Path) -> None:
    path = bundle(tmp_path / "bundle.safetensors", [5])
    target = tmp_path / "page.html"
    for words, code, said in (
        ([path], 2, "--output"),
        ([path, "-o", tmp_path / "no" / "page.html"], 1, "expected a folder"),
        ([path, "-o", target, "--max-size", "big"], 2, "--max-size: expected a size such as 3MB"),
        ([path, "-o", target, "--max-size", "60kB"], 2, "--max-size: expected room for maps"),
        ([path, "-o", target, "--labels", "a,b"], 1, "--labels: expected 5 tokens, one a key"),
        ([path, "-o", target, "--head-index", "7"], 2, "head_index"),
        (["--q-len", "0", "-o", target], 1, "expected queries and keys to show"),
        ([path, "-o", target, "--label-limit", "sink"], 2, "expected NAME=X"),
    ):
        outcome = run("report", *words, code=code)
        assert said in outcome.stderr.replace("-index", "_index") or said in outcome.stderr
    assert not target.exists()


# ── its numbers ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], {}),
        (["--causal", "--left-window", "3"], {"causal": True, "left_window": 3}),
        (["--softcap", "2", "--temperature", "2"], {"softcap": 2.0, "temperature": 2.0}),
        (["--key-lengths", "7"], {"key_lengths": (7,)}),
    ],
)
def test_maps_are_the_weights_and_strips_what_entropy_says(
    page: MakePage, tmp_path: Path, words: list[str], options: dict[str, Any]
) -> None:
    path = bundle(tmp_path / "bundle.safetensors", [9])
    read, whole = page(path, *words), weights_of(path, **options)
    group, found = read.data["groups"][0], read.plane()
    assert group["maps"]["encoding"] == "f4"
    assert not group["pooled"]
    hidden = found == -1
    assert (whole[hidden] == 0).all()
    assert (whole[~hidden] > 0).all()
    np.testing.assert_allclose(np.where(hidden, 0, found), whole, rtol=2e-7)
    safe = np.where(whole > 0, whole, 1)
    np.testing.assert_allclose(read.strips("rows"), -(whole * np.log2(safe)).sum(-1), atol=1e-6)
    seen = (~hidden).sum(-2)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(read.strips("mass"), whole.sum(-2) / seen, rtol=1e-6)
    np.testing.assert_array_equal(read.strips("keys")[0], (~hidden).sum(-1)[0])
    assert group["edges"] == {"q": list(range(10)), "k": list(range(10))}


def test_heads_may_have_masks_of_their_own(page: MakePage, tmp_path: Path) -> None:
    path = bundle(tmp_path / "bundle.safetensors", [9])
    mask = np.stack([np.tri(9, dtype=bool), np.eye(9, dtype=bool)])
    np.save(tmp_path / "mask.npy", mask)
    read = page(path, "--attn-mask", tmp_path / "mask.npy")
    np.testing.assert_array_equal(read.plane() == -1, ~mask)
    seen = floats(read.data["groups"][0]["keys"]).reshape(2, 9)
    np.testing.assert_array_equal(seen, mask.sum(-1))
    assert str(tmp_path) not in read.text
    assert "--attn-mask mask.npy" in read.data["commands"]["overview"]


def test_a_table_of_very_many_heads_says_what_it_leaves_out(
    page: MakePage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attncli.report.page.page.TABLE_ROWS", 5)
    read = page(bundle(tmp_path / "bundle.safetensors", [4, 4], heads=4))
    assert len(read.rows) == 6
    assert len(read.data["heads"]["head"]) == 8
    assert any(words.startswith("3 more heads") for _, _, words in read.words)


def test_the_corner_holds_scores_before_the_mask(page: MakePage, tmp_path: Path) -> None:
    path = bundle(tmp_path / "bundle.safetensors", [20])
    read = page(path, "--causal", "--softcap", "3", "--scale", "0.7")
    with safe_open(path, "pt") as file:
        q, k = (file.get_tensor(f"layers.0.{role}") for role in "qk")
    capped = attncli.compute(q, k, stages="capped", softcap=3.0, scale=0.7).stages["capped"]
    found = floats(read.data["groups"][0]["corner"]).reshape(2, 8, 8)
    np.testing.assert_allclose(found, capped[0, :, :8, :8].numpy(), rtol=1e-6)


def test_sixteen_bits_hold_weights_to_what_the_page_says(page: MakePage, tmp_path: Path) -> None:
    path = bundle(tmp_path / "bundle.safetensors", [60], heads=12)
    read, whole = page(path, "--causal", "--max-size", "330kB"), weights_of(path, causal=True)
    assert read.data["groups"][0]["maps"]["encoding"] == "u2sqrt"
    assert not read.data["groups"][0]["pooled"]
    found = read.plane()
    later = np.triu(np.ones((60, 60), bool), 1)
    assert (found[:, later] == -1).all()
    found = np.where(found == -1, 0, found)
    assert np.abs(found - whole).max() < 1.6e-5
    assert np.abs(found.sum(-1) - 1).max() < np.sqrt(60) / 65533
    assert (found[whole == 1] == 1).all()
    assert any("2·10⁻⁵" in words for _, _, words in read.words)


@pytest.mark.parametrize("words", [[], ["--causal"], ["--causal", "--left-window", "40"]])
def test_pooled_maps_hold_means_and_the_largest(
    page: MakePage, tmp_path: Path, words: list[str]
) -> None:
    path = bundle(
        tmp_path / "bundle.safetensors", [150], heads=6, labels=list(map(str, range(150)))
    )
    options = {"causal": "--causal" in words} | ({"left_window": 40} if len(words) > 1 else {})
    read, whole = page(path, *words, "--max-size", "330kB"), weights_of(path, **options)
    group = read.data["groups"][0]
    edges = np.array(group["edges"]["k"])
    assert group["pooled"]
    assert edges[:5].tolist() == [0, 1, 2, 3, 4]
    assert edges[-1] == 150
    assert group["edges"]["q"] == edges.tolist()
    assert 40 <= len(edges) - 1 < 80
    sums = np.add.reduceat(np.add.reduceat(whole, edges[:-1], 1), edges[:-1], 2)
    most = np.maximum.reduceat(np.maximum.reduceat(whole, edges[:-1], 1), edges[:-1], 2)
    cells = np.outer(np.diff(edges), np.diff(edges))
    mean, largest = read.plane(), read.plane(how="max")
    np.testing.assert_array_equal(mean == -1, most == 0)
    np.testing.assert_allclose(np.where(mean == -1, 0, mean), sums / cells, atol=1.6e-5)
    np.testing.assert_allclose(np.where(largest == -1, 0, largest), most, atol=1.6e-5)
    row_sums = (np.where(mean == -1, 0, mean) * np.diff(edges)).sum(-1)
    np.testing.assert_allclose(row_sums, 1, atol=2e-3)
    (tokens,) = read.data["tokens"]
    assert tokens[0] == ["0"]
    assert tokens[-1] == [str(i) for i in range(edges[-2], 150)][:12]


def test_many_heads_have_thumbnails_and_the_telling_ones_maps(
    page: MakePage, tmp_path: Path
) -> None:
    path = bundle(tmp_path / "bundle.safetensors", [60, 50], heads=24)
    read = page(path, "--max-size", "330kB")
    groups = read.data["groups"]
    kept = [group["maps"]["heads"] for group in groups]
    assert 2 <= sum(map(len, kept)) < 48
    assert abs(len(kept[0]) - len(kept[1])) <= 1
    for layer, group in enumerate(groups):
        whole, small = weights_of(path, layer), read.plane(layer, of="thumbs")
        edges = np.array(group["thumbs"]["edges"]["k"])
        assert small.shape == (24, len(edges) - 1, len(edges) - 1)
        sums = np.add.reduceat(np.add.reduceat(whole, edges[:-1], 1), edges[:-1], 2)
        cells = np.outer(np.diff(edges), np.diff(edges))
        np.testing.assert_allclose(small, sums / cells, atol=1.6e-5)
        np.testing.assert_allclose(read.plane(layer), whole[kept[layer]], atol=1.6e-5)
    assert "corner" not in groups[0]
    start = groups[read.data["heads"]["group"][read.data["start"]]]
    assert read.data["start"] - start["first"] in start["maps"]["heads"]


@pytest.mark.parametrize(
    ("layers", "heads", "length", "largest"),
    [(6, 12, 64, "3MB"), (6, 12, 300, "3MB"), (6, 12, 64, "500kB"), (16, 32, 30, "2MB")],
)
def test_no_page_is_larger_than_asked_nor_much_smaller(
    page: MakePage, tmp_path: Path, layers: int, heads: int, length: int, largest: str
) -> None:
    labels = [f"token{i}" for i in range(length)]
    path = bundle(tmp_path / "bundle.safetensors", [length] * layers, heads, labels=labels)
    read = page(path, "--causal", "--max-size", largest)
    most = 500_000 if largest == "500kB" else int(largest[0]) * 1_000_000
    assert 0.6 * most < len(read.text.encode()) <= most
    assert len(read.data["tokens"]) <= 2
    if length == 64 and most > 1_000_000:
        assert read.data["groups"][0]["maps"]["encoding"] == "f4"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--q-len 1 --k-len 1", "1 head × 1 token"),
        ("--q-len 4 --k-len 9 --heads 3", "3 heads × 4 queries × 9 keys"),
        ("--q-len 5 --k-len 5 --key-lengths 0", "key lengths 0"),
        ("--q-len 5 --k-len 5 --causal --query-offset -3 --query-lengths 3", "query offset −3"),
        ("--q-len 6 --k-len 6 --causal --alibi --sinks 1", "causal, alibi, sinks"),
        ("--q-len 6 --k-len 6 --sink-keys 2", "Most on the first 2 tokens"),
        ("--batch 3 --batch-index 2,0 --heads 2", "2 batches × 2 heads × 8 tokens"),
    ],
)
def test_every_input_is_told_in_words(page: MakePage, words: str, said: str) -> None:
    read = page(*words.split())
    assert any(said in text for _, _, text in read.words)


def test_warnings_are_those_of_the_command(page: MakePage, run: Any, tmp_path: Path) -> None:
    path = bundle(tmp_path / "bundle.safetensors", [9], heads=8, cuasal=True)
    said = run("report", path, "-o", tmp_path / "page.html").stderr
    (warning,) = re.findall("warning: (.*)", said)
    read = page(path)
    assert ("li", "", warning) in read.words
    assert "«" not in read.text


def test_what_is_no_number_is_shown_as_such(page: MakePage, tmp_path: Path) -> None:
    q = np.random.default_rng(0).standard_normal((6, 4))
    q[2] = np.nan
    np.save(tmp_path / "q.npy", q)
    words = (tmp_path / "q.npy", tmp_path / "q.npy", "--allow-nonfinite", "--left-window", "1")
    read = page(*words, "--right-window", "0", "--query-offset", "0")
    lost = np.isnan(read.plane()[0])
    assert lost[2].sum() == 2
    assert set(np.flatnonzero(lost.any(-1))) == {2, 3}
    assert read.data["heads"]["entropy_bits_mean"] == [None]
    assert "NaN" in read.rows[1]


def test_groups_of_different_lengths_and_queries_of_their_own(
    page: MakePage, tmp_path: Path
) -> None:
    read = page(bundle(tmp_path / "bundle.safetensors", [9, 5, 7]))
    groups = read.data["groups"]
    assert [group["first"] for group in groups] == [0, 2, 4]
    assert [group["short"] for group in groups] == ["0", "1", "2"]
    assert [read.plane(i).shape for i in range(3)] == [(2, 9, 9), (2, 5, 5), (2, 7, 7)]
    assert any("3 layers, 6 heads, 5 to 9 tokens" in words for _, _, words in read.words)

    words = ["--q-len", 3, "--k-len", 7, "--heads", 4, "--kv-heads", 2, "--batch", 2]
    read = page(*words, "--causal", "--query-offset", "bottom-right", "--batch-index", "1,0")
    assert [group["batch"] for group in read.data["groups"]] == [1, 0]
    assert read.plane(0).shape == (4, 3, 7)
    assert read.data["groups"][0]["offset"] == 4
    read = page(*words, "--head-index", "3")
    assert read.data["heads"]["head"] == [3]
    assert any("batch 0 of 2" in text for _, _, text in read.words)


def test_given_weights_are_shown_as_they_are(page: MakePage, tmp_path: Path) -> None:
    weights = np.tril(np.random.default_rng(0).uniform(0.1, 1, (1, 2, 6, 6)))
    weights /= weights.sum(-1, keepdims=True)
    np.save(tmp_path / "w.npy", weights)
    read = page("--weights", tmp_path / "w.npy")
    found = read.plane()
    np.testing.assert_array_equal(found == -1, weights[0] == 0)
    np.testing.assert_allclose(np.where(found == -1, 0, found), weights[0], rtol=1e-6)
    group = read.data["groups"][0]
    assert group["commands"] == {"compute": None, "entropy": "attncli entropy --weights w.npy"}
    assert group["dk"] is None
    assert "corner" not in group
    np.save(tmp_path / "layers.npy", np.stack([weights, weights]))
    read = page("--weights", tmp_path / "layers.npy")
    commands = [group["commands"]["entropy"] for group in read.data["groups"]]
    assert commands[1] == "attncli entropy --group layers.1 --weights layers.npy"


# ── its words ────────────────────────────────────────────────────────────────────────────────


def test_the_table_is_that_of_the_records(page: MakePage, run: Any) -> None:
    read = page(MINILM, "--group", "layers.1", "--causal")
    words = ("--group", "layers.1", "--causal", "--format", "json")
    records = run("entropy", MINILM, *words).json["data"]
    headings, *rows = read.rows
    assert headings[:4] == ["head", "label", "entropy (bits)", "normalised"]
    assert len(rows) == len(records) == 12
    for row, record in zip(rows, records, strict=True):
        cells = dict(zip(headings, row, strict=True))
        assert cells["head"] == str(record["head"])
        assert cells["label"].split(" near ")[0] == record["label"]
        assert cells["entropy (bits)"] == f"{record['entropy_bits_mean']:.3f}"
        assert cells["sink mass"] == f"{record['sink_mass_mean']:.4f}"
        assert cells["at key"] == str(record["max_logit_key"])
    offered = {column.heading for column in HEAD}
    assert {re.sub(r" \(bits\)$", "", heading) for heading in headings} <= offered
    heads = read.data["heads"]
    assert heads["label"] == [read.data["labels"].index(r["label"]) for r in records]
    for name in ("entropy_bits_mean", "max_logit", "distance_mean"):
        np.testing.assert_allclose(heads[name], [r[name] for r in records], rtol=5e-6)
    for place, near in enumerate(heads["nearest"]):
        mixed = records[place]["label"] == "mixed"
        assert (near is not None) == mixed
        if mixed:
            score = heads["nearest_score"][place]
            assert score == pytest.approx(1 - records[place]["label_score"], rel=1e-5)


def test_without_a_bundle_it_teaches_on_the_example(page: MakePage) -> None:
    read = page()
    assert len(read.text.encode()) < 200_000
    assert read.plane().shape == (1, 4, 4)
    assert read.data["example"]["dk"] == 3
    q, k, v = (np.array(read.data["example"][role]) for role in "qkv")
    assert q.shape == k.shape == v.shape == (4, 3)
    weights = attncli.compute(q, k).stages["weights"][0].numpy()
    np.testing.assert_allclose(read.plane(), weights, rtol=2e-7)


def test_the_commands_of_the_page_run_and_print_the_same(
    page: MakePage, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle(tmp_path / "bundle.safetensors", [9, 5], labels=None)
    monkeypatch.chdir(tmp_path)
    words = ("--causal", "--sink-keys", "2", "--batch-index", "0", "--lang", "zh")
    read = page(tmp_path / "bundle.safetensors", *words)
    commands = read.data["commands"]
    assert set(commands) == {
        *("overview", "numbers", "report", "scaling", "steps", "steps_causal", "softmax")
    }

    def output(command: str, *more: str) -> Any:
        program, *rest = shlex.split(command)
        assert program == "attncli"
        return run(*rest, *more)

    report = output(commands["report"])
    assert report.code == 0
    assert Read((tmp_path / "report.html").read_text()).data == read.data
    heads = output(commands["overview"], "--format", "json").json["data"]
    np.testing.assert_allclose(
        [head["sink_mass_mean"] for head in heads], read.data["heads"]["sink_mass_mean"], rtol=1e-5
    )
    curves = output(commands["scaling"], "--format", "json").json["data"]
    for name, values in read.data["curves"].items():
        np.testing.assert_allclose(values, [record[name] for record in curves], rtol=5e-6)
    head = read.data["groups"][1]["commands"]["compute"] + " --head-index 1 --stage weights"
    stages = output(head, "--rows", "3", "--format", "json").json["data"]["stages"]
    row = np.array(stages["weights"]["values"], dtype=object).ravel().astype(float)
    shown = read.plane(1)[1, 3]
    np.testing.assert_allclose(np.where(shown == -1, 0, shown), row, rtol=1e-6)
    for name in ("steps", "steps_causal", "softmax"):
        assert output(commands[name]).stdout


def test_the_language_is_that_asked_for(page: MakePage) -> None:
    read = page("--lang", "zh", "--theme", "dark")
    (html,) = (given for tag, given in read.elements if tag == "html")
    assert html == {"lang": "zh", "data-theme": "dark"}
    text = " ".join(words for tag, _, words in read.words if tag not in ("script", "style"))
    for word in ("注意力分数", "缩放", "掩码", "数值稳定"):
        assert word in text + json.dumps(read.data["strings"], ensure_ascii=False)
    (html,) = (given for tag, given in page().elements if tag == "html")
    assert html == {"lang": "en"}


def test_the_draw_behind_the_slider_is_the_most_typical_of_400() -> None:
    widths = np.arange(1, WALK_WIDTH + 1)

    def off(draw: np.ndarray) -> float:
        return float(np.abs(np.log(draw.var(0, ddof=1) / widths)).max())

    assert walk().shape == (WALK_KEYS, WALK_WIDTH)
    assert off(walk()) == pytest.approx(min(off(walk_of(seed)) for seed in range(400)), rel=1e-5)
    assert np.exp(off(walk())) < 2.2


def test_a_tensor_of_a_bundle_keeps_its_path_within() -> None:
    assert _name("folder/a.npz::x/q") == "a.npz::x/q"
    assert _name("folder/a.npy") == "a.npy"
