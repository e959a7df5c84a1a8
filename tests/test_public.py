"""What `import attncli` gives: the commands' functions by their names, and nothing loaded early."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import attncli
from attncli import api
from attncli.analysis.attention_arguments import read_keywords
from attncli.analysis.compute import ask_stages
from attncli.attention.options import AttentionOptions, Target
from attncli.attention.variance.fit_scale import fit_scale

HEAVY = ("numpy", "rich", "torch", "typer")
PACKAGE = Path(attncli.__file__).parent


def loaded_by(code: str) -> set[str]:
    """Heavy packages in memory after a fresh interpreter has run the code."""
    probe = f"{code}\nimport sys\nprint(*[name for name in {HEAVY} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


def test_the_import_loads_nothing_heavy() -> None:
    code = "import attncli, attncli.errors\nattncli.UsageError, attncli.Layout, dir(attncli)"
    assert loaded_by(code) == set()


def test_the_command_line_loads_neither_torch_nor_numpy_nor_rich() -> None:
    assert not loaded_by("import attncli.cli.app") & {"numpy", "rich", "torch"}


def test_a_heavy_import_would_be_noticed() -> None:
    assert loaded_by("import attncli\nattncli.compute") >= {"numpy", "torch"}
    assert loaded_by("import rich") == {"rich"}


@pytest.mark.parametrize("name", attncli.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(attncli, name)
    assert name in dir(attncli)
    if name != "__version__":
        assert value.__name__ == name
        assert value.__doc__


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'softmax'"):
        attncli.softmax  # noqa: B018


def test_type_checkers_see_the_same_names() -> None:
    """The imports for type checkers are what the lazy table says, name by name."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    typed = {
        alias.asname: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == attncli._HOMES


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.parametrize("module", ["attncli", "attncli.api"])
def test_examples_in_docstrings(module: str) -> None:
    found = importlib.import_module(module)
    result = doctest.testmod(found, extraglobs={"attncli": attncli, "numpy": np})
    assert result.failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    examples = [test.examples for test in finder.find(api, extraglobs={})]
    assert sum(map(len, examples)) >= 15


# ── compute ──────────────────────────────────────────────────────────────────────────────────

Q = np.random.default_rng(0).standard_normal((2, 4, 5, 8))
K = np.random.default_rng(1).standard_normal((2, 2, 6, 8))
V = np.random.default_rng(2).standard_normal((2, 2, 6, 3))


def test_shapes_of_everything() -> None:
    result = attncli.compute(Q, K, V, softcap=5.0)
    over_keys = ("scores", "scaled", "capped", "masked", "weights")
    assert tuple(result.stages) == (*over_keys, "output")
    assert {result.stages[name].shape for name in over_keys} == {(2, 4, 5, 6)}
    assert result.stages["output"].shape == (2, 4, 5, 3)
    assert result.visible is not None
    assert result.visible.shape == (2, 4, 5, 6)
    assert result.real.tolist() == [[True] * 5] * 2
    assert set(result.statistics) == set(result.stages)
    assert result.cost.pairs == 2 * 4 * 5 * 6
    assert (result.batches, result.heads, result.rows) == ((0, 1), (0, 1, 2, 3), (0, 1, 2, 3, 4))


def test_a_selection_is_a_part_of_the_whole() -> None:
    whole = attncli.compute(Q, K, V, causal=True, query_offset="bottom-right")
    part = attncli.compute(
        Q,
        K,
        V,
        causal=True,
        query_offset="bottom-right",
        rows=[-1, 0],
        head_index=3,
        batch_index=[1],
        stages=["output", "masked"],
    )
    assert tuple(part.stages) == ("masked", "output")
    for name, values in part.stages.items():
        expected = whole.stages[name][1:2, 3:4, [4, 0]]
        torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)
    assert (part.batches, part.heads, part.rows) == ((1,), (3,), (4, 0))


