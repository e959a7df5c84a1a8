"""Where Q, K and V come from, as a user says it; loads nothing, so that help is fast.

None means "not given".
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, ClassVar

from attncli.attention.options import OPTION_NAMES, Layout, WeightsLayout, option


@dataclass(frozen=True, slots=True)
class FileOptions:
    """Which files Q, K and V come from, and how to read them."""

    panel: ClassVar[str] = "Inputs"

    files: list[str] | None = option(
        None,
        "Q, K and V files in this order, or a bundle with tensors named q, k, v; "
        "'-' is standard input.",
        "FILE",
        positional=True,
    )
    q: str | None = option(None, "The queries.", "FILE[::NAME]")
    k: str | None = option(None, "The keys.", "FILE[::NAME]")
    v: str | None = option(None, "The values.", "FILE[::NAME]")
    qkv: str | None = option(
        None,
        "Q, K and V fused in one tensor: it is split, with «heads» where packed.",
        "FILE[::NAME]",
    )
    group: list[str] | None = option(None, "Analyse only these groups of a bundle.", "NAME")
    x: str | None = option(None, "Project X (S, d) or (B, S, d) first.", "FILE")
    wq: str | None = option(None, "W_Q for «x».", "FILE")
    wk: str | None = option(None, "W_K for «x».", "FILE")
    wv: str | None = option(None, "W_V for «x».", "FILE")
    wo: str | None = option(None, "W_O, adds the stage 'projected'.", "FILE")
    bq: str | None = option(None, "Bias after «wq», (H·d_k).", "FILE")
    bk: str | None = option(None, "Bias after «wk».", "FILE")
    bv: str | None = option(None, "Bias after «wv».", "FILE")
    bo: str | None = option(None, "Bias after «wo».", "FILE")
    weights_layout: WeightsLayout = option(
        WeightsLayout.IN_OUT, "in-out: x @ w; out-in: the weight of an nn.Linear."
    )
    layout: Layout = option(
        Layout.BHSD,
        "Order of the axes: bhsd is (B, H, S, d); bsh and sbh pack heads, (B, S, H·d).",
    )
    k_layout: Layout | None = option(None, "That of K, if another: bhds is (B, H, d, S).")
    heads: int | None = option(None, "Query heads.", "H")
    kv_heads: int | None = option(None, "Key and value heads. [default: H]", "H")
    dtype: str | None = option(
        None, "Cast on loading; of 16-bit integers, a 16-bit float says what bits they are.", "NAME"
    )
    allow_nonfinite: bool = option(False, "Carry on with NaN and inf, as IEEE says.")


@dataclass(frozen=True, slots=True)
class InputOptions(FileOptions):
    """Where Q, K and V come from: files, or random draws of these sizes."""

    batch: int | None = option(None, "Random tensors: batches. [default: 1]", "B")
    q_len: int | None = option(None, "Random tensors: S_q. [default: 8]", "N")
    k_len: int | None = option(None, "Random tensors: S_k. [default: 8]", "N")
    dk: int | None = option(None, "Random tensors: d_k. [default: 64]", "N")
    dv: int | None = option(None, "Random tensors: d_v. [default: d_k]", "N")
    seed: int | None = option(None, "Random tensors: the seed. [default: 0]", "N")


class AttentionWords(SimpleNamespace):
    """What is said of each field of `AttentionOptions`, as typed; None where nothing is."""

    panel: ClassVar[str] = "What shapes attention"


def defaults_of(options: Any) -> dict[str, Any]:
    """The default of every option of a group."""
    if isinstance(options, AttentionWords):
        return dict.fromkeys(OPTION_NAMES)
    return {entry.name: entry.default for entry in fields(options)}
