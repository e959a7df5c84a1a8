"""`attncli mask`: build, see, audit, recognise and compare masks. Needs no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from attncli.attention.options import Layout
from attncli.cli.command import command
from attncli.cli.options import Many, ShapeOptions, WorkOptions, make_printer
from attncli.cli.values import several
from attncli.errors import CheckFailedError, UsageError
from attncli.report.choices import Format

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncli.attention.mask import Mask
    from attncli.attention.mask_audit import MaskAudit
    from attncli.cli.mask_sizes import Sized
    from attncli.cli.shape import Shape
    from attncli.report.printer import Printer

FAILURES = ("empty-rows", "unused-keys", "leak")


@dataclass(frozen=True, slots=True)
class MaskOptions:
    """Which mask, and what to do with it."""

    files: Annotated[
        Many,
        typer.Argument(
            metavar="[FILE]...", help="Q and K, or a bundle: only their lengths and options count."
        ),
    ] = None
    group: Annotated[Many, Option("--group", metavar="NAME", help="Which group of a bundle.")] = (
        None
    )
    layout: Annotated[Layout, Option(help="Order of the axes of the files.")] = Layout.BHSD
    q_len: Annotated[
        int | None, Option("--q-len", metavar="N", min=0, help="S_q. [default: S_k]")
    ] = None
    k_len: Annotated[
        int | None, Option("--k-len", metavar="N", min=0, help="S_k. [default: S_q, or 8]")
    ] = None
    batch: Annotated[
        int | None, Option("--batch", metavar="B", min=1, help="Batches. [default: as the masks]")
    ] = None
    heads: Annotated[
        int | None, Option("--heads", metavar="H", min=1, help="Heads. [default: as the masks]")
    ] = None
    against: Annotated[
        str | None,
        Option(
            "--against",
            metavar="FILE|options",
            help="Compare with another mask, or --attn-mask with what the options build.",
        ),
    ] = None
    scores: Annotated[
        str | None,
        Option("--scores", metavar="FILE", help="Scaled scores: softmax before and after."),
    ] = None
    effect: Annotated[
        bool,
        Option("--effect", help="The same with Q·K·scale of the files."),
    ] = False
    save: Annotated[
        str | None, Option("--save", metavar="FILE", help="Write the mask, (B, H, S_q, S_k).")
    ] = None
    save_as: Annotated[
        str | None,
        Option("--as", metavar="bool|additive", help="What --save writes. [default: bool]"),
    ] = None
    save_dtype: Annotated[
        str | None,
        Option(
            "--dtype",
            metavar="float16|bfloat16|float32|float64",
            help="Of --save --as additive. [default: float32]",
        ),
    ] = None
    fail_on: Annotated[
        Many,
        Option("--fail-on", metavar="empty-rows|unused-keys|leak", help="Exit 3 if there are any."),
    ] = None
    max_values: Annotated[
        int,
        Option("--max-values", metavar="N", min=0, help="JSON: leave out larger masks' values."),
    ] = 65_536


def register(app: typer.Typer) -> None:
    """Add `mask` to the program."""

    @command(app, "mask")
    def mask(chosen: MaskOptions, shape: ShapeOptions, work: WorkOptions) -> None:
        """Build a mask, or say what a given one lets through and what it is.

        The options that shape attention build it; --attn-mask FILE is recognised: causal (which
        corner), windows, prefix, padding, packed documents, or probably inverted.
        """
        from attncli.cli.mask_sizes import find_sizes
        from attncli.cli.shape import read_shape

        _check_options(chosen, shape)
        printer = make_printer(work)
        sized = find_sizes(chosen, shape)
        read = read_shape(shape, sized.declared)
        printer.warn((*sized.warnings, *read.warnings))
        run_mask(chosen, sized, read, work, printer)


def run_mask(
    chosen: MaskOptions, sized: Sized, read: Shape, work: WorkOptions, printer: Printer
) -> None:
    """Build, audit, save and judge."""
    from attncli.attention.mask import build_mask
    from attncli.attention.mask_audit import audit
    from attncli.cli.mask_sizes import sizes_of

    options = read.options if sized.mask is None else replace(read.options, attn_mask=sized.mask)
    read = replace(read, options=options)
    sizes = sizes_of(chosen, options, sized)
    built = build_mask(options, sizes)
    printer.warn(built.warnings)
    judged = audit(built)
    if chosen.save is not None:
        _save(built, chosen, printer)
    if chosen.against is not None:
        from attncli.cli.mask_compare import run_compare

        run_compare(chosen, read, sizes, work, printer)
        return
    if chosen.scores is not None or chosen.effect:
        from attncli.cli.mask_effect import run_effect

        run_effect(chosen, built, sized, read, work, printer)
    else:
        _print(built, judged, chosen, sized, read, work, printer)
    _judge(built, judged, chosen, read)


def _check_options(chosen: MaskOptions, shape: ShapeOptions) -> None:
    """Refuse options that would do nothing, or that make no sense together."""
    for option, value in (("--as", chosen.save_as), ("--dtype", chosen.save_dtype)):
        if value is not None and chosen.save is None:
            raise UsageError(option, f"expected --save beside it, got {option} alone")
    if chosen.save_as not in (None, "bool", "additive"):
        raise UsageError("--as", f"expected bool or additive, got {chosen.save_as!r}")
    if chosen.save_dtype is not None and chosen.save_as != "additive":
        raise UsageError("--dtype", "expected --as additive beside it, got a boolean mask")
    for name in several(chosen.fail_on):
        if name not in FAILURES:
            raise UsageError("--fail-on", f"expected one of {', '.join(FAILURES)}, got {name!r}")
    for name in ("temperature", "softcap", "sinks"):
        if getattr(shape, name) is not None:
            raise UsageError(f"--{name}", "expected options of the mask, got one of the softmax")
    if shape.scale is not None and not chosen.effect:
        raise UsageError("--scale", "expected --effect beside it, got --scale alone")
    if chosen.against == "options" and shape.attn_mask is None:
        raise UsageError("--against options", "expected --attn-mask beside it, got none")
    if chosen.against is not None and (chosen.scores is not None or chosen.effect):
        raise UsageError("--against", "expected no --scores or --effect beside it, got one")
    if chosen.scores is not None and chosen.effect:
        raise UsageError("--effect", "expected one of --scores and --effect, got both")


def _print(
    built: Mask,
    judged: MaskAudit,
    chosen: MaskOptions,
    sized: Sized,
    read: Shape,
    work: WorkOptions,
    printer: Printer,
) -> None:
    from attncli.cli.emit import emit
    from attncli.report.mask import mask_tables
    from attncli.report.records import MASK

    def records() -> Iterator[dict[str, Any]]:
        for record in judged.records:
            one = asdict(record)
            for key in ("first_empty_rows", "first_unused_keys"):
                one[key] = list(one[key])
            if work.format is Format.JSON:
                one |= _values(built, record.batch, record.head, chosen.max_values)
            yield one

    emit(
        work.format,
        printer,
        command="mask",
        columns=MASK,
        records=records(),
        inputs=sized.described,
        params=params_of(built, read, judged),
        show=lambda found: mask_tables(built, judged, found, sized.labels, printer, work.digits),
    )


def params_of(built: Mask, read: Shape, judged: MaskAudit | None = None) -> dict[str, Any]:
    """What decided the mask, and the options that would build it."""
    from attncli.cli.shape import shape_record

    record = shape_record(read, built.offset)
    for name in ("scale", "temperature", "softcap", "sinks"):
        del record[name]
    sizes = asdict(built.sizes)
    recognised = None if judged is None else judged.recognition.options
    return record | sizes | {"recognised": None if recognised is None else _plain(recognised)}


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Recognised options as JSON can hold them."""
    return {
        name: value.tolist() if hasattr(value, "tolist") else value
        for name, value in options.items()
    }


