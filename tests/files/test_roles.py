"""Which tensor is q, k or v, which group it belongs to, and how to name one tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import file_builders as build
import numpy as np
import pytest

from attncli.errors import DataError, UsageError
from attncli.files.roles import groups_of, read_one, split_name
from attncli.files.tensor import TensorFile, TensorHeader

Put = Callable[[str, bytes], str]


def bundle(*names: str | None) -> TensorFile:
    headers = tuple(TensorHeader(name, (2, 2), "float32") for name in names)
    return TensorFile("b.npz", "npz", headers, lambda *_: np.zeros((2, 2)))


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (("k", "q", "v", "x"), {"": {"q": "q", "k": "k", "v": "v"}}),
        (("Query", "KEY"), {"": {"q": "Query", "k": "KEY", "v": None}}),
        (("queries", "keys", "values"), {"": {"q": "queries", "k": "keys", "v": "values"}}),
        (("a/b.q", "a/b.k"), {"a/b": {"q": "a/b.q", "k": "a/b.k", "v": None}}),
        (("a.q/k", "a.q/q"), {"a.q": {"q": "a.q/q", "k": "a.q/k", "v": None}}),
        ((".q", ".k"), {"": {"q": ".q", "k": ".k", "v": None}}),
        (("a\nb.q", "a\nb.k"), {"a\nb": {"q": "a\nb.q", "k": "a\nb.k", "v": None}}),
    ],
)
def test_roles_and_groups(names: tuple[str, ...], groups: dict[str, object]) -> None:
    file = bundle(*names)
    assert groups_of(file) == groups
    assert file.warnings == []


def test_groups_come_in_natural_order() -> None:
    order = ["", "layers.0", "layers.2", "layers.10", "layers.10.b2", "layers." + "9" * 5000]
    names = [f"{group}.{role}" if group else role for group in reversed(order) for role in "qk"]
    assert list(groups_of(bundle(*names))) == order


def test_asked_groups_come_as_asked() -> None:
    file = bundle("a.q", "a.k", "b.q", "b.k", "c.q")
    assert list(groups_of(file, ["b", "a"])) == ["b", "a"]
    assert file.warnings == []
    with pytest.raises(DataError, match=r"^b\.npz: expected a group d, got a, b, c$"):
        groups_of(file, ["d"])
    with pytest.raises(DataError, match=r"expected q and k in group c, got no k, only c\.q"):
        groups_of(file, ["c"])


def test_incomplete_groups_are_told_once() -> None:
    file = bundle("a.q", "a.k", "b.v", "c.q")
    for _ in range(2):
        assert list(groups_of(file)) == ["a"]
    assert file.warnings == [
        "b.npz: group b has no q and no k and is left out",
        "b.npz: group c has no k and is left out",
    ]
    with pytest.raises(DataError, match="expected q and k in the file, got no k, only q"):
        groups_of(bundle("q", "x"))


def test_two_tensors_for_one_role() -> None:
    with pytest.raises(DataError, match=r"expected one tensor as q, got a\.q and a/Query"):
        groups_of(bundle("a.q", "a.k", "a/Query"))


def test_no_roles() -> None:
    names = [f"t{n}\x1b" for n in range(10)]
    with pytest.raises(DataError, match=r"got t0\\x1b, .*, t7\\x1b and 2 more") as caught:
        groups_of(bundle(*names))
    assert caught.value.advice == "Point at single tensors: «q=b.npz::NAME» «k=b.npz::NAME»."
    with pytest.raises(DataError, match="got one tensor without a name") as caught:
        groups_of(bundle(None))
    assert "«q=FILE» «k=FILE»" in caught.value.advice


@pytest.mark.parametrize(
    ("q", "k", "group"),
    [
        ("blocks.0.attn.hook_q", "blocks.0.attn.hook_k", "blocks.0.attn"),
        ("model.layers.3.self_attn.q_proj", "model.layers.3.self_attn.k_proj", None),
        ("self_attn.q_proj.output", "self_attn.k_proj.output", "self_attn"),
        ("query_states", "key_states", ""),
        ("encoder/attn/query_layer", "encoder/attn/key_layer", "encoder/attn"),
        ("h.0.mixed_query_layer", "h.0.mixed_key_layer", "h.0"),
        ("layer3_q", "layer3_k", "layer3"),
        ("layer_3_query", "layer_3_key", "layer_3"),
        ("q_layer3", "k_layer3", "layer3"),
        ("q0", "k0", "0"),
        ("q.0", "k.0", "0"),
        ("xq", "xk", ""),
        ("L0.to_q", "L0.to_k", "L0"),
        ("attn1.q_lin", "attn1.k_lin", "attn1"),
        ("queryHeads", "keyHeads", ""),
        ("cross_q", "cross_k", "cross"),
        ("Qcur-3", "Kcur-3", "3"),
        ("blk.3.attn_q", "blk.3.attn_k", "blk.3.attn"),
        (
            "layers_0/attention/query/__call__",
            "layers_0/attention/key/__call__",
            "layers_0/attention",
        ),
        ("q_mat", "k_mat", ""),
        ("Q", "K", ""),
        ("q", "key_cache", ""),
        ("a\nb.hook_q", "a\nb.hook_k", "a\nb"),
    ],
)
def test_names_of_common_dumps(q: str, k: str, group: str | None) -> None:
    file = bundle("x", k, q, f"{q}.weight", "kv_lora", "key_padding_mask", "query_len")
    expected = "model.layers.3.self_attn" if group is None else group
    assert groups_of(file) == {expected: {"q": q, "k": k, "v": None}}
    assert file.warnings == []


def test_plain_names_stand_above_those_of_dumps() -> None:
    plain = bundle("q", "k", "old_q", "old_k", "hook_q", "v_cache")
    assert groups_of(plain) == {"": {"q": "q", "k": "k", "v": None}}
    assert list(groups_of(plain, ["old"])) == ["old"]
    assert plain.warnings == []
    with pytest.raises(DataError, match=r"expected a group new, got "):
        groups_of(plain, ["new"])
    mixed = bundle("q", "hook_q", "hook_k", "hook_v")
    assert groups_of(mixed) == {"": {"q": "q", "k": "hook_k", "v": "hook_v"}}


def test_what_attention_uses_stands_above_what_it_was_made_of() -> None:
    layers = [f"l.{n}.{stage}" for n in range(2) for stage in ("hook_rot_%s", "hook_%s")]
    names = [name % role for name in layers for role in "qk"] + ["l.0.hook_v", "l.1.hook_v"]
    file = bundle(*names)
    found = groups_of(file)
    assert found["l.1"] == {"q": "l.1.hook_rot_q", "k": "l.1.hook_rot_k", "v": "l.1.hook_v"}
    assert file.warnings == [
        "b.npz: hook_rot_q is taken as q, hook_q is left out",
        "b.npz: hook_rot_k is taken as k, hook_k is left out",
    ]
    normed = bundle("q_proj", "q_norm", "k_norm", "k_proj", "v_proj")
    assert groups_of(normed) == {"": {"q": "q_norm", "k": "k_norm", "v": "v_proj"}}
    rotated = bundle("q_post_rope", "q_pre_rope", "k_pre_rope", "k_post_rope")
    assert groups_of(rotated) == {"": {"q": "q_post_rope", "k": "k_post_rope", "v": None}}
    with pytest.raises(DataError, match=r"expected one tensor as q, got to_q and q_proj"):
        groups_of(bundle("to_q", "q_proj", "to_k"))


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        (("hook_k", "hook_v", "z"), "Point at single tensors: «q=b.npz::NAME» «k=b.npz::hook_k»."),
        (("a.qkv", "b.qkv"), "If Q, K and V are fused in one, split it: «qkv=b.npz::a.qkv»."),
        (("h.c_attn", "x"), "If Q, K and V are fused in one, split it: «qkv=b.npz::h.c_attn»."),
        (
            ("l.k_proj.weight", "l.q_proj.weight"),
            "Weights project what «x» gives: «x=FILE» «wq=b.npz::l.q_proj.weight».",
        ),
    ],
)
def test_advice_names_what_fits(names: tuple[str, ...], advice: str) -> None:
    with pytest.raises(DataError, match="expected tensors named q and k, got ") as caught:
        groups_of(bundle(*names))
    assert caught.value.advice == advice


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("«q»", "blocks.0.attn.hook_q"),
        ("«k»", "blocks.0.attn.hook_k"),
        ("«v»", "blocks.0.attn.hook_v"),
        ("«sinks»", "blocks.0.attn.sinks"),
        ("«attn_mask»", "mask"),
        ("«key_padding»", "NAME"),
        ("«wk»", "k_proj.weight"),
        ("«actual_output»", "attn_out"),
        ("--actual-weights", "blocks.0.attn.hook_pattern"),
    ],
)
def test_the_example_fits_the_option(put: Put, option: str, name: str) -> None:
    names = [f"blocks.0.attn.{last}" for last in ("hook_k", "hook_pattern", "hook_q", "hook_v")]
    names += ["blocks.0.attn.sinks", "mask", "q_proj.weight", "k_proj.weight", "attn_out"]
    both = put("b.npz", build.npz(**{one: np.ones(2) for one in names}))
    with pytest.raises(UsageError) as caught:
        read_one(both, option)
    assert caught.value.advice == f"Say which: {both}::{name}."


def test_split_name(put: Put, tmp_path: Path) -> None:
    odd = put("a::b", b"")
    assert split_name("a.npz") == ("a.npz", None)
    assert split_name("a.npz::layers.0.q") == ("a.npz", "layers.0.q")
    assert split_name("-") == ("-", None)
    assert split_name("-::q") == ("-", "q")
    assert split_name(odd) == (odd, None)
    assert split_name(f"{odd}::q::r") == (odd, "q::r")
    assert split_name("C::x" + "y" * 9000) == ("C", "x" + "y" * 9000)
    for text in ("a.npz::", "::q", "::"):
        with pytest.raises(UsageError, match="expected FILE or FILE::NAME"):
            split_name(text)


def test_read_one(put: Put) -> None:
    both = put("b.npz", build.npz(q=np.ones(2), k=np.zeros(3)))
    alone = put("q.npy", build.npy(np.ones(2)) + b"x")
    stored, warnings = read_one(f"{both}::k", "--key")
    assert (stored.name, stored.shape, warnings) == ("k", (3,), [])
    stored, warnings = read_one(alone, "--q")
    assert stored.name is None
    assert read_one(both, "--q")[0].name == "q"  # as the option is called
    assert warnings == [f"{alone}: 1 byte after the array are ignored"]
    with pytest.raises(
        UsageError, match=r"^--sinks: expected one tensor, got a file of 2: q, k"
    ) as e:
        read_one(both, "--sinks")
    assert e.value.advice == f"Say which: {both}::NAME."
    with pytest.raises(DataError, match="expected a tensor named w, got q, k"):
        read_one(f"{both}::w", "--q")
