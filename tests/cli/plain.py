"""Attention as a textbook writes it, in NumPy alone: what the program is judged by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensors = dict[str, NDArray[Any]]
Array = NDArray[Any]
Run = Callable[..., Any]


def attention(q: Array, k: Array, v: Array, visible: Array | None = None) -> Tensors:
    """Every stage in float64, key and value heads repeated for the query heads that share them."""
    q, k, v = (tensor.astype(np.float64) for tensor in (q, k, v))
    share = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, share, axis=1), np.repeat(v, share, axis=1)
    scores = np.einsum("bhid,bhjd->bhij", q, k)
    scaled = scores / np.sqrt(q.shape[-1])
    seen = (
        np.ones(scores.shape, bool) if visible is None else np.broadcast_to(visible, scores.shape)
    )
    masked = np.where(seen, scaled, -np.inf)
    with np.errstate(invalid="ignore"):
        exps = np.exp(masked - masked.max(-1, keepdims=True))
    exps = np.where(seen.any(-1, keepdims=True), exps, 0)
    weights = exps / np.maximum(exps.sum(-1, keepdims=True), np.finfo(float).tiny)
    output = weights @ v
    names = ("scores", "scaled", "masked", "weights", "output")
    return dict(zip(names, (scores, scaled, masked, weights, output), strict=True))


def assert_stages(found: Any, expected: Tensors, *, atol: float = 1e-12) -> None:
    """Every expected stage is there, with these values; null stands for what is not finite."""
    for name, array in expected.items():
        values = np.array(found["stages"][name]["values"], dtype=np.float64)
        finite = np.isfinite(array)
        np.testing.assert_array_equal(np.isnan(values), ~finite, err_msg=name)
        np.testing.assert_allclose(values[finite], array[finite], atol=atol, rtol=0, err_msg=name)
