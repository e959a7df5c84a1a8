"""The options that several commands share, each declared once.

None means "not given": what a bundle declares for a group then applies, or the default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from attncli.attention.options import Layout, MaskTrue, Precision, WeightsLayout
from attncli.report.choices import Color, Format, Unit

if TYPE_CHECKING:
    from attncli.report.printer import Printer

Many = list[str] | None


@dataclass(frozen=True, slots=True)
class FileOptions:
    """Which files Q, K and V come from, and how to read them."""

    files: Annotated[
        Many,
        typer.Argument(
            metavar="[FILE]...",
            help="Q, K and V files in this order, or a bundle with tensors named q, k, v; "
            "'-' is standard input.",
        ),
    ] = None
    q: Annotated[str | None, Option("--q", metavar="FILE[::NAME]", help="The queries.")] = None
    k: Annotated[str | None, Option("--k", metavar="FILE[::NAME]", help="The keys.")] = None
    v: Annotated[str | None, Option("--v", metavar="FILE[::NAME]", help="The values.")] = None
    group: Annotated[
        Many, Option("--group", metavar="NAME", help="Analyse only these groups of a bundle.")
    ] = None
    x: Annotated[
        str | None, Option("--x", metavar="FILE", help="Project X (S, d) or (B, S, d) first.")
    ] = None
    wq: Annotated[str | None, Option("--wq", metavar="FILE", help="W_Q for --x.")] = None
    wk: Annotated[str | None, Option("--wk", metavar="FILE", help="W_K for --x.")] = None
    wv: Annotated[str | None, Option("--wv", metavar="FILE", help="W_V for --x.")] = None
    wo: Annotated[
        str | None, Option("--wo", metavar="FILE", help="W_O, adds the stage 'projected'.")
    ] = None
    weights_layout: Annotated[
        WeightsLayout,
        Option(help="in-out: x @ w; out-in: the weight of an nn.Linear."),
    ] = WeightsLayout.IN_OUT
    layout: Annotated[
        Layout,
        Option(help="bhsd: (B, H, S, d); bshd: (B, S, H, d); bsh: packed (B, S, H·d)."),
    ] = Layout.BHSD
    heads: Annotated[int | None, Option("--heads", metavar="H", help="Query heads.")] = None
    kv_heads: Annotated[
        int | None, Option("--kv-heads", metavar="H", help="Key and value heads. [default: H]")
    ] = None
    dtype: Annotated[
        str | None,
        Option("--dtype", metavar="NAME", help="Cast on loading, e.g. float16, bfloat16, float32."),
    ] = None
    allow_nonfinite: Annotated[
        bool, Option("--allow-nonfinite", help="Carry on with NaN and inf, as IEEE says.")
    ] = False


@dataclass(frozen=True, slots=True)
class InputOptions(FileOptions):
    """Where Q, K and V come from: files, or random draws of these sizes."""

    batch: Annotated[
        int | None, Option("--batch", metavar="B", help="Random tensors: batches. [default: 1]")
    ] = None
    q_len: Annotated[
        int | None, Option("--q-len", metavar="N", help="Random tensors: S_q. [default: 8]")
    ] = None
    k_len: Annotated[
        int | None, Option("--k-len", metavar="N", help="Random tensors: S_k. [default: 8]")
    ] = None
    dk: Annotated[
        int | None, Option("--dk", metavar="N", help="Random tensors: d_k. [default: 64]")
    ] = None
    dv: Annotated[
        int | None, Option("--dv", metavar="N", help="Random tensors: d_v. [default: d_k]")
    ] = None
    seed: Annotated[
        int | None, Option("--seed", metavar="N", help="Random tensors: the seed. [default: 0]")
    ] = None


@dataclass(frozen=True, slots=True)
class ShapeOptions:
    """What shapes attention; the meaning is that of `attncli.attention.options`."""

    scale: Annotated[
        float | None,
        Option("--scale", metavar="X", help="Multiply the scores by X. [default: 1/√d_k]"),
    ] = None
    temperature: Annotated[
        float | None, Option("--temperature", metavar="T", help="Divide the scaled scores by T.")
    ] = None
    softcap: Annotated[
        float | None, Option("--softcap", metavar="C", help="C·tanh(scaled/C), before the mask.")
    ] = None
    causal: Annotated[
        bool | None,
        Option("--causal/--no-causal", help="Key j is visible to position p iff j ≤ p."),
    ] = None
    query_offset: Annotated[
        Many,
        Option(
            "--query-offset",
            metavar="top-left|bottom-right|N[,N…]",
            help="Position of query 0 on the key axis. [default: 0 where S_q = S_k]",
        ),
    ] = None
    left_window: Annotated[
        int | None,
        Option("--left-window", metavar="L", help="Hide keys before p − L; L excludes the query."),
    ] = None
    right_window: Annotated[
        int | None, Option("--right-window", metavar="R", help="Hide keys after p + R.")
    ] = None
    prefix: Annotated[
        int | None,
        Option("--prefix", metavar="P", help="With --causal: every query sees the first P keys."),
    ] = None
    key_lengths: Annotated[
        Many, Option("--key-lengths", metavar="N[,N…]", help="Real keys, one number or per batch.")
    ] = None
    query_lengths: Annotated[
        Many, Option("--query-lengths", metavar="N[,N…]", help="Real queries, likewise.")
    ] = None
    key_padding: Annotated[
        str | None,
        Option("--key-padding", metavar="FILE", help="Boolean (B, S_k), True = real key."),
    ] = None
    attn_mask: Annotated[
        str | None,
        Option("--attn-mask", metavar="FILE", help="Boolean, or floats that are added."),
    ] = None
    mask_true: Annotated[
        MaskTrue | None,
        Option("--mask-true", help="What True means in a boolean --attn-mask. [default: keep]"),
    ] = None
    segments: Annotated[
        Many,
        Option("--segments", metavar="FILE|ID,ID,…", help="Document of each key: no leaks."),
    ] = None
    alibi: Annotated[
        bool | None, Option("--alibi/--no-alibi", help="Add the bias −mₕ·|p − j|.")
    ] = None
    sinks: Annotated[
        Many,
        Option("--sinks", metavar="FILE|X,X,…", help="A logit per head in the denominator."),
    ] = None


@dataclass(frozen=True, slots=True)
class WorkOptions:
    """How to work, and what to print where."""

    format: Annotated[Format, Option("--format", "-f", help="What to print.")] = Format.TABLE
    output: Annotated[
        str, Option("--output", "-o", metavar="FILE|-", help="Where to print it.")
    ] = "-"
    digits: Annotated[
        int, Option("--digits", metavar="N", min=0, max=17, help="Decimals in tables.")
    ] = 4
    unit: Annotated[Unit, Option("--unit", help="Unit of entropy in tables.")] = Unit.BITS
    precision: Annotated[
        Precision, Option("--precision", help="auto: float64 up to 2²⁶ scores.")
    ] = Precision.AUTO
    device: Annotated[
        str, Option("--device", metavar="auto|cpu|cuda[:N]", help="Where torch computes.")
    ] = "auto"
    color: Annotated[Color, Option("--color", help="Colour in tables.")] = Color.AUTO
    quiet: Annotated[bool, Option("--quiet", "-q", help="No warnings and no progress.")] = False


def make_printer(work: WorkOptions) -> Printer:
    """The printer that the output options ask for."""
    from attncli.report.printer import Printer

    return Printer(target=work.output, color=work.color, quiet=work.quiet)
