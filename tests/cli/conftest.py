"""Tensors in files, and attention computed plainly beside the program."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from plain import Tensors


@pytest.fixture
def tensors() -> Tensors:
    """B=2, H=4, H_kv=2, S_q=5, S_k=7, d_k=8, d_v=6, in float32."""
    rng = np.random.default_rng(7)
    shapes = {"q": (2, 4, 5, 8), "k": (2, 2, 7, 8), "v": (2, 2, 7, 6)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def files(tensors: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, made the working one, with q.npy, k.npy, v.npy and bundle.npz."""
    monkeypatch.chdir(tmp_path)
    for name, array in tensors.items():
        np.save(f"{name}.npy", array)
    np.savez("bundle.npz", **tensors)
    return tmp_path
