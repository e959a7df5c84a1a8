"""`attncli entropy`: what every head does, in memory that grows with n alone."""

from __future__ import annotations

from dataclasses import dataclass

from attncli.analysis.options import AttentionWords, InputOptions
from attncli.attention.options import option
from attncli.cli.options import OutputOptions


@dataclass(frozen=True, slots=True)
class EntropyOptions:
    """Which records, of which heads, and what to fail on."""

    weights: list[str] | None = option(
        None, "Attention weights alone, (B, H, S_q, S_k), in the place of Q and K.", "FILE[::NAME]"
    )
    per_row: bool = option(False, "One record per query row.")
    per_key: bool = option(False, "One record per key: the mass it receives.")
    top: int | None = option(None, "With «per_key»: the K heaviest of each head.", "K", minimum=1)
    summary: bool = option(False, "One record per group.")
    grid: str | None = option(None, "A picture of all heads, e.g. entropy_bits_mean.", "COLUMN")
    histogram: bool = option(False, "Row entropies of one head as a histogram.")
    head_index: list[str] | None = option(None, "Compute only these query heads.", "I[,I…]")
    batch_index: list[str] | None = option(None, "Compute only these batches.", "I[,I…]")
    compare_scale: bool = option(False, "Beside it, what happens without the scale.")
    temperatures: list[str] | None = option(None, "Several, side by side.", "T[,T…]")
    sample_rows: int | None = option(None, "Estimate from N rows of each head.", "N", minimum=1)
    sample_seed: int = option(0, "Which rows «sample_rows» takes.", "N", minimum=0)
    sink_keys: int = option(1, "First keys that count as sinks.", "N", minimum=1)
    label_limit: list[str] | None = option(None, "Adjust a threshold of the labels.", "NAME=X")
    fail_on: list[str] | None = option(None, "Exit 3 if a head is so.", "collapsed|nan|max-logit=X")


def entropy(
    inputs: InputOptions, words: AttentionWords, options: EntropyOptions, output: OutputOptions
) -> str:
    """Measure every head: entropy, effective keys, largest weight and logit, sink mass.

    Takes any number of bundles. No S_q × S_k matrix is ever built. Each head gets a label:
    previous-token, self, sink, local, uniform, collapsed or mixed.

    --weights takes weights without Q and K, a file or several: tensors of any rank from
    (S_q, S_k) to (layers, B, H, S_q, S_k), a tuple of layers in a .pt file. Weights of 0 count as
    hidden where no option says what is.
    """
    return "attncli.cli.entropy_run"
