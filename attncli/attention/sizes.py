"""The axes of tensors: their lengths, and the orders they lie in memory in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from attncli.attention.options import Layout
from attncli.errors import DataError, UsageError

Tensor = TypeVar("Tensor", bound=Any)
Axes = tuple[int, int, int, int]  # B, H, S, d
Rows = tuple[int, ...] | range  # places on an axis

# What packed layouts are once their heads are split.
PACKED = {Layout.BSH: "bshd", Layout.SBH: "sbhd"}

# No head in use is wider (576 is what latent attention has), and no layer has more heads.
WIDEST = 576
MOST_HEADS = 128
# Up to so many scores, float64 costs less than anyone notices.
FLOAT64_CELLS = 1 << 26


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths of the axes of one attention problem: B, H, S_q, S_k."""

    batch: int
    heads: int
    q_len: int
    k_len: int

    @property
    def cells(self) -> int:
        """B·H·S_q·S_k."""
        return self.batch * self.heads * self.q_len * self.k_len


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomShape:
    """Sizes of random Q, K and V; None follows another size as its comment says.

    Raises:
        UsageError: a negative length, fewer than one batch, head or d_k, or H that H_kv does not
            divide.
    """

    batch: int = 1
    heads: int = 1
    kv_heads: int | None = None  # heads
    q_len: int = 8
    k_len: int | None = None  # q_len
    dk: int = 64
    dv: int | None = None  # dk

    def __post_init__(self) -> None:
        least = {"batch": 1, "heads": 1, "kv_heads": 1, "dk": 1, "q_len": 0, "k_len": 0, "dv": 0}
        for name, fewest in least.items():
            value = getattr(self, name)
            if value is not None and value < fewest:
                raise UsageError(f"«{name}»", f"expected at least {fewest}, got {value}")
        if self.heads % self.key_heads:
            problem = f"expected a divisor of «heads={self.heads}», got {self.kv_heads}"
            raise UsageError("«kv_heads»", problem)

    @property
    def key_heads(self) -> int:
        """H_kv."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def keys(self) -> int:
        """S_k."""
        return self.q_len if self.k_len is None else self.k_len

    @property
    def values(self) -> int:
        """d_v."""
        return self.dk if self.dv is None else self.dv

    @property
    def numbers(self) -> tuple[int, int, int]:
        """How many numbers Q, K and V hold."""
        of_keys = self.batch * self.key_heads * self.keys
        return (
            self.batch * self.heads * self.q_len * self.dk,
            of_keys * self.dk,
            of_keys * self.values,
        )


# The batches and the heads to look at, by their indices; None for all of them.
Chosen = tuple[Sequence[int] | None, Sequence[int] | None]


def places(option: str, wanted: Sequence[int | slice] | None, length: int) -> Rows:
    """The places on an axis of some length that indices and ranges name, each once; None for all.

    Raises:
        UsageError: an index beyond the axis, or a range with nothing in it.
    """
    if wanted is None:
        return range(length)
    found: list[int] = []
    for one in wanted:
        inside = range(length)[one] if isinstance(one, slice) else [one]
        if not all(-length <= index < length for index in inside) or not inside:
            limits = f"from {-length} to {length - 1}" if length else "none, the axis is empty"
            ends = (one.start, one.stop) if isinstance(one, slice) else (one,)
            got = ":".join("" if end is None else str(end) for end in ends)
            raise UsageError(option, f"expected an index {limits}, got {got}")
        found += [index % length for index in inside]
    return tuple(dict.fromkeys(found))


def to_bhsd(tensor: Tensor, role: str, layout: Layout, heads: int | None) -> Tensor:
    """View a tensor, of torch or NumPy, as (B, H, S, d).

    Args:
        tensor: rank 4, 3 without B, or 2 without B and H, in the order of `layout`: (S, d),
            (H, S, d) or (B, H, S, d) for `bhsd`; rank 3 (B, S, H·d) or 2 (S, H·d) for `bsh`.
        role: name for messages: "q", "k", "v".
        layout: order of the axes.
        heads: number of heads that `bsh` and `sbh` pack into their last axis.

    Raises:
        DataError: a rank that the layout does not have.
        UsageError: packed heads without their number, or one that does not divide the width.
    """
    found: Tensor = _unpack(tensor, role, layout, heads) if layout in PACKED else tensor
    if found.ndim not in (2, 3, 4):
        *some, last = (_named(order_of(layout, rank)) for rank in (2, 3, 4))
        problem = f"expected {', '.join(some)} or {last}, got {tuple(tensor.shape)}"
        fused = tensor.ndim == 5 and 3 in tensor.shape
        raise DataError(role, problem, "«qkv» splits Q, K and V fused in one" if fused else "")
    order = list("bh"[: 4 - found.ndim] + order_of(layout, found.ndim))
    found = found[(None,) * (4 - found.ndim)]
    for place, axis in enumerate("bhsd"):
        at = order.index(axis)
        found = found.swapaxes(place, at)
        order[place], order[at] = order[at], order[place]
    return found


def order_of(layout: Layout, rank: int) -> str:
    """The axes of a tensor: letters of "bhsd" in their order; B is left out first, then H."""
    order = PACKED.get(layout, str(layout))
    return "".join(axis for axis in order if axis not in "bh"[: 4 - rank])


def axes_text(layout: Layout) -> str:
    """The axes of a layout for messages: (B, S, H, d), (B, S, H·d)."""
    return _named(order_of(layout, 4)).replace("H, d", "H·d" if layout in PACKED else "H, d")


def _named(order: str) -> str:
    return f"({', '.join(axis if axis == 'd' else axis.upper() for axis in order)})"


def _unpack(tensor: Tensor, role: str, layout: Layout, heads: int | None) -> Tensor:
    """(B, S, H, d) of (B, S, H·d), as a view."""
    shape = tuple(tensor.shape)
    if tensor.ndim not in (2, 3):
        raise DataError(role, f"expected {axes_text(layout)} for «layout={layout}», got {shape}")
    if heads is None:
        raise UsageError(f"«layout={layout}»", "expected «heads» beside it, got none")
    if heads < 1 or shape[-1] % heads:
        option = "«heads»" if role == "q" else "«kv_heads» or «heads»"
        raise UsageError(option, f"expected a divisor of {role}'s width {shape[-1]}, got {heads}")
    split: Tensor = tensor.reshape(*shape[:-1], heads, shape[-1] // heads)
    return split


def layouts_that_fit(
    shapes: Mapping[str, tuple[int, ...]], layout: Layout, k_layout: Layout | None
) -> dict[str, dict[str, Axes]]:
    """Other layouts in which Q, K and V would go together.

    Args:
        shapes: "q", "k" and where there are values "v", as they came.
        layout: order of their axes, as it was taken to be.
        k_layout: that of K, where it has one of its own.

    Returns:
        What to say, as «layout=bshd» → the lengths of the axes (B, H, S, d) of each.
    """
    found: dict[str, dict[str, Axes]] = {}
    for keys in (k_layout, Layout.BHDS):
        for one in (layout, Layout.BHSD, Layout.BSHD, Layout.SBHD):
            if (one, keys) == (layout, k_layout) or one in PACKED:
                continue
            axes = {
                role: _axes(shape, keys if keys is not None and role == "k" else one)
                for role, shape in shapes.items()
            }
            if not _go_together(axes):
                continue
            words = [f"«layout={one}»"] if one is not layout else []
            words += [f"«k_layout={keys}»"] if keys is not k_layout else []
            found.setdefault(" ".join(words), axes)
    return found


def layout_doubts(
    shapes: Mapping[str, tuple[int, ...]], layout: Layout, k_layout: Layout | None = None
) -> list[str]:
    """What to say where another layout than the one assumed fits the shapes better.

    Arguments as for `layouts_that_fit`; the shapes go together as they are. Sequences are longer
    than the other axes, as a rule, and those of queries and keys are alike.
    """
    ranks = {len(shape) for shape in shapes.values()}
    if layout is not Layout.BHSD or len(shapes["q"]) < 3 or not ranks <= {2, 3, 4}:
        return []
    q = _axes(shapes["q"], layout)
    _, heads, q_len, width = q
    k_len = _axes(shapes["k"], k_layout or layout)[2]
    if len(shapes["q"]) == 3 and width > WIDEST:
        axes = "(H, S, d); if heads are packed, (B, S, H·d), say «layout=bsh» and «heads»"
        return [f"q {shapes['q']} is taken as {axes}"]
    better: list[tuple[int, str]] = []
    for words, axes_of in layouts_that_fit(shapes, layout, k_layout).items():
        (_, count, queries, _), keys = axes_of["q"], axes_of["k"][2]
        alike = queries == keys > 1 != count and q_len != k_len
        longer = max(queries, keys) > max(q_len, k_len) and count <= MOST_HEADS
        if min(q_len, k_len) > 0 and "«k_layout" not in words and (longer or alike):
            better.append((max(queries, keys), words))
    if not better:
        return []
    words = max(better, key=lambda pair: pair[0])[1]
    other = Layout(words.strip("«»").partition("=")[2])
    what = f"has {q_len} queries, and k {k_len} keys"
    if other is Layout.BSHD and heads > q_len:
        what = "has more heads than queries"
    elif other is Layout.SBHD and q[0] > q_len:
        what = "has more batches than queries"
    named = _named(order_of(other, len(shapes["q"])))
    return [f"q {q} {what}; if it is {named}, say {words}"]


def _axes(shape: tuple[int, ...], layout: Layout) -> Axes:
    """B, H, S and d of a shape of rank 2 to 4."""
    lengths = dict(zip(order_of(layout, len(shape)), shape, strict=True))
    return lengths.get("b", 1), lengths.get("h", 1), lengths["s"], lengths["d"]


def _go_together(axes: Mapping[str, Axes]) -> bool:
    (batch, heads, _, width), k = axes["q"], axes["k"]
    alike = k[0] == batch and k[3] == width > 0 and k[1] > 0 and heads % k[1] == 0
    return alike and ("v" not in axes or axes["v"][:3] == k[:3])