def test_results_are_frozen() -> None:
    result = attncli.compute(Q, K)
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.rows = ()  # type: ignore[misc]
    with pytest.raises(TypeError):
        result.stages["weights"] = torch.zeros(1)  # type: ignore[index]


def test_statistics_are_of_visible_cells() -> None:
    result = attncli.compute(Q, K, V, key_lengths=[2, 6], stages=["masked"])
    assert result.visible is not None
    seen = result.stages["masked"][result.visible]
    found = result.statistics["masked"]
    assert found.n_masked == 4 * 5 * 4
    assert found.mean == pytest.approx(seen.mean().item(), abs=1e-12)
    assert found.std == pytest.approx(seen.std(correction=0).item(), abs=1e-12)
    assert (found.min, found.max) == (seen.min().item(), seen.max().item())


def test_what_is_visible() -> None:
    assert attncli.compute(Q, K, rows=[1, 3]).visible.tolist() == [[[[True] * 6] * 2] * 4] * 2
    assert attncli.compute(Q, K, V, stages="output").visible is None
    mask = np.random.default_rng(3).random((4, 5, 6)) < 0.5
    some = attncli.compute(
        Q, K, attn_mask=mask, query_lengths=[5, 2], head_index=[3, 1], rows=[4, 0]
    )
    expected = np.stack([mask[[3, 1]][:, [4, 0]]] * 2)
    expected[1, :, 0] = False  # padding
    np.testing.assert_array_equal(some.visible, expected)


def test_padded_queries_are_told_apart() -> None:
    result = attncli.compute(Q, K, V, query_lengths=(5, 2), rows=[0, 4, 2])
    assert result.real.tolist() == [[True, True, True], [True, False, False]]


def same(array: np.ndarray[Any, Any]) -> list[Any]:
    """One array in every form that callers hold it in."""
    reversed_view = np.ascontiguousarray(array[..., ::-1])[..., ::-1]
    read_only = array.copy()
    read_only.flags.writeable = False
    forms = [array.tolist(), torch.tensor(array), torch.tensor(array, requires_grad=True)]
    return [*forms, reversed_view, read_only, array.astype(array.dtype.newbyteorder())]


@pytest.mark.parametrize("form", range(6))
def test_any_form_of_array_gives_the_same(form: int) -> None:
    mask = np.random.default_rng(3).standard_normal((5, 6))
    sinks = np.array([0.5, -1.0, 2.0, 0.0])
    expected = attncli.compute(Q, K, V, attn_mask=mask, sinks=sinks)
    q, k, v, mask_form, sink_form = (same(array)[form] for array in (Q, K, V, mask, sinks))
    result = attncli.compute(q, k, v, attn_mask=mask_form, sinks=sink_form)
    for name, values in expected.stages.items():
        torch.testing.assert_close(result.stages[name], values, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_dtypes_that_numpy_lacks(name: str) -> None:
    low = Q.astype(getattr(ml_dtypes, name))
    exact = torch.tensor(low.astype(np.float64))
    for given in (low, torch.tensor(Q).to(getattr(torch, name))):
        result = attncli.compute(given, given, attn_mask=given[0, 0, :, :5])
        expected = attncli.compute(exact, exact, attn_mask=exact[0, 0, :, :5])
        torch.testing.assert_close(
            result.stages["masked"], expected.stages["masked"], rtol=0, atol=0
        )


FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"key_lengths": 3}, {"key_lengths": (3,)}),
    ({"key_lengths": np.array([3, 4])}, {"key_lengths": (3, 4)}),
    ({"key_lengths": torch.tensor([3, 4])}, {"key_lengths": (3, 4)}),
    ({"query_offset": "top-left"}, {"query_offset": attncli.Corner.TOP_LEFT}),
    ({"query_offset": [2]}, {"query_offset": 2}),
    ({"query_offset": np.int64(2)}, {"query_offset": 2}),
    ({"query_offset": [2, 3]}, {"query_offset": (2, 3)}),
    ({"scale": 2}, {"scale": 2.0}),
    ({"scale": torch.tensor([[[2.0]], [[3.0]]])}, {"scale": (2.0, 3.0)}),
    ({"scale": [2, 0.5]}, {"scale": (2.0, 0.5)}),
    ({"mask_true": "drop"}, {"mask_true": attncli.MaskTrue.DROP}),
    ({"causal": True, "prefix": 1}, {"causal": True, "prefix": 1}),
    ({"temperature": None, "causal": None, "mask_true": None, "attn_mask": None}, {}),
]


