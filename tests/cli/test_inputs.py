"""Every way in: files, bundles, groups, names, pipes, layouts, projections, random tensors."""

from __future__ import annotations

import io
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from plain import Run, Tensors, assert_stages, attention
from safetensors.torch import save_file


@pytest.mark.parametrize(
    "arguments",
    [
        ("q.npy", "k.npy", "v.npy"),
        ("bundle.npz",),
        ("bundle.npz::q", "bundle.npz::k", "bundle.npz::v"),
        ("--q", "q.npy", "--k", "bundle.npz::k", "--v", "v.npy"),
        ("q.npy", "k.npy", "--v", "bundle.npz::v"),
        ("bundle.npz", "--q", "q.npy"),
    ],
    ids=" ".join,
)
def test_files_bundles_and_names(
    run: Run, files: Path, tensors: Tensors, arguments: tuple[str, ...]
) -> None:
    found = run("compute", *arguments, "-f", "json").json
    assert_stages(found["data"], attention(**tensors))
    assert found["inputs"]["q"]["shape"] == [2, 4, 5, 8]
    assert found["inputs"]["q"]["dtype"] == "float32"
    assert found["schema"] == "attncli.compute/1"


@pytest.mark.parametrize(
    "arguments", [("roles",), ("roles/",), ("--q", "roles", "--k", "roles::k")]
)
def test_a_folder_is_a_bundle(
    run: Run, files: Path, tensors: Tensors, arguments: tuple[str, ...]
) -> None:
    Path("roles").mkdir()
    for name in "qkv":
        Path(f"{name}.npy").rename(f"roles/{name}.npy")
    wanted = attention(**tensors)
    if len(arguments) > 1:
        del wanted["output"]
    found = run("compute", *arguments, "-f", "json").json
    assert_stages(found["data"], wanted)
    assert "output" in found["data"]["stages"] or len(arguments) > 1
    assert found["inputs"]["q"]["source"] in ("roles/q.npy", "roles")


def test_what_save_writes_to_a_folder_is_read_from_it(run: Run, files: Path) -> None:
    """Weights by entropy, any stage by check, all by inspect; without Q and K compute says so."""
    run("compute", "bundle.npz", "--save", "saved", "--quiet")
    measured = run("entropy", "--weights", "saved", "-f", "json").json["data"]
    wanted = run("entropy", "bundle.npz", "-f", "json").json["data"]
    entropies = [[one["entropy_nats_mean"] for one in found] for found in (measured, wanted)]
    assert entropies[0] == pytest.approx(entropies[1], rel=1e-12)
    assert "output: right\n" in run("check", "bundle.npz", "--actual-output", "saved").stdout
    listed = run("inspect", "saved", "-f", "csv").stdout.splitlines()[1:]
    names = ["masked", "output", "scaled", "scores", "weights"]
    assert [line.partition(",")[0] for line in listed] == [f"saved/{name}.npy" for name in names]
    refused = run("compute", "saved", code=1).stderr
    assert "saved: expected tensors named q and k, got masked, output" in refused
    assert "attention weights alone are for entropy --weights saved" in refused


def test_bundles_in_a_folder_stand_for_themselves(run: Run, files: Path) -> None:
    Path("two").mkdir()
    for name in ("10", "9"):
        Path(f"two/{name}.npz").write_bytes(Path("bundle.npz").read_bytes())
    Path("two/config.json").write_text("{}")
    Path("two/broken.npz").write_bytes(b"PK\3\4")
    for command in (("entropy",), ("variance",)):
        out = run(*command, "two", "-f", "csv")
        sources = [line.partition(",")[0] for line in out.stdout.splitlines()[1:]]
        assert list(dict.fromkeys(sources)) == ["two/9.npz", "two/10.npz"]
        assert "left out: two/broken.npz: expected" in out.stderr
    assert "two/broken.npz" in run("inspect", "two", "9.npz", code=1).stderr
    words = "--causal", "--query-offset", "bottom-right"
    opening = "two/9.npz · B=2 H=4 S_q=5 S_k=7\n"
    assert run("mask", "two", *words).stdout.startswith(opening)


def test_a_file_of_a_folder_is_never_a_target(run: Run, files: Path) -> None:
    Path("roles").mkdir()
    for name in "qkv":
        Path(f"{name}.npy").rename(f"roles/{name}.npy")
    before = Path("roles/q.npy").read_bytes()
    for words in (("--save", "roles/q.npy"), ("-o", "roles/q.npy")):
        out = run("compute", "roles", "--stage", "output", *words, code=2)
        assert "expected a name of its own, got that of an input" in out.stderr
    assert Path("roles/q.npy").read_bytes() == before
    run("compute", "roles", "--stage", "output", "--save", "roles/o.npz", "-o", "roles/o.txt")
    run("compute", "bundle.npz", "--save", "roles", "-o", "roles/o.txt", "--stage", "output")


def test_folders_without_tensors_are_refused_in_a_line(run: Run, files: Path) -> None:
    Path("empty").mkdir()
    for command in ("compute", "entropy", "inspect", "mask"):
        refused = run(command, "empty", code=1).stderr
        assert refused.startswith("attncli: error: empty: expected files of tensors (.npy, .npz")


