"""Counts, comparisons, pictures and effects of masks against sums over plain cells."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_masks import plain_mask

import attncli.attention.masks.mask as mask_module
from attncli.attention.masks.audit import (
    CellCounts,
    MaskRecord,
    audit,
    cell_counts,
    undeclared_leaks,
)
from attncli.attention.masks.build import build_mask
from attncli.attention.masks.compare import Cell, compare, differing_cells, leaks
from attncli.attention.masks.mask import HeadMask, Mask
from attncli.attention.masks.rules import BooleanMask
from attncli.attention.masks.spans import mask_of_spans
from attncli.attention.options import AttentionOptions, Corner
from attncli.attention.sizes import Sizes
from attncli.errors import DataError

LONG = 100_000


def build(q_len: int, k_len: int, *, batch: int = 1, heads: int = 1, **options: Any) -> Mask:
    return build_mask(AttentionOptions(**options), Sizes(batch, heads, q_len, k_len))


def file_mask(cells: np.ndarray, batch: int = 1, heads: int = 1) -> Mask:
    return build(*cells.shape[-2:], batch=batch, heads=heads, attn_mask=cells)


def assert_counts(record: MaskRecord, cells: np.ndarray) -> None:
    """The record holds the sums of these cells, bool (real queries, S_k)."""
    rows, columns = cells.sum(1), cells.sum(0)
    assert record.cells == cells.size
    assert record.kept == cells.sum()
    assert record.density == (cells.mean() if cells.size else None)
    assert record.empty_rows == (rows == 0).sum()
    assert record.first_empty_rows == tuple(np.flatnonzero(rows == 0)[:10])
    assert record.unused_keys == (columns == 0).sum()
    assert record.first_unused_keys == tuple(np.flatnonzero(columns == 0)[:10])
    assert record.keys_min == (rows.min() if len(rows) else None)
    assert record.keys_max == (rows.max() if len(rows) else None)


@st.composite
def drawn_structures(draw: st.DrawFn) -> tuple[Mask, np.ndarray]:
    """A mask from options alone, and its cells from plain loops, bool (S_q, S_k)."""
    q_len, k_len = draw(st.integers(0, 8)), draw(st.integers(0, 8))
    offset = draw(st.integers(-9, 9))
    rules: dict[str, Any] = {"causal": draw(st.booleans())}
    options: dict[str, Any] = {"causal": rules["causal"], "query_offset": offset}
    if rules["causal"]:
        rules["prefix"] = options["prefix"] = draw(st.integers(0, 9))
    if draw(st.booleans()):
        rules["left_window"] = options["left_window"] = draw(st.integers(0, 9))
        rules["sink_window"] = options["sink_window"] = draw(st.integers(0, 3))
    if draw(st.booleans()):
        rules["key_length"] = draw(st.integers(0, k_len))
        options["key_lengths"] = (rules["key_length"],)
    if draw(st.booleans()):
        keep = np.array(draw(st.lists(st.booleans(), min_size=k_len, max_size=k_len)), bool)
        rules["keep"] = options["key_padding"] = keep
    if draw(st.booleans()):
        ids = draw(st.lists(st.integers(-1, 2), min_size=k_len, max_size=k_len))
        rules["segments"] = options["segments"] = np.array(ids, int)
    return build(q_len, k_len, **options), plain_mask(q_len, k_len, offset, **rules)


# Audits


@settings(deadline=None)
@given(drawn=drawn_structures())
def test_structures_are_counted_as_their_cells(drawn: tuple[Mask, np.ndarray]) -> None:
    mask, cells = drawn
    assert HeadMask(mask).interval_mask is not None
    (record,) = audit(mask).records
    assert_counts(record, cells)
    assert (record.batch, record.head) == (None, None)


@settings(deadline=None)
@given(drawn=drawn_structures(), seed=st.integers(0, 99), real=st.integers(0, 8))
def test_mask_files_are_counted_as_their_cells(
    drawn: tuple[Mask, np.ndarray], seed: int, real: int
) -> None:
    mask, cells = drawn
    given_mask = np.random.default_rng(seed).random(cells.shape) > 0.3
    real = min(real, len(cells))
    both = mask.also(BooleanMask(given_mask[None, None], shown=True))
    both = replace(both, query_lengths=np.array([real], np.int64))
    (record,) = audit(both).records
    assert_counts(record, (cells & given_mask)[:real])
    assert (record.q_len, record.k_len) == cells.shape


@pytest.mark.parametrize("shape", [(1, 1, 1, 7), (1, 1, 5, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("additive", [False, True])
def test_masks_alike_for_all_queries_or_keys_are_no_more_than_padding(
    shape: tuple[int, ...], additive: bool
) -> None:
    shown = np.random.default_rng(4).random(shape) > 0.4
    given_mask = np.where(shown, 0.0, -np.inf) if additive else shown
    mask = build(5, 7, attn_mask=given_mask, causal=True, query_offset=2)
    assert HeadMask(mask).interval_mask is not None
    assert_counts(audit(mask).records[0], np.tri(5, 7, 2, dtype=bool) & shown[0, 0])


def test_a_long_mask_is_counted_from_its_structure() -> None:
    mask = build(LONG, LONG, causal=True, left_window=4095)
    (record,) = audit(mask).records
    assert record.kept == 4096 * LONG - 4095 * 4096 // 2
    assert (record.keys_min, record.keys_max) == (1, 4096)
    assert record.cells == LONG**2
    assert record.description.startswith("causal with a window of 4095 keys")


def test_a_long_mask_of_every_rule_is_counted_from_its_structure() -> None:
    """Each row by one sum over its own keys."""
    generator = np.random.default_rng(5)
    ids = np.sort(generator.integers(0, 50, LONG))
    keep = generator.random(LONG) > 0.1
    mask = build(
        LONG, LONG, causal=True, left_window=1000, key_lengths=(90_000,), prefix=500,
        segments=ids, key_padding=keep,
    )  # fmt: skip
    profile = HeadMask(mask).marginals
    for query in [*generator.integers(0, LONG, 50).tolist(), 0, 499, 89_999, 90_500, LONG - 1]:
        keys = np.arange(max(0, query - 1000), max(query + 1, 500))
        keys = keys[keys < 90_000]
        seen = keys[keep[keys] & (ids[keys] == ids[query])]
        assert profile.counts[query] == len(seen)
        assert profile.first[query] == (seen[0] if len(seen) else LONG)
        assert profile.last[query] == (seen[-1] if len(seen) else -1)
    assert profile.used.sum() == profile.counts.sum()


def test_batches_and_heads_that_are_equal_are_one_record() -> None:
    lower = np.tri(4, dtype=bool)
    full = np.ones((4, 4), bool)
    by_head = np.broadcast_to(np.stack([lower, full]), (3, 2, 4, 4))
    by_batch = np.broadcast_to(np.stack([lower, full])[:, None], (2, 3, 4, 4))
    places = [
        [(record.batch, record.head) for record in audit(file_mask(each, *each.shape[:2])).records]
        for each in (by_head, by_batch, by_batch[:1], np.stack([by_head[0], by_head[0][::-1]]))
    ]
    assert places == [
        [(None, 0), (None, 1)],
        [(0, None), (1, None)],
        [(None, None)],
        [(0, 0), (0, 1), (1, 0), (1, 1)],
    ]


def test_equal_counts_of_other_cells_are_two_records() -> None:
    one = np.array([[True, False], [False, True]])
    records = audit(file_mask(np.stack([one, ~one]), heads=2)).records
    assert [record.head for record in records] == [0, 1]
    assert records[0].kept == records[1].kept


def test_padding_on_the_wrong_axis_shows_as_empty_rows() -> None:
    wrong = np.arange(6)[:, None] < np.array([4] * 6)
    (record,) = audit(file_mask(wrong)).records
    assert record.first_empty_rows == (4, 5)
    assert record.unused_keys == 0
    assert record.description == "queries 4–5 hidden"


# Additive masks


def test_values_of_an_additive_mask_are_counted() -> None:
    low = float(np.finfo(np.float32).min)
    found = audit(file_mask(np.array([[0, low, -1e4], [0, 0, -np.inf]])))
    assert found.added is not None
    assert found.added.counts == {-np.inf: 1, low: 1, -1e4: 1, 0.0: 3}
    assert (found.added.minimum, found.added.maximum, found.added.hidden) == (low, 0.0, 1)
    assert found.records[0].kept == 3
    assert found.lenient is None


def test_rows_of_nothing_but_minus_a_lot_are_told_in_both_readings() -> None:
    found = audit(file_mask(np.where(np.tri(4, k=-1, dtype=bool), 0, -1e4)))
    assert found.records[0].kept == 4 + 6
    assert found.lenient is not None
    assert found.lenient.description == "causal (offset -1)"
    reading = f"with values of -10000 or less as hidden everywhere: {found.lenient.description}"
    assert found.description == f"{found.recognition.description}; {reading}"
    assert found.records[0].description == found.description


def test_many_distinct_values_are_not_listed() -> None:
    added = audit(file_mask(np.arange(100.0).reshape(10, 10))).added
    assert added is not None
    assert added.counts is None
    assert (added.minimum, added.maximum) == (0.0, 99.0)


def test_boolean_masks_add_nothing() -> None:
    assert audit(file_mask(np.ones((2, 2), bool))).added is None


# Comparisons and leaks


@settings(deadline=None)
@given(seed=st.integers(0, 999), one_file=st.booleans(), other_file=st.booleans())
def test_differing_cells_are_counted_and_named(seed: int, one_file: bool, other_file: bool) -> None:
    generator = np.random.default_rng(seed)
    q_len, k_len = generator.integers(1, 7, 2)
    masks, cells = [], []
    for as_file in (one_file, other_file):
        rules = {"causal": True, "left_window": int(generator.integers(0, 4))}
        offset = int(generator.integers(-2, 4))
        cells.append(plain_mask(q_len, k_len, offset, **rules))
        options = {**rules, "query_offset": offset}
        masks.append(file_mask(cells[-1]) if as_file else build(q_len, k_len, **options))
    found = compare(*masks, limit=3)
    wrong = np.argwhere(cells[0] != cells[1])
    assert found.cells == q_len * k_len
    assert found.differing == len(wrong)
    assert found.only_a == (cells[0] & ~cells[1]).sum()
    assert found.only_b == (cells[1] & ~cells[0]).sum()
    expected = [
        Cell(None, None, int(q), int(k), bool(cells[0][q, k]), bool(cells[1][q, k]))
        for q, k in wrong[:3]
    ]
    assert list(found.first) == expected
    assert sum(1 for _ in differing_cells(*masks)) == len(wrong)
    assert found.bias_differing == 0


def test_batches_and_heads_are_named_where_a_mask_has_them() -> None:
    cells = np.ones((2, 3, 2, 2), bool)
    cells[1, 2, 0, 1] = False
    found = compare(file_mask(cells, 2, 3), build(2, 2))
    assert found.cells == 24
    assert found.first == (Cell(1, 2, 0, 1, False, True),)


def test_long_structures_are_compared_without_their_cells() -> None:
    found = compare(build(LONG, LONG, causal=True), build(LONG, LONG, causal=True, query_offset=1))
    assert found.differing == found.only_b == LONG - 1
    assert found.first[0] == Cell(None, None, 0, 1, False, True)


def test_other_numbers_added_to_visible_cells_are_differences_too() -> None:
    one = file_mask(np.array([[0.0, -9.0, -np.inf]]))
    other = file_mask(np.array([[0.0, -np.inf, -np.inf]]))
    found = compare(one, other)
    assert (found.differing, found.bias_differing) == (1, 0)
    found = compare(one, file_mask(np.array([[0.0, -8.0, -np.inf]])))
    assert (found.differing, found.bias_differing) == (0, 1)
    assert found.first == (Cell(None, None, 0, 1, -9.0, -8.0),)


@pytest.mark.parametrize("other", [build(3, 4), build(2, 5), build(2, 4, batch=3)])
def test_masks_of_other_sizes_are_refused(other: Mask) -> None:
    with pytest.raises(DataError, match="expected"):
        compare(build(2, 4, batch=2), other)


def test_other_numbers_are_found_in_the_rows_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mask_module, "BLOCK_CELLS", 12)  # two rows at a time
    one = np.random.default_rng(3).standard_normal((1, 2, 5, 6))
    for row in range(5):
        other = one.copy()
        other[0, 1, row, 2] += 1
        masks = [build(5, 6, heads=2, attn_mask=added) for added in (one, other)]
        found = compare(*masks)
        numbers = (float(each[0, 1, row, 2]) for each in (one, other))
        cell = Cell(None, 1, row, 2, *numbers)
        assert list(differing_cells(*masks)) == [cell]
        assert (found.differing, found.bias_differing, found.first) == (0, 1, (cell,))
    plain = build(5, 6, heads=2)
    assert len(list(differing_cells(build(5, 6, heads=2, attn_mask=one), plain))) == 60


def test_leaks_are_counted_for_each_declared_rule() -> None:
    """A causal mask that also shows one future key, and one key of another document."""
    ids = np.array([0, 0, 1, 1])
    cells = plain_mask(4, 4, causal=True, segments=ids)
    cells[0, 1] = cells[3, 0] = True
    options = AttentionOptions(causal=True, segments=ids, key_lengths=(3,), left_window=3)
    found = {leak.rule: leak for leak in leaks(file_mask(cells), options)}
    assert {rule: leak.cells for rule, leak in found.items()} == {
        "causal": 1,
        "left window": 0,
        "segments": 1,
        "key padding": 1,
    }
    assert found["causal"].first == (Cell(None, None, 0, 1, True, False),)
    assert found["segments"].first == (Cell(None, None, 3, 0, True, False),)
    assert found["key padding"].first == (Cell(None, None, 3, 3, True, False),)


def test_a_mask_that_hides_more_than_the_rules_does_not_leak() -> None:
    options = AttentionOptions(causal=True)
    (found,) = leaks(file_mask(np.zeros((4, 4), bool)), options)
    assert (found.cells, found.first) == (0, ())
    assert leaks(file_mask(np.ones((4, 4), bool)), AttentionOptions()) == []


def test_without_a_declared_rule_the_nearest_pattern_is_what_leaks() -> None:
    cells = np.tri(6, dtype=bool)
    cells[1, 4] = True
    cells[5, 2] = False
    mask = file_mask(cells)
    (found,) = undeclared_leaks(mask, audit(mask).recognition)
    assert (found.rule, found.cells) == ("causal", 1)
    assert found.first == (Cell(None, None, 1, 4, True, False),)
    assert undeclared_leaks(build(6, 6, causal=True), audit(build(6, 6)).recognition) == []


def test_the_nearest_pattern_is_one_that_options_build() -> None:
    rows = ("xx..xx", "x...x.", "xx....", "..x...", "xx....")
    mask = build(5, 6, attn_mask=np.array([[cell == "x" for cell in row] for row in rows]))
    (found,) = undeclared_leaks(mask, audit(mask).recognition)
    assert "window of -" not in found.rule


WINDOW = "with a window of {} keys to the left ({} with the query's own)"
ASKED: list[tuple[int, int, dict[str, Any], str]] = [
    (
        *(4, 4, {"causal": True, "left_window": 9}),
        f"causal {WINDOW.format(9, 10)}; here the same as: causal",
    ),
    (
        *(1, 4, {"causal": True, "query_offset": 3}),
        "causal (bottom-right, offset 3); here the same as: full",
    ),
    (
        *(2, 6, {"left_window": 7, "right_window": 1, "query_offset": 3}),
        "window of 7 keys to the left and 1 key to the right (offset 3); "
        "here the same as: causal (bottom-right, offset 4)",
    ),
    (
        *(4, 4, {"causal": True, "left_window": 2, "dilation": 1}),
        f"causal {WINDOW.format(2, 3)}",
    ),
    (
        *(1, 9, {"causal": True, "left_window": 8, "dilation": 2, "query_offset": 8}),
        f"causal (bottom-right, offset 8) {WINDOW.format(8, 9)}, dilated by 2; "
        "here the same as: key padding, 4 of 9 keys hidden: 1, 3, 5, 7",
    ),
    (
        *(4, 4, {"causal": True, "prefix": 4}),
        "prefix of 4, then causal; here the same as: full",
    ),
    (
        *(4, 4, {"causal": True, "key_lengths": (4,)}),
        "causal; key padding, length 4; here the same as: causal",
    ),
    (4, 4, {"key_padding": np.arange(4) < 3}, "key padding, length 3"),
    (
        *(4, 4, {"segments": np.zeros(4, int)}),
        "one packed document: segments 0–3; here the same as: full",
    ),
    (
        *(4, 4, {"causal": True, "attn_mask": np.ones((4, 4), bool), "left_window": 9}),
        f"causal; asked for beside the file: causal {WINDOW.format(9, 10)}",
    ),
    (
        *(4, 6, {"causal": True, "query_offset": 2, "sink_window": 1, "left_window": 9}),
        f"causal (bottom-right, offset 2) {WINDOW.format(9, 10)}, the first key kept; "
        "here the same as: causal (bottom-right, offset 2)",
    ),
]


@pytest.mark.parametrize(("q_len", "k_len", "options", "said"), ASKED)
def test_what_options_ask_for_is_told_where_it_does_not_show(
    q_len: int, k_len: int, options: dict[str, Any], said: str
) -> None:
    asked = AttentionOptions(**options)
    assert audit(build(q_len, k_len, **options), asked).description == said


def test_positions_of_documents_are_told_with_their_corner() -> None:
    cuts = {"cu_seqlens_q": (0, 2, 4), "cu_seqlens_k": (0, 3, 6)}
    bare = "causal; two packed documents: segments 0–2, 3–5; positions counted in each document, "
    corner = {"causal": True, "query_offset": Corner.BOTTOM_RIGHT, **cuts}
    for options, where in (
        (corner, "bottom-right"),
        ({**corner, "query_offset": 1}, "at offset 1"),
    ):
        found = audit(build(4, 6, **options), AttentionOptions(**options))
        assert found.description == bare + where


# Pictures


@settings(deadline=None)
@given(
    drawn=drawn_structures(),
    seed=st.none() | st.integers(0, 99),
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
)
def test_grids_hold_the_sums_of_their_rectangles(
    drawn: tuple[Mask, np.ndarray], seed: int | None, rows: int, columns: int
) -> None:
    mask, cells = drawn
    if seed is not None:
        given_mask = np.random.default_rng(seed).random(cells.shape) > 0.3
        mask, cells = mask.also(BooleanMask(given_mask[None, None], shown=True)), cells & given_mask
    found = cell_counts(HeadMask(mask), rows, columns)
    assert found.counts.shape == (min(rows, cells.shape[0]), min(columns, cells.shape[1]))
    for (row, column), count in np.ndenumerate(found.counts):
        part = cells[
            found.query_edges[row] : found.query_edges[row + 1],
            found.key_edges[column] : found.key_edges[column + 1],
        ]
        assert part.size == found.sizes[row, column] > 0
        assert count == part.sum()
    assert found.counts.sum() == cells.sum()


def summed(cells: np.ndarray, found: CellCounts) -> list[list[int]]:
    """The visible cells of each rectangle, one by one."""
    return [
        [int(cells[top:end, left:stop].sum()) for left, stop in pairwise(found.key_edges)]
        for top, end in pairwise(found.query_edges)
    ]


@pytest.mark.parametrize("block_cells", [1, 20, 1 << 22])
def test_grids_of_cells_do_not_depend_on_the_blocks(
    block_cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of one row, of a few, and of all, which end within rectangles or beside them."""
    monkeypatch.setattr(mask_module, "BLOCK_CELLS", block_cells)
    random = np.random.default_rng(0)
    for _ in range(40):
        q_len, k_len, rows, columns = (int(random.integers(1, 10)) for _ in range(4))
        cells = random.random((q_len, k_len)) < 0.5
        view = file_mask(cells).head(0, 0)
        found = cell_counts(view, rows, columns)
        assert found.counts.tolist() == summed(cells, found)
        assert found.counts.shape == (min(rows, q_len), min(columns, k_len))
        assert view.marginals.counts.tolist() == cells.sum(1).tolist()
        assert view.marginals.used.tolist() == cells.sum(0).tolist()
        first = [int(row.argmax()) if row.any() else k_len for row in cells]
        last = [int(np.flatnonzero(row)[-1]) if row.any() else -1 for row in cells]
        assert view.marginals.first.tolist() == first
        assert view.marginals.last.tolist() == last


