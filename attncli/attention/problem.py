"""One attention problem: Q, K, V and everything that shapes what is computed from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from attncli.attention.masks.build import build_mask
from attncli.attention.masks.mask import Mask, head_masks
from attncli.attention.nonfinite import (
    MOST_CELLS,
    Products,
    first_overflow,
    origins,
    refuse_nonfinite,
)
from attncli.attention.options import (
    AttentionOptions,
    Layout,
    Precision,
    require_device_name,
    require_heads,
)
from attncli.attention.sizes import (
    FLOAT64_CELLS,
    PACKED,
    Sizes,
    layout_doubts,
    layouts_that_fit,
    to_bhsd,
)
from attncli.columns import column
from attncli.errors import DataError, ResourceError, UsageError, in_python

_SCAN_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class GivenWeights:
    """Weights in the place of Q and K."""

    values: torch.Tensor  # (B, H, S_q, S_k), in the dtype they came in
    lowest: float | None  # what their rows sum to, but for empty ones; None where all are empty
    highest: float | None
    zeros_hidden: bool  # whether a weight of 0 means that the query does not see the key


@dataclass(frozen=True, slots=True)
class Problem:
    """Checked input of every analysis.

    Attributes:
        q: (B, H, S_q, d_k), in the dtype it came in.
        k: (B, H_kv, S_k, d_k).
        v: (B, H_kv, S_k, d_v); None where there are no values.
        mask: which key each query sees, and what is added to its logit.
        scale: multiplies the scores, one number or one per query head.
        temperature: divides them.
        softcap: c of c·tanh(x/c), a normal number of `dtype`; None for none.
        sinks: float64 (H,), one logit per query head; None for none.
        dtype: what arithmetic is done in, float32 or float64.
        device: where it is done.
        marked_warnings: what the reader of the results should know, options named as «causal».
        given: the weights themselves, where these are all there is; q and k are zeros then.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor | None
    mask: Mask
    scale: float | tuple[float, ...]
    temperature: float
    softcap: float | None
    sinks: torch.Tensor | None
    dtype: torch.dtype
    device: torch.device
    marked_warnings: tuple[str, ...] = ()
    given: GivenWeights | None = None

    def mask_on_device(self) -> Mask:
        """The mask with torch tensors on the device of the arithmetic."""
        return self.mask.moved(partial(torch.as_tensor, device=self.device))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the reader of the results should know, options named as keywords."""
        return tuple(map(in_python, self.marked_warnings))

    @property
    def sizes(self) -> Sizes:
        """Lengths of the axes."""
        return self.mask.sizes

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.k.shape[1]

    @property
    def dk(self) -> int:
        """Width of one query or key."""
        return self.q.shape[-1]

    @property
    def dv(self) -> int | None:
        """Width of one value; None where there are no values."""
        return None if self.v is None else self.v.shape[-1]

    @property
    def numpy_dtype(self) -> np.dtype[np.floating[Any]]:
        """NumPy's name for the dtype of the arithmetic."""
        return np.dtype(np.float32 if self.dtype == torch.float32 else np.float64)

    def kv_head(self, head: int) -> int:
        """The key and value head that a query head uses: heads are interleaved, not tiled."""
        return head // (self.sizes.heads // self.kv_heads)

    def scale_of(self, head: int) -> float:
        """The scale of one query head."""
        return self.scale[head] if isinstance(self.scale, tuple) else self.scale

    def scales_of(self, heads: range) -> float | torch.Tensor:
        """The scale of all these query heads, or theirs (heads, 1, 1) where each has its own."""
        if not isinstance(self.scale, tuple):
            return self.scale
        chosen = torch.tensor(self.scale[heads.start : heads.stop], dtype=torch.float64)
        return self.cast(chosen[:, None, None])

    def cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in the dtype and on the device of the arithmetic."""
        return tensor.to(device=self.device, dtype=self.dtype)


def make_problem(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    options: AttentionOptions,
    *,
    layout: Layout = Layout.BHSD,
    k_layout: Layout | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    precision: Precision = Precision.AUTO,
    device: str = "auto",
    allow_nonfinite: bool = False,
    came_as: Sequence[torch.dtype] | None = None,
) -> Problem:
    """Check Q, K and V against each other and the options.

    Args:
        q: (S_q, d_k), (H, S_q, d_k) or (B, H, S_q, d_k), or as `layout` says.
        k: like q, with S_k in the place of S_q and H_kv in the place of H; one batch serves all.
        v: like k, with d_v in the place of d_k; None where there are no values.
        options: what shapes attention.
        layout: order of the axes.
        k_layout: that of k, where it has one of its own.
        heads: H, needed where `layout` packs heads, checked elsewhere.
        kv_heads: H_kv, likewise; None means `heads`.
        precision: dtype of the arithmetic.
        device: "auto", "cpu", "cuda" or "cuda:N".
        allow_nonfinite: whether NaN and inf in the tensors are let through.
        came_as: dtypes of the input, where Q, K and V were computed from it in another one.

    Raises:
        DataError: shapes that do not fit each other, or NaN and inf that are not allowed.
        UsageError: options that do not fit the shapes.
        ResourceError: a device that is not there.
    """
    given = {"q": q, "k": k} if v is None else {"q": q, "k": k, "v": v}
    counts = {"q": heads, "k": kv_heads or heads, "v": kv_heads or heads}
    orders = {"q": layout, "k": k_layout or layout, "v": layout}
    ready = {r: to_bhsd(tensor, r, orders[r], counts[r]) for r, tensor in given.items()}
    shapes = {role: tuple(tensor.shape) for role, tensor in given.items()}
    warnings = []
    try:
        _check_shapes(ready)
    except DataError as error:
        raise _with_layout(error, shapes, layout, k_layout) from None
    if heads is None:
        warnings += layout_doubts(shapes, layout, k_layout)
    _check_heads(ready, heads, kv_heads)
    if not allow_nonfinite:
        for role, tensor in ready.items():
            refuse_nonfinite(tensor, role)
    warnings += _share_batch(ready)
    batch, query_heads, q_len, dk = ready["q"].shape
    sizes = Sizes(batch, query_heads, q_len, ready["k"].shape[2])
    require_heads(options, query_heads)
    scale = 1 / math.sqrt(dk) if options.scale is None else options.scale
    dtype = compute_dtype(precision, came_as or [t.dtype for t in ready.values()], sizes)
    factor = max(map(abs, np.atleast_1d(scale)), default=0.0) / options.temperature
    reach = partial(_reach, ready["q"], ready["k"], factor, options.softcap or math.inf)
    mask = build_mask(options, sizes, itemsize=dtype.itemsize, reach=reach)
    warnings += mask.warnings
    scales = scale if isinstance(scale, tuple) else (scale,) * query_heads
    factors = [each / options.temperature for each in scales]
    capped = options.softcap is not None
    products = Products(ready["q"], ready["k"], mask, factors, capped, dtype)
    if allow_nonfinite:
        warnings += origins(products, ready.get("v"))
    warnings += _overflow(products, "scaled scores")
    return Problem(
        q=ready["q"],
        k=ready["k"],
        v=ready.get("v"),
        mask=mask,
        scale=scale,
        temperature=options.temperature,
        softcap=None if options.softcap is None else max(options.softcap, torch.finfo(dtype).tiny),
        sinks=_sinks(options),
        dtype=dtype,
        device=choose_device(device),
        marked_warnings=tuple(warnings),
    )


def _reach(
    q: torch.Tensor, k: torch.Tensor, factor: float, softcap: float, harmless: float
) -> float:
    """By how much capped logits of one row may differ, at most; exact where that is much.

    Args:
        q: (B, H, S_q, d_k).
        k: (B, H_kv, S_k, d_k).
        factor: multiplies Q·K, at most.
        softcap: +inf for none.
        harmless: a difference that would change nothing.
    """
    if not q.numel() or not k.numel():
        return 0.0
    widest, exact = 0.0, 0.0
    heads = [(b, h, h // (q.shape[1] // k.shape[1])) for b, h in np.ndindex(*q.shape[:2])]
    for batch, head, shared in heads:
        norms = [of.detach().float().norm(dim=-1) for of in (q[batch, head], k[batch, shared])]
        longest = [float(norm.nan_to_num(0.0, 0.0).amax()) for norm in norms]
        widest = max(widest, 2 * longest[0] * longest[1] * factor)
    if min(widest, 2 * softcap) <= harmless:
        return min(widest, 2 * softcap)
    for batch, head, shared in heads:
        keys = k[batch, shared].detach().float().T
        step = max(1, _SCAN_ELEMENTS // keys.shape[1])
        for rows in torch.split(q[batch, head].detach(), step):
            logits = (rows.float() @ keys * factor).nan_to_num(0.0, 0.0, 0.0)
            exact = max(exact, float((logits.amax(-1) - logits.amin(-1)).amax()))
    return min(exact, 2 * softcap)


def score_warnings(problem: Problem) -> list[str]:
    """What to say of scores that overflow, whatever they are scaled to; nothing where none do."""
    ones = (1.0,) * problem.sizes.heads
    return _overflow(
        Products(problem.q, problem.k, problem.mask, ones, True, problem.dtype), "scores"
    )


def _overflow(products: Products, stage: str) -> list[str]:
    found, is_sure = first_overflow(products)
    name = str(products.dtype).removeprefix("torch.")
    advice = "; «precision=float64» holds more" if products.dtype != torch.float64 else ""
    if found is None:
        few = f"some {MOST_CELLS:,} cells that could were looked at, and none does"
        return [] if is_sure else [f"{stage} may overflow {name}: {few}{advice}"]
    batch, head, query = found
    where = f"first at query {query} of batch {batch}, head {head}"
    return [f"{stage} overflow {name}, {where}{advice}"]


def compute_dtype(
    precision: Precision, came_as: Sequence[torch.dtype], sizes: Sizes
) -> torch.dtype:
    """The dtype of the arithmetic: under "auto" float64 for few cells or float64 input."""
    if precision is not Precision.AUTO:
        return torch.float32 if precision is Precision.FLOAT32 else torch.float64
    exact = torch.float64 in came_as
    return torch.float64 if exact or sizes.cells <= FLOAT64_CELLS else torch.float32


def choose_device(name: str) -> torch.device:
    """The device of that name; "auto" takes CUDA where there is one.

    Raises:
        UsageError: a name that is none.
        ResourceError: a device that this machine does not have.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    require_device_name(name)
    kind, _, index = name.partition(":")
    present = torch.cuda.device_count()
    if kind == "cuda" and int(index or 0) >= present:
        devices = f"one of {present} CUDA devices" if present else "cpu: this torch sees no CUDA"
        raise ResourceError("«device»", f"expected {devices}, got {name}")
    return torch.device(name)