@pytest.mark.parametrize("kind", ["pt", "safetensors", "fortran", "misnamed", "query-key-value"])
def test_containers(run: Run, files: Path, tensors: Tensors, kind: str) -> None:
    as_torch = {name: torch.from_numpy(array) for name, array in tensors.items()}
    arguments = ["x.bin"]
    if kind == "pt":
        torch.save(as_torch, "x.bin")
    elif kind == "safetensors":
        save_file(as_torch, "x.bin")
    elif kind == "misnamed":  # told by content, never by extension
        Path("x.bin").write_bytes(Path("bundle.npz").read_bytes())
    elif kind == "query-key-value":
        named = {"Query": tensors["q"], "KEY": tensors["k"], "value": tensors["v"]}
        with Path("x.bin").open("wb") as file:
            np.savez(file, **named)
    else:
        for name, array in tensors.items():
            np.save(f"{name}_f.npy", np.asfortranarray(array))
        arguments = ["q_f.npy", "k_f.npy", "v_f.npy"]
    assert_stages(run("compute", *arguments, "-f", "json").json["data"], attention(**tensors))


def test_standard_input_and_pipes(run: Run, files: Path, tensors: Tensors) -> None:
    expected = attention(**tensors)
    q = Path("q.npy").read_bytes()
    found = run("compute", "-", "k.npy", "v.npy", "-f", "json", stdin=q).json
    assert_stages(found["data"], expected)
    bundle = Path("bundle.npz").read_bytes()
    assert_stages(run("compute", "-", "-f", "json", stdin=bundle).json["data"], expected)
    os.mkfifo("pipe")
    writer = threading.Thread(target=lambda: Path("pipe").write_bytes(q))
    writer.start()
    assert_stages(run("compute", "pipe", "k.npy", "v.npy", "-f", "json").json["data"], expected)
    writer.join()


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        ("float16", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("float64", torch.float64),
        ("float8_e4m3fn", torch.float8_e4m3fn),
    ],
)
def test_dtypes_stay_what_they_are(
    run: Run, files: Path, tensors: Tensors, dtype: str, stored: torch.dtype
) -> None:
    narrow = {name: torch.from_numpy(array).to(stored) for name, array in tensors.items()}
    save_file(narrow, "narrow.safetensors")
    found = run("compute", "narrow.safetensors", "-f", "json").json
    assert found["inputs"]["k"]["dtype"] == dtype
    exact = {name: tensor.to(torch.float64).numpy() for name, tensor in narrow.items()}
    assert_stages(found["data"], attention(**exact))
    cast = run("compute", "q.npy", "k.npy", "v.npy", "--dtype", dtype, "-f", "json").json
    assert cast["data"] == found["data"]


def test_integers_are_converted_and_never_multiplied_as_such(run: Run, files: Path) -> None:
    q, k = np.array([[100, 100]], np.int8), np.array([[100, 100], [1, -1]], np.int8)
    np.save("qi.npy", q)
    np.save("ki.npy", k)
    found = run("compute", "qi.npy", "ki.npy", "-f", "json").json["data"]["stages"]
    assert found["scores"]["values"] == [[[[20000.0, 0.0]]]]
    assert "output" not in found


def test_raw_bfloat16_needs_its_name(run: Run, files: Path, tensors: Tensors) -> None:
    bits = torch.from_numpy(tensors["q"]).bfloat16().view(torch.int16).numpy()
    np.save("raw.npy", bits.view("V2"))
    failed = run("compute", "raw.npy", "k.npy", "v.npy", code=1)
    assert "raw.npy: expected a named element type" in failed.stderr
    assert "--dtype bfloat16" in failed.stderr
    found = run("compute", "raw.npy", "k.npy", "v.npy", "--dtype", "bfloat16", "-f", "json").json
    narrow = {n: torch.from_numpy(a).bfloat16().double().numpy() for n, a in tensors.items()}
    assert_stages(found["data"], attention(**narrow))


@pytest.mark.parametrize(
    "name", ["blocks.0.attn.hook_{}", "layers.0.self_attn.{}_proj", "layer0_{}", "x{}"]
)
def test_names_of_dumps(run: Run, files: Path, tensors: Tensors, name: str) -> None:
    laid = {n: np.ascontiguousarray(a.transpose(0, 2, 1, 3)) for n, a in tensors.items()}
    save_file({name.format(n): torch.from_numpy(a) for n, a in laid.items()}, "d.safetensors")
    found = run("compute", "d.safetensors", "--layout", "bshd", "-f", "json").json
    assert_stages(found["data"], attention(**tensors))


@pytest.mark.parametrize("container", ["npy", "npz", "safetensors", "pt"])
@pytest.mark.parametrize(
    ("dtype", "integers"),
    [
        ("bfloat16", ("uint16", "int16")),
        ("float16", ("uint16", "int16")),
        ("float8_e4m3fn", ("uint8", "int8")),
        ("float8_e5m2", ("uint8", "int8")),
    ],
)
def test_integers_beside_a_float_of_their_width_are_its_bits(
    run: Run, files: Path, tensors: Tensors, dtype: str, integers: tuple[str, ...], container: str
) -> None:
    narrow = {n: torch.from_numpy(a).to(getattr(torch, dtype)) for n, a in tensors.items()}
    expected = attention(**{n: t.double().numpy() for n, t in narrow.items()})
    for kind in integers:
        bits = {name: t.view(getattr(torch, kind)) for name, t in narrow.items()}
        words = [f"bits.{container}"]
        if container == "npy":
            words = [f"{name}.npy" for name in bits]
            for name, t in bits.items():
                np.save(f"{name}.npy", t.numpy())
        elif container == "npz":
            np.savez("bits.npz", **{name: t.numpy() for name, t in bits.items()})
        elif container == "pt":
            torch.save(bits, "bits.pt")
        else:
            save_file(bits, "bits.safetensors")
        outcome = run("compute", *words, "--dtype", dtype, "-f", "json")
        assert_stages(outcome.json["data"], expected)
        said = f"{words[0]}: {kind} values are taken as the bits of {dtype}; without --dtype"
        assert outcome.stderr.count(said) == 1
        seen = run("inspect", *words, "--dtype", dtype, "-f", "json")
        assert said in seen.stderr
        largest = max(float(t.double().max()) for t in narrow.values())
        assert max(record["max"] for record in seen.json["data"]) == largest


