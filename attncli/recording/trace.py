"""Follow attention that is written out: q·kᵀ → … → softmax → ·v, by marks on the tensors.

What the logits hold beyond scale · q·kᵀ (masks, ALiBi, relative positions) is an additive mask, so
that whatever was done between the products is kept.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from attncli.attention.check.walk import unit_roundoff

_PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm", "einsum")
_TIMES = ("mul", "__mul__", "__rmul__", "mul_", "__imul__", "multiply")
_OVER = ("div", "__truediv__", "div_", "__itruediv__", "true_divide", "divide")
_QUIET = ("__get__", "__set__", "size", "dim", "stride", "numel")


@dataclass(frozen=True, slots=True, eq=False)
class _Product:
    """q·kᵀ times a scale, so far: q (…, S_q, d), k (…, S_k, d)."""

    q: torch.Tensor
    k: torch.Tensor
    scale: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _Weights:
    """The softmax of what became of a product: its logits (…, S_q, S_k)."""

    product: _Product
    logits: torch.Tensor


@dataclass(slots=True)
class Trace:
    """Attention that is written out, told as it ends.

    Attributes:
        found: is told q, k, v, output, mask, scale, by these names, as `Call` has them.
        heads: how many heads the running module has; None where it does not say.
    """

    found: Callable[..., None]
    heads: Callable[[], int | None]

    def follow(self, func: Any, args: Any, given: dict[str, Any], result: Any) -> None:
        """Mark the result of one operation by what its operands are."""
        name = getattr(func, "__name__", "")
        if not isinstance(result, torch.Tensor) or name in _QUIET:
            return
        if name in _PRODUCTS:
            self._multiplied(name, args, given, result)
            return
        for one in (*args, *given.values()):
            mark = getattr(one, "_attncli", None) if isinstance(one, torch.Tensor) else None
            if isinstance(mark, _Product):
                _pass_on(name, mark, one, args, result)
            elif mark is not None and result.numel() == one.numel():
                result._attncli = mark  # type: ignore[attr-defined]

    def _multiplied(self, name: str, args: Any, given: dict[str, Any], result: Any) -> None:
        """A product of weights and V ends attention; any other may begin it."""
        scale, operands = 1.0, [*args, *given.values()]
        if name == "baddbmm":
            scale = float(given.get("alpha", 1))
            operands = [*args[1:], *(given[n] for n in ("batch1", "batch2") if n in given)]
        if name == "einsum":
            parts = _matrices(args)
            if parts is None:
                return
            left, right, order = parts
            result_of = result.permute(order)
        else:
            left, right, result_of = operands[0], operands[1], result
        mark = getattr(operands[1 if name == "einsum" else 0], "_attncli", None)
        if isinstance(mark, _Weights):
            self._ended(mark, right, result_of)
        elif left.ndim >= 3 and right.ndim >= 3:
            result._attncli = _Product(left.detach(), right.detach().mT, scale)

    def _ended(self, weights: _Weights, v: torch.Tensor, output: torch.Tensor) -> None:
        logits, product = weights.logits, weights.product
        shape = tuple(logits.shape)
        if len(shape) == 3:  # (B·H, S_q, S_k)
            heads = self.heads() or shape[0]
            shape = (-1, heads if shape[0] % heads == 0 else shape[0], *shape[1:])
        if len(shape) != 4:
            return
        try:
            logits = logits.reshape(shape)
            batch, _, q_len, k_len = logits.shape
            q = product.q.reshape(batch, -1, q_len, product.q.shape[-1])
            k = product.k.reshape(batch, -1, k_len, product.k.shape[-1])
            values = v.detach().reshape(batch, -1, k_len, v.shape[-1])
            attended = output.detach().reshape(batch, -1, q_len, v.shape[-1])
            rest = _beyond(q, k, product.scale, logits)
        except RuntimeError:  # products of another kind, which only look like these
            return
        self.found(q=q, k=k, v=values, output=attended, mask=rest, scale=product.scale)


def _pass_on(name: str, mark: _Product, one: torch.Tensor, args: Any, result: torch.Tensor) -> None:
    """What an operation on a product is: softmax of it, or still a product."""
    if name == "softmax" and one.shape == result.shape:
        result._attncli = _Weights(mark, one.detach())  # type: ignore[attr-defined]
        return
    same = result.ndim > 1 and result.shape[-1] == one.shape[-1]
    if not same or not one.numel() or result.numel() % one.numel():
        return
    factor = next((float(x) for x in args if x is not one and _is_number(x)), 1.0)
    if name in _TIMES:
        mark = replace(mark, scale=mark.scale * factor)
    elif name in _OVER and args[0] is one:
        mark = replace(mark, scale=mark.scale / factor)
    result._attncli = mark  # type: ignore[attr-defined]


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Number) or (
        isinstance(value, torch.Tensor) and value.numel() == 1
    )


def _matrices(args: Any) -> tuple[torch.Tensor, torch.Tensor, list[int]] | None:
    """The operands of an einsum as (…, m, s) and (…, s, n), and its result's axes as (…, m, n).

    None where it is no product of two batches of matrices.
    """
    equation, *operands = args
    if not isinstance(equation, str) or "." in equation:
        return None
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    inputs, _, result = equation.replace(" ", "").partition("->")
    left, _, right = inputs.partition(",")
    summed = [c for c in left if c in right and c not in result]
    lead = [c for c in result if c in left and c in right]
    rows = [c for c in left if c not in right and c in result]
    columns = [c for c in right if c not in left and c in result]
    if len(operands) != 2 or not (len(summed) == len(rows) == len(columns) == 1) or not lead:
        return None
    first = operands[0].permute([left.index(c) for c in (*lead, *rows, *summed)])
    second = operands[1].permute([right.index(c) for c in (*lead, *summed, *columns)])
    return first, second, [result.index(c) for c in (*lead, *rows, *columns)]


def _beyond(
    q: torch.Tensor, k: torch.Tensor, scale: float, logits: torch.Tensor
) -> torch.Tensor | None:
    """What logits hold beyond scale · q·kᵀ, where it is more than rounding; None for nothing."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    wide = torch.promote_types(q.dtype, torch.float32)
    scaled = (q.to(wide) @ k.to(wide).mT) * scale
    rest = logits.to(wide) - scaled
    small = rest.abs() <= 8 * unit_roundoff(q.dtype) * (1 + scaled.abs())
    return None if bool(small.all()) else rest.masked_fill(small, 0.0)
