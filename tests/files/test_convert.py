"""From stored bytes to numbers: what is cast, what is declared, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from attncli.errors import DataError, UsageError
from attncli.files.tensor import FLOATS, StoredTensor, as_float, bfloat16_bits
from attncli.files.torch_tensors import as_torch, torch_dtype


def stored(array: np.ndarray, dtype: str | None = None) -> StoredTensor:
    return StoredTensor("x.npy", None, dtype or array.dtype.name, array)


def test_casting_on_loading() -> None:
    import torch

    tensor = as_torch(stored(np.array([1.0, 1e6, -1e6], np.float32)), "float16")
    assert tensor.dtype == torch.float16
    assert tensor.tolist() == [1, float("inf"), float("-inf")]
    assert as_torch(stored(np.array([True, False])), "float64").tolist() == [1, 0]


def test_integers_are_kept_exactly() -> None:
    large = np.array([2**63 - 1, -(2**63), 2**53 + 1])
    assert as_torch(stored(large)).tolist() == large.tolist()
    assert as_torch(stored(np.array([2**64 - 1], np.uint64))).tolist() == [2**64 - 1]
    assert as_torch(stored(np.array([65535], np.uint16)), "float32").tolist() == [65535]


def test_undeclared_bytes_must_be_declared() -> None:
    two = stored(np.array([0x3FC0], np.uint16), "|V2")
    assert as_torch(two, "bfloat16").tolist() == [1.5]
    for wrong in (None, "float32", "float16"):
        with pytest.raises(DataError, match=r"^x\.npy: expected a named element type, got \|V2"):
            as_torch(two, wrong)
    with pytest.raises(DataError) as caught:
        as_float(two)
    assert caught.value.advice == "If they are bfloat16, say so: «dtype=bfloat16»."
    one = stored(np.array([0x38], np.uint8), "|V1")
    assert as_torch(one, "float8_e4m3fn").tolist() == [1]
    with pytest.raises(DataError, match=r"got \|V1, 1 raw bytes"):
        as_torch(one, "bfloat16")


def test_memory_is_shared_where_torch_can() -> None:
    for array in (np.zeros((2, 3)), np.zeros((4, 6))[::2, ::3], np.zeros((2, 3)).T):
        tensor = as_torch(stored(array))
        array[0, 1] = 7
        assert tensor[0, 1] == 7


def test_arrays_that_torch_cannot_share_are_copied() -> None:
    fields = np.zeros(3, [("a", "f4"), ("b", "u1")])
    fields["a"] = [1, 2, 3]
    frozen = np.arange(3.0)
    frozen.flags.writeable = False
    arrays = [np.arange(3.0)[::-1], fields["a"], frozen, np.arange(3.0).astype(">f8")]
    for array in arrays:
        assert as_torch(stored(array)).tolist() == array.tolist()


@pytest.mark.parametrize("name", [name for name in FLOATS if name.startswith("float8")])
def test_every_float8_is_what_torch_makes_of_it(name: str) -> None:
    import torch

    every = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(every).view(getattr(torch, name)).to(torch.float32).numpy()
    np.testing.assert_array_equal(as_float(stored(every, name)), expected)


def test_other_types_are_refused() -> None:
    for convert in (as_torch, as_float):
        with pytest.raises(DataError, match="got complex64"):
            convert(stored(np.zeros(2, np.complex64)))


def test_torch_dtype() -> None:
    import torch

    assert [torch_dtype(name) for name in FLOATS] == [getattr(torch, name) for name in FLOATS]
    expected = r"^dtype: expected one of float64, float32"
    short = {"half": torch.float16, "FP16": torch.float16, "bf16": torch.bfloat16}
    assert {name: torch_dtype(name) for name in short} == short
    for name in ("int64", "fp8", "\x1b[31m", "Tensor"):
        with pytest.raises(UsageError, match=expected) as caught:
            torch_dtype(name)
        assert str(caught.value).isprintable()


def test_rounding_to_bfloat16_is_that_of_torch() -> None:
    import torch

    generator = np.random.default_rng(6)
    values = generator.standard_normal(2000) * 10.0 ** generator.integers(-30, 39, 2000)
    values = np.concatenate([values, [1.00390625, 1.01171875, -np.inf, 3.4e38, -3.3961e38]])
    expected = torch.tensor(values.astype(np.float32)).bfloat16().view(torch.uint16).numpy()
    np.testing.assert_array_equal(bfloat16_bits(values), expected)