def test_integers_that_look_like_bits_are_worth_a_warning(run: Run, files: Path) -> None:
    for name in ("uint16", "int16"):
        np.save("bits.npy", np.array([[16256, 16384]], name))
        outcome = run("compute", "bits.npy", "bits.npy", "-f", "json")
        assert outcome.json["data"]["stages"]["scores"]["max"] == 16256**2 + 16384**2
        assert f"bits.npy: {name} values as large as 16384 are taken as numbers" in outcome.stderr
        assert "--dtype bfloat16" in outcome.stderr
        wide = run("compute", "bits.npy", "bits.npy", "--dtype", "float32", "-f", "json")
        assert wide.json["data"]["stages"]["scores"]["max"] == 16256**2 + 16384**2
        assert wide.stderr == ""
        np.save("small.npy", np.array([[100, 2]], name))
        assert run("compute", "small.npy", "small.npy", "-f", "json").stderr == ""


@pytest.mark.parametrize("layout", ["bshd", "bsh", "sbhd", "sbh", "bhds", "rank-3", "rank-2"])
def test_layouts(run: Run, files: Path, tensors: Tensors, layout: str) -> None:
    options = ["--layout", layout]
    kept = tensors
    if layout == "bshd":
        laid = {name: array.transpose(0, 2, 1, 3) for name, array in tensors.items()}
    elif layout == "sbhd":
        laid = {name: array.transpose(2, 0, 1, 3) for name, array in tensors.items()}
    elif layout == "bhds":
        laid = {name: array.transpose(0, 1, 3, 2) for name, array in tensors.items()}
    elif layout in ("bsh", "sbh"):
        order = (0, 2, 1, 3) if layout == "bsh" else (2, 0, 1, 3)
        turned = {name: array.transpose(order) for name, array in tensors.items()}
        laid = {name: array.reshape(*array.shape[:2], -1) for name, array in turned.items()}
        options += ["--heads", "4", "--kv-heads", "2"]
    else:
        first = {n: a[:1] if layout == "rank-3" else a[:1, :1] for n, a in tensors.items()}
        kept, options = first, []
        laid = {n: a[0] if layout == "rank-3" else a[0, 0] for n, a in first.items()}
    np.savez("laid.npz", **{name: np.ascontiguousarray(array) for name, array in laid.items()})
    found = run("compute", "laid.npz", *options, "-f", "json").json
    assert_stages(found["data"], attention(**kept))


def test_keys_of_another_layout(run: Run, files: Path, tensors: Tensors) -> None:
    q, v = (tensors[name].transpose(0, 2, 1, 3) for name in "qv")
    np.savez("a.npz", q=q, k=tensors["k"].transpose(0, 1, 3, 2), v=v)
    words = ("a.npz", "--layout", "bshd", "--k-layout", "bhds", "-f", "json")
    assert_stages(run("compute", *words).json["data"], attention(**tensors))
    mask = run("mask", *words, "--causal", "--query-offset", "0").json["data"]
    assert [(one["q_len"], one["k_len"]) for one in mask] == [(5, 7)]
    refused = run("mask", "--k-len", "4", "--k-layout", "bhds", code=2).stderr
    assert "--k-layout: expected files beside it" in refused
    np.savez("b.npz", q=tensors["q"], k=tensors["k"].transpose(0, 1, 3, 2), v=tensors["v"])
    failed = run("compute", "b.npz", code=1).stderr
    assert "with --k-layout bhds they go together" in failed
    out = attention(**tensors)["output"]
    np.save("out.npy", out.transpose(2, 0, 1, 3))
    np.savez("c.npz", **{name: array.transpose(2, 0, 1, 3) for name, array in tensors.items()})
    run("check", "c.npz", "--layout", "sbhd", "--actual-output", "out.npy")
    np.save("out.npy", out.transpose(2, 0, 1, 3).reshape(5, 2, -1))
    packed = {n: a.transpose(2, 0, 1, 3).reshape(a.shape[2], 2, -1) for n, a in tensors.items()}
    np.savez("d.npz", **packed)
    heads = ("--heads", "4", "--kv-heads", "2")
    run("check", "d.npz", "--layout", "sbh", *heads, "--actual-output", "out.npy")