@pytest.mark.parametrize(("given", "fields"), FORMS)
def test_options_in_any_form(given: Any, fields: dict[str, Any]) -> None:
    assert read_keywords(given) == AttentionOptions(**fields)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"layout": "dbhs"},
        attncli.UsageError,
        "layout: expected one of bhsd, bshd, sbhd, bhds, bsh, sbh, got 'dbhs'",
    ),
    ({"stages": "logits"}, attncli.UsageError, "stages: expected one of scores, .*got 'logits'"),
    ({"stages": ["capped"]}, attncli.UsageError, "got 'capped'"),
    ({"precision": "float16"}, attncli.UsageError, "precision: expected one of auto, float32"),
    ({"query_offset": "middle"}, attncli.UsageError, "query_offset: expected one of top-left"),
    ({"mask_true": "yes"}, attncli.UsageError, "mask_true: expected one of keep, drop"),
    ({"causal": True}, attncli.UsageError, "query_offset: expected a value"),
    ({"rows": [5]}, attncli.UsageError, "rows: expected an index from -5 to 4, got 5"),
    ({"device": "tpu"}, attncli.UsageError, "device"),
    ({"key_lengths": [1.5]}, TypeError, "expected whole numbers"),
    ({"windows": 3}, TypeError, "expected one of scale, .*got keyword 'windows'"),
    ({"heads": 3}, attncli.UsageError, "heads: expected 4"),
    ({"scale": (1, 2)}, attncli.UsageError, "scale: expected 1 or one per query head"),
    ({"scale": [1, float("nan")]}, attncli.UsageError, "scale: expected a finite number"),
]


