"""`attncli check`: is this output right, and if not, which mistake is it?"""

from __future__ import annotations

from dataclasses import dataclass

from attncli.analysis.options import AttentionWords, FileOptions
from attncli.attention.options import option
from attncli.cli.options import OutputOptions


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """What is to be checked, and how strictly."""

    actual_output: str | None = option(None, "The output to check, (B, H, S_q, d_v).", "FILE")
    actual_weights: str | None = option(None, "The weights to check.", "FILE")
    actual_logsumexp: str | None = option(None, "The log-sum-exp to check, (B, H, S_q).", "FILE")
    pair: str | None = option(
        None, "A second candidate for the same: which is closer, where do they part?", "FILE"
    )
    rtol: float | None = option(None, "Relative tolerance. [default: by the dtype]", "X")
    atol: float | None = option(None, "Absolute tolerance. [default: by the dtype]", "X")


def check(
    inputs: FileOptions, words: AttentionWords, options: CheckOptions, output: OutputOptions
) -> str:
    """Compare an output with the float64 reference, and name the mistake if it differs.

    The options say what should have been computed. A candidate that is off is tried against
    the classic mistakes: scale, causal corner, mask polarity, padding, soft cap, head
    grouping, layout, precision; where one explains every cell, the command that verifies it
    is printed. Exit 3 if it is off.

    NDJSON and CSV hold one record per candidate, whose explanation names the mistake; all
    mistakes that were tried are in the JSON document, under data.hypotheses.
    """
    return "attncli.cli.check_run"