@pytest.mark.parametrize(
    ("q", "k", "said"),
    [
        ((8, 2, 4, 8), (8, 2, 4, 8), "more batches than queries; if it is (S, B, H, d), say"),
        ((512, 2, 16, 64), (512, 2, 8, 64), "if it is (S, B, H, d), say --layout sbhd"),
        ((1, 8, 3, 4), (1, 8, 3, 4), "more heads than queries; if it is (B, S, H, d), say"),
        ((1, 5, 4, 8), (1, 5, 2, 8), "more heads than queries"),
        ((1, 4, 32, 8), (1, 4, 8, 8), "has 32 queries, and k 8 keys; if it is (B, S, H, d), say"),
        ((9, 4, 8), (9, 4, 8), "if it is (S, H, d), say --layout bshd"),
        ((1, 6, 768), (1, 6, 768), "if heads are packed, (B, S, H·d), say --layout bsh"),
        ((1, 8, 1, 4), (1, 8, 9, 4), None),
        ((16, 8, 1, 4), (16, 8, 64, 4), None),
        ((1, 8, 10, 4), (1, 8, 77, 4), None),
        ((2, 4, 5, 8), (2, 2, 6, 8), None),
        ((4, 8), (2, 8), None),
    ],
)
def test_a_layout_that_fits_better_is_worth_a_warning(
    run: Run, files: Path, q: tuple[int, ...], k: tuple[int, ...], said: str | None
) -> None:
    np.save("q.npy", np.ones(q, np.float32))
    np.save("k.npy", np.ones(k, np.float32))
    for command in ("entropy", "mask"):
        words = (command, "q.npy", "k.npy", "-f", "json")
        outcome = run(*words)
        assert (said is None) == (outcome.stderr == "")
        assert said is None or said in outcome.stderr
    if len(q) == 4:
        assert run("entropy", "q.npy", "k.npy", "--heads", str(q[1]), "-f", "csv").stderr == ""


@pytest.mark.parametrize(
    ("q", "k", "said"),
    [
        ((1, 5, 4, 8), (1, 9, 4, 8), "with --layout bshd they go together"),
        ((5, 2, 4, 8), (9, 2, 4, 8), "with --layout sbhd they go together"),
        ((1, 2, 6, 8), (1, 2, 8, 5), "with --k-layout bhds they go together"),
        ((1, 6, 4, 8), (1, 4, 8, 5), "with --layout bshd --k-layout bhds they go together"),
        ((1, 6, 64), (1, 6, 16), "if heads are packed, (B, S, H·d): --layout bsh with --heads"),
        ((1, 6, 3, 4, 8), (1, 6, 4, 8), "--qkv splits Q, K and V fused in one"),
    ],
)
def test_what_would_fit_is_named_where_shapes_do_not_go_together(
    run: Run, files: Path, q: tuple[int, ...], k: tuple[int, ...], said: str
) -> None:
    np.save("q.npy", np.ones(q, np.float32))
    np.save("k.npy", np.ones(k, np.float32))
    assert said in run("entropy", "q.npy", "k.npy", code=1).stderr
    if len(q) == 5:
        assert said in run("mask", "q.npy", "k.npy", code=1).stderr