def _values(built: Mask, batch: int | None, head: int | None, max_values: int) -> dict[str, Any]:
    """Booleans of one record's matrix, or word that they are too many."""
    if built.sizes.q_len * built.sizes.k_len > max_values:
        return {"values": None, "values_omitted": True}
    cells = built.visible(
        slice(batch or 0, (batch or 0) + 1),
        slice(head or 0, (head or 0) + 1),
        slice(None),
        slice(None),
    )
    return {"values": cells[0, 0].tolist()}


def _save(built: Mask, chosen: MaskOptions, printer: Printer) -> None:
    """Write the mask block by block, with as many batches and heads as it has."""
    from attncli.cli.mask_save import save_mask

    assert chosen.save is not None
    dtype = "bool" if chosen.save_as != "additive" else chosen.save_dtype or "float32"
    save_mask(built, chosen.save, dtype)
    printer.note(f"wrote {chosen.save}")


def _judge(built: Mask, judged: MaskAudit, chosen: MaskOptions, read: Shape) -> None:
    """Fail where something was found that the user asked to fail on.

    Raises:
        CheckFailedError: naming what was found and where.
    """
    wanted = several(chosen.fail_on)
    for record in judged.records:
        place = _place(record.batch, record.head)
        if "empty-rows" in wanted and record.empty_rows:
            first = ", ".join(map(str, record.first_empty_rows))
            raise CheckFailedError(
                f"mask{place}", f"expected no empty rows, got {record.empty_rows}: {first}"
            )
        if "unused-keys" in wanted and record.unused_keys:
            first = ", ".join(map(str, record.first_unused_keys))
            raise CheckFailedError(
                f"mask{place}", f"expected no unused keys, got {record.unused_keys}: {first}"
            )
    if "leak" in wanted:
        _refuse_leaks(chosen, read, built)


def _refuse_leaks(chosen: MaskOptions, read: Shape, built: Mask) -> None:
    """Compare what the mask file shows with what each declared rule hides."""
    from attncli.attention.mask import build_mask
    from attncli.attention.mask_compare import leaks
    from attncli.attention.options import AttentionOptions

    options = read.options
    if options.attn_mask is None:
        raise UsageError("--fail-on leak", "expected --attn-mask beside it, got none")
    bare = AttentionOptions(
        attn_mask=options.attn_mask,
        mask_true=options.mask_true,
        query_lengths=options.query_lengths,
    )
    found = leaks(build_mask(bare, built.sizes), replace(options, attn_mask=None))
    if not found:
        raise UsageError(
            "--fail-on leak",
            "expected a rule that must hold, such as --causal, --segments or --key-lengths, "
            "got none",
        )
    for leak in found:
        if leak.cells:
            cell = leak.first[0]
            raise CheckFailedError(
                f"mask{_place(cell.batch, cell.head)}",
                f"expected no cell visible that {leak.rule} hides, got {leak.cells}, the first "
                f"at query {cell.query}, key {cell.key}",
            )


def _place(batch: int | None, head: int | None) -> str:
    named = {"batch": batch, "head": head}
    parts = [f"{name} {index}" for name, index in named.items() if index is not None]
    return f" ({', '.join(parts)})" if parts else ""
