"""Some query rows of a problem beside the same rows of a tensor from elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncli.attention import steps
from attncli.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncli.attention.problem import Problem

# Scores held at once, in float64: 2²² of them are 32 MiB.
SAMPLE_CELLS = 1 << 22
_KEY_ROWS = 1 << 16


# Roundings between the scores and a weight: product, shift, exponential, sum, quotient.
_ROUNDINGS = 8


@dataclass(frozen=True, slots=True)
class SamplePart:
    """Rows of one head, float64.

    Attributes:
        scores: (rows, S_k).
        visible: bool (rows, S_k).
        bias: (rows, S_k), added to the logits.
        sink: the sink's logit, float64 (); None for none.
        target: (rows, S_k) or (rows, d_v), what was given.
        v: (S_k, d_v) as it came; None where the target is weights.
    """

    scores: torch.Tensor
    visible: torch.Tensor
    bias: torch.Tensor
    sink: torch.Tensor | None
    target: torch.Tensor
    v: torch.Tensor | None

    def recompute(self, factor: float, softcap: float | None) -> torch.Tensor:
        """What the target would be if scores were multiplied by the factor."""
        scaled = self.scores * factor
        capped = scaled if softcap is None else softcap * torch.tanh(scaled / softcap)
        masked = torch.where(self.visible, capped + self.bias, -torch.inf)
        weights = steps.softmax(masked, self.visible, self.sink).weights
        if self.v is None:
            return weights
        found = torch.zeros_like(self.target)
        for at in range(0, len(self.v), _KEY_ROWS):
            keys = slice(at, at + _KEY_ROWS)
            values = self.v[keys].to(weights)
            found += steps.weighted_sum(weights[:, keys], values, self.visible[:, keys])
        return found


@dataclass(frozen=True, slots=True)
class Sample:
    """All parts, and what they share.

    Attributes:
        parts: one per head looked at that has rows that see a key.
        temperature, softcap: the problem's.
        rows, rows_total: rows held, and rows that see a key (an estimate where rows were sampled).
        smallest: smallest normal number of the target's dtype.
        precision: relative precision of the target's dtype.
    """

    parts: tuple[SamplePart, ...]
    temperature: float
    softcap: float | None
    rows: int
    rows_total: int
    smallest: float
    precision: float

    @property
    def target_rms(self) -> float:
        """Root mean square of the target; 0 without rows."""
        count = sum(part.target.numel() for part in self.parts)
        total = sum(float(part.target.square().sum()) for part in self.parts)
        return math.sqrt(total / count) if count else 0.0

    @property
    def noise(self) -> float:
        """Root mean square that rounding explains: of the target, and of a softmax like ours."""
        return self.target_rms * self.precision * _ROUNDINGS

    @property
    def spread(self) -> float:
        """Root mean square of the visible scores about 0."""
        count = sum(int(part.visible.sum()) for part in self.parts)
        total = sum(float(part.scores[part.visible].square().sum()) for part in self.parts)
        return math.sqrt(total / count) if count else 0.0

    def errors(self, scale: float) -> torch.Tensor:
        """Recomputed − given, flat, float64."""
        return torch.cat([error.flatten() for error in self._errors(scale)])

    def residual(self, scale: float) -> tuple[float, float]:
        """Root mean square and maximum of |recomputed − given|; 0 without rows."""
        squares, largest, count = 0.0, 0.0, 0
        for error in self._errors(scale):
            squares += float(error.square().sum())
            largest = max(largest, float(error.abs().max()))
            count += error.numel()
        return (math.sqrt(squares / count) if count else 0.0), largest

    def _errors(self, scale: float) -> Iterator[torch.Tensor]:
        for part in self.parts:
            yield part.recompute(scale / self.temperature, self.softcap) - part.target


def draw_sample(problem: Problem, target: torch.Tensor, role: str) -> Sample:
    """Rows spread evenly over heads and queries, all of them where they are few.

    Args:
        problem: what the target should have come from.
        target: (B, H, S_q, S_k) or, for the role "output", (B, H, S_q, d_v).
        role: "weights" or "output".

    Raises:
        DataError: another shape, or NaN and inf in rows that see a key.
    """
    target = _rank_4(problem, target, role)
    sizes = problem.sizes
    heads = [(batch, head) for batch in range(sizes.batch) for head in range(sizes.heads)]
    afford = max(1, SAMPLE_CELLS // max(1, sizes.k_len))
    chosen = [heads[place] for place in _spread(len(heads), afford)]
    each = max(1, afford // max(1, len(chosen)))
    parts, seeing = [], 0.0
    for batch, head in chosen:
        real = problem.mask.real_queries(batch)
        rows = torch.tensor(_spread(real, each), dtype=torch.int64)
        part = _part(problem, target, role, batch, head, rows)
        if part is not None:
            parts.append(part)
            seeing += len(part.target) / len(rows) * real
    kind = target.dtype if target.is_floating_point() else torch.float64
    return Sample(
        parts=tuple(parts),
        temperature=problem.temperature,
        softcap=problem.softcap,
        rows=sum(len(part.target) for part in parts),
        rows_total=round(seeing * len(heads) / max(1, len(chosen))),
        smallest=torch.finfo(kind).tiny,
        precision=torch.finfo(kind).eps,
    )


def _part(
    problem: Problem, target: torch.Tensor, role: str, batch: int, head: int, rows: torch.Tensor
) -> SamplePart | None:
    """The rows that see a key; None where there are none."""
    one, own, every = slice(batch, batch + 1), slice(head, head + 1), slice(None)
    visible = torch.as_tensor(problem.mask.visible(one, own, rows.numpy(), every)[0, 0])
    seeing = visible.any(-1)
    if not bool(seeing.any()):
        return None
    rows, visible = rows[seeing], visible[seeing]
    given = target[batch, head, rows].to(dtype=torch.float64, device="cpu")
    if not bool(torch.isfinite(given).all()):
        raise DataError(
            role,
            f"expected finite values in rows that see a key, got NaN or inf in "
            f"batch {batch}, head {head}",
        )
    bias = problem.mask.bias(one, own, rows.numpy(), every)
    added = torch.zeros((), dtype=torch.float64)
    if bias is not None:
        added = steps.finite_in(torch.as_tensor(bias[0, 0]), torch.float64)
    shared = problem.kv_head(head)
    return SamplePart(
        scores=_scores(problem.q[batch, head, rows], problem.k[batch, shared]),
        visible=visible,
        bias=torch.where(visible, added, 0.0),
        sink=None if problem.sinks is None else problem.sinks[head].double().cpu(),
        target=given,
        v=problem.v[batch, shared] if role == "output" and problem.v is not None else None,
    )


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Q Kᵀ in float64 on the CPU, (rows, S_k), keys cast a block at a time."""
    q = q.to(dtype=torch.float64, device="cpu")
    blocks = [q @ k[at : at + _KEY_ROWS].to(q).T for at in range(0, len(k), _KEY_ROWS)]
    return torch.cat(blocks, dim=1)


def _rank_4(problem: Problem, target: torch.Tensor, role: str) -> torch.Tensor:
    """The target with all four axes.

    Raises:
        DataError: it has other lengths.
    """
    sizes = problem.sizes
    width = sizes.k_len if role == "weights" else problem.dv
    wanted = (sizes.batch, sizes.heads, sizes.q_len, width)
    whole = target[(None,) * (4 - target.ndim)] if target.ndim < 4 else target
    if tuple(whole.shape) != wanted:
        raise DataError(role, f"expected {wanted}, got {tuple(target.shape)}")
    return whole


def _spread(length: int, most: int) -> list[int]:
    """At most so many indices of an axis, evenly spread, the last one among them."""
    if length <= most:
        return list(range(length))
    return [(index + 1) * length // most - 1 for index in range(most)]