def test_a_group_whose_tensors_lie_in_several_shards(
    run: Run, files: Path, tensors: Tensors
) -> None:
    t = {name: torch.from_numpy(array) for name, array in tensors.items()}
    first = {"l.0.q": t["q"], "l.0.v": t["v"], "x": t["v"] + 1}
    second = {"l.0.k": t["k"], "l.1.hook_q": t["q"], "l.1.q": t["q"] + 1}
    second["l.1.k"] = t["k"] * 2
    save_file(first, "m-00001-of-00003.safetensors")
    save_file(second, "m-00002-of-00003.safetensors")
    save_file({"l.2.q": t["q"]}, "m-00003-of-00003.safetensors", {"attncli": "{}"})
    shards = [f"m-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    where = (
        dict.fromkeys(first, shards[0]) | dict.fromkeys(second, shards[1]) | {"l.2.q": shards[2]}
    )
    Path("m.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    for words in (shards, shards[:2], shards[::-1], ["m.safetensors.index.json"]):
        outcome = run("entropy", *words, "-f", "json")
        assert list(outcome.json["inputs"]) == ["l.0", "l.1"] if len(words) == 1 else True
        assert [one["group"] for one in outcome.json["data"][::8]] == ["l.0", "l.1"]
        alone = run("compute", *words, "--group", "l.0", "-f", "json").json
        assert_stages(alone["data"], attention(**tensors))
        sources = {role: alone["inputs"][role]["source"] for role in "qkv"}
        assert sources == {
            "q": f"{shards[0]}::l.0.q",
            "k": f"{shards[1]}::l.0.k",
            "v": f"{shards[0]}::l.0.v",
        }
    assert "group l.2 has no k and is left out" in run("entropy", *shards).stderr
    mask = run("mask", *shards[:2], "--group", "l.0", "-f", "json").json["data"]
    assert (mask[0]["q_len"], mask[0]["k_len"]) == (5, 7)
    for n, role in enumerate("vkqx"):  # a tensor each
        save_file({f"l.0.{role}": t.get(role, t["q"])}, f"{n}.safetensors")
    each = [f"{n}.safetensors" for n in range(4)]
    assert_stages(run("compute", *each, "-f", "json").json["data"], attention(**tensors))
    wrong = run("compute", each[2], each[0], "-f", "json", code=1).stderr
    assert "0.safetensors" in wrong
    save_file({"k": t["q"]}, "k.safetensors")
    said = run("compute", "k.safetensors", "k.safetensors", "-f", "json").stderr
    assert said.count("k.safetensors: k is taken as q: files are Q, K and V in this order") == 1
    # Two runs of one model have the same names: each is a bundle of its own.
    save_file(second | {"l.1.k": t["k"] + 1}, "again.safetensors")
    both = run("entropy", shards[1], "again.safetensors", "-f", "json").json["data"]
    assert {one["source"] for one in both} == {shards[1], "again.safetensors"}


def test_names_that_stand_for_another_layout(run: Run, files: Path) -> None:
    hooked = {f"blocks.{n}.attn.hook_{r}": torch.rand(1, 4, 12, 8) for n in range(2) for r in "qk"}
    save_file(hooked, "hooked.safetensors")
    said = run("entropy", "hooked.safetensors").stderr
    assert said == (
        "attncli: warning: blocks.0.attn: hooked.safetensors: hook_q is (B, S, H, d) as a rule, "
        "which --layout bshd reads\n"
    )
    assert run("entropy", "hooked.safetensors", "--layout", "bshd").stderr == ""
    assert run("entropy", "hooked.safetensors", "--heads", "4").stderr == ""
    save_file({f"l.{r}_proj": torch.rand(2, 6, 32) for r in "qk"}, "packed.safetensors")
    said = run("entropy", "packed.safetensors").stderr
    assert "q_proj is (B, S, H·d) as a rule, which --layout bsh with --heads reads" in said
    words = ("--layout", "bsh", "--heads", "4")
    assert run("entropy", "packed.safetensors", *words).stderr == ""


@pytest.mark.parametrize(
    ("role", "sinks"),
    [
        ("l.0.self_attn.{}", "l.0.self_attn.sinks"),
        ("l.0.attn.hook_{}", "l.0.attn.attention_sinks"),
        ("layer0_{}", "layer0_sinks"),
        ("{}", "s_aux"),
    ],
)
def test_sinks_that_a_bundle_holds(
    run: Run, files: Path, tensors: Tensors, role: str, sinks: str
) -> None:
    logits = np.array([0.5, -1, 2, 0])
    np.savez("s.npz", **{role.format(n): a for n, a in tensors.items()}, **{sinks: logits})
    words = ("compute", "s.npz", "--heads", "4", "-f", "json")
    held, given = run(*words), run(*words, "--sinks", "0.5,-1,2,0")
    assert held.json["data"] == given.json["data"]
    assert held.json["params"]["sinks"] == f"s.npz::{sinks}"
    np.savez("p.npz", **{role.format(n): a for n, a in tensors.items()})
    assert run("compute", "p.npz", *words[2:]).json["data"] != held.json["data"]
    failed = run("compute", "p.npz", "--sinks", "s.npz", code=2).stderr
    assert f"Say which: s.npz::{sinks}." in failed


FUSED = {
    "bs3hd": (2, []),
    "bsh3d": (3, []),
    "3bhsd": (0, []),
    "3bshd": (0, ["--layout", "bshd"]),
    "b3hsd": (1, []),
    "sb3hd": (2, ["--layout", "sbhd"]),
}


@pytest.mark.parametrize("form", FUSED)
def test_fused_tensors_are_split(run: Run, files: Path, tensors: Tensors, form: str) -> None:
    axis, words = FUSED[form]
    alike = {"q": tensors["q"], "k": tensors["q"] + 1, "v": tensors["q"] - 2}
    order = ["bhsd".index(letter) for letter in form.replace("3", "")]
    laid = [array.transpose(order) for array in alike.values()]
    np.save("f.npy", np.stack(laid, axis))
    found = run("compute", "--qkv", "f.npy", *words, "-f", "json").json
    assert_stages(found["data"], attention(**alike))
    assert list(found["inputs"]) == ["qkv"]
    if form[0] != "b":
        return
    np.save("one.npy", np.stack(laid, axis)[0])  # without B
    alone = {name: array[:1] for name, array in alike.items()}
    found = run("compute", "--qkv", "one.npy", *words, "-f", "json").json
    assert_stages(found["data"], attention(**alone))


def test_packed_fused_tensors_are_split(run: Run, files: Path, tensors: Tensors) -> None:
    v = tensors["k"][:, :, :5] * 2
    some = {"q": tensors["q"], "k": tensors["k"][:, :, :5], "v": v}
    rows = [a.transpose(0, 2, 1, 3).reshape(2, 5, -1) for a in some.values()]
    whole = np.concatenate(rows, -1)  # (B, S, H·d + 2·H_kv·d)
    heads = ["--heads", "4", "--kv-heads", "2"]
    expected = attention(**some)
    for name, array, words in (
        ("bsh", whole, []),
        ("also bsh", whole, ["--layout", "bsh"]),
        ("sbh", whole.transpose(1, 0, 2), ["--layout", "sbh"]),
    ):
        np.save("f.npy", array)
        (
            assert_stages(
                run("compute", "--qkv", "f.npy", *heads, *words, "-f", "json").json["data"],
                expected,
            ),
            name,
        )
    np.save("out.npy", expected["output"].transpose(0, 2, 1, 3).reshape(2, 5, -1))
    np.save("f.npy", whole)
    words = ["--qkv", "f.npy", *heads, "--layout", "bsh"]
    run("check", *words, "--actual-output", "out.npy")
    bundle = {f"l.{n}.attn.qkv": whole + n for n in range(2)}
    np.savez("b.npz", **bundle, x=whole)
    found = run("entropy", "--qkv", "b.npz", *heads, "-f", "json").json
    assert {one["group"] for one in found["data"]} == {"l.0.attn", "l.1.attn"}
    one = run("entropy", "--qkv", "b.npz", "--group", "l.1.attn", *heads, "-f", "json").json
    assert one["data"] == [record for record in found["data"] if record["group"] == "l.1.attn"]
    np.savez("d.npz", **bundle, **{"l.1.attn.sinks": np.ones(4)})
    sunk = run("entropy", "--qkv", "d.npz", *heads, "-f", "json").json
    assert sunk["data"][:8] == [one | {"source": "d.npz"} for one in found["data"][:8]]
    ones = run(
        "entropy", "--qkv", "d.npz::l.1.attn.qkv", *heads, "--sinks", "1,1,1,1", "-f", "json"
    )
    entropies = [one["entropy_bits_mean"] for one in ones.json["data"]]
    assert entropies == [one["entropy_bits_mean"] for one in sunk["data"][8:]]
    np.savez("n.npz", query_key_value=whole)
    assert (
        "reshape it to (B, S, H, 3, d)"
        in run("entropy", "--qkv", "n.npz::query_key_value", *heads).stderr
    )


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("entropy f.npy", 2, "if Q, K and V are fused in one: --qkv f.npy"),
        ("entropy --qkv p.npy", 2, "--qkv: expected --heads beside it for packed heads (1, 6, 96)"),
        ("entropy --qkv p.npy --heads 5", 2, "expected H + 2·H_kv to divide the width 96"),
        ("entropy --qkv q.npy", 1, "--qkv: expected (B, S, 3, H, d), (S, 3, H, d) or packed heads"),
        ("entropy --qkv f.npy q.npy", 2, "expected no other Q, K or V beside --qkv"),
        ("entropy --qkv f.npy --x q.npy", 2, "--qkv: expected no other Q, K or V beside --x"),
        ("entropy b.npz", 1, "If Q, K and V are fused in one, split it: --qkv b.npz::l.0.qkv"),
        ("entropy --qkv c.npz", 2, "Say which: c.npz::NAME."),
        ("entropy --qkv f.npy --group l.0", 2, "--group: expected a bundle with groups"),
        ("entropy --qkv b.npz --group l.2", 1, "--group: expected one of l.0, l.1, got l.2"),
        ("entropy --qkv f.npy --k-layout bhds", 2, "--k-layout: expected nothing beside --qkv"),
    ],
)
def test_faults_of_fused_tensors(run: Run, files: Path, words: str, code: int, said: str) -> None:
    np.save("f.npy", np.ones((1, 6, 3, 4, 8)))
    np.save("p.npy", np.ones((1, 6, 96)))
    np.savez("b.npz", **{f"l.{n}.qkv": np.ones((1, 6, 3, 4, 8)) for n in range(2)})
    np.savez("c.npz", a=np.ones(2), b=np.ones(2))
    assert said in run(*words.split(), code=code).stderr


