"""`attncli compute`: every stage of attention, on files, random tensors or the example."""

from __future__ import annotations

from dataclasses import dataclass

from attncli.analysis.options import AttentionWords, InputOptions
from attncli.attention.options import option
from attncli.cli.options import OutputOptions
from attncli.errors import UsageError


@dataclass(frozen=True, slots=True)
class ComputeOptions:
    """What of the stages to look at."""

    stage: list[str] | None = option(
        None, "Only these stages: scores, scaled, weights, …", "NAME[,NAME…]"
    )
    rows: list[str] | None = option(None, "Only these queries; -1 is the last.", "I[,I…]")
    head_index: list[str] | None = option(None, "Only these heads.", "I[,I…]")
    batch_index: list[str] | None = option(None, "Only these batches.", "I[,I…]")
    max_values: int = option(
        65_536, "Tables and JSON: leave out the values of larger stages.", "N", minimum=0
    )
    save: str | None = option(None, "Write stages as tensors.", "FILE.npz|.safetensors|DIR")
    explain: bool = option(False, "Walk through the stages: formula, purpose, numbers.")
    step: bool = option(False, "With «explain» on a terminal: wait between stages.")


def compute(
    inputs: InputOptions, words: AttentionWords, options: ComputeOptions, output: OutputOptions
) -> str:
    """Compute attention stage by stage: scores, scaled, masked, weights, output.

    With no input it shows the embedded 4×3 example. Q, K and V come as three files, as a
    bundle (.npz, .safetensors, .pt) with tensors named q, k, v, or are projected from --x.
    """
    if options.step and not options.explain:
        raise UsageError("--step", "expected --explain beside it, got --step alone")
    return "attncli.cli.compute_run"
