"""Where NaN and infinities enter, which rows they reach, and where arithmetic makes them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np
import torch
from numpy.typing import NDArray

from attncli import ranks
from attncli.attention.masks.interval_mask import SortedIntervals
from attncli.attention.masks.mask import HeadMask, Mask
from attncli.errors import DataError

_SCAN_ELEMENTS = 1 << 22
# How many of a tensor's cells are named.
_NAMED = 3

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Broken:
    """What is not finite in one tensor.

    Attributes:
        role: which tensor.
        nan, posinf, neginf: how many elements.
        first: indices (…, row, column) of the first ones.
        rows: bool (…, S), in which rows.
    """

    role: str
    nan: int
    posinf: int
    neginf: int
    first: tuple[tuple[int, ...], ...]
    rows: Flags

    def __add__(self, other: Broken) -> Broken:
        """What two parts of the tensor hold."""
        return Broken(
            role=self.role,
            nan=self.nan + other.nan,
            posinf=self.posinf + other.posinf,
            neginf=self.neginf + other.neginf,
            first=tuple(sorted(self.first + other.first)[:_NAMED]),
            rows=self.rows | other.rows,
        )

    @property
    def count(self) -> int:
        """How many elements."""
        return self.nan + self.posinf + self.neginf

    @property
    def kinds(self) -> str:
        """In words: "2 NaN and 1 inf"."""
        counts = {"NaN": self.nan, "inf": self.posinf, "-inf": self.neginf}
        *most, last = [f"{count} {name}" for name, count in counts.items() if count]
        return f"{', '.join(most)} and {last}" if most else last

    @property
    def places(self) -> str:
        """The first of them: "q[0, 2, 17, 5] and 2 more"."""
        named = ", ".join(f"{self.role}{list(index)}" for index in self.first)
        more = self.count - len(self.first)
        return f"{named} and {more} more" if more else named

    @property
    def entry(self) -> str:
        """Where it enters, and how much there is."""
        counts = {"NaN": self.nan, "inf": self.count - self.nan}
        kinds = [name for name, count in counts.items() if count]
        verb = "enters" if len(kinds) == 1 else "enter"
        return f"{' and '.join(kinds)} {verb} at {self.places} ({self.kinds})"


def find_broken(tensor: torch.Tensor, role: str) -> Broken | None:
    """What is not finite in a tensor (…, S, d) of any real dtype; None for nothing."""
    if not tensor.is_floating_point():
        return None
    nan = posinf = neginf = 0
    first: list[tuple[int, ...]] = []
    rows = np.zeros(tuple(tensor.shape[:-1]), np.bool_)
    for at, part in _own_parts(tensor.detach()):
        # NaN and inf both outlive a sum, which costs a fifth of looking at each element.
        if not math.isfinite(float(part.sum())):
            wrong = ~torch.isfinite(part)
            nan += int(torch.isnan(part).sum())
            posinf += int(torch.isposinf(part).sum())
            neginf += int(torch.isneginf(part).sum())
            rows[..., at : at + part.shape[-2]] = wrong.any(-1).cpu().numpy()
            for *place, row, column in wrong.nonzero()[:_NAMED].tolist():
                first.append((*place, row + at, column))
    own = Broken(role, nan, posinf, neginf, tuple(sorted(first)[:_NAMED]), rows) if first else None
    found = [one for one in ranks.everywhere(own) if one is not None]
    return reduce(add, found) if found else None


_CARRY_ON = "«allow_nonfinite» carries on with IEEE arithmetic and counts the rows it reaches"


def refuse_nonfinite(tensor: torch.Tensor, role: str, advice: str = _CARRY_ON) -> None:
    """Raise DataError with counts and first indices where a tensor holds NaN or inf."""
    found = find_broken(tensor, role)
    if found is not None:
        got = f"{found.count} NaN or inf, the first at {found.first[0]}"
        raise DataError(role, f"expected finite values, got {got}", advice)


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor of any real dtype holds no NaN and no infinity."""
    return all(bool(torch.isfinite(part).all()) for part in _parts(tensor.detach()))


