"""`attncli variance`: why √d_k, by experiment without files, by audit of tensors with them."""

from __future__ import annotations

from dataclasses import dataclass

from attncli.analysis.options import AttentionWords, FileOptions
from attncli.attention.options import DistributionName, option
from attncli.cli.options import OutputOptions


@dataclass(frozen=True, slots=True)
class ExperimentOptions:
    """What to draw, where there are no files."""

    dk: list[str] | None = option(None, "Widths d_k to try. [default: 64]", "N|A:B:xF|A:B:+D")
    samples: int | None = option(None, "Dot products. [default: 100000]", "N")
    keys: int | None = option(None, "Keys of each query. [default: 8]", "N")
    dist: DistributionName | None = option(
        None,
        "What entries are drawn from; uniform is on [0, 1). [default: normal]",
        "normal|uniform|rademacher|laplace|student-t",
    )
    mean: float | None = option(None, "Mean of an entry. [default: its own]", "X")
    std: float | None = option(None, "Deviation of an entry. [default: its own]", "X")
    correlation: float | None = option(None, "Between the entries of q and k. [default: 0]", "R")
    df: float | None = option(None, "Degrees of freedom of student-t. [default: 10]", "N")
    scale_rule: list[str] | None = option(
        None,
        "1/√d_k, 1/d_k, 1, ln(keys)/√d_k or a number, side by side. [default: sqrt]",
        "sqrt|linear|none|log-n|X",
    )
    temperatures: list[str] | None = option(None, "Side by side. [default: 1]", "T[,T…]")
    seed: int | None = option(None, "Of the draws. [default: 0]", "N")


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """What to look for in tensors from files."""

    fit_scale: str | None = option(
        None, "Weights or output from elsewhere: which scale was used there?", "FILE"
    )


def variance(
    inputs: FileOptions,
    words: AttentionWords,
    experiment: ExperimentOptions,
    audit: AuditOptions,
    output: OutputOptions,
) -> str:
    """Measure the variance of q·k that makes 1/√d_k necessary.

    Without files it draws queries and keys: variance against theory, and softmax with and
    without the scale. With files it takes the exact variance of all visible scores of every
    head apart: which part softmax sees, and what the assumption behind 1/√d_k predicts.
    """
    return "attncli.cli.variance_run"