def _with_layout(
    error: DataError, shapes: dict[str, tuple[int, ...]], layout: Layout, k_layout: Layout | None
) -> DataError:
    """The same error, with the layout in which the shapes go together, or heads that are packed."""
    advice = error.advice
    ranks = {len(shape) for shape in shapes.values()}
    q_width, k_width = shapes["q"][-1], shapes["k"][-1]
    if layout in PACKED:
        return error
    if fitting := layouts_that_fit(shapes, layout, k_layout):
        advice = f"with {next(iter(fitting))} they go together"
    elif max(ranks) < 4 and q_width > k_width > 0 and q_width % k_width == 0:
        advice = "if heads are packed, (B, S, H·d): «layout=bsh» with «heads» and «kv_heads»"
    return DataError(error.where, error.problem, advice)


def _check_shapes(ready: dict[str, torch.Tensor]) -> None:
    """Refuse Q, K and V of shapes that do not go together."""
    q, k, v = ready["q"], ready["k"], ready.get("v")
    for role, tensor in ready.items():
        if tensor.is_complex():
            raise DataError(role, f"expected real numbers, got {tensor.dtype}")
        if tensor.shape[0] not in (1, q.shape[0]):
            raise DataError(role, f"expected B={q.shape[0]} like q, got {tuple(tensor.shape)}")
    if q.shape[-1] == 0:
        raise DataError("q", f"expected d_k of at least 1, got shape {tuple(q.shape)}")
    if k.shape[-1] != q.shape[-1]:
        raise DataError(
            "k", f"expected d_k={q.shape[-1]} like q {tuple(q.shape)}, got {tuple(k.shape)}"
        )
    if v is not None and v.shape[1:3] != k.shape[1:3]:
        raise DataError(
            "v",
            f"expected H_kv={k.shape[1]} and S_k={k.shape[2]} like k {tuple(k.shape)}, "
            f"got {tuple(v.shape)}",
        )
    if q.shape[1] == 0 or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise DataError(
            "k",
            f"expected a number of heads that divides q's {q.shape[1]}, got {k.shape[1]}",
            "heads are the second axis from the left; «layout=bshd» if they are the third",
        )