def test_grids_of_patches_are_those_of_their_batch() -> None:
    options = AttentionOptions(causal=True, query_offset=(0, 3), key_lengths=(9, 7))
    sizes = Sizes(2, 1, 6, 9)
    found, plain = mask_of_spans(options, sizes), build_mask(options, sizes)
    assert found is not None
    for batch in range(2):
        counts = cell_counts(found.head(batch, 0), 4, 5)
        assert counts.counts.tolist() == summed(plain.head(batch, 0).cells(slice(None)), counts)


# Memory


@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_nothing_here_imports_torch(name: str) -> None:
    """The second name shows that the first could be found."""
    code = f"import sys, attncli.attention.masks.audit\nsys.exit({name!r} in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], check=False)
    assert run.returncode == (name == "numpy")


_MEASURE = r"""
import re, sys
from pathlib import Path
import numpy as np
from attncli.attention.sizes import Sizes
from attncli.attention.masks.build import build_mask
from attncli.attention.masks.audit import audit
from attncli.attention.options import AttentionOptions, Corner
def peak():  # ru_maxrss would start from that of the process before
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
given = np.load(sys.argv[1], mmap_mode="r")
mask = build_mask(AttentionOptions(attn_mask=given), Sizes(1, 1, *given.shape))
before = peak()
(record,) = audit(mask).records
after = peak()
print((after - before) // 1024, record.kept, record.description)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="madvise and /proc are as on Linux")
def test_a_mapped_mask_file_is_read_in_blocks(tmp_path: Path) -> None:
    """A file of 256 MiB takes less than 64 MiB."""
    size = 16_384
    path = tmp_path / "mask.npy"
    cells = np.lib.format.open_memmap(path, mode="w+", dtype=bool, shape=(size, size))
    for start in range(0, size, 1024):
        cells[start : start + 1024] = np.tri(1024, size, start, dtype=bool)
    cells.flush()
    del cells
    run = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(path)], check=True, capture_output=True, text=True
    )
    grown, kept, words = run.stdout.split()
    assert int(kept) == size * (size + 1) // 2
    assert words == "causal"
    assert int(grown) < 64