def test_which_axis_of_three_is_taken_is_said(run: Run, files: Path) -> None:
    fused = np.random.default_rng(0).standard_normal((1, 6, 3, 3, 8))
    np.save("f.npy", fused)
    outcome = run("compute", "--qkv", "f.npy", "-f", "json")
    q, k, v = (fused[:, :, n].transpose(0, 2, 1, 3) for n in range(3))
    assert_stages(outcome.json["data"], attention(q, k, v))
    assert "axis 2 is taken as that of Q, K and V, though axis 3 is of length 3" in outcome.stderr


def test_more_heads_than_queries_is_worth_a_warning(run: Run, files: Path) -> None:
    np.save("wide.npy", np.ones((1, 8, 3, 4)))
    outcome = run("compute", "wide.npy", "wide.npy", "-f", "json")
    assert "--layout bshd" in outcome.stderr
    assert any("--layout bshd" in text for text in outcome.json["warnings"])
    quiet = run("compute", "wide.npy", "wide.npy", "-f", "json", "--quiet")
    assert quiet.stderr == ""
    assert quiet.stdout == outcome.stdout


def test_groups_with_their_own_options_and_labels(run: Run, files: Path) -> None:
    rng = np.random.default_rng(1)
    named = {f"layers.{n}.{r}": rng.standard_normal((3, 2)) for n in (10, 2) for r in "qkv"}
    own = {"layers.2": {"causal": True, "scale": 0.5, "labels": ["one", "two", "three"]}}
    as_torch = {name: torch.from_numpy(array) for name, array in named.items()}
    save_file(as_torch, "g.safetensors", metadata={"attncli": json.dumps(own)})
    found = run("compute", "g.safetensors", "-f", "json").json
    assert list(found["data"]["groups"]) == ["layers.2", "layers.10"]
    assert found["params"]["layers.2"]["causal"] is True
    assert found["params"]["layers.2"]["scale"] == 0.5
    assert found["params"]["layers.10"]["causal"] is False
    assert found["data"]["groups"]["layers.2"]["stages"]["weights"]["n_masked"] == 3
    picked = run("compute", "g.safetensors", "--group", "layers.10", "-f", "json").json
    assert picked["data"] == found["data"]["groups"]["layers.10"]
    over = ("--group", "layers.2", "--no-causal", "--scale", "2", "-f", "json")
    won = run("compute", "g.safetensors", *over).json
    assert (won["params"]["causal"], won["params"]["scale"]) == (False, 2.0)
    table = run("compute", "g.safetensors").stdout
    for word in ("group layers.2", "group layers.10", "three 2", "causal"):
        assert word in table
    lines = run("compute", "g.safetensors", "-f", "csv").stdout.splitlines()
    assert lines[0] == "group,stage,batch,head,row,column,value"
    assert lines[1].startswith("layers.2,scores,0,0,0,0,")
    missing = run("compute", "g.safetensors", "--group", "layers.3", code=1)
    assert "expected a group layers.3, got layers.2, layers.10" in missing.stderr


