"""Keys that a float mask makes weightless: the same figures as of a boolean mask, everywhere."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attncli
from attncli.attention.masks.build import UNDERFLOW, build_mask
from attncli.attention.options import AttentionOptions
from attncli.attention.sizes import Sizes
from attncli.errors import UsageError

FINFO = float(np.finfo(np.float32).min)
S = 12
CAUSAL, OWN = np.tri(S, dtype=bool), np.eye(S, dtype=bool)
RNG = np.random.default_rng(0)


def cells(options: AttentionOptions, sizes: Sizes, itemsize: int = 8) -> np.ndarray:
    mask = build_mask(options, sizes, itemsize=itemsize)
    found = [
        [mask.head(b, h).cells(slice(None)) for h in range(sizes.heads)] for b in range(sizes.batch)
    ]
    return np.array(found)


# The rule, cell by cell

VALUES = st.sampled_from([0.0, 0.0, 0.0, -1.5, -50.0, -100.0, -1e3, -1e4, -2e4, FINFO, -np.inf])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_key_is_hidden_where_its_row_has_one_that_leaves_it_no_weight(data: Any) -> None:
    batch, heads, q_len, k_len = (data.draw(st.integers(1, 3)) for _ in range(4))
    k_len += data.draw(st.integers(0, 3))
    shape = [data.draw(st.sampled_from([1, n])) for n in (batch, heads, q_len, k_len)]
    number = int(np.prod(shape))
    file = np.array(data.draw(st.lists(VALUES, min_size=number, max_size=number))).reshape(shape)
    beside: dict[str, Any] = {}
    if data.draw(st.booleans()):
        beside |= {"causal": True, "query_offset": k_len - q_len}
    if data.draw(st.booleans()):
        beside["key_lengths"] = tuple(data.draw(st.integers(0, k_len)) for _ in range(batch))
    itemsize, sizes = data.draw(st.sampled_from([4, 8])), Sizes(batch, heads, q_len, k_len)
    kind = data.draw(st.sampled_from([np.float32, np.float64]))
    options = AttentionOptions(attn_mask=file.astype(kind), **beside)

    others = cells(AttentionOptions(**beside), sizes)
    added = np.broadcast_to(file.astype(kind).astype(float), (batch, heads, q_len, k_len))
    shown = others & (added > -np.inf)
    with np.errstate(invalid="ignore"):
        top = np.where(shown, added, -np.inf).max(-1, keepdims=True)
        expected = shown & ~(added - top < UNDERFLOW[itemsize])
    np.testing.assert_array_equal(cells(options, sizes, itemsize), expected)
    mask = build_mask(options, sizes, itemsize=itemsize)
    for b, h in np.ndindex(batch, heads):
        marginals = mask.head(b, h).marginals  # by intervals, where there are any
        np.testing.assert_array_equal(marginals.counts, expected[b, h].sum(-1))
        np.testing.assert_array_equal(marginals.used, expected[b, h].sum(-2))


def test_underflow_is_where_weights_become_zero() -> None:
    for itemsize, dtype in ((4, np.float32), (8, np.float64)):
        just_above, below = UNDERFLOW[itemsize] + 0.01, UNDERFLOW[itemsize] - 0.01
        assert np.exp(np.array(just_above, dtype)) > 0
        assert np.exp(np.array(below, dtype)) == 0


# The same figures as of a boolean mask

QKV = [RNG.standard_normal((2, 2, S, 8)) for _ in range(3)]
PADDED = np.arange(S) >= np.array([0, 4])[:, None]  # (B, S_k), on the left
KEEP = {
    "causal": CAUSAL,
    "by head": np.stack([CAUSAL, CAUSAL & (RNG.random((S, S)) < 0.7) | np.eye(S, dtype=bool)])[
        None
    ],
    "by batch": (CAUSAL & PADDED[:, None, None] | np.eye(S, dtype=bool)),
    "of keys alone": PADDED[:, None, None],
    "of keys alone, beside --causal": np.arange(S) % 3 != 2,
}
LOW = [-1e4, -1e9, FINFO]
PRECISIONS = ["float32", "float64"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", KEEP)
def test_every_command_has_the_figures_of_the_boolean_mask(
    name: str, low: float, precision: str
) -> None:
    keep = KEEP[name]
    beside: dict[str, Any] = {"causal": "causal" in name and name != "causal"}
    floats = np.where(keep, 0, low).astype(np.float32)
    q, k, v = QKV
    told: list[Any] = []
    for mask in (keep, floats):
        entropy = attncli.entropy(q, k, attn_mask=mask, precision=precision, per_key=True, **beside)
        computed = attncli.compute(q, k, v, attn_mask=mask, precision=precision, **beside)
        counts = attncli.mask(S, S, batch=2, heads=2, attn_mask=mask, **beside)
        weights = computed.stages["weights"]
        found = attncli.check(
            q, k, v, actual_weights=weights, attn_mask=mask, precision=precision, **beside
        )
        told.append(
            {
                "entropy": entropy.heads,
                "rows": [_listed(rows) for rows in entropy.rows or ()],
                "variance": attncli.variance(
                    q, k, attn_mask=mask, precision=precision, **beside
                ).records,
                "statistics": computed.statistics,
                "cost": computed.cost,
                "mask": [(one.kept, one.unused_keys, one.keys_max) for one in counts.records],
                "check": [one.passed for one in found.comparisons],
                "warnings": (entropy.warnings, computed.warnings, counts.warnings),
            }
        )
    for part in told[0]:
        (words, numbers), (words_too, numbers_too) = (_apart(repr(each[part])) for each in told)
        assert words == words_too, part
        # Which cells are skipped, and so the order of sums, may differ.
        np.testing.assert_allclose(numbers, numbers_too, 5e-6 if precision == "float32" else 1e-12)


def _listed(result: Any) -> dict[str, Any]:
    """The tensors of a dataclass, of which a text shows but some digits."""
    held = {field.name: getattr(result, field.name) for field in fields(result)}
    return {name: value.tolist() for name, value in held.items() if hasattr(value, "tolist")}


def _apart(text: str) -> tuple[list[str], list[float]]:
    """Words and numbers of a text."""
    number = r"-?\d+(?:\.\d*)?(?:e[-+]?\d+)?"
    return re.split(number, text), [float(found) for found in re.findall(number, text)]


def test_a_row_of_nothing_else_is_a_plain_softmax() -> None:
    q, k = np.ones((1, 1)), np.array([[1.0], [2.0], [3.0]])
    found = attncli.compute(q, k, attn_mask=[[-1e4] * 3], scale=1.0)
    weights = np.exp([1.0, 2, 3]) / np.exp([1.0, 2, 3]).sum()
    np.testing.assert_allclose(found.stages["weights"][0, 0, 0], weights)
    assert "1 row holds nothing but values of -10000 or less" in found.warnings[0]
    hidden = attncli.compute(q, k, attn_mask=[[-1e4] * 3], hide_below=-1e4)
    assert hidden.statistics["weights"].n_masked == 3
    assert hidden.warnings == ()


def test_swin_masks_stay_visible_unless_told() -> None:
    q, k = np.ones((2, 1)), np.ones((2, 1))
    swin = np.where(np.eye(2, dtype=bool), 0, -100.0)
    found = attncli.entropy(q, k, attn_mask=swin)
    assert found.heads[0].keys_mean == 2
    assert "hide_below=-100 counts them as hidden" in found.warnings[0]
    told = attncli.entropy(q, k, attn_mask=swin, hide_below=-100)
    assert told.heads[0].keys_mean == 1
    assert told.warnings == ()


def test_logits_that_reach_across_the_difference_keep_their_weight() -> None:
    q, k = np.array([[100.0], [1.0]]), np.array([[0.0], [100.0]])
    added = np.array([[0.0, -1e4]])
    found = attncli.compute(q, k, attn_mask=added, scale=1.0)
    np.testing.assert_allclose(found.stages["weights"][0, 0], [[0.5, 0.5], [1.0, 0.0]])
    assert "hide_below=-10000 counts them as hidden" in found.warnings[0]
    steep = attncli.compute(q, k, attn_mask=added, scale=1.0, softcap=20.0)
    assert steep.statistics["weights"].n_masked == 2
    assert steep.warnings == ()


@pytest.mark.parametrize("softcap", [None, 6000.0, 3000.0])
def test_wide_vectors_reach_as_far_as_tall_ones(softcap: float | None) -> None:
    """Of which no entry is large: q·k is ±9216, and −10⁴ takes nothing from either key."""
    q, k = np.full((1, 64), 12.0), np.array([[12.0], [-12.0]]) * np.ones(64)
    added = np.array([[-1e4, 0.0]])
    found = attncli.compute(q, k, attn_mask=added, scale=1.0, softcap=softcap)
    kept = softcap is None or softcap > 5000  # tanh leaves 6000 · 0.91 to either side
    assert found.statistics["weights"].n_masked == (0 if kept else 1)
    assert found.stages["weights"][0, 0, 0].tolist() == ([1, 0] if kept else [0, 1])


def test_rows_that_are_far_from_each_other_reach_no_further() -> None:
    """Of both rows the keys are alike, though one row is 10⁴ above the other."""
    q, k = np.array([[5000.0], [-5000.0]]), np.ones((2, 1))
    found = attncli.compute(q, k, attn_mask=np.array([[-1e4, 0.0]]), scale=1.0)
    assert found.statistics["weights"].n_masked == 2
    apart = attncli.compute(q, k * [[1.0], [-1.0]], attn_mask=np.array([[-1e4, 0.0]]), scale=1.0)
    assert apart.statistics["weights"].n_masked == 0


def test_each_row_decides_by_what_it_sees() -> None:
    """With −500 and −1200 a row hides what is 745 below its largest, and nothing else."""
    added = np.array([[0.0, -500.0, -1200.0], [-1200.0, -500.0, -1200.0], [0.0, -1200.0, 0.0]])
    seen = cells(AttentionOptions(attn_mask=added), Sizes(1, 1, 3, 3))[0, 0]
    assert seen.tolist() == [[True, True, False], [True] * 3, [True, False, True]]


def test_rows_of_nothing_else_are_counted_in_all_batches_and_heads() -> None:
    added = np.zeros((2, 2, 4, 4))
    added[0, 0, 1:3] = added[1, 1, 3] = -1e4
    added[..., 0, 3] = -1e4
    said = build_mask(AttentionOptions(attn_mask=added), Sizes(2, 2, 4, 4)).warnings
    assert said[0].startswith("«attn_mask»: 3 rows hold nothing but values of -10000 or less")
    hidden = build_mask(AttentionOptions(attn_mask=added, hide_below=-1e4), Sizes(2, 2, 4, 4))
    assert hidden.warnings == ()


def test_large_norms_that_meet_nowhere_change_nothing() -> None:
    q, k = np.array([[1e3, 0.0], [1e3, 0.0]]), np.array([[0.0, 1e3], [0.0, 1e3]])
    found = attncli.compute(q, k, attn_mask=np.array([[0.0, -1e4], [0.0, 0.0]]))
    assert found.statistics["weights"].n_masked == 1


def test_hide_below_needs_a_float_mask() -> None:
    with pytest.raises(UsageError, match="attn_mask"):
        attncli.mask(4, hide_below=-5)
    said = attncli.mask(attn_mask=CAUSAL, hide_below=-5).warnings
    assert said == ("hide_below: attn_mask is boolean, and has no numbers to be below it",)
    halves = attncli.mask(attn_mask=np.where(CAUSAL, 0, -4.3).astype(np.float16), hide_below=-4.3)
    assert halves.records[0].kept in (CAUSAL.sum(), S * S)  # as float16 has −4.3
