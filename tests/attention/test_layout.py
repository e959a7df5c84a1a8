"""The ways tensors lie in memory: each is told apart by its indices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attncli.attention.options import Layout
from attncli.attention.sizes import layout_doubts, layouts_that_fit, to_bhsd
from attncli.errors import AttncliError, DataError, UsageError

B, H, S, D = 2, 3, 4, 5
BHSD = torch.arange(B * H * S * D).reshape(B, H, S, D)

LAYOUTS: list[tuple[Layout, torch.Tensor, int | None, torch.Tensor]] = [
    (Layout.BHSD, BHSD, None, BHSD),
    (Layout.BHSD, BHSD[1], None, BHSD[1:]),
    (Layout.BHSD, BHSD[1, 2], None, BHSD[1:, 2:]),
    (Layout.BSHD, BHSD.transpose(1, 2), None, BHSD),
    (Layout.BSHD, BHSD[1].transpose(0, 1), None, BHSD[1:]),
    (Layout.BSHD, BHSD[1, 2], None, BHSD[1:, 2:]),
    (Layout.BSH, BHSD.transpose(1, 2).flatten(2), H, BHSD),
    (Layout.BSH, BHSD[1].transpose(0, 1).flatten(1), H, BHSD[1:]),
    (Layout.BSH, BHSD[:, 0], 1, BHSD[:, :1]),
    (Layout.SBHD, BHSD.permute(2, 0, 1, 3), None, BHSD),
    (Layout.SBHD, BHSD[1].permute(1, 0, 2), None, BHSD[1:]),
    (Layout.BHDS, BHSD.mT, None, BHSD),
    (Layout.BHDS, BHSD[1].mT, None, BHSD[1:]),
    (Layout.SBH, BHSD.permute(2, 0, 1, 3).flatten(2), H, BHSD),
    (Layout.SBH, BHSD[1].transpose(0, 1).flatten(1), H, BHSD[1:]),
]


@pytest.mark.parametrize(("layout", "given", "heads", "expected"), LAYOUTS)
def test_every_layout_leads_to_the_same(
    layout: Layout, given: torch.Tensor, heads: int | None, expected: torch.Tensor
) -> None:
    found = to_bhsd(given, "q", layout, heads)
    assert found.shape == expected.shape
    assert torch.equal(found, expected)


def test_a_layout_is_a_view() -> None:
    packed = BHSD.transpose(1, 2).flatten(2)
    for layout, given in ((Layout.BHSD, BHSD), (Layout.BSHD, BHSD), (Layout.BSH, packed)):
        found = to_bhsd(given, "q", layout, H)
        assert found.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()


REFUSED: list[tuple[Any, ...]] = [
    (Layout.BHSD, (5,), None, DataError, r"v: expected \(S, d\), \(H, S, d\) or .*, got \(5,\)"),
    (Layout.BHSD, (1, 1, 1, 1, 1), None, DataError, r"got \(1, 1, 1, 1, 1\)"),
    (Layout.BSHD, (5,), None, DataError, r"v: expected \(S, d\), \(S, H, d\) or"),
    (Layout.BSH, (1, 2, 3, 4), 2, DataError, r"v: expected \(B, S, H·d\) for layout=bsh"),
    (Layout.BSH, (2, 3, 6), None, UsageError, "layout=bsh: expected heads beside it, got none"),
    (Layout.BSH, (2, 3, 6), 4, UsageError, "expected a divisor of v's width 6, got 4"),
    (Layout.BSH, (2, 3, 6), 0, UsageError, "expected a divisor of v's width 6, got 0"),
]


@pytest.mark.parametrize(("layout", "shape", "heads", "kind", "message"), REFUSED)
def test_refused(
    layout: Layout, shape: Any, heads: int | None, kind: type[AttncliError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        to_bhsd(torch.zeros(shape), "v", layout, heads)


def test_other_layouts_in_which_shapes_go_together() -> None:
    """Lengths of the axes (B, H, S, d) by what has to be said."""
    shapes = {"q": (2, 5, 4, 8), "k": (2, 7, 4, 8), "v": (2, 7, 4, 3)}
    found = layouts_that_fit(shapes, Layout.BHSD, None)
    assert found == {
        "«layout=bshd»": {"q": (2, 4, 5, 8), "k": (2, 4, 7, 8), "v": (2, 4, 7, 3)},
    }
    as_they_are = {"q": (2, 4, 5, 8), "k": (2, 4, 7, 8), "v": (2, 4, 7, 3)}
    assert layouts_that_fit(as_they_are, Layout.BHSD, None) == {}
    assert list(layouts_that_fit(as_they_are, Layout.BSHD, None)) == ["«layout=bhsd»"]
    first = {"q": (5, 2, 4, 8), "k": (7, 2, 4, 8)}
    assert layouts_that_fit(first, Layout.BHSD, None) == {
        "«layout=sbhd»": {"q": (2, 4, 5, 8), "k": (2, 4, 7, 8)},
    }


def test_keys_that_lie_with_their_width_first_are_told() -> None:
    shapes = {"q": (2, 4, 5, 8), "k": (2, 4, 8, 7), "v": (2, 4, 7, 3)}
    expected = {"q": (2, 4, 5, 8), "k": (2, 4, 7, 8), "v": (2, 4, 7, 3)}
    assert layouts_that_fit(shapes, Layout.BHSD, None) == {"«k_layout=bhds»": expected}
    assert layouts_that_fit(shapes, Layout.BHSD, Layout.BHDS) == {}
    turned = {"q": (2, 5, 4, 8), "k": (2, 4, 8, 7)}
    assert layouts_that_fit(turned, Layout.BHSD, None) == {
        "«layout=bshd» «k_layout=bhds»": {"q": (2, 4, 5, 8), "k": (2, 4, 7, 8)},
    }
    assert list(layouts_that_fit(turned, Layout.BHSD, Layout.BHDS)) == ["«layout=bshd»"]


@pytest.mark.parametrize(
    ("shapes", "wrong"),
    [
        ({"q": (2, 4, 5, 8), "k": (1, 4, 7, 8)}, "batches"),
        ({"q": (2, 4, 5, 8), "k": (2, 4, 7, 9)}, "widths"),
        ({"q": (2, 4, 5, 8), "k": (2, 3, 7, 8)}, "heads"),
        ({"q": (2, 4, 5, 0), "k": (2, 4, 7, 0)}, "no width"),
        ({"q": (2, 4, 5, 8), "k": (2, 4, 7, 8), "v": (2, 4, 6, 8)}, "lengths of keys and values"),
    ],
)
def test_shapes_that_do_not_go_together(shapes: dict[str, tuple[int, ...]], wrong: str) -> None:
    assert "«layout=bhsd»" not in layouts_that_fit(shapes, Layout.BSHD, None), wrong
    fine = {"q": (2, 4, 5, 8), "k": (2, 2, 7, 8)}
    assert "«layout=bhsd»" in layouts_that_fit(fine, Layout.BSHD, None)


def test_doubts_about_a_layout() -> None:
    def doubts(q: tuple[int, ...], k: tuple[int, ...], layout: Layout = Layout.BHSD) -> list[str]:
        return layout_doubts({"q": q, "k": k}, layout)

    more = "q (2, 64, 4, 8) has more heads than queries; if it is (B, S, H, d), say «layout=bshd»"
    assert doubts((2, 64, 4, 8), (2, 64, 4, 8)) == [more]
    batches = "q (64, 2, 4, 8) has more batches than queries; if it is (S, B, H, d), "
    assert doubts((64, 2, 4, 8), (64, 2, 4, 8)) == [batches + "say «layout=sbhd»"]
    assert doubts((2, 64, 4, 8), (2, 64, 4, 8), Layout.BSHD) == []
    assert doubts((2, 4, 64, 8), (2, 4, 64, 8)) == []
    assert doubts((64, 8), (64, 8)) == []
    packed = "q (2, 64, 1024) is taken as (H, S, d); if heads are packed, (B, S, H·d), "
    assert doubts((2, 64, 1024), (2, 64, 1024)) == [packed + "say «layout=bsh» and «heads»"]
    # As many queries as keys is likelier than not.
    alike = "q (1, 6, 8, 8) has 8 queries, and k 4 keys; if it is (B, S, H, d), say «layout=bshd»"
    assert doubts((1, 6, 8, 8), (1, 6, 4, 8)) == [alike]
    assert doubts((1, 6, 8, 8), (1, 6, 8, 8)) == []
