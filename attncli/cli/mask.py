"""`attncli mask`: build, see, audit, recognise and compare masks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from attncli.analysis.options import AttentionWords
from attncli.attention.options import Layout, option
from attncli.cli.options import OutputOptions


class SaveAs(StrEnum):
    """What a mask is written as."""

    BOOL = "bool"
    ADDITIVE = "additive"


class SaveDtype(StrEnum):
    """Element types of additive masks."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"


@dataclass(frozen=True, slots=True)
class MaskOptions:
    """Which mask, and what to do with it."""

    files: list[str] | None = option(
        None,
        "Q and K, or a bundle: only their lengths and options count.",
        "FILE",
        positional=True,
    )
    weights: list[str] | None = option(
        None, "Attention weights: what their zeros hide.", "FILE[::NAME]"
    )
    group: list[str] | None = option(None, "Which group of a bundle.", "NAME")
    layout: Layout = option(Layout.BHSD, "Order of the axes of the files.")
    k_layout: Layout | None = option(None, "That of K, if another.")
    q_len: int | None = option(None, "S_q. [default: S_k]", "N", minimum=0)
    k_len: int | None = option(None, "S_k. [default: S_q, or 8]", "N", minimum=0)
    batch: int | None = option(None, "Batches. [default: as the masks]", "B", minimum=1)
    heads: int | None = option(None, "Heads. [default: as the masks]", "H", minimum=1)
    against: str | None = option(
        None,
        "Compare with another mask, or «attn_mask» with what the options build.",
        "FILE|options",
    )
    scores: str | None = option(None, "Scaled scores: softmax before and after.", "FILE")
    effect: bool = option(False, "The same with Q·K·scale of the files.", names=("--effect",))
    save: str | None = option(None, "Write the mask, (B, H, S_q, S_k).", "FILE")
    save_as: SaveAs | None = option(None, "What «save» writes. [default: bool]", names=("--as",))
    save_dtype: SaveDtype | None = option(
        None, "Of additive values that are saved. [default: float32]", names=("--dtype",)
    )
    fail_on: list[str] | None = option(
        None, "Exit 3 if there are any.", "empty-rows|unused-keys|leak"
    )
    max_values: int = option(65_536, "JSON: leave out larger masks' values.", "N", minimum=0)


def mask(options: MaskOptions, words: AttentionWords, output: OutputOptions) -> str:
    """Build a mask, or say what a given one lets through and what it is.

    The options that shape attention build it; --attn-mask FILE is recognised: causal (which
    corner), windows, prefix, padding, packed documents, or probably inverted.

    --fail-on leak: the mask of --attn-mask shows a cell that --causal, a window, --segments or
    key padding beside it hides. Without any of these, one beyond the pattern nearest to it.

    --weights FILE is read as the mask that the zeros of attention weights show.

    Additive values hide where they leave a key no weight at all beside its row's other keys, as
    -10000 and finfo.min do. Rows of nothing else are described in both readings.
    """
    needs_torch = options.effect or options.scores is not None
    return "attncli.cli.mask_effect_run" if needs_torch else "attncli.cli.mask_run"
