"""`attncli.compute`: every stage of attention as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from attncli.analysis.compute import Computed, ask_stages, compute_stages
from attncli.api.arguments import as_problem
from attncli.api.keywords import OptionKeywords, TensorLike, as_indices, as_options
from attncli.attention.options import Layout, Precision


def compute(
    q: TensorLike,
    k: TensorLike,
    v: TensorLike = None,
    *,
    stages: str | Sequence[str] | None = None,
    rows: int | Sequence[int] | None = None,
    head_index: int | Sequence[int] | None = None,
    batch_index: int | Sequence[int] | None = None,
    layout: Layout | str = Layout.BHSD,
    heads: int | None = None,
    kv_heads: int | None = None,
    precision: Precision | str = Precision.AUTO,
    device: str = "auto",
    allow_nonfinite: bool = False,
    **options: Unpack[OptionKeywords],
) -> Computed:
    """Compute attention stage by stage, for everything or for chosen batches, heads and queries.

    >>> result = attncli.compute([[2.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]], [[0.0], [1.0]], scale=1)
    >>> result.stages["weights"]
    tensor([[[[0.8808, 0.1192]]]], dtype=torch.float64)
    >>> result.stages["output"].item()
    0.11920292202211755
    >>> result.statistics["scaled"].max
    2.0

    Args:
        q: (S_q, d_k), (H, S_q, d_k) or (B, H, S_q, d_k), or as `layout` says: a torch tensor, a
            NumPy array or nested lists, of any real dtype.
        k: like q, with S_k in the place of S_q and H_kv in the place of H.
        v: like k, with d_v in the place of d_k; None leaves out the stage `output`.
        stages: some of `scores`, `scaled`, `capped`, `masked`, `weights`, `output`; None for all
            that there are. A stage over keys takes batches × heads × rows × S_k numbers.
        rows: queries to compute, negative ones counted from the end; None for all.
        head_index: query heads, likewise.
        batch_index: batches, likewise.
        layout: "bhsd", "bshd" for (B, S, H, d), or "bsh" for packed (B, S, H·d).
        heads: H, needed where the layout packs heads, checked elsewhere.
        kv_heads: H_kv, likewise; None means `heads`.
        precision: dtype of the arithmetic: "float32", "float64", or "auto", which is float64
            for float64 input or up to 2²⁶ scores.
        device: "auto", "cpu", "cuda" or "cuda:N".
        allow_nonfinite: whether NaN and inf in Q, K and V are let through, as IEEE says.
        options: any field of `AttentionOptions`: causal=True, attn_mask=mask, key_lengths=[5, 3], …

    Raises:
        DataError: shapes that do not fit each other, or NaN and inf that are not allowed.
        UsageError: options that make no sense, or do not fit the shapes.
        ResourceError: a device that is not there, or more memory than there is.
    """
    problem = as_problem(
        q,
        k,
        v,
        as_options(options),
        layout=layout,
        heads=heads,
        kv_heads=kv_heads,
        precision=precision,
        device=device,
        allow_nonfinite=allow_nonfinite,
    )
    asked = ask_stages(
        problem,
        [stages] if isinstance(stages, str) else stages,
        option="stages",
        batches=as_indices(batch_index),
        heads=as_indices(head_index),
        rows=as_indices(rows),
    )
    return compute_stages(asked)