@pytest.mark.parametrize(
    ("own", "complaint"),
    [
        ({"scale": "big"}, "expected scale to be a number or list of numbers, got 'big'"),
        ({"softcap": -1}, "softcap: expected a finite number above 0, got -1.0"),
        ({"labels": "abc"}, "expected labels to be a list, got str"),
        ({"left_window": True}, "expected left_window to be a whole number, got True"),
    ],
)
def test_what_a_bundle_declares_wrongly_is_the_fault_of_the_data(
    run: Run, files: Path, own: dict[str, object], complaint: str
) -> None:
    ones = {"a.q": torch.ones(2, 2), "a.k": torch.ones(2, 2)}
    save_file(ones, "g.safetensors", metadata={"attncli": json.dumps({"a": own})})
    outcome = run("compute", "g.safetensors", code=1)
    assert complaint in outcome.stderr
    assert outcome.stderr.startswith("attncli: error: g.safetensors")


def test_a_bundle_declares_numbers_per_head(run: Run, files: Path) -> None:
    own = {"a": {"scale": [2, 0.5], "alibi_slopes": [1, 0.25]}}
    tensors = {"a.q": torch.ones(2, 3, 4), "a.k": torch.ones(2, 3, 4)}
    save_file(tensors, "g.safetensors", metadata={"attncli": json.dumps(own)})
    found = run("compute", "g.safetensors", "-f", "json").json
    assert found["params"]["scale"] == [2.0, 0.5]
    assert found["params"]["alibi_slopes"] == [1.0, 0.25]
    masked = found["data"]["stages"]["masked"]["values"][0]
    assert [masked[0][0], masked[1][0]] == [[8, 7, 6], [2, 1.75, 1.5]]
    bare = run("compute", "g.safetensors", "--no-alibi", "--scale", 1, "-f", "json").json
    assert bare["data"]["stages"]["masked"]["values"][0][1][0] == [4, 4, 4]


@pytest.mark.parametrize("out_in", [False, True])
def test_projection(run: Run, files: Path, out_in: bool) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, 5, 6))
    widths = {"wq": 8, "wk": 4, "wv": 6}  # H=2 of d_k=4, H_kv=1, d_v=6
    weights = {name: rng.standard_normal((6, width)) for name, width in widths.items()}
    weights["wo"] = rng.standard_normal((12, 3))
    np.save("x.npy", x)
    arguments: list[str] = ["--x", "x.npy", "--heads", "2", "--kv-heads", "1"]
    for name, array in weights.items():
        np.save(f"{name}.npy", array.T if out_in else array)
        arguments += [f"--{name}", f"{name}.npy"]
    arguments += ["--weights-layout", "out-in"] if out_in else []
    found = run("compute", *arguments, "-f", "json").json
    q = (x @ weights["wq"]).reshape(2, 5, 2, 4).transpose(0, 2, 1, 3)
    k, v = ((x @ weights[name])[:, None] for name in ("wk", "wv"))
    expected = attention(q, k, v)
    joined = expected["output"].transpose(0, 2, 1, 3).reshape(2, 5, 12)
    expected |= {"q": q, "k": k, "v": v, "projected": (joined @ weights["wo"])[:, None]}
    assert_stages(found["data"], expected)
    assert set(found["inputs"]) == {"x", *weights}


def test_biases_make_projections_those_of_a_torch_layer(run: Run, files: Path) -> None:
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).double()
    torch.nn.init.normal_(layer.in_proj_bias)
    torch.nn.init.normal_(layer.out_proj.bias)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    weights = dict(zip(("wq", "wk", "wv"), layer.in_proj_weight.chunk(3), strict=True))
    biases = dict(zip(("bq", "bk", "bv"), layer.in_proj_bias.chunk(3), strict=True))
    parts = {"x": x, "wo": layer.out_proj.weight, "bo": layer.out_proj.bias} | weights | biases
    for name, part in parts.items():
        np.save(f"{name}.npy", part.detach().numpy())
    named = [word for name in parts for word in (f"--{name}", f"{name}.npy")]
    found = run("compute", *named, "--heads", 2, "--weights-layout", "out-in", "-f", "json").json
    output, expected = layer(x, x, x, average_attn_weights=False)
    stages = found["data"]["stages"]
    close = {"rtol": 1e-12, "atol": 1e-12}
    np.testing.assert_allclose(stages["weights"]["values"], expected.detach(), **close)
    np.testing.assert_allclose(stages["projected"]["values"], output.detach()[:, None], **close)
    assert set(found["inputs"]) == set(parts)
    np.save("in_proj.npy", layer.in_proj_weight.detach())
    np.save("in_bias.npy", layer.in_proj_bias.detach())
    one = {f"{n}.npy": "in_proj.npy" for n in weights} | {f"{n}.npy": "in_bias.npy" for n in biases}
    fused = [one.get(word, word) for word in named]
    outcome = run("compute", *fused, "--heads", 2, "--weights-layout", "out-in", "-f", "json")
    again = outcome.json["data"]["stages"]
    assert again["projected"]["values"] == stages["projected"]["values"]
    assert "--wq, --wk, --wv name one tensor: Q, K and V are its parts" in outcome.stderr


