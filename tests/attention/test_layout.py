"""The ways tensors lie in memory: each is told apart by its indices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attncli.attention.options import Layout
from attncli.attention.sizes import to_bhsd
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
