"""Masks told in words: known ones by the words themselves, random ones by building them again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plain_masks import plain_mask

from attncli.attention.masks.audit import MaskRecognition, recognise, recognise_mask
from attncli.attention.masks.build import build_mask
from attncli.attention.masks.mask import HeadMask, Mask
from attncli.attention.masks.patterns import Pattern, ranges
from attncli.attention.options import AttentionOptions
from attncli.attention.sizes import Sizes

LOWER = np.tri(6, dtype=bool)
KEYS = np.arange(6)
DOCUMENTS = np.kron(np.eye(2), np.ones((3, 3))) > 0


def from_file(cells: np.ndarray, batch: int = 1, heads: int = 1) -> MaskRecognition:
    """What a mask file with these cells is said to be."""
    return recognise_mask(file_mask(cells, batch, heads))


def file_mask(cells: np.ndarray, batch: int = 1, heads: int = 1) -> Mask:
    sizes = Sizes(batch, heads, *cells.shape[-2:])
    return build_mask(AttentionOptions(attn_mask=cells), sizes)


def from_options(q_len: int, k_len: int, batch: int = 1, **options: Any) -> MaskRecognition:
    return recognise_mask(build_mask(AttentionOptions(**options), Sizes(batch, 1, q_len, k_len)))


def built(options: dict[str, Any], q_len: int, k_len: int, batch: int = 1) -> np.ndarray:
    """The cells that options give, bool (B, S_q, S_k)."""
    mask = build_mask(AttentionOptions(**options), Sizes(batch, 1, q_len, k_len))
    everything = slice(None)
    cells = mask.visible(everything, everything, everything, everything)[:, 0]
    return np.broadcast_to(cells, (batch, q_len, k_len))


WORDS = [
    ("full", np.ones((3, 5), bool)),
    ("nothing visible", np.zeros((3, 5), bool)),
    ("causal", LOWER),
    ("causal (top-left)", np.tri(3, 8, dtype=bool)),
    ("causal (bottom-right, offset 5)", np.tri(3, 8, 5, dtype=bool)),
    ("causal (bottom-right, offset -3)", np.tri(6, 3, -3, dtype=bool)),
    ("causal (offset -2)", np.tri(6, 6, -2, dtype=bool)),
    ("causal (offset 1)", np.tri(6, 6, 1, dtype=bool)),
    ("causal (offset 2)", np.tri(3, 8, 2, dtype=bool)),
    (
        "causal with a window of 3 keys to the left (4 with the query's own)",
        LOWER & ~np.tri(6, k=-4, dtype=bool),
    ),
    (
        "causal with a window of 0 keys to the left (1 with the query's own)",
        np.eye(6, dtype=bool),
    ),
    (
        "causal (bottom-right, offset 5) with a window of 1 key to the left "
        "(2 with the query's own)",
        np.tri(3, 8, 5, dtype=bool) & ~np.tri(3, 8, 3, dtype=bool),
    ),
    (
        "window of 2 keys to the left and 1 key to the right",
        np.tri(6, k=1, dtype=bool) & ~np.tri(6, k=-3, dtype=bool),
    ),
    (
        "window of 1 key to the left and 1 key to the right (top-left)",
        np.tri(3, 8, 1, dtype=bool) & ~np.tri(3, 8, -2, dtype=bool),
    ),
    ("window of 2 keys to the left and all keys to the right", ~np.tri(6, k=-3, dtype=bool)),
    ("key padding, length 4", np.tile(KEYS < 4, (6, 1))),
    ("key padding, 2 of 6 keys hidden: 1, 3", np.tile(~np.isin(KEYS, [1, 3]), (6, 1))),
    ("causal; key padding, length 4", LOWER & (KEYS < 4)),
    ("causal; key padding, the first 2 keys hidden", LOWER & (KEYS >= 2)),
    ("causal; key padding, 1 of 6 keys hidden: 2", LOWER & (KEYS != 2)),
    ("prefix of 3, then causal", LOWER | (KEYS < 3)),
    ("prefix of 2, then causal (bottom-right, offset -2)", np.tri(6, 4, -2, bool) | (KEYS[:4] < 2)),
    ("two packed documents: segments 0–2, 3–5", DOCUMENTS),
    ("causal; two packed documents: segments 0–2, 3–5", DOCUMENTS & LOWER),
    (
        "causal; key padding, length 5; two packed documents: segments 0–2, 3–5",
        DOCUMENTS & LOWER & (KEYS < 5),
    ),
    ("two packed documents: segments 0, 2, 4 | 1, 3, 5", KEYS[:, None] % 2 == KEYS % 2),
    ("causal; queries 4–5 hidden", LOWER & (KEYS < 4)[:, None]),
    ("queries 4–5 hidden", np.tile((KEYS < 4)[:, None], (1, 6))),
    (
        "causal with a window of 4 keys to the left (5 with the query's own), dilated by 2",
        LOWER & (KEYS[:, None] - 4 <= KEYS) & (KEYS[:, None] % 2 == KEYS % 2),
    ),
    (
        "causal with a window of 1 key to the left (2 with the query's own), the first key kept",
        LOWER & ((KEYS[:, None] - 1 <= KEYS) | (KEYS < 1)),
    ),
    (
        "causal (bottom-right, offset 8) with a window of 2 keys to the left "
        "(3 with the query's own), the first 2 keys kept; key padding, length 10",
        np.tri(4, 12, 8, bool)
        & (~np.tri(4, 12, 5, bool) | (np.arange(12) < 2))
        & (np.arange(12) < 10),
    ),
    (
        "causal but for the first 3 keys (prefix-LM), with a window of 2 keys to the left "
        "(3 with the query's own)",
        (LOWER | (KEYS < 3)) & (KEYS[:, None] - 2 <= KEYS),
    ),
]


@pytest.mark.parametrize(("words", "cells"), WORDS, ids=[words for words, _ in WORDS])
def test_words_of_a_mask_file(words: str, cells: np.ndarray) -> None:
    found = from_file(cells)
    assert found.description == words
    assert not found.probably_inverted


@pytest.mark.parametrize(("words", "cells"), WORDS, ids=[words for words, _ in WORDS])
def test_options_of_a_mask_file_build_it_again(words: str, cells: np.ndarray) -> None:
    options = from_file(cells).options
    assert options is not None
    np.testing.assert_array_equal(built(options, *cells.shape)[0], cells)


INVERTED = [
    ("probably inverted: causal", ~LOWER),
    ("probably inverted: causal (bottom-right, offset 3)", ~np.tri(3, 6, 3, dtype=bool)),
    (
        "probably inverted: causal with a window of 2 keys to the left (3 with the query's own)",
        ~(LOWER & ~np.tri(6, k=-3, dtype=bool)),
    ),
    ("probably inverted: two packed documents: segments 0–2, 3–5", ~DOCUMENTS),
    ("probably inverted: causal; two packed documents: segments 0–2, 3–5", ~(DOCUMENTS & LOWER)),
    ("probably inverted: causal; key padding, length 4", ~(LOWER & (KEYS < 4))),
    ("probably inverted: prefix of 3, then causal", ~(LOWER | (KEYS < 3))),
    (
        "key padding, the first 4 keys hidden; or probably inverted: key padding, length 4",
        np.tile(KEYS >= 4, (6, 1)),
    ),
    (
        "window of 3 keys to the left and all keys to the right (bottom-right, offset 4); "
        "or probably inverted: causal (top-left)",
        ~np.tri(2, 6, dtype=bool),
    ),
]


@pytest.mark.parametrize(("words", "cells"), INVERTED, ids=[words for words, _ in INVERTED])
def test_inverted_masks_are_called_out(words: str, cells: np.ndarray) -> None:
    found = from_file(cells)
    assert found.description == words
    assert found.probably_inverted


def flipped(cells: np.ndarray, *places: tuple[int, int]) -> np.ndarray:
    changed = cells.copy()
    for place in places:
        changed[place] ^= True
    return changed


@pytest.mark.parametrize(
    ("words", "cells"),
    [
        ("nearest is causal, differing in 1 cell", flipped(LOWER, (0, 5))),
        ("nearest is causal, differing in 2 cells", flipped(LOWER, (0, 5), (5, 2))),
        (
            "nearest is two packed documents: segments 0–2, 3–5, differing in 1 cell",
            flipped(DOCUMENTS, (4, 0)),
        ),
        ("nearest is key padding, length 4, differing in 1 cell", flipped(WORDS[15][1], (3, 1))),
        ("nearest is full, differing in 1 cell", flipped(np.ones((6, 6), bool), (2, 3))),
        (
            "nearest is nothing visible, differing in 40 cells",
            np.random.default_rng(8).permutation(1200).reshape(30, 40) < 40,
        ),
        (
            "nearest is causal with a window of 2 keys to the left (3 with the query's own), "
            "differing in 2 cells",
            flipped(LOWER & ~np.tri(6, k=-3, dtype=bool), (0, 5), (4, 0)),
        ),
        ("nearest is the inverse of causal, differing in 1 cell", flipped(~LOWER, (5, 1))),
    ],
)
def test_other_masks_are_told_by_the_nearest_pattern(words: str, cells: np.ndarray) -> None:
    found = from_file(cells)
    assert found.description == f"no known pattern; {words}"
    assert found.options is None


def test_the_number_of_differing_cells_is_exact() -> None:
    cells = np.random.default_rng(3).random((40, 50)) > 0.5
    nearest = recognise(HeadMask(file_mask(cells))).nearest
    assert nearest is not None
    pattern = nearest.pattern.interval_mask(40).cells(slice(0, 40))
    assert nearest.cells == int((cells != (pattern ^ nearest.inverted)).sum())


# Batches and heads


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("key padding, lengths 4,6", {"key_lengths": (4, 6)}),
        ("key padding, lengths 4,6,0", {"key_lengths": (4, 6, 0)}),
        ("causal; key padding, lengths 1,6", {"causal": True, "key_lengths": (1, 6)}),
        ("causal (offsets 3,5)", {"causal": True, "query_offset": (3, 5)}),
        ("key padding, length 4", {"key_lengths": (4, 4)}),
    ],
)
def test_batches_are_told_together(words: str, options: dict[str, Any]) -> None:
    batch = max(len(value) for value in options.values() if isinstance(value, tuple))
    q_len, k_len = (3, 8) if "query_offset" in options else (6, 6)
    cells = built(options, q_len, k_len, batch)
    found = from_file(cells[:, None], batch)
    assert found.description == words
    assert found.options is not None
    np.testing.assert_array_equal(built(found.options, q_len, k_len, batch), cells)
    assert from_options(q_len, k_len, batch, **options).description == words


def test_heads_that_differ_are_told_apart() -> None:
    found = from_file(np.stack([LOWER, DOCUMENTS]), heads=2)
    assert found.description == "head 0: causal | head 1: two packed documents: segments 0–2, 3–5"
    assert found.options is None
    assert [(batch, head) for batch, head, _ in found.parts] == [(None, 0), (None, 1)]


def test_batches_that_hide_other_queries_are_told_apart() -> None:
    cells = np.stack([DOCUMENTS, DOCUMENTS])
    cells[0, 4:], cells[1, 1:3] = False, False
    found = from_file(cells[:, None], batch=2)
    assert "queries 4–5 hidden" in found.description
    assert "queries 1–2 hidden" in found.description
    alike = from_file(np.stack([cells[:1], cells[:1]]), batch=2)
    assert alike.description.count("hidden") == 1


def test_many_documents_are_counted_and_some_are_listed() -> None:
    ten = np.kron(np.eye(10), np.ones((2, 2))) > 0
    listed = ", ".join(f"{start}–{start + 1}" for start in range(0, 16, 2))
    assert from_file(ten).description == f"10 packed documents: segments {listed} and 2 more"
    eight = ten[:16, :16]
    assert from_file(eight).description == f"eight packed documents: segments {listed}"


def test_heads_that_are_alike_are_one() -> None:
    found = from_file(np.stack([LOWER, LOWER]), heads=2)
    assert found.description == "causal"
    assert [(batch, head) for batch, head, _ in found.parts] == [(None, None)]


def test_padded_queries_do_not_count() -> None:
    cells = LOWER.copy()
    cells[4:] = True
    options = AttentionOptions(attn_mask=cells, query_lengths=(4,))
    found = recognise_mask(build_mask(options, Sizes(1, 1, 6, 6)))
    assert found.description == "causal"


@pytest.mark.parametrize("low", [-1e4, -1e9, np.finfo(np.float32).min])
def test_values_meant_as_minus_infinity_count_as_hidden(low: float) -> None:
    assert recognise_mask(file_mask(np.where(LOWER, 0.0, low))).description == "causal"


# Random combinations, built by plain loops


@st.composite
def drawn_masks(draw: st.DrawFn) -> tuple[int, int, dict[str, Any]]:
    q_len = draw(st.integers(1, 8))
    k_len = draw(st.just(q_len) | st.integers(1, 8))
    rules: dict[str, Any] = {"causal": draw(st.booleans())}
    if q_len != k_len or draw(st.booleans()):
        rules["offset"] = draw(st.integers(-q_len - 1, k_len + 1))
    if rules["causal"] and draw(st.booleans()):
        rules["prefix"] = draw(st.integers(0, k_len + 1))
    for name, width in (("left_window", k_len + 2), ("right_window", k_len + 2)):
        if draw(st.booleans()):
            rules[name] = draw(st.integers(0, width))
    if "left_window" in rules and draw(st.booleans()):
        rules["sink_window"] = draw(st.integers(0, k_len + 1))
    padding = draw(st.sampled_from(["none", "length", "keep"]))
    if padding == "length":
        rules["key_length"] = draw(st.integers(0, k_len))
    if padding == "keep":
        rules["keep"] = np.array(draw(st.lists(st.booleans(), min_size=k_len, max_size=k_len)))
    if draw(st.booleans()):
        ids = draw(st.lists(st.integers(0, 3), min_size=k_len, max_size=k_len))
        rules["segments"] = np.array(sorted(ids) if draw(st.booleans()) else ids)
    return q_len, k_len, rules


def options_from(rules: dict[str, Any]) -> dict[str, Any]:
    names = {"offset": "query_offset", "key_length": "key_lengths", "keep": "key_padding"}
    options = {names.get(name, name): value for name, value in rules.items()}
    if "key_lengths" in options:
        options["key_lengths"] = (options["key_lengths"],)
    return options


@settings(max_examples=400, deadline=None)
@given(drawn=drawn_masks())
@example(drawn=(1, 1, {"causal": True}))
@example(drawn=(3, 5, {"causal": True, "offset": -1, "left_window": 9, "key_length": 0}))
def test_what_is_said_of_random_combinations_is_so(drawn: tuple[int, int, dict[str, Any]]) -> None:
    """Options give the same cells and the same words; a few wild combinations have no name."""
    q_len, k_len, rules = drawn
    cells = plain_mask(q_len, k_len, **rules)
    found = from_file(cells)
    assert from_options(q_len, k_len, **options_from(rules)).description == found.description
    if found.options is None:
        return
    np.testing.assert_array_equal(built(found.options, q_len, k_len)[0], cells)
    assert from_options(q_len, k_len, **found.options).description == found.description


PAIRS = np.arange(6) // 2


@st.composite
def usual_masks(draw: st.DrawFn) -> tuple[int, int, dict[str, Any]]:
    """What models and their kernels use: causal or windowed, in a corner, padded, packed."""
    k_len = draw(st.integers(6, 24))
    q_len = draw(st.just(k_len) | st.integers(4, k_len))
    rules: dict[str, Any] = {"causal": draw(st.booleans()), "offset": k_len - q_len}
    kind = draw(st.sampled_from(["plain", "prefix", "window", "dilation", "sinks"]))
    if kind == "prefix":
        rules |= {"causal": True, "prefix": draw(st.integers(1, k_len - 1))}
    if kind in ("window", "dilation", "sinks"):
        rules["left_window"] = draw(st.integers(1, k_len))
        if not rules["causal"]:
            rules["right_window"] = draw(st.integers(1, k_len))
    if kind == "dilation":
        rules["dilation"] = draw(st.integers(2, 3))
    if kind == "sinks":  # a gap in two rows at least
        rules["sink_window"] = draw(st.integers(1, 2))
        rules["left_window"] = draw(st.integers(1, k_len - rules["sink_window"] - 3))
    padded = ["none", "length", "left"] if kind not in ("dilation", "sinks") else ["none"]
    padding = draw(st.sampled_from(padded))
    if padding == "length":
        rules["key_length"] = draw(st.integers(k_len // 2, k_len))
    if padding == "left":
        rules["keep"] = np.arange(k_len) >= draw(st.integers(1, k_len // 2))
    if kind in ("plain", "window") and draw(st.booleans()):
        rules["segments"] = np.arange(k_len) // draw(st.integers(2, k_len))
    return q_len, k_len, rules


def drawn_pattern(q_len: int, k_len: int, rules: dict[str, Any]) -> Pattern:
    """The rules as drawn, in the terms in which patterns are weighed against each other."""
    offset = rules["offset"]
    left, right = rules.get("left_window"), rules.get("right_window")
    ahead = None if right is None else offset + right
    return Pattern(
        q_len=q_len,
        k_len=k_len,
        lowest=None if left is None else offset - left,
        kept=rules.get("sink_window"),
        highest=offset if rules["causal"] else ahead,
        prefix=rules.get("prefix"),
        position=offset if rules.keys() & {"segments", "dilation"} else None,
        dilation=rules.get("dilation"),
        length=rules.get("key_length"),
        keep=rules.get("keep"),
        ids=rules.get("segments"),
    )


# Of thousands of such masks one in some thousand is not named: always the same ones are drawn.
@settings(max_examples=300, deadline=None, derandomize=True)
@given(drawn=usual_masks())
@example(drawn=(6, 6, {"causal": False, "offset": 0, "key_length": 3, "segments": PAIRS}))
def test_usual_combinations_are_recognised(drawn: tuple[int, int, dict[str, Any]]) -> None:
    """The options give the same cells, in words that are none longer than the rules."""
    q_len, k_len, rules = drawn
    cells = plain_mask(q_len, k_len, **rules)
    found = from_file(cells)
    assert found.options is not None, found.description
    np.testing.assert_array_equal(built(found.options, q_len, k_len)[0], cells)
    pattern = found.parts[0][2].buildable
    assert pattern is not None
    assert pattern.cost <= drawn_pattern(q_len, k_len, rules).cost


def strict_words(rules: dict[str, Any], size: int) -> str:
    """Words for combinations in which every rule shows, put together here once more."""
    own = rules.get("left_window", 0) + 1
    where = f" (offset {rules['offset']})" if rules["offset"] else ""
    parts = [f"causal{where}"]
    if "prefix" in rules and "left_window" in rules:
        parts[0] += f" but for the first {rules['prefix']} keys (prefix-LM),"
    elif "prefix" in rules:
        parts = [f"prefix of {rules['prefix']}, then {parts[0]}"]
    if "left_window" in rules:
        keys = f"{own - 1} key{'s' * (own != 2)}"
        parts[0] += f" with a window of {keys} to the left ({own} with the query's own)"
    if "key_length" in rules:
        parts.append(f"key padding, length {rules['key_length']}")
    if "segments" in rules:
        half = int(rules["segments"].sum())
        parts.append(
            f"two packed documents: segments 0–{size - half - 1}, {size - half}–{size - 1}"
        )
    return "; ".join(parts)


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(22, 30),
    offset=st.integers(-2, 0),
    left=st.none() | st.integers(1, 4),
    length=st.none() | st.integers(16, 18),
    cut=st.none() | st.integers(7, 9),
)
def test_random_causal_masks_give_back_the_words_they_were_drawn_from(
    size: int, offset: int, left: int | None, length: int | None, cut: int | None
) -> None:
    rules: dict[str, Any] = {"causal": True, "offset": offset}
    if left is not None:
        rules["left_window"] = left
    if length is not None:
        rules["key_length"] = length
    if cut is not None:
        rules["segments"] = (np.arange(size) >= cut).astype(int)
    assert from_file(plain_mask(size, size, **rules)).description == strict_words(rules, size)


@settings(max_examples=50, deadline=None)
@given(size=st.integers(12, 20), prefix=st.integers(5, 8), left=st.none() | st.integers(6, 9))
def test_random_prefixes_give_back_the_words_they_were_drawn_from(
    size: int, prefix: int, left: int | None
) -> None:
    rules: dict[str, Any] = {"causal": True, "offset": 0, "prefix": prefix}
    if left is not None:
        rules["left_window"] = left
    assert from_file(plain_mask(size, size, **rules)).description == strict_words(rules, size)


@pytest.mark.parametrize(
    ("index", "words"),
    [([], "none"), ([3], "3"), ([0, 1, 2], "0–2"), ([0, 2, 3, 7], "0, 2–3, 7")],
)
def test_ranges(index: list[int], words: str) -> None:
    assert ranges(np.array(index, np.int64)) == words


def test_ranges_are_cut_short() -> None:
    assert ranges(np.arange(0, 40, 2)) == "0, 2, 4, 6, 8, 10, 12, 14, …"