def test_a_bias_that_does_not_fit_is_refused(run: Run, files: Path) -> None:
    for name, shape in {"x": (5, 8), "w": (8, 6), "b": (8,)}.items():
        np.save(f"{name}.npy", np.ones(shape))
    outcome = run(
        "compute", "--x", "x.npy", "--wq", "w.npy", "--wk", "w.npy", "--bk", "b.npy", code=1
    )
    assert "--bk: expected (6,) like the columns of --wk, got (8,)" in outcome.stderr


def test_nan_is_traced_to_what_it_is_projected_from(run: Run, files: Path) -> None:
    x, bias = np.ones((5, 8)), np.zeros(6)
    x[2, 3], bias[1] = np.nan, np.inf
    np.save("x.npy", x)
    np.save("b.npy", bias)
    np.save("w.npy", np.ones((8, 6)))
    given = ("entropy", "--x", "x.npy", "--wq", "w.npy", "--wk", "w.npy", "--bk", "b.npy")
    refused = run(*given, code=1).stderr
    assert "--x (x.npy): expected finite values, got 1 NaN or inf, the first at (2, 3)" in refused
    said = run(*given, "--allow-nonfinite").stderr
    assert "NaN enters at x[2, 3] (1 NaN), before the projection" in said
    assert "inf enters at bk[0, 1] (1 inf), before the projection" in said


def test_random_tensors_are_the_documented_draws(run: Run) -> None:
    sizes = ("--batch", 2, "--heads", 4, "--kv-heads", 2, "--q-len", 3, "--k-len", 5)
    found = run("compute", *sizes, "--dk", 6, "--dv", 7, "--seed", 11, "-f", "json").json
    rng = np.random.default_rng(11)
    shapes = [(2, 4, 3, 6), (2, 2, 5, 6), (2, 2, 5, 7)]
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    assert_stages(found["data"], attention(q, k, v))
    assert found["params"]["seed"] == 11
    assert found["inputs"]["q"] == {"source": "random", "shape": [2, 4, 3, 6], "dtype": "float32"}


@pytest.mark.parametrize(
    ("arguments", "q", "k", "v"),
    [
        (("--seed", 0), [1, 1, 8, 64], [1, 1, 8, 64], [1, 1, 8, 64]),
        (("--heads", 2, "--dk", 4), [1, 2, 8, 4], [1, 2, 8, 4], [1, 2, 8, 4]),
        (("--q-len", 3), [1, 1, 3, 64], [1, 1, 8, 64], [1, 1, 8, 64]),
        (("--dv", 5), [1, 1, 8, 64], [1, 1, 8, 64], [1, 1, 8, 5]),
    ],
)
def test_defaults_of_random_tensors(
    run: Run, arguments: tuple[object, ...], q: list[int], k: list[int], v: list[int]
) -> None:
    found = run("compute", *arguments, "--stage", "output", "-f", "json").json["inputs"]
    assert [found[role]["shape"] for role in "qkv"] == [q, k, v]


def test_nothing_given_is_the_example(run: Run) -> None:
    found = run("compute", "-f", "json").json
    weights = found["data"]["stages"]["weights"]["values"][0][0][0]
    np.testing.assert_allclose(weights, [0.223429, 0.391231, 0.191135, 0.194205], atol=5e-7)
    output = found["data"]["stages"]["output"]["values"][0][0][0]
    np.testing.assert_allclose(output, [0.417634, 0.585436, 0.385340], atol=5e-7)
    assert found["inputs"]["q"]["source"] == "example"


def test_values_are_optional(run: Run, files: Path) -> None:
    found = run("compute", "q.npy", "k.npy", "-f", "json").json["data"]["stages"]
    assert list(found) == ["scores", "scaled", "masked", "weights"]


def test_empty_sequences_are_legal(run: Run, files: Path) -> None:
    np.save("none.npy", np.empty((3, 1, 0, 8)))
    no_keys = run("compute", "q.npy", "none.npy", code=1)
    assert "k (none.npy): expected B=2" in no_keys.stderr
    found = run("compute", "--k-len", 0, "-f", "json").json["data"]["stages"]
    assert found["weights"]["shape"] == [1, 1, 8, 0]
    assert not np.array(found["output"]["values"]).any()
    for form in ("table", "csv", "ndjson"):
        run("compute", "--q-len", 0, "-f", form)
    run("compute", "--q-len", 0, "--explain")


def test_trailing_bytes_are_worth_a_warning(run: Run, files: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.ones((2, 3)))
    Path("long.npy").write_bytes(buffer.getvalue() + b"more")
    outcome = run("compute", "long.npy", "long.npy", "-f", "json")
    assert "long.npy" in outcome.stderr


def test_a_group_whose_name_holds_a_comma(run: Run, files: Path) -> None:
    np.savez("g.npz", **{f"{g}.{r}": np.eye(2) for g in ("x", "x,y", "z") for r in "qk"})

    def chosen(*names: str) -> list[str]:
        words = [word for name in names for word in ("--group", name)]
        return [
            head["group"] for head in run("entropy", "g.npz", *words, "-f", "json").json["data"]
        ]

    assert chosen("x,y") == ["x,y"]
    assert chosen("z,x") == ["z", "x"]
    assert chosen("x", "x,y") == ["x", "x,y"]


def test_the_same_bundle_twice_is_told_twice(run: Run, files: Path) -> None:
    np.savez("g.npz", **{f"{g}.{r}": np.eye(2) for g in "ab" for r in "qk"})
    inputs = run("entropy", "g.npz", "g.npz", "-f", "json").json["inputs"]
    assert list(inputs) == ["a", "b", "a (2)", "b (2)"]