@pytest.mark.parametrize(("given", "kind", "message"), REFUSED)
def test_refused_options(given: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        attncli.compute(Q, K, V, **given)


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sinks": [1, 2, 3, 4.0]}])
def test_a_scale_per_head_is_that_scale_for_the_head(
    precision: str, options: dict[str, Any]
) -> None:
    scales = (2.0, 0.0, -0.7, 5.0)
    given = {"causal": True, "query_offset": 1, "precision": precision} | options
    computed = attncli.compute(Q, K, V, scale=scales, **given)
    heads = attncli.entropy(Q, K, V, scale=scales, **given)
    audited = attncli.variance(Q, K, scale=scales, **given)
    found = attncli.check(Q, K, V, scale=scales, actual_output=computed.stages["output"], **given)
    assert found.passed
    for head, scale in enumerate(scales):
        alone = attncli.compute(Q, K, V, scale=scale, **given)
        for stage, values in alone.stages.items():
            assert torch.equal(computed.stages[stage][:, head], values[:, head])
        assert heads.heads[head] == attncli.entropy(Q, K, V, scale=scale, **given).heads[head]
        records = attncli.variance(Q, K, scale=scale, **given).records
        assert audited.records[head] == records[head]


def test_one_scale_cannot_be_fitted_beside_one_per_head() -> None:
    problem = attncli.compute(Q, K, V, scale=(1, 2, 3, 4)).problem
    with pytest.raises(attncli.UsageError, match="scale: expected one number beside fit_scale"):
        fit_scale(problem, Target.WEIGHTS, torch.ones(1))


BAD: list[tuple[Any, str]] = [
    ([[1, 2], [3]], "q: expected an array, got lists of uneven lengths"),
    (np.zeros((2, 2), complex), "got complex128"),
    (torch.zeros(2, 2, dtype=torch.complex64), "got torch.complex64"),
    (np.array([["a"]]), "got <U1"),
    (np.array([[None]]), "got object"),
    (np.zeros((2, 2), np.longdouble), "got float128|got longdouble"),
    (np.array([[np.nan, 1.0]]), "expected finite values, got 1 NaN or inf"),
    (np.zeros(3), r"expected \(S, d\), .* got \(3,\)"),
    (np.zeros((2, 0)), "expected d_k of at least 1"),
]


@pytest.mark.parametrize(("tensor", "message"), BAD)
def test_refused_tensors(tensor: Any, message: str) -> None:
    with pytest.raises(attncli.DataError, match=message):
        attncli.compute(tensor, tensor)


def test_more_than_the_machine_has_is_refused_before_it_is_allocated() -> None:
    long = np.zeros((2_000_000, 1), np.float32)  # 16 TB of float32 per stage
    with pytest.raises(attncli.ResourceError, match=r"^stages: expected .*, got [\d.]+ TB"):
        attncli.compute(long, long)


def test_chosen_rows_of_the_same_fit() -> None:
    long = np.zeros((2_000_000, 1), np.float32)
    result = attncli.compute(long, long, rows=[0, -1], stages=["weights"], causal=True)
    assert result.stages["weights"][0, 0, 0, 0] == 1.0
    assert result.stages["weights"][0, 0, 1, -1] == pytest.approx(1 / 2_000_000)


def test_the_need_is_what_is_kept_and_worked_with(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = attncli.compute(Q, K, V).problem
    everything = {"batches": None, "heads": None, "rows": None}
    need = ask_stages(problem, ["weights"], option="stages", **everything).needed_bytes
    assert need >= 2 * 4 * 5 * 6 * (8 + 1)
    monkeypatch.setattr("attncli.limits.available_memory", lambda: need - 1)
    with pytest.raises(attncli.ResourceError):
        attncli.compute(Q, K, V, stages="weights")
    monkeypatch.setattr("attncli.limits.available_memory", lambda: need)
    attncli.compute(Q, K, V, stages="weights")


@pytest.mark.parametrize(("q_len", "k_len"), [(0, 3), (3, 0), (0, 0)])
def test_empty_axes(q_len: int, k_len: int) -> None:
    result = attncli.compute(np.zeros((q_len, 4)), np.zeros((k_len, 4)), np.ones((k_len, 2)))
    assert result.stages["weights"].shape == (1, 1, q_len, k_len)
    assert result.visible is not None
    assert result.visible.shape == (1, 1, q_len, k_len)
    assert result.stages["output"].tolist() == [[[[0.0, 0.0]] * q_len]]
    assert result.statistics["weights"].mean is None


def test_warnings_are_passed_on() -> None:
    assert attncli.compute(Q, K, V).warnings == ()
    doubtful = attncli.compute(Q, K, V, attn_mask=np.array([0.0, 1, 1, 1, 1, 1]))
    assert "was a boolean mask meant?" in doubtful.warnings[0]


def test_keys_in_a_layout_of_their_own() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 5, 8, generator=generator)  # each (B, H, S, d)
    expected = attncli.compute(q, k, v).stages["output"]
    turned = attncli.compute(q, k.mT, v, k_layout="bhds").stages["output"]
    by_rows = [tensor.permute(2, 0, 1, 3) for tensor in (q, k, v)]
    assert torch.equal(turned, expected)
    assert torch.equal(attncli.compute(*by_rows, layout="sbhd").stages["output"], expected)
    label = attncli.entropy(q, k.mT, k_layout="bhds").heads[0].label
    assert label == attncli.entropy(q, k).heads[0].label
    assert attncli.variance(q, k.mT, k_layout="bhds").records == attncli.variance(q, k).records
    assert attncli.check(q, k.mT, v, k_layout="bhds", actual_output=expected).passed