def _own_parts(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Slices of the rows that are this rank's to look at, each with the number of its first."""
    own = ranks.share_of(tensor.shape[-2])
    at = own.start
    for part in _parts(tensor[..., own.start : own.stop, :]):
        yield at, part
        at += part.shape[-2]


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Slices along the sequence axis, few enough elements each to be looked at in one go."""
    per_row = max(1, tensor.numel() // max(1, tensor.shape[-2]))
    for part in torch.split(tensor, max(1, _SCAN_ELEMENTS // per_row), dim=-2):
        # float8 has no isfinite of its own, and float16 sums overflow where float32 ones do not.
        yield part.float() if part.element_size() < 4 else part


@dataclass(frozen=True, slots=True)
class Products:
    """What becomes of Q and K before the softmax.

    Attributes:
        q: (B, H, S_q, d_k).
        k: (B, H_kv, S_k, d_k).
        mask: which keys a query sees.
        factors: scale / temperature of each query head.
        softcap: whether there is one, which leaves no logit infinite.
        dtype: of the arithmetic.
    """

    q: torch.Tensor
    k: torch.Tensor
    mask: Mask
    factors: Sequence[float]
    softcap: bool
    dtype: torch.dtype

    def shared(self, head: int) -> int:
        """The key head of a query head."""
        return head // (self.q.shape[1] // self.k.shape[1])


def origins(products: Products, v: torch.Tensor | None) -> list[str]:
    """A sentence for each tensor that holds NaN or infinities: where, how many, whom they reach.

    Args:
        products: of Q and K.
        v: (B, H_kv, S_k, d_v); None for none.
    """
    said = []
    for role, tensor in {"q": products.q, "k": products.k, "v": v}.items():
        found = None if tensor is None else find_broken(tensor, role)
        if found is None:
            continue
        reached = list(_reached(found.rows, products.mask, role == "q"))
        count = sum(int(rows.sum()) * times for _, _, rows, times in reached)
        of = "output" if role == "v" else "scores"
        said.append(f"{found.entry}; {count} of {_rows(products.mask)} rows of {of} affected")
        if role != "v" and not found.nan and count:
            batch, head, rows, _ = next(each for each in reached if each[2].any())
            said[-1] += _first_nan(products, batch, head, int(rows.argmax()))
    return said


def origin_of_weights(weights: torch.Tensor, mask: Mask) -> list[str]:
    """The same of weights (B, H, S_q, S_k) in the place of Q and K: at most one sentence."""
    found = find_broken(weights, "weights")
    if found is None:
        return []
    count = 0
    for batch, head, row in np.argwhere(found.rows).tolist():
        if row < mask.real_queries(batch):
            seen = _seen_by(mask.head(batch, head), row)
            count += not bool(torch.isfinite(weights[batch, head, row].cpu()[seen]).all())
    return [f"{found.entry}; {count} of {_rows(mask)} rows affected"]


def _rows(mask: Mask) -> int:
    """Rows of all real queries."""
    return mask.sizes.heads * sum(map(mask.real_queries, range(mask.sizes.batch)))


def _reached(broken: Flags, mask: Mask, of_queries: bool) -> Iterator[tuple[int, int, Flags, int]]:
    """Batch, head, which of its queries are reached, bool (R,), and of how many heads that holds.

    Args:
        broken: bool (B, H | H_kv, S), queries or keys that hold something broken.
        mask: which keys a query sees.
        of_queries: whether these are queries: those that see no key have no scores.
    """
    group, alike = mask.sizes.heads // max(1, broken.shape[1]), not mask.differs(1)
    for batch, shared in np.argwhere(broken.any(-1)).tolist():
        for head in range(shared * group, shared * group + (1 if alike else group)):
            view, of_head = mask.head(batch, head), broken[batch, shared]
            if of_queries:
                rows = of_head[: view.rows] & (view.marginals.counts > 0)
            else:
                rows = rows_that_see(view, of_head)
            yield batch, head, rows, group if alike else 1


def rows_that_see(view: HeadMask, keys: Flags) -> Flags:
    """Which real queries of a head, bool (R,), see one of some keys, bool (S_k,), not all False."""
    seen, intervals = np.zeros(view.rows, np.bool_), view.interval_mask
    if intervals is None:
        first, last = np.flatnonzero(keys)[[0, -1]].tolist()
        step, near = max(1, _SCAN_ELEMENTS // (last + 1 - first)), slice(first, last + 1)
        for at in range(0, view.rows, step):
            rows = slice(at, min(at + step, view.rows))
            seen[rows] = (np.asarray(view.cells(rows, near)) & keys[near]).any(-1)
        return seen
    for part in intervals.parts:
        ordered = SortedIntervals(part)
        before = np.concatenate([[0], np.cumsum(keys[ordered.keys])])
        seen |= before[ordered.high] > before[ordered.low]
    return seen


def _seen_by(view: HeadMask, row: int) -> torch.Tensor:
    """Which keys a query sees, bool (S_k,)."""
    return torch.as_tensor(np.array(view.cells(slice(row, row + 1))[0]))


def _first_nan(products: Products, batch: int, head: int, row: int) -> str:
    """At which stage infinities of Q or K first make a NaN in a row; nothing where they do not."""
    visible = _seen_by(products.mask.head(batch, head), row)
    keys = products.k[batch, products.shared(head)].detach().cpu()[visible].to(torch.float64)
    scores = keys @ products.q[batch, head, row].detach().cpu().to(torch.float64)
    if bool(torch.isnan(scores).any()):
        return "; NaN first arises in scores, from ∞ − ∞ or 0 · ∞"
    scaled = scores * products.factors[head]
    if bool(torch.isnan(scaled).any()):
        return "; NaN first arises in scaled, from 0 · ∞"
    if math.isinf(float(scaled.max())) and not products.softcap:
        return "; NaN first arises in weights, from ∞ − ∞"
    return ""


# Cells that are looked at for one that overflows.
MOST_CELLS = 1 << 26
# What a row counts for at least, since each takes some calls.
_FEWEST_CELLS = 1 << 12


def first_overflow(products: Products) -> tuple[tuple[int, int, int] | None, bool]:
    """Where a logit of finite Q and K overflows first, and whether all were looked at.

    Queries of which a bound says that it cannot are not: |q·k| ≤ d_k·max|q|·max|k|.

    Returns:
        Batch, head and query, None for none; and False where `MOST_CELLS` were not enough to tell.
    """
    limit = torch.finfo(products.dtype).max
    largest = [_largest(tensor) for tensor in (products.q, products.k)]
    factor = max(map(abs, products.factors), default=0.0)
    if products.q.shape[-1] * largest[0] * largest[1] * factor < limit / 2:
        return None, True
    left = MOST_CELLS
    for batch, head in np.ndindex(*products.q.shape[:2]):
        view, factor = products.mask.head(batch, head), abs(products.factors[head])
        keys = products.k[batch, products.shared(head)].detach().to(torch.float64).T / largest[1]
        bound = math.log(limit) - sum(map(math.log, largest)) - math.log(factor or 5e-324)
        bound = math.exp(bound) if bound < 700 else math.inf
        queries = products.q[batch, head, : view.rows].detach()
        at_most = queries.to(torch.float64).abs().amax(-1) / largest[0] * keys.shape[0]
        suspects = torch.nonzero(at_most.nan_to_num(0.0, 0.0) >= bound)[:, 0].tolist()
        for row in suspects:
            if left <= 0:
                return None, False
            left -= max(keys.shape[1], _FEWEST_CELLS)
            found = (queries[row].to(torch.float64) / largest[0]) @ keys  # (S_k,)
            beyond = (found.abs() >= bound) & torch.isfinite(found)
            if bool((beyond.cpu() & _seen_by(view, row)).any()):
                return (batch, head, row), True
    return None, True


def _largest(tensor: torch.Tensor) -> float:
    """Largest finite magnitude; 0 where there is none."""
    found = 0.0
    for _, part in _own_parts(tensor.detach()):
        part = part if part.is_floating_point() else part.double()  # few operations know them all
        if part.numel():
            low, high = (float(end) for end in torch.aminmax(part))
            if not math.isfinite(high - low):
                low, high = (float(end) for end in torch.aminmax(part.nan_to_num(0.0, 0.0, 0.0)))
            found = max(found, abs(low), abs(high))
    return max(ranks.everywhere(found))
