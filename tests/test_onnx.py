"""The 93 `Attention` cases of the ONNX backend tests, through the command line."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx.backend.test.case.node import collect_testcases

INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")
Run = Callable[..., Any]
Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class Case:
    """One case: attributes of the node, its inputs and what it must put out."""

    name: str
    attributes: dict[str, Any]
    inputs: Arrays
    expected: Arrays
    rtol: float
    atol: float

    @property
    def packed(self) -> bool:
        return self.inputs["Q"].ndim == 3

    @property
    def q_len(self) -> int:
        return int(self.inputs["Q"].shape[-2])

    @property
    def needs_positions(self) -> bool:
        windows = ("left_window_size", "right_window_size")
        bounded = any(self.attributes.get(name, -1) >= 0 for name in windows)
        return bounded or bool(self.attributes.get("is_causal", 0))


def named(roles: tuple[str, ...], names: Any, declared: Any, arrays: Any) -> Arrays:
    """Arrays by the role that their name plays in the node; a role left out has no name."""
    values = {tensor.name: array for tensor, array in zip(declared, arrays, strict=True)}
    return {role: values[name] for role, name in zip(roles, names, strict=False) if name}


def read_case(case: Any) -> Case:
    graph = case.model.graph
    (node,) = graph.node
    ((given, expected),) = case.data_sets
    low = any(array.dtype.itemsize == 2 for array in given)
    return Case(
        name=case.name.removeprefix("test_attention_"),
        attributes={a.name: onnx.helper.get_attribute_value(a) for a in node.attribute},
        inputs=named(INPUTS, node.input, graph.input, given),
        expected=named(OUTPUTS, node.output, graph.output, expected),
        # Cases in 16 bits were rounded at every step; computed exactly they differ by so much.
        rtol=2e-2 if low else case.rtol,
        atol=2e-2 if low else case.atol,
    )


def collect() -> list[Case]:
    with warnings.catch_warnings():  # the package's own arithmetic warns of its infinities
        warnings.simplefilter("ignore")
        found = collect_testcases("Attention")
    return [read_case(case) for case in found if not case.name.endswith("_expanded")]


CASES = collect()


def with_past(case: Case, role: str, past: str) -> np.ndarray[Any, Any]:
    """Keys or values behind those of the cache, in the layout of the case."""
    new = case.inputs[role]
    if past not in case.inputs:
        return new
    old = case.inputs[past]
    if case.packed:
        old = old.transpose(0, 2, 1, 3).reshape(old.shape[0], old.shape[2], -1)  # (B, P, H·d)
    return np.concatenate([old, new], axis=-2)


def mask_of(case: Case, k_len: int) -> np.ndarray[Any, Any]:
    """The mask as it comes, padded to S_k with "masked"."""
    mask = case.inputs["attn_mask"]
    if mask.dtype == ml_dtypes.bfloat16:
        mask = mask.astype(np.float32)
    beyond = [(0, 0)] * (mask.ndim - 1) + [(0, k_len - mask.shape[-1])]
    return np.pad(mask, beyond, constant_values=False if mask.dtype == bool else -np.inf)


def offset_of(case: Case) -> str:
    """Where query 0 stands: behind the cache, or so that the last query is the last real key."""
    if "nonpad_kv_seqlen" in case.inputs:
        return ",".join(str(n - case.q_len) for n in case.inputs["nonpad_kv_seqlen"])
    past = case.inputs.get("past_key")
    return "top-left" if past is None else str(past.shape[2])


def options_of(case: Case) -> list[str]:
    """The attributes of the node as options of the command line."""
    given = case.attributes
    options = ["--causal"] if given.get("is_causal") else []
    if case.packed:
        heads, kv_heads = given["q_num_heads"], given["kv_num_heads"]
        options += ["--layout=bsh", f"--heads={heads}", f"--kv-heads={kv_heads}"]
    for name in ("scale", "softcap"):
        if given.get(name):
            options.append(f"--{name}={given[name]}")
    for side in ("left", "right"):
        if given.get(f"{side}_window_size", -1) >= 0:
            options.append(f"--{side}-window={given[f'{side}_window_size']}")
    if case.needs_positions:
        options.append(f"--query-offset={offset_of(case)}")
    if "nonpad_kv_seqlen" in case.inputs:
        options.append("--key-lengths=" + ",".join(map(str, case.inputs["nonpad_kv_seqlen"])))
    return options


def stage_of(case: Case) -> str:
    """The stage that `qk_matmul_output` is."""
    mode = case.attributes.get("qk_matmul_output_mode", 0)
    capped = "capped" if case.attributes.get("softcap") else "scaled"
    return ("scaled", capped, "masked", "weights")[mode]


def write_inputs(case: Case, folder: Path) -> list[str]:
    """Q, K, V and the mask as files; the arguments that name them."""
    k, v = with_past(case, "K", "past_key"), with_past(case, "V", "past_value")
    for name, array in {"q": case.inputs["Q"], "k": k, "v": v}.items():
        np.save(folder / f"{name}.npy", array)
    arguments = [str(folder / f"{name}.npy") for name in "qkv"]
    if case.inputs["Q"].dtype == ml_dtypes.bfloat16:
        arguments.append("--dtype=bfloat16")
    if "attn_mask" in case.inputs:
        np.save(folder / "mask.npy", mask_of(case, k.shape[-2]))
        arguments.append(f"--attn-mask={folder / 'mask.npy'}")
    return arguments


def assert_close(case: Case, actual: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    np.testing.assert_allclose(
        actual, expected.astype(np.float64), rtol=case.rtol, atol=case.atol, equal_nan=False
    )


def test_there_are_93_cases_and_every_one_differs() -> None:
    assert len(CASES) >= 93
    assert len({case.name for case in CASES}) == len(CASES)
    assert sum("qk_matmul_output" in case.expected for case in CASES) >= 18


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_onnx_case(case: Case, run: Run, tmp_path: Path) -> None:
    stages = ["output", *([stage_of(case)] if "qk_matmul_output" in case.expected else [])]
    arguments = [*write_inputs(case, tmp_path), *options_of(case)]
    arguments += [f"--stage={','.join(stages)}", f"--save={tmp_path / 'out.npz'}", "--format=json"]

    document = run("compute", *arguments).json

    with np.load(tmp_path / "out.npz") as saved:
        found = dict(saved)
    assert set(found) == set(stages)
    output = found["output"]  # (B, H, S_q, d_v)
    if case.packed:
        output = output.transpose(0, 2, 1, 3).reshape(case.expected["Y"].shape)
    assert_close(case, output, case.expected["Y"])
    if "qk_matmul_output" in case.expected:
        assert_close(case, found[stages[1]], case.expected["qk_matmul_output"])
    for name in stages:
        printed = np.array(document["data"]["stages"][name]["values"], dtype=np.float64)
        finite = np.where(np.isfinite(found[name]), found[name], np.nan)
        np.testing.assert_array_equal(printed, finite)


@pytest.mark.parametrize(
    "case", [case for case in CASES if "past_key" in case.inputs], ids=lambda case: case.name
)
def test_the_cache_is_joined_as_the_standard_joins_it(case: Case) -> None:
    """Guards the map above: wrong joining could otherwise be made good by a wrong offset."""
    for role, past, present in (
        ("K", "past_key", "present_key"),
        ("V", "past_value", "present_value"),
    ):
        expected = case.expected[present]
        if case.packed:
            batch, _, length, _ = expected.shape
            expected = expected.transpose(0, 2, 1, 3).reshape(batch, length, -1)
        np.testing.assert_array_equal(with_past(case, role, past), expected)
