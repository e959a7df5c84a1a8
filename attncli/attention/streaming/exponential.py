"""The natural exponential by way of exp2.

On CPUs torch hands `exp` to a library that takes three times as long, and seventy times as long
where results are denormal, which weights far below a row's largest are all the time. The detour
costs a relative error of |x| half ulps: nothing, where results get small as |x| gets large. It
also spares us torch.set_flush_denormal, which is a setting of the whole process.
"""

from __future__ import annotations

import torch

LOG2_E = 1.4426950408889634


def exponential(values: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """e^x of each value, float32 or float64; in `out` where it is given."""
    return torch.mul(values, LOG2_E, out=out).exp2_()
