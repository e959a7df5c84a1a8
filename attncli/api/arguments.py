"""What Python callers pass, brought to what the mathematics takes."""

from __future__ import annotations

import torch

from attncli.api.keywords import TensorLike, as_choice, as_stored
from attncli.attention.options import AttentionOptions, Layout, Precision
from attncli.attention.problem import Problem, make_problem
from attncli.files.torch_tensors import as_torch


def as_tensor(values: TensorLike, role: str) -> torch.Tensor:
    """A torch tensor of the same values, dtype and device, sharing memory where that works.

    Args:
        values: a torch tensor, a NumPy array of any strides and byte order (bfloat16 and float8
            of `ml_dtypes` included), or nested lists of numbers.
        role: name for messages: "q", "k", "v".

    Raises:
        DataError: complex numbers, objects, strings, or lists of uneven lengths.
    """
    if isinstance(values, torch.Tensor):
        return values.detach()
    return as_torch(as_stored(values, role))


def as_problem(
    q: TensorLike,
    k: TensorLike,
    v: TensorLike,
    options: AttentionOptions,
    *,
    layout: Layout | str,
    precision: Precision | str,
    device: str | None,
    heads: int | None,
    kv_heads: int | None,
    allow_nonfinite: bool,
) -> Problem:
    """A checked problem from what a caller gave; arguments and errors as for `make_problem`.

    A `device` of None means where q is.
    """
    queries = as_tensor(q, "q")
    return make_problem(
        queries,
        as_tensor(k, "k"),
        None if v is None else as_tensor(v, "v"),
        options,
        layout=as_choice(Layout, layout, "layout"),
        heads=heads,
        kv_heads=kv_heads,
        precision=as_choice(Precision, precision, "precision"),
        device=str(queries.device) if device is None else device,
        allow_nonfinite=allow_nonfinite,
    )