def _share_batch(ready: dict[str, torch.Tensor]) -> list[str]:
    """Let every batch of Q see the only one that K or V have; return what is said of it."""
    batch = ready["q"].shape[0]
    shared = [role for role in ready if ready[role].shape[0] != batch]
    for role in shared:
        ready[role] = ready[role].expand(batch, -1, -1, -1)
    holds = "hold" if len(shared) > 1 else "holds"
    return [f"{' and '.join(shared)} {holds} 1 batch, shared by all {batch} of q"] if shared else []


def _check_heads(ready: dict[str, torch.Tensor], heads: int | None, kv_heads: int | None) -> None:
    """Refuse declared numbers of heads that the tensors do not have."""
    found = {"«heads»": (heads, ready["q"]), "«kv_heads»": (kv_heads, ready["k"])}
    for option, (declared, tensor) in found.items():
        if declared is not None and declared != tensor.shape[1]:
            raise UsageError(
                option,
                f"expected {tensor.shape[1]} for tensors of {tuple(tensor.shape)}, got {declared}",
            )


def _sinks(options: AttentionOptions) -> torch.Tensor | None:
    if options.sinks is None:
        return None
    sinks = torch.as_tensor(options.sinks, dtype=torch.float64)
    if not bool(torch.isfinite(sinks).all()):
        raise UsageError("«sinks»", "expected finite logits, got NaN or inf")
    return sinks


