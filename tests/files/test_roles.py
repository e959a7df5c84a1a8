"""Which tensor is q, k or v, which group it belongs to, and how to name one tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import file_builders as build
import numpy as np
import pytest

from attncli.errors import DataError, UsageError
from attncli.files.container import TensorFile
from attncli.files.roles import groups_of, read_one, split_name
from attncli.files.tensor import TensorHeader

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
    assert caught.value.advice == r"Point at single tensors: «q=b.npz::t0\x1b»."
    with pytest.raises(DataError, match="got one tensor without a name") as caught:
        groups_of(bundle(None))
    assert "«q=FILE» «k=FILE»" in caught.value.advice


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
    assert warnings == [f"{alone}: 1 byte after the array are ignored"]
    with pytest.raises(UsageError, match=r"^--q: expected one tensor, got a file of 2: q, k") as e:
        read_one(both, "--q")
    assert e.value.advice == f"Say which: {both}::q."
    with pytest.raises(DataError, match="expected a tensor named w, got q, k"):
        read_one(f"{both}::w", "--q")
