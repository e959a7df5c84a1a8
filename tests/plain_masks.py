"""Masks by plain loops over the rules of visibility, written apart from the package."""

from __future__ import annotations

from typing import Any

import numpy as np


def plain_mask(q_len: int, k_len: int, offset: int = 0, **rules: Any) -> np.ndarray:
    """Bool (S_q, S_k): True where every rule lets query i, at position i + offset, see key j."""
    visible = np.zeros((q_len, k_len), bool)
    for i in range(q_len):
        for j in range(k_len):
            visible[i, j] = all(_obeys(name, rules, i + offset, j, k_len) for name in rules)
    return visible


def _obeys(name: str, rules: dict[str, Any], p: int, j: int, k_len: int) -> bool:
    value = rules[name]
    if name == "causal":
        return not value or j <= p or j < rules.get("prefix", 0)
    if name == "left_window":
        return j >= p - value or j < rules.get("sink_window", 0)
    if name == "right_window":
        return j <= p + value
    if name == "dilation":
        return (p - j) % value == 0
    if name == "key_length":
        return j < value
    if name == "keep":
        return bool(value[j])
    if name == "segments":
        return 0 <= p < k_len and value[p] == value[j]
    assert name in ("prefix", "sink_window")
    return True  # they only loosen other rules