@dataclass(frozen=True, slots=True)
class Cost:
    """Operations (one multiply-add is two) and bytes of the whole problem, whatever is selected."""

    pairs: int = column(None, description="B·H·S_q·S_k")
    visible_pairs: int = column(None, description="those of them that real queries see")
    scores_operations: int = column(None, description="2·pairs·d_k")
    output_operations: int = column(None, description="2·pairs·d_v; 0 without values")
    visible_operations: int = column(
        None, description="both, for the visible pairs alone: what a kernel that skips needs"
    )
    softmax_exponentials: int = column(None, description="one per pair")
    input_bytes: int = column(None, description="Q, K and V in the dtype of the arithmetic")
    matrix_bytes: int = column(None, description="one (B, H, S_q, S_k) matrix in that dtype")
    streamed_bytes: int = column(
        None,
        description="what is kept beside the inputs when that matrix is never built: the output, "
        "and a maximum and a sum per row",
    )


def cost_of(problem: Problem) -> Cost:
    """Count what the problem costs, by 2·S_q·S_k·d_k for the scores and 2·S_q·S_k·d_v after."""
    sizes, width = problem.sizes, problem.dtype.itemsize
    dv = problem.dv or 0
    pairs = sizes.cells
    # From the intervals of each batch and head, or counted where a mask file is more than that.
    found = head_masks(problem.mask)
    alike = sizes.batch * sizes.heads // max(1, len(found))
    visible = alike * sum(view.marginals.kept for _, _, view in found)
    tensors = [problem.q, problem.k] + ([] if problem.v is None else [problem.v])
    rows = sizes.batch * sizes.heads * sizes.q_len
    return Cost(
        pairs=pairs,
        visible_pairs=visible,
        scores_operations=2 * pairs * problem.dk,
        output_operations=2 * pairs * dv,
        visible_operations=2 * visible * (problem.dk + dv),
        softmax_exponentials=pairs,
        input_bytes=width * sum(tensor.numel() for tensor in tensors),
        matrix_bytes=width * pairs,
        streamed_bytes=width * rows * (dv + 2),
    )
